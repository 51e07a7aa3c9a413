"""Mooncake's transfer engine over TCP, addresses written directly. Its reader is not told: the writer's end counts.

There is no registration, no matching and no outcome at the reader here: what is compared is the moving of the bytes.
"""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import numpy as np
from mooncake.engine import TransferEngine
from worker import Memory, Shape


class _Engine(Memory):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._engine = TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, "the engine does not start"
        for layer in self.layers:
            assert self._engine.register_memory(layer.data_ptr(), layer.nbytes) == 0, "memory is not registered"

    def versions(self) -> str:
        return f"mooncake {importlib.metadata.version('mooncake-transfer-engine-non-cuda')}"

    def close(self) -> None:
        for layer in self.layers:
            self._engine.unregister_memory(layer.data_ptr())


class Reader(_Engine):
    def info(self) -> Any:
        return [f"127.0.0.1:{self._engine.get_rpc_port()}", [layer.data_ptr() for layer in self.layers]]

    def expect(self, transfer_id: str, block_ids: list[int], writer: Any) -> None:
        return None

    def await_done(self, transfer_id: str) -> None:
        return None


class Writer(_Engine):
    def info(self) -> Any:
        return None

    def await_registered(self, transfer_id: str, message: Any) -> None:
        pass

    def push(self, transfer_id: str, local: list[int], remote: list[int], reader: Any, message: Any) -> list[int]:
        session, bases = reader
        begun_ns = time.monotonic_ns()
        size = self.shape.block_bytes
        mine = [layer.data_ptr() for layer in self.layers]
        from_addresses = (np.array(mine)[:, None] + np.array(local) * size).reshape(-1).tolist()
        to_addresses = (np.array(bases)[:, None] + np.array(remote) * size).reshape(-1).tolist()
        lengths = [size] * len(from_addresses)
        failed = self._engine.batch_transfer_sync_write(session, from_addresses, to_addresses, lengths)
        assert failed == 0, f"batch_transfer_sync_write() returned {failed}"
        return [begun_ns, time.monotonic_ns()]
