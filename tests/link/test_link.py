"""kvpush.link over real sockets, on loopback only: links open, carry and close, whatever stands at the other end.

No test sleeps to let something happen: they poll as the loop does, until it happened or a deadline passed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpush import link as link_module
from kvpush.config import Config
from kvpush.endpoint import Endpoint, parse_listen
from kvpush.errors import ConfigurationError
from kvpush.link import Dialer, FdLedger, LinkClosed, LinkMessage, LinkOpened, Listener, make_context

FAR_S = 20.0  # a wait this long has failed; a loaded machine is slow, not wrong
CONFIG = Config(handshake_timeout_s=0.5)


class Loop:
    """One end with its own poller, turned by hand as its owner's loop would."""

    def __init__(self, context: zmq.Context, make: Callable[[zmq.Context, zmq.Poller], Listener | Dialer]) -> None:
        self.poller = zmq.Poller()
        self.end = make(context, self.poller)
        self.events: list = []

    def turn(self, limit: int = 64) -> list:
        """Sleep until there is something, at most a little, and take it."""
        ready = dict(self.poller.poll(10))
        new = self.end.receive(limit, ready) if isinstance(self.end, Dialer) else self.end.receive(limit)
        self.events += new
        return new

    def of(self, kind: type, link: object = None) -> list:
        return [event for event in self.events if isinstance(event, kind) and link in (None, event.link)]

    def closed(self, link: object = None) -> LinkClosed | None:
        return next(iter(self.of(LinkClosed, link)), None)


def turn_until(condition: Callable[[], object], *loops: Loop, timeout_s: float = FAR_S):
    """Turn the loops until the condition holds, and return what it returned."""
    give_up_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < give_up_s, [loop.events[-5:] for loop in loops]
        for loop in loops:
            loop.turn()
    return found


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = make_context()
    yield context
    started_s = time.monotonic()
    context.term()
    assert time.monotonic() - started_s < 1


@pytest.fixture
def ends(context) -> Iterator[Callable[..., Loop]]:
    """Makes loops, and closes them afterwards, within a second."""
    loops: list[Loop] = []

    def listener(listen: object = "127.0.0.1:0", config: Config = CONFIG) -> Loop:
        loops.append(Loop(context, lambda c, p: Listener(c, p, parse_listen(listen), config)))
        return loops[-1]

    def dialer(config: Config = CONFIG, **options) -> Loop:
        loops.append(Loop(context, lambda c, p: Dialer(c, p, config, **options)))
        return loops[-1]

    ends.listener, ends.dialer = listener, dialer
    yield ends
    started_s = time.monotonic()
    for loop in loops:
        loop.end.close()
        loop.end.close()
        assert not loop.poller.sockets
    assert time.monotonic() - started_s < 1


