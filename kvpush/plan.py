"""Pure: from two geometries and two lists of blocks to the rows and index arrays of a WRITE.

A *row* is what one prepared descriptor covers: the same piece of every block, ``(address, length_bytes, device_id,
stride_bytes, count)``. A block consists of one segment from every row. How a block is cut into rows depends on both
sides' memory and is worked out once per remote, by :func:`pair`; a push only turns block ids into indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpush.errors import ConfigurationError, Failure, FailureCode, Incompatible, UsageError
from kvpush.layout import CacheGeometry, LayerGeometry

# A descriptor costs NIXL 5 to 9 us, as long as moving tens of KiB. Cutting a block into pieces this short, as for heads
# before tokens on one side and tokens before heads on the other, would take longer than computing the block again.
MIN_TILE_BYTES = 1024

_MAX_SEGMENTS = 2**31  # NIXL's indices are int32

_FEW_IDS = 64  # up to here a set of ints is faster than numpy's sort

BlockIds = npt.NDArray[np.int64]  # shape (blocks,)
RemoteIds = npt.NDArray[np.integer[Any]]  # the same of a peer, of whatever width they came in
_Rows = npt.NDArray[np.uint64]  # shape (rows, 5)
_Indices = npt.NDArray[np.int32]  # shape (rows * blocks,)


@dataclass(frozen=True, eq=False)
class PairPlan:
    """How a block is cut to fit both sides. Segment ``i`` of row ``r`` has index ``r * num_blocks + i`` on each side.

    ``local_rows`` and ``remote_rows`` have shape (rows, 5), uint64: address, length_bytes, device_id, stride_bytes,
    count. Row ``r`` is the same piece of a block, of the same length, on both sides. ``block_len_bytes`` is a block's
    length over all rows.
    """

    local_rows: _Rows
    remote_rows: _Rows
    local_num_blocks: int
    remote_num_blocks: int
    block_len_bytes: int
    _local_offsets: _Indices = field(init=False, repr=False)  # index of segment 0 of each row, shape (rows, 1)
    _remote_offsets: _Indices = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for side, rows, num_blocks in (
            ("local", self.local_rows, self.local_num_blocks),
            ("remote", self.remote_rows, self.remote_num_blocks),
        ):
            object.__setattr__(self, f"_{side}_offsets", _row_offsets(side, len(rows), num_blocks))

    def local_indices(self, block_ids: BlockIds) -> _Indices:
        """Indices into the local rows, row by row. Every id is one of 0 .. ``local_num_blocks`` - 1."""
        return _indices(self._local_offsets, block_ids)

    def remote_indices(self, block_ids: BlockIds) -> _Indices:
        """Indices into the remote rows, in the order of :meth:`local_indices`."""
        return _indices(self._remote_offsets, block_ids)


def _row_offsets(side: str, num_rows: int, num_blocks: int) -> _Indices:
    if num_rows * num_blocks > _MAX_SEGMENTS:
        raise Failure(
            FailureCode.bad_blocks,
            f"{side} cache: {num_blocks} blocks in {num_rows} pieces are more than NIXL can number ({_MAX_SEGMENTS})",
        )
    return (np.arange(num_rows, dtype=np.int64) * num_blocks).astype(np.int32)[:, np.newaxis]


def _indices(row_offsets: _Indices, block_ids: BlockIds) -> _Indices:
    # Nothing wraps: PairPlan has checked the largest index there can be.
    return (row_offsets + block_ids.astype(np.int32)).reshape(-1)


def pair(local: CacheGeometry, remote: CacheGeometry, *, min_tile_bytes: int = MIN_TILE_BYTES) -> PairPlan:
    """Cut a block into the longest pieces that are contiguous on both sides, with the same elements in the same order.

    Layers are matched by name and axes by letter, so the order of either may differ. A block that is contiguous on both
    sides is one row a layer; keys and values apart in the memory of either side make two. ``min_tile_bytes`` bounds
    how finely anything else may be cut. Both geometries have been checked. Takes microseconds a layer, however many
    blocks there are.

    Raises Incompatible naming both values when layers, axes, sizes or dtypes differ, or when the two orders in memory
    have too little in common; ``Failure(bad_blocks)`` when the cache has more segments than NIXL can number.
    """
    remote_layers = _matched_layers(local, remote)
    _check_same_blocks(local, remote)
    local_rows: list[_Rows] = []
    remote_rows: list[_Rows] = []
    for ours in local.layers:
        theirs = remote_layers[ours.name]
        steps = _block_axes(local, ours, remote, theirs)
        tile_bytes, outer = _common_tile(steps, local.itemsize_bytes)
        if tile_bytes < min_tile_bytes and any(step.axis != "K" for step in outer):
            raise Incompatible(
                f"layer {ours.name!r}: the two sides order a block's elements too differently in memory: only "
                f"{tile_bytes} bytes at a time are contiguous on both, at least {min_tile_bytes} are needed"
            )
        local_offsets, remote_offsets = _tile_offsets(outer)
        local_rows.append(_rows(local, ours, tile_bytes, local_offsets))
        remote_rows.append(_rows(remote, theirs, tile_bytes, remote_offsets))
    rows = np.concatenate(local_rows)
    return PairPlan(
        local_rows=rows,
        remote_rows=np.concatenate(remote_rows),
        local_num_blocks=local.num_blocks,
        remote_num_blocks=remote.num_blocks,
        block_len_bytes=int(rows[:, 1].sum()),
    )


def _matched_layers(local: CacheGeometry, remote: CacheGeometry) -> dict[str, LayerGeometry]:
    ours = {layer.name for layer in local.layers}
    theirs = {layer.name: layer for layer in remote.layers}
    if differing := ours ^ theirs.keys():
        missing = ", ".join(repr(name) for name in sorted(differing)[:4])
        raise Incompatible(
            f"layers: {len(ours)} here, {len(theirs)} at the peer; on one side only: {missing}"
            + (f" and {len(differing) - 4} more" if len(differing) > 4 else "")
        )
    return theirs


def _check_same_blocks(local: CacheGeometry, remote: CacheGeometry) -> None:
    ours, theirs = _block_form(local), _block_form(remote)
    if ours != theirs:
        raise Incompatible(f"a block here is {_described(ours)}, a block at the peer {_described(theirs)}")


def _block_form(geometry: CacheGeometry) -> dict[str, Any]:
    axes = zip(geometry.dims, geometry.layers[0].shape, strict=True)
    sizes = {axis: size for axis, size in axes if axis != "B"}
    return {**sizes, "dtype": geometry.dtype, "itemsize_bytes": geometry.itemsize_bytes}


def _described(form: dict[str, Any]) -> str:
    return " ".join(f"{name}={form[name]}" for name in sorted(form))


class _Step(NamedTuple):
    """One axis of a block, and how far apart its neighbours are on either side."""

    axis: str
    size: int
    local_stride_bytes: int
    remote_stride_bytes: int


def _block_axes(
    local: CacheGeometry, ours: LayerGeometry, remote: CacheGeometry, theirs: LayerGeometry
) -> tuple[_Step, ...]:
    remote_strides = dict(zip(remote.dims, theirs.strides_bytes, strict=True))
    axes = zip(local.dims, ours.shape, ours.strides_bytes, strict=True)
    return tuple(
        _Step(axis, size, stride, remote_strides[axis]) for axis, size, stride in axes if axis != "B" and size > 1
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


def _tile_offsets(outer: tuple[_Step, ...]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Where a block's tiles start on either side, in bytes from the block's address; one tile, one index."""
    local = np.zeros(1, dtype=np.uint64)
    remote = np.zeros(1, dtype=np.uint64)
    for step in outer:
        steps = np.arange(step.size, dtype=np.uint64)
        local = np.add.outer(local, steps * np.uint64(step.local_stride_bytes)).reshape(-1)
        remote = np.add.outer(remote, steps * np.uint64(step.remote_stride_bytes)).reshape(-1)
    return local, remote


