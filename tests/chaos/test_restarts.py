"""Whole fleets and prefill engines that are replaced under traffic, and one engine that cannot keep itself up.

What tests/processes shows already: a prefill engine that is killed, with others beside it (F5).
"""

from __future__ import annotations

import itertools
import time
from collections import Counter

import peers
import pytest
from chaos import QUICK, RELEASE_BUDGET_S, SMALL, BaseLine, Prefill, is_up_now, push_and_check, register


@pytest.mark.timeout(240)
def test_f1_a_rolling_restart_of_all_decode_engines_costs_only_their_own_pushes(fleet):
    """F1, F9: one after the other, by SIGKILL or in order, while the others are pushed to all the time."""
    serial = itertools.count()
    with Prefill(**QUICK) as prefill:
        decodes = {f"d{i}": fleet.decode(f"d{i}", wait=False) for i in range(4)}

        def push_to(engine_id):
            number = next(serial)
            push_and_check(prefill, decodes[engine_id], f"t{number}", [number % 64], [(number + 1) % 64])

        for engine_id in decodes:
            push_to(engine_id)
        base = BaseLine.of(prefill)
        for turn, engine_id in enumerate([*decodes, *decodes]):
            others = itertools.cycle([other for other in decodes if other != engine_id])
            old = decodes[engine_id]
            push_to(engine_id)
            register(prefill, old, f"lost-{turn}", [5])
            old.kill() if turn % 2 else old.leave()
            push_to(next(others))
            old.close()
            new = decodes[engine_id] = fleet.decode(engine_id, wait=False)
            is_up = False
            while not is_up:  # traffic goes on until the new life is there
                push_to(next(others))
                is_up = is_up_now(new)
            push_to(engine_id)
            assert prefill.states() == dict.fromkeys(decodes, "connected")
        reasons = Counter(reason for engine_id in decodes for reason in prefill.reasons(engine_id))
        assert reasons["closing"] == 4 and reasons["lost"] + reasons["superseded"] == 4, reasons
        base.check(prefill)
        for decode in decodes.values():
            assert decode.call("guards_are_intact")


@pytest.mark.timeout(180)
def test_f5_prefill_restarts_at_once_with_receives_outstanding_again_and_again(fleet):
    """F5: same id, host and port. What was asked of the old life fails, its blocks proven quiet; the rest goes on."""
    delays_s = []
    prefill = fleet.prefill(**QUICK)
    address = prefill.call("address")
    listen = "{}:{}".format(*address)
    with peers.Decode("d0", **QUICK) as first, peers.Decode("d1", **QUICK) as second:
        base = None
        for life in range(5):
            outstanding = [f"{life}-{number}" for number in range(4)]
            for number, transfer_id in enumerate(outstanding):
                decode = (first, second)[number % 2]
                decode.expect(transfer_id, [2 * number, 2 * number + 1], address)
            peers.until(lambda: prefill.call("stats")["registrations_waiting"] == 4, what="all are registered")  # noqa: B023
            killed_s = time.monotonic()
            prefill.kill()
            prefill.close()
            prefill = fleet.prefill(listen=listen, **QUICK)
            for number, transfer_id in enumerate(outstanding):
                decode = (first, second)[number % 2]
                event = decode.inbox.outcome(transfer_id)
                assert event.outcome == "failed" and event.code in ("peer_lost", "peer_restarted"), event
                assert decode.inbox.reusable(transfer_id) in ("outcome", "proven")
            delays_s.append(time.monotonic() - killed_s)
            for number, decode in enumerate((first, second)):
                decode.expect(f"{life}-after-{number}", [40], address)
                prefill.call("push", f"{life}-after-{number}", [life])
                assert decode.inbox.outcome(f"{life}-after-{number}").outcome == "done"
                assert decode.arena.holds(f"{life}-after-{number}", [40])
                assert decode.arena.is_clean([*range(40), *range(41, SMALL.blocks)])
                assert decode.receiver.healthy() and decode.receiver.stats()["engines"] == 1
            base = base or peers.resources()
        end = peers.resources()
        assert end.descriptors <= base.descriptors + 2 and end.threads <= base.threads, (base, end)
        assert end.rss_mib <= base.rss_mib * 1.05 + 16, (base, end)
    print("SIGKILL of prefill to the last event, new life included:", ", ".join(f"{s:.3f} s" for s in delays_s))


@pytest.mark.timeout(180)
def test_f7_an_engine_that_keeps_dying_costs_the_others_nothing(fleet):
    """F7: d1 dies as soon as it is up, eight times, with a push on its way each time; d0 does not feel it."""
    with Prefill(**QUICK) as prefill:
        steady = fleet.decode("d0")
        serial = itertools.count()

        def round_trip():
            number = next(serial)
            register(prefill, steady, f"t{number}", [number % 64])
            start_s = time.monotonic()
            prefill.push(f"t{number}", [number % 64])
            assert prefill.inbox.outcome(f"t{number}").outcome == "done"
            took_s = time.monotonic() - start_s
            assert steady.call("outcome", f"t{number}").outcome == "done"
            return took_s

        quiet_s = [round_trip() for _ in range(100)]
        base, busy_s = BaseLine.of(prefill), []
        for life in range(8):
            flapping = fleet.decode("d1", wait=False)
            while not is_up_now(flapping):
                busy_s.append(round_trip())
            register(prefill, flapping, f"hit-{life}", [1])
            prefill.push(f"hit-{life}", [1])
            flapping.kill()
            killed_s = time.monotonic()
            busy_s.append(round_trip())
            assert prefill.inbox.outcome(f"hit-{life}").outcome in ("done", "failed")
            peers.until(lambda: prefill.states()["d1"] == "evicted", RELEASE_BUDGET_S)
            assert time.monotonic() - killed_s < RELEASE_BUDGET_S
            flapping.close()
        base.check(prefill)
        assert prefill.engine("d0").generation == 1 and prefill.states()["d0"] == "connected"
        quiet, busy = (peers.percentile(times_s, 0.9) for times_s in (quiet_s, busy_s))
        print(f"p90 of {len(busy_s)} pushes to d0: {quiet * 1000:.2f} ms quiet, {busy * 1000:.2f} ms beside d1")
        # a process that starts takes a core of this machine for a while, hence the slack
        assert busy < 2 * quiet + 0.05
        survivor = fleet.decode("d1")
        push_and_check(prefill, survivor, "last", [2], [3])
