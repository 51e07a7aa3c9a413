"""What two ranks agree on: slots of either side's blocks, and what a registration asks for in them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpush import wire
from kvpush.blocks import MAX_SLOTS_PER_BLOCK, slots_of
from kvpush.errors import Failure, FailureCode, Incompatible, RemoteProtocolError
from kvpush.terms import GroupTerms, all_terms, group_terms, slot_range, wanted_slots

SIZES = st.integers(1, 64)


def want(block_ids, first_block=0, num_tokens=0):
    return wire.Want("kv", first_block, wire.pack_block_ids(np.array(block_ids, dtype=np.int64)), num_tokens)


def all_of(wanted):
    return wanted.between(wanted.first_slot, wanted.first_slot + wanted.num_slots).tolist()


@pytest.mark.parametrize(
    ("prefill", "decode", "slot", "of_prefill", "of_decode"),
    [
        (16, 16, 16, 1, 1),
        (16, 32, 16, 1, 2),
        (64, 16, 16, 4, 1),
        (16, 24, 8, 2, 3),
        (7, 5, 1, 7, 5),
        (1, 1, 1, 1, 1),
        (1, 16, 1, 1, 16),
        (MAX_SLOTS_PER_BLOCK, 1, 1, MAX_SLOTS_PER_BLOCK, 1),
    ],
)
def test_a_slot_is_the_greatest_run_that_both_blocks_are_multiples_of(prefill, decode, slot, of_prefill, of_decode):
    assert group_terms("kv", prefill, decode) == GroupTerms("kv", slot, of_prefill, of_decode)


@pytest.mark.parametrize(("prefill", "decode"), [(2**31 - 1, 16), (16, 2**31 - 1), (MAX_SLOTS_PER_BLOCK + 1, 1)])
def test_rule19_a_block_size_that_would_make_too_many_slots_is_refused_with_both(prefill, decode):
    with pytest.raises(Incompatible, match=f"{prefill}.*{decode}"):
        group_terms("kv", prefill, decode)


@given(SIZES, SIZES)
def test_both_sides_come_to_the_same_cut(prefill, decode):
    terms = group_terms("kv", prefill, decode)
    assert terms.slot_size_tokens * terms.prefill_slots_per_block == prefill
    assert terms.slot_size_tokens * terms.decode_slots_per_block == terms.decode_size_tokens == decode
    assert math.gcd(terms.prefill_slots_per_block, terms.decode_slots_per_block) == 1


def test_terms_are_of_the_groups_that_both_sides_have():
    found = all_terms({"full": 16, "window": 16, "state": 1}, {"window": 8, "full": 16, "other": 4})
    assert found == {"full": GroupTerms("full", 16, 1, 1), "window": GroupTerms("window", 8, 2, 1)}
    assert all_terms({"full": 16}, {}) == {}


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "first_block", "num_blocks", "num_tokens", "expected"),
    [
        ((16, 16), 0, 3, 0, (0, 3)),
        ((16, 16), 2, 3, 0, (2, 3)),
        ((16, 32), 2, 3, 0, (4, 6)),  # decode's blocks count, in slots of 16
        ((32, 16), 2, 3, 0, (2, 3)),
        ((16, 24), 1, 2, 0, (3, 6)),
        # an end in the last block, at a slot's edge, inside one, and of one token
        ((16, 32), 0, 3, 80, (0, 5)),
        ((16, 32), 0, 3, 81, (0, 6)),
        ((16, 32), 0, 3, 65, (0, 5)),
        ((16, 32), 1, 1, 33, (2, 1)),
        ((16, 16), 0, 3, 33, (0, 3)),
        ((16, 16), 0, 3, 32, (0, 2)),
        ((16, 16), 0, 1, 1, (0, 1)),
        # an end beyond the blocks ends nothing; one before them leaves nothing
        ((16, 32), 0, 3, 10**9, (0, 6)),
        ((16, 32), 2, 3, 64, (4, 0)),
        ((16, 32), 2, 3, 1, (4, 0)),
        ((16, 32), 2, 0, 0, (4, 0)),
        ((16, 16), 2**31 - 1, 1, 2**63 - 1, (2**31 - 1, 1)),
    ],
)
def test_slots_of_blocks_up_to_a_token(sizes, first_block, num_blocks, num_tokens, expected):
    terms = group_terms("kv", *sizes)
    assert slot_range(first_block, num_blocks, num_tokens, terms) == expected


@given(SIZES, SIZES, st.integers(0, 5), st.integers(0, 5), st.integers(0, 400))
def test_exactly_the_slots_that_hold_a_wanted_token(prefill, decode, first_block, num_blocks, num_tokens):
    terms = group_terms("kv", prefill, decode)
    tokens = range(first_block * decode, (first_block + num_blocks) * decode)
    wanted = {token // terms.slot_size_tokens for token in tokens if not num_tokens or token < num_tokens}
    first_slot, num_slots = slot_range(first_block, num_blocks, num_tokens, terms)
    assert set(range(first_slot, first_slot + num_slots)) == wanted
    assert first_slot * terms.slot_size_tokens == first_block * decode


@given(SIZES, SIZES, st.lists(st.integers(0, 1000), unique=True, max_size=8), st.integers(0, 4), st.integers(0, 300))
def test_wanted_slots_are_those_of_decodes_blocks_in_order(prefill, decode, block_ids, first_block, num_tokens):
    terms = group_terms("kv", prefill, decode)
    found = wanted_slots(want(block_ids, first_block, num_tokens), terms)
    first_slot, num_slots = slot_range(first_block, len(block_ids), num_tokens, terms)
    per_block = terms.decode_slots_per_block
    assert found.first_slot == first_slot
    assert all_of(found) == [block * per_block + i for block in block_ids for i in range(per_block)][:num_slots]
    assert found.highest_block == max(block_ids, default=-1)


def test_a_block_that_only_the_cut_off_end_names_is_still_checked():
    """The bound is that of every block that was named, whether or not a token of it is wanted."""
    found = wanted_slots(want([3, 90], num_tokens=16), group_terms("kv", 16, 16))
    assert all_of(found) == [3]
    assert found.highest_block == 90


def test_where_blocks_are_slots_nothing_is_copied_twice():
    ids = np.array([5, 1, 9])
    assert slots_of(ids, 1) is ids


@pytest.mark.parametrize(
    ("packed", "error", "code", "what"),
    [
        (b"\0\0\0", RemoteProtocolError, FailureCode.malformed, "3 bytes"),
        (b"\xff\xff\xff\xff", Failure, FailureCode.bad_blocks, str(2**32 - 1)),
        (wire.pack_block_ids(np.array([2**31 - 1])), Failure, FailureCode.bad_blocks, "2147483647; .* 0 to 2147483646"),
        (wire.pack_block_ids(np.array([7, 8, 7])), Failure, FailureCode.bad_blocks, "7 twice"),
        (wire.pack_block_ids(np.array([*range(200), 13])), Failure, FailureCode.bad_blocks, "13 twice"),
    ],
    ids=["torn", "huge", "one too many", "twice", "twice in a long list"],
)
def test_rule19_impossible_blocks_are_refused(packed, error, code, what):
    with pytest.raises(error, match=what) as caught:
        wanted_slots(wire.Want("kv", 0, packed), group_terms("kv", 16, 32))
    assert caught.value.code == code


def test_the_largest_block_of_the_largest_cache_has_its_slots():
    largest = 2**31 - 2
    found = wanted_slots(want([largest]), group_terms("kv", 1, 16))
    assert all_of(found) == [16 * largest + i for i in range(16)]
