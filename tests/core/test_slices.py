"""Rule 7 for huge transfers: they go slice by slice, and nobody waits for their end."""

import numpy as np
import pytest
from core_worlds import SOON_S, connect, make_config, make_world, run_to_the_end
from rank_cores import ALONE, Other, Prefill

from kvpush import wire
from kvpush.layout import KVGroup
from kvpush.pushes import Part

BLOCK_BYTES = 128  # of the world's engines, over all layers


def make_sliced(num_decodes=1, num_blocks=64, **overrides):
    world = make_world(**({"max_write_bytes": 4 * BLOCK_BYTES} | overrides))
    prefill = world.prefill("p0", num_blocks=2 * num_blocks)
    decodes = [world.decode(f"d{i}", num_blocks=num_blocks) for i in range(num_decodes)]
    connect(world, prefill, *decodes)
    return world, prefill, *decodes


def sizes(world):
    return [write.num_bytes // BLOCK_BYTES for write in world.writes]


@pytest.mark.parametrize("num_blocks", [1, 3, 4, 5, 8, 37])
@pytest.mark.parametrize("first_block", [0, 3])
def test_rule07_slices_add_up_to_the_transfer(num_blocks, first_block):
    world, prefill, decode = make_sliced()
    receive = decode.expect("t", list(range(num_blocks)), prefill, first_block=first_block)
    push = prefill.push("t", list(range(first_block + num_blocks))[::-1])
    posted = prefill.transport.counts.writes_posted
    run_to_the_end(world)  # the oracle has compared every byte
    assert push.outcome == receive.outcome == "done"
    assert push.finished.num_bytes == num_blocks * BLOCK_BYTES
    assert prefill.transport.counts.writes_posted - posted == -(-num_blocks // 4)


def test_rule07_chunks_and_fences_are_sliced_each_for_itself():
    world, prefill, decode = make_sliced()
    receive = decode.expect("t", list(range(20)), prefill)
    push = prefill.push("t", list(range(9)), last=False, fenced=True)
    prefill.push("t", list(range(9, 20)), first_block=9)
    world.advance(1)
    assert receive.landed == set(range(9, 20))
    prefill.compute(push, 0, range(9))
    run_to_the_end(world)
    assert push.outcome == receive.outcome == "done"


@pytest.mark.parametrize("max_write_bytes", [1, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES - 1])
def test_rule07_a_slice_is_one_block_at_least_and_two_are_in_flight(max_write_bytes):
    world, prefill, decode = make_sliced(max_write_bytes=max_write_bytes)
    world.hold_writes = True
    receive = decode.expect("t", [1, 2, 3, 4, 5], prefill)
    prefill.push("t", [1, 2, 3, 4, 5])
    world.advance(SOON_S)
    assert 2 <= len(sizes(world)) <= 3
    assert set(sizes(world)) == {1}
    world.hold_writes = False
    world.resume_writes()
    run_to_the_end(world)
    assert receive.outcome == "done"


def test_rule07_two_slices_of_a_huge_push_are_in_flight_and_the_next_follows_each():
    world, prefill, decode = make_sliced()
    world.hold_writes = True
    decode.expect("huge", list(range(40)), prefill)
    push = prefill.push("huge", list(range(40)))
    world.advance(SOON_S)
    for settled in range(10):
        assert sizes(world) == [4] * min(2, 10 - settled)
        assert not push.is_over
        world.finish(world.writes[0])
        world.advance(SOON_S)
    assert push.outcome == "done"
    world.hold_writes = False
    run_to_the_end(world)


def test_rule07_small_pushes_to_another_engine_pass_a_huge_one():
    """The whole room of the pusher is less than the huge push, and still nobody waits for it."""
    world, prefill, huge, small = make_sliced(num_decodes=2, num_blocks=1100, max_in_flight_bytes=16 * BLOCK_BYTES)
    huge.expect("huge", list(range(1024)), prefill)
    push = prefill.push("huge", list(range(1024)))
    slowest_s = 0.0
    for i in range(100):
        small.expect(f"small {i}", [i], prefill)
        one = prefill.push(f"small {i}", [1100 + i])
        slowest_s = max(slowest_s, world.run_until(lambda one=one: one.is_over, 1))
        assert one.outcome == "done"
        assert not push.is_over or i > 50
    assert slowest_s < 0.005
    run_to_the_end(world)
    assert push.outcome == "done"


def test_rule07_small_pushes_are_posted_all_at_once():
    world, prefill, decode = make_sliced(max_write_bytes=16 * BLOCK_BYTES)
    world.hold_writes = True
    for i in range(32):
        decode.expect(f"t{i}", [i], prefill)
        prefill.push(f"t{i}", [i])
    world.advance(SOON_S)
    assert sizes(world) == [1] * 32
    world.hold_writes = False
    world.resume_writes()
    run_to_the_end(world)


def test_rule12_a_huge_push_that_is_cancelled_posts_no_further_slice():
    world, prefill, decode = make_sliced()
    world.hold_writes = True
    receive = decode.expect("huge", list(range(40)), prefill)
    push = prefill.push("huge", list(range(40)))
    world.advance(SOON_S)
    decode.cancel("huge")
    world.advance(SOON_S)
    assert sizes(world) == [4, 4]
    for write in world.writes:
        assert not receive.is_free
        world.finish(write)
        world.advance(SOON_S)
    assert receive.released.proven
    assert push.outcome == "cancelled"
    assert receive.landed == set(range(8))
    world.hold_writes = False
    run_to_the_end(world)


def test_rule10_a_slice_that_fails_ends_the_push_and_the_others_settle():
    world, prefill, decode = make_sliced()
    world.hold_writes = True
    receive = decode.expect("huge", list(range(40)), prefill)
    push = prefill.push("huge", list(range(40)))
    world.advance(SOON_S)
    world.fail_write(world.writes[1], disconnected=True)
    world.settle(1)
    assert (push.outcome, receive.outcome) == ("failed", "failed")
    world.hold_writes = False
    again = decode.expect("again", list(range(40)), prefill)
    prefill.push("again", list(range(40)))
    run_to_the_end(world)
    assert again.outcome == "done"


def test_rule07_a_stalled_slice_takes_no_room_from_others():
    world = make_world()
    prefill = world.prefill("p0", config=make_config(max_write_bytes=BLOCK_BYTES, hold_timeout_s=100))
    decode = world.decode("d0")
    connect(world, prefill, decode)
    world.stalling.add("d0")
    decode.expect("stuck", [1, 2, 3, 4], prefill)
    stuck = prefill.push("stuck", [1, 2, 3, 4])
    world.run_until(lambda: stuck.is_over, 5)
    assert len(world.writes) == 2
    assert prefill.core.gauges()["bytes_in_flight"] == 0
    world.heal()
    run_to_the_end(world)


# --- blocks of several slots: prefill's are twice as long as decode's -------------------------------------------------


def make_halved(**settings):
    prefill, other = Prefill(tokens=32, **settings), Other("d0", ALONE)
    prefill.meets(other)
    return prefill, other


def test_d9_a_later_chunk_begins_at_the_first_slot_of_its_block():
    prefill, other = make_halved()
    prefill.registers(other, "t", 1, [4, 5, 6, 7], num_tokens=64)
    prefill.push("t", [1], last=False)
    prefill.push("t", [2], index=1, first_block=1)
    prefill.answers(other)
    spans = [span for write_id in prefill.posted for span in prefill.spans(write_id)]
    assert [(span.first_slot, span.num_slots) for span in spans] == [(0, 2), (2, 2)]


def test_rule07_a_block_of_two_slots_that_just_fits_is_one_slice():
    length_bytes = Prefill(tokens=32).geometry.groups[0].block_len_bytes
    for max_write_bytes, num_slots in ((length_bytes, [2]), (length_bytes - 1, [1, 1])):
        prefill, other = make_halved(max_write_bytes=max_write_bytes)
        prefill.registers(other, "t", 1, [4, 5], num_tokens=32)
        prefill.push("t", [1])
        prefill.answers(other)
        assert [span.num_slots for write_id in prefill.posted for span in prefill.spans(write_id)] == num_slots


def test_a_chunk_that_has_nothing_for_a_rank_leaves_it_nothing_to_wait_for():
    prefill, other = make_halved()
    prefill.registers(other, "t", 1, [4, 5], num_tokens=32)
    prefill.push("t", [2], first_block=1, last=False, fenced=True)
    assert not prefill.core._pushes["t"].legs[0, 0].has_pieces


def test_what_is_missing_of_one_group_is_found_behind_the_parts_of_another():
    groups = [KVGroup("full", ["a"]), KVGroup("window", ["b"])]
    prefill, other = Prefill(groups=groups), Other("d0", ALONE, groups=groups)
    prefill.meets(other)
    prefill.hears(other, wire.Register("t", 1, (wire.Want("window", 0, wire.pack_block_ids(np.arange(3))),), 60_000))
    parts = tuple(Part(group, (range(1),), 0, np.arange(2)) for group in (0, 1))
    prefill.do(prefill.core.push("t", parts, last=True, fenced=False, index=0, now_s=prefill.now_s))
    (end,) = prefill.events
    assert end.code == "bad_blocks" and "position 2" in end.reason
