"""What kvpush relies on in a transport, asserted for the fake and for NIXL alike.

``writer`` pushes from this process; a peer's memory is in this one or in another. ``peer.progress()`` is one turn of
the receiver's loop. Nothing here waits for time to pass: it polls until a deadline.
"""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from contract_worlds import IN_PROCESS, PROCESSES

from kvpush.errors import Closed, FailureCode, TransportError, UsageError
from kvpush.layout import MemoryKind
from kvpush.transport import Notification

DEADLINE_S = 10.0
LOST_WITHIN_S = 5.0  # a killed peer on this host; milliseconds, when nothing else runs
QUIET_S = 0.05  # long enough for a stray notification: one arrives within 2 ms
JUNK_ROW = [1 << 40, 256, 0, 256, 8]  # an address that nobody registered


def indices(*values):
    return np.array(values, np.int32)


def add(writer, cache, peer, **changes):
    arguments = {
        "agent_name": peer.agent_name,
        "metadata": peer.metadata,
        "kind": MemoryKind.dram,
        "local_rows": cache.rows,
        "remote_rows": peer.rows,
    }
    return writer.add_remote(**(arguments | changes))


def loaded(world):
    """A writer with one peer loaded."""
    writer, cache = world.writer()
    peer = world.peer()
    return writer, cache, peer, add(writer, cache, peer)


