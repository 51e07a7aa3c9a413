"""The registry against a model that knows nothing of timers, locks or heaps, only the rules.

Hypothesis draws what happens; the model predicts every return value, every effect, every row that is fired and every
field of every snapshot. Ids, ranks and incarnations are few, so that rules collide; generations, attempts and pins that
are over stay in play, so that late answers are common; time moves by steps that fall on and just before the limits.
"""

from dataclasses import asdict

import pytest
from covering import run_to_cover
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvpush.registry
from kvpush.config import Config
from kvpush.errors import QueueFull
from kvpush.events import StaleReason
from kvpush.lifecycle import ENGINE
from kvpush.registry import Evicted, HandshakeTimedOut, Registry, RetryDue, WentStale
from kvpush.testing.clock import FakeClock

TIMEOUT_S, TTL_S, GRACE_S, SILENCE_S, MEMORY_S = 4.0, 10.0, 6.0, 14.0, 25.0
FLOOR_S, CAP_S = 2.0, 7.0
MAX_ENGINES, MAX_REMEMBERED = 3, 1
CONFIG = Config(
    handshake_timeout_s=TIMEOUT_S,
    handshake_backoff_min_s=FLOOR_S,
    handshake_backoff_max_s=CAP_S,
    engine_ttl_s=TTL_S,
    evict_grace_s=GRACE_S,
    liveness_timeout_s=SILENCE_S,
    tombstone_ttl_s=MEMORY_S,
    max_engines=MAX_ENGINES,
    max_tombstones=MAX_REMEMBERED,
)
STEPS_S = [
    0.5,
    1.0,
    2.0,
    3.0,
    TIMEOUT_S - 1,
    TIMEOUT_S,
    GRACE_S - 1,
    GRACE_S,
    TTL_S - 1,
    TTL_S,
    SILENCE_S - 1,
    SILENCE_S,
]

covered = set()  # (state, trigger) of every row that was fired in the whole run


class MiddleOfTheRange:
    """Stands in for the random numbers of the jitter, so that the model can name the delay."""

    @staticmethod
    def uniform(low, high):
        return (low + high) / 2


class FireRecorder:
    """Stands in for the engine's lifecycle and sees which rows are fired."""

    initial = ENGINE.initial

    def __init__(self):
        self.fired = []

    def fire(self, engine, trigger):
        covered.add((engine.state, trigger))
        self.fired.append((engine.generation, str(engine.state), str(trigger)))
        ENGINE.fire(engine, trigger)


