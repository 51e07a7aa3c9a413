"""A push to a decode engine of several ranks: one outcome for all of them, and each is told what concerns it."""

import numpy as np
import pytest
from rank_cores import Other, Prefill

from kvpush import wire
from kvpush.errors import FailureCode, TransportError
from kvpush.layout import KVGroup
from kvpush.parallel import Share
from kvpush.prefill_effects import PostWrite
from kvpush.pushes import Part

BLOCK_LEN_BYTES = 2 * 2 * 4 * 16 * 64 * 2  # layers, key/value, heads, tokens, head size, item


def make_two(**settings):
    """One prefill rank that writes half of its heads to each of two decode ranks, both of which it knows."""
    prefill = Prefill(**settings)
    left, right = (Other("d0", Share(tp_rank=rank, tp_size=2)) for rank in (0, 1))
    prefill.meets(left, right)
    return prefill, left, right


def make_writing(**settings):
    """... and to both of which a WRITE of transfer t is in flight."""
    prefill, left, right = make_two(**settings)
    prefill.push("t", [1, 2])
    prefill.registers(left, "t", 7, [5, 6])
    prefill.registers(right, "t", 9, [3, 4])
    prefill.answers(left, right)
    return prefill, left, right


def test_each_rank_is_written_as_soon_as_it_has_registered_and_the_push_ends_with_the_last():
    prefill, left, right = make_two()
    prefill.push("t", [1, 2])
    prefill.registers(left, "t", 7, [5, 6])
    prefill.answers(left)
    first = prefill.write_to(left)
    prefill.settles(first)
    assert not prefill.events, "the other rank has not even registered"
    prefill.registers(right, "t", 9, [3, 4])
    prefill.answers(right)
    prefill.settles(prefill.write_to(right))
    (end,) = prefill.events
    assert (end.outcome, end.engine_id, end.blocks_reusable) == ("done", "d0", True)
    assert end.num_bytes == 2 * 2 * 2 * 4 * 16 * 64 * 2, "blocks, layers, key/value, all heads, tokens, head size, item"


def test_half_of_the_heads_go_to_each():
    prefill, left, right = make_writing()
    for other in (left, right):
        write = prefill.posted[prefill.write_to(other)]
        assert [write.peer.len_bytes(piece) for piece in write.pieces] == [2 * 2 * 2 * 2 * 16 * 64 * 2]


def test_a_rank_that_never_registers_ends_the_push_by_its_lease_which_names_it():
    prefill, left, right = make_two(lease_s=10)
    prefill.push("t", [1, 2])
    prefill.registers(left, "t", 7, [5, 6])
    prefill.answers(left)
    prefill.settles(prefill.write_to(left))
    prefill.advance(9)
    assert not prefill.events
    prefill.advance(11)
    (end,) = prefill.events
    assert (end.outcome, end.blocks_reusable) == ("expired", True)
    assert "(0, 1)" in end.reason and "'d0'" in end.reason
    assert prefill.told(left, wire.Failed) == [], "it has everything"


def test_a_failure_on_one_rank_ends_the_push_and_the_other_is_told_before_its_write_has_ended():
    prefill, left, right = make_writing()
    prefill.settles(prefill.write_to(left), TransportError(FailureCode.peer_lost, "broken", disconnected=True))
    (failed,) = prefill.told(right, wire.Failed)
    assert (failed.epoch, failed.settled) == (9, False)
    assert not prefill.events, "a WRITE still reads the blocks"
    (failed,) = prefill.told(left, wire.Failed)
    assert (failed.epoch, failed.settled) == (7, True)
    prefill.settles(prefill.write_to(right))
    (end,) = prefill.events
    assert (end.outcome, end.code, end.blocks_reusable) == ("failed", "peer_lost", True)
    assert [message.epoch for message in prefill.told(right, wire.Drained)] == [9]


def test_a_cancel_of_one_rank_is_drained_at_its_own_time():
    """The other rank's WRITE goes on, and says nothing about the memory of this one."""
    prefill, left, right = make_writing()
    prefill.hears(left, wire.Cancel("t", 7, FailureCode.cancelled_by_caller, "enough"))
    assert prefill.told(left, wire.Drained) == []
    prefill.settles(prefill.write_to(left))
    assert [message.epoch for message in prefill.told(left, wire.Drained)] == [7]
    assert not prefill.events
    (failed,) = prefill.told(right, wire.Failed)
    assert (failed.code, failed.settled) == ("cancelled_by_peer", False)
    prefill.settles(prefill.write_to(right))
    assert [message.epoch for message in prefill.told(right, wire.Drained)] == [9]
    (end,) = prefill.events
    assert (end.outcome, end.code) == ("cancelled", "cancelled_by_peer")


def test_a_cancel_of_a_rank_that_nothing_is_in_flight_to_is_drained_at_once():
    prefill, left, right = make_two()
    prefill.push("t", [1, 2])
    prefill.registers(left, "t", 7, [5, 6])
    prefill.registers(right, "t", 9, [3, 4])
    prefill.answers(right)
    prefill.hears(left, wire.Cancel("t", 7, FailureCode.cancelled_by_caller, "enough"))
    assert [message.epoch for message in prefill.told(left, wire.Drained)] == [7]
    assert prefill.told(right, wire.Drained) == []


def test_a_cancel_of_a_rank_that_has_not_registered_is_drained_and_ends_nothing():
    prefill, left, right = make_two()
    prefill.push("t", [1, 2])
    prefill.registers(left, "t", 7, [5, 6])
    prefill.hears(right, wire.Cancel("t", 9, FailureCode.cancelled_by_caller, "enough"))
    assert [message.epoch for message in prefill.told(right, wire.Drained)] == [9]
    assert not prefill.events


