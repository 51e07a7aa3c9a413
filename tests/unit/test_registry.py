"""The registry by named scenarios, under a fake clock. Test names carry the rule or the scenario that they hold."""

import inspect
import random
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpush.registry
from kvpush.config import Config
from kvpush.errors import QueueFull
from kvpush.events import StaleReason
from kvpush.lifecycle import State
from kvpush.registry import LOCK_BATCH, TRACE_LENGTH, Evicted, HandshakeTimedOut, Need, Registry, RetryDue, WentStale
from kvpush.testing.clock import FakeClock

# Heartbeats come too rarely to matter unless a test says otherwise, so that ageing shows alone.
QUIET = {
    "handshake_timeout_s": 1.0,
    "handshake_backoff_min_s": 1.0,
    "handshake_backoff_max_s": 8.0,
    "engine_ttl_s": 10.0,
    "evict_grace_s": 3.0,
    "liveness_timeout_s": 1000.0,
    "tombstone_ttl_s": 50.0,
}
TTL_S, GRACE_S = QUIET["engine_ttl_s"], QUIET["evict_grace_s"]
HEARING = QUIET | {"liveness_timeout_s": 5.0}
MOMENT_S = 1 / 1024  # a power of two, so that sums of times are exact


class Desk:
    """A registry with its clock, and the short cuts that scenarios are told in."""

    def __init__(self, **settings):
        self.config = Config(**(QUIET | settings))
        self.clock = FakeClock()
        self.registry = Registry(self.config, self.clock, random.Random(7))
        self.resources = {}

    def __getattr__(self, name):
        return getattr(self.registry, name)

    def connect(self, engine_id="d0", incarnation="one", address="host:1", rank=(0, 0)):
        generation, _ = self.admit(engine_id, incarnation, address, rank)
        self.shake(generation)
        return generation

    def shake(self, generation):
        attempt = self.begin_handshake(generation)
        assert attempt is not None
        self.resources[generation] = f"agent of generation {generation}"
        assert self.handshake_succeeded(generation, attempt, self.resources[generation])

    def fail(self, generation, error="refused"):
        attempt = self.begin_handshake(generation)
        assert attempt is not None
        assert self.handshake_failed(generation, attempt, error)

    def pass_time(self, duration_s):
        """Move the clock and sweep once, as the loop does at its tick."""
        self.clock.advance(duration_s)
        return self.sweep()

    def of(self, generation):
        return next(shot for shot in self.snapshot() if shot.generation == generation)

    def triggers(self):
        return [str(change.trigger) for change in self.transitions()]


@pytest.fixture
def desk():
    return Desk()


def stale(engine_id, generation, reason, detail, *, link_is_up=True):
    return WentStale(engine_id, generation, reason, detail, link_is_up)


# --- rule 1: every change is a row ------------------------------------------------------------------------------------


def test_rule1_a_whole_life_is_rows_of_the_table(desk):
    d0 = desk.connect()
    desk.pin(d0)
    desk.settle(d0, ok=True)
    desk.pass_time(TTL_S)
    assert desk.need(d0) is Need.write
    desk.lost(d0, "cable", link_is_up=False)
    assert [(change.source, change.trigger, change.dest) for change in desk.transitions()] == [
        ("unknown", "handshake_started", "handshaking"),
        ("handshaking", "handshake_succeeded", "connected"),
        ("connected", "ttl_expired", "stale"),
        ("stale", "revived", "connected"),
        ("connected", "peer_lost", "stale"),
        ("stale", "evict", "evicted"),
    ]


def test_rule1_only_the_lifecycle_writes_a_state():
    source = inspect.getsource(kvpush.registry)
    assert ".state =" not in source
    assert source.count("ENGINE.fire(") == 4  # _move, and the three internal rows


def test_first_state_of_a_generation_is_unknown(desk):
    generation, effects = desk.admit("d0", "one", "host:1")
    assert effects == []
    assert desk.state_of(generation) is State.unknown
    assert desk.need(generation) is Need.handshake
    assert desk.generation_of("d0") == generation
    assert len(desk.registry) == 1


def test_an_unknown_generation_is_evicted_to_everybody_who_asks(desk):
    assert desk.state_of(99) is State.evicted
    assert desk.need(99) is Need.gone
    assert desk.pins_of(99) == 0
    assert desk.pin(99) is None
    assert desk.begin_handshake(99) is None
    assert desk.lost(99, "?", link_is_up=True) == []
    assert desk.retire(99, StaleReason.dropped, "?") == []
    desk.heard(99, activity=True)
    desk.name_incarnation(99, "one")
    assert desk.snapshot() == []
    assert desk.transitions() == []


# --- rule 2: effects, not actions, and a short hold of the lock -------------------------------------------------------


def test_rule2_the_lock_is_free_when_effects_are_in_hand(desk):
    d0 = desk.connect()
    effects = desk.retire(d0, StaleReason.dropped, "operator")
    assert [type(effect) for effect in effects] == [WentStale, Evicted]
    assert desk.registry._lock.acquire(blocking=False)
    desk.registry._lock.release()


def test_rule2_every_method_takes_the_lock_exactly_once_at_a_time(desk):
    """Not re-entrant, so a public method that calls another one would hang here; pytest-timeout would tell."""
    assert isinstance(desk.registry._lock, type(threading.Lock()))


def test_rule2_a_sweep_takes_a_bounded_bite_and_the_rest_is_still_due(desk):
    count = 3 * LOCK_BATCH + 1
    for i in range(count):
        desk.connect(f"d{i}")
    desk.clock.advance(TTL_S)
    sizes = []
    while desk.next_due_s() <= desk.clock():
        sizes.append(len(desk.sweep()))
    assert sizes == [LOCK_BATCH] * 3 + [1]
    assert {shot.state for shot in desk.snapshot()} == {State.stale}


def test_rule2_a_snapshot_drops_the_lock_on_the_way(desk):
    for i in range(3 * LOCK_BATCH):
        desk.admit(f"d{i}", "one", f"host:{i}")
    lock = desk.registry._lock = CountingLock()
    assert len(desk.snapshot()) == 3 * LOCK_BATCH
    assert lock.holds == 4


class CountingLock:
    def __init__(self):
        self.holds = 0

    def __enter__(self):
        self.holds += 1

    def __exit__(self, *exc):
        return None


# --- rule 3: pins -----------------------------------------------------------------------------------------------------


def test_rule3_pin_returns_the_resource_and_counts(desk):
    d0 = desk.connect()
    assert desk.pin(d0) == desk.resources[d0]
    assert desk.pin(d0) == desk.resources[d0]
    assert desk.pins_of(d0) == 2
    shot = desk.of(d0)
    assert (shot.in_flight, shot.pushes) == (2, 2)
    assert desk.settle(d0, ok=True) == []
    assert desk.pins_of(d0) == 1


@pytest.mark.parametrize("state", ["unknown", "handshaking", "stale", "evicted"])
def test_rule3_no_pin_outside_connected(desk, state):
    d0 = desk.connect() if state in ("stale", "evicted") else desk.admit("d0", "one", "host:1")[0]
    if state == "handshaking":
        desk.begin_handshake(d0)
    if state == "stale":
        desk.pass_time(TTL_S)
    if state == "evicted":
        desk.retire(d0, StaleReason.dropped, "operator")
    before = desk.snapshot()
    assert desk.state_of(d0) == state
    assert desk.pin(d0) is None
    assert desk.snapshot() == before


