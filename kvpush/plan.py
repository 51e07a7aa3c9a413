"""Pure: from two ranks' geometries to the rows of a pair, and from slots to the index arrays of a WRITE.

The prefill rank (*local*) and the decode rank (*remote*) may differ in which heads and layers they hold, in the size
and number of their blocks, and in the order of a block's elements. What they have in common is cut into *tiles*, the
longest pieces of a *slot* that are contiguous on both sides with the same elements in the same order. A slot is the
smallest run of tokens that both sides' blocks are multiples of; with equal block sizes it is a block.

A tile of every block is a *row* on either side, or several where a block has several slots. How it all is cut depends
on both memories and is worked out once per remote, by :func:`pair`; a push only turns slots into indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpush.blocks import MAX_SLOTS_PER_BLOCK, BlockIds
from kvpush.errors import ConfigurationError, Failure, FailureCode, Incompatible, UsageError
from kvpush.layout import CacheGeometry, GroupGeometry, LayerGeometry
from kvpush.parallel import Share, heads_of, written_heads
from kvpush.rows import MAX_SEGMENTS, Indices, Rows, rows_at

# A descriptor costs NIXL 5 to 9 us, as long as moving tens of KiB. Cutting a block into pieces this short, as for heads
# before tokens on one side and tokens before heads on the other, would take longer than computing the block again.
MIN_TILE_BYTES = 1024


_MAX_ROWS = 2**20  # of one side: 40 MB, and more than any model needs; a peer's numbers must not decide on more
_NO_ROWS: Rows = np.empty((0, 5), dtype=np.uint64)
_NO_FIRSTS: Indices = np.empty((0, 1), dtype=np.int32)
_Bytes = npt.NDArray[np.int64]
_ALONE = Share()


class _Tiles(NamedTuple):
    """Tiles of a group in the order of their rows: the index of each one's first segment."""

    local_firsts: Indices  # shape (tiles, 1)
    remote_firsts: Indices  # likewise


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """What one group of a pair moves. ``num_layers`` counts the local layers, in whose order they are asked for.

    Slot ``block_id * slots_per_block + j`` is the ``j``-th part of a block, on each side by its own numbers.
    """

    name: str
    local_slots_per_block: int
    remote_slots_per_block: int
    local_num_blocks: int
    remote_num_blocks: int
    num_layers: int
    _local_row_parts: int  # how many rows a tile has here: one for each slot of a block, or a single one
    _remote_row_parts: int
    _ends: tuple[int, ...]  # how many tiles the layers up to each one have, from 0
    _ends_bytes: tuple[int, ...]  # the same in bytes
    _tiles: _Tiles  # layer by layer
    _merged: _Tiles | None  # across layers, when that makes fewer of them
    _all_layers: range = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_all_layers", range(self.num_layers))

    def slot_len_bytes(self, layers: range) -> int:
        """How many bytes one slot moves over these local layers; 0 when the sides have none of them in common."""
        first, end = self._bounds(layers)
        return self._ends_bytes[end] - self._ends_bytes[first]

    def indices(self, layers: range, local_slots: BlockIds, remote_slots: BlockIds) -> tuple[Indices, Indices]:
        """The segments that move ``local_slots[i]`` into ``remote_slots[i]`` over these local layers, on both sides.

        The slots are equally many, and exist. Both arrays run row by row, which is the order in which NIXL finds the
        most to merge: it makes one of neighbours of the list that are neighbours in one row on both sides.
        """
        local = _places(local_slots, self._local_row_parts, self.local_num_blocks)
        remote = _places(remote_slots, self._remote_row_parts, self.remote_num_blocks)
        tiles = (self._merged or self._tiles) if layers == self._all_layers else self._some_tiles(layers)
        return (tiles.local_firsts + local).reshape(-1), (tiles.remote_firsts + remote).reshape(-1)

    def _some_tiles(self, layers: range) -> _Tiles:
        first, end = (self._ends[layer] for layer in self._bounds(layers))
        if self._merged is not None and end - first == self._ends[-1]:
            return self._merged
        tiles, part = self._tiles, slice(first, end)
        return _Tiles(tiles.local_firsts[part], tiles.remote_firsts[part])

    def _bounds(self, layers: range) -> tuple[int, int]:
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= self.num_layers:
            raise UsageError(f"group {self.name!r}: layers {layers} are not some of range(0, {self.num_layers})")
        return layers.start, layers.stop


