"""NIXL behind the transport contract. The only importer of ``nixl``, and the place where its exceptions become ours.

One thread makes a transport, calls it and closes it: the agent runs without a progress thread (NIXL's would burn a
core, idle or not) and without locks, so calls from two threads would corrupt it. Progress is made by ``poll_write`` and
``notifications``.

What NIXL does not say and this module is shaped by (``tests/contract`` asserts it against the pinned version):

* A released handle is freed memory; using it again crashes the process. Callers get numbers, never NIXL's handles.
* The notification of a WRITE is sent by the call that sees its end, ``transfer`` or ``check_xfer_state``.
* Releasing a handle and removing a remote cancel nothing. Only the agent's destruction stops a WRITE, and every handle
  keeps the agent alive: what is released here is also dropped, even from the tracebacks of errors.
* Metadata that fails to load behind its name makes that name unusable for this agent, and removing the remote does not
  help. Loading metadata of an agent that is loaded already disturbs the connection. So the name is read first.
* NIXL removes a remote neither on disconnect nor on error. Preparing lists again for the same name works after removal.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nixl import _bindings as nixl_bindings
from nixl._api import nixl_agent, nixl_agent_config

from kvpush.config import Config
from kvpush.errors import Closed, ConfigurationError, FailureCode, TransportError, UsageError
from kvpush.layout import MemoryKind, MemoryRange
from kvpush.rows import Indices, Rows, indices_problem, rows_problem
from kvpush.transport import Notification, RemoteHandle, TransportCounts, WriteHandle

logger = logging.getLogger(__name__)

# NIXL's exceptions have no common base class: each one is a direct subclass of Exception.
NIXL_EXCEPTIONS: tuple[type[Exception], ...] = (
    nixl_bindings.nixlBackendError,
    nixl_bindings.nixlCancelledError,
    nixl_bindings.nixlInvalidParamError,
    nixl_bindings.nixlMismatchError,
    nixl_bindings.nixlNoTelemetryError,
    nixl_bindings.nixlNotAllowedError,
    nixl_bindings.nixlNotFoundError,
    nixl_bindings.nixlNotPostedError,
    nixl_bindings.nixlNotSupportedError,
    nixl_bindings.nixlRemoteDisconnectError,
    nixl_bindings.nixlRepostActiveError,
    nixl_bindings.nixlUnknownError,
)
# The bindings' own complaints, too. A descriptor builder's None becomes the TypeError of the call that is given it.
_FAILURES: tuple[type[Exception], ...] = (*NIXL_EXCEPTIONS, TypeError, ValueError, LookupError, RuntimeError)
_DISCONNECTED: type[Exception] = nixl_bindings.nixlRemoteDisconnectError

_LOCAL = ""  # NIXL's name for the initiator's own side of a transfer
_BLOB_PREFIX = b"nixlSerDes|Agent"  # followed by the name's length (8 bytes, little-endian) and the name
_MAX_TCP_USER_TIMEOUT_MS = 2**31 - 1  # the socket option is an int


def _quieten_nixl_log() -> None:
    """Raise NIXL's logger from its default, INFO to stdout, to WARNING. A level that somebody chose is left alone."""
    nixl_logger = logging.getLogger("nixl")
    if nixl_logger.level == logging.INFO and "NIXL_LOG_LEVEL" not in os.environ:
        nixl_logger.setLevel(logging.WARNING)


_quieten_nixl_log()


@dataclass(slots=True, eq=False)
class _LocalList:
    """A prepared list of this side, shared by all remotes that use the same rows."""

    key: bytes
    dlist: Any
    users: int = 0


@dataclass(slots=True, eq=False)
class _Remote:
    agent_name: str
    local: _LocalList
    dlist: Any
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class _Write:
    remote: _Remote
    xfer: Any  # None once released
    is_done: bool = False  # transfer() itself saw the end
    failure: TransportError | None = None  # transfer() failed and may have posted a part


