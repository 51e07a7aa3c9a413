"""What decode's core decides by itself: dialling, deadlines, holds, and what it believes of what it is told."""

import pytest
from core_worlds import (
    CONFIG,
    SETTLED_S,
    SOON_S,
    connect,
    is_a,
    lose,
    make_config,
    make_connected,
    make_pair,
    make_world,
    only_engine,
    replace,
    run_to_the_end,
    states,
    welcome_of,
    written,
)

from kvpush import wire
from kvpush.decode import MAX_NOTICES
from kvpush.errors import FailureCode
from kvpush.transport import Notification


def only_link(decode):
    (link,) = decode.core._links
    return link


def tell(decode, message, link=None):
    """A message out of the blue, from the prefill engine at the other end."""
    decode._perform(decode.core.message(link or only_link(decode), message, decode.world.clock()))


def notify(decode, prefill, epoch, *spans):
    """A notification that no WRITE sent."""
    notification = Notification(prefill.identity.agent_name, written(epoch, *spans))
    decode.world.fabric.notify(decode.identity.agent_name, notification)
    decode.world.advance(SOON_S)


# --- meeting ---------------------------------------------------------------------------------------------------------


def test_a2_another_engine_answers_and_the_failure_names_both():
    world = make_world()
    prefill, decode = world.prefill("p1"), world.decode("d0")
    connect(world, prefill, decode)
    prefill.engine_id, advertised = "p0", prefill.engine_id  # the router tells decode a wrong id
    receive = decode.expect("t", [7], prefill)
    prefill.engine_id = advertised
    world.settle(1)
    assert (receive.outcome, receive.code) == ("failed", "wrong_engine")
    for name in ("'p0'", "'p1'", "10.0.0.1:1"):
        assert name in receive.finished.reason
    assert states(decode, "p0") == ["handshaking", "unknown"]
    assert states(decode, "p1") == ["handshaking", "connected"]
    again = decode.expect("again", [7], prefill)
    prefill.push("again", [3])
    world.settle(1)
    assert again.outcome == "done"


def test_a2_a_welcome_of_another_engine_is_not_believed():
    import msgspec.structs

    world, prefill, decode = make_pair()
    world.network.tamper = replace(wire.Welcome, lambda message: msgspec.structs.replace(message, engine_id="p9"))
    receive = decode.expect("t", [7], prefill)
    run_to_the_end(world)
    assert receive.code == "wrong_engine"
    assert "'p9'" in receive.finished.reason


def test_a10_an_incompatible_peer_is_refused_at_once_and_not_asked_three_times():
    world, prefill, decode = make_pair()
    stranger = world.decode("d1")
    stranger.identity.fingerprint["model"] = "another"
    receive = stranger.expect("t", [7], prefill)
    good, _ = decode.expect("good", [8], prefill), prefill.push("good", [3])
    run_to_the_end(world)
    assert (receive.outcome, receive.code) == ("failed", "incompatible")
    assert "'m'" in receive.finished.reason
    assert "'another'" in receive.finished.reason
    assert stranger.core.counters["handshakes_started"] == 1
    assert good.outcome == "done"


def test_rule08_receives_for_an_unknown_engine_dial_once_and_share_the_outcome():
    world, prefill, decode = make_pair(handshake_attempts=1)
    world.network.tamper = lose(wire.Welcome)
    receives = [decode.expect(f"t{i}", [i], prefill) for i in range(5)]
    world.settle(SETTLED_S)
    assert {receive.code for receive in receives} == {"handshake_timeout"}
    assert decode.core.counters["handshakes_started"] == 1


def test_rule06_a_welcome_that_comes_too_late_changes_nothing():
    world, prefill, decode = make_pair(handshake_attempts=1)
    world.network.hold = is_a(wire.Welcome)
    receive = decode.expect("t", [7], prefill)
    world.settle(SETTLED_S)
    link = decode.core._last_link
    assert decode.core.message(link, welcome_of(prefill), world.clock()) == []
    assert decode.core.counters["messages_late"] == 1
    assert only_engine(decode).state == "unknown"
    assert receive.code == "handshake_timeout"
    run_to_the_end(world)


def test_an_engine_that_moves_to_another_address_supersedes_itself():
    world, old, decode = make_connected()
    leftover = decode.expect("leftover", [1], old)
    world.advance(SOON_S)
    old.kill()
    new = world.prefill("p0")
    receive = decode.expect("t", [7], new)
    new.push("t", [3])
    run_to_the_end(world)
    assert receive.outcome == "done"
    assert leftover.outcome == "failed"