@contextlib.contextmanager
def tcp_server(family: int = socket.AF_INET, host: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.socket(family) as server:
        server.bind((host, 0))
        server.listen(16)
        server.settimeout(FAR_S)
        yield server


def endpoint_of(server: socket.socket) -> Endpoint:
    return Endpoint(*server.getsockname()[:2])


@contextlib.contextmanager
def closed_port() -> Iterator[Endpoint]:
    """A port at which nobody listens, and which nobody can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield endpoint_of(taken)


def connected_pair(ends, config: Config = CONFIG) -> tuple[Loop, Loop, bytes]:
    """A listener and a dialer with link 1 up and heard; the listener's name for it."""
    p, d = ends.listener(config=config), ends.dialer(config)
    d.end.dial(1, p.end.bound)
    turn_until(lambda: d.of(LinkOpened), d)
    assert d.end.send(1, [b"hello"])
    return p, d, turn_until(lambda: p.of(LinkOpened), p)[0].link


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- the way of a link ----------------------------------------------------------------------------------------------


def test_a_link_opens_carries_both_ways_and_closes(ends):
    p, d, peer = connected_pair(ends)
    assert p.events == [LinkOpened(peer), LinkMessage(peer, [b"hello"])]
    assert p.end.send(peer, [b"welcome", b"\0" * 1000])
    turn_until(lambda: d.of(LinkMessage), d)
    assert d.events == [LinkOpened(1), LinkMessage(1, [b"welcome", b"\0" * 1000])]
    assert len(p.end) == len(d.end) == 1
    d.end.hang_up(1)
    closed = turn_until(p.closed, p)
    assert closed == LinkClosed(peer, False, "connection closed by the peer or the network")
    assert len(p.end) == len(d.end) == 0
    assert not p.end.send(peer, [b"anybody?"])
    assert not d.end.send(1, [b"anybody?"])
    d.turn()
    assert not d.closed()


def test_counters(ends):
    p, d, peer = connected_pair(ends)
    p.end.send(peer, [b"abc", b"de"])
    turn_until(lambda: d.of(LinkMessage), d)
    assert (d.end.messages_out, d.end.bytes_out, d.end.messages_in, d.end.bytes_in) == (1, 5, 1, 5)
    assert (p.end.messages_in, p.end.bytes_in, p.end.messages_out, p.end.bytes_out) == (1, 5, 1, 5)


def test_a_closed_listener_is_noticed_after_its_last_words(ends):
    p, d, peer = connected_pair(ends)
    assert p.end.send(peer, [b"goodbye"])
    turn_until(lambda: d.of(LinkMessage), d)
    p.end.close()
    closed = turn_until(d.closed, d)
    assert not closed.refused
    assert str(p.end.bound) in closed.reason
    assert [type(event) for event in d.events] == [LinkOpened, LinkMessage, LinkClosed]


@pytest.mark.parametrize("who", ["dialer", "listener"])
def test_last_words_are_carried_if_there_is_time_to_linger(ends, who):
    p, d, peer = connected_pair(ends)
    if who == "dialer":
        for i in range(20):
            assert d.end.send(1, [b"%d" % i])
        d.end.hang_up(1, linger_s=0.5)
        turn_until(p.closed, p)
        assert [event.frames for event in p.of(LinkMessage)] == [[b"hello"]] + [[b"%d" % i] for i in range(20)]
    else:
        assert p.end.send(peer, [b"goodbye"])
        p.end.close(linger_s=0.5)
        turn_until(d.closed, d)
        assert [event.frames for event in d.of(LinkMessage)] == [[b"goodbye"]]


def test_what_arrived_before_the_end_is_delivered_before_the_end(ends):
    """Unread messages outlive their connection, on both sides."""
    p, d, peer = connected_pair(ends)
    for i in range(30):
        assert p.end.send(peer, [b"%d" % i])
    turn_until(lambda: d.of(LinkMessage), d)
    p.end.close(linger_s=0.5)
    turn_until(d.closed, d)
    assert [type(event) for event in d.events] == [LinkOpened] + [LinkMessage] * 30 + [LinkClosed]


def test_a_listener_that_hears_of_the_end_first_still_delivers_what_came_before(ends):
    p, d, peer = connected_pair(ends)
    for i in range(30):
        assert d.end.send(1, [b"%d" % i])
    d.end.hang_up(1, linger_s=5)
    assert p.end._monitor.socket.poll(FAR_S * 1000)
    p.turn()
    assert p.events[0] == LinkOpened(peer)
    assert [event.frames for event in p.of(LinkMessage)] == [[b"hello"]] + [[b"%d" % i] for i in range(30)]
    assert p.events[-1] == p.closed(peer)
    assert len(p.of(LinkClosed)) == 1


def test_a_link_is_one_connection(ends):
    """A dialer whose loop is slow to hear of the end does not connect again meanwhile."""
    p, d, _ = connected_pair(ends)
    p.end.close()
    again = ends.listener(p.end.bound.address)
    assert not again.end._monitor.socket.poll(300)
    turn_until(d.closed, d)


def test_order_is_kept_and_nothing_is_repeated(ends):
    p, d, peer = connected_pair(ends)
    sent = 0
    while sent < 2000:
        sent += d.end.send(1, [b"%d" % sent, b"x" * 100])
        if sent % 50 == 0:
            p.turn()
    turn_until(lambda: len(p.of(LinkMessage)) == 2001, p)
    assert [event.frames[0] for event in p.of(LinkMessage)[1:]] == [b"%d" % i for i in range(2000)]


def test_receive_keeps_its_limit_and_serves_links_in_turn(ends):
    p, d = ends.listener(), ends.dialer()
    for link in (1, 2, 3):
        d.end.dial(link, p.end.bound)
    turn_until(lambda: len(d.of(LinkOpened)) == 3, d)
    for link in (1, 2, 3):
        d.end.send(link, [b"hello %d" % link])
    turn_until(lambda: len(p.of(LinkMessage)) == 3, p)
    names = {event.frames[0][-1:]: event.link for event in p.of(LinkMessage)}
    for name in (b"1", b"2", b"3"):
        for _ in range(40):
            assert p.end.send(names[name], [name])
    # both the poll and the look without one keep the limit
    turn_until(
        lambda: all(s.poll(0) for s, _ in d.poller.sockets if isinstance(s, zmq.Socket) and s.type == zmq.DEALER)
    )
    first = d.turn(limit=6)
    assert sorted(event.link for event in first) == [1, 1, 2, 2, 3, 3]
    second = d.end.receive(6)
    assert len(second) == 6
    d.events += second
    # nor does a limit below the number of links favour the first ones
    assert sorted(event.link for _ in range(6) for event in d.turn(limit=1)) == [1, 1, 2, 2, 3, 3]
    turn_until(lambda: len(d.of(LinkMessage)) == 120, d)


def test_a_limit_in_bytes_ends_a_receive_with_the_message_that_reaches_it_on_both_ends(ends):
    p, d, peer = connected_pair(ends)
    for _ in range(10):
        assert d.end.send(1, [b"x" * 1000])
        assert p.end.send(peer, [b"x" * 1000])
    for end in (p.end, d.end):
        turns = []
        turn_until(lambda end=end, turns=turns: turns.append(len(end.receive(64, limit_bytes=2500))) or sum(turns) >= 9)
        assert max(turns) == 3, turns


def test_a_link_with_huge_messages_takes_turns_with_the_others_on_the_listener(ends):
    p, d = ends.listener(), ends.dialer()
    for link in (1, 2):
        d.end.dial(link, p.end.bound)
    turn_until(lambda: len(d.of(LinkOpened)) == 2, d)
    for _ in range(20):
        assert d.end.send(1, [b"x" * 1_000_000])
    assert d.end.send(2, [b"small"])
    turn_until(lambda: p.poller.poll(0))
    sizes = []
    turn_until(
        lambda: sizes.extend(len(e.frames[0]) for e in p.end.receive(64, 1) if isinstance(e, LinkMessage)) or 5 in sizes
    )
    assert len(sizes) < 20, "the small one did not wait for all of the huge ones"


def test_receive_is_right_without_a_poll(ends):
    p, d = ends.listener(), ends.dialer()
    d.end.dial(1, p.end.bound)
    events: list = []
    give_up_s = time.monotonic() + FAR_S
    while LinkOpened(1) not in events:
        assert time.monotonic() < give_up_s
        events += d.end.receive(10)
    assert d.end.send(1, [b"hello"])
    turn_until(lambda: p.of(LinkMessage), p)
    p.end.close()
    while not isinstance(events[-1], LinkClosed):
        assert time.monotonic() < give_up_s
        events += d.end.receive(10)


def test_idle_links_are_not_looked_at(ends, monkeypatch):
    p, d, _ = connected_pair(ends)
    d.turn()
    looked = []
    monkeypatch.setattr(link_module._Monitor, "drain", lambda self: looked.append(self) or iter(()))
    monkeypatch.setattr(Dialer, "_receive_one", lambda *args: looked.append(args))
    assert d.end.receive(64, {}) == []
    assert not looked
    d.end.receive(64)
    assert looked


def test_the_limit_of_zero_still_sees_links_come_and_go(ends):
    p, d, peer = connected_pair(ends)
    p.end.close()
    turn_until(d.closed, d)
    assert d.end.receive(0) == []


def test_a_forgotten_link_is_silent(ends):
    p, d, peer = connected_pair(ends)
    p.end.forget(peer)
    p.end.forget(peer)
    p.end.forget(b"nobody")
    assert len(p.end) == 0
    assert not p.end.send(peer, [b"x"])
    d.end.send(1, [b"still here"])
    turn_until(lambda: p.end.messages_ignored, p)
    d.end.hang_up(1)
    d.end.dial(2, p.end.bound)
    turn_until(lambda: d.of(LinkOpened, 2), d)
    d.end.send(2, [b"new"])
    turn_until(lambda: len(p.of(LinkOpened)) == 2, p)
    assert [event.frames for event in p.of(LinkMessage)] == [[b"hello"], [b"new"]]
    assert not p.closed()


def test_hang_up_of_links_in_every_state(ends):
    d = ends.dialer()
    with tcp_server() as silent, closed_port() as nobody:
        d.end.dial(1, endpoint_of(silent))
        d.end.dial(2, Endpoint("fe80::1%no-such", 5600))  # fails at once
        d.end.dial(3, nobody)
        for link in (1, 2, 3, 4):
            d.end.hang_up(link)
        assert len(d.end) == 0
        assert d.end.deadline_s() == float("inf")
        assert d.turn() == []


# --- a peer's process dies ------------------------------------------------------------------------------------------

PEER = """
import sys, zmq
from kvpush.config import Config
from kvpush.endpoint import parse_address
from kvpush.link import Dialer, make_context
context, poller = make_context(), zmq.Poller()
dialer = Dialer(context, poller, Config())
dialer.dial(1, parse_address(sys.argv[1]))
while True:
    for event in dialer.receive(10, dict(poller.poll())):
        if type(event).__name__ == "LinkOpened":
            dialer.send(1, [b"hello"])
"""


@pytest.mark.processes
def test_a_killed_peer_is_noticed_at_once(ends, record_property):
    p = ends.listener()
    took_ms = []
    for _ in range(3):
        p.events.clear()
        with subprocess.Popen([sys.executable, "-c", PEER, str(p.end.bound)]) as peer:
            turn_until(lambda: p.of(LinkMessage), p, timeout_s=60)
            peer.send_signal(signal.SIGKILL)
            killed_s = time.monotonic()
            turn_until(p.closed, p)
            took_ms.append((time.monotonic() - killed_s) * 1000)
    record_property("noticed_ms", [round(ms, 1) for ms in took_ms])
    print("noticed after ms:", took_ms)
    assert min(took_ms) < 500  # measured: 1 to 10 ms


# --- h4: addresses --------------------------------------------------------------------------------------------------


def reachable(p: Loop, d: Loop, address: Endpoint) -> bool:
    link = next(numbers)
    d.end.dial(link, address)
    turn_until(lambda: d.of(LinkOpened, link) or d.closed(link), d, p)
    d.end.hang_up(link)
    return bool(d.of(LinkOpened, link))


numbers = itertools.count(100)


def has_ipv6_loopback() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6_loopback(), reason="no ::1 on this machine")


