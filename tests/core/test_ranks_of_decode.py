"""A receive from a prefill engine of several ranks: done when the last part of the last rank is there, not before."""

import pytest
from rank_cores import Decode, Other, address_of, source_of

from kvpush import wire
from kvpush.errors import FailureCode
from kvpush.parallel import Share


def make_two(**settings):
    """A decode rank, and the two prefill ranks that hold half of its heads each; connected."""
    decode = Decode(**settings)
    others = [Other("p0", Share(tp_rank=rank, tp_size=2)) for rank in (0, 1)]
    decode.expect("t", [5, 6], others)
    return decode, *others


def make_registered(**settings):
    decode, left, right = make_two(**settings)
    decode.meets(left, right)
    return decode, left, right


def outcomes(decode):
    return [(event.transfer_id, str(event.outcome)) for event in decode.events if hasattr(event, "outcome")]


def test_it_registers_with_every_rank_that_holds_its_heads():
    decode, left, right = make_registered()
    for other in (left, right):
        (hello,) = decode.told(other, wire.Hello)
        assert hello.expected_share == other.identity.share
        (registration,) = decode.told(other, wire.Register)
        assert wire.unpack_block_ids(registration.wants[0].block_ids).tolist() == [5, 6]


def test_each_rank_is_asked_as_soon_as_it_is_up():
    decode, left, right = make_two()
    decode.meets(left)
    assert len(decode.told(left, wire.Register)) == 1
    assert decode.told(right, wire.Register) == []


def test_d10_done_comes_with_the_last_part_of_the_last_rank():
    decode, left, right = make_registered()
    decode.arrives(left, 1, 0, 2)
    decode.arrives(left, 1, 0, 2)
    decode.arrives(right, 1, 0, 1)
    assert outcomes(decode) == []
    decode.arrives(right, 1, 1, 1)
    assert outcomes(decode) == [("t", "done")]
    assert decode.events[0].blocks_reusable


def test_d11_parts_are_counted_and_not_reports():
    """Layers of one rank, in any order, some twice."""
    decode, left, right = make_registered()
    decode.arrives(right, 1, 0, 2)
    for first_slot, layer in ((1, 1), (0, 1), (0, 1), (1, 1), (0, 0)):
        decode.arrives(left, 1, first_slot, 1, layers=range(layer, layer + 1))
    assert outcomes(decode) == []
    decode.arrives(left, 1, 1, 1, layers=range(1))
    assert outcomes(decode) == [("t", "done")]


def test_j7_one_rank_cannot_speak_for_another():
    decode, left, right = make_registered()
    decode.arrives(left, 1, 0, 2)
    decode.arrives(right, 1, 0, 2, agent=left.identity.agent_name)
    assert outcomes(decode) == []
    assert decode.core.counters["notifications_foreign"] == 1


def test_a_failure_of_one_rank_ends_the_receive_and_cancels_the_other():
    decode, left, right = make_registered()
    decode.hears(left, wire.Failed("t", 1, FailureCode.write_failed, "no", settled=True))
    (end,) = decode.events
    assert (end.outcome, end.code, end.blocks_reusable) == ("failed", "write_failed", False)
    assert [message.epoch for message in decode.told(right, wire.Cancel)] == [1]
    assert decode.told(left, wire.Cancel) == []
    decode.hears(right, wire.Drained("t", 1))
    released = decode.events[1]
    assert released.proven and released.transfer_id == "t"
    assert decode.core.num_receives == 0


def test_blocks_are_held_until_every_rank_is_quiet():
    decode, left, right = make_registered()
    decode.do(decode.core.cancel("t", decode.now_s))
    assert not decode.events[0].blocks_reusable
    decode.hears(left, wire.Drained("t", 1))
    assert len(decode.events) == 1
    decode.arrives(right, 1, 0, 2)  # everything from the other: nothing more of it can come
    assert [type(event).__name__ for event in decode.events] == ["ReceiveFinished", "BlocksReleased"]


def test_a_rank_that_was_never_registered_with_holds_nothing():
    decode, left, right = make_two()
    decode.meets(left)
    decode.do(decode.core.cancel("t", decode.now_s))
    assert not decode.events[0].blocks_reusable
    decode.hears(left, wire.Drained("t", 1))
    assert decode.events[1].proven


