"""SIGKILL of a decode engine at every moment of a push, again and again, beside one that is served throughout.

What tests/processes shows already: ten restarts with a WRITE in flight (F1), a hundred pushes before the kill (B5).
"""

from __future__ import annotations

import time

import peers
import pytest
from chaos import BIG, QUICK, RELEASE_BUDGET_S, STUCK, BaseLine, Prefill, get_stuck, push_and_check, register

LIVES = 3


def idle(prefill, decode, transfer_id):
    """Nothing is under way but a registration."""
    push_and_check(prefill, decode, f"{transfer_id}-before", [1], [2])
    register(prefill, decode, transfer_id, [3])
    return False


def in_the_handshake(prefill, decode, transfer_id):
    """Prefill has asked a process that does not answer any more."""
    register(prefill, decode, transfer_id, [3])
    decode.freeze()
    prefill.push(transfer_id, [1])
    peers.until(lambda: prefill.states()["d0"] == "handshaking", what="the handshake is under way")
    return True


def in_the_write(prefill, decode, transfer_id):
    push_and_check(prefill, decode, f"{transfer_id}-before", [1], [2])
    get_stuck(prefill, decode, transfer_id, BIG.blocks)
    return True


@pytest.mark.parametrize("moment", [idle, in_the_handshake, in_the_write], ids=lambda moment: moment.__name__)
def test_f1_sigkill_at_any_moment_costs_the_push_under_way_and_nothing_else(fleet, moment):
    """F1, B2: its end within the budget, the next life under the same id served at once, everything back in place."""
    delays_s = []
    with Prefill(shape=BIG, handshake_timeout_s=30.0, **STUCK) as prefill:
        other = fleet.decode("d1", shape=BIG, ucx_options="TLS=tcp")
        push_and_check(prefill, other, "other", [9], [9])
        base = None
        for life in range(LIVES):
            decode = fleet.decode(shape=BIG, ucx_options="TLS=tcp")
            transfer_id = f"hit-{life}"
            is_pushed = moment(prefill, decode, transfer_id)
            killed_s = time.monotonic()
            decode.kill()
            if is_pushed:
                event = prefill.inbox.outcome(transfer_id)
                assert event.outcome == "failed" and event.code in ("peer_lost", "write_failed"), event
                assert prefill.inbox.reusable(transfer_id) in ("outcome", "proven")
            peers.until(lambda: prefill.states()["d0"] == "evicted", what="d0 is released")
            delays_s.append(time.monotonic() - killed_s)
            push_and_check(prefill, other, f"other-{life}", [10], [life])
            again = fleet.decode(shape=BIG, ucx_options="TLS=tcp")
            push_and_check(prefill, again, f"again-{life}", [4, 5], [6, 7])
            again.kill()
            peers.until(lambda: prefill.states()["d0"] == "evicted", what="d0 is released")
            decode.close()
            again.close()
            if base is None:
                base = BaseLine.of(prefill)  # the first life warms up pools
        base.check(prefill)
        assert prefill.states()["d1"] == "connected"
        assert other.call("guards_are_intact") and prefill.arena.guards_are_intact()
    print(f"SIGKILL {moment.__name__} to released:", ", ".join(f"{delay_s:.3f} s" for delay_s in delays_s))
    assert max(delays_s) < RELEASE_BUDGET_S


def test_f1_a_kill_while_the_descriptors_are_being_loaded_leaves_nothing_half_done(fleet):
    """C6, F1: killed at a random instant between the first push and its end, many times."""
    with Prefill(**QUICK, handshake_attempts=1) as prefill:
        outcomes = []

        def live_and_die(life):
            decode = fleet.decode()
            register(prefill, decode, f"t{life}", [1])
            prefill.push(f"t{life}", [1])
            end_s = time.monotonic() + 0.0005 * life  # from before the request to after the WRITE
            peers.until(lambda: time.monotonic() >= end_s, what="the instant")
            decode.kill()
            outcomes.append(prefill.inbox.outcome(f"t{life}").outcome)
            assert prefill.inbox.reusable(f"t{life}") in ("outcome", "proven")
            peers.until(lambda: prefill.states()["d0"] == "evicted", what="d0 is released")
            decode.close()

        for life in range(3):
            live_and_die(life)
        base = BaseLine.of(prefill)
        for life in range(3, 12):
            live_and_die(life)
        base.check(prefill)
        assert {"failed"} <= set(outcomes) <= {"done", "failed"}, outcomes
        survivor = fleet.decode()
        push_and_check(prefill, survivor, "last", [1], [1])