def _rows(geometry: CacheGeometry, layer: LayerGeometry, tile_bytes: int, offsets: npt.NDArray[np.uint64]) -> _Rows:
    stride_bytes = layer.strides_bytes[geometry.dims.index("B")]
    rows = np.empty((len(offsets), 5), dtype=np.uint64)
    rows[:, 0] = offsets + np.uint64(layer.address)
    rows[:, 1] = tile_bytes
    rows[:, 2] = layer.device_id
    rows[:, 3] = stride_bytes if geometry.num_blocks > 1 else tile_bytes  # a single block's stride means nothing
    rows[:, 4] = geometry.num_blocks
    return rows


# --- positions -------------------------------------------------------------------------------------------------------


def block_len_bytes(geometry: CacheGeometry) -> int:
    """The length of one block over all layers. Raises ConfigurationError for a cache that no plan could serve."""
    try:
        return pair(geometry, geometry).block_len_bytes
    except Failure as exc:
        raise ConfigurationError(
            f"dims={geometry.dims!r}: a block's elements lie too far apart to be written: {exc.reason}"
        ) from exc


class Overlap(NamedTuple):
    """The positions ``first_block`` .. that both sides hold: ``local_ids[i]`` goes into ``remote_ids[i]``."""

    first_block: int
    local_ids: BlockIds
    remote_ids: BlockIds


