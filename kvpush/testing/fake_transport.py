"""A world of NIXL-like agents inside one process, for tests and simulations without NIXL, GPUs or a network.

A :class:`FakeFabric` holds the agents and is what a test steers; a :class:`FakeTransport` is one agent and meets the
contract of :class:`kvpush.transport.Transport`. The suite in ``tests/contract`` runs the same tests against it and
against NIXL. Where a caller breaks a rule that NIXL would punish with a crash or silence, the fake raises.

    fabric = FakeFabric(delivery=Delivery.manual, seed=7)
    prefill = fabric.transport("p0#1", MemoryKind.dram, [range_of(source)])
    decode = fabric.transport("d0#1", MemoryKind.dram, [range_of(sink)])
    remote = prefill.add_remote("d0#1", decode.metadata(), MemoryKind.dram, source_rows, sink_rows)
    handle = prefill.post_write(remote, local_indices, remote_indices, b"done")
    fabric.step()                               # bytes land
    assert prefill.poll_write(handle)           # the end is seen, the notification sent
    assert list(decode.notifications()) == [Notification("p0#1", b"done")]

A WRITE goes through three moments, and a test may stop it before any of them: its bytes land (:meth:`FakeFabric.land`),
the writer can see its end (:meth:`FakeFabric.complete`), the writer polls and the notification leaves. As with NIXL,
the local bytes are read when they land, and neither abandoning a WRITE nor removing its remote keeps it from landing.

No threads and no clock. One lock makes the fabric usable from the loops of several pushers and receivers.
"""

from __future__ import annotations

import ctypes
import enum
import random
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvpush.config import Config
from kvpush.errors import Closed, ConfigurationError, FailureCode, TransportError, UsageError
from kvpush.layout import MemoryKind, MemoryRange
from kvpush.rows import Indices, Rows, indices_problem, num_segments, rows_problem, segments_of
from kvpush.transport import Notification, RemoteHandle, TransportCounts, WriteHandle

_BLOB_PREFIX = b"kvpush-fake|Agent"  # then, as in NIXL's blobs, the name's length and the name
_CHECKSUM_BYTES = 4


class Delivery(enum.StrEnum):
    """When a WRITE lands and its writer can see the end."""

    immediate = "immediate"  # as soon as it is posted
    progress = "progress"  # when the target next calls notifications(), which is what NIXL needs, too
    manual = "manual"  # when the test calls step(), drain() or complete()


class WriteState(enum.StrEnum):
    """Where a WRITE stands, seen from outside."""

    in_flight = "in_flight"
    completed = "completed"  # landed; the writer's next poll says so
    failed = "failed"  # the writer's next poll raises
    dropped = "dropped"  # nobody tracks it and it will not land: one of the two processes is gone


@dataclass(slots=True, eq=False)
class FakeWrite:
    """One posted WRITE. To look at; change it through the fabric."""

    writer: str
    target: str
    notification: bytes
    local_indices: Indices
    remote_indices: Indices
    sources: npt.NDArray[np.uint64]  # the address of each segment here
    destinations: npt.NDArray[np.uint64]  # and there
    lengths_bytes: npt.NDArray[np.uint64]
    state: WriteState = WriteState.in_flight
    is_abandoned: bool = False
    is_stalled: bool = False
    error: TransportError | None = None

    @property
    def num_bytes(self) -> int:
        """The sum of its segments' lengths."""
        return int(self.lengths_bytes.sum())


class Operation(enum.StrEnum):
    """Calls of a transport that :meth:`FakeFabric.fail_next` can make fail."""

    add_remote = "add_remote"
    post_write = "post_write"
    poll_write = "poll_write"
    notifications = "notifications"


