"""How much may be registered, and that whoever is refused for a cheap reason costs nothing more. Rule 16."""

import itertools

import core_worlds
import numpy as np
import pytest
from core_worlds import SOON_S, connect, make_world, run_to_the_end
from rank_cores import ALONE, Other, Prefill

from kvpush import pushes, wire
from kvpush.errors import FailureCode
from kvpush.parallel import Share
from kvpush.pushes import Registration
from kvpush.terms import wanted_slots

NUM_BLOCKS = 8  # of one registration here

_epochs = itertools.count(1000)


@pytest.fixture
def looks(monkeypatch):
    """The transfers whose ids were looked at one by one."""
    seen = []
    unpacked = Registration.unpacked

    def watched(registration):
        seen.append(registration.transfer_id)
        return unpacked(registration)

    monkeypatch.setattr(Registration, "unpacked", watched)
    return seen


def make_three(**settings):
    world = make_world(**settings)
    prefill, first, second = world.prefill("p0"), world.decode("d0"), world.decode("d1")
    connect(world, prefill, first, second)
    return world, prefill, first, second


def link_of(prefill, decode):
    (link,) = [
        link for link, known in prefill.core._links.items() if known.hello.incarnation == decode.identity.incarnation
    ]
    return link


def register(prefill, decode, transfer_id, num_blocks=NUM_BLOCKS, *, packed=None, epoch=None):
    """What this engine is told of this registration: ``None`` for nothing, which is good news."""
    packed = wire.pack_block_ids(np.arange(num_blocks)) if packed is None else packed
    epoch = next(_epochs) if epoch is None else epoch
    message = core_worlds.register(transfer_id, epoch, packed, remaining_ms=60_000)
    effects = prefill.core.message(link_of(prefill, decode), message, prefill.now_s())
    told = [effect.message for effect in effects if isinstance(getattr(effect, "message", None), wire.Failed)]
    return next((failed for failed in told if failed.epoch == epoch), None)


def registered(prefill):
    return prefill.core.gauges()["blocks_registered"]


# --- cheap refusals come first ---------------------------------------------------------------------------------------


def when_closed(prefill, first, second):
    prefill.core.drain(prefill.now_s())
    return FailureCode.closing


def when_it_ended(prefill, first, second):
    prefill.cancel("t")
    return FailureCode.cancelled_by_peer


def when_another_has_it(prefill, first, second):
    assert register(prefill, second, "t") is None
    return FailureCode.claimed


def when_too_many_wait(prefill, first, second):
    assert register(prefill, first, "a") is None
    assert register(prefill, first, "b") is None
    return FailureCode.queue_full


def when_the_engine_has_too_much(prefill, first, second):
    assert register(prefill, first, "a", 20) is None
    return FailureCode.queue_full


def when_all_have_too_much(prefill, first, second):
    assert register(prefill, first, "a", 12) is None
    assert register(prefill, second, "b", 12) is None
    return FailureCode.queue_full


@pytest.mark.parametrize(
    "arrange",
    [
        when_closed,
        when_it_ended,
        when_another_has_it,
        when_too_many_wait,
        when_the_engine_has_too_much,
        when_all_have_too_much,
    ],
)
def test_rule16_a_registration_that_is_refused_for_a_cheap_reason_is_not_looked_at(arrange, looks):
    limits = {"max_registrations_per_engine": 2, "max_registered_blocks_per_engine": 24, "max_registered_blocks": 30}
    world, prefill, first, second = make_three(**limits)
    code = arrange(prefill, first, second)
    looks.clear()
    before = registered(prefill)
    told = register(prefill, first, "t")
    assert told is not None and told.code == code and told.settled
    assert looks == [] and registered(prefill) == before
    assert register(prefill, first, "t", packed=b"\0" * 64).code == code  # the same block, again and again


def test_rule16_an_identical_repetition_is_not_looked_at_either(looks):
    world, prefill, first, _ = make_three()
    assert register(prefill, first, "t", epoch=7) is None
    looks.clear()
    assert register(prefill, first, "t", epoch=7) is None
    assert looks == [] and registered(prefill) == NUM_BLOCKS


def test_rule19_ids_that_cannot_be_are_refused_at_once_and_replace_nothing(looks):
    world, prefill, first, _ = make_three()
    assert register(prefill, first, "t") is None
    looks.clear()
    told = register(prefill, first, "t", packed=b"\0" * 8)
    assert told.code == FailureCode.bad_blocks and "twice" in told.reason
    assert looks == ["t"] and registered(prefill) == NUM_BLOCKS  # the good one goes on waiting


