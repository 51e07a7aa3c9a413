"""The checks on rows and indices that every transport shares, without a transport."""

from __future__ import annotations

import numpy as np
import pytest

from kvpush.transport import indices_problem, pair_problem, rows_problem

TOP = 2**64


def rows(*values):
    return np.array(values, np.uint64)


@pytest.mark.parametrize(
    "fine",
    [
        rows([4096, 64, 0, 64, 1]),
        rows([4096, 64, 0, 128, 4], [8192, 32, 7, 32, 4]),
        rows([0, 1, 0, 1, 2**31 - 1]),
        rows([TOP - 256, 64, 0, 64, 4]),
        rows([0, 1, 0, 2**63, 2]),
    ],
)
def test_rows_that_can_be_addressed(fine):
    assert rows_problem(fine) is None
    assert pair_problem(fine, fine) is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (rows([4096, 64, 0, 64, 1])[:0], "non-empty"),
        (rows([4096, 64, 0, 64]), "non-empty"),
        (rows(4096, 64, 0, 64, 1), "non-empty"),
        (rows([4096, 64, 0, 64, 1]).astype(np.int64), "int64"),
        (rows([4096, 64, 0, 64, 4], [8192, 64, 0, 64, 5]), "count"),
        (rows([4096, 64, 0, 64, 0]), "int32"),
        (rows([0, 1, 0, 1, 2**31]), "int32"),
        (rows([0, 1, 0, 1, 2**30], [0, 1, 0, 1, 2**30]), "int32"),
        (rows([0, 1, 0, 1, 2**63], [0, 1, 0, 1, 2**63]), "int32"),
        (rows([4096, 0, 0, 64, 4]), "row 0: segments of 0 bytes"),
        (rows([4096, 64, 0, 64, 4], [4096, 64, 0, 63, 4]), "row 1: segments of 64 bytes, 63 bytes apart"),
        (rows([TOP - 255, 64, 0, 64, 4]), "row 0 leaves the address space"),
        (rows([4096, 64, 0, 2**63, 3]), "row 0 leaves the address space"),
        (rows([4096, 64, 0, TOP - 64, 2]), "row 0 leaves the address space"),
    ],
)
def test_rows_that_cannot(bad, reason):
    assert reason in rows_problem(bad)


def test_sides_must_fit_row_by_row():
    ours = rows([4096, 64, 0, 64, 4], [8192, 32, 0, 32, 4])
    theirs = rows([4096, 64, 3, 128, 9], [8192, 32, 3, 64, 9])
    assert pair_problem(ours, theirs) is None
    assert pair_problem(ours, theirs[:1]) == "2 local rows, 1 remote rows"
    assert pair_problem(ours, theirs[::-1]) == "row 0: segments of 64 bytes here, of 32 there"


def test_indices_must_be_flat_equally_many_and_of_the_right_kind():
    one, two = np.array([5], np.int32), np.array([1, 2], np.int32)
    assert indices_problem(two, two) is None
    assert "1 local and 2 remote" in indices_problem(one, two)
    assert "0 local and 0 remote" in indices_problem(one[:0], one[:0])
    assert "int64" in indices_problem(one, one.astype(np.int64))
    assert "(1, 1)" in indices_problem(one.reshape(1, 1), one)
