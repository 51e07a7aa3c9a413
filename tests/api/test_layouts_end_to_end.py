"""Every layout of a real engine moves byte for byte, and what belongs to nobody stays as it was."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from peers import config, until

import kvpush

SIZES = {"K": 2, "H": 2, "N": 16, "D": 64}
BLOCKS = {"prefill": 11, "decode": 29}  # D7: nobody has as many blocks as the other
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]
MOVES = {28: 10, 0: 3, 17: 0}  # decode's block <- prefill's


@dataclass(frozen=True)
class Layout:
    """``memory`` is the order of the axes in memory, ``dims`` that of the tensor; they differ for permuted views."""

    dims: str
    memory: str
    names: tuple[str, ...] = ("layers.0", "layers.1")
    is_one_storage: bool = False

    def make(self, blocks: int, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """The caches, and the storages under them as bytes."""
        sizes = [SIZES.get(axis, blocks) for axis in self.memory]
        count = torch.Size(sizes).numel() * dtype.itemsize
        if self.is_one_storage:
            whole = torch.zeros(count * len(self.names), dtype=torch.uint8)
            storages, parts = [whole], list(whole.split(count))
        else:
            storages = parts = [torch.zeros(count, dtype=torch.uint8) for _ in self.names]
        order = [self.memory.index(axis) for axis in self.dims]
        views = [part.view(dtype).view(sizes).permute(order) for part in parts]
        return dict(zip(self.names, views, strict=True)), storages


BKHND = Layout("BKHND", "BKHND")
K_AND_V_APART = Layout("BHND", "BHND", ("layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"))
SAME_ON_BOTH = {
    "block first": BKHND,
    "keys first": Layout("KBNHD", "KBNHD"),
    "keys first, heads first": Layout("KBHND", "KBHND"),
    "keys and values apart": K_AND_V_APART,
    "mla": Layout("BND", "BND"),
    "one storage": Layout("BKHND", "BKHND", is_one_storage=True),
    "permuted view": Layout("BHND", "BNHD"),
}
# the axes come in one order for the caller, and in another in memory; a block's own bytes need not lie the same way
DIFFERENT = {
    "block first to keys first": (BKHND, Layout("BKHND", "KBHND")),
    "keys first to block first": (Layout("KBHND", "KBHND"), Layout("KBHND", "BKHND")),
    "apart to one storage": (K_AND_V_APART, Layout("BHND", "BHND", K_AND_V_APART.names, is_one_storage=True)),
    "layers in another order": (BKHND, Layout("BKHND", "BKHND", ("layers.1", "layers.0"))),
    "heads outermost to innermost block": (BKHND, Layout("BKHND", "HBKND")),
}


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(prefill_layout, decode_layout, dtype):
    source, source_bytes = prefill_layout.make(BLOCKS["prefill"], dtype)
    target, target_bytes = decode_layout.make(BLOCKS["decode"], dtype)
    random = torch.Generator().manual_seed(0)
    for storage in source_bytes:
        storage.copy_(torch.randint(0, 256, storage.shape, generator=random, dtype=torch.uint8))
    for storage in target_bytes:
        storage.fill_(0xEE)
    expected = {name: cache.clone() for name, cache in target.items()}
    spec = kvpush.KVCacheSpec(dims=prefill_layout.dims)
    with (
        kvpush.PrefillPusher("p0", source, spec, config=config()) as pusher,
        kvpush.DecodeReceiver("d0", target, kvpush.KVCacheSpec(dims=decode_layout.dims), config=config()) as receiver,
    ):
        receiver.expect("t1", list(MOVES), source=pusher.address, source_engine_id="p0")
        pusher.push("t1", list(MOVES.values()))
        (got,) = until(receiver.poll)
        (sent,) = until(pusher.poll)
        assert got.outcome == sent.outcome == "done", got
    block = prefill_layout.dims.index("B")
    for name in expected:
        for to, of in MOVES.items():
            expected[name].select(block, to).copy_(source[name].select(block, of))
        assert same_bytes(target[name], expected[name]), name
    block_bytes = sum(cache.select(block, 0).numel() for cache in source.values()) * dtype.itemsize
    assert sent.num_bytes == len(MOVES) * block_bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SAME_ON_BOTH)
def test_d7_every_layout_and_dtype_with_other_numbers_of_blocks(name, dtype):
    check(SAME_ON_BOTH[name], SAME_ON_BOTH[name], dtype)


@pytest.mark.parametrize("name", DIFFERENT)
def test_two_sides_may_lay_the_same_axes_out_differently(name):
    check(*DIFFERENT[name], torch.bfloat16)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Layout("BHND", "BHND"), ("'DHKN'", "'DHN'")),
        (Layout("BKND", "BKND"), ("'DHKN'", "'DKN'", "kv.total_kv_heads")),
    ],
    ids=["keys and values", "heads"],
)
def test_a10_caches_that_do_not_fit_are_refused_with_both_values(other, named):
    """A10: before any metadata moves; a good decode engine is served beside it."""
    source, _ = BKHND.make(11, torch.bfloat16)
    bad, bad_bytes = other.make(11, torch.bfloat16)
    good, _ = BKHND.make(11, torch.bfloat16)
    with (
        kvpush.PrefillPusher("p0", source, kvpush.KVCacheSpec(dims="BKHND"), config=config()) as pusher,
        kvpush.DecodeReceiver("bad", bad, kvpush.KVCacheSpec(dims=other.dims), config=config()) as refused,
        kvpush.DecodeReceiver("good", good, kvpush.KVCacheSpec(dims="BKHND"), config=config()) as served,
    ):
        for receiver, transfer_id in ((refused, "t1"), (served, "t2")):
            receiver.expect(transfer_id, [1], source=pusher.address, source_engine_id="p0")
            pusher.push(transfer_id, [1])
        (event,) = until(refused.poll)
        assert event.outcome == "failed" and event.code == "incompatible" and event.blocks_reusable
        assert all(text in event.reason for text in named), event.reason
        (event,) = until(served.poll)
        assert event.outcome == "done"
        assert not any(storage.any() for storage in bad_bytes)
        assert [e.engine_id for e in pusher.engines()] == ["good"]


def test_a11_a_different_model_revision_is_refused_and_compared_whole():
    source, _ = BKHND.make(11, torch.bfloat16)
    with kvpush.PrefillPusher("p0", source, kvpush.KVCacheSpec("BKHND", model="m@a"), config=config()) as pusher:
        for model in ("m@b", "m@", "m@a ", "M@a", ""):
            target, _ = BKHND.make(11, torch.bfloat16)
            with kvpush.DecodeReceiver(
                "d0", target, kvpush.KVCacheSpec("BKHND", model=model), config=config()
            ) as receiver:
                receiver.expect("t1", [1], source=pusher.address, source_engine_id="p0")
                (event,) = until(receiver.poll)
                assert event.code == "incompatible" and "'m@a'" in event.reason and repr(model) in event.reason