@dataclass(frozen=True, eq=False)
class PairPlan:
    """How a prefill rank (local) writes to a decode rank (remote).

    The rows are what a transport prepares; see :mod:`kvpush.rows` for their form. Their number and their counts differ
    between the sides; segments that :meth:`GroupPlan.indices` puts at the same place are the same elements. A pair that
    has nothing to write (other layers, other heads, or another writer) has no rows. ``groups`` are the local ones, in
    their order.
    """

    local_rows: Rows
    remote_rows: Rows
    groups: tuple[GroupPlan, ...]

    @property
    def writes_nothing(self) -> bool:
        """Whether the pair has no bytes to move, whatever is pushed: a transport has nothing to prepare for it."""
        return not len(self.local_rows)

    def remote_num_blocks(self, group: int) -> int:
        """How many blocks the remote side has in a local group, by its place; 0 when it has no such group."""
        return self.groups[group].remote_num_blocks


def _places(slots: BlockIds, row_parts: int, num_blocks: int) -> Indices:
    """Where slots lie among the segments of a tile: in one row, or in one row for each part of a block.

    Added to the index of a tile's first segment, nothing wraps: pair() has checked the largest index there can be.
    """
    if row_parts == 1:
        return slots.astype(np.int32)
    blocks, parts = np.divmod(slots, row_parts)
    parts *= num_blocks
    parts += blocks
    return parts.astype(np.int32)


def descriptors_after_merging(plan: PairPlan, local_indices: Indices, remote_indices: Indices) -> int:
    """How many descriptors NIXL posts for these index arrays: neighbours of the list that follow each other in one row
    on both sides, without a gap, become one. Neighbours in memory that belong to different rows do not."""
    if not len(local_indices):
        return 0
    merges = np.ones(len(local_indices) - 1, dtype=np.bool_)
    for rows, indices in ((plan.local_rows, local_indices), (plan.remote_rows, remote_indices)):
        at = rows_at(rows, indices)
        is_dense = rows[:, 1] == rows[:, 3]
        merges &= (at[:-1] == at[1:]) & (indices[:-1] + 1 == indices[1:]) & is_dense[at[:-1]]
    return len(local_indices) - int(np.count_nonzero(merges))


# --- pairing ---------------------------------------------------------------------------------------------------------


def pair(
    local: CacheGeometry,
    remote: CacheGeometry,
    *,
    local_share: Share = _ALONE,
    remote_share: Share = _ALONE,
    min_tile_bytes: int = MIN_TILE_BYTES,
) -> PairPlan:
    """Cut what a prefill rank writes to a decode rank into the longest pieces that are contiguous on both sides.

    Groups and layers are matched by name, axes by letter, heads by the shares of the model that the ranks hold, tokens
    by slots; what only one side has is left out. Tiles of different layers that touch on both sides become one.
    ``min_tile_bytes`` bounds how finely a block may be cut; keys and values apart, and blocks that are tiny as a whole,
    are no fault. Both geometries have been checked. Takes microseconds a layer, however many blocks there are.

    Raises Incompatible naming the group, the layer and both values when axes, sizes, heads or dtypes do not fit, or
    when the two orders in memory have too little in common; ``Failure(bad_blocks)`` when there are more segments than
    NIXL can number.
    """
    remote_groups = {group.name: group for group in remote.groups}
    builder = _Builder()
    plans = []
    for ours in local.groups:
        theirs = remote_groups.get(ours.name)
        cut = None if theirs is None else _cut(ours, local_share, theirs, remote_share, min_tile_bytes)
        plans.append(builder.add(ours, theirs, cut) if theirs and cut else _idle(ours, theirs))
    return PairPlan(builder.local.rows(), builder.remote.rows(), tuple(plans))


def _idle(ours: GroupGeometry, theirs: GroupGeometry | None) -> GroupPlan:
    """A group in which this rank writes nothing to that one. Its slots are known all the same, if both have it."""
    slots = _slots_per_block(ours, theirs) if theirs else (1, 1)
    nothing = _Tiles(_NO_FIRSTS, _NO_FIRSTS)
    ends = (0,) * (len(ours.layers) + 1)
    num_blocks = theirs.num_blocks if theirs else 0
    return GroupPlan(ours.name, *slots, ours.num_blocks, num_blocks, len(ours.layers), 1, 1, ends, ends, nothing, None)


