"""SIGTERM, the way an engine should take it: drain, then close. Peers see it leave, and do not call it lost."""

from __future__ import annotations

import signal
import time

import peers
import pytest
from chaos import QUICK, BaseLine, Prefill, push_and_check, register

import kvpush

DRAIN_S = 10.0


class Polite:
    """Mixed into a service: SIGTERM ends the process in order."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        signal.signal(signal.SIGTERM, self._leave)

    def _leave(self, *_):
        is_drained = self.side.drain(DRAIN_S)
        report = self.side.close()
        raise SystemExit(0 if is_drained and not report.unsettled else 3)


class PoliteDecode(Polite, peers.DecodeService):
    pass


class PolitePrefill(Polite, peers.PrefillService):
    pass


def test_f9_a_decode_engine_leaves_in_order_with_receives_on_their_way():
    """F9: what is registered is still served, nothing new is taken, prefill sees `closing`; the id may come back."""
    with Prefill(**QUICK) as prefill:
        base = None
        for life in range(3):
            with peers.Peer(PoliteDecode, engine_id="d0", shape=peers.Shape(), settings={}) as decode:
                push_and_check(prefill, decode, f"{life}-warm", [1], [1])
                ids = [f"{life}-{block}" for block in range(20)]
                for block, transfer_id in enumerate(ids):
                    register(prefill, decode, transfer_id, [block])
                decode.terminate()
                for block, transfer_id in enumerate(ids):
                    prefill.push(transfer_id, [block])
                for event in prefill.inbox.outcomes(ids).values():
                    assert event.outcome == "done", event
                assert decode.join() == 0
            peers.until(lambda: prefill.states()["d0"] == "evicted", what="d0 is released")
            assert prefill.reasons("d0") == ["closing"] * (life + 1)
            base = base or BaseLine.of(prefill)
        base.check(prefill)


def test_f9_a_prefill_engine_leaves_in_order_and_says_so_at_once(fleet):
    """F9, rule 11: what nothing was pushed for fails as `closing` with its blocks free; its successor is served."""
    with peers.Decode(**QUICK) as decode:
        with peers.Peer(
            PolitePrefill, engine_id="p0", shape=peers.Shape(), listen="127.0.0.1:0", settings={}
        ) as prefill:
            address = prefill.call("address")
            for number, transfer_id in enumerate(("served", "waiting-1", "waiting-2")):
                decode.expect(transfer_id, [number], address)
            peers.until(lambda: prefill.call("stats")["registrations_waiting"] == 3)
            prefill.call("push", "served", [7])
            start_s = time.monotonic()
            prefill.terminate()
            assert decode.inbox.outcome("served").outcome == "done"
            for transfer_id in ("waiting-1", "waiting-2"):
                event = decode.inbox.outcome(transfer_id)
                assert event.outcome == "failed" and event.code == "closing" and event.blocks_reusable, event
            assert time.monotonic() - start_s < 2.0
            assert prefill.join() == 0
        reasons = [c.detail.partition(":")[0] for c in decode.receiver.transitions() if c.dest == "stale"]
        assert reasons == ["closing"]
        again = fleet.prefill(listen="{}:{}".format(*address))
        decode.expect("after", [1, 2], address)
        again.call("push", "after", [3, 4])
        assert decode.inbox.outcome("after").outcome == "done" and decode.arena.holds("after", [1, 2])


def test_f9_a_draining_receiver_takes_nothing_new_and_waits_for_what_is_open():
    with peers.Prefill() as prefill, peers.Decode() as decode:
        assert decode.receiver.drain(5.0), "nothing is open"
    with peers.Prefill() as prefill, peers.Decode() as decode:
        decode.expect("open", [1], prefill.address)
        peers.until(lambda: prefill.pusher.stats()["registrations_waiting"])
        assert not decode.receiver.drain(0.05)
        with pytest.raises(kvpush.Closed, match="draining"):
            decode.expect("new", [2], prefill.address)
        decode.expect("open", [1], prefill.address)  # a repetition is no new one
        prefill.push("open", [3])
        assert decode.receiver.drain(peers.PATIENCE_S)
        assert decode.inbox.outcome("open").outcome == "done"
        decode.receiver.cancel("open")
        assert decode.receiver.close() == kvpush.CloseReport()
        assert not decode.receiver.drain(0.1)