def until(condition, deadline_s=DEADLINE_S):
    """Try until the condition gives something true, and return that; fail after the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if result := condition():
            return result
    raise AssertionError(f"nothing happened within {deadline_s} s")


def finish(writer, write, *peers):
    def turn():
        for peer in peers:
            peer.progress()
        return writer.poll_write(write)

    until(turn)


def await_arrivals(peer, count):
    def turn():
        peer.progress()
        return len(peer.arrivals) >= count

    until(turn)
    return peer.arrivals


def assert_quiet(peer, arrivals):
    """No further notification comes."""
    end = time.monotonic() + QUIET_S
    while time.monotonic() < end:
        peer.progress()
    assert len(peer.arrivals) == arrivals


def push(writer, remote, peer, local=(0,), there=(0,), payload=b"pushed"):
    """A whole push, to the notification."""
    arrivals = len(peer.arrivals)
    finish(writer, writer.post_write(remote, indices(*local), indices(*there), payload), peer)
    return await_arrivals(peer, arrivals + 1)[-1]


def failure_of_write(writer, remote, deadline_s=LOST_WITHIN_S):
    """The error that a WRITE ends in, from posting it or from polling it. It must come before the deadline."""
    try:
        write = writer.post_write(remote, indices(0), indices(0), b"lost")
    except TransportError as error:
        return error
    return failure_of_poll(writer, write, deadline_s)


def failure_of_poll(writer, write, deadline_s=LOST_WITHIN_S):
    def turn():
        try:
            assert not writer.poll_write(write), "the write succeeded"
        except TransportError as error:
            return error
        return None

    return until(turn, deadline_s)


def assert_lost(error, peer):
    assert (error.code, error.disconnected) == (FailureCode.peer_lost, True)
    assert peer.agent_name in str(error)


def assert_refused(error, peer):
    assert (error.code, error.disconnected) == (FailureCode.handshake_failed, False)
    assert peer.agent_name in str(error)


def assert_refused_without_a_trace(writer, cache, peer, **changes):
    """Adding the peer like this fails; nothing stays loaded, and adding it as it is works."""
    with pytest.raises(TransportError) as caught:
        add(writer, cache, peer, **changes)
    assert_refused(caught.value, peer)
    assert_balanced(writer)
    push(writer, add(writer, cache, peer), peer)


def assert_balanced(transport):
    counts = transport.counts
    assert counts.remotes_added == counts.remotes_removed
    assert counts.writes_posted == counts.writes_released
    assert counts.lists_prepared == counts.lists_released


def in_flight_write(writer, cache, peer):
    """A WRITE that does not end, because its receiver makes no progress."""
    remote = add(writer, cache, peer)
    push(writer, remote, peer)
    peer.pause()
    write = writer.post_write(remote, indices(1), indices(1), b"in flight")
    assert not writer.poll_write(write)
    return remote, write


class TestWrites:
    def test_bytes_land_and_one_notification_follows(self, world):
        writer, cache, peer, remote = loaded(world)
        arrival = push(writer, remote, peer, local=(3, 9), there=(15, 4), payload=b"\x00\xff binary")
        expected = np.zeros_like(cache.blocks)
        expected[1, 7] = cache.blocks[0, 3]
        expected[0, 4] = cache.blocks[1, 1]
        assert arrival.notification == Notification(writer.agent_name, b"\x00\xff binary")
        assert np.array_equal(arrival.blocks, expected)
        assert_quiet(peer, 1)
        assert np.array_equal(peer.blocks(), expected)

    def test_a_write_that_is_not_polled_to_its_end_notifies_nobody(self, world):
        writer, cache = world.writer()
        peer = world.peer()
        write = writer.post_write(add(writer, cache, peer), indices(0), indices(0), b"late")
        assert_quiet(peer, 0)
        finish(writer, write, peer)
        assert await_arrivals(peer, 1)[0].notification.payload == b"late"
        assert_quiet(peer, 1)

    def test_a_write_ends_only_when_its_receiver_makes_progress(self, world):
        writer, cache = world.writer()
        peer = world.peer()
        _, write = in_flight_write(writer, cache, peer)
        end = time.monotonic() + QUIET_S
        while time.monotonic() < end:
            assert not writer.poll_write(write)
        peer.resume()
        finish(writer, write, peer)
        assert await_arrivals(peer, 2)[1].notification.payload == b"in flight"

    def test_segments_are_numbered_row_by_row(self, world):
        writer, cache = world.writer(layers=3, blocks=4)
        peer = world.peer(layers=3, blocks=4)
        remote = add(writer, cache, peer)
        for index in range(12):
            arrival = push(writer, remote, peer, local=(index,), there=(index,))
            assert np.array_equal(arrival.blocks[index // 4, index % 4], cache.blocks[index // 4, index % 4])
        assert np.array_equal(peer.blocks(), cache.blocks)

    def test_sides_may_differ_in_their_number_of_blocks(self, world):
        writer, cache = world.writer(layers=2, blocks=5)
        peer = world.peer(layers=2, blocks=9)
        remote = add(writer, cache, peer)
        arrival = push(writer, remote, peer, local=(2, 5 + 2), there=(8, 9 + 8))
        assert np.array_equal(arrival.blocks[:, 8], cache.blocks[:, 2])
        assert not arrival.blocks[:, :8].any()

    @pytest.mark.parametrize("seed", range(3))
    def test_any_selection_in_any_order(self, world, seed):
        rng = np.random.default_rng(seed)
        writer, cache = world.writer(layers=4, blocks=32, block_bytes=1024)
        peer = world.peer(layers=4, blocks=32, block_bytes=1024)
        remote = add(writer, cache, peer)
        local, there = (rng.permutation(128)[:77].astype(np.int32) for _ in range(2))
        arrival = push(writer, remote, peer, local=local, there=there)
        expected = np.zeros((128, 1024), np.uint8)
        expected[there] = cache.blocks.reshape(128, 1024)[local]
        assert np.array_equal(arrival.blocks.reshape(128, 1024), expected)

    def test_each_of_many_writes_in_flight_is_visible_when_its_notification_is_read(self, world):
        writer, cache = world.writer(layers=1, blocks=64, block_bytes=4096)
        peer = world.peer(layers=1, blocks=64, block_bytes=4096)
        remote = add(writer, cache, peer)
        pending = [writer.post_write(remote, indices(i), indices(63 - i), bytes([i])) for i in range(64)]

        def turn():
            peer.progress()
            pending[:] = [write for write in pending if not writer.poll_write(write)]
            return not pending

        until(turn)
        for arrival in await_arrivals(peer, 64):
            (index,) = arrival.notification.payload
            assert np.array_equal(arrival.blocks[0, 63 - index], cache.blocks[0, index])
        assert_quiet(peer, 64)
        assert sorted(arrival.notification.payload for arrival in peer.arrivals) == [bytes([i]) for i in range(64)]

    def test_writes_to_several_peers_at_once(self, world):
        writer, cache = world.writer()
        peers = [world.peer(name=f"peer{i}") for i in range(4)]
        writes = {
            peer.agent_name: writer.post_write(add(writer, cache, peer), indices(i), indices(0), bytes([i]))
            for i, peer in enumerate(peers)
        }
        for i, peer in reversed(list(enumerate(peers))):
            finish(writer, writes[peer.agent_name], *peers)
            assert await_arrivals(peer, 1)[0].notification == Notification(writer.agent_name, bytes([i]))
            assert np.array_equal(peer.arrivals[0].blocks[0, 0], cache.blocks[0, i])

    def test_writers_are_told_apart_by_their_names_and_need_not_be_known(self, world):
        """The receiver has loaded nobody's metadata."""
        peer = world.peer()
        for i in range(2):
            writer, cache = world.writer(name=f"writer{i}")
            arrival = push(writer, add(writer, cache, peer), peer, local=(i,), there=(i,), payload=b"same")
            assert arrival.notification == Notification(writer.agent_name, b"same")
            assert np.array_equal(arrival.blocks[0, i], cache.blocks[0, i])

    def test_an_abandoned_write_may_land_and_never_notifies(self, world):
        writer, cache = world.writer()
        peer = world.peer()
        remote, write = in_flight_write(writer, cache, peer)
        writer.abandon_write(write)
        peer.resume()
        push(writer, remote, peer, local=(2,), there=(2,), payload=b"later")
        assert_quiet(peer, 2)
        assert [arrival.notification.payload for arrival in peer.arrivals] == [b"pushed", b"later"]
        block = peer.blocks()[0, 1]
        assert np.array_equal(block, cache.blocks[0, 1]) or not block.any()

    @pytest.mark.parametrize(
        ("local", "there"),
        [
            pytest.param(indices(), indices(), id="empty"),
            pytest.param(indices(0, 1), indices(0), id="more-here"),
            pytest.param(indices(0), indices(0, 1), id="more-there"),
            pytest.param(indices(0).astype(np.int64), indices(0), id="int64"),
            pytest.param(indices(0).reshape(1, 1), indices(0).reshape(1, 1), id="not-flat"),
        ],
    )
    def test_malformed_index_lists_are_the_callers_mistake(self, world, local, there):
        writer, cache, peer, remote = loaded(world)
        with pytest.raises(UsageError, match=peer.agent_name):
            writer.post_write(remote, local, there, b"never")
        push(writer, remote, peer)
        assert_quiet(peer, 1)

    @pytest.mark.parametrize(("local", "there"), [(16, 0), (0, 16), (-1, 0), (0, -1), (2**31 - 1, 0), (0, -(2**31))])
    def test_an_index_out_of_range_posts_nothing(self, world, local, there):
        writer, cache, peer, remote = loaded(world)
        with pytest.raises(TransportError, match=peer.agent_name) as caught:
            writer.post_write(remote, indices(1, local), indices(1, there), b"never")
        assert (caught.value.code, caught.value.disconnected) == (FailureCode.write_failed, False)
        push(writer, remote, peer)
        assert_quiet(peer, 1)
        assert not peer.blocks()[:, 1:].any()
        writer.remove_remote(remote)

    def test_a_handle_is_not_used_after_its_end(self, world):
        writer, cache, peer, remote = loaded(world)
        write = writer.post_write(remote, indices(0), indices(0), b"once")
        finish(writer, write, peer)
        for use in (writer.poll_write, writer.abandon_write):
            with pytest.raises(UsageError, match="has ended"):
                use(write)
        abandoned = writer.post_write(remote, indices(0), indices(0), b"abandoned")
        writer.abandon_write(abandoned)
        for use in (writer.poll_write, writer.abandon_write):
            with pytest.raises(UsageError, match="has ended"):
                use(abandoned)
        with pytest.raises(UsageError, match="unknown"):
            writer.poll_write(10**6)


