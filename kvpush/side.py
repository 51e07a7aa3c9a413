"""What PrefillPusher and DecodeReceiver have in common: events, accounts, introspection, the end.

**Threads.** Any thread may call any method. A *ledger* keeps the account of every transfer from its admission to the
poll of its last event, under a lock that is held for microseconds; commands are submitted to the loop under it, so that
nothing is admitted after the order to stop.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from abc import abstractmethod
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from kvpush import wire
from kvpush.config import Config
from kvpush.errors import Closed, ConfigurationError, QueueFull, UsageError
from kvpush.events import BlocksReleased, EngineSnapshot, PushFinished, ReceiveFinished, Transition
from kvpush.layout import KVCacheSpec
from kvpush.loop import Health, Loop
from kvpush.registry import Registry
from kvpush.wire import Rank

F = TypeVar("F", PushFinished, ReceiveFinished)
A = TypeVar("A")  # what a side remembers of a transfer that it took


@dataclass(frozen=True, slots=True)
class CloseReport:
    """How ``close()`` went.

    ``unsettled`` names transfers whose blocks a late WRITE might still touch. ``is_thread_stopped`` is false when a
    native call did not return in time and the thread was left behind: then the tensors must stay allocated.
    """

    unsettled: tuple[str, ...] = ()
    is_thread_stopped: bool = True


class EventQueue(Generic[F]):
    """Events for the caller. Filled by the loop thread, emptied by any."""

    def __init__(self) -> None:
        self._events: deque[F | BlocksReleased] = deque()
        self._filled = threading.Condition()
        self._held: dict[str, None] = {}
        self._is_sealed = False

    def put(self, event: F | BlocksReleased) -> None:
        """Append, and wake whoever waits."""
        with self._filled:
            if isinstance(event, BlocksReleased):
                self._held.pop(event.transfer_id, None)
            elif self._is_sealed:
                return
            elif not event.blocks_reusable:
                self._held[event.transfer_id] = None
            self._events.append(event)
            self._filled.notify_all()

    def seal(self) -> None:
        """Every transfer has its outcome: from now on only blocks are released."""
        with self._filled:
            self._is_sealed = True

    def take(self) -> list[F | BlocksReleased]:
        """Everything so far. Never blocks for longer than a ``put``."""
        with self._filled:
            events = list(self._events)
            self._events.clear()
            return events

    def wait(self, timeout_s: float) -> None:
        """Until there is an event, up to ``timeout_s``."""
        with self._filled:
            self._filled.wait_for(lambda: bool(self._events), timeout_s)

    def __bool__(self) -> bool:
        return bool(self._events)

    def ended(self) -> set[str]:
        """Transfers whose outcome is in the queue."""
        with self._filled:
            return {event.transfer_id for event in self._events if not isinstance(event, BlocksReleased)}

    def held(self) -> tuple[str, ...]:
        """Transfers that ended and whose blocks have not been released."""
        with self._filled:
            return tuple(self._held)


class Ledger(Generic[A]):
    """The transfers that a side took and whose last event has not been polled. Bounded by ``limit``."""

    def __init__(self, owner: str, limit: int) -> None:
        self.lock = threading.RLock()  # re-entrant: a signal handler that closes may interrupt its own thread's push()
        self._owner = owner
        self._pid = os.getpid()
        self._limit = limit
        self._accounts: dict[str, A] = {}
        self._held: dict[str, A] = {}  # polled as finished, with blocks that are held
        self._closed = ""  # why nothing is taken any more

    def shut(self, why: str) -> None:
        """Take nothing from now on. The first reason stays."""
        with self.lock:
            self._closed = self._closed or why

    def check_open(self, call: str) -> None:
        """Raise :class:`Closed` after :meth:`shut`, and in a process that was forked from the one it was made in."""
        if self._closed:
            raise Closed(f"{call}: {self._owner} {self._closed}")
        if os.getpid() != self._pid:
            raise Closed(f"{call}: {self._owner} is of process {self._pid} and does not survive fork(); make a new one")

    def find(self, transfer_id: str) -> A | None:
        """The open account. Under the lock."""
        return self._accounts.get(transfer_id)

    def open(self, transfer_id: str, account: A, call: str) -> None:
        """Take a transfer. Under the lock. Raises :class:`UsageError` for an id whose blocks are held, since
        BlocksReleased could not say which of its uses it means, and :class:`QueueFull`."""
        if transfer_id in self._held:
            raise UsageError(
                f"{call}: blocks of an earlier use of transfer {transfer_id!r} are still held by {self._owner}; "
                f"use a new transfer_id, or wait for its BlocksReleased"
            )
        if len(self._accounts) + len(self._held) >= self._limit:
            raise QueueFull(
                f"{call}: {self._limit} transfers of {self._owner} have not been polled to their end "
                f"(max_pending_pushes); poll() and try again"
            )
        self._accounts[transfer_id] = account

    def settle(self, event: PushFinished | ReceiveFinished | BlocksReleased) -> A | None:
        """An event was polled: the account that it closes for good, if it does. Under the lock."""
        if isinstance(event, BlocksReleased):
            return self._held.pop(event.transfer_id, None)
        finished = self._accounts.pop(event.transfer_id, None)
        if finished is not None and not event.blocks_reusable:
            self._held[event.transfer_id] = finished
            return None
        return finished

    def without_outcome(self, events: EventQueue[Any]) -> list[str]:
        """Transfers whose outcome has neither been polled nor waits in ``events``."""
        with self.lock:
            ended = events.ended()
            return [transfer_id for transfer_id in self._accounts if transfer_id not in ended]


class Side(Generic[F, A]):
    """What :class:`kvpush.PrefillPusher` and :class:`kvpush.DecodeReceiver` have in common."""

    def __init__(
        self,
        config: Config,
        engine_id: str,
        incarnation: str,
        rank: Rank,
        registry: Registry,
        ledger: Ledger[A],
        events: EventQueue[F],
    ) -> None:
        self.engine_id = engine_id
        self.incarnation = incarnation
        self.rank = rank
        self._config = config
        self._registry = registry
        self._ledger = ledger
        self._events: EventQueue[F] = events
        self._report: CloseReport | None = None
        self._close_lock = threading.RLock()  # re-entrant for the same reason

    def _run(self, loop: Loop) -> None:
        """Start the loop, and see to it that it ends with this object or the interpreter at the latest."""
        self._side_loop = loop
        loop.start()
        self._finalizer: weakref.finalize[[float], Any] = weakref.finalize(
            self, loop.stop, self._config.close_timeout_s
        )

    # --- events ------------------------------------------------------------------------------------------------------

    def poll(self) -> list[F | BlocksReleased]:
        """What has happened since the last call. Never blocks."""
        if not self._events:
            return []
        with self._ledger.lock:  # one step, so that an outcome is at every moment in the queue or settled
            events = self._events.take()
            for event in events:
                account = self._ledger.settle(event)
                if account is not None:
                    self._account_closed(event, account)
        return events

    def wait(self, timeout_s: float) -> list[F | BlocksReleased]:
        """As :meth:`poll`, after waiting up to ``timeout_s`` for the first event. Raises UsageError when that is not a
        number of seconds."""
        self._events.wait(check_timeout(timeout_s, "wait"))
        return self.poll()

    def _account_closed(self, event: F | BlocksReleased, account: A) -> None:
        """The caller has been told that this transfer's blocks are its own again. Under the ledger's lock."""

    # --- looking at it -----------------------------------------------------------------------------------------------

    def engines(self) -> list[EngineSnapshot]:
        """Every remote engine that is known, one entry per live generation, then those that were evicted lately."""
        return self._registry.snapshot()

    def transitions(self) -> list[Transition]:
        """The last state changes of all engines, oldest first."""
        return self._registry.transitions()

    def healthy(self) -> Health:
        """Truthy while the loop turns; else its ``reason`` says what is wrong."""
        return self._side_loop.health()

    def stats(self) -> dict[str, int]:
        """Counters since the start, and sizes of everything that is bounded. Waits up to a second for the loop; empty
        when that does not answer."""
        return self._side_loop.ask(self._side_loop.stats, {})

    @abstractmethod
    def drop_engine(self, engine_id: str) -> None:
        """Retire a remote engine now."""

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> CloseReport:
        """End everything within about ``close_timeout_s``. Calling it again returns the same report.

        What can be settled in that time is; the report names the rest. Events can still be polled afterwards.
        """
        self._ledger.shut("is closed; make a new one")
        with self._close_lock:
            if self._report is None:
                self._finalizer.detach()
                is_stopped = self._side_loop.stop(self._config.close_timeout_s)
                self._report = CloseReport(self._events.held(), is_stopped)
            return self._report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_timeout(timeout_s: object, call: str) -> float:
    """``timeout_s``, cut to what the platform can wait. Raises UsageError."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or math.isnan(timeout_s):
        raise UsageError(f"{call}: timeout_s={timeout_s!r} must be a number of seconds")
    return min(max(0.0, timeout_s), threading.TIMEOUT_MAX / 2)


def check_setup(spec: object, config: object) -> None:
    """Raise ConfigurationError unless both are what their names say."""
    if not isinstance(spec, KVCacheSpec):
        raise ConfigurationError(f"spec={spec!r} must be a KVCacheSpec")
    if config is not None and not isinstance(config, Config):
        raise ConfigurationError(f"config={config!r} must be a Config")


def check_engine_id(engine_id: Any) -> str:
    """An engine id that can travel. Raises UsageError."""
    return wire.check_id(engine_id, "engine_id")