def test_what_becomes_of_a_rank_that_has_everything_does_not_matter_any_more():
    prefill, left, right = make_writing()
    prefill.settles(prefill.write_to(left))
    prefill.do(prefill.core.link_closed(left.link, "killed", prefill.now_s))
    assert not prefill.events
    prefill.settles(prefill.write_to(right))
    assert [end.outcome for end in prefill.events] == ["done"]


@pytest.mark.parametrize("is_pushed_first", [True, False])
def test_what_becomes_of_a_rank_that_asks_for_nothing_does_not_matter(is_pushed_first):
    """A stage of decode whose layers this rank does not have: it only hears how the transfer ends."""
    prefill = Prefill()
    other_layers = Other("d0", Share(pp_rank=0, pp_size=2), layers=("c",))
    ours = Other("d0", Share(pp_rank=1, pp_size=2))
    prefill.meets(other_layers, ours)
    if is_pushed_first:
        prefill.push("t", [1, 2])
    prefill.registers(other_layers, "t", 7, [])
    prefill.registers(ours, "t", 9, [3, 4])
    if not is_pushed_first:
        prefill.push("t", [1, 2])
    prefill.answers(ours)
    prefill.do(prefill.core.link_closed(other_layers.link, "killed", prefill.now_s))
    assert prefill.told(ours, wire.Failed) == []
    prefill.settles(prefill.write_to(ours))
    assert [end.outcome for end in prefill.events] == ["done"]


def test_the_loss_of_a_rank_that_is_not_served_ends_the_push_and_the_other_is_told():
    prefill, left, right = make_writing()
    prefill.settles(prefill.write_to(right))
    prefill.do(prefill.core.link_closed(left.link, "killed", prefill.now_s))
    prefill.settles(prefill.write_to(left), TransportError(FailureCode.peer_lost, "broken", disconnected=True))
    (end,) = prefill.events
    assert (end.outcome, end.code) == ("failed", "peer_lost")
    assert prefill.told(right, wire.Failed) == [], "it has everything"


def test_a_stalled_write_to_one_rank_holds_the_blocks_and_the_other_is_drained():
    prefill, left, right = make_writing(stall_timeout_s=3, hold_timeout_s=60)
    prefill.advance(4)
    (end,) = prefill.events
    assert (end.code, end.blocks_reusable) == ("write_stalled", False)
    prefill.settles(prefill.write_to(left))
    assert [message.epoch for message in prefill.told(left, wire.Drained)] == [7]
    assert len(prefill.events) == 1, "the WRITE to the other still reads the blocks"
    prefill.settles(prefill.write_to(right))
    assert [type(event).__name__ for event in prefill.events] == ["PushFinished", "BlocksReleased"]


def test_a_push_waits_through_just_so_many_attempts():
    prefill, other = Prefill(handshake_attempts=3), Other("d0", Share())
    prefill.meets(other)
    prefill.push("t", [1])
    prefill.registers(other, "t", 7, [5])
    for number in range(1, 4):
        assert not prefill.events
        asked = prefill.told(other, wire.MetadataRequest)
        assert len(asked) == number
        prefill.hears(other, wire.MetadataUnavailable(asked[-1].attempt, FailureCode.not_ready, "no memory yet"))
        prefill.advance(prefill.config.handshake_backoff_max_s)
    assert [(end.outcome, end.code) for end in prefill.events] == [("failed", "not_ready")]


def test_a_failed_handshake_with_one_rank_ends_the_push_for_both():
    prefill, left, right = make_two(handshake_attempts=1)
    prefill.push("t", [1, 2])
    prefill.registers(left, "t", 7, [5, 6])
    prefill.registers(right, "t", 9, [3, 4])
    prefill.answers(right)
    attempt = prefill.told(left, wire.MetadataRequest)[-1].attempt
    prefill.hears(left, wire.MetadataUnavailable(attempt, FailureCode.not_ready, "no memory yet"))
    assert [failed.settled for failed in prefill.told(left, wire.Failed)] == [True]
    assert [failed.settled for failed in prefill.told(right, wire.Failed)] == [False]
    prefill.settles(prefill.write_to(right))
    assert [(end.outcome, end.code) for end in prefill.events] == [("failed", "not_ready")]


def test_registrations_that_wait_end_together():
    """One rank cancels before the push: the push that still comes is cancelled, and the other rank knows now."""
    prefill, left, right = make_two()
    prefill.registers(left, "t", 7, [5, 6])
    prefill.registers(right, "t", 9, [3, 4])
    prefill.hears(left, wire.Cancel("t", 7, FailureCode.cancelled_by_caller, "enough"))
    assert [message.epoch for message in prefill.told(left, wire.Drained)] == [7]
    assert prefill.told(left, wire.Failed) == []
    assert [(m.epoch, m.code, m.settled) for m in prefill.told(right, wire.Failed)] == [(9, "cancelled_by_peer", True)]
    prefill.push("t", [1, 2])
    assert [end.outcome for end in prefill.events] == ["cancelled"]


def test_a_use_of_the_id_after_a_cancel_is_another_transfer_on_both_ranks():
    prefill, left, right = make_two()
    prefill.registers(left, "t", 7, [5, 6])
    prefill.registers(right, "t", 9, [3, 4])
    prefill.hears(right, wire.Cancel("t", 9, FailureCode.cancelled_by_caller, "enough"))
    prefill.registers(left, "t", 8, [5, 6])
    prefill.registers(right, "t", 10, [3, 4])
    prefill.push("t", [1, 2])
    prefill.answers(left, right)
    for other in (left, right):
        prefill.settles(prefill.write_to(other))
    assert [end.outcome for end in prefill.events] == ["done"]


