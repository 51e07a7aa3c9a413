"""Scenarios between one or more prefill and decode engines, in a world with a fake clock and an oracle for memory.

Every test ends with the oracle's and the world's own checks; most of what could go wrong is found there.
"""

import itertools
from dataclasses import replace as replaced

import msgspec.structs
import pytest
from core_worlds import (
    CONFIG,
    SETTLED_S,
    SOON_S,
    connect,
    is_a,
    lose,
    make_config,
    make_connected,
    make_pair,
    make_world,
    only_engine,
    replace,
    run_to_the_end,
    states,
)

from kvpush import wire
from kvpush.config import HoldPolicy
from kvpush.errors import FailureCode, TransportError
from kvpush.pushes import LeaseEnd, Stall
from kvpush.testing import Operation, Violation, World

# --- every order of everything ---------------------------------------------------------------------------------------

STEPS = ("expect", "push", "cancel by prefill", "cancel by decode", "handshake done", "write done")


def outcome_of(order):
    """A cancel counts when its side has something to cancel, or will; nothing counts after the end."""
    end = max(order.index(step) for step in ("expect", "push", "handshake done", "write done"))
    cancels = [order.index("cancel by prefill")]
    if order.index("cancel by decode") > order.index("expect"):
        cancels.append(order.index("cancel by decode"))
    return "cancelled" if min(cancels) < end else "done"


@pytest.mark.parametrize("first", list(itertools.permutations(STEPS, 2)), ids=", ".join)
@pytest.mark.parametrize("times", [1, 2], ids=["cancelled once", "cancelled twice"])
def test_rule13_cancel_works_in_every_order(first, times):
    rest = [step for step in STEPS if step not in first]
    for order in (first + tail for tail in itertools.permutations(rest)):
        world, prefill, decode = make_pair()
        world.network.hold = is_a(wire.Metadata)
        world.hold_writes = True

        def write_done(world=world):
            world.hold_writes = False
            world.resume_writes()

        actions = {
            "expect": lambda decode=decode, prefill=prefill: decode.expect("t", [7, 8, 2], prefill),
            "push": lambda prefill=prefill: prefill.push("t", [3, 4, 9]),
            "cancel by prefill": lambda prefill=prefill: [prefill.cancel("t") for _ in range(times)],
            "cancel by decode": lambda decode=decode: [decode.cancel("t") for _ in range(times)],
            "handshake done": world.network.release,
            "write done": write_done,
        }
        for step in order:
            actions[step]()
            world.advance(SOON_S)
        world.settle(CONFIG.lease_s + CONFIG.hold_timeout_s)
        world.check_settled()
        (push,), (receive,) = prefill.pushes, decode.receives
        assert (push.outcome, receive.outcome) == (outcome_of(order),) * 2, order


@pytest.mark.parametrize("order", list(itertools.permutations(("registration", "push", "abort"))), ids=", ".join)
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_c7_all_orders_of_registration_push_and_abort_converge(order, who):
    world, prefill, decode = make_pair()
    actions = {
        "registration": lambda: decode.expect("t", [7, 8], prefill),
        "push": lambda: prefill.push("t", [3, 4]),
        "abort": lambda: (prefill if who == "prefill" else decode).cancel("t"),
    }
    for step in order:
        actions[step]()
        world.advance(SOON_S)
    run_to_the_end(world)
    is_early = order.index("abort") < 2 and (who == "prefill" or order.index("abort") > order.index("registration"))
    expected = "cancelled" if is_early else "done"
    assert (prefill.pushes[0].outcome, decode.receives[0].outcome) == (expected, expected)


def test_c7_unmatched_items_expire_and_are_counted():
    world, prefill, decode = make_pair()
    push = prefill.push("only pushed", [3])
    receive = decode.expect("only expected", [7], prefill, deadline_s=20)
    run_to_the_end(world)
    assert (push.outcome, push.code) == ("expired", "lease_expired")
    assert (receive.outcome, receive.code) == ("expired", "deadline")
    assert prefill.core.counters["pushes_expired"] == decode.core.counters["receives_expired"] == 1


# --- handshakes ------------------------------------------------------------------------------------------------------


def test_a4_a_failed_handshake_fails_every_push_that_waits_on_it_once():
    world, prefill, decode = make_pair(handshake_attempts=1)
    world.network.tamper = replace(wire.Metadata, lambda message: msgspec.structs.replace(message, digest=b"0" * 32))
    receives = [decode.expect(f"r{i}", [i], prefill) for i in range(5)]
    pushes = [prefill.push(f"r{i}", [i]) for i in range(5)]
    world.settle(CONFIG.handshake_timeout_s)
    assert {push.outcome for push in pushes} == {receive.outcome for receive in receives} == {"failed"}
    assert {push.code for push in pushes} == {receive.code for receive in receives} == {"bad_metadata"}
    assert "digest" in pushes[0].finished.reason
    assert only_engine(prefill).state == "unknown"
    assert prefill.core.gauges()["pushes_behind_handshakes"] == 0
    world.network.tamper = None
    r6 = decode.expect("r6", [6], prefill)
    prefill.push("r6", [6])
    run_to_the_end(world)
    assert r6.outcome == "done"
    assert prefill.core.counters["handshakes_started"] == 2


def test_a4_receives_fail_when_nobody_listens_and_the_next_one_succeeds():
    world, prefill, decode = make_pair()
    world.network.unlisten(prefill.address)
    receives = [decode.expect(f"r{i}", [i], prefill) for i in range(5)]
    world.settle(CONFIG.handshake_attempts * (CONFIG.handshake_backoff_max_s + SOON_S))
    assert {(receive.outcome, receive.code) for receive in receives} == {("failed", "peer_lost")}
    assert "refused" in receives[0].finished.reason
    world.network.listen(prefill.address, prefill)
    receive, push = decode.expect("r6", [6], prefill), prefill.push("r6", [6])
    run_to_the_end(world)
    assert receive.outcome == push.outcome == "done"


