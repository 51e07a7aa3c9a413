"""The thread under a pusher or receiver: commands in, turns, events out, health, an end in bounded time.

**Who owns what.** The loop thread alone makes, uses and closes the transport, the sockets and the core. Callers'
threads reach it through :meth:`Loop.submit` (a deque).

**What wakes it.** While nothing is in flight it sleeps in ``poll()`` on its sockets and an eventfd, no longer than to
the next timer. While something is in flight NIXL has to be asked: it then looks at everything again after a pause that
grows from ``poll_min_s`` to ``poll_max_s`` with the time since something last happened (:class:`Pace`); from a
millisecond on, that pause too is spent in ``poll()``.

**How it stops.** :meth:`Loop.stop` submits the order and joins with a bound. Whatever happens inside, the thread's end
closes what it opened. One bad item is counted and logged, and the loop goes on; a row of failures without a success in
between ends it, and then ``healthy()`` is false and :meth:`Loop.died` tells the owner's callers.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from kvpush.config import Config
from kvpush.errors import Failure, FailureCode, QueueFull
from kvpush.registry import Clock, Registry

logger = logging.getLogger("kvpush")

R = TypeVar("R")

PR_SET_TIMERSLACK = 29  # linux/prctl.h
MAX_SLEEP_S = 0.5  # an idle loop still lets NIXL notice connections that ended
WEDGED_AFTER_S = 5.0  # ten sleeps: a loop that has not turned for this long hangs in a call
MAX_FAILURES_IN_A_ROW = 100
POLL_RESOLUTION_S = 0.001  # poll() counts milliseconds: a shorter pause is slept through, deaf to sockets and commands
SPIN_S = 0.0001  # right after something happened, look again without a pause: the next event is often near
MESSAGES_PER_TURN = 256  # so that a flood of control messages starves neither WRITEs nor notifications,
BYTES_PER_TURN = 1 << 20  # nor a flood of huge ones: a registration of a million blocks takes 25 ms to check
GOODBYE_LINGER_S = 0.2  # time for the last messages to leave before the sockets close
START_TIMEOUT_S = 60.0  # the first NIXL agent of a process loads plug-ins; on a busy machine that takes seconds
CALL_TIMEOUT_S = 1.0  # stats() and the like, answered by the loop
MIN_COMMANDS = 1024  # callers' commands that may wait for the loop, and more where max_pending_pushes is large:
COMMANDS_PER_PUSH = 4  # one to submit each, the rest for chunks, cancels and the like


@dataclass(frozen=True, slots=True)
class Health:
    """True when the loop turns; else ``reason`` says what is wrong.

    ``is_healthy`` is the same as a plain ``bool``.
    """

    is_healthy: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.is_healthy


def _end_sleeps_in_time() -> None:
    """Linux ends sleeps of a thread up to 50 us late, to wake several at once (PR_SET_TIMERSLACK, prctl(2)): that is
    the shortest pause between two looks again. For the calling thread alone."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)  # an error leaves everything as it was


