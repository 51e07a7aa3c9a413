"""WRITEs that nobody asks about any more may still land, from a source that holds other bytes by then."""

import pytest
from core_worlds import CONFIG, SOON_S, connect, make_config, make_connected, make_world, only_engine, run_to_the_end

from kvpush import wire
from kvpush.testing import Violation

HOLD_IS_OVER_S = CONFIG.stall_timeout_s + CONFIG.hold_timeout_s + SOON_S


def make_late_write(**overrides):
    """A WRITE stalls, the control link is dark until prefill's hold has run out unproven, and the source is reused."""
    world, prefill, decode = make_connected(receive_deadline_s=60, **overrides)
    world.stalling.add("d0")
    receive, push = decode.expect("t", [7, 8], prefill), prefill.push("t", [3, 4])
    world.advance(SOON_S)
    world.network.black_hole("p0", "d0")
    world.advance(HOLD_IS_OVER_S)
    return world, prefill, decode, receive, push


def land_late(world, prefill):
    """The source blocks have another owner; then the WRITE goes on."""
    prefill.push("other", [3, 4])
    world.stalling.clear()
    world.resume_writes()
    world.advance(SOON_S)


def test_decode_is_never_done_with_bytes_of_a_reused_source():
    world, prefill, decode, receive, push = make_late_write()
    assert not push.released.proven
    assert not receive.is_over
    land_late(world, prefill)
    assert receive.landed == {0, 1}
    assert not receive.is_over
    world.heal()
    run_to_the_end(world)
    assert receive.outcome in ("failed", "expired")
    assert not receive.is_free_for_sure  # prefill claims nothing while its agent lives


def test_decode_would_be_done_with_them_if_prefill_asked_about_the_write_once_more():
    """What the rule is there for: the oracle does see it when the notification is sent after all."""
    world, prefill, decode = make_connected(receive_deadline_s=60)
    kept = []
    prefill.transport.abandon_write = kept.append
    prefill.transport.remove_remote = lambda remote: None
    world.stalling.add("d0")
    decode.expect("t", [7, 8], prefill)
    prefill.push("t", [3, 4])
    world.advance(SOON_S)
    world.network.black_hole("p0", "d0")
    world.advance(HOLD_IS_OVER_S)
    land_late(world, prefill)
    (handle,) = kept
    assert prefill.transport.poll_write(handle)
    with pytest.raises(Violation, match="has other bytes"):
        world.advance(SOON_S)


def test_an_abandoned_write_leaves_nothing_tracked_and_lets_its_engine_go():
    world, prefill, decode, receive, push = make_late_write()
    gauges = prefill.core.gauges()
    assert (gauges["writes_in_flight"], gauges["bytes_in_flight"], gauges["writes_doubtful"]) == (0, 0, 1)
    assert (gauges["pushes_held"], gauges["timers"]) == (0, 0)
    assert prefill.core.counters["writes_abandoned"] == 1
    assert prefill.core.counters["holds_timed_out"] == 1
    counts = prefill.transport.counts
    assert counts.writes_posted == counts.writes_released
    assert counts.remotes_added == counts.remotes_removed == 1
    assert only_engine(prefill).state == "evicted"
    world.heal()
    run_to_the_end(world)


def test_a_policy_that_keeps_the_blocks_goes_on_asking():
    world, prefill, decode, receive, push = make_late_write(hold_policy="keep")
    assert not push.is_free
    assert prefill.core.gauges()["writes_in_flight"] == 1
    world.heal()
    world.settle(5)
    assert push.released.proven
    assert receive.is_free_for_sure
    run_to_the_end(world)


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "asked again"])
def test_the_end_of_the_agent_proves_an_abandoned_write_quiet(is_cancelled):
    """Decode hears it before the goodbye, and needs no second link to find out."""
    world = make_world(tombstone_ttl_s=1000)
    prefill = world.prefill("p0")
    decode = world.decode("d0", config=make_config(hold_timeout_s=500, receive_deadline_s=100))
    connect(world, prefill, decode)
    world.stalling.add("d0")
    receive = decode.expect("t", [7], prefill)
    prefill.push("t", [3])
    world.advance(SOON_S)
    world.network.black_hole("p0", "d0")
    world.advance(HOLD_IS_OVER_S)
    if is_cancelled:
        decode.cancel("t")
    world.network.heal("p0", "d0")
    world.advance(5)
    assert receive.is_over
    assert not receive.is_free
    prefill.close()
    world.settle(SOON_S)
    assert (receive.released.proven, receive.released.reason) == (True, "drained")
    run_to_the_end(world)


def test_a_registration_that_a_late_write_may_reach_is_not_served_again():
    """Even when its tombstone is long gone: a new push's bytes must not be overwritten by those of an old source."""
    world, prefill, decode, receive, push = make_late_write(tombstone_ttl_s=1)
    again = prefill.push("t", [5, 6])
    world.network.heal("p0", "d0")
    world.advance(5)
    assert (receive.outcome, receive.code, receive.is_free) == ("failed", "already_served", False)
    assert not again.is_over
    retried = decode.expect("t2", [9], prefill)
    prefill.push("t2", [9])
    world.heal()
    world.settle(60)
    assert retried.outcome == "done"
    assert again.outcome == "expired"
    run_to_the_end(world)


def test_drained_is_not_said_for_another_engine_that_names_the_same_incarnation():
    world, prefill, decode, receive, push = make_late_write()
    thief = world.decode("d9")
    connect(world, prefill, thief)
    (link,) = [link for link, known in prefill.core._links.items() if known.hello.engine_id == "d9"]
    cancel = wire.Cancel("t", receive.epoch, "cancelled_by_peer", "")
    (drained,) = prefill.core.message(link, cancel, world.clock())
    assert isinstance(drained.message, wire.Drained)
    world.network.heal("p0", "d0")
    world.advance(5)
    assert not receive.is_free  # the thief's question changed nothing for the one who was written to
    world.heal()
    run_to_the_end(world)


def test_two_chunks_one_in_doubt_and_one_stalled_are_both_given_up():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive = decode.expect("t", [7, 8], prefill)
    world.advance(SOON_S)  # registered: each chunk is a WRITE of its own
    push = prefill.push("t", [3], last=False)
    prefill.push("t", [4], first_block=1)
    world.advance(SOON_S)
    one, two = world.writes
    world.fabric.stall(two)
    world.fail_write(one, disconnected=False)
    world.advance(HOLD_IS_OVER_S)
    assert (push.code, push.released.proven) == ("write_failed", False)
    gauges = prefill.core.gauges()
    assert (gauges["writes_in_flight"], gauges["writes_doubtful"]) == (0, 2)
    assert prefill.core.counters["writes_abandoned"] == 1
    assert not receive.is_free_for_sure
    world.heal()
    run_to_the_end(world)
