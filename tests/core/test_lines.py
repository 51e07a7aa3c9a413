"""Lines and the room in flight, by themselves."""

import numpy as np
import pytest
from core_worlds import make_config

from kvpush import wire
from kvpush.lines import Lines
from kvpush.pushes import Link, Push, Registration
from kvpush.writes import Writes


def make_push(name="t"):
    return Push(name, opened_s=0.0, lease_until_s=1.0)


def in_line(lines, generation, *names):
    for name in names:
        lines.join(make_push(name), generation)


def serve(lines, can_post=lambda push, generation: True):
    """What is served, in order; everybody has one piece."""
    served = []

    def post_next(push, generation):
        if not can_post(push, generation):
            return False
        served.append(push.transfer_id)
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
    assert serve(lines, lambda push, generation: generation == 2) == ["b1", "b2"]
    assert serve(lines) == ["a1", "a2"]


def test_the_turn_goes_on_where_it_stopped():
    lines = Lines(4)
    for generation in (1, 2, 3):
        in_line(lines, generation, *[f"{generation}.{i}" for i in range(3)])
    served = []
    for _ in range(9):
        room = [1]
        served += serve(lines, lambda push, generation, room=room: room and room.pop())
    assert [name[0] for name in served] == list("123") * 3


def test_a_push_stands_in_one_line_once():
    lines = Lines(4)
    push = make_push()
    lines.join(push, 1)
    lines.join(push, 1)
    assert lines.gauges()["pushes_in_lines"] == 1
    lines.leave(1)
    assert not push.is_queued


def test_a_line_may_be_served_from_within():
    """Posting may end an engine, and what waited for it joins another line at once."""
    lines = Lines(4)
    in_line(lines, 1, "a1", "a2")
    served = []

    def post_next(push, generation):
        served.append(push.transfer_id)
        lines.leave(generation)
        if generation == 1:
            for waiting in lines.disband(1):
                lines.join(waiting, 2)
            lines.serve(post_next)
        return True

    lines.serve(post_next)
    assert served == ["a1", "a2"]


def test_behind_a_handshake_there_is_room_for_so_many_and_they_leave_together():
    lines = Lines(2)
    pushes = [make_push(name) for name in "ab"]
    for push in pushes:
        assert lines.has_room_behind(1)
        push.generation = 1
        lines.defer(push, 1)
    assert not lines.has_room_behind(1)
    assert lines.has_room_behind(2)
    assert lines.is_deferred(pushes[0], 1)
    lines.undefer(pushes[0])
    lines.undefer(pushes[0])
    assert lines.deferred(1) == lines.take_deferred(1) == [pushes[1]]
    assert lines.take_deferred(1) == []
    assert lines.gauges() == {"pushes_behind_handshakes": 0, "pushes_in_lines": 0}


def test_whoever_waits_for_an_engine_that_is_over_waits_no_more():
    lines = Lines(2)
    deferred, queued = make_push("deferred"), make_push("queued")
    deferred.generation = 1
    lines.defer(deferred, 1)
    lines.join(queued, 1)
    assert lines.disband(1) == [deferred, queued]
    assert not queued.is_queued
    assert serve(lines) == []


# --- room in flight --------------------------------------------------------------------------------------------------


def make_matched(epoch=1, engine_id="d0"):
    hello = wire.Hello(engine_id, "life 1", (0, 0), "p0", {}, f"{engine_id}/0.0#1")
    push = make_push(f"t{epoch}")
    push.registration = Registration(Link(b"1", hello), push.transfer_id, epoch, 0, np.arange(8), 1.0)
    return push


def make_writes(**settings):
    return Writes(make_config(**({"max_write_bytes": 40, "max_in_flight_bytes": 100} | settings)), 10)


def test_one_engine_has_two_of_the_largest_writes_in_flight():
    writes = make_writes()
    assert writes.max_blocks == 4
    push = make_matched()
    first = writes.post(push, 1, 4)
    assert writes.has_room(1, 4)
    writes.post(push, 1, 4)
    assert not writes.has_room(1, 1)
    writes.prove(first.write_id)
    assert writes.has_room(1, 4)


def test_everybody_together_stays_within_the_limit_but_each_may_have_one():
    writes = make_writes()
    for generation in (1, 2):
        writes.post(make_matched(generation), generation, 4)
    assert writes.has_room(1, 2)
    assert not writes.has_room(1, 3)
    assert writes.has_room(3, 4)


@pytest.mark.parametrize("end", ["prove", "doubt", "stall"])
def test_what_has_ended_or_stalled_takes_no_room(end):
    writes = make_writes()
    push = make_matched()
    write = writes.post(push, 1, 4)
    getattr(writes, end)(write.write_id)
    assert writes.gauges()["bytes_in_flight"] == 0
    assert len(writes) == (end == "stall")
    assert push.in_flight == (set() if end == "prove" else {write.write_id})
    assert not writes._bytes_to


def test_a_registration_is_unproven_until_the_last_of_its_writes_is():
    writes = make_writes()
    push = make_matched()
    hello = push.registration.link.hello
    one, two = writes.post(push, 1, 1), writes.post(push, 1, 1)
    writes.prove(one.write_id)
    assert writes.unproven(hello, 1) is push.registration
    assert writes.unproven(hello, 2) is None
    assert writes.tracked_of(push) == [two.write_id]
    writes.doubt(two.write_id)
    assert writes.tracked_of(push) == []
    assert writes.unproven(hello, 1) is push.registration
    assert writes.prove_all() == [push.registration]
    assert writes.unproven(hello, 1) is None
    assert not any(writes.gauges().values())


def test_rule16_doubtful_writes_are_bounded():
    writes = make_writes(max_tombstones=3)
    for epoch in range(10):
        writes.doubt(writes.post(make_matched(epoch), 1, 1).write_id)
    assert writes.gauges()["writes_doubtful"] == len(writes._unproven) == 3
