"""Scenarios of group D that need real NIXL, groups of layers, and what callers may get wrong about them."""

from __future__ import annotations

import numpy as np
import peers
import pytest
import torch

import kvpush
from kvpush import wire

SHAPE = peers.Shape(blocks=256, layers=3)


def test_d13_done_means_visible_at_decode_and_free_at_prefill():
    """Prefill overwrites its blocks the moment that it may; decode looks at its own the moment that they are done."""
    half = SHAPE.blocks // 2
    with peers.Prefill(shape=SHAPE) as prefill, peers.Decode(shape=SHAPE) as decode:
        for turn in range(40):
            transfer_id, ids = f"t{turn}", list(range(half * (turn % 2), half * (turn % 2) + half))
            decode.expect(transfer_id, ids, prefill.address)
            prefill.push(transfer_id, ids)
            sent = prefill.inbox.outcome(transfer_id)
            assert sent.outcome == "done" and sent.blocks_reusable
            prefill.arena.clear(ids)
            assert decode.inbox.outcome(transfer_id).outcome == "done"
            assert decode.arena.holds(transfer_id, ids), f"turn {turn}"


def test_d22_a_long_list_in_pieces_travels_as_ids_alone():
    ids = list(range(0, SHAPE.blocks, 2))
    message = wire.Register("t", 1, (wire.Want("kv", 0, wire.pack_block_ids(torch.tensor(ids).numpy())),), 1000)
    assert sum(map(len, wire.encode(message))) < 4 * len(ids) + 100
    with peers.Prefill(shape=SHAPE) as prefill, peers.Decode(shape=SHAPE) as decode:
        decode.expect("t", ids, prefill.address)
        prefill.push("t", ids)
        assert decode.inbox.outcome("t").outcome == "done"
        assert prefill.inbox.outcome("t").outcome == "done"
        assert decode.arena.holds("t", ids)
        assert decode.arena.is_clean([block for block in range(SHAPE.blocks) if block not in ids])


# --- groups ----------------------------------------------------------------------------------------------------------

GROUPS = (
    kvpush.KVGroup("full", ["a", "b"]),
    kvpush.KVGroup("window", ["c"]),
    kvpush.KVGroup("state", ["s"], dims="BS"),
)
SPEC = kvpush.KVCacheSpec(dims="BKHND", groups=GROUPS)


def make_caches(fill: int) -> dict[str, torch.Tensor]:
    """Blocks of 4 KiB in two groups of different sizes, and a state of 100 bytes."""
    kv = {name: torch.full((16 if name == "c" else 32, 2, 2, 16, 32), fill, dtype=torch.int16) for name in "abc"}
    return kv | {"s": torch.full((4, 100), fill, dtype=torch.uint8)}


@pytest.fixture
def hybrids():
    source, target = make_caches(3), make_caches(0)
    with (
        kvpush.PrefillPusher("p0", source, SPEC, config=peers.config()) as pusher,
        kvpush.DecodeReceiver("d0", target, SPEC, config=peers.config()) as receiver,
    ):
        yield pusher, receiver, source, target


def expect(receiver, pusher, transfer_id, block_ids, **options):
    receiver.expect(transfer_id, block_ids, source=pusher.address, source_engine_id="p0", **options)


def test_every_group_has_its_own_blocks_and_positions(hybrids):
    pusher, receiver, source, target = hybrids
    expect(receiver, pusher, "t", {"full": [31, 30], "window": [7], "state": [1]}, first_block={"window": 5})
    pusher.push("t", {"full": [0, 1], "window": [2, 3], "state": [3]}, first_block={"window": 4})
    inbox = peers.Inbox(receiver)
    end = inbox.outcome("t")
    assert (end.outcome, end.num_blocks) == ("done", 4)
    for layer, blocks in {"a": [31, 30], "b": [31, 30], "c": [7], "s": [1]}.items():
        changed = [block for block in range(len(target[layer])) if bool((target[layer][block] == 3).all())]
        assert changed == sorted(blocks), layer
        assert int((target[layer] != 0).sum()) == len(blocks) * target[layer][0].numel()


def test_a_group_that_is_left_out_moves_nothing(hybrids):
    pusher, receiver, _, target = hybrids
    expect(receiver, pusher, "t", {"full": [1]})
    pusher.push("t", {"full": [2], "state": [0]})
    assert peers.Inbox(receiver).outcome("t").outcome == "done"
    assert int(target["s"].sum()) == int(target["c"].sum()) == 0


def test_d5_prefill_lacks_a_group_that_decode_wants(hybrids):
    pusher, receiver, *_ = hybrids
    expect(receiver, pusher, "t", {"full": [1], "window": [2]})
    pusher.push("t", {"full": [2]})
    end = peers.Inbox(receiver).outcome("t")
    assert (end.outcome, end.code) == ("failed", "bad_blocks") and "'window'" in end.reason