@pytest.mark.parametrize("reason", [StaleReason.superseded, StaleReason.dropped, StaleReason.closing])
def test_rule3_retired_while_pinned_evicts_at_the_last_settle(desk, reason):
    d0 = desk.connect()
    desk.pin(d0)
    desk.pin(d0)
    assert desk.retire(d0, reason, "because") == [stale("d0", d0, reason, "because")]
    assert desk.state_of(d0) is State.stale
    assert desk.pass_time(10 * TTL_S) == []
    assert desk.settle(d0, ok=True) == []
    assert desk.settle(d0, ok=False) == [Evicted("d0", d0, reason, desk.resources[d0])]
    assert desk.state_of(d0) is State.evicted


def test_rule3_lost_while_pinned_evicts_at_the_last_settle(desk):
    d0 = desk.connect()
    desk.pin(d0)
    assert desk.lost(d0, "reset", link_is_up=False) == [stale("d0", d0, StaleReason.lost, "reset", link_is_up=False)]
    assert desk.pin(d0) is None
    assert desk.settle(d0, ok=False) == [Evicted("d0", d0, StaleReason.lost, desk.resources[d0])]


def test_rule3_a_pinned_engine_that_ends_is_not_looked_at_again():
    desk = Desk(**HEARING)
    d0 = desk.connect()
    desk.pin(d0)
    desk.lost(d0, "write failed", link_is_up=True)
    assert desk.pass_time(5) == []
    assert desk.next_due_s() is None


def test_rule3_a_pinned_engine_never_ages(desk):
    d0 = desk.connect()
    desk.pin(d0)
    for _ in range(20):
        assert desk.pass_time(TTL_S) == []
    assert desk.state_of(d0) is State.connected


def test_rule3_settling_more_than_was_pinned_is_our_own_bug(desk):
    d0 = desk.connect()
    with pytest.raises(AssertionError, match="settled twice"):
        desk.settle(d0, ok=True)
    assert desk.pins_of(d0) == 0


def test_rule3_none_is_no_resource_because_pin_says_none_for_not_connected(desk):
    d0, _ = desk.admit("d0", "one", "host:1")
    attempt = desk.begin_handshake(d0)
    with pytest.raises(AssertionError, match="pin"):
        desk.handshake_succeeded(d0, attempt, None)


def test_rule3_the_resource_is_handed_out_once(desk):
    d0 = desk.connect()
    first = desk.retire(d0, StaleReason.dropped, "operator")
    assert [effect.resource for effect in first if isinstance(effect, Evicted)] == [desk.resources[d0]]
    assert desk.retire(d0, StaleReason.dropped, "operator") == []
    assert desk.lost(d0, "late", link_is_up=False) == []
    assert desk.pass_time(100 * TTL_S) == []


def test_an_engine_that_never_connected_has_nothing_to_release(desk):
    d0, _ = desk.admit("d0", "one", "host:1")
    assert desk.retire(d0, StaleReason.dropped, "operator") == [
        stale("d0", d0, StaleReason.dropped, "operator"),
        Evicted("d0", d0, StaleReason.dropped, None),
    ]


# --- rule 4: liveness -------------------------------------------------------------------------------------------------


def test_rule4_a_posted_push_refreshes_activity(desk):
    d0 = desk.connect()
    desk.clock.advance(4)
    assert desk.of(d0).idle_s == 4
    desk.pin(d0)
    assert desk.of(d0).idle_s == 0
    assert desk.of(d0).silent_s == 4  # our own push says nothing about the peer


@pytest.mark.parametrize(("ok", "silent_s"), [(True, 0), (False, 4)])
def test_rule4_a_settled_push_refreshes_activity_and_a_confirmed_one_is_heard(desk, ok, silent_s):
    d0 = desk.connect()
    desk.pin(d0)
    desk.clock.advance(4)
    desk.settle(d0, ok=ok)
    assert desk.of(d0).idle_s == 0
    assert desk.of(d0).silent_s == silent_s


def test_rule4_a_settle_on_stale_stamps_nothing(desk):
    d0 = desk.connect()
    desk.pin(d0)
    desk.pin(d0)
    desk.retire(d0, StaleReason.dropped, "operator")
    desk.clock.advance(4)
    desk.settle(d0, ok=True)
    assert (desk.of(d0).idle_s, desk.of(d0).silent_s) == (4, 4)


def test_rule4_a_registration_is_activity(desk):
    d0 = desk.connect()
    desk.clock.advance(4)
    desk.heard(d0, activity=True)
    assert (desk.of(d0).idle_s, desk.of(d0).silent_s) == (0, 0)


def test_rule4_a_heartbeat_is_heard_and_no_activity(desk):
    d0 = desk.connect()
    desk.clock.advance(4)
    desk.heard(d0, activity=False)
    assert (desk.of(d0).idle_s, desk.of(d0).silent_s) == (4, 0)


def test_rule4_heartbeats_alone_do_not_keep_an_engine_connected():
    desk = Desk(**HEARING)
    d0 = desk.connect()
    for _ in range(int(TTL_S) - 1):
        assert desk.pass_time(1) == []
        desk.heard(d0, activity=False)
    assert desk.pass_time(1) == [stale("d0", d0, StaleReason.idle, "idle")]


def test_rule4_nothing_refreshes_an_engine_that_is_stale(desk):
    d0 = desk.connect()
    desk.pass_time(TTL_S)
    desk.clock.advance(1)
    desk.heard(d0, activity=True)
    assert desk.of(d0).idle_s == TTL_S + 1
    assert desk.pin(d0) is None
    assert desk.of(d0).idle_s == TTL_S + 1
    assert desk.pass_time(GRACE_S - 1) == [Evicted("d0", d0, StaleReason.idle, desk.resources[d0])]


def test_rule4_a_write_longer_than_the_ttl_does_not_age_its_own_engine(desk):
    d0 = desk.connect()
    desk.pin(d0)
    assert desk.pass_time(3 * TTL_S) == []
    desk.settle(d0, ok=True)
    assert desk.pass_time(TTL_S - MOMENT_S) == []
    assert desk.pass_time(MOMENT_S) == [stale("d0", d0, StaleReason.idle, "idle")]


def test_b1_evicted_only_after_the_ttl_counted_from_the_settle(desk):
    """A WRITE is stuck, another engine shakes hands in the meantime, and the WRITE ends after all."""
    d0 = desk.connect("d0")
    desk.pin(d0)
    assert desk.pass_time(TTL_S + GRACE_S + 1) == []
    d1 = desk.connect("d1")
    assert desk.sweep() == []
    assert desk.state_of(d0) is State.connected
    desk.settle(d0, ok=True)
    assert desk.pass_time(TTL_S - MOMENT_S) == []
    assert desk.pass_time(MOMENT_S) == [stale(d, g, StaleReason.idle, "idle") for d, g in (("d0", d0), ("d1", d1))]
    assert desk.pass_time(GRACE_S - MOMENT_S) == []
    assert {effect.generation for effect in desk.pass_time(MOMENT_S)} == {d0, d1}


def test_b1_a_stale_engine_with_a_pin_waits_for_it(desk):
    d0 = desk.connect()
    desk.pin(d0)
    desk.lost(d0, "stalled", link_is_up=True)
    assert desk.pass_time(100 * TTL_S) == []
    assert desk.state_of(d0) is State.stale
    assert [type(effect) for effect in desk.settle(d0, ok=True)] == [Evicted]


