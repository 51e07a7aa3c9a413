"""Strangers on the control port and black holes at the other end: whatever they say, the others are served."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import threading
import time

import msgspec
import peers
import pytest
import zmq
from peers import until

import kvpush
from kvpush import wire

HANDSHAKE_S = 1.0


class Stranger:
    """A DEALER that says what it likes."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, 10_000)
        self.socket.connect("tcp://{}:{}".format(*address))

    def say(self, *frames):
        self.socket.send_multipart(list(frames))

    def hear(self, timeout_s=10.0):
        """The next answer, decoded."""
        assert self.socket.poll(int(timeout_s * 1000)), "no answer"
        return wire.decode_to_decode(self.socket.recv_multipart())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self.context.term()


@contextlib.contextmanager
def listener(serve=None):
    """A TCP port that accepts, and does with each connection what ``serve`` says: nothing at all, by default."""
    port = socket.create_server(("127.0.0.1", 0), backlog=64)
    kept = []
    is_over = threading.Event()

    def accept():
        with contextlib.suppress(OSError):
            while not is_over.is_set():
                connection, _ = port.accept()
                kept.append(connection)
                if serve:
                    serve(connection)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield port.getsockname()
    finally:
        is_over.set()
        port.shutdown(socket.SHUT_RDWR)
        port.close()
        thread.join(10)
        for connection in kept:
            connection.close()


def preamble():
    return wire.encode(wire.Heartbeat())[0]


def body(**fields):
    return msgspec.msgpack.encode(fields)


def is_served(prefill, decode, transfer_id="t1", block=1):
    decode.expect(transfer_id, [block], prefill.address)
    prefill.push(transfer_id, [block])
    got = decode.inbox.outcome(transfer_id)
    assert got.outcome == "done" and decode.arena.holds(transfer_id, [block])
    assert prefill.inbox.outcome(transfer_id).outcome == "done"
    assert prefill.pusher.healthy() and prefill.pusher.stats()["internal_errors"] == 0


class Exploit:
    """J3: what unpickling this would do shows in the environment."""

    def __reduce__(self):
        return os.putenv, ("KVPUSH_TEST_WAS_UNPICKLED", "1")


def real_hello(engine_id="x"):
    """What a good decode engine with the same cache says to p0."""
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as ear, peers.Decode(engine_id) as decode:
        port = ear.bind_to_random_port("tcp://127.0.0.1")
        decode.expect("t", [1], ("127.0.0.1", port))
        assert ear.poll(10_000)
        _, *frames = ear.recv_multipart()
    context.term()
    hello = wire.decode_to_prefill(frames)
    assert isinstance(hello, wire.Hello)
    return hello


JUNK = [
    b"",
    b"\x00",
    b"\xff" * 100,
    b"x" * 100_000,
    *(msgspec.msgpack.encode(value) for value in ({}, [], None, 7, "x", 1e308, b"\xff", 2**64 - 1, [[]] * 100)),
    b"\x91" * 10_000,  # nested
    msgspec.msgpack.encode({str(i): i for i in range(100_000)}),
    pickle.dumps(Exploit()),
]


def test_a1_j1_j3_junk_of_every_kind_is_answered_or_dropped_and_the_port_lives():
    with peers.Prefill() as prefill, peers.Decode() as decode, Stranger(prefill.address) as stranger:
        for junk in JUNK:
            stranger.say(junk)
            stranger.say(preamble(), junk)
            stranger.say(preamble(), junk, junk)
            stranger.say(junk, wire.encode(wire.Heartbeat())[1])
        stranger.say(b"kvpush/999", b"\xff\xfe undecodable")
        stranger.say(*[b"frame"] * 500)
        until(lambda: prefill.pusher.stats().get("messages_malformed", 0) >= 4 * len(JUNK), what="all junk is counted")
        said = stranger.hear()
        assert isinstance(said, wire.Refused) and said.code == "malformed"
        is_served(prefill, decode)
        assert "KVPUSH_TEST_WAS_UNPICKLED" not in os.environ
        # os.putenv() shows in children only
        assert subprocess.run(["printenv", "KVPUSH_TEST_WAS_UNPICKLED"], check=False).returncode == 1


