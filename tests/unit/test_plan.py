"""kvpush.plan: every byte of a block goes where it belongs, whatever the two memories look like."""

from __future__ import annotations

import collections
import ctypes
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.errors import Failure, FailureCode, Incompatible
from kvpush.layout import KVCacheSpec, geometry_of, memory_ranges
from kvpush.plan import MIN_TILE_BYTES, PairPlan, pair

# --- memories of every form ------------------------------------------------------------------------------------------

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
GUARD_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Storage:
    """One allocation: physical axes from outermost to innermost, each cut out of a longer one.

    ``L`` is the axis of the layers that share the allocation. ``before`` and ``after`` are elements left out at either
    end of an axis, so they are gaps that no write may touch.
    """

    order: tuple[str, ...]
    sizes: dict[str, int]
    before: dict[str, int]
    after: dict[str, int]

    def extent(self, axis):
        return self.before[axis] + self.sizes[axis] + self.after[axis]

    def num_items(self):
        return int(np.prod([self.extent(axis) for axis in self.order]))

    def views(self, items, dims):
        """The layers' tensors over ``items``, with the axes in the order of ``dims``."""
        whole = items.reshape([self.extent(axis) for axis in self.order])
        for position, axis in enumerate(self.order):
            whole = whole.narrow(position, self.before[axis], self.sizes[axis])
        return list(whole.permute([self.order.index(axis) for axis in ("L", *dims)]).unbind(0))


@dataclasses.dataclass(frozen=True)
class Memory:
    """One side: names in the order of its mapping, spread over storages in one arena."""

    dims: str
    dtype: torch.dtype
    names: tuple[str, ...]
    storages: tuple[Storage, ...]

    def arena_bytes(self):
        used = sum(s.num_items() * self.dtype.itemsize + GUARD_BYTES for s in self.storages)
        return GUARD_BYTES + -(-used // GUARD_BYTES) * GUARD_BYTES + GUARD_BYTES * len(self.storages)

    def tensors(self, arena):
        views, start = [], GUARD_BYTES
        for storage in self.storages:
            length = storage.num_items() * self.dtype.itemsize
            views += storage.views(arena[start : start + length].view(self.dtype), self.dims)
            start = -(-(start + length) // GUARD_BYTES) * GUARD_BYTES + GUARD_BYTES
        return dict(zip(self.names, views, strict=True))


@st.composite
def memories(draw, axes, sizes, dtype, names, num_blocks):
    sizes = sizes | {"B": num_blocks}
    groups, left = [], len(names)
    while left:
        groups.append(draw(st.integers(1, left)))
        left -= groups[-1]
    storages = []
    for group in groups:
        order = tuple(draw(st.permutations(("L", *axes))))
        margin = st.fixed_dictionaries({axis: st.sampled_from([0, 0, 0, 1]) for axis in order})
        storages.append(Storage(order, sizes | {"L": group}, draw(margin), draw(margin)))
    return Memory("".join(draw(st.permutations(axes))), dtype, tuple(draw(st.permutations(names))), tuple(storages))


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


def random_arena(num_bytes, seed):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8))


def segments(rows, indices):
    """What NIXL makes of rows and indices: (address, length) of each."""
    for index in indices.tolist():
        row, i = divmod(index, int(rows[0, 4]))
        address, length, _, stride, count = rows[row].tolist()
        assert i < count
        yield address + i * stride, length


def write(plan, local_ids, remote_ids):
    """Carry a WRITE out and return what it touched."""
    ids = (np.array(local_ids, dtype=np.int64), np.array(remote_ids, dtype=np.int64))
    local_indices, remote_indices = plan.local_indices(ids[0]), plan.remote_indices(ids[1])
    assert local_indices.dtype == remote_indices.dtype == np.int32
    assert local_indices.flags.c_contiguous and remote_indices.flags.c_contiguous
    read = list(segments(plan.local_rows, local_indices))
    written = list(segments(plan.remote_rows, remote_indices))
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


@settings(max_examples=400, deadline=None)
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
    assert sum(length for _, length in written) == plan.block_len_bytes * len(remote_ids)


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
    sizes = {"B": num_blocks, "K": 2, "H": 2, "N": 4, "D": 8} | sizes
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
    assert plan.local_rows.shape == plan.remote_rows.shape == (2 * rows_a_layer, 5)
    assert set(plan.local_rows[:, 1].tolist()) == set(plan.remote_rows[:, 1].tolist()) == {tile_bytes}
    assert plan.block_len_bytes == 2 * rows_a_layer * tile_bytes
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
    with pytest.raises(Incompatible, match=f"only 16 bytes .* at least {MIN_TILE_BYTES} are needed"):
        pair(ours, theirs)
    assert len(pair(ours, theirs, min_tile_bytes=16).local_rows) == 2 * 2 * 2 * 4
    assert len(pair(geometry("BKHND", D=512), geometry("BKHND", "BKNHD", D=512)).local_rows) == 2 * 2 * 2 * 4


@pytest.mark.parametrize("dims", ["BND", "KBND", "BKND"])
def test_tiny_blocks_that_are_whole_are_no_fault(dims):
    pair(geometry(dims, N=1, D=1), geometry(dims, N=1, D=1))


@pytest.mark.parametrize(
    ("ours", "theirs", "named"),
    [
        (geometry("BKHND", layers=2), geometry("BKHND", layers=3), ["2 here", "3 at the peer", "layers.2"]),
        (geometry("BKHND", layers=9), geometry("BKHND", layers=1), ["9 here", "1 at the peer", "and 4 more"]),
        (geometry("BKHND", N=4), geometry("BKHND", N=8), ["N=4", "N=8"]),
        (geometry("BKHND", H=2), geometry("BKHND", H=1), ["H=2", "H=1"]),
        (geometry("BKHND"), geometry("BHND"), ["K=2"]),
        (geometry("BND"), geometry("BND", dtype=torch.float16), ["bfloat16", "float16"]),
    ],
)
def test_a10_what_does_not_fit_is_refused_with_both_values(ours, theirs, named):
    with pytest.raises(Incompatible) as caught:
        pair(ours, theirs)
    assert caught.value.code is FailureCode.incompatible
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


def test_indices_run_row_by_row():
    plan = pair(geometry("KBNHD", layers=1), geometry("BKNHD", layers=1, num_blocks=9))
    ids = np.array([4, 0])
    assert plan.local_indices(ids).tolist() == [4, 0, 5 + 4, 5 + 0]
    assert plan.remote_indices(ids).tolist() == [4, 0, 9 + 4, 9 + 0]
    assert plan.local_indices(ids[:0]).tolist() == []


def test_the_largest_index_fits_and_one_more_row_is_refused():
    def plan(num_rows, num_blocks):
        rows = np.zeros((num_rows, 5), dtype=np.uint64)
        return PairPlan(rows, rows, num_blocks, 1, 0)

    widest = plan(2**11, 2**20)
    assert widest.local_indices(np.array([2**20 - 1]))[-1] == 2**31 - 1
    with pytest.raises(Failure, match="more than NIXL can number") as caught:
        plan(2**11 + 1, 2**20)
    assert caught.value.code is FailureCode.bad_blocks
