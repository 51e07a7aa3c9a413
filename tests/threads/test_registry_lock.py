"""The registry's lock under real threads: that it blocks, and that it lets exactly one win.

A waiting thread cannot be seen to wait without a clock, so these tests look at the lock itself: a :class:`SeenLock`
tells when somebody asks for it. Contention tests count winners and never measure time.
"""

import copy
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpush.config import Config
from kvpush.events import StaleReason
from kvpush.lifecycle import State
from kvpush.registry import Evicted, Registry, WentStale
from kvpush.testing.clock import FakeClock

PATIENCE_S = 30.0
CONFIG = Config(engine_ttl_s=10, evict_grace_s=3, liveness_timeout_s=1000)


class SeenLock:
    """A lock that says when a thread has come to the door."""

    def __init__(self):
        self._lock = threading.Lock()
        self.someone_asked = threading.Event()
        self.holds = 0

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self.someone_asked.set()
            assert self._lock.acquire(timeout=PATIENCE_S)
        self.holds += 1

    def __exit__(self, *exc):
        self._lock.release()


class Bench:
    """One connected engine behind a :class:`SeenLock`, and a pool for the threads that want it."""

    def __init__(self):
        self.clock = FakeClock()
        self.registry = Registry(CONFIG, self.clock, random.Random(1))
        self.lock = self.registry._lock = SeenLock()
        self.d0, _ = self.registry.admit("d0", "one", "host:1")
        attempt = self.registry.begin_handshake(self.d0)
        assert self.registry.handshake_succeeded(self.d0, attempt, "agent")

    def behind_the_lock(self, call):
        """Run ``call`` on another thread while a third one holds the lock; return what it did once let go."""
        engine = self.registry._by_generation[self.d0]
        before = copy.copy(engine)
        with ThreadPoolExecutor(1) as pool:
            with self.lock:
                self.lock.holds = 0
                future = pool.submit(call)
                assert self.lock.someone_asked.wait(PATIENCE_S), "the call never asked for the lock"
                assert not future.done()
                assert self.registry._by_generation[self.d0] is engine
                assert all(getattr(engine, name) == getattr(before, name) for name in engine.__slots__)
            return future.result(PATIENCE_S)


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def hurried_switching():
    """Threads change places as often as the interpreter can manage."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# --- the lock blocks --------------------------------------------------------------------------------------------------


def test_origin3_the_reader_waits_for_the_lock_and_pins_once(bench):
    assert bench.behind_the_lock(lambda: bench.registry.pin(bench.d0)) == "agent"
    assert bench.registry.pins_of(bench.d0) == 1


def test_origin3_the_evictor_waits_for_the_lock_and_evicts_once(bench):
    effects = bench.behind_the_lock(lambda: bench.registry.retire(bench.d0, StaleReason.dropped, "operator"))
    assert [type(effect) for effect in effects] == [WentStale, Evicted]
    assert bench.registry.retire(bench.d0, StaleReason.dropped, "operator") == []


def test_origin3_the_sweep_waits_for_the_lock_and_ages_once(bench):
    bench.clock.advance(CONFIG.engine_ttl_s)
    assert [type(effect) for effect in bench.behind_the_lock(bench.registry.sweep)] == [WentStale]
    assert bench.registry.sweep() == []


def public_calls(registry, d0):
    return {
        "admit": lambda: registry.admit("d1", "one", "host:2"),
        "admit_address": lambda: registry.admit_address("d1", "host:2"),
        "name_incarnation": lambda: registry.name_incarnation(d0, "one"),
        "need": lambda: registry.need(d0),
        "begin_handshake": lambda: registry.begin_handshake(d0),
        "is_attempt_current": lambda: registry.is_attempt_current(d0, 1),
        "handshake_succeeded": lambda: registry.handshake_succeeded(d0, 1, "agent"),
        "handshake_failed": lambda: registry.handshake_failed(d0, 1, "error"),
        "pin": lambda: registry.pin(d0),
        "heard": lambda: registry.heard(d0, activity=True),
        "lost": lambda: registry.lost(d0, "cable", link_is_up=False),
        "retire": lambda: registry.retire(d0, StaleReason.dropped, "operator"),
        "retire_address": lambda: registry.retire_address("host:1", "d9"),
        "sweep": registry.sweep,
        "next_due_s": registry.next_due_s,
        "generation_of": lambda: registry.generation_of("d0"),
        "state_of": lambda: registry.state_of(d0),
        "describe": lambda: registry.describe("d0"),
        "pins_of": lambda: registry.pins_of(d0),
        "snapshot": registry.snapshot,
        "transitions": registry.transitions,
        "transitions_since": lambda: registry.transitions_since(0),
    }


WITHOUT_THE_LOCK = {"num_transitions"}  # one number, and only a hint
NAMES = sorted(public_calls(Registry(CONFIG, FakeClock(), random.Random(1)), 1))


@pytest.mark.parametrize("name", NAMES)
def test_rule2_every_public_method_waits_for_the_lock(bench, name):
    bench.behind_the_lock(public_calls(bench.registry, bench.d0)[name])
    assert bench.lock.holds >= 1


def test_rule2_settle_waits_for_the_lock(bench):
    bench.registry.pin(bench.d0)
    with ThreadPoolExecutor(1) as pool:
        with bench.lock:
            future = pool.submit(bench.registry.settle, bench.d0, ok=True)
            assert bench.lock.someone_asked.wait(PATIENCE_S)
            assert bench.registry._by_generation[bench.d0].pins == 1
        assert future.result(PATIENCE_S) == []
    assert bench.registry.pins_of(bench.d0) == 0


def test_rule2_no_public_method_is_missing_here():
    public = {name for name in vars(Registry) if not name.startswith("_")}
    assert public == {*NAMES, "settle", *WITHOUT_THE_LOCK}


# --- exactly one wins -------------------------------------------------------------------------------------------------


def at_once(calls):
    """Run all calls, each on its own thread, from a barrier; return their results in order."""
    barrier = threading.Barrier(len(calls))

    def run(call):
        barrier.wait(PATIENCE_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(run, call) for call in calls]]


@pytest.mark.usefixtures("hurried_switching")
def test_c2_sixteen_threads_start_exactly_one_handshake_per_round():
    clock = FakeClock()
    registry = Registry(CONFIG, clock, random.Random(1))
    callers, rounds = 16, 200
    barrier = threading.Barrier(callers)
    generation = [0]
    winners = []

    def prepare():
        """The last thread to arrive drops what was there and names the engine anew: a forced disconnect."""
        registry.lost(generation[0], "reset", link_is_up=False)
        clock.advance(CONFIG.handshake_backoff_max_s)
        generation[0], _ = registry.admit("d0", "one", "host:1")

    barrier = threading.Barrier(callers, action=prepare)

    def contend():
        for number in range(rounds):
            barrier.wait(PATIENCE_S)
            attempt = registry.begin_handshake(generation[0])
            if attempt is not None:
                winners.append((number, registry.handshake_succeeded(generation[0], attempt, "agent")))

    with ThreadPoolExecutor(callers) as pool:
        for future in [pool.submit(contend) for _ in range(callers)]:
            future.result(PATIENCE_S * 3)
    assert sorted(winners) == [(number, True) for number in range(rounds)]


@pytest.mark.usefixtures("hurried_switching")
def test_c1_a_pin_is_never_had_on_an_evicted_engine():
    """Pushers pin while an evictor drops the engine: the agent is released after the last pin, and exactly once."""
    for _ in range(100):
        bench = Bench()
        bench.registry._lock = threading.Lock()
        registry, d0 = bench.registry, bench.d0
        released = []

        def push(registry=registry, d0=d0, released=released):
            resource = registry.pin(d0)
            if resource is None:
                return 0
            assert not released, "pinned after its agent was released"
            assert registry.state_of(d0) is not State.evicted
            released.extend(effect for effect in registry.settle(d0, ok=True) if isinstance(effect, Evicted))
            return 1

        def drop(registry=registry, d0=d0, released=released):
            effects = registry.retire(d0, StaleReason.dropped, "operator")
            released.extend(effect for effect in effects if isinstance(effect, Evicted))

        at_once([push, push, push, drop])
        assert released == [Evicted("d0", d0, StaleReason.dropped, "agent")]
        assert registry.pin(d0) is None


@pytest.mark.usefixtures("hurried_switching")
def test_c1_push_evict_and_shake_hands_for_ten_thousand_pins():
    """Four engines, pushers that heal what they find broken, an evictor: each agent is released once."""
    registry = Registry(CONFIG, FakeClock(), random.Random(1))
    registry._back_off = lambda engine, now_s: None  # attempts at once: this test is about the lock
    released, loaded = [], []
    pins_wanted = 10_000
    threads = 4
    done = threading.Event()

    def release(effects):
        released.extend(effect.resource for effect in effects if isinstance(effect, Evicted) and effect.resource)

    def push(seed):
        rng = random.Random(seed)
        pins = 0
        while pins < pins_wanted // threads:
            engine_id = f"d{rng.randrange(4)}"
            generation, effects = registry.admit(engine_id, "one", engine_id)
            release(effects)
            attempt = registry.begin_handshake(generation)
            if attempt is not None:
                loaded.append(attempt)
                if not registry.handshake_succeeded(generation, attempt, attempt):
                    released.append(attempt)
            resource = registry.pin(generation)
            if resource is not None:
                assert registry.pins_of(generation) > 0
                release(registry.settle(generation, ok=rng.random() < 0.9))
                pins += 1
        return pins

    def evict():
        rng = random.Random(0)
        while not done.is_set():
            generation = registry.generation_of(f"d{rng.randrange(4)}")
            if generation is not None:
                release(registry.retire(generation, StaleReason.dropped, "operator"))

    with ThreadPoolExecutor(threads + 1) as pool:
        evictor = pool.submit(evict)
        try:
            pushers = [pool.submit(push, seed) for seed in range(threads)]
            assert sum(future.result(PATIENCE_S * 3) for future in pushers) == pins_wanted
        finally:
            done.set()
        evictor.result(PATIENCE_S)
    for shot in registry.snapshot():
        release(registry.retire(shot.generation, StaleReason.closing, "end"))
    assert len(registry) == 0
    assert sorted(released) == sorted(loaded), "every agent that was loaded is released once"


@pytest.mark.usefixtures("hurried_switching")
def test_rule6_two_evictions_of_one_engine_race_into_one():
    for _ in range(100):
        bench = Bench()
        bench.registry._lock = threading.Lock()
        bench.clock.advance(CONFIG.engine_ttl_s)
        registry, d0 = bench.registry, bench.d0
        results = at_once(
            [
                registry.sweep,
                lambda registry=registry, d0=d0: registry.retire(d0, StaleReason.dropped, "operator"),
                lambda registry=registry, d0=d0: registry.lost(d0, "cable", link_is_up=False),
            ]
        )
        assert sum(isinstance(effect, Evicted) for effects in results for effect in effects) == 1
