"""Timers: at most one per key, earliest first, and bounded however often they are moved."""

import heapq

from hypothesis import given
from hypothesis import strategies as st

from kvpush.timers import Timers


def due_at(timers, now_s):
    return list(timers.pop_due(now_s))


def test_nothing_set_nothing_due():
    timers = Timers()
    assert timers.next_due_s() is None
    assert due_at(timers, 1e9) == []
    assert len(timers) == 0


def test_due_at_its_time_and_not_before():
    timers = Timers()
    timers.set("a", 10.0)
    assert due_at(timers, 9.999) == []
    assert due_at(timers, 10.0) == ["a"]
    assert due_at(timers, 10.0) == []


def test_earliest_first_and_first_set_first_on_a_tie():
    timers = Timers()
    for key, due_s in [("c", 3.0), ("a", 1.0), ("b2", 2.0), ("b1", 2.0)]:
        timers.set(key, due_s)
    assert due_at(timers, 5.0) == ["a", "b2", "b1", "c"]


def test_moving_a_timer_either_way_replaces_it():
    timers = Timers()
    timers.set("a", 10.0)
    timers.set("a", 20.0)
    assert timers.next_due_s() == 20.0
    assert due_at(timers, 10.0) == []
    timers.set("a", 5.0)
    assert due_at(timers, 20.0) == ["a"]
    assert due_at(timers, 20.0) == []


def test_a_moved_timer_does_not_fire_at_its_old_time():
    """Without asking for the next one in between, which would clean up."""
    timers = Timers()
    timers.set("a", 10.0)
    timers.set("a", 20.0)
    assert due_at(timers, 15.0) == []
    assert due_at(timers, 20.0) == ["a"]


def test_a_timer_that_was_cancelled_and_set_again_does_not_fire_at_its_old_time():
    timers = Timers()
    timers.set("a", 10.0)
    timers.cancel("a")
    timers.set("a", 20.0)
    assert due_at(timers, 15.0) == []
    assert due_at(timers, 20.0) == ["a"]


def test_setting_the_same_time_again_fires_once():
    timers = Timers()
    timers.set("a", 10.0)
    timers.set("a", 10.0)
    assert due_at(timers, 10.0) == ["a"]


def test_cancelled_is_not_due_and_cancelling_twice_is_fine():
    timers = Timers()
    timers.set("a", 10.0)
    timers.set("b", 11.0)
    timers.cancel("a")
    timers.cancel("a")
    timers.cancel("never set")
    assert "a" not in timers
    assert timers.next_due_s() == 11.0
    assert due_at(timers, 20.0) == ["b"]


def test_is_set_before():
    timers = Timers()
    assert not timers.is_set_before("a", 1e9)
    timers.set("a", 10.0)
    assert timers.is_set_before("a", 10.0)
    assert timers.is_set_before("a", 11.0)
    assert not timers.is_set_before("a", 9.0)


def test_keys_set_while_popping_count_too():
    timers = Timers()
    timers.set("a", 1.0)
    seen = []
    for key in timers.pop_due(5.0):
        seen.append(key)
        if key == "a":
            timers.set("b", 2.0)
            timers.set("later", 6.0)
    assert seen == ["a", "b"]
    assert timers.next_due_s() == 6.0


def test_a_popped_key_can_be_set_again_while_popping_the_rest():
    timers = Timers()
    timers.set("a", 1.0)
    timers.set("b", 2.0)
    popped = timers.pop_due(5.0)
    assert next(popped) == "a"
    timers.set("a", 9.0)
    assert list(popped) == ["b"]
    assert due_at(timers, 9.0) == ["a"]


def test_keys_need_not_be_comparable():
    timers = Timers()
    timers.set(("lease", 1), 1.0)
    timers.set(None, 1.0)
    assert due_at(timers, 1.0) == [("lease", 1), None]


def test_g1_moving_one_timer_for_ever_does_not_grow_the_heap():
    timers = Timers()
    for step in range(10_000):
        timers.set("a", float(step))
    assert len(timers._heap) <= 65
    assert due_at(timers, 1e9) == ["a"]


def test_g1_when_dead_entries_are_cleared_away_the_others_are_still_in_order():
    timers = Timers()
    for step in range(4):
        for key in range(100):
            timers.set(key, float(1000 * step - key))  # the youngest first
            assert len(timers._heap) <= 2 * 100
    assert due_at(timers, 3000.0) == list(reversed(range(100)))


def test_timers_that_are_all_alive_are_never_put_in_order_anew(monkeypatch):
    """Thousands of receives have one each: it would be done for every one of them."""
    monkeypatch.setattr(heapq, "heapify", None)
    timers = Timers()
    for key in range(1000):
        timers.set(key, float(key))
    assert len(due_at(timers, 1000.0)) == 1000


def test_g1_keys_that_come_and_go_do_not_grow_the_heap():
    timers = Timers()
    for step in range(10_000):
        timers.set(step, 1e6)
        timers.cancel(step)
    assert len(timers) == 0
    assert len(timers._heap) <= 65


KEYS = st.integers(0, 2)  # few keys and few times, so that timers are moved often
TIMES = st.integers(0, 6).map(float)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, TIMES),
        st.tuples(st.just("cancel"), KEYS, TIMES),
        st.tuples(st.just("pop"), KEYS, TIMES),
        st.tuples(st.just("next"), KEYS, TIMES),
    ),
    min_size=10,
    max_size=100,
)


@given(STEPS)
def test_timers_agree_with_a_dictionary(steps):
    timers, model = Timers(), {}
    for step, key, time_s in steps:
        if step == "set":
            timers.set(key, time_s)
            model[key] = time_s
        elif step == "cancel":
            timers.cancel(key)
            model.pop(key, None)
        elif step == "next":  # not after every step: asking cleans up
            assert timers.next_due_s() == min(model.values(), default=None)
        else:
            popped = due_at(timers, time_s)
            expected = {key for key, due_s in model.items() if due_s <= time_s}
            assert len(popped) == len(set(popped))
            assert set(popped) == expected
            assert [model[key] for key in popped] == sorted(model[key] for key in popped)
            for key in popped:
                del model[key]
        assert len(timers) == len(model)
        assert all((key in timers) == (key in model) for key in range(3))
        assert len(timers._heap) <= max(65, 2 * len(model) + 1)
