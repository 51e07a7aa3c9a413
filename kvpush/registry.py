"""Every remote engine that this side knows, one record per rank of an engine and generation, behind one lock.

An engine that is spread over several processes has a record for each of its ranks that this side talks to: each has
its own link, incarnation and NIXL agent, restarts and dies by itself, and is written as soon as it is ready. What
becomes of a transfer when one of its ranks is lost is the cores' to decide: it ends on all of them.

Rules of this file:

* The lock is held for microseconds: no NIXL call, socket, log call or caller's code under it. Methods that release
  something return *effects*, which the caller carries out after the lock is dropped.
* Only :meth:`Registry._move` changes a state, by firing a row of the engine's table.
* A *generation* is our own fence number: it grows with every new record and is never used twice. Every method that acts
  on a record takes it, so a late answer of an old generation finds nothing to change.
* Reading an engine's agent and pinning it is one step (:meth:`Registry.pin`): a pinned engine is never evicted.

Threads: any thread may call any method. The loop thread does nearly all of it; the engine's thread takes snapshots.

Two clocks per engine. *Activity* (a registration, a posted or settled push) holds off ``engine_ttl_s``; *being heard*
(any message, heartbeats too) holds off ``liveness_timeout_s``. A heartbeat is no activity: an engine that only says
that it is alive still goes idle.
"""

from __future__ import annotations

import enum
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Any

from kvpush.config import Config
from kvpush.errors import QueueFull
from kvpush.events import EngineSnapshot, StaleReason, Transition
from kvpush.lifecycle import ENGINE, State, Trigger
from kvpush.timers import Timers

Clock = Callable[[], float]  # monotonic seconds
Rank = tuple[int, int]  # (pp_rank, tp_rank)

ONLY_RANK: Rank = (0, 0)  # of an engine that is one process

_Key = tuple[str, Rank]

TRACE_LENGTH = 4096  # state changes remembered for introspection and logs
LOCK_BATCH = 8  # records that one hold of the lock works through, well within 1 ms even when all of them are evicted


class Need(enum.Enum):
    """What a push that wants an engine has to do next."""

    write = enum.auto()  # connected: pin and post
    handshake = enum.auto()  # unknown, and an attempt may start now
    wait = enum.auto()  # an attempt is under way, or backoff runs
    gone = enum.auto()  # stale or evicted: this generation serves no new push


@dataclass(frozen=True, slots=True)
class WentStale:
    """Effect: no new push goes to this generation. Whatever waits for it must be decided.

    ``link_is_up`` travels along, because the record may be gone by the time that the effect is carried out.
    """

    engine_id: str
    generation: int
    reason: StaleReason
    detail: str
    link_is_up: bool


@dataclass(frozen=True, slots=True)
class Evicted:
    """Effect: release ``resource`` (``None`` when nothing was loaded). The generation is over."""

    engine_id: str
    generation: int
    reason: StaleReason | None
    resource: Any


@dataclass(frozen=True, slots=True)
class HandshakeTimedOut:
    """Effect: the attempt took longer than ``handshake_timeout_s``; the caller decides how it failed."""

    engine_id: str
    generation: int
    attempt: int


@dataclass(frozen=True, slots=True)
class RetryDue:
    """Effect: the backoff of an unknown engine is over."""

    engine_id: str
    generation: int


RegistryEffect = WentStale | Evicted | HandshakeTimedOut | RetryDue


