"""A loop that hangs, dies or meets its own bugs: callers are never stuck with it, and are told."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

import peers
import pytest
from peers import until

import kvpush
from kvpush.errors import FailureCode, TransportError
from kvpush.nixl_transport import NixlTransport

CALL_BUDGET_S = 2.0  # stats() may wait a second for the loop
CLOSE_BUDGET_S = 4.5


class Trap:
    """Makes transports that behave until the test says otherwise."""

    def __init__(self):
        self.faults = {}  # method name -> what it does instead
        self.made = []

    def __call__(self, *args):
        trap = self

        class Trapped(NixlTransport):
            def __getattribute__(self, name):
                return trap.faults.get(name) or super().__getattribute__(name)

        self.made.append(Trapped(*args))
        return self.made[-1]


def raising(error):
    def fail(*_args):
        raise error

    return fail


class Hang:
    """A native call that does not return until the test lets it."""

    def __init__(self):
        self.is_reached = threading.Event()
        self.may_return = threading.Event()

    def __call__(self, *_args):
        self.is_reached.set()
        self.may_return.wait(peers.PATIENCE_S)
        raise TransportError(FailureCode.internal, "the test ended the call")


@contextlib.contextmanager
def sides(trap, which, **settings):
    """A pair whose prefill or decode side has the trap."""
    prefill_trap, decode_trap = (trap, NixlTransport) if which == "prefill" else (NixlTransport, trap)
    source, target = peers.Arena(), peers.Arena()
    source.fill("source", range(64))
    spec, config = source.shape.spec(), peers.config(**settings)
    pusher = kvpush.PrefillPusher("p0", source.caches, spec, config=config, transport_factory=prefill_trap)
    with pusher:
        receiver = kvpush.DecodeReceiver("d0", target.caches, spec, config=config, transport_factory=decode_trap)
        with receiver:
            yield pusher, receiver, target


def move(pusher, receiver, transfer_id, block=1):
    receiver.expect(transfer_id, [block], source=pusher.address, source_engine_id="p0")
    pusher.push(transfer_id, [block])
    (got,) = until(receiver.poll)
    (sent,) = until(pusher.poll)
    return sent, got


@pytest.fixture
def _errors_are_expected(caplog):
    caplog.set_level(logging.CRITICAL + 1, logger="kvpush")


pytestmark = pytest.mark.usefixtures("_errors_are_expected")


def calls_of(side, source):
    """Every public call but close()."""
    if isinstance(side, kvpush.PrefillPusher):
        yield "push", lambda: side.push("x", [7])
        yield "drain", lambda: side.drain(0.1)
    else:
        yield "expect", lambda: side.expect("x", [7], source=source, source_engine_id="p0")
        yield "renew", lambda: side.renew(["x"], source=source, source_engine_id="p0")
    yield "cancel", lambda: side.cancel("x")
    yield "drop_engine", lambda: side.drop_engine("nobody")
    yield "poll", side.poll
    yield "wait", lambda: side.wait(0.05)
    yield "engines", side.engines
    yield "transitions", side.transitions
    yield "healthy", side.healthy
    yield "stats", side.stats
    yield "repr", lambda: repr(side)


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_c11_every_call_is_bounded_while_a_native_call_hangs(which):
    """C11, rule 18: the stuck loop is reported as unhealthy, and close() leaves it behind and says so."""
    trap, hang = Trap(), Hang()
    with sides(trap, which) as (pusher, receiver, _):
        assert move(pusher, receiver, "t1")[1].outcome == "done"
        side = pusher if which == "prefill" else receiver
        trap.faults["notifications"] = hang
        assert hang.is_reached.wait(peers.PATIENCE_S)
        try:
            for name, call in calls_of(side, pusher.address):
                start_s = time.monotonic()
                call()
                took_s = time.monotonic() - start_s
                assert took_s < CALL_BUDGET_S, f"{name}() took {took_s:.1f} s"
            until(lambda: not side.healthy(), 15.0, "the loop counts as stuck")
            assert "has not turned for" in side.healthy().reason
            start_s = time.monotonic()
            report = side.close()
            assert time.monotonic() - start_s < CLOSE_BUDGET_S
            assert not report.is_thread_stopped
        finally:
            hang.may_return.set()


@pytest.mark.parametrize("which", ["prefill", "decode"])
@pytest.mark.parametrize("error", [SystemExit("bye"), MemoryError("no memory"), RuntimeError("bug")], ids=repr)
def test_a_dead_loop_is_unhealthy_and_fails_what_waits_on_it(which, error):
    """Rule 17: a BaseException at once, an Exception after a row of them."""
    trap = Trap()
    with sides(trap, which) as (pusher, receiver, _):
        assert move(pusher, receiver, "t1")[1].outcome == "done"
        side = pusher if which == "prefill" else receiver
        receiver.expect("t2", [1], source=pusher.address, source_engine_id="p0", deadline_s=30.0)
        until(lambda: pusher.stats().get("registrations_waiting"), what="t2 is registered")
        if which == "prefill":
            pusher.push("t3", [2])  # nobody registers for it
        trap.faults["notifications"] = trap.faults["poll_write"] = raising(error)
        until(lambda: not side.healthy(), 60.0, "the loop is dead")
        assert "died" in side.healthy().reason
        transfer_id = "t3" if which == "prefill" else "t2"
        (event,) = until(lambda: [e for e in side.poll() if not isinstance(e, kvpush.BlocksReleased)])
        assert (event.transfer_id, event.outcome, event.code) == (transfer_id, "failed", "internal")
        for name, call in calls_of(side, pusher.address):
            if name in ("push", "expect", "cancel", "renew", "drop_engine"):
                with pytest.raises(kvpush.Closed, match="died"):
                    call()
            else:
                call()
        assert side.stats() == {}
        assert side.close().is_thread_stopped
        if which == "prefill":  # decode hears of it
            (got,) = until(receiver.poll)
            assert got.outcome == "failed" and got.transfer_id == "t2"
            assert receiver.healthy()


def test_a_dead_loop_reports_every_transfer_once():
    """Rule 10: with a WRITE in flight, with an end that nobody has polled yet, and with one that waits."""
    trap = Trap()
    with sides(trap, "prefill") as (pusher, receiver, _):
        move(pusher, receiver, "warm")
        receiver.expect("ended", [1], source=pusher.address, source_engine_id="p0")
        pusher.push("ended", [1])
        until(lambda: pusher.stats()["pushes_done"] == 2, what="its end waits to be polled")
        receiver.expect("flying", [2], source=pusher.address, source_engine_id="p0")
        until(lambda: pusher.stats()["registrations_waiting"], what="registered")
        trap.faults["poll_write"] = lambda _write: False  # it never ends
        pusher.push("flying", [2])
        pusher.push("waiting", [3])
        until(lambda: pusher.stats()["writes_in_flight"], what="posted")
        trap.faults["poll_write"] = raising(SystemExit("bye"))
        until(lambda: not pusher.healthy(), what="the loop is dead")
        pusher.close()
        events = pusher.poll()
        ends = {e.transfer_id: e.outcome for e in events if not isinstance(e, kvpush.BlocksReleased)}
        finished = [e.transfer_id for e in events if not isinstance(e, kvpush.BlocksReleased)]
        assert sorted(finished) == ["ended", "flying", "waiting"]
        assert ends == {"ended": "done", "flying": "failed", "waiting": "failed"}
        released = sorted(e.transfer_id for e in events if isinstance(e, kvpush.BlocksReleased))
        assert released == ["flying", "waiting"]  # the agent is destroyed: they are the caller's


def test_a_loop_that_meets_its_own_bugs_goes_on():
    """Rule 17: one bad item is counted; the next one is served."""
    trap = Trap()
    with sides(trap, "decode") as (pusher, receiver, target):
        move(pusher, receiver, "t1")
        for number in range(20):
            trap.faults["notifications"] = raising(RuntimeError("a bug"))
            until(lambda met=number: receiver.stats().get("internal_errors", 0) > met, what="it is met")
            trap.faults.clear()
            assert move(pusher, receiver, f"t{number + 2}", block=number)[1].outcome == "done"
        assert receiver.healthy() and pusher.healthy()
        assert target.holds("source", range(20))


@pytest.mark.parametrize("method", ["post_write", "add_remote"])
@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("x"), AssertionError(), MemoryError()], ids=repr)
def test_rule_10_a_bug_on_the_way_of_a_push_ends_that_push_at_once(method, error):
    """Rule 10, A1, E2: not a failure that the transport may have, but one that nobody thought of."""
    trap = Trap()
    with sides(trap, "prefill") as (pusher, receiver, target):
        if method == "post_write":
            move(pusher, receiver, "warm")
        trap.faults[method] = raising(error)
        start_s = time.monotonic()
        sent, got = move(pusher, receiver, "bad", block=2)
        assert time.monotonic() - start_s < 4, "it ended by a timeout"
        assert sent.outcome == got.outcome == "failed" and sent.code == got.code == "internal"
        assert repr(error) in sent.reason and pusher.stats()["internal_errors"] == 1
        assert target.is_clean([2])
        trap.faults.clear()
        sent, got = move(pusher, receiver, "good", block=3)
        assert sent.outcome == got.outcome == "done" and target.holds("source", [3], first_block=3)
        (engine,) = [e for e in pusher.engines() if e.state == "connected"]
        assert engine.in_flight == 0 and pusher.healthy()


def test_rule_17_a_bug_takes_no_other_push_with_it():
    """All wait behind one handshake, so one step of the core posts them all; the first one meets the bug."""
    trap = Trap()
    with sides(trap, "prefill") as (pusher, receiver, target):
        fail_once = iter([RuntimeError("a bug")])

        def post_write(*args):
            for error in fail_once:
                raise error
            return NixlTransport.post_write(trap.made[0], *args)

        trap.faults["post_write"] = post_write
        ids = [f"t{number}" for number in range(5)]
        for number, transfer_id in enumerate(ids):
            receiver.expect(transfer_id, [number], source=pusher.address, source_engine_id="p0")
            pusher.push(transfer_id, [number])
        ends = {}
        until(lambda: ends.update({e.transfer_id: e for e in receiver.poll()}) or len(ends) == 5, 5.0, "five ends")
        failed = [e for e in ends.values() if e.outcome == "failed"]
        assert len(failed) == 1 and failed[0].code == "internal"
        assert all(target.holds("source", [n], first_block=n) for n in range(5) if ids[n] != failed[0].transfer_id)
        sent = []
        assert len(until(lambda: sent.extend(pusher.poll()) or (len(sent) == 5 and sent))) == 5


def test_rule_10_a_bug_in_an_engine_s_release_costs_no_push_its_outcome():
    """The last WRITE of a dropped engine ends, its release meets a bug, and the push is reported all the same."""
    trap = Trap()
    with sides(trap, "prefill") as (pusher, receiver, _):
        move(pusher, receiver, "warm")
        trap.faults["poll_write"] = lambda _write: False
        receiver.expect("t1", [2], source=pusher.address, source_engine_id="p0")
        pusher.push("t1", [2])
        until(lambda: pusher.stats()["writes_in_flight"], what="the WRITE is posted")
        pusher.drop_engine("d0")
        until(lambda: pusher.engines()[0].state == "stale")
        trap.faults["remove_remote"] = raising(RuntimeError("a bug"))
        del trap.faults["poll_write"]
        (sent,) = until(pusher.poll, 5.0, "the outcome")
        assert sent.outcome in ("done", "failed") and sent.blocks_reusable
        assert pusher.stats()["internal_errors"] == 1 and pusher.healthy()


def test_e2_a_write_that_cannot_be_posted_fails_on_both_sides_within_a_second():
    """E2, E14: an explicit failure with its reason, never a completion."""
    trap = Trap()
    with sides(trap, "prefill") as (pusher, receiver, target):
        move(pusher, receiver, "warm")
        trap.faults["post_write"] = raising(TransportError(FailureCode.write_failed, "no such descriptor"))
        start_s = time.monotonic()
        sent, got = move(pusher, receiver, "t1", block=5)
        assert time.monotonic() - start_s < 5
        assert sent.outcome == got.outcome == "failed" and sent.code == got.code == "write_failed"
        assert "no such descriptor" in sent.reason and "no such descriptor" in got.reason
        assert sent.blocks_reusable and got.blocks_reusable and target.is_clean([5])
        trap.faults.clear()
        sent, got = move(pusher, receiver, "t2", block=5)
        assert sent.outcome == got.outcome == "done"


def test_nothing_is_left_of_a_side_whose_transport_does_not_start():
    """C6, G9: the port is free again, and the thread is gone."""
    arena = peers.Arena()
    with peers.Prefill() as taken:
        address = taken.address
    for error in (TransportError(FailureCode.internal, "no NIXL"), RuntimeError("boom"), SystemExit("bye")):
        with pytest.raises(type(error)):
            kvpush.PrefillPusher(
                "p0",
                arena.caches,
                arena.shape.spec(),
                listen=address,
                config=peers.config(),
                transport_factory=raising(error),
            )
        with pytest.raises(type(error)):
            kvpush.DecodeReceiver("d0", arena.caches, arena.shape.spec(), transport_factory=raising(error))
    with peers.Prefill(listen=f"{address[0]}:{address[1]}"):
        pass
