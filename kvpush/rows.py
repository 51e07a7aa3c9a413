"""Rows: strided runs of equally long segments, and the numbers by which a WRITE names them.

A row is ``(address, length_bytes, device_id, stride_bytes, count)``. The index of a segment counts the segments of all
rows before its own, then its place in its row; rows of one side may have different counts and lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_SEGMENTS = 2**31 - 1  # indices are int32
_ADDRESS_SPACE = 2**64

Rows = npt.NDArray[np.uint64]  # shape (rows, 5): address, length_bytes, device_id, stride_bytes, count
Indices = npt.NDArray[np.int32]  # shape (segments,)


class Segments(NamedTuple):
    """What indices stand for, one entry an index."""

    addresses: npt.NDArray[np.uint64]
    lengths_bytes: npt.NDArray[np.uint64]


def segments_of(rows: Rows, indices: Indices) -> Segments:
    """The segments that these indices name. Every index is one of 0 .. the number of segments - 1."""
    at = rows_at(rows, indices)
    chosen = rows[at]
    before = np.cumsum(rows[:, 4], dtype=np.int64)[at] - chosen[:, 4].astype(np.int64)
    place = indices - before
    return Segments(chosen[:, 0] + chosen[:, 3] * place.astype(np.uint64), chosen[:, 1])


def rows_at(rows: Rows, indices: Indices) -> npt.NDArray[np.intp]:
    """The row of each index."""
    return np.searchsorted(np.cumsum(rows[:, 4], dtype=np.int64), indices, side="right")


def num_segments(rows: Rows) -> int:
    """How many segments the rows have together. The rows are valid."""
    return int(rows[:, 4].sum())


def rows_problem(rows: Rows) -> str | None:
    """Why these rows cannot be a side of a remote, or ``None``.

    Not left to NIXL: its own range check computes a row's end modulo 2**64, so that a row with a huge stride or count
    would pass it and reach memory that nobody registered.
    """
    if rows.dtype != np.uint64 or rows.ndim != 2 or rows.shape[1] != 5 or not len(rows):
        return f"rows are a non-empty (rows, 5) array of uint64, not {rows.shape} of {rows.dtype}"
    counts = rows[:, 4]
    if int(counts.max()) > MAX_SEGMENTS or not counts.all() or num_segments(rows) > MAX_SEGMENTS:
        return f"{len(rows)} rows of {counts.min()} to {counts.max()} segments: each needs one, and indices are int32"
    lengths, strides = rows[:, 1], rows[:, 3]
    if (bad := _first((lengths == 0) | (lengths > strides))) is not None:
        length_bytes, stride_bytes = rows[bad, 1], rows[bad, 3]
        return f"row {bad}: segments of {length_bytes} bytes, {stride_bytes} bytes apart, are empty or overlap"
    if (bad := _first(_wraps(rows))) is not None:
        return f"row {bad} leaves the address space"
    return None


def indices_problem(local_indices: Indices, remote_indices: Indices) -> str | None:
    """Why these index lists cannot be written, or ``None``. Their range is the implementation's to check."""
    for indices in (local_indices, remote_indices):
        if indices.dtype != np.int32 or indices.ndim != 1:
            return f"indices are a flat array of int32, not {indices.shape} of {indices.dtype}"
    if not len(local_indices) or len(local_indices) != len(remote_indices):
        return f"{len(local_indices)} local and {len(remote_indices)} remote indices: equally many, at least one"
    return None


def _wraps(rows: Rows) -> npt.NDArray[np.bool_]:
    """Rows whose last byte has no address. uint64 would wrap around, so the largest ones are worked out in Python."""
    wraps = np.zeros(len(rows), dtype=np.bool_)
    # Below these bounds neither the product nor the sum can wrap.
    huge = (rows[:, 3] >= 2**31) | (rows[:, 0] >= 2**63) | (rows[:, 1] >= 2**31)
    for row in np.flatnonzero(huge).tolist():
        address, length_bytes, _, stride_bytes, count = rows[row].tolist()
        wraps[row] = address + stride_bytes * (count - 1) + length_bytes > _ADDRESS_SPACE
    return wraps


def _first(flags: npt.NDArray[np.bool_]) -> int | None:
    return int(flags.argmax()) if flags.any() else None