# --- believing -------------------------------------------------------------------------------------------------------


def test_d11_positions_are_counted_and_not_messages():
    world, prefill, decode = make_connected()
    receive = decode.expect("t", [7, 8, 9], prefill, first_block=4)
    world.advance(SOON_S)
    for _ in range(5):
        notify(decode, prefill, receive.epoch, (5, 1))
    assert not receive.is_over
    for span in ((3, 1), (0, 2), (6, 2), (7, 1), (4, 4)):
        notify(decode, prefill, receive.epoch, span)
    assert decode.core.counters["notifications_malformed"] == 5
    assert not receive.is_over
    prefill.push("t", list(range(7)))
    run_to_the_end(world)
    assert receive.outcome == "done"


def test_d19_what_an_earlier_user_left_in_a_block_neither_ends_a_receive_nor_spoils_it():
    # no byte of a block says whether it has arrived: only the epoch of a notification does
    world, prefill, decode = make_connected()
    earlier = decode.expect("earlier", [7, 8], prefill)
    prefill.push("earlier", [3, 4])
    world.run_until(lambda: earlier.is_over, SETTLED_S)
    receive = decode.expect("t", [8, 7], prefill)  # its blocks hold all that a good transfer would leave there
    world.advance(SOON_S)
    notify(decode, prefill, earlier.epoch, (0, 2))
    assert not receive.is_over
    assert decode.core.counters["notifications_late"] == 1
    prefill.push("t", [3, 4])
    run_to_the_end(world)
    assert receive.outcome == "done"


def test_rule17_junk_notifications_and_messages_are_counted_and_the_next_one_works():
    world, prefill, decode = make_connected()
    agent = prefill.identity.agent_name
    for payload in (b"", b"\xc1", b"x" * (wire.MAX_WRITTEN_BYTES + 1), b"\x90"):
        world.fabric.notify(decode.identity.agent_name, Notification(agent, payload))
    notify(decode, prefill, 10**6, (0, 1))
    (link,) = prefill.core._links
    for frames in ([], [b"junk"], [b"kvpush/1", b"\xc1"]):
        world.network.send(prefill, link, frames)
    world.advance(SOON_S)
    counters = decode.core.counters
    assert (counters["notifications_malformed"], counters["notifications_late"]) == (4, 1)
    assert counters["messages_malformed"] == 3
    receive, _ = decode.expect("t", [7], prefill), prefill.push("t", [3])
    run_to_the_end(world)
    assert receive.outcome == "done"


def test_rule17_messages_about_nothing_change_nothing():
    world, prefill, decode = make_connected()
    receive = decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    tell(decode, wire.Failed("t", 999, FailureCode.internal, "no such epoch", settled=True))
    tell(decode, wire.Drained("t", 999))
    tell(decode, wire.Drained("t", receive.epoch))  # of a receive that did not ask
    tell(decode, welcome_of(prefill))
    tell(decode, wire.Refused(FailureCode.malformed, "one of your messages"))
    assert not receive.is_over
    prefill.push("t", [3])
    run_to_the_end(world)
    assert receive.outcome == "done"


def test_rule19_prefill_ends_only_its_own_receives():
    world = make_world()
    mine, other, decode = world.prefill("p0"), world.prefill("p1"), world.decode("d0")
    connect(world, mine, decode)
    connect(world, other, decode)
    receive = decode.expect("t", [7], mine)
    world.advance(SOON_S)
    (others,) = [link for link, prefill in decode.core._links.items() if prefill.engine_id == "p1"]
    tell(decode, wire.Failed("t", receive.epoch, FailureCode.internal, "not mine", settled=True), others)
    notify(decode, other, receive.epoch, (0, 1))
    assert not receive.is_over
    mine.push("t", [3])
    run_to_the_end(world)
    assert receive.outcome == "done"


# --- ending ----------------------------------------------------------------------------------------------------------


def test_rule10_a_receive_that_was_never_registered_holds_nothing():
    world, prefill, decode = make_pair()
    world.network.black_hole("p0", "d0")
    receive = decode.expect("t", [7], prefill, deadline_s=0.5)
    cancelled = decode.expect("c", [8], prefill)
    decode.cancel("c")
    assert (cancelled.outcome, cancelled.finished.blocks_reusable) == ("cancelled", True)
    world.settle(1)
    assert (receive.outcome, receive.finished.blocks_reusable) == ("expired", True)
    world.heal()
    run_to_the_end(world)


