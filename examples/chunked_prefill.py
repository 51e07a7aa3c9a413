"""Chunked prefill: every chunk is pushed while the next one is computed, and decode has a part of the prompt already.

Run it:  python examples/chunked_prefill.py

Positions count the prompt's blocks from 0. Decode asks for positions 2 to 9, because its prefix cache holds 0 and 1;
prefill pushes all ten in chunks of four and need not know: what nobody asked for is not sent. Decode's event comes when
the last position is in place, in whatever order the chunks arrive.
"""

from __future__ import annotations

import sys

import torch

import kvpush

SPEC = kvpush.KVCacheSpec(dims="KBNHD", model="example-model/revision-1")  # axes of each tensor, in order
PROMPT_BLOCKS = 10
CHUNK_BLOCKS = 4
PREFIX_BLOCKS = 2


def make_caches() -> dict[str, torch.Tensor]:
    """One tensor a layer: key and value, 32 blocks, 16 tokens, 2 heads, head size 64."""
    return {f"layers.{i}": torch.zeros(2, 32, 16, 2, 64, dtype=torch.float16) for i in range(4)}


def compute(caches: dict[str, torch.Tensor], positions: range, block_ids: list[int]) -> None:
    """Stands for the forward pass over one chunk."""
    for layer, cache in enumerate(caches.values()):
        for position, block_id in zip(positions, block_ids, strict=True):
            cache[:, block_id] = 100 * layer + position


def main() -> int:
    prefill_caches, decode_caches = make_caches(), make_caches()
    prefill_blocks = [5, 6, 7, 8, 20, 21, 22, 23, 1, 2]  # position -> block
    decode_blocks = [30, 31, 3, 4, 12, 13, 14, 15, 9, 10]
    compute(decode_caches, range(PREFIX_BLOCKS), decode_blocks[:PREFIX_BLOCKS])  # an earlier request left these here

    with (
        kvpush.PrefillPusher("prefill-0", prefill_caches, SPEC, listen="127.0.0.1:0") as pusher,
        kvpush.DecodeReceiver("decode-0", decode_caches, SPEC) as receiver,
    ):
        receiver.expect(
            "request-1",
            decode_blocks[PREFIX_BLOCKS:],
            first_block=PREFIX_BLOCKS,
            source=pusher.address,
            source_engine_id="prefill-0",
        )
        for start in range(0, PROMPT_BLOCKS, CHUNK_BLOCKS):
            chunk = range(start, min(start + CHUNK_BLOCKS, PROMPT_BLOCKS))
            block_ids = prefill_blocks[chunk.start : chunk.stop]
            compute(prefill_caches, chunk, block_ids)
            # On a GPU the kernels may still run: ready=event, recorded behind them, delays the WRITE until they end.
            pusher.push("request-1", block_ids, first_block=start, last=chunk.stop == PROMPT_BLOCKS)
            print(f"prefill: positions {chunk.start} to {chunk.stop - 1} are on their way")

        (received,) = receiver.wait(timeout_s=30)
        (pushed,) = pusher.wait(timeout_s=30)
        assert isinstance(received, kvpush.ReceiveFinished)
        assert isinstance(pushed, kvpush.PushFinished)
        print(f"decode: {received.outcome}, {received.num_blocks} blocks; prefill: {pushed.num_bytes} bytes sent")

    got = [[int(cache[1, block, -1, -1, -1]) for block in decode_blocks] for cache in decode_caches.values()]
    is_right = got == [[100 * layer + position for position in range(PROMPT_BLOCKS)] for layer in range(4)]
    print("every position is right" if is_right else f"WRONG: {got}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
