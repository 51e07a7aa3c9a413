"""What decode keeps of a link, what it says over it, and who waits for the next one."""

import pytest
from rank_cores import ALONE, Decode, Other, address_of, source_of

from kvpush import wire
from kvpush.decode_effects import HangUp
from kvpush.errors import FailureCode
from kvpush.parallel import Share


def make_two(**settings):
    return Decode(**settings), *(Other("p0", Share(tp_rank=rank, tp_size=2)) for rank in (0, 1))


def make_one(**settings):
    return Decode(**settings), Other("p0", ALONE)


def renew(decode, transfer_ids, *others):
    decode.do(decode.core.renew(transfer_ids, source=source_of(others), now_s=decode.now_s))


def fail_dials(decode, other, duration_s):
    """Nobody answers, and nobody refuses: every dial fails at once."""
    end_s = decode.now_s + duration_s
    while decode.now_s < end_s:
        if decode.dialled[address_of(other)] in decode.core._links:
            decode.loses(other)
        decode.advance(0.5)


def ends(decode):
    return [(event.transfer_id, event.outcome, event.code) for event in decode.events]


# --- other sizes of the engine at a known address ---------------------------------------------------------------------


@pytest.mark.parametrize("why", ["it is up", "a receive waits", "prefill is yet to be told of one"])
def test_a_rank_keeps_its_sizes_while(why):
    decode, left, right = make_two()
    decode.expect("first", [5] if why != "prefill is yet to be told of one" else [], [left, right])
    if why == "it is up":
        decode.meets(left, right)
        decode.arrives(left, 1, 0, 1)
        decode.arrives(right, 1, 0, 1)
    decode.expect("other", [6], [Other("p0", ALONE)])
    assert ends(decode)[-1] == ("other", "failed", "incompatible")


def test_a_dial_under_other_sizes_that_nobody_waits_for_is_given_up_and_its_answer_is_late():
    decode, left, right = make_two()
    alone = Other("p0", ALONE)
    renew(decode, ["queues"], alone)
    decode.do(decode.core.link_opened(decode.dialled[address_of(alone)], decode.now_s))  # Hello names the wrong sizes
    decode.expect("t", [5], [left, right])
    decode.hears(left, wire.Refused(FailureCode.incompatible, "name an address for each rank"))
    assert decode.core.counters["messages_late"] == 1 and not decode.events
    decode.meets(right)
    decode.advance(1)
    decode.meets(left)
    assert [hello.expected_share.tp_size for hello in decode.told(left, wire.Hello)] == [2]
    decode.arrives(left, 1, 0, 1)
    decode.arrives(right, 1, 0, 1)
    assert ends(decode) == [("t", "done", None)]


# --- links that end --------------------------------------------------------------------------------------------------


def test_an_idle_engine_that_is_let_go_is_told_goodbye_and_hung_up_on_once():
    decode, prefill = make_one(liveness_timeout_s=1000)
    decode.expect("t", [5], [prefill])
    decode.meets(prefill)
    decode.arrives(prefill, 1, 0, 1)
    link = decode.dialled[address_of(prefill)]
    sent = []
    while decode.core.gauges()["engines"]:
        decode.now_s += 1
        sent += decode.core.tick(decode.now_s)
    said = [effect.message for effect in sent if not isinstance(effect, HangUp)]
    assert [type(message) for message in said if not isinstance(message, wire.Heartbeat)] == [wire.Goodbye]
    assert [effect.link for effect in sent if isinstance(effect, HangUp)] == [link]


def test_a_lost_engine_is_hung_up_on_once_and_told_nothing():
    decode, prefill = make_one()
    decode.expect("t", [5], [prefill])
    decode.meets(prefill)
    decode.arrives(prefill, 1, 0, 1)
    decode.now_s += decode.config.liveness_timeout_s
    effects = decode.core.tick(decode.now_s)
    assert len([effect for effect in effects if isinstance(effect, HangUp)]) == 1
    decode.do(effects)
    assert not decode.told(prefill, wire.Goodbye)


def test_a_dropped_engine_whose_link_has_closed_is_told_nothing_more():
    decode, prefill = make_one()
    decode.expect("t", [5], [prefill])
    decode.meets(prefill)
    decode.do(decode.core.drop_engine("p0", decode.now_s))
    decode.loses(prefill)
    num_sent = len(decode.sent)
    decode.advance(decode.config.hold_timeout_s)
    assert len(decode.sent) == num_sent
    assert not decode.core.gauges()["engines"]


def test_the_loop_may_ask_where_a_link_leads_for_as_long_as_there_is_one():
    decode, prefill = make_one()
    decode.expect("t", [5], [prefill])
    link = decode.dialled[address_of(prefill)]
    assert decode.core.address_of(link) == address_of(prefill)
    decode.loses(prefill)
    assert decode.core.address_of(link) is None


# --- what goes on over the next link ---------------------------------------------------------------------------------