def test_rule12_a_failure_that_is_not_settled_holds_the_blocks_until_drained():
    world, prefill, decode = make_connected()
    receive = decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    tell(decode, wire.Failed("t", receive.epoch, FailureCode.write_failed, "one of two", settled=False))
    assert (receive.outcome, receive.is_free) == ("failed", False)
    tell(decode, wire.Failed("t", receive.epoch, FailureCode.write_failed, "one of two", settled=False))
    assert not receive.is_free
    tell(decode, wire.Drained("t", receive.epoch))
    assert receive.released.proven
    tell(decode, wire.Drained("t", receive.epoch))
    prefill.cancel("t")
    world.advance(SOON_S)
    world.check()


def test_rule12_the_last_position_proves_a_held_receive_quiet():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive = decode.expect("t", [7, 8], prefill, deadline_s=1)
    prefill.push("t", [3], last=False)
    prefill.push("t", [4], first_block=1)
    world.advance(SOON_S)
    world.network.tamper = lose(wire.Drained)
    world.advance(1)
    assert receive.outcome == "expired"
    for write in world.writes:
        assert not receive.is_free
        world.finish(write)
        world.advance(SOON_S)
    assert (receive.released.proven, receive.released.reason) == (True, "every position has been written")
    run_to_the_end(world)


def test_rule12_a_dropped_prefill_engine_is_listened_to_until_it_has_drained():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(SOON_S)
    decode.drop_engine("p0")
    decode.drop_engine("nobody")
    assert (receive.outcome, receive.code, receive.is_free) == ("failed", "engine_dropped", False)
    world.advance(1)
    assert only_engine(decode).state == "stale"
    world.hold_writes = False
    world.resume_writes()
    world.settle(1)
    assert receive.released.proven
    assert push.outcome == "cancelled"
    assert only_engine(decode).state == "evicted"
    run_to_the_end(world)


def test_rule12_a_killed_prefill_process_is_proof_and_a_silent_one_is_not():
    for strike, is_proven in (("kill", True), ("freeze", False)):
        world, prefill, decode = make_connected()
        world.hold_writes = True
        receive = decode.expect("t", [7], prefill, deadline_s=4)
        prefill.push("t", [3])
        world.advance(SOON_S)
        getattr(prefill, strike)()
        world.run_until(lambda receive=receive: receive.is_free, SETTLED_S)
        assert receive.is_free_for_sure == is_proven, strike


def test_rule12_a_link_that_breaks_before_welcome_proves_nothing():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive, _ = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(SOON_S)
    world.network.hold = is_a(wire.Welcome)
    world.network.cut("p0", "d0")
    world.run_until(lambda: world.network.num_links("p0", "d0") == 1, 2)
    world.network.cut("p0", "d0")
    world.advance(SOON_S)
    assert not receive.is_free
    world.network.release()
    world.hold_writes = False
    world.resume_writes()
    run_to_the_end(world)
    assert receive.is_free_for_sure


def test_rule18_a_frozen_prefill_engine_is_lost_within_the_liveness_timeout():
    world, prefill, decode = make_connected()
    receive = decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    prefill.freeze()
    took_s = world.run_until(lambda: "stale" in states(decode, "p0"), 10)
    assert took_s <= CONFIG.liveness_timeout_s + 1
    assert not receive.is_over  # what became of it is still to be asked
    prefill.thaw()
    prefill.push("t", [3])
    run_to_the_end(world)
    assert receive.is_over


def test_rule16_renewals_for_an_engine_that_finds_no_room_are_dropped_and_raise_nothing():
    world = make_world(max_engines=1)
    prefill, other, decode = world.prefill("p0"), world.prefill("p1"), world.decode("d0")
    connect(world, prefill, decode)
    decode.renew(["t"] * 5, other)
    assert decode.core.counters["renewals_dropped"] == 5
    refused = decode.expect("t", [7], other)
    assert (refused.outcome, refused.code, refused.is_free_for_sure) == ("failed", "queue_full", True)
    run_to_the_end(world)


def test_rule16_what_waits_for_a_dead_address_is_bounded():
    world, prefill, decode = make_pair()
    world.network.black_hole("p0", "d0")
    for i in range(MAX_NOTICES + 10):
        assert decode.expect(f"t{i}", [], prefill).outcome == "done"
        decode.renew([f"t{i}"], prefill)
    assert decode.core.counters["notices_dropped"] == 10
    (record,) = decode.core._prefills.values()
    assert len(record.notices) == MAX_NOTICES
    assert len(record.renewals) == MAX_NOTICES + 10 <= CONFIG.max_pending_pushes
    world.heal()
    world.advance(CONFIG.handshake_timeout_s + CONFIG.handshake_backoff_max_s + SOON_S)
    assert (record.notices, record.renewals) == ([], {})
    assert prefill.core.gauges()["registrations_waiting"] == MAX_NOTICES
    world.advance(SETTLED_S)
    run_to_the_end(world)


