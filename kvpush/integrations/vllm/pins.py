"""Blocks of vLLM's cache that the library still uses, whatever vLLM does with the requests they belong to.

vLLM counts how many users a block has and gives it to somebody else only when the count is zero. A pin is one more
user. So a request may be finished, aborted or preempted at any moment, and its blocks stay where they are until the
library has said that no WRITE can touch them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class BlockPool(Protocol):
    """The part of vLLM's block pool that is used."""

    blocks: Any  # a list of blocks, by id

    def touch(self, blocks: Sequence[Any]) -> None:
        """One more user of each."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """One user less of each; the first to be evicted comes first."""


class Pins(Generic[K]):
    """Pinned blocks by key."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._pinned: dict[K, list[int]] = {}

    def bind(self, pool: BlockPool) -> None:
        """vLLM makes its pool after the connector."""
        self._pool = pool

    def add(self, key: K, block_ids: Iterable[int]) -> None:
        """Pin blocks; those pinned under this key before stay pinned."""
        pool = self._bound()
        ids = list(block_ids)
        pool.touch([pool.blocks[block_id] for block_id in ids])
        self._pinned.setdefault(key, []).extend(ids)

    def drop(self, key: K) -> None:
        """Give the blocks back, the last of them to be reused first."""
        ids = self._pinned.pop(key, None)
        if ids is not None:
            pool = self._bound()
            pool.free_blocks([pool.blocks[block_id] for block_id in reversed(ids)])

    def __contains__(self, key: K) -> bool:
        return key in self._pinned

    def __len__(self) -> int:
        return len(self._pinned)

    @property
    def num_blocks(self) -> int:
        """How many, each as often as it is pinned."""
        return sum(map(len, self._pinned.values()))

    def _bound(self) -> BlockPool:
        if self._pool is None:
            raise RuntimeError("this release of vLLM has not shown its block pool to the connector")
        return self._pool