def test_a_dead_rank_fails_the_receive_and_a_living_one_is_waited_for():
    """D10: with a dead rank the request fails, not succeeds."""
    decode, left, right = make_registered()
    decode.arrives(left, 1, 0, 2)
    decode.loses(right)
    decode.advance(1)
    decode.loses(right, refused=True)
    (end,) = decode.events
    assert (end.outcome, end.code, end.blocks_reusable) == ("failed", "peer_lost", True), "the first rank has finished"


def test_the_death_of_a_rank_that_has_written_everything_does_not_matter():
    decode, left, right = make_registered()
    decode.arrives(left, 1, 0, 2)
    decode.loses(left)
    decode.advance(1)
    decode.arrives(right, 1, 0, 2)
    assert outcomes(decode) == [("t", "done")]


def test_a_rank_that_has_written_everything_may_move_elsewhere():
    decode, left, right = make_registered()
    decode.arrives(left, 1, 0, 2)
    moved = source_of([left, right])
    moved.addresses[left.identity.rank] = ("127.0.0.1", 5)
    decode.do(decode.core.renew(["another"], source=moved, now_s=decode.now_s))
    assert [str(engine.reason) for engine in decode.registry.snapshot() if engine.rank == (0, 0)] == ["None"]
    assert outcomes(decode) == []
    decode.arrives(right, 1, 0, 2)
    assert outcomes(decode) == [("t", "done")]


def test_a_rank_that_restarts_before_it_wrote_fails_the_receive():
    decode, left, right = make_registered()
    decode.loses(right)
    decode.advance(1)
    successor = Other("p0", right.identity.share)
    decode.meets(successor)
    (end,) = decode.events
    assert (end.outcome, end.code) == ("failed", "peer_restarted")
    assert not end.blocks_reusable, "the other rank still writes"
    assert [message.epoch for message in decode.told(left, wire.Cancel)] == [1]


def test_a_rank_that_is_never_reached_fails_the_receive_for_all():
    decode, left, right = make_two(handshake_attempts=1)
    decode.meets(left)
    decode.loses(right)
    (end,) = decode.events
    assert (end.outcome, end.code, end.blocks_reusable) == ("failed", "peer_lost", False)
    assert [message.epoch for message in decode.told(left, wire.Cancel)] == [1]


def test_a_receive_that_is_over_does_not_end_again_when_a_rank_is_given_up():
    decode, left, right = make_two(handshake_attempts=1)
    decode.meets(left)
    decode.do(decode.core.cancel("t", decode.now_s))
    decode.loses(right)
    assert outcomes(decode) == [("t", "cancelled")]
    decode.hears(left, wire.Drained("t", 1))
    assert decode.events[-1].proven


def test_the_deadline_says_what_came_from_whom():
    decode, left, right = make_registered(receive_deadline_s=5)
    decode.arrives(left, 1, 0, 2)
    decode.arrives(right, 1, 0, 1)
    decode.advance(31)
    end = decode.events[0]
    assert (end.outcome, end.code) == ("expired", "deadline")
    assert "1 of 2 ranks" in end.reason and "(0, 1) 1 of 2 blocks" in end.reason


def test_the_deadline_names_up_to_eight_ranks():
    decode = Decode(total_heads=16)
    others = [Other("p0", Share(tp_rank=rank, tp_size=16), total_heads=16) for rank in range(16)]
    decode.expect("t", [5, 6], others, deadline_s=1.0)
    decode.meets(*others[:15])  # nobody has reached the last one
    decode.arrives(others[0], 1, 0, 2)
    decode.arrives(others[8], 1, 0, 1)
    decode.advance(1)
    parts = [f"of (0, {rank}) {int(rank == 8)} of 2 blocks" for rank in range(1, 9)]
    assert f"the parts of 1 of 16 ranks (pp, tp) ({'; '.join(parts)}) came" in decode.events[0].reason


@pytest.mark.parametrize(("is_met", "arrived"), [(False, 0), (True, 2)])
def test_the_deadline_says_what_came_from_the_only_rank(is_met, arrived):
    decode, other = Decode(handshake_timeout_s=2), Other("p0", Share())
    decode.expect("t", [5, 6, 7], [other], deadline_s=1.0)
    if is_met:
        decode.meets(other)
        decode.arrives(other, 1, 0, 2)
        decode.arrives(other, 1, 2, 1, layers=range(1))  # of its two layers
    decode.advance(1)
    assert f"'t': {arrived} of 3 blocks came from prefill engine 'p0'" in decode.events[0].reason


