"""Layer by layer: each layer is pushed as soon as its kernels are launched, while the next layers are computed.

Run it:  python examples/layer_by_layer.py

The prompt comes in two chunks, and each layer of each chunk is a push_layers() of its own. ``ready=`` delays the WRITE
until the device has passed the event, so nothing here waits for a kernel. A position is complete when every layer was
pushed for it. Nobody knows beforehand which call is the last: an empty push() with ``last=True`` ends the transfer.
"""

from __future__ import annotations

import sys

import torch

import kvpush

SPEC = kvpush.KVCacheSpec(dims="KBNHD", model="example-model/revision-1")  # axes of each tensor, in order
LAYERS = [f"layers.{i}" for i in range(4)]
CHUNKS = [range(6), range(6, 10)]  # positions of the prompt's blocks


class Event:
    """Stands for a recorded torch.cuda.Event."""

    def __init__(self) -> None:
        self.is_passed = False

    def query(self) -> bool:
        return self.is_passed


def make_caches() -> dict[str, torch.Tensor]:
    """One tensor a layer: key and value, 32 blocks, 16 tokens, 2 heads, head size 64."""
    return {layer: torch.zeros(2, 32, 16, 2, 64, dtype=torch.float16) for layer in LAYERS}


def run_kernels(cache: torch.Tensor, layer: str, positions: range, block_ids: list[int], event: Event) -> None:
    """Stands for the device, which gets to this layer some time after the kernels were launched."""
    for position, block_id in zip(positions, block_ids, strict=True):
        cache[:, block_id] = 100 * LAYERS.index(layer) + position
    event.is_passed = True


def main() -> int:
    prefill_caches, decode_caches = make_caches(), make_caches()
    prefill_blocks = [5, 6, 7, 8, 20, 21, 22, 23, 1, 2]  # position -> block
    decode_blocks = [30, 31, 3, 4, 12, 13, 14, 15, 9, 10]

    with (
        kvpush.PrefillPusher("prefill-0", prefill_caches, SPEC, listen="127.0.0.1:0") as pusher,
        kvpush.DecodeReceiver("decode-0", decode_caches, SPEC) as receiver,
    ):
        receiver.expect("request-1", decode_blocks, source=pusher.address, source_engine_id="prefill-0")
        for chunk in CHUNKS:
            block_ids = prefill_blocks[chunk.start : chunk.stop]
            events = {layer: Event() for layer in LAYERS}
            for layer in LAYERS:  # the engine's callback after a layer was launched
                pusher.push_layers("request-1", block_ids, layers=[layer], first_block=chunk.start, ready=events[layer])
            for layer in LAYERS:
                run_kernels(prefill_caches[layer], layer, chunk, block_ids, events[layer])
            print(f"prefill: positions {chunk.start} to {chunk.stop - 1} are computed")
        pusher.push("request-1", [], last=True)

        (received,) = receiver.wait(timeout_s=30)
        (pushed,) = pusher.wait(timeout_s=30)
        assert isinstance(received, kvpush.ReceiveFinished)
        assert isinstance(pushed, kvpush.PushFinished)
        print(f"decode: {received.outcome}, {received.num_blocks} blocks; prefill: {pushed.num_bytes} bytes sent")

    got = [[int(cache[1, block, -1, -1, -1]) for block in decode_blocks] for cache in decode_caches.values()]
    is_right = got == [[100 * layer + position for position in range(10)] for layer in range(4)]
    print("every layer is right" if is_right else f"WRONG: {got}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