def test_another_engine_cannot_take_the_part_of_a_rank():
    prefill, left, _ = make_two()
    stranger = Other("d1", Share(tp_rank=1, tp_size=2))
    prefill.meets(stranger)
    prefill.push("t", [1, 2])
    prefill.registers(left, "t", 7, [5, 6])
    prefill.registers(stranger, "t", 1, [3, 4])
    assert [failed.code for failed in prefill.told(stranger, wire.Failed)] == ["claimed"]


def test_ranks_that_do_not_agree_about_how_many_they_are_are_refused():
    prefill, left, _ = make_two()
    confused = Other("d0", Share(tp_rank=1, tp_size=4))
    prefill.meets(confused)
    prefill.push("t", [1, 2])
    prefill.registers(left, "t", 7, [5, 6])
    prefill.registers(confused, "t", 1, [3, 4])
    (failed,) = prefill.told(confused, wire.Failed)
    assert failed.code == "incompatible" and "(0, 3)" in failed.reason


def test_a_further_rank_that_comes_after_the_end_learns_why():
    prefill, left, right = make_two(lease_s=10)
    prefill.push("t", [1, 2])
    prefill.registers(left, "t", 7, [5, 6])
    prefill.answers(left)
    prefill.do(prefill.core.cancel("t", prefill.now_s))
    prefill.registers(right, "t", 9, [3, 4])  # while the WRITE to the other is in flight
    prefill.settles(prefill.write_to(left))
    prefill.registers(right, "t", 10, [3, 4])  # after it
    codes = [(failed.code, failed.settled) for failed in prefill.told(right, wire.Failed)]
    assert codes == [("cancelled_by_peer", True), ("cancelled_by_peer", True)]


def test_a_rank_that_has_nothing_to_do_with_this_one_is_refused_with_both_shapes():
    prefill = Prefill(Share(tp_rank=0, tp_size=2))
    stranger = Other("d0", Share(tp_rank=1, tp_size=2))
    prefill.meets(stranger)
    (refused,) = prefill.told(stranger, wire.Refused)
    assert refused.code == "incompatible" and "(0, 1)" in refused.reason and "(0, 0)" in refused.reason


@pytest.mark.parametrize("wrong", [Share(tp_size=1), Share(tp_rank=1, tp_size=2), Share(tp_size=4)])
def test_decode_must_know_which_rank_of_how_many_it_talks_to(wrong):
    prefill = Prefill(Share(tp_rank=0, tp_size=2))
    other = Other("d0", Share())
    prefill.meets(other, expected_share=wrong)
    (refused,) = prefill.told(other, wire.Refused)
    assert refused.code == "incompatible" and f"tp_size={wrong.tp_size}" in refused.reason


def test_a_rank_that_writes_to_nobody_is_told_by_its_witness_and_gives_its_blocks_back():
    """Four prefill ranks share two heads: the second copy of each writes nothing."""
    prefill = Prefill(Share(tp_rank=1, tp_size=4), total_heads=2)
    witness = Other("d0", Share(tp_rank=0, tp_size=2), total_heads=2)
    prefill.meets(witness)
    prefill.push("t", [1, 2])
    prefill.registers(witness, "t", 7, [])
    (end,) = prefill.events
    assert (end.outcome, end.num_bytes, end.blocks_reusable) == ("done", 0, True)
    assert prefill.told(witness, wire.MetadataRequest) == [], "no handshake for nothing"


def test_d8_each_rank_of_decode_has_its_own_number_of_blocks():
    prefill = Prefill()
    large = Other("d0", Share(tp_rank=0, tp_size=2), blocks=16)
    small = Other("d0", Share(tp_rank=1, tp_size=2), blocks=12)
    prefill.meets(large, small)
    prefill.push("t", [1])
    prefill.registers(large, "t", 7, [13])
    prefill.answers(large)
    prefill.registers(small, "t", 9, [13])
    prefill.answers(small)
    (failed,) = prefill.told(small, wire.Failed)
    assert failed.code == "bad_blocks" and "block 13" in failed.reason and "12" in failed.reason
    assert "(0, 1)" in failed.reason
    assert len(prefill.posted) == 1, "nothing was written to the small one"


def test_d8_the_first_block_that_a_cache_does_not_have_is_refused():
    prefill, other = Prefill(), Other("d0", Share(), blocks=12)
    prefill.meets(other)
    prefill.push("t", [1])
    prefill.registers(other, "t", 7, [12])
    prefill.answers(other)
    assert [failed.code for failed in prefill.told(other, wire.Failed)] == ["bad_blocks"]
    assert not prefill.posted


def test_a_write_that_has_ended_says_nothing_of_the_one_that_has_not():
    """The registration is over with its last WRITE: until then the loss of its link ends the push."""
    prefill, other = make_one(max_write_bytes=1)
    prefill.registers(other, "t", 2, [4, 5])
    prefill.push("t", [1, 2])
    first, second = prefill.posted
    prefill.settles(first)
    assert prefill.core.gauges()["blocks_registered"] == 2
    prefill.do(prefill.core.link_closed(other.link, "killed", prefill.now_s))
    prefill.settles(second)
    assert [(end.outcome, end.code) for end in prefill.events] == [("failed", "peer_lost")]