def test_b3_pushes_alone_keep_an_engine_connected(desk):
    d0 = desk.connect()
    for _ in range(3 * int(TTL_S)):
        assert desk.pass_time(1) == []
        assert desk.pin(d0) is not None
        desk.settle(d0, ok=True)
    assert desk.state_of(d0) is State.connected


def test_b3_registrations_alone_keep_an_engine_connected(desk):
    d0 = desk.connect()
    for _ in range(3 * int(TTL_S)):
        assert desk.pass_time(1) == []
        desk.heard(d0, activity=True)
    assert desk.state_of(d0) is State.connected


def test_origin1_the_silent_engine_goes_and_the_one_pushed_to_stays(desk):
    silent, busy = desk.connect("silent"), desk.connect("busy")
    effects = []
    for _ in range(int(TTL_S + GRACE_S)):
        effects += desk.pass_time(1)
        desk.pin(busy)
        desk.settle(busy, ok=True)
    assert effects == [
        stale("silent", silent, StaleReason.idle, "idle"),
        Evicted("silent", silent, StaleReason.idle, desk.resources[silent]),
    ]
    assert desk.state_of(busy) is State.connected


# --- rule 5: ageing by the clock --------------------------------------------------------------------------------------


def test_rule5_idle_to_stale_to_evicted_at_the_instant(desk):
    d0 = desk.connect()
    assert desk.pass_time(TTL_S - MOMENT_S) == []
    assert desk.pass_time(MOMENT_S) == [stale("d0", d0, StaleReason.idle, "idle")]
    assert desk.of(d0).reason is StaleReason.idle
    assert desk.pass_time(GRACE_S - MOMENT_S) == []
    assert desk.pass_time(MOMENT_S) == [Evicted("d0", d0, StaleReason.idle, desk.resources[d0])]
    assert len(desk.registry) == 0


def test_b2_no_other_peer_and_no_traffic_and_it_is_freed_by_the_tick_alone(desk):
    d0 = desk.connect()
    seen = []
    while desk.of(d0).state != "evicted":
        desk.clock.set(desk.next_due_s())
        seen += desk.sweep()
    assert [type(effect) for effect in seen] == [WentStale, Evicted]
    assert desk.clock() == 1000 + TTL_S + GRACE_S


def test_b2_eviction_can_be_asked_for_at_once(desk):
    d0 = desk.connect()
    assert desk.retire(d0, StaleReason.dropped, "drop_engine()")[-1] == Evicted(
        "d0", d0, StaleReason.dropped, desk.resources[d0]
    )


def test_rule5_an_engine_that_was_only_named_goes_too(desk):
    d0, _ = desk.admit("d0", "one", "host:1")
    assert desk.pass_time(TTL_S + GRACE_S - MOMENT_S) == []
    assert desk.pass_time(MOMENT_S) == [Evicted("d0", d0, None, None)]


def test_rule5_a_registration_holds_off_the_eviction_of_a_named_engine(desk):
    d0, _ = desk.admit("d0", "one", "host:1")
    desk.pass_time(TTL_S)
    desk.heard(d0, activity=True)
    assert desk.pass_time(TTL_S + GRACE_S - MOMENT_S) == []
    assert desk.state_of(d0) is State.unknown


def test_rule5_a_silent_engine_is_lost_at_the_instant():
    desk = Desk(**HEARING)
    d0 = desk.connect()
    assert desk.pass_time(5 - MOMENT_S) == []
    effects = desk.pass_time(MOMENT_S)
    assert effects == [
        stale("d0", d0, StaleReason.lost, "nothing heard for 5 s", link_is_up=False),
        Evicted("d0", d0, StaleReason.lost, desk.resources[d0]),
    ]
    assert desk.of(d0).last_error == "nothing heard for 5 s"


def test_rule5_a_silent_engine_is_lost_although_pushes_are_posted_to_it():
    """A frozen peer: WRITEs may still be posted, and only a word from it counts."""
    desk = Desk(**HEARING)
    d0 = desk.connect()
    for _ in range(4):
        desk.pass_time(1)
        assert desk.pin(d0) is not None
        desk.settle(d0, ok=False)
    assert [type(effect) for effect in desk.pass_time(1)] == [WentStale, Evicted]


def test_rule5_a_silent_engine_with_a_pin_is_stale_and_kept():
    desk = Desk(**HEARING)
    d0 = desk.connect()
    desk.pin(d0)
    assert desk.pass_time(5) == [stale("d0", d0, StaleReason.lost, "nothing heard for 5 s", link_is_up=False)]
    assert desk.state_of(d0) is State.stale


def test_rule5_an_idle_engine_that_falls_silent_is_lost_before_its_grace_ends():
    """A peer that freezes while it is idle must not be revived as if it had been heard."""
    desk = Desk(**(HEARING | {"evict_grace_s": 100.0}))
    d0 = desk.connect()
    for _ in range(int(TTL_S)):
        desk.pass_time(1)
        desk.heard(d0, activity=False)
    assert desk.of(d0).reason is StaleReason.idle
    assert desk.pass_time(5 - MOMENT_S) == []
    effects = desk.pass_time(MOMENT_S)
    assert [(type(effect), effect.reason) for effect in effects] == [
        (WentStale, StaleReason.lost),
        (Evicted, StaleReason.lost),
    ]


def test_rule5_silence_is_not_judged_during_a_handshake():
    desk = Desk(**(HEARING | {"handshake_timeout_s": 60.0}))
    d0, _ = desk.admit("d0", "one", "host:1")
    attempt = desk.begin_handshake(d0)
    assert desk.pass_time(59) == []
    assert desk.is_attempt_current(d0, attempt)


@pytest.mark.parametrize("shorter", ["engine_ttl_s", "liveness_timeout_s"])
def test_rule5_the_patience_of_a_handshake_does_not_put_off_what_comes_after_it(shorter):
    desk = Desk(**{"handshake_timeout_s": 100.0, shorter: 5.0})
    d0 = desk.connect()
    assert desk.next_due_s() == desk.clock() + 5
    desk.pass_time(5)
    assert desk.state_of(d0) is not State.connected


def test_rule5_a_handshake_that_failed_after_a_long_silence_leaves_that_to_be_judged_at_once():
    desk = Desk(**HEARING | {"handshake_timeout_s": 60.0})
    d0, _ = desk.admit("d0", "one", "host:1")
    attempt = desk.begin_handshake(d0)
    assert desk.pass_time(6) == []
    desk.handshake_failed(d0, attempt, "refused")
    assert desk.next_due_s() <= desk.clock()
    assert [type(effect) for effect in desk.sweep()] == [WentStale, Evicted]


def test_rule5_silence_is_judged_from_the_last_attempt_on():
    desk = Desk(**HEARING)
    d0, _ = desk.admit("d0", "one", "host:1")
    desk.clock.advance(4)
    desk.fail(d0)
    assert desk.pass_time(5 - MOMENT_S) == []
    assert [type(effect) for effect in desk.pass_time(MOMENT_S)] == [WentStale, Evicted]


def test_rule4_a_handshake_that_succeeds_is_heard_and_activity():
    desk = Desk(**HEARING)
    d0, _ = desk.admit("d0", "one", "host:1")
    attempt = desk.begin_handshake(d0)
    desk.clock.advance(0.5)
    desk.handshake_succeeded(d0, attempt, "agent")
    assert (desk.of(d0).idle_s, desk.of(d0).silent_s) == (0, 0)


