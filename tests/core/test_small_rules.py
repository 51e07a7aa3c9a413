"""What a mutation run found that no other test looked at: counters, what is shown, and rarely taken turns."""

import msgspec.structs
import pytest
from core_worlds import (
    CONFIG,
    SOON_S,
    connect,
    decoded,
    lose,
    make_connected,
    make_leg,
    make_pair,
    make_world,
    only_engine,
    part,
    run_to_the_end,
    written,
)
from rank_cores import ALONE, Decode, Other, Prefill, address_of, source_of

from kvpush import decode as decode_module
from kvpush import metadata, wire
from kvpush.decode_effects import HangUp
from kvpush.errors import Failure, FailureCode
from kvpush.lines import Lines
from kvpush.parallel import Share
from kvpush.prefill import REGISTRATION_GRACE_S


def counted(owner, *names):
    return {name: owner.core.counters[name] for name in names}


def link_to(prefill, decode):
    return next(link for link, known in prefill.core._links.items() if known.hello.engine_id == decode.engine_id)


# --- counters --------------------------------------------------------------------------------------------------------


def test_every_event_of_a_plain_push_is_counted_once():
    world, prefill, decode = make_pair()
    decode.expect("t", [7], prefill)
    prefill.push("t", [3])
    world.advance(SOON_S)
    assert prefill.core.counters == {
        "pushes": 1, "registrations": 1, "pushes_deferred": 1, "handshakes_started": 1, "handshakes_succeeded": 1,
        "pushes_done": 1, "bytes_written": 128,
    }  # fmt: skip
    assert decode.core.counters == {
        "receives": 1, "handshakes_started": 1, "handshakes_succeeded": 1, "receives_done": 1,
    }  # fmt: skip
    world.advance(CONFIG.engine_ttl_s + CONFIG.evict_grace_s + 1)
    for owner in (prefill, decode):
        assert counted(owner, "engines_stale_idle", "engines_evicted") == {
            "engines_stale_idle": 1,
            "engines_evicted": 1,
        }


@pytest.mark.parametrize(("disconnected", "code"), [(True, "peer_lost"), (False, "write_failed")])
def test_a_write_that_fails_is_counted_once(disconnected, code):
    world, prefill, decode = make_connected()
    world.hold_writes = True
    decode.expect("t", [7], prefill)
    prefill.push("t", [3])
    world.advance(SOON_S)
    world.fail_write(world.writes[0], disconnected=disconnected)
    world.advance(SOON_S)
    assert counted(prefill, f"writes_failed_{code}", "engines_stale_lost", "engines_evicted") == {
        f"writes_failed_{code}": 1,
        "engines_stale_lost": 1,
        "engines_evicted": 1,
    }


def test_messages_that_are_not_believed_are_counted_once():
    world, prefill, decode = make_connected()
    prefill.core.message(b"stranger", wire.Heartbeat(), world.clock())
    hello = prefill.core._links[link_to(prefill, decode)].hello
    misled = msgspec.structs.replace(hello, engine_id="d9", expected_share=Share(tp_rank=1, tp_size=2))
    prefill.core.message(b"new", misled, world.clock())
    assert counted(prefill, "messages_before_hello", "hellos_refused_incompatible") == {
        "messages_before_hello": 1,
        "hellos_refused_incompatible": 1,
    }
    (link,) = decode.core._links
    for message in (
        wire.Failed("t", 99, FailureCode.closing, "?", settled=True),
        wire.Drained("t", 99),
        wire.Refused(FailureCode.malformed, "?"),
    ):
        decode.core.message(link, message, world.clock())
    assert counted(decode, "messages_late", "refusals_malformed") == {"messages_late": 2, "refusals_malformed": 1}


def test_each_of_these_is_counted_once_in_prefill():
    prefill, other = Prefill(lease_s=10), Other("d0", ALONE)
    prefill.meets(other)
    prefill.do(prefill.core.malformed(other.link, Failure(FailureCode.malformed, "?"), prefill.now_s))
    prefill.push("waits", [1])
    prefill.hears(other, wire.Renew(["waits", "unknown"]))
    prefill.hears(other, wire.Cancel("unknown", 1, FailureCode.deadline, ""))
    prefill.hears(other, wire.Withdraw("unknown", 2, FailureCode.deadline, ""))
    for attempt in (98, 99):
        prefill.hears(other, metadata.build(attempt, "life", "agent", b"blob", other.geometry))
        prefill.hears(other, wire.MetadataUnavailable(attempt, FailureCode.not_ready, "?"))
    prefill.registers(other, "waits", 3, [5])
    (asked,) = prefill.told(other, wire.MetadataRequest)
    prefill.hears(other, wire.MetadataUnavailable(asked.attempt, FailureCode.not_ready, "?"))
    assert counted(
        prefill,
        "messages_malformed",
        "leases_renewed",
        "cancels",
        "withdrawals",
        "handshakes_late",
        "handshakes_failed_not_ready",
    ) == {
        "messages_malformed": 1,
        "leases_renewed": 1,
        "cancels": 1,
        "withdrawals": 1,
        "handshakes_late": 4,
        "handshakes_failed_not_ready": 1,
    }


