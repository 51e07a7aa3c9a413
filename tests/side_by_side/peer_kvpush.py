"""kvpush, through its public API."""

from __future__ import annotations

import time
from typing import Any

from worker import Memory, Patience, Shape

import kvpush

# a process that is not its turn is stopped: nobody may take that for a loss
CONFIG = kvpush.Config(net_devices="lo", liveness_timeout_s=3600.0, heartbeat_interval_s=600.0)
SPEC = kvpush.KVCacheSpec(dims="BND", model="side by side")
TOKENS = 16


def caches(memory: Memory) -> dict[str, Any]:
    shape = (memory.shape.blocks, TOKENS, memory.shape.block_bytes // TOKENS)
    return {f"layers.{number}": layer.view(shape) for number, layer in enumerate(memory.layers)}


def await_outcome(side: Any, transfer_id: str) -> int:
    patience = Patience(f"the end of {transfer_id}")
    while True:
        patience.check()
        for event in side.wait(1.0):
            if getattr(event, "transfer_id", None) == transfer_id and hasattr(event, "outcome"):
                assert event.outcome == "done", event
                return time.monotonic_ns()


class Reader(Memory):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._receiver = kvpush.DecodeReceiver("d0", caches(self), SPEC, config=CONFIG)

    def versions(self) -> str:
        return f"kvpush {kvpush.__version__}"

    def info(self) -> Any:
        return None

    def expect(self, transfer_id: str, block_ids: list[int], writer: Any) -> None:
        self._receiver.expect(transfer_id, block_ids, source=tuple(writer), source_engine_id="p0")

    def await_done(self, transfer_id: str) -> int:
        return await_outcome(self._receiver, transfer_id)

    def close(self) -> None:
        self._receiver.close()


class Writer(Memory):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._pusher = kvpush.PrefillPusher("p0", caches(self), SPEC, config=CONFIG)

    def versions(self) -> str:
        return f"kvpush {kvpush.__version__}"

    def info(self) -> Any:
        return list(self._pusher.address)

    def await_registered(self, transfer_id: str, message: Any) -> None:
        patience = Patience(f"the registration of {transfer_id}")
        while not self._pusher.stats()["registrations_waiting"]:
            patience.check()
            time.sleep(0.0002)

    def push(self, transfer_id: str, local: list[int], remote: list[int], reader: Any, message: Any) -> list[int]:
        begun_ns = time.monotonic_ns()
        self._pusher.push(transfer_id, local)
        return [begun_ns, await_outcome(self._pusher, transfer_id)]

    def close(self) -> None:
        self._pusher.close()
