"""What a caller can do with one pusher and one receiver, in every order, and what comes of it."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import peers
import pytest
import torch
from peers import only, until

import kvpush


def expect(prefill, decode, transfer_id, block_ids, **options):
    decode.expect(transfer_id, block_ids, prefill.address, **options)


def both_done(prefill, decode, transfer_id):
    sent, got = prefill.inbox.outcome(transfer_id), decode.inbox.outcome(transfer_id)
    assert (sent.outcome, got.outcome) == ("done", "done"), (sent, got)
    assert sent.blocks_reusable and got.blocks_reusable
    return sent, got


def registered(prefill, count=1):
    until(lambda: prefill.pusher.stats()["registrations_waiting"] == count, what="the registration")


def is_empty(side):
    """Nothing is open, held or remembered as in use."""
    stats = side.stats()
    sizes = ("pushes_open", "registrations_waiting", "writes_in_flight", "receives_open", "receives_held")
    return not any(stats.get(name) for name in sizes)


class Fence:
    """What the loop sees of a torch.cuda.Event."""

    def __init__(self):
        self.is_passed = False
        self.queries = 0

    def query(self):
        self.queries += 1
        return self.is_passed


# --- positions and chunks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [0, 5])
def test_d4_an_empty_registration_is_done_and_gives_prefill_its_blocks_back(pair, num_blocks):
    """D4: a full prefix hit, or nothing at all. Zero bytes, one outcome a side, nobody waits."""
    prefill, decode = pair
    expect(prefill, decode, "t1", [], first_block=num_blocks)
    prefill.push("t1", range(num_blocks))
    sent, got = both_done(prefill, decode, "t1")
    assert sent.num_bytes == got.num_blocks == 0
    assert sent.engine_id == "d0"
    assert decode.arena.is_clean()


@pytest.mark.parametrize("hit", [0, 1, 3, 4])
def test_d1_d3_a_prefix_hit_shifts_positions_and_not_the_tail(pair, hit):
    """D1, D3: what decode has already is not sent, and position i goes where position i belongs."""
    prefill, decode = pair
    target = [30, 20, 10, 0][hit:]
    expect(prefill, decode, "t1", target, first_block=hit)
    prefill.push("t1", [5, 6, 7, 8])
    sent, _ = both_done(prefill, decode, "t1")
    assert decode.arena.holds("t1", target, first_block=hit) if target else True
    assert decode.arena.is_clean([b for b in range(64) if b not in target])
    assert sent.num_bytes == len(target) * 2 * 4096


def test_decode_asks_for_fewer_positions_than_prefill_holds(pair):
    prefill, decode = pair
    expect(prefill, decode, "t1", [9], first_block=1)
    prefill.push("t1", [1, 2, 3])
    both_done(prefill, decode, "t1")
    assert decode.arena.holds("t1", [9], first_block=1) and decode.arena.is_clean([b for b in range(64) if b != 9])


@pytest.mark.parametrize("first_block", [2, 5, 60])
def test_d5_prefill_lacks_positions_that_decode_wants(pair, first_block):
    """D5, E2: both fail at once, and the reason names both counts."""
    prefill, decode = pair
    expect(prefill, decode, "t1", [1, 2, 3], first_block=first_block)
    prefill.push("t1", [4, 5, 6, 7])
    sent, got = prefill.inbox.outcome("t1"), decode.inbox.outcome("t1")
    assert sent.outcome == got.outcome == "failed" and sent.code == got.code == "bad_blocks"
    assert "3 blocks" in got.reason and "pushed 4" in got.reason
    assert decode.inbox.reusable("t1") == "outcome" and decode.arena.is_clean()


def test_chunks_in_every_order_land_where_they_belong(pair):
    """Also the last one first, and the registration before, between and after them."""
    prefill, decode = pair
    chunks = [(0, [1, 2]), (2, [3]), (3, [4, 5, 6])]
    for number, (order, when) in enumerate(itertools.product(itertools.permutations(chunks), (0, 2, 3))):
        transfer_id = f"t{number}"
        for step, (first_block, block_ids) in enumerate(order):
            if step == when:
                expect(prefill, decode, transfer_id, [11, 12, 13, 14, 15, 16])
            last = first_block == 3
            if last and step < 2:
                continue  # "last" closes the transfer: what is last must come last
            prefill.push(transfer_id, block_ids, first_block=first_block, last=step == 2)
        if when == 3:
            expect(prefill, decode, transfer_id, [11, 12, 13, 14, 15, 16])
        sent, got = prefill.inbox.outcome(transfer_id), decode.inbox.outcome(transfer_id)
        is_whole = order[2][0] == 3
        assert sent.outcome == got.outcome == ("done" if is_whole else "failed"), (order, when, sent, got)
        if is_whole:
            assert decode.arena.holds(transfer_id, [11, 12, 13, 14, 15, 16])
        decode.inbox.reusable(transfer_id)
        prefill.inbox.reusable(transfer_id)
        decode.arena.clear([11, 12, 13, 14, 15, 16])
    assert decode.arena.is_clean() and decode.arena.guards_are_intact()


def test_every_form_of_block_ids_means_the_same(pair):
    prefill, decode = pair
    forms = [[7, 3], (7, 3), np.array([7, 3], np.int32), np.array([7, 3], np.uint64), torch.tensor([7, 3])]
    for number, form in enumerate(forms):
        decode.arena.clear([7, 3])
        expect(prefill, decode, f"t{number}", form)
        prefill.arena.fill(f"t{number}", [7, 3])
        prefill.pusher.push(f"t{number}", form)
        both_done(prefill, decode, f"t{number}")
        assert decode.arena.holds(f"t{number}", [7, 3])


# --- fences ----------------------------------------------------------------------------------------------------------


def test_a_fence_delays_the_write_until_the_device_has_passed_it(pair):
    prefill, decode = pair
    fence = Fence()
    expect(prefill, decode, "t1", [1])
    registered(prefill)
    prefill.pusher.push("t1", [5], ready=fence)
    until(lambda: fence.queries > 20, what="the loop asks")
    assert decode.arena.is_clean() and prefill.pusher.stats()["writes_in_flight"] == 0
    prefill.arena.fill("t1", [5])  # the kernel ends only now
    fence.is_passed = True
    both_done(prefill, decode, "t1")
    assert decode.arena.holds("t1", [1])
    queries = fence.queries
    prefill.pusher.stats()
    assert fence.queries == queries, "a fence that was passed is not asked again"


def test_a_fence_delays_its_own_chunk_only(pair):
    prefill, decode = pair
    fence = Fence()
    expect(prefill, decode, "t1", [1, 2])
    prefill.push("t1", [5], last=False, ready=fence)
    prefill.push("t1", [6], first_block=1)
    until(lambda: decode.arena.holds("t1", [2], first_block=1), what="the second chunk")
    assert decode.arena.is_clean([0, 1])
    expect(prefill, decode, "t2", [3])
    prefill.push("t2", [7])
    both_done(prefill, decode, "t2")
    fence.is_passed = True
    both_done(prefill, decode, "t1")


def test_a_fence_that_raises_fails_its_push_on_both_sides(pair):
    prefill, decode = pair

    class Broken:
        def query(self):
            raise RuntimeError("CUDA error: device-side assert triggered")

    expect(prefill, decode, "t1", [1])
    prefill.push("t1", [5], ready=Broken())
    sent, got = prefill.inbox.outcome("t1"), decode.inbox.outcome("t1")
    assert sent.outcome == got.outcome == "failed"
    assert "device-side assert" in sent.reason and "device-side assert" in got.reason
    assert prefill.pusher.healthy() and prefill.pusher.stats()["internal_errors"] == 0


def test_a_push_that_ends_while_the_fences_of_another_are_asked_is_left_alone(pair):
    prefill, _ = pair
    later = Fence()

    class Last:
        is_set = False

        def query(self):  # on the loop's thread
            if self.is_set:
                later.is_passed = True
                prefill.pusher._loop.cancel("later")
            return self.is_set

    first = Last()
    prefill.push("first", [5], ready=first)
    prefill.push("later", [6], ready=later)
    until(lambda: later.queries, what="both are asked")
    first.is_set = True
    assert prefill.inbox.outcome("later").outcome == "cancelled"
    prefill.pusher.cancel("first")
    assert prefill.inbox.outcome("first").outcome == "cancelled"
    assert prefill.pusher.stats()["internal_errors"] == 0


def test_a_push_can_be_cancelled_before_its_fence(pair):
    prefill, decode = pair
    fence = Fence()
    expect(prefill, decode, "t1", [1])
    registered(prefill)
    prefill.push("t1", [5], ready=fence)
    prefill.pusher.cancel("t1")
    assert prefill.inbox.outcome("t1").outcome == decode.inbox.outcome("t1").outcome == "cancelled"
    fence.is_passed = True
    expect(prefill, decode, "t2", [2])
    prefill.push("t2", [6])
    both_done(prefill, decode, "t2")
    assert decode.arena.is_clean([1])


# --- cancel, from both sides, at every moment -------------------------------------------------------------------------


@pytest.fixture
def quick_lease():
    """A receive that is cancelled before its link is up was never registered: prefill's lease ends the push."""
    with peers.Prefill(lease_s=0.5) as prefill, peers.Decode() as decode:
        yield prefill, decode


