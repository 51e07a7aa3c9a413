"""Fakes for tests of kvpush and of what is built on it: a clock, a transport, a network, and a world of whole engines.

Nothing in here needs NIXL, a GPU, a socket or a thread, and nothing waits: time is data.
"""

from kvpush.testing.accounts import Account, Push, Receive
from kvpush.testing.clock import FakeClock
from kvpush.testing.decode_engine import DecodeEngine
from kvpush.testing.engine import Engine
from kvpush.testing.fake_transport import Delivery, FakeFabric, FakeTransport, FakeWrite, Operation, WriteState
from kvpush.testing.network import FakeNetwork, InTransit
from kvpush.testing.observer import Observer
from kvpush.testing.prefill_engine import PrefillEngine
from kvpush.testing.trace import Trace
from kvpush.testing.violations import Stuck, Violation
from kvpush.testing.world import World

__all__ = [
    "Account",
    "DecodeEngine",
    "Delivery",
    "Engine",
    "FakeClock",
    "FakeFabric",
    "FakeNetwork",
    "FakeTransport",
    "FakeWrite",
    "InTransit",
    "Observer",
    "Operation",
    "PrefillEngine",
    "Push",
    "Receive",
    "Stuck",
    "Trace",
    "Violation",
    "World",
    "WriteState",
]