class Model:
    """What the registry must do, told with dictionaries and without any schedule: a sweep looks at everything."""

    def __init__(self):
        self.now = 1000.0
        self.live = {}  # generation -> record
        self.current = {}  # (engine id, rank) -> generation
        self.past = {}  # (engine id, rank) -> record with "over", oldest first
        self.generations = 0
        self.attempts = 0
        self.fired = []
        self.effects = []

    # --- names -------------------------------------------------------------------------------------------------------

    def admit(self, key, incarnation, address):
        old = self.live.get(self.current.get(key))
        if old and old["incarnation"] == incarnation and self.serves(old):
            old["address"] = address
            self.hear(old, activity=True)
            return old["generation"]
        return self.replace(old, key, incarnation, address)

    def admit_address(self, key, address):
        old = self.live.get(self.current.get(key))
        if old and old["address"] == address and self.serves(old):
            return old["generation"]
        return self.replace(old, key, "", address)

    def serves(self, record):
        return record["state"] != "stale" or record["reason"] == "idle"

    def replace(self, old, key, incarnation, address):
        if len(self.live) >= MAX_ENGINES and (old is None or old["pins"]):
            return QueueFull
        remembered = self.past.get(key)
        if old:
            self.end(old, "superseded", f"by {incarnation or 'a new record'}", "retired")
            remembered = old
        elif remembered and self.now - remembered["over"] >= MEMORY_S:
            remembered = None
        self.past.pop(key, None)
        self.generations += 1
        record = {"generation": self.generations, "engine_id": key[0], "rank": key[1], "incarnation": incarnation}
        record.update(address=address)
        record.update(state="unknown", reason=None, active=self.now, heard=self.now, attempt=None, begun=None)
        record.update(resource=None, link=True, pins=0, pushes=0, stale_since=None, is_wanted=False)
        record.update(failures=0, retry_at=0.0, error="")
        if remembered and incarnation in ("", remembered["incarnation"]):
            record |= {key: remembered[key] for key in ("failures", "retry_at", "error")}
        self.live[self.generations] = record
        self.current[key] = self.generations
        return self.generations

    def name_incarnation(self, generation, incarnation):
        record = self.live.get(generation)
        if record and record["state"] == "handshaking":
            record["incarnation"] = incarnation

    # --- handshakes --------------------------------------------------------------------------------------------------

    def need(self, generation):
        record = self.live.get(generation)
        if record is None:
            return "gone"
        if record["state"] == "stale" and record["reason"] == "idle":
            self.move(record, "revived", "connected")
            record.update(reason=None, active=self.now)
        if record["state"] == "unknown" and record["retry_at"] > self.now:
            record["is_wanted"] = True
            return "wait"
        return {"connected": "write", "handshaking": "wait", "unknown": "handshake", "stale": "gone"}[record["state"]]

    def begin_handshake(self, generation):
        record = self.live.get(generation)
        if not record or record["state"] != "unknown" or record["retry_at"] > self.now:
            return None
        self.attempts += 1
        self.move(record, "handshake_started", "handshaking")
        record.update(attempt=self.attempts, begun=self.now, is_wanted=False, heard=self.now)
        return self.attempts

    def is_attempt_current(self, generation, attempt):
        record = self.live.get(generation)
        return bool(record) and record["state"] == "handshaking" and record["attempt"] == attempt

    def handshake_succeeded(self, generation, attempt, resource):
        if not self.is_attempt_current(generation, attempt):
            return False
        record = self.live[generation]
        self.move(record, "handshake_succeeded", "connected")
        record.update(attempt=None, resource=resource, active=self.now, heard=self.now)
        return True

    def handshake_failed(self, generation, attempt, error):
        if not self.is_attempt_current(generation, attempt):
            return False
        self.fail(self.live[generation], error)
        return True

    def fail(self, record, error):
        self.move(record, "handshake_failed", "unknown")
        record.update(attempt=None, error=error)
        self.back_off(record)

    def back_off(self, record):
        record["failures"] += 1
        ceiling_s = min(CAP_S, FLOOR_S * 2 ** record["failures"])
        record["retry_at"] = self.now + (FLOOR_S + ceiling_s) / 2

    # --- pushes and news ---------------------------------------------------------------------------------------------

    def pin(self, generation):
        record = self.live.get(generation)
        if not record or record["state"] != "connected":
            return None
        self.note(record, "push_posted")
        record.update(active=self.now, pins=record["pins"] + 1, pushes=record["pushes"] + 1)
        return record["resource"]

    def settle(self, generation, ok):
        record = self.live[generation]
        self.note(record, "push_settled")
        record["pins"] -= 1
        if record["state"] == "connected":
            record["active"] = self.now
            if ok:
                record.update(heard=self.now, failures=0, retry_at=0.0)
        elif not record["pins"]:
            self.evict(record)

    def heard(self, generation, activity):
        if generation in self.live:
            self.hear(self.live[generation], activity)

    def hear(self, record, activity):
        if record["state"] == "connected":
            self.note(record, "peer_heard")
        record["heard"] = self.now
        if activity and record["state"] != "stale":
            record["active"] = self.now

    def lost(self, generation, detail, link_is_up):
        if generation in self.live:
            self.live[generation]["link"] = link_is_up
            self.end(self.live[generation], "lost", detail, "peer_lost")

    def retire(self, generation, reason, detail):
        if generation in self.live:
            self.end(self.live[generation], reason, detail, "retired")

    def retire_address(self, address, keep, rank):
        for record in list(self.live.values()):
            if record["address"] == address and (record["engine_id"], record["rank"]) != (keep, rank):
                self.end(record, "superseded", f"{keep} answers at {address}", "retired")

    def end(self, record, reason, detail, trigger):
        if record["reason"] not in (None, "idle"):
            return
        if record["state"] == "handshaking":
            self.fail(record, detail)
        if record["state"] == "connected":
            self.move(record, trigger, "stale")
            if reason == "lost":
                self.back_off(record)
        record["reason"] = reason
        if reason == "lost":
            record["error"] = detail
        self.effects.append(
            WentStale(record["engine_id"], record["generation"], reason, detail, link_is_up=record["link"])
        )
        if not record["pins"]:
            self.evict(record)

    def evict(self, record):
        self.move(record, "evict", "evicted")
        generation, key = record["generation"], (record["engine_id"], record["rank"])
        self.effects.append(Evicted(record["engine_id"], generation, record["reason"], record["resource"]))
        del self.live[generation]
        if self.current.get(key) == generation:
            del self.current[key]
            self.past.pop(key, None)
            self.past[key] = record | {"over": self.now}
            while len(self.past) > MAX_REMEMBERED:
                del self.past[next(iter(self.past))]

    # --- time --------------------------------------------------------------------------------------------------------

    def sweep(self, first):
        """``first``: generations to begin with, in this order."""
        for generation in [*first, *(generation for generation in list(self.live) if generation not in first)]:
            self.age(self.live[generation])
        for key, record in list(self.past.items()):
            if self.now - record["over"] >= MEMORY_S:
                del self.past[key]

    def age(self, record):
        if self.is_silent(record):
            record["link"] = False
            self.end(record, "lost", "nothing heard for 14 s", "peer_lost")
            return
        named = (record["engine_id"], record["generation"])
        idle_s = self.now - record["active"]
        if record["state"] == "handshaking":
            if self.now - record["begun"] >= TIMEOUT_S:
                self.effects.append(HandshakeTimedOut(*named, record["attempt"]))
        elif record["state"] == "unknown":
            if record["is_wanted"] and record["retry_at"] <= self.now:
                record["is_wanted"] = False
                self.effects.append(RetryDue(*named))
            if idle_s >= TTL_S + GRACE_S:
                self.evict(record)
        elif record["state"] == "connected":
            if idle_s >= TTL_S and not record["pins"]:
                self.move(record, "ttl_expired", "stale")
                record.update(reason="idle", stale_since=self.now)
                self.effects.append(WentStale(*named, "idle", "idle", link_is_up=record["link"]))
        elif record["reason"] == "idle" and self.now - record["stale_since"] >= GRACE_S:
            self.evict(record)

    def is_silent(self, record):
        listens = record["incarnation"] and record["state"] != "handshaking" and record["reason"] in (None, "idle")
        return listens and self.now - record["heard"] >= SILENCE_S

    # --- what can be seen --------------------------------------------------------------------------------------------

    def those(self, state):
        return [generation for generation, record in self.live.items() if record["state"] == state]

    def move(self, record, trigger, dest):
        self.note(record, trigger)
        record["state"] = dest

    def note(self, record, trigger):
        self.fired.append((record["generation"], record["state"], trigger))

    def snapshots(self):
        past = [record for record in self.past.values() if self.now - record["over"] < MEMORY_S]
        return [self.shot(record) for record in [*self.live.values(), *past]]

    def shot(self, record):
        same = ("engine_id", "rank", "generation", "incarnation", "state", "reason", "address", "pushes")
        return {key: record[key] for key in same} | {
            "idle_s": self.now - record["active"],
            "silent_s": self.now - record["heard"],
            "in_flight": record["pins"],
            "handshake_failures": record["failures"],
            "retry_in_s": max(0.0, record["retry_at"] - self.now),
            "last_error": record["error"],
        }