def test_a7_a_silent_decode_engine_fails_at_the_timeout():
    world, prefill, decode = make_pair(handshake_attempts=1)
    world.network.tamper = lose(wire.Metadata)
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    took_s = world.settle(SETTLED_S)
    assert took_s == pytest.approx(CONFIG.handshake_timeout_s, rel=0.2)
    assert (push.code, receive.code) == ("handshake_timeout",) * 2
    assert "d0" in push.finished.reason
    world.check_settled()


def test_a7_a_silent_prefill_engine_fails_at_the_timeout():
    world, prefill, decode = make_pair(handshake_attempts=1)
    world.network.tamper = lose(wire.Welcome)
    receive = decode.expect("t", [7], prefill)
    took_s = world.settle(SETTLED_S)
    assert took_s == pytest.approx(CONFIG.handshake_timeout_s, rel=0.2)
    assert receive.code == "handshake_timeout"
    assert "p0" in receive.finished.reason
    assert f"{prefill.address[0]}:{prefill.address[1]}" in receive.finished.reason


def test_a7_a_late_answer_does_not_resurrect_the_attempt():
    world, prefill, decode = make_pair(handshake_attempts=1)
    world.network.hold = is_a(wire.Metadata)
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.run_until(lambda: push.is_over and receive.is_over)
    world.network.release()
    world.advance(SOON_S)
    assert only_engine(prefill).state == "unknown"
    assert prefill.core.counters["handshakes_late"] == 1
    assert prefill.transport.counts.remotes_added == 0
    run_to_the_end(world)


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a7_abort_and_shutdown_in_the_middle_of_a_handshake(who):
    world, prefill, decode = make_pair()
    world.network.tamper = lose(wire.Metadata)
    aborted, waiting = decode.expect("aborted", [7], prefill), decode.expect("waiting", [8], prefill)
    prefill.push("aborted", [3])
    prefill.push("waiting", [4])
    world.advance(SOON_S)
    decode.cancel("aborted")
    world.advance(SOON_S)
    assert aborted.outcome == "cancelled"
    assert aborted.is_free_for_sure
    start_s = world.clock()
    (prefill if who == "prefill" else decode).close()
    assert world.clock() - start_s < 1
    world.run_until(lambda: waiting.is_free, SETTLED_S)
    assert waiting.code == "closing"
    run_to_the_end(world)


def test_a8_the_peer_listens_later_and_needs_no_manual_help():
    world, prefill, decode = make_pair()
    world.network.unlisten(prefill.address)
    first = decode.expect("r1", [1], prefill)
    world.advance(2)
    assert (first.outcome, first.finished.blocks_reusable) == ("failed", True)
    world.network.listen(prefill.address, prefill)
    world.advance(1)
    second = decode.expect("r2", [2], prefill)
    prefill.push("r2", [2])
    run_to_the_end(world)
    assert second.outcome == "done"


def test_a8_a_push_waits_through_a_failed_attempt():
    world, prefill, decode = make_pair()
    world.network.tamper = lose(wire.Metadata)
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(CONFIG.handshake_timeout_s + SOON_S)
    assert not push.is_over
    world.network.tamper = None
    run_to_the_end(world)
    assert receive.outcome == push.outcome == "done"
    assert prefill.core.counters["handshakes_started"] == 2


def test_a9_metadata_before_the_memory_is_registered_is_not_ready():
    world, prefill, decode = make_pair()

    def emptied(message):
        from kvpush import metadata
        from kvpush.layout import decode_geometry

        geometry = msgspec.structs.replace(decode_geometry(message.geometry), groups=())
        return metadata.build(message.attempt, message.incarnation, message.agent_name, message.blob, geometry)

    world.network.tamper = replace(wire.Metadata, emptied)
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.run_until(lambda: prefill.core.counters["handshakes_failed_not_ready"] == 1)
    assert prefill.transport.counts.remotes_added == 0
    world.network.tamper = None
    run_to_the_end(world)
    assert receive.outcome == push.outcome == "done"


def test_rule15_damaged_metadata_never_reaches_the_transport():
    world, prefill, decode = make_pair(handshake_attempts=100)

    def flipped(message):
        position = world.random.randrange(len(message.blob))
        blob = bytearray(message.blob)
        blob[position] ^= 1 << world.random.randrange(8)
        return msgspec.structs.replace(message, blob=bytes(blob))

    world.network.tamper = replace(wire.Metadata, flipped)
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.run_until(lambda: prefill.core.counters["handshakes_failed_bad_metadata"] == 10)
    assert prefill.transport.counts.remotes_added == 0
    world.network.tamper = None
    run_to_the_end(world)  # the name has not been poisoned
    assert receive.outcome == push.outcome == "done"


@pytest.mark.parametrize("field", ["incarnation", "agent_name"])
def test_rule15_metadata_of_another_life_is_refused(field):
    world, prefill, decode = make_pair(handshake_attempts=1)
    world.network.tamper = replace(wire.Metadata, lambda m: msgspec.structs.replace(m, **{field: "somebody else"}))
    decode.expect("t", [7], prefill)
    push = prefill.push("t", [3])
    run_to_the_end(world)
    assert push.code == "bad_metadata"
    assert prefill.transport.counts.remotes_added == 0


# --- who answers where -----------------------------------------------------------------------------------------------


def test_b4_another_engine_at_the_address_ends_the_old_ones_work_and_gets_none_of_it():
    world, old, decode = make_pair()
    connect(world, old, decode)
    leftover = decode.expect("leftover", [1], old)
    world.advance(SOON_S)
    old.kill()
    new = world.prefill("p0b", address=old.address)
    receive = decode.expect("t", [7], new)
    new.push("t", [3])
    never = new.push("leftover", [4])
    world.run_until(lambda: receive.is_over and leftover.is_over)
    assert receive.outcome == "done"
    assert leftover.outcome == "failed"
    assert leftover.code in ("superseded", "peer_restarted", "peer_lost")
    run_to_the_end(world)
    assert never.code == "lease_expired"
    assert states(decode, "p0")[-1] == "evicted"


