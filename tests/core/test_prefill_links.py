"""What prefill keeps of a link, and what it says over it."""

from dataclasses import replace

from rank_cores import ALONE, Other, Prefill

from kvpush import wire
from kvpush.errors import Failure, FailureCode
from kvpush.lifecycle import State
from kvpush.parallel import Share
from kvpush.prefill_effects import ReleasePeer


def make_linked(**settings):
    prefill, other = Prefill(**settings), Other("d0", ALONE)
    prefill.meets(other)
    return prefill, other


def gauges(prefill, *names):
    found = prefill.core.gauges()
    return tuple(found[name] for name in names)


def test_rule17_a_malformed_message_is_answered_with_what_was_wrong():
    prefill, other = make_linked()
    prefill.do(prefill.core.malformed(other.link, Failure(FailureCode.malformed, "no such field"), prefill.now_s))
    (refused,) = prefill.told(other, wire.Refused)
    assert (refused.code, refused.reason) == ("malformed", "no such field")


def test_a_second_hello_over_the_same_link_keeps_what_was_registered_over_it():
    prefill, other = make_linked()
    prefill.registers(other, "waits", 1, [5])
    prefill.push("pushed", [1])
    prefill.registers(other, "pushed", 2, [6])
    prefill.meets(other)
    prefill.do(prefill.core.link_closed(other.link, "gone", prefill.now_s))
    assert gauges(prefill, "links", "registrations_waiting", "pushes_open") == (0, 0, 0)
    assert [(end.transfer_id, end.code) for end in prefill.events] == [("pushed", "peer_lost")]


def test_a_link_is_forgotten_with_its_goodbye():
    prefill, other = make_linked()
    prefill.hears(other, wire.Goodbye("done"))
    assert gauges(prefill, "links") == (0,)
    assert prefill.core.counters["engines_stale_lost"] == 0
    prefill.do(prefill.core.link_closed(other.link, "gone", prefill.now_s))
    prefill.hears(other, wire.Heartbeat())
    assert prefill.core.counters["messages_before_hello"] == 1


def test_an_eager_handshake_that_failed_is_tried_again_with_the_first_hello_after_its_backoff():
    prefill, other = make_linked(eager_handshake=True, handshake_backoff_min_s=1, handshake_backoff_max_s=1)
    (asked,) = prefill.told(other, wire.MetadataRequest)
    prefill.hears(other, wire.MetadataUnavailable(asked.attempt, FailureCode.not_ready, "?"))
    prefill.meets(other)
    assert len(prefill.told(other, wire.MetadataRequest)) == 1
    prefill.advance(1)
    prefill.meets(other)
    assert len(prefill.told(other, wire.MetadataRequest)) == 2


def test_rule18_close_lets_every_engine_go():
    prefill, other = make_linked()
    prefill.registers(other, "t", 1, [5])
    prefill.push("t", [3])
    prefill.answers(other)
    generation = prefill.registry.generation_of("d0")
    prefill.settles(prefill.write_to(other))
    effects = prefill.core.close(prefill.now_s)
    assert len([effect for effect in effects if isinstance(effect, ReleasePeer)]) == 1
    assert prefill.registry.state_of(generation) is State.evicted


def test_rule10_a_chunk_of_a_push_that_is_ending_is_counted_and_not_written():
    prefill, other = make_linked()
    prefill.registers(other, "t", 1, [5, 6])
    prefill.push("t", [3], last=False)
    prefill.answers(other)
    (write_id,) = prefill.posted
    prefill.do(prefill.core.cancel("t", prefill.now_s))
    prefill.push("t", [4], index=1, first_block=1)
    assert prefill.core.counters["chunks_after_end"] == 1
    assert list(prefill.posted) == [write_id]
    prefill.settles(write_id)
    assert [end.outcome for end in prefill.events] == ["cancelled"] and not prefill.posted


def test_rule19_an_engine_withdraws_from_no_push_of_another():
    shares = [Share(tp_rank=rank, tp_size=2) for rank in (0, 1)]
    prefill, owner, stranger = Prefill(), Other("d0", shares[0]), Other("d1", shares[1])
    prefill.meets(owner, stranger)
    prefill.push("t", [3])
    prefill.registers(owner, "t", 1, [5])
    prefill.hears(stranger, wire.Withdraw("t", 1, FailureCode.cancelled_by_peer, "?"))
    prefill.answers(owner)
    assert prefill.events == [] and len(prefill.posted) == 1


def test_rule19_an_epoch_that_decode_uses_for_two_transfers_counts_for_each():
    prefill, other = make_linked()
    for name, block in (("t", 5), ("u", 6)):
        prefill.registers(other, name, 1, [block])
        prefill.push(name, [block])
    prefill.answers(other)
    first, second = sorted(prefill.posted)
    prefill.hears(other, wire.Cancel("u", 1, FailureCode.cancelled_by_peer, "?"))
    prefill.settles(first)
    assert not prefill.told(other, wire.Drained)
    prefill.settles(second)
    assert [drained.transfer_id for drained in prefill.told(other, wire.Drained)] == ["u"]
    assert [(end.transfer_id, end.outcome) for end in prefill.events] == [("t", "done"), ("u", "cancelled")]


def test_rule19_a_rank_does_not_take_over_what_another_has_registered():
    """Both say that they are one process."""
    prefill = Prefill()
    first, second = (Other("d0", Share(tp_rank=rank, tp_size=2)) for rank in (0, 1))
    second.identity = replace(second.identity, incarnation=first.identity.incarnation)
    prefill.meets(first, second)
    prefill.registers(first, "t", 1, [5])
    prefill.registers(second, "t", 2, [5])
    prefill.push("t", [3])
    prefill.answers(first, second)
    prefill.hears(second, wire.Cancel("t", 1, FailureCode.cancelled_by_peer, "?"))
    assert [drained.epoch for drained in prefill.told(second, wire.Drained)] == [
        1
    ]  # nothing of its own is written there
    prefill.settles(prefill.write_to(first))
    prefill.settles(prefill.write_to(second))
    assert [end.outcome for end in prefill.events] == ["done"]
