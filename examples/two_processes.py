"""A prefill and a decode process: every prompt's KV blocks move from one into the other.

Run it:  python examples/two_processes.py

This process plays the router: it names the transfers, tells both engines of each, and ends them with SIGTERM as an
orchestrator would. Across machines nothing changes but the addresses: PrefillPusher(listen="0.0.0.0:5600",
advertise="prefill-0.example.com"), and the router tells decode that address.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from multiprocessing.connection import Connection

import torch

import kvpush

SPEC = kvpush.KVCacheSpec(dims="BKHND", model="example-model/revision-1")
PROMPTS = {"request-a": [3, 4, 9], "request-b": [0, 1], "request-c": [11, 6, 7, 2]}  # blocks that prefill computes into


def make_caches(fill: float) -> dict[str, torch.Tensor]:
    """One tensor a layer: 16 blocks, key and value, 2 heads, 16 tokens, head size 64."""
    return {f"layers.{i}": torch.full((16, 2, 2, 16, 64), fill, dtype=torch.bfloat16) for i in range(4)}


def prefill(router: Connection) -> None:
    is_asked_to_stop = False

    def stop(*_: object) -> None:
        nonlocal is_asked_to_stop
        is_asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    caches = make_caches(0.0)
    with kvpush.PrefillPusher("prefill-0", caches, SPEC, listen="127.0.0.1:0") as pusher:
        router.send(pusher.address)
        while not is_asked_to_stop:
            if router.poll():
                transfer_id, block_ids = router.recv()
                for layer in caches.values():
                    layer[block_ids] = torch.tensor(block_ids, dtype=layer.dtype)[
                        :, None, None, None, None
                    ]  # "compute"
                pusher.push(transfer_id, block_ids)
            report("prefill", pusher.wait(timeout_s=0.02))
        pusher.drain(timeout_s=10)  # nothing new is taken, what was pushed finishes
        report("prefill", pusher.poll())
    print("prefill: drained and closed", flush=True)


def decode(router: Connection, source: tuple[str, int]) -> None:
    is_asked_to_stop = False

    def stop(*_: object) -> None:
        nonlocal is_asked_to_stop
        is_asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    caches = make_caches(-1.0)
    next_block = 0
    expected: dict[str, list[int]] = {}
    with kvpush.DecodeReceiver("decode-0", caches, SPEC) as receiver:
        while not is_asked_to_stop:
            if router.poll():
                transfer_id, num_blocks = router.recv()
                expected[transfer_id] = list(range(next_block, next_block := next_block + num_blocks))
                receiver.expect(
                    transfer_id, expected[transfer_id], source=source, source_engine_id="prefill-0", deadline_s=30
                )
            events = receiver.wait(timeout_s=0.02)
            report("decode", events)
            for event in events:
                router.send(caches["layers.3"][expected.pop(event.transfer_id), 0, 0, 0, 0].tolist())
        receiver.drain(timeout_s=10)  # nothing new is taken, what is under way arrives
        report("decode", receiver.poll())
    print("decode: drained and closed", flush=True)


def report(
    who: str,
    events: list[kvpush.PushFinished | kvpush.BlocksReleased] | list[kvpush.ReceiveFinished | kvpush.BlocksReleased],
) -> None:
    for event in events:
        print(f"{who}: {event.transfer_id}: {getattr(event, 'outcome', 'released')} {event.reason}", flush=True)


def main() -> int:
    processes = multiprocessing.get_context("spawn")
    to_prefill, at_prefill = processes.Pipe()
    to_decode, at_decode = processes.Pipe()
    prefiller = processes.Process(target=prefill, args=(at_prefill,), daemon=True)
    prefiller.start()
    decoder = processes.Process(target=decode, args=(at_decode, to_prefill.recv()), daemon=True)
    decoder.start()
    is_right = True
    for transfer_id, block_ids in PROMPTS.items():
        to_decode.send((transfer_id, len(block_ids)))  # either side may hear of a transfer first
        to_prefill.send((transfer_id, block_ids))
        is_right &= to_decode.recv() == block_ids
    for process in (decoder, prefiller):
        process.terminate()  # SIGTERM
        process.join()
    print("every block is right" if is_right else "WRONG BLOCKS", flush=True)
    return 0 if is_right and prefiller.exitcode == decoder.exitcode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