@pytest.mark.parametrize("offset_s", [1e6, -999])
def test_b9_clocks_of_two_processes_have_nothing_in_common(offset_s):
    world = make_world()
    prefill, decode = world.prefill("p0"), world.decode("d0", clock_offset_s=offset_s)
    connect(world, prefill, decode)
    expired = decode.expect("expired", [6], prefill, deadline_s=5)
    kept = decode.expect("kept", [7], prefill, deadline_s=8)
    world.advance(5.5)
    assert expired.outcome == "expired"
    assert not kept.is_over
    prefill.push("kept", [3])
    run_to_the_end(world)
    assert kept.outcome == "done"
    assert prefill.core.counters["registrations_expired"] == 0


# --- deferred, late, cancelled ---------------------------------------------------------------------------------------


def test_c8_a_write_deferred_beyond_its_lease_is_never_posted():
    world, prefill, decode = make_pair(lease_s=0.5)
    world.network.hold = is_a(wire.Metadata)
    receive = decode.expect("r1", [7, 8], prefill)
    first = prefill.push("r1", [0, 1])
    world.run_until(lambda: first.is_over)
    assert (first.outcome, first.code) == ("expired", "lease_expired")
    second = prefill.push("r2", [0, 1])  # the same source blocks, with another transfer's bytes
    world.network.release()
    world.advance(SOON_S)
    assert (receive.outcome, receive.code) == ("failed", "lease_expired")
    assert prefill.transport.counts.writes_posted == 0
    run_to_the_end(world)
    assert second.outcome == "expired"


def test_rule09_the_lease_is_checked_again_just_before_the_write():
    """The lease ends at the very moment that the line moves, before its timer has fired."""
    world, prefill, decode = make_connected(max_in_flight_bytes=1)
    world.hold_writes = True
    big, late = decode.expect("big", [1], prefill), decode.expect("late", [2], prefill)
    prefill.push("big", [1])
    push = prefill.push("late", [2])
    world.advance(SOON_S)
    (write,) = world.writes
    lease_end_s = world.clock() - SOON_S + CONFIG.lease_s
    world.fabric.resume(write)
    prefill.core._timers.cancel(next(key for key in prefill.core._timers._due_s if isinstance(key, Stall)))
    prefill.core._timers.cancel(next(key for key in prefill.core._timers._due_s if isinstance(key, LeaseEnd)))
    world.clock.set(lease_end_s)
    world.finish(write)
    world.hold_writes = False
    world.advance(SOON_S)
    assert big.outcome == "done"
    assert (push.outcome, late.code) == ("expired", "lease_expired")
    run_to_the_end(world)


def test_e1_decode_aborts_and_its_blocks_come_back_only_when_nothing_can_be_written():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive, push = decode.expect("r1", [3, 4], prefill), prefill.push("r1", [5, 6])
    world.advance(SOON_S)
    decode.cancel("r1")
    world.advance(1)
    assert (receive.outcome, receive.is_free) == ("cancelled", False)
    world.hold_writes = False
    world.resume_writes()
    world.settle(SOON_S)
    assert receive.released.proven
    assert (push.outcome, push.code) == ("cancelled", "cancelled_by_peer")
    run_to_the_end(world)


def test_e1_an_unposted_write_is_dropped_on_abort():
    world, prefill, decode = make_pair()
    world.network.hold = is_a(wire.Metadata)
    receive, push = decode.expect("r1", [3, 4], prefill), prefill.push("r1", [5, 6])
    world.advance(SOON_S)
    decode.cancel("r1")
    world.settle(SOON_S)
    assert receive.released.proven
    assert push.outcome == "cancelled"
    world.network.release()
    run_to_the_end(world)
    assert prefill.transport.counts.writes_posted == 0


@pytest.mark.parametrize("disconnected", [True, False], ids=["disconnected", "refused"])
def test_e2_a_write_that_cannot_be_posted_is_told_to_decode_at_once(disconnected):
    world, prefill, decode = make_connected()
    code = FailureCode.peer_lost if disconnected else FailureCode.write_failed
    error = TransportError(code, "made to fail", disconnected=disconnected)
    world.fabric.fail_next(prefill.identity.agent_name, Operation.post_write, error)
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    assert world.settle(1) < SOON_S
    assert (push.outcome, receive.outcome) == ("failed", "failed")
    assert push.code == receive.code == code
    assert push.is_free_for_sure
    assert receive.is_free_for_sure
    again = decode.expect("again", [7], prefill)
    prefill.push("again", [3])
    run_to_the_end(world)
    assert again.outcome == "done"


def test_e4_a_push_with_two_failing_writes_is_reported_once():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive = decode.expect("t", [7, 8], prefill)
    push = prefill.push("t", [3], last=False)
    prefill.push("t", [4], first_block=1)
    healthy, _ = decode.expect("healthy", [9], prefill), prefill.push("healthy", [5])
    world.advance(SOON_S)
    one, two, third = world.writes
    world.finish(third)
    world.fail_write(one, disconnected=True)
    assert two.state == "failed"
    world.settle(SOON_S)
    assert (push.outcome, receive.outcome, healthy.outcome) == ("failed", "failed", "done")
    run_to_the_end(world)