@pytest.mark.parametrize("order", list(itertools.permutations(["expect", "push", "cancel"])), ids="-".join)
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_c7_every_order_of_registration_push_and_cancel_converges(quick_lease, order, who):
    """C7, rule 13: one outcome a side, the blocks come back, and nothing is left behind."""
    prefill, decode = quick_lease
    steps = {
        "expect": lambda: expect(prefill, decode, "t1", [1, 2], deadline_s=3.0),
        "push": lambda: prefill.push("t1", [5, 6]),
        "cancel": lambda: (prefill.pusher if who == "prefill" else decode.receiver).cancel("t1"),
    }
    for step in order:
        steps[step]()
    if order[-1] == "cancel":
        steps["cancel"]()  # twice is no error
    prefill_cancels = who == "prefill"
    if not prefill_cancels and order[0] == "cancel":
        both_done(prefill, decode, "t1")  # decode cancelled what it had not asked for
        return
    got = decode.inbox.outcome("t1")
    sent = prefill.inbox.outcome("t1")
    assert {sent.outcome, got.outcome} <= {"cancelled", "done", "expired"}, (sent, got)
    if prefill_cancels and order.index("cancel") < 2:
        assert sent.outcome == "cancelled"
    assert decode.inbox.reusable("t1") in ("outcome", "proven")
    assert prefill.inbox.reusable("t1") in ("outcome", "proven")
    assert got.outcome != "done" or decode.arena.holds("t1", [1, 2])
    until(lambda: is_empty(prefill.pusher) and is_empty(decode.receiver), what="nothing is left")