def _slots_per_block(ours: GroupGeometry, theirs: GroupGeometry) -> tuple[int, int]:
    here, there = ours.block_size_tokens, theirs.block_size_tokens
    slot_tokens = math.gcd(here, there)
    if max(here, there) // slot_tokens > MAX_SLOTS_PER_BLOCK:
        raise Incompatible(
            f"group {ours.name!r}: blocks of {here} tokens here, of {there} at the peer: {slot_tokens} tokens in "
            f"common make more than {MAX_SLOTS_PER_BLOCK} slots a block"
        )
    return here // slot_tokens, there // slot_tokens


class _Pieces(NamedTuple):
    """Tiles on both sides, in bytes; ``stride`` is from block to block and ``step`` from slot to slot of a block."""

    local_addresses: _Bytes
    remote_addresses: _Bytes
    lengths: _Bytes
    local_strides: _Bytes
    remote_strides: _Bytes
    local_steps: _Bytes
    remote_steps: _Bytes
    local_devices: _Bytes
    remote_devices: _Bytes


class _Cut(NamedTuple):
    """How one group is cut: its tiles layer by layer, and how many each local layer has."""

    pieces: _Pieces
    tiles_per_layer: list[int]


class _Form(NamedTuple):
    """How the rows of a group are made on one side. ``is_even``: a block's slots and those of the next one are equally
    far apart, so that all of a tile's segments are one row, in which NIXL can merge them."""

    slots_per_block: int
    num_blocks: int
    is_even: bool

    @property
    def row_parts(self) -> int:
        return 1 if self.is_even else self.slots_per_block


def _is_even(strides: _Bytes, steps: _Bytes, slots_per_block: int, group: GroupGeometry) -> bool:
    if slots_per_block == 1:
        return False
    return group.num_blocks == 1 or bool(np.all(strides == slots_per_block * steps))


class _Side:
    """The rows of one side, and how many segments they have."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rows: list[Rows] = []
        self._num_rows = 0
        self._num_segments = 0

    def rows(self) -> Rows:
        return np.concatenate(self._rows) if self._rows else _NO_ROWS

    def has_room(self, num_tiles: int, form: _Form) -> bool:
        num_rows, num_segments = num_tiles * form.row_parts, num_tiles * form.slots_per_block * form.num_blocks
        return self._num_rows + num_rows <= _MAX_ROWS and self._num_segments + num_segments <= MAX_SEGMENTS

    def add(
        self,
        addresses: _Bytes,
        lengths: _Bytes,
        devices: _Bytes,
        strides: _Bytes,
        steps: _Bytes,
        form: _Form,
    ) -> Indices:
        """Rows for these tiles, one for each part of a block. Returns the index of each one's first segment."""
        num_tiles = len(addresses)
        if not self.has_room(num_tiles, form):
            raise Failure(
                FailureCode.bad_blocks,
                f"{self._name} cache: {form.num_blocks} blocks in {num_tiles} pieces of {form.slots_per_block} parts "
                f"are more than NIXL can number ({MAX_SEGMENTS}) or than {_MAX_ROWS} rows",
            )
        tile_segments = form.slots_per_block * form.num_blocks
        count = tile_segments // form.row_parts
        apart = steps if form.is_even else strides
        rows = np.empty((num_tiles, form.row_parts, 5), dtype=np.uint64)
        rows[:, :, 0] = addresses[:, np.newaxis] + steps[:, np.newaxis] * np.arange(form.row_parts)
        rows[:, :, 1] = lengths[:, np.newaxis]
        rows[:, :, 2] = devices[:, np.newaxis]
        rows[:, :, 3] = (apart if count > 1 else lengths)[:, np.newaxis]  # the stride of a single segment means nothing
        rows[:, :, 4] = count
        self._rows.append(rows.reshape(-1, 5))
        firsts = self._num_segments + np.arange(num_tiles, dtype=np.int64) * tile_segments
        self._num_rows += num_tiles * form.row_parts
        self._num_segments += num_tiles * tile_segments
        return firsts.astype(np.int32)[:, np.newaxis]


