"""Every queue and table has its limit: whoever floods it is told, everybody else is served, and memory stays flat.

Rule 16. Each flood comes in rounds: what memory the first one takes for good, the later ones do not take again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter

import msgspec
import numpy as np
import peers
import pytest
import zmq
from peers import until

import kvpush
from kvpush import wire
from kvpush.errors import FailureCode
from kvpush.loop import MIN_COMMANDS
from kvpush.nixl_transport import NixlTransport

ROUNDS = 3
FLAT_MIB = 12.0  # what the allocator may keep between rounds
WINDOW = 200  # messages on their way before their answers are read


class Flooder:
    """A DEALER with a window: it sends as much as it likes and reads what it is told."""

    def __init__(self, address, engine_id="flooder"):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect("tcp://{}:{}".format(*address))
        self.engine_id = engine_id

    def answers(self, messages, kind=None):
        """How often each answer came; one answer of ``kind`` for each message."""
        seen, waiting = Counter(), 0
        for message in messages:
            self.socket.send_multipart(message if isinstance(message, list) else wire.encode(message))
            waiting += 1
            if waiting >= WINDOW:
                waiting -= self._read(seen, kind)
        while waiting > 0:
            waiting -= self._read(seen, kind)
        return seen

    def _read(self, seen, kind):
        assert self.socket.poll(10_000), f"no answer any more after {seen}"
        said = wire.decode_to_decode(self.socket.recv_multipart())
        code = getattr(said, "code", "")
        seen[f"{type(said).__name__} {code}".strip()] += 1
        return kind is None or isinstance(said, kind)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self.context.term()


@pytest.fixture(scope="module")
def hello():
    """What a good decode engine with the same cache says to p0."""
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as ear, peers.Decode("x") as decode:
        port = ear.bind_to_random_port("tcp://127.0.0.1")
        decode.expect("t", [1], ("127.0.0.1", port))
        assert ear.poll(10_000)
        _, *frames = ear.recv_multipart()
    context.term()
    said = wire.decode_to_prefill(frames)
    assert isinstance(said, wire.Hello)
    return said


def named(hello, engine_id):
    return msgspec.structs.replace(hello, engine_id=engine_id)


def flat_over_rounds(flood):
    """Run it again and again. Memory, descriptors and threads stay where the first round left them."""
    flood(0)
    base = peers.resources()
    for number in range(1, ROUNDS):
        flood(number)
    end = peers.resources()
    assert end.rss_mib < base.rss_mib + FLAT_MIB, (base, end)
    assert end.descriptors <= base.descriptors + 2 and end.threads <= base.threads, (base, end)


def is_served(prefill, decode, transfer_id):
    decode.expect(transfer_id, [1], prefill.address)
    prefill.push(transfer_id, [1])
    assert decode.inbox.outcome(transfer_id).outcome == prefill.inbox.outcome(transfer_id).outcome == "done"
    assert prefill.pusher.healthy() and prefill.pusher.stats()["internal_errors"] == 0


def test_g6_a_flood_of_registrations_is_refused_above_the_cap_and_leaves_with_its_engine(hello):
    """G6: whoever registers is told `queue_full`; the others still find room."""
    with peers.Prefill(max_registrations=2000, max_registrations_per_engine=1000) as prefill, peers.Decode() as decode:

        def flood(number):
            with Flooder(prefill.address) as flooder:
                assert flooder.answers([named(hello, "flooder")]) == {"Welcome": 1}
                registers = [peers.register(f"{number}/{i}", i, b"\1\0\0\0") for i in range(10_000)]
                for register in registers[:1000]:
                    flooder.socket.send_multipart(wire.encode(register))
                seen = flooder.answers(registers[1000:])
                assert seen == {"Failed queue_full": 9000}, seen
                assert prefill.pusher.stats()["registrations_waiting"] == 1000
                is_served(prefill, decode, f"beside {number}")
            until(lambda: prefill.pusher.stats()["registrations_waiting"] == 0, what="they leave with their engine")

        flat_over_rounds(flood)
        # tombstones of what was served, and nothing of the flood
        assert prefill.pusher.stats()["tombstones"] == ROUNDS and prefill.pusher.stats()["timers"] == 0


def huge_registers(kind, count):
    """Registrations of 8 MiB and less, valid but for what ``kind`` says."""
    size = {"above the bound": 2_000_000}.get(kind, 1 << 20)
    packed = wire.pack_block_ids(np.arange(size))
    for i in range(count):
        yield wire.encode(peers.register("one" if kind == "one transfer" else f"t{i}", i, packed))


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        ("above the bound", {"Failed bad_blocks": 60}),
        ("many transfers", {"Failed queue_full": 59}),
        ("one transfer", {"Failed superseded": 59}),  # each of them is looked at, id by id
    ],
)
def test_rule16_a_flood_of_huge_registrations_costs_little_memory_and_delays_the_others_little(hello, kind, answers):
    """A million block ids each: the bound in size, packed ids, and few bytes a turn."""
    settings = {"liveness_timeout_s": 600.0}  # the flooder has no heartbeat
    with peers.Prefill(**settings) as prefill, peers.Decode(**settings) as decode, Flooder(prefill.address) as flooder:
        flooder.socket.setsockopt(zmq.SNDHWM, 2)
        assert flooder.answers([named(hello, "flooder")]) == {"Welcome": 1}
        is_served(prefill, decode, "first")
        start_s = time.monotonic()
        is_served(prefill, decode, "quiet")
        quiet_s = time.monotonic() - start_s
        base = peers.resources()
        flood = threading.Thread(target=lambda: [flooder.socket.send_multipart(m) for m in huge_registers(kind, 60)])
        flood.start()
        slowest_s = most_mib = number = 0
        while flood.is_alive() or not number:
            start_s = time.monotonic()
            is_served(prefill, decode, f"beside {number}")
            slowest_s = max(slowest_s, time.monotonic() - start_s)
            most_mib = max(most_mib, peers.resources().rss_mib - base.rss_mib)
            number += 1
        flood.join()
        seen = flooder.answers([wire.Heartbeat()], wire.Heartbeat)
        assert seen == {**answers, "Heartbeat": 1}
        assert prefill.pusher.stats()["blocks_registered"] == (0 if kind == "above the bound" else 1 << 20)
        print(f"{kind}: {number} transfers beside it, the slowest {slowest_s:.3f} s; {most_mib:.0f} MiB at most")
        assert most_mib < 400, most_mib  # 32 messages of 8 MiB that wait to be read, and those of the flooder
        assert slowest_s < 2 + 20 * quiet_s, (slowest_s, quiet_s)  # a busy machine makes both slow


def test_a_flood_of_cancels_is_answered_and_remembered_by_nobody(hello):
    """Nothing of an unknown transfer is or will be in flight: Drained, every time."""
    with peers.Prefill() as prefill, peers.Decode() as decode, Flooder(prefill.address) as flooder:
        assert flooder.answers([hello]) == {"Welcome": 1}

        def flood(number):
            cancels = [wire.Cancel(f"{number}/{i}", i, FailureCode.cancelled_by_peer, "x" * 100) for i in range(10_000)]
            assert flooder.answers(cancels) == {"Drained": 10_000}
            is_served(prefill, decode, f"beside {number}")

        flat_over_rounds(flood)
        assert prefill.pusher.stats()["tombstones"] == ROUNDS


def test_a_flood_of_hellos_finds_max_engines_and_is_told_so(hello):
    with peers.Prefill(max_engines=20) as prefill, peers.Decode() as decode:
        is_served(prefill, decode, "first")

        def flood(number):
            with contextlib.ExitStack() as stack:
                seen = Counter()
                for i in range(60):
                    flooder = stack.enter_context(Flooder(prefill.address))
                    seen += flooder.answers([named(hello, f"{number}/{i}")] * 3)
                assert seen == {"Welcome": 19 * 3, "Refused queue_full": 41 * 3}, seen
                is_served(prefill, decode, f"beside {number}")
                assert len([e for e in prefill.pusher.engines() if e.state != "evicted"]) == 20
            until(lambda: prefill.pusher.stats()["links"] == 1, what="they are gone")
            until(lambda: sum(e.state != "evicted" for e in prefill.pusher.engines()) == 1)

        flat_over_rounds(flood)


def test_a_flood_of_hellos_on_one_link_is_one_engine(hello):
    with peers.Prefill() as prefill, Flooder(prefill.address) as flooder:
        flat_over_rounds(lambda _: flooder.answers([hello] * 5000))
        (engine,) = prefill.pusher.engines()
        assert engine.generation == 1 and prefill.pusher.stats()["links"] == 1


def test_a_flood_of_unknown_messages_is_answered_and_counted(hello):
    """A newer peer's message, or junk: refused, each time, and the link goes on."""
    preamble = wire.encode(wire.Heartbeat())[0]
    strange = [preamble, msgspec.msgpack.encode({"type": "Teleport", "where": "x" * 1000})]
    with peers.Prefill() as prefill, peers.Decode() as decode, Flooder(prefill.address) as flooder:

        def flood(number):
            assert flooder.answers([strange] * 10_000) == {"Refused malformed": 10_000}
            is_served(prefill, decode, f"beside {number}")

        flat_over_rounds(flood)
        assert prefill.pusher.stats()["messages_malformed"] == ROUNDS * 10_000