def test_rule5_nothing_is_due_for_a_pinned_engine_that_cannot_be_heard(desk):
    d0, _ = desk.admit_address("d0", "host:1")
    desk.shake(d0)
    desk.pin(d0)
    assert desk.pass_time(TTL_S) == []
    assert desk.next_due_s() is None


@pytest.mark.parametrize("start_s", [-1000.0, 0.0])
def test_a_clock_may_start_anywhere(start_s):
    desk = Desk()
    desk.registry = Registry(desk.config, FakeClock(start_s), random.Random(7))
    d0 = desk.connect()
    d1, _ = desk.admit("d0", "two", "host:1")
    assert desk.need(d1) is Need.handshake
    assert desk.of(d1).retry_in_s == 0
    assert [type(effect) for effect in desk.retire(d1, StaleReason.dropped, "operator")] == [WentStale, Evicted]
    assert desk.state_of(d0) is State.evicted


def test_rule5_nobody_is_heard_before_it_was_dialled():
    """Decode names a prefill engine by its address; until it answers there is nobody who could fall silent."""
    desk = Desk(**HEARING)
    p0, _ = desk.admit_address("p0", "host:1")
    assert desk.pass_time(TTL_S) == []
    assert desk.state_of(p0) is State.unknown


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["admit", "connect", "pin", "settle", "heartbeat", "register", "need", "fail", "begin"])
        ),
        st.tuples(st.sampled_from(["lost", "retire"])),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 1.0, 3.0, 5.0, 10.0])),
    ),
    max_size=25,
)


@given(OPERATIONS)
def test_rule5_next_due_is_never_late(operations):
    """Whatever came before: a sweep at any time short of ``next_due_s`` has nothing to do and changes nothing."""
    desk = Desk(**HEARING)
    for operation in operations:
        apply(desk, *operation)
        for _ in range(100):
            due_s = desk.next_due_s()
            if due_s is None or due_s > desk.clock():
                break
            fail_what_timed_out(desk, desk.sweep())
        else:
            pytest.fail("the sweep never runs out of work at one instant")
    due_s = desk.next_due_s()
    horizon_s = desk.clock() + 200 if due_s is None else due_s - MOMENT_S
    if horizon_s > desk.clock():
        states = [(shot.generation, shot.state, shot.reason) for shot in desk.snapshot()]
        desk.clock.set(horizon_s)
        assert desk.sweep() == []
        assert [(shot.generation, shot.state, shot.reason) for shot in desk.snapshot()] == states


def apply(desk, operation, *arguments):
    generation = desk.generation_of("d0")
    if operation == "wait":
        desk.clock.advance(*arguments)
    elif operation == "admit" or generation is None:
        desk.admit("d0", "one", "host:1")
    elif operation == "connect":
        attempt = desk.begin_handshake(generation)
        assert attempt is None or desk.handshake_succeeded(generation, attempt, "agent")
    elif operation == "begin":
        desk.begin_handshake(generation)
    elif operation == "fail":
        attempt = desk.begin_handshake(generation)
        assert attempt is None or desk.handshake_failed(generation, attempt, "refused")
    elif operation == "pin":
        desk.pin(generation)
    elif operation == "settle":
        if desk.pins_of(generation):
            desk.settle(generation, ok=True)
    elif operation in ("heartbeat", "register"):
        desk.heard(generation, activity=operation == "register")
    elif operation == "need":
        desk.need(generation)
    elif operation == "lost":
        desk.lost(generation, "cable", link_is_up=False)
    else:
        desk.retire(generation, StaleReason.dropped, "operator")


def fail_what_timed_out(desk, effects):
    for effect in effects:
        if isinstance(effect, HandshakeTimedOut):
            assert desk.handshake_failed(effect.generation, effect.attempt, "timeout")


# --- rule 6: late answers ---------------------------------------------------------------------------------------------


def test_rule6_a_late_answer_of_an_old_attempt_changes_nothing(desk):
    d0, _ = desk.admit("d0", "one", "host:1")
    old = desk.begin_handshake(d0)
    desk.handshake_failed(d0, old, "timeout")
    desk.clock.advance(60)
    new = desk.begin_handshake(d0)
    before = desk.snapshot()
    assert not desk.handshake_succeeded(d0, old, "late agent")
    assert not desk.handshake_failed(d0, old, "late error")
    assert not desk.is_attempt_current(d0, old)
    assert desk.is_attempt_current(d0, new)
    assert desk.snapshot() == before
    assert desk.handshake_succeeded(d0, new, "agent")
    assert desk.pin(d0) == "agent"


def test_rule6_an_answer_after_the_attempt_ended_changes_nothing(desk):
    d0, _ = desk.admit("d0", "one", "host:1")
    attempt = desk.begin_handshake(d0)
    assert desk.handshake_succeeded(d0, attempt, "agent")
    assert not desk.handshake_succeeded(d0, attempt, "agent again")
    assert not desk.handshake_failed(d0, attempt, "late error")
    assert desk.pin(d0) == "agent"


def test_rule6_an_answer_for_an_old_generation_changes_nothing(desk):
    old, _ = desk.admit("d0", "one", "host:1")
    attempt = desk.begin_handshake(old)
    new, _ = desk.admit("d0", "two", "host:1")
    other = desk.begin_handshake(new)
    assert not desk.handshake_succeeded(old, attempt, "agent of the old one")
    assert not desk.handshake_failed(old, attempt, "late")
    assert not desk.handshake_succeeded(new, attempt, "agent of the old one")
    assert desk.state_of(new) is State.handshaking
    assert desk.handshake_succeeded(new, other, "agent of the new one")
    assert desk.pin(new) == "agent of the new one"


def test_rule6_attempt_numbers_are_never_used_twice(desk):
    first, _ = desk.admit("d0", "one", "host:1")
    second, _ = desk.admit("d1", "one", "host:2")
    assert desk.begin_handshake(first) != desk.begin_handshake(second)


def test_rule6_a_late_settle_goes_to_its_own_generation(desk):
    old = desk.connect("d0", "one")
    desk.pin(old)
    new = desk.connect("d0", "two")
    desk.pin(new)
    desk.clock.advance(4)
    before = desk.of(new)
    assert desk.settle(old, ok=True) == [Evicted("d0", old, StaleReason.superseded, desk.resources[old])]
    assert desk.of(new) == before
    assert desk.pins_of(new) == 1
    assert desk.generation_of("d0") == new


def test_rule6_late_news_of_an_old_generation_leaves_the_new_one_alone(desk):
    old = desk.connect("d0", "one")
    desk.pin(old)
    new = desk.connect("d0", "two")
    before = desk.of(new)
    assert desk.lost(old, "late", link_is_up=False) == []
    assert desk.retire(old, StaleReason.dropped, "late") == []
    desk.heard(old, activity=True)
    assert desk.of(new) == before
    assert desk.of(old).reason is StaleReason.superseded


def test_rule6_a_late_timer_of_a_lost_engine_changes_nothing(desk):
    d0, _ = desk.admit("d0", "one", "host:1")
    attempt = desk.begin_handshake(d0)
    desk.handshake_succeeded(d0, attempt, "agent")
    assert desk.pass_time(QUIET["handshake_timeout_s"]) == []
    assert desk.state_of(d0) is State.connected


# --- rule 8 and c2: one handshake -------------------------------------------------------------------------------------


def test_rule8_exactly_one_of_many_callers_gets_the_handshake(desk):
    d0, _ = desk.admit("d0", "one", "host:1")
    attempts = [desk.begin_handshake(d0) for _ in range(16)]
    assert attempts[0] is not None
    assert attempts[1:] == [None] * 15
    assert [desk.need(d0) for _ in range(3)] == [Need.wait] * 3


