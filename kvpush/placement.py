"""Where a caller's blocks are: block lists by group, checked, and brought to the units of the cache's tensors.

A cache with one group takes a plain list; one with several takes ``{group name: list}``, and a group that is left out
has nothing to move. Where the engine's blocks are larger than those of its tensors (one logical block is several kernel
blocks), the caller speaks of logical blocks, and everything behind this file of those of the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvpush.blocks import BlockIds, check_block_ids, slots_of
from kvpush.errors import ConfigurationError, UsageError
from kvpush.layout import CacheGeometry, GroupGeometry, KVCacheSpec

MAX_POSITION = 2**31 - 1  # positions are uint32 on the wire, and slots are counted in 31 bits


class GroupBlocks(msgspec.Struct, frozen=True, eq=False):
    """Position ``first_block + i`` of a transfer is in block ``block_ids[i]`` of this group, in the tensors' units."""

    group: int  # its number in the cache
    name: str
    first_block: int
    block_ids: BlockIds

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.block_ids)

    def is_same(self, other: GroupBlocks) -> bool:
        """Whether both say the same."""
        same_place = self.group == other.group and self.first_block == other.first_block
        return same_place and np.array_equal(self.block_ids, other.block_ids)


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    num_blocks: int  # as the caller counts them
    kernel_blocks: int  # of the tensors, in one of the caller's
    kernel_size_tokens: int  # of one of those; 0 where blocks are no tokens


class Placement:
    """How one cache's callers name blocks."""

    def __init__(self, geometry: CacheGeometry, spec: KVCacheSpec) -> None:
        """Raises ConfigurationError for logical blocks that are no multiple of those of the tensors."""
        logical = {group.name: group.block_size_tokens for group in spec.groups if group.block_size_tokens}
        self._groups = tuple(
            _group_of(group, logical.get(group.name, spec.block_size_tokens)) for group in geometry.groups
        )
        self._numbers = {group.name: number for number, group in enumerate(self._groups)}

    def parse(self, block_ids: Any, first_block: Any, *, call: str, unique: bool) -> tuple[GroupBlocks, ...]:
        """Both arguments of ``push()`` and ``expect()``. Raises UsageError naming the group and the value."""
        if len(self._groups) == 1 and not isinstance(block_ids, Mapping) and not isinstance(first_block, Mapping):
            return (self._checked(0, block_ids, first_block, call, unique),)
        by_name = self._by_name(block_ids, call)
        firsts = self._first_blocks(first_block, by_name, call)
        numbered = sorted((self._numbers[name], name) for name in by_name)  # in whatever order the caller names them
        return tuple(self._checked(number, by_name[name], firsts[name], call, unique) for number, name in numbered)

    def name_of(self, group: int) -> str:
        """Of the group with this number."""
        return self._groups[group].name

    def num_blocks(self, parts: Sequence[GroupBlocks]) -> int:
        """How many they are, as the caller counts them."""
        return sum(len(part.block_ids) // self._groups[part.group].kernel_blocks for part in parts)

    def has_tokens(self, part: GroupBlocks) -> bool:
        """Whether its blocks are of tokens, and not opaque state that is copied whole."""
        return bool(self._groups[part.group].kernel_size_tokens)

    def pages(self, part: GroupBlocks) -> BlockIds:
        """Its blocks as the caller counts them, which is how groups that share memory count it."""
        kernel_blocks = self._groups[part.group].kernel_blocks
        return part.block_ids[::kernel_blocks] // kernel_blocks if kernel_blocks > 1 else part.block_ids

    def positions(self, part: GroupBlocks) -> range:
        """Of the transfer, as the caller counts them."""
        kernel_blocks = self._groups[part.group].kernel_blocks
        return range(part.first_block // kernel_blocks, part.end_block // kernel_blocks)

    def num_pages(self) -> list[int]:
        """Blocks of each group, as the caller counts them."""
        return [group.num_blocks for group in self._groups]

    def last_block_begins_at(self, part: GroupBlocks) -> int:
        """The token with which the last of these blocks begins, as the caller counts blocks; -1 when there is none."""
        group = self._groups[part.group]
        if not len(part.block_ids) or not group.kernel_size_tokens:
            return -1
        return (part.end_block - group.kernel_blocks) * group.kernel_size_tokens

    def _by_name(self, block_ids: Any, call: str) -> dict[str, Any]:
        if not isinstance(block_ids, Mapping):
            if len(self._groups) > 1:
                raise UsageError(
                    f"{call}: this cache has the groups {self._names()}: give block_ids as {{group name: list}}"
                )
            return {self._groups[0].name: block_ids}
        for name in block_ids:
            if name not in self._numbers:
                raise UsageError(f"{call}: block_ids names the group {name!r}; this cache has {self._names()}")
        return dict(block_ids)

    def _first_blocks(self, first_block: Any, by_name: Mapping[str, Any], call: str) -> dict[str, Any]:
        if not isinstance(first_block, Mapping):
            return dict.fromkeys(by_name, first_block)
        for name in first_block:
            if name not in by_name:
                raise UsageError(f"{call}: first_block names the group {name!r}, for which block_ids has no list")
        return {name: first_block.get(name, 0) for name in by_name}

    def _checked(self, number: int, block_ids: Any, first_block: Any, call: str, unique: bool) -> GroupBlocks:
        group = self._groups[number]
        of_group = f" of group {group.name!r}" if len(self._groups) > 1 else ""
        ids = check_block_ids(block_ids, group.num_blocks, what=f"{call}: block_ids{of_group}", unique=unique)
        position = _checked_position(first_block, len(ids), group.kernel_blocks, f"{call}: first_block{of_group}")
        return GroupBlocks(number, group.name, position, slots_of(ids, group.kernel_blocks))

    def _names(self) -> str:
        return ", ".join(repr(group.name) for group in self._groups)


def _group_of(group: GroupGeometry, block_size_tokens: int | None) -> _Group:
    kernel_size_tokens = group.block_size_tokens
    if block_size_tokens is None or group.is_opaque:
        return _Group(group.name, group.num_blocks, 1, 0 if group.is_opaque else kernel_size_tokens)
    if block_size_tokens % kernel_size_tokens:
        raise ConfigurationError(
            f"block_size_tokens={block_size_tokens}: the tensors of group {group.name!r} have blocks of "
            f"{kernel_size_tokens} tokens, and {block_size_tokens}/{kernel_size_tokens} is not a whole number"
        )
    ratio = block_size_tokens // kernel_size_tokens
    if ratio > group.num_blocks:
        raise ConfigurationError(
            f"block_size_tokens={block_size_tokens}: the tensors of group {group.name!r} have "
            f"{group.num_blocks} blocks of {kernel_size_tokens} tokens, which is less than one block"
        )
    return _Group(group.name, group.num_blocks // ratio, ratio, kernel_size_tokens)


def _checked_position(first_block: Any, num_blocks: int, kernel_blocks: int, what: str) -> int:
    """The position of the first block, in units of the tensors."""
    if not isinstance(first_block, int | np.integer) or isinstance(first_block, bool):
        raise UsageError(f"{what}={first_block!r} must be a whole number")
    if not first_block >= 0 or (int(first_block) + num_blocks) * kernel_blocks > MAX_POSITION:
        raise UsageError(f"{what}={first_block!r} and {num_blocks} blocks must lie within 0 to {MAX_POSITION}")
    return int(first_block) * kernel_blocks