@dataclass(slots=True, eq=False)
class _Engine:
    """One record. Guarded by the registry's lock. ``state`` is written by the lifecycle alone."""

    engine_id: str
    rank: Rank
    generation: int
    incarnation: str
    address: str
    activity_s: float
    heard_s: float
    state: State = ENGINE.initial
    reason: StaleReason | None = None
    attempt: int | None = None  # the one under way, while handshaking
    attempt_due_s: float = inf  # while handshaking
    resource: Any = None  # what the transport loaded, from connected until evicted
    pins: int = 0
    stale_since_s: float = inf  # while it is idle
    failures: int = 0  # in a row, carried over to the next generation of the same incarnation
    retry_at_s: float = -inf
    retry_pending: bool = False
    pushes: int = 0
    last_error: str = ""

    @property
    def key(self) -> _Key:
        return self.engine_id, self.rank

    @property
    def is_ending(self) -> bool:
        """Evicted as soon as nothing is in flight; one that is idle may yet be revived."""
        return self.reason not in (None, StaleReason.idle)


@dataclass(slots=True)
class _Past:
    """What is remembered of an engine whose last generation is over: for engines(), and so that backoff survives it."""

    snapshot: EngineSnapshot
    over_s: float
    failures: int
    retry_at_s: float
    last_heard_s: float
    last_activity_s: float


@dataclass(slots=True)
class _Trace:
    changes: deque[Transition] = field(default_factory=lambda: deque(maxlen=TRACE_LENGTH))
    count: int = 0


