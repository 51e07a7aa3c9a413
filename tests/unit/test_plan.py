"""kvpush.plan: every byte of a block goes where it belongs, whatever the two memories look like."""

from __future__ import annotations

import collections
import ctypes

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memories import BITS, memories, random_arena

from kvpush.blocks import MAX_SLOTS_PER_BLOCK
from kvpush.errors import ConfigurationError, Failure, FailureCode, Incompatible, UsageError
from kvpush.layout import CacheGeometry, KVCacheSpec, KVGroup, LayerGeometry, geometry_of, memory_ranges
from kvpush.parallel import Share
from kvpush.plan import MIN_TILE_BYTES, check_writable, descriptors_after_merging, pair
from kvpush.rows import MAX_SEGMENTS

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


@st.composite
def pushes(draw):
    axes = draw(st.sampled_from(["BND", "BHND", "BKND", "BKHND"]))
    sizes = {"K": 2, "H": draw(st.integers(1, 3)), "N": draw(st.integers(1, 3)), "D": draw(st.integers(1, 4))}
    dtype = draw(st.sampled_from(DTYPES))
    names = [f"layers.{i}" for i in range(draw(st.integers(1, 3)))]
    local_blocks, remote_blocks = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return (
        draw(memories(axes, sizes, dtype, names, local_blocks)),
        draw(memories(axes, sizes, dtype, names, remote_blocks)),
        *draw(grants(local_blocks, remote_blocks)),
        draw(st.integers(0, 2**31)),
    )


@st.composite
def grants(draw, local_blocks, remote_blocks):
    remote_ids = draw(st.permutations(range(remote_blocks)))[: draw(st.integers(0, remote_blocks))]
    local = st.lists(st.integers(0, local_blocks - 1), min_size=len(remote_ids), max_size=len(remote_ids))
    return draw(local), list(remote_ids)


def segments(rows, indices):
    """What NIXL makes of rows and indices: (address, length) of each."""
    every = [
        (address + i * stride, length) for address, length, _, stride, count in rows.tolist() for i in range(count)
    ]
    return [every[index] for index in indices.tolist()]


def slots(*ids):
    return np.array(ids, dtype=np.int64)


def write(plan, local_ids, remote_ids):
    """Carry a WRITE out and return what it touched."""
    (group,) = plan.groups
    local_indices, remote_indices = group.indices(range(group.num_layers), slots(*local_ids), slots(*remote_ids))
    assert local_indices.dtype == remote_indices.dtype == np.int32
    assert local_indices.flags.c_contiguous and remote_indices.flags.c_contiguous
    read = segments(plan.local_rows, local_indices)
    written = segments(plan.remote_rows, remote_indices)
    for (source, length), (target, target_length) in zip(read, written, strict=True):
        assert length == target_length
        ctypes.memmove(target, source, length)
    return read, written


def assert_registered(touched, geometry):
    ranges = memory_ranges(geometry)
    for address, length in touched:
        holders = [r for r in ranges if r.address <= address and address + length <= r.address + r.length_bytes]
        assert len(holders) == 1


def block_bits(tensor, dims, block_id, axes):
    """One block's elements as integers, axes in the order of ``axes``."""
    block = tensor.view(BITS[tensor.itemsize]).select(dims.index("B"), block_id)
    order = dims.replace("B", "")
    return block.permute([order.index(axis) for axis in axes])


