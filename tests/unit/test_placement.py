"""Block lists as callers give them: by group, checked, and in units of the cache's tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpush.errors import ConfigurationError, UsageError
from kvpush.layout import KVCacheSpec, KVGroup, geometry_of
from kvpush.placement import MAX_POSITION, Placement

NUM_BLOCKS = 12


def make(*groups, num_blocks=NUM_BLOCKS, tokens=16, block_size_tokens=None):
    """A cache with one layer for each group; ``groups`` are (name, dims, tokens in a block, logical tokens)."""
    if not groups:
        spec = KVCacheSpec(dims="BND", model="m", block_size_tokens=block_size_tokens)
        tensors = {"layers.0": torch.zeros(num_blocks, tokens, 2)}
        return Placement(geometry_of(tensors, spec), spec)
    named, tensors = [], {}
    for name, dims, of_tensor, logical in groups:
        named.append(KVGroup(name, [f"{name}.0"], dims=dims, block_size_tokens=logical))
        tensors[f"{name}.0"] = torch.zeros([num_blocks, of_tensor, 2] if dims == "BND" else [num_blocks, 8])
    spec = KVCacheSpec(dims="BND", model="m", groups=named, block_size_tokens=block_size_tokens)
    return Placement(geometry_of(tensors, spec), spec)


HYBRID = (("full", "BND", 16, None), ("window", "BND", 8, None), ("state", "BS", 0, None))


def parsed(placement, block_ids, first_block=0, *, unique=False):
    """As plain values: {group name: (its number, first block, ids)}."""
    parts = placement.parse(block_ids, first_block, call="push('t')", unique=unique)
    assert all(part.end_block == part.first_block + len(part.block_ids) for part in parts)
    assert all(part.block_ids.dtype == np.int64 for part in parts)
    return {part.name: (part.group, part.first_block, part.block_ids.tolist()) for part in parts}


@pytest.mark.parametrize(
    ("block_ids", "first_block", "expected"),
    [
        ([3, 1, 2], 0, (0, 0, [3, 1, 2])),
        ((3, 1), 7, (0, 7, [3, 1])),
        (range(2, 5), np.int64(2), (0, 2, [2, 3, 4])),
        (np.array([4, 4], dtype=np.uint8), 0, (0, 0, [4, 4])),
        (torch.tensor([11]), 0, (0, 0, [11])),
        ([], 5, (0, 5, [])),
        ([0], MAX_POSITION - 1, (0, MAX_POSITION - 1, [0])),
        ({"kv": [3, 1]}, 2, (0, 2, [3, 1])),
        ({"kv": [3, 1]}, {"kv": 2}, (0, 2, [3, 1])),
        ({"kv": [3, 1]}, {}, (0, 0, [3, 1])),
    ],
)
def test_one_group_takes_a_plain_list_or_a_named_one(block_ids, first_block, expected):
    assert parsed(make(), block_ids, first_block) == {"kv": expected}


@pytest.mark.parametrize(
    ("block_ids", "first_block", "expected"),
    [
        ({}, 0, {}),
        ({"window": [5]}, 3, {"window": (1, 3, [5])}),
        ({"state": [1], "full": [2, 3]}, 4, {"state": (2, 4, [1]), "full": (0, 4, [2, 3])}),
        ({"full": [2], "window": [3]}, {"window": 9}, {"full": (0, 0, [2]), "window": (1, 9, [3])}),
        ({"full": [], "window": []}, {"full": 1}, {"full": (0, 1, []), "window": (1, 0, [])}),
        # the same number is another block in another group
        ({"full": [2], "window": [2]}, 0, {"full": (0, 0, [2]), "window": (1, 0, [2])}),
    ],
)
def test_several_groups_take_a_list_for_each(block_ids, first_block, expected):
    assert parsed(make(*HYBRID), block_ids, first_block, unique=True) == expected


BAD_IDS = [12, -1, 2**40, 1.5, True, "3", None]


@pytest.mark.parametrize("bad", BAD_IDS, ids=repr)
def test_a_bad_block_is_refused_by_name(bad):
    with pytest.raises(UsageError, match=r"push\('t'\): block_ids: "):
        parsed(make(), [3, bad])
    with pytest.raises(UsageError, match=r"push\('t'\): block_ids of group 'window': "):
        parsed(make(*HYBRID), {"full": [3], "window": [3, bad]})


@pytest.mark.parametrize("groups", [(), HYBRID], ids=["one", "three"])
@pytest.mark.parametrize(
    "bad", [-1, 1.0, "0", None, True, [0], MAX_POSITION, 2**70, np.float64(1), np.int64(-1)], ids=repr
)
def test_a_bad_position_is_refused_with_its_value(groups, bad):
    name = "full" if groups else "kv"
    for first_block in (bad, {name: bad}):
        with pytest.raises(UsageError, match="first_block") as caught:
            parsed(make(*groups), {name: [3]}, first_block)
        assert repr(bad) in str(caught.value)


def test_what_names_no_group_is_refused_with_those_that_there_are():
    with pytest.raises(UsageError, match=r"names the group 'ful'; this cache has 'full', 'window', 'state'"):
        parsed(make(*HYBRID), {"ful": [1]})
    with pytest.raises(UsageError, match=r"names the group 0; this cache has 'kv'"):
        parsed(make(), {0: [1]})
    with pytest.raises(UsageError, match=r"first_block names the group 'window', for which block_ids has no list"):
        parsed(make(*HYBRID), {"full": [1]}, {"full": 0, "window": 1})
    with pytest.raises(UsageError, match=r"has the groups 'full', 'window', 'state': give block_ids as"):
        parsed(make(*HYBRID), [1, 2])


@pytest.mark.parametrize("block_ids", [{"kv": 3}, {"kv": None}, {"kv": {"kv": [3]}}, 3, None, "34", b"34"], ids=repr)
def test_what_is_no_list_is_refused(block_ids):
    with pytest.raises(UsageError, match=r"push\('t'\): block_ids"):
        parsed(make(), block_ids)


def test_repeated_blocks_are_refused_where_they_must_be_unique():
    assert parsed(make(), [3, 3]) == {"kv": (0, 0, [3, 3])}
    with pytest.raises(UsageError, match=r"block_ids of group 'full': block 3 comes twice"):
        parsed(make(*HYBRID), {"full": [3, 3]}, unique=True)


# --- logical blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logical", "block_ids", "first_block", "expected"),
    [
        (16, [3], 2, (0, 2, [3])),
        (32, [3, 0], 2, (0, 4, [6, 7, 0, 1])),
        (64, [2], 1, (0, 4, [8, 9, 10, 11])),
        (192, [0], 0, (0, 0, list(range(12)))),
        (32, [], 3, (0, 6, [])),
    ],
)
def test_logical_blocks_are_spoken_of_and_those_of_the_tensors_passed_on(logical, block_ids, first_block, expected):
    placement = make(block_size_tokens=logical)
    assert parsed(placement, block_ids, first_block, unique=True) == {"kv": expected}
    parts = placement.parse(block_ids, first_block, call="push('t')", unique=True)
    assert placement.num_blocks(parts) == len(block_ids)


@given(st.integers(1, 5), st.lists(st.integers(0, 3), unique=True), st.integers(0, 9))
def test_token_for_token_it_is_the_same(ratio, block_ids, first_block):
    """Token ``t`` of the transfer is at the same place, whichever way the blocks are counted."""
    logical, kernel = 4 * ratio, 4
    placement = make(num_blocks=4 * ratio, tokens=kernel, block_size_tokens=logical)
    (part,) = placement.parse(block_ids, first_block, call="push('t')", unique=True)
    places = {
        part.first_block * kernel + i * kernel + token: block * kernel + token
        for i, block in enumerate(part.block_ids.tolist())
        for token in range(kernel)
    }
    assert places == {
        (first_block + i) * logical + token: block * logical + token
        for i, block in enumerate(block_ids)
        for token in range(logical)
    }


@pytest.mark.parametrize(("num_blocks", "logical", "last"), [(12, 32, 5), (13, 32, 5), (12, 64, 2)])
def test_only_whole_logical_blocks_are_blocks(num_blocks, logical, last):
    placement = make(num_blocks=num_blocks, block_size_tokens=logical)
    parsed(placement, [last])
    with pytest.raises(UsageError, match="is not one of"):
        parsed(placement, [last + 1])


def test_a_cache_of_less_than_one_logical_block_is_refused():
    with pytest.raises(ConfigurationError, match="3 blocks of 16 tokens"):
        make(num_blocks=3, block_size_tokens=64)


def test_positions_are_bounded_in_units_of_the_tensors():
    placement = make(block_size_tokens=64)
    assert parsed(placement, [0], MAX_POSITION // 4 - 1)["kv"][1] == 4 * (MAX_POSITION // 4 - 1)
    with pytest.raises(UsageError, match="first_block"):
        parsed(placement, [0], MAX_POSITION // 4)


def test_each_group_may_have_its_own_logical_block_and_opaque_state_has_none():
    groups = (("full", "BND", 16, 32), ("window", "BND", 8, None), ("state", "BS", 0, None))
    placement = make(*groups, num_blocks=16, block_size_tokens=64)
    block_ids = {"full": [1], "window": [1], "state": [1]}
    assert parsed(placement, block_ids, 1) == {
        "full": (0, 2, [2, 3]),
        "window": (1, 8, list(range(8, 16))),
        "state": (2, 1, [1]),
    }
    parts = placement.parse(block_ids, 1, call="push('t')", unique=True)
    assert placement.num_blocks(parts) == 3


@pytest.mark.parametrize("logical", [8, 17, 24, 1])
def test_a_logical_block_that_is_no_multiple_is_refused_with_both_sizes(logical):
    with pytest.raises(
        ConfigurationError, match=f"block_size_tokens={logical}: .* of group .kv. have blocks of 16 tokens"
    ):
        make(block_size_tokens=logical)


# --- the same again ---------------------------------------------------------------------------------------------------


def test_what_is_the_same_and_what_is_not():
    placement = make(*HYBRID)

    def part(block_ids, first_block=0):
        (found,) = placement.parse(block_ids, first_block, call="push('t')", unique=True)
        return found

    one = part({"full": [1, 2]})
    assert one.is_same(part({"full": (1, 2)}))
    assert one.is_same(part({"full": np.array([1, 2], dtype=np.int32)}))
    for other in (part({"full": [2, 1]}), part({"full": [1]}), part({"full": [1, 2]}, 1), part({"window": [1, 2]})):
        assert not one.is_same(other)


def test_the_callers_list_may_change_afterwards():
    placement, ids = make(), np.array([1, 2])
    (part,) = placement.parse(ids, 0, call="push('t')", unique=True)
    ids[0] = 9
    assert part.block_ids.tolist() == [1, 2]