def test_cancelled_blocks_come_back_once_prefill_has_confirmed(pair):
    """E1: the receive is over at once, its blocks are not before Drained."""
    prefill, decode = pair
    expect(prefill, decode, "t1", [1, 2])
    registered(prefill)
    decode.receiver.cancel("t1")
    assert decode.inbox.outcome("t1").outcome == "cancelled"
    assert decode.inbox.reusable("t1") == "proven"
    expect(prefill, decode, "t2", [1, 2])
    prefill.push("t1", [5, 6])  # comes too late
    prefill.push("t2", [7, 8])
    assert prefill.inbox.outcome("t1").outcome == "cancelled"
    both_done(prefill, decode, "t2")
    assert decode.arena.holds("t2", [1, 2])


def test_e18_another_registration_of_the_same_transfer_is_refused_until_the_first_has_ended(pair):
    prefill, decode = pair
    expect(prefill, decode, "t1", [3, 4])
    expect(prefill, decode, "t1", [3, 4])  # folded
    with pytest.raises(kvpush.UsageError, match="expected already"):
        expect(prefill, decode, "t1", [7, 8])
    decode.receiver.cancel("t1")
    assert decode.inbox.reusable("t1") in ("outcome", "proven")
    assert only(decode.inbox.finished.pop("t1")).outcome == "cancelled"
    decode.inbox.released.clear()
    expect(prefill, decode, "t1", [7, 8])
    registered(prefill)  # a push that comes before it would be the one that the first receive cancelled
    prefill.push("t1", [1, 2])
    both_done(prefill, decode, "t1")
    assert decode.arena.holds("t1", [7, 8]) and decode.arena.is_clean([3, 4])