@pytest.mark.parametrize(
    ("listen", "host"),
    [
        ("127.0.0.1:0", "127.0.0.1"),
        ("localhost:0", None),
        ("lo:0", "127.0.0.1"),
        ("0.0.0.0:0", "0.0.0.0"),
        pytest.param("[::1]:0", "::1", marks=needs_ipv6),
        pytest.param(("::1", 0), "::1", marks=needs_ipv6),
        pytest.param("[::1%lo]:0", "::1", marks=needs_ipv6),
        pytest.param("[::ffff:127.0.0.1]:0", "::ffff:127.0.0.1", marks=needs_ipv6),
        pytest.param("*:0", "::", marks=needs_ipv6),
        pytest.param("[::]:0", "::", marks=needs_ipv6),
    ],
    ids=repr,
)
def test_h4_loopback_forms_bind_and_connect(ends, listen, host):
    p, d = ends.listener(listen), ends.dialer()
    bound = p.end.bound
    assert bound.port > 0
    assert bound.host == host or (host is None and bound.host in ("127.0.0.1", "::1"))
    dial_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound.host, bound.host)
    assert reachable(p, d, Endpoint(dial_host, bound.port))


@needs_ipv6
@pytest.mark.parametrize(
    ("listen", "by_ipv4", "by_mapped", "by_ipv6"),
    [
        ("127.0.0.1:0", True, True, False),
        ("[::1]:0", False, False, True),
        ("0.0.0.0:0", True, True, False),
        ("*:0", True, True, True),
        ("[::]:0", True, True, True),
    ],
)
def test_h4_families(ends, listen, by_ipv4, by_mapped, by_ipv6):
    p, d = ends.listener(listen), ends.dialer()
    hosts = {"127.0.0.1": by_ipv4, "::ffff:127.0.0.1": by_mapped, "::1": by_ipv6}
    assert {host: reachable(p, d, Endpoint(host, p.end.bound.port)) for host in hosts} == hosts


def test_h4_ipv6_is_enabled_only_where_the_host_needs_it(ends):
    p, d = ends.listener(), ends.dialer()
    d.end.dial(1, p.end.bound)
    dealers = [each for each, _ in d.poller.sockets if isinstance(each, zmq.Socket) and each.type == zmq.DEALER]
    assert [each.ipv6 for each in (*dealers, p.end._socket)] == [0, 0]


def link_local_on_loopback() -> str | None:
    with open("/proc/net/if_inet6") as table:
        rows = [line.split() for line in table]
    for digits, _, _, _, _, name in rows:
        if name == "lo" and digits.startswith("fe80"):
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)) + "%lo"
    return None


def test_h4_scope_ids(ends):
    host = link_local_on_loopback()
    if host is None:
        pytest.skip("lo has no link-local address (ip -6 addr add fe80::1/64 dev lo)")
    p, d = ends.listener((host, 0)), ends.dialer()
    assert reachable(p, d, Endpoint(host, p.end.bound.port))


def test_h4_a_scope_that_names_no_interface(ends):
    with pytest.raises(ConfigurationError, match="no-such"):
        ends.listener("[fe80::1%no-such]:0")
    d = ends.dialer()
    d.end.dial(1, Endpoint("fe80::1%no-such", 5600))
    assert d.end.deadline_s() < time.monotonic()  # so the loop does not sleep over it
    [closed] = d.turn()
    assert closed.link == 1
    assert not closed.refused
    assert "fe80::1%no-such" in closed.reason


def fake_names(monkeypatch, names: dict[str, list[str]]) -> None:
    """Names that resolve to these addresses, in this order; all others do not exist."""

    def look_up(host: str, port: int, **_: object) -> list:
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(None, None, None, "", (address, port, 0, 0)) for address in names[host]]

    monkeypatch.setattr(link_module.network, "getaddrinfo", look_up)