def test_the_first_chunk_of_a_push_that_was_cancelled_before_is_not_counted_as_one_after_the_end():
    world, prefill, _ = make_pair()
    prefill.cancel("t")
    assert prefill.push("t", [3]).outcome == "cancelled"
    assert prefill.core.counters["chunks_after_end"] == 0


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_both_sides_say_how_long_it_took_and_prefill_which_link_it_was():
    world, prefill, decode = make_connected()
    receive = decode.expect("t", [7], prefill)
    world.advance(2)
    push = prefill.push("t", [3])
    world.advance(SOON_S)
    assert 2 < receive.finished.duration_s < 2 + SOON_S
    assert 0 < push.finished.duration_s < SOON_S
    assert only_engine(prefill).address == f"link {link_to(prefill, decode).hex()}"


def test_goodbye_closes_the_engine_on_decode():
    world, prefill, decode = make_connected()
    prefill.close()
    world.advance(SOON_S)
    assert (only_engine(decode).state, only_engine(decode).reason) == ("evicted", "closing")


def test_positions_that_arrive_are_activity():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    decode.expect("t", [7, 8], prefill)
    prefill.push("t", [3], last=False)
    world.advance(1)  # Writing came long ago
    assert only_engine(decode).idle_s > 0.9
    world.finish(world.writes[0])
    world.advance(SOON_S)
    assert only_engine(decode).idle_s <= SOON_S


# --- rarely taken turns ----------------------------------------------------------------------------------------------


def test_only_the_engine_that_was_dropped_loses_its_registrations():
    world = make_world()
    prefill, d0, d1 = world.prefill("p0"), world.decode("d0"), world.decode("d1")
    connect(world, prefill, d0, d1)
    lost, kept = d0.expect("t0", [7], prefill), d1.expect("t1", [7], prefill)
    world.advance(SOON_S)
    prefill.drop_engine("d0")
    world.advance(SOON_S)
    assert (lost.code, kept.is_over) == ("engine_dropped", False)
    prefill.push("t1", [3])
    world.advance(SOON_S)
    assert kept.outcome == "done"


def test_only_the_prefill_engine_that_was_dropped_loses_its_receives():
    world = make_world()
    p0, p1, decode = world.prefill("p0"), world.prefill("p1"), world.decode("d0")
    lost, kept = decode.expect("t0", [7], p0), decode.expect("t1", [8], p1)
    world.advance(SOON_S)
    decode.drop_engine("p0")
    assert (lost.code, kept.is_over) == ("engine_dropped", False)
    p1.push("t1", [3])
    world.advance(SOON_S)
    assert kept.outcome == "done"


def test_after_a_refusal_for_a_drop_the_push_may_still_be_for_somebody_else():
    world = make_world()
    prefill, d0, d1 = world.prefill("p0"), world.decode("d0"), world.decode("d1")
    connect(world, prefill, d0, d1)
    d0.expect("t", [7], prefill)
    world.advance(SOON_S)
    prefill.drop_engine("d0")
    world.advance(SOON_S)
    receive, push = d1.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(SOON_S)
    assert (receive.outcome, push.outcome) == ("done", "done")


def test_a_push_that_is_ending_is_not_renewed():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    decode.expect("t", [7], prefill)
    prefill.push("t", [3])
    world.advance(SOON_S)
    prefill.cancel("t")
    decode.renew(["t"], prefill)
    world.advance(SOON_S)
    assert prefill.core.counters["leases_renewed"] == 0
    world.heal()
    run_to_the_end(world)


def test_the_lease_begins_anew_when_what_was_pushed_so_far_is_written():
    world, prefill, decode = make_connected(stall_timeout_s=100)
    world.hold_writes = True
    decode.expect("t", [7], prefill)
    push = prefill.push("t", [3], last=False)
    world.advance(CONFIG.lease_s - 1)
    world.finish(world.writes[0])
    world.advance(CONFIG.lease_s - 1)
    assert not push.is_over
    world.advance(2)
    assert push.outcome == "done"


def test_no_lease_runs_while_decode_waits_for_the_next_chunk():
    world, prefill, decode = make_connected()
    decode.expect("t", [7, 8], prefill)
    push = prefill.push("t", [3], last=False)
    world.advance(2 * CONFIG.lease_s)
    assert not push.is_over
    prefill.push("t", [4], first_block=1)
    world.advance(SOON_S)
    assert push.outcome == "done"


def test_a_registration_ends_when_its_time_and_the_grace_for_its_cancel_are_over():
    prefill, other = Prefill(engine_ttl_s=1000, liveness_timeout_s=1000), Other("d0", ALONE)
    prefill.meets(other)
    prefill.registers(other, "t", 7, [5], remaining_ms=100_000)
    prefill.advance(100 + REGISTRATION_GRACE_S - 0.05)
    assert prefill.told(other, wire.Failed) == []
    prefill.advance(0.1)
    assert [(failed.epoch, failed.code) for failed in prefill.told(other, wire.Failed)] == [(7, "deadline")]
    assert prefill.core.counters["registrations_expired"] == 1