@pytest.mark.parametrize("num_extra", [0, 1], ids=["short", "long"])
def test_a_short_list_is_unpacked_once_and_a_long_one_is_kept_packed_until_its_push(num_extra, monkeypatch):
    unpacked = []
    monkeypatch.setattr(pushes, "wanted_slots", lambda *args: unpacked.append(args) or wanted_slots(*args))
    world, prefill, first, _ = make_three(max_in_flight_bytes=1)
    unpacked.clear()
    assert register(prefill, first, "t", pushes.SHORT_LIST_BLOCKS + num_extra) is None
    prefill.push("t", [3], last=False)
    assert len(unpacked) == 1 + num_extra


def test_a_newer_life_of_decode_is_not_told_that_its_epochs_are_old():
    prefill, before, after = Prefill(), Other("d0", Share()), Other("d0", Share())
    prefill.meets(before)
    prefill.push("t", [1])
    prefill.registers(before, "t", 7, [5])
    prefill.answers(before)
    prefill.meets(after)  # while a WRITE to the former is in flight
    prefill.registers(after, "t", 1, [5])
    assert [failed.code for failed in prefill.told(after, wire.Failed)] == [FailureCode.already_served]


# --- how much may be registered --------------------------------------------------------------------------------------


def test_rule16_what_waits_is_kept_as_packed_as_it_came():
    world, prefill, first, _ = make_three()
    packed = wire.pack_block_ids(np.arange(NUM_BLOCKS))
    register(prefill, first, "t", packed=packed)
    waiting = prefill.core._registrations.find("t", (0, 0))
    assert [want.block_ids for want in waiting.wants] == [packed]


@pytest.mark.parametrize("is_pushed", [False, True], ids=["registered first", "pushed first"])
def test_rule16_one_that_is_too_large_by_itself_is_told_so_and_never_to_try_again(is_pushed):
    world, prefill, first, _ = make_three(max_registered_blocks_per_engine=8)
    if is_pushed:
        prefill.push("t", [3, 4])
    told = register(prefill, first, "t", 9)
    assert told.code == FailureCode.bad_blocks
    assert "9 blocks" in told.reason and "max_registered_blocks_per_engine=8" in told.reason
    assert register(prefill, first, "t", 8) is None or is_pushed  # the transfer itself is not spoilt
    assert registered(prefill) == (0 if is_pushed else 8)


def test_rule16_room_comes_back_with_every_kind_of_end():
    world, prefill, first, second = make_three(max_registered_blocks_per_engine=8)
    assert register(prefill, first, "t") is None
    assert register(prefill, first, "u", 1).code == FailureCode.queue_full
    assert register(prefill, first, "t", 8) is None  # a newer registration takes the place of the old one
    prefill.cancel("t")
    assert registered(prefill) == 0
    assert register(prefill, first, "v") is None
    prefill.core.message(link_of(prefill, first), wire.Cancel("v", next(_epochs) - 1, "deadline", ""), prefill.now_s())
    assert registered(prefill) == 0
    receive, push = first.expect("w", list(range(8)), prefill), prefill.push("w", list(range(8)))
    world.run_until(lambda: receive.is_over and push.is_over)
    assert receive.outcome == push.outcome == "done" and registered(prefill) == 0
    assert register(prefill, first, "x") is None
    assert register(prefill, second, "y") is None
    assert registered(prefill) == 16
    first.kill()
    world.advance(SOON_S)
    assert registered(prefill) == 8
    world.advance(100.0)  # the other's deadline
    assert registered(prefill) == 0
    run_to_the_end(world)


def test_rule16_all_engines_together_have_just_so_much_and_a_newer_registration_has_the_room_of_its_older():
    world, prefill, first, second = make_three(max_registered_blocks_per_engine=16, max_registered_blocks=16)
    assert register(prefill, first, "t", 8) is None
    assert register(prefill, second, "u", 8) is None
    assert register(prefill, first, "t", 8) is None
    assert register(prefill, first, "v", 1).code == FailureCode.queue_full
    assert registered(prefill) == 16


