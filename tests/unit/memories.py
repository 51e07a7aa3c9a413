"""Memories of every form for the tests of plans: permuted, interleaved, with gaps that no write may touch."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from hypothesis import strategies as st

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
GUARD_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Storage:
    """One allocation: physical axes from outermost to innermost, each cut out of a longer one.

    ``L`` is the axis of the layers that share the allocation. ``before`` and ``after`` are elements left out at either
    end of an axis, so they are gaps that no write may touch.
    """

    order: tuple[str, ...]
    sizes: dict[str, int]
    before: dict[str, int]
    after: dict[str, int]

    def extent(self, axis):
        return self.before[axis] + self.sizes[axis] + self.after[axis]

    def num_items(self):
        return int(np.prod([self.extent(axis) for axis in self.order]))

    def views(self, items, dims):
        """The layers' tensors over ``items``, with the axes in the order of ``dims``."""
        whole = items.reshape([self.extent(axis) for axis in self.order])
        for position, axis in enumerate(self.order):
            whole = whole.narrow(position, self.before[axis], self.sizes[axis])
        return list(whole.permute([self.order.index(axis) for axis in ("L", *dims)]).unbind(0))


@dataclasses.dataclass(frozen=True)
class Memory:
    """The layers of one group on one rank: names in the order of its mapping, spread over storages in one arena."""

    dims: str
    dtype: torch.dtype
    names: tuple[str, ...]
    storages: tuple[Storage, ...]

    def arena_bytes(self):
        used = sum(s.num_items() * self.dtype.itemsize + GUARD_BYTES for s in self.storages)
        return GUARD_BYTES + -(-used // GUARD_BYTES) * GUARD_BYTES + GUARD_BYTES * len(self.storages)

    def tensors(self, arena):
        views, start = [], GUARD_BYTES
        for storage in self.storages:
            length = storage.num_items() * self.dtype.itemsize
            views += storage.views(arena[start : start + length].view(self.dtype), self.dims)
            start = -(-(start + length) // GUARD_BYTES) * GUARD_BYTES + GUARD_BYTES
        return dict(zip(self.names, views, strict=True))


@st.composite
def memories(draw, axes, sizes, dtype, names, num_blocks):
    sizes = sizes | {"B": num_blocks}
    groups, left = [], len(names)
    while left:
        groups.append(draw(st.integers(1, left)))
        left -= groups[-1]
    storages = []
    for group in groups:
        order = tuple(draw(st.permutations(("L", *axes))))
        margin = st.fixed_dictionaries({axis: st.sampled_from([0, 0, 0, 1]) for axis in order})
        storages.append(Storage(order, sizes | {"L": group}, draw(margin), draw(margin)))
    return Memory("".join(draw(st.permutations(axes))), dtype, tuple(draw(st.permutations(names))), tuple(storages))


def random_memory(rng, axes, sizes, dtype, names, num_blocks):
    """The same without hypothesis, for tests that need many memories: it would spend its time on drawing them."""
    sizes = sizes | {"B": num_blocks}
    names = rng.sample(names, len(names))
    storages, left = [], len(names)
    while left:
        together = rng.randint(1, left)
        left -= together
        order = tuple(rng.sample(("L", *axes), len(axes) + 1))
        before, after = ({axis: int(rng.random() < 0.2) for axis in order} for _ in range(2))
        storages.append(Storage(order, sizes | {"L": together}, before, after))
    return Memory("".join(rng.sample(axes, len(axes))), dtype, tuple(names), tuple(storages))


def random_arena(num_bytes, seed):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8))


def bits(tensor):
    """The tensor's elements as integers in a numpy array over the same memory."""
    return tensor.view(BITS[tensor.itemsize]).numpy()