def test_e18_another_engine_cannot_claim_a_transfer(pair):
    """E18, J7: the first registration stands; the second is told who was faster."""
    prefill, decode = pair
    expect(prefill, decode, "t1", [3])
    registered(prefill)
    with peers.Decode("d1") as thief:
        thief.expect("t1", [3], prefill.address)
        got = thief.inbox.outcome("t1")
        assert got.outcome == "failed" and got.code == "claimed" and "d0" in got.reason
        prefill.push("t1", [5])
        both_done(prefill, decode, "t1")
        assert thief.arena.is_clean()


def test_e16_blocks_whose_lease_has_ended_are_not_written_for_anybody():
    """E16: the registration comes after the lease, or after the transfer was served."""
    with peers.Prefill(lease_s=0.3) as prefill, peers.Decode() as decode:
        prefill.push("late", [1])
        assert prefill.inbox.outcome("late").outcome == "expired"
        prefill.arena.fill("somebody else's", [1])
        expect(prefill, decode, "late", [1])
        got = decode.inbox.outcome("late")
        assert got.outcome == "failed" and got.code == "lease_expired" and decode.inbox.reusable("late") == "outcome"
        expect(prefill, decode, "t1", [2])
        prefill.push("t1", [2])
        both_done(prefill, decode, "t1")
        with peers.Decode("d1") as other:
            other.expect("t1", [2], prefill.address)
            assert other.inbox.outcome("t1").code == "already_served"
            assert other.arena.is_clean() and decode.arena.is_clean([1])


def test_renew_keeps_blocks_that_a_queued_request_will_need():
    with peers.Prefill(lease_s=0.6) as prefill, peers.Decode() as decode:
        prefill.push("kept", [1])
        prefill.push("given back", [2])
        kept_until_s = time.monotonic() + 1.5
        while time.monotonic() < kept_until_s:
            decode.receiver.renew(["kept"], source=prefill.address, source_engine_id="p0")
            decode.inbox.side.wait(0.05)
            prefill.inbox.poll()
        assert "given back" in prefill.inbox.finished and "kept" not in prefill.inbox.finished
        expect(prefill, decode, "kept", [3])
        both_done(prefill, decode, "kept")


def test_e7_decode_s_own_deadline_ends_what_prefill_never_starts(pair):
    prefill, decode = pair
    start_s = time.monotonic()
    expect(prefill, decode, "t1", [1], deadline_s=0.5)
    got = decode.inbox.outcome("t1")
    assert got.outcome == "expired" and 0.5 <= got.duration_s < 2 and time.monotonic() - start_s < 5
    assert decode.inbox.reusable("t1") == "proven"
    assert "t1" in got.reason


# --- ids, limits, misuse ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transfer_id",
    ["a:b:1", "cmpl-1_kv_0", "PUSH_REG:{}", "é☃", "\x00", "a\nb", "x" * 512, "[::1]:5600", "../../etc", " "],
)
def test_d15_any_id_goes_through_unchanged(pair, transfer_id):
    prefill, decode = pair
    expect(prefill, decode, transfer_id, [1])
    prefill.push(transfer_id, [2])
    sent, got = both_done(prefill, decode, transfer_id)
    assert sent.transfer_id == got.transfer_id == transfer_id