class Registry:
    """The remote engines of one pusher or receiver."""

    def __init__(self, config: Config, clock: Clock, rng: random.Random) -> None:
        self._config = config
        self._clock = clock
        self._rng = rng
        self._lock = threading.Lock()
        self._by_generation: dict[int, _Engine] = {}
        self._current: dict[_Key, int] = {}  # its newest generation that is not over
        self._past: OrderedDict[_Key, _Past] = OrderedDict()
        self._due: Timers[int] = Timers()  # generation -> when the sweep must look at it
        self._last_generation = 0
        self._last_attempt = 0
        self._trace = _Trace()

    # --- meeting and naming ------------------------------------------------------------------------------------------

    def admit(
        self, engine_id: str, incarnation: str, address: str, rank: Rank = ONLY_RANK
    ) -> tuple[int, list[RegistryEffect]]:
        """The generation under which this incarnation is known from now on, and what that made of its predecessor.

        The record that is current is kept when it is of the same incarnation and may serve; otherwise it is retired
        (``superseded``) and a new one begins as ``unknown``. Raises :class:`QueueFull` at ``max_engines``.
        """
        effects: list[RegistryEffect] = []
        with self._lock:
            now_s = self._clock()
            current = self._current_of((engine_id, rank))
            if current is not None and current.incarnation == incarnation and not current.is_ending:
                current.address = address
                self._heard(current, now_s, activity=True)
                return current.generation, effects
            self._check_room(engine_id, current)
            return self._replace(current, (engine_id, rank), incarnation, address, now_s, effects), effects

    def admit_address(self, engine_id: str, address: str, rank: Rank = ONLY_RANK) -> tuple[int, list[RegistryEffect]]:
        """As :meth:`admit`, for decode, which knows an address before it knows who answers there."""
        effects: list[RegistryEffect] = []
        with self._lock:
            now_s = self._clock()
            current = self._current_of((engine_id, rank))
            if current is not None and current.address == address and not current.is_ending:
                return current.generation, effects
            self._check_room(engine_id, current)
            return self._replace(current, (engine_id, rank), "", address, now_s, effects), effects

    def _check_room(self, engine_id: str, current: _Engine | None) -> None:
        if current is not None and not current.pins:
            return  # it is evicted in the same step, and the new record takes its place
        if len(self._by_generation) >= self._config.max_engines:
            raise QueueFull(f"max_engines={self._config.max_engines} engines are known; {engine_id!r} must try later")

    def _replace(
        self,
        current: _Engine | None,
        key: _Key,
        incarnation: str,
        address: str,
        now_s: float,
        effects: list[RegistryEffect],
    ) -> int:
        """Begin a new generation in place of ``current``. Backoff survives, unless another incarnation starts."""
        failures, retry_at_s, last_error, known_incarnation = 0, -inf, "", None
        if current is not None:
            self._retire(current, StaleReason.superseded, f"by {incarnation or 'a new record'}", now_s, effects)
            failures, retry_at_s, last_error = current.failures, current.retry_at_s, current.last_error
            known_incarnation = current.incarnation
        past = self._past.pop(key, None)
        if past is not None and not self._is_forgotten(past, now_s):
            failures, retry_at_s, last_error = past.failures, past.retry_at_s, past.snapshot.last_error
            known_incarnation = past.snapshot.incarnation
        engine = self._begin(key, incarnation, address, now_s)
        if incarnation in ("", known_incarnation):
            engine.failures, engine.retry_at_s, engine.last_error = failures, retry_at_s, last_error
        return engine.generation

    def name_incarnation(self, generation: int, incarnation: str) -> None:
        """Decode learns the incarnation only from the answer: fill it in while handshaking."""
        with self._lock:
            engine = self._by_generation.get(generation)
            if engine is not None and engine.state is State.handshaking:
                engine.incarnation = incarnation

    def _begin(self, key: _Key, incarnation: str, address: str, now_s: float) -> _Engine:
        self._last_generation += 1
        engine = _Engine(*key, self._last_generation, incarnation, address, activity_s=now_s, heard_s=now_s)
        self._by_generation[engine.generation] = engine
        self._current[key] = engine.generation
        self._schedule(engine)
        return engine

    # --- handshake ---------------------------------------------------------------------------------------------------

    def need(self, generation: int) -> Need:
        """What a push for this generation has to do. Fires ``revived`` when the engine is stale only because idle."""
        with self._lock:
            engine = self._by_generation.get(generation)
            if engine is None:
                return Need.gone
            if engine.reason is StaleReason.idle:
                self._move(engine, Trigger.revived, "a push came")
                engine.reason = None
                engine.activity_s = self._clock()  # our own push: nothing was heard
                self._schedule(engine)
            match engine.state:
                case State.connected:
                    return Need.write
                case State.handshaking:
                    return Need.wait
                case State.unknown:
                    now_s = self._clock()
                    if engine.retry_at_s <= now_s:
                        return Need.handshake
                    engine.retry_pending = True
                    self._schedule(engine)
                    return Need.wait
                case _:
                    return Need.gone

    def begin_handshake(self, generation: int) -> int | None:
        """Claim the handshake: the attempt's number, or ``None`` when it is somebody else's, too early, or too late."""
        with self._lock:
            engine = self._by_generation.get(generation)
            now_s = self._clock()
            if engine is None or engine.state is not State.unknown or engine.retry_at_s > now_s:
                return None
            self._last_attempt += 1
            self._move(engine, Trigger.handshake_started, f"attempt {self._last_attempt}")
            engine.attempt = self._last_attempt
            engine.attempt_due_s = now_s + self._config.handshake_timeout_s
            engine.retry_pending = False
            engine.heard_s = now_s
            self._schedule(engine)
            return self._last_attempt

    def is_attempt_current(self, generation: int, attempt: int) -> bool:
        """Whether an answer to this attempt would still change anything."""
        with self._lock:
            return self._attempted(generation, attempt) is not None

    def handshake_succeeded(self, generation: int, attempt: int, resource: Any) -> bool:
        """``False``: this attempt is over or superseded, and the caller must undo what it loaded.

        ``resource`` is what :meth:`pin` will return, so it cannot be ``None``.
        """
        assert resource is not None, "pin() returns None for an engine that is not connected"
        with self._lock:
            engine = self._attempted(generation, attempt)
            if engine is None:
                return False
            self._move(engine, Trigger.handshake_succeeded, f"attempt {attempt}")
            engine.attempt = None
            engine.resource = resource
            engine.activity_s = engine.heard_s = self._clock()
            self._schedule(engine)
            return True

    def handshake_failed(self, generation: int, attempt: int, error: str) -> bool:
        """Back to unknown, with the next attempt put off. ``False``: a late answer, nothing changed."""
        with self._lock:
            engine = self._attempted(generation, attempt)
            if engine is None:
                return False
            self._fail_handshake(engine, error, self._clock())
            return True

    def _attempted(self, generation: int, attempt: int) -> _Engine | None:
        engine = self._by_generation.get(generation)
        return engine if engine is not None and engine.attempt == attempt else None

    def _fail_handshake(self, engine: _Engine, error: str, now_s: float) -> None:
        self._move(engine, Trigger.handshake_failed, error)
        engine.attempt = None
        engine.last_error = error
        self._back_off(engine, now_s)
        self._schedule(engine)

    def _back_off(self, engine: _Engine, now_s: float) -> None:
        """Exponential backoff with full jitter between the floor and the current ceiling."""
        engine.failures += 1
        floor_s = self._config.handshake_backoff_min_s
        ceiling_s = min(self._config.handshake_backoff_max_s, floor_s * 2.0 ** min(engine.failures, 64))
        engine.retry_at_s = now_s + self._rng.uniform(floor_s, ceiling_s)

    # --- the hot path ------------------------------------------------------------------------------------------------

    def pin(self, generation: int) -> Any:
        """Pin a connected engine and return what was loaded for it; ``None`` when it is not connected.

        One step: whoever holds the result holds the pin, and must :meth:`settle` it exactly once.
        """
        with self._lock:
            engine = self._by_generation.get(generation)
            if engine is None or engine.state is not State.connected:
                return None
            ENGINE.fire(engine, Trigger.push_posted)
            engine.activity_s = self._clock()
            engine.pins += 1
            engine.pushes += 1
            return engine.resource

    def settle(self, generation: int, *, ok: bool) -> list[RegistryEffect]:
        """Undo one pin. ``ok``: the peer confirmed, which is a sign of life and ends a row of failures."""
        effects: list[RegistryEffect] = []
        with self._lock:
            engine = self._by_generation[generation]  # pinned, so it is there
            assert engine.pins > 0, f"engine {engine.engine_id!r} generation {generation} was settled twice"
            ENGINE.fire(engine, Trigger.push_settled)
            engine.pins -= 1
            now_s = self._clock()
            if engine.state is State.connected:
                engine.activity_s = now_s
                if ok:
                    engine.heard_s = now_s
                    engine.failures = 0
            self._schedule(engine)
            if engine.state is State.stale:
                self._evict_if_due(engine, now_s, effects)
        return effects

    # --- signs of life and of death ----------------------------------------------------------------------------------

    def heard(self, generation: int, *, activity: bool) -> None:
        """A message of this incarnation came. ``activity`` is false for a heartbeat."""
        with self._lock:
            engine = self._by_generation.get(generation)
            if engine is not None:
                self._heard(engine, self._clock(), activity=activity)

    def _heard(self, engine: _Engine, now_s: float, *, activity: bool) -> None:
        if engine.state is State.connected:
            ENGINE.fire(engine, Trigger.peer_heard)
        engine.heard_s = now_s
        # an idle engine that is stale ages on: only a push revives it
        if activity and engine.state is not State.stale:
            engine.activity_s = now_s

    def lost(self, generation: int, detail: str, *, link_is_up: bool) -> list[RegistryEffect]:
        """The peer is lost. ``link_is_up`` tells a WRITE's failure from a link that closed or fell silent."""
        effects: list[RegistryEffect] = []
        with self._lock:
            engine = self._by_generation.get(generation)
            if engine is None:
                return effects
            now_s = self._clock()
            self._end(engine, Trigger.peer_lost, StaleReason.lost, detail, now_s, effects, link_is_up=link_is_up)
        return effects

    def retire(self, generation: int, reason: StaleReason, detail: str) -> list[RegistryEffect]:
        """Superseded, dropped or closing: no new push; evicted as soon as nothing is in flight."""
        effects: list[RegistryEffect] = []
        with self._lock:
            engine = self._by_generation.get(generation)
            if engine is not None:
                self._retire(engine, reason, detail, self._clock(), effects)
        return effects

    def retire_address(self, address: str, keep_engine_id: str, rank: Rank = ONLY_RANK) -> list[RegistryEffect]:
        """Another engine answers at ``address`` now: whoever was known there before is superseded."""
        effects: list[RegistryEffect] = []
        with self._lock:
            now_s = self._clock()
            detail = f"{keep_engine_id} answers at {address}"
            for engine in list(self._by_generation.values()):
                if engine.address == address and engine.key != (keep_engine_id, rank):
                    self._retire(engine, StaleReason.superseded, detail, now_s, effects)
        return effects

    def _retire(
        self, engine: _Engine, reason: StaleReason, detail: str, now_s: float, effects: list[RegistryEffect]
    ) -> None:
        self._end(engine, Trigger.retired, reason, detail, now_s, effects)

    def _end(
        self,
        engine: _Engine,
        trigger: Trigger,
        reason: StaleReason,
        detail: str,
        now_s: float,
        effects: list[RegistryEffect],
        *,
        link_is_up: bool = True,
    ) -> None:
        """From any live state towards evicted, by the rows that lead there."""
        if engine.state is State.handshaking:
            self._fail_handshake(engine, detail, now_s)
        if engine.state is State.connected:
            self._move(engine, trigger, f"{reason}: {detail}")
            if reason is StaleReason.lost:
                self._back_off(engine, now_s)
        if not engine.is_ending:  # otherwise the first root cause stays
            engine.reason = reason
            if reason is StaleReason.lost:
                engine.last_error = detail
            effects.append(WentStale(engine.engine_id, engine.generation, reason, detail, link_is_up))
        self._evict_if_due(engine, now_s, effects)

    # --- ageing ------------------------------------------------------------------------------------------------------

    def sweep(self) -> list[RegistryEffect]:
        """Age the engines whose time has come. Called by the loop at :meth:`next_due_s`; needs no traffic.

        At most :data:`LOCK_BATCH` of them: when more are due, :meth:`next_due_s` is still in the past, and the loop
        calls again after it has served its pushes.
        """
        effects: list[RegistryEffect] = []
        with self._lock:
            now_s = self._clock()
            for generation in list(islice(self._due.pop_due(now_s), LOCK_BATCH)):
                engine = self._by_generation[generation]
                self._age(engine, now_s, effects)
                if engine.state is not State.evicted:
                    self._schedule(engine)
            self._forget_past(now_s)
        return effects

    def next_due_s(self) -> float | None:
        """When :meth:`sweep` has something to do next, on the registry's clock; may be early, never late."""
        with self._lock:
            due_s = self._due.next_due_s()
            if self._past:
                forget_s = next(iter(self._past.values())).over_s + self._config.tombstone_ttl_s
                due_s = forget_s if due_s is None else min(due_s, forget_s)
            return due_s

    def _age(self, engine: _Engine, now_s: float, effects: list[RegistryEffect]) -> None:
        if self._is_silent(engine, now_s):
            detail = f"nothing heard for {self._config.liveness_timeout_s:g} s"
            self._end(engine, Trigger.peer_lost, StaleReason.lost, detail, now_s, effects, link_is_up=False)
            return
        match engine.state:
            case State.handshaking:
                if now_s >= engine.attempt_due_s:
                    assert engine.attempt is not None, "handshaking always has an attempt"
                    effects.append(HandshakeTimedOut(engine.engine_id, engine.generation, engine.attempt))
            case State.connected if engine.pins == 0 and now_s >= engine.activity_s + self._config.engine_ttl_s:
                self._move(engine, Trigger.ttl_expired, f"idle for {self._config.engine_ttl_s:g} s")
                engine.reason = StaleReason.idle
                engine.stale_since_s = now_s
                effects.append(WentStale(engine.engine_id, engine.generation, engine.reason, "idle", link_is_up=True))
            case State.unknown if engine.retry_pending and now_s >= engine.retry_at_s:
                engine.retry_pending = False
                effects.append(RetryDue(engine.engine_id, engine.generation))
            case _:
                pass
        self._evict_if_due(engine, now_s, effects)

    def _is_silent(self, engine: _Engine, now_s: float) -> bool:
        return now_s >= self._silent_at_s(engine)

    def _silent_at_s(self, engine: _Engine) -> float:
        """When the peer counts as lost if nothing more is heard; infinity when nobody listens for it.

        A handshake has its own, shorter patience. A decode-side record that nobody has dialled yet has no incarnation,
        and nobody who could be heard. An idle engine is listened to: a push may revive it.
        """
        if engine.state is State.handshaking or engine.is_ending or not engine.incarnation:
            return inf
        return engine.heard_s + self._config.liveness_timeout_s

    def _evict_if_due(self, engine: _Engine, now_s: float, effects: list[RegistryEffect]) -> None:
        if self._evict_at_s(engine) > now_s:
            return
        self._move(engine, Trigger.evict, "" if engine.reason is None else str(engine.reason))
        effects.append(Evicted(engine.engine_id, engine.generation, engine.reason, engine.resource))
        del self._by_generation[engine.generation]
        self._due.cancel(engine.generation)
        if self._current.get(engine.key) == engine.generation:
            del self._current[engine.key]
            self._remember(engine, now_s)

    def _evict_at_s(self, engine: _Engine) -> float:
        """When ``evict`` is allowed, as things stand; infinity while it is not."""
        if engine.pins or engine.state not in (State.unknown, State.stale):
            return inf
        if engine.reason is StaleReason.idle:
            return engine.stale_since_s + self._config.evict_grace_s
        if engine.reason is not None:
            return -inf
        return engine.activity_s + self._config.engine_ttl_s + self._config.evict_grace_s

    def _schedule(self, engine: _Engine) -> None:
        """Set the sweep's timer when it must move forward; an entry that is early only costs one look."""
        due_s = min(self._evict_at_s(engine), self._silent_at_s(engine))
        match engine.state:
            case State.handshaking:
                due_s = engine.attempt_due_s
            case State.connected if engine.pins == 0:
                due_s = min(due_s, engine.activity_s + self._config.engine_ttl_s)
            case State.unknown if engine.retry_pending:
                due_s = min(due_s, engine.retry_at_s)
            case _:
                pass
        if due_s != inf and not self._due.is_set_before(engine.generation, due_s):
            self._due.set(engine.generation, due_s)

    # --- introspection -----------------------------------------------------------------------------------------------

    def generation_of(self, engine_id: str, rank: Rank = ONLY_RANK) -> int | None:
        """The newest generation of this rank of this engine that is not over."""
        with self._lock:
            return self._current.get((engine_id, rank))

    def state_of(self, generation: int) -> State:
        """``evicted`` for a generation that is over."""
        with self._lock:
            engine = self._by_generation.get(generation)
            return State.evicted if engine is None else engine.state

    def pins_of(self, generation: int) -> int:
        """How many pushes are in flight to this generation."""
        with self._lock:
            engine = self._by_generation.get(generation)
            return 0 if engine is None else engine.pins

    def snapshot(self) -> list[EngineSnapshot]:
        """Every live record, then the last generation of every engine that is over (bounded by ``max_tombstones``).

        Each snapshot is of one instant; the list is not, because the lock is dropped now and then on the way.
        """
        with self._lock:
            now_s = self._clock()
            engines = list(self._by_generation.values())
            past = [past for past in self._past.values() if not self._is_forgotten(past, now_s)]
        live: list[EngineSnapshot] = []
        for start in range(0, len(engines), LOCK_BATCH):
            with self._lock:
                now_s = self._clock()
                live += [self._snapshot(engine, now_s) for engine in engines[start : start + LOCK_BATCH]]
        return live + [_aged(past, now_s) for past in past]

    def describe(self, engine_id: str, rank: Rank = ONLY_RANK) -> str:
        """A sentence for people: the engine, its state, when it may be asked again, and its last error."""
        with self._lock:
            now_s = self._clock()
            current, past = self._current_of((engine_id, rank)), self._past.get((engine_id, rank))
            if current is not None:
                seen = self._snapshot(current, now_s)
            elif past is not None:
                seen = _aged(past, now_s)
            else:
                return f"engine {engine_id!r} is not known any more"
        state = f"{seen.state} ({seen.reason})" if seen.reason is not None else seen.state
        backoff = f", to be asked again in {seen.retry_in_s:.1f} s" if seen.retry_in_s else ""
        error = f", last error: {seen.last_error}" if seen.last_error else ""
        which = "" if rank == ONLY_RANK else f" rank (pp, tp) {rank}"
        return f"engine {engine_id!r}{which} is {state}{backoff}{error}"

    def transitions(self) -> list[Transition]:
        """The last state changes, oldest first, at most :data:`TRACE_LENGTH`."""
        with self._lock:
            return list(self._trace.changes)

    @property
    def num_transitions(self) -> int:
        """State changes so far. Read without the lock: a hint that :meth:`transitions_since` has something."""
        return self._trace.count

    def transitions_since(self, count: int) -> tuple[int, list[Transition]]:
        """Changes after the first ``count`` ones, and the new count. Older ones than the trace holds are left out."""
        with self._lock:
            new = min(self._trace.count - count, len(self._trace.changes))
            return self._trace.count, list(self._trace.changes)[len(self._trace.changes) - new :]

    def __len__(self) -> int:
        with self._lock:
            return len(self._by_generation)

    def _snapshot(self, engine: _Engine, now_s: float) -> EngineSnapshot:
        return EngineSnapshot(
            engine_id=engine.engine_id,
            rank=engine.rank,
            generation=engine.generation,
            incarnation=engine.incarnation,
            state=engine.state,
            reason=engine.reason,
            address=engine.address,
            idle_s=now_s - engine.activity_s,
            silent_s=now_s - engine.heard_s,
            in_flight=engine.pins,
            handshake_failures=engine.failures,
            retry_in_s=max(0.0, engine.retry_at_s - now_s),
            pushes=engine.pushes,
            last_error=engine.last_error,
        )

    # --- inside the lock ---------------------------------------------------------------------------------------------

    def _current_of(self, key: _Key) -> _Engine | None:
        generation = self._current.get(key)
        return None if generation is None else self._by_generation[generation]

    def _move(self, engine: _Engine, trigger: Trigger, detail: str) -> None:
        source = engine.state
        ENGINE.fire(engine, trigger)
        self._trace.count += 1
        self._trace.changes.append(
            Transition(self._clock(), engine.engine_id, engine.generation, source, trigger, engine.state, detail)
        )

    def _remember(self, engine: _Engine, now_s: float) -> None:
        self._past[engine.key] = _Past(
            self._snapshot(engine, now_s), now_s, engine.failures, engine.retry_at_s, engine.heard_s, engine.activity_s
        )
        while len(self._past) > self._config.max_tombstones:
            self._past.popitem(last=False)

    def _is_forgotten(self, past: _Past, now_s: float) -> bool:
        return now_s >= past.over_s + self._config.tombstone_ttl_s

    def _forget_past(self, now_s: float) -> None:
        for key, past in list(islice(self._past.items(), LOCK_BATCH)):  # the oldest come first
            if not self._is_forgotten(past, now_s):
                return
            del self._past[key]


def _aged(past: _Past, now_s: float) -> EngineSnapshot:
    """A remembered snapshot with its durations counted up to now."""
    return replace(
        past.snapshot,
        idle_s=now_s - past.last_activity_s,
        silent_s=now_s - past.last_heard_s,
        retry_in_s=max(0.0, past.retry_at_s - now_s),
    )
