"""kvpush.layout: what tensors say about themselves, and what is believed of a peer."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush.errors import ConfigurationError, Failure, FailureCode, RemoteProtocolError
from kvpush.layout import (
    MAX_GEOMETRY_BYTES,
    CacheGeometry,
    GroupGeometry,
    KVCacheSpec,
    KVGroup,
    LayerGeometry,
    MemoryKind,
    MemoryRange,
    check_geometry,
    compare,
    decode_geometry,
    encode_geometry,
    fingerprint,
    geometry_of,
    memory_ranges,
    totals_of,
)
from kvpush.parallel import MAX_RANKS, NO_HEADS, PER_RANK, Share

SIZES = {"B": 5, "K": 2, "H": 3, "N": 4, "D": 8, "S": 7}


def tensor(dims="BKHND", dtype=torch.bfloat16, **sizes):
    return torch.zeros([(SIZES | sizes)[axis] for axis in dims], dtype=dtype)


def geometry(dims="BKHND", layers=("a", "b"), **options):
    return geometry_of({name: tensor(dims, **options) for name in layers}, KVCacheSpec(dims=dims))


# --- the spec --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dims", ["BND", "DNB", "BHND", "BKND", "BKHND", "BKNHD", "KBNHD", "KHBND", "DNHKB", "BS", "SB"]
)
def test_axes_may_come_in_any_order(dims):
    (group,) = geometry(dims).groups
    assert group.dims == dims and group.name == "kv"
    assert group.block_size_tokens == (1 if "S" in dims else 4) and group.is_opaque == ("S" in dims)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dims", ""),
        ("dims", "BKH"),
        ("dims", "KND"),
        ("dims", "BNDN"),
        ("dims", "BNDX"),
        ("dims", "bnd"),
        ("dims", "S"),
        ("dims", "BSD"),
        ("dims", "BNS"),
        ("dims", "BSH"),
        ("dims", None),
        ("dims", ("B", "N", "D")),
        ("model", None),
        ("model", b"m"),
        ("model", "\ud800"),
        ("model", "m" * 5000),
        ("tp_rank", -1),
        ("tp_rank", True),
        ("tp_rank", "0"),
        ("tp_rank", 0.0),
        ("tp_rank", 2),
        ("tp_size", 0),
        ("tp_size", None),
        ("tp_size", 2**31),
        ("tp_size", MAX_RANKS + 1),
        ("pp_size", MAX_RANKS + 1),
        ("pp_rank", 1),
        ("pp_rank", 1.5),
        ("pp_size", -3),
        ("pp_size", True),
        ("total_kv_heads", 0),
        ("total_kv_heads", False),
        ("total_kv_heads", "8"),
        ("groups", None),
        ("groups", "kv"),
        ("groups", KVGroup("a", ["b"])),
        ("groups_share_memory", 1),
    ],
)
def test_a_wrong_spec_is_refused_by_field_and_value(field, value):
    options = {"dims": "BKHND", "tp_size": 2} | {field: value}
    with pytest.raises(ConfigurationError) as caught:
        KVCacheSpec(**options)
    assert f"{field}=" in str(caught.value) and len(str(caught.value)) < 300


def test_a_rank_is_pipeline_then_tensor():
    spec = KVCacheSpec("BND", tp_rank=1, tp_size=4, pp_rank=2, pp_size=3)
    assert spec.rank == (2, 1) and spec.share == Share(pp_rank=2, pp_size=3, tp_rank=1, tp_size=4)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: KVGroup("", ["a"]), "name=''"),
        (lambda: KVGroup(None, ["a"]), "name=None"),
        (lambda: KVGroup("g" * 49, ["a"]), "49 characters"),
        (lambda: KVGroup("g", []), "group 'g': layers=[]"),
        (lambda: KVGroup("g", "abc"), "group 'g': layers='abc'"),
        (lambda: KVGroup("g", [1]), "group 'g': layers has 1"),
        (lambda: KVGroup("g", ["a"], dims="BNX"), "'BNX'"),
        (lambda: KVGroup("g", ["a"], total_kv_heads=0), "total_kv_heads=0"),
        (lambda: KVCacheSpec("BND", groups=["g"]), "groups has 'g'"),
        (lambda: KVCacheSpec("BND", groups=[KVGroup("g", ["a", ""])] * 2), "two are named 'g'"),
        (lambda: KVCacheSpec("BND", groups=[KVGroup("g", ["a"]), KVGroup("h", ["a"])]), "'a' is in 'g' and in 'h'"),
        (lambda: KVCacheSpec("BND", groups=[KVGroup("g", ["a", "a"])]), "'a' is in 'g' and in 'g'"),
        (lambda: KVCacheSpec("BND", groups=[KVGroup(f"g{i}", [str(i)]) for i in range(16)]), "groups has 16 entries"),
    ],
)
def test_wrong_groups_are_refused(make, named):
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert named in str(caught.value)


# --- tensors to geometry ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "name", "itemsize"),
    [
        (torch.bfloat16, "bfloat16", 2),
        (torch.float16, "float16", 2),
        (torch.float32, "float32", 4),
        (torch.float8_e4m3fn, "float8_e4m3fn", 1),
        (torch.float8_e5m2, "float8_e5m2", 1),
        (torch.int8, "int8", 1),
        (torch.uint8, "uint8", 1),
    ],
)
def test_a_geometry_says_what_the_tensors_are(dtype, name, itemsize):
    caches = {"a": tensor("BKNHD", dtype), "b": tensor("BKNHD", dtype)}
    found = geometry_of(caches, KVCacheSpec(dims="BKNHD"))
    (group,) = found.groups
    assert (found.memory, group.dtype, group.itemsize_bytes, group.num_blocks) == (MemoryKind.dram, name, itemsize, 5)
    assert group.total_kv_heads == 3 and totals_of(found) == (3,) and group.block_len_bytes == 2 * 192 * itemsize
    strides = tuple(items * itemsize for items in (192, 96, 24, 8, 1))
    assert group.layers == tuple(
        LayerGeometry(name=n, shape=(5, 2, 4, 3, 8), strides_bytes=strides, address=t.data_ptr(), device_id=0)
        for n, t in caches.items()
    )
    check_geometry(found)


def test_views_keep_their_strides_and_offsets():
    storage = tensor("BNHKD")
    view = storage.permute(0, 3, 2, 1, 4)[1:, :, :2]
    (layer,) = geometry_of({"a": view}, KVCacheSpec(dims="BKHND")).groups[0].layers
    assert layer.address == storage.data_ptr() + storage[0].numel() * 2
    assert layer.shape == (4, 2, 2, 4, 8) and layer.strides_bytes == (384, 16, 32, 96, 2)


def test_the_stride_of_an_axis_of_size_one_is_zero():
    view = torch.zeros(1, 4, 8).as_strided((1, 4, 8), (999, 8, 1))
    (layer,) = geometry_of({"a": view}, KVCacheSpec(dims="BND")).groups[0].layers
    assert layer.strides_bytes == (0, 32, 4)


def _self_overlapping():
    return torch.zeros(64).as_strided((5, 4, 8), (8, 4, 1))


@pytest.mark.parametrize(
    ("caches", "named"),
    [
        ({}, ["0 entries"]),
        (None, ["NoneType"]),
        ([tensor()], ["list"]),
        ({1: tensor()}, ["key 1"]),
        ({"": tensor()}, ["key ''"]),
        ({"\ud800": tensor()}, ["UTF-8"]),
        ({"n" * 513: tensor()}, ["513 characters"]),
        ({"a": None}, ["'a'", "NoneType"]),
        ({"a": [1]}, ["'a'", "list"]),
        ({"a": tensor("BHND")}, ["'a'", "4 axes", "'BKHND'"]),
        ({"a": tensor(), "b": tensor(dtype=torch.float16)}, ["'a'", "'b'", "bfloat16", "float16"]),
        ({"a": tensor(), "b": tensor(B=6)}, ["'b'", "(6, 2, 3, 4, 8)", "'a'", "(5, 2, 3, 4, 8)"]),
        ({"a": tensor(), "b": tensor(N=2)}, ["'b'", "(5, 2, 3, 2, 8)", "'a'", "(5, 2, 3, 4, 8)"]),
        ({"a": tensor(N=0)}, ["'a'", "(5, 2, 3, 0, 8)"]),
        ({"a": tensor(B=0)}, ["'a'", "(0, 2, 3, 4, 8)"]),
        ({"a": tensor(K=3)}, ["axis K", "size 3"]),
        ({"a": tensor(H=1).expand(5, 2, 3, 4, 8)}, ["'a'", "overlaps itself"]),
        ({"a": tensor(B=1).expand(5, 2, 3, 4, 8)}, ["'a'", "overlaps itself"]),
        ({"a": tensor().to("meta")}, ["'a'", "meta", "cpu, cuda"]),
        ({"a": tensor(), "b": tensor().to("meta")}, ["'a'", "'b'", "meta", "cpu"]),
        ({"a": torch.zeros(5, 2, 3, 4, 8).to_sparse()}, ["'a'", "sparse"]),
    ],
)
def test_wrong_tensors_are_refused_with_both_values(caches, named):
    with pytest.raises(ConfigurationError) as caught:
        geometry_of(caches, KVCacheSpec(dims="BKHND"))
    assert all(text in str(caught.value) for text in named), str(caught.value)


def test_a_tensor_that_overlaps_itself_is_refused():
    with pytest.raises(ConfigurationError, match="overlaps itself"):
        geometry_of({"a": _self_overlapping()}, KVCacheSpec(dims="BND"))


@pytest.mark.parametrize(
    ("heads", "total", "tp_size", "fits"),
    [
        (3, 3, 1, True),
        (3, 6, 2, True),
        (1, 2, 8, True),
        (3, 8, 2, False),
        (2, 2, 2, False),
        (2, 2, 4, False),
        (1, 3, 8, False),
    ],
)
def test_heads_here_and_heads_of_the_model_must_fit(heads, total, tp_size, fits):
    spec = KVCacheSpec("BKHND", total_kv_heads=total, tp_size=tp_size)
    if fits:
        geometry_of({"a": tensor(H=heads)}, spec)
    else:
        cannot = f"total_kv_heads={total} does not fit {heads} heads|{total} KV heads cannot be spread over {tp_size}"
        with pytest.raises(ConfigurationError, match=cannot):
            geometry_of({"a": tensor(H=heads)}, spec)


# --- groups ----------------------------------------------------------------------------------------------------------


def hybrid(**options):
    """Full attention, a window with other blocks and fewer heads, and opaque state."""
    caches = {
        "full.0": tensor(H=4),
        "full.1": tensor(H=4),
        "window.0": tensor("KBNHD", torch.float16, B=9, N=2, H=1),
        "state.0": tensor("BS", torch.float32, B=3),
    }
    groups = [
        KVGroup("full", ["full.0", "full.1"]),
        KVGroup("window", ["window.0"], dims="KBNHD", total_kv_heads=1),
        KVGroup("state", ["state.0"], dims="BS"),
    ]
    return caches, KVCacheSpec("BKHND", groups=groups, **options)


def test_groups_may_differ_in_everything():
    found = geometry_of(*hybrid(total_kv_heads=8, tp_size=2))
    assert [(g.name, g.dims, g.dtype, g.num_blocks, g.block_size_tokens, len(g.layers)) for g in found.groups] == [
        ("full", "BKHND", "bfloat16", 5, 4, 2),
        ("window", "KBNHD", "float16", 9, 2, 1),
        ("state", "BS", "float32", 3, 1, 1),
    ]
    assert totals_of(found) == (8, 1, PER_RANK)
    assert totals_of(geometry("BND")) == (NO_HEADS,)
    check_geometry(found)
    assert decode_geometry(encode_geometry(found)) == found


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ([KVGroup("g", ["a"])], "kv_caches['b'] is in none of the groups ['g']"),
        ([KVGroup("g", ["a", "b", "c"])], "group 'g' names the layer 'c'"),
        ([KVGroup("g", ["a"]), KVGroup("h", ["b"], dims="BND")], "kv_caches['b'] has 5 axes"),
        ([KVGroup("g", ["a", "b"], total_kv_heads=2)], "group 'g': 3 heads in each tensor of 2 in all"),
        ([KVGroup("g", ["a", "b"], total_kv_heads=9)], "group 'g': total_kv_heads=9 does not fit 3 heads"),
    ],
)
def test_groups_must_fit_the_tensors(groups, named):
    with pytest.raises(ConfigurationError) as caught:
        geometry_of({"a": tensor(), "b": tensor()}, KVCacheSpec("BKHND", groups=groups))
    assert named in str(caught.value)


def test_layers_of_one_group_are_alike_and_of_one_device():
    caches = {"a": tensor(), "b": tensor(N=2)}
    with pytest.raises(ConfigurationError, match="'b' has shape"):
        geometry_of(caches, KVCacheSpec("BKHND"))
    geometry_of(caches, KVCacheSpec("BKHND", groups=[KVGroup("g", ["a"]), KVGroup("h", ["b"])]))


def pages(num_pages=8, page=4096):
    """One storage that two kinds of layers divide: attention in the first half of every page, state in the second."""
    storage = torch.zeros(num_pages, page, dtype=torch.uint8)
    attention = storage[:, : page // 2].view(torch.bfloat16).view(num_pages, 2, 4, 16, 8)
    state = storage[:, page // 2 :].view(torch.float32)
    return storage, attention, state


GROUPS = [KVGroup("attention", ["a"]), KVGroup("state", ["s"], dims="BS")]


def test_groups_may_divide_the_pages_of_one_storage():
    storage, attention, state = pages()
    found = geometry_of({"a": attention, "s": state}, KVCacheSpec("BKHND", groups=GROUPS))
    (together,) = memory_ranges(found)
    assert together == MemoryRange(storage.data_ptr(), storage.numel(), 0)


@pytest.mark.parametrize("shift", [1, 128, 511])
def test_groups_that_share_bytes_are_refused_unless_the_engine_says_that_a_page_has_one_owner(shift):
    storage, attention, _ = pages()
    state = storage[:, 2048 - 4 * shift : 4096 - 4 * shift].view(torch.float32)
    caches = {"a": attention, "s": state}
    with pytest.raises(ConfigurationError, match="'a' and 's' share bytes; .* groups_share_memory=True"):
        geometry_of(caches, KVCacheSpec("BKHND", groups=GROUPS))
    found = geometry_of(caches, KVCacheSpec("BKHND", groups=GROUPS, groups_share_memory=True))
    assert len(memory_ranges(found)) == 1


def test_groups_may_share_whole_pages_by_the_option_and_layers_of_one_group_never():
    storage, attention, _ = pages()
    caches = {"a": attention, "s": storage.view(torch.float32)}
    geometry_of(caches, KVCacheSpec("BKHND", groups=GROUPS, groups_share_memory=True))
    spec = KVCacheSpec("BKHND", groups=[KVGroup("one", ["a", "b"])], groups_share_memory=True)
    with pytest.raises(ConfigurationError, match="'a' and 'b' share bytes"):
        geometry_of({"a": attention, "b": attention}, spec)


def test_keys_and_values_of_many_blocks_are_told_apart_from_what_lies_between():
    """More pieces than are listed one by one: two halves, and pages of one size."""
    half = torch.zeros(2, 70_000, 32, dtype=torch.uint8)
    keys_first, state = half[:, :, :16].view(2, 70_000, 2, 8), half[:, :, 16:].reshape(2, 70_000, 16)
    groups = [KVGroup("g", ["a"], dims="KBND"), KVGroup("h", ["s"], dims="BS")]
    geometry_of({"a": keys_first, "s": half[1, :, 16:]}, KVCacheSpec("BND", groups=groups))
    with pytest.raises(ConfigurationError, match="share bytes"):
        geometry_of({"a": keys_first, "s": half[1, :, 15:]}, KVCacheSpec("BND", groups=groups))
    assert state is not None


# --- shared bytes ----------------------------------------------------------------------------------------------------

STORAGE = torch.zeros(6, 4, 2, 3, 4, 8, dtype=torch.bfloat16)  # [block, layer, key/value, head, token, head size]


@pytest.mark.parametrize(
    ("caches", "num_ranges"),
    [
        ({f"layers.{i}": STORAGE[:, i] for i in range(4)}, 1),
        ({f"layers.{i}": STORAGE.transpose(0, 1)[:, i] for i in range(6)}, 1),
        ({f"layers.{i}": STORAGE[i : i + 2].flatten(0, 1) for i in (4, 0, 2)}, 1),
        ({"even": STORAGE[::2, 0], "odd": STORAGE[1::2, 0]}, 1),
        ({"key": STORAGE[:, :, 0].flatten(0, 1), "value": STORAGE[:, :, 1].flatten(0, 1)}, 1),
        ({"head": STORAGE[:3, 0], "tail": STORAGE[3:, 0]}, 2),
    ],
)
def test_views_that_interleave_without_sharing_a_byte_are_accepted(caches, num_ranges):
    dims = "BKHND" if next(iter(caches.values())).ndim == 5 else "BHND"
    assert len(memory_ranges(geometry_of(caches, KVCacheSpec(dims=dims)))) == num_ranges


def test_views_with_different_strides_are_compared_byte_by_byte():
    geometry_of({"a": STORAGE[::2, 0], "b": STORAGE[1:4, 1]}, KVCacheSpec(dims="BKHND"))


@pytest.mark.parametrize(
    "caches",
    [
        {"a": STORAGE[:, 0], "b": STORAGE[:, 0]},
        {"a": STORAGE[:5, 0], "b": STORAGE[1:, 0]},
        {"a": STORAGE[:4, 0], "c": STORAGE[:4, 1], "b": STORAGE[2:, 0]},
        {"a": STORAGE[::2, 0], "b": STORAGE[2:5, 0]},
        {"a": STORAGE.flatten()[:960].view(5, 2, 3, 4, 8), "b": STORAGE.flatten()[1:961].view(5, 2, 3, 4, 8)},
    ],
)
def test_two_names_for_one_byte_are_refused(caches):
    with pytest.raises(ConfigurationError, match="layers '.' and '.' "):
        geometry_of(caches, KVCacheSpec(dims="BKHND"))


def test_half_an_item_in_common_is_shared_too():
    memory = bytearray(130)
    views = [torch.frombuffer(memory, dtype=torch.int16, count=64, offset=offset) for offset in (0, 1)]
    with pytest.raises(ConfigurationError, match="share bytes"):
        geometry_of({name: view.view(2, 4, 8) for name, view in zip("ab", views, strict=True)}, KVCacheSpec(dims="BND"))


@settings(deadline=None)
@given(st.data())
def test_bytes_are_shared_exactly_when_two_views_have_one_in_common(data):
    """The oracle lists every byte of both views."""
    sizes = [data.draw(st.integers(1, 3)) for _ in range(3)]
    order = data.draw(st.permutations(range(3)))
    gaps = [data.draw(st.integers(0, 2)) for _ in range(3)]
    strides, reach = [0, 0, 0], 1
    for axis in order:
        strides[axis] = reach + gaps[axis]
        reach = (sizes[axis] - 1) * strides[axis] + reach
        reach += data.draw(st.integers(0, 1))
    distance = data.draw(st.integers(0, reach + 2))
    items = torch.zeros(distance + reach + 1, dtype=torch.uint8)
    views = [items.as_strided(sizes, strides, offset) for offset in (0, distance)]
    held = [
        {offset + sum(i * s for i, s in zip(at, strides, strict=True)) for at in itertools.product(*map(range, sizes))}
        for offset in (0, distance)
    ]
    caches = dict(zip("ab", views, strict=True))
    if held[0] & held[1]:
        with pytest.raises(ConfigurationError, match="share bytes"):
            geometry_of(caches, KVCacheSpec(dims="BND"))
    else:
        geometry_of(caches, KVCacheSpec(dims="BND"))


# --- ranges ----------------------------------------------------------------------------------------------------------


def placed(*spots, memory=MemoryKind.dram):
    """One layer of 8 bytes at each (address, device)."""
    layers = tuple(
        LayerGeometry(f"l{i}", (2, 2, 2), (4, 2, 1), address, device) for i, (address, device) in enumerate(spots)
    )
    return CacheGeometry(memory, (GroupGeometry("kv", "BND", "int8", 1, 2, 0, layers),))


@pytest.mark.parametrize(
    ("spots", "memory", "ranges"),
    [
        ([(100, 0)], MemoryKind.dram, [(100, 8, 0)]),
        ([(200, 0), (100, 0)], MemoryKind.dram, [(100, 8, 0), (200, 8, 0)]),
        ([(100, 0), (108, 0)], MemoryKind.dram, [(100, 16, 0)]),
        ([(100, 0), (109, 0)], MemoryKind.dram, [(100, 8, 0), (109, 8, 0)]),
        ([(104, 0), (100, 0), (107, 0)], MemoryKind.dram, [(100, 15, 0)]),
        ([(100, 0), (108, 0)], MemoryKind.vram, [(100, 8, 0), (108, 8, 0)]),
        ([(100, 0), (107, 0)], MemoryKind.vram, [(100, 15, 0)]),
        ([(100, 0), (100, 1)], MemoryKind.vram, [(100, 8, 0), (100, 8, 1)]),
    ],
)
def test_spans_that_meet_are_registered_once(spots, memory, ranges):
    assert memory_ranges(placed(*spots, memory=memory)) == tuple(MemoryRange(*r) for r in ranges)


def test_a_span_inside_another_adds_nothing():
    wide = LayerGeometry("wide", (2, 2, 2), (64, 2, 1), 100, 0)
    around = changed(placed((120, 0)), layers=(*placed((120, 0)).groups[0].layers, wide))
    assert memory_ranges(around) == (MemoryRange(100, 68, 0),)


def test_a_range_covers_a_view_from_its_first_byte_to_its_last():
    view = STORAGE[1:, 2]
    (found,) = memory_ranges(geometry_of({"a": view}, KVCacheSpec(dims="BKHND")))
    assert found == MemoryRange(view.data_ptr(), view[-1].data_ptr() + 192 * 2 - view.data_ptr(), 0)


# --- fingerprints ----------------------------------------------------------------------------------------------------

SPEC = KVCacheSpec(dims="BKHND", model="m/revision-a")
OURS = fingerprint(geometry(), SPEC)


def test_a_fingerprint_is_text_that_a_person_can_read():
    assert OURS == {
        "model": "m/revision-a",
        "kv.dtype": "bfloat16",
        "kv.axes": "DHKN",
        "kv.head_size": "8",
        "kv.total_kv_heads": "3",
    }


def test_every_group_has_its_own_part_of_the_fingerprint():
    found = fingerprint(geometry_of(*hybrid()), KVCacheSpec("BKHND"))
    assert found == {
        "model": "",
        "full.dtype": "bfloat16",
        "full.axes": "DHKN",
        "full.head_size": "8",
        "full.total_kv_heads": "4",
        "window.dtype": "float16",
        "window.axes": "DHKN",
        "window.head_size": "8",
        "window.total_kv_heads": "1",
        "state.dtype": "float32",
        "state.axes": "S",
        "state.state_size": "7",
    }


def test_a_cache_without_heads_has_none():
    found = fingerprint(geometry("BND"), KVCacheSpec(dims="BND", total_kv_heads=128))
    assert found["kv.total_kv_heads"] == "" and found["kv.axes"] == "DN"


@pytest.mark.parametrize(
    ("theirs", "spec"),
    [
        (geometry(B=9), SPEC),
        (geometry("KBHND"), SPEC),
        (geometry("BKNHD"), SPEC),
        (geometry(N=2), SPEC),
        (geometry(layers=("b", "a")), SPEC),
        (geometry(layers="abc"), SPEC),
        (geometry(), dataclasses.replace(SPEC, total_kv_heads=3)),
        (geometry(), dataclasses.replace(SPEC, pp_rank=1, pp_size=2)),
        (
            geometry_of({"a": tensor(H=1)}, dataclasses.replace(SPEC, tp_rank=2, tp_size=3)),
            dataclasses.replace(SPEC, tp_rank=2, tp_size=3),
        ),
    ],
)
def test_d7_d9_d10_what_may_differ_is_not_in_the_fingerprint(theirs, spec):
    assert compare(OURS, fingerprint(theirs, spec), "p0", "d0") is None


def replaced(**changes):
    return dataclasses.replace(SPEC, **changes)


@pytest.mark.parametrize(
    ("theirs", "spec", "differences"),
    [
        (geometry(dtype=torch.float8_e4m3fn), SPEC, {"kv.dtype": ("bfloat16", "float8_e4m3fn")}),
        (geometry(dtype=torch.float16), SPEC, {"kv.dtype": ("bfloat16", "float16")}),
        (geometry("BHND"), SPEC, {"kv.axes": ("DHKN", "DHN")}),
        (geometry(D=4), SPEC, {"kv.head_size": ("8", "4")}),
        (geometry(H=6), SPEC, {"kv.total_kv_heads": ("3", "6")}),
        (
            geometry_of({"a": tensor()}, dataclasses.replace(SPEC, tp_size=2)),
            dataclasses.replace(SPEC, tp_size=2),
            {"kv.total_kv_heads": ("3", "6")},
        ),
    ],
)
def test_a10_each_difference_is_named_with_both_values(theirs, spec, differences):
    expected = {f"{field}: p0 has {ours!r}, d0 has {other!r}" for field, (ours, other) in differences.items()}
    found = compare(OURS, fingerprint(theirs, spec), "p0", "d0")
    assert found is not None and set(found.split("; ")) == expected


@pytest.mark.parametrize("model", ["m/revision-b", "m/revision-", "m/revision-aa", "", "M/revision-a", "m/revision-a "])
def test_a11_another_revision_of_the_same_shapes_is_another_model(model):
    found = compare(OURS, fingerprint(geometry(), replaced(model=model)), "p0", "d0")
    assert found == f"model: p0 has 'm/revision-a', d0 has {model!r}"


@pytest.mark.parametrize("field", OURS)
def test_a10_a_field_that_one_side_lacks_differs(field):
    without = {name: value for name, value in OURS.items() if name != field}
    assert compare(OURS, without, "p0", "d0") == f"{field}: p0 has {OURS[field]!r}, d0 has nothing"
    assert compare(without, OURS, "p0", "d0") == f"{field}: p0 has nothing, d0 has {OURS[field]!r}"


def test_a_long_value_is_shown_around_its_first_difference():
    ours, theirs = "x" * 1500 + "HERE" + "y" * 400, "x" * 1500 + "THERE" + "y" * 400
    found = compare({"layers": ours}, {"layers": theirs}, "p0", "d0")
    assert found is not None and "HERE" in found and "THERE" in found and len(found) < 600


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=600), st.text(max_size=600) | st.just("x" * 100_000), max_size=64))
def test_whatever_a_peer_sends_the_refusal_fits_into_a_message(theirs):
    found = compare(OURS, theirs, "p" * 512, "d" * 512)
    assert found is not None and 0 < len(found) < 4000


# --- a peer's geometry -----------------------------------------------------------------------------------------------

GOOD = placed((100, 0), (200, 0))


GROUP = GOOD.groups[0]


def changed(geometry=GOOD, **changes):
    """With another first group."""
    return msgspec.structs.replace(geometry, groups=(msgspec.structs.replace(geometry.groups[0], **changes),))


def with_layer(**changes):
    return changed(layers=(GROUP.layers[0], msgspec.structs.replace(GROUP.layers[1], **changes)))


def with_groups(*groups):
    return msgspec.structs.replace(GOOD, groups=groups)


def test_a_geometry_survives_the_wire():
    for sent in (GOOD, geometry(), changed(num_blocks=0, layers=())):
        assert decode_geometry(encode_geometry(sent)) == sent


def test_unknown_fields_are_ignored():
    raw = msgspec.to_builtins(GOOD) | {"later": [1, {"x": 2}]}
    raw["groups"] = [raw["groups"][0] | {"later": 3}]
    assert decode_geometry(msgspec.msgpack.encode(raw)) == GOOD


def test_good_geometries_pass():
    for good in (GOOD, geometry(), with_layer(address=2**63 - 8), with_layer(address=0)):
        check_geometry(good)


@pytest.mark.parametrize("early", [
    changed(num_blocks=0),
    changed(layers=()),
    changed(num_blocks=0, layers=()),
    with_groups(),
    with_groups(GROUP, msgspec.structs.replace(GROUP, name="later", layers=())),
])  # fmt: skip
def test_a9_a_peer_that_published_before_it_had_memory_is_not_ready(early):
    with pytest.raises(Failure) as caught:
        check_geometry(decode_geometry(encode_geometry(early)))
    assert caught.value.code is FailureCode.not_ready and caught.value.is_retryable


@pytest.mark.parametrize(
    "bad",
    [
        changed(num_blocks=3),
        changed(dims="BNH"),
        changed(dims="BKND"),
        changed(dims="BN"),
        changed(dims="KND"),
        changed(dims="BNÐ"),
        changed(dims=""),
        changed(dtype="bfloat16"),
        changed(dtype="nn"),
        changed(dtype="int8", itemsize_bytes=2),
        changed(layers=GROUP.layers * 2),
        with_groups(GROUP, GROUP),
        with_groups(GROUP, msgspec.structs.replace(GROUP, name="other")),
        with_groups(
            GROUP,
            msgspec.structs.replace(
                GROUP,
                name="other",
                layers=tuple(msgspec.structs.replace(GROUP.layers[0], name=f"m{i}") for i in range(4095)),
            ),
        ),
        changed(total_kv_heads=1),
        changed(dims="BHD", total_kv_heads=2),
        changed(dims="BHND", total_kv_heads=1, layers=(LayerGeometry("a", (2, 2, 2, 2), (8, 4, 2, 1), 0, 0),)),
        changed(dims="BHND", total_kv_heads=0, layers=(LayerGeometry("a", (2, 2, 2, 2), (8, 4, 2, 1), 0, 0),)),
        changed(dims="BSN"),
        changed(dims="BS"),
        with_layer(shape=(2, 2, 4)),
        with_layer(shape=(3, 2, 2)),
        with_layer(shape=(2, 2), strides_bytes=(2, 1)),
        with_layer(strides_bytes=(4, 2)),
        with_layer(strides_bytes=(4, 2, 1, 1)),
        with_layer(strides_bytes=(3, 2, 1)),
        with_layer(strides_bytes=(0, 2, 1)),
        with_layer(strides_bytes=(4, 2, 2)),
        with_layer(address=2**63 - 7),
        with_layer(strides_bytes=(2**63 - 1, 2, 1)),
        changed(dims="KBND", layers=(LayerGeometry("a", (3, 2, 2, 2), (8, 4, 2, 1), 0, 0),)),
        changed(layers=(LayerGeometry("a", (2, 2), (2, 1), 0, 0),)),
    ],
)
def test_a_geometry_that_contradicts_itself_is_refused(bad):
    with pytest.raises(Failure) as caught:
        check_geometry(bad)
    assert caught.value.code is FailureCode.bad_metadata


@pytest.mark.parametrize(
    "bad",
    [
        {"num_blocks": -1},
        {"num_blocks": 2**31},
        {"num_blocks": True},
        {"num_blocks": "5"},
        {"itemsize_bytes": 0},
        {"total_kv_heads": -1},
        {"total_kv_heads": 2**31},
        {"name": ""},
        {"name": "g" * 49},
        {"dims": "BKHNDX"},
        {"dtype": ""},
        {"layers": [msgspec.to_builtins(GROUP.layers[0])] * 4097},
        *({"layers": [msgspec.to_builtins(GROUP.layers[0]) | change]} for change in [
            {"name": ""},
            {"name": "n" * 513},
            {"shape": [0, 2, 2]},
            {"shape": [-1, 2, 2]},
            {"shape": [1] * 6},
            {"strides_bytes": [-1, 2, 1]},
            {"address": -1},
            {"address": 2**63},
            {"device_id": -1},
            {"device_id": 2**31},
        ]),
    ],
)  # fmt: skip
def test_numbers_out_of_bounds_are_not_even_decoded(bad):
    raw = msgspec.to_builtins(GOOD)
    raw["groups"] = [raw["groups"][0] | bad]
    with pytest.raises(RemoteProtocolError):
        decode_geometry(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize("bad", [{"memory": "HBM"}, {"groups": [msgspec.to_builtins(GROUP)] * 16}, {"groups": None}])
def test_a_cache_out_of_bounds_is_not_even_decoded(bad):
    with pytest.raises(RemoteProtocolError):
        decode_geometry(msgspec.msgpack.encode(msgspec.to_builtins(GOOD) | bad))


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xc1", b"\x93" * 5000, b"\xa2\xff\xff", msgspec.msgpack.encode([1]), b"\x00" * (MAX_GEOMETRY_BYTES + 1)],
)
def test_junk_is_refused(raw):
    with pytest.raises(RemoteProtocolError):
        decode_geometry(raw)


def believed(raw):
    """The geometry, or None when it is refused the way refusals have to be."""
    try:
        found = decode_geometry(raw)
        check_geometry(found)
    except Failure:
        return None
    return found


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(raw):
    assert believed(raw) is None


RAW = encode_geometry(GOOD)


@settings(deadline=None, max_examples=500)
@given(st.integers(0, len(RAW) - 1), st.integers(0, 255))
def test_what_passes_the_checks_lies_within_the_address_space(position, byte):
    found = believed(RAW[:position] + bytes([byte]) + RAW[position + 1 :])
    for group in found.groups if found else ():
        for layer in group.layers:
            assert 0 <= layer.address <= 2**63 - layer.span_bytes(group.itemsize_bytes)