def test_a_withdrawal_does_not_concern_a_rank_that_has_registered():
    prefill, other = Prefill(), Other("d0", ALONE)
    prefill.meets(other)
    prefill.registers(other, "waits", 1, [5])
    prefill.push("pushed", [1])
    prefill.registers(other, "pushed", 2, [6])
    for name in ("waits", "pushed"):
        prefill.hears(other, wire.Withdraw(name, 9, FailureCode.cancelled_by_peer, "?"))
    prefill.push("waits", [2])
    prefill.answers(other)
    for write_id in list(prefill.posted):
        prefill.settles(write_id)
    assert [end.outcome for end in prefill.events] == ["done", "done"]


def test_a_hello_with_an_earlier_dial_over_the_same_link_is_a_second_hello_and_not_a_late_one():
    prefill, other = Prefill(), Other("d0", ALONE)
    prefill.meets(other, dial=2)
    prefill.meets(other, dial=1)
    (refused,) = prefill.told(other, wire.Refused)
    assert refused.code == "malformed" and "one link, one engine" in refused.reason


def test_the_first_dial_of_a_new_process_is_not_late_however_often_the_old_one_dialled():
    prefill, before, after = Prefill(), Other("d0", ALONE), Other("d0", ALONE)
    prefill.meets(before, dial=2)
    prefill.meets(after, dial=1)
    assert len(prefill.told(after, wire.Welcome)) == 1


def test_writes_in_doubt_make_a_row_of_failures():
    prefill, other = Prefill(handshake_timeout_s=5, liveness_timeout_s=100), Other("d0", ALONE)
    prefill.meets(other)
    for epoch in (1, 2):
        prefill.registers(other, f"t{epoch}", epoch, [5])
        prefill.push(f"t{epoch}", [epoch])
        prefill.advance(1)  # longer than any backoff
        prefill.answers(other)
        (write_id,) = prefill.posted
        del prefill.posted[write_id]
        failure = Failure(FailureCode.write_failed, "status ERR")
        prefill.do(prefill.core.write_doubted(write_id, failure, prefill.now_s))
        assert only_engine(prefill).handshake_failures == epoch


def says_goodbye(prefill, other):
    prefill.hears(other, wire.Goodbye("?"))


def restarts(prefill, other):
    prefill.meets(Other("d0", ALONE))


def breaks_off(prefill, other):
    prefill.do(prefill.core.link_closed(other.link, "killed", prefill.now_s))


def falls_silent(prefill, other):
    prefill.advance(prefill.config.liveness_timeout_s)


@pytest.mark.parametrize("ends", [says_goodbye, restarts, breaks_off, falls_silent])
def test_a_registration_that_ends_with_its_engine_leaves_the_push_to_others(ends):
    prefill, first, second = Prefill(), Other("d0", ALONE), Other("d1", ALONE)
    prefill.meets(first)
    prefill.registers(first, "taken", 1, [5])
    prefill.registers(first, "left", 2, [6])
    ends(prefill, first)
    assert prefill.told(first, wire.Failed) == []
    prefill.push("taken", [1])
    prefill.push("left", [2])
    prefill.meets(second)
    prefill.registers(second, "taken", 1, [5])
    prefill.answers(second)
    prefill.settles(prefill.write_to(second))
    prefill.advance(prefill.config.lease_s)
    taken, left = prefill.events
    assert (taken.outcome, taken.engine_id, left.outcome) == ("done", "d1", "expired")
    assert "its registration had ended with its decode engine: engine 'd0'" in left.reason


def test_whose_registration_ended_is_forgotten_with_the_next_one():
    world, prefill, decode = make_connected()
    decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    decode.kill()
    world.advance(SOON_S)
    again = decode.restart()
    again.expect("t", [7], prefill)
    world.advance(SOON_S)
    assert prefill.push("t", [3]) and not world.advance(SOON_S)
    push = prefill.push("t", [3])
    run_to_the_end(world)
    assert "no decode engine has registered for it" in push.finished.reason


def test_an_unknown_transfer_among_renewals_stops_none_of_the_others():
    world, prefill, decode = make_connected()
    push = prefill.push("t", [3])
    world.advance(CONFIG.lease_s - 1)
    decode.renew(["unknown", "t"], prefill)
    world.advance(CONFIG.lease_s - 1)
    assert not push.is_over


def test_a_silent_engine_takes_its_registrations_and_its_link_with_it():
    world, prefill, decode = make_connected()
    decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    decode.freeze()
    world.advance(CONFIG.liveness_timeout_s + 1)
    gauges = prefill.core.gauges()
    assert (gauges["links"], gauges["registrations_waiting"]) == (0, 0)