def overlap(wanted_first: int, wanted_ids: RemoteIds, held_first: int, held_ids: BlockIds) -> Overlap | None:
    """What a transfer's holder can write of what was asked for; ``None`` when no position is on both sides.

    Position ``first + i`` is in block ``ids[i]``. Only positions count, never how long the lists are: of a long list
    whose ids are kept packed, only this part is unpacked. The local ids are a view.
    """
    first = max(wanted_first, held_first)
    end = min(wanted_first + len(wanted_ids), held_first + len(held_ids))
    if first >= end:
        return None
    return Overlap(
        first_block=first,
        local_ids=held_ids[first - held_first : end - held_first],
        remote_ids=wanted_ids[first - wanted_first : end - wanted_first].astype(np.int64),
    )


# --- block ids -------------------------------------------------------------------------------------------------------


def check_block_ids(block_ids: Any, num_blocks: int, *, what: str, unique: bool) -> BlockIds:
    """A caller's block ids as a fresh C-contiguous int64 array, each one of 0 .. ``num_blocks`` - 1.

    Takes a list, tuple, range or other sequence of integers, or a one-dimensional integer array or tensor; an empty one
    is fine. ``unique`` refuses an id that comes twice. Raises UsageError with ``what`` and the offending value.
    """
    ids = _converted(block_ids, num_blocks, what)
    if unique and (repeated := _repeated(ids)) is not None:
        raise UsageError(f"{what}: block {repeated} comes twice")
    return ids


def check_remote_ids(block_ids: RemoteIds, num_blocks: int) -> None:
    """The same rule for ids that a peer sent. Raises ``Failure(bad_blocks)`` with the offending value.

    It looks at every one of them: 0.4 ms for 65,536, 20 ms for a million.
    """
    if not block_ids.size:
        return
    if (bad := _outside(block_ids, num_blocks)) is not None:
        raise Failure(FailureCode.bad_blocks, f"the peer names block {bad}; it has blocks 0 to {num_blocks - 1}")
    if (repeated := _repeated(block_ids)) is not None:
        raise Failure(FailureCode.bad_blocks, f"the peer names block {repeated} twice")


def _converted(block_ids: Any, num_blocks: int, what: str) -> BlockIds:
    if type(block_ids) is list or type(block_ids) is tuple:
        return _from_list(block_ids, num_blocks, what)
    if isinstance(block_ids, torch.Tensor):
        block_ids = _from_tensor(block_ids, what)
    if isinstance(block_ids, np.ndarray) and not isinstance(block_ids, np.ma.MaskedArray):
        return _from_array(block_ids, num_blocks, what)
    if isinstance(block_ids, range):
        return _from_range(block_ids, num_blocks, what)
    if isinstance(block_ids, Sequence) and not isinstance(block_ids, str | bytes | bytearray | memoryview):
        return _from_list(list(block_ids), num_blocks, what)
    raise UsageError(f"{what}: {_clipped(block_ids)} is not a sequence of block ids")