class NixlTransport:
    """One NIXL agent with the UCX backend and the memory it registers; see :class:`kvpush.transport.Transport`.

    ``agent_name`` is unique in the whole fleet. Making the first one of a process takes about 0.4 s. Settings used:
    ``net_devices``, ``tcp_user_timeout_s`` and ``ucx_options``; a ``UCX_*`` variable in the environment overrides them.
    Raises ConfigurationError when UCX cannot start with these settings or the memory cannot be registered.
    """

    def __init__(self, agent_name: str, kind: MemoryKind, ranges: Sequence[MemoryRange], config: Config) -> None:
        self._agent_name = agent_name
        self._thread_id = threading.get_ident()
        self._kind = kind
        self._agent: Any = None
        self._memory: Any = None
        self._metadata = b""
        self._is_closed = False
        self._next_handle = 1
        self._remotes: dict[RemoteHandle, _Remote] = {}
        self._loaded: set[str] = set()
        self._local_lists: dict[bytes, _LocalList] = {}
        self._writes: dict[WriteHandle, _Write] = {}
        self._unreleased: list[Any] = []  # handles that NIXL refused to release; tried again at close
        self.counts = TransportCounts()

        options = backend_options(config)
        _check_ranges(kind, ranges)
        try:
            self._start(options, ranges)
        except BaseException:
            self.close()
            raise

    def _start(self, options: dict[str, str], ranges: Sequence[MemoryRange]) -> None:
        if self._kind is MemoryKind.vram:
            _claim_cuda_device(ranges[0].device_id)
        try:
            self._agent = nixl_agent(self._agent_name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend("UCX", options)
        except _FAILURES as exc:
            raise ConfigurationError(
                f"agent {self._agent_name!r}: UCX does not start with {options['engine_config']!r}: {_named(exc)}"
            ) from _without_frames(exc)
        try:
            self._memory = self._agent.register_memory(
                [(r.address, r.length_bytes, r.device_id, "") for r in ranges], self._kind.value
            )
            self._metadata = self._agent.get_agent_metadata()
        except _FAILURES as exc:
            num_bytes = sum(r.length_bytes for r in ranges)
            raise ConfigurationError(
                f"agent {self._agent_name!r}: {len(ranges)} ranges of {self._kind.value} with {num_bytes} bytes "
                f"cannot be registered: {_named(exc)}"
            ) from _without_frames(exc)

    @property
    def agent_name(self) -> str:
        return self._agent_name

    def metadata(self) -> bytes:
        self._check_usable()
        return self._metadata

    # --- remotes ---------------------------------------------------------------------------------------------------

    def add_remote(
        self, agent_name: str, metadata: bytes, kind: MemoryKind, local_rows: Rows, remote_rows: Rows
    ) -> RemoteHandle:
        self._check_usable()
        if problem := rows_problem(local_rows):
            raise UsageError(f"local side of agent {agent_name!r}: {problem}")
        if problem := self._name_problem(agent_name, metadata) or rows_problem(remote_rows):
            raise TransportError(FailureCode.handshake_failed, f"agent {agent_name!r}: {problem}")

        local = self._acquire_local(agent_name, local_rows)
        try:
            self._load(agent_name, metadata)
            remote_list = self._prepare_remote(agent_name, kind, remote_rows)
        except BaseException:
            self._release_local(local)
            raise
        self._loaded.add(agent_name)
        self.counts.remotes_added += 1
        remote = RemoteHandle(self._mint())
        self._remotes[remote] = _Remote(agent_name, local, remote_list)
        return remote

    def _name_problem(self, agent_name: str, metadata: bytes) -> str | None:
        if agent_name == self._agent_name:
            return "that is this agent's own name"
        if agent_name in self._loaded:
            return "already loaded; remove it first"
        named = _agent_named_in(metadata)
        if named is None:
            return f"its metadata ({len(metadata)} bytes) is not NIXL's"
        if named != agent_name.encode():
            return f"its metadata names {named[:64]!r}"
        return None

    def _load(self, agent_name: str, metadata: bytes) -> None:
        try:
            loaded = self._agent.add_remote_agent(metadata)
        except _FAILURES as exc:
            self._unload(agent_name)
            raise _failure("add_remote_agent", agent_name, FailureCode.handshake_failed, exc) from _without_frames(exc)
        if loaded != agent_name.encode():
            self._unload(agent_name)
            raise TransportError(
                FailureCode.handshake_failed, f"add_remote_agent of agent {agent_name!r}: NIXL loaded {loaded!r}"
            )

    def _prepare_remote(self, agent_name: str, kind: MemoryKind, rows: Rows) -> Any:
        try:
            remote_list = self._agent.prep_xfer_dlist(agent_name, rows, kind.value)
        except _FAILURES as exc:
            self._unload(agent_name)
            raise _failure("prep_xfer_dlist", agent_name, FailureCode.handshake_failed, exc) from _without_frames(exc)
        self.counts.lists_prepared += 1
        return remote_list

    def _unload(self, agent_name: str) -> None:
        _quietly("remove_remote_agent", agent_name, self._agent.remove_remote_agent, agent_name)

    def _acquire_local(self, agent_name: str, rows: Rows) -> _LocalList:
        key = rows.tobytes()
        local = self._local_lists.get(key)
        if local is None:
            try:
                dlist = self._agent.prep_xfer_dlist(_LOCAL, rows, self._kind.value)
            except _FAILURES as exc:
                raise _failure(
                    "prep_xfer_dlist (local)", agent_name, FailureCode.handshake_failed, exc
                ) from _without_frames(exc)
            self.counts.lists_prepared += 1
            local = self._local_lists[key] = _LocalList(key, dlist)
        local.users += 1
        return local

    def _release_local(self, local: _LocalList) -> None:
        local.users -= 1
        if not local.users:
            del self._local_lists[local.key]
            self._release_list(local)

    def _release_list(self, owner: _LocalList | _Remote) -> None:
        dlist, owner.dlist = owner.dlist, None
        self._release_nixl("release_dlist_handle", dlist)
        self.counts.lists_released += 1

    def remove_remote(self, remote: RemoteHandle) -> None:
        self._check_usable()
        entry = self._remote(remote)
        if entry.in_flight:
            raise UsageError(f"agent {entry.agent_name!r} has {entry.in_flight} writes in flight; it cannot be removed")
        self._drop_remote(remote, entry)

    def _drop_remote(self, remote: RemoteHandle, entry: _Remote) -> None:
        # The agent before its list: the order that NIXL was measured to take in every state of the peer.
        del self._remotes[remote]
        self._loaded.discard(entry.agent_name)
        self._unload(entry.agent_name)
        self._release_list(entry)
        self._release_local(entry.local)
        self.counts.remotes_removed += 1

    # --- writes ----------------------------------------------------------------------------------------------------

    def post_write(
        self, remote: RemoteHandle, local_indices: Indices, remote_indices: Indices, notification: bytes
    ) -> WriteHandle:
        self._check_usable()
        entry = self._remote(remote)
        if problem := indices_problem(local_indices, remote_indices):
            raise UsageError(f"write to agent {entry.agent_name!r}: {problem}")
        try:
            xfer = self._agent.make_prepped_xfer(
                "WRITE", entry.local.dlist, local_indices, entry.dlist, remote_indices, notification
            )
        except _FAILURES as exc:
            raise _failure("make_prepped_xfer", entry.agent_name, FailureCode.write_failed, exc) from _without_frames(
                exc
            )
        write = _Write(entry, xfer)
        del xfer  # an error's traceback must not keep the handle, and with it the agent, alive
        self.counts.writes_posted += 1
        self._transfer(write)
        handle = WriteHandle(self._mint())
        self._writes[handle] = write
        entry.in_flight += 1
        return handle

    def _transfer(self, write: _Write) -> None:
        """Post. Raises only when nothing of the write can land any more; other failures wait for ``poll_write``."""
        agent_name = write.remote.agent_name
        try:
            status = self._agent.transfer(write.xfer)
        except _DISCONNECTED as exc:
            self._release_xfer(write)
            raise _failure("transfer", agent_name, FailureCode.write_failed, exc) from _without_frames(exc)
        except _FAILURES as exc:
            # A write is posted descriptor by descriptor: those before the failing one may be on their way.
            write.failure = _failure("transfer", agent_name, FailureCode.write_failed, exc)
            write.failure.__cause__ = _without_frames(exc)
        else:
            write.is_done = status == "DONE"
            if status not in ("DONE", "PROC"):
                write.failure = _unexpected_status("transfer", agent_name, status)

    def poll_write(self, write: WriteHandle) -> bool:
        self._check_usable()
        entry = self._write(write)
        if not entry.is_done and entry.failure is None:
            agent_name = entry.remote.agent_name
            try:
                status = self._agent.check_xfer_state(entry.xfer)
            except _FAILURES as exc:
                self._forget(write)
                raise _failure("check_xfer_state", agent_name, FailureCode.write_failed, exc) from _without_frames(exc)
            if status == "PROC":
                return False
            if status != "DONE":
                entry.failure = _unexpected_status("check_xfer_state", agent_name, status)
        self._forget(write)
        if entry.failure is not None:
            raise entry.failure
        return True

    def abandon_write(self, write: WriteHandle) -> None:
        self._check_usable()
        self._write(write)
        self._forget(write)

    def _forget(self, handle: WriteHandle) -> None:
        write = self._writes.pop(handle)
        write.remote.in_flight -= 1
        self._release_xfer(write)

    def _release_xfer(self, write: _Write) -> None:
        xfer, write.xfer = write.xfer, None
        self._release_nixl("release_xfer_handle", xfer)
        self.counts.writes_released += 1

    def _release_nixl(self, operation: str, handle: Any) -> None:
        """Release one of NIXL's handles; one that NIXL will not let go is kept for close()."""
        if not _quietly(operation, self._agent_name, handle.release):
            self._unreleased.append(handle)

    # --- arrivals and the end --------------------------------------------------------------------------------------

    def notifications(self) -> list[Notification]:
        self._check_usable()
        try:
            arrived = self._agent.get_new_notifs()
        except _FAILURES as exc:
            # A sender's name that is not UTF-8 is a ValueError. What else arrived with it is lost.
            code = FailureCode.malformed if isinstance(exc, ValueError) else FailureCode.internal
            raise _failure("get_new_notifs", self._agent_name, code, exc) from _without_frames(exc)
        return [Notification(sender, payload) for sender, payloads in arrived.items() for payload in payloads]

    def close(self) -> None:
        self._check_thread()
        if self._is_closed:
            return
        self._is_closed = True
        for write in list(self._writes):
            self._forget(write)
        for remote, entry in list(self._remotes.items()):
            self._drop_remote(remote, entry)
        unreleased, self._unreleased = self._unreleased, []
        for handle in unreleased:
            _quietly("second release", self._agent_name, handle.release)
        if self._memory is not None:
            _quietly("deregister_memory", self._agent_name, self._agent.deregister_memory, self._memory)
        self._memory = None
        self._agent = None  # the last reference: sockets close, and writes that never ended stop

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread_id:
            raise UsageError(f"agent {self._agent_name!r} belongs to another thread than {threading.current_thread()}")

    def _check_usable(self) -> None:
        self._check_thread()
        if self._is_closed:
            raise Closed(f"agent {self._agent_name!r} is closed")

    def _mint(self) -> int:
        handle = self._next_handle
        self._next_handle += 1
        return handle

    def _remote(self, remote: RemoteHandle) -> _Remote:
        try:
            return self._remotes[remote]
        except KeyError:
            raise UsageError(f"agent {self._agent_name!r}: remote {remote} is unknown or removed") from None

    def _write(self, write: WriteHandle) -> _Write:
        try:
            return self._writes[write]
        except KeyError:
            raise UsageError(f"agent {self._agent_name!r}: write {write} is unknown or has ended") from None


def backend_options(config: Config) -> dict[str, str]:
    """Parameters of NIXL's UCX backend. Raises ConfigurationError for what NIXL would ignore without a word."""
    user_timeout_ms = min(max(1, round(config.tcp_user_timeout_s * 1000)), _MAX_TCP_USER_TIMEOUT_MS)
    engine_config = {
        "TCP_USER_TIMEOUT": f"{user_timeout_ms}ms",  # the only knob that bounds UCX's TCP failure detection
        "TCP_CONN_NB": "y",  # connecting to a black hole must not stop this thread for minutes
    }
    device = config.net_devices.strip()
    if "," in device:
        raise ConfigurationError(
            f"net_devices={config.net_devices!r}: NIXL hands UCX only the first of several devices; "
            "set UCX_NET_DEVICES in the environment instead"
        )
    if device:
        engine_config["NET_DEVICES"] = device
    engine_config |= _parsed_ucx_options(config.ucx_options)
    return {
        "ucx_error_handling_mode": "peer",  # without it a killed peer is never reported
        "engine_config": ",".join(f"{key}={value}" for key, value in engine_config.items()),
    }


def _parsed_ucx_options(text: str) -> dict[str, str]:
    options = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = (part.strip() for part in item.partition("="))
        if not separator or not value or not re.fullmatch(r"(?!UCX_)[A-Z][A-Z0-9_]*", key):
            raise ConfigurationError(
                f"ucx_options={text!r}: {item!r} is not KEY=VALUE with UCX's name of the option less its UCX_; "
                "a value with a comma goes into the environment, as UCX_KEY"
            )
        options[key] = value
    return options


def _check_ranges(kind: MemoryKind, ranges: Sequence[MemoryRange]) -> None:
    if not ranges or any(r.length_bytes <= 0 for r in ranges):
        raise ConfigurationError(f"ranges={list(ranges)!r}: at least one, none of them empty")
    devices = sorted({r.device_id for r in ranges})
    if kind is MemoryKind.vram and len(devices) > 1:
        raise ConfigurationError(f"ranges on CUDA devices {devices}: one transport serves one device")


def _claim_cuda_device(device_id: int) -> None:
    """Make the device current on this thread. UCX takes the current context when it registers and copies GPU memory."""
    import torch

    try:
        torch.cuda.set_device(device_id)
    except (RuntimeError, AssertionError, AttributeError) as exc:  # also: torch built without CUDA
        raise ConfigurationError(f"CUDA device {device_id} cannot be used: {exc}") from exc


def _agent_named_in(metadata: bytes) -> bytes | None:
    """The name a metadata blob begins with, or ``None`` when it is not a blob of NIXL's."""
    start = len(_BLOB_PREFIX) + 8
    if not metadata.startswith(_BLOB_PREFIX) or len(metadata) < start:
        return None
    end = start + int.from_bytes(metadata[len(_BLOB_PREFIX) : start], "little")
    return metadata[start:end] if start < end < len(metadata) else None


def _failure(operation: str, agent_name: str, code: FailureCode, exc: Exception) -> TransportError:
    """Our error for one of NIXL's. A disconnect on the way of a WRITE is ``peer_lost``, whatever ``code`` says."""
    disconnected = isinstance(exc, _DISCONNECTED)
    if disconnected and code is FailureCode.write_failed:
        code = FailureCode.peer_lost
    return TransportError(code, f"{operation} of agent {agent_name!r}: {_named(exc)}", disconnected=disconnected)


def _unexpected_status(operation: str, agent_name: str, status: str) -> TransportError:
    return TransportError(FailureCode.write_failed, f"{operation} of agent {agent_name!r}: status {status!r}")


def _without_frames(exc: Exception) -> Exception:
    """The exception less its traceback: its frames hold NIXL's objects, so a kept error would keep the agent alive."""
    return exc.with_traceback(None)


def _named(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


def _quietly(operation: str, agent_name: str, call: Callable[..., object], *args: object) -> bool:
    """Whether a call that only gives something back went well. Nobody could do anything about its failure."""
    try:
        call(*args)
    except Exception:
        logger.warning("%s of agent %r failed", operation, agent_name, exc_info=True)
        return False
    return True