@pytest.mark.parametrize("block_ids", [[], [4]], ids=["asks for nothing", "has everything"])
def test_before_the_last_chunk_is_known_no_rank_has_all_for_sure(block_ids):
    prefill, other = make_one()
    prefill.registers(other, "t", 2, block_ids)
    prefill.push("t", [1], last=False)
    for write_id in list(prefill.posted):
        prefill.settles(write_id)
    prefill.do(prefill.core.link_closed(other.link, "killed", prefill.now_s))
    assert [(end.outcome, end.code) for end in prefill.events] == [("failed", "peer_lost")]


def test_a_push_that_is_given_up_tells_every_rank_that_waits_once_and_takes_no_place_in_any_line():
    prefill = Prefill()
    served, one, deferred, two = ranks = [Other("d0", Share(tp_rank=rank, tp_size=4)) for rank in range(4)]
    prefill.meets(*ranks)
    prefill.push("t", [1])
    for epoch, other in enumerate(ranks, 7):
        prefill.registers(other, "t", epoch, [5])
    prefill.answers(served, one, two)
    prefill.settles(prefill.write_to(served))
    assert prefill.core.gauges()["pushes_behind_handshakes"] == 1
    prefill.do(prefill.core.cancel("t", prefill.now_s))
    assert prefill.core.gauges()["pushes_behind_handshakes"] == 0
    for other in (one, two):
        prefill.settles(prefill.write_to(other))
    assert [end.outcome for end in prefill.events] == ["cancelled"]
    told = [[failed.settled for failed in prefill.told(other, wire.Failed)] for other in ranks]
    assert told == [[], [False], [True], [False]]
    assert [len(prefill.told(other, wire.Drained)) for other in ranks] == [0, 1, 0, 1]


def test_any_rank_of_the_engine_renews_the_lease_and_nobody_else():
    prefill, left, right = make_two(lease_s=10, liveness_timeout_s=1000)
    stranger = Other("d1", Share())
    prefill.meets(stranger)
    prefill.push("t", [1])
    prefill.registers(left, "t", 7, [5])
    prefill.registers(right, "t", 9, [5])
    prefill.answers(left)
    prefill.settles(prefill.write_to(left))
    for other in (left, right):
        prefill.advance(9)
        prefill.hears(other, wire.Renew(["t"]))
    prefill.advance(9)
    prefill.hears(stranger, wire.Renew(["t"]))
    assert prefill.core.counters["leases_renewed"] == 2
    assert not prefill.events
    prefill.advance(1)
    assert [end.outcome for end in prefill.events] == ["expired"]


def test_a_reason_names_eight_ranks_at_most_or_the_states_of_four():
    ranks = [Other("d0", Share(tp_rank=rank, tp_size=16), total_heads=16) for rank in range(16)]
    prefill = Prefill(total_heads=16, handshake_timeout_s=100)
    prefill.meets(*ranks)
    prefill.push("t", [1])
    prefill.push("u", [1])
    prefill.registers(ranks[0], "t", 7, [5])
    for rank in ranks:
        prefill.registers(rank, "u", 8, [5])
    prefill.advance(prefill.config.lease_s)
    waits, is_complete = prefill.events
    assert "(0, 8)" in waits.reason and "(0, 9)" not in waits.reason
    assert is_complete.reason.count("is handshaking") == 4


def test_a_refusal_names_eight_ranks_at_most():
    prefill = Prefill(Share(tp_rank=0, tp_size=2), total_heads=64)
    stranger = Other("d1", Share(tp_rank=63, tp_size=64), total_heads=64)
    prefill.meets(stranger)
    (refused,) = prefill.told(stranger, wire.Refused)
    assert refused.reason.endswith("(0, 7)]")
    few, many = (Other("d0", Share(tp_rank=rank, tp_size=16 * rank), total_heads=64) for rank in (2, 4))
    prefill.meets(few, many)
    prefill.push("t", [1])
    prefill.registers(few, "t", 7, [5])
    prefill.registers(many, "t", 8, [5])
    (failed,) = prefill.told(many, wire.Failed)
    assert failed.reason.count("(0, 7)]") == 2


# --- time ------------------------------------------------------------------------------------------------------------


def test_a_push_whose_lease_ends_in_its_engines_line_is_not_written_though_no_timer_has_fired():
    prefill, other = make_one(max_write_bytes=1, lease_s=10)
    for number, name in enumerate(("long", "late", "next"), 2):
        prefill.now_s += name == "next"
        prefill.registers(other, name, number, [4, 5])
        prefill.push(name, [1, 2])
    first, second = prefill.posted
    prefill.now_s += 9
    prefill.settles(first)
    assert [(end.transfer_id, end.outcome) for end in prefill.events] == [("late", "expired")]
    assert len(prefill.posted) == 2, "the next in line went in the same turn"


def test_a_push_that_was_cancelled_in_its_engines_line_holds_up_nobody_behind_it():
    prefill, other = make_one(max_write_bytes=1)
    for number, name in enumerate(("long", "cancelled", "next"), 2):
        prefill.registers(other, name, number, [4, 5])
        prefill.push(name, [1, 2])
    prefill.do(prefill.core.cancel("cancelled", prefill.now_s))
    prefill.settles(min(prefill.posted))
    assert len(prefill.posted) == 2


def test_a_push_that_ends_as_soon_as_it_comes_leaves_no_timer():
    prefill, other = make_one()
    prefill.registers(other, "t", 2, [])
    prefill.push("t", [1])
    assert [end.outcome for end in prefill.events] == ["done"]
    assert prefill.core.gauges()["timers"] == 0


