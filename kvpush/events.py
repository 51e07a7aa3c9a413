"""What callers see: outcomes, events and snapshots. Values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvpush.errors import FailureCode


class Outcome(enum.StrEnum):
    """How a push or a receive ended. Each has exactly one."""

    done = "done"
    failed = "failed"
    cancelled = "cancelled"
    expired = "expired"


class StaleReason(enum.StrEnum):
    """Why an engine is stale."""

    idle = "idle"  # nothing happened for engine_ttl_s; may be revived
    lost = "lost"  # link closed, heartbeats missed, NIXL disconnect, stalled WRITE
    superseded = "superseded"  # a new incarnation took the id or the address
    dropped = "dropped"  # the operator or router said so
    closing = "closing"  # the engine said goodbye, or this side shuts down


@dataclass(frozen=True, slots=True)
class PushFinished:
    """A push ended.

    ``engine_id`` is ``None`` when no decode engine ever registered for it. ``blocks_reusable`` is ``False`` while a
    WRITE that was posted may still read the blocks; then exactly one :class:`BlocksReleased` follows. ``num_bytes``
    counts what was written and confirmed. ``duration_s`` runs from the first ``push()`` to this outcome.
    """

    transfer_id: str
    outcome: Outcome
    engine_id: str | None
    code: FailureCode | None
    reason: str
    blocks_reusable: bool
    num_bytes: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class ReceiveFinished:
    """A receive ended.

    On ``done`` every byte that was asked for is in place and visible. ``blocks_reusable`` is ``False`` while the
    prefill engine may still write into the blocks; then exactly one :class:`BlocksReleased` follows.
    """

    transfer_id: str
    outcome: Outcome
    engine_id: str
    code: FailureCode | None
    reason: str
    blocks_reusable: bool
    num_blocks: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class BlocksReleased:
    """Held blocks are the caller's again.

    ``proven`` is ``True`` when no write can touch them any more (settled, drained by acknowledgement, or the peer's
    process is gone) and ``False`` when the hold outlived ``hold_timeout_s`` and ended by policy.
    """

    transfer_id: str
    proven: bool
    reason: str


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """One rank of a remote engine and generation, as the registry sees it at one instant."""

    engine_id: str
    rank: tuple[int, int]  # (pp_rank, tp_rank); (0, 0) for an engine that is one process
    generation: int  # our own fence number: grows with every new record, never used twice
    incarnation: str  # the remote's boot identity
    state: str  # kvpush.lifecycle.State
    reason: StaleReason | None
    address: str
    idle_s: float  # since the last registration, posted or settled push
    silent_s: float  # since anything was heard, heartbeats included
    in_flight: int  # pins: posted and not settled
    handshake_failures: int  # in a row
    retry_in_s: float  # until the next handshake attempt is allowed; 0 when it is
    pushes: int
    last_error: str


@dataclass(frozen=True, slots=True)
class Transition:
    """One state change of an engine, as the trace records it."""

    at_s: float  # the registry's monotonic clock
    engine_id: str
    generation: int
    source: str
    trigger: str
    dest: str
    detail: str