def test_a_link_that_comes_back_before_its_end_is_noticed_takes_the_place_of_the_old_one():
    world, prefill, decode = make_connected()
    decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    old = link_to(prefill, decode)
    hello = prefill.core._links[old].hello
    prefill.core.message(b"new", hello, world.clock())
    assert list(prefill.core._links) == [b"new"]
    assert prefill.core.gauges()["registrations_waiting"] == 0  # decode asks again on the new one


def test_a_chunk_is_fenced_until_its_fence_is_reached():
    world, prefill, _ = make_pair()
    prefill.core.push("t", part(0, 3), last=True, fenced=True, index=0, now_s=world.clock())
    assert prefill.core.is_fenced("t", 0)
    assert not prefill.core.is_fenced("t", 1)
    assert not prefill.core.is_fenced("unknown", 0)
    prefill.core.fences_reached("t", [0, 1], world.clock())
    assert not prefill.core.is_fenced("t", 0)


def test_decode_is_written_to_from_register_to_the_end():
    world, prefill, decode = make_connected()
    assert not decode.core.is_written_to
    decode.expect("t", [7], prefill)
    assert decode.core.is_written_to
    prefill.push("t", [3])
    world.advance(SOON_S)
    assert not decode.core.is_written_to


def test_a_record_that_is_ending_is_not_used_for_the_next_receive():
    """A receive keeps the old generation pinned; the next one gets a generation that can serve."""
    world, prefill, decode = make_connected()
    registry = decode.registry
    generation = registry.generation_of("p0")
    registry.pin(generation)
    address = only_engine(decode).address
    registry.lost(generation, "cable", link_is_up=False)
    following, _ = registry.admit_address("p0", address)
    assert following != generation
    assert registry.state_of(generation) == "stale"


def test_a_line_that_vanishes_while_another_is_served_is_passed_over():
    lines, served = Lines(4), []
    for generation, name in ((1, "a"), (2, "b"), (3, "c")):
        lines.join(make_leg(name), generation)

    def post_next(leg, generation):
        served.append(leg.transfer_id)
        lines.leave(generation)
        lines.disband(2)  # the engine was lost
        return True

    lines.serve(post_next)
    assert served == ["a", "c"]


def test_a_line_behind_a_handshake_that_is_empty_is_not_kept():
    lines, leg = Lines(4), make_leg("a")
    leg.generation = 1
    lines.defer(leg, 1)
    lines.undefer(leg)
    assert not lines._deferred


def test_failures_of_an_earlier_life_of_the_link_do_not_count_against_a_receive():
    """Its attempts are counted anew for every generation that dials."""
    world, prefill, decode = make_connected(handshake_attempts=2)
    receive = decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    epoch = receive.epoch
    (leg,) = decode.core._receives[epoch].legs.values()
    leg.failed_attempts = 1
    world.network.cut("p0", "d0")
    world.advance(1)
    assert decode.core._receives[epoch].legs == {(0, 0): leg}
    assert leg.failed_attempts == 0
    prefill.push("t", [3])
    run_to_the_end(world)
    assert receive.outcome == "done"


def test_a_push_that_comes_while_prefill_closes_ends_with_that():
    prefill = Prefill()
    prefill.do(prefill.core.close(prefill.now_s))
    prefill.push("t", [1])
    assert [(end.outcome, end.code, end.blocks_reusable) for end in prefill.events] == [("failed", "closing", True)]


def test_a_push_that_failed_before_any_registration_tells_nobody():
    world, prefill, _ = make_pair()
    push = prefill.push("t", [3])
    prefill.fail("t", Failure(FailureCode.write_failed, "its ready event raised"))
    assert (push.outcome, push.is_free) == ("failed", True)
    run_to_the_end(world)


def test_a_stalled_write_and_a_refused_registration_are_counted_once():
    world, prefill, decode = make_connected()
    world.stalling.add("d0")
    decode.expect("t", [7], prefill)
    prefill.push("t", [3])
    world.advance(CONFIG.stall_timeout_s + 1)
    assert counted(prefill, "writes_stalled", "pushes_in_doubt") == {"writes_stalled": 1, "pushes_in_doubt": 1}
    world.advance(1)
    decode.expect("t", [8], prefill)
    world.advance(SOON_S)
    refused = {name: n for name, n in prefill.core.counters.items() if name.startswith("registrations_refused_")}
    assert list(refused.values()) == [1]


def test_decode_says_goodbye_when_it_closes():
    world, prefill, decode = make_connected()
    decode.close()
    world.advance(SOON_S)
    assert (only_engine(prefill).state, only_engine(prefill).reason) == ("evicted", "closing")


def test_goodbye_ends_the_registrations_that_came_before_it():
    world, prefill, decode = make_connected()
    decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    prefill.core.message(link_to(prefill, decode), wire.Goodbye("?"), world.clock())
    assert prefill.core.gauges()["registrations_waiting"] == 0


def test_goodbye_in_place_of_welcome_is_a_failed_attempt_at_once():
    world, prefill, decode = make_pair()
    world.network.tamper = lose(wire.Welcome)
    decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    (link,) = decode.core._links
    decode._perform(decode.core.message(link, wire.Goodbye("not here"), world.clock()))
    assert (only_engine(decode).state, only_engine(decode).handshake_failures) == ("unknown", 1)
    assert "not here" in only_engine(decode).last_error