@needs_ipv6
@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
@pytest.mark.parametrize("addresses", [["::1", "127.0.0.1"], ["127.0.0.1", "::1"]], ids=["AAAA first", "A first"])
def test_h4_all_addresses_of_a_name_are_tried(ends, monkeypatch, listen, addresses):
    fake_names(monkeypatch, {"localhost": addresses})
    p, d = ends.listener(listen), ends.dialer()
    assert reachable(p, d, Endpoint("localhost", p.end.bound.port))


@needs_ipv6
def test_h4_a_name_with_only_an_ipv6_address(ends, monkeypatch):
    fake_names(monkeypatch, {"only-six": ["::1"]})
    p, d = ends.listener("only-six:0"), ends.dialer()
    assert p.end.bound.host == "::1"
    assert reachable(p, d, Endpoint("only-six", p.end.bound.port))


@needs_ipv6
def test_h4_a_silent_first_address_leaves_time_for_the_second(ends, monkeypatch):
    fake_names(monkeypatch, {"two": ["::1", "127.0.0.1"]})
    p, d = ends.listener(), ends.dialer(Config(handshake_timeout_s=2))
    with socket.socket(socket.AF_INET6) as silent:
        silent.bind(("::1", p.end.bound.port))
        silent.listen()
        assert reachable(p, d, Endpoint("two", p.end.bound.port))


def test_a_name_is_refused_only_if_all_its_addresses_refuse(ends, monkeypatch):
    fake_names(monkeypatch, {"two": ["127.0.0.2", "127.0.0.1"]})
    d = ends.dialer()
    with tcp_server() as silent:
        d.end.dial(1, Endpoint("two", silent.getsockname()[1]))
        assert not turn_until(lambda: d.closed(1), d).refused
    with closed_port() as nobody:
        d.end.dial(2, Endpoint("two", nobody.port))
        assert turn_until(lambda: d.closed(2), d).refused


def test_a_name_that_refuses_in_part_is_not_refused(ends, monkeypatch):
    fake_names(monkeypatch, {"two": ["127.0.0.2", "127.0.0.1"]})
    d = ends.dialer(Config(handshake_timeout_s=30))
    with tcp_server(host="127.0.0.2") as server, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", server.getsockname()[1]))
        d.end.dial(1, Endpoint("two", server.getsockname()[1]))
        turn_until(lambda: select_readable(server), d)
        server.accept()[0].close()
        assert not turn_until(lambda: d.closed(1), d).refused


def select_readable(server: socket.socket) -> bool:
    return bool(select.select([server], [], [], 0)[0])


# --- name look-ups --------------------------------------------------------------------------------------------------


def test_a_name_that_does_not_exist_ends_the_link(ends, monkeypatch):
    fake_names(monkeypatch, {})
    d = ends.dialer()
    d.end.dial(1, Endpoint("nobody.example", 5600))
    closed = turn_until(d.closed, d)
    assert not closed.refused
    assert "nobody.example" in closed.reason
    with pytest.raises(ConfigurationError, match=r"nobody\.example"):
        ends.listener("nobody.example:0")


def test_a_slow_name_server_stops_nobody_else(ends, monkeypatch):
    p, d, peer = connected_pair(ends)
    answer = threading.Event()
    asked = []

    def slow(host: str, port: int, **_: object) -> list:
        asked.append(host)
        assert answer.wait(FAR_S)
        return [(None, None, None, "", (p.end.bound.host, port))]

    monkeypatch.setattr(link_module.network, "getaddrinfo", slow)
    threads_before = threading.active_count()
    d.end.dial(2, Endpoint("slow.example", p.end.bound.port))
    d.end.dial(3, Endpoint("slow.example", p.end.bound.port))
    started_s = time.monotonic()
    assert d.end.send(1, [b"ping"])
    turn_until(lambda: len(p.of(LinkMessage)) == 2, p, d)
    assert p.end.send(peer, [b"pong"])
    turn_until(lambda: d.of(LinkMessage), p, d)
    assert threading.active_count() == threads_before + 1  # one look-up for both
    closed = turn_until(lambda: d.closed(2) and d.closed(3), d)
    assert CONFIG.handshake_timeout_s <= time.monotonic() - started_s < CONFIG.handshake_timeout_s + 2
    assert "look-up" in closed.reason
    # the late answer is used by whoever waits for it now
    d.end.dial(4, Endpoint("slow.example", p.end.bound.port))
    answer.set()
    turn_until(lambda: d.of(LinkOpened, 4), d)
    assert asked == ["slow.example"]
    assert not d.of(LinkOpened, 2)
    assert not d.of(LinkOpened, 3)


