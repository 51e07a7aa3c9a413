"""Block ids: what a caller or a peer names, which positions both sides hold, and the slots that blocks consist of.

A *slot* is the smallest run of tokens that both sides' blocks are multiples of: a block of ``slots_per_block`` slots is
the slots ``block_id * slots_per_block`` and those that follow. Everything here that speaks of blocks serves slots too.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpush.errors import Failure, FailureCode, UsageError

MAX_SLOTS_PER_BLOCK = 512  # a push lists slots: a peer's block size must not decide how many there are

_FEW_IDS = 64  # up to here a set of ints is faster than numpy's sort

BlockIds = npt.NDArray[np.int64]  # shape (blocks,)


def shared_positions(first: int, count: int, other_first: int, other_count: int) -> range:
    """The positions that both of two runs name; empty when there is none. Only positions count, never how long the runs
    are."""
    start = max(first, other_first)
    return range(start, max(start, min(first + count, other_first + other_count)))


def slots_of(block_ids: BlockIds, slots_per_block: int) -> BlockIds:
    """The slots of these blocks, block by block. With one slot a block these are the ids themselves, not a copy."""
    if slots_per_block == 1:
        return block_ids
    return np.add.outer(block_ids * slots_per_block, np.arange(slots_per_block, dtype=np.int64)).reshape(-1)


def slots_between(block_ids: BlockIds, slots_per_block: int, start: int, end: int) -> BlockIds:
    """``slots_of(block_ids, slots_per_block)[start:end]``, laying out no others than these blocks' slots."""
    if slots_per_block == 1:
        return block_ids[start:end]
    first, last = start // slots_per_block, -(-end // slots_per_block)
    skipped = first * slots_per_block
    return slots_of(block_ids[first:last], slots_per_block)[start - skipped : end - skipped]


def check_block_ids(block_ids: Any, num_blocks: int, *, what: str, unique: bool) -> BlockIds:
    """A caller's block ids as a fresh C-contiguous int64 array, each one of 0 .. ``num_blocks`` - 1.

    Takes a list, tuple, range or other sequence of integers, or a one-dimensional integer array or tensor; an empty one
    is fine. ``unique`` refuses an id that comes twice. Raises UsageError with ``what`` and the offending value.
    """
    ids = _converted(block_ids, num_blocks, what)
    if unique and (repeated := _repeated(ids)) is not None:
        raise UsageError(f"{what}: block {repeated} comes twice")
    return ids


def check_remote_ids(block_ids: BlockIds, num_blocks: int) -> None:
    """The same rule for ids that a peer sent. Raises ``Failure(bad_blocks)`` with the offending value."""
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


def _repeated(block_ids: BlockIds) -> int | None:
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
