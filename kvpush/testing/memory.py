"""The memory of one process in a world: real bytes, small, seen as blocks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from kvpush.testing.slices import Slice

CANARY = 0xEE  # in every block of decode that nobody may write to
SCRIBBLE = 0xDD  # in every block of prefill that is not in use by a push


class Memory:
    """A cache of a few layers and heads. Blocks are seen as flat bytes in one order, however the tensors lie in memory.

    Layers and heads have the model's numbers, also where a rank holds only some of them.
    """

    def __init__(self, dims: str, num_blocks: int, held: Slice) -> None:
        self.held = held
        _, _, tokens, head_size = held.model.block_shape
        sizes = {"B": num_blocks, "K": 2, "H": len(held.heads), "N": tokens, "D": head_size}
        self.tensors = {
            f"layers.{layer}": torch.zeros([sizes[axis] for axis in dims], dtype=torch.uint8) for layer in held.layers
        }
        order = [dims.index(axis) for axis in "BKHND"]
        views = [tensor.permute(order).numpy() for tensor in self.tensors.values()]
        self._views = dict(zip(held.layers, views, strict=True))
        self.place_at: dict[int, tuple[int, int]] = {}  # address of a unit's first byte -> its block, its number there
        for layer, view in self._views.items():
            base, (block_step, part_step, head_step, *_) = view.__array_interface__["data"][0], view.strides
            for part in range(2):
                for index, head in enumerate(held.heads):
                    unit, start = held.model.unit(layer, part, head), base + part * part_step + index * head_step
                    for block in range(num_blocks):
                        self.place_at[start + block * block_step] = block, unit

    def read(self, layer: int, block: int) -> bytes:
        """What is held of one block of one layer."""
        return bytes(self._views[layer][block].tobytes())

    def write(self, layer: int, block: int, data: bytes) -> None:
        """Overwrite one block of one layer. ``data`` is of all heads; those that are held are taken from it."""
        view = self._views[layer][block]
        view[...] = self._heads_of(data)

    def holds(self, layer: int, block: int, data: bytes) -> bool:
        """Whether a block of a layer has these bytes, of which the heads that are held count."""
        return self.read(layer, block) == self._heads_of(data).tobytes()

    def _heads_of(self, data: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        heads = self.held.heads
        return np.frombuffer(data, dtype=np.uint8).reshape(self.held.model.block_shape)[:, heads.start : heads.stop]

    def fill(self, blocks: Iterable[int], value: int) -> None:
        """Overwrite whole blocks in all layers."""
        chosen = list(blocks)
        if chosen:
            for view in self._views.values():
                view[chosen] = value

    def not_filled(self, blocks: Iterable[int], value: int) -> list[int]:
        """Those of the blocks in which some byte is not ``value``."""
        chosen = np.array(list(blocks), dtype=np.int64)
        if not len(chosen):
            return []
        is_other = np.zeros(len(chosen), dtype=np.bool_)
        for view in self._views.values():
            is_other |= (view[chosen] != value).reshape(len(chosen), -1).any(axis=1)
        return [int(block) for block in chosen[is_other]]
