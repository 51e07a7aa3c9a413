"""A transfer id that is used again says nothing about its earlier use, and nothing of that one speaks for the new."""

from __future__ import annotations

import peers
import pytest
from peers import until

import kvpush
from kvpush.testing import Delivery, FakeFabric


class Fence:
    """What the loop sees of a torch.cuda.Event."""

    def __init__(self):
        self.is_passed = False
        self.queries = 0

    def query(self):
        self.queries += 1
        return self.is_passed


def is_asked(fence):
    asked = fence.queries
    until(lambda: fence.queries > asked + 20, what="the loop asks")


def test_a_fence_of_a_cancelled_push_does_not_speak_for_a_new_one(pair):
    prefill, decode = pair
    old, new = Fence(), Fence()
    prefill.pusher.push("t1", [5], ready=old)
    is_asked(old)
    prefill.pusher.cancel("t1")
    assert prefill.inbox.outcome("t1").outcome == "cancelled"
    prefill.inbox.finished.clear()

    prefill.pusher.push("t1", [6], ready=new)
    decode.expect("t1", [1], prefill.address)
    old.is_passed = True
    is_asked(new)
    assert decode.arena.is_clean() and prefill.pusher.stats()["writes_in_flight"] == 0
    prefill.arena.fill("t1", [6])
    new.is_passed = True
    assert prefill.inbox.outcome("t1").outcome == decode.inbox.outcome("t1").outcome == "done"
    assert decode.arena.holds("t1", [1])


def test_a_fence_of_a_chunk_that_came_after_the_end_does_not_speak_for_a_new_push(pair):
    """The caller has not polled the end of the first push yet, and adds a chunk to it."""
    prefill, decode = pair
    old, new = Fence(), Fence()
    prefill.pusher.push("t1", [5], last=False)
    prefill.pusher.cancel("t1")
    prefill.pusher.push("t1", [6], first_block=1, ready=old)
    assert prefill.inbox.outcome("t1").outcome == "cancelled"
    prefill.inbox.finished.clear()

    prefill.push("t1", [7], last=False)
    prefill.pusher.push("t1", [8], first_block=1, ready=new)
    decode.expect("t1", [1, 2], prefill.address)
    old.is_passed = True
    until(lambda: decode.arena.holds("t1", [1]), what="the chunk that has no fence")
    is_asked(new)
    assert decode.arena.is_clean([2])
    prefill.arena.fill("t1", [8], first_block=1)
    new.is_passed = True
    assert prefill.inbox.outcome("t1").outcome == decode.inbox.outcome("t1").outcome == "done"
    assert decode.arena.holds("t1", [1, 2])


@pytest.fixture
def stalled():
    """Real links and loops over a fake fabric on which no WRITE ends by itself; and a transfer that is stuck there."""
    fabric = FakeFabric(delivery=Delivery.manual)
    config = kvpush.Config(stall_timeout_s=0.2)
    shape = peers.Shape()
    source, sink = peers.Arena(shape), peers.Arena(shape)
    with (
        kvpush.PrefillPusher(
            "p0", source.caches, shape.spec(), config=config, transport_factory=fabric.transport
        ) as pusher,
        kvpush.DecodeReceiver(
            "d0", sink.caches, shape.spec(), config=config, transport_factory=fabric.transport
        ) as receiver,
    ):
        receiver.expect("t1", [1], source=pusher.address, source_engine_id="p0")
        pusher.push("t1", [5])
        yield fabric, pusher, receiver


def test_an_id_whose_blocks_are_held_is_refused_until_they_are_released(stalled):
    fabric, pusher, receiver = stalled
    sent, got = peers.Inbox(pusher), peers.Inbox(receiver)
    for inbox in (sent, got):
        end = inbox.outcome("t1")
        assert (end.outcome, end.code, end.blocks_reusable) == ("failed", "write_stalled", False)
    with pytest.raises(kvpush.UsageError, match="'t1' are still held"):
        pusher.push("t1", [6])
    with pytest.raises(kvpush.UsageError, match="'t1' are still held"):
        receiver.expect("t1", [2], source=pusher.address, source_engine_id="p0")
    fabric.drain()
    assert (sent.reusable("t1"), got.reusable("t1")) == ("proven", "proven")
    pusher.push("t1", [6])  # another transfer, for all that kvpush knows
    pusher.cancel("t1")
    receiver.expect("t1", [2], source=pusher.address, source_engine_id="p0")


def test_a_chunk_of_a_push_whose_end_has_been_polled_is_refused_and_another_attempt_is_not(pair):
    # it was taken for a push of its own, which nobody registered for and which held its blocks for a whole lease
    prefill, decode = pair
    decode.expect("t1", [1, 2], prefill.address)
    prefill.push("t1", [5], last=False)
    decode.receiver.cancel("t1")
    assert prefill.inbox.outcome("t1").outcome == "cancelled"
    for last in (False, True):
        with pytest.raises(kvpush.TransferEnded, match=r"'t1' has ended before this chunk \(cancelled\)"):
            prefill.pusher.push("t1", [6], first_block=1, last=last)
    assert decode.inbox.outcome("t1").outcome == "cancelled"
    assert decode.inbox.reusable("t1")
    assert prefill.pusher.stats()["pushes"] == 1
    forget(prefill, decode)
    prefill.push("t1", [5, 6])
    decode.expect("t1", [1, 2], prefill.address)
    assert decode.inbox.outcome("t1").outcome == prefill.inbox.outcome("t1").outcome == "done"


def test_after_the_last_chunk_an_id_may_be_used_again_for_anything(pair):
    prefill, decode = pair
    for first_block, block in enumerate((5, 6, 7)):
        prefill.push("t1", [block], first_block=first_block)
        decode.expect("t1", [first_block], prefill.address, first_block=first_block)
        assert decode.inbox.outcome("t1").outcome == prefill.inbox.outcome("t1").outcome == "done"
        forget(prefill, decode)


def forget(*sides):
    """What the inboxes know: the next events are of another use of the id."""
    for side in sides:
        side.inbox.finished.clear()
        side.inbox.released.clear()


@pytest.mark.parametrize("last", ["x", 1, None])
def test_last_is_a_truth_value(pair, last):
    prefill, _ = pair
    with pytest.raises(kvpush.UsageError, match="last="):
        prefill.pusher.push("t1", [5], last=last)