def test_e3_a_failure_waits_for_the_sibling_that_still_writes():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive = decode.expect("t", [7, 8, 9], prefill)
    push = prefill.push("t", [3], last=False)
    prefill.push("t", [4], first_block=1, last=False)
    world.advance(SOON_S)
    prefill.fail("t", TransportError(FailureCode.write_failed, "its fence raised"))
    world.advance(1)
    assert not push.is_over
    assert (receive.outcome, receive.is_free) == ("failed", False)
    first, second = world.writes
    world.finish(first)
    world.advance(SOON_S)
    assert not push.is_over
    assert not receive.is_free
    world.finish(second)
    world.settle(SOON_S)
    assert (push.outcome, push.finished.blocks_reusable) == ("failed", True)
    assert receive.released.proven
    world.check_settled()


# --- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "first_block"), [([5, 6], 2), ([5], 3), ([5, 6, 7, 8], 0), ([5, 6], 1)])
def test_d1_a_prefix_hit_gets_the_positions_that_it_names(blocks, first_block):
    world, prefill, decode = make_pair()
    receive = decode.expect("t", blocks, prefill, first_block=first_block)
    push = prefill.push("t", [10, 11, 12, 13])
    run_to_the_end(world)
    assert receive.outcome == push.outcome == "done"
    assert push.finished.num_bytes == 128 * len(blocks)


def test_d3_positions_beyond_what_prefill_holds_are_refused_and_not_shifted():
    world, prefill, decode = make_pair()
    receive = decode.expect("t", [5, 6], prefill, first_block=3)
    push = prefill.push("t", [10, 11, 12, 13])  # positions 0 to 3; decode wants 3 and 4
    run_to_the_end(world)
    assert (push.code, receive.code) == ("bad_blocks", "bad_blocks")
    assert prefill.transport.counts.writes_posted == 0


@pytest.mark.parametrize("is_pushed_first", [True, False])
def test_d4_zero_blocks_are_done_with_zero_bytes_and_nobody_waits(is_pushed_first):
    world, prefill, decode = make_pair()
    pushes = [prefill.push("t", [1, 2])] if is_pushed_first else []
    receive = decode.expect("t", [], prefill)
    assert receive.outcome == "done"
    world.advance(SOON_S)
    push = pushes[0] if pushes else prefill.push("t", [1, 2])
    world.settle(SOON_S)
    assert (push.outcome, push.finished.num_bytes) == ("done", 0)
    assert prefill.transport.counts.writes_posted == 0
    world.check_settled()


@pytest.mark.parametrize("is_pushed_first", [True, False])
def test_d5_lists_of_different_length_fail_on_both_sides_naming_both(is_pushed_first):
    world, prefill, decode = make_pair()
    steps = [lambda: prefill.push("t", [0]), lambda: decode.expect("t", [4, 5], prefill)]
    for step in steps if is_pushed_first else reversed(steps):
        step()
        world.advance(SOON_S)
    run_to_the_end(world)
    (push,), (receive,) = prefill.pushes, decode.receives
    assert push.code == receive.code == "bad_blocks"
    for reason in (push.finished.reason, receive.finished.reason):
        assert "2 blocks" in reason
        assert "pushed 1" in reason
    assert prefill.transport.counts.writes_posted == 0


ODD_IDS = ["a:b:1", "cmpl-1_kv_0", "r:9", "HB:x", "PUSH_REG:{}", "é☃", "\x00", "a\nb", "x" * 512, " ", "d0/0.0#1"]


def test_d15_ids_are_opaque():
    world = make_world()
    prefill, decode = world.prefill("p:0/\n☃"), world.decode("d:0 #\x00")
    for block, transfer_id in enumerate(ODD_IDS):
        decode.expect(transfer_id, [block], prefill)
        prefill.push(transfer_id, [block])
    run_to_the_end(world)
    assert {push.outcome for push in prefill.pushes} == {"done"}
    assert {push.finished.engine_id for push in prefill.pushes} == {"d:0 #\x00"}


def test_d16_ids_that_differ_in_a_suffix_only_are_different_transfers():
    world, prefill, decode = make_pair()
    ids = ["u1-0-aaaaaaaa", "u1-0-bbbbbbbb", "u1-1-aaaaaaaa", "deadbeef"]
    for block, transfer_id in enumerate(ids):
        prefill.push(transfer_id, [block])
    for block, transfer_id in reversed(list(enumerate(ids))):
        decode.expect(transfer_id, [15 - block], prefill)
    stranger = decode.expect("u1-0", [5], prefill)
    run_to_the_end(world)
    assert {push.outcome for push in prefill.pushes} == {"done"}
    assert stranger.outcome == "expired"


# --- deadlines, leases, holds ----------------------------------------------------------------------------------------


def test_e7_decode_never_depends_on_prefill_to_end():
    causes = {
        "prefill never finishes": lambda world, prefill, decode: None,
        "prefill is killed": lambda world, prefill, decode: prefill.kill(),
        "prefill aborts": lambda world, prefill, decode: prefill.cancel("t"),
        "the network drops": lambda world, prefill, decode: world.black_hole(prefill, decode),
        "prefill freezes": lambda world, prefill, decode: prefill.freeze(),
    }
    for cause, strike in causes.items():
        world, prefill, decode = make_connected()
        receive = decode.expect("t", [7], prefill)
        world.advance(SOON_S)
        strike(world, prefill, decode)
        took_s = world.run_until(lambda receive=receive: receive.is_over, SETTLED_S)
        assert took_s <= CONFIG.receive_deadline_s, cause
        assert receive.outcome in ("failed", "expired", "cancelled"), cause
        world.run_until(lambda receive=receive: receive.is_free, CONFIG.hold_timeout_s)
        world.check()