def test_rule16_prefill_engines_that_come_and_go_leave_nothing_behind():
    world = make_world(max_tombstones=16)
    decode = world.decode("d0")
    for life in range(60):
        prefill = world.prefill(f"p{life}")
        decode.expect(f"t{life}", [1], prefill)
        prefill.push(f"t{life}", [1])
        world.advance(SOON_S)
        prefill.kill()
        world.advance(SOON_S)
    assert {receive.outcome for receive in decode.receives} == {"done"}
    world.advance(5)
    assert {name: size for name, size in decode.core.gauges().items() if size} == {}
    assert len(decode.registry) == 0


def test_rule05_an_idle_engine_says_goodbye_when_it_is_evicted():
    world, prefill, decode = make_connected()
    world.advance(CONFIG.engine_ttl_s + CONFIG.evict_grace_s)
    assert only_engine(prefill).state == only_engine(decode).state == "evicted"
    assert decode.core.gauges() | {"timers": 0} == dict.fromkeys(decode.core.gauges(), 0)
    assert world.network.num_links("p0", "d0") == 0


def test_rule13_cancel_of_an_unknown_transfer_and_of_one_that_is_over_does_nothing():
    world, prefill, decode = make_connected()
    decode.cancel("unknown")
    receive, _ = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.settle(1)
    decode.cancel("t")
    assert receive.outcome == "done"
    run_to_the_end(world)


def test_events_of_links_that_are_over_are_harmless():
    world, prefill, decode = make_connected()
    link = only_link(decode)
    world.network.cut("p0", "d0")
    world.advance(1)
    assert decode.core.link_closed(link, "again", world.clock(), refused=False) == []
    assert decode.core.link_opened(link, world.clock()) == []
    assert decode.core.message(link, wire.Heartbeat(), world.clock()) == []
    run_to_the_end(world)


@pytest.mark.parametrize("is_matched", [True, False])
def test_rule14_a_restarted_prefill_engine_settles_what_the_old_one_owed(is_matched):
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive = decode.expect("t", [7], prefill)
    if is_matched:
        prefill.push("t", [3])
    world.advance(SOON_S)
    again = prefill.restart()
    world.hold_writes = False
    world.settle(5)
    assert (receive.outcome, receive.code) == ("failed", "peer_restarted")
    assert receive.is_free_for_sure
    connect(world, again, decode)
    run_to_the_end(world)


def test_a_peer_without_room_is_asked_again_later():
    world = make_world()
    prefill = world.prefill("p0", config=make_config(max_engines=1))
    first, second = world.decode("d0"), world.decode("d1")
    connect(world, prefill, first)
    receive = second.expect("t", [7], prefill)
    prefill.push("t", [3])
    world.advance(0.2)
    first.kill()
    run_to_the_end(world)
    assert receive.outcome == "done"
    assert second.core.counters["refusals_queue_full"] >= 1


# --- the process that holds the blocks -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_met", [False, True], ids=["not met yet", "connected"])
def test_f5_a_receive_from_a_process_that_is_gone_fails_when_its_successor_answers(is_met):
    """The router's answer is older than prefill's restart: nobody would ever push."""
    world, prefill, decode = make_connected() if is_met else make_pair()
    gone = prefill.identity.incarnation
    prefill.kill()
    prefill = prefill.restart()
    world.settle(1)
    if is_met:
        decode.expect("finds out", [8], prefill)  # it is sent to the old process, whose end is not known yet
        world.settle(5)
        connect(world, prefill, decode)
    receive = decode.expect("t", [7], prefill, incarnation=gone)
    world.settle(1)
    assert (receive.outcome, receive.code) == ("failed", "peer_restarted")
    assert receive.finished.blocks_reusable
    run_to_the_end(world)


def test_a_receive_from_the_very_process_that_answers_is_served():
    world, prefill, decode = make_connected()
    receive = decode.expect("t", [7], prefill, incarnation=prefill.identity.incarnation)
    prefill.push("t", [3])
    world.settle(1)
    assert receive.outcome == "done"
    run_to_the_end(world)