def test_lookups_are_bounded_and_close_does_not_wait_for_them(ends, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(link_module.network, "getaddrinfo", lambda *a, **k: answer.wait(FAR_S) and [])
    d = ends.dialer()
    threads_before = threading.active_count()
    for i in range(link_module.MAX_LOOKUPS + 1):
        d.end.dial(i, Endpoint(f"slow-{i}.example", 5600))
    assert threading.active_count() == threads_before + link_module.MAX_LOOKUPS
    [closed] = d.turn()
    assert closed.link == link_module.MAX_LOOKUPS
    assert "too many" in closed.reason
    started_s = time.monotonic()
    d.end.close()
    assert time.monotonic() - started_s < 0.5
    answer.set()
    give_up_s = time.monotonic() + FAR_S
    while threading.active_count() > threads_before:
        assert time.monotonic() < give_up_s


def test_a_name_without_addresses(ends, monkeypatch):
    monkeypatch.setattr(link_module.network, "getaddrinfo", lambda *a, **k: [])
    d = ends.dialer()
    d.end.dial(1, Endpoint("empty.example", 5600))
    assert "empty.example" in turn_until(d.closed, d).reason
    with pytest.raises(ConfigurationError, match=r"empty\.example"):
        ends.listener("empty.example:0")


# --- a7, g4: dials that fail ----------------------------------------------------------------------------------------


def test_a_refused_dial_is_known_at_once(ends):
    d = ends.dialer(Config(handshake_timeout_s=30))
    with closed_port() as nobody:
        started_s = time.monotonic()
        d.end.dial(1, nobody)
        closed = turn_until(d.closed, d)
        assert time.monotonic() - started_s < 5
        assert closed.refused
        assert str(nobody) in closed.reason
        assert len(d.end) == 0
        d.end.dial(1, nobody)  # the number is free again
        turn_until(lambda: len(d.of(LinkClosed)) == 2, d)


GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x00" + b"NULL" + b"\0" * 16 + b"\0" + b"\0" * 31


@pytest.mark.parametrize("says", [b"", GREETING[:11], GREETING, b"HTTP/1.1 400 Bad Request\r\n\r\n" * 30, b"\0" * 999])
def test_a7_a_black_hole_ends_the_link_in_time(ends, says):
    d = ends.dialer()
    with tcp_server() as server:
        started_s = time.monotonic()
        d.end.dial(1, endpoint_of(server))
        conversation, _ = server.accept()
        with conversation:
            conversation.sendall(says)
            # asleep in between: no more is needed to wake the loop than its sockets and the deadline
            while not d.closed():
                timeout_s = max(d.end.deadline_s() - time.monotonic(), 0)
                d.events += d.end.receive(64, dict(d.poller.poll(int(timeout_s * 1000) + 1)))
            took_s = time.monotonic() - started_s
    assert not d.of(LinkOpened)
    assert not d.closed().refused
    assert str(endpoint_of(server)) in d.closed().reason if server.fileno() >= 0 else True
    assert took_s < CONFIG.handshake_timeout_s * 1.2 + 1


@pytest.mark.parametrize("says", [b"", GREETING[:11], GREETING])
def test_a7_a_peer_that_hangs_up_during_the_handshake(ends, says):
    d = ends.dialer(Config(handshake_timeout_s=30))
    with tcp_server() as server:
        d.end.dial(1, endpoint_of(server))
        conversation, _ = server.accept()
        conversation.sendall(says)
        conversation.close()
        closed = turn_until(d.closed, d)
    assert not closed.refused  # somebody listens there
    assert "handshake" in closed.reason


@pytest.mark.parametrize("late", [False, True])
def test_a7_a_full_backlog_is_silence_not_refusal(ends, late):
    """The nearest thing to a dropped packet that loopback has to offer: a connection that never comes up."""
    d = ends.dialer()
    with socket.socket() as server, contextlib.ExitStack() as queued:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            waiting = queued.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        d.end.dial(1, endpoint_of(server))
        if late:  # ZeroMQ's own time-out is in the monitor by then, and looks like a refusal
            late_s = time.monotonic() + 1
            turn_until(lambda: time.monotonic() > late_s)
        closed = turn_until(d.closed, d)
    assert not closed.refused


def test_g4_a_thousand_failed_dials_leak_nothing(ends):
    d = ends.dialer()
    d.turn()
    with closed_port() as nobody:

        def fail(count: int) -> None:
            for _ in range(count):
                d.end.dial(1, nobody)
                turn_until(d.closed, d)
                d.events.clear()

        fail(20)
        fds, threads = settled_fds(), threading.active_count()
        fail(1000)
        assert settled_fds(at_most=fds) <= fds
        assert threading.active_count() == threads
        assert len(d.poller.sockets) == 1  # the look-ups' wake-up


def test_g4_black_holes_leak_nothing(ends):
    d = ends.dialer(Config(handshake_timeout_s=0.2))
    with tcp_server() as server:
        d.end.dial(0, endpoint_of(server))
        turn_until(d.closed, d)
    fds = settled_fds()
    d.events.clear()
    with tcp_server() as server:
        for link in range(50):
            d.end.dial(link, endpoint_of(server))
        turn_until(lambda: len(d.of(LinkClosed)) == 50, d)
    assert settled_fds(at_most=fds) <= fds


def settled_fds(at_most: int | None = None) -> int:
    """Descriptors, once ZeroMQ's own threads have closed what they were told to close."""
    give_up_s = time.monotonic() + FAR_S
    calm_since_s, fds = time.monotonic(), open_fds()
    while time.monotonic() < give_up_s:
        if (now := open_fds()) != fds:
            calm_since_s, fds = time.monotonic(), now
        if (fds <= at_most) if at_most is not None else time.monotonic() - calm_since_s > 0.2:
            break
    return fds


def test_no_sockets_left_ends_the_link(ends):
    context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, 8)
    poller = zmq.Poller()
    dialer = Dialer(context, poller, CONFIG)
    with tcp_server() as server:
        for link in range(5):
            dialer.dial(link, endpoint_of(server))
        closed = dialer.receive(1)
        assert closed
        assert all("cannot dial" in event.reason and not event.refused for event in closed)
        assert len(closed) + len(dialer) == 5
        dialer.close()
    context.term()


# --- strangers at the listener --------------------------------------------------------------------------------------


def works(p: Loop, d: Loop) -> bool:
    """A new link comes up and carries a message both ways."""
    link = next(numbers)
    d.end.dial(link, p.end.bound)
    turn_until(lambda: d.of(LinkOpened, link), d, p)
    assert d.end.send(link, [b"link %d" % link])
    peer = turn_until(lambda: [e.link for e in p.of(LinkMessage) if e.frames == [b"link %d" % link]], p)[0]
    assert p.end.send(peer, [b"back"])
    turn_until(lambda: d.of(LinkMessage, link), d, p)
    return True