def test_what_is_asked_again_on_a_new_link_pins_it_only_until_the_answer():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive = decode.expect("t", [7], prefill)
    prefill.push("t", [3])
    world.advance(SOON_S)
    decode.cancel("t")
    world.network.cut("p0", "d0")
    world.advance(1)
    assert only_engine(decode).in_flight == 1
    world.heal()
    run_to_the_end(world)
    assert receive.is_free
    assert all(engine.in_flight == 0 for engine in decode.registry.snapshot())


def test_a_push_that_is_cancelled_behind_its_handshake_is_drained():
    world, prefill, decode = make_pair()
    world.network.tamper = lose(wire.Metadata)
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(SOON_S)
    decode.cancel("t")
    world.advance(SOON_S)
    assert (push.outcome, receive.released.reason, receive.released.proven) == ("cancelled", "drained", True)


def test_a_failure_that_crosses_the_cancel_proves_that_nothing_was_written():
    world, prefill, decode = make_connected()
    receive = decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    prefill.cancel("t")
    decode.cancel("t")
    world.advance(SOON_S)
    assert (receive.outcome, receive.released.proven) == ("cancelled", True)


def test_a_chunk_that_decode_did_not_ask_for_ends_no_writing():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    decode.expect("t", [7], prefill)
    prefill.push("t", [3], last=False)
    world.advance(SOON_S)
    prefill.push("t", [4], first_block=1, last=False)
    assert prefill.core._pushes["t"].state == "writing"
    world.heal()
    prefill.push("t", [5], first_block=2)
    run_to_the_end(world)


def test_what_ends_with_its_link_ends_in_the_order_in_which_it_came():
    """A set of ids has another order in every process: the same seed would not give the same run."""
    world, prefill, decode = make_connected()
    names = [f"transfer {number}" for number in range(12)]
    for number, name in enumerate(names):
        decode.expect(name, [number], prefill)
    world.advance(SOON_S)
    effects = prefill.core.drop_engine("d0", world.clock())
    told = [
        effect.message.transfer_id for effect in effects if isinstance(getattr(effect, "message", None), wire.Failed)
    ]
    assert told == names


def test_a_cancel_during_the_write_is_answered_with_drained_and_nothing_else():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    decode.expect("t", [7], prefill)
    prefill.push("t", [3])
    world.advance(SOON_S)
    told = []

    def listen(message):
        told.append(decoded(message)) if message.receiver == "d0" else None
        return message.frames

    world.network.tamper = listen
    decode.cancel("t")
    world.advance(SOON_S)
    world.heal()
    world.advance(SOON_S)
    assert not [message for message in told if isinstance(message, wire.Failed)]


def test_a_receive_that_is_done_takes_its_row(monkeypatch):
    fired = []
    monkeypatch.setattr(decode_module.DecodeCore, "_fire", lambda self, receive, trigger: fired.append(str(trigger)))
    world, prefill, decode = make_connected()
    fired.clear()
    decode.expect("t", [7], prefill)
    prefill.push("t", [3])
    world.advance(SOON_S)
    assert fired == ["completed"]


def test_a_push_in_line_goes_on_when_its_engine_is_lost_and_its_link_is_not():
    world, prefill, decode = make_connected(max_write_bytes=1)
    world.hold_writes = True
    for number in range(3):
        decode.expect(f"t{number}", [number], prefill)
        prefill.push(f"t{number}", [number])
    world.advance(SOON_S)
    one, two = world.writes
    waiting = prefill.pushes[-1]
    assert prefill.core.gauges()["pushes_in_lines"] == 1
    world.fail_write(one, disconnected=False)
    world.hold_writes = False
    world.finish(two)
    world.advance(2)
    assert waiting.outcome == "done"


def test_a_registration_without_a_push_is_told_when_its_engine_finds_no_room():
    world = make_world(max_engines=1, stall_timeout_s=100, hold_timeout_s=200)
    prefill, decode = world.prefill("p0"), world.decode("d0")
    connect(world, prefill, decode)
    world.hold_writes = True
    for number in range(2):
        decode.expect(f"flying {number}", [number], prefill)
        prefill.push(f"flying {number}", [number])
    unpushed = decode.expect("unpushed", [12], prefill)
    world.advance(SOON_S)
    one, two = world.writes
    world.fabric.stall(two)
    world.fail_write(one, disconnected=False)
    world.advance(SOON_S)
    decode.expect("t", [5], prefill)
    prefill.push("t", [5])
    world.advance(SOON_S)
    assert unpushed.code == "queue_full"
    push = prefill.push("unpushed", [12])
    world.advance(SOON_S)
    assert not push.is_over  # another engine may ask for it, or this one later