def test_e8_expired_receives_give_their_blocks_back_and_a_late_completion_is_ignored():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    late = decode.expect("late", [0, 1], prefill, deadline_s=1)
    prefill.push("late", [0, 1])
    others = [decode.expect(f"r{i}", [2 + 2 * i, 3 + 2 * i], prefill, deadline_s=1) for i in range(3)]
    world.advance(1 + SOON_S)
    assert {receive.outcome for receive in [late, *others]} == {"expired"}
    assert all(receive.is_free_for_sure for receive in others)  # prefill confirmed: nothing was posted for them
    assert not late.is_free
    good = decode.expect("good", [2, 3], prefill)
    prefill.push("good", [2, 3])
    world.hold_writes = False
    world.resume_writes()
    world.settle(SOON_S)
    assert (good.outcome, late.outcome) == ("done", "expired")
    run_to_the_end(world)


def test_e9_source_blocks_come_back_with_no_traffic_at_all():
    world, prefill, _ = make_pair()
    pushes = [prefill.push(f"r{i}", [i]) for i in range(4)]
    world.advance(CONFIG.lease_s - 0.001)
    assert not any(push.is_over for push in pushes)
    world.advance(0.001)
    assert all(push.outcome == "expired" and push.is_free_for_sure for push in pushes)
    world.check_settled()


def test_e10_a_stuck_write_holds_its_source_until_its_real_end():
    world, prefill, decode = make_connected(hold_timeout_s=50)
    world.stalling.add("d0")
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(CONFIG.stall_timeout_s + SOON_S)
    assert (push.outcome, push.code, push.is_free) == ("failed", "write_stalled", False)
    assert (receive.outcome, receive.is_free) == ("failed", False)
    assert prefill.transport.counts.remotes_removed == 0  # the agent stays loaded while its WRITE is in flight
    world.advance(20)
    assert not push.is_free
    world.heal()
    world.settle(SOON_S)
    assert push.released.proven
    assert receive.released.proven
    run_to_the_end(world)
    assert prefill.transport.counts.remotes_removed == 1


@pytest.mark.parametrize("policy", HoldPolicy)
def test_e10_a_hold_ends_by_policy_and_says_that_it_is_not_proven(policy):
    world, prefill, decode = make_connected(hold_policy=policy)
    world.stalling.add("d0")
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(CONFIG.stall_timeout_s + CONFIG.hold_timeout_s + SOON_S)
    assert push.is_free == receive.is_free == (policy == "release")
    if policy == "release":
        assert not push.released.proven
        assert not receive.released.proven
    assert prefill.core.counters["holds_timed_out"] == decode.core.counters["holds_timed_out"] == 1
    world.heal()
    world.advance(1)
    assert (push.released.proven, receive.released.proven) == (policy == "keep",) * 2
    run_to_the_end(world)


def test_e16_a_registration_after_the_lease_or_the_end_is_refused():
    world, prefill, decode = make_connected()
    prefill.push("late", [0])
    world.advance(CONFIG.lease_s + 1)
    prefill.push("another", [0])
    late = decode.expect("late", [7], prefill)
    world.settle(CONFIG.lease_s + 1)
    assert late.code == "lease_expired"
    served, _ = decode.expect("served", [8], prefill), prefill.push("served", [0])
    world.settle(1)
    assert served.outcome == "done"
    prefill.push("another", [0])
    again = decode.expect("served", [8], prefill)
    world.run_until(lambda: again.is_over, 1)
    assert again.code == "already_served"
    run_to_the_end(world)


def test_e20_a_cancel_that_is_lost_with_its_link_is_repeated_on_the_next():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(SOON_S)
    world.network.tamper = lose(wire.Cancel)
    decode.cancel("t")
    world.advance(SOON_S)
    world.network.tamper = None
    world.network.cut("p0", "d0")
    world.advance(1)
    assert prefill.core.counters["cancels"] == 1
    assert not receive.is_free
    world.hold_writes = False
    world.resume_writes()
    world.settle(SOON_S)
    assert receive.released.proven
    assert push.outcome == "failed"
    run_to_the_end(world)


def test_leases_are_renewed_while_requests_queue_at_decode():
    world, prefill, decode = make_connected()
    push = prefill.push("t", [3])
    for _ in range(5):
        world.advance(CONFIG.lease_s * 0.8)
        decode.renew(["t", "unknown"], prefill)
    receive = decode.expect("t", [7], prefill)
    world.settle(1)
    assert push.outcome == receive.outcome == "done"
    assert prefill.core.counters["leases_renewed"] == 5
    world.check_settled()


def test_one_call_may_renew_more_leases_than_one_message_carries(monkeypatch):
    monkeypatch.setattr(wire, "MAX_RENEWALS", 7)
    world, prefill, decode = make_connected()
    pushes = [prefill.push(f"t{i}", [i], last=True) for i in range(12)]
    world.advance(CONFIG.lease_s * 0.8)
    decode.renew([push.transfer_id for push in pushes], prefill)
    world.advance(CONFIG.lease_s * 0.8)
    assert not any(push.is_over for push in pushes)
    run_to_the_end(world)


# --- a second registration -------------------------------------------------------------------------------------------


def raw_register(decode, prefill, transfer_id, epoch, block_ids, first_block=0, remaining_ms=10_000):
    """Register past decode's core, as a confused or malicious engine would."""
    import numpy as np

    packed = wire.pack_block_ids(np.array(block_ids))
    message = wire.Register(transfer_id, epoch, first_block, packed, remaining_ms)
    (link,) = [link.link for link in prefill.core._links.values() if link.hello.engine_id == decode.engine_id]
    return prefill.core.message(link, message, prefill.world.clock())


def sent(effects, kind):
    return [effect.message for effect in effects if isinstance(getattr(effect, "message", None), kind)]


def test_e18_before_the_match_the_newest_registration_wins():
    world, prefill, decode = make_connected()
    first = decode.expect("t", [3, 4], prefill)
    world.advance(SOON_S)
    decode.cancel("t")
    second = decode.expect("t", [7, 8], prefill)
    world.advance(SOON_S)
    push = prefill.push("t", [0, 1])
    run_to_the_end(world)
    assert (first.outcome, second.outcome, push.outcome) == ("cancelled", "done", "done")


