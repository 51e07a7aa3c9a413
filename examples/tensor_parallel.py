"""Tensor parallelism: prefill on four ranks, decode on two, and a request that starts when every rank has its part.

Run it:  python examples/tensor_parallel.py

An engine has one id, and a pusher or receiver for each of its ranks, in production each in the rank's own process. All
ranks name the same transfer id. Each decode rank finds the prefill ranks that hold its heads in ``source``. Each rank
has an outcome of its own: one may be done while another fails. So a request starts when all are done; when one is not,
it is cancelled on all others (after the end that is ignored) and tried again under a fresh id.
"""

from __future__ import annotations

import sys
import time

import torch

import kvpush

HEADS, LAYERS = 8, 2
PREFILL_RANKS, DECODE_RANKS = 4, 2


def spec(tp_rank: int, tp_size: int) -> kvpush.KVCacheSpec:
    """Of one rank."""
    return kvpush.KVCacheSpec(
        dims="BKHND", model="example-model/revision-1", tp_rank=tp_rank, tp_size=tp_size, total_kv_heads=HEADS
    )


def make_caches(tp_size: int) -> dict[str, torch.Tensor]:
    """One rank's share of the heads: 16 blocks, key and value, heads, 16 tokens, head size 64."""
    return {f"layers.{i}": torch.zeros(16, 2, HEADS // tp_size, 16, 64, dtype=torch.float16) for i in range(LAYERS)}


def compute(caches: dict[str, torch.Tensor], tp_rank: int, block_ids: list[int]) -> None:
    """Stands for one rank's forward pass: every element says which layer, head and position it is of."""
    for layer, cache in enumerate(caches.values()):
        heads = cache.shape[2]
        for position, block_id in enumerate(block_ids):
            for head in range(heads):
                cache[block_id, :, head] = 100 * layer + 10 * (tp_rank * heads + head) + position


def outcomes(receivers: list[kvpush.DecodeReceiver], transfer_id: str) -> list[kvpush.Outcome]:
    """One from each rank. Its blocks go back to a rank's pool as its own events say."""
    found: dict[int, kvpush.Outcome] = {}
    give_up_s = time.monotonic() + 60
    while len(found) < len(receivers) and time.monotonic() < give_up_s:
        for rank, receiver in enumerate(receivers):
            for event in receiver.wait(timeout_s=0.01):
                if isinstance(event, kvpush.BlocksReleased):
                    continue
                found[rank] = event.outcome
                if event.outcome != "done":
                    for other in receivers:
                        other.cancel(transfer_id)
    return [found[rank] for rank in sorted(found)]


def main() -> int:
    prefill_caches = [make_caches(PREFILL_RANKS) for _ in range(PREFILL_RANKS)]
    decode_caches = [make_caches(DECODE_RANKS) for _ in range(DECODE_RANKS)]
    pushers = [
        kvpush.PrefillPusher("prefill-0", caches, spec(rank, PREFILL_RANKS), listen="127.0.0.1:0")
        for rank, caches in enumerate(prefill_caches)
    ]
    receivers = [
        kvpush.DecodeReceiver("decode-0", caches, spec(rank, DECODE_RANKS)) for rank, caches in enumerate(decode_caches)
    ]
    source = {(0, rank): pusher.address for rank, pusher in enumerate(pushers)}  # (pp_rank, tp_rank): address

    prefill_blocks, decode_blocks = [3, 4, 9], [7, 8, 2]
    for receiver in receivers:
        receiver.expect("request-1", decode_blocks, source=source, source_engine_id="prefill-0")
    for rank, pusher in enumerate(pushers):
        compute(prefill_caches[rank], rank, prefill_blocks)
        pusher.push("request-1", prefill_blocks)
    ends = outcomes(receivers, "request-1")
    print("decode:", ", ".join(f"rank {rank} {outcome}" for rank, outcome in enumerate(ends)))
    is_served = ends == ["done"] * DECODE_RANKS  # only now may the request join the batch

    for receiver in receivers:
        receiver.close()
    for pusher in pushers:
        pusher.close()
    heads = HEADS // DECODE_RANKS
    is_right = is_served and all(
        torch.all(cache[block_id, :, head] == 100 * layer + 10 * (rank * heads + head) + position)
        for rank, caches in enumerate(decode_caches)
        for layer, cache in enumerate(caches.values())
        for position, block_id in enumerate(decode_blocks)
        for head in range(heads)
    )
    print("every head is right" if is_right else "WRONG HEADS")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