@settings(max_examples=200, deadline=None)
@given(pushes())
def test_every_granted_byte_is_written_once_and_nothing_else(push):
    local, remote, local_ids, remote_ids, seed = push
    source_arena = random_arena(local.arena_bytes(), seed)
    target_arena = random_arena(remote.arena_bytes(), seed + 1)
    source, target = local.tensors(source_arena), remote.tensors(target_arena)
    ours, theirs = (
        geometry_of(source, KVCacheSpec(dims=local.dims)),
        geometry_of(target, KVCacheSpec(dims=remote.dims)),
    )

    # The oracle: torch, by the axes' names, on a copy of the target's memory.
    expected_arena, granted_arena = target_arena.clone(), torch.zeros_like(target_arena)
    expected, granted = remote.tensors(expected_arena), remote.tensors(granted_arena)
    axes = local.dims.replace("B", "")
    for name in source:
        for local_id, remote_id in zip(local_ids, remote_ids, strict=True):
            block_bits(expected[name], remote.dims, remote_id, axes).copy_(
                block_bits(source[name], local.dims, local_id, axes)
            )
            block_bits(granted[name], remote.dims, remote_id, axes).fill_(-1 if local.dtype.itemsize > 1 else 255)
    untouched = source_arena.clone()

    plan = pair(ours, theirs, min_tile_bytes=1)
    read, written = write(plan, local_ids, remote_ids)

    assert torch.equal(target_arena, expected_arena)
    assert torch.equal(source_arena, untouched)
    hits = np.zeros(target_arena.numel(), dtype=np.int64)
    for address, length in written:
        start = address - target_arena.data_ptr()
        hits[start : start + length] += 1
    assert np.array_equal(hits, granted_arena.numpy() // 255)
    assert_registered(read, ours)
    assert_registered(written, theirs)
    assert sum(length for _, length in written) == ours.groups[0].block_len_bytes * len(remote_ids)


def test_the_property_above_meets_every_form_of_memory():
    """A vacuous strategy would pass for ever: count what it draws."""
    met = collections.Counter()

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(pushes())
    def draw(push):
        local, remote, _, remote_ids, _ = push
        met["shared storage"] += any(s.sizes["L"] > 1 for s in remote.storages)
        met["gaps"] += any(s.before["B"] + s.after["N"] for s in remote.storages)
        met["other dims"] += local.dims != remote.dims
        met["other numbers of blocks"] += local.storages[0].sizes["B"] != remote.storages[0].sizes["B"]
        met["several blocks"] += len(remote_ids) > 1
        met["other order of layers"] += local.names != remote.names

    draw()
    assert all(met[form] >= 20 for form in met) and len(met) == 6, met


# --- how a block is cut ----------------------------------------------------------------------------------------------


def caches(dims, memory_order=None, num_blocks=5, layers=2, dtype=torch.bfloat16, **sizes):
    """Tensors with axes ``dims`` whose memory runs in ``memory_order``, outermost first."""
    sizes = {"B": num_blocks, "K": 2, "H": 2, "N": 4, "D": 8, "S": 8} | sizes
    memory_order = memory_order or dims
    order = [memory_order.index(axis) for axis in dims]
    return {
        f"layers.{i}": torch.zeros([sizes[axis] for axis in memory_order], dtype=dtype).permute(order)
        for i in range(layers)
    }


def geometry(dims, memory_order=None, **options):
    tensors = caches(dims, memory_order, **options)
    return geometry_of(tensors, KVCacheSpec(dims=dims))


BLOCK = 2 * 2 * 4 * 8 * 2


@pytest.mark.parametrize(
    ("local", "remote", "rows_a_layer", "tile_bytes"),
    [
        ("BKHND", "BKHND", 1, BLOCK),
        ("BKNHD", "KBNHD", 2, BLOCK // 2),
        ("KBNHD", "BKNHD", 2, BLOCK // 2),
        ("KBNHD", "KBNHD", 2, BLOCK // 2),
        ("KHBND", "BKHND", 4, BLOCK // 4),
        ("BHND", "BHND", 1, BLOCK // 2),
        ("BND", "BND", 1, BLOCK // 4),
        ("NBD", "NBD", 4, 16),
    ],
)
def test_a_block_is_cut_as_little_as_both_sides_allow(local, remote, rows_a_layer, tile_bytes):
    plan = pair(geometry(local), geometry(remote, num_blocks=3), min_tile_bytes=1)
    num_rows = 2 * rows_a_layer
    assert plan.local_rows.shape == plan.remote_rows.shape == (num_rows, 5)
    assert set(plan.local_rows[:, 1].tolist()) == set(plan.remote_rows[:, 1].tolist()) == {tile_bytes}
    assert plan.groups[0].slot_len_bytes(range(2)) == 2 * rows_a_layer * tile_bytes
    assert plan.groups[0].slot_len_bytes(range(1)) == rows_a_layer * tile_bytes
    assert set(plan.local_rows[:, 4].tolist()) == {5} and set(plan.remote_rows[:, 4].tolist()) == {3}


def test_order_in_memory_counts_and_order_of_dims_does_not():
    same_memory = pair(geometry("BKHND"), geometry("DNHKB", "BKHND"))
    assert len(same_memory.local_rows) == 2


def test_rows_name_address_length_device_stride_and_count():
    tensors = caches("KBNHD", layers=1)
    (tensor,) = tensors.values()
    plan = pair(geometry_of(tensors, KVCacheSpec(dims="KBNHD")), geometry("BKNHD", layers=1))
    half = BLOCK // 2
    assert plan.local_rows.dtype == np.uint64 and plan.local_rows.flags.c_contiguous
    assert plan.local_rows.tolist() == [[tensor[k].data_ptr(), half, 0, half, 5] for k in (0, 1)]


def test_a_single_block_has_a_stride_that_nixl_accepts():
    plan = pair(geometry("BKHND", num_blocks=1), geometry("BKHND"))
    assert plan.local_rows[0].tolist()[1:] == [BLOCK, 0, BLOCK, 1]


def test_heads_and_tokens_swapped_in_memory_are_refused_while_the_pieces_are_tiny():
    ours, theirs = geometry("BKHND"), geometry("BKHND", "BKNHD")
    with pytest.raises(Incompatible, match=f"only 16 bytes .* at least {MIN_TILE_BYTES} are needed") as caught:
        pair(ours, theirs)
    assert "BKHND (H=2, N=4, D=8) here, BKNHD (N=4, H=2, D=8) at the peer" in caught.value.reason
    assert len(pair(ours, theirs, min_tile_bytes=16).local_rows) == 2 * 2 * 2 * 4
    assert len(pair(geometry("BKHND", D=512), geometry("BKHND", "BKNHD", D=512)).local_rows) == 2 * 2 * 2 * 4


@pytest.mark.parametrize("dims", ["BND", "KBND", "BKND"])
def test_tiny_blocks_that_are_whole_are_no_fault(dims):
    pair(geometry(dims, N=1, D=1), geometry(dims, N=1, D=1))


def shared(size, rank=0):
    return Share(tp_rank=rank, tp_size=size)


@pytest.mark.parametrize(
    ("ours", "theirs", "named"),
    [
        (geometry("BKHND", D=8), geometry("BKHND", D=16), ["head size 8 here, 16 at the peer"]),
        (geometry("BKHND", H=2), geometry("BKHND", H=1), ["KV heads of the model 2 here, 1 at the peer"]),
        (geometry("BKHND"), geometry("BHND"), ["'BKHND' here, 'BHND' at the peer", "not supported"]),
        (geometry("BKHND"), geometry("BKND"), ["'BKHND' here, 'BKND' at the peer", "the axes differ"]),
        (geometry("BND"), geometry("BND", dtype=torch.float16), ["dtype bfloat16 here, float16 at the peer"]),
        (geometry("BS", S=8), geometry("BS", S=9), ["state size 8 here, 9 at the peer"]),
        (geometry("BS"), geometry("BND"), ["'BS' here, 'BND' at the peer"]),
    ],
)
def test_a10_what_does_not_fit_is_refused_with_both_values(ours, theirs, named):
    with pytest.raises(Incompatible) as caught:
        pair(ours, theirs, min_tile_bytes=1)
    assert caught.value.code is FailureCode.incompatible
    assert all(text in caught.value.reason for text in ["group 'kv', layer 'layers.0'", *named]), caught.value.reason


def with_total(found, total):
    return msgspec.structs.replace(
        found, groups=tuple(msgspec.structs.replace(group, total_kv_heads=total) for group in found.groups)
    )


@pytest.mark.parametrize(
    ("ours", "our_share", "theirs", "their_share", "named"),
    [
        (with_total(geometry("BHND", H=2), 4), shared(1), with_total(geometry("BHND", H=4), 4), shared(1),
         ["here: 2 heads in the tensor, 4 are the share of tp_rank 0 of 1 in 4"]),
        (with_total(geometry("BHND", H=4), 4), shared(1), with_total(geometry("BHND", H=4), 4), shared(2, 1),
         ["at the peer: 4 heads in the tensor, 2 are the share of tp_rank 1 of 2 in 4"]),
        (with_total(geometry("BHND", H=4), 4), shared(1), with_total(geometry("BHND", H=1), 4), shared(3),
         ["4 KV heads cannot be spread over 3 tensor-parallel ranks"]),
        (geometry("BS"), shared(2), geometry("BS"), shared(1), ["opaque state", "tp_size 2", "1 on the other"]),
    ],
)  # fmt: skip
def test_d10_shares_that_do_not_fit_are_refused(ours, our_share, theirs, their_share, named):
    with pytest.raises(Incompatible) as caught:
        pair(ours, theirs, local_share=our_share, remote_share=their_share, min_tile_bytes=1)
    assert all(text in caught.value.reason for text in named), caught.value.reason


@pytest.mark.parametrize("remote_dims", ["BKNHD", "KBNHD"])
def test_d7_different_numbers_of_blocks(remote_dims):
    source = caches("KBNHD", num_blocks=111)
    for name, tensor in source.items():
        tensor[:, 110] = 1 + int(name[-1])
    ours = geometry_of(source, KVCacheSpec(dims="KBNHD"))
    for num_blocks, block_id in ((16, 15), (500, 499)):
        target = caches(remote_dims, num_blocks=num_blocks)
        plan = pair(ours, geometry_of(target, KVCacheSpec(dims=remote_dims)))
        write(plan, [110], [block_id])
        for name, tensor in target.items():
            blocks = tensor.movedim(remote_dims.index("B"), 0)
            assert (blocks[block_id] == 1 + int(name[-1])).all()
            assert not blocks[:block_id].any() and not blocks[block_id + 1 :].any()


def indices_of(plan, layers, local_ids, remote_ids, group=0):
    return [found.tolist() for found in plan.groups[group].indices(layers, slots(*local_ids), slots(*remote_ids))]


def test_indices_run_row_by_row():
    plan = pair(geometry("KBNHD", layers=1), geometry("BKNHD", layers=1, num_blocks=9))
    assert indices_of(plan, range(1), [4, 0], [8, 2]) == [[4, 0, 5 + 4, 5 + 0], [8, 2, 9 + 8, 9 + 2]]
    assert indices_of(plan, range(1), [], []) == [[], []]


def test_layers_are_asked_for_in_the_local_order_and_those_of_one_side_are_left_out():
    ours, theirs = caches("BND", layers=4), caches("BND", layers=4)
    del ours["layers.1"]
    theirs = {name: theirs[name] for name in ("layers.3", "layers.1", "layers.0")}
    plan = pair(geometry_of(ours, KVCacheSpec("BND")), geometry_of(theirs, KVCacheSpec("BND")))
    (group,) = plan.groups
    assert group.num_layers == 3 and len(plan.local_rows) == len(plan.remote_rows) == 2
    block = 4 * 8 * 2
    assert [group.slot_len_bytes(range(i, i + 1)) for i in range(3)] == [block, 0, block]
    assert group.slot_len_bytes(range(3)) == group.slot_len_bytes(range(2, 3)) * 2
    assert indices_of(plan, range(1, 2), [2], [3]) == [[], []]
    for layer, name in ((0, "layers.0"), (2, "layers.3")):
        local, remote = group.indices(range(layer, layer + 1), slots(2), slots(3))
        assert segments(plan.local_rows, local) == [(ours[name][2].data_ptr(), block)]
        assert segments(plan.remote_rows, remote) == [(theirs[name][3].data_ptr(), block)]


@pytest.mark.parametrize("layers", [range(3), range(-1, 1), range(0, 2, 2), range(2, 1)])
def test_layers_that_are_not_there_are_the_caller_s_mistake(layers):
    plan = pair(geometry("BND"), geometry("BND"))
    with pytest.raises(UsageError, match="not some of range"):
        plan.groups[0].indices(layers, slots(0), slots(0))
    with pytest.raises(UsageError, match="not some of range"):
        plan.groups[0].slot_len_bytes(layers)


def test_a_pair_with_nothing_to_write_has_no_rows_and_still_knows_slots():
    ours, theirs = caches("BND", layers=1, N=4), caches("BND", layers=3, N=6, num_blocks=7)
    del theirs["layers.0"]
    plan = pair(geometry_of(ours, KVCacheSpec("BND")), geometry_of(theirs, KVCacheSpec("BND")))
    assert plan.writes_nothing and plan.local_rows.shape == plan.remote_rows.shape == (0, 5)
    (group,) = plan.groups
    assert (group.local_slots_per_block, group.remote_slots_per_block, plan.remote_num_blocks(0)) == (2, 3, 7)
    assert group.slot_len_bytes(range(1)) == 0 and indices_of(plan, range(1), [0, 1], [0, 1]) == [[], []]


def two_groups(names=("full", "window"), **options):
    tensors = caches("BKHND", layers=3, **options)
    one, *others = tensors
    spec = KVCacheSpec("BKHND", groups=[KVGroup(names[0], [one]), KVGroup(names[1], others)])
    return geometry_of(tensors, spec)


def test_groups_are_matched_by_name_and_numbered_by_the_local_order():
    ours, theirs = two_groups(num_blocks=5), two_groups(num_blocks=9)
    swapped = msgspec.structs.replace(theirs, groups=theirs.groups[::-1])
    plan = pair(ours, swapped)
    assert [group.name for group in plan.groups] == ["full", "window"]
    assert [group.num_layers for group in plan.groups] == [1, 2] and plan.remote_num_blocks(1) == 9
    assert len(plan.local_rows) == 3
    assert indices_of(plan, range(1), [1], [2], group=0) == [[1], [2]]
    assert indices_of(plan, range(2), [1], [2], group=1) == [[5 + 1, 10 + 1], [9 + 2, 18 + 2]]


def test_a_group_that_only_one_side_has_is_left_out():
    plan = pair(two_groups(), two_groups(names=("full", "other")))
    lone = plan.groups[1]
    assert lone.slot_len_bytes(range(2)) == 0 and plan.remote_num_blocks(1) == 0
    assert (lone.local_slots_per_block, lone.remote_slots_per_block) == (1, 1)
    assert len(plan.local_rows) == 1


# --- unequal blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "per_block"),
    [(16, 32, (1, 2)), (64, 16, (4, 1)), (48, 32, (3, 2)), (16, 16, (1, 1)), (1, 64, (1, 64))],
)  # fmt: skip
def test_d9_blocks_of_unequal_sizes_meet_in_slots(ours, theirs, per_block):
    plan = pair(geometry("BND", N=ours), geometry("BND", N=theirs), min_tile_bytes=1)
    (group,) = plan.groups
    assert (group.local_slots_per_block, group.remote_slots_per_block) == per_block
    assert group.slot_len_bytes(range(2)) == 2 * (ours // per_block[0]) * 8 * 2


@pytest.mark.parametrize("dims", ["BND", "BHND", "KBHND", "KBNHD"])
def test_d9_a_logical_block_fills_the_kernel_blocks_it_consists_of(dims):
    source, target = caches(dims, N=8), caches(dims, N=4)
    for tensor in source.values():
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) % 251)
    plan = pair(*(geometry_of(t, KVCacheSpec(dims)) for t in (source, target)), min_tile_bytes=1)
    write(plan, [2 * 3, 2 * 3 + 1], [4, 1])  # block 3 here into blocks 4 and 1 there
    block, token = dims.index("B"), dims.replace("B", "").index("N")
    for name, tensor in target.items():
        halves = source[name].select(block, 3).split(4, dim=token)
        assert torch.equal(tensor.select(block, 4), halves[0]) and torch.equal(tensor.select(block, 1), halves[1])
        assert not any(tensor.select(block, other).any() for other in (0, 2, 3))


def test_d9_slots_smaller_than_either_block_count_as_cut_finely():
    ours, theirs = geometry("BND", N=6, D=64), geometry("BND", N=4, D=64)
    with pytest.raises(Incompatible, match="only 256 bytes .* 2 tokens in common"):
        pair(ours, theirs)
    pair(geometry("BND", N=2, D=64), theirs)  # a whole block of one side


# --- heads -----------------------------------------------------------------------------------------------------------


def of_total(dims, heads, total, **options):
    return with_total(geometry(dims, H=heads, **options), total)


def test_d10_heads_outside_tokens_go_in_one_piece_and_inside_token_by_token():
    whole, half = of_total("BKHND", 4, 4, layers=1), of_total("BKHND", 2, 4, layers=1)
    plan = pair(half, whole, local_share=shared(2, 1), remote_share=shared(1))
    assert [row[1] for row in plan.local_rows.tolist()] == [2 * 4 * 8 * 2] * 2
    whole, half = of_total("BKNHD", 4, 4, layers=1, D=256), of_total("BKNHD", 2, 4, layers=1, D=256)
    plan = pair(half, whole, local_share=shared(2, 1), remote_share=shared(1))
    assert [row[1] for row in plan.local_rows.tolist()] == [2 * 256 * 2] * 2 * 4


def test_d10_tiles_too_small_are_refused_with_sizes_layouts_and_the_setting():
    whole, one = of_total("BKNHD", 8, 8, N=16, D=128), of_total("BKNHD", 1, 8, N=16, D=128)
    with pytest.raises(Incompatible) as caught:
        pair(one, whole, local_share=shared(8, 3), remote_share=shared(1))
    for text in (
        "group 'kv', layer 'layers.0': only 256 bytes at a time",
        "at least 1024 are needed",
        "BKNHD (N=16, H=1, D=128) here",
        "BKNHD (N=16, H=8, D=128) at the peer",
        "min_tile_bytes=256 permits it",
    ):
        assert text in caught.value.reason, caught.value.reason
    pair(one, whole, local_share=shared(8, 3), remote_share=shared(1), min_tile_bytes=256)


# --- the fewest descriptors ------------------------------------------------------------------------------------------


def page_of_layers(num_blocks=12, layers=6, order=None):
    """One storage with all layers of a block side by side."""
    storage = torch.zeros(num_blocks, layers, 2, 2, 4, 8, dtype=torch.bfloat16)
    names = [f"layers.{i}" for i in order or range(layers)]
    return storage, geometry_of({name: storage[:, i] for i, name in enumerate(names)}, KVCacheSpec("BKHND"))


def count(plan, layers, local_ids, remote_ids):
    found = plan.groups[0].indices(layers, slots(*local_ids), slots(*remote_ids))
    return len(found[0]), descriptors_after_merging(plan, *found)


def test_layers_side_by_side_on_both_sides_are_one_row():
    (kept, ours), (also_kept, theirs) = page_of_layers(), page_of_layers(num_blocks=20)
    plan = pair(ours, theirs)
    assert len(plan.local_rows) == 6 + 1
    assert plan.local_rows[-1].tolist() == [kept.data_ptr(), 6 * BLOCK, 0, 6 * BLOCK, 12]
    assert count(plan, range(6), [3, 7, 5], [1, 9, 4]) == (3, 3)
    assert count(plan, range(6), [3, 4, 5], [7, 8, 9]) == (3, 1)  # blocks side by side: NIXL merges them
    assert count(plan, range(1, 4), [3, 7], [1, 9]) == (6, 6)  # some of the layers: no row, so NIXL does not merge them
    assert count(plan, range(2, 4), [3, 7], [1, 9]) == (4, 4)
    assert count(plan, range(2, 3), [3, 4], [7, 8]) == (2, 2)
    assert also_kept is not None


def test_layers_in_another_order_at_the_peer_are_merged_only_where_both_agree():
    (kept, ours), (also_kept, theirs) = page_of_layers(), page_of_layers(order=[2, 3, 0, 1, 5, 4])
    plan = pair(ours, theirs)
    assert sorted(row[1] // BLOCK for row in plan.local_rows[6:].tolist()) == [1, 1, 2, 2]
    assert count(plan, range(6), [3], [1]) == (4, 4)
    assert kept is not None and also_kept is not None


def test_layers_that_are_all_the_other_side_has_are_merged_although_there_are_more_here():
    (kept, ours), (also_kept, theirs) = page_of_layers(), page_of_layers(layers=3)
    plan = pair(ours, theirs)
    assert count(plan, range(6), [3, 7], [1, 9]) == count(plan, range(3), [3, 7], [1, 9]) == (2, 2)
    assert count(plan, range(4), [3, 7], [1, 9]) == (2, 2)
    assert kept is not None and also_kept is not None


@pytest.mark.parametrize("uneven_side", ["local", "remote"])
def test_layers_that_touch_in_one_block_only_are_not_merged(uneven_side):
    """Layer 0 in blocks 0 and 2 of a storage, layer 1 in 1 and 4: neighbours first, apart later."""
    items = torch.zeros(5 * 32, dtype=torch.int8)
    sizes, inner = (2, 4, 8), (8, 1)
    uneven = {"a": items.as_strided(sizes, (64, *inner)), "b": items.as_strided(sizes, (96, *inner), 32)}
    even = {"a": items.as_strided(sizes, (64, *inner)), "b": items.as_strided(sizes, (64, *inner), 32)}
    one, other = (geometry_of(tensors, KVCacheSpec("BND")) for tensors in (uneven, even))
    assert len(pair(other, other).local_rows) == 2 + 1
    assert len(pair(*((one, other) if uneven_side == "local" else (other, one))).local_rows) == 2


@pytest.mark.parametrize("is_ours", [False, True])
def test_layers_that_touch_in_the_first_slot_of_a_block_only_are_not_merged(is_ours):
    """Two slots a block: 32 bytes of layer "a", then 32 of layer "b", and the second ones elsewhere."""
    items = torch.zeros(512, dtype=torch.int8)
    whole = {name: items.as_strided((4, 1, 32), (64, 32, 1), 32 * i) for i, name in enumerate("ab")}
    for second_step, num_rows in ((64, 2 + 1), (96, 2)):
        halves = {
            "a": items.as_strided((2, 2, 32), (256, 64, 1)),
            "b": items.as_strided((2, 2, 32), (256, second_step, 1), 32),
        }
        sides = [geometry_of(tensors, KVCacheSpec("BND")) for tensors in (whole, halves)]
        plan = pair(*(reversed(sides) if is_ours else sides), min_tile_bytes=1)
        assert len(plan.remote_rows if is_ours else plan.local_rows) == num_rows


@pytest.mark.parametrize("axis", ["B", "N"])
@pytest.mark.parametrize("side", [0, 1])
def test_layers_are_merged_whatever_the_strides_of_axes_of_size_one(axis, side):
    """Such a stride leads nowhere, and a peer may say what it likes."""
    storage = torch.zeros(1, 2, 2, 2, 1, 8, dtype=torch.bfloat16)
    both = [geometry_of({name: storage[:, i] for i, name in enumerate("ab")}, KVCacheSpec("BKHND"))] * 2
    (group,) = both[side].groups
    first, second = group.layers
    strides = list(second.strides_bytes)
    strides["BKHND".index(axis)] = 4096
    odd = msgspec.structs.replace(second, strides_bytes=tuple(strides))
    both[side] = msgspec.structs.replace(both[side], groups=(msgspec.structs.replace(group, layers=(first, odd)),))
    assert len(pair(*both).local_rows) == 2 + 1


def test_the_slots_of_a_single_block_are_one_row_whatever_its_stride():
    """Keys and values lie between one block and the next, and there is no next one."""
    plan = pair(geometry("BKND", N=8, num_blocks=1), geometry("BKND", N=4), min_tile_bytes=1)
    assert plan.local_rows[:, 4].tolist() == [2] * 4
    assert pair(geometry("BKND", N=8), geometry("BKND", N=4), min_tile_bytes=1).local_rows[:, 4].tolist() == [5] * 8


def test_layers_apart_are_not_merged():
    assert len(pair(geometry("BKHND"), page_of_layers(layers=2)[1]).local_rows) == 2
    assert len(pair(page_of_layers(layers=2)[1], geometry("BKHND")).local_rows) == 2


@pytest.mark.parametrize(("dims", "rows_a_layer"), [("BKHND", 1), ("KBNHD", 2), ("BND", 1)])
def test_runs_of_blocks_are_left_to_nixl_and_end_up_as_one_descriptor_a_row(dims, rows_a_layer):
    plan = pair(geometry(dims, num_blocks=64), geometry(dims, num_blocks=64))
    assert count(plan, range(2), range(10, 42), range(20, 52)) == (2 * rows_a_layer * 32, 2 * rows_a_layer)
    assert count(plan, range(2), range(0, 64, 2), range(32)) == (2 * rows_a_layer * 32, 2 * rows_a_layer * 32)
    assert count(plan, range(1), range(10, 42), range(20, 52)) == (rows_a_layer * 32, rows_a_layer)


@pytest.mark.parametrize("dims", ["BND", "KBNHD"])
def test_d9_the_slots_of_a_block_end_up_as_one_descriptor_where_memory_allows(dims):
    plan = pair(geometry(dims, N=16), geometry(dims, N=4, num_blocks=40), min_tile_bytes=1)
    pieces = 2 * (2 if "K" in dims else 1)
    assert count(plan, range(2), range(4, 8), [30, 31, 32, 33]) == (4 * pieces, pieces)
    assert count(plan, range(2), range(4, 8), [30, 31, 9, 10]) == (4 * pieces, 2 * pieces)


def test_nothing_to_write_is_no_descriptor():
    assert count(pair(geometry("BND"), geometry("BND")), range(2), [], []) == (0, 0)


# --- limits ----------------------------------------------------------------------------------------------------------


def vast(num_blocks, tokens=1, layers=1):
    """A geometry that no machine has."""
    shape, strides = (num_blocks, tokens, 1), (tokens, 1, 0)
    span = num_blocks * tokens
    found = tuple(LayerGeometry(f"l{i}", shape, strides, 2**20 + i * span, 0) for i in range(layers))
    group = geometry("BND").groups[0]
    group = msgspec.structs.replace(group, dtype="int8", itemsize_bytes=1, num_blocks=num_blocks, layers=found)
    return CacheGeometry(geometry("BND").memory, (group,))


def test_the_largest_index_fits_and_one_more_row_is_refused():
    plan = pair(vast(2**20, layers=2**11 - 1), vast(1, layers=2**11 - 1))
    local, _ = plan.groups[0].indices(range(2**11 - 1), slots(2**20 - 1), slots(0))
    assert local[-1] == (2**11 - 1) * 2**20 - 1
    for ours, theirs in (
        (vast(2**20, layers=2**11), vast(1, layers=2**11)),
        (vast(1, layers=2**11), vast(2**20, layers=2**11)),
        (vast(2**20, tokens=2, layers=2**10), vast(1, layers=2**10)),  # every block in two parts
        (vast(1, layers=2**10), vast(2**20, tokens=2, layers=2**10)),
    ):
        with pytest.raises(Failure, match="more than NIXL can number") as caught:
            pair(ours, theirs)
        assert caught.value.code is FailureCode.bad_blocks


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_largest_number_of_segments_fits_and_one_more_does_not(is_ours):
    def both(num_blocks):
        sides = vast(num_blocks), vast(1)
        return pair(*(sides if is_ours else reversed(sides)))

    both(MAX_SEGMENTS)
    with pytest.raises(Failure, match="more than NIXL can number"):
        both(MAX_SEGMENTS + 1)


@pytest.mark.parametrize("is_ours", [True, False])
def test_layers_are_merged_only_while_there_is_room_for_more_rows_on_both_sides(monkeypatch, is_ours):
    """Four layers, one when merged; on the side whose blocks are cut into two slots, each has a row of its own."""
    items = torch.zeros(2**16, dtype=torch.int8)
    whole = {name: items.as_strided((4, 1, 32), (128, 32, 1), 32 * i) for i, name in enumerate("abcd")}
    halves = {name: items.as_strided((2, 2, 32), (512, 128, 1), 32 * i) for i, name in enumerate("abcd")}
    sides = [geometry_of(tensors, KVCacheSpec("BND")) for tensors in (whole, halves)]
    sides = sides[::-1] if is_ours else sides

    def num_rows():
        plan = pair(*sides, min_tile_bytes=1)
        return len(plan.local_rows), len(plan.remote_rows)

    few, many = 4, 4 * 2
    assert num_rows() == ((many + 2, few + 1) if is_ours else (few + 1, many + 2))
    monkeypatch.setattr("kvpush.plan._MAX_ROWS", many + 2)
    assert num_rows() == ((many + 2, few + 1) if is_ours else (few + 1, many + 2))
    monkeypatch.setattr("kvpush.plan._MAX_ROWS", many + 1)
    assert num_rows() == ((many, few) if is_ours else (few, many))
    monkeypatch.setattr("kvpush.plan._MAX_ROWS", many)
    assert num_rows() == ((many, few) if is_ours else (few, many))
    monkeypatch.setattr("kvpush.plan._MAX_ROWS", many - 1)
    with pytest.raises(Failure, match=f"{'local' if is_ours else 'remote'} cache"):
        num_rows()


@pytest.mark.parametrize("tokens", [MAX_SLOTS_PER_BLOCK + 1, 2**31 - 1, 2**60])
def test_d9_a_peer_s_block_size_does_not_decide_how_many_slots_there_are(tokens):
    pair(vast(1), vast(1, tokens=MAX_SLOTS_PER_BLOCK))
    with pytest.raises(Incompatible, match=f"blocks of 1 tokens here, of {tokens} at the peer"):
        pair(vast(1), vast(1, tokens=tokens))


def test_rows_are_bounded():
    source, target = caches("NBD", N=1024, num_blocks=2, layers=17), caches("NBD", N=1024, num_blocks=2, layers=17)
    ours, theirs = (geometry_of(tensors, KVCacheSpec("NBD")) for tensors in (source, target))
    pair(ours, theirs, min_tile_bytes=16)
    many = [msgspec.structs.replace(ours.groups[0], name=f"g{i}") for i in range(61)]
    with pytest.raises(Failure, match="1048576 rows") as caught:
        pair(*(msgspec.structs.replace(side, groups=tuple(many)) for side in (ours, theirs)), min_tile_bytes=16)
    assert caught.value.code is FailureCode.bad_blocks


def test_rows_are_bounded_where_every_part_of_a_block_has_its_own():
    """The blocks of one side are apart, so that each of their 512 slots begins a row."""
    group = vast(2, tokens=MAX_SLOTS_PER_BLOCK, layers=1025).groups[0]
    apart = tuple(
        msgspec.structs.replace(each, strides_bytes=(2 * MAX_SLOTS_PER_BLOCK, 1, 0), address=2**20 + place * 4096)
        for place, each in enumerate(group.layers)
    )
    theirs = msgspec.structs.replace(group, layers=apart)
    ours = vast(1, layers=1025).groups[0]
    sides = CacheGeometry(geometry("BND").memory, (ours,)), CacheGeometry(geometry("BND").memory, (theirs,))
    assert len(pair(*sides, min_tile_bytes=1).remote_rows) == 1025 * MAX_SLOTS_PER_BLOCK
    twice = [
        msgspec.structs.replace(side, groups=tuple(msgspec.structs.replace(side.groups[0], name=n) for n in "ab"))
        for side in sides
    ]
    with pytest.raises(Failure, match="remote cache: .* 1048576 rows"):
        pair(*twice, min_tile_bytes=1)


def overlapping(geometry, offset_bytes):
    """The second layer begins so many bytes after the first, as no tensors of ours could."""
    first, second = geometry.groups[0].layers
    lying = msgspec.structs.replace(second, address=first.address + offset_bytes)
    return msgspec.structs.replace(
        geometry, groups=(msgspec.structs.replace(geometry.groups[0], layers=(first, lying)),)
    )


@pytest.mark.parametrize("num_blocks", [2, 5])
def test_a_peer_s_layers_that_share_bytes_make_no_longer_rows(num_blocks):
    """Block 0 of one is block 1 of the other."""
    kept, ours = page_of_layers(layers=2)
    theirs = overlapping(geometry("BKHND", layers=2, num_blocks=num_blocks), BLOCK)
    assert len(pair(ours, theirs).local_rows) == 2
    assert kept is not None


def test_a_peer_s_layers_that_share_bytes_in_a_single_block_make_no_longer_rows():
    """Slot 0 of one is slot 1 of the other."""
    items = torch.zeros(256, dtype=torch.int8)
    layers = {f"layers.{i}": items.as_strided((2, 1, 32), (64, 32, 1), 32 * i) for i in range(2)}
    ours = geometry_of(layers, KVCacheSpec("BND"))
    theirs = overlapping(geometry("BND", N=2, D=32, num_blocks=1, dtype=torch.int8), 32)
    assert len(pair(ours, theirs, min_tile_bytes=1).local_rows) == 2


# --- one side by itself ----------------------------------------------------------------------------------------------


def test_the_length_of_a_block_is_all_of_its_layers():
    def lengths_bytes(found):
        return [group.block_len_bytes for group in found.groups]

    assert lengths_bytes(geometry("BKHND", layers=3)) == [3 * BLOCK]
    assert lengths_bytes(two_groups()) == [BLOCK, 2 * BLOCK]
    assert lengths_bytes(geometry("BS", S=9)) == [2 * 9 * 2]


def test_a_cache_that_no_plan_could_serve_is_refused_here():
    with pytest.raises(ConfigurationError, match="too far apart"):
        check_writable(geometry("NBD"))
    check_writable(geometry("NBD"), min_tile_bytes=16)
    check_writable(of_total("BKNHD", 2, 8))