@pytest.mark.parametrize("is_pushed_first", [True, False])
def test_no_lease_runs_while_a_push_is_written_however_many_slices_it_has(is_pushed_first):
    prefill, other = make_one(max_write_bytes=1, lease_s=2, liveness_timeout_s=100)
    if is_pushed_first:
        prefill.push("t", [1, 2, 3, 4])
    prefill.registers(other, "t", 2, [4, 5, 6, 7])
    if not is_pushed_first:
        prefill.push("t", [1, 2, 3, 4])
    while prefill.posted:
        assert prefill.core.gauges()["timers"] == len(prefill.posted), "one for each WRITE that may stall"
        prefill.now_s += 1
        prefill.settles(min(prefill.posted))
    assert [end.outcome for end in prefill.events] == ["done"]


def test_decode_that_sleeps_is_woken_before_the_write_is_posted_and_told_after_it_when_it_does_not():
    prefill, other = make_one(liveness_timeout_s=100)

    def push(name, epoch):
        prefill.registers(other, name, epoch, [4])
        part = Part(0, (range(2),), 0, np.array([1]))
        effects = prefill.core.push(name, (part,), last=True, fenced=False, index=0, now_s=prefill.now_s)
        return ["post" if isinstance(effect, PostWrite) else type(effect.message).__name__ for effect in effects]

    assert push("soon", 2) == ["post", "Writing"]
    prefill.now_s += 10 * wire.ATTENTION_S
    assert push("later", 3) == ["Writing", "post"]
    assert push("at once", 4) == ["post", "Writing"]


@pytest.mark.parametrize("end", ["doubted", "stalled"])
def test_rule07_a_write_that_nobody_waits_for_any_more_makes_room_for_others_at_once(end):
    prefill = Prefill(max_write_bytes=1, max_in_flight_bytes=3 * BLOCK_LEN_BYTES, liveness_timeout_s=100)
    gone, other = Other("d0", Share()), Other("d1", Share())
    prefill.meets(gone, other)
    for engine, name in ((gone, "lost"), (other, "kept")):
        prefill.registers(engine, name, 1, [4, 5])
        prefill.push(name, [1, 2])
        prefill.answers(engine)
        prefill.advance(1)
    assert len(prefill.posted) == 3
    if end == "doubted":
        failure = TransportError(FailureCode.write_failed, "status ERR", disconnected=False)
        prefill.do(prefill.core.write_doubted(min(prefill.posted), failure, prefill.now_s))
    else:
        prefill.advance(1)
    assert len(prefill.posted) == 4


def test_a_push_to_an_engine_that_has_just_ended_waits_in_its_line_for_what_is_decided():
    """Two engines may end in one look at the clock, and the news of the first comes before that of the second."""
    prefill, other = make_one()
    prefill.registers(other, "t", 2, [4])
    pin = prefill.registry.pin
    prefill.registry.pin = lambda generation: None
    prefill.push("t", [1])
    assert prefill.core.gauges()["pushes_in_lines"] == 1
    prefill.registry.pin = pin
    prefill.do(prefill.core.tick(prefill.now_s))
    prefill.settles(prefill.write_to(other))
    assert [end.outcome for end in prefill.events] == ["done"]


# --- pieces ----------------------------------------------------------------------------------------------------------


def make_one(**settings):
    prefill = Prefill(**settings)
    other = Other("d0", Share())
    prefill.meets(other)
    prefill.push("first", [0])
    prefill.registers(other, "first", 1, [0])
    prefill.answers(other)
    prefill.settles(prefill.write_to(other))
    prefill.events.clear()
    return prefill, other


def test_small_pieces_of_a_growing_push_wait_for_the_write_before_them_and_go_together():
    prefill, other = make_one()
    prefill.registers(other, "t", 2, list(range(8)))
    for chunk in range(4):
        prefill.push("t", [chunk], index=chunk, first_block=chunk, last=False)
    assert len(prefill.posted) == 1, "the first goes at once"
    prefill.settles(prefill.write_to(other))
    write_id = prefill.write_to(other)
    assert [(span.first_slot, span.num_slots) for span in prefill.spans(write_id)] == [(1, 1), (2, 1), (3, 1)]
    prefill.push("t", [8, 9, 10, 11], index=4, first_block=4, last=True)
    assert len(prefill.posted) == 2, "nothing more will come, so nothing is waited for"


def test_large_pieces_wait_for_nothing():
    prefill, other = make_one(coalesce_bytes=1)
    prefill.registers(other, "t", 2, list(range(8)))
    for chunk in range(2):
        prefill.push("t", [chunk], index=chunk, first_block=chunk, last=False)
    assert len(prefill.posted) == 2


def test_a_piece_of_just_the_size_that_is_enough_waits_for_nothing():
    prefill, other = make_one(coalesce_bytes=BLOCK_LEN_BYTES)
    prefill.registers(other, "t", 2, list(range(8)))
    for chunk in range(2):
        prefill.push("t", [chunk], index=chunk, first_block=chunk, last=False)
    assert len(prefill.posted) == 2


def test_a_layer_is_a_piece_and_the_push_is_done_when_every_layer_of_every_position_is():
    prefill, other = make_one()
    prefill.registers(other, "t", 2, [4, 5])
    prefill.push("t", [1, 2], index=0, layers=(range(1),), last=False)
    (span,) = prefill.spans(prefill.write_to(other))
    assert (span.first_layer, span.num_layers, span.first_slot, span.num_slots) == (0, 1, 0, 2)
    prefill.settles(prefill.write_to(other))
    assert not prefill.events
    prefill.push("t", [1, 2], index=1, layers=(range(1, 2),), last=True)
    prefill.settles(prefill.write_to(other))
    assert [end.outcome for end in prefill.events] == ["done"]