class _Builder:
    """Collects the rows of all groups of a pair."""

    def __init__(self) -> None:
        self.local = _Side("local")
        self.remote = _Side("remote")

    def add(self, ours: GroupGeometry, theirs: GroupGeometry, cut: _Cut) -> GroupPlan:
        slots = _slots_per_block(ours, theirs)
        p = cut.pieces
        local = _Form(slots[0], ours.num_blocks, _is_even(p.local_strides, p.local_steps, slots[0], ours))
        remote = _Form(slots[1], theirs.num_blocks, _is_even(p.remote_strides, p.remote_steps, slots[1], theirs))
        tiles = self._tiles(p, local, remote)
        merged = _merged(p, local, remote)
        if merged is not None and not all(
            side.has_room(len(merged.lengths), form) for side, form in ((self.local, local), (self.remote, remote))
        ):
            merged = None
        ends = (0, *np.cumsum(cut.tiles_per_layer).tolist())
        bytes_before = np.concatenate(([0], np.cumsum(cut.pieces.lengths)))
        return GroupPlan(
            name=ours.name,
            local_slots_per_block=slots[0],
            remote_slots_per_block=slots[1],
            local_num_blocks=ours.num_blocks,
            remote_num_blocks=theirs.num_blocks,
            num_layers=len(ours.layers),
            _local_row_parts=local.row_parts,
            _remote_row_parts=remote.row_parts,
            _ends=ends,
            _ends_bytes=tuple(bytes_before[list(ends)].tolist()),
            _tiles=tiles,
            _merged=None if merged is None else self._tiles(merged, local, remote),
        )

    def _tiles(self, pieces: _Pieces, local: _Form, remote: _Form) -> _Tiles:
        p = pieces
        return _Tiles(
            self.local.add(p.local_addresses, p.lengths, p.local_devices, p.local_strides, p.local_steps, local),
            self.remote.add(p.remote_addresses, p.lengths, p.remote_devices, p.remote_strides, p.remote_steps, remote),
        )


def _merged(pieces: _Pieces, local: _Form, remote: _Form) -> _Pieces | None:
    """Tiles that touch on both sides, and go on touching from slot to slot, as one; ``None`` when few of them do."""
    order = np.lexsort((pieces.local_addresses, pieces.local_devices))
    p = _Pieces(*(values[order] for values in pieces))
    touches = p.local_addresses[:-1] + p.lengths[:-1] == p.local_addresses[1:]
    touches &= p.remote_addresses[:-1] + p.lengths[:-1] == p.remote_addresses[1:]
    alike = [p.local_devices, p.remote_devices]
    alike += [p.local_strides] if local.num_blocks > 1 else []
    alike += [p.remote_strides] if remote.num_blocks > 1 else []
    alike += [p.local_steps] if local.slots_per_block > 1 else []
    alike += [p.remote_steps] if remote.slots_per_block > 1 else []
    for values in alike:
        touches &= values[:-1] == values[1:]
    if 4 * np.count_nonzero(touches) < len(p.lengths):
        return None  # not worth a second set of rows
    starts = np.concatenate(([0], np.flatnonzero(~touches) + 1))
    lengths = np.add.reduceat(p.lengths, starts)
    found = _Pieces(*(values[starts] for values in p))._replace(lengths=lengths)
    # A peer's layers may share bytes, by mistake; then these would be no rows.
    for form, strides, steps in (
        (local, found.local_strides, found.local_steps),
        (remote, found.remote_strides, found.remote_steps),
    ):
        if (form.num_blocks > 1 or form.is_even) and np.any(lengths > (steps if form.is_even else strides)):
            return None
    return found


# --- cutting one group -----------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """One axis of a slot, and how far apart its neighbours are on either side."""

    axis: str
    size: int
    local_stride_bytes: int
    remote_stride_bytes: int


class _Pattern(NamedTuple):
    """Where the tiles of a slot start on either side, in bytes from the tensor's address, and how long each one is."""

    local_offsets: _Bytes
    remote_offsets: _Bytes
    tile_bytes: int


class _Common(NamedTuple):
    """What two groups have in common: how many tokens a slot has, and which heads are written."""

    ours: GroupGeometry
    theirs: GroupGeometry
    slot_tokens: int
    heads: range  # of the model; range(1) where there are none
    our_first_head: int
    their_first_head: int