class FakeFabric:
    """The world that fake agents live in, and the test's handle on their faults.

    ``delivery`` says when WRITEs land. ``copy=False`` moves no bytes, so that addresses may be invented: look at
    :attr:`history` instead. ``seed`` decides every random choice. ``check_threads=False`` lets any thread use a
    transport. The last ``history_len`` WRITEs are kept in :attr:`history`; ``on_post`` is called with each one, under
    the fabric's lock, for a simulator to schedule its end.
    """

    def __init__(
        self,
        *,
        delivery: Delivery = Delivery.immediate,
        copy: bool = True,
        seed: int = 0,
        check_threads: bool = True,
        history_len: int = 4096,
    ) -> None:
        self.delivery = delivery
        self.copy = copy
        self.check_threads = check_threads
        self.agents: dict[str, FakeTransport] = {}  # alive ones
        self.in_flight: list[FakeWrite] = []  # in the order posted, abandoned ones included
        self.history: deque[FakeWrite] = deque(maxlen=history_len)
        self.on_post: Callable[[FakeWrite], None] | None = None
        self._random = random.Random(seed)
        self._names: set[str] = set()  # every name ever used
        self._frozen: set[str] = set()
        self._partitions: set[tuple[str, str]] = set()
        self._held: dict[str, list[Notification]] = {}
        self._injected: dict[tuple[str, Operation], deque[TransportError]] = {}
        self._lock = threading.RLock()

    def transport(
        self, agent_name: str, kind: MemoryKind, ranges: Sequence[MemoryRange], config: Config | None = None
    ) -> FakeTransport:
        """A new agent. Takes what ``NixlTransport`` takes, so it can stand in wherever a transport is made."""
        return FakeTransport(self, agent_name, kind, ranges, config)

    # --- WRITEs ----------------------------------------------------------------------------------------------------

    def can_complete(self, write: FakeWrite) -> bool:
        """Whether nothing holds the WRITE up: both ends alive and awake, no partition, not stalled."""
        return (
            write.state is WriteState.in_flight
            and not write.is_stalled
            and write.target in self.agents
            and not self._frozen & {write.writer, write.target}
            and (write.writer, write.target) not in self._partitions
        )

    def step(self) -> FakeWrite | None:
        """Complete one WRITE that can be completed, chosen at random, and return it; ``None`` when there is none."""
        with self._lock:
            ready = [write for write in self.in_flight if self.can_complete(write)]
            if not ready:
                return None
            write = self._random.choice(ready)
            self.complete(write)
            return write

    def drain(self) -> int:
        """Complete every WRITE that can be completed, in random order; how many there were."""
        with self._lock:
            completed = 0
            while self.step() is not None:
                completed += 1
            return completed

    def land(self, write: FakeWrite, segments: int | None = None) -> None:
        """Let the bytes land now (or those of the first ``segments``), whatever the writer knows about it.

        Works on a stalled WRITE and on one that was abandoned or whose remote was removed. An abandoned one is over
        once all of it has landed. Raises UsageError when the WRITE is over or a process is gone.
        """
        with self._lock:
            if write.state is not WriteState.in_flight:
                raise UsageError(f"a write in state {write.state.value!r} does not land")
            self._copy(write, segments)
            if write.is_abandoned and segments is None:
                self._end(write, WriteState.completed)

    def complete(self, write: FakeWrite) -> None:
        """Let the bytes land, and let the writer's next poll see the end. Raises UsageError while something holds it
        up, and when it is over."""
        with self._lock:
            if not self.can_complete(write):
                raise UsageError(f"a write in state {write.state.value!r} is over or held up and cannot complete")
            self._copy(write, None)
            self._end(write, WriteState.completed)

    def fail(self, write: FakeWrite, error: TransportError | None = None, *, landed_segments: int = 0) -> None:
        """Let the writer's next poll raise ``error`` (default: write_failed), after some segments have landed.

        An error with ``disconnected`` set takes the connection with it, as :meth:`disconnect` does. Raises UsageError
        when the WRITE is over.
        """
        with self._lock:
            if write.state is not WriteState.in_flight:
                raise UsageError(f"a write in state {write.state.value!r} does not fail")
            if landed_segments:
                self._copy(write, landed_segments)
            error = error or TransportError(
                FailureCode.write_failed, f"write to agent {write.target!r}: made to fail by a test"
            )
            self._fail(write, error)
            if error.disconnected:
                self.disconnect(write.writer, write.target)

    def doubt(self, write: FakeWrite, error: TransportError | None = None) -> None:
        """Let the writer's next poll raise ``error`` (default: write_failed), and keep the WRITE under way: its bytes
        may land later, when nobody asks about it any more. Raises UsageError for one that is over."""
        with self._lock:
            if write.state is not WriteState.in_flight:
                raise UsageError(f"a write in state {write.state.value!r} cannot become doubtful")
            write.error = error or TransportError(
                FailureCode.write_failed, f"write to agent {write.target!r}: nobody knows what became of it"
            )

    def stall(self, write: FakeWrite) -> None:
        """Hold the WRITE up until :meth:`resume`: it neither ends nor fails."""
        write.is_stalled = True

    def resume(self, write: FakeWrite) -> None:
        """Undo :meth:`stall`. The WRITE completes by the next step, drain or progress."""
        write.is_stalled = False

    def _post(self, write: FakeWrite) -> None:
        self.in_flight.append(write)
        self.history.append(write)
        if self.delivery is Delivery.immediate and self.can_complete(write):
            self.complete(write)
        if self.on_post is not None:
            self.on_post(write)

    def _progress(self, agent_name: str) -> None:
        """What an agent's call of notifications() lets happen to the WRITEs into its memory."""
        if self.delivery is Delivery.manual:
            return
        for write in [write for write in self.in_flight if write.target == agent_name and self.can_complete(write)]:
            self.complete(write)

    def _copy(self, write: FakeWrite, segments: int | None) -> None:
        if not self.copy:
            return
        moves = zip(
            write.destinations[:segments].tolist(),
            write.sources[:segments].tolist(),
            write.lengths_bytes[:segments].tolist(),
            strict=True,
        )
        for destination, source, length_bytes in moves:
            ctypes.memmove(destination, source, length_bytes)

    def _end(self, write: FakeWrite, state: WriteState) -> None:
        write.state = state
        self.in_flight.remove(write)

    def _fail(self, write: FakeWrite, error: TransportError) -> None:
        write.error = error
        self._end(write, WriteState.dropped if write.is_abandoned else WriteState.failed)

    # --- processes and the network ---------------------------------------------------------------------------------

    def kill(self, agent_name: str) -> None:
        """The agent's process is gone: its memory, its WRITEs and its unread notifications with it.

        WRITEs to it fail with ``peer_lost`` and ``disconnected``; so does every later attempt to post one.
        """
        with self._lock:
            self._alive(agent_name)._die()

    def freeze(self, agent_name: str) -> None:
        """SIGSTOP: WRITEs to and from it neither end nor fail, notifications to it wait. Posting to it works."""
        with self._lock:
            self._alive(agent_name)
            self._frozen.add(agent_name)

    def thaw(self, agent_name: str) -> None:
        """SIGCONT."""
        self._frozen.discard(agent_name)

    def partition(self, writer: str, target: str) -> None:
        """A black hole between the two, in this direction: WRITEs neither end nor fail until :meth:`heal`."""
        self._partitions.add((writer, target))

    def heal(self, writer: str, target: str) -> None:
        """Undo :meth:`partition`."""
        self._partitions.discard((writer, target))

    def heal_all(self) -> None:
        """Undo every :meth:`partition`, and forget errors that :meth:`fail_next` still has in store."""
        self._partitions.clear()
        self._injected.clear()

    def disconnect(self, writer: str, target: str) -> None:
        """The connection broke: WRITEs in flight fail with ``peer_lost``, and so does every one posted to this remote.

        As with NIXL, the only cure is to remove the remote and to add it again.
        """
        with self._lock:
            for write in [w for w in self.in_flight if (w.writer, w.target) == (writer, target)]:
                self._fail(write, _peer_lost(target))
            if writer in self.agents:
                self.agents[writer]._lose(target)

    def hold_notifications(self, agent_name: str) -> None:
        """Delay notifications to this agent until :meth:`release_notifications`."""
        with self._lock:
            self._held.setdefault(agent_name, [])

    def release_notifications(self, agent_name: str, *, shuffle: bool = False) -> None:
        """Deliver what was held back, in order or shuffled, and hold back no more."""
        with self._lock:
            held = self._held.pop(agent_name, [])
            if shuffle:
                self._random.shuffle(held)
            for notification in held:
                self._deliver(agent_name, notification)

    def notify(self, agent_name: str, notification: Notification) -> None:
        """Deliver a notification that no WRITE of this fabric sent: forged, repeated or stray."""
        with self._lock:
            self._deliver(agent_name, notification)

    def _deliver(self, agent_name: str, notification: Notification) -> None:
        if agent_name in self._held:
            self._held[agent_name].append(notification)
        elif agent_name in self.agents:
            self.agents[agent_name]._inbox.append(notification)

    def _remove_agent(self, agent_name: str) -> None:
        if self.agents.pop(agent_name, None) is None:
            return
        self._frozen.discard(agent_name)
        self._held.pop(agent_name, None)
        for write in list(self.in_flight):
            if write.writer == agent_name:
                self._end(write, WriteState.dropped)
            elif write.target == agent_name:
                self._fail(write, _peer_lost(agent_name))

    def _alive(self, agent_name: str) -> FakeTransport:
        try:
            return self.agents[agent_name]
        except KeyError:
            raise UsageError(f"no agent {agent_name!r} is alive") from None

    # --- errors and metadata ---------------------------------------------------------------------------------------

    def fail_next(self, agent_name: str, operation: Operation, error: TransportError, *, times: int = 1) -> None:
        """Make the agent's next calls of this operation raise ``error``. A poll that raises ends its WRITE;
        one of a WRITE that has ended anyway does not count."""
        with self._lock:
            self._injected.setdefault((agent_name, operation), deque()).extend([error] * times)

    def _injected_error(self, agent_name: str, operation: Operation) -> TransportError | None:
        queued = self._injected.get((agent_name, operation))
        return queued.popleft() if queued else None

    def corrupted(self, metadata: bytes) -> bytes:
        """The blob with one random bit flipped behind its name, where NIXL may make the name unusable."""
        header_bytes = len(_BLOB_PREFIX) + 8
        name_bytes = int.from_bytes(metadata[len(_BLOB_PREFIX) : header_bytes], "little")
        position = self._random.randrange(header_bytes + name_bytes, len(metadata))
        flipped = bytearray(metadata)
        flipped[position] ^= 1 << self._random.randrange(8)
        return bytes(flipped)