def test_a_flood_of_pushes_that_nobody_wants_is_refused_to_its_caller_and_expires():
    with peers.Prefill(max_pending_pushes=500, lease_s=0.2, max_tombstones=100) as prefill, peers.Decode() as decode:

        def flood(number):
            for i in range(500):
                prefill.pusher.push(f"{number}/{i}", [i % 64])
            for _ in range(5000):
                with pytest.raises(kvpush.QueueFull, match="max_pending_pushes"):
                    prefill.pusher.push("one too many", [1])
            events = []
            until(lambda: events.extend(prefill.pusher.poll()) or len(events) == 500, what="all expire")
            assert {event.outcome for event in events} == {"expired"}
            is_served(prefill, decode, f"beside {number}")

        flat_over_rounds(flood)
        stats = prefill.pusher.stats()
        assert stats["pushes_open"] == 0 and stats["tombstones"] <= 100


def test_a_flood_of_the_callers_cancels_is_bounded_in_the_queue_and_in_memory():
    with peers.Prefill(max_tombstones=1000) as prefill, peers.Decode() as decode:

        def flood(number):
            for i in range(20_000):
                with contextlib.suppress(kvpush.QueueFull):
                    prefill.pusher.cancel(f"{number}/{i}")
                    decode.receiver.cancel(f"{number}/{i}")
            is_served(prefill, decode, f"beside {number}")

        flat_over_rounds(flood)
        assert prefill.pusher.stats()["tombstones"] <= 1000