def _cut(
    ours: GroupGeometry, our_share: Share, theirs: GroupGeometry, their_share: Share, min_tile_bytes: int
) -> _Cut | None:
    """The tiles of one group, or ``None`` when this rank has nothing to write to that one."""
    their_layers = {layer.name: layer for layer in theirs.layers}
    shared = [layer for layer in ours.layers if layer.name in their_layers]
    if not shared:
        return None
    _check_alike(ours, theirs, shared[0].name)
    heads = written_heads(our_share.tp, their_share.tp, ours.total)
    if not heads:
        return None
    common = _Common(
        ours,
        theirs,
        math.gcd(ours.block_size_tokens, theirs.block_size_tokens),
        heads,
        _first_head("here", ours, our_share),
        _first_head("at the peer", theirs, their_share),
    )
    patterns: dict[tuple[tuple[int, ...], tuple[int, ...]], _Pattern] = {}  # layers are mostly alike
    chosen: list[tuple[LayerGeometry, LayerGeometry, _Pattern]] = []
    tiles_per_layer = []
    for layer in ours.layers:
        other = their_layers.get(layer.name)
        if other is None:
            tiles_per_layer.append(0)
            continue
        form = (layer.strides_bytes, other.strides_bytes)
        pattern = patterns.get(form)
        if pattern is None:
            pattern = patterns[form] = _pattern(common, layer, other, min_tile_bytes)
        tiles_per_layer.append(len(pattern.local_offsets))
        chosen.append((layer, other, pattern))
    return _Cut(_pieces(common, chosen), tiles_per_layer)


def _check_alike(ours: GroupGeometry, theirs: GroupGeometry, layer: str) -> None:
    where = f"group {ours.name!r}, layer {layer!r}"
    if ("K" in ours.dims) != ("K" in theirs.dims):
        raise Incompatible(
            f"{where}: dims {ours.dims!r} here, {theirs.dims!r} at the peer: keys and values are one tensor on one "
            "side and two on the other, which is not supported"
        )
    if set(ours.dims) != set(theirs.dims):
        raise Incompatible(f"{where}: dims {ours.dims!r} here, {theirs.dims!r} at the peer: the axes differ")
    for what, here, there in (
        ("dtype", ours.dtype, theirs.dtype),
        ("item size", ours.itemsize_bytes, theirs.itemsize_bytes),
        ("head size", ours.axis_size("D"), theirs.axis_size("D")),
        ("state size", ours.axis_size("S"), theirs.axis_size("S")),
        ("KV heads of the model", ours.total_kv_heads, theirs.total_kv_heads),
    ):
        if here != there:
            raise Incompatible(f"{where}: {what} {here} here, {there} at the peer")


def _first_head(side: str, group: GroupGeometry, share: Share) -> int:
    """The first of the model's heads in a rank's tensors, once they are known to have as many as the rank's share."""
    heads = group.axis_size("H")
    if heads is None:
        return 0
    held = heads_of(*share.tp, group.total_kv_heads)
    if heads != len(held):
        raise Incompatible(
            f"group {group.name!r}, layer {group.layers[0].name!r} {side}: {heads} heads in the tensor, {len(held)} "
            f"are the share of tp_rank {share.tp_rank} of {share.tp_size} in {group.total_kv_heads}"
        )
    return held.start


def _pattern(common: _Common, layer: LayerGeometry, other: LayerGeometry, min_tile_bytes: int) -> _Pattern:
    local_strides = dict(zip(common.ours.dims, layer.strides_bytes, strict=True))
    remote_strides = dict(zip(common.theirs.dims, other.strides_bytes, strict=True))
    sizes = dict(zip(common.ours.dims, layer.shape, strict=True))
    sizes |= {"N": common.slot_tokens, "H": len(common.heads)}  # 1 where there is no such axis
    steps = tuple(
        _Step(axis, size, local_strides[axis], remote_strides[axis])
        for axis, size in sizes.items()
        if axis != "B" and size > 1
    )
    tile_bytes, outer = _common_tile(steps, common.ours.itemsize_bytes)
    if tile_bytes < min_tile_bytes and _is_cut_finely(common, outer):
        raise Incompatible(_too_fine(common, layer, other, tile_bytes, min_tile_bytes))
    local, remote = _tile_offsets(outer)
    return _Pattern(
        local + (common.heads.start - common.our_first_head) * local_strides.get("H", 0),
        remote + (common.heads.start - common.their_first_head) * remote_strides.get("H", 0),
        tile_bytes,
    )


def _common_tile(steps: tuple[_Step, ...], itemsize_bytes: int) -> tuple[int, tuple[_Step, ...]]:
    """The longest run that is contiguous on both sides, and the axes outside of it, longest local stride first.

    The run grows from one element by the axis whose neighbours touch it on both sides; there is never more than one.
    """
    tile_bytes = itemsize_bytes
    outer = list(steps)
    while inner := next((s for s in outer if s.local_stride_bytes == s.remote_stride_bytes == tile_bytes), None):
        tile_bytes *= inner.size
        outer.remove(inner)
    return tile_bytes, tuple(sorted(outer, key=lambda step: -step.local_stride_bytes))