def test_d16_ids_that_look_alike_are_told_apart(pair):
    """D16: matched whole, whatever they begin with."""
    prefill, decode = pair
    ids = ["u1-0-aaaaaaaa", "u1-0-bbbbbbbb", "u1-1-aaaaaaaa", "u1-0", "deadbeef", "u1-0-aaaaaaaa "]
    for number, transfer_id in enumerate(ids):
        expect(prefill, decode, transfer_id, [number])
    for number, transfer_id in reversed(list(enumerate(ids))):
        prefill.push(transfer_id, [63 - number])
    for number, transfer_id in enumerate(ids):
        both_done(prefill, decode, transfer_id)
        assert decode.arena.holds(transfer_id, [number])


BAD_IDS = ["", "x" * 513, "é" * 257, None, 7, b"t1", "\ud800"]
BAD_BLOCKS = [[64], [-1], [1.5], ["1"], [2**63], [True], "34", {"0": 3}, None, 3, np.ones((2, 2), int), np.ones(2)]


def test_every_mistake_of_the_caller_is_raised_at_once_and_leaves_nothing_behind(pair):
    prefill, decode = pair
    source, usage = prefill.address, kvpush.UsageError
    bad_push = [
        *((bad, [1], {}) for bad in BAD_IDS),
        *(("t1", bad, {}) for bad in BAD_BLOCKS),
        *(("t1", [1], {"first_block": bad}) for bad in (-1, 2**31, 1.0, None, True, "0")),
        *(("t1", [1], {"ready": bad}) for bad in (True, object())),
    ]
    for transfer_id, block_ids, options in bad_push:
        with pytest.raises(usage):
            prefill.pusher.push(transfer_id, block_ids, **options)
    good = {"source": source, "source_engine_id": "p0"}
    bad_expect = [
        *((bad, [1], good) for bad in BAD_IDS),
        *(("t1", bad, good) for bad in [*BAD_BLOCKS, [1, 1]]),
        *(("t1", [1], good | {"first_block": bad}) for bad in (-1, 2**31, 1.0, None, True, "0")),
        *(("t1", [1], good | {"deadline_s": bad}) for bad in (0, -1, float("nan"), float("inf"), "5", True)),
        *(("t1", [1], good | {"source_engine_id": bad}) for bad in BAD_IDS),
    ]
    for transfer_id, block_ids, options in bad_expect:
        with pytest.raises(usage):
            decode.receiver.expect(transfer_id, block_ids, **options)
    bad_sources = [
        "nobody",
        "127.0.0.1:0",
        "127.0.0.1:70000",
        ("127.0.0.1", "80"),
        ("127.0.0.1",),
        "0.0.0.0:80",
        5,
        None,
    ]
    for bad in [*bad_sources, {(0, 1): source}]:
        with pytest.raises(kvpush.ConfigurationError):
            decode.receiver.expect("t1", [1], source=bad, source_engine_id="p0")
    for side in (prefill.pusher, decode.receiver):
        for bad in BAD_IDS:
            with pytest.raises(usage):
                side.cancel(bad)
            with pytest.raises(usage):
                side.drop_engine(bad)
        assert is_empty(side) and not side.poll() and not side.engines()
    expect(prefill, decode, "t1", [1])  # the very ids and blocks that were refused
    prefill.push("t1", [1])
    both_done(prefill, decode, "t1")


def test_blocks_of_a_receive_cannot_be_given_away_twice(pair):
    prefill, decode = pair
    expect(prefill, decode, "t1", [1, 2])
    with pytest.raises(kvpush.UsageError, match="block 2"):
        expect(prefill, decode, "t2", [2, 3])
    expect(prefill, decode, "t3", [3, 4])  # block 3 was not taken by the refused one
    prefill.push("t1", [1, 2])
    prefill.push("t3", [3, 4])
    both_done(prefill, decode, "t1")
    expect(prefill, decode, "t2", [2, 1])  # polled to its end: free again
    prefill.push("t2", [1, 2])
    both_done(prefill, decode, "t2")
    both_done(prefill, decode, "t3")


