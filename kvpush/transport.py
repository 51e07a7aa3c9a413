"""What a transport must do: the contract that NIXL's adapter and the fake both meet.

Thread ownership: a transport belongs to **one** thread (the loop thread of its pusher or receiver), which makes every
call below, the constructor and :meth:`Transport.close` included. Calls from another thread are refused (UsageError).
Nothing here blocks for longer than ``add_remote``'s non-blocking connect (milliseconds).

Block addressing: each side of a remote is a list of *rows* (:mod:`kvpush.rows`), strided runs of equally long segments.
A segment's index counts the segments of all rows before its own, then its place in its row. The two sides may have
different numbers of rows, of different counts and lengths; only the segments that one WRITE pairs must be equally long.

Who is to blame decides what is raised. :class:`~kvpush.errors.UsageError`: the caller broke a rule written here, and
nothing has changed. :class:`~kvpush.errors.TransportError`: the peer, the network or NIXL. A closed transport raises
:class:`~kvpush.errors.Closed`.

``tests/contract`` runs the same tests against every implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvpush.config import Config
from kvpush.layout import MemoryKind, MemoryRange
from kvpush.rows import Indices as Indices
from kvpush.rows import Rows as Rows

RemoteHandle = NewType("RemoteHandle", int)
WriteHandle = NewType("WriteHandle", int)


@dataclass(frozen=True, slots=True)
class Notification:
    """A small message bound to a WRITE of ``agent_name``. When it is read, the WRITE's bytes are visible here."""

    agent_name: str
    payload: bytes


@dataclass(slots=True)
class TransportCounts:
    """What a transport has made and released so far. At rest, and always after ``close()``, each pair is equal."""

    remotes_added: int = 0
    remotes_removed: int = 0
    writes_posted: int = 0
    writes_released: int = 0
    lists_prepared: int = 0
    lists_released: int = 0


class Transport(Protocol):
    """One NIXL agent, or something that behaves like one.

    The constructor raises :class:`kvpush.errors.ConfigurationError` when the agent cannot be made or memory cannot be
    registered. Later, every failure is a :class:`kvpush.errors.TransportError`; no other exception leaves an
    implementation for a reason that lies with the peer, the network or NIXL.
    """

    @property
    def agent_name(self) -> str:
        """Unique in the whole fleet and never used twice: it carries the incarnation."""

    def metadata(self) -> bytes:
        """The opaque blob that lets a peer write into the memory registered here."""

    def add_remote(
        self, agent_name: str, metadata: bytes, kind: MemoryKind, local_rows: Rows, remote_rows: Rows
    ) -> RemoteHandle:
        """Load a *verified* metadata blob and prepare both descriptor lists.

        Neither side is empty. ``kind`` is the remote memory's. All or nothing: on an error nothing of this remote stays
        loaded.
        Raises ``TransportError(handshake_failed)``, also when the blob names another agent than ``agent_name``, when
        that agent is already loaded, and when rows leave the memory that the blob advertises.
        A blob that is damaged behind its name may make that *name* unusable here for good: verify before calling.
        """

    def remove_remote(self, remote: RemoteHandle) -> None:
        """Unload. Refused (UsageError) while a write to it is in flight (that is what pins are for), and twice.

        Removal cancels nothing that was posted and abandoned.
        """

    def post_write(
        self, remote: RemoteHandle, local_indices: Indices, remote_indices: Indices, notification: bytes
    ) -> WriteHandle:
        """Post one WRITE of the given segments, with ``notification`` bound to its end.

        The lists are equally long and not empty, and segments at the same place in both are equally long. Returns at
        once; the state comes from :meth:`poll_write`. The local bytes may be read at any time until the end.
        Raises ``TransportError(write_failed)`` when nothing was posted, also for segments of unequal lengths, or
        ``TransportError(peer_lost)`` with ``disconnected`` set: after either, no byte of it lands (any more).
        """

    def poll_write(self, write: WriteHandle) -> bool:
        """``True`` once the WRITE is complete; ``False`` while it is in flight. Must be polled to its end: the peer's
        notification is sent from here.

        After ``True`` or an error the handle is released and must not be used again. The error says what is proven:
        ``peer_lost`` with ``disconnected`` set means that the connection is gone and no byte of the WRITE lands later;
        ``write_failed`` leaves it in doubt: treat its blocks as those of a stalled WRITE, and the peer as lost.
        """

    def abandon_write(self, write: WriteHandle) -> None:
        """Stop tracking a WRITE that never ended: its notification is never sent. Cancels nothing: its bytes may still
        land, and they are read from the local blocks when they are sent, not when they were posted."""

    def notifications(self) -> Iterable[Notification]:
        """Everything that arrived since the last call, in the order in which the writers saw their WRITEs end.

        Also drives this side's progress: a WRITE *into* this memory may need it to finish. A sender's name is its own
        claim.
        """

    def close(self) -> None:
        """Release handles, lists, remotes, memory and the agent, in this order. Idempotent, bounded, never raises
        because of a peer or NIXL. Only this stops writes that were posted here and never ended."""


TransportFactory = Callable[[str, MemoryKind, Sequence[MemoryRange], Config], Transport]
"""Makes a transport on the loop thread: agent name, kind and ranges of the memory to register, settings."""
