"""Decode processes that are killed, replaced and paused: prefill lets go at once and serves the next."""

from __future__ import annotations

import time

import peers
import pytest

SMALL = peers.Shape(blocks=64)
BIG = peers.Shape(blocks=128, layers=1, heads=8, tokens=64, head_size=128)  # 256 KiB a block, 32 MiB in all
# over TCP a WRITE to a frozen process fills the socket and stays there; the other settings keep it from failing earlier
STUCK = {"ucx_options": "TLS=tcp", "tcp_user_timeout_s": 60.0, "liveness_timeout_s": 60.0, "stall_timeout_s": 60.0}
RELEASE_BUDGET_S = 2.0


def push_and_check(prefill, decode, transfer_id, source, target):
    decode.call("expect", transfer_id, target, prefill.address)
    prefill.push(transfer_id, source)
    assert prefill.inbox.outcome(transfer_id).outcome == "done"
    assert decode.call("outcome", transfer_id).outcome == "done"
    assert decode.call("holds", transfer_id, target)


def get_stuck(prefill, decode, transfer_id, count):
    """A WRITE in flight to a frozen process."""
    peers.until(lambda: prefill.pusher.stats()["registrations_waiting"], what="it is registered")
    decode.freeze()
    prefill.push(transfer_id, range(count))
    peers.until(lambda: prefill.pusher.stats()["writes_in_flight"], what="the WRITE is posted")
    assert not prefill.pusher.poll()


@pytest.mark.timeout(240)
def test_f1_the_same_id_comes_back_ten_times_with_a_write_in_flight_at_the_kill(fleet):
    """F1, F2: other addresses and another number of blocks each time; nothing of the old life is written to the new."""
    delays_s, incarnations, sizes = [], set(), []
    with peers.Prefill(shape=BIG, **STUCK) as prefill:
        for life in range(10):
            shape = peers.Shape(blocks=128 - 7 * life, layers=1, heads=8, tokens=64, head_size=128)
            decode = fleet.decode(shape=shape, **STUCK)
            push_and_check(prefill, decode, f"ok-{life}", [3, 127], [shape.blocks - 1, life])
            (live,) = [e for e in prefill.pusher.engines() if e.state == "connected"]
            incarnations.add(live.incarnation)

            stuck = f"stuck-{life}"
            decode.call("expect", stuck, list(range(shape.blocks)), prefill.address)
            get_stuck(prefill, decode, stuck, shape.blocks)
            killed_s = time.monotonic()
            decode.kill()
            event = prefill.inbox.outcome(stuck)
            assert event.outcome == "failed" and event.code in ("peer_lost", "write_failed"), event
            assert prefill.inbox.reusable(stuck) in ("outcome", "proven")
            peers.until(lambda: prefill.states() == {"d0": "evicted"}, what="d0 is evicted")
            delays_s.append(time.monotonic() - killed_s)
            decode.close()
            sizes.append(peers.resources())
        assert len(incarnations) == 10
        assert prefill.pusher.stats()["internal_errors"] == 0
        assert prefill.pusher.healthy()
        # the first lives warm up pools; what grows after that is a leak
        assert sizes[-1].descriptors <= sizes[2].descriptors + 2
        assert sizes[-1].threads <= sizes[2].threads
        assert sizes[-1].rss_mib <= sizes[2].rss_mib + 16
    print("SIGKILL to evicted and reusable:", ", ".join(f"{delay_s:.3f} s" for delay_s in delays_s))
    assert max(delays_s) < RELEASE_BUDGET_S, delays_s


def test_f3_an_old_process_that_is_only_paused_is_never_written_to_again(fleet):
    """F3: two processes claim one id; the newer incarnation wins, also after the old one wakes up."""
    with peers.Prefill(shape=SMALL, liveness_timeout_s=60.0) as prefill:
        old = fleet.decode(shape=SMALL)
        push_and_check(prefill, old, "old", [1], [1])
        old.freeze()
        new = fleet.decode(shape=SMALL)
        push_and_check(prefill, new, "new-1", [2], [2])
        old.thaw()
        push_and_check(prefill, new, "new-2", [3], [3])
        assert old.call("is_clean", [0, *range(2, SMALL.blocks)])
        live = [e for e in prefill.pusher.engines() if e.state == "connected"]
        assert len(live) == 1 and live[0].generation > 1