def registrations():
    """J1: every field removed, and every field with every odd value."""
    odds = (None, -1, [], {}, "", 1e308, b"\xff", 2**64 - 1, True, [1], "34", {"0": 3}, float("nan"))
    want = ["kv", 0, b"\0" * 4, 0]
    good = {"type": "Register", "transfer_id": "t", "epoch": 1, "wants": [want], "remaining_ms": 1000}
    for name in good:
        yield {key: value for key, value in good.items() if key != name}
        for odd in odds:
            if (name, odd) not in (("remaining_ms", True), ("epoch", True)):
                yield good | {name: odd}
    for place in range(len(want)):
        yield good | {"wants": [want[:place]]}
        for odd in odds:
            yield good | {"wants": [[*want[:place], odd, *want[place + 1 :]]]}
    yield good | {"wants": [["kv", 0, b"\0" * 8]], "transfer_id": "twice"}
    yield good | {"wants": [["kv", 0, b"\xff" * 4]], "transfer_id": "huge"}
    yield good | {"wants": [want, want], "transfer_id": "one group twice"}


def test_j1_odd_registrations_are_dropped_and_a_good_one_works_on_the_same_link():
    with peers.Prefill() as prefill, peers.Decode() as decode, Stranger(prefill.address) as stranger:
        stranger.say(*wire.encode(real_hello()))
        assert isinstance(stranger.hear(), wire.Welcome)
        count = 0
        for fields in registrations():
            stranger.say(preamble(), msgspec.msgpack.encode(fields))
            count += 1
        stranger.say(*wire.encode(peers.register("good", 7, b"")))
        until(lambda: prefill.pusher.stats().get("registrations", 0) >= 1)
        prefill.push("good", [1])
        assert prefill.inbox.outcome("good").outcome == "done"
        stats = prefill.pusher.stats()
        assert stats["messages_malformed"] + stats["registrations"] >= count
        grown = {"type": "Register", "transfer_id": "grown", "epoch": 8, "wants": [["kv", 0, b"", 0, "more"]]}
        stranger.say(preamble(), msgspec.msgpack.encode(grown | {"remaining_ms": 9000, "colour": "blue", "x": [1]}))
        prefill.push("grown", [1])
        assert prefill.inbox.outcome("grown").outcome == "done"
        is_served(prefill, decode)


def test_j7_nobody_speaks_before_hello_or_for_another():
    with peers.Prefill() as prefill, peers.Decode() as decode, Stranger(prefill.address) as stranger:
        decode.expect("t1", [1], prefill.address)
        until(lambda: prefill.pusher.stats()["registrations_waiting"])
        stranger.say(*wire.encode(wire.Cancel("t1", 1, kvpush.FailureCode.cancelled_by_peer, "")))
        assert isinstance(stranger.hear(), wire.Goodbye)
        stranger.say(*wire.encode(real_hello("thief")))
        assert isinstance(stranger.hear(), wire.Welcome)
        stranger.say(*wire.encode(wire.Cancel("t1", 1, kvpush.FailureCode.cancelled_by_peer, "")))
        assert isinstance(stranger.hear(), wire.Drained)  # of its own, which never existed
        stranger.say(*wire.encode(peers.register("t1", 1, b"\1\0\0\0")))
        refused = stranger.hear()
        assert isinstance(refused, wire.Failed) and refused.code == "claimed"
        stranger.say(*wire.encode(real_hello("another")))
        refused = stranger.hear()
        assert isinstance(refused, wire.Refused) and "one link, one engine" in refused.reason
        prefill.push("t1", [1])
        assert decode.inbox.outcome("t1").outcome == "done"


def test_a9_a_peer_with_bad_or_no_metadata_fails_its_own_handshake():
    """A9, J5, J6: NIXL sees none of it; the waiting push fails on both sides, and a good engine is served."""
    settings = {"handshake_attempts": 2, "handshake_backoff_min_s": 0.01, "handshake_backoff_max_s": 0.02}
    with peers.Prefill(**settings) as prefill, peers.Decode() as decode, Stranger(prefill.address) as stranger:
        hello = real_hello()
        stranger.say(*wire.encode(hello))
        assert isinstance(stranger.hear(), wire.Welcome)
        stranger.say(*wire.encode(peers.register("t", 1, b"\1\0\0\0")))
        prefill.push("t", [1])
        for blob, digest in ((b"", b""), (b"nixlSerDes|Agent" + b"\xff" * 400, b"\0" * 32)):
            request = stranger.hear()
            assert isinstance(request, wire.MetadataRequest)
            fields = (request.attempt, hello.incarnation, hello.agent_name, len(blob), digest, blob, b"")
            stranger.say(*wire.encode(wire.Metadata(*fields)))
        failed = stranger.hear()
        assert isinstance(failed, wire.Failed) and failed.code == "bad_metadata" and failed.settled
        sent = prefill.inbox.outcome("t")
        assert sent.outcome == "failed" and sent.code == "bad_metadata" and sent.blocks_reusable
        is_served(prefill, decode)