@dataclass(slots=True, eq=False)
class _Remote:
    agent_name: str
    local_rows: Rows
    remote_rows: Rows
    in_flight: int = 0
    is_disconnected: bool = False


class FakeTransport:
    """One agent of a :class:`FakeFabric`. Made by :meth:`FakeFabric.transport`.

    :attr:`counts` tells what was made and released, for leak tests.
    """

    def __init__(
        self,
        fabric: FakeFabric,
        agent_name: str,
        kind: MemoryKind,
        ranges: Sequence[MemoryRange],
        config: Config | None = None,
    ) -> None:
        if not ranges or any(r.length_bytes <= 0 for r in ranges):
            raise ConfigurationError(f"ranges={list(ranges)!r}: at least one, none of them empty")
        if fabric.copy and kind is not MemoryKind.dram:
            raise ConfigurationError(f"kind={kind.value!r}: a fabric that copies bytes moves DRAM only; use copy=False")
        self.fabric = fabric
        self.config = config
        self.counts = TransportCounts()
        self._agent_name = agent_name
        self._kind = kind
        self._ranges = tuple(ranges)
        self._thread_id = threading.get_ident()
        self._is_closed = False
        self._is_killed = False
        self._next_handle = 1
        self._remotes: dict[RemoteHandle, _Remote] = {}
        self._writes: dict[WriteHandle, tuple[_Remote, FakeWrite]] = {}
        self._poisoned: set[str] = set()
        self._inbox: deque[Notification] = deque()
        with fabric._lock:
            if agent_name in fabric._names:
                raise UsageError(f"agent name {agent_name!r} was used before: a new incarnation has a new name")
            fabric._names.add(agent_name)
            fabric.agents[agent_name] = self

    @property
    def agent_name(self) -> str:
        return self._agent_name

    def metadata(self) -> bytes:
        self._check_usable()
        return _encode_blob(self._agent_name, self._kind, self._ranges)

    # --- remotes ---------------------------------------------------------------------------------------------------

    def add_remote(
        self, agent_name: str, metadata: bytes, kind: MemoryKind, local_rows: Rows, remote_rows: Rows
    ) -> RemoteHandle:
        self._check_usable()
        if problem := rows_problem(local_rows):
            raise UsageError(f"local side of agent {agent_name!r}: {problem}")
        with self.fabric._lock:
            self._raise_injected(Operation.add_remote)
            problem = (
                self._name_problem(agent_name, metadata)
                or rows_problem(remote_rows)
                or _bounds_problem("local", local_rows, self._ranges)
                or self._load_problem(agent_name, metadata, kind, remote_rows)
            )
            if problem:
                raise TransportError(FailureCode.handshake_failed, f"agent {agent_name!r}: {problem}")
            self.counts.remotes_added += 1
            self.counts.lists_prepared += 2
            remote = RemoteHandle(self._mint())
            self._remotes[remote] = _Remote(agent_name, local_rows.copy(), remote_rows.copy())
            return remote

    def _name_problem(self, agent_name: str, metadata: bytes) -> str | None:
        if agent_name == self._agent_name:
            return "that is this agent's own name"
        if any(remote.agent_name == agent_name for remote in self._remotes.values()):
            return "already loaded; remove it first"
        named = _agent_named_in(metadata)
        if named is None:
            return f"its metadata ({len(metadata)} bytes) is not a fake agent's"
        if named != agent_name:
            return f"its metadata names {named[:64]!r}"
        if agent_name in self._poisoned:
            return "damaged metadata of this name was loaded before; NIXL takes the name no more"
        return None

    def _load_problem(self, agent_name: str, metadata: bytes, kind: MemoryKind, remote_rows: Rows) -> str | None:
        sections = _decode_sections(metadata)
        if sections is None:
            self._poisoned.add(agent_name)
            return "its metadata is damaged"
        remote_kind, ranges = sections
        if remote_kind is not kind:
            return f"it advertises {remote_kind.value}, not {kind.value}"
        return _bounds_problem("remote", remote_rows, ranges)

    def remove_remote(self, remote: RemoteHandle) -> None:
        self._check_usable()
        entry = self._remote(remote)
        if entry.in_flight:
            raise UsageError(f"agent {entry.agent_name!r} has {entry.in_flight} writes in flight; it cannot be removed")
        with self.fabric._lock:
            self._drop_remote(remote)

    def _drop_remote(self, remote: RemoteHandle) -> None:
        del self._remotes[remote]
        self.counts.remotes_removed += 1
        self.counts.lists_released += 2

    def _lose(self, agent_name: str) -> None:
        for remote in self._remotes.values():
            remote.is_disconnected |= remote.agent_name == agent_name

    # --- writes ----------------------------------------------------------------------------------------------------

    def post_write(
        self, remote: RemoteHandle, local_indices: Indices, remote_indices: Indices, notification: bytes
    ) -> WriteHandle:
        self._check_usable()
        entry = self._remote(remote)
        problem = indices_problem(local_indices, remote_indices)
        if problem:
            raise UsageError(f"write to agent {entry.agent_name!r}: {problem}")
        with self.fabric._lock:
            self._raise_injected(Operation.post_write)
            problem = _range_problem(local_indices, entry.local_rows) or _range_problem(
                remote_indices, entry.remote_rows
            )
            if problem:
                raise TransportError(FailureCode.write_failed, f"write to agent {entry.agent_name!r}: {problem}")
            if entry.is_disconnected or entry.agent_name not in self.fabric.agents:
                raise _peer_lost(entry.agent_name)
            write = self._made(entry, local_indices, remote_indices, notification)
            self.counts.writes_posted += 1
            entry.in_flight += 1
            handle = WriteHandle(self._mint())
            self._writes[handle] = (entry, write)
            self.fabric._post(write)
            return handle

    def _made(self, remote: _Remote, local_indices: Indices, remote_indices: Indices, notification: bytes) -> FakeWrite:
        sources, lengths_bytes = segments_of(remote.local_rows, local_indices)
        destinations, remote_lengths_bytes = segments_of(remote.remote_rows, remote_indices)
        if np.any(lengths_bytes != remote_lengths_bytes):
            raise TransportError(
                FailureCode.write_failed, f"write to agent {remote.agent_name!r}: segments differ in length"
            )
        return FakeWrite(
            writer=self._agent_name,
            target=remote.agent_name,
            notification=bytes(notification),
            local_indices=local_indices.copy(),
            remote_indices=remote_indices.copy(),
            sources=sources,
            destinations=destinations,
            lengths_bytes=lengths_bytes,
        )

    def poll_write(self, write: WriteHandle) -> bool:
        self._check_usable()
        remote, posted = self._write(write)
        with self.fabric._lock:
            if posted.state is WriteState.in_flight and posted.error is not None:
                posted.is_abandoned = True
                self._forget(write)
                raise posted.error
            if posted.state is WriteState.in_flight:
                injected = self.fabric._injected_error(self._agent_name, Operation.poll_write)
                if injected is None:
                    return False
                self.fabric.fail(posted, injected)
            self._forget(write)
            if posted.error is not None:
                raise posted.error
            self.fabric._deliver(remote.agent_name, Notification(self._agent_name, posted.notification))
            return True

    def abandon_write(self, write: WriteHandle) -> None:
        self._check_usable()
        _, posted = self._write(write)
        with self.fabric._lock:
            posted.is_abandoned = True
            self._forget(write)

    def _forget(self, handle: WriteHandle) -> None:
        remote, _ = self._writes.pop(handle)
        remote.in_flight -= 1
        self.counts.writes_released += 1

    @property
    def has_news(self) -> bool:
        """Whether :meth:`notifications` would return or raise anything, or let a WRITE land: cheaper than asking it."""
        return bool(self._inbox or self.fabric._injected) or self.fabric.delivery is not Delivery.manual

    # --- arrivals and the end --------------------------------------------------------------------------------------

    def notifications(self) -> list[Notification]:
        self._check_usable()
        with self.fabric._lock:
            self._raise_injected(Operation.notifications)
            if self._agent_name in self.fabric._frozen:
                return []
            self.fabric._progress(self._agent_name)
            arrived = list(self._inbox)
            self._inbox.clear()
            return arrived

    def close(self) -> None:
        self._check_thread()
        if self._is_closed:
            return
        self._is_closed = True
        with self.fabric._lock:
            for write in list(self._writes):
                self._forget(write)
            for remote in list(self._remotes):
                self._drop_remote(remote)
            self._inbox.clear()
            self.fabric._remove_agent(self._agent_name)

    def _die(self) -> None:
        self._is_killed = True
        self._inbox.clear()
        self.fabric._remove_agent(self._agent_name)

    def _raise_injected(self, operation: Operation) -> None:
        error = self.fabric._injected_error(self._agent_name, operation)
        if error is not None:
            raise error

    def _check_thread(self) -> None:
        if self.fabric.check_threads and threading.get_ident() != self._thread_id:
            raise UsageError(f"agent {self._agent_name!r} belongs to another thread than {threading.current_thread()}")

    def _check_usable(self) -> None:
        self._check_thread()
        if self._is_closed:
            raise Closed(f"agent {self._agent_name!r} is closed")
        if self._is_killed:
            raise UsageError(f"agent {self._agent_name!r} was killed: its process makes no calls")

    def _mint(self) -> int:
        handle = self._next_handle
        self._next_handle += 1
        return handle

    def _remote(self, remote: RemoteHandle) -> _Remote:
        try:
            return self._remotes[remote]
        except KeyError:
            raise UsageError(f"agent {self._agent_name!r}: remote {remote} is unknown or removed") from None

    def _write(self, write: WriteHandle) -> tuple[_Remote, FakeWrite]:
        try:
            return self._writes[write]
        except KeyError:
            raise UsageError(f"agent {self._agent_name!r}: write {write} is unknown or has ended") from None


