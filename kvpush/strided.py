"""Strided memory: which bytes a tensor uses, and whether two tensors share any. Pure arithmetic on addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_MAX_RUNS = 1 << 16  # of one tensor that are listed one by one to compare it with another of different strides


class Strided(NamedTuple):
    """A tensor's bytes. ``axes`` are ``(stride_bytes, size)``, longest stride first, nested within each other."""

    name: str
    address: int
    axes: tuple[tuple[int, int], ...]
    itemsize_bytes: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.address + self.itemsize_bytes + sum((size - 1) * stride for stride, size in self.axes)


def axes_of(shape: Sequence[int], strides_bytes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The axes longer than 1, longest stride first: they decide which bytes are used."""
    pairs = zip(strides_bytes, shape, strict=True)
    return tuple(sorted((pair for pair in pairs if pair[1] > 1), reverse=True))


def shared_bytes_defect(tensors: Sequence[Strided]) -> str | None:
    """Two tensors with a byte in common, as a sentence.

    Views of one storage may interleave: then their spans mix, and their bytes do not.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.address)
    addresses = np.array([tensor.address for tensor in ordered], dtype=np.int64)
    for i, tensor in enumerate(ordered):
        mixed = ordered[i + 1 : int(np.searchsorted(addresses, tensor.end))]
        if not mixed:
            continue
        form = (tensor.axes, tensor.itemsize_bytes)
        alike = [other for other in mixed if (other.axes, other.itemsize_bytes) == form]
        distances = np.array([other.address - tensor.address for other in alike], dtype=np.int64)
        shared = _meets_copy(distances, tensor.axes, tensor.itemsize_bytes)
        if shared.any():
            return f"layers {tensor.name!r} and {alike[int(shared.argmax())].name!r} share bytes"
        for other in mixed:
            if (other.axes, other.itemsize_bytes) != form and (defect := _defect_of_two(tensor, other)):
                return defect
    return None


def _meets_copy(
    distances: npt.NDArray[np.int64], axes: Sequence[tuple[int, int]], itemsize_bytes: int
) -> npt.NDArray[np.bool_]:
    """For each distance: does a tensor meet its own copy, moved by that many bytes?

    They meet when the distance is a sum of whole steps along the axes, each shorter than its axis. The axes are nested,
    so what is left after the longest one is shorter than its stride: only the two nearest numbers of steps can do.
    """
    if not axes:
        return np.abs(distances) < itemsize_bytes
    (stride, size), inner = axes[0], axes[1:]
    below = distances // stride
    meets = np.zeros(distances.shape, dtype=np.bool_)
    for steps in (below, below + 1):
        meets |= (np.abs(steps) < size) & _meets_copy(distances - steps * stride, inner, itemsize_bytes)
    return meets


def _defect_of_two(one: Strided, two: Strided) -> str | None:
    meets = _meets(two.address - one.address, one, two)
    if meets is None:
        return (
            f"layers {one.name!r} and {two.name!r} lie within each other with different strides and more than "
            f"{_MAX_RUNS} pieces, so they may share bytes"
        )
    return f"layers {one.name!r} and {two.name!r} share bytes" if meets else None


def _meets(distance: int, one: Strided, two: Strided) -> bool | None:
    """Whether two tensors of different form share a byte when the second one starts that many bytes after the first;
    ``None`` when it would take too long to find out."""
    if one.axes and two.axes and one.axes[0][0] == two.axes[0][0]:
        # Pages of one size: what is left within a page is shorter than the page, on both sides.
        stride = one.axes[0][0]
        least, most = 1 - two.axes[0][1], one.axes[0][1] - 1
        inner_one, inner_two = (tensor._replace(axes=tensor.axes[1:]) for tensor in (one, two))
        below = distance // stride
        answers = [
            _meets(distance - steps * stride, inner_one, inner_two)
            for steps in (below, below + 1)
            if least <= steps <= most
        ]
        return True if True in answers else None if None in answers else False
    first, second = _runs(0, one), _runs(distance, two)
    if first is None or second is None:
        return _meets_halves(distance, one, two)
    # A run of the second meets one of the first when it begins before that one ends and ends after it begins. Runs of
    # one tensor do not meet each other, so their ends are in the order of their starts.
    (starts, ends), (others, other_ends) = first, second
    return bool(np.any(np.searchsorted(ends, others, side="right") < np.searchsorted(starts, other_ends, side="left")))


def _meets_halves(distance: int, one: Strided, two: Strided) -> bool | None:
    """The same for tensors of many pieces, when one of them is two halves such as all keys and all values."""
    answers: list[bool | None] = [None]
    if one.axes and one.axes[0][1] == 2:
        half = one._replace(axes=one.axes[1:])
        answers = [_meets(distance - start, half, two) for start in (0, one.axes[0][0])]
    elif two.axes and two.axes[0][1] == 2:
        half = two._replace(axes=two.axes[1:])
        answers = [_meets(distance + start, one, half) for start in (0, two.axes[0][0])]
    return True if True in answers else None if None in answers else False


def _runs(start: int, tensor: Strided) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Starts and ends of the contiguous pieces of a tensor, in order; ``None`` when there are too many."""
    length_bytes = tensor.itemsize_bytes
    outer = list(tensor.axes)
    while outer and outer[-1][0] == length_bytes:
        length_bytes *= outer.pop()[1]
    count = 1
    for _, size in outer:
        count *= size
        if count > _MAX_RUNS:
            return None
    starts = np.array([start], dtype=np.int64)
    for stride, size in outer:
        starts = np.add.outer(starts, np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, starts + length_bytes