def test_e18_the_newest_wins_without_a_cancel_too_and_leaves_no_timer():
    world, prefill, decode = make_connected()
    before = prefill.core.gauges()["timers"]
    for epoch in range(100, 200):
        effects = raw_register(decode, prefill, "t", epoch, [3])
        assert [failed.code for failed in sent(effects, wire.Failed)] == ["superseded"] * (epoch > 100)
    assert prefill.core.gauges()["timers"] == before + 1
    assert prefill.core.gauges()["registrations_waiting"] == 1
    stale = raw_register(decode, prefill, "t", 150, [4])
    assert [failed.code for failed in sent(stale, wire.Failed)] == ["superseded"]
    identical = raw_register(decode, prefill, "t", 199, [3])
    assert identical == []


def test_e18_during_the_write_a_second_one_is_refused_and_the_first_goes_on():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(SOON_S)
    (failed,) = sent(raw_register(decode, prefill, "t", 99, [8]), wire.Failed)
    assert (failed.code, failed.epoch, failed.settled) == ("already_served", 99, True)
    world.hold_writes = False
    world.resume_writes()
    run_to_the_end(world)
    assert receive.outcome == push.outcome == "done"


def test_e18_after_the_end_a_second_one_is_refused():
    world, prefill, decode = make_connected()
    decode.expect("t", [7], prefill)
    prefill.push("t", [3])
    run_to_the_end(world)
    (failed,) = sent(raw_register(decode, prefill, "t", 99, [8]), wire.Failed)
    assert (failed.code, failed.settled) == ("already_served", True)


@pytest.mark.parametrize("is_thief_first", [True, False])
def test_j7_a_second_claimant_is_refused(is_thief_first):
    world, prefill, decode = make_pair()
    thief = world.decode("d1")
    first, second = (thief, decode) if is_thief_first else (decode, thief)
    winner = first.expect("t", [7], prefill)
    world.advance(SOON_S)
    loser = second.expect("t", [8], prefill)
    world.advance(SOON_S)
    prefill.push("t", [3])
    run_to_the_end(world)
    assert winner.outcome == "done"
    assert (loser.outcome, loser.code) == ("failed", "claimed")


def test_j7_a_peer_can_neither_cancel_nor_renew_what_is_anothers():
    world, prefill, decode = make_connected()
    thief = world.decode("d1")
    connect(world, prefill, thief)
    world.hold_writes = True
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3], last=False)
    waiting = decode.expect("waiting", [8], prefill)
    world.advance(SOON_S)
    (link,) = [link.link for link in prefill.core._links.values() if link.hello.engine_id == "d1"]
    for epoch in range(20):
        for transfer_id in ("t", "waiting"):
            cancel = wire.Cancel(transfer_id, epoch, FailureCode.cancelled_by_peer, "mine")
            effects = prefill.core.message(link, cancel, world.clock())
            assert [drained.epoch for drained in sent(effects, wire.Drained)] == [epoch]
    prefill.core.message(link, wire.Renew(["t"]), world.clock())
    assert prefill.core.counters["leases_renewed"] == 0
    assert not push.is_over
    assert not receive.is_over
    world.hold_writes = False
    world.resume_writes()
    prefill.push("t", [4], first_block=1)
    prefill.push("waiting", [5])
    run_to_the_end(world)
    assert receive.outcome == waiting.outcome == "done"


def test_j7_a_notification_counts_only_from_the_agent_that_was_asked():
    from kvpush.transport import Notification

    world, prefill, decode = make_connected()
    receive = decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    forged = wire.encode_written(wire.Written(receive.epoch, (0, 0), 0, 0, 1))
    world.fabric.notify(decode.identity.agent_name, Notification("d1/0.0#9", forged))
    world.advance(SOON_S)
    assert not receive.is_over
    assert decode.core.counters["notifications_foreign"] == 1
    prefill.push("t", [3])
    run_to_the_end(world)
    assert receive.outcome == "done"


# --- restarts and scale ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_f1_decode_restarts_with_the_same_id_again_and_again(seed):
    world = World(seed, CONFIG)
    prefill, decode = world.prefill("p0"), world.decode("d0")
    for life in range(20):
        receive, push = decode.expect(f"r{life}", [7, 8], prefill), prefill.push(f"r{life}", [3, 4])
        world.run_until(lambda push=push, receive=receive: push.is_over and receive.is_over)
        assert push.outcome == receive.outcome == "done"
        world.hold_writes = bool(life % 2)
        decode.expect(f"in flight {life}", [1], prefill)
        leftover = prefill.push(f"in flight {life}", [5])
        waiting = prefill.push(f"unregistered {life}", [6])
        world.advance(SOON_S if life % 3 else 0.001)
        decode = decode.restart()
        world.hold_writes = False
        world.run_until(lambda leftover=leftover: leftover.is_free, SETTLED_S)
        prefill.cancel(waiting.transfer_id)
    run_to_the_end(world)
    assert prefill.transport.counts.remotes_added - prefill.transport.counts.remotes_removed <= 1
    assert len(prefill.registry) <= 1
    assert prefill.core.gauges()["links"] <= 1


def test_rule14_the_restarted_engine_is_a_new_generation_with_rebuilt_descriptors():
    world, prefill, decode = make_connected()
    old = only_engine(prefill)
    decode = decode.restart()
    connect(world, prefill, decode)
    (new,) = prefill.registry.snapshot()
    assert (new.engine_id, new.state) == (old.engine_id, "connected")
    assert new.generation > old.generation
    assert new.incarnation != old.incarnation
    assert prefill.transport.counts.lists_prepared == 4
    assert prefill.transport.counts.lists_released == 2