JUNK = [
    b"",
    b"junk" * 100,
    b"\xff" * 64,
    b"\0" * 300,
    GREETING[:11],
    GREETING[:33],
    GREETING + b"\x04\xff",
    b"GET / HTTP/1.0\r\n\r\n",
]
JUNK += [b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\x7f" * 200, b"\x01\0" + b"\x05\0hello", os.urandom(4096)]


@pytest.mark.parametrize("hangs_up", [True, False])
def test_raw_junk_does_not_hurt_the_listener(ends, hangs_up):
    p, d, peer = connected_pair(ends)
    with contextlib.ExitStack() as strangers:
        for junk in JUNK:
            stranger = strangers.enter_context(socket.create_connection(p.end.bound.address))
            stranger.sendall(junk)
            if hangs_up:
                stranger.close()
            p.turn()
        assert works(p, d)
    assert not p.closed(peer)
    assert p.end.send(peer, [b"still there?"])


def test_a_peer_that_chooses_its_own_routing_id_is_ignored(ends, context):
    p, d = ends.listener(), ends.dialer()
    for identity in (b"p0", b"x" * 255, b"abcde"):
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.routing_id = identity
            stranger.connect(p.end.bound.zmq())
            ignored = p.end.messages_ignored
            stranger.send(b"hello")
            turn_until(lambda ignored=ignored: p.end.messages_ignored > ignored, p)
    assert p.events == []
    assert works(p, d)


def test_a_loop_that_stands_still_while_strangers_come_and_go_stops_no_other(ends):
    """All links of a context share one I/O thread, which must not wait for a monitor that nobody reads."""
    still, p, d = ends.listener(), ends.listener(), ends.dialer()
    for _ in range(800):
        socket.create_connection(still.end.bound.address).close()
    assert works(p, d)
    still.turn()
    assert works(still, d)


@pytest.mark.parametrize("identity", [b"", b"old"])
def test_a_stranger_that_speaks_zmtp_1_is_ignored(ends, identity):
    """Its messages are delivered by ZeroMQ, but do not tell by which descriptor they came."""
    p, d, peer = connected_pair(ends)

    def frame(body: bytes, flags: int = 0) -> bytes:
        return bytes([len(body) + 1, flags]) + body

    with socket.create_connection(p.end.bound.address) as stranger:
        stranger.sendall(frame(identity) + frame(b"kvpush/1", 1) + frame(b"\x80") + frame(b"more"))
        turn_until(lambda: p.end.messages_ignored == 2, p)
        assert works(p, d)
    assert len(p.of(LinkOpened)) == 2
    assert not p.closed()


def test_an_oversize_message_closes_only_its_own_link(ends):
    small = dataclasses.replace(CONFIG, max_message_bytes=1000)
    p, d, peer = connected_pair(ends, small)
    d.end.dial(2, p.end.bound)
    turn_until(lambda: d.of(LinkOpened, 2), d)
    assert d.end.send(2, [b"fits", b"x" * 1000])
    turn_until(lambda: len(p.of(LinkMessage)) == 2, p)
    assert d.end.send(2, [b"too big", b"x" * 1001])
    turn_until(lambda: d.closed(2) and p.closed(), d, p)
    assert p.closed().link != peer
    assert len(p.of(LinkMessage)) == 2
    assert p.end.send(peer, [b"still there"])
    turn_until(lambda: d.of(LinkMessage, 1), d)
    assert not p.end.send(p.closed().link, [b"x"])


def test_an_oversize_answer_closes_only_its_own_link(ends):
    p, d, peer = connected_pair(ends, dataclasses.replace(CONFIG, max_message_bytes=1000))
    assert p.end.send(peer, [b"x" * 1001])
    turn_until(lambda: d.closed(1) and p.closed(peer), d, p)
    assert works(p, d)


def test_j4_a_slow_reader_fills_only_its_own_queue(ends):
    config = dataclasses.replace(CONFIG, max_registrations_per_engine=100)
    p, d, peer = connected_pair(ends, config)
    slow = ends.dialer(config)
    slow.end.dial(1, p.end.bound)
    turn_until(lambda: slow.of(LinkOpened), slow)
    slow.end.send(1, [b"hello"])
    stuck = turn_until(lambda: [e.link for e in p.of(LinkOpened) if e.link != peer], p)[0]
    answer = [b"x" * 10_000]
    started_s = time.monotonic()
    sent = 0
    while p.end.send(stuck, answer):  # nobody reads at the other end
        sent += 1
        assert sent < 100_000
    # the queue can only fill up for good once the kernel's buffers are full as well
    turn_until(lambda: not any(p.end.send(stuck, answer) for _ in range(20)), p)
    assert time.monotonic() - started_s < FAR_S
    assert p.end.send(peer, [b"you are served"])
    turn_until(lambda: d.of(LinkMessage), d)
    assert works(p, d)
    assert not p.closed(stuck)  # full is not gone


def test_j4_a_reader_that_stays_slow_is_hung_up_by_and_by(ends):
    config = Config(heartbeat_interval_s=0.1, liveness_timeout_s=0.4, max_registrations_per_engine=100)
    p, d, peer = connected_pair(ends, config)
    for _ in range(1000):
        p.end.send(peer, [b"x" * 10_000])
    turn_until(lambda: p.closed(peer), p)


def test_a_silent_but_living_peer_is_not_hung_up(ends):
    """ZeroMQ's own heartbeats are answered without any help of the peer's loop."""
    config = Config(heartbeat_interval_s=0.1, liveness_timeout_s=0.2)
    p, d, peer = connected_pair(ends, config)
    give_up_s = time.monotonic() + 1.5
    while time.monotonic() < give_up_s:
        p.turn()
    assert not p.closed()


# --- h8, g9: binding ------------------------------------------------------------------------------------------------


def listening_addresses() -> set[tuple[str, int]]:
    found = set()
    for path, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        with contextlib.suppress(FileNotFoundError), open(path) as table:
            for line in list(table)[1:]:
                _, local, _, state = line.split()[:4]
                if state == "0A":
                    digits, port = local.split(":")
                    words = [int(digits[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(digits), 8)]
                    found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def test_j4_only_what_was_asked_for_is_listened_on(ends):
    p = ends.listener()
    port = p.end.bound.port
    assert {host for host, found in listening_addresses() if found == port} == {"127.0.0.1"}
    p.end.close()
    assert port not in {found for _, found in listening_addresses()}


def test_a_taken_port_is_named(ends):
    p = ends.listener()
    fds = settled_fds()
    for _ in range(3):
        with pytest.raises(ConfigurationError, match=rf"{p.end.bound}.*in use"):
            ends.listener(p.end.bound.address)
    assert settled_fds(at_most=fds) <= fds


def test_a_taken_port_is_not_evaded_to_another_address_of_the_name(ends, monkeypatch):
    p = ends.listener()
    fake_names(monkeypatch, {"two": ["127.0.0.1", "127.0.0.2"]})
    with pytest.raises(ConfigurationError, match="in use"):
        ends.listener(("two", p.end.bound.port))


def test_a_name_is_bound_to_the_first_address_that_is_here(ends, monkeypatch):
    fake_names(monkeypatch, {"two": ["192.0.2.77", "127.0.0.2"]})
    assert ends.listener("two:0").end.bound.host == "127.0.0.2"


def test_an_address_of_another_machine_cannot_be_bound(ends):
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.77"):
        ends.listener("192.0.2.77:0")


@pytest.mark.parametrize("listen", ["127.0.0.1:0", pytest.param("[::1]:0", marks=needs_ipv6), "*:0"])
def test_g9_the_port_is_free_when_close_returns(ends, context, listen):
    address = None
    fds = None
    for round_ in range(50):
        p = ends.listener(listen if address is None else address)
        address = p.end.bound.address
        d = ends.dialer()
        host = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(address[0], address[0])
        assert reachable(p, d, Endpoint(host, address[1]))  # connections that were up do not keep it
        p.end.close()
        d.end.close()
        if round_ == 5:
            fds = settled_fds()
    assert settled_fds(at_most=fds) <= fds


def test_h8_sixteen_listeners_at_a_barrier(context):
    for _ in range(10):
        barrier, listeners, lock = threading.Barrier(16), [], threading.Lock()

        def start(barrier=barrier, listeners=listeners, lock=lock) -> None:
            barrier.wait()
            listener = Listener(context, zmq.Poller(), parse_listen("127.0.0.1:0"), CONFIG)
            with lock:
                listeners.append(listener)

        threads = [threading.Thread(target=start) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(FAR_S)
        assert len({listener.bound for listener in listeners}) == 16
        for listener in listeners:
            listener.close()


# --- descriptors are re-used ----------------------------------------------------------------------------------------


def test_routing_ids_grow_with_every_connection(ends, context):
    """What FdLedger relies on: not promised by ZeroMQ's manual, but true of every libzmq."""
    p = ends.listener()
    serials = []
    for _ in range(20):
        with context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.connect(p.end.bound.zmq())
            peer.send(b"hello")
            p.events.clear()
            serials.append(link_module._serial(turn_until(lambda: p.of(LinkOpened), p)[0].link))
    assert {(later - sooner) % 2**32 for sooner, later in itertools.pairwise(serials)} == {1}


@pytest.mark.parametrize("seed", range(5))
def test_connections_that_take_each_others_descriptors(ends, context, seed):
    """Peers come, speak and go between two turns of the listener's loop, in an order drawn by chance."""
    chance = random.Random(seed)
    p = ends.listener()
    alive: dict[bytes, zmq.Socket] = {}
    names = (b"peer %d" % i for i in itertools.count())
    try:
        for _ in range(150):
            action = chance.random()
            if action < 0.45 or not alive:
                name = next(names)
                alive[name] = peer = context.socket(zmq.DEALER)
                peer.linger = 100
                peer.connect(p.end.bound.zmq())
                peer.send(name)
            elif action < 0.6:
                name = chance.choice(list(alive))
                alive[name].send(name)
            elif action < 0.9:
                alive.pop(chance.choice(list(alive))).close()
            else:
                p.turn(limit=chance.choice([1, 3, 64]))
        for name, peer in alive.items():
            peer.send(name)
            peer.send(b"last of " + name)

        def settled() -> bool:
            links = {event.frames[0]: event.link for event in p.of(LinkMessage)}
            closed = {event.link for event in p.of(LinkClosed)}
            return (
                {b"last of " + name for name in alive} <= set(links)
                and {name for name, link in links.items() if link not in closed and b"last" not in name} == set(alive)
                and len(p.end) == len(alive)
            )

        turn_until(settled, p)
        by_link: dict[bytes, list] = {}
        for event in p.events:
            by_link.setdefault(event.link, []).append(event)
        for events in by_link.values():
            assert isinstance(events[0], LinkOpened)
            assert all(isinstance(event, LinkMessage) for event in events[1:-1])
            assert (
                len({event.frames[0].removeprefix(b"last of ") for event in events if isinstance(event, LinkMessage)})
                == 1
            )
        for name in alive:
            [link] = {event.link for event in p.of(LinkMessage) if event.frames == [name]}
            assert p.end.send(link, [b"for " + name])
            assert alive[name].poll(FAR_S * 1000)
            assert alive[name].recv() == b"for " + name
    finally:
        for peer in alive.values():
            peer.close(linger=0)


def routing_id(serial: int) -> bytes:
    return b"\0" + (serial % 2**32).to_bytes(4, "big")


A, B, C = map(routing_id, (1, 2, 3))
F = 17


def test_a_connection_that_is_accepted_between_the_monitor_and_the_message(ends, monkeypatch):
    p, d = ends.listener(), ends.dialer()
    d.end.dial(1, p.end.bound)
    turn_until(lambda: d.of(LinkOpened), d)
    assert d.end.send(1, [b"hello"])
    assert p.end._socket.poll(FAR_S * 1000)
    drain, calls = p.end._drain_monitor, itertools.count()
    monkeypatch.setattr(p.end, "_drain_monitor", lambda: next(calls) and drain())  # the first look is too early
    p.turn()
    assert [type(event) for event in p.events] == [LinkOpened, LinkMessage]


class TestInterleavings:
    """The table in FdLedger's docstring, row by row."""

    def test_one_after_the_other(self):
        ledger = FdLedger()
        assert ledger.accepted(F) is None
        assert ledger.heard(A, F) == (True, None)
        assert ledger.disconnected(F) == A
        assert ledger.accepted(F) is None
        assert ledger.heard(B, F) == (True, None)
        assert A not in ledger and B in ledger

    @pytest.mark.parametrize("taken_again", [False, True])
    def test_late_words_of_a_link_that_closed(self, taken_again):
        ledger = FdLedger()
        ledger.accepted(F)
        ledger.heard(A, F)
        ledger.disconnected(F)
        if taken_again:
            ledger.accepted(F)
        assert ledger.heard(A, F) == (False, None)
        assert len(ledger) == 0

    def test_late_words_of_a_stranger(self):
        ledger = FdLedger()
        ledger.accepted(F)
        assert ledger.disconnected(F) is None
        assert ledger.heard(A, F) == (False, None)

    def test_late_words_after_the_next_one_spoke(self):
        ledger = FdLedger()
        ledger.accepted(F)
        ledger.disconnected(F)
        ledger.accepted(F)
        assert ledger.heard(B, F) == (True, None)
        assert ledger.heard(A, F) == (False, None)
        assert B in ledger

    def test_late_words_before_the_next_one_speaks(self):
        ledger = FdLedger()
        ledger.accepted(F)
        ledger.disconnected(F)
        ledger.accepted(F)
        assert ledger.heard(A, F) == (True, None)
        assert ledger.heard(B, F) == (True, A)
        assert A not in ledger and B in ledger
        assert ledger.heard(A, F) == (False, None)
        assert ledger.disconnected(F) == B

    def test_late_words_and_the_next_one_never_speaks(self):
        ledger = FdLedger()
        ledger.accepted(F)
        ledger.disconnected(F)
        ledger.accepted(F)
        ledger.heard(A, F)
        assert ledger.disconnected(F) == A

    def test_an_answer_that_finds_no_way_makes_room(self):
        ledger = FdLedger()
        ledger.accepted(F)
        ledger.disconnected(F)
        ledger.accepted(F)
        ledger.heard(A, F)
        assert ledger.lost(A)
        assert not ledger.lost(A)
        assert ledger.heard(A, F) == (False, None)
        assert ledger.heard(B, F) == (True, None)

    def test_a_forgotten_link_stays_forgotten(self):
        ledger = FdLedger()
        ledger.accepted(F)
        ledger.heard(A, F)
        ledger.lost(A)
        assert ledger.heard(A, F) == (False, None)
        assert ledger.disconnected(F) is None
        ledger.accepted(F)
        assert ledger.heard(B, F) == (True, None)

    def test_a_lost_disconnect_is_made_up_for(self):
        ledger = FdLedger()
        ledger.accepted(F)
        ledger.heard(A, F)
        assert ledger.accepted(F) == A

    def test_descriptors_nobody_knows(self):
        ledger = FdLedger()
        assert ledger.disconnected(F) is None
        assert ledger.heard(A, F) == (False, None)

    @pytest.mark.parametrize("link", [b"", b"p0", b"\0\0\0\1", b"\1\0\0\0\1", b"\0\0\0\0\0\1", b"x" * 255])
    def test_ids_of_the_peers_own_making(self, link):
        ledger = FdLedger()
        ledger.accepted(F)
        assert ledger.heard(link, F) == (False, None)

    def test_the_counter_wraps(self):
        ledger = FdLedger()
        ledger.accepted(F)
        ledger.heard(routing_id(2**32 - 1), F)
        ledger.disconnected(F)
        ledger.accepted(F)
        assert ledger.heard(routing_id(0), F) == (True, None)
        assert ledger.heard(routing_id(2**32 - 1), F) == (False, None)


@dataclasses.dataclass(eq=False)
class Peer:
    """A connection as it truly is."""

    link: bytes
    fd: int
    alive: bool = True
    unread: int = 0
    was_heard: bool = False


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against the truth: peers come, speak and go, their messages arrive in any order across peers, and the
    monitor is read late, but never later than the contract says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = FdLedger()
        self.peers: list[Peer] = []
        self.monitor: list[tuple[str, int]] = []
        self.serial = 2**32 - 5  # wraps soon
        self.opened: set[bytes] = set()
        self.closed: set[bytes] = set()

    @rule()
    def comes(self) -> None:
        fd = next(fd for fd in itertools.count(3) if fd not in {peer.fd for peer in self.peers if peer.alive})
        self.peers.append(Peer(routing_id(self.serial), fd))
        self.serial += 1
        self.monitor.append(("accepted", fd))

    @precondition(lambda self: any(peer.alive for peer in self.peers))
    @rule(data=st.data())
    def speaks(self, data) -> None:
        data.draw(st.sampled_from([peer for peer in self.peers if peer.alive])).unread += 1

    @precondition(lambda self: any(peer.alive for peer in self.peers))
    @rule(data=st.data())
    def goes(self, data) -> None:
        peer = data.draw(st.sampled_from([peer for peer in self.peers if peer.alive]))
        peer.alive = False
        self.monitor.append(("disconnected", peer.fd))

    @rule()
    def drains_the_monitor(self) -> None:
        for what, fd in self.monitor:
            self._closes(getattr(self.ledger, what)(fd))
        self.monitor.clear()

    @precondition(lambda self: any(peer.unread for peer in self.peers))
    @rule(data=st.data())
    def receives(self, data) -> None:
        peer = data.draw(st.sampled_from([peer for peer in self.peers if peer.unread]))
        peer.unread -= 1
        if peer.link in self.ledger:
            return
        self.drains_the_monitor()
        opens, gone = self.ledger.heard(peer.link, peer.fd)
        self._closes(gone)
        peer.was_heard = True
        if opens:
            assert peer.link not in self.opened, "a link opens once"
            self.opened.add(peer.link)
        assert opens or not peer.alive, "a living peer is heard"

    def _closes(self, link: bytes | None) -> None:
        if link is None:
            return
        assert link in self.opened - self.closed, "an open link closes, once"
        self.closed.add(link)
        assert not next(peer for peer in self.peers if peer.link == link).alive, "a living link is never closed"

    @invariant()
    def open_links_are_those_reported(self) -> None:
        open_links = self.opened - self.closed
        assert len(self.ledger) == len(open_links)
        assert all(link in self.ledger for link in open_links)

    @invariant()
    def the_truth_is_known_as_far_as_it_can_be(self) -> None:
        for peer in self.peers:
            is_open = peer.link in self.ledger
            if peer.alive and peer.was_heard:
                assert is_open, "a living peer that was heard is open"
            elif is_open and not self.monitor:
                # a mistake is only made for the descriptor of somebody who has not been heard yet
                assert not peer.alive
                assert any(other.alive and not other.was_heard and other.fd == peer.fd for other in self.peers)

    def teardown(self) -> None:
        """When everybody has spoken or gone, and all is read, the ledger knows exactly who is there."""
        for peer in self.peers:
            peer.unread += peer.alive
        self.drains_the_monitor()
        for peer in self.peers:
            for _ in range(peer.unread):
                if peer.link not in self.ledger:
                    opens, gone = self.ledger.heard(peer.link, peer.fd)
                    self._closes(gone)
                    if opens:
                        self.opened.add(peer.link)
        assert self.opened - self.closed == {peer.link for peer in self.peers if peer.alive}


TestLedgerAgainstTheTruth = LedgerMachine.TestCase
TestLedgerAgainstTheTruth.settings = settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True)


# --- ownership ------------------------------------------------------------------------------------------------------


def test_two_io_threads_are_refused():
    with zmq.Context(io_threads=2) as context, pytest.raises(AssertionError):
        Listener(context, zmq.Poller(), parse_listen("127.0.0.1:0"), CONFIG)


def test_close_is_quick_beside_frozen_peers_and_full_queues(ends):
    p, d, peer = connected_pair(ends)
    for _ in range(2000):
        p.end.send(peer, [b"x" * 10_000])  # nobody reads
        d.end.send(1, [b"x" * 10_000])
    with tcp_server() as silent:
        for link in range(10, 20):
            d.end.dial(link, endpoint_of(silent))
        started_s = time.monotonic()
        d.end.close()
        p.end.close()
        assert time.monotonic() - started_s < 1