# --- pipeline stages -------------------------------------------------------------------------------------------------


def make_stages(*layers_of_stage, **settings):
    decode = Decode(**settings)
    stages = [
        Other("p0", Share(pp_rank=stage, pp_size=len(layers_of_stage)), layers=layers)
        for stage, layers in enumerate(layers_of_stage)
    ]
    decode.expect("t", [5, 6], stages)
    decode.meets(*stages)
    return decode, *stages


def test_every_stage_writes_its_layers():
    decode, first, second = make_stages(["a"], ["b"])
    decode.arrives(first, 1, 0, 2, layers=range(1))
    assert outcomes(decode) == []
    decode.arrives(second, 1, 0, 2, layers=range(1))
    assert outcomes(decode) == [("t", "done")]


def test_a_stage_without_a_layer_of_ours_is_told_so_and_not_waited_for():
    decode, first, second, third = make_stages(["a"], ["b"], ["c"])
    (registration,) = decode.told(third, wire.Register)
    assert registration.wants == ()
    assert [engine.in_flight for engine in decode.registry.snapshot()] == [1, 1, 0]
    decode.arrives(first, 1, 0, 2, layers=range(1))
    decode.arrives(second, 1, 0, 2, layers=range(1))
    assert outcomes(decode) == [("t", "done")]


def test_a_stage_without_a_layer_of_ours_may_be_the_last_to_be_reached():
    decode = Decode(layers=["a"], handshake_attempts=3)
    first, second = (
        Other("p0", Share(pp_rank=stage, pp_size=2), layers=[layer]) for stage, layer in enumerate(("a", "b"))
    )
    decode.expect("t", [5, 6], [first, second])
    decode.meets(first)
    decode.loses(second)
    decode.arrives(first, 1, 0, 2, layers=range(1))
    assert outcomes(decode) == []  # it might hold layer "a", too
    decode.advance(1)
    decode.meets(second)
    assert outcomes(decode) == [("t", "done")]
    failures = {engine.rank: engine.handshake_failures for engine in decode.registry.snapshot()}
    assert failures == {(0, 0): 0, (1, 0): 1}  # nothing that the second one wrote has arrived


def test_a_layer_that_no_stage_holds_fails_the_receive_and_is_named():
    decode, first, second = make_stages(["a"], ["c"])
    (end,) = decode.events
    assert (end.outcome, end.code) == ("failed", "incompatible")
    assert "'b'" in end.reason and "no stage" in end.reason
    assert [message.epoch for message in decode.told(first, wire.Cancel)] == [1]
    # the last one was not asked: a registration for nothing would let it call its push done
    assert not decode.told(second, wire.Register)
    assert [message.epoch for message in decode.told(second, wire.Withdraw)] == [1]


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ("abcde", "of the 5 layers of decode engine 'd0', no stage of it holds 'b', 'c', 'd', 'e'"),
        ("abcdef", "of the 6 layers of decode engine 'd0', no stage of it holds 'b', 'c', 'd', 'e' and 1 more"),
    ],
)
def test_up_to_four_layers_are_named_and_the_others_counted(layers, named):
    decode, *_ = make_stages(["a"], ["x"], layers=list(layers))
    (end,) = decode.events
    assert f"layers: {named}; prefill engine 'p0' has 2" in end.reason


def test_what_was_never_asked_for_holds_no_block():
    decode, alone = make_stages(["a"])
    (end,) = decode.events
    assert "'b'" in end.reason and "no stage" in end.reason
    assert not decode.told(alone, wire.Register)
    assert end.blocks_reusable


def test_a_layer_that_two_stages_hold_fails_the_receive_and_is_named():
    decode, *_ = make_stages(["a", "b"], ["b"])
    (end,) = decode.events
    assert (end.outcome, end.code) == ("failed", "incompatible")
    assert "'b'" in end.reason and "more than one stage" in end.reason


def test_a_stage_of_decode_asks_for_its_own_layers_alone():
    decode = Decode(Share(pp_rank=1, pp_size=2), layers=["b"])
    prefill = Other("p0", Share())
    decode.expect("t", [5, 6], [prefill])
    decode.meets(prefill)
    decode.arrives(prefill, 1, 0, 2, layers=range(1, 2))  # the second of prefill's layers
    assert outcomes(decode) == [("t", "done")]


