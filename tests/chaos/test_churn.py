"""Engines that come and go under fire, and refreshes of living ones: NIXL's agent has one owner, and it shows."""

from __future__ import annotations

import itertools
import threading
import time

import peers
import psutil
import pytest
from chaos import BaseLine, Prefill, push_and_check

CHURN_S = 6.0
REFRESHES = 300
HOLE_S = 3.0


@pytest.mark.timeout(180)
def test_c3_eight_engines_join_and_leave_all_the_time_while_four_threads_push():
    """C3, C6: NIXL's maps are read by status polls and written by handshakes, all of it on one thread."""
    shape = peers.Shape(blocks=16)
    end = threading.Event()
    errors, lives, pushed = [], itertools.count(), itertools.count()
    with Prefill(shape=shape, lease_s=1.0) as prefill, peers.Decode("steady", shape=shape) as steady:
        lock = threading.Lock()

        def churn(number):
            while not end.is_set():
                with peers.Decode(f"d{number}-{next(lives)}", shape=shape) as decode:
                    transfer_id = f"churn-{decode.receiver.engine_id}"
                    decode.expect(transfer_id, [1], prefill.address)
                    prefill.pusher.push(transfer_id, [number % 16])
                    decode.inbox.outcome(transfer_id) if number % 2 else None  # the others leave in the middle of it

        def push(number):
            while not end.is_set():
                transfer_id = f"steady-{next(pushed)}"
                steady.expect(transfer_id, [number], prefill.address)
                prefill.pusher.push(transfer_id, [number])
                with lock:
                    assert steady.inbox.outcome(transfer_id).outcome == "done"
                    prefill.inbox.poll()

        def guarded(work, number):
            try:
                work(number)
            except BaseException as exc:  # noqa: BLE001  # raised again below
                errors.append(exc)
                end.set()

        threads = [threading.Thread(target=guarded, args=(churn, number)) for number in range(8)]
        threads += [threading.Thread(target=guarded, args=(push, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        end.wait(CHURN_S)
        end.set()
        for thread in threads:
            thread.join(peers.PATIENCE_S)
        if errors:
            raise errors[0]
        assert next(lives) > 8 and next(pushed) > 100
        stats = prefill.pusher.stats()
        assert stats["internal_errors"] == 0 and prefill.pusher.healthy(), stats
        peers.until(lambda: prefill.inbox.poll() or not prefill.pusher.stats()["pushes_open"], what="every push ends")
        assert all(len(ends) == 1 for ends in prefill.inbox.finished.values())
        assert prefill.states()["steady"] == "connected"


@pytest.mark.timeout(180)
def test_c4_f2_a_living_engine_that_is_refreshed_again_and_again_never_fails_a_push(fleet):
    """C4, F2: remove, add, new descriptor lists, first WRITE; three hundred times, and not one retry."""
    with Prefill() as prefill:
        decode = fleet.decode()
        push_and_check(prefill, decode, "first", [0], [0])
        base = BaseLine.of(prefill)
        for number in range(REFRESHES):
            prefill.pusher.drop_engine("d0")
            push_and_check(prefill, decode, f"t{number}", [number % 64], [(number + 7) % 64])
        stats = prefill.pusher.stats()
        assert stats["handshakes_succeeded"] == stats["handshakes_started"] == REFRESHES + 1
        assert not [name for name in stats if name.startswith("writes_failed")]
        counts = prefill.counts
        assert counts.remotes_added == REFRESHES + 1 and counts.remotes_removed == REFRESHES
        # NIXL 1.5.1 keeps one socket of every connection to a living process that is given up, until that process ends
        assert peers.resources().descriptors <= base.resources.descriptors + 2 + REFRESHES
        decode.kill()
        peers.until(lambda: prefill.states()["d0"] == "evicted", what="d0 is released")
        base.check(prefill)


def cores_over(process, span_s):
    """The CPU that a process uses while this one waits."""
    before, start_s = process.cpu_times(), time.monotonic()
    peers.until(lambda: time.monotonic() - start_s >= span_s, what="some seconds of waiting")
    now = process.cpu_times()
    return (now.user + now.system - before.user - before.system) / (time.monotonic() - start_s)


def test_c13_waiting_for_a_handshake_costs_nothing_and_a_hundred_pushes_start_one(fleet):
    """C13: decode registers a hundred times and freezes; prefill asks once, and waits."""
    prefill = fleet.prefill(shape=peers.Shape(blocks=128), handshake_timeout_s=HOLE_S + 2, liveness_timeout_s=30.0)
    decode = fleet.decode(shape=peers.Shape(blocks=128))
    for number in range(100):
        decode.call("expect", f"t{number}", [number], prefill.call("address"))
    peers.until(lambda: prefill.call("stats")["registrations_waiting"] == 100, what="all are registered")
    decode.freeze()
    for number in range(100):
        prefill.call("push", f"t{number}", [number])
    assert prefill.call("stats")["pushes_behind_handshakes"] == 100
    cores = cores_over(psutil.Process(prefill.pid), HOLE_S)
    print(f"a hundred pushes wait for one handshake: {cores:.4f} core")
    assert cores < 0.1
    stats = prefill.call("stats")
    assert stats["handshakes_started"] == 1 and stats["pushes_behind_handshakes"] == 100
    decode.thaw()
    ids = [f"t{number}" for number in range(100)]
    assert {event.outcome for event in prefill.call("outcomes", ids).values()} == {"done"}
    assert {event.outcome for event in decode.call("outcomes", ids).values()} == {"done"}
    assert prefill.call("stats")["handshakes_started"] == 1