def test_pieces_stay_within_the_number_of_spans():
    num_blocks = wire.MAX_SPANS + 3
    prefill, other = Prefill(), Other("d0", Share(), blocks=num_blocks)
    prefill.meets(other)
    prefill.registers(other, "t", 2, list(range(num_blocks)))
    for chunk in range(num_blocks):
        prefill.push("t", [chunk % 16], index=chunk, first_block=chunk, last=False)
    prefill.answers(other)
    assert [len(effect.pieces) for effect in prefill.posted.values()] == [wire.MAX_SPANS]


def test_two_of_the_largest_blocks_are_in_flight_to_one_engine():
    groups = [KVGroup("small", ["a"]), KVGroup("large", ["b", "c", "d"]), KVGroup("smallest", ["e"])]
    prefill = Prefill(layers="abcde", groups=groups, max_write_bytes=1)
    other = Other("d0", Share(), layers="abcde", groups=groups)
    prefill.meets(other)
    wants = (wire.Want("large", 0, wire.pack_block_ids(np.arange(3))),)
    prefill.hears(other, wire.Register("t", 1, wants, 60_000))
    part = Part(1, (range(3),), 0, np.arange(3))
    prefill.do(prefill.core.push("t", (part,), last=True, fenced=False, index=0, now_s=prefill.now_s))
    prefill.answers(other)
    assert len(prefill.posted) == 2


@pytest.mark.parametrize("fenced", [False, True])
def test_the_newest_registration_takes_the_place_of_one_that_nothing_was_written_for(fenced):
    prefill, other = Prefill(), Other("d0", Share())
    prefill.meets(other)
    prefill.push("t", [1], fenced=fenced)
    prefill.registers(other, "t", 2, [5])
    prefill.registers(other, "t", 3, [6])
    assert [(failed.epoch, failed.code) for failed in prefill.told(other, wire.Failed)] == [(2, "superseded")]
    prefill.do(prefill.core.fences_reached("t", [0], prefill.now_s))
    prefill.answers(other)
    (post,) = prefill.posted.values()
    assert [piece.remote_slots.tolist() for piece in post.pieces] == [[6]]
    assert wire.decode_written(post.notification).epoch == 3
    prefill.settles(post.write_id)
    assert [end.outcome for end in prefill.events] == ["done"]


def test_a_layer_that_was_never_pushed_is_a_shortage():
    prefill, other = make_one()
    prefill.registers(other, "t", 2, [4, 5])
    prefill.push("t", [1, 2], layers=(range(1),), last=True)
    (end,) = prefill.events
    assert (end.outcome, end.code) == ("failed", "bad_blocks")
    assert "nothing for layer 'b' of positions 0 to 1 of group 'kv'" in end.reason


@pytest.mark.parametrize(
    ("num_pushed", "missing"),
    [
        (1, "layers 'b', 'c', 'd', 'e' and 2 more"),
        (2, "layers 'c', 'd', 'e', 'f' and 1 more"),
        (3, "layers 'd', 'e', 'f', 'g'"),
        (5, "layers 'f', 'g'"),
        (6, "layer 'g'"),
    ],
)
def test_four_missing_layers_are_named_and_the_rest_is_counted(num_pushed, missing):
    prefill, other = Prefill(layers="abcdefg"), Other("d0", Share(), layers="abcdefg")
    prefill.meets(other)
    prefill.registers(other, "t", 2, [4])
    prefill.push("t", [1], layers=(range(num_pushed),))
    (end,) = prefill.events
    assert f"nothing for {missing} of position 0 of group 'kv'" in end.reason


@pytest.mark.parametrize(("wanted_of_x", "first_block"), [([], 0), ([5], 1)], ids=["nothing of x", "a later position"])
def test_what_a_chunk_has_of_one_group_decides_nothing_about_the_next_group(wanted_of_x, first_block):
    groups = [KVGroup("x", ["a"]), KVGroup("y", ["b"])]
    prefill, other = Prefill(groups=groups), Other("d0", Share(), groups=groups)
    prefill.meets(other)
    wants = [wire.Want("x", first_block, wire.pack_block_ids(np.array(wanted_of_x)))] if wanted_of_x else []
    wants.append(wire.Want("y", 0, wire.pack_block_ids(np.array([4]))))
    prefill.hears(other, wire.Register("t", 1, tuple(wants), 60_000))
    both = tuple(Part(group, (range(1),), 0, np.array([1])) for group in (0, 1))
    prefill.do(prefill.core.push("t", both, last=False, fenced=False, index=0, now_s=prefill.now_s))
    prefill.push("t", [2], index=1, first_block=1, layers=(range(1),))
    prefill.answers(other)
    for write_id in list(prefill.posted):
        prefill.settles(write_id)
    assert [end.outcome for end in prefill.events] == ["done"]


def test_positions_that_are_missing_are_counted_in_decodes_blocks():
    prefill, other = Prefill(tokens=32), Other("d0", Share(), tokens=16)
    prefill.meets(other)
    prefill.registers(other, "t", 1, list(range(10)))
    for chunk, (first_block, block_ids) in enumerate([(3, [4, 5]), (0, [1, 2])]):
        prefill.push("t", block_ids, index=chunk, first_block=first_block, last=bool(chunk))
    (end,) = prefill.events
    assert "prefill pushed 4 blocks, but nothing for positions 4 to 5 of group 'kv'" in end.reason


