"""Peers that fail again and again, completions that get lost, and requests that can never be met."""

import msgspec
import pytest
from core_worlds import CONFIG, SETTLED_S, SOON_S, make_connected, make_pair, only_engine, replace, run_to_the_end

from kvpush import wire
from kvpush.errors import FailureCode, TransportError
from kvpush.testing import Operation


def without_notification_of(decode, epoch):
    """Lose what says that this registration's blocks have arrived; NIXL has written them all the same."""
    ask = decode.transport.notifications

    def notifications():
        return [found for found in ask() if wire.decode_written(found.payload).epoch != epoch]

    decode.transport.notifications = notifications


def test_e6_one_lost_notification_ends_by_the_deadline_and_its_blocks_come_back_proven():
    """E6: the others are done; this one is `deadline`, and held until prefill says that nothing is in flight."""
    world, prefill, decode = make_connected()
    receives = [decode.expect(f"r{i}", [i], prefill, deadline_s=5) for i in (1, 2, 3)]
    world.advance(SOON_S)
    without_notification_of(decode, receives[1].epoch)
    pushes = [prefill.push(f"r{i}", [i]) for i in (1, 2, 3)]
    world.run_until(lambda: all(receive.is_over for receive in receives), SETTLED_S)
    assert [receive.outcome for receive in receives] == ["done", "expired", "done"]
    assert receives[1].code == "deadline" and "0 of 1 blocks" in receives[1].finished.reason
    assert not receives[1].finished.blocks_reusable  # the WRITE may have happened, and has
    assert [push.outcome for push in pushes] == ["done", "done", "done"]
    run_to_the_end(world)
    assert receives[1].is_free_for_sure
    assert decode.core.counters["receives_expired"] == 1


def test_e14_a_failed_write_sends_no_completion_and_the_next_one_does():
    """E14: raised while posting, and found while polling."""
    world, prefill, decode = make_connected()
    for number, fail in enumerate(("posting", "polling")):
        receive = decode.expect(f"bad {fail}", [number], prefill)
        world.advance(SOON_S)
        if fail == "posting":
            error = TransportError(FailureCode.write_failed, "no such descriptor")
            world.fabric.fail_next(prefill.transport.agent_name, Operation.post_write, error)
            push = prefill.push(f"bad {fail}", [number])
        else:
            world.hold_writes = True
            push = prefill.push(f"bad {fail}", [number])
            world.run_until(lambda: bool(world.writes))
            world.fail_write(world.writes[0], disconnected=True)
            world.hold_writes = False
        world.settle(SETTLED_S)
        assert push.outcome == receive.outcome == "failed", (push, receive)
        assert decode.core.counters["receives_done"] == number + 1  # with the one that connected, and the good ones
        good = decode.expect(f"good {fail}", [5], prefill)
        prefill.push(f"good {fail}", [5])
        world.settle(SETTLED_S)
        assert good.outcome == "done"
    run_to_the_end(world)


def test_a_peer_that_fails_for_long_is_asked_seldom_and_served_again_when_it_heals():
    """Quarantine: exponential backoff with jitter up to its cap, a probe now and then, and no blacklist."""
    world, prefill, decode = make_pair(handshake_attempts=1, lease_s=5, handshake_backoff_max_s=30)
    world.network.tamper = replace(wire.Metadata, lambda message: msgspec.structs.replace(message, digest=b"0" * 32))
    number, end_s = 0, world.clock() + 1200
    while world.clock() < end_s:
        number += 1
        receive, push = decode.expect(f"t{number}", [number % 16], prefill), prefill.push(f"t{number}", [number % 16])
        world.settle(SETTLED_S)
        assert push.outcome in ("failed", "expired") and receive.outcome == "failed", (push, receive)
    attempts = prefill.core.counters["handshakes_started"]
    assert 1200 / 35 < attempts < 1200 / 8, attempts  # full jitter: half the cap on average
    snapshot = only_engine(prefill)
    assert snapshot.state == "unknown" and snapshot.handshake_failures == attempts and "digest" in snapshot.last_error
    assert snapshot.retry_in_s <= 30
    world.network.tamper = None
    world.advance(30)
    healed, push = decode.expect("healed", [1], prefill), prefill.push("healed", [1])
    world.settle(SETTLED_S)
    assert healed.outcome == push.outcome == "done"
    assert only_engine(prefill).handshake_failures == 0
    run_to_the_end(world)


@pytest.mark.parametrize("kind", ["engine_lost", "write_fails"])
def test_f7_an_engine_whose_writes_fail_is_quarantined_and_the_other_is_not(kind):
    """F7: repeated failures after a good handshake back off, too; the neighbour is served at once all the time."""
    world, prefill, bad = make_connected(lease_s=2)
    good = world.decode("d1")
    slowest_s = 0.0
    for number in range(30):
        error = TransportError(FailureCode.peer_lost, "broken", disconnected=kind == "engine_lost")
        world.fabric.fail_next(prefill.transport.agent_name, Operation.post_write, error)
        receive, push = bad.expect(f"bad {number}", [number % 16], prefill), prefill.push(f"bad {number}", [1])
        world.run_until(lambda receive=receive, push=push: receive.is_over and push.is_over, SETTLED_S)
        assert push.outcome in ("failed", "expired") and receive.outcome == "failed"
        start_s = world.clock()
        fine = good.expect(f"good {number}", [number % 16], prefill)
        prefill.push(f"good {number}", [2])
        world.run_until(lambda fine=fine: fine.is_over, SETTLED_S)
        assert fine.outcome == "done", fine
        slowest_s = max(slowest_s, world.clock() - start_s)
        world.settle(SETTLED_S)
    assert slowest_s < CONFIG.handshake_backoff_min_s
    run_to_the_end(world)