# --- who hears of it -------------------------------------------------------------------------------------------------


def test_copies_that_write_nothing_are_told_how_it_ends():
    """Four prefill ranks share two heads; this decode rank holds both. Two of them write, and all four hear of it."""
    decode = Decode(total_heads=2)
    others = [Other("p0", Share(tp_rank=rank, tp_size=4), total_heads=2) for rank in range(4)]
    decode.expect("t", [5, 6], others)
    decode.meets(*others)
    wants = [decode.told(other, wire.Register)[0].wants for other in others]
    assert [bool(each) for each in wants] == [True, False, True, False]
    decode.arrives(others[0], 1, 0, 2)
    decode.arrives(others[2], 1, 0, 2)
    assert outcomes(decode) == [("t", "done")]


def test_copies_that_write_nothing_need_not_be_reached():
    decode = Decode(total_heads=2)
    others = [Other("p0", Share(tp_rank=rank, tp_size=4), total_heads=2) for rank in range(4)]
    decode.expect("t", [5, 6], others)
    decode.meets(others[0], others[2])
    decode.arrives(others[0], 1, 0, 2)
    decode.arrives(others[2], 1, 0, 2)
    assert outcomes(decode) == [("t", "done")]


def test_nothing_to_move_is_done_at_once_and_every_rank_hears_of_it():
    decode = Decode()
    others = [Other("p0", Share(tp_rank=rank, tp_size=2)) for rank in (0, 1)]
    decode.expect("t", [], others)
    assert outcomes(decode) == [("t", "done")]
    decode.meets(*others)
    assert all(decode.told(other, wire.Register)[0].wants == () for other in others)


def test_an_address_that_is_missing_fails_the_receive_and_names_the_rank():
    decode = Decode()
    (left,) = [Other("p0", Share(tp_rank=0, tp_size=2))]
    decode.expect("t", [5, 6], [left])
    (end,) = decode.events
    assert (end.outcome, end.code) == ("failed", "incompatible") and "(0, 1)" in end.reason


def test_heads_that_cannot_be_shared_out_fail_the_receive():
    decode = Decode(total_heads=4)
    others = [Other("p0", Share(tp_rank=rank, tp_size=3), total_heads=3) for rank in range(3)]
    decode.expect("t", [5, 6], others)
    (end,) = decode.events
    assert (end.outcome, end.code) == ("failed", "incompatible")


def test_a_rank_that_answers_as_another_is_not_believed():
    decode, left, right = make_two(handshake_attempts=1)
    liar = Other("p0", Share(tp_rank=1, tp_size=2))
    liar.identity = type(liar.identity)(
        **{name: getattr(liar.identity, name) for name in liar.identity.__slots__} | {"share": left.identity.share}
    )
    decode.dialled[address_of(liar)] = decode.dialled[address_of(right)]
    theirs = liar.identity
    decode.do(decode.core.link_opened(decode.dialled[address_of(right)], decode.now_s))
    decode.hears(right, wire.Welcome("p0", theirs.incarnation, left.identity.share, theirs.holdings, theirs.agent_name))
    (end,) = decode.events
    assert (end.outcome, end.code) == ("failed", "incompatible")


def refused(decode, other):
    """Prefill does not take the link, since it is not the rank that was named."""
    decode.do(decode.core.link_opened(decode.dialled[address_of(other)], decode.now_s))
    decode.hears(other, wire.Refused(FailureCode.incompatible, "name an address for each rank"))


def test_a_receive_that_named_too_few_ranks_spoils_nothing_for_the_next():
    decode, alone = Decode(), Other("p0", Share())
    left, right = (Other("p0", Share(tp_rank=rank, tp_size=2)) for rank in (0, 1))
    decode.expect("wrong", [5, 6], [alone])
    refused(decode, alone)
    assert outcomes(decode) == [("wrong", "failed")]
    decode.expect("t", [5, 6], [left, right])
    decode.meets(right)
    decode.advance(1)  # the backoff after the first attempt
    decode.meets(left)
    assert decode.told(left, wire.Hello)[-1].expected_share == left.identity.share
    decode.arrives(left, 2, 0, 2)
    decode.arrives(right, 2, 0, 2)
    assert outcomes(decode) == [("wrong", "failed"), ("t", "done")]