def test_f5_prefill_restarts_and_its_registrations_end_within_a_bound():
    world = make_world()
    first, second, decode = world.prefill("p0"), world.prefill("p1"), world.decode("d0")
    lost = [decode.expect(f"r{i}", [i], first) for i in range(4)]
    kept = decode.expect("r5", [5], second)
    world.advance(SOON_S)
    again = first.restart()
    world.run_until(lambda: all(receive.is_over for receive in lost), 5)
    assert {(receive.outcome, receive.code) for receive in lost} == {("failed", "peer_restarted")}
    assert all(receive.is_free_for_sure for receive in lost)
    second.push("r5", [5])
    more = decode.expect("r6", [6], again)
    again.push("r6", [6])
    run_to_the_end(world)
    assert kept.outcome == more.outcome == "done"


def test_f5_prefill_dies_for_good_and_blocks_come_back_proven():
    world, prefill, decode = make_connected()
    receive = decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    prefill.kill()
    world.settle(2)
    assert (receive.outcome, receive.code) == ("failed", "peer_lost")
    assert receive.is_free_for_sure
    run_to_the_end(world)


def test_f7_the_failure_of_one_pair_stays_with_that_pair():
    world = make_world()
    prefill = world.prefill("p0", num_blocks=128)
    decodes = [world.decode(f"d{i}", num_blocks=64) for i in range(3)]
    connect(world, prefill, *decodes)
    decodes[1].freeze()
    slowest_s = 0.0
    for i in range(30):
        for index, decode in enumerate(decodes):
            if index == 1:
                prefill.push(f"{index} {i}", [90 + i])
                continue
            receive = decode.expect(f"{index} {i}", [i], prefill)
            push = prefill.push(f"{index} {i}", [index])
            slowest_s = max(slowest_s, world.run_until(lambda push=push: push.is_over, 1))
            world.run_until(lambda receive=receive: receive.is_over, 1)
            assert push.outcome == receive.outcome == "done"
    assert slowest_s < 0.01
    world.run_until(lambda: all(push.is_over for push in prefill.pushes), SETTLED_S)
    world.heal()
    run_to_the_end(world)


def test_f9_drain_refuses_what_is_new_and_finishes_what_runs():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    running = [decode.expect(f"run {i}", [i], prefill) for i in range(5)]
    pushes = [prefill.push(f"run {i}", [i]) for i in range(5)]
    waiting = [decode.expect(f"wait {i}", [5 + i], prefill) for i in range(3)]
    world.advance(SOON_S)
    prefill.drain()
    world.advance(SOON_S)
    assert {(receive.outcome, receive.code) for receive in waiting} == {("failed", "closing")}
    late = decode.expect("late", [9], prefill)
    world.advance(SOON_S)
    assert late.code == "closing"
    world.hold_writes = False
    world.resume_writes()
    world.run_until(lambda: prefill.core.num_pushes == 0, 1)
    assert {push.outcome for push in pushes} == {receive.outcome for receive in running} == {"done"}
    prefill.close()
    run_to_the_end(world)


def test_f9_close_with_a_stuck_write_is_bounded_and_reports_it():
    world, prefill, decode = make_connected()
    world.stalling.add("d0")
    receive, push = decode.expect("stuck", [7], prefill), prefill.push("stuck", [3])
    unmatched = prefill.push("unmatched", [4])
    world.advance(SOON_S)
    start_s = world.clock()
    prefill.close()
    assert world.clock() - start_s == pytest.approx(CONFIG.close_timeout_s)
    assert (push.outcome, push.code, push.finished.blocks_reusable) == ("failed", "closing", False)
    assert push.released.proven  # the agent is destroyed: nothing reads any more
    assert (unmatched.code, unmatched.finished.blocks_reusable) == ("closing", True)
    world.settle(5)
    assert receive.released.proven  # goodbye, then nobody listens
    world.check_settled()


def test_rule18_close_of_decode_beside_a_frozen_prefill_is_bounded():
    world, prefill, decode = make_connected()
    receive = decode.expect("t", [7], prefill)
    never_sent = decode.expect("unsent", [8], world.prefill("p9"))
    world.advance(SOON_S)
    prefill.freeze()
    start_s = world.clock()
    decode.close()
    assert world.clock() - start_s == pytest.approx(CONFIG.close_timeout_s)
    assert (receive.code, receive.is_free) == ("closing", False)
    assert never_sent.is_over


# --- links that come and go ------------------------------------------------------------------------------------------


def test_a_link_that_breaks_and_comes_back_keeps_what_was_not_pushed_yet():
    world, prefill, decode = make_connected()
    receive = decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    world.network.cut("p0", "d0")
    world.advance(2)
    push = prefill.push("t", [3])
    world.settle(1)
    assert receive.outcome == push.outcome == "done"
    world.check_settled()


def test_rule12_asked_again_on_a_new_link_prefill_does_not_call_a_running_write_settled():
    """The push failed with the link; its WRITE still runs. A refusal that said "settled" would free decode's blocks."""
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(SOON_S)
    world.network.cut("p0", "d0")
    world.advance(2)
    assert (receive.outcome, receive.is_free) == ("failed", False)
    world.hold_writes = False
    world.resume_writes()
    world.settle(1)
    assert (push.outcome, push.code) == ("failed", "peer_lost")
    assert receive.released.proven
    run_to_the_end(world)


def test_rule12_drained_is_not_said_while_a_write_runs_even_after_the_push_is_forgotten():
    world, prefill, decode = make_connected(hold_timeout_s=6)
    patient = world.decode("d1", config=make_config(hold_timeout_s=80, stall_timeout_s=1000, receive_deadline_s=90))
    connect(world, prefill, patient)
    world.stalling.add("d1")
    receive, push = patient.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(CONFIG.stall_timeout_s + CONFIG.hold_timeout_s + SOON_S)
    assert push.released is not None
    assert not push.released.proven  # prefill has forgotten the push
    world.network.cut("p0", "d1")  # decode asks again on a new link
    world.advance(5)
    patient.cancel("t")
    world.advance(5)
    assert receive.is_over
    assert not receive.is_free
    assert prefill.core.counters["cancels"] >= 1
    world.heal()  # the WRITE lands; nobody asks about it any more, so nobody can say so
    world.advance(5)
    assert receive.landed == {0}
    assert not receive.is_free
    prefill.close()
    world.settle(SOON_S)
    assert receive.released.proven
    run_to_the_end(world)
    assert decode.core.counters["receives_done"] == 1