def test_c2_after_a_disconnect_exactly_one_shakes_hands_again(desk):
    for _ in range(200):
        d0, _ = desk.admit("d0", "one", "host:1")
        desk.clock.advance(60)
        attempts = [attempt for _ in range(16) if (attempt := desk.begin_handshake(d0)) is not None]
        assert len(attempts) == 1
        assert desk.handshake_succeeded(d0, attempts[0], "agent")
        desk.lost(d0, "reset", link_is_up=False)
    assert desk.triggers().count("handshake_started") == 200


@pytest.mark.parametrize("incarnation", ["one", "two"])
def test_rule8_no_handshake_for_an_engine_that_ends(desk, incarnation):
    d0 = desk.connect("d0", incarnation)
    desk.pin(d0)
    desk.retire(d0, StaleReason.dropped, "operator")
    assert desk.begin_handshake(d0) is None
    assert desk.need(d0) is Need.gone


# --- the handshake and its backoff ------------------------------------------------------------------------------------


def test_handshake_times_out_until_the_caller_has_decided(desk):
    d0, _ = desk.admit("d0", "one", "host:1")
    attempt = desk.begin_handshake(d0)
    assert desk.pass_time(1 - MOMENT_S) == []
    assert desk.pass_time(MOMENT_S) == [HandshakeTimedOut("d0", d0, attempt)]
    assert desk.state_of(d0) is State.handshaking
    assert desk.sweep() == [HandshakeTimedOut("d0", d0, attempt)]
    assert desk.handshake_failed(d0, attempt, "no answer")
    assert desk.sweep() == []
    shot = desk.of(d0)
    assert (shot.state, shot.last_error, shot.handshake_failures) == ("unknown", "no answer", 1)


def test_backoff_jitter_stays_between_the_floor_and_a_doubling_ceiling():
    ceilings_s = [2, 4, 8, 8, 8]
    seen = {number: [] for number in range(5)}
    for seed in range(200):
        desk = Desk(**(QUIET | {"engine_ttl_s": 1000.0}))
        desk.registry._rng = random.Random(seed)
        d0, _ = desk.admit("d0", "one", "host:1")
        for number, ceiling_s in enumerate(ceilings_s):
            desk.fail(d0)
            shot = desk.of(d0)
            assert shot.handshake_failures == number + 1
            assert 1 <= shot.retry_in_s <= ceiling_s
            seen[number].append(shot.retry_in_s)
            desk.clock.advance(ceiling_s)
    for number, ceiling_s in enumerate(ceilings_s):  # full jitter: the whole range is used
        assert min(seen[number]) < 1 + 0.1 * (ceiling_s - 1)
        assert max(seen[number]) > ceiling_s - 0.1 * (ceiling_s - 1)


def test_backoff_survives_a_thousand_failures_without_overflow():
    desk = Desk(**(QUIET | {"engine_ttl_s": 1e6}))
    d0, _ = desk.admit("d0", "one", "host:1")
    for _ in range(1100):
        desk.fail(d0)
        desk.clock.advance(8)
    assert desk.of(d0).handshake_failures == 1100


def test_backoff_is_obeyed_and_its_end_announced_once(desk):
    d0, _ = desk.admit("d0", "one", "host:1")
    desk.fail(d0)
    retry_in_s = desk.of(d0).retry_in_s
    assert desk.begin_handshake(d0) is None
    assert desk.need(d0) is Need.wait
    assert desk.need(d0) is Need.wait
    assert desk.pass_time(retry_in_s / 2) == []
    assert desk.pass_time(retry_in_s / 2) == [RetryDue("d0", d0)]
    assert desk.sweep() == []
    assert desk.need(d0) is Need.handshake
    assert desk.begin_handshake(d0) is not None


def test_nobody_waits_nobody_is_told_that_the_backoff_is_over(desk):
    d0, _ = desk.admit("d0", "one", "host:1")
    desk.fail(d0)
    assert desk.pass_time(2) == []
    assert desk.need(d0) is Need.handshake


def test_the_end_of_a_backoff_is_not_announced_early(desk):
    """The sweep looks when the attempt that failed would have been over, which is sooner."""
    d0, _ = desk.admit("d0", "one", "host:1")
    desk.fail(d0)
    desk.need(d0)
    retry_in_s = desk.of(d0).retry_in_s
    assert desk.config.handshake_timeout_s < retry_in_s
    assert desk.pass_time(desk.config.handshake_timeout_s) == []
    assert desk.pass_time(retry_in_s - desk.config.handshake_timeout_s) == [RetryDue("d0", d0)]


def test_an_attempt_takes_the_announcement_with_it(desk):
    d0, _ = desk.admit("d0", "one", "host:1")
    desk.fail(d0)
    desk.need(d0)
    desk.clock.advance(2)
    desk.shake(d0)
    assert desk.sweep() == []


def test_an_attempt_that_fails_is_followed_by_no_announcement_that_nobody_waits_for():
    desk = Desk(engine_ttl_s=100.0)
    d0, _ = desk.admit("d0", "one", "host:1")
    desk.fail(d0)
    assert desk.need(d0) is Need.wait
    desk.clock.advance(8)  # the backoff is over, and no sweep has said so
    desk.fail(d0)
    assert desk.pass_time(8) == []


def test_failures_are_forgotten_by_a_confirmed_write_and_not_by_a_handshake(desk):
    """An engine that connects and breaks at the first WRITE must not be dialled in a tight loop."""
    d0, _ = desk.admit("d0", "one", "host:1")
    desk.fail(d0)
    desk.clock.advance(2)
    desk.shake(d0)
    assert desk.of(d0).handshake_failures == 1
    desk.pin(d0)
    desk.settle(d0, ok=False)
    assert desk.of(d0).handshake_failures == 1
    desk.pin(d0)
    desk.settle(d0, ok=True)
    assert (desk.of(d0).handshake_failures, desk.of(d0).retry_in_s) == (0, 0)


def test_backoff_carries_over_to_the_next_generation_of_the_same_incarnation(desk):
    d0 = desk.connect()
    desk.lost(d0, "NIXL disconnect", link_is_up=True)
    again, effects = desk.admit("d0", "one", "host:1")
    assert effects == []
    shot = desk.of(again)
    assert shot.handshake_failures == 1
    assert 1 <= shot.retry_in_s <= 2
    assert shot.last_error == "NIXL disconnect"
    assert desk.begin_handshake(again) is None


def test_backoff_carries_over_while_the_old_generation_is_still_pinned(desk):
    d0 = desk.connect()
    desk.pin(d0)
    desk.lost(d0, "stalled", link_is_up=True)
    again, _ = desk.admit("d0", "one", "host:1")
    assert again != d0
    assert desk.of(again).handshake_failures == 1
    assert desk.need(again) is Need.wait


@pytest.mark.parametrize("is_pinned", [False, True])
def test_f1_a_new_incarnation_starts_without_the_old_ones_backoff(desk, is_pinned):
    d0 = desk.connect()
    if is_pinned:
        desk.pin(d0)
    desk.lost(d0, "killed", link_is_up=False)
    again, _ = desk.admit("d0", "two", "host:1")
    shot = desk.of(again)
    assert (shot.handshake_failures, shot.retry_in_s, shot.last_error) == (0, 0, "")
    assert desk.begin_handshake(again) is not None