class TestRemotes:
    def test_a_remote_can_be_added_again_after_removal(self, world):
        writer, cache = world.writer()
        peer = world.peer()
        old = add(writer, cache, peer)
        push(writer, old, peer)
        writer.remove_remote(old)
        new = add(writer, cache, peer)
        with pytest.raises(UsageError, match="removed"):
            writer.post_write(old, indices(1), indices(1), b"stale")
        assert np.array_equal(push(writer, new, peer, local=(2,), there=(2,)).blocks[0, 2], cache.blocks[0, 2])
        assert not peer.blocks()[0, 1].any()

    def test_a_remote_is_removed_once(self, world):
        writer, cache = world.writer()
        remote = add(writer, cache, world.peer())
        writer.remove_remote(remote)
        with pytest.raises(UsageError, match="removed"):
            writer.remove_remote(remote)
        assert_balanced(writer)

    def test_a_remote_is_not_removed_while_a_write_is_in_flight(self, world):
        writer, cache = world.writer()
        peer = world.peer()
        remote, write = in_flight_write(writer, cache, peer)
        with pytest.raises(UsageError, match="1 writes in flight"):
            writer.remove_remote(remote)
        peer.resume()
        finish(writer, write, peer)
        writer.remove_remote(remote)
        assert_balanced(writer)

    def test_a_remote_can_be_removed_when_its_write_was_abandoned(self, world):
        writer, cache = world.writer()
        peer = world.peer()
        remote, write = in_flight_write(writer, cache, peer)
        writer.abandon_write(write)
        writer.remove_remote(remote)
        assert_balanced(writer)

    def test_an_agent_that_is_loaded_is_not_loaded_again(self, world):
        writer, cache, peer, remote = loaded(world)
        with pytest.raises(TransportError, match="already loaded") as caught:
            add(writer, cache, peer)
        assert_refused(caught.value, peer)
        push(writer, remote, peer)

    def test_metadata_that_names_another_agent_is_refused_and_leaves_that_agent_alone(self, world):
        writer, cache = world.writer()
        good, liar = world.peer(name="good"), world.peer(name="liar")
        remote = add(writer, cache, good)
        push(writer, remote, good)
        with pytest.raises(TransportError, match="names") as caught:
            add(writer, cache, liar, metadata=good.metadata)
        assert_refused(caught.value, liar)
        push(writer, remote, good, local=(1,), there=(1,))
        push(writer, add(writer, cache, liar), liar)

    def test_its_own_metadata_is_refused(self, world):
        writer, cache = world.writer()
        with pytest.raises(TransportError, match="own name"):
            writer.add_remote(writer.agent_name, writer.metadata(), MemoryKind.dram, cache.rows, cache.rows)

    @pytest.mark.parametrize(
        "mangled",
        [
            pytest.param(lambda blob, name: b"", id="empty"),
            pytest.param(lambda blob, name: b"\x00junk\xff" * 50, id="junk"),
            pytest.param(lambda blob, name: name, id="bare-name"),
            pytest.param(lambda blob, name: blob[: blob.index(name)], id="cut-before-the-name"),
            pytest.param(lambda blob, name: blob[: blob.index(name) + 3], id="cut-in-the-name"),
            pytest.param(lambda blob, name: blob[: blob.index(name) + len(name)], id="cut-after-the-name"),
            pytest.param(lambda blob, name: blob.replace(name, b"x" * len(name)), id="renamed"),
            pytest.param(
                lambda blob, name: blob[: blob.index(name) - 8] + b"\xff" * 8 + blob[blob.index(name) :],
                id="endless-name",
            ),
        ],
    )
    def test_junk_is_refused_and_does_no_harm(self, world, mangled):
        writer, cache = world.writer()
        peer = world.peer()
        assert_refused_without_a_trace(writer, cache, peer, metadata=mangled(peer.metadata, peer.agent_name.encode()))

    def test_damage_behind_the_name_makes_the_name_unusable_here(self, world):
        writer, cache = world.writer()
        damaged, bystander = world.peer(name="damaged"), world.peer(name="bystander")
        remote = add(writer, cache, bystander)
        for metadata in (damaged.metadata[:-1], damaged.metadata, damaged.metadata):
            with pytest.raises(TransportError) as caught:
                add(writer, cache, damaged, metadata=metadata)
            assert_refused(caught.value, damaged)
        push(writer, remote, bystander)
        writer.remove_remote(remote)
        assert_balanced(writer)
        other, other_cache = world.writer(name="other")
        push(other, add(other, other_cache, damaged), damaged)

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda rows: rows + np.array([0, 0, 0, 0, 1], np.uint64), id="one-block-more"),
            pytest.param(lambda rows: rows + np.array([1, 0, 0, 0, 0], np.uint64), id="a-byte-later"),
            pytest.param(lambda rows: rows - np.array([1, 0, 0, 0, 0], np.uint64), id="a-byte-earlier"),
            pytest.param(lambda rows: rows + np.array([0, 0, 1, 0, 0], np.uint64), id="another-device"),
            pytest.param(lambda rows: np.array([JUNK_ROW] * len(rows), np.uint64), id="elsewhere"),
            pytest.param(lambda rows: np.array([[*row[:3], 1 << 63, 3] for row in rows], np.uint64), id="stride-wraps"),
            pytest.param(lambda rows: rows | np.array([0, 0, 0, 0, 1 << 62], np.uint64), id="count-wraps"),
            pytest.param(lambda rows: rows | np.array([0, 0, 0, 0, 1 << 30], np.uint64), id="more-than-int32"),
            pytest.param(lambda rows: rows * np.array([1, 1, 1, 0, 1], np.uint64), id="no-stride"),
            pytest.param(lambda rows: rows * np.array([1, 1, 1, 1, 0], np.uint64), id="no-blocks"),
            pytest.param(lambda rows: rows * np.array([1, 0, 1, 1, 1], np.uint64), id="no-bytes"),
            pytest.param(lambda rows: rows[:0], id="no-rows"),
            pytest.param(lambda rows: rows.astype(np.int64), id="int64"),
        ],
    )
    def test_rows_that_do_not_fit_are_refused_and_everything_is_undone(self, world, change):
        writer, cache = world.writer()
        peer = world.peer()
        assert_refused_without_a_trace(writer, cache, peer, remote_rows=change(peer.rows))

    def test_rows_of_one_side_may_differ_in_count_and_length(self, world):
        """Layer 0 in whole blocks, layer 1 in halves here and in fewer blocks there: indices count what lies before."""
        writer, cache = world.writer(layers=2, blocks=4)
        peer = world.peer(layers=2, blocks=6)
        whole, other = cache.rows.tolist()
        halves = [other[0], other[1] // 2, 0, other[3] // 2, 2 * other[4]]
        local_rows = np.array([whole, halves, other], np.uint64)
        there = peer.rows.tolist()
        remote_rows = np.array([[*there[1][:4], 2], [there[1][0], 128, 0, there[1][3], 6], there[0]], np.uint64)
        remote = add(writer, cache, peer, local_rows=local_rows, remote_rows=remote_rows)
        # block 3 of layer 0 into block 1 of layer 1; the second half of block 2 of layer 1 into the first of block 5;
        # block 1 of layer 1 into block 4 of layer 0
        local, remote_indices = (3, 4 + 2 * 2 + 1, 4 + 8 + 1), (1, 2 + 5, 2 + 6 + 4)
        arrival = push(writer, remote, peer, local=local, there=remote_indices)
        expected = np.zeros((2, 6, 256), np.uint8)
        expected[1, 1] = cache.blocks[0, 3]
        expected[1, 5, :128] = cache.blocks[1, 2, 128:]
        expected[0, 4] = cache.blocks[1, 1]
        assert np.array_equal(arrival.blocks, expected)

    def test_the_sides_may_differ_in_their_number_of_rows(self, world):
        writer, cache = world.writer(layers=3, blocks=4)
        peer = world.peer(layers=2, blocks=4)
        remote = add(writer, cache, peer)
        arrival = push(writer, remote, peer, local=(2 * 4 + 3,), there=(4 + 1,))
        assert np.array_equal(arrival.blocks[1, 1], cache.blocks[2, 3])
        remote_rows = peer.rows[1:]
        writer.remove_remote(remote)
        arrival = push(writer, add(writer, cache, peer, remote_rows=remote_rows), peer, local=(5,), there=(2,))
        assert np.array_equal(arrival.blocks[1, 2], cache.blocks[1, 1])

    def test_segments_of_unequal_lengths_are_not_written(self, world):
        """Refused as a whole, before a byte moves: the first pair would have fitted."""
        writer, cache = world.writer()
        peer = world.peer()
        halves = peer.rows // np.array([1, 2, 1, 1, 1], np.uint64)
        remote = add(writer, cache, peer, remote_rows=np.concatenate([peer.rows, halves]))
        with pytest.raises(TransportError) as caught:
            writer.post_write(remote, indices(0, 1), indices(0, 16 + 1), b"never")
        assert (caught.value.code, caught.value.disconnected) == (FailureCode.write_failed, False)
        assert_quiet(peer, 0)
        assert not peer.blocks().any()
        push(writer, remote, peer)

    @pytest.mark.parametrize(("local", "there"), [((16,), (0,)), ((0,), (19,)), ((-1,), (0,)), ((0,), (-1,))])
    def test_an_index_beyond_the_last_segment_is_not_written(self, world, local, there):
        writer, cache = world.writer(layers=2, blocks=8)
        peer = world.peer(layers=2, blocks=8)
        uneven = np.concatenate([peer.rows, [[*peer.rows[0].tolist()[:4], 3]]]).astype(np.uint64)
        remote = add(writer, cache, peer, remote_rows=uneven)
        with pytest.raises(TransportError) as caught:
            writer.post_write(remote, indices(*local), indices(*there), b"never")
        assert caught.value.code is FailureCode.write_failed
        push(writer, remote, peer, local=(15,), there=(18,))

    def test_each_remote_may_have_its_own_selection_of_local_rows(self, world):
        writer, cache = world.writer(layers=4)
        peers = [world.peer(layers=2) for _ in range(2)]
        remotes = [
            add(writer, cache, peer, local_rows=rows)
            for peer, rows in zip(peers, (cache.rows[:2], cache.rows[2:]), strict=True)
        ]
        arrived = [push(writer, *pair).blocks[0, 0] for pair in zip(remotes, peers, strict=True)]
        assert np.array_equal(arrived, cache.blocks[[0, 2], 0])
        writer.remove_remote(remotes[0])
        push(writer, remotes[1], peers[1])

    def test_malformed_local_rows_are_the_callers_mistake(self, world):
        writer, cache = world.writer()
        peer = world.peer()
        with pytest.raises(UsageError, match="local side"):
            add(writer, cache, peer, local_rows=cache.rows[:, :3])
        assert_balanced(writer)
        push(writer, add(writer, cache, peer), peer)

    def test_local_rows_outside_the_registered_memory_are_refused(self, world):
        writer, cache = world.writer()
        peer = world.peer()
        assert_refused_without_a_trace(writer, cache, peer, local_rows=np.array([JUNK_ROW] * 2, np.uint64))

    def test_a_kind_of_memory_that_is_not_advertised_is_refused_and_undone(self, world):
        writer, cache = world.writer()
        peer = world.peer()
        assert_refused_without_a_trace(writer, cache, peer, kind=MemoryKind.vram)

    def test_metadata_stays_the_same(self, world):
        writer, cache = world.writer()
        before = writer.metadata()
        peer = world.peer()
        push(writer, add(writer, cache, peer), peer)
        assert writer.metadata() == before


class TestLostPeers:
    @pytest.mark.without(IN_PROCESS, reason="an agent cannot be killed without the process that this test runs in")
    def test_writes_to_a_killed_peer_fail_at_once(self, world):
        writer, cache, peer, remote = loaded(world)
        push(writer, remote, peer)
        world.kill(peer)
        assert_lost(failure_of_write(writer, remote), peer)
        assert_lost(failure_of_write(writer, remote), peer)
        writer.remove_remote(remote)
        assert_balanced(writer)

    @pytest.mark.without(IN_PROCESS, reason="an agent cannot be killed without the process that this test runs in")
    def test_a_write_in_flight_to_a_killed_peer_fails_at_once(self, world):
        writer, cache = world.writer()
        peer = world.peer()
        remote, write = in_flight_write(writer, cache, peer)
        world.kill(peer)
        assert_lost(failure_of_poll(writer, write), peer)
        with pytest.raises(UsageError, match="has ended"):
            writer.poll_write(write)
        writer.remove_remote(remote)
        assert_balanced(writer)

    @pytest.mark.without(IN_PROCESS, reason="an agent cannot be stopped without the process that this test runs in")
    def test_a_write_to_a_frozen_peer_neither_ends_nor_fails_until_it_thaws(self, world):
        writer, cache, peer, remote = loaded(world)
        push(writer, remote, peer)
        world.freeze(peer)
        write = writer.post_write(remote, indices(1), indices(1), b"thawed")
        end = time.monotonic() + 4 * QUIET_S
        while time.monotonic() < end:
            assert not writer.poll_write(write)
        world.thaw(peer)
        finish(writer, write, peer)
        assert await_arrivals(peer, 2)[1].notification.payload == b"thawed"

    def test_a_write_in_flight_fails_when_its_receiver_closes(self, world):
        writer, cache = world.writer()
        peer = world.peer()
        remote, write = in_flight_write(writer, cache, peer)
        peer.close()
        assert_lost(failure_of_poll(writer, write), peer)
        with pytest.raises(UsageError, match="has ended"):
            writer.poll_write(write)
        writer.remove_remote(remote)
        assert_balanced(writer)

    def test_a_lost_remote_stays_loaded_until_it_is_removed(self, world):
        writer, cache, peer, remote = loaded(world)
        push(writer, remote, peer)
        peer.close()
        assert_lost(failure_of_write(writer, remote), peer)
        with pytest.raises(TransportError, match="already loaded"):
            add(writer, cache, peer)
        writer.remove_remote(remote)
        assert_balanced(writer)

    def test_a_peer_that_has_gone_before_it_is_added_is_found_out_by_the_first_write(self, world):
        writer, cache = world.writer()
        peer = world.peer()
        peer.close()
        try:
            remote = add(writer, cache, peer)
        except TransportError as error:
            assert_refused(error, peer)
        else:
            assert_lost(failure_of_write(writer, remote), peer)
            writer.remove_remote(remote)
        assert_balanced(writer)

    @pytest.mark.without(IN_PROCESS, reason="an agent cannot be killed without the process that this test runs in")
    def test_a_restarted_peer_is_served_under_its_new_name_while_the_old_one_is_still_loaded(self, world):
        writer, cache = world.writer()
        old = world.peer(name="d0")
        old_remote = add(writer, cache, old)
        push(writer, old_remote, old)
        world.kill(old)
        new = world.peer(name="d0")
        new_remote = add(writer, cache, new)
        assert np.array_equal(push(writer, new_remote, new).blocks[0, 0], cache.blocks[0, 0])
        assert_lost(failure_of_write(writer, old_remote), old)
        writer.remove_remote(old_remote)
        push(writer, new_remote, new, local=(1,), there=(1,))

    def test_one_lost_peer_does_not_disturb_another(self, world):
        writer, cache = world.writer()
        lost, bystander = world.peer(name="lost"), world.peer(name="bystander")
        lost_remote, remote = add(writer, cache, lost), add(writer, cache, bystander)
        push(writer, lost_remote, lost)
        lost.close()
        write = writer.post_write(remote, indices(0), indices(0), b"undisturbed")
        assert_lost(failure_of_write(writer, lost_remote), lost)
        finish(writer, write, bystander)
        assert await_arrivals(bystander, 1)[0].notification.payload == b"undisturbed"


class TestTheEnd:
    def test_close_is_idempotent_bounded_and_complete_with_writes_in_flight(self, world):
        writer, cache = world.writer()
        peers = [world.peer(name=f"peer{i}") for i in range(3)]
        remotes = [add(writer, cache, peer) for peer in peers]
        for remote, peer in zip(remotes, peers, strict=True):
            push(writer, remote, peer)
        for peer in peers:
            peer.pause()
        for remote in remotes * 5:
            writer.post_write(remote, indices(1), indices(1), b"never ends")
        start = time.monotonic()
        writer.close()
        writer.close()
        assert time.monotonic() - start < 1.0
        assert_balanced(writer)

    def test_after_close_nothing_more_is_read_from_the_source(self, world):
        """The one thing that ends a WRITE for good: prefill's blocks are reusable once its agent is destroyed."""
        writer, cache = world.writer(layers=1, blocks=8, block_bytes=1 << 20)
        peer = world.peer(layers=1, blocks=8, block_bytes=1 << 20)
        remote = add(writer, cache, peer)
        push(writer, remote, peer)
        peer.pause()
        rest = indices(*range(1, 8))
        writer.post_write(remote, rest, rest, b"never ends")
        before = cache.blocks.copy()
        writer.close()
        cache.blocks[:] = ~before  # its next owner's
        peer.resume()
        assert_quiet(peer, 1)
        landed = peer.blocks()[0, 1:]
        assert np.all((landed == before[0, 1:]) | (landed == 0))

    @pytest.mark.without(IN_PROCESS, reason="an agent cannot be stopped without the process that this test runs in")
    def test_close_is_bounded_beside_a_frozen_peer(self, world):
        writer, cache, peer, remote = loaded(world)
        push(writer, remote, peer)
        world.freeze(peer)
        for _ in range(5):
            writer.post_write(remote, indices(1), indices(1), b"never ends")
        start = time.monotonic()
        writer.close()
        assert time.monotonic() - start < 1.0
        assert_balanced(writer)

    def test_a_closed_transport_refuses_everything(self, world):
        writer, cache = world.writer()
        peer = world.peer()
        remote, write = in_flight_write(writer, cache, peer)
        writer.close()
        uses = [
            writer.metadata,
            writer.notifications,
            lambda: add(writer, cache, peer),
            lambda: writer.remove_remote(remote),
            lambda: writer.post_write(remote, indices(0), indices(0), b""),
            lambda: writer.poll_write(write),
            lambda: writer.abandon_write(write),
        ]
        for use in uses:
            with pytest.raises(Closed, match=writer.agent_name):
                use()

    def test_another_thread_is_refused(self, world):
        writer, cache, peer, remote = loaded(world)
        write = writer.post_write(remote, indices(0), indices(0), b"mine")
        uses = [
            writer.metadata,
            writer.notifications,
            writer.close,
            lambda: add(writer, cache, peer),
            lambda: writer.remove_remote(remote),
            lambda: writer.post_write(remote, indices(0), indices(0), b""),
            lambda: writer.poll_write(write),
            lambda: writer.abandon_write(write),
        ]
        refused = []

        def use_all():
            for use in uses:
                try:
                    use()
                except UsageError as error:
                    refused.append(str(error))

        thread = threading.Thread(target=use_all)
        thread.start()
        thread.join()
        assert len(refused) == len(uses)
        assert all("belongs to another thread" in reason for reason in refused)
        finish(writer, write, peer)
        assert await_arrivals(peer, 1)[0].notification.payload == b"mine"

    def test_peers_come_and_go_without_a_trace(self, world):
        writer, cache = world.writer()
        cycles = 50 if world.name == PROCESSES else 200  # 60 ms each there, and one leaked descriptor would do

        def cycle():
            peer = world.peer()
            remote = add(writer, cache, peer)
            push(writer, remote, peer)
            peer.close()
            writer.remove_remote(remote)

        for _ in range(cycles):  # the first ones open what stays open, some of it late
            cycle()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(cycles):
            cycle()
        # a connection that was given up closes in its own time
        until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        assert_balanced(writer)
        assert writer.counts.writes_posted == 2 * cycles