def test_a_failure_that_comes_after_the_cancel_releases_the_blocks_by_itself():
    """Prefill will also answer the cancel, but its process may end before that."""
    decode, other = Decode(), Other("p0", ALONE)
    decode.expect("t", [7], [other])
    decode.meets(other)
    (asked,) = decode.told(other, wire.Register)
    decode.do(decode.core.cancel("t", decode.now_s))
    decode.hears(other, wire.Failed("t", asked.epoch, FailureCode.cancelled_by_peer, "?", settled=True))
    ended, released = decode.events
    assert (ended.blocks_reusable, released.proven) == (False, True)


def test_prefill_that_has_not_said_welcome_is_not_told_goodbye():
    decode, other = Decode(), Other("p0", ALONE)
    decode.expect("t", [7], [other])
    decode.do(decode.core.link_opened(decode.dialled[address_of(other)], decode.now_s))
    decode.do(decode.core.transport_closed(decode.now_s))
    assert [type(message) for message in decode.told(other, object)] == [wire.Hello]


def test_prefill_that_has_not_said_welcome_again_is_not_told_of_a_cancel_before_it_has():
    decode, other = Decode(), Other("p0", ALONE)
    decode.expect("t", [7], [other])
    decode.meets(other)
    decode.loses(other)
    decode.advance(1)
    decode.do(decode.core.link_opened(decode.dialled[address_of(other)], decode.now_s))
    decode.do(decode.core.cancel("t", decode.now_s))
    assert [type(message) for message in decode.told(other, object)] == [wire.Hello]
    decode.meets(other)
    assert len(decode.told(other, wire.Cancel)) == 1


def test_decode_without_its_memory_says_goodbye_hangs_up_and_knows_no_living_engine():
    decode, other = Decode(), Other("p0", ALONE)
    decode.expect("t", [7], [other])
    decode.meets(other)
    decode.arrives(other, 1, 0, 1)
    link = decode.dialled[address_of(other)]
    said, hung_up = decode.core.transport_closed(decode.now_s)
    assert isinstance(said.message, wire.Goodbye)
    assert (said.link, hung_up) == (link, HangUp(link))
    assert decode.core.gauges()["links"] == 0
    assert (only_engine(decode).state, only_engine(decode).reason) == ("evicted", "closing")


@pytest.mark.parametrize("is_met", [False, True])
def test_a_link_that_has_closed_is_not_hung_up_on(is_met):
    decode, other = Decode(), Other("p0", ALONE)
    decode.expect("t", [7], [other])
    if is_met:
        decode.meets(other)
    effects = decode.core.link_closed(decode.dialled[address_of(other)], "gone", decode.now_s, refused=False)
    assert not [effect for effect in effects if isinstance(effect, HangUp)]


def test_the_first_heartbeat_comes_one_interval_after_welcome():
    decode, other = Decode(), Other("p0", ALONE)
    decode.expect("t", [7], [other])
    decode.meets(other)
    for seconds, num_heartbeats in ((0, 0), (CONFIG.heartbeat_interval_s / 2, 0), (CONFIG.heartbeat_interval_s / 2, 1)):
        decode.advance(seconds)
        assert len(decode.told(other, wire.Heartbeat)) == num_heartbeats


def test_notifications_of_a_rank_or_a_group_that_nobody_knows_are_counted_once_and_change_nothing():
    decode, other = Decode(), Other("p0", ALONE)
    decode.expect("t", [7], [other])
    decode.meets(other)
    for payload in (written(1, (0, 1), rank=(0, 5)), written(1, (9, 0, 2, 0, 1))):
        decode.do(decode.core.notified(other.identity.agent_name, payload, decode.now_s))
    assert (decode.core.counters["notifications_foreign"], decode.core.counters["notifications_malformed"]) == (1, 1)
    assert decode.events == []
    decode.arrives(other, 1, 0, 1)
    assert [event.outcome for event in decode.events] == ["done"]


def test_a_failure_that_comes_before_welcome_ends_nothing():
    decode, other = Decode(), Other("p0", ALONE)
    decode.expect("t", [7], [other])
    decode.hears(other, wire.Failed("t", 1, FailureCode.closing, "?", settled=True))
    assert (decode.events, decode.core.counters["messages_late"]) == ([], 1)


def test_a_receive_is_in_flight_until_its_last_layer_has_arrived_which_ends_a_row_of_failures():
    decode, other = Decode(handshake_attempts=3), Other("p0", ALONE)
    decode.expect("t", [7, 8], [other])
    decode.loses(other)
    decode.advance(1)
    decode.meets(other)
    assert decode.core._receives[1].state == "registered"
    decode.arrives(other, 1, 0, 1)
    decode.arrives(other, 1, 1, 1, layers=range(1))
    assert decode.core._receives[1].state == "receiving"
    assert (only_engine(decode).in_flight, only_engine(decode).handshake_failures) == (1, 1)
    decode.arrives(other, 1, 1, 1, layers=range(1, 2))
    assert (only_engine(decode).in_flight, only_engine(decode).handshake_failures) == (0, 0)


