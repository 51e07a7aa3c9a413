"""What is known of a run: one row per engine, every finished push, every state change, and how the kill went.

The views show it while it grows, the summary reads it at the end. All times are ``time.monotonic()``, which counts for
every process of a machine.
"""

from __future__ import annotations

import enum
import statistics
import time
from dataclasses import dataclass, field

import kvpush
from kvpush.cli.demo.messages import DecodeStatus, PrefillStatus, Pushed, Role
from kvpush.cli.demo.router import Router

RATE_WINDOW_S = 2.0


class ProcessState(enum.StrEnum):
    """What has become of an engine's process."""

    starting = "starting"
    ready = "ready"
    killed = "killed"
    stopped = "stopped"


@dataclass(slots=True, eq=False)
class EngineRow:
    """One engine, over all of its processes."""

    engine_id: str
    role: Role
    pid: int
    process: ProcessState = ProcessState.starting
    heard_s: float = 0.0
    num_blocks: int = 0
    status: PrefillStatus | DecodeStatus | None = None
    state: str = ""  # as prefill sees it; empty before they have met
    generation: int = 0
    answered: int = 0  # requests
    pushes: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class Kill:
    """How the engine that was killed went and came back. ``None``: not yet."""

    engine_id: str
    killed_s: float
    interrupted: tuple[str, ...] = ()  # transfer ids
    released_s: float | None = None  # prefill evicted it
    restarted_s: float | None = None  # its new process was started
    ready_s: float | None = None
    first_push_s: float | None = None  # the first push into the new process was done


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes per second of single pushes: bytes / time from push() to PushFinished, as kvpush reports it."""

    median: float
    best: float
    num_pushes: int


@dataclass(slots=True)
class Board:
    """Everything that the views and the summary show."""

    router: Router
    started_s: float = field(default_factory=time.monotonic)
    rows: dict[str, EngineRow] = field(default_factory=dict)
    pushed: list[Pushed] = field(default_factory=list)  # done
    transitions: list[kvpush.Transition] = field(default_factory=list)
    kill: Kill | None = None
    _steady: list[Pushed] = field(default_factory=list)
    _met: set[str] = field(default_factory=set)  # engines that the first push of a process has reached

    def since_start_s(self, at_s: float | None = None) -> float:
        """Seconds into the run; now, if no time is given."""
        return (time.monotonic() if at_s is None else at_s) - self.started_s

    # --- what happens ------------------------------------------------------------------------------------------------

    def add_engine(self, role: Role, engine_id: str, pid: int) -> None:
        """A process was started, the first one of this engine or another."""
        self.rows.setdefault(engine_id, EngineRow(engine_id, role, pid))
        row = self.rows[engine_id]
        row.pid, row.process, row.status, row.heard_s = pid, ProcessState.starting, None, time.monotonic()
        if self.kill is not None and self.kill.engine_id == engine_id:
            self.kill.restarted_s = row.heard_s

    def add_ready(self, engine_id: str, num_blocks: int) -> None:
        """An engine takes orders."""
        row = self.rows[engine_id]
        row.process, row.num_blocks = ProcessState.ready, num_blocks
        if self.kill is not None and self.kill.engine_id == engine_id:
            self.kill.ready_s = time.monotonic()

    def add_kill(self, engine_id: str, killed_s: float) -> None:
        """An engine was killed. What it had reported until then still arrives."""
        self.kill = Kill(engine_id, killed_s)
        self.rows[engine_id].process = ProcessState.killed
        self._met.discard(engine_id)

    def add_death(self) -> None:
        """What the killed engine had reported has arrived: what is open now is interrupted. Before the router knows."""
        assert self.kill is not None, "only what was killed may die"
        self.kill.interrupted = tuple(request.transfer_id for request in self.router.open_requests(self.kill.engine_id))

    def add_pushed(self, report: Pushed) -> None:
        """A push is done."""
        engine_id = report.event.engine_id
        assert engine_id is not None, "it is known once a push is done"
        self.pushed.append(report)
        row = self.rows[engine_id]
        row.pushes += 1
        row.num_bytes += report.event.num_bytes
        if engine_id in self._met and report.num_chunks == 1:
            self._steady.append(report)  # the first one waited for the handshake, chunked ones for their computation
        self._met.add(engine_id)
        kill = self.kill
        if kill is not None and kill.engine_id == engine_id and kill.ready_s is not None and kill.first_push_s is None:
            kill.first_push_s = report.at_s

    def add_status(self, engine_id: str, status: PrefillStatus | DecodeStatus) -> None:
        """An engine's own view of itself."""
        self.rows[engine_id].status = status

    def add_transition(self, transition: kvpush.Transition) -> None:
        """Prefill's view of a decode engine changed."""
        self.transitions.append(transition)
        row = self.rows[transition.engine_id]
        row.state, row.generation = transition.dest, transition.generation
        kill = self.kill
        if (
            kill is not None
            and kill.released_s is None
            and transition.engine_id == kill.engine_id
            and transition.trigger == "evict"
            and transition.at_s >= kill.killed_s
        ):
            kill.released_s = transition.at_s

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Moved by pushes that are done."""
        return sum(report.event.num_bytes for report in self.pushed)

    @property
    def num_tokens(self) -> int:
        """Generated by complete requests."""
        return sum(len(request.tokens) for request in self.router.requests)

    def rate_now(self, engine_id: str | None = None) -> float:
        """Bytes per second over the last moments, to one engine or to all."""
        since_s = time.monotonic() - RATE_WINDOW_S
        recent = [report.event for report in self.pushed[-256:] if report.at_s >= since_s]
        return sum(event.num_bytes for event in recent if engine_id in (None, event.engine_id)) / RATE_WINDOW_S

    def push_rate(self) -> Rate | None:
        """Of pushes in one chunk to an engine that was connected."""
        rates = [report.event.num_bytes / report.event.duration_s for report in self._steady if report.event.duration_s]
        return Rate(statistics.median(rates), max(rates), len(rates)) if rates else None

    def pushes_under_way(self, engine_id: str) -> int:
        """Transfers to a decode engine that are not done, those whose prompt is being computed included."""
        return sum(request.phase == "moving" for request in self.router.open_requests(engine_id))
