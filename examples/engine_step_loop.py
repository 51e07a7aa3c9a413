"""Both classes inside an engine's step loop with continuous batching.

Run it:  python examples/engine_step_loop.py

A step never blocks: it polls the events, admits what has room, runs one forward pass, and goes on. Blocks go back to
the pool when an event says that they are reusable, and never earlier: a WRITE that was posted may still touch them.
Here two engines take turns in one process; in production each has its own, and a router in front names the transfers.
"""

from __future__ import annotations

import sys
import time
from collections import deque

import torch

import kvpush

SPEC = kvpush.KVCacheSpec(dims="BKHND", model="example-model/revision-1")
REQUESTS = {f"request-{i}": 1 + i % 5 for i in range(40)}  # transfer id -> number of blocks; more than the pools hold
NEW_TOKENS = 3


class Engine:
    """A cache of 24 blocks and the list of the free ones."""

    def __init__(self) -> None:
        self.caches = {f"layers.{i}": torch.zeros(24, 2, 2, 16, 64, dtype=torch.bfloat16) for i in range(2)}
        self.free = list(range(24))
        self.blocks: dict[str, list[int]] = {}
        self.waiting: deque[str] = deque(REQUESTS)

    def admit(self) -> str | None:
        """The next request, if it has room."""
        if not self.waiting or len(self.free) < REQUESTS[self.waiting[0]]:
            return None
        transfer_id = self.waiting.popleft()
        count = REQUESTS[transfer_id]
        self.blocks[transfer_id], self.free = self.free[:count], self.free[count:]
        return transfer_id

    def release(self, transfer_id: str) -> None:
        self.free += self.blocks.pop(transfer_id)


class PrefillEngine(Engine):
    def __init__(self) -> None:
        super().__init__()
        self.pusher = kvpush.PrefillPusher("prefill-0", self.caches, SPEC, listen="127.0.0.1:0")

    def step(self) -> None:
        for event in self.pusher.poll():
            if isinstance(event, kvpush.BlocksReleased) or event.blocks_reusable:
                self.release(event.transfer_id)  # whatever the outcome was
        if (transfer_id := self.admit()) is not None:
            for layer in self.caches.values():  # the forward pass; on a GPU pass ready=event, recorded behind it
                layer[self.blocks[transfer_id]] = float(transfer_id.removeprefix("request-"))
            self.pusher.push(transfer_id, self.blocks[transfer_id])


class DecodeEngine(Engine):
    def __init__(self, source: tuple[str, int]) -> None:
        super().__init__()
        self.source = source
        self.receiver = kvpush.DecodeReceiver("decode-0", self.caches, SPEC)
        self.running: dict[str, int] = {}  # tokens still to generate
        self.outputs: dict[str, list[float]] = {}

    def step(self) -> None:
        for event in self.receiver.poll():
            if isinstance(event, kvpush.BlocksReleased):
                self.release(event.transfer_id)
            elif event.outcome == "done":
                self.running[event.transfer_id] = NEW_TOKENS  # joins the batch with this very step
            else:
                print(f"{event.transfer_id}: {event.outcome}: {event.reason}")  # a router would send it again
                if event.blocks_reusable:
                    self.release(event.transfer_id)
        while (transfer_id := self.admit()) is not None:
            block_ids = self.blocks[transfer_id]
            self.receiver.expect(transfer_id, block_ids, source=self.source, source_engine_id="prefill-0")
        for transfer_id in list(self.running):  # one token for every running request
            token = self.caches["layers.1"][self.blocks[transfer_id]].float().mean().item()
            self.outputs.setdefault(transfer_id, []).append(token)
            self.running[transfer_id] -= 1
            if not self.running[transfer_id]:
                del self.running[transfer_id]
                self.release(transfer_id)


def main() -> int:
    prefill = PrefillEngine()
    decode = DecodeEngine(prefill.pusher.address)
    steps, give_up_s = 0, time.monotonic() + 60
    with prefill.pusher, decode.receiver:
        while decode.waiting or decode.blocks or prefill.blocks:
            prefill.step()
            decode.step()
            steps += 1
            if time.monotonic() > give_up_s or not (prefill.pusher.healthy() and decode.receiver.healthy()):
                break
    expected = {f"request-{i}": [float(i)] * NEW_TOKENS for i in range(len(REQUESTS))}
    is_right = decode.outputs == expected and len(prefill.free) == len(decode.free) == 24
    print(f"{len(decode.outputs)} requests in {steps} steps:", "every token is right" if is_right else "WRONG TOKENS")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