@pytest.mark.parametrize("asks", ["cancels", "registers"])
def test_rule16_what_a_write_in_flight_took_on_a_link_that_broke_makes_no_room_on_the_next(asks):
    prefill, other = Prefill(max_registered_blocks_per_engine=8), Other("d0", Share())
    prefill.meets(other)
    prefill.push("t", range(8))
    prefill.registers(other, "t", 1, range(8))
    prefill.answers(other)
    prefill.do(prefill.core.link_closed(other.link, "broken", prefill.now_s))
    other.link = b"again"
    prefill.meets(other)
    if asks == "cancels":
        prefill.hears(other, wire.Cancel("t", 1, FailureCode.deadline, ""))
    else:
        prefill.registers(other, "t", 1, range(8))
    prefill.settles(prefill.write_to(other))
    assert [drained.epoch for drained in prefill.told(other, wire.Drained)] == [1]
    prefill.registers(other, "u", 2, range(8))
    prefill.registers(other, "v", 3, range(1))
    assert prefill.told(other, wire.Failed)[-1].code == FailureCode.queue_full
    assert registered(prefill) == 8


def test_rule16_what_has_ended_makes_no_room_for_its_successor():
    """A rank that asks only for what prefill does not have is over at once, though the push waits for another rank."""
    prefill = Prefill(max_registered_blocks_per_engine=8)
    left, right = (Other("d0", Share(tp_rank=rank, tp_size=2)) for rank in (0, 1))
    prefill.meets(left, right)
    prefill.push("t", [1])
    wants = (wire.Want("unknown", 0, wire.pack_block_ids(np.arange(8))),)
    prefill.hears(left, wire.Register("t", 1, wants, 60_000))
    prefill.registers(left, "u", 2, range(8))
    assert prefill.told(left, wire.Failed) == []
    prefill.hears(left, wire.Register("t", 3, wants, 60_000))
    assert [(failed.epoch, failed.code) for failed in prefill.told(left, wire.Failed)] == [(3, "queue_full")]


def test_rule16_a_push_that_has_begun_still_counts():
    """Chunked prefill: the registration is needed, whole, until the last chunk."""
    world, prefill, first, _ = make_three(max_registered_blocks_per_engine=8)
    receive = first.expect("t", list(range(6)), prefill)
    prefill.push("t", [0, 1], last=False)
    world.advance(SOON_S)
    assert registered(prefill) == 6
    assert register(prefill, first, "u", 3).code == FailureCode.queue_full
    prefill.push("t", [2, 3, 4, 5], first_block=2)
    world.run_until(lambda: receive.is_over)
    assert receive.outcome == "done" and registered(prefill) == 0
    run_to_the_end(world)


def test_an_id_that_was_withdrawn_may_be_registered_again_and_not_once_more_for_what_was_withdrawn():
    prefill, other = Prefill(), Other("d0", ALONE)
    prefill.meets(other)
    prefill.hears(other, wire.Withdraw("t", 1, FailureCode.cancelled_by_peer, "?"))
    prefill.registers(other, "t", 1, [5])
    assert [(failed.epoch, failed.code) for failed in prefill.told(other, wire.Failed)] == [(1, "cancelled_by_peer")]
    prefill.registers(other, "t", 2, [6])
    prefill.push("t", [3])
    prefill.answers(other)
    prefill.settles(prefill.write_to(other))
    assert [end.outcome for end in prefill.events] == ["done"]


def test_a_registration_that_was_cancelled_is_refused_when_it_comes_again_over_another_link():
    prefill, other = Prefill(), Other("d0", ALONE)
    prefill.meets(other)
    prefill.registers(other, "t", 5, [5])
    prefill.hears(other, wire.Cancel("t", 5, FailureCode.cancelled_by_peer, "?"))
    prefill.registers(other, "t", 5, [5])
    assert [(failed.epoch, failed.code) for failed in prefill.told(other, wire.Failed)] == [(5, "cancelled_by_peer")]
    prefill.registers(other, "t", 6, [5])
    assert len(prefill.told(other, wire.Failed)) == 1


def test_nothing_is_kept_of_a_transfer_whose_registrations_have_ended():
    prefill, other = Prefill(), Other("d0", ALONE)
    prefill.meets(other)
    for epoch, name in enumerate(("cancelled", "pushed"), 1):
        prefill.registers(other, name, epoch, [5])
    assert prefill.core._registrations.transfer_ids() == ["cancelled", "pushed"]
    prefill.hears(other, wire.Cancel("cancelled", 1, FailureCode.cancelled_by_peer, "?"))
    prefill.push("pushed", [3])
    assert prefill.core._registrations.transfer_ids() == []
