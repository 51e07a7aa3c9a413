"""Lines and the room in flight, by themselves."""

import pytest
from core_worlds import make_config, make_leg

from kvpush.lines import Lines
from kvpush.writes import Writes


def in_line(lines, generation, *names):
    for name in names:
        lines.join(make_leg(name), generation)


def serve(lines, can_post=lambda leg, generation: True):
    """What is served, in order; everybody has one piece."""
    served = []

    def post_next(leg, generation):
        if not can_post(leg, generation):
            return False
        served.append(leg.transfer_id)
        lines.leave(generation)
        return True

    lines.serve(post_next)
    return served


def test_lines_are_served_in_turn_and_each_in_its_order():
    lines = Lines(4)
    in_line(lines, 1, "a1", "a2", "a3")
    in_line(lines, 2, "b1")
    in_line(lines, 3, "c1", "c2")
    assert serve(lines) == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert lines.gauges()["pushes_in_lines"] == 0


def test_a_line_that_cannot_go_on_holds_up_nobody():
    lines = Lines(4)
    in_line(lines, 1, "a1", "a2")
    in_line(lines, 2, "b1", "b2")
    assert serve(lines, lambda leg, generation: generation == 2) == ["b1", "b2"]
    assert serve(lines) == ["a1", "a2"]


def test_the_turn_goes_on_where_it_stopped():
    lines = Lines(4)
    for generation in (1, 2, 3):
        in_line(lines, generation, *[f"{generation}.{i}" for i in range(3)])
    served = []
    for _ in range(9):
        room = [1]
        served += serve(lines, lambda leg, generation, room=room: room and room.pop())
    assert [name[0] for name in served] == list("123") * 3


def test_a_push_stands_in_one_line_once():
    lines = Lines(4)
    leg = make_leg()
    lines.join(leg, 1)
    lines.join(leg, 1)
    assert lines.gauges()["pushes_in_lines"] == 1
    lines.leave(1)
    assert not leg.is_queued


def test_a_line_may_be_served_from_within():
    """Posting may end an engine, and what waited for it joins another line at once."""
    lines = Lines(4)
    in_line(lines, 1, "a1", "a2")
    served = []

    def post_next(leg, generation):
        served.append(leg.transfer_id)
        lines.leave(generation)
        if generation == 1:
            for waiting in lines.disband(1):
                lines.join(waiting, 2)
            lines.serve(post_next)
        return True

    lines.serve(post_next)
    assert served == ["a1", "a2"]


def test_turns_are_given_by_one_call_however_often_it_is_called_from_within():
    """A push of thousands of pieces that end at once must not be a stack as deep."""
    lines, depths, depth = Lines(4), [], 0
    in_line(lines, 1, *(f"a{number}" for number in range(5)))

    def post_next(leg, generation):
        nonlocal depth
        depth += 1
        depths.append(depth)
        lines.leave(generation)
        lines.serve(post_next)
        depth -= 1
        return True

    lines.serve(post_next)
    lines.serve(post_next)
    assert depths == [1] * 5


def test_behind_a_handshake_there_is_room_for_so_many_and_they_leave_together():
    lines = Lines(2)
    legs = [make_leg(name) for name in "ab"]
    for leg in legs:
        assert lines.has_room_behind(1)
        leg.generation = 1
        lines.defer(leg, 1)
    assert not lines.has_room_behind(1)
    assert lines.has_room_behind(2)
    assert lines.is_deferred(legs[0], 1)
    lines.undefer(legs[0])
    lines.undefer(legs[0])
    assert lines.deferred(1) == lines.take_deferred(1) == [legs[1]]
    assert lines.take_deferred(1) == []
    assert lines.gauges() == {"pushes_behind_handshakes": 0, "pushes_in_lines": 0}


def test_whoever_waits_for_an_engine_that_is_over_waits_no_more():
    lines = Lines(2)
    deferred, queued = make_leg("deferred"), make_leg("queued")
    deferred.generation = 1
    lines.defer(deferred, 1)
    lines.join(queued, 1)
    assert lines.disband(1) == [deferred, queued]
    assert not queued.is_queued
    assert serve(lines) == []


# --- room in flight --------------------------------------------------------------------------------------------------


BLOCK_BYTES = 10


def make_matched(epoch=1):
    return make_leg(f"t{epoch}", epoch)


def post(writes, leg, generation, num_blocks):
    return writes.post(leg, generation, num_cells=2 * num_blocks, num_bytes=BLOCK_BYTES * num_blocks)


def has_room(writes, generation, num_blocks):
    return writes.has_room(generation, BLOCK_BYTES * num_blocks)


def make_writes(**settings):
    return Writes(make_config(**({"max_write_bytes": 40, "max_in_flight_bytes": 100} | settings)), BLOCK_BYTES)


def test_one_engine_has_two_of_the_largest_writes_in_flight():
    writes = make_writes()
    leg = make_matched()
    first = post(writes, leg, 1, 4)
    assert has_room(writes, 1, 4)
    post(writes, leg, 1, 4)
    assert not has_room(writes, 1, 1)
    writes.prove(first.write_id)
    assert has_room(writes, 1, 4)


def test_everybody_together_stays_within_the_limit_but_each_may_have_one():
    writes = make_writes()
    for generation in (1, 2):
        post(writes, make_matched(generation), generation, 4)
    assert has_room(writes, 1, 2)
    assert not has_room(writes, 1, 3)
    assert has_room(writes, 3, 4)


@pytest.mark.parametrize("end", ["prove", "doubt", "stall"])
def test_what_has_ended_or_stalled_takes_no_room(end):
    writes = make_writes()
    leg = make_matched()
    write = post(writes, leg, 1, 4)
    getattr(writes, end)(write.write_id)
    assert writes.gauges()["bytes_in_flight"] == 0
    assert len(writes) == (end == "stall")
    assert leg.in_flight == (set() if end == "prove" else {write.write_id})
    assert not writes._bytes_to


@pytest.mark.parametrize("end", ["prove", "doubt"])
def test_a_write_that_stalls_and_ends_is_counted_out_once(end):
    writes = make_writes()
    write = post(writes, make_matched(), 1, 4)
    writes.stall(write.write_id)
    getattr(writes, end)(write.write_id)
    assert writes.gauges()["bytes_in_flight"] == 0
    assert has_room(writes, 1, 100), "nothing is in flight to it"


def test_a_registration_is_unproven_until_the_last_of_its_writes_is():
    writes = make_writes()
    leg = make_matched()
    link = leg.registration.link
    one, two = post(writes, leg, 1, 1), post(writes, leg, 1, 1)
    writes.prove(one.write_id)
    assert writes.unproven(link, leg.transfer_id, 1) is leg.registration
    assert writes.unproven(link, leg.transfer_id, 2) is None
    assert writes.tracked_of(leg.push) == [two.write_id]
    writes.doubt(two.write_id)
    assert writes.tracked_of(leg.push) == []
    assert writes.unproven(link, leg.transfer_id, 1) is leg.registration
    assert writes.prove_all() == [leg.registration]
    assert writes.unproven(link, leg.transfer_id, 1) is None
    assert not any(writes.gauges().values())


def test_rule16_doubtful_writes_are_bounded():
    writes = make_writes(max_tombstones=3)
    for epoch in range(10):
        writes.doubt(post(writes, make_matched(epoch), 1, 1).write_id)
    assert writes.gauges()["writes_doubtful"] == len(writes._unproven) == 3
    link = make_matched().registration.link
    assert [epoch for epoch in range(10) if writes.unproven(link, f"t{epoch}", epoch)] == [7, 8, 9]