def test_what_was_pushed_of_one_group_is_nothing_of_another():
    groups = [KVGroup("x", ["a"]), KVGroup("y", ["b"])]
    prefill, other = Prefill(groups=groups), Other("d0", Share(), groups=groups)
    prefill.meets(other)
    packed = wire.pack_block_ids(np.array([4, 5]))
    prefill.hears(other, wire.Register("t", 1, (wire.Want("x", 0, packed), wire.Want("y", 0, packed)), 60_000))
    prefill.push("t", [1, 2], layers=(range(1),))
    (end,) = prefill.events
    asked = "2 blocks of 16 tokens from position 0 of group"
    assert f"asks for {asked} 'x', {asked} 'y'; prefill pushed 2 blocks" in end.reason
    assert "nothing for positions 0 to 1 of group 'y'" in end.reason


def test_positions_that_were_never_pushed_are_named():
    prefill, other = make_one()
    prefill.registers(other, "t", 2, [4, 5, 6, 7], first_block=2)
    prefill.push("t", [1, 2, 3, 9], last=False)
    prefill.push("t", [5], index=1, first_block=5)
    prefill.settles(prefill.write_to(other))
    (end,) = prefill.events
    assert (end.outcome, end.code) == ("failed", "bad_blocks")
    assert "asks for 4 blocks of 16 tokens from position 2; prefill pushed 5 blocks" in end.reason
    assert "nothing for position 4 of group 'kv'" in end.reason


def test_a_last_block_that_prefill_has_only_in_part_hints_at_num_tokens():
    prefill, other = Prefill(), Other("d0", Share(), tokens=32)
    prefill.meets(other)
    prefill.registers(other, "t", 1, [4, 5, 6])  # 96 tokens
    prefill.push("t", [0, 1, 2, 3, 4])  # 80
    (end,) = prefill.events
    assert (end.outcome, end.code) == ("failed", "bad_blocks")
    assert "nothing for position 2 from token 80 on of group 'kv'" in end.reason
    assert "num_tokens" in end.reason


def test_a_push_that_waits_in_vain_says_which_engine_was_refused_meanwhile_and_the_log_says_it_once():
    prefill, stranger = Prefill(), Other("d7", Share(), total_heads=2)
    prefill.push("t", [1])
    prefill.meets(stranger)
    prefill.meets(stranger)
    assert len(prefill.warnings) == 1
    assert "'d7'" in prefill.warnings[0]
    prefill.advance(prefill.config.lease_s)
    (end,) = prefill.events
    assert end.outcome == "expired"
    assert "decode engine 'd7' was refused meanwhile" in end.reason
    prefill.push("u", [1])  # nobody was refused since
    prefill.advance(prefill.config.lease_s)
    assert "refused" not in prefill.events[-1].reason


def test_a_push_of_which_thousands_of_pieces_end_at_once_is_done():
    # each of them took seven frames of the stack, until the loop could not go on and the push never ended
    prefill, first = Prefill(max_write_bytes=1), Other("d0", Share(pp_size=2), layers=["a"])
    second = Other("d0", Share(pp_rank=1, pp_size=2), layers=["b"])
    prefill.meets(first, second)
    for chunk in range(400):  # of layer b alone: nothing of it is for the first stage
        prefill.push("t", [chunk % 16], index=chunk, first_block=chunk, layers=(range(1, 2),), last=False)
    prefill.push("t", [0], index=400, first_block=0, layers=(range(1),), last=True)
    prefill.registers(first, "t", 1, [5])
    prefill.registers(second, "t", 1, [6])
    prefill.answers(first, second)
    while prefill.posted:
        prefill.settles(min(prefill.posted))
    assert [end.outcome for end in prefill.events] == ["done"]
    assert prefill.core.gauges()["pushes_open"] == 0


def test_fenced_chunks_are_posted_as_they_are_computed_and_nothing_walks_through_those_that_are_not():
    prefill, other = make_one()
    prefill.registers(other, "t", 2, list(range(6)))
    for chunk in range(6):
        prefill.push("t", [chunk], index=chunk, first_block=chunk, last=chunk == 5, fenced=True)
    assert not prefill.posted
    prefill.do(prefill.core.fences_reached("t", [4], prefill.now_s))
    (span,) = prefill.spans(prefill.write_to(other))
    assert (span.first_slot, span.num_slots) == (4, 1)
    prefill.do(prefill.core.fences_reached("t", [0, 1, 5, 99], prefill.now_s))  # together: one WRITE
    spans = prefill.spans(max(prefill.posted))
    assert [each.first_slot for each in spans] == [0, 1, 5]
    leg = prefill.core._pushes["t"].legs[0, 0]
    assert not leg.pieces
    assert sorted(leg.fenced) == [2, 3]
    prefill.do(prefill.core.fences_reached("t", [3, 2], prefill.now_s))
    while prefill.posted:
        prefill.settles(min(prefill.posted))
    assert [end.outcome for end in prefill.events] == ["done"]