def _peer_lost(agent_name: str) -> TransportError:
    return TransportError(FailureCode.peer_lost, f"write to agent {agent_name!r}: disconnected", disconnected=True)


def _bounds_problem(side: str, rows: Rows, ranges: Sequence[MemoryRange]) -> str | None:
    """Each row lies inside one range of its device: as strict as NIXL's check, without its arithmetic modulo 2**64."""
    for index, (address, length_bytes, device_id, stride_bytes, count) in enumerate(rows.tolist()):
        end = address + stride_bytes * (count - 1) + length_bytes
        if not any(
            r.device_id == device_id and r.address <= address and end <= r.address + r.length_bytes for r in ranges
        ):
            return f"{side} row {index} leaves the memory registered there"
    return None


def _range_problem(indices: Indices, rows: Rows) -> str | None:
    segments = num_segments(rows)
    if indices.min() < 0 or indices.max() >= segments:
        return f"an index is outside 0..{segments - 1}"
    return None


def _encode_blob(agent_name: str, kind: MemoryKind, ranges: Sequence[MemoryRange]) -> bytes:
    name = agent_name.encode()
    sections = msgspec.msgpack.encode((kind, [(r.address, r.length_bytes, r.device_id) for r in ranges]))
    blob = _BLOB_PREFIX + len(name).to_bytes(8, "little") + name + sections
    return blob + zlib.crc32(blob).to_bytes(_CHECKSUM_BYTES, "little")


def _header_end(metadata: bytes) -> int:
    start = len(_BLOB_PREFIX) + 8
    return start + int.from_bytes(metadata[len(_BLOB_PREFIX) : start], "little")


def _agent_named_in(metadata: bytes) -> str | None:
    start, end = len(_BLOB_PREFIX) + 8, _header_end(metadata)
    if not metadata.startswith(_BLOB_PREFIX) or not start < end < len(metadata):
        return None
    return metadata[start:end].decode(errors="replace")


def _decode_sections(metadata: bytes) -> tuple[MemoryKind, list[MemoryRange]] | None:
    """What follows a blob's name, or ``None`` when a single bit of the blob has changed."""
    body, checksum = metadata[:-_CHECKSUM_BYTES], metadata[-_CHECKSUM_BYTES:]
    if zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
        return None
    kind, ranges = msgspec.msgpack.decode(
        body[_header_end(metadata) :], type=tuple[MemoryKind, list[tuple[int, int, int]]]
    )
    return kind, [MemoryRange(*r) for r in ranges]
