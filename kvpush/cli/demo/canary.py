"""Canaries: blocks of a cache that nobody may write hold a pattern, and a look at them shows whether anybody did."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvpush.cli.model import PagedKVCache

_PATTERN = 0x5AA5_C33C_0FF0_9669  # as keys or values these bytes do not occur by chance


class Canaries:
    """The pattern in every block of ``cache`` that is watched; at first that is all of them.

    A block is watched from the moment that its owner gives it back until it is granted to a sender, or until the engine
    itself is about to write it. So one that changed while it was watched was written by somebody who had no right to.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._layers = [tensor.view(cache.num_blocks, -1).view(torch.int64) for tensor in cache.kv_caches.values()]
        self._is_watched = torch.zeros(cache.num_blocks, dtype=torch.bool)
        self.watch(range(cache.num_blocks))

    @property
    def num_watched(self) -> int:
        """How many blocks :meth:`changed` looks at."""
        return int(self._is_watched.sum())

    def watch(self, block_ids: Iterable[int]) -> None:
        """Fill these blocks with the pattern; from now on nobody may write them."""
        ids = torch.tensor(list(block_ids), dtype=torch.int64)
        for layer in self._layers:
            layer.index_fill_(0, ids, _PATTERN)
        self._is_watched[ids] = True

    def release(self, block_ids: Iterable[int]) -> None:
        """These blocks are granted to a sender, or the engine will write them."""
        self._is_watched[torch.tensor(list(block_ids), dtype=torch.int64)] = False

    def changed(self) -> tuple[int, ...]:
        """Watched blocks that do not hold the pattern any more."""
        is_intact = torch.ones_like(self._is_watched)
        for layer in self._layers:
            is_intact &= (layer == _PATTERN).all(dim=1)
        return tuple((self._is_watched & ~is_intact).nonzero().flatten().tolist())
