"""Dynamo's nixl_connect: an operation a transfer, its descriptors made and registered for it, as its API wants it.

The reader makes a writable operation and sends its metadata (here: through run.py, untimed); the writer begins to write
when it has it. Both wait in ``wait_for_completion()``, which looks every 5 ms and less and less often.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from typing import Any

import dynamo.nixl_connect as connect
from worker import Memory, Shape


class _Side(Memory):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._loop = asyncio.new_event_loop()
        self._connector = connect.Connector()

    def versions(self) -> str:
        return f"ai-dynamo {importlib.metadata.version('ai-dynamo')}, nixl {importlib.metadata.version('nixl')}"

    def info(self) -> Any:
        return None

    def _descriptors(self, block_ids: list[int]) -> Any:
        made = [connect.Descriptor(layer[block]) for layer in self.layers for block in block_ids]
        return made if len(made) > 1 else made[0]

    def close(self) -> None:
        self._loop.close()


class Reader(_Side):
    def expect(self, transfer_id: str, block_ids: list[int], writer: Any) -> Any:
        self._operation = self._loop.run_until_complete(self._connector.create_writable(self._descriptors(block_ids)))
        return self._operation.metadata().model_dump()

    def await_done(self, transfer_id: str) -> int:
        self._loop.run_until_complete(self._operation.wait_for_completion())
        at_ns = time.monotonic_ns()
        self._operation.__exit__(None, None, None)
        return at_ns


class Writer(_Side):
    def await_registered(self, transfer_id: str, message: Any) -> None:
        pass

    def push(self, transfer_id: str, local: list[int], remote: list[int], reader: Any, message: Any) -> list[int]:
        begun_ns = time.monotonic_ns()
        self._loop.run_until_complete(self._write(local, message))
        return [begun_ns, self._done_ns]

    async def _write(self, local: list[int], message: Any) -> None:
        metadata = connect.RdmaMetadata.model_validate(message)
        operation = await self._connector.begin_write(self._descriptors(local), metadata)
        with operation:
            await operation.wait_for_completion()
            self._done_ns = time.monotonic_ns()