def after_a_failed_dial():
    """Decode and a prefill engine that it has reached at the second attempt, and asked for transfer t."""
    decode, other = Decode(handshake_attempts=3), Other("p0", ALONE)
    decode.expect("t", [7], [other])
    decode.loses(other)
    decode.advance(1)
    decode.meets(other)
    return decode, other


def test_a_second_welcome_and_a_failed_dial_are_counted_once():
    decode, other = after_a_failed_dial()
    theirs = other.identity
    decode.hears(
        other, wire.Welcome(theirs.engine_id, theirs.incarnation, theirs.share, theirs.holdings, theirs.agent_name)
    )
    counters = decode.core.counters
    assert counters["messages_unexpected"] == 1
    assert {name: n for name, n in counters.items() if name.startswith("handshakes_failed_")} == {
        "handshakes_failed_peer_lost": 1
    }


def test_a_lease_ends_and_names_the_ranks_that_were_not_served_alone():
    prefill = Prefill(lease_s=10)
    left, right = (Other("d0", Share(tp_rank=rank, tp_size=2)) for rank in (0, 1))
    prefill.meets(left, right)
    prefill.push("t", [1, 2])
    for epoch, other in enumerate((left, right), 7):
        prefill.registers(other, "t", epoch, [5, 6])
    prefill.answers(left)
    prefill.settles(prefill.write_to(left))
    prefill.advance(11)
    (end,) = prefill.events
    assert end.outcome == "expired"
    assert end.reason.endswith("it could not be written: engine 'd0' rank (pp, tp) (0, 1) is handshaking")


def test_rule16_the_memory_of_whose_registration_ended_is_bounded():
    world, prefill, decode = make_connected(max_tombstones=3)
    for number in range(5):
        decode.expect(f"t{number}", [number], prefill)
    world.advance(SOON_S)
    decode.kill()
    world.advance(SOON_S)
    assert list(prefill.core._registrations._owners) == ["t2", "t3", "t4"]


def test_rule16_whose_registration_ended_last_is_remembered_longest():
    prefill = Prefill(max_tombstones=2, liveness_timeout_s=1000)
    left, right = (Other("d0", Share(tp_rank=rank, tp_size=2)) for rank in (0, 1))
    others = [Other("d1", ALONE), Other("d2", ALONE)]
    prefill.meets(left, right, *others)
    for epoch, (other, name) in enumerate(zip((left, right, *others), ("t", "t", "u", "v"), strict=True), 1):
        prefill.registers(other, name, epoch, [5])
    for other in (left, others[0], right, others[1]):
        breaks_off(prefill, other)
    prefill.push("t", [1])
    prefill.push("u", [2])
    prefill.advance(prefill.config.lease_s)
    last, first = prefill.events
    assert "had ended with its decode engine: engine 'd0'" in last.reason
    assert "no decode engine has registered for it" in first.reason


def test_a_silent_prefill_engine_is_hung_up_on_and_not_told_goodbye():
    """Goodbye means that nothing is owed any more. What it was asked to write is asked again on the next link."""
    decode, other = Decode(), Other("p0", ALONE)
    decode.expect("t", [7], [other])
    decode.meets(other)
    link = decode.dialled[address_of(other)]
    decode.advance(CONFIG.liveness_timeout_s)
    decode.advance(CONFIG.handshake_backoff_max_s)
    assert decode.dialled[address_of(other)] != link
    assert not [message for to, message in decode.sent if to == link and isinstance(message, wire.Goodbye)]


@pytest.mark.parametrize(("num_failures", "is_told"), [(1, True), (2, False)])
def test_prefill_is_told_of_a_receive_of_no_block_as_long_as_others_would_wait(num_failures, is_told):
    decode, other = Decode(handshake_attempts=2), Other("p0", ALONE)
    decode.expect("empty", [], [other])
    for _ in range(num_failures):
        decode.loses(other)
        decode.advance(1)
    decode.expect("t", [7], [other])
    decode.meets(other)
    told = [registration.transfer_id for registration in decode.told(other, wire.Register)]
    assert told == (["t", "empty"] if is_told else ["t"])


def test_a_failure_that_prefill_reports_ends_no_row_of_failures():
    """Otherwise an engine that connects and breaks at each WRITE would be dialled in a tight loop."""
    decode, other = after_a_failed_dial()
    decode.hears(other, wire.Failed("t", 1, FailureCode.write_failed, "?", settled=True))
    assert (only_engine(decode).in_flight, only_engine(decode).handshake_failures) == (0, 1)


@pytest.mark.parametrize(
    ("deadline_s", "waited_s", "remaining_ms"),
    [(30.0, 0.0, 30_000), (30.0, 4.5, 25_500), (1.0, 2.0, 0), (1e9, 0.0, wire.MAX_REMAINING_MS)],
)
def test_prefill_is_told_how_much_time_is_left(deadline_s, waited_s, remaining_ms):
    decode, other = Decode(handshake_timeout_s=10), Other("p0", ALONE)
    decode.expect("t", [7], [other], deadline_s=deadline_s)
    decode.now_s += waited_s  # the link takes so long, and the timer of the deadline is late
    decode.meets(other)
    assert [asked.remaining_ms for asked in decode.told(other, wire.Register)] == [remaining_ms]


