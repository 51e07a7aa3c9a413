"""SIGSTOP and SIGCONT of a decode engine at every moment of a push.

What tests/processes shows already: a freeze while idle, a WRITE that outlives the TTL (B1), a stalled WRITE and its
late end (E10), one frozen engine of three (F7), a frozen prefill engine (E7).
"""

from __future__ import annotations

import time

import peers
import pytest
from chaos import BIG, QUICK, BaseLine, Prefill, get_stuck, push_and_check, register


def test_a_freeze_in_the_handshake_fails_the_push_in_time_and_is_forgiven(fleet):
    """A7, F7: the other engine's handshake does not wait; after SIGCONT the next push is served."""
    with Prefill(handshake_timeout_s=0.5, handshake_attempts=1, **QUICK) as prefill:
        decode, other = fleet.decode("d0"), fleet.decode("d1")
        register(prefill, decode, "hit", [3])
        decode.freeze()
        start_s = time.monotonic()
        prefill.push("hit", [1])
        push_and_check(prefill, other, "other", [2], [2])
        event = prefill.inbox.outcome("hit")
        assert event.outcome == "failed" and event.code in ("handshake_timeout", "peer_lost"), event
        assert event.blocks_reusable and time.monotonic() - start_s < 0.5 * 1.2 + 1
        decode.thaw()
        got = decode.call("outcome", "hit")
        assert got.outcome == "failed" and got.code == event.code or got.code == "peer_lost", got
        assert decode.call("reusable", "hit") in ("outcome", "proven")
        assert decode.call("is_clean")
        push_and_check(prefill, decode, "after", [1], [3])


def test_a_short_freeze_in_the_handshake_costs_time_only(fleet):
    with Prefill(**QUICK) as prefill:
        decode = fleet.decode()
        register(prefill, decode, "t1", [3])
        decode.freeze()
        prefill.push("t1", [1])
        peers.until(lambda: prefill.states()["d0"] == "handshaking", what="the handshake is under way")
        decode.thaw()
        assert prefill.inbox.outcome("t1").outcome == "done"
        assert decode.call("outcome", "t1").outcome == "done" and decode.call("holds", "t1", [3])


@pytest.mark.timeout(180)
def test_e1_frozen_in_the_write_again_and_again(fleet):
    """E1, E10: lost with a WRITE in flight, in doubt, forgiven; no descriptor, handle or byte is left of it."""
    settings = {"ucx_options": "TLS=tcp", "tcp_user_timeout_s": 60.0, "stall_timeout_s": 0.5} | QUICK
    with Prefill(shape=BIG, **settings) as prefill:
        decode, other = (fleet.decode(f"d{i}", shape=BIG, **settings) for i in range(2))
        push_and_check(prefill, other, "other", [1], [1])
        base = None
        for turn in range(4):
            push_and_check(prefill, decode, f"before-{turn}", [5], [6])
            get_stuck(prefill, decode, f"stuck-{turn}", BIG.blocks)
            event = prefill.inbox.outcome(f"stuck-{turn}")
            assert event.outcome == "failed" and event.code == "write_stalled" and not event.blocks_reusable
            assert prefill.engine("d0").state == "stale" and prefill.engine("d0").reason == "lost"
            push_and_check(prefill, other, f"other-{turn}", [2], [2])
            decode.thaw()
            assert prefill.inbox.reusable(f"stuck-{turn}") == "proven"
            assert decode.call("outcome", f"stuck-{turn}").outcome in ("done", "failed")
            assert decode.call("reusable", f"stuck-{turn}") in ("outcome", "proven")
            push_and_check(prefill, decode, f"after-{turn}", [7], [8])
            if base is None:
                base = BaseLine.of(prefill)
        # NIXL 1.5.1 keeps one socket of every connection to a living process that is given up, until that process ends
        base.check(prefill, more_descriptors=2 + 3 * 2)
        decode.kill()
        other.kill()
        peers.until(lambda: set(prefill.states().values()) == {"evicted"}, what="both are released")
        assert prefill.arena.guards_are_intact()


def test_a_frozen_prefill_engine_wakes_up_to_old_and_new_work(fleet):
    """E7: what it had been asked for before the freeze is over on decode; what comes after is served."""
    prefill = fleet.prefill(**QUICK, lease_s=1.0)
    address = prefill.call("address")
    with peers.Decode(**QUICK) as decode:
        decode.expect("warm", [0], address)
        prefill.call("push", "warm", [0])
        assert decode.inbox.outcome("warm").outcome == "done"
        base = peers.resources()
        for turn in range(3):
            late = f"late-{turn}"
            decode.expect(late, [1, 2], address, deadline_s=0.5)
            peers.until(lambda: prefill.call("stats")["registrations_waiting"], what="registered")
            prefill.freeze()
            event = decode.inbox.outcome(late)
            assert event.outcome == "expired" and event.code == "deadline"
            peers.until(lambda: decode.receiver.engines()[0].state != "connected", 5.0, "p0 counts as lost")
            prefill.thaw()
            assert decode.inbox.reusable(late) in ("outcome", "proven")
            prefill.call("push", late, [4, 5])  # too late: nobody wants it, and nothing is written
            # decode's cancel came in time to meet it, or went with the old link: then the lease ends it
            assert prefill.call("outcome", late).outcome in ("cancelled", "expired")
            assert decode.arena.is_clean([1, 2])
            decode.expect(f"after-{turn}", [1, 2], address)
            prefill.call("push", f"after-{turn}", [6, 7])
            assert decode.inbox.outcome(f"after-{turn}").outcome == "done"
            assert decode.arena.holds(f"after-{turn}", [1, 2])
            decode.arena.clear([1, 2])
        end = peers.resources()
        # a socket for every connection to a living process that was given up: see above
        assert end.descriptors <= base.descriptors + 2 + 3 and end.threads <= base.threads, (base, end)
