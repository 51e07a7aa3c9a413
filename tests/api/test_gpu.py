"""GPU memory: the same transfers between caches on a CUDA device, and a WRITE that waits for the kernels before it."""

from __future__ import annotations

import pytest
import torch
from peers import until

import kvpush

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPE = (32, 2, 2, 16, 64)


@pytest.fixture
def gpu_pair():
    """Caches of 4 layers on the first device; decode's are all -1."""
    source = {f"layers.{i}": torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda") for i in range(4)}
    target = {name: torch.full_like(layer, -1.0) for name, layer in source.items()}
    torch.cuda.synchronize()
    spec = kvpush.KVCacheSpec(dims="BKHND")
    with (
        kvpush.PrefillPusher("p0", source, spec) as pusher,
        kvpush.DecodeReceiver("d0", target, spec) as receiver,
    ):
        yield pusher, receiver, source, target


def end_of(side):
    (event,) = until(side.poll)
    assert event.outcome == "done", event
    return event


def assert_moved(source, target, moved):
    """Block d holds what block moved[d] held; the others are untouched."""
    for name, layer in target.items():
        expected = torch.full_like(layer, -1.0)
        for to, of in moved.items():
            expected[to] = source[name][of]
        assert torch.equal(layer, expected), name


def test_blocks_move_between_caches_in_gpu_memory(gpu_pair):
    pusher, receiver, source, target = gpu_pair
    for number, layer in enumerate(source.values()):
        layer.copy_(torch.arange(layer.numel(), device="cuda").view(SHAPE) % 251 + number)
    torch.cuda.synchronize()
    receiver.expect("t1", [7, 8, 2], source=pusher.address, source_engine_id="p0")
    pusher.push("t1", torch.tensor([3, 4, 9], device="cuda"))
    end_of(receiver)
    assert end_of(pusher).num_bytes == 3 * 4 * source["layers.0"][0].numel() * 2
    assert_moved(source, target, {7: 3, 8: 4, 2: 9})


def test_the_write_waits_for_the_event_behind_the_kernels(gpu_pair):
    """The blocks are computed only after push() has returned; what arrives is what the kernels left."""
    pusher, receiver, source, target = gpu_pair
    receiver.expect("warm", [31], source=pusher.address, source_engine_id="p0")
    pusher.push("warm", [31])
    end_of(receiver), end_of(pusher)
    for turn in range(10):
        receiver.expect(f"t{turn}", [turn], source=pusher.address, source_engine_id="p0")
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # tens of milliseconds of a busy device
            for layer in source.values():
                layer[turn] = float(turn + 1)
            event.record()
        pusher.push(f"t{turn}", [turn], ready=event)
        end_of(receiver), end_of(pusher)
        assert event.query()
        assert all(bool((layer[turn] == turn + 1).all()) for layer in target.values()), turn


def test_a_chunk_behind_a_busy_stream_does_not_delay_the_others(gpu_pair):
    pusher, receiver, source, target = gpu_pair
    event = torch.cuda.Event()
    torch.cuda._sleep(200_000_000)
    event.record()
    receiver.expect("slow", [1], source=pusher.address, source_engine_id="p0")
    pusher.push("slow", [1], ready=event)
    assert pusher.healthy() and pusher.stats()["writes_in_flight"] == 0
    end_of(receiver), end_of(pusher)
    assert event.query()
