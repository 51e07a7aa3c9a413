"""A paged KV cache: one tensor per layer, cut into blocks that are handed out and taken back.

Not thread-safe: the engine's own thread allocates, writes and reads. kvpush writes into blocks that the engine has
allocated for a request and does not touch until it is told that they are complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpush.cli.model.config import ModelConfig
from kvpush.errors import ConfigurationError, QueueFull, UsageError

KEYS, VALUES = 0, 1


class OutOfBlocks(QueueFull):
    """The cache has fewer free blocks than were asked for. Nothing was taken; try again when a request has ended."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where the tokens ``[start, stop)`` of one sequence lie in the cache, as index tensors for all layers.

    Write to the span's tokens; read all tokens ``[0, stop)``, those before the span included.
    """

    write_blocks: Tensor  # [token]: the block of each token of the span
    write_offsets: Tensor  # [token]: its place in that block
    read_blocks: Tensor  # [block]: blocks of tokens [0, stop), in token order
    stop: int


class PagedKVCache:
    """Keys and values of all layers in blocks of ``block_size_tokens``, and the list of free blocks.

    ``kv_caches`` maps ``"layers.{i}"`` to a tensor ``[block, 2, kv_head, token, head_size]``: keys first, then values
    (``KVCacheSpec(dims="BKHND")``). Hand it to a pusher or receiver as it is.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size_tokens: int, *, device: torch.device | str = "cpu"
    ) -> None:
        if num_blocks < 1 or block_size_tokens < 1:
            raise ConfigurationError(f"{num_blocks=} and {block_size_tokens=} must be above 0")
        self.config = config
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        shape = (num_blocks, 2, config.num_kv_heads, block_size_tokens, config.head_size)
        self.kv_caches = {
            f"layers.{i}": torch.zeros(shape, dtype=config.dtype, device=device) for i in range(config.num_layers)
        }
        self._layers = list(self.kv_caches.values())
        # First in, first out: a freed block rests as long as possible, which is kind to a late write.
        self._free = deque(range(num_blocks))
        self._allocated: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that :meth:`allocate` can still give."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks off the free list; their old contents stay. Raises :class:`OutOfBlocks`, and then takes none."""
        if num_blocks < 0:
            raise UsageError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > len(self._free):
            raise OutOfBlocks(f"{num_blocks} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        taken = [self._free.popleft() for _ in range(num_blocks)]
        self._allocated.update(taken)
        return taken

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back. Raises :class:`UsageError`, and frees none, when one is not allocated or named twice."""
        block_ids = list(block_ids)
        if len(set(block_ids)) != len(block_ids) or not self._allocated.issuperset(block_ids):
            raise UsageError(f"cannot free {block_ids}: each must be allocated, and named once")
        self._allocated.difference_update(block_ids)
        self._free.extend(block_ids)

    def span(self, block_ids: Sequence[int], start: int, stop: int) -> Span:
        """Locate tokens ``[start, stop)`` of the sequence that ``block_ids`` hold; further blocks are ignored."""
        used = list(block_ids[: self.blocks_for(stop)])
        if not 0 <= start < stop:
            raise UsageError(f"no tokens in [{start}, {stop})")
        if len(used) * self.block_size_tokens < stop:
            raise UsageError(f"{len(used)} blocks of {self.block_size_tokens} tokens cannot hold {stop} tokens")
        if len(set(used)) != len(used) or min(used) < 0 or max(used) >= self.num_blocks:
            raise UsageError(f"block ids must differ and lie in [0, {self.num_blocks}): {used}")
        device = self._layers[0].device
        read_blocks = torch.tensor(used, device=device)
        positions = torch.arange(start, stop, device=device)
        return Span(
            write_blocks=read_blocks[positions // self.block_size_tokens],
            write_offsets=positions % self.block_size_tokens,
            read_blocks=read_blocks,
            stop=stop,
        )

    def write(self, layer_index: int, span: Span, keys: Tensor, values: Tensor) -> None:
        """Store keys and values ``[token, kv_head, head_size]`` of the span's tokens."""
        layer = self._layers[layer_index]
        layer[span.write_blocks, KEYS, :, span.write_offsets] = keys
        layer[span.write_blocks, VALUES, :, span.write_offsets] = values

    def read(self, layer_index: int, span: Span) -> tuple[Tensor, Tensor]:
        """Copy keys and values of tokens ``[0, span.stop)`` out, each ``[kv_head, token, head_size]`` in token order.

        The copies have a shape, strides and alignment that depend on ``span.stop`` alone, never on the block ids.
        """
        # Permuting before the selection makes it write in token order at once: one copy instead of two.
        blocks = self._layers[layer_index].permute(1, 2, 0, 3, 4).index_select(2, span.read_blocks)
        in_order = blocks.flatten(2, 3)  # [2, kv_head, block * token, head_size]
        keys, values = in_order[:, :, : span.stop]
        return keys, values
