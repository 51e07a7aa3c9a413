"""kvpush.blocks: what is a block id, which positions two sides share, and the slots that blocks consist of."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpush import blocks
from kvpush.blocks import check_block_ids, check_remote_ids, shared_positions, slots_between, slots_of
from kvpush.errors import Failure, FailureCode, UsageError

# --- positions -------------------------------------------------------------------------------------------------------


def overlapping(wanted_first, wanted_ids, held_first, held_ids):
    """As plain values: (first_block, [(local, remote), ...]) or None."""
    both = shared_positions(wanted_first, len(wanted_ids), held_first, len(held_ids))
    if not both:
        return None
    return both.start, [(held_ids[i - held_first], wanted_ids[i - wanted_first]) for i in both]


@pytest.mark.parametrize(
    ("wanted_first", "wanted_ids", "pairs"),
    [
        (2, [5, 6], [(12, 5), (13, 6)]),
        (3, [5], [(13, 5)]),
        (0, [5, 6, 7, 8], [(10, 5), (11, 6), (12, 7), (13, 8)]),
        (1, [5], [(11, 5)]),
    ],
)
def test_d1_partial_prefix_takes_positions_and_not_ends(wanted_first, wanted_ids, pairs):
    assert overlapping(wanted_first, wanted_ids, 0, [10, 11, 12, 13]) == (wanted_first, pairs)


def test_d3_shifted_positions_are_not_squeezed_into_place():
    held = list(range(100, 132))  # positions 0 .. 31
    assert overlapping(31, [7, 8], 0, held) == (31, [(131, 7)])
    assert overlapping(32, [7, 8], 0, held) is None


def test_d5_lengths_differ_and_only_common_positions_move():
    assert overlapping(0, [4, 5], 0, [0, 1, 2]) == (0, [(0, 4), (1, 5)])
    assert overlapping(0, [4, 5, 6], 0, [0]) == (0, [(0, 4)])
    assert overlapping(0, [], 0, [0]) is None
    assert overlapping(0, [4], 0, []) is None


RUNS = st.tuples(st.integers(0, 12), st.lists(st.integers(0, 99), max_size=8))


@given(RUNS, RUNS)
def test_shared_positions_agree_with_matching_position_by_position(wanted, held):
    positions = {held[0] + i: block_id for i, block_id in enumerate(held[1])}
    pairs = [
        (wanted[0] + i, positions[wanted[0] + i], b) for i, b in enumerate(wanted[1]) if wanted[0] + i in positions
    ]
    expected = (pairs[0][0], [(local, remote) for _, local, remote in pairs]) if pairs else None
    assert overlapping(*wanted, *held) == expected


@given(st.lists(st.integers(0, 99), max_size=8), st.integers(1, 5), st.integers(0, 40), st.integers(0, 40))
def test_slots_between_are_a_part_of_all_slots(block_ids, per_block, start, length):
    ids = np.array(block_ids, dtype=np.int64)
    end = min(start + length, len(ids) * per_block)
    start = min(start, end)
    assert slots_between(ids, per_block, start, end).tolist() == slots_of(ids, per_block)[start:end].tolist()


def test_a_few_slots_of_a_long_list_are_laid_out_alone(monkeypatch):
    laid_out = []
    monkeypatch.setattr(blocks, "slots_of", lambda ids, per_block: laid_out.extend(ids) or slots_of(ids, per_block))
    assert slots_between(np.arange(1000), 4, 4 * 500 + 1, 4 * 501 + 1).tolist() == [2001, 2002, 2003, 2004]
    assert laid_out == [500, 501]


# --- block ids -------------------------------------------------------------------------------------------------------

SEQUENCES = [
    [3, 0, 7],
    (3, 0, 7),
    collections.deque([3, 0, 7]),
    [np.int32(3), 0, np.uint64(7)],
    np.array([3, 0, 7]),
    np.array([3, 0, 7], dtype=np.uint8),
    np.array([3, 9, 0, 9, 7])[::2],
    np.array([3, 0, 7], dtype=">i4"),
    torch.tensor([3, 0, 7]),
    torch.tensor([3, 0, 7], dtype=torch.int32),
]


@pytest.mark.parametrize("block_ids", SEQUENCES, ids=lambda ids: type(ids).__name__)
def test_block_ids_of_every_kind_become_one(block_ids):
    ids = check_block_ids(block_ids, 8, what="block_ids", unique=True)
    assert ids.tolist() == [3, 0, 7]
    assert ids.dtype == np.int64 and ids.dtype.isnative and ids.flags.c_contiguous


@pytest.mark.parametrize("block_ids", [[], (), range(0), np.array([]), np.array([], np.int64), torch.tensor([])])
def test_no_block_ids_are_fine(block_ids):
    ids = check_block_ids(block_ids, 8, what="block_ids", unique=True)
    assert ids.shape == (0,) and ids.dtype == np.int64


@pytest.mark.parametrize(("block_ids", "expected"), [(range(8), [*range(8)]), (range(7, -1, -3), [7, 4, 1])])
def test_ranges_are_block_ids(block_ids, expected):
    assert check_block_ids(block_ids, 8, what="block_ids", unique=True).tolist() == expected


@pytest.mark.parametrize(
    "block_ids",
    [np.array([1, 2]), torch.tensor([1, 2])],
)
def test_checked_block_ids_are_a_copy(block_ids):
    ids = check_block_ids(block_ids, 8, what="block_ids", unique=False)
    block_ids[0] = 5
    assert ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("block_ids", "named"),
    [
        ("123", "'123'"),
        (b"\x01", "x01"),
        (bytearray(b"\x01"), "x01"),
        (memoryview(b"\x01"), "memory"),
        ({1: 2}, "{1: 2}"),
        ({1}, "{1}"),
        (None, "None"),
        (3, "3"),
        ((i for i in [1]), "generator"),
        ([1.5], "1.5"),
        ([1.0], "1.0"),
        (["1"], "'1'"),
        ([True], "True"),
        ([1, True], "True"),
        ([False, 2], "False"),
        ([np.True_], "True"),
        ([None], "None"),
        ([[1]], "[1]"),
        ([[1], [2, 3]], "[1]"),
        ([torch.tensor(1)], "tensor(1)"),
        ([8], "8"),
        ([-1], "-1"),
        ([0, -5, 3], "-5"),
        ([2**63], str(2**63)),
        ([-(2**63) - 1], str(-(2**63) - 1)),
        ([0, 2**64], str(2**64)),
        ([10**5000], "digits"),
        (range(9), "8"),
        (range(-1, 2), "-1"),
        (range(2**70), str(2**70 - 1)),
        (range(10**12), str(10**12 - 1)),
        (np.array([8]), "8"),
        (np.array([-1], dtype=np.int8), "-1"),
        (np.array([2**63], dtype=np.uint64), str(2**63)),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array([1], dtype=object), "object"),
        (np.array(["1"]), "'1'"),
        (np.array([[1]]), "(1, 1)"),
        (np.array(1), "()"),
        (np.ma.array([1, 2], mask=[False, True]), "masked_array"),
        (torch.tensor([1.0]), "a tensor of torch.float32; block ids are integers"),
        (torch.tensor([1j]), "a tensor of torch.complex64; block ids are integers"),
        (torch.tensor([1, 2]).to_sparse(), "a tensor of torch.int64 with layout torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "a tensor of torch.int64"),
        (torch.tensor([True]), "bool"),
        (torch.tensor(1), "()"),
        (torch.tensor([8]), "8"),
    ],
    ids=lambda value: str(type(value).__name__) if not isinstance(value, str) else value[:12],
)
def test_what_is_no_block_id_is_refused_and_named(block_ids, named):
    with pytest.raises(UsageError) as caught:
        check_block_ids(block_ids, 8, what="blocks of 't1'", unique=False)
    message = str(caught.value)
    assert message.startswith("blocks of 't1': ") and named in message and len(message) < 200


@pytest.mark.parametrize(("length", "shown"), [(80, "x" * 78 + "'"), (81, "x" * 78 + "…")])
def test_what_is_no_block_id_is_shown_up_to_80_characters(length, shown):
    with pytest.raises(UsageError) as caught:
        check_block_ids("x" * (length - 2), 8, what="ids", unique=False)
    text = str(caught.value).removeprefix("ids: ").removesuffix(" is not a sequence of block ids")
    assert text == "'" + shown and len(text) == 80


@pytest.mark.parametrize(
    "block_ids",
    [[1, 5, 1], (5, 5), np.array([5, 1, 5]), torch.tensor([5, 5]), [*range(100), 5]],
)
def test_an_id_that_comes_twice_is_refused_only_where_it_matters(block_ids):
    assert len(check_block_ids(block_ids, 100, what="block_ids", unique=False)) == len(block_ids)
    with pytest.raises(UsageError, match=r"block [15] comes twice"):
        check_block_ids(block_ids, 100, what="block_ids", unique=True)


@pytest.mark.parametrize(
    ("ids", "named"),
    [([8], "block 8"), ([-1, 3], "block -1"), ([2**32 - 1], str(2**32 - 1)), ([1, 2, 1], "block 1 twice")],
)
def test_d7_ids_from_a_peer_are_held_against_the_peer_s_own_blocks(ids, named):
    with pytest.raises(Failure, match=named) as caught:
        check_remote_ids(np.array(ids, dtype=np.int64), 8)
    assert caught.value.code is FailureCode.bad_blocks


@pytest.mark.parametrize("ids", [[], [0], [7, 0, 3], range(8)])
def test_good_ids_from_a_peer_pass(ids):
    check_remote_ids(np.array(ids, dtype=np.int64), 8)


# --- slots -----------------------------------------------------------------------------------------------------------


def test_with_one_slot_a_block_slots_are_the_ids_themselves():
    ids = np.array([3, 0, 7])
    assert slots_of(ids, 1) is ids


@pytest.mark.parametrize(
    ("ids", "slots_per_block", "slots"),
    [
        ([3, 0], 2, [6, 7, 0, 1]),
        ([1], 3, [3, 4, 5]),
        ([], 4, []),
        ([2**31 - 2], 2, [2**32 - 4, 2**32 - 3]),
    ],
)
def test_d9_a_block_is_its_slots_in_order(ids, slots_per_block, slots):
    found = slots_of(np.array(ids, dtype=np.int64), slots_per_block)
    assert found.tolist() == slots and found.dtype == np.int64


def test_d9_logical_and_kernel_blocks_meet_in_slots():
    """P's block 3 is D's blocks 6 and 7; at 3 to 2, two of P's are three of D's."""
    assert slots_of(np.array([3]), 2).tolist() == slots_of(np.array([6, 7]), 1).tolist()
    assert len(slots_of(np.array([5, 6]), 3)) == len(slots_of(np.array([0, 2, 9]), 2))