def test_prefill_that_reports_a_failure_is_not_asked_to_stop():
    decode, other = Decode(), Other("p0", ALONE)
    decode.expect("t", [7], [other])
    decode.meets(other)
    decode.hears(other, wire.Failed("t", 1, FailureCode.write_stalled, "?", settled=False))
    (end,) = decode.events
    assert (end.outcome, end.blocks_reusable) == ("failed", False)
    assert decode.told(other, wire.Cancel) == []


def test_blocks_that_are_held_are_released_when_nobody_listens_at_the_address_any_more():
    decode, other = Decode(), Other("p0", ALONE)
    decode.expect("t", [7], [other])
    decode.meets(other)
    decode.do(decode.core.cancel("t", decode.now_s))
    decode.loses(other)
    decode.advance(1)
    assert len(decode.events) == 1
    decode.loses(other, refused=True)
    assert decode.events[-1].proven


def test_a_receive_that_was_cancelled_before_welcome_is_not_in_flight_after_it():
    decode, other = Decode(), Other("p0", ALONE)
    decode.expect("t", [7], [other])
    decode.do(decode.core.cancel("t", decode.now_s))
    decode.expect("u", [8], [other])
    decode.meets(other)
    assert (decode.told(other, wire.Cancel), only_engine(decode).in_flight) == ([], 1)


def test_a_receive_whose_blocks_are_held_takes_its_rows(monkeypatch):
    fired = []
    fire = decode_module.DecodeCore._fire
    monkeypatch.setattr(decode_module.DecodeCore, "_fire", lambda *args: fired.append(str(args[2])) or fire(*args))
    for is_drained in (True, False):
        decode, other = Decode(), Other("p0", ALONE)
        decode.expect("t", [7], [other])
        decode.meets(other)
        decode.do(decode.core.cancel("t", decode.now_s))
        if is_drained:
            decode.hears(other, wire.Drained("t", 1))
        else:
            decode.advance(CONFIG.hold_timeout_s)
    assert fired == ["ended_unquiet", "proven_quiet", "ended_unquiet", "hold_expired"]


def test_a_dropped_prefill_engine_that_says_goodbye_is_hung_up_on():
    decode, other = Decode(), Other("p0", ALONE)
    decode.expect("t", [7], [other])
    decode.meets(other)
    decode.do(decode.core.drop_engine("p0", decode.now_s))
    assert decode.core.gauges()["links"] == 1  # what it was asked to write may still land: it is listened to
    decode.hears(other, wire.Goodbye("shuts down"))
    assert decode.core.gauges()["links"] == 0


def test_an_answer_to_a_cancel_ends_a_row_of_failures():
    decode, other = after_a_failed_dial()
    decode.do(decode.core.cancel("t", decode.now_s))
    assert only_engine(decode).handshake_failures == 1
    decode.hears(other, wire.Drained("t", 1))
    assert only_engine(decode).handshake_failures == 0


def test_each_renewal_that_finds_no_room_is_counted_once():
    decode, other = Decode(max_pending_pushes=3), Other("p0", ALONE)
    for names in (["t0", "t1"], ["t1", "t2", "t3", "t4"]):
        decode.do(decode.core.renew(names, source=source_of([other]), now_s=decode.now_s))
    assert decode.core.counters["renewals_dropped"] == 2
    decode.meets(other)
    (renewed,) = decode.told(other, wire.Renew)
    assert renewed.transfer_ids == ["t2", "t3", "t4"]  # the oldest gave way


def test_decode_says_how_many_there_are_of_everything():
    decode, other = Decode(), Other("p0", ALONE)
    for number, name in enumerate(("open", "also open", "held")):
        decode.expect(name, [number], [other])
    decode.meets(other)
    decode.do(decode.core.cancel("held", decode.now_s))
    assert decode.core.gauges() == {
        "links": 1, "engines": 1, "receives_open": 2, "receives_held": 1,
        "timers": 4,  # two deadlines, the end of the hold, and a heartbeat
    }  # fmt: skip


def test_a_push_in_doubt_is_one_that_is_not_over():
    world, prefill, decode = make_connected()
    world.stalling.add("d0")
    decode.expect("t", [7], prefill)
    prefill.push("t", [3])
    world.advance(CONFIG.stall_timeout_s + 1)
    assert prefill.pushes[-1].outcome == "failed"
    assert prefill.core.num_pushes == 1


def test_the_end_of_a_writer_whose_part_has_come_whole_does_not_matter():
    decode, left, right = Decode(), *(Other("p0", Share(tp_rank=rank, tp_size=2)) for rank in (0, 1))
    decode.expect("t", [7], [left, right])
    decode.meets(left, right)
    decode.arrives(left, 1, 0, 1)
    decode.loses(left, refused=True)
    assert not decode.events
    decode.arrives(right, 1, 0, 1)
    assert [event.outcome for event in decode.events] == ["done"]