def test_decode_carries_backoff_over_because_it_does_not_know_who_will_answer(desk):
    p0, _ = desk.admit_address("p0", "host:1")
    desk.fail(p0)
    desk.retire(p0, StaleReason.dropped, "operator")
    again, _ = desk.admit_address("p0", "host:1")
    assert desk.of(again).handshake_failures == 1
    assert desk.need(again) is Need.wait


def test_b8_backoff_of_a_forgotten_engine_is_not_remembered_although_no_sweep_ran():
    desk = Desk(**(QUIET | {"handshake_backoff_max_s": 1000.0, "handshake_backoff_min_s": 500.0}))
    d0 = desk.connect()
    desk.lost(d0, "killed", link_is_up=False)
    desk.clock.advance(QUIET["tombstone_ttl_s"])
    again, _ = desk.admit("d0", "one", "host:1")
    assert desk.of(again).handshake_failures == 0


def test_ending_an_attempt_backs_off_once(desk):
    d0, _ = desk.admit("d0", "one", "host:1")
    desk.begin_handshake(d0)
    effects = desk.lost(d0, "link closed", link_is_up=False)
    assert [type(effect) for effect in effects] == [WentStale, Evicted]
    assert desk.triggers() == ["handshake_started", "handshake_failed", "evict"]
    assert desk.of(d0).handshake_failures == 1


# --- revived ----------------------------------------------------------------------------------------------------------


def idle_engine(desk):
    d0 = desk.connect()
    desk.pass_time(TTL_S)
    assert desk.state_of(d0) is State.stale
    return d0


def test_revived_by_a_push_and_ages_anew(desk):
    d0 = idle_engine(desk)
    assert desk.pass_time(GRACE_S - MOMENT_S) == []
    assert desk.need(d0) is Need.write
    shot = desk.of(d0)
    assert (shot.state, shot.reason, shot.idle_s) == ("connected", None, 0)
    assert desk.pin(d0) == desk.resources[d0]
    desk.settle(d0, ok=True)
    assert desk.pass_time(TTL_S - MOMENT_S) == []
    assert desk.pass_time(MOMENT_S) == [stale("d0", d0, StaleReason.idle, "idle")]


def test_a_revived_engine_is_due_by_its_ttl_although_its_grace_was_longer():
    desk = Desk(evict_grace_s=100.0)
    d0 = desk.connect()
    desk.pass_time(TTL_S)
    desk.clock.advance(1)
    assert desk.need(d0) is Need.write
    assert desk.next_due_s() == desk.clock() + TTL_S


def test_reviving_is_not_hearing(desk):
    d0 = idle_engine(desk)
    desk.need(d0)
    assert desk.of(d0).silent_s == TTL_S


def test_not_revived_by_a_message(desk):
    d0 = idle_engine(desk)
    desk.heard(d0, activity=True)
    desk.heard(d0, activity=False)
    assert desk.state_of(d0) is State.stale


def test_not_revived_after_the_grace(desk):
    d0 = idle_engine(desk)
    desk.pass_time(GRACE_S)
    assert desk.need(d0) is Need.gone


@pytest.mark.parametrize("reason", [StaleReason.superseded, StaleReason.dropped, StaleReason.closing])
def test_not_revived_when_retired(desk, reason):
    d0 = desk.connect()
    desk.pin(d0)
    desk.retire(d0, reason, "because")
    assert desk.need(d0) is Need.gone
    assert desk.state_of(d0) is State.stale


@pytest.mark.parametrize("link_is_up", [True, False])
def test_not_revived_when_lost(desk, link_is_up):
    d0 = desk.connect()
    desk.pin(d0)
    desk.lost(d0, "stalled", link_is_up=link_is_up)
    assert desk.need(d0) is Need.gone


def test_an_idle_engine_whose_link_closes_is_lost_at_once(desk):
    d0 = idle_engine(desk)
    assert desk.lost(d0, "closed", link_is_up=False) == [
        stale("d0", d0, StaleReason.lost, "closed", link_is_up=False),
        Evicted("d0", d0, StaleReason.lost, desk.resources[d0]),
    ]
    assert desk.triggers()[-2:] == ["ttl_expired", "evict"]


def test_a_hello_of_the_same_incarnation_keeps_an_idle_engine(desk):
    d0 = idle_engine(desk)
    assert desk.admit("d0", "one", "host:2") == (d0, [])
    assert desk.state_of(d0) is State.stale
    assert desk.of(d0).address == "host:2"
    assert desk.need(d0) is Need.write


# --- rule 14: incarnations, ids and addresses -------------------------------------------------------------------------


def test_rule14_the_same_incarnation_is_the_same_generation(desk):
    d0 = desk.connect()
    desk.clock.advance(4)
    assert desk.admit("d0", "one", "host:9") == (d0, [])
    shot = desk.of(d0)
    assert (shot.address, shot.idle_s, shot.silent_s) == ("host:9", 0, 0)


def test_f1_a_restart_under_the_same_id_and_address_is_a_new_generation(desk):
    generations = []
    for boot in range(20):
        d0, effects = desk.admit("d0", f"boot {boot}", "host:1")
        if generations:
            old = generations[-1]
            assert effects == [
                stale("d0", old, StaleReason.superseded, f"by boot {boot}"),
                Evicted("d0", old, StaleReason.superseded, desk.resources[old]),
            ]
        desk.shake(d0)
        assert desk.pin(d0) == desk.resources[d0]
        desk.settle(d0, ok=True)
        generations.append(d0)
    assert generations == sorted(set(generations))
    assert len(desk.registry) == 1


def test_f1_a_restart_with_a_write_in_flight_keeps_the_old_agent_until_it_ends(desk):
    old = desk.connect("d0", "one")
    desk.pin(old)
    new, effects = desk.admit("d0", "two", "host:1")
    assert effects == [stale("d0", old, StaleReason.superseded, "by two")]
    assert (desk.state_of(old), desk.state_of(new)) == (State.stale, State.unknown)
    desk.shake(new)
    assert desk.pin(new) == desk.resources[new]
    assert desk.pin(old) is None
    assert desk.settle(old, ok=False) == [Evicted("d0", old, StaleReason.superseded, desk.resources[old])]
    assert desk.state_of(new) is State.connected


def test_f1_a_restart_during_the_handshake_fences_its_attempt(desk):
    old, _ = desk.admit("d0", "one", "host:1")
    attempt = desk.begin_handshake(old)
    new, effects = desk.admit("d0", "two", "host:1")
    assert [type(effect) for effect in effects] == [WentStale, Evicted]
    assert not desk.handshake_succeeded(old, attempt, "agent")
    assert desk.state_of(new) is State.unknown


def test_b4_another_engine_at_the_address_supersedes_the_old_one(desk):
    old = desk.connect("d0", address="host:5600")
    bystander = desk.connect("d1", address="host:5601")
    desk.pin(old)
    new = desk.connect("d0b", address="host:5600")
    effects = desk.retire_address("host:5600", "d0b")
    assert effects == [stale("d0", old, StaleReason.superseded, "d0b answers at host:5600")]
    assert desk.need(old) is Need.gone
    assert desk.settle(old, ok=False) == [Evicted("d0", old, StaleReason.superseded, desk.resources[old])]
    assert desk.state_of(new) is State.connected
    assert desk.state_of(bystander) is State.connected
    assert desk.retire_address("host:5600", "d0b") == []


