"""The three lifecycles as tables, and the one way to move along them. The only importer of ``transitions``.

Rules of this file:

* Every state change of an engine, a push or a receive is a row of a table below. Nothing else writes ``state``.
* Rows carry no guards and no callbacks. Whoever fires has decided before, in plain Python, under the lock that guards
  the object; a trigger that is not in the table for this state raises :class:`IllegalTransition` and changes nothing.
* ``dest=None`` marks an internal row: the state is neither left nor entered, the trigger is only *legal* there.

Theory of operation. ``transitions`` usually owns its models; here one ``Machine`` per table has none (a flyweight), and
the bound trigger of an event is called with whatever object has a ``state``. That costs the same few microseconds per
trigger and no memory per engine. The machine keys states by enum member *name*, so the enums are ``StrEnum`` with
name == value.

``docs/statecharts/`` is generated from these tables.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from transitions import Machine, MachineError
from transitions.core import Event

from kvpush.errors import IllegalTransition

S = TypeVar("S", bound=enum.StrEnum)
T = TypeVar("T", bound=enum.StrEnum)


class HasState(Protocol[S]):
    """Anything that a lifecycle can move."""

    state: S


@dataclass(frozen=True, slots=True)
class Row(Generic[S, T]):
    """One row of a table. ``why`` says when it is fired and becomes a cell of the generated table."""

    trigger: T
    sources: tuple[S, ...]
    dest: S | None
    why: str


class _PlainEvent(Event):
    """A trigger whose rows carry no guards and no callbacks: there is nothing to evaluate or call, only a state to set.

    The library's own way through hooks that are all empty, and the log lines in between, costs seven times as much. So
    nothing is logged here either, which happens under a lock.
    """

    def trigger(self, model: Any, *args: Any, **kwargs: Any) -> bool:
        rows = self.transitions.get(model.state)  # a StrEnum: equal to its name, by which rows are kept
        if not rows:
            raise MachineError(f"no row for {self.name} from {model.state}")
        dest = rows[0].dest
        if dest is not None:
            model.state = self.machine.states[dest].value
        return True


class _PlainMachine(Machine):
    event_cls = _PlainEvent


class Lifecycle(Generic[S, T]):
    """A table that runs. Stateless: threads may share it while each *object* is guarded by its owner's lock."""

    def __init__(
        self, name: str, states: type[S], triggers: type[T], initial: S, rows: Sequence[Row[S, T]], final: Sequence[S]
    ) -> None:
        self.name = name
        self.states = tuple(states)
        self.triggers = tuple(triggers)
        self.initial = initial
        self.rows = tuple(rows)
        self.final = frozenset(final)
        machine = _PlainMachine(
            model=None,
            states=list(states),
            initial=None,
            auto_transitions=False,
            queued=False,
            transitions=[
                {
                    "trigger": row.trigger.value,
                    "source": list(row.sources),
                    "dest": row.dest,
                }
                for row in rows
            ],
        )
        self._fire: dict[T, Callable[[Any], bool]] = {
            trigger: machine.events[trigger.value].trigger for trigger in triggers
        }

    def fire(self, subject: HasState[S], trigger: T) -> None:
        """Move ``subject`` along the row for its state, or raise :class:`IllegalTransition` and leave it as it is."""
        state = subject.state
        try:
            moved = self._fire[trigger](subject)
        except MachineError:
            raise IllegalTransition(self.name, state, trigger, tuple(self.allowed(state))) from None
        assert moved, "rows carry no guards, so a matching row always fires"

    def allowed(self, state: S) -> list[T]:
        """The triggers that are legal in ``state``, in table order."""
        return [row.trigger for row in self.rows if state in row.sources]

    def dest(self, state: S, trigger: T) -> S | None:
        """Where ``trigger`` leads from ``state`` (itself for an internal row); ``None`` when it is not legal there."""
        for row in self.rows:
            if row.trigger is trigger and state in row.sources:
                return state if row.dest is None else row.dest
        return None


# --- a remote engine: one record per engine and generation -----------------------------------------------------------


