"""The memory of one engine in a world: real bytes, small, seen as blocks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

CANARY = 0xEE  # in every block of decode that nobody may write to
SCRIBBLE = 0xDD  # in every block of prefill that is not in use by a push

_HEADS, _TOKENS, _HEAD_SIZE = 1, 2, 16
BLOCK_BYTES = 2 * _HEADS * _TOKENS * _HEAD_SIZE  # of one layer


class Memory:
    """A cache of a few layers. Blocks are seen as flat bytes in one order, however the tensors lie in memory."""

    def __init__(self, dims: str, num_blocks: int, num_layers: int) -> None:
        sizes = {"B": num_blocks, "K": 2, "H": _HEADS, "N": _TOKENS, "D": _HEAD_SIZE}
        self.tensors = {
            f"layers.{layer}": torch.zeros([sizes[axis] for axis in dims], dtype=torch.uint8)
            for layer in range(num_layers)
        }
        order = [dims.index(axis) for axis in "BKHND"]
        self._views = [tensor.permute(order).numpy() for tensor in self.tensors.values()]
        self.block_at: dict[int, int] = {}  # address of a key's or value's first byte -> block
        for view in self._views:
            base, block_step, part_step = view.__array_interface__["data"][0], view.strides[0], view.strides[1]
            for block in range(num_blocks):
                for part in range(2):
                    self.block_at[base + block * block_step + part * part_step] = block

    def read(self, layer: int, block: int) -> bytes:
        """One block of one layer."""
        return bytes(self._views[layer][block].tobytes())

    def write(self, layer: int, block: int, data: bytes) -> None:
        """Overwrite one block of one layer."""
        view = self._views[layer][block]
        view[...] = np.frombuffer(data, dtype=np.uint8).reshape(view.shape)

    def fill(self, blocks: Iterable[int], value: int) -> None:
        """Overwrite whole blocks in all layers."""
        chosen = list(blocks)
        if chosen:
            for view in self._views:
                view[chosen] = value

    def not_filled(self, blocks: Iterable[int], value: int) -> list[int]:
        """Those of the blocks in which some byte is not ``value``."""
        chosen = np.array(list(blocks), dtype=np.int64)
        if not len(chosen):
            return []
        is_other = np.zeros(len(chosen), dtype=np.bool_)
        for view in self._views:
            is_other |= (view[chosen] != value).reshape(len(chosen), -1).any(axis=1)
        return [int(block) for block in chosen[is_other]]