def test_pieces_stay_within_the_largest_write_and_the_number_of_spans():
    prefill, other = make_one(max_write_bytes=3 * BLOCK_LEN_BYTES)
    prefill.registers(other, "t", 2, list(range(8)))
    prefill.push("t", [0], index=0, last=False)  # goes at once
    for chunk in range(1, 8):
        prefill.push("t", [chunk], index=chunk, first_block=chunk, last=chunk == 7)
    sizes = [sum(piece.num_cells for piece in effect.pieces) // 2 for effect in prefill.posted.values()]
    while prefill.posted:
        prefill.settles(min(prefill.posted))
        sizes += [sum(piece.num_cells for piece in effect.pieces) // 2 for effect in list(prefill.posted.values())[-1:]]
    assert max(sizes) == 3
    assert [end.outcome for end in prefill.events] == ["done"]


def test_rule10_no_rank_is_served_again_under_what_it_asked_of_an_earlier_use_of_the_id():
    """As in test_pair, of every rank: had only one been remembered, another could be written twice."""
    prefill, left, right = make_two()
    prefill.push("t", [1], last=False)
    prefill.registers(left, "t", 7, [5, 6])
    prefill.registers(right, "t", 9, [3, 4])
    prefill.answers(left, right)
    for other in (left, right):
        prefill.settles(prefill.write_to(other))
    prefill.do(prefill.core.cancel("t", prefill.now_s))
    assert [event.outcome for event in prefill.events] == ["cancelled"]
    prefill.push("t", [1, 2])
    for other, epoch, block_ids in ((right, 9, [3, 4]), (left, 7, [5, 6])):  # its news was lost with its link
        prefill.registers(other, "t", epoch, block_ids)
        again = prefill.told(other, wire.Failed)[-1]
        assert (again.epoch, again.code, again.settled) == (epoch, FailureCode.cancelled_by_peer, True)
        assert len(prefill.told(other, wire.Failed)) == 2
    assert not prefill.posted


def test_each_rank_of_decode_renews_the_lease_of_a_push_that_waits_for_several():
    prefill, left, right = make_two(lease_s=10, liveness_timeout_s=60, heartbeat_interval_s=20, handshake_timeout_s=50)
    prefill.push("t", [1, 2])
    prefill.registers(left, "t", 7, [5, 6])
    prefill.registers(right, "t", 9, [3, 4])
    for renewing in (left, right):
        prefill.advance(9)
        prefill.hears(renewing, wire.Renew(["t"]))
    assert prefill.core.counters["leases_renewed"] == 2
    prefill.advance(9)
    assert not prefill.events
    prefill.advance(2)
    assert [event.outcome for event in prefill.events] == ["expired"]


def make_half_served():
    """Transfer t, whose blocks one rank has and the other has not asked for, with a lease of 10 s."""
    prefill, left, right = make_two(lease_s=10, liveness_timeout_s=60, heartbeat_interval_s=20)
    prefill.push("t", [1, 2])
    prefill.registers(left, "t", 7, [5, 6])
    prefill.answers(left)
    prefill.settles(prefill.write_to(left))
    return prefill, right


def test_j7_nobody_renews_the_lease_of_what_waits_for_another_engine():
    prefill, _ = make_half_served()
    stranger = Other("d1", Share(tp_rank=0, tp_size=2))
    prefill.meets(stranger)
    prefill.advance(9)
    prefill.hears(stranger, wire.Renew(["t"]))
    assert prefill.core.counters["leases_renewed"] == 0
    prefill.advance(2)
    assert [event.outcome for event in prefill.events] == ["expired"]


def test_rule11_what_waits_for_its_push_ends_with_news_for_every_rank():
    prefill, left, right = make_two()
    prefill.registers(left, "t", 7, [5, 6])
    prefill.registers(right, "t", 9, [3, 4])
    prefill.do(prefill.core.cancel("t", prefill.now_s))
    for other, epoch in ((left, 7), (right, 9)):
        (failed,) = prefill.told(other, wire.Failed)
        assert (failed.epoch, failed.code, failed.settled) == (epoch, FailureCode.cancelled_by_peer, True)


def test_rule14_a_push_that_waits_for_its_caller_ends_with_the_life_of_decode_that_it_was_for():
    """It would bring the old incarnation back, and with it end all that the new one has asked for."""
    prefill, before, after = Prefill(), Other("d0", Share()), Other("d0", Share())
    prefill.meets(before)
    prefill.push("t", [1], last=False)
    prefill.registers(before, "t", 7, [5, 6])
    prefill.answers(before)
    prefill.settles(next(iter(prefill.posted)))
    assert not prefill.events
    prefill.meets(after)
    assert [(event.outcome, event.code) for event in prefill.events] == [("failed", FailureCode.peer_restarted)]
    prefill.push("t", [2], index=1, first_block=1)
    current = [seen.incarnation for seen in prefill.registry.snapshot() if seen.state != "evicted"]
    assert current == [after.identity.incarnation] and not prefill.posted


def test_a_rank_that_still_queues_renews_the_lease_although_another_has_registered():
    prefill, right = make_half_served()
    prefill.advance(9)
    prefill.hears(right, wire.Renew(["t"]))
    prefill.advance(9)
    assert prefill.core.counters["leases_renewed"] == 1 and not prefill.events


def test_a_write_names_no_layer_that_its_rank_does_not_hold():
    prefill, first = Prefill(), Other("d0", Share(pp_size=2), layers=["a"])
    second = Other("d0", Share(pp_rank=1, pp_size=2), layers=["b"])
    prefill.meets(first, second)
    for other in (first, second):
        prefill.registers(other, "t", 1, [5])
    prefill.push("t", [3], layers=(range(1), range(1, 2)))
    prefill.answers(first, second)
    for other, layer in ((first, 0), (second, 1)):
        (span,) = prefill.spans(prefill.write_to(other))
        assert (span.first_layer, span.num_layers) == (layer, 1)
        assert len(prefill.posted[prefill.write_to(other)].pieces) == 1