def test_b4_an_address_that_nobody_had_changes_nothing(desk):
    desk.connect("d0", address="host:5600")
    assert desk.retire_address("host:1", "d9") == []
    assert desk.triggers() == ["handshake_started", "handshake_succeeded"]


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_two_ranks_of_an_engine_are_two_records(desk):
    first = desk.connect("d0", "boot 0")
    second = desk.connect("d0", "boot 1", rank=(0, 1))
    assert first != second
    assert [(shot.engine_id, shot.rank, shot.generation) for shot in desk.snapshot()] == [
        ("d0", (0, 0), first),
        ("d0", (0, 1), second),
    ]
    assert desk.generation_of("d0") == desk.generation_of("d0", (0, 0)) == first
    assert desk.generation_of("d0", (0, 1)) == second
    assert desk.generation_of("d0", (1, 0)) is None
    assert desk.pin(first) == desk.resources[first]
    assert desk.pin(second) == desk.resources[second]
    assert (desk.pins_of(first), desk.pins_of(second)) == (1, 1)
    assert desk.admit("d0", "boot 1", "host:1", (0, 1)) == (second, [])


def test_one_rank_that_is_lost_leaves_the_others_of_its_engine_alone(desk):
    ranks = {
        (stage, rank): desk.connect("d0", f"{stage}.{rank}", rank=(stage, rank)) for stage in (0, 1) for rank in (0, 1)
    }
    gone = ranks.pop((1, 0))
    effects = desk.lost(gone, "cable", link_is_up=False)
    assert [(effect.engine_id, effect.generation) for effect in effects] == [("d0", gone), ("d0", gone)]
    assert {desk.state_of(generation) for generation in ranks.values()} == {State.connected}
    assert desk.generation_of("d0", (1, 0)) is None


@pytest.mark.parametrize("is_by_address", [False, True])
def test_rule14_a_rank_that_restarts_supersedes_itself_alone(desk, is_by_address):
    if is_by_address:
        meet = desk.admit_address
        old, other = (desk.admit_address("p0", f"host:{rank}", (0, rank))[0] for rank in (0, 1))
        new, effects = meet("p0", "host:9", (0, 1))
    else:
        old, other = (desk.connect("p0", f"boot {rank}", rank=(0, rank)) for rank in (0, 1))
        new, effects = desk.admit("p0", "boot again", "host:1", (0, 1))
    assert {effect.generation for effect in effects} == {other}
    assert desk.generation_of("p0", (0, 0)) == old
    assert desk.generation_of("p0", (0, 1)) == new not in (old, other)


def test_backoff_and_what_is_remembered_are_each_ranks_own(desk):
    failing, _ = desk.admit("d0", "boot", "host:1", (0, 1))
    desk.fail(failing, "refused")
    other, _ = desk.admit("d0", "boot", "host:1", (0, 0))
    assert desk.need(other) is Need.handshake
    assert desk.need(failing) is Need.wait
    desk.retire(failing, StaleReason.closing, "bye")
    assert [(shot.rank, shot.handshake_failures) for shot in desk.snapshot()] == [((0, 0), 0), ((0, 1), 1)]
    again, _ = desk.admit("d0", "boot", "host:1", (0, 1))
    assert desk.need(again) is Need.wait
    assert desk.of(again).last_error == "refused"


def test_b4_another_rank_at_the_address_supersedes_the_old_one(desk):
    old = desk.connect("p0", "boot", address="host:5600", rank=(0, 0))
    elsewhere = desk.connect("p0", "boot", address="host:5601", rank=(0, 2))
    new = desk.connect("p0", "boot", address="host:5600", rank=(0, 1))
    effects = desk.retire_address("host:5600", "p0", (0, 1))
    assert effects == [
        stale("p0", old, StaleReason.superseded, "p0 answers at host:5600"),
        Evicted("p0", old, StaleReason.superseded, desk.resources[old]),
    ]
    assert desk.state_of(new) is desk.state_of(elsewhere) is State.connected
    assert desk.retire_address("host:5600", "p0", (0, 1)) == []


def test_rule16_ranks_count_one_by_one_towards_the_limits():
    desk = Desk(max_engines=2, max_tombstones=1)
    for rank in (0, 1):
        desk.connect("d0", rank=(0, rank))
    with pytest.raises(QueueFull, match="max_engines=2"):
        desk.admit("d0", "one", "host:1", (0, 2))
    for rank in (0, 1):
        desk.retire(desk.generation_of("d0", (0, rank)), StaleReason.closing, "bye")
    assert [shot.rank for shot in desk.snapshot()] == [(0, 1)]


# --- decode -----------------------------------------------------------------------------------------------------------


def test_decode_knows_an_engine_by_its_address(desk):
    p0, _ = desk.admit_address("p0", "host:1")
    assert desk.admit_address("p0", "host:1") == (p0, [])
    attempt = desk.begin_handshake(p0)
    desk.name_incarnation(p0, "boot")
    assert desk.of(p0).incarnation == "boot"
    desk.handshake_succeeded(p0, attempt, "link")
    desk.name_incarnation(p0, "too late")
    assert desk.of(p0).incarnation == "boot"
    moved, effects = desk.admit_address("p0", "host:2")
    assert moved != p0
    assert effects[0] == stale("p0", p0, StaleReason.superseded, "by a new record")


# --- reasons ----------------------------------------------------------------------------------------------------------


def test_rule10_the_first_reason_stays(desk):
    d0 = desk.connect()
    desk.pin(d0)
    desk.lost(d0, "first", link_is_up=True)
    assert desk.retire(d0, StaleReason.dropped, "second") == []
    assert desk.lost(d0, "third", link_is_up=False) == []
    shot = desk.of(d0)
    assert (shot.reason, shot.last_error) == (StaleReason.lost, "first")
    assert desk.settle(d0, ok=False) == [Evicted("d0", d0, StaleReason.lost, desk.resources[d0])]


@pytest.mark.parametrize("reason", [StaleReason.superseded, StaleReason.dropped, StaleReason.closing])
def test_a_stronger_reason_takes_the_place_of_idle(desk, reason):
    d0 = idle_engine(desk)
    assert desk.retire(d0, reason, "because") == [
        stale("d0", d0, reason, "because"),
        Evicted("d0", d0, reason, desk.resources[d0]),
    ]


def test_dropped_without_a_fault_leaves_no_error(desk):
    d0 = desk.connect()
    desk.retire(d0, StaleReason.dropped, "operator")
    assert desk.of(d0).last_error == ""


# --- rule 16 and g1: bounds -------------------------------------------------------------------------------------------


def test_rule16_max_engines_is_a_clear_retryable_error(desk):
    desk = Desk(max_engines=2)
    d0 = desk.connect("d0")
    desk.connect("d1")
    before = desk.snapshot()
    with pytest.raises(QueueFull, match="max_engines=2 engines are known; 'd2' must try later") as caught:
        desk.admit("d2", "one", "host:1")
    assert caught.value.retryable
    assert desk.snapshot() == before
    with pytest.raises(QueueFull):
        desk.admit_address("d2", "host:1")
    assert desk.admit("d0", "one", "host:1") == (d0, [])
    desk.retire(d0, StaleReason.dropped, "operator")
    assert desk.admit("d2", "one", "host:1")[1] == []


def test_f1_a_restart_finds_room_in_a_full_registry():
    """It takes its predecessor's place, so no room is needed."""
    desk = Desk(max_engines=1)
    desk.connect("d0", "one")
    new, effects = desk.admit("d0", "two", "host:1")
    assert [type(effect) for effect in effects] == [WentStale, Evicted]
    assert desk.generation_of("d0") == new


