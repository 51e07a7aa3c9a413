"""``Writing``, the hint that a WRITE is under way: forgotten with its receive at the latest, and needed by nobody."""

import numpy as np
import pytest
from core_worlds import SETTLED_S, SOON_S, is_a, lose, make_connected, make_pair, run_to_the_end

from kvpush import wire
from kvpush.prefill_effects import PostWrite, Send
from kvpush.pushes import Part


def make_writing(**overrides):
    """A WRITE of two positions has been posted, and decode knows."""
    world, prefill, decode = make_connected(**overrides)
    assert not decode.core.is_write_under_way
    world.hold_writes = True
    receive, push = decode.expect("t", [7, 8], prefill), prefill.push("t", [3, 4])
    world.advance(SOON_S)
    assert decode.core.is_write_under_way
    return world, prefill, decode, receive, push


def go_on(world):
    world.hold_writes = False
    world.resume_writes()


def is_forgotten(decode):
    return decode.core._under_way == set() and not decode.core.is_write_under_way


def test_a_write_is_under_way_until_all_of_it_has_arrived():
    world, prefill, decode, receive, _ = make_writing()
    go_on(world)
    world.settle(SOON_S)
    assert receive.outcome == "done"
    assert is_forgotten(decode)
    run_to_the_end(world)


def test_slices_are_counted_each_for_itself():
    world, prefill, decode, receive, _ = make_writing(max_write_bytes=1)
    one, two = world.writes
    world.finish(one)
    world.advance(SOON_S)
    assert decode.core.is_write_under_way
    world.finish(two)
    world.advance(SOON_S)
    assert receive.outcome == "done"
    assert is_forgotten(decode)
    world.hold_writes = False
    run_to_the_end(world)


def test_a_hint_that_its_write_has_overtaken_evens_out():
    world, prefill, decode = make_connected()
    world.network.hold = is_a(wire.Writing)
    receive = decode.expect("t", [7, 8], prefill)
    prefill.push("t", [3], last=False)
    world.advance(SOON_S)
    assert receive.landed == {0}
    assert not decode.core.is_write_under_way
    world.network.release()
    world.advance(SOON_S)
    assert is_forgotten(decode)
    prefill.push("t", [4], first_block=1)
    world.network.hold = is_a(wire.Writing)
    world.settle(SOON_S)
    assert receive.outcome == "done"
    world.network.release()  # of a receive that is over
    world.advance(SOON_S)
    assert is_forgotten(decode)
    run_to_the_end(world)


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_cancel_ends_it_no_later_than_the_hold(who):
    world, prefill, decode, receive, _ = make_writing()
    (prefill if who == "prefill" else decode).cancel("t")
    world.advance(SOON_S)
    assert receive.outcome == "cancelled"
    assert decode.core.is_write_under_way  # it is, and its end frees the blocks
    go_on(world)
    world.settle(SOON_S)
    assert is_forgotten(decode)
    run_to_the_end(world)


def test_the_loss_of_the_link_ends_it():
    """The WRITE goes on, but decode looks at the leisurely pace of one that is not told."""
    world, prefill, decode, receive, _ = make_writing()
    world.network.cut("p0", "d0")
    world.advance(SOON_S)
    assert is_forgotten(decode)
    go_on(world)
    run_to_the_end(world)
    assert receive.is_over
    assert is_forgotten(decode)


def test_a_stalled_write_is_forgotten_with_its_hold():
    world, prefill, decode, receive, _ = make_writing()
    world.settle(SETTLED_S)
    assert receive.outcome == "failed"
    assert is_forgotten(decode)
    go_on(world)
    run_to_the_end(world)


def test_hints_of_unknown_receives_change_nothing():
    world, prefill, decode = make_connected()
    (link,) = decode.core._links
    assert decode.core.message(link, wire.Writing(999), world.clock()) == []
    assert is_forgotten(decode)
    run_to_the_end(world)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_depends_on_a_hint(seed):
    world, prefill, decode = make_pair(seed, max_write_bytes=256)
    world.network.tamper = lose(wire.Writing)
    for i in range(8):
        decode.expect(f"t{i}", [2 * i, 2 * i + 1], prefill)
        prefill.push(f"t{i}", [2 * i], last=False)
        world.advance(world.random.choice([0.0, 0.0005, SOON_S]))
        prefill.push(f"t{i}", [2 * i + 1], first_block=1)
    run_to_the_end(world)
    assert {receive.outcome for receive in decode.receives} == {"done"}
    assert {push.outcome for push in prefill.pushes} == {"done"}
    assert is_forgotten(decode)


def test_a_decode_engine_that_sleeps_is_told_before_the_write_is_posted_and_one_that_looks_already_is_told_after():
    world, prefill, decode = make_connected()
    world.advance(1)
    orders = []
    for transfer_id, block in (("asleep", 1), ("awake", 2)):
        receive = decode.expect(transfer_id, [block], prefill)
        world.advance(0.005)
        part = Part(0, (range(prefill.core._groups[0].num_layers),), 0, np.array([block]))
        effects = prefill.core.push(transfer_id, (part,), last=True, fenced=False, index=0, now_s=prefill.now_s())
        orders.append([type(each).__name__ for each in effects if isinstance(each, Send | PostWrite)])
        assert receive.epoch
    assert orders == [["Send", "PostWrite"], ["PostWrite", "Send"]]