MISTAKES = {
    "a plain list": ([1], {}, "groups 'full', 'window', 'state'"),
    "an unknown group": ({"full": [1], "kv": [2]}, {}, "group 'kv'"),
    "a block of a smaller group": ({"window": [16]}, {}, "of group 'window': block 16"),
    "a position for a group without a list": ({"full": [1]}, {"first_block": {"window": 1}}, "group 'window'"),
    "a position that is no number": ({"full": [1]}, {"first_block": {"full": "1"}}, "whole number"),
    "a negative position": ({"full": [1]}, {"first_block": -1}, "first_block"),
}


@pytest.mark.parametrize(("block_ids", "options", "says"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_about_groups_are_raised_and_name_them(hybrids, block_ids, options, says):
    pusher, receiver, *_ = hybrids
    with pytest.raises(kvpush.UsageError, match=says.replace("'", ".")):
        pusher.push("t", block_ids, **options)
    with pytest.raises(kvpush.UsageError, match=says.replace("'", ".")):
        expect(receiver, pusher, "t", block_ids, **options)
    pusher.push("t", {"full": [1]})  # nothing was taken


def test_a_block_that_comes_twice_is_refused_within_a_group_and_not_across(hybrids):
    pusher, receiver, *_ = hybrids
    expect(receiver, pusher, "t", {"full": [1], "window": [1]})
    with pytest.raises(kvpush.UsageError, match="block 1 of group 'window' belongs to a receive"):
        expect(receiver, pusher, "u", {"full": [2], "window": [1]})


# --- layers ----------------------------------------------------------------------------------------------------------


def test_layers_may_come_in_any_order_and_together_make_the_transfer(hybrids):
    pusher, receiver, _, target = hybrids
    expect(receiver, pusher, "t", {"full": [1, 2], "window": [3]})
    pusher.push_layers("t", {"window": [0]}, layers=["c"])
    pusher.push_layers("t", {"full": [5, 6]}, layers=["b"])
    inbox = peers.Inbox(receiver)
    pusher.push_layers("t", {"full": [5, 6]}, layers=["a"], last=True)
    assert inbox.outcome("t").outcome == "done"
    assert peers.Inbox(pusher).outcome("t").outcome == "done"
    assert bool((target["a"][1:3] == 3).all()) and bool((target["b"][1:3] == 3).all())


LAYER_MISTAKES = {
    "no layer": ({"full": [1]}, [], "layers="),
    "a name": ({"full": [1]}, "a", "layers="),
    "an unknown layer": ({"full": [1]}, ["z"], "no layer 'z'"),
    "a layer twice": ({"full": [1]}, ["a", "a"], "'a' twice"),
    "a layer of a group without a list": ({"full": [1]}, ["a", "c"], "block_ids"),
}


@pytest.mark.parametrize(("block_ids", "layers", "says"), LAYER_MISTAKES.values(), ids=LAYER_MISTAKES.keys())
def test_mistakes_about_layers_are_raised_and_name_them(hybrids, block_ids, layers, says):
    pusher, *_ = hybrids
    with pytest.raises(kvpush.UsageError, match=says.replace("'", ".")):
        pusher.push_layers("t", block_ids, layers=layers)


def test_a_layer_cannot_be_pushed_twice_for_the_same_position(hybrids):
    pusher, *_ = hybrids
    pusher.push_layers("t", {"full": [1, 2]}, layers=["a"])
    pusher.push_layers("t", {"full": [1, 2]}, layers=["a"])  # an identical repetition is folded into the first
    with pytest.raises(kvpush.UsageError, match="positions 1 to 1 overlap 0 to 1"):
        pusher.push_layers("t", {"full": [2]}, layers=["a", "b"], first_block=1)
    pusher.push_layers("t", {"full": [2]}, layers=["b"], first_block=1)


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_d9_a_logical_block_that_is_no_multiple_is_refused_with_the_ratio():
    with pytest.raises(kvpush.ConfigurationError, match="24/16"):
        kvpush.PrefillPusher(
            "p0",
            {"a": torch.zeros(4, 2, 2, 16, 8)},
            kvpush.KVCacheSpec(dims="BKHND", block_size_tokens=24),
            config=peers.config(min_tile_bytes=32),
        )


@pytest.mark.parametrize("num_tokens", [0, -1, 1.5, True, "3", 2**63])
def test_a_number_of_tokens_must_be_one(hybrids, num_tokens):
    pusher, receiver, *_ = hybrids
    with pytest.raises(kvpush.UsageError, match="num_tokens"):
        expect(receiver, pusher, "t", {"full": [1]}, num_tokens=num_tokens)


@pytest.mark.parametrize(("first_block", "num_tokens"), [(0, 32), (0, 1), (3, 80), (3, 33)])
def test_tokens_end_in_the_last_block_or_it_is_said(hybrids, first_block, num_tokens):
    # it was done, and nothing had been written into what lay behind
    pusher, receiver, *_ = hybrids
    with pytest.raises(kvpush.UsageError, match=f"num_tokens={num_tokens} .* 'full' that is asked for begins at token"):
        expect(receiver, pusher, "t", {"full": [1, 2, 3]}, num_tokens=num_tokens, first_block=first_block)


def test_opaque_state_is_copied_whole_however_many_tokens_there_are(hybrids):
    pusher, receiver, _, target = hybrids
    blocks = {"full": [1, 2], "state": [1, 2, 3]}
    expect(receiver, pusher, "t", blocks, num_tokens=20, first_block={"state": 50})
    pusher.push("t", blocks, first_block={"state": 50})
    assert peers.Inbox(receiver).outcome("t").outcome == "done"
    assert [block for block in range(4) if bool((target["s"][block] == 3).all())] == [1, 2, 3]


def test_the_order_of_the_groups_says_nothing(hybrids):
    pusher, receiver, *_ = hybrids
    for names in (("full", "window"), ("window", "full")):
        blocks = {name: [1] for name in names}
        expect(receiver, pusher, "t", blocks)  # the second time: folded
        pusher.push("t", blocks, last=False)
    pusher.push("t", {"full": []}, last=True)
    assert peers.Inbox(receiver).outcome("t").outcome == "done"


@pytest.mark.parametrize("layers", [["a", []], [{}], [1], "a", [], None])
def test_layers_are_names(hybrids, layers):
    pusher, *_ = hybrids
    with pytest.raises(kvpush.UsageError, match="push_layers"):
        pusher.push_layers("t", {"full": [1]}, layers=layers)


def test_numbers_of_numpy_are_numbers(hybrids):
    pusher, receiver, *_ = hybrids
    receiver.expect(
        "t",
        {"full": [1]},
        source={(np.int64(0), np.int64(0)): pusher.address},
        source_engine_id="p0",
        num_tokens=np.int64(16),
        first_block=np.int64(0),
        deadline_s=np.float32(30),
    )
    pusher.push("t", {"full": [1]}, last=np.bool_(True))
    assert peers.Inbox(receiver).outcome("t").outcome == "done"


def test_groups_that_share_memory_share_pages_though_one_counts_smaller_blocks():
    pages, page_bytes = 16, 32 * 2 * 2 * 64 * 2
    store = torch.zeros(pages * page_bytes, dtype=torch.uint8)
    caches = {"a": store.view(torch.bfloat16).view(2 * pages, 2, 2, 16, 64), "s": store.view(pages, page_bytes)}
    spec = kvpush.KVCacheSpec(
        dims="BKHND",
        groups_share_memory=True,
        groups=[kvpush.KVGroup("full", ["a"], block_size_tokens=32), kvpush.KVGroup("state", ["s"], dims="BS")],
    )
    source = {"source": ("127.0.0.1", 9), "source_engine_id": "p0"}
    with kvpush.DecodeReceiver("d0", caches, spec, config=peers.config()) as receiver:
        receiver.expect("t1", {"full": [1]}, **source)
        receiver.expect("t2", {"state": [2]}, **source)
        for blocks in ({"state": [1]}, {"full": [1]}, {"full": [2]}):
            ((group, (block,)),) = blocks.items()
            with pytest.raises(kvpush.UsageError, match=f"block {block} of group '{group}' belongs to a receive"):
                receiver.expect("t3", blocks, **source)


def test_positions_are_said_as_the_caller_counts_them():
    caches = {"a": torch.zeros(16, 2, 2, 16, 64)}
    spec = kvpush.KVCacheSpec(dims="BKHND", block_size_tokens=64)
    with kvpush.PrefillPusher("p0", caches, spec, config=peers.config()) as pusher:
        pusher.push("t", [0, 1], first_block=2, last=False)
        with pytest.raises(kvpush.UsageError, match="positions 3 to 4 overlap 2 to 3,"):
            pusher.push("t", [2, 3], first_block=3)


BAD_SOURCES = {
    "no entry": ({}, "names no address"),
    "a hole": ({(0, 0): ("127.0.0.1", 1), (0, 2): ("127.0.0.1", 2)}, r"no address for \(0, 1\)"),
    "a key that is no rank": ({0: ("127.0.0.1", 1)}, "has the key 0"),
    "a negative rank": ({(0, -1): ("127.0.0.1", 1)}, "has the key"),
    "a bad address": ({(0, 0): "nowhere"}, "nowhere"),
}


@pytest.mark.parametrize(("source", "says"), BAD_SOURCES.values(), ids=BAD_SOURCES.keys())
def test_a_source_names_every_rank(hybrids, source, says):
    _, receiver, *_ = hybrids
    with pytest.raises(kvpush.ConfigurationError, match=says):
        receiver.expect("t", {"full": [1]}, source=source, source_engine_id="p0")
