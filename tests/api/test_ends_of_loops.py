"""What the loops must see to, before blocks are anybody's again: they are not what the simulation runs."""

from __future__ import annotations

import logging

import pytest
from peers import until
from test_sick_loop import Trap, move, raising, sides

import kvpush
from kvpush.errors import FailureCode, TransportError
from kvpush.link import LinkClosed


@pytest.fixture(autouse=True)
def _errors_are_expected(caplog):
    caplog.set_level(logging.CRITICAL + 1, logger="kvpush")


@pytest.fixture
def trap():
    return Trap()


def test_rule12_a_write_that_fails_in_doubt_gives_no_blocks_back_before_the_agent_is_gone(trap):
    """NIXL posts segment by segment: after any error but a disconnect, some of them may still be under way."""
    with sides(trap, "prefill") as (pusher, receiver, _):
        move(pusher, receiver, "t1")
        trap.faults["poll_write"] = raising(TransportError(FailureCode.write_failed, "nobody knows"))
        receiver.expect("t2", [2], source=pusher.address, source_engine_id="p0")
        pusher.push("t2", [2])
        (sent,) = until(pusher.poll)
        assert (sent.outcome, sent.code, sent.blocks_reusable) == ("failed", "write_failed", False)
        del trap.faults["poll_write"]
        report = pusher.close()
        (released,) = until(pusher.poll)
        assert (released.transfer_id, released.proven, report.unsettled) == ("t2", True, ())


def test_rule12_a_write_that_fails_as_a_disconnect_is_over(trap):
    with sides(trap, "prefill") as (pusher, receiver, _):
        move(pusher, receiver, "t1")
        trap.faults["poll_write"] = raising(TransportError(FailureCode.peer_lost, "gone", disconnected=True))
        receiver.expect("t2", [2], source=pusher.address, source_engine_id="p0")
        pusher.push("t2", [2])
        (sent,) = until(pusher.poll)
        assert (sent.outcome, sent.code, sent.blocks_reusable) == ("failed", "peer_lost", True)
        del trap.faults["poll_write"]


def test_rule12_goodbye_and_proof_come_after_the_end_of_the_agent(trap, monkeypatch):
    order = []
    with sides(trap, "prefill") as (pusher, receiver, _):
        move(pusher, receiver, "t1")
        (transport,), core = trap.made, pusher._loop._core
        destroy, told = transport.close, core.transport_closed
        monkeypatch.setattr(core, "transport_closed", lambda now_s: (order.append("told"), told(now_s))[1])
        trap.faults["close"] = lambda: (order.append("destroyed"), destroy())[1]
        pusher.close()
    assert order == ["destroyed", "told"]


def test_rule12_a_hello_that_cannot_be_sent_says_nothing_about_the_process(trap, monkeypatch):
    """The blocks that prefill was to write stay held: only its port's own answer would prove it gone."""
    with sides(trap, "decode") as (pusher, receiver, _):
        core, closed = receiver._loop.core, []
        real = core.link_closed
        monkeypatch.setattr(
            core, "link_closed", lambda *args, refused: (closed.append(refused), real(*args, refused=refused))[1]
        )
        monkeypatch.setattr(receiver._loop._dialer, "send", lambda *_args: False)
        receiver.expect("t", [1], source=pusher.address, source_engine_id="p0")
        until(lambda: closed)
        assert closed[0] is False


def test_rule12_a_dial_that_was_turned_away_is_asked_again_before_the_process_counts_as_gone(trap, monkeypatch):
    with sides(trap, "decode") as (pusher, receiver, _):
        loop, closed = receiver._loop, []
        monkeypatch.setattr(loop.core, "link_closed", lambda *args, refused: closed.append(refused) or [])
        monkeypatch.setattr(loop.core, "address_of", lambda link: pusher.address)  # which listens
        loop.submit(lambda: loop._link_event(LinkClosed(1, True, "turned away")))
        until(lambda: closed)
        assert closed == [False]


def test_rule12_what_is_given_up_is_abandoned_at_the_transport(trap):
    """Else its handle stays, or another look at it sends the notification of a WRITE whose source has other bytes."""
    settings = {"stall_timeout_s": 0.3, "hold_timeout_s": 0.3}
    with sides(trap, "prefill", **settings) as (pusher, receiver, _):
        move(pusher, receiver, "t1")
        (transport,) = trap.made
        trap.faults["poll_write"] = lambda _write: False
        receiver.expect("t2", [2], source=pusher.address, source_engine_id="p0")
        pusher.push("t2", [2])
        events = []
        until(lambda: events.extend(pusher.poll()) or len(events) == 2)
        assert [getattr(event, "proven", None) for event in events] == [None, False]
        assert until(lambda: transport.counts.writes_posted == transport.counts.writes_released, 1)
        del trap.faults["poll_write"]


def test_rule12_blocks_that_are_held_cannot_be_given_away_when_the_outcome_has_been_polled(trap):
    with sides(trap, "decode") as (pusher, receiver, _):
        move(pusher, receiver, "t1")
        trap.faults["notifications"] = list  # a WRITE ends only when its receiver makes progress
        receiver.expect("t2", [2], source=pusher.address, source_engine_id="p0")
        pusher.push("t2", [2])
        until(lambda: pusher.stats()["writes_in_flight"])
        receiver.cancel("t2")
        (got,) = until(receiver.poll)
        assert (got.outcome, got.blocks_reusable) == ("cancelled", False)
        with pytest.raises(kvpush.UsageError, match="may still land"):
            receiver.expect("t3", [2], source=pusher.address, source_engine_id="p0")
        trap.faults.clear()
        (released,) = until(receiver.poll)
        assert (released.transfer_id, released.proven) == ("t2", True)
        receiver.expect("t3", [2], source=pusher.address, source_engine_id="p0")


def test_rule12_an_agent_that_does_not_end_proves_nothing(trap):
    with sides(trap, "prefill", stall_timeout_s=0.3, hold_timeout_s=60) as (pusher, receiver, _):
        move(pusher, receiver, "t1")
        (transport,) = trap.made
        trap.faults["poll_write"] = lambda _write: False
        receiver.expect("t2", [2], source=pusher.address, source_engine_id="p0")
        pusher.push("t2", [2])
        (sent,) = until(pusher.poll)
        assert not sent.blocks_reusable
        trap.faults["close"] = raising(RuntimeError("made to fail"))
        try:
            report = pusher.close()
            assert report.unsettled == ("t2",), pusher.poll()
        finally:
            trap.faults.clear()