class Pace:
    """How long to pause between two looks at NIXL while something is in flight."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._min_s = config.poll_min_s
        self._max_s = config.poll_max_s
        self._clock = clock
        self._progress_s = clock()

    def progressed(self) -> None:
        """Something happened: look closely for a while."""
        self._progress_s = self._clock()

    def pause_s(self) -> float:
        """A quarter of the time since then, so that waiting costs at most a quarter more than the wait itself."""
        since_s = self._clock() - self._progress_s
        if since_s < SPIN_S:
            return 0.0
        return min(self._max_s, max(self._min_s, since_s / 4))


class Loop(ABC):
    """One thread. Subclasses say what it opens, what a turn does, and how it ends."""

    def __init__(self, name: str, config: Config, clock: Clock, registry: Registry) -> None:
        self.internal_errors = 0
        self._name = name
        self._config = config
        self._clock = clock
        self._registry = registry
        self.idle = threading.Event()  # set while no transfer is open or held; any thread may wait for it
        self.idle.set()
        self._poller = zmq.Poller()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._commands: deque[Callable[[], None]] = deque()
        self._max_commands = max(MIN_COMMANDS, COMMANDS_PER_PUSH * config.max_pending_pushes)
        self._is_asleep = False
        self._is_stopping = False
        self._stop_at_s = 0.0
        self._turned_s = clock()
        self._failures = 0
        self._death = ""
        self._logged_transitions = 0
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        # Guards _wake_fd against its close; nothing else is done under it. Re-entrant: a signal handler that closes may
        # interrupt its own thread in submit().
        self._fd_lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=f"kvpush {name}", daemon=True)

    # --- any thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and wait until everything is open. What went wrong there is raised here."""
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            self._is_stopping = True
            raise TimeoutError(f"{self._name}: not started within {START_TIMEOUT_S:g} s")
        if self._start_error is not None:
            self._thread.join()
            raise self._start_error

    def check_room(self, call: str) -> None:
        """Raise :class:`QueueFull` when the loop is so far behind that callers must not add to it."""
        if len(self._commands) >= self._max_commands:
            raise QueueFull(f"{call}: {self._name}: {self._max_commands} calls wait for the loop; try again later")

    def submit(self, command: Callable[[], None]) -> None:
        """Have the loop thread run ``command``. Takes microseconds. Callers' commands need :meth:`check_room` first."""
        self._commands.append(command)
        if self._is_asleep:
            self._wake()

    def ask(self, question: Callable[[], R], default: R) -> R:
        """The loop thread's answer, or ``default`` when it does not answer within ``CALL_TIMEOUT_S``."""
        answers: list[R] = []
        answered = threading.Event()

        def answer() -> None:
            try:
                answers.append(question())
            finally:
                answered.set()

        if not self._thread.is_alive() or len(self._commands) >= self._max_commands:
            return default
        self.submit(answer)
        answered.wait(CALL_TIMEOUT_S)
        return answers[0] if answers else default

    def health(self) -> Health:
        """Whether the thread lives and turns."""
        if self._death:
            return Health(is_healthy=False, reason=f"{self._name}: the loop died: {self._death}")
        if not self._thread.is_alive():
            return Health(is_healthy=False, reason=f"{self._name}: closed")
        stuck_s = self._clock() - self._turned_s
        if stuck_s > WEDGED_AFTER_S:
            return Health(is_healthy=False, reason=f"{self._name}: the loop has not turned for {stuck_s:.1f} s")
        return Health(is_healthy=True)

    def stop(self, timeout_s: float) -> bool:
        """End in order within about ``timeout_s``. ``False``: the thread hangs in a native call and is left behind."""
        self.submit(lambda: self._stop(timeout_s))
        if threading.current_thread() is self._thread:  # a finalizer that ran on this very thread
            return False
        self._thread.join(timeout_s + WEDGED_AFTER_S / 5)
        return not self._thread.is_alive()

    def _wake(self) -> None:
        with self._fd_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)  # would block at 2**64 - 1 calls that nobody has answered

    # --- what a subclass says; all on the loop thread ---------------------------------------------------------------

    @abstractmethod
    def open(self) -> None:
        """Make the transport, the sockets and the core. What it made is closed by :meth:`shut` when it raises."""

    @abstractmethod
    def turn(self, ready: set[object]) -> bool:
        """Look at everything once. ``ready``: the sockets that can be read. Whether something happened."""

    @abstractmethod
    def is_busy(self) -> bool:
        """Whether NIXL has to be asked again soon."""

    @abstractmethod
    def next_due_s(self) -> float | None:
        """The earliest timer."""

    @abstractmethod
    def begin_stop(self) -> None:
        """No new work; end what can be ended."""

    @abstractmethod
    def is_settled(self) -> bool:
        """After :meth:`begin_stop`: whether nothing is left to wait for."""

    @abstractmethod
    def shut(self) -> None:
        """Close everything that :meth:`open` made, as far as it got. Bounded."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Counters and sizes."""

    @abstractmethod
    def died(self, reason: str) -> None:
        """The loop cannot go on: fail what waits for it."""

    # --- the loop thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        _end_sleeps_in_time()
        try:
            self.open()
        except BaseException as exc:  # noqa: BLE001  # raised again in start(), on the caller's thread
            self._start_error = exc
            self._guarded(self.shut)
            self._close_fd()
            self._started.set()
            return
        self._started.set()
        try:
            pace = Pace(self._config, self._clock)
            while not (self._is_stopping and (self.is_settled() or self._clock() >= self._stop_at_s)):
                self._turn_once(pace)
        except BaseException as exc:  # noqa: BLE001  # callers learn of it from healthy() and from their events
            self._death = self._death or repr(exc)
            logger.critical("%s: the loop died: %s", self._name, self._death)
            self._guarded(lambda: self.died(self._death))
        finally:
            self._guarded(self.shut)
            self._log_transitions()
            self._close_fd()

    def _turn_once(self, pace: Pace) -> None:
        ready = self._sleep(pace)
        self._turned_s = self._clock()
        has_progressed = bool(self._commands)
        for _ in range(len(self._commands)):
            self._guarded(self._commands.popleft())
        has_progressed |= bool(self._guarded(self.turn, ready))
        if has_progressed:
            pace.progressed()
        self._log_transitions()

    def _sleep(self, pace: Pace) -> set[object]:
        if self._commands:
            return self._ready(0)
        if self.is_busy():
            timeout_s = pace.pause_s()
            if timeout_s < POLL_RESOLUTION_S:
                if timeout_s:
                    time.sleep(timeout_s)
                return self._ready(0)
        else:
            due_s = self.next_due_s()
            timeout_s = MAX_SLEEP_S if due_s is None else min(MAX_SLEEP_S, max(0.0, due_s - self._clock()))
        if self._is_stopping:
            timeout_s = min(timeout_s, max(0.0, self._stop_at_s - self._clock()))
        # submit() looks at the flag after it appended; so look at the commands after setting it
        self._is_asleep = True
        try:
            # poll() counts whole milliseconds: round up, or a timer that is due in a moment spins
            return self._ready(0 if self._commands else math.ceil(timeout_s * 1000))
        finally:
            self._is_asleep = False

    def _ready(self, timeout_ms: int) -> set[object]:
        ready = {socket for socket, _ in self._poller.poll(timeout_ms)}
        if self._wake_fd in ready:
            ready.remove(self._wake_fd)
            os.eventfd_read(self._wake_fd)  # would block if anybody else read it
        return ready

    def _guarded(self, item: Callable[..., Any], *args: Any) -> Any:
        """Run one item. A failure is this library's bug: count it, log it, go on; a row of them ends the loop."""
        try:
            result = item(*args)
        except Exception:
            self.internal_errors += 1
            self._failures += 1
            logger.exception("%s: internal error", self._name)
            if self._failures >= MAX_FAILURES_IN_A_ROW:
                self._death = f"{self._failures} internal errors in a row"
                raise
            return None
        self._failures = 0
        return result

    def _as_failure(self, exc: Exception) -> Failure:
        """What a core is told when a call raised: a failure as it is; anything else is a bug, counted and logged."""
        if isinstance(exc, Failure):
            return exc
        self.internal_errors += 1
        logger.error("%s: internal error", self._name, exc_info=exc)
        return Failure(FailureCode.internal, f"{self._name}: internal error: {exc!r}")

    def note_idle(self, num_transfers: int) -> None:
        """How many are open or held now."""
        is_idle = num_transfers == 0
        if is_idle is not self.idle.is_set():
            (self.idle.set if is_idle else self.idle.clear)()

    def _stop(self, timeout_s: float) -> None:
        if not self._is_stopping:
            self._stop_at_s = self._clock() + timeout_s
            self._is_stopping = True
            self.begin_stop()

    def _log_transitions(self) -> None:
        if self._registry.num_transitions == self._logged_transitions:
            return
        self._logged_transitions, changes = self._registry.transitions_since(self._logged_transitions)
        for change in changes:
            logger.info(
                "engine=%s generation=%d %s->%s trigger=%s %s",
                change.engine_id,
                change.generation,
                change.source,
                change.dest,
                change.trigger,
                change.detail,
            )

    def _close_fd(self) -> None:
        with self._fd_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
