"""Engines of any shape, one process for each rank, over real NIXL.

A model is described once (:class:`Model`); a :class:`Layout` says how one engine spreads and stores it. What every
element of the KV cache must hold is a function of (transfer id, layer, key/value, head, token, place in the head), so
whatever ends up at the wrong place, of the wrong layer, head or request, is seen. Written from that definition alone:
nothing here knows kvpush's plans.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import peers
import torch

import kvpush

CANARY = -7
GARBAGE = -5  # in prefill's blocks, where no transfer has put anything


@dataclass(frozen=True)
class Group:
    """Layers with one block table. ``heads`` 0: none (MLA, or opaque state)."""

    name: str
    layers: tuple[str, ...]
    heads: int
    head_size: int
    is_opaque: bool = False

    @property
    def kv(self) -> int:
        return 2 if self.heads else 1


@dataclass(frozen=True)
class Layout:
    """How one engine spreads and stores the model."""

    tp_size: int = 1
    stages: tuple[tuple[str, ...], ...] = ()  # layer names by pipeline stage; () is one stage with all layers
    tokens: int = 16  # in a block of the tensors
    blocks: int = 24
    order: str = "BKHND"  # of the axes in memory; a group uses those that it has
    logical_tokens: int | None = None

    @property
    def pp_size(self) -> int:
        return max(1, len(self.stages))

    @property
    def ranks(self) -> list[tuple[int, int]]:
        return [(pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size)]


def heads_of(group: Group, tp: int, tp_size: int) -> list[int]:
    """As engines do: an even share, or copies of one head."""
    if group.heads >= tp_size:
        share = group.heads // tp_size
        return list(range(tp * share, (tp + 1) * share))
    return [tp * group.heads // tp_size]


def expected(transfer_id: str, layer: str, heads: Sequence[int], kv: int, tokens: np.ndarray, size: int) -> np.ndarray:
    """int16 of shape (key/value, head, token, place)."""
    seed = np.int64(zlib.crc32(f"{transfer_id} {layer}".encode()))
    k, h, n, d = np.ix_(np.arange(kv), np.asarray(heads), tokens, np.arange(size))
    return ((seed + k * 104729 + h * 1299709 + n * 15485863 + d * 32452843) % 32749).astype(np.int16)


@dataclass
class RankCache:
    """One rank's tensors, each seen with its axes in the order key/value, block, head, token, place."""

    groups: Sequence[Group]
    layout: Layout
    rank: tuple[int, int]
    fill: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    views: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.held = {group.name: [layer for layer in group.layers if self._holds(layer)] for group in self.groups}
        for group in self.groups:
            for layer in self.held[group.name]:
                self._add(group, layer)

    def _holds(self, layer: str) -> bool:
        return not self.layout.stages or layer in self.layout.stages[self.rank[0]]

    def dims(self, group: Group) -> str:
        if group.is_opaque:
            return "BS"
        return self.layout.order if group.heads else self.layout.order.replace("K", "").replace("H", "")

    def _add(self, group: Group, layer: str) -> None:
        if group.is_opaque:
            tensor = torch.full((self.layout.blocks, group.head_size), self.fill, dtype=torch.int16)
            self.tensors[layer], self.views[layer] = tensor, tensor.numpy()[None, :, None, None, :]
            return
        heads = len(self.heads(group)) if group.heads else 1
        sizes = {"B": self.layout.blocks, "K": 2, "H": heads, "N": self.layout.tokens, "D": group.head_size}
        dims = self.dims(group)
        tensor = torch.full([sizes[axis] for axis in dims], self.fill, dtype=torch.int16)
        view = tensor.numpy()
        for axis in "KBHND":
            if axis not in dims:
                view, dims = view[None], axis + dims
        self.tensors[layer] = tensor
        self.views[layer] = view.transpose([dims.index(axis) for axis in "KBHND"])

    def heads(self, group: Group) -> list[int]:
        return heads_of(group, self.rank[1], self.layout.tp_size) if group.heads else [0]

    def tokens_of(self, group: Group) -> int:
        return 1 if group.is_opaque else self.layout.tokens

    def spec(self) -> kvpush.KVCacheSpec:
        groups = [
            kvpush.KVGroup(group.name, self.held[group.name], dims=self.dims(group), total_kv_heads=group.heads or None)
            for group in self.groups
            if self.held[group.name]
        ]
        return kvpush.KVCacheSpec(
            dims=groups[0].dims or "",
            model="ranks/int16",
            tp_rank=self.rank[1],
            tp_size=self.layout.tp_size,
            pp_rank=self.rank[0],
            pp_size=self.layout.pp_size,
            block_size_tokens=self.layout.logical_tokens,
            groups=groups,
        )

    def kernel_blocks(self, group: Group, block_ids: Sequence[int]) -> list[int]:
        ratio = 1 if group.is_opaque else (self.layout.logical_tokens or self.layout.tokens) // self.layout.tokens
        return [block * ratio + i for block in block_ids for i in range(ratio)]

    def compute(
        self, transfer_id: str, group: Group, layers: Sequence[str], first_block: int, ids: Sequence[int]
    ) -> None:
        """Put a transfer's KV into blocks, as prefill does."""
        size = self.tokens_of(group)
        kernel = self.kernel_blocks(group, ids)
        start = first_block * (len(kernel) // max(1, len(ids)))
        for i, block in enumerate(kernel):
            tokens = np.arange((start + i) * size, (start + i + 1) * size)
            for layer in layers:
                wanted = expected(transfer_id, layer, self.heads(group), group.kv, tokens, group.head_size)
                self.views[layer][:, block] = wanted

    def wrong(
        self, transfer_id: str, first_block: Mapping[str, int], ids: Mapping[str, Sequence[int]], end: int
    ) -> list[str]:
        """Where it is not what a transfer of ``end`` tokens must have left; every other block must hold the canary."""
        problems = []
        for group in self.groups:
            size = self.tokens_of(group)
            given = list(ids.get(group.name, ()))
            kernel = self.kernel_blocks(group, given)
            start = first_block.get(group.name, 0) * (len(kernel) // max(1, len(given)))
            rest = np.setdiff1d(np.arange(self.layout.blocks), kernel)
            for layer in self.held[group.name]:
                view = self.views[layer]
                if (view[:, rest] != self.fill).any():
                    problems.append(f"{self.rank} {layer}: a block that was not granted has changed")
                for i, block in enumerate(kernel):
                    tokens = np.arange((start + i) * size, (start + i + 1) * size)
                    known = tokens < end if not group.is_opaque else tokens >= 0
                    wanted = expected(transfer_id, layer, self.heads(group), group.kv, tokens, group.head_size)
                    if (view[:, block][:, :, known] != wanted[:, :, known]).any():
                        problems.append(f"{self.rank} {layer}: block {block} at position {start + i} is wrong")
        return problems


class _RankService:
    def __init__(
        self, engine_id: str, groups: Sequence[Group], layout: Layout, rank: tuple[int, int], fill: int
    ) -> None:
        self.groups = {group.name: group for group in groups}
        self.cache = RankCache(groups, layout, rank, fill)
        self.engine_id = engine_id
        self.side: Any = None
        self.inbox: Any = None

    def outcome(self, transfer_id: str, timeout_s: float = peers.PATIENCE_S) -> Any:
        return self.inbox.outcome(transfer_id, timeout_s)

    def stats(self) -> dict[str, int]:
        return self.side.stats()

    def engines(self) -> list[kvpush.EngineSnapshot]:
        return self.side.engines()

    def close(self) -> Any:
        return self.side.close()


class PrefillRank(_RankService):
    """One rank of a prefill engine."""

    def __init__(self, engine_id, groups, layout, rank, settings: Mapping[str, Any]) -> None:
        super().__init__(engine_id, groups, layout, rank, GARBAGE)
        self.side = kvpush.PrefillPusher(
            engine_id, self.cache.tensors, self.cache.spec(), config=peers.config(**settings)
        )
        self.inbox = peers.Inbox(self.side)

    def address(self) -> tuple[str, int]:
        return self.side.address

    def push(self, transfer_id, first_block: Mapping[str, int], ids: Mapping[str, Sequence[int]], **options) -> None:
        """Compute and push; groups of which this stage has no layer are left out."""
        mine = {name: list(each) for name, each in ids.items() if self.cache.held[name]}
        for name, blocks in mine.items():
            self.cache.compute(transfer_id, self.groups[name], self.cache.held[name], first_block.get(name, 0), blocks)
        self.side.push(transfer_id, mine, first_block={name: first_block.get(name, 0) for name in mine}, **options)

    def push_by_layer(self, transfer_id, first_block, ids, *, last: bool = True, step: int = 1) -> None:
        """As an engine that calls back after every ``step`` layers of its only group."""
        ((name, blocks),) = ids.items()
        layers = self.cache.held[name]
        for start in range(0, len(layers), step):
            done = layers[start : start + step]
            self.cache.compute(transfer_id, self.groups[name], done, first_block.get(name, 0), blocks)
            self.side.push_layers(
                transfer_id,
                {name: list(blocks)},
                layers=done,
                first_block=first_block.get(name, 0),
                last=last and start + step >= len(layers),
            )


class DecodeRank(_RankService):
    """One rank of a decode engine."""

    def __init__(self, engine_id, groups, layout, rank, settings: Mapping[str, Any]) -> None:
        super().__init__(engine_id, groups, layout, rank, CANARY)
        self.side = kvpush.DecodeReceiver(
            engine_id, self.cache.tensors, self.cache.spec(), config=peers.config(**settings)
        )
        self.inbox = peers.Inbox(self.side)

    def expect(self, transfer_id, first_block, ids, source, **options: Any) -> None:
        mine = {name: list(each) for name, each in ids.items() if self.cache.held[name]}
        firsts = {name: first_block.get(name, 0) for name in mine}
        self.side.expect(transfer_id, mine, first_block=firsts, source=source, source_engine_id="p0", **options)

    def wrong(self, transfer_id, first_block, ids, end: int) -> list[str]:
        return self.cache.wrong(transfer_id, first_block, ids, end)