KEYS = [("d0", (0, 0)), ("d0", (0, 1)), ("d1", (0, 0))]
ENGINES = st.sampled_from(KEYS)
INCARNATIONS = st.sampled_from(["one", "one", "one", "two"])  # mostly the same: each other one ends a record
ADDRESSES = st.sampled_from(["host:1", "host:1", "host:1", "host:2"])
PICKS = st.integers(0, 7)  # counted from the newest, modulo how many there are


class RegistryMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.recorder = FireRecorder()
        kvpush.registry.ENGINE = self.recorder
        self.clock = FakeClock()
        self.registry = Registry(CONFIG, self.clock, MiddleOfTheRange())
        self.model = Model()
        self.generations = []  # all that ever were
        self.attempts = []  # (generation, attempt), superseded ones too
        self.pins = []  # generations, orphaned ones too

    def teardown(self):
        kvpush.registry.ENGINE = ENGINE

    # --- comparing ---------------------------------------------------------------------------------------------------

    def check(self, actual, expected, effects=()):
        """The value, the effects and the rows of one call, in order."""
        assert actual == expected
        assert list(effects) == self.model.effects
        assert self.recorder.fired == self.model.fired
        self.forget()

    def forget(self):
        for record in (self.model.effects, self.model.fired, self.recorder.fired):
            record.clear()

    def admitted(self, call, expected):
        try:
            generation, effects = call()
        except QueueFull:
            generation, effects = QueueFull, []
        self.check(generation, expected, effects)
        if generation is not QueueFull and generation not in self.generations:
            assert generation > max(self.generations, default=0), "a generation was used twice"
            self.generations.append(generation)
        return generation

    def pick(self, items, index):
        return items[-1 - index % len(items)]

    def pick_generation(self, index):
        """Mostly one that is alive; a low number means any, those that are over included."""
        live = list(self.model.live)
        return self.pick(live if live and index > 1 else self.generations, index)

    # --- names -------------------------------------------------------------------------------------------------------

    @rule(key=ENGINES, incarnation=INCARNATIONS, address=ADDRESSES)
    def admit(self, key, incarnation, address):
        self.meet(key, incarnation, address)

    def meet(self, key, incarnation, address):
        engine_id, rank = key
        expected = self.model.admit(key, incarnation, address)
        return self.admitted(lambda: self.registry.admit(engine_id, incarnation, address, rank), expected)

    @rule(key=ENGINES, address=ADDRESSES)
    def admit_address(self, key, address):
        engine_id, rank = key
        expected = self.model.admit_address(key, address)
        self.admitted(lambda: self.registry.admit_address(engine_id, address, rank), expected)

    @rule(key=ENGINES, incarnation=INCARNATIONS, address=ADDRESSES)
    def connect(self, key, incarnation, address):
        """The short cut to the deep states."""
        generation = self.meet(key, incarnation, address)
        if generation is not QueueFull and self.begin(generation) is not None:
            self.answer(*self.attempts[-1], ok=True)

    @precondition(lambda self: self.generations)
    @rule(index=PICKS, incarnation=INCARNATIONS)
    def name_incarnation(self, index, incarnation):
        generation = self.pick_generation(index)
        self.check(
            self.registry.name_incarnation(generation, incarnation),
            self.model.name_incarnation(generation, incarnation),
        )

    # --- handshakes --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.generations)
    @rule(index=PICKS)
    def need(self, index):
        generation = self.pick_generation(index)
        self.check(self.registry.need(generation).name, self.model.need(generation))

    @precondition(lambda self: self.generations)
    @rule(index=PICKS)
    def begin_handshake(self, index):
        self.begin(self.pick_generation(index))

    def begin(self, generation):
        attempt = self.registry.begin_handshake(generation)
        self.check(attempt, self.model.begin_handshake(generation))
        if attempt is not None:
            assert all(attempt != other for _, other in self.attempts), "an attempt's number was used twice"
            self.attempts.append((generation, attempt))
        return attempt

    @precondition(lambda self: self.attempts)
    @rule(index=PICKS, ok=st.booleans())
    def handshake_answered(self, index, ok):
        self.answer(*self.pick(self.attempts, index), ok=ok)

    @rule(key=ENGINES, incarnation=INCARNATIONS, address=ADDRESSES)
    def dial(self, key, incarnation, address):
        """The short cut to an attempt that is under way, patient enough for the backoff of the last one."""
        generation = self.meet(key, incarnation, address)
        if generation is not QueueFull:
            self.model.now = self.clock.advance(max(0.0, self.model.live[generation]["retry_at"] - self.model.now))
            self.begin(generation)

    @precondition(lambda self: self.attempts and self.model.those("handshaking"))
    @rule(index=PICKS, other=PICKS, ok=st.booleans())
    def handshake_answered_for_another(self, index, other, ok):
        """An attempt that is over, or somebody else's, for an engine that is in the middle of one."""
        generation = self.pick(self.model.those("handshaking"), other)
        self.answer(generation, self.pick(self.attempts, index)[1], ok=ok)

    def answer(self, generation, attempt, *, ok):
        assert self.registry.is_attempt_current(generation, attempt) == self.model.is_attempt_current(
            generation, attempt
        )
        if ok:
            resource = f"agent {attempt}"
            actual = self.registry.handshake_succeeded(generation, attempt, resource)
            expected = self.model.handshake_succeeded(generation, attempt, resource)
        else:
            actual = self.registry.handshake_failed(generation, attempt, "refused")
            expected = self.model.handshake_failed(generation, attempt, "refused")
        self.check(actual, expected)

    # --- pushes and news ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.generations)
    @rule(index=PICKS)
    def pin(self, index):
        self.pin_one(self.pick_generation(index))

    @precondition(lambda self: self.model.those("connected"))
    @rule(index=PICKS)
    def pin_a_connected_one(self, index):
        self.pin_one(self.pick(self.model.those("connected"), index))

    def pin_one(self, generation):
        resource = self.registry.pin(generation)
        self.check(resource, self.model.pin(generation))
        if resource is not None:
            self.pins.append(generation)

    @precondition(lambda self: self.pins)
    @rule(index=PICKS, ok=st.booleans())
    def settle(self, index, ok):
        self.settle_one(self.pick(self.pins, index), ok)

    def settle_one(self, generation, ok):
        self.pins.remove(generation)
        effects = self.registry.settle(generation, ok=ok)
        self.check(None, self.model.settle(generation, ok), effects)

    @precondition(lambda self: self.model.those("connected"))
    @rule(index=PICKS, ok=st.booleans(), step_s=st.sampled_from(STEPS_S), is_dropped=st.booleans())
    def push(self, index, ok, step_s, is_dropped):
        """The short cut to a settle, on an engine that may have become stale in the meantime."""
        generation = self.pick(self.model.those("connected"), index)
        self.pin_one(generation)
        if is_dropped:
            effects = self.registry.retire(generation, StaleReason.dropped, "operator")
            self.check(None, self.model.retire(generation, "dropped", "operator"), effects)
        self.time_passes(step_s)
        self.sweep()
        self.settle_one(generation, ok)

    @precondition(lambda self: self.generations)
    @rule(index=PICKS, activity=st.booleans())
    def heard(self, index, activity):
        generation = self.pick_generation(index)
        self.check(self.registry.heard(generation, activity=activity), self.model.heard(generation, activity))

    @precondition(lambda self: self.generations)
    @rule(
        index=PICKS,
        key=ENGINES,
        how=st.sampled_from(["lost", "lost, link up", "superseded", "dropped", "closing", "address"]),
    )
    def end(self, index, key, how):
        """One rule for all of them: as many rules would let no engine live for long."""
        generation = self.pick_generation(index)
        if how == "address":
            effects = self.registry.retire_address("host:1", *key)
            expected = self.model.retire_address("host:1", *key)
        elif how.startswith("lost"):
            link_is_up = how != "lost"
            effects = self.registry.lost(generation, "cable", link_is_up=link_is_up)
            expected = self.model.lost(generation, "cable", link_is_up)
        else:
            effects = self.registry.retire(generation, StaleReason(how), "because")
            expected = self.model.retire(generation, how, "because")
        self.check(None, expected, effects)

    # --- time --------------------------------------------------------------------------------------------------------

    @rule(step_s=st.sampled_from(STEPS_S))
    def time_passes(self, step_s):
        self.model.now = self.clock.advance(step_s)

    @rule()
    def sweep(self):
        """The registry sweeps in the order of its timers. That order is its own business; the model follows it."""
        effects = self.registry.sweep()
        self.model.sweep(dict.fromkeys(effect.generation for effect in effects))
        self.check(None, None, effects)

    @rule(step_s=st.sampled_from(STEPS_S), index=PICKS, activity=st.booleans())
    def time_passes_and_a_peer_speaks(self, step_s, index, activity):
        self.time_passes(step_s)
        if self.generations:
            self.heard(index, activity)
        self.sweep()

    @precondition(lambda self: self.model.those("connected"))
    @rule()
    def all_send_heartbeats_until_the_ttl_ends(self):
        """The short cut to idle engines."""
        self.time_passes(TTL_S)
        for generation in list(self.model.live):
            self.check(self.registry.heard(generation, activity=False), self.model.heard(generation, activity=False))
        self.sweep()

    @precondition(lambda self: self.model.those("stale"))
    @rule(index=PICKS)
    def a_push_wants_a_stale_one(self, index):
        generation = self.pick(self.model.those("stale"), index)
        self.check(self.registry.need(generation).name, self.model.need(generation))

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def snapshots_agree_in_every_field(self):
        shots = [asdict(shot) for shot in self.registry.snapshot()]
        assert shots == self.model.snapshots()

    @invariant()
    def look_ups_agree(self):
        assert len(self.registry) == len(self.model.live) <= MAX_ENGINES
        for engine_id, rank in KEYS:
            assert self.registry.generation_of(engine_id, rank) == self.model.current.get((engine_id, rank))
        for generation in self.generations:
            record = self.model.live.get(generation)
            assert str(self.registry.state_of(generation)) == (record["state"] if record else "evicted")
            assert self.registry.pins_of(generation) == self.pins.count(generation)

    @invariant()
    def the_next_sweep_is_not_late(self):
        """Whatever the model would do by then is announced by ``next_due_s``."""
        dues = [due_s for record in self.model.live.values() if (due_s := self.due_s(record)) is not None]
        dues += [record["over"] + MEMORY_S for record in self.model.past.values()]
        if dues:
            assert self.registry.next_due_s() <= min(dues)

    @staticmethod
    def due_s(record):
        dues = []
        if record["incarnation"] and record["state"] != "handshaking" and record["reason"] in (None, "idle"):
            dues.append(record["heard"] + SILENCE_S)
        if record["state"] == "handshaking":
            dues.append(record["begun"] + TIMEOUT_S)
        elif record["state"] == "unknown":
            dues.append(record["active"] + TTL_S + GRACE_S)
            dues += [record["retry_at"]] if record["is_wanted"] else []
        elif record["state"] == "connected":
            dues += [] if record["pins"] else [record["active"] + TTL_S]
        elif record["reason"] == "idle":
            dues.append(record["stale_since"] + GRACE_S)
        return min(dues, default=None)

    @invariant()
    def an_engine_that_is_over_has_no_pin_and_a_pinned_one_its_agent(self):
        for generation in self.pins:
            assert self.registry._by_generation[generation].resource is not None


STEPS = 50


@pytest.mark.timeout(600)
def test_rule1_to_6_registry_agrees_with_the_model_and_every_row_is_taken():
    covered.clear()
    rows = {(state, row.trigger) for row in ENGINE.rows for state in row.sources}
    run_to_cover(RegistryMachine, lambda: rows - covered, steps=STEPS)
    assert covered == rows, f"rows that are in no table: {covered - rows}"
