"""Two experiments for bugs that live in the locks and loops around the cores: no threads, no sockets, no NIXL."""

import contextlib
import random
import threading

from kvpush import wire
from kvpush.config import Config
from kvpush.endpoint import Endpoint
from kvpush.events import StaleReason
from kvpush.identity import new_identity
from kvpush.layout import KVCacheSpec, geometry_of, memory_ranges
from kvpush.lifecycle import State
from kvpush.link import LinkMessage
from kvpush.pusher import _PushLoop
from kvpush.registry import Registry
from kvpush.side import EventQueue, Ledger
from kvpush.testing import FakeClock, FakeFabric
from kvpush.testing.memory import Memory
from kvpush.testing.slices import Model, Slice


class Intruder:
    """A lock that lets somebody else act whenever it is dropped: the worst moment a thread could find."""

    def __init__(self, act):
        self._lock = threading.Lock()
        self._act = act
        self._is_acting = False

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *exc):
        self._lock.release()
        if not self._is_acting:
            self._is_acting = True
            self._act()


def an_intruder_gets_in():
    """Whether pin() hands out the agent of an engine that somebody evicted before the pin was taken."""
    registry = Registry(Config(), FakeClock(), random.Random(1))
    generation, _ = registry.admit("d0", "one", "host:1")
    attempt = registry.begin_handshake(generation)
    assert registry.handshake_succeeded(generation, attempt, "agent")
    registry._lock = Intruder(lambda: registry.retire(generation, StaleReason.dropped, "operator"))
    return registry.pin(generation) is not None and registry.state_of(generation) is State.evicted


class FakeListener:
    """The pusher's end of the control plane: what comes in is given, what goes out is kept."""

    def __init__(self, events):
        self.events = events
        self.sent = []

    def receive(self, limit, max_bytes):
        events, self.events = self.events[:limit], self.events[limit:]
        return events

    def send(self, link, frames):
        self.sent.append(wire.decode_to_decode(frames))
        return True

    def forget(self, link):
        pass


def messages_handled_after_a_bad_one():
    """One turn of the pusher's loop: a message that a bug in the core stumbles over comes before two good ones."""
    memory = Memory("BKHND", 4, Slice(Model(1)))
    spec = KVCacheSpec(dims="BKHND", model="m")
    geometry = geometry_of(memory.tensors, spec)
    config, clock = Config(), FakeClock()
    identity = new_identity("p0", spec, geometry)
    registry = Registry(config, clock, random.Random(1))
    loop = _PushLoop(
        identity, geometry, config, clock, registry, Ledger("test", 8), EventQueue(), Endpoint("127.0.0.1", 0), None
    )
    try:
        loop._transport = FakeFabric().transport(identity.agent_name, geometry.memory, memory_ranges(geometry), config)
        ours = identity
        hello = wire.Hello(
            "d0", "one", ours.share, "p0", ours.share, ours.fingerprint, ours.block_sizes_tokens, "d0/0.0#one", 1
        )
        good = [LinkMessage(b"link", wire.encode(hello)), LinkMessage(b"link", [b"junk"])]
        loop._listener = FakeListener([LinkMessage(b"bad", wire.encode(hello)), *good])
        handle = loop._core.message

        def stumble(link, message, now_s):
            if link == b"bad":
                raise ZeroDivisionError("a bug")
            return handle(link, message, now_s)

        loop._core.message = stumble
        with contextlib.suppress(ZeroDivisionError):  # this is how a loop dies
            loop.turn({"ready"})
        return len(loop._listener.sent)
    finally:
        loop._context.term()
        loop._close_fd()
