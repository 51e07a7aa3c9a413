"""One taxonomy of errors. Imports nothing.

An error says *who* broke the rule by its type: :class:`ConfigurationError` and :class:`UsageError` are the caller's own
mistakes and are raised at once from the call; everything that a peer, the network or NIXL did wrong reaches the caller
as an event that carries a :class:`FailureCode` and a reason, built from the other classes here.
"""

from __future__ import annotations

import enum
from typing import ClassVar


class FailureCode(enum.StrEnum):
    """Why a push, a receive, a handshake or a link ended. Travels on the wire, so members are only ever added.

    ``docs/failure-codes.md`` says of each which side sees it and what to do. Decide by the code: the ``reason`` beside
    it is for people, and its words may change.
    """

    protocol_version = "protocol_version"  # the peers speak different protocol versions
    incompatible = "incompatible"  # the fingerprints differ: the bytes would make no sense
    wrong_engine = "wrong_engine"  # another engine answers at this address
    malformed = "malformed"  # a message could not be decoded or broke the protocol
    not_ready = "not_ready"  # the peer has not registered its memory yet
    bad_metadata = "bad_metadata"  # metadata failed its length, digest, name or bounds check
    handshake_timeout = "handshake_timeout"  # no answer within handshake_timeout_s
    handshake_failed = "handshake_failed"  # NIXL refused the peer's metadata
    queue_full = "queue_full"  # a bounded table or queue has no room; try again later
    bad_blocks = "bad_blocks"  # block ids outside the cache, repeated, or too few of them
    claimed = "claimed"  # another engine already registered for this transfer
    already_served = "already_served"  # this transfer has ended; its blocks belong to somebody else by now
    superseded = "superseded"  # a newer registration or incarnation took its place
    lease_expired = "lease_expired"  # the blocks' lease ended before they could be written
    deadline = "deadline"  # the receiver's own deadline passed
    cancelled_by_caller = "cancelled_by_caller"  # cancel() was called on this side
    cancelled_by_peer = "cancelled_by_peer"  # the other side gave up: its cancel(), its deadline or its end
    peer_lost = "peer_lost"  # link closed, heartbeats missed, or NIXL reports a disconnect
    peer_restarted = "peer_restarted"  # a new incarnation answers: the old process is gone
    engine_dropped = "engine_dropped"  # drop_engine() was called
    write_failed = "write_failed"  # the WRITE could not be posted or ended in an error
    write_stalled = "write_stalled"  # the WRITE neither ended nor failed within stall_timeout_s
    closing = "closing"  # this side or the peer shuts down
    internal = "internal"  # a bug in kvpush: the loop met an unexpected exception
    unknown = "unknown"  # a newer peer sent a code that this version does not know

    @classmethod
    def _missing_(cls, value: object) -> FailureCode | None:
        return cls.unknown if isinstance(value, str) and value.isidentifier() else None


RETRYABLE_CODES = frozenset(
    {
        FailureCode.not_ready,
        FailureCode.bad_metadata,
        FailureCode.handshake_timeout,
        FailureCode.handshake_failed,
        FailureCode.queue_full,
        FailureCode.peer_lost,
        FailureCode.peer_restarted,
        FailureCode.write_failed,
        FailureCode.write_stalled,
    }
)


class KvpushError(Exception):
    """Root of everything that kvpush raises. ``retryable`` says whether the same call may succeed later."""

    retryable: ClassVar[bool] = False


class ConfigurationError(KvpushError, ValueError):
    """A setting, spec or address is wrong. Raised at construction; names the field and the value."""


class UsageError(KvpushError):
    """The caller broke a rule of the API. Raised at once from the call; nothing has changed."""


class Closed(UsageError):
    """The pusher or receiver is closed or draining. Make a new one."""


class TransferEnded(UsageError):
    """A push goes on that has ended, and whose end has been polled. The chunk was not taken: drop the rest of them."""


class IllegalTransition(UsageError):
    """A trigger that the lifecycle's table does not allow in this state. The state is unchanged."""

    def __init__(self, lifecycle: str, state: str, trigger: str, allowed: tuple[str, ...]) -> None:
        self.lifecycle = lifecycle
        self.state = state
        self.trigger = trigger
        super().__init__(
            f"{lifecycle}: trigger {str(trigger)!r} is not allowed in state {str(state)!r}; "
            f"allowed there: {', '.join(allowed) or 'nothing (final state)'}"
        )


class QueueFull(KvpushError):
    """A bounded queue or table has no room. Nothing was taken; poll() for finished work and try again."""

    retryable = True


class Failure(KvpushError):
    """What a peer, the network or NIXL did wrong: a :class:`FailureCode` and a sentence that names the engine."""

    def __init__(self, code: FailureCode, reason: str) -> None:
        self.code = code
        self.reason = reason
        super().__init__(reason)

    @property
    def is_retryable(self) -> bool:
        """Whether another attempt may succeed without anybody changing a configuration."""
        return self.code in RETRYABLE_CODES


class Incompatible(Failure):
    """The two sides' caches or settings do not fit; the reason names both values. Never retried."""

    def __init__(self, reason: str) -> None:
        super().__init__(FailureCode.incompatible, reason)


class RemoteProtocolError(Failure):
    """A peer sent something malformed, oversize or out of turn."""

    def __init__(self, reason: str) -> None:
        super().__init__(FailureCode.malformed, reason)


class TransportError(Failure):
    """NIXL refused or failed. ``disconnected`` means that the remote agent is gone for good."""

    def __init__(self, code: FailureCode, reason: str, *, disconnected: bool = False) -> None:
        self.disconnected = disconnected
        super().__init__(code, reason)
