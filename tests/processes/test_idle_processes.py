"""Processes that nobody calls: they make progress on their own, and cost next to nothing."""

from __future__ import annotations

import time

import peers
import psutil
import pytest

PROMPT_S = 1.0
IDLE_BUDGET_CORES = 0.02


class QuietDecode(peers.DecodeService):
    """Does nothing but look for its event, and does not start before prefill is done."""

    def end(self):
        (event,) = peers.until(self.side.poll, PROMPT_S, "the end on decode")
        return event


@pytest.mark.parametrize("ucx_options", ["", "TLS=tcp"], ids=["cma", "tcp"])
def test_b10_the_last_write_completes_on_both_sides_without_a_call(ucx_options):
    """B10: one blocking wait on prefill, and nothing but poll() on decode, which drives nothing."""
    shape = peers.Shape(blocks=64, heads=8, tokens=64, head_size=64)
    settings = {"ucx_options": ucx_options}
    with (
        peers.Peer(QuietDecode, engine_id="d0", shape=shape, settings=settings) as decode,
        peers.Prefill(shape=shape, **settings) as prefill,
    ):
        decode.call("expect", "t1", list(range(64)), prefill.address)
        peers.until(lambda: prefill.pusher.stats()["registrations_waiting"], what="registered")
        prefill.arena.fill("t1", range(64))
        start_s = time.monotonic()
        prefill.pusher.push("t1", range(64))
        (event,) = prefill.pusher.wait(5.0)
        assert event.outcome == "done"
        assert decode.call("end").outcome == "done"
        took_s = time.monotonic() - start_s
        print(f"push() to both ends: {took_s:.3f} s for {event.num_bytes >> 20} MiB")
        assert took_s < PROMPT_S + 1  # with the first connection, on a busy machine
        assert decode.call("holds", "t1", list(range(64)))


def test_rule_20_an_idle_pair_costs_almost_nothing(fleet):
    """Rule 20: nothing in flight, the link up, heartbeats running."""
    prefill, decode = fleet.prefill(), fleet.decode()
    decode.call("expect", "t1", [1], prefill.call("address"))
    prefill.call("push", "t1", [1])
    assert decode.call("outcome", "t1").outcome == prefill.call("outcome", "t1").outcome == "done"
    processes = [psutil.Process(peer.pid) for peer in (prefill, decode)]
    before = [process.cpu_times() for process in processes]
    start_s = time.monotonic()
    peers.until(lambda: time.monotonic() - start_s >= 4.0, what="some seconds of idling")
    span_s = time.monotonic() - start_s
    for process, then in zip(processes, before, strict=True):
        now = process.cpu_times()
        cores = (now.user + now.system - then.user - then.system) / span_s
        print(f"idle: {cores:.4f} core")
        assert cores <= IDLE_BUDGET_CORES