def _from_tensor(block_ids: torch.Tensor, what: str) -> npt.NDArray[Any]:
    """Its values as an array. Sparse, meta and quantized tensors have none that numpy could hold."""
    if not block_ids.numel():
        return np.empty(0, dtype=np.int64)  # torch.tensor([]) is a tensor of floats
    if block_ids.is_floating_point() or block_ids.is_complex():
        raise UsageError(f"{what}: a tensor of {block_ids.dtype}; block ids are integers")
    try:
        return block_ids.detach().cpu().numpy()
    except (TypeError, RuntimeError, NotImplementedError) as exc:
        raise UsageError(f"{what}: a tensor of {block_ids.dtype} with layout {block_ids.layout}: {exc}") from exc


def _from_list(block_ids: list[Any] | tuple[Any, ...], num_blocks: int, what: str) -> BlockIds:
    if not block_ids:
        return np.empty(0, dtype=np.int64)
    # bool is an int to numpy and to isinstance, and 1.5 becomes 1: only the exact type can be trusted.
    if set(map(type, block_ids)) != {int}:
        for block_id in block_ids:
            if not isinstance(block_id, Integral) or isinstance(block_id, bool):
                raise UsageError(f"{what}: {_clipped(block_id)} is not a block id; block ids are integers")
    # Before the conversion: 2**63 does not fit into an int64. On plain ints faster than numpy's own min and max.
    for block_id in (min(block_ids), max(block_ids)):
        _check_inside(int(block_id), num_blocks, what)
    return np.array(block_ids, dtype=np.int64)


def _from_range(block_ids: range, num_blocks: int, what: str) -> BlockIds:
    if block_ids:
        # Before the conversion: a range far too long must not be laid out in memory. Its ends are its extremes.
        for block_id in (block_ids[0], block_ids[-1]):
            _check_inside(block_id, num_blocks, what)
    return np.array(block_ids, dtype=np.int64)


def _from_array(block_ids: npt.NDArray[Any], num_blocks: int, what: str) -> BlockIds:
    if block_ids.ndim != 1:
        raise UsageError(f"{what}: an array of shape {block_ids.shape}; block ids are one-dimensional")
    if not block_ids.size:
        return np.empty(0, dtype=np.int64)
    if block_ids.dtype.kind not in "iu":
        raise UsageError(f"{what}: an array of {block_ids.dtype}, such as {block_ids[0]!r}; block ids are integers")
    if (bad := _outside(block_ids, num_blocks)) is not None:
        _check_inside(bad, num_blocks, what)
    return np.array(block_ids, dtype=np.int64, order="C")


def _check_inside(block_id: int, num_blocks: int, what: str) -> None:
    if not 0 <= block_id < num_blocks:
        raise UsageError(f"{what}: block {_clipped(block_id)} is not one of 0 to {num_blocks - 1}")


def _outside(block_ids: npt.NDArray[Any], num_blocks: int) -> int | None:
    """An id that is not one of 0 .. num_blocks - 1, if there is one. The array is not empty."""
    lowest, highest = int(block_ids.min()), int(block_ids.max())
    if lowest < 0:
        return lowest
    return highest if highest >= num_blocks else None


def _repeated(block_ids: BlockIds | RemoteIds) -> int | None:
    """An id that comes more than once, if there is one."""
    if len(block_ids) <= _FEW_IDS and len(set(block_ids.tolist())) == len(block_ids):
        return None
    ordered = np.sort(block_ids)
    again = ordered[1:] == ordered[:-1]
    return int(ordered[int(again.argmax())]) if again.any() else None


def _clipped(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python converts
        text = "a number of thousands of digits"
    return text if len(text) <= 80 else text[:79] + "…"