def test_b5_after_a_hundred_good_pushes_a_killed_engine_costs_at_most_what_was_on_its_way(fleet):
    """B5: the first error retires the engine, and its successor is served without a restart of prefill."""
    with peers.Prefill(shape=SMALL) as prefill:
        decode = fleet.decode(shape=SMALL)
        for i in range(100):
            push_and_check(prefill, decode, f"t{i}", [i % 64], [(i + 1) % 64])
        decode.call("expect", "t100", [5], prefill.address)
        peers.until(lambda: prefill.pusher.stats()["registrations_waiting"], what="t100 is registered")
        decode.kill()
        prefill.push("t100", [5])
        prefill.inbox.poll()
        decode = fleet.decode(shape=SMALL)
        push_and_check(prefill, decode, "t101", [6], [6])
        # t100 was matched before the death was noticed, or its registration went with the process
        prefill.pusher.cancel("t100")
        assert prefill.inbox.outcome("t100").outcome in ("failed", "cancelled")
        assert prefill.inbox.reusable("t100") == "outcome"


def test_b2_a_dead_engine_is_let_go_with_no_traffic_at_all(fleet):
    """B2: nobody pushes, nobody comes, nobody polls; and an operator need not even wait for the clock."""
    with peers.Prefill(shape=SMALL) as prefill:
        decode = fleet.decode(shape=SMALL)
        push_and_check(prefill, decode, "t1", [1], [1])
        decode.kill()
        peers.until(lambda: prefill.states() == {"d0": "evicted"}, RELEASE_BUDGET_S, "evicted by the clock alone")
        other = fleet.decode("d1", shape=SMALL)
        push_and_check(prefill, other, "t2", [1], [1])
        prefill.pusher.drop_engine("d1")
        peers.until(lambda: prefill.states()["d1"] == "evicted", RELEASE_BUDGET_S, "evicted by request")
        push_and_check(prefill, other, "t3", [2], [2])  # the same process comes back as a new generation


def test_b4_another_id_in_the_same_place_leaves_nothing_of_the_first(fleet):
    """B4, F8: prefill knows decode by its connection, so what was registered by d0 never goes to its successor."""
    with peers.Prefill(shape=SMALL) as prefill:
        first = fleet.decode("d0", shape=SMALL)
        push_and_check(prefill, first, "t1", [1], [1])
        first.call("expect", "t2", [2], prefill.address)
        peers.until(lambda: prefill.pusher.stats()["registrations_waiting"], what="t2 is registered")
        first.kill()
        peers.until(lambda: prefill.states()["d0"] == "evicted", RELEASE_BUDGET_S)
        second = fleet.decode("d0b", shape=SMALL)
        push_and_check(prefill, second, "t3", [3], [3])
        prefill.push("t2", [2])
        prefill.pusher.cancel("t2")
        assert prefill.inbox.outcome("t2").outcome == "cancelled"
        assert second.call("is_clean", [0, 1, 2, *range(4, SMALL.blocks)])
        assert prefill.states() == {"d0": "evicted", "d0b": "connected"}


@pytest.mark.timeout(300)
def test_g1_forty_decode_processes_come_and_go(fleet):
    """G1: descriptors, threads and tables are where they were; memory grows by less than a process' share of it."""
    shape = peers.Shape(blocks=4096, layers=16, heads=1, tokens=1, head_size=8)
    with peers.Prefill(shape=shape) as prefill:

        def live_and_die(number):
            decode = fleet.decode(f"d{number}", shape=shape)
            push_and_check(prefill, decode, f"t{number}", [1, 2], [4094, 0])
            decode.kill() if number % 2 else decode.leave()
            peers.until(lambda: prefill.states()[f"d{number}"] == "evicted", RELEASE_BUDGET_S)
            decode.close()

        for number in range(5):
            live_and_die(number)
        base = peers.resources()
        for number in range(5, 40):
            live_and_die(number)
        end = peers.resources()
        stats = prefill.pusher.stats()
        assert stats["links"] == stats["pushes_open"] == stats["writes_in_flight"] == stats["internal_errors"] == 0
        assert stats["registrations_waiting"] == stats["pushes_behind_handshakes"] == 0
    assert end.descriptors <= base.descriptors + 2, (base, end)
    assert end.threads <= base.threads, (base, end)
    assert end.rss_mib <= base.rss_mib * 1.05, (base, end)