def test_rule14_another_engine_that_answers_later_proves_that_nothing_more_is_written():
    decode, prefill = make_one()
    decode.expect("t", [5], [prefill])
    decode.meets(prefill)
    decode.loses(prefill)
    decode.advance(1)
    decode.do(decode.core.link_opened(decode.dialled[address_of(prefill)], decode.now_s))
    theirs = Other("p9", ALONE).identity
    welcome = wire.Welcome("p9", theirs.incarnation, theirs.share, theirs.holdings, theirs.agent_name)
    decode.hears(prefill, welcome)
    (end,) = decode.events
    assert (end.outcome, end.code, end.blocks_reusable) == ("failed", "peer_restarted", True)


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_receive_outlives_the_record_of_an_engine_that_does_not_answer(is_registered):
    decode, prefill = make_one(handshake_attempts=10_000)
    decode.expect("t", [5], [prefill], deadline_s=1000)
    if is_registered:
        decode.meets(prefill)
    fail_dials(decode, prefill, 3 * (decode.config.engine_ttl_s + decode.config.evict_grace_s))
    assert decode.core.counters["engines_evicted"] >= 2 and not decode.events
    decode.meets(prefill)
    decode.arrives(prefill, 1, 0, 1)
    assert ends(decode) == [("t", "done", None)]


def test_a_leg_that_is_proven_quiet_has_nothing_to_ask_over_another_link():
    decode, left, right = make_two(hold_timeout_s=100)
    decode.expect("t", [5], [left, right])
    decode.meets(left, right)
    epoch = decode.told(left, wire.Register)[0].epoch
    decode.hears(left, wire.Failed("t", epoch, FailureCode.lease_expired, "?", settled=True))
    (end,) = decode.events
    assert not end.blocks_reusable  # right may still write
    decode.loses(left)
    decode.advance(1)
    assert decode.core.counters["handshakes_started"] == 2


def test_what_waits_for_a_process_that_is_gone_is_not_said_to_the_next_one():
    decode, prefill = make_one()
    decode.expect("t", [], [prefill])  # prefill is to be told that nothing is wanted
    decode.loses(prefill, refused=True)
    decode.advance(60)
    assert decode.core.counters["handshakes_started"] == 1


def test_renewals_alone_are_reason_enough_to_dial_again():
    decode, prefill = make_one()
    decode.expect("t", [5], [prefill])
    decode.do(decode.core.cancel("t", decode.now_s))
    decode.loses(prefill, refused=True)
    renew(decode, ["queues"], prefill)
    decode.advance(1)
    decode.meets(prefill)
    assert [renewal.transfer_ids for renewal in decode.told(prefill, wire.Renew)] == [["queues"]]


def test_a_deadline_says_how_long_it_was():
    decode, prefill = make_one()
    decode.expect("t", [5], [prefill], deadline_s=12)
    decode.advance(12)
    assert "within 12 s" in decode.events[0].reason


def test_a_leg_that_arrives_while_its_rank_is_dialled_again_asks_nothing_of_it():
    """Its pin would have kept the lost record in the place that the next generation needs."""
    decode, left, right = make_two(max_engines=2)
    decode.expect("t", [1, 2], [left, right])
    decode.expect("u", [3], [left, right])
    decode.meets(left, right)
    decode.do(decode.core.cancel("t", decode.now_s))  # left may still write
    decode.loses(right)
    decode.advance(0.6)
    decode.arrives(right, 1, 0, 2)
    decode.meets(right)
    assert [cancel.transfer_id for cancel in decode.told(right, wire.Cancel)] == []
    decode.loses(right)
    decode.advance(0.6)
    decode.meets(right)
    for rank in (left, right):
        decode.arrives(rank, 2, 0, 1)
    assert ends(decode)[-1] == ("u", "done", None)


@pytest.mark.parametrize("num_failures", [1, 3])
def test_renewals_are_given_up_with_the_attempts_to_reach_prefill(num_failures):
    decode, prefill = make_one(handshake_attempts=3)
    decode.expect("t", [5], [prefill])
    renew(decode, ["queues"], prefill)
    for _ in range(num_failures):
        decode.loses(prefill)
        decode.advance(0.5)
    decode.expect("later", [6], [prefill])
    decode.advance(0.5)
    decode.meets(prefill)
    assert len(decode.told(prefill, wire.Renew)) == (num_failures < 3)


def test_renewals_are_given_up_with_a_refusal_that_is_final():
    decode, prefill = make_one()
    renew(decode, ["queues"], prefill)
    decode.do(decode.core.link_opened(decode.dialled[address_of(prefill)], decode.now_s))
    decode.hears(prefill, wire.Refused(FailureCode.incompatible, "another model"))
    decode.expect("t", [5], [prefill])
    decode.advance(0.5)
    decode.meets(prefill)
    assert decode.told(prefill, wire.Register) and not decode.told(prefill, wire.Renew)
