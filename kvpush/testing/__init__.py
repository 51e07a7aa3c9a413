"""Fakes for tests of kvpush and of what is built on it: a clock, a transport, a network, and a world of whole engines.

Nothing in here needs NIXL, a GPU, a socket or a thread, and nothing waits: time is data.
"""

from kvpush.testing.clock import FakeClock
from kvpush.testing.fake_transport import Delivery, FakeFabric, FakeTransport, FakeWrite, Operation, WriteState
from kvpush.testing.network import FakeNetwork, InTransit
from kvpush.testing.world import DecodeEngine, PrefillEngine, Push, Receive, Stuck, Violation, World

__all__ = [
    "DecodeEngine",
    "Delivery",
    "FakeClock",
    "FakeFabric",
    "FakeNetwork",
    "FakeTransport",
    "FakeWrite",
    "InTransit",
    "Operation",
    "PrefillEngine",
    "Push",
    "Receive",
    "Stuck",
    "Violation",
    "World",
    "WriteState",
]