class State(enum.StrEnum):
    """A remote engine, as this side sees it."""

    unknown = enum.auto()
    handshaking = enum.auto()
    connected = enum.auto()
    stale = enum.auto()
    evicted = enum.auto()


class Trigger(enum.StrEnum):
    """What moves an engine."""

    handshake_started = enum.auto()
    handshake_succeeded = enum.auto()
    handshake_failed = enum.auto()
    push_posted = enum.auto()
    push_settled = enum.auto()
    peer_heard = enum.auto()
    ttl_expired = enum.auto()
    peer_lost = enum.auto()
    retired = enum.auto()
    revived = enum.auto()
    evict = enum.auto()


ENGINE: Lifecycle[State, Trigger] = Lifecycle(
    "engine",
    State,
    Trigger,
    State.unknown,
    [
        Row(
            Trigger.handshake_started,
            (State.unknown,),
            State.handshaking,
            "the first push that needs the engine, or eagerly at Hello; on decode, the first receive dials",
        ),
        Row(
            Trigger.handshake_succeeded,
            (State.handshaking,),
            State.connected,
            "agent loaded and descriptors ready; on decode, Welcome: the first sign of life",
        ),
        Row(
            Trigger.handshake_failed,
            (State.handshaking,),
            State.unknown,
            "timeout, refusal, bad metadata, NIXL error, link closed; backoff with jitter decides the next attempt",
        ),
        Row(
            Trigger.push_posted,
            (State.connected,),
            None,
            "the hot path: refreshes liveness and pins, then the WRITE is posted; on decode, Register is sent",
        ),
        Row(
            Trigger.push_settled,
            (State.connected, State.stale),
            None,
            "a WRITE (on decode, a receive) reached its end: unpins; a sign of life on connected",
        ),
        Row(Trigger.peer_heard, (State.connected,), None, "any message of this incarnation"),
        Row(
            Trigger.ttl_expired,
            (State.connected,),
            State.stale,
            "no activity for engine_ttl_s and nothing in flight (reason idle)",
        ),
        Row(
            Trigger.peer_lost,
            (State.connected,),
            State.stale,
            "link closed, nothing heard for liveness_timeout_s, NIXL disconnect, stalled WRITE (reason lost)",
        ),
        Row(
            Trigger.retired,
            (State.connected,),
            State.stale,
            "a new incarnation took the id or the address, drop_engine(), goodbye (superseded, dropped, closing)",
        ),
        Row(
            Trigger.revived,
            (State.stale,),
            State.connected,
            "a push for an engine that is stale only because idle, with its link alive and its agent loaded",
        ),
        Row(
            Trigger.evict,
            (State.unknown, State.stale),
            State.evicted,
            "nothing in flight, and the reason or evict_grace_s allows it: everything is released",
        ),
    ],
    final=[State.evicted],
)


# --- a push, on prefill ----------------------------------------------------------------------------------------------


class PushState(enum.StrEnum):
    """A push on the prefill engine."""

    waiting = enum.auto()
    deferred = enum.auto()
    writing = enum.auto()
    draining = enum.auto()
    in_doubt = enum.auto()
    done = enum.auto()
    failed = enum.auto()
    cancelled = enum.auto()
    expired = enum.auto()


class PushTrigger(enum.StrEnum):
    """What moves a push."""

    engine_awaited = enum.auto()
    write_posted = enum.auto()
    caught_up = enum.auto()
    given_up = enum.auto()
    stalled = enum.auto()
    completed = enum.auto()
    failure_settled = enum.auto()
    cancel_settled = enum.auto()
    expiry_settled = enum.auto()


_PUSH_OPEN = (PushState.waiting, PushState.deferred, PushState.writing, PushState.draining, PushState.in_doubt)

