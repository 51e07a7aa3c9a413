"""Prefill processes that die or freeze under their receivers: decode fails what is lost, and nothing else."""

from __future__ import annotations

import time

import peers

SHAPE = peers.Shape(blocks=64)
PROMPT_S = 2.0


def test_f5_a_killed_prefill_engine_fails_its_receives_and_no_others(fleet):
    """F5, E7(b): four receives of p0 fail within a bound with their blocks reusable; p1's goes on; p0 comes back."""
    first, second = fleet.prefill("p0", SHAPE), fleet.prefill("p1", SHAPE)
    p0, p1 = first.call("address"), second.call("address")
    with peers.Decode(shape=SHAPE) as decode:
        lost = [f"r{i}" for i in range(1, 5)]
        for number, transfer_id in enumerate(lost):
            decode.expect(transfer_id, [2 * number, 2 * number + 1], p0)
        decode.expect("r5", [10, 11], p1, source_engine_id="p1")
        peers.until(lambda: first.call("stats")["registrations_waiting"] == 4)
        peers.until(lambda: second.call("stats")["registrations_waiting"] == 1)

        killed_s = time.monotonic()
        first.kill()
        for transfer_id, event in decode.inbox.outcomes(lost).items():
            assert event.outcome == "failed" and event.code in ("peer_lost", "peer_restarted"), event
            assert decode.inbox.reusable(transfer_id) in ("outcome", "proven")
        delay_s = time.monotonic() - killed_s
        print(f"SIGKILL of prefill to failed and reusable: {delay_s:.3f} s")
        assert delay_s < PROMPT_S
        assert decode.receiver.healthy() and "r5" not in decode.inbox.finished

        again = fleet.prefill("p0", SHAPE, listen=f"{p0[0]}:{p0[1]}")
        decode.expect("r1", [0, 1], p0)
        again.call("push", "r1", [7, 8])
        second.call("push", "r5", [1, 2])
        assert decode.inbox.outcome("r5").outcome == "done" and decode.arena.holds("r5", [10, 11])
        peers.until(lambda: decode.inbox.poll() or len(decode.inbox.finished["r1"]) == 2, what="the second r1")
        assert decode.inbox.finished["r1"][1].outcome == "done" and decode.arena.holds("r1", [0, 1])
        assert decode.arena.is_clean([*range(2, 10), *range(12, SHAPE.blocks)]) and decode.arena.guards_are_intact()
        assert {e.engine_id: e.state for e in decode.receiver.engines()} == {"p0": "connected", "p1": "connected"}


def test_e7_a_frozen_prefill_engine_is_given_up_at_the_deadline_and_its_blocks_are_held(fleet):
    """E7(d), E8: nobody can prove that it will not write, so the blocks come back only once it can be asked."""
    prefill = fleet.prefill(shape=SHAPE)
    address = prefill.call("address")
    with peers.Decode(shape=SHAPE, liveness_timeout_s=2.0) as decode:
        decode.expect("warm", [0], address)
        prefill.call("push", "warm", [0])
        assert decode.inbox.outcome("warm").outcome == "done"
        prefill.freeze()
        decode.expect("late", [1, 2], address, deadline_s=0.5)
        event = decode.inbox.outcome("late")
        assert event.outcome == "expired" and event.code == "deadline" and not event.blocks_reusable
        peers.until(lambda: decode.receiver.engines()[0].state != "connected", 5.0, "p0 counts as lost")
        assert decode.receiver.stats()["receives_held"] == 1
        prefill.thaw()
        assert decode.inbox.reusable("late") == "proven"
        decode.expect("after", [1, 2], address)
        prefill.call("push", "after", [4, 5])
        assert decode.inbox.outcome("after").outcome == "done"
        assert decode.arena.holds("after", [1, 2]) and decode.arena.is_clean(list(range(3, SHAPE.blocks)))


def test_e7_a_hold_ends_by_policy_when_the_frozen_engine_never_answers(fleet):
    prefill = fleet.prefill(shape=SHAPE)
    address = prefill.call("address")
    with peers.Decode(shape=SHAPE, hold_timeout_s=0.5, liveness_timeout_s=20.0) as decode:
        decode.expect("warm", [0], address)
        prefill.call("push", "warm", [0])
        assert decode.inbox.outcome("warm").outcome == "done"
        decode.expect("late", [1, 2], address)
        peers.until(lambda: prefill.call("stats")["registrations_waiting"])
        prefill.freeze()
        decode.receiver.cancel("late")
        assert decode.inbox.outcome("late").outcome == "cancelled"
        assert decode.inbox.reusable("late") == "unproven"
        assert decode.receiver.stats()["holds_timed_out"] == 1