def test_j4_a_client_that_never_reads_is_dropped_and_bounds_what_it_costs():
    """J4: 20 000 messages that each ask for an answer; the default address is loopback."""
    with peers.Prefill(max_registrations_per_engine=16, max_registrations=64) as prefill, peers.Decode() as decode:
        assert prefill.address[0] == "127.0.0.1"
        with Stranger(prefill.address) as stranger:
            stranger.socket.setsockopt(zmq.RCVHWM, 1)
            stranger.say(*wire.encode(real_hello()))
            with contextlib.suppress(zmq.Again):
                for _ in range(20_000):
                    stranger.say(preamble(), b"junk")
            is_served(prefill, decode)
            before = peers.resources()
            is_served(prefill, decode, "t2", 2)
            assert peers.resources().rss_mib < before.rss_mib + 64


@pytest.mark.parametrize("what", ["silent", "half a frame", "another protocol"])
def test_a7_a_peer_that_accepts_and_says_nothing_fails_alone_and_in_time(what):
    """A7: the failure names the engine and the address; close() in the middle of a handshake is quick."""
    says = {
        "silent": b"",
        "half a frame": b"\xff\x00\x00\x00\x00",
        "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    }
    settings = {"handshake_timeout_s": HANDSHAKE_S, "handshake_attempts": 1}
    with listener(lambda connection: connection.sendall(says[what])) as address, peers.Decode(**settings) as decode:
        start_s = time.monotonic()
        decode.expect("t1", [1], address, source_engine_id="p-silent")
        got = decode.inbox.outcome("t1")
        took_s = time.monotonic() - start_s
        assert got.outcome == "failed" and got.code in ("handshake_timeout", "peer_lost") and got.blocks_reusable
        assert "p-silent" in got.reason and f"{address[0]}:{address[1]}" in got.reason, got.reason
        assert took_s < HANDSHAKE_S * 1.2 + 1
        decode.expect("t2", [1], address, source_engine_id="p-silent")
        decode.receiver.cancel("t2")
        assert decode.inbox.outcome("t2").outcome in ("cancelled", "failed")
        decode.expect("t3", [2], address, source_engine_id="p-silent-2")
        start_s = time.monotonic()
        assert decode.receiver.close().is_thread_stopped
        assert time.monotonic() - start_s < 1.5
        assert decode.inbox.outcome("t3").outcome == "failed"


def test_a6_one_black_hole_does_not_delay_the_others():
    """A6: it is asked first; nine others connect at once, and it alone fails at its timeout."""
    with contextlib.ExitStack() as stack:
        hole = stack.enter_context(listener())
        prefills = [stack.enter_context(peers.Prefill(f"p{i}", peers.Shape(blocks=4))) for i in range(5)]
        decode = stack.enter_context(
            peers.Decode(shape=peers.Shape(blocks=16), handshake_timeout_s=3.0, handshake_attempts=1)
        )
        start_s = time.monotonic()
        decode.expect("t-hole", [15], hole, source_engine_id="p-hole")
        for number, prefill in enumerate(prefills):
            decode.expect(f"t{number}", [number], prefill.address, source_engine_id=f"p{number}")
            prefill.push(f"t{number}", [1])
        for number in range(len(prefills)):
            assert decode.inbox.outcome(f"t{number}").outcome == "done"
        assert time.monotonic() - start_s < 2.5, "they waited for the black hole"
        assert "t-hole" not in decode.inbox.finished
        assert decode.inbox.outcome("t-hole").outcome == "failed"


def test_a4_a8_nobody_listens_yet_and_then_somebody_does():
    """A4, A8: what waits is told once with the cause; the next request works with no restart."""
    with peers.Prefill() as taken:
        address = taken.address
    quick = {"handshake_attempts": 2, "handshake_backoff_min_s": 0.05, "handshake_backoff_max_s": 0.1}
    with peers.Decode(**quick) as decode:
        for number in range(5):
            decode.expect(f"r{number}", [number], address)
        for event in decode.inbox.outcomes([f"r{number}" for number in range(5)]).values():
            assert event.outcome == "failed" and event.code == "peer_lost" and "refused" in event.reason
        with peers.Prefill(listen=f"{address[0]}:{address[1]}") as prefill:
            is_served(prefill, decode, "r6", 6)
    with peers.Decode(handshake_attempts=1000, handshake_backoff_min_s=0.05, handshake_backoff_max_s=0.2) as decode:
        decode.expect("early", [1], address)  # waits through the refusals
        until(lambda: decode.receiver.stats().get("handshakes_failed_peer_lost", 0) >= 2)
        with peers.Prefill(listen=f"{address[0]}:{address[1]}") as prefill:
            prefill.push("early", [1])
            assert decode.inbox.outcome("early").outcome == "done"


def test_a2_the_wrong_engine_answers_and_neither_is_harmed():
    with peers.Prefill("p-right") as right, peers.Prefill("p-wrong") as wrong, peers.Decode() as decode:
        decode.expect("t1", [1], wrong.address, source_engine_id="p-right")
        got = decode.inbox.outcome("t1")
        assert got.code == "wrong_engine" and "'p-right'" in got.reason and "'p-wrong'" in got.reason
        assert str(wrong.address[1]) in got.reason and decode.inbox.reusable("t1") == "outcome"
        assert wrong.pusher.engines() == []
        decode.expect("t2", [2], right.address, source_engine_id="p-right")
        right.push("t2", [1])
        assert decode.inbox.outcome("t2").outcome == "done"


def test_g4_failed_handshakes_leave_no_descriptor_behind():
    """G4: fifty refusals and fifty black holes."""
    quick = {"handshake_timeout_s": 0.05, "handshake_attempts": 1, "handshake_backoff_min_s": 0.001}
    with (
        socket.create_server(("127.0.0.1", 0), backlog=128) as port,  # the kernel accepts, nobody else does
        peers.Decode(**quick, handshake_backoff_max_s=0.001, max_tombstones=8) as decode,
    ):
        hole = port.getsockname()
        with peers.Prefill() as closed:
            refused = closed.address

        def fail(number):
            decode.expect(f"t{number}", [number % 8], (refused, hole)[number % 2], source_engine_id=f"p{number}")
            assert decode.inbox.outcome(f"t{number}").outcome == "failed"

        for number in range(10):
            fail(number)
        base = peers.resources()
        for number in range(10, 110):
            fail(number)
        end = peers.resources()
        assert end.descriptors <= base.descriptors + 2 and end.threads <= base.threads
        start_s = time.monotonic()
        decode.receiver.close()
        assert time.monotonic() - start_s < 1.5


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
@pytest.mark.parametrize("listen", ["[::1]:0", ("::1", 0), "localhost:0", "127.0.0.1:0"])
def test_h4_every_way_to_write_loopback_works_end_to_end(listen):
    try:
        prefill = peers.Prefill(listen=listen)
    except kvpush.ConfigurationError as exc:
        pytest.skip(f"cannot bind {listen}: {exc}")
    with prefill, peers.Decode() as decode:
        host, port = prefill.address
        is_served(prefill, decode)
        written = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        decode.receiver.expect("t2", [2], source=written, source_engine_id="p0")
        prefill.push("t2", [3])
        assert decode.inbox.outcome("t2").outcome == "done"
        assert any(written in e.address for e in decode.receiver.engines())


def test_g9_h8_the_same_port_thirty_times_and_sixteen_at_once():
    """G9, H8: create, use, close, on one fixed port; then many at a barrier, each with a port of its own."""
    with peers.Prefill() as first:
        listen = "{}:{}".format(*first.address)
    shape = peers.Shape(blocks=4)

    def live(number):
        with peers.Prefill(listen=listen, shape=shape) as prefill, peers.Decode(shape=shape) as decode:
            is_served(prefill, decode, f"t{number}", 1)

    for number in range(5):
        live(number)
    base = peers.resources()
    for number in range(30):
        live(number)
    end = peers.resources()
    assert end.descriptors <= base.descriptors and end.threads <= base.threads, (base, end)
    assert end.rss_mib <= base.rss_mib * 1.05 + 8, (base, end)

    made = []
    threads = [threading.Thread(target=lambda: made.append(peers.Prefill(shape=shape))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(peers.PATIENCE_S)
    assert len({prefill.address for prefill in made}) == 16
    for prefill in made:
        prefill.pusher.close()
    with pytest.raises(kvpush.ConfigurationError, match="in use"), peers.Prefill(shape=shape) as taken:
        peers.Prefill(listen="{}:{}".format(*taken.address), shape=shape)