def _is_cut_finely(common: _Common, outer: Sequence[_Step]) -> bool:
    """Whether tiles are smaller than what belongs together on both sides: a whole block, of keys or of values."""
    return any(step.axis != "K" for step in outer) or min(_slots_per_block(common.ours, common.theirs)) > 1


def _too_fine(common: _Common, layer: LayerGeometry, other: LayerGeometry, tile_bytes: int, min_tile_bytes: int) -> str:
    ours, theirs = _described(common.ours, layer), _described(common.theirs, other)
    return (
        f"group {common.ours.name!r}, layer {layer.name!r}: only {tile_bytes} bytes at a time are contiguous on both "
        f"sides, at least {min_tile_bytes} are needed: {ours} here, {theirs} at the peer, {len(common.heads)} heads "
        f"and {common.slot_tokens} tokens in common; min_tile_bytes={tile_bytes} permits it, at the price of many "
        "small writes"
    )


def _described(group: GroupGeometry, layer: LayerGeometry) -> str:
    """A block's order in memory, outermost axis first, with sizes: ``BNHD (N=16, H=8, D=128)``."""
    axes: list[tuple[int, str, int]] = []
    outside = 0
    for axis, size, stride in reversed(list(zip(group.dims, layer.shape, layer.strides_bytes, strict=True))):
        outside = stride if size > 1 else outside  # an axis of size 1 has no stride: it stays where dims has it
        axes.insert(0, (outside, axis, size))
    axes.sort(key=lambda entry: -entry[0])
    order = "".join(axis for _, axis, _ in axes)
    sizes = ", ".join(f"{axis}={size}" for _, axis, size in axes if axis not in "BK")
    return f"{order} ({sizes})"


def _tile_offsets(outer: tuple[_Step, ...]) -> tuple[_Bytes, _Bytes]:
    """Where a slot's tiles start on either side, in bytes from its first element; one tile, one index."""
    local = np.zeros(1, dtype=np.int64)
    remote = np.zeros(1, dtype=np.int64)
    for step in outer:
        steps = np.arange(step.size, dtype=np.int64)
        local = np.add.outer(local, steps * step.local_stride_bytes).reshape(-1)
        remote = np.add.outer(remote, steps * step.remote_stride_bytes).reshape(-1)
    return local, remote


def _pieces(common: _Common, chosen: Sequence[tuple[LayerGeometry, LayerGeometry, _Pattern]]) -> _Pieces:
    counts = [len(pattern.local_offsets) for _, _, pattern in chosen]

    def spread(values: list[int]) -> _Bytes:
        return np.repeat(np.array(values, dtype=np.int64), counts)

    def strides(group: GroupGeometry, layers: list[LayerGeometry], axis: str) -> _Bytes:
        place = group.dims.find(axis)
        return spread([layer.strides_bytes[place] if place >= 0 else 0 for layer in layers])

    ours, theirs = [layer for layer, _, _ in chosen], [other for _, other, _ in chosen]
    return _Pieces(
        local_addresses=spread([layer.address for layer in ours])
        + np.concatenate([pattern.local_offsets for _, _, pattern in chosen]),
        remote_addresses=spread([other.address for other in theirs])
        + np.concatenate([pattern.remote_offsets for _, _, pattern in chosen]),
        lengths=spread([pattern.tile_bytes for _, _, pattern in chosen]),
        local_strides=strides(common.ours, ours, "B"),
        remote_strides=strides(common.theirs, theirs, "B"),
        local_steps=strides(common.ours, ours, "N") * common.slot_tokens,
        remote_steps=strides(common.theirs, theirs, "N") * common.slot_tokens,
        local_devices=spread([layer.device_id for layer in ours]),
        remote_devices=spread([other.device_id for other in theirs]),
    )


# --- one side by itself ----------------------------------------------------------------------------------------------


def check_writable(geometry: CacheGeometry, *, min_tile_bytes: int = MIN_TILE_BYTES) -> None:
    """Raises ConfigurationError for a cache that no plan could serve, not even with a peer of the same layout."""
    for group in geometry.groups:
        heads = range(group.axis_size("H") or 1)
        common = _Common(group, group, group.block_size_tokens, heads, 0, 0)
        try:
            for layer in group.layers:
                _pattern(common, layer, layer, min_tile_bytes)
        except Incompatible as exc:
            raise ConfigurationError(
                f"dims={group.dims!r}: a block's elements lie too far apart to be written: {exc.reason}"
            ) from exc