def test_identical_repetitions_are_folded_and_different_ones_refused(pair):
    prefill, decode = pair
    for _ in range(3):
        expect(prefill, decode, "t1", [1, 2])
        prefill.push("t1", [5], last=False)
    with pytest.raises(kvpush.UsageError, match="expected already"):
        expect(prefill, decode, "t1", [1, 2], source_incarnation=prefill.pusher.incarnation)
    with pytest.raises(kvpush.UsageError, match="overlap"):
        prefill.pusher.push("t1", [7], first_block=0, last=False)
    for _ in range(3):
        prefill.push("t1", [6], first_block=1)
    with pytest.raises(kvpush.UsageError, match="last chunk"):
        prefill.pusher.push("t1", [7], first_block=2)
    both_done(prefill, decode, "t1")
    assert decode.arena.holds("t1", [1, 2])
    assert prefill.pusher.stats()["pushes"] == 1 and decode.receiver.stats()["receives"] == 1


def test_a_full_queue_is_a_retryable_error_and_polling_makes_room():
    with peers.Prefill(max_pending_pushes=3) as prefill, peers.Decode(max_pending_pushes=3) as decode:
        for number in range(3):
            prefill.push(f"t{number}", [number])
            expect(prefill, decode, f"t{number}", [number])
        with pytest.raises(kvpush.QueueFull) as refused:
            prefill.pusher.push("t3", [3])
        assert refused.value.retryable
        with pytest.raises(kvpush.QueueFull):
            expect(prefill, decode, "t3", [3])
        for number in range(3):
            both_done(prefill, decode, f"t{number}")
        prefill.push("t3", [3])
        expect(prefill, decode, "t3", [3])
        both_done(prefill, decode, "t3")


def test_peers_beyond_the_limits_are_told_so():
    """Rule 16, G6: registrations are bounded for all engines together and for each."""
    with peers.Prefill(max_registrations=4, max_registrations_per_engine=3) as prefill:
        with peers.Decode("d0") as first, peers.Decode("d1") as second:
            for number in range(5):
                first.expect(f"a{number}", [number], prefill.address)
            refused = [first.inbox.outcome(f"a{number}") for number in (3, 4)]
            assert {event.code for event in refused} == {"queue_full"}
            assert "max_registrations_per_engine=3" in refused[0].reason
            for number in range(2):
                second.expect(f"b{number}", [number], prefill.address)
            assert "max_registrations=4" in second.inbox.outcome("b1").reason
            prefill.push("a0", [1])
            assert first.inbox.outcome("a0").outcome == "done"
        until(lambda: prefill.pusher.stats()["registrations_waiting"] == 0, what="their registrations go with them")


# --- waiting, draining, closing ---------------------------------------------------------------------------------------


def test_poll_never_waits_and_wait_wakes_with_the_event(pair):
    prefill, decode = pair
    start_s = time.monotonic()
    assert prefill.pusher.poll() == decode.receiver.poll() == []
    assert time.monotonic() - start_s < 0.5
    start_s = time.monotonic()
    assert decode.receiver.wait(0.2) == []
    assert time.monotonic() - start_s >= 0.2
    expect(prefill, decode, "t1", [1])
    timer = threading.Timer(0.1, prefill.push, ("t1", [1]))
    timer.start()
    start_s = time.monotonic()
    (got,) = decode.receiver.wait(peers.PATIENCE_S)
    assert got.outcome == "done" and time.monotonic() - start_s < 10
    (sent,) = prefill.pusher.wait(peers.PATIENCE_S)
    assert sent.outcome == "done"
    timer.join()


