"""What kvpush is compared with: the least Python that moves the same descriptors with NIXL and knows that they arrived.

No control plane, no state, no failure handling, both sides spinning: a lower bound, not a program that one could run.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nixl._api import nixl_agent, nixl_agent_config

from kvpush.config import Config
from kvpush.layout import KVCacheSpec, geometry_of, memory_ranges
from kvpush.nixl_transport import backend_options
from kvpush.plan import pair
from kvpush.transport import Rows

_TIMEOUT_NS = 30 * 10**9
_NOTIFICATION = b"twelve bytes"


class _BareAgent:
    def __init__(self, cache: Mapping[str, torch.Tensor], spec: KVCacheSpec, config: Config) -> None:
        self._cache = dict(cache)  # keeps the memory alive
        geometry = geometry_of(cache, spec)
        self.agent_name = f"bare#{uuid.uuid4().hex}"
        self.rows: Rows = pair(geometry, geometry).local_rows
        self._kind = geometry.memory.value
        self._num_blocks = geometry.groups[0].num_blocks
        self._agent = nixl_agent(self.agent_name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._agent.create_backend("UCX", backend_options(config))
        ranges = [(r.address, r.length_bytes, r.device_id, "") for r in memory_ranges(geometry)]
        self._memory = self._agent.register_memory(ranges, self._kind)
        self.metadata: bytes = self._agent.get_agent_metadata()


class BareReader(_BareAgent):
    """Is written to."""

    def wait(self) -> int:
        """Spin until a WRITE has arrived. When that was."""
        give_up_ns = time.monotonic_ns() + _TIMEOUT_NS
        while not self._agent.get_new_notifs():
            if time.monotonic_ns() > give_up_ns:
                raise TimeoutError("no notification came")
        return time.monotonic_ns()


class BareWriter(_BareAgent):
    """Writes."""

    def connect(self, agent_name: str, metadata: bytes, rows: Rows) -> None:
        """Load the reader and prepare both lists."""
        self._agent.add_remote_agent(metadata)
        self._local_list = self._agent.prep_xfer_dlist("", self.rows, self._kind)
        self._remote_list = self._agent.prep_xfer_dlist(agent_name, rows, self._kind)

    def indices(self, block_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Of these blocks in every row."""
        offsets = np.arange(len(self.rows), dtype=np.int32)[:, np.newaxis] * np.int32(self._num_blocks)
        return (offsets + block_ids.astype(np.int32)).reshape(-1)

    def write(self, local_indices: npt.NDArray[np.int32], remote_indices: npt.NDArray[np.int32]) -> int:
        """Post one WRITE and spin until it is done. When it was begun."""
        begun_ns = time.monotonic_ns()
        xfer: Any = self._agent.make_prepped_xfer(
            "WRITE", self._local_list, local_indices, self._remote_list, remote_indices, _NOTIFICATION
        )
        state = self._agent.transfer(xfer)
        while state == "PROC":
            if time.monotonic_ns() > begun_ns + _TIMEOUT_NS:
                raise TimeoutError("the WRITE did not end")
            state = self._agent.check_xfer_state(xfer)
        self._agent.release_xfer_handle(xfer)
        return begun_ns
