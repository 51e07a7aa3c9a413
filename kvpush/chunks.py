"""What a caller has pushed of one transfer: its chunks, and how the next one is checked against them. Pure.

Chunked prefill makes tens of chunks, layer by layer thousands: what is known of them is searched, not walked through.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from functools import lru_cache

import msgspec

from kvpush.placement import GroupBlocks
from kvpush.pushes import Part


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """What one call brought: blocks by group, and of which layers (a bit for each, by their number in the group)."""

    parts: tuple[GroupBlocks, ...]
    layers: tuple[int, ...]  # one for each part
    last: bool

    def is_same(self, other: Chunk) -> bool:
        """Whether both say the same."""
        if self.layers != other.layers or self.last != other.last:
            return False
        return all(mine.is_same(theirs) for mine, theirs in zip(self.parts, other.parts, strict=True))

    def for_core(self) -> tuple[Part, ...]:
        """As the core counts it."""
        return tuple(
            [
                Part(part.group, _runs(layers), part.first_block, part.block_ids)
                for part, layers in zip(self.parts, self.layers, strict=True)
            ]
        )


class Chunks:
    """The chunks of one transfer, no two of which name the same position of the same layer."""

    __slots__ = ("_by_layers", "_empty", "_num_chunks", "_unsorted", "has_last")

    def __init__(self) -> None:
        self.has_last = False  # the caller has nothing more to push
        self._num_chunks = 0
        self._unsorted: list[Chunk] = []  # most transfers have one chunk, which is never searched
        self._by_layers: dict[tuple[int, int], _Positions] = {}  # (group, layers) -> what chunks name of just these
        self._empty: dict[_Places, list[Chunk]] = {}  # those that name no position of a layer

    def add(self, chunk: Chunk) -> int:
        """One more, which :meth:`overlap` has nothing against. Its number, from 0."""
        self._unsorted.append(chunk)
        self.has_last = self.has_last or chunk.last
        self._num_chunks += 1
        return self._num_chunks - 1

    def has_same(self, chunk: Chunk) -> bool:
        """Whether an earlier one says the same."""
        self._sort()
        for part, layers in zip(chunk.parts, chunk.layers, strict=True):
            if layers and len(part.block_ids):
                named = self._by_layers.get((part.group, layers))
                earlier = None if named is None else named.beginning_at(part.first_block)
                return earlier is not None and earlier.is_same(chunk)
        return any(earlier.is_same(chunk) for earlier in self._empty.get(_places(chunk), ()))

    def overlap(self, chunk: Chunk) -> tuple[GroupBlocks, GroupBlocks] | None:
        """A part of it, and a part of an earlier one that names a position of a layer that the first names, too."""
        self._sort()
        for part, layers in zip(chunk.parts, chunk.layers, strict=True):
            if not len(part.block_ids):
                continue
            for (group, named_layers), named in self._by_layers.items():
                if group == part.group and named_layers & layers and (earlier := named.meeting(part)) is not None:
                    return part, earlier
        return None

    def runs(self) -> dict[tuple[int, int], list[range]]:
        """The positions that have been named, by group and layers."""
        self._sort()
        return {key: named.runs() for key, named in self._by_layers.items()}

    def _sort(self) -> None:
        for chunk in self._unsorted:
            is_empty = True
            for part, layers in zip(chunk.parts, chunk.layers, strict=True):
                if layers and len(part.block_ids):
                    self._by_layers.setdefault((part.group, layers), _Positions()).add(part, chunk)
                    is_empty = False
            if is_empty:
                self._empty.setdefault(_places(chunk), []).append(chunk)
        self._unsorted.clear()

    def __len__(self) -> int:
        return self._num_chunks


_Places = tuple[tuple[int, int, int, int], ...]


def _places(chunk: Chunk) -> _Places:
    """What distinguishes most chunks that are not the same."""
    return tuple(
        (part.group, layers, part.first_block, len(part.block_ids))
        for part, layers in zip(chunk.parts, chunk.layers, strict=True)
    )


class _Positions:
    """Runs of positions that do not overlap, and which chunk named each."""

    __slots__ = ("_chunks", "_firsts", "_parts")

    def __init__(self) -> None:
        self._firsts: list[int] = []  # sorted, as are the lists beside it
        self._parts: list[GroupBlocks] = []
        self._chunks: list[Chunk] = []

    def add(self, part: GroupBlocks, chunk: Chunk) -> None:
        at = bisect_left(self._firsts, part.first_block)
        self._firsts.insert(at, part.first_block)
        self._parts.insert(at, part)
        self._chunks.insert(at, chunk)

    def runs(self) -> list[range]:
        runs: list[range] = []
        for part in self._parts:
            if runs and runs[-1].stop == part.first_block:
                runs[-1] = range(runs[-1].start, part.end_block)
            else:
                runs.append(range(part.first_block, part.end_block))
        return runs

    def beginning_at(self, first_block: int) -> Chunk | None:
        at = bisect_left(self._firsts, first_block)
        return self._chunks[at] if at < len(self._firsts) and self._firsts[at] == first_block else None

    def meeting(self, part: GroupBlocks) -> GroupBlocks | None:
        """One that names a position of this part: the last that begins before its end, if any does."""
        at = bisect_left(self._firsts, part.end_block)
        earlier = self._parts[at - 1] if at else None
        return earlier if earlier is not None and earlier.end_block > part.first_block else None


class CutShort:
    """What was pushed of transfers that ended before their last chunk, and how they ended. Bounded in number and time.

    It tells a chunk that goes on with such a transfer, because its caller has not looked yet, from the first chunk of
    another attempt under the same id: that one begins where the last one began.
    """

    def __init__(self, limit: int, ttl_s: float) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._ended: OrderedDict[str, tuple[dict[tuple[int, int], list[range]], str, float]] = OrderedDict()

    def note(self, transfer_id: str, chunks: Chunks, how: str, now_s: float) -> None:
        """It has ended, and its caller knows."""
        self._ended[transfer_id] = chunks.runs(), how, now_s + self._ttl_s
        self._ended.move_to_end(transfer_id)
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def continued(self, transfer_id: str, chunk: Chunk, now_s: float) -> str | None:
        """How the transfer ended that this chunk goes on with; ``None`` when it begins one, which is forgotten here."""
        runs, how, until_s = self._ended.get(transfer_id, ({}, "", now_s))
        is_new = until_s <= now_s or any(
            group == part.group and named & layers and _meet(run, part)
            for part, layers in zip(chunk.parts, chunk.layers, strict=True)
            for (group, named), listed in runs.items()
            for run in listed
        )
        if not is_new:
            return how
        self._ended.pop(transfer_id, None)
        return None

    def __len__(self) -> int:
        return len(self._ended)


def _meet(run: range, part: GroupBlocks) -> bool:
    return run.start < part.end_block and part.first_block < run.stop


@lru_cache(maxsize=1024)  # all layers, or one after the other
def _runs(layers: int) -> tuple[range, ...]:
    """The runs of ones in a bit mask."""
    runs: list[range] = []
    start = 0
    while layers >> start:
        start += ((layers >> start) & -(layers >> start)).bit_length() - 1
        ones = layers >> start
        length = ((ones + 1) & -(ones + 1)).bit_length() - 1
        runs.append(range(start, start + length))
        start += length
    return tuple(runs)