PUSH: Lifecycle[PushState, PushTrigger] = Lifecycle(
    "push",
    PushState,
    PushTrigger,
    PushState.waiting,
    [
        Row(
            PushTrigger.engine_awaited,
            (PushState.waiting,),
            PushState.deferred,
            "blocks and registration have met, and the engine is not connected yet",
        ),
        Row(
            PushTrigger.write_posted,
            (PushState.waiting, PushState.deferred),
            PushState.writing,
            "the first WRITE is posted, after the last check that it is still wanted",
        ),
        Row(PushTrigger.write_posted, (PushState.writing,), None, "a further chunk or slice is posted"),
        Row(
            PushTrigger.caught_up,
            (PushState.writing,),
            PushState.waiting,
            "what could be written so far is written; more is to come, or another rank is still to register",
        ),
        Row(
            PushTrigger.given_up,
            (PushState.writing,),
            PushState.draining,
            "failed or cancelled while a WRITE is in flight: no new one starts, the outcome waits for its end",
        ),
        Row(
            PushTrigger.stalled,
            (PushState.writing, PushState.draining),
            PushState.in_doubt,
            "a WRITE neither ended nor failed within stall_timeout_s: the outcome is reported, the blocks are held",
        ),
        Row(
            PushTrigger.completed,
            (PushState.waiting, PushState.deferred, PushState.writing),
            PushState.done,
            "every position that decode asked for is written and confirmed (none, when it asked for none)",
        ),
        Row(PushTrigger.failure_settled, _PUSH_OPEN, PushState.failed, "failed, and nothing is in flight"),
        Row(
            PushTrigger.cancel_settled,
            (PushState.waiting, PushState.deferred, PushState.draining, PushState.in_doubt),
            PushState.cancelled,
            "cancelled by either side, and nothing is in flight",
        ),
        Row(
            PushTrigger.expiry_settled,
            (PushState.waiting, PushState.deferred),
            PushState.expired,
            "the lease ended before the blocks could be written",
        ),
    ],
    final=[PushState.done, PushState.failed, PushState.cancelled, PushState.expired],
)


# --- a receive, on decode --------------------------------------------------------------------------------------------


class ReceiveState(enum.StrEnum):
    """A receive on the decode engine."""

    registered = enum.auto()
    receiving = enum.auto()
    settled = enum.auto()
    holding = enum.auto()
    released = enum.auto()


class ReceiveTrigger(enum.StrEnum):
    """What moves a receive."""

    blocks_arrived = enum.auto()
    completed = enum.auto()
    ended_quiet = enum.auto()
    ended_unquiet = enum.auto()
    proven_quiet = enum.auto()
    hold_expired = enum.auto()


RECEIVE: Lifecycle[ReceiveState, ReceiveTrigger] = Lifecycle(
    "receive",
    ReceiveState,
    ReceiveTrigger,
    ReceiveState.registered,
    [
        Row(
            ReceiveTrigger.blocks_arrived,
            (ReceiveState.registered,),
            ReceiveState.receiving,
            "the first notification: some positions are in place",
        ),
        Row(ReceiveTrigger.blocks_arrived, (ReceiveState.receiving,), None, "further positions are in place"),
        Row(
            ReceiveTrigger.completed,
            (ReceiveState.registered, ReceiveState.receiving),
            ReceiveState.settled,
            "every position is in place (done); nothing was asked for",
        ),
        Row(
            ReceiveTrigger.ended_quiet,
            (ReceiveState.registered, ReceiveState.receiving),
            ReceiveState.settled,
            "failed, cancelled or expired, and no write can come: the blocks are the caller's with the outcome",
        ),
        Row(
            ReceiveTrigger.ended_unquiet,
            (ReceiveState.registered, ReceiveState.receiving),
            ReceiveState.holding,
            "failed, cancelled or expired while a write may still come: reported now, the blocks are held",
        ),
        Row(
            ReceiveTrigger.proven_quiet,
            (ReceiveState.holding,),
            ReceiveState.released,
            "Drained, every position written, or the prefill process is gone",
        ),
        Row(
            ReceiveTrigger.hold_expired,
            (ReceiveState.holding,),
            ReceiveState.released,
            "hold_timeout_s passed and hold_policy says release",
        ),
    ],
    final=[ReceiveState.settled, ReceiveState.released],
)

LIFECYCLES: tuple[Lifecycle[Any, Any], ...] = (ENGINE, PUSH, RECEIVE)
