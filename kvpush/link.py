"""The control plane's links on ZeroMQ: a :class:`Listener` on prefill, a :class:`Dialer` on decode.

**Who owns what.** Each end belongs to one loop thread, which alone calls its methods. The owner gives the context
(:func:`make_context`) and the poller, and terminates the context after ``close()``. Sockets are registered in that
poller and unregistered when they close, so the loop sleeps in ``poller.poll()``.

**What wakes the loop.** A message, a connection that came up or went away, a finished name look-up, and, for the
Dialer, the moment that :meth:`Dialer.deadline_s` names: the loop calls ``receive()`` no later than that.

**How it stops.** ``close()`` closes every socket and returns within a fraction of a second, whatever the peers do.
A look-up that is still under way ends by itself on a daemon thread and tells nobody.

A link is one connection. It is never re-established behind the owner's back: when it is gone the owner hears
:class:`LinkClosed` once, and dials again if it wants to. Nothing here decodes a message, and no fault of a peer raises.

What the two ends can and cannot know about a peer that went away:

* The peer's process died or closed: the kernel resets the connection, the monitor says so within milliseconds.
* The peer's host vanished or its process is frozen: the connection looks alive. Heartbeats of the application are the
  witness. The listener's socket also sends ZeroMQ's own, which only see to it that a connection whose host is gone, or
  whose peer has stopped to read, gives its descriptor back some time after ``liveness_timeout_s``.
* ZeroMQ does not say why a dial failed. A connection that was turned away before the timeout met a host without a
  listener (``refused``) or, after some seconds, a router that knows no way; one that ran into the timeout met silence.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import socket as network
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import zmq

from kvpush.config import Config
from kvpush.endpoint import Endpoint
from kvpush.errors import ConfigurationError

_L = TypeVar("_L", bytes, int)
Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

MAX_SOCKETS = 65535  # ZeroMQ's own ceiling; a dialled link takes 3, and the default of 1023 would end at 341 links
RECEIVE_QUEUE_MESSAGES = 32  # per connection, each up to max_message_bytes; beyond it TCP holds the sender back
SEND_QUEUE_SLACK = 64  # room for heartbeats, the handshake and goodbye beside one message per registration
LISTEN_BACKLOG = 1024  # a whole fleet may dial at once after this side restarted
# A link is one connection. Not -1, nor IMMEDIATE: with either, ZeroMQ throws away what came in before a disconnect and
# was not read yet, and with it the peer's last words (why it refused, that it leaves).
NO_RECONNECT_MS = 86_400_000
MAX_LOOKUPS = 16  # names looked up at a time; a dead name server holds each for seconds
UNBIND_TIMEOUT_MS = 500  # measured: below 1 ms. Bounds close() should the I/O thread be busy


def make_context() -> Context:
    """A context that suits both ends. The owner terminates it."""
    context: Context = zmq.Context(io_threads=1)  # FdLedger relies on one: see there
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


@dataclass(frozen=True, slots=True)
class LinkOpened(Generic[_L]):
    """The link can be used. On the listener: its first message has come, and follows this event."""

    link: _L


@dataclass(frozen=True, slots=True)
class LinkMessage(Generic[_L]):
    """A message, undecoded."""

    link: _L
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class LinkClosed(Generic[_L]):
    """The link is gone for good; nothing more is heard of it.

    ``refused``: the dialled host turned the connection away at once: nobody listens at that address.
    It is never true for a connection that once came up. A host that left the network may end a dial early, too, so it
    is a hint and no proof: kvpush.receiver asks the port again before it believes that the process is gone.
    """

    link: _L
    refused: bool
    reason: str


LinkEvent = LinkOpened[_L] | LinkMessage[_L] | LinkClosed[_L]


class FdLedger:
    """Which link lives on which descriptor: pure book-keeping over what a ROUTER and its monitor tell.

    The monitor names connections by descriptor (ACCEPTED, DISCONNECTED), messages carry a routing id and the
    descriptor they came by, and descriptors are re-used at once. What can be relied upon:

    1. The monitor's stream is in order and complete: a descriptor is reported DISCONNECTED before it is closed, hence
       before the kernel gives it out again. (With several I/O threads ACCEPTED could come late: the context has one.)
    2. A connection's ACCEPTED is in the stream before its first message can be received. The listener drains the
       monitor after it received a message from a link it does not know and before it asks :meth:`heard`.
    3. A connection that is gone may still have messages in the ROUTER's queue, which arrive after its DISCONNECTED
       and in any order with those of the descriptor's next owners.
    4. Routing ids are ZeroMQ's own: a zero byte and a 32-bit counter that grows with every connection. On one
       descriptor a later connection has a later id. Ids chosen by a peer are not accepted (:meth:`heard`).

    Interleavings on one descriptor F, with connections A, then B, then C:

    =====================================================  ==========================================================
    seen                                                   result
    =====================================================  ==========================================================
    acc F, msg A, dis F                                    A opens, A closes
    acc F, msg A, dis F, acc F, msg B                      A opens, A closes, B opens
    acc F, msg A, dis F, [acc F,] late msg A               the late one is ignored: A is the newest heard here, and gone
    acc F, dis F, late msg A                               ignored: nobody lives on F
    acc F, dis F, acc F, msg B, late msg A                 B opens; A is older than B: ignored
    acc F, dis F, acc F, late msg A, msg B                 A opens by mistake, and closes when the newer B is heard
    acc F, dis F, acc F, late msg A, dis F                 A opens by mistake, and closes with B, which never spoke
    acc F, dis F                                           nothing: somebody looked in and left
    acc F, msg A, forget A, msg A, dis F                   A opens; silence after that
    =====================================================  ==========================================================

    "By mistake" cannot be told at that moment. It needs a peer that came, spoke and went between two turns of the
    loop, and it heals with the next sign of life on F, or when an answer to A finds no way (:meth:`lost`).
    A link that lives is never closed by mistake. The tables are bounded by the descriptors of this process.
    """

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._fds: dict[bytes, int] = {}  # open links only

    def __len__(self) -> int:
        return len(self._fds)

    def __contains__(self, link: bytes) -> bool:
        return link in self._fds

    def accepted(self, fd: int) -> bytes | None:
        """A connection was accepted. Returns a link that must be gone, because ``fd`` was its own (a lost event)."""
        slot = self._slots.setdefault(fd, _Slot())
        gone = self._vacate(slot)
        slot.connected = True
        return gone

    def disconnected(self, fd: int) -> bytes | None:
        """A connection ended. Returns the open link that lived on it, if any."""
        slot = self._slots.get(fd)
        if slot is None:
            return None
        slot.connected = False
        return self._vacate(slot)

    def heard(self, link: bytes, fd: int) -> tuple[bool, bytes | None]:
        """A message came from a link that is not open. Returns whether it opens, and a link that must be gone.

        The caller has drained the monitor since it received the message.
        """
        serial = _serial(link)
        slot = self._slots.get(fd)
        if serial is None or slot is None or not slot.connected or not slot.is_news(serial):
            return False, None
        gone = self._vacate(slot)
        slot.newest = serial
        slot.link = link
        self._fds[link] = fd
        return True, gone

    def lost(self, link: bytes) -> bool:
        """Drop an open link whose connection may still be up. It never opens again. Returns whether it was open."""
        fd = self._fds.get(link)
        if fd is None:
            return False
        self._vacate(self._slots[fd])
        return True

    def _vacate(self, slot: _Slot) -> bytes | None:
        link, slot.link = slot.link, None
        if link is not None:
            del self._fds[link]
        return link


@dataclass(slots=True)
class _Slot:
    """One descriptor."""

    connected: bool = False
    newest: int | None = None  # serial of the newest connection ever heard on it
    link: bytes | None = None  # the open link on it

    def is_news(self, serial: int) -> bool:
        """Whether a serial is later than all that was heard here; the counter wraps, so "later" is half the circle."""
        return self.newest is None or 0 < (serial - self.newest) % 2**32 < 2**31


def _serial(link: bytes) -> int | None:
    """The counter in a routing id that ZeroMQ made; ``None`` for an id that the peer chose."""
    return int.from_bytes(link[1:], "big") if len(link) == 5 and link[0] == 0 else None


class Listener:
    """Prefill's end: a ROUTER that decode engines dial. A link is known by its routing id.

    A link opens with its first message; a connection that never speaks is never reported. Its end is reported after
    the messages that had already arrived. Raises ConfigurationError when the address cannot be bound.
    """

    def __init__(self, context: Context, poller: zmq.Poller, listen: Endpoint, config: Config) -> None:
        assert context.get(zmq.IO_THREADS) == 1, "FdLedger relies on one I/O thread"
        self.messages_in = self.messages_out = self.bytes_in = self.bytes_out = 0
        self.messages_ignored = 0  # of links forgotten or gone, and of strangers: own routing id, old protocol
        self._poller = poller
        self._ledger = FdLedger()
        self._departed: dict[bytes, str] = {}  # closed in the ledger, reported at the end of receive()
        with contextlib.ExitStack() as undo:
            self._socket = context.socket(zmq.ROUTER)
            undo.callback(self._socket.close, linger=0)
            _set_limits(self._socket, config, send_queue=config.max_registrations_per_engine + SEND_QUEUE_SLACK)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown or full peer is an error, not silence
            self._socket.setsockopt(zmq.BACKLOG, LISTEN_BACKLOG)
            self._socket.setsockopt(zmq.HANDSHAKE_IVL, _milliseconds(config.handshake_timeout_s))
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, _milliseconds(config.liveness_timeout_s))
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _milliseconds(config.liveness_timeout_s))
            self._monitor = _Monitor(context, self._socket, _LISTEN_EVENTS)
            undo.callback(self._monitor.close)
            self.bound = _bind(self._socket, listen)
            undo.pop_all()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor.socket, zmq.POLLIN)

    def __len__(self) -> int:
        return len(self._ledger)

    def receive(self, limit: int, limit_bytes: int = sys.maxsize) -> list[LinkEvent[bytes]]:
        """What has happened, with up to ``limit`` messages, links in turn. Never blocks.

        ``limit_bytes`` is exceeded by at most one message: it ends with the one that reaches it.
        """
        events: list[LinkEvent[bytes]] = []
        self._drain_monitor()
        for _ in range(limit):
            if limit_bytes <= 0:
                break
            try:
                head = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            frames = [self._socket.recv(zmq.NOBLOCK)]
            while self._socket.getsockopt(zmq.RCVMORE):
                frames.append(self._socket.recv(zmq.NOBLOCK))
            limit_bytes -= sum(map(len, frames))
            self._dispatch(head, frames, events)
        events.extend(LinkClosed(link, False, reason) for link, reason in self._departed.items())
        self._departed.clear()
        return events

    def send(self, link: bytes, frames: list[bytes]) -> bool:
        """Queue a message. False when the link is gone or its queue is full. Never blocks."""
        if link not in self._ledger:
            return False
        try:
            self._socket.send_multipart([link, *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as exc:
            if exc.errno != errno.EHOSTUNREACH:
                raise
            if self._ledger.lost(link):
                self._departed[link] = "connection closed: no way to send an answer"
            return False
        self.messages_out += 1
        self.bytes_out += sum(map(len, frames))
        return True

    def forget(self, link: bytes) -> None:
        """Ignore a link from now on, without a LinkClosed. The peer is not hung up: a ROUTER cannot do that."""
        self._ledger.lost(link)
        self._departed.pop(link, None)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the port and every link. What is queued may still be sent for ``linger_s``, in the background; then the
        port is given back by the time that the context is terminated, otherwise before this returns."""
        if self._socket.closed:
            return
        self._poller.unregister(self._socket)
        self._poller.unregister(self._monitor.socket)
        if not linger_s:
            self._unbind()  # the connections end with their port, and what is queued is lost
        self._monitor.close()
        self._socket.close(linger=_milliseconds(linger_s))

    def _unbind(self) -> None:
        """Give the port back before close() returns: closing alone leaves that to the I/O thread, some time later."""
        self._socket.unbind(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        give_up_s = time.monotonic() + UNBIND_TIMEOUT_MS / 1000
        while (left_s := give_up_s - time.monotonic()) > 0 and self._monitor.socket.poll(_milliseconds(left_s)):
            if any(event == zmq.EVENT_CLOSED for event, _ in self._monitor.drain()):
                return

    def _dispatch(self, head: zmq.Frame, frames: list[bytes], events: list[LinkEvent[bytes]]) -> None:
        link = head.bytes
        if link not in self._ledger and link not in self._departed:
            self._drain_monitor()
            fd = _descriptor(head)
            opens, gone = (False, None) if fd is None else self._ledger.heard(link, fd)
            if gone is not None:
                self._departed[gone] = "connection closed: another one has its descriptor"
            if not opens:
                self.messages_ignored += 1
                return
            events.append(LinkOpened(link))
        self.messages_in += 1
        self.bytes_in += sum(map(len, frames))
        events.append(LinkMessage(link, frames))

    def _drain_monitor(self) -> None:
        for event, fd in self._monitor.drain():
            if event == zmq.EVENT_ACCEPTED:
                gone = self._ledger.accepted(fd)
            elif event == zmq.EVENT_DISCONNECTED:
                gone = self._ledger.disconnected(fd)
            else:
                continue
            if gone is not None:
                self._departed[gone] = "connection closed by the peer or the network"


class Dialer:
    """Decode's end: one DEALER per link, dialled once. The owner numbers the links.

    An attempt ends within ``handshake_timeout_s``: in LinkOpened, or in LinkClosed. A name is looked up on a thread
    of its own (ZeroMQ would do it on the I/O thread that serves all links, and say nothing when it fails); its
    addresses are tried in turn.
    """

    def __init__(
        self,
        context: Context,
        poller: zmq.Poller,
        config: Config,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.messages_in = self.messages_out = self.bytes_in = self.bytes_out = 0
        self._context = context
        self._poller = poller
        self._config = config
        self._clock = clock
        self._dials: dict[int, _Dial] = {}
        self._connecting: dict[int, _Dial] = {}  # in the order of their deadlines: all have the same timeout
        self._by_socket: dict[Socket, _Dial] = {}
        self._backlog: deque[_Dial] = deque()  # may have messages that the last receive() had no room for
        self._failed: list[LinkClosed[int]] = []  # failed outside receive(), reported by the next one
        self._resolver = _Resolver()
        poller.register(self._resolver.wakeup_fd, zmq.POLLIN)

    def __len__(self) -> int:
        return len(self._dials)

    def dial(self, link: int, address: Endpoint) -> None:
        """Start to connect. The outcome is an event. ``link`` must not be in use."""
        assert link not in self._dials, f"link {link} is in use"
        dial = _Dial(link, address, deadline_s=self._clock() + self._config.handshake_timeout_s)
        self._dials[link] = self._connecting[link] = dial
        if not _has_interface(address.host):
            # ZeroMQ would find out on its I/O thread, and tell nobody
            self._end(dial, self._failed, f"cannot dial {address}: its scope names no interface of this host")
        elif address.is_numeric:
            dial.candidates.append(address)
            self._connect_next(dial, self._failed)
        elif not self._resolver.look_up(address):
            self._end(dial, self._failed, f"cannot look up {address.host!r}: too many look-ups are under way")

    def deadline_s(self) -> float:
        """When receive() has something to do even if no socket is ready; ``inf`` for never."""
        if self._failed:
            return -math.inf
        return next((dial.deadline_s for dial in self._connecting.values()), math.inf)

    def receive(
        self, limit: int, ready: Iterable[object] | None = None, limit_bytes: int = sys.maxsize
    ) -> list[LinkEvent[int]]:
        """What has happened, with up to ``limit`` messages, links in turn. Never blocks. ``limit_bytes`` as above.

        ``ready`` is what ``poller.poll()`` found readable (``dict(poller.poll())``; strange sockets are ignored), so
        that a thousand idle links cost nothing. Without it every link is looked at.
        A link that has ended is emptied first, which may exceed the limit by what its queue holds.
        """
        events: list[LinkEvent[int]] = [*self._failed]
        self._failed.clear()
        dials = self._ready_dials(ready)
        for address, found in self._resolver.results():
            self._resolved(address, found, events)
        for dial in dials:
            self._follow(dial, events)
        self._receive_messages(limit, limit_bytes, deque(dial for dial in dials if dial.is_open), events)
        self._expire(events)
        return events

    def send(self, link: int, frames: list[bytes]) -> bool:
        """Queue a message. False when the link is not open or its queue is full. Never blocks."""
        dial = self._dials.get(link)
        if dial is None or dial.connection is None or not dial.is_open:
            return False
        try:
            dial.connection.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.messages_out += 1
        self.bytes_out += sum(map(len, frames))
        return True

    def hang_up(self, link: int, linger_s: float = 0.0) -> None:
        """Close a link without a LinkClosed. What is queued may still be sent for ``linger_s``, in the background."""
        dial = self._dials.get(link)
        if dial is not None:
            self._drop(dial, linger_s)
        self._failed = [closed for closed in self._failed if closed.link != link]

    def close(self, linger_s: float = 0.0) -> None:
        """Hang up every link."""
        for dial in list(self._dials.values()):
            self._drop(dial, linger_s)
        self._failed.clear()
        if not self._resolver.closed:
            self._poller.unregister(self._resolver.wakeup_fd)
            self._resolver.close()

    # --- one attempt ---------------------------------------------------------------------------------------------

    def _resolved(self, address: Endpoint, found: list[Endpoint] | str, events: list[LinkEvent[int]]) -> None:
        for dial in [dial for dial in self._connecting.values() if dial.address == address and not dial.resolved]:
            dial.resolved = True
            if isinstance(found, str):
                self._end(dial, events, found)
            else:
                dial.candidates.extend(found)
                self._connect_next(dial, events)

    def _connect_next(self, dial: _Dial, events: list[LinkEvent[int]] | list[LinkClosed[int]]) -> None:
        """Connect to the next address. The time that is left is shared among the addresses that are."""
        dial.resolved = True
        left_s = max(dial.deadline_s - self._clock(), 0.001) / len(dial.candidates)
        endpoint = dial.candidates.popleft()
        dial.under_way = dial.connected = False
        dial.connect_until_s = self._clock() + left_s
        try:
            dial.connection = _Connection(self._context, self._poller, endpoint, self._config, left_s)
        except zmq.ZMQError as exc:
            # no descriptors or ZeroMQ sockets left
            self._end(dial, events, f"cannot dial {dial.address}: {exc.strerror}")
            return
        for socket in dial.connection.sockets():
            self._by_socket[socket] = dial

    def _follow(self, dial: _Dial, events: list[LinkEvent[int]]) -> None:
        """Take what the monitor says."""
        if dial.connection is None:
            return
        for event, value in dial.connection.monitor.drain():
            if event == zmq.EVENT_CONNECT_DELAYED:
                dial.under_way = True
            elif event == zmq.EVENT_CONNECTED:
                dial.connected = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                dial.is_open = True
                del self._connecting[dial.link]
                events.append(LinkOpened(dial.link))
            elif dial.is_open:
                self._drain(dial, events)
                self._end(dial, events, f"connection to {dial.address} closed by the peer or the network")
                return
            else:
                self._attempt_failed(dial, event, value, events)
                return

    def _attempt_failed(self, dial: _Dial, event: int, value: int, events: list[LinkEvent[int]]) -> None:
        """The connection did not come up. Tries the next address; after the last one, says what is known."""
        turned_away = dial.under_way and not dial.connected and self._clock() < dial.connect_until_s
        dial.all_refused &= turned_away
        if dial.candidates:
            self._release(dial)
            self._connect_next(dial, events)
            return
        if dial.connected:
            reason = f"{dial.address} accepted but did not complete the handshake{_detail(event, value)}"
        elif dial.all_refused:
            reason = f"{dial.address} refused the connection: nobody listens there"
        else:
            reason = f"no connection to {dial.address}: unreachable or silent"
        self._end(dial, events, reason, refused=dial.all_refused)

    def _expire(self, events: list[LinkEvent[int]]) -> None:
        now_s = self._clock()
        while (dial := next(iter(self._connecting.values()), None)) is not None and dial.deadline_s <= now_s:
            what = "handshake" if dial.connected else "connection" if dial.resolved else "result of the name look-up"
            self._end(dial, events, f"{dial.address}: no {what} within {self._config.handshake_timeout_s:g} s")

    def _end(
        self,
        dial: _Dial,
        events: list[LinkEvent[int]] | list[LinkClosed[int]],
        reason: str,
        *,
        refused: bool = False,
    ) -> None:
        self._drop(dial)
        events.append(LinkClosed(dial.link, refused, reason))

    def _drop(self, dial: _Dial, linger_s: float = 0.0) -> None:
        self._release(dial, linger_s)
        dial.is_open = False
        del self._dials[dial.link]
        self._connecting.pop(dial.link, None)

    def _release(self, dial: _Dial, linger_s: float = 0.0) -> None:
        connection, dial.connection = dial.connection, None
        if connection is None:
            return
        for socket in connection.sockets():
            del self._by_socket[socket]
        connection.close(linger_s)

    # --- messages ------------------------------------------------------------------------------------------------

    def _ready_dials(self, ready: Iterable[object] | None) -> list[_Dial]:
        if ready is None:
            self._backlog.clear()
            return list(self._dials.values())
        found = (self._by_socket.get(item) for item in ready if isinstance(item, zmq.Socket))
        dials = dict.fromkeys(itertools.chain(self._backlog, (dial for dial in found if dial is not None)))
        self._backlog.clear()
        return list(dials)

    def _receive_messages(
        self, limit: int, limit_bytes: int, dials: deque[_Dial], events: list[LinkEvent[int]]
    ) -> None:
        """One message per link and turn, so that no link waits behind another's queue."""
        end_bytes = self.bytes_in + limit_bytes
        while dials and limit > 0 and self.bytes_in < end_bytes:
            dial = dials.popleft()
            if self._receive_one(dial, events):
                dials.append(dial)
                limit -= 1
        self._backlog = dials

    def _drain(self, dial: _Dial, events: list[LinkEvent[int]]) -> None:
        while self._receive_one(dial, events):
            pass

    def _receive_one(self, dial: _Dial, events: list[LinkEvent[int]]) -> bool:
        if dial.connection is None:
            return False
        try:
            frames = dial.connection.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.messages_in += 1
        self.bytes_in += sum(map(len, frames))
        events.append(LinkMessage(dial.link, frames))
        return True


@dataclass(slots=True, eq=False)
class _Dial:
    """A link from dial() to its end."""

    link: int
    address: Endpoint
    deadline_s: float
    resolved: bool = False
    candidates: deque[Endpoint] = field(default_factory=deque)  # addresses not tried yet
    connection: _Connection | None = None
    connect_until_s: float = 0.0
    under_way: bool = False  # the network was asked: without it a failure is local, such as "no route"
    connected: bool = False  # TCP is up
    all_refused: bool = True  # by every address tried so far
    is_open: bool = False  # ZeroMQ's handshake is done


class _Connection:
    """A DEALER that connects once, and its monitor."""

    def __init__(
        self, context: Context, poller: zmq.Poller, endpoint: Endpoint, config: Config, timeout_s: float
    ) -> None:
        self._poller = poller
        with contextlib.ExitStack() as undo:
            self.socket = context.socket(zmq.DEALER)
            undo.callback(self.socket.close, linger=0)
            # a receive is registered and cancelled at most, and all of them may be asked for at once
            _set_limits(self.socket, config, send_queue=2 * config.max_pending_pushes + SEND_QUEUE_SLACK)
            self.socket.setsockopt(zmq.RECONNECT_IVL, NO_RECONNECT_MS)
            self.socket.setsockopt(zmq.CONNECT_TIMEOUT, _milliseconds(timeout_s))
            self.socket.setsockopt(zmq.HANDSHAKE_IVL, _milliseconds(timeout_s))
            self.socket.setsockopt(zmq.IPV6, endpoint.is_ipv6)
            self.monitor = _Monitor(context, self.socket, _DIAL_EVENTS)
            undo.callback(self.monitor.close)
            self.socket.connect(endpoint.zmq())
            undo.pop_all()
        for each in self.sockets():
            poller.register(each, zmq.POLLIN)

    def sockets(self) -> tuple[Socket, Socket]:
        return self.socket, self.monitor.socket

    def close(self, linger_s: float) -> None:
        for each in self.sockets():
            self._poller.unregister(each)
        self.monitor.close()
        self.socket.close(linger=_milliseconds(linger_s))


# CLOSED is the port's own end: close() waits for it
_LISTEN_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

_DIAL_EVENTS = (
    zmq.EVENT_CONNECT_DELAYED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    # every other one ends the link
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)


class _Monitor:
    """The events of one socket, as (event, value). Closed before that socket."""

    _numbers = itertools.count()

    def __init__(self, context: Context, watched: Socket, events: int) -> None:
        self._watched = watched
        self.socket = context.socket(zmq.PAIR)
        try:
            # Unbounded on purpose: the I/O thread blocks on a full monitor, and with it every link of the context.
            # What piles up is a few bytes per connection, for as long as the loop stands still.
            self.socket.setsockopt(zmq.RCVHWM, 0)
            self.socket.setsockopt(zmq.LINGER, 0)
            name = f"inproc://kvpush-monitor-{next(self._numbers)}"
            watched.monitor(name, events)
            self.socket.connect(name)
        except BaseException:
            self.socket.close(linger=0)
            raise

    def drain(self) -> Iterator[tuple[int, int]]:
        while not self.socket.closed:
            try:
                event, _endpoint = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield struct.unpack("=Hi", event)

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(linger=0)


class _Resolver:
    """Looks names up on daemon threads, one per name and at most ``MAX_LOOKUPS`` at a time.

    A look-up cannot be interrupted and may take as long as the system's resolver likes. Asking for a name that is
    being looked up already takes no further thread.
    """

    def __init__(self) -> None:
        self.closed = False
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._under_way: set[Endpoint] = set()
        self._results: list[tuple[Endpoint, list[Endpoint] | str]] = []

    def look_up(self, address: Endpoint) -> bool:
        """Start a look-up. False when too many are under way."""
        with self._lock:
            if address in self._under_way:
                return True
            if len(self._under_way) >= MAX_LOOKUPS:
                return False
            self._under_way.add(address)
        try:
            threading.Thread(target=self._run, args=(address,), name=f"kvpush-lookup-{address}", daemon=True).start()
        except RuntimeError:  # the system has no thread for us
            with self._lock:
                self._under_way.discard(address)
            return False
        return True

    def results(self) -> list[tuple[Endpoint, list[Endpoint] | str]]:
        """Finished look-ups: the addresses, or a sentence that says what went wrong."""
        if not self._results:
            return []
        with self._lock:
            results, self._results = self._results, []
            os.eventfd_read(self.wakeup_fd)
        return results

    def close(self) -> None:
        with self._lock:
            self.closed = True
            os.close(self.wakeup_fd)

    def _run(self, address: Endpoint) -> None:
        try:
            found: list[Endpoint] | str = _look_up(address)
        except (OSError, UnicodeError) as exc:
            found = f"cannot look up {address.host!r}: {exc}"
        with self._lock:
            self._under_way.discard(address)
            if not self.closed:
                self._results.append((address, found))
                os.eventfd_write(self.wakeup_fd, 1)


def _look_up(address: Endpoint) -> list[Endpoint]:
    """All addresses of a name, in the system's order of preference: at least one. Raises OSError."""
    found = network.getaddrinfo(address.host, address.port, type=network.SOCK_STREAM)
    if not found:
        raise OSError("the name has no address")
    return list(dict.fromkeys(Endpoint(str(sockaddr[0]), address.port) for *_, sockaddr in found))


def _descriptor(frame: zmq.Frame) -> int | None:
    """The descriptor that a message came by; ``None`` if the peer speaks a ZMTP older than 3: it is none of ours."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _bind(socket: Socket, listen: Endpoint) -> Endpoint:
    """Bind once, and say what was bound. Raises ConfigurationError."""
    cause = "no such address"
    for endpoint, ipv6 in _bind_candidates(listen):
        try:
            socket.setsockopt(zmq.IPV6, ipv6)
            socket.bind(endpoint.zmq())
        except zmq.ZMQError as exc:
            cause = exc.strerror
            if exc.errno == errno.EADDRINUSE:
                break  # the port is taken; another address of the same name would only hide that
        else:
            return _parse_bound(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    raise ConfigurationError(f"listen={str(listen)!r}: cannot bind {listen}: {cause}")


def _bind_candidates(listen: Endpoint) -> list[tuple[Endpoint, bool]]:
    """What to try to bind, and whether it takes an IPv6 socket."""
    if listen.is_numeric:
        return [(listen, listen.is_ipv6)]
    if listen.is_wildcard or listen.host in _interfaces():
        # every interface in both families, or an interface's own address; then without IPv6
        families = (True, False) if listen.is_wildcard else (False, True)
        return [(listen, ipv6) for ipv6 in families]
    try:
        return [(endpoint, endpoint.is_ipv6) for endpoint in _look_up(listen)]
    except (OSError, UnicodeError) as exc:
        raise ConfigurationError(f"listen={str(listen)!r}: cannot look up {listen.host!r}: {exc}") from exc


def _interfaces() -> set[str]:
    return {name for _, name in network.if_nameindex()}


def _has_interface(host: str) -> bool:
    """Whether the scope of an address (``fe80::1%eth0``), if it has one, is an interface of this host."""
    _, _, scope = host.partition("%")
    return not scope or scope.isdigit() or scope in _interfaces()


def _parse_bound(text: str) -> Endpoint:
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    return Endpoint(host.removeprefix("[").removesuffix("]"), int(port))


def _set_limits(socket: Socket, config: Config, send_queue: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, config.max_message_bytes)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
    socket.setsockopt(zmq.SNDHWM, send_queue)


def _milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000)


def _detail(event: int, value: int) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value:
        return f": {os.strerror(value)}"
    return " (it speaks another protocol)" if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL else ""
