"""kvpush.plan for all ranks of two engines: every byte of a transfer is written exactly once, and nothing else.

The memories of all ranks are arrays; the plans of all pairs are carried out byte by byte, as a transport would. The
reference is written from the definition: for each token, head, layer, key or value, where is it, where must it go.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import itertools
import random

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memories import Memory, bits, random_arena, random_memory

from kvpush.blocks import shared_positions, slots_of
from kvpush.layout import (
    KVCacheSpec,
    KVGroup,
    check_geometry,
    compare,
    fingerprint,
    geometry_of,
    memory_ranges,
    totals_of,
)
from kvpush.parallel import Share, heads_of, meets, readers, writers
from kvpush.plan import descriptors_after_merging, pair
from kvpush.rows import rows_problem

DTYPES = [torch.uint8, torch.bfloat16, torch.float32]
BLOCK_SIZES = [1, 1, 2, 3, 4, 6, 8, 16, 24, 32, 64]


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of the model. ``total`` 0: no heads."""

    name: str
    axes: str
    dtype: torch.dtype
    total: int
    size: int  # of a head, or of a state
    layers: tuple[str, ...]

    @property
    def is_opaque(self):
        return "S" in self.axes


@dataclasses.dataclass(frozen=True)
class Table:
    """A group's blocks of the transfer on one engine: position ``first + i`` is block ``ids[i]``, on every rank."""

    block_tokens: int
    first: int
    ids: tuple[int, ...]

    def tokens(self):
        return range(self.first * self.block_tokens, (self.first + len(self.ids)) * self.block_tokens)

    def place(self, token):
        """(block id, token in the block)."""
        return self.ids[token // self.block_tokens - self.first], token % self.block_tokens


@dataclasses.dataclass(frozen=True)
class RankMemory:
    share: Share
    memories: dict[str, Memory]  # by group

    def spec(self, groups):
        return KVCacheSpec(
            dims=self.memories[groups[0].name].dims,
            model="m",
            pp_rank=self.share.pp_rank,
            pp_size=self.share.pp_size,
            tp_rank=self.share.tp_rank,
            tp_size=self.share.tp_size,
            groups=[
                KVGroup(g.name, self.memories[g.name].names, self.memories[g.name].dims, g.total or None)
                for g in groups
            ],
        )


@dataclasses.dataclass(frozen=True)
class Engine:
    tables: dict[str, Table]
    ranks: tuple[RankMemory, ...]


@dataclasses.dataclass(frozen=True)
class Transfer:
    groups: tuple[Group, ...]
    prefill: Engine
    decode: Engine
    chunk_blocks: int
    layers_a_push: int
    seed: int


# --- drawing ---------------------------------------------------------------------------------------------------------


def fits(size, total):
    return total % size == 0 or size % total == 0


@st.composite
def groups_of_layers(draw, prefill_size, decode_size, stages):
    groups = []
    for index in range(draw(st.sampled_from([1, 1, 2, 3]))):
        kinds = ["KHND", "KHND", "HND", "KND", "ND"] + (["S"] if prefill_size == decode_size else [])
        axes = draw(st.sampled_from(kinds))
        total = 0
        if "H" in axes:
            total = draw(st.sampled_from([t for t in range(1, 17) if fits(prefill_size, t) and fits(decode_size, t)]))
        layers = tuple(f"g{index}.{i}" for i in range(draw(st.integers(stages, stages + 2))))
        size = draw(st.integers(1, 3))
        groups.append(Group(f"g{index}", axes, draw(st.sampled_from(DTYPES)), total, size, layers))
    return tuple(groups)


def engine_of(rng, groups, tp_size, pp_size, tokens, block_tokens_of):
    """An engine whose ranks lie in memory as chance will have it."""
    tables, capacities, stage_of = {}, {}, {}
    for group in groups:
        block_tokens = block_tokens_of[group.name]
        count = -(-(1 if group.is_opaque else tokens) // block_tokens)
        first = rng.choice([0, 0, rng.randint(0, count)])  # a prefix hit on decode; what left the window on prefill
        capacities[group.name] = max(1, count - first) + rng.randint(0, 3)
        ids = rng.sample(range(capacities[group.name]), count - first)
        if rng.random() < 0.5:
            ids.sort()
        tables[group.name] = Table(block_tokens, first, tuple(ids))
        order = rng.sample(group.layers, len(group.layers))
        stages = [*range(pp_size), *(rng.randrange(pp_size) for _ in group.layers[pp_size:])]
        stage_of |= dict(zip(order, stages, strict=True))
    ranks = []
    for stage, rank in itertools.product(range(pp_size), range(tp_size)):
        found = {}
        for group in groups:
            lengths = {"K": 2, "N": tables[group.name].block_tokens, "D": group.size, "S": group.size}
            if group.total:
                lengths["H"] = len(heads_of(rank, tp_size, group.total))
            names = [layer for layer in group.layers if stage_of[layer] == stage]
            num_blocks = capacities[group.name] + rng.randint(0, 2)  # D8: ranks of one engine differ in capacity
            sizes = {axis: lengths[axis] for axis in group.axes}
            found[group.name] = random_memory(rng, "B" + group.axes, sizes, group.dtype, names, num_blocks)
        ranks.append(RankMemory(Share(stage, pp_size, rank, tp_size), found))
    return Engine(tables, tuple(ranks))


@st.composite
def transfers(draw):
    """Hypothesis draws the shapes; how memories look follows from a seed, or drawing would take all the time."""
    prefill_size, decode_size = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    prefill_stages = min(draw(st.integers(1, 4)), 8 // prefill_size)
    decode_stages = min(draw(st.integers(1, 4)), 8 // decode_size)
    tokens = draw(st.integers(1, 24))
    groups = draw(groups_of_layers(prefill_size, decode_size, max(prefill_stages, decode_stages)))
    sizes = st.sampled_from([n for n in BLOCK_SIZES if n <= 4 * tokens])
    block_tokens = [{g.name: 1 if g.is_opaque else draw(sizes) for g in groups} for _ in range(2)]
    seed = draw(st.integers(0, 2**31))
    rng = random.Random(seed)
    return Transfer(
        groups,
        engine_of(rng, groups, prefill_size, prefill_stages, tokens, block_tokens[0]),
        engine_of(rng, groups, decode_size, decode_stages, tokens, block_tokens[1]),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 2, 99, 99])),
        seed,
    )


# --- the definition --------------------------------------------------------------------------------------------------


def truth_of(transfer):
    """What the model's cache holds: by group, an array [layer, token, key/value, head, element]."""
    rng = np.random.default_rng(transfer.seed)
    truth = {}
    for group in transfer.groups:
        ends = [engine.tables[group.name].tokens().stop for engine in (transfer.prefill, transfer.decode)]
        shape = (len(group.layers), max(1, *ends), 2, max(1, group.total), group.size)
        truth[group.name] = rng.integers(1, 127, shape, dtype=np.int64)
    return truth


def element(view, dims, block, token, key_or_value, head):
    """The elements of one head of one token, in a layer's array."""
    at = {"B": block, "N": token, "K": key_or_value, "H": head}
    return view[tuple(at.get(axis, slice(None)) for axis in dims)]


def put(transfer, engine, rank, tensors, tokens_of, *, value_of):
    """Write, element by element, what a rank holds of the given tokens."""
    for group in transfer.groups:
        memory, table = rank.memories[group.name], engine.tables[group.name]
        heads = heads_of(*rank.share.tp, group.total) if group.total else range(1)
        for name in memory.names:
            view = bits(tensors[group.name][name])
            for token in tokens_of(group):
                block, place = table.place(token)
                for head in heads:
                    for key_or_value in range(2 if "K" in group.axes else 1):
                        at = element(view, memory.dims, block, place, key_or_value, head - heads.start)
                        at[...] = value_of(group, rank, name, token, key_or_value, head)


# --- carrying plans out ----------------------------------------------------------------------------------------------


class Rank:
    """One rank's memory: an arena a group, and what the rank says of it."""

    def __init__(self, transfer, memory, seed):
        self.memory = memory
        self.share = memory.share
        self.arenas = {
            name: random_arena(m.arena_bytes(), seed + i) for i, (name, m) in enumerate(memory.memories.items())
        }
        self.tensors = self.views(self.arenas)
        self.spec = memory.spec(transfer.groups)
        self.geometry = geometry_of({n: t for ts in self.tensors.values() for n, t in ts.items()}, self.spec)
        check_geometry(self.geometry)
        self.hits = {name: np.zeros(arena.numel(), dtype=np.int64) for name, arena in self.arenas.items()}
        self.ranges = memory_ranges(self.geometry)

    def views(self, arenas):
        return {name: self.memory.memories[name].tensors(arena) for name, arena in arenas.items()}

    def check_registered(self, address, length):
        holders = [r for r in self.ranges if r.address <= address and address + length <= r.address + r.length_bytes]
        assert len(holders) == 1

    def hit(self, address, length):
        for name, arena in self.arenas.items():
            start = address - arena.data_ptr()
            if start >= 0 and start + length <= arena.numel():
                self.hits[name][start : start + length] += 1
                return
        raise AssertionError("a write outside every arena")


def all_segments(rows):
    """Segment by segment, in the order of their indices."""
    found = []
    for address, length, _, stride, count in rows.tolist():
        found += [(address + i * stride, length) for i in range(count)]
    return found


def carry_out(transfer, ours, theirs):
    """Everything that one prefill rank writes to one decode rank. Returns the bytes, and what descriptors they took."""
    plan = pair(ours.geometry, theirs.geometry, local_share=ours.share, remote_share=theirs.share, min_tile_bytes=1)
    assert [group.name for group in plan.groups] == [group.name for group in transfer.groups]
    assert plan.writes_nothing == (not len(plan.local_rows)) == (not len(plan.remote_rows))
    for rows in (plan.local_rows, plan.remote_rows):
        assert plan.writes_nothing or rows_problem(rows) is None
    sources, targets = all_segments(plan.local_rows), all_segments(plan.remote_rows)
    num_bytes = 0
    for index, (group, part) in enumerate(zip(transfer.groups, plan.groups, strict=True)):
        held, wanted = transfer.prefill.tables[group.name], transfer.decode.tables[group.name]
        assert part.num_layers == len(ours.memory.memories[group.name].names)
        assert plan.remote_num_blocks(index) == theirs.geometry.groups[index].num_blocks
        wanted_slots = slots_of(np.array(wanted.ids, dtype=np.int64), part.remote_slots_per_block)
        for start in range(0, len(held.ids), transfer.chunk_blocks):
            chunk = np.array(held.ids[start : start + transfer.chunk_blocks], dtype=np.int64)
            slots = slots_of(chunk, part.local_slots_per_block)
            wanted_from = wanted.first * part.remote_slots_per_block
            held_from = (held.first + start) * part.local_slots_per_block
            both = shared_positions(wanted_from, len(wanted_slots), held_from, len(slots))
            if not both:
                continue
            local_slots = slots[both.start - held_from : both.stop - held_from]
            remote_slots = wanted_slots[both.start - wanted_from : both.stop - wanted_from]
            for layer in range(0, part.num_layers, transfer.layers_a_push):
                layers = range(layer, min(layer + transfer.layers_a_push, part.num_layers))
                local, remote = part.indices(layers, local_slots, remote_slots)
                assert local.dtype == remote.dtype == np.int32 and len(local) == len(remote)
                written = 0
                runs = 0
                last = None
                for i, j in zip(local.tolist(), remote.tolist(), strict=True):
                    (source, length), (target, target_length) = sources[i], targets[j]
                    assert length == target_length
                    ours.check_registered(source, length)
                    theirs.check_registered(target, length)
                    theirs.hit(target, length)
                    ctypes.memmove(target, source, length)
                    written += length
                    runs += last != (source, target)
                    last = (source + length, target + length)
                assert written == part.slot_len_bytes(layers) * len(local_slots)
                # NIXL merges within a row only.
                assert runs <= descriptors_after_merging(plan, local, remote) <= len(local)
                num_bytes += written
    return num_bytes, plan


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(transfers())
def test_d8_d9_d10_every_byte_of_every_decode_rank_is_written_once_and_nothing_else(transfer):
    truth = truth_of(transfer)

    def value(group, rank, name, token, key_or_value, head):
        if group.is_opaque:  # every rank has a state of its own
            return truth[group.name][group.layers.index(name), token, 0, 0] + rank.share.tp_rank
        return truth[group.name][group.layers.index(name), token, key_or_value, head]

    sources = [Rank(transfer, memory, transfer.seed + 100 * i) for i, memory in enumerate(transfer.prefill.ranks)]
    targets = [Rank(transfer, memory, transfer.seed + 7777 + 100 * i) for i, memory in enumerate(transfer.decode.ranks)]
    for rank in sources:
        put(transfer, transfer.prefill, rank.memory, rank.tensors,
            lambda g: transfer.prefill.tables[g.name].tokens(), value_of=value)  # fmt: skip
    untouched = [{name: arena.clone() for name, arena in rank.arenas.items()} for rank in sources]

    # What decode must hold in the end: the tokens that both engines have blocks for, and its own bytes elsewhere.
    def common_tokens(group):
        ours, theirs = (engine.tables[group.name].tokens() for engine in (transfer.prefill, transfer.decode))
        return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))

    expected, granted = [], []
    for rank in targets:
        arenas = {name: arena.clone() for name, arena in rank.arenas.items()}
        put(transfer, transfer.decode, rank.memory, rank.views(arenas), common_tokens, value_of=value)
        expected.append(arenas)
        marks = {name: torch.zeros_like(arena) for name, arena in rank.arenas.items()}
        put(transfer, transfer.decode, rank.memory, rank.views(marks), common_tokens, value_of=lambda g, *_: {
            1: 255, 2: -1, 4: -1}[g.dtype.itemsize])  # fmt: skip
        granted.append(marks)

    totals = totals_of(sources[0].geometry)
    for rank in targets + sources:
        assert compare(
            fingerprint(sources[0].geometry, sources[0].spec), fingerprint(rank.geometry, rank.spec), "p", "d"
        ) is None  # fmt: skip
        assert totals_of(rank.geometry) == totals
    first = sources[0].share, targets[0].share
    for theirs in targets:
        heard_of = writers(theirs.share, first[0].pp_size, first[0].tp_size, totals)
        for ours in sources:
            num_bytes, plan = carry_out(transfer, ours, theirs)
            talks = ours.share.rank in heard_of
            assert talks == meets(ours.share.tp, theirs.share.tp, totals)
            assert talks == (theirs.share.rank in readers(ours.share, first[1].pp_size, first[1].tp_size, totals))
            assert talks or (not num_bytes and plan.writes_nothing)
    for ours in sources:
        assert readers(ours.share, first[1].pp_size, first[1].tp_size, totals)

    for rank, arenas, marks in zip(targets, expected, granted, strict=True):
        for name, arena in rank.arenas.items():
            assert torch.equal(arena, arenas[name]), f"{name} of rank {rank.share.rank}"
            assert np.array_equal(rank.hits[name], marks[name].numpy() // 255)
    for rank, before in zip(sources, untouched, strict=True):
        assert all(torch.equal(arena, before[name]) for name, arena in rank.arenas.items())


def test_the_property_above_meets_every_form_of_engine():
    """A vacuous strategy would pass for ever: count what it draws."""
    met = collections.Counter()

    @settings(max_examples=150, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(transfers())
    def draw(transfer):
        prefill, decode = transfer.prefill, transfer.decode
        ours, theirs = prefill.ranks[0].share, decode.ranks[0].share
        tables = [(prefill.tables[g.name], decode.tables[g.name]) for g in transfer.groups]
        moving = any(a.ids and b.ids for a, b in tables)
        met["more prefill ranks"] += ours.tp_size > theirs.tp_size
        met["fewer prefill ranks"] += ours.tp_size < theirs.tp_size
        met["prefill stages"] += ours.pp_size > 1
        met["decode stages"] += theirs.pp_size > 1
        met["heads copied at prefill"] += any(0 < g.total < ours.tp_size for g in transfer.groups)
        met["heads copied at decode"] += any(0 < g.total < theirs.tp_size for g in transfer.groups)
        met["several groups"] += len(transfer.groups) > 1
        met["opaque state"] += any(g.is_opaque for g in transfer.groups)
        met["unequal blocks, one a multiple"] += any(
            a.block_tokens != b.block_tokens
            and not max(a.block_tokens, b.block_tokens) % min(a.block_tokens, b.block_tokens)
            for a, b in tables
        )
        met["unequal blocks, neither a multiple"] += any(
            max(a.block_tokens, b.block_tokens) % min(a.block_tokens, b.block_tokens) for a, b in tables
        )
        met["prefix hit"] += moving and any(b.first for _, b in tables)
        met["window"] += moving and any(a.first for a, _ in tables)
        met["several chunks"] += any(len(a.ids) > transfer.chunk_blocks for a, _ in tables)
        met["some layers at a time"] += transfer.layers_a_push < 99
        met["something moves"] += moving

    draw()
    assert len(met) == 15 and all(met[form] >= 8 for form in met), met
