"""Rule 2, by instrumentation: nothing slow and nothing foreign happens while the registry's lock is held.

A real pusher and real receivers push, cancel, drop and restart on their own threads. The lock knows who holds it; every
call of the transport, every call of a zmq socket, every log record and every call of the caller's code asks it.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
import time
from collections import Counter

import pytest
import torch
import zmq

import kvpush
from kvpush.registry import Registry
from kvpush.testing.fake_transport import Delivery, FakeFabric

PATIENCE_S = 60.0
BLOCKS = 32
TURNS = 40
CONFIG = kvpush.Config(
    handshake_timeout_s=2,
    handshake_backoff_min_s=0.01,
    handshake_backoff_max_s=0.05,
    heartbeat_interval_s=0.02,
    liveness_timeout_s=10,
    engine_ttl_s=0.3,
    evict_grace_s=0.05,
    close_timeout_s=2,
    net_devices="lo",
)
SOCKET_CALLS = (
    "send", "send_multipart", "recv", "recv_multipart", "poll", "connect", "bind", "unbind", "close",
    "setsockopt", "getsockopt",
)  # fmt: skip
TRANSPORT_CALLS = (
    "metadata", "add_remote", "remove_remote", "post_write", "poll_write", "abandon_write", "notifications", "close",
)  # fmt: skip


class Witness:
    """Counts what happens, and keeps what happened on a thread that held a registry's lock."""

    def __init__(self):
        self.seen = Counter()
        self.guilty = set()
        self.holds = 0
        self._mine = threading.local()

    @property
    def is_held_here(self):
        return getattr(self._mine, "depth", 0) > 0

    def held(self, change):
        self._mine.depth = getattr(self._mine, "depth", 0) + change
        self.holds += change > 0

    def note(self, kind, what):
        self.seen[kind] += 1
        if self.is_held_here:
            self.guilty.add(f"{kind}: {what}")

    def watched(self, kind, function):
        """``function``, noted whenever it is called."""

        @functools.wraps(function)
        def call(*args, **kwargs):
            self.note(kind, function.__qualname__)
            return function(*args, **kwargs)

        return call


class HeldLock:
    """The registry's lock, and it knows who has it."""

    def __init__(self, lock, witness):
        self._lock = lock
        self._witness = witness

    def __enter__(self):
        self._lock.acquire()
        self._witness.held(+1)

    def __exit__(self, *exc):
        self._witness.held(-1)
        self._lock.release()


class WatchedTransport:
    """A transport whose every call is noted."""

    def __init__(self, transport, witness):
        self.counts = transport.counts
        for name in TRANSPORT_CALLS:
            setattr(self, name, witness.watched("transport", getattr(transport, name)))
        self.agent_name = transport.agent_name


class Fence:
    """The caller's code: the loop asks it until it says yes."""

    def __init__(self, witness):
        self._witness = witness
        self._patience = 2

    def query(self):
        self._witness.note("caller", "Fence.query")
        self._patience -= 1
        return self._patience < 0


class Handler(logging.Handler):
    def __init__(self, witness):
        super().__init__(logging.DEBUG)
        self._witness = witness

    def emit(self, record):
        self._witness.note("log", record.getMessage())


@pytest.fixture
def witness(monkeypatch):
    witness = Witness()
    init = Registry.__init__

    def with_held_lock(self, config, clock, rng):
        init(self, config, clock, rng)
        self._lock = HeldLock(self._lock, witness)

    monkeypatch.setattr(Registry, "__init__", with_held_lock)
    for name in SOCKET_CALLS:
        monkeypatch.setattr(zmq.Socket, name, witness.watched("socket", getattr(zmq.Socket, name)))
    monkeypatch.setattr(zmq.Poller, "poll", witness.watched("socket", zmq.Poller.poll))
    monkeypatch.setattr(time, "sleep", witness.watched("sleep", time.sleep))
    logger, handler = logging.getLogger("kvpush"), Handler(witness)
    level = logger.level
    logger.setLevel(logging.DEBUG)  # not by attribute: loggers remember what they once found disabled
    logger.addHandler(handler)
    yield witness
    logger.removeHandler(handler)
    logger.setLevel(level)


def fake_factory():
    return FakeFabric(delivery=Delivery.progress).transport


def nixl_factory():
    from kvpush.nixl_transport import NixlTransport

    return NixlTransport