class Hanging(NixlTransport):
    """Its calls do not return while ``may_turn`` is not set."""

    may_turn = threading.Event()
    hangs = threading.Event()

    def notifications(self):
        if not self.may_turn.is_set():
            self.hangs.set()
        assert self.may_turn.wait(peers.PATIENCE_S)
        return super().notifications()


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_c11_callers_cannot_pile_up_commands_behind_a_loop_that_hangs(which):
    """C11: a clear, retryable error to whoever submits; and when the loop goes on, so does everything else."""
    arena, config = peers.Arena(), peers.config(max_pending_pushes=8)
    Hanging.may_turn.set()
    made = {
        "prefill": lambda: kvpush.PrefillPusher(
            "p0", arena.caches, arena.shape.spec(), config=config, transport_factory=Hanging
        ),
        "decode": lambda: kvpush.DecodeReceiver(
            "d0", arena.caches, arena.shape.spec(), config=config, transport_factory=Hanging
        ),
    }
    with made[which]() as side:
        calls = {
            "cancel": lambda: side.cancel("x"),
            "drop_engine": lambda: side.drop_engine("x"),
            "push": lambda: side.push("new", [1]),
            "expect": lambda: side.expect("new", [1], source=("127.0.0.1", 9), source_engine_id="p"),
            "renew": lambda: side.renew(["x"], source=("127.0.0.1", 9), source_engine_id="p"),
        }
        calls = {name: call for name, call in calls.items() if hasattr(side, name)}
        Hanging.hangs.clear()
        Hanging.may_turn.clear()
        try:
            side.cancel("x")
            assert Hanging.hangs.wait(peers.PATIENCE_S)  # from now on nothing is taken from the queue
            refused = None
            for _ in range(10 * MIN_COMMANDS):
                try:
                    side.cancel("x")
                except kvpush.QueueFull as exc:
                    refused = exc
            assert refused is not None and refused.retryable
            for name, call in calls.items():
                with pytest.raises(kvpush.QueueFull, match=name):
                    call()
            assert side.stats() == {} and not side.drain(0.05)
        finally:
            Hanging.may_turn.set()
        assert until(side.stats)["internal_errors"] == 0
        side.cancel("x")


def test_decode_is_not_hurt_by_a_prefill_engine_that_talks_nonsense():
    """Unknown epochs, junk and endless requests over the link that decode dialled: counted, answered, forgotten."""
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as ear, peers.Decode() as decode, peers.Prefill("p1") as good:
        ear.setsockopt(zmq.LINGER, 0)
        ear.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue blocks: nothing is thrown away
        port = ear.bind_to_random_port("tcp://127.0.0.1")
        decode.expect("t", [60], ("127.0.0.1", port))
        assert ear.poll(10_000)
        link, *_ = ear.recv_multipart()
        ear.send_multipart([link, *wire.encode(peers.welcome("p0", "i", "agent", decode.arena))])
        nonsense = [
            wire.encode(wire.Failed("t", 10**6, FailureCode.unknown, "x" * 1000, True)),
            wire.encode(wire.Drained("t", 10**6)),
            [wire.encode(wire.Heartbeat())[0], b"junk"],
            wire.encode(peers.welcome("p9", "j", "another", decode.arena)),
        ]

        def flood(number):
            before = decode.receiver.stats().get("messages_late", 0)
            for _ in range(3000):
                for frames in nonsense:
                    ear.send_multipart([link, *frames])
                while ear.poll(0):
                    ear.recv_multipart()
            until(lambda: decode.receiver.stats()["messages_late"] == before + 6000, what="all of it is read")
            decode.expect(f"beside {number}", [1], good.address, source_engine_id="p1")
            good.push(f"beside {number}", [2])
            assert decode.inbox.outcome(f"beside {number}").outcome == "done"

        flat_over_rounds(flood)
        stats = decode.receiver.stats()
        assert stats["messages_malformed"] == stats["messages_unexpected"] == ROUNDS * 3000
        assert stats["receives_open"] == 1 and stats["internal_errors"] == 0 and decode.receiver.healthy()
    context.term()