def test_rule16_a_restart_needs_room_while_its_predecessor_is_pinned():
    desk = Desk(max_engines=1)
    d0 = desk.connect("d0", "one")
    desk.pin(d0)
    with pytest.raises(QueueFull):
        desk.admit("d0", "two", "host:1")
    assert desk.state_of(d0) is State.connected
    desk.settle(d0, ok=True)
    desk.admit("d0", "two", "host:1")
    assert len(desk.registry) == 1


def test_rule16_tombstones_are_bounded_in_number(desk):
    desk = Desk(max_tombstones=3)
    for i in range(10):
        desk.retire(desk.connect(f"d{i}"), StaleReason.dropped, "operator")
    assert [shot.engine_id for shot in desk.snapshot()] == ["d7", "d8", "d9"]
    assert len(desk.registry._past) == 3


def test_b8_tombstones_are_bounded_in_time_on_look_up_and_by_the_clock(desk):
    d0 = desk.connect()
    desk.retire(d0, StaleReason.dropped, "operator")
    died_s = desk.clock()
    desk.clock.advance(50 - MOMENT_S)
    assert [shot.engine_id for shot in desk.snapshot()] == ["d0"]
    assert desk.next_due_s() == died_s + 50
    desk.clock.advance(MOMENT_S)
    assert desk.snapshot() == []
    assert desk.sweep() == []
    assert len(desk.registry._past) == 0
    assert desk.next_due_s() is None


def test_an_engine_that_comes_back_is_shown_once(desk):
    desk.retire(desk.connect("d0"), StaleReason.dropped, "operator")
    again = desk.connect("d0", "two")
    assert [(shot.engine_id, shot.generation) for shot in desk.snapshot()] == [("d0", again)]


def test_a_superseded_generation_leaves_no_tombstone(desk):
    old = desk.connect("d0", "one")
    desk.pin(old)
    new = desk.connect("d0", "two")
    desk.settle(old, ok=True)
    assert [shot.generation for shot in desk.snapshot()] == [new]
    desk.retire(new, StaleReason.dropped, "operator")
    assert [shot.generation for shot in desk.snapshot()] == [new]


def test_g1_nothing_is_left_of_three_hundred_engines_that_came_and_went(desk):
    for i in range(300):
        d = desk.connect(f"d{i}", address=f"host:{i}")
        desk.pin(d)
        desk.settle(d, ok=True)
        desk.lost(d, "killed", link_is_up=False)
    desk.clock.advance(QUIET["tombstone_ttl_s"])
    while desk.next_due_s() is not None:
        desk.sweep()
    registry = desk.registry
    assert [len(registry._by_generation), len(registry._current), len(registry._past), len(registry._due)] == [0] * 4
    assert len(registry._due._heap) <= 65
    assert len(registry._trace.changes) <= TRACE_LENGTH


# --- introspection ----------------------------------------------------------------------------------------------------


def test_snapshot_fields(desk):
    d0 = desk.connect("d0", "boot", "host:1")
    desk.pin(d0)
    desk.clock.advance(2)
    desk.heard(d0, activity=False)
    desk.clock.advance(1)
    (shot,) = desk.snapshot()
    assert (shot.engine_id, shot.generation, shot.incarnation, shot.address) == ("d0", d0, "boot", "host:1")
    assert shot.state is State.connected
    assert shot.reason is None
    assert (shot.idle_s, shot.silent_s) == (3, 1)
    assert (shot.in_flight, shot.pushes) == (1, 1)
    assert (shot.handshake_failures, shot.retry_in_s, shot.last_error) == (0, 0, "")


def test_snapshot_of_an_engine_that_is_over_goes_on_counting(desk):
    d0 = desk.connect()
    desk.clock.advance(1)
    desk.lost(d0, "killed", link_is_up=False)
    retry_in_s = desk.of(d0).retry_in_s
    desk.clock.advance(1)
    shot = desk.of(d0)
    assert (shot.state, shot.reason, shot.last_error) == ("evicted", StaleReason.lost, "killed")
    assert (shot.idle_s, shot.silent_s) == (2, 2)
    assert shot.retry_in_s == retry_in_s - 1
    desk.clock.advance(8)
    assert desk.of(d0).retry_in_s == 0


def test_trace_records_each_change_and_no_internal_row(desk):
    d0 = desk.connect()
    desk.pin(d0)
    desk.heard(d0, activity=True)
    desk.settle(d0, ok=True)
    desk.clock.advance(1)
    desk.retire(d0, StaleReason.dropped, "operator")
    last = desk.transitions()[-2:]
    assert [(c.at_s, c.engine_id, c.generation) for c in last] == [(1001.0, "d0", d0)] * 2
    assert [(c.source, c.trigger, c.dest, c.detail) for c in last] == [
        ("connected", "retired", "stale", "dropped: operator"),
        ("stale", "evict", "evicted", "dropped"),
    ]
    assert len(desk.transitions()) == 4


def test_transitions_since_counts_on(desk):
    assert desk.transitions_since(0) == (0, [])
    d0 = desk.connect()
    count, first = desk.transitions_since(0)
    assert (count, [c.trigger for c in first]) == (2, ["handshake_started", "handshake_succeeded"])
    assert desk.transitions_since(count) == (2, [])
    desk.retire(d0, StaleReason.dropped, "operator")
    count, news = desk.transitions_since(count)
    assert (count, [c.trigger for c in news]) == (4, ["retired", "evict"])
    assert desk.transitions_since(99) == (4, [])


def test_the_hint_counts_transitions(desk):
    assert desk.num_transitions == 0
    desk.connect()
    assert desk.num_transitions == 2


def test_rule16_the_trace_is_bounded_and_says_what_it_left_out(desk):
    for i in range(TRACE_LENGTH // 2):
        desk.retire(desk.connect(f"d{i % 3}", f"boot {i}"), StaleReason.dropped, "operator")
    assert len(desk.transitions()) == TRACE_LENGTH
    count, news = desk.transitions_since(0)
    assert count == 2 * TRACE_LENGTH
    assert news == desk.transitions()


# --- ten thousand engines ---------------------------------------------------------------------------------------------


def fill(desk, count):
    for i in range(count):
        generation, _ = desk.admit(f"decode-{i}", f"boot-{i}", f"10.0.0.1:{i}")
        attempt = desk.begin_handshake(generation)
        assert desk.handshake_succeeded(generation, attempt, "agent")


def test_an_engine_fits_in_four_kib():
    desk, count = Desk(), 1000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        fill(desk, count)
        assert (tracemalloc.get_traced_memory()[0] - before) / count <= 4096
    finally:
        tracemalloc.stop()


def test_ten_thousand_engines_come_and_all_go():
    desk = Desk(max_engines=10_000, max_tombstones=1000)
    fill(desk, 10_000)
    with pytest.raises(QueueFull):
        desk.admit("one too many", "boot", "10.0.0.1:1")
    assert desk.sweep() == []
    ends = []
    desk.clock.advance(TTL_S)
    for _ in range(2):
        while desk.next_due_s() <= desk.clock():
            effects = desk.sweep()
            assert len(effects) <= LOCK_BATCH
            ends += [effect.generation for effect in effects if isinstance(effect, Evicted)]
        desk.clock.advance(GRACE_S)
    assert len(ends) == len(set(ends)) == 10_000
    assert len(desk.registry) == 0
