"""The fake's own controls: what a test can do to a world of fake agents. Its likeness to NIXL is tested next door."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from contract_peer import Cache

from kvpush.errors import ConfigurationError, FailureCode, TransportError, UsageError
from kvpush.layout import MemoryKind, MemoryRange
from kvpush.testing.clock import FakeClock
from kvpush.testing.fake_transport import Delivery, FakeFabric, Operation, WriteState
from kvpush.transport import Notification


def indices(*values):
    return np.array(values, np.int32)


class Pair:
    """A writer that has one peer loaded."""

    def __init__(self, fabric: FakeFabric) -> None:
        self.fabric = fabric
        self.cache, self.sink = Cache(2, 4, 64), Cache(2, 4, 64)
        self.cache.fill(1)
        self.writer = fabric.transport("p#1", MemoryKind.dram, [self.cache.range])
        self.peer = fabric.transport("d#1", MemoryKind.dram, [self.sink.range])
        self.remote = self.add()

    def add(self, metadata=None):
        metadata = self.peer.metadata() if metadata is None else metadata
        return self.writer.add_remote("d#1", metadata, MemoryKind.dram, self.cache.rows, self.sink.rows)

    def post(self, *blocks, payload=b"n"):
        handle = self.writer.post_write(self.remote, indices(*blocks), indices(*blocks), payload)
        return handle, self.fabric.history[-1]

    def landed(self, block):
        assert self.cache.blocks[0, block].any()
        return np.array_equal(self.sink.blocks[0, block], self.cache.blocks[0, block])


@pytest.fixture
def pair():
    return Pair(FakeFabric(delivery=Delivery.manual))


def test_immediate_delivery_needs_nobody():
    pair = Pair(FakeFabric())
    handle, write = pair.post(0)
    assert pair.landed(0)
    assert list(pair.peer.notifications()) == []
    assert pair.writer.poll_write(handle)
    assert pair.peer.notifications() == [Notification("p#1", b"n")]
    assert write.state is WriteState.completed


def test_progress_delivery_needs_the_target():
    pair = Pair(FakeFabric(delivery=Delivery.progress))
    handle, _ = pair.post(0)
    pair.writer.notifications()
    assert not pair.writer.poll_write(handle)
    assert not pair.landed(0)
    pair.peer.notifications()
    assert pair.landed(0)
    assert pair.writer.poll_write(handle)


def test_manual_delivery_completes_one_write_per_step(pair):
    handles = [pair.post(i)[0] for i in range(4)]
    chosen = [pair.fabric.step().notification for _ in range(4)]
    assert pair.fabric.step() is None
    assert chosen == [b"n"] * 4
    assert all(pair.writer.poll_write(handle) for handle in handles)


def test_the_seed_decides_the_order():
    def order(seed):
        pair = Pair(FakeFabric(delivery=Delivery.manual, seed=seed))
        for i in range(32):
            pair.post(0, payload=bytes([i]))
        return [pair.fabric.step().notification for _ in range(32)]

    assert order(3) == order(3) != order(4)


def test_a_simulator_is_told_of_each_write(pair):
    seen = []
    pair.fabric.on_post = seen.append
    _, write = pair.post(2)
    assert seen == [write]
    assert (write.writer, write.target, write.num_bytes) == ("p#1", "d#1", 64)
    assert write.remote_indices.tolist() == [2]


def test_bytes_are_read_when_they_land(pair):
    _, write = pair.post(1)
    pair.cache.fill(2)
    pair.fabric.complete(write)
    assert pair.landed(1)


def test_a_write_can_fail_with_a_part_of_it_landed(pair):
    handle, write = pair.post(0, 1)
    pair.fabric.fail(write, landed_segments=1)
    with pytest.raises(TransportError, match="d#1") as caught:
        pair.writer.poll_write(handle)
    assert caught.value.code is FailureCode.write_failed
    assert pair.landed(0)
    assert not pair.landed(1)
    pair.post(0)


def test_a_disconnect_lasts_until_the_remote_is_added_again(pair):
    handle, write = pair.post(0)
    pair.fabric.fail(write, TransportError(FailureCode.peer_lost, "reset", disconnected=True))
    with pytest.raises(TransportError, match="reset"):
        pair.writer.poll_write(handle)
    with pytest.raises(TransportError) as caught:
        pair.post(0)
    assert caught.value.disconnected
    pair.writer.remove_remote(pair.remote)
    pair.remote = pair.add()
    pair.post(0)


def test_a_stalled_write_waits_to_be_resumed(pair):
    handle, write = pair.post(0)
    pair.fabric.stall(write)
    assert pair.fabric.drain() == 0
    with pytest.raises(UsageError, match="held up"):
        pair.fabric.complete(write)
    pair.fabric.resume(write)
    assert pair.fabric.drain() == 1
    assert pair.writer.poll_write(handle)


def test_an_abandoned_write_lands_late_with_whatever_the_blocks_hold_by_then(pair):
    handle, write = pair.post(0)
    pair.writer.abandon_write(handle)
    pair.writer.remove_remote(pair.remote)
    assert write.is_abandoned
    assert pair.fabric.in_flight == [write]
    pair.cache.fill(9)
    pair.fabric.land(write)
    assert pair.landed(0)
    assert pair.fabric.in_flight == []
    assert list(pair.peer.notifications()) == []
    with pytest.raises(UsageError, match="does not land"):
        pair.fabric.land(write)


def test_landed_bytes_are_not_yet_a_completed_write(pair):
    handle, write = pair.post(0)
    pair.fabric.land(write)
    assert pair.landed(0)
    assert not pair.writer.poll_write(handle)
    pair.fabric.complete(write)
    assert pair.writer.poll_write(handle)


@pytest.mark.parametrize("end", ["kill", "close"])
def test_what_a_peer_had_in_flight_goes_with_it(pair, end):
    handle, write = pair.post(0)
    abandoned_handle, abandoned = pair.post(1)
    pair.writer.abandon_write(abandoned_handle)
    pair.fabric.kill("d#1") if end == "kill" else pair.peer.close()
    assert (write.state, abandoned.state) == (WriteState.failed, WriteState.dropped)
    assert pair.fabric.in_flight == []
    with pytest.raises(TransportError) as caught:
        pair.writer.poll_write(handle)
    assert (caught.value.code, caught.value.disconnected) == (FailureCode.peer_lost, True)
    pair.writer.remove_remote(pair.remote)
    assert pair.writer.counts.writes_posted == pair.writer.counts.writes_released == 2


def test_the_writes_of_a_killed_writer_never_land(pair):
    _, write = pair.post(0)
    pair.fabric.kill("p#1")
    assert write.state is WriteState.dropped
    assert not pair.landed(0)
    with pytest.raises(UsageError, match="killed"):
        pair.writer.metadata()
    with pytest.raises(UsageError, match="no agent"):
        pair.fabric.kill("p#1")
    pair.writer.close()


@pytest.mark.parametrize("who", ["p#1", "d#1"])
def test_nothing_ends_while_either_side_is_frozen(pair, who):
    handle, _ = pair.post(0)
    pair.fabric.freeze(who)
    assert pair.fabric.drain() == 0
    pair.fabric.thaw(who)
    assert pair.fabric.drain() == 1
    assert pair.writer.poll_write(handle)


def test_a_partition_is_a_black_hole_until_it_heals(pair):
    pair.fabric.partition("p#1", "d#1")
    handle, _ = pair.post(0)
    assert pair.fabric.drain() == 0
    assert not pair.writer.poll_write(handle)
    pair.fabric.heal("p#1", "d#1")
    assert pair.fabric.drain() == 1


def test_notifications_can_be_held_back_forged_and_repeated(pair):
    pair.fabric.hold_notifications("d#1")
    for i in range(8):
        handle, _ = pair.post(0, payload=bytes([i]))
        pair.fabric.drain()
        assert pair.writer.poll_write(handle)
    assert pair.peer.notifications() == []
    pair.fabric.release_notifications("d#1", shuffle=True)
    payloads = [notification.payload for notification in pair.peer.notifications()]
    assert payloads != sorted(payloads) == [bytes([i]) for i in range(8)]
    stray = Notification("nobody", b"\xff")
    pair.fabric.notify("d#1", stray)
    pair.fabric.notify("d#1", stray)
    assert pair.peer.notifications() == [stray, stray]


def test_one_flipped_bit_makes_the_name_unusable_for_this_agent_only(pair):
    pair.writer.remove_remote(pair.remote)
    for metadata in (pair.fabric.corrupted(pair.peer.metadata()), pair.peer.metadata()):
        with pytest.raises(TransportError) as caught:
            pair.add(metadata)
        assert caught.value.code is FailureCode.handshake_failed


@pytest.mark.parametrize("operation", Operation)
def test_any_call_can_be_made_to_fail(pair, operation):
    error = TransportError(FailureCode.internal, "injected")
    handle, _ = pair.post(0)
    pair.fabric.fail_next("p#1", operation, error)
    use = {
        Operation.add_remote: lambda: pair.add(),
        Operation.post_write: lambda: pair.post(1),
        Operation.poll_write: lambda: pair.writer.poll_write(handle),
        Operation.notifications: pair.writer.notifications,
    }[operation]
    with pytest.raises(TransportError, match="injected"):
        use()
    pair.post(1)
    assert pair.writer.notifications() == []


def test_without_copying_addresses_may_be_invented():
    fabric = FakeFabric(copy=False)
    rows = np.array([[4096, 64, 3, 64, 4]], np.uint64)
    ranges = [MemoryRange(4096, 256, 3)]
    writer, peer = (fabric.transport(name, MemoryKind.vram, ranges) for name in ("p#1", "d#1"))
    remote = writer.add_remote("d#1", peer.metadata(), MemoryKind.vram, rows, rows)
    writer.post_write(remote, indices(3), indices(1), b"")
    (write,) = fabric.history
    assert (write.sources.tolist(), write.destinations.tolist()) == ([4096 + 3 * 64], [4096 + 64])
    with pytest.raises(ConfigurationError, match="copy=False"):
        FakeFabric().transport("g#1", MemoryKind.vram, ranges)


def test_a_name_is_never_used_twice(pair):
    pair.peer.close()
    with pytest.raises(UsageError, match="used before"):
        pair.fabric.transport("d#1", MemoryKind.dram, [pair.sink.range])


def test_memory_must_not_be_empty():
    for ranges in ([], [MemoryRange(4096, 0, 0)]):
        with pytest.raises(ConfigurationError, match="ranges"):
            FakeFabric().transport("d#1", MemoryKind.dram, ranges)


def test_threads_need_not_be_checked():
    pair = Pair(FakeFabric(check_threads=False))
    thread = threading.Thread(target=pair.post, args=(0,))
    thread.start()
    thread.join()
    assert pair.landed(0)


def test_the_history_is_bounded():
    pair = Pair(FakeFabric(history_len=3))
    for i in range(5):
        pair.post(0, payload=bytes([i]))
    assert [write.notification for write in pair.fabric.history] == [b"\x02", b"\x03", b"\x04"]


def test_the_clock_moves_forward_and_only_when_told():
    clock = FakeClock(5.0)
    assert (clock(), clock()) == (5.0, 5.0)
    assert clock.advance(0.5) == clock() == 5.5
    assert clock.set(9.0) == clock() == 9.0
    for back in (lambda: clock.set(8.9), lambda: clock.advance(-0.1), lambda: clock.set(float("nan"))):
        with pytest.raises(UsageError, match="back"):
            back()
    assert clock() == 9.0