class Fleet:
    """One pusher, some receivers that come and go, and callers that do not wait for each other."""

    def __init__(self, witness, factory):
        self.witness = witness
        self._make = factory()
        self._chance = random.Random(7)
        self.ends = Counter()
        self.pusher = kvpush.PrefillPusher("p0", caches(), SPEC, config=CONFIG, transport_factory=self.watched_factory)
        self.receivers = {f"d{i}": self.receiver(f"d{i}") for i in range(2)}

    def watched_factory(self, *args):
        return WatchedTransport(self._make(*args), self.witness)

    def receiver(self, engine_id):
        return kvpush.DecodeReceiver(engine_id, caches(), SPEC, config=CONFIG, transport_factory=self.watched_factory)

    def turn(self, number):
        chance, block = self._chance, number % BLOCKS
        engine_id = f"d{number % 2}"
        if number % 10 == 9:  # it restarts
            self.receivers.pop(engine_id).close()
            self.receivers[engine_id] = self.receiver(engine_id)
        receiver, transfer_id = self.receivers[engine_id], f"t{number}"
        deeds = [
            lambda: receiver.expect(transfer_id, [block], source=self.pusher.address, source_engine_id="p0"),
            lambda: self.pusher.push(transfer_id, [block], ready=Fence(self.witness)),
        ]
        for deed in chance.sample(deeds, 2):
            deed()
        if number % 7 == 3:
            chance.choice([self.pusher, receiver]).cancel(transfer_id)
        if number % 11 == 5:
            self.pusher.drop_engine(engine_id)
        for side in (self.pusher, receiver):
            side.engines(), side.transitions(), side.stats(), side.healthy()
        self.await_end(transfer_id)

    def await_end(self, transfer_id):
        """Each block is used again only a whole round later, so the other transfers need not be waited for."""
        end_s = time.monotonic() + PATIENCE_S
        while not self.ends[transfer_id]:
            assert time.monotonic() < end_s, f"{transfer_id} does not end"
            for event in self.pusher.wait(timeout_s=0.05):
                self.ends[event.transfer_id] += isinstance(event, kvpush.PushFinished)
            for receiver in self.receivers.values():
                receiver.poll()

    def close(self):
        for side in (*self.receivers.values(), self.pusher):
            side.close()


SPEC = kvpush.KVCacheSpec(dims="BKHND", model="m")


def caches():
    return {"layers.0": torch.zeros(BLOCKS, 2, 1, 2, 16, dtype=torch.uint8)}


def run(witness, factory, turns=TURNS):
    fleet = Fleet(witness, factory)
    try:
        for number in range(turns):
            fleet.turn(number)
        idle_s = time.monotonic() + PATIENCE_S  # the sweep evicts what is idle, too
        while any(engine.state != "evicted" for engine in fleet.pusher.engines()):
            assert time.monotonic() < idle_s
            fleet.pusher.wait(timeout_s=0.05)
    finally:
        fleet.close()
    return fleet


@pytest.mark.parametrize("factory", [fake_factory, pytest.param(nixl_factory, marks=pytest.mark.nixl)])
def test_rule2_nothing_foreign_happens_under_the_lock(witness, factory):
    fleet = run(witness, factory)
    assert sum(fleet.ends.values()) == len(fleet.ends) == TURNS
    assert witness.holds > 1000, "the lock was hardly used"
    for kind in ("transport", "socket", "log", "caller"):
        assert witness.seen[kind] > 20, f"the run did not show {kind} calls: {witness.seen}"
    assert witness.guilty == set()


# --- it would notice -------------------------------------------------------------------------------------------------


def log_under_the_lock(monkeypatch, witness):
    move = Registry._move

    def and_log(self, engine, trigger, detail):
        move(self, engine, trigger, detail)
        logging.getLogger("kvpush").info("engine=%s", engine.engine_id)

    monkeypatch.setattr(Registry, "_move", and_log)
    return "log: engine=d0"


def socket_under_the_lock(monkeypatch, witness):
    evict = Registry._evict_if_due

    def and_poll(self, engine, now_s, effects):
        evict(self, engine, now_s, effects)
        zmq.Poller().poll(0)

    monkeypatch.setattr(Registry, "_evict_if_due", and_poll)
    return "socket: Poller.poll"


def transport_under_the_lock(monkeypatch, witness):
    """An eviction that releases where it decides: the mistake that the effects are there to prevent."""
    made = []
    factory = Fleet.watched_factory

    def remember(self, *args):
        made.append(factory(self, *args))
        return made[-1]

    evict = Registry._evict_if_due

    def and_call(self, engine, now_s, effects):
        evict(self, engine, now_s, effects)
        if threading.current_thread().name.startswith("kvpush pusher"):
            made[0].metadata()

    monkeypatch.setattr(Fleet, "watched_factory", remember)
    monkeypatch.setattr(Registry, "_evict_if_due", and_call)
    return "transport: FakeTransport.metadata"


def caller_under_the_lock(monkeypatch, witness):
    pin = Registry._schedule

    def and_ask(self, engine):
        pin(self, engine)
        Fence(witness).query()

    monkeypatch.setattr(Registry, "_schedule", and_ask)
    return "caller: Fence.query"


PLANTED = [log_under_the_lock, socket_under_the_lock, transport_under_the_lock, caller_under_the_lock]


@pytest.mark.parametrize("violation", PLANTED, ids=lambda violation: violation.__name__)
def test_a_planted_violation_is_noticed(monkeypatch, witness, violation):
    expected = violation(monkeypatch, witness)
    run(witness, fake_factory, turns=4)
    assert expected in witness.guilty
    assert all(found.startswith(expected.split(":")[0]) for found in witness.guilty), witness.guilty
