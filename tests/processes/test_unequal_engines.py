"""Engines of different shapes, a process for each rank, real NIXL: every element of the KV cache is in its place."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import peers
import pytest
from ranks import DecodeRank, Group, Layout, PrefillRank

LAYERS = tuple(f"layers.{i}" for i in range(4))
FOUR_HEADS = Group("kv", LAYERS, heads=4, head_size=64)
TWO_HEADS = Group("kv", LAYERS, heads=2, head_size=64)
LATENT = Group("kv", LAYERS, heads=0, head_size=576)


@dataclass(frozen=True)
class Case:
    """``cached``: tokens that decode has already."""

    prefill: Layout
    decode: Layout
    groups: tuple[Group, ...] = (FOUR_HEADS,)
    num_tokens: int = 90
    cached: int = 0
    chunks: int = 1
    by_layer: int = 0  # layers in one call; 0: all at once
    settings: dict[str, Any] = field(default_factory=dict)


HALVES = (LAYERS[:2], LAYERS[2:])
HYBRID = (
    Group("full", LAYERS[:2], heads=4, head_size=64),
    Group("window", LAYERS[2:3], heads=2, head_size=64),
    Group("state", LAYERS[3:], heads=0, head_size=100, is_opaque=True),
)

CASES = {
    "d10 tp 2 to 1": Case(Layout(tp_size=2), Layout()),
    "d10 tp 1 to 2": Case(Layout(), Layout(tp_size=2)),
    "d10 tp 4 to 2 with 2 heads": Case(Layout(tp_size=4), Layout(tp_size=2), (TWO_HEADS,)),
    "tp 4 to 1 with 2 heads: two ranks write nothing": Case(Layout(tp_size=4), Layout(), (TWO_HEADS,)),
    "d10 tp 1 to 4 with 2 heads: copies at decode": Case(Layout(), Layout(tp_size=4), (TWO_HEADS,)),
    "latent attention, 1 to 2: every copy is written": Case(
        Layout(order="BND"), Layout(tp_size=2, order="BND"), (LATENT,)
    ),
    "pp 2 to 1": Case(Layout(stages=HALVES), Layout()),
    "pp 1 to 2": Case(Layout(), Layout(stages=HALVES)),
    "pp 2 to 2, cut elsewhere, and tp 2 to 1": Case(
        Layout(tp_size=2, stages=HALVES), Layout(stages=(LAYERS[:1], LAYERS[1:]))
    ),
    "d9 blocks of 16 to 32": Case(Layout(), Layout(tokens=32)),
    "d9 blocks of 64 to 16": Case(Layout(tokens=64), Layout(), num_tokens=150),
    "d9 blocks of 24 to 16": Case(Layout(tokens=24), Layout(), num_tokens=100),
    "d9 logical blocks of two kernel blocks to single ones": Case(Layout(logical_tokens=32), Layout()),
    "d1 a prefix hit": Case(Layout(), Layout(), cached=32),
    "d1 a prefix hit, blocks of 16 to 32, tp 2 to 1": Case(Layout(tp_size=2), Layout(tokens=32), cached=64),
    "d11 three groups": Case(Layout(), Layout(), HYBRID),
    "d11 three groups in two stages to one": Case(Layout(stages=HALVES), Layout(), HYBRID),
    "layer by layer": Case(Layout(), Layout(), by_layer=1),
    "layer by layer, two at a time, in chunks, tp 2 to 1": Case(Layout(tp_size=2), Layout(), chunks=3, by_layer=2),
    "8 chunks": Case(Layout(), Layout(), num_tokens=16 * 16 - 3, chunks=8),
    "slices": Case(Layout(), Layout(), settings={"max_write_bytes": 20_000}),
    "tokens before heads to tokens before heads": Case(Layout(order="BKNHD"), Layout(order="KBNHD")),
    "tokens before heads to heads before tokens": Case(
        Layout(order="BKNHD"), Layout(order="BKHND"), settings={"min_tile_bytes": 128}
    ),
}


def block_lists(groups, layout, num_tokens, first_token=0):
    """Positions and blocks of all groups, in an order that is not the natural one."""
    size = layout.logical_tokens or layout.tokens
    firsts, ids = {}, {}
    for group in groups:
        if group.is_opaque:
            firsts[group.name], ids[group.name] = 0, [layout.blocks - 2]
            continue
        first, end = first_token // size, math.ceil(num_tokens / size)
        firsts[group.name] = first
        ids[group.name] = [(5 * i + 3) % (layout.blocks * layout.tokens // size) for i in range(first, end)]
    return firsts, ids


@contextlib.contextmanager
def engines(case: Case):
    """The processes of both engines, by rank, and where the prefill ranks are."""
    with contextlib.ExitStack() as stack:
        made = []
        for engine_id, service, layout in (("p0", PrefillRank, case.prefill), ("d0", DecodeRank, case.decode)):
            made.append(
                {
                    rank: stack.enter_context(
                        contextlib.closing(
                            peers.Peer(
                                service,
                                engine_id=engine_id,
                                groups=case.groups,
                                layout=layout,
                                rank=rank,
                                settings=case.settings,
                            )
                        )
                    )
                    for rank in layout.ranks
                }
            )
        for ranks in made:
            for peer in ranks.values():
                peer.wait_until_up()
        prefill, decode = made
        yield prefill, decode, {rank: peer.call("address") for rank, peer in prefill.items()}


def expect(case, decode, source, transfer_id):
    firsts, ids = block_lists(case.groups, case.decode, case.num_tokens, case.cached)
    for peer in decode.values():
        peer.call("expect", transfer_id, firsts, ids, source, num_tokens=case.num_tokens)


def push(case, prefill, transfer_id):
    firsts, ids = block_lists(case.groups, case.prefill, case.num_tokens)
    for chunk in range(case.chunks):
        parts = {
            name: slice(len(each) * chunk // case.chunks, len(each) * (chunk + 1) // case.chunks)
            for name, each in ids.items()
        }
        some = {name: each[parts[name]] for name, each in ids.items()}
        starts = {name: firsts[name] + parts[name].start for name in ids}
        last = chunk == case.chunks - 1
        for peer in prefill.values():
            if case.by_layer:
                peer.call("push_by_layer", transfer_id, starts, some, last=last, step=case.by_layer)
            else:
                peer.call("push", transfer_id, starts, some, last=last)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_element_is_where_it_must_be(case):
    with engines(case) as (prefill, decode, source):
        for transfer_id, calls in (("t1", (expect, push)), ("t2", (push, expect))):
            for call in calls:
                call(case, decode if call is expect else prefill, *([source] if call is expect else []), transfer_id)
            firsts, ids = block_lists(case.groups, case.decode, case.num_tokens, case.cached)
            for rank, peer in {**decode}.items():
                end = peer.call("outcome", transfer_id)
                assert (end.outcome, end.blocks_reusable) == ("done", True), (rank, end)
                assert peer.call("wrong", transfer_id, firsts, ids, case.num_tokens) == []
            num_bytes = 0
            for rank, peer in prefill.items():
                end = peer.call("outcome", transfer_id)
                assert (end.outcome, end.blocks_reusable, end.engine_id) == ("done", True, "d0"), (rank, end)
                num_bytes += end.num_bytes
            assert num_bytes > 0
