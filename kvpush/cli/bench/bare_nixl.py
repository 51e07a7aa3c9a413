"""What kvpush is compared with: the least Python that moves the same descriptors with NIXL and knows that they arrived.

No control plane, no state, no failure handling, both sides spinning: a lower bound, not a program that one could run.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nixl._api import nixl_agent, nixl_agent_config

from kvpush.config import Config
from kvpush.nixl_transport import backend_options

Indices = npt.NDArray[np.int32]

_TIMEOUT_NS = 90 * 10**9
_NOTIFICATION = b"twelve bytes"


class _BareAgent:
    """An agent over a cache of contiguous layers, one row of the descriptor list a layer."""

    def __init__(self, cache: Mapping[str, torch.Tensor], config: Config) -> None:
        self._cache = list(cache.values())  # keeps the memory alive
        first = self._cache[0]
        self.agent_name = f"bare#{uuid.uuid4().hex}"
        self._kind = "VRAM" if first.is_cuda else "DRAM"
        self.num_blocks = len(first)
        device_id = first.get_device() if first.is_cuda else 0
        block_bytes = first[0].nbytes
        self.rows: npt.NDArray[np.uint64] = np.array(
            [(layer.data_ptr(), block_bytes, device_id, block_bytes, len(layer)) for layer in self._cache],
            dtype=np.uint64,
        )
        self._agent: Any = nixl_agent(self.agent_name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._agent.create_backend("UCX", backend_options(config))
        self._memory: Any = self._agent.register_memory(
            [(layer.data_ptr(), layer.nbytes, device_id, "") for layer in self._cache], self._kind
        )
        self.metadata: bytes = self._agent.get_agent_metadata()

    def close(self) -> None:
        """Destroy the agent, which every handle would keep alive."""
        if self._agent is not None:
            self._agent.deregister_memory(self._memory)
        self._agent = self._memory = None


class BareReader(_BareAgent):
    """Is written to."""

    def arrivals(self) -> int:
        """How many WRITEs have arrived since the last call."""
        return sum(len(notifications) for notifications in self._agent.get_new_notifs().values())


def await_writes(readers: Sequence[BareReader], count: int) -> int:
    """Spin until ``count`` WRITEs have arrived at each. When that was."""
    give_up_ns = time.monotonic_ns() + _TIMEOUT_NS
    missing = dict.fromkeys(readers, count)
    while missing:
        for reader in list(missing):
            if arrived := reader.arrivals():
                missing[reader] -= arrived
                if missing[reader] <= 0:
                    del missing[reader]
        if time.monotonic_ns() > give_up_ns:
            raise TimeoutError("no notification came")
    return time.monotonic_ns()


@dataclass(slots=True, eq=False)
class BareRemote:
    """A reader that a writer has loaded."""

    agent_name: str
    dlist: Any
    num_blocks: int


@dataclass(frozen=True, slots=True)
class BareWrite:
    """One WRITE to post."""

    remote: BareRemote
    local: Indices
    to: Indices


class BareWriter(_BareAgent):
    """Writes."""

    def __init__(self, cache: Mapping[str, torch.Tensor], config: Config) -> None:
        super().__init__(cache, config)
        self._local_list: Any = self._agent.prep_xfer_dlist("", self.rows, self._kind)
        self._remotes: list[BareRemote] = []

    def connect(self, agent_name: str, metadata: bytes, rows: npt.NDArray[np.uint64]) -> BareRemote:
        """Load a reader and prepare its list."""
        self._agent.add_remote_agent(metadata)
        dlist = self._agent.prep_xfer_dlist(agent_name, rows, self._kind)
        remote = BareRemote(agent_name, dlist, int(rows[0, 4]))
        self._remotes.append(remote)
        return remote

    def disconnect(self, remote: BareRemote) -> None:
        """Forget a reader."""
        self._remotes.remove(remote)
        self._agent.release_dlist_handle(remote.dlist)
        remote.dlist = None
        self._agent.remove_remote_agent(remote.agent_name)

    def write_of(
        self, remote: BareRemote, local_ids: npt.NDArray[np.int64], remote_ids: npt.NDArray[np.int64]
    ) -> BareWrite:
        """These blocks of every layer, into those."""
        return BareWrite(
            remote,
            _indices(len(self.rows), self.num_blocks, local_ids),
            _indices(len(self.rows), remote.num_blocks, remote_ids),
        )

    def write(self, writes: Sequence[BareWrite]) -> int:
        """Post all WRITEs and spin until they are done. When that was begun."""
        begun_ns = time.monotonic_ns()
        posted = [self._post(write) for write in writes]
        while posted:
            for xfer in list(posted):
                if self._agent.check_xfer_state(xfer) != "PROC":  # this call also sends the notification
                    self._agent.release_xfer_handle(xfer)
                    posted.remove(xfer)
            if time.monotonic_ns() > begun_ns + _TIMEOUT_NS:
                raise TimeoutError("the WRITE did not end")
        return begun_ns

    def _post(self, write: BareWrite) -> Any:
        xfer = self._agent.make_prepped_xfer(
            "WRITE", self._local_list, write.local, write.remote.dlist, write.to, _NOTIFICATION
        )
        self._agent.transfer(xfer)
        return xfer

    def close(self) -> None:
        """Forget every reader and destroy the agent."""
        for remote in list(self._remotes):
            self.disconnect(remote)
        if self._agent is not None:
            self._agent.release_dlist_handle(self._local_list)
        self._local_list = None
        super().close()


def _indices(num_rows: int, num_blocks: int, block_ids: npt.NDArray[np.int64]) -> Indices:
    """Of these blocks in every row."""
    offsets = np.arange(num_rows, dtype=np.int32)[:, np.newaxis] * np.int32(num_blocks)
    return (offsets + block_ids.astype(np.int32)).reshape(-1)