def test_nor_does_one_that_was_given_up_before_the_link_stood():
    decode, alone = Decode(), Other("p0", Share())
    left, right = (Other("p0", Share(tp_rank=rank, tp_size=2)) for rank in (0, 1))
    decode.expect("wrong", [], [alone])
    refused(decode, alone)
    decode.do(decode.core.renew(["wrong"], source=source_of([alone]), now_s=decode.now_s))
    decode.expect("t", [5, 6], [left, right])
    decode.meets(right)
    decode.advance(1)
    decode.meets(left)
    decode.arrives(left, 2, 0, 2)
    decode.arrives(right, 2, 0, 2)
    assert outcomes(decode)[-1] == ("t", "done")


def test_ranks_that_prefill_has_confirmed_are_not_renamed():
    decode, left, right = make_registered()
    decode.expect("wrong", [7], [Other("p0", Share())])
    (end,) = decode.events
    assert (end.transfer_id, end.outcome, end.code) == ("wrong", "failed", "incompatible")
    assert "tp_size=2" in end.reason and "tp_size=1" in end.reason
    decode.arrives(left, 1, 0, 2)
    decode.arrives(right, 1, 0, 2)
    assert outcomes(decode)[-1] == ("t", "done")


# --- unequal blocks --------------------------------------------------------------------------------------------------


def test_d9_slots_are_counted_where_the_blocks_differ():
    """Prefill has blocks of 16 tokens, decode of 32: two slots in each block of decode."""
    decode = Decode(tokens=32)
    prefill = Other("p0", Share(), tokens=16)
    decode.expect("t", [5, 6], [prefill], num_tokens=40)
    decode.meets(prefill)
    decode.arrives(prefill, 1, 0, 2)
    assert outcomes(decode) == []
    decode.arrives(prefill, 1, 2, 1)  # tokens 32 to 47; nothing is known beyond token 39, and nothing more is asked for
    assert outcomes(decode) == [("t", "done")]


def test_d9_blocks_with_too_little_in_common_fail_the_receive_at_once():
    """Prefill refuses such a Hello. Should it not, this side does not wait for a WRITE that it never asked for."""
    decode, prefill = Decode(tokens=513), Other("p0", Share(), tokens=1)
    decode.expect("t", [5], [prefill])
    decode.meets(prefill)
    (end,) = decode.events
    assert (end.outcome, end.code, end.blocks_reusable) == ("failed", "incompatible", True)
    assert "blocks of 1 tokens at prefill and of 513 at decode" in end.reason
    assert not decode.told(prefill, wire.Register)


def test_d1_a_prefix_hit_is_counted_from_its_own_block():
    decode = Decode(tokens=32)
    prefill = Other("p0", Share(), tokens=16)
    decode.expect("t", [5], [prefill], first_block=2)
    decode.meets(prefill)
    decode.arrives(prefill, 1, 0, 2)
    assert decode.core.counters["notifications_malformed"] == 1
    decode.arrives(prefill, 1, 4, 2)
    assert outcomes(decode) == [("t", "done")]


def test_rule4_a_hold_that_runs_out_is_no_sign_of_life():
    """Nobody confirmed anything: a dead engine must not count as heard whenever a receive of it is given up."""
    decode = Decode(liveness_timeout_s=60, heartbeat_interval_s=20, hold_timeout_s=6)
    (other,) = others = [Other("p0", Share())]
    decode.expect("t", [1], others)
    decode.meets(other)
    decode.do(decode.core.cancel("t", decode.now_s))
    decode.advance(7)
    ended, released = decode.events
    assert (ended.outcome, released.proven) == ("cancelled", False)
    (seen,) = decode.registry.snapshot()
    assert (seen.in_flight, seen.silent_s) == (0, 7)


def test_rule18_prefill_is_told_how_much_of_the_deadline_is_left_when_it_is_asked():
    decode = Decode(handshake_timeout_s=20, liveness_timeout_s=60)
    (other,) = others = [Other("p0", Share())]
    decode.expect("t", [1], others, deadline_s=30)
    decode.advance(5)
    decode.meets(other)
    (registration,) = decode.told(other, wire.Register)
    assert registration.remaining_ms == 25_000