def test_rule10_positions_of_an_earlier_use_of_the_id_are_not_written_twice():
    """Decode asks again for what a failed push had written in part, and prefill's caller tries again: were the new push
    matched, decode could call everything arrived while a second WRITE of the first positions still runs."""
    world, prefill, decode = make_connected()
    receive = decode.expect("t", [7, 8], prefill)
    prefill.push("t", [3], last=False)
    world.advance(SOON_S)
    assert decode.core.counters["notifications_late"] == 0
    world.network.cut("p0", "d0")
    world.run_until(lambda: prefill.pushes[-1].is_over, 1)
    again = prefill.push("t", [3, 4])
    world.run_until(lambda: receive.is_over, 2)
    assert (receive.outcome, receive.code) == ("failed", "peer_lost")
    assert not again.is_over
    retried = decode.expect("t", [7, 8], prefill)
    run_to_the_end(world)
    assert retried.outcome == again.outcome == "done"


# --- a crowd ---------------------------------------------------------------------------------------------------------


def test_g2_every_handle_is_released_whatever_becomes_of_the_push():
    world = make_world(3)
    prefill, decode = world.prefill("p0"), world.decode("d0")
    agent = prefill.identity.agent_name
    ends = ["ok", "post", "poll", "cancel", "doubt", "ok", "kill"]
    for i in range(140):
        end = ends[i % len(ends)]
        decode.expect(f"t{i}", [i % 16], prefill)
        push = prefill.push(f"t{i}", [i % 16])
        if end == "post":
            error = TransportError(FailureCode.write_failed, "no")
            world.fabric.fail_next(agent, Operation.post_write, error)
        world.hold_writes = end != "ok"
        world.run_until(lambda push=push: push.is_over or bool(world.writes), 5)
        for write in world.writes:
            if end in ("poll", "doubt"):
                world.fail_write(write, disconnected=end == "poll")
        if end == "cancel":
            prefill.cancel(f"t{i}")
        if end == "kill":
            decode = decode.restart()
        world.hold_writes = False
        world.resume_writes()
        world.settle(SETTLED_S)
    run_to_the_end(world)
    counts = prefill.transport.counts
    assert counts.writes_posted == counts.writes_released > 50
    assert counts.remotes_added - counts.remotes_removed == sum(
        engine.state in ("connected", "stale") for engine in prefill.registry.snapshot()
    )


def test_g6_registrations_for_pushes_that_never_come_are_capped_and_leave_with_their_engine():
    world, prefill, decode = make_pair(max_registrations_per_engine=50, max_registrations=60)
    other = world.decode("d1")
    connect(world, prefill, decode, other)
    codes = []
    for i in range(1000):
        codes += [failed.code for failed in sent(raw_register(decode, prefill, f"x{i}", i, [1]), wire.Failed)]
    assert codes == ["queue_full"] * 950
    codes = [sent(raw_register(other, prefill, f"y{i}", i, [1]), wire.Failed) for i in range(20)]
    assert sum(map(bool, codes)) == 10
    decode.kill()
    world.advance(SOON_S)
    assert prefill.core.gauges()["registrations_waiting"] == 10
    world.advance(CONFIG.receive_deadline_s)
    assert prefill.core.gauges()["registrations_waiting"] == 0
    world.check_settled()


@pytest.mark.parametrize("seed", range(3))
def test_chunks_arrive_in_any_order_and_any_cut(seed):
    world, prefill, decode = make_pair(seed)
    for number, order in enumerate(itertools.permutations(range(4))):
        cuts = [(0, [0, 1]), (2, [2]), (3, [3, 4, 5]), (6, [6])]
        receive = decode.expect(f"t{number}", [8, 9, 10, 11], prefill, first_block=1)
        for step, index in enumerate(order):
            first_block, blocks = cuts[index]
            prefill.push(f"t{number}", blocks, first_block=first_block, last=step == 3)
            if seed:
                world.advance(world.random.choice([0.0, 0.0005, SOON_S]))
        world.settle(1)
        assert receive.outcome == prefill.pushes[-1].outcome == "done", order
    world.check_settled()


def test_fenced_chunks_are_written_only_when_they_are_computed():
    world, prefill, decode = make_connected()
    receive = decode.expect("t", [7, 8], prefill)
    push = prefill.push("t", [3], last=False, fenced=True)
    prefill.push("t", [4], first_block=1)
    world.advance(1)
    assert receive.landed == {1}
    prefill.compute(push, 0, [0])
    world.settle(SOON_S)
    assert receive.outcome == push.outcome == "done"
    world.check_settled()


def test_the_same_seed_gives_the_same_run():
    def run(seed):
        world = World(seed, CONFIG)
        prefill, decode = world.prefill("p0"), world.decode("d0")
        for i in range(10):
            decode.expect(f"t{i}", [i], prefill)
            prefill.push(f"t{i}", [i])
            world.advance(0.001)
        world.settle(10)
        return [(push.transfer_id, push.finished.duration_s) for push in prefill.pushes]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_the_oracle_sees_a_write_into_blocks_that_are_not_granted():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    decode.expect("t", [7], prefill)
    prefill.push("t", [3])
    world.advance(SOON_S)
    (write,) = world.writes
    decode.receives[-1].finished = replaced(decode.receives[0].finished, transfer_id="t")  # as if it were over
    with pytest.raises(Violation, match="are written after"):
        world.finish(write)
