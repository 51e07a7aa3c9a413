"""The bare NIXL loop of ``kvpush bench``: no control plane, both sides spin."""

from __future__ import annotations

import base64
import importlib.metadata
import time
from typing import Any

import numpy as np
from worker import Memory, Shape

from kvpush import Config
from kvpush.cli.bench.bare_nixl import BareReader, BareWriter, await_writes

CONFIG = Config(net_devices="lo")


class Reader(Memory):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._reader = BareReader(dict(enumerate(self.layers)), CONFIG)

    def versions(self) -> str:
        return f"nixl {importlib.metadata.version('nixl')}"

    def info(self) -> Any:
        metadata = base64.b64encode(self._reader.metadata).decode()
        return [self._reader.agent_name, metadata, self._reader.rows.tolist()]

    def expect(self, transfer_id: str, block_ids: list[int], writer: Any) -> None:
        return None

    def await_done(self, transfer_id: str) -> int:
        return await_writes([self._reader], 1)

    def close(self) -> None:
        self._reader.close()


class Writer(Memory):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._writer = BareWriter(dict(enumerate(self.layers)), CONFIG)
        self._remote: Any = None

    def versions(self) -> str:
        return f"nixl {importlib.metadata.version('nixl')}"

    def info(self) -> Any:
        return None

    def await_registered(self, transfer_id: str, message: Any) -> None:
        pass

    def push(self, transfer_id: str, local: list[int], remote: list[int], reader: Any, message: Any) -> list[int]:
        begun_ns = time.monotonic_ns()
        if self._remote is None:
            name, metadata, rows = reader
            self._remote = self._writer.connect(name, base64.b64decode(metadata), np.array(rows, dtype=np.uint64))
        self._writer.write([self._writer.write_of(self._remote, np.array(local), np.array(remote))])
        return [begun_ns, time.monotonic_ns()]

    def close(self) -> None:
        self._writer.close()
