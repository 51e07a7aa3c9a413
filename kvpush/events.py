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

    ``transfer_id`` is the caller's, and ``outcome`` says how it ended. ``engine_id`` is the decode engine's; ``None``
    when none ever registered for it. ``code`` (``None`` when done) says why it is not done and is there to decide by;
    ``reason`` (then empty) says the same to people. ``blocks_reusable`` is ``False`` while a WRITE that was posted may
    still read the blocks; then exactly one :class:`BlocksReleased` follows. ``num_bytes`` counts what was written and
    confirmed. ``duration_s`` runs from the first ``push()`` to this outcome.
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

    On ``done`` every byte that was asked for is in place and visible. ``transfer_id`` is the caller's, ``outcome`` says
    how it ended, and ``engine_id`` is the prefill engine's. ``code`` (``None`` when done) says why it is not done and
    is there to decide by; ``reason`` (then empty) says the same to people. ``blocks_reusable`` is ``False`` while the
    prefill engine may still write into the blocks; then exactly one :class:`BlocksReleased` follows. ``num_blocks`` is
    the number of blocks that ``expect()`` asked for, of all groups, whatever has arrived of them. ``duration_s`` runs
    from ``expect()`` to this outcome.
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

    They are those of ``transfer_id``, whose outcome came before. ``proven`` is ``True`` when no write can touch them
    any more (settled, drained by acknowledgement, or the peer's process is gone) and ``False`` when the hold outlived
    ``hold_timeout_s`` and ended by policy. ``reason`` says to people what ended it.
    """

    transfer_id: str
    proven: bool
    reason: str


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """One rank of a remote engine and generation, as the registry sees it at one instant.

    ``engine_id`` and ``rank``, which is ``(pp_rank, tp_rank)``, name it; ``incarnation`` is its process's own identity
    and ``generation`` this side's number for the record: it grows with every new one and is never used twice.
    ``state`` is a :class:`State`, ``reason`` why it is stale, if it is. ``address`` is where decode dials; prefill
    shows the link's number. ``idle_s`` counts from the last registration, posted or settled push, ``silent_s`` from
    anything that was heard, heartbeats included. ``in_flight`` counts what holds off its release: WRITEs that
    have not settled, on decode receives that are registered there; ``pushes`` counts all that ever were.
    ``handshake_failures`` are those in a row; the next attempt is allowed in ``retry_in_s``, and now when that is 0.
    ``last_error`` is for people.
    """

    engine_id: str
    rank: tuple[int, int]
    generation: int
    incarnation: str
    state: str
    reason: StaleReason | None
    address: str
    idle_s: float
    silent_s: float
    in_flight: int
    handshake_failures: int
    retry_in_s: float
    pushes: int
    last_error: str


@dataclass(frozen=True, slots=True)
class Transition:
    """One state change of an engine, as the trace records it.

    ``at_s`` is of this side's monotonic clock. The record of ``engine_id`` with this ``generation`` went from
    ``source`` to ``dest`` because of ``trigger``; ``detail`` is for people.
    """

    at_s: float
    engine_id: str
    generation: int
    source: str
    trigger: str
    dest: str
    detail: str
