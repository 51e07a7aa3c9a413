"""The checks on rows and indices that every transport shares, without a transport."""

from __future__ import annotations

import numpy as np
import pytest

from kvpush.rows import indices_problem, num_segments, rows_at, rows_problem, segments_of

TOP = 2**64


def rows(*values):
    return np.array(values, np.uint64)


@pytest.mark.parametrize(
    "fine",
    [
        rows([4096, 64, 0, 64, 1]),
        rows([4096, 64, 0, 128, 4], [8192, 32, 7, 32, 4]),
        rows([4096, 64, 0, 64, 4], [8192, 32, 0, 64, 5]),
        rows([0, 1, 0, 1, 2**30], [0, 1, 0, 1, 2**30 - 1]),
        rows([0, 1, 0, 1, 2**31 - 1]),
        rows([TOP - 256, 64, 0, 64, 4]),
        rows([0, 1, 0, 2**63, 2]),
    ],
)
def test_rows_that_can_be_addressed(fine):
    assert rows_problem(fine) is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (rows([4096, 64, 0, 64, 1])[:0], "non-empty"),
        (rows([4096, 64, 0, 64]), "non-empty"),
        (rows(4096, 64, 0, 64, 1), "non-empty"),
        (rows([4096, 64, 0, 64, 1]).astype(np.int64), "int64"),
        (rows([4096, 64, 0, 64, 4], [8192, 64, 0, 64, 0]), "int32"),
        (rows([4096, 64, 0, 64, 1], [0, 1, 0, 1, 2**31 - 1]), "int32"),
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


def test_an_index_counts_the_segments_of_the_rows_before_its_own():
    some = rows([4096, 64, 0, 64, 2], [8192, 32, 7, 100, 3], [512, 8, 0, 8, 1])
    found = segments_of(some, np.arange(6, dtype=np.int32))
    assert num_segments(some) == 6
    assert found.addresses.tolist() == [4096, 4160, 8192, 8292, 8392, 512]
    assert found.lengths_bytes.tolist() == [64, 64, 32, 32, 32, 8]
    assert rows_at(some, np.arange(6, dtype=np.int32)).tolist() == [0, 0, 1, 1, 1, 2]
    assert segments_of(some, np.array([4, 0, 4], np.int32)).addresses.tolist() == [8392, 4096, 8392]


def test_many_rows_are_checked_in_little_time():
    many = np.tile(rows([4096, 64, 0, 64, 4]), (1 << 18, 1))
    assert rows_problem(many) is None
    many[-1, 3] = 63
    assert "row 262143" in rows_problem(many)


def test_indices_must_be_flat_equally_many_and_of_the_right_kind():
    one, two = np.array([5], np.int32), np.array([1, 2], np.int32)
    assert indices_problem(two, two) is None
    assert "1 local and 2 remote" in indices_problem(one, two)
    assert "0 local and 0 remote" in indices_problem(one[:0], one[:0])
    assert "int64" in indices_problem(one, one.astype(np.int64))
    assert "(1, 1)" in indices_problem(one.reshape(1, 1), one)