def test_f9_drain_finishes_what_was_pushed_and_refuses_the_rest(pair):
    prefill, decode = pair
    fence = Fence()
    expect(prefill, decode, "running", [1])
    expect(prefill, decode, "never pushed", [2])
    registered(prefill, 2)
    prefill.push("running", [1], ready=fence)
    assert not prefill.pusher.drain(0.1)
    got = decode.inbox.outcome("never pushed")
    assert got.outcome == "failed" and got.code == "closing" and "draining" in got.reason
    with pytest.raises(kvpush.Closed, match="draining"):
        prefill.pusher.push("new", [3])
    expect(prefill, decode, "too late", [3])
    assert decode.inbox.outcome("too late").code == "closing"
    fence.is_passed = True
    assert prefill.pusher.drain(peers.PATIENCE_S)
    both_done(prefill, decode, "running")
    assert prefill.pusher.close() == kvpush.CloseReport()


def test_after_close_every_call_says_closed_and_the_rest_still_answers(pair):
    prefill, decode = pair
    expect(prefill, decode, "t1", [1])
    prefill.push("t2", [2])
    assert decode.receiver.close() == decode.receiver.close()
    assert prefill.pusher.close() == prefill.pusher.close()
    pusher, receiver = prefill.pusher, decode.receiver
    calls = [
        lambda: pusher.push("t3", [1]),
        lambda: pusher.cancel("t2"),
        lambda: pusher.drop_engine("d0"),
        lambda: expect(prefill, decode, "t3", [3]),
        lambda: receiver.cancel("t1"),
        lambda: receiver.drop_engine("p0"),
        lambda: receiver.renew(["t1"], source=prefill.address, source_engine_id="p0"),
    ]
    for call in calls:
        with pytest.raises(kvpush.Closed):
            call()
    for side, transfer_id in ((prefill, "t2"), (decode, "t1")):
        assert side.inbox.outcome(transfer_id).outcome == "failed"
        assert side.inbox.outcome(transfer_id).code == "closing"
    for side in (pusher, receiver):
        assert not side.healthy() and "closed" in side.healthy().reason
        assert side.stats() == {} and side.wait(0.01) == [] and repr(side)
        assert all(engine.in_flight == 0 for engine in side.engines())
    assert not pusher.drain(0.1)


def test_what_one_side_closes_the_other_hears_of(pair):
    """Rule 11: at once, with a code, in both directions; all of them, however much there is to say."""
    prefill, decode = pair
    ids = [f"{block}".rjust(500, "-") for block in range(64)]
    for block, transfer_id in enumerate(ids):
        expect(prefill, decode, transfer_id, [block])
    registered(prefill, 64)
    start_s = time.monotonic()
    prefill.pusher.close()
    for transfer_id, got in decode.inbox.outcomes(ids).items():
        assert got.outcome == "failed" and got.code == "closing", got
        assert decode.inbox.reusable(transfer_id) == "outcome"
    assert time.monotonic() - start_s < 5
    with peers.Prefill("p1") as second:
        decode.expect("t2", [2], second.address, source_engine_id="p1")
        registered(second)
        decode.receiver.close()
        until(lambda: second.states() == {"d0": "evicted"}, 5.0)
        assert second.pusher.stats()["registrations_waiting"] == 0


def test_f5_a_receive_may_name_the_process_that_holds_its_blocks(pair):
    prefill, decode = pair
    alive = prefill.pusher.incarnation
    expect(prefill, decode, "by its name", [7], source_incarnation=alive)
    expect(prefill, decode, "by its rank", [8], source_incarnation={(0, 0): alive, (0, 1): "another rank's"})
    for transfer_id, block in (("by its name", 3), ("by its rank", 4)):
        prefill.pusher.push(transfer_id, [block])
        both_done(prefill, decode, transfer_id)
    expect(prefill, decode, "of the one before", [9], source_incarnation="the process before")
    ended = decode.inbox.outcome("of the one before")
    assert (ended.outcome, ended.code, ended.blocks_reusable) == ("failed", "peer_restarted", True)
    with pytest.raises(kvpush.UsageError, match="source_incarnation"):
        expect(prefill, decode, "nonsense", [10], source_incarnation=7)
    assert is_empty(decode.receiver)
