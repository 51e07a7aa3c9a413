"""A control plane without sockets: ordered links between dialers and listeners, one event at a time.

A link carries whole messages in order, in both directions, until it ends; then each side that can still be reached is
told once. Nothing moves by itself: every delivery is an item on the owner's agenda (:class:`kvpush.testing.World` has
one), so that the owner decides when it happens.

What can go wrong here is what goes wrong with TCP: nobody listens (:meth:`FakeNetwork.unlisten`), a connection breaks
and what was under way is lost (:meth:`FakeNetwork.cut`), or each side notices in its own time and hears what was under
way after the next connection already stands (:meth:`FakeNetwork.sever`), a path swallows everything until it is healed
(:meth:`FakeNetwork.black_hole`), a path is slow (:meth:`FakeNetwork.delay`), a send queue is full
(:meth:`FakeNetwork.choke`). A message may be looked at and replaced or dropped on its way (:attr:`FakeNetwork.tamper`),
lost or repeated (:attr:`FakeNetwork.mischief`), or kept until it is late (:attr:`FakeNetwork.hold`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from kvpush.errors import UsageError
from kvpush.link import LinkClosed, LinkEvent, LinkMessage, LinkOpened

Address = tuple[str, int]
Frames = list[bytes]
Schedule = Callable[[float, Callable[[], None]], None]
"""Run an action after so many seconds."""
Latency = Callable[[str, str], float]
"""Of one delivery between two processes, named in either order."""


class Party(Protocol):
    """One process on the network. ``name`` tells it apart from others when paths are named."""

    @property
    def name(self) -> str: ...

    def link_event(self, event: LinkEvent[Any]) -> None:
        """Something happened to a link of this process."""


@dataclass(frozen=True, slots=True)
class InTransit:
    """A message on its way, as :attr:`FakeNetwork.tamper` and :attr:`FakeNetwork.hold` see it."""

    sender: str
    receiver: str
    frames: Frames


@dataclass(slots=True, eq=False)
class _End:
    """One end of a link. ``link`` is what its process calls it; ``None`` for a process that is no longer told."""

    party: Party
    link: Any
    queue: deque[LinkEvent[Any]] = field(default_factory=deque)  # to be delivered here, in order
    is_told: bool = True  # still wants to hear of this link
    is_delivering: bool = False


@dataclass(slots=True, eq=False)
class _Connection:
    serial: int
    dialer: _End
    listener: _End
    is_open: bool = True
    is_severed: bool = False  # nothing new gets through; each end is told in its own time
    is_pristine: bool = True  # no fault of any kind has touched it

    def other(self, end: _End) -> _End:
        return self.listener if end is self.dialer else self.dialer


class FakeNetwork:
    """All links of a world. ``latency_s`` is asked once for every delivery."""

    def __init__(self, schedule: Schedule, latency_s: Latency) -> None:
        self.tamper: Callable[[InTransit], Frames | None] | None = None  # the message to deliver; None loses it
        self.mischief: Callable[[InTransit], list[Frames]] | None = None  # what to deliver in place of a message
        self.watch: Callable[[InTransit, str], None] | None = None  # told what became of each message
        self.hold: Callable[[InTransit], bool] | None = None  # whether release() is to deliver it, late and out of turn
        self._held: list[tuple[_End, LinkMessage[Any]]] = []
        self._schedule = schedule
        self._latency_s = latency_s
        self._listeners: dict[Address, Party] = {}
        self._ends: dict[tuple[Party, Any], tuple[_Connection, _End]] = {}
        self._peers: dict[tuple[Party, Any], Party] = {}  # of every link that ever stood
        self._dialing: set[tuple[Party, int]] = set()
        self._black_holes: set[frozenset[str]] = set()
        self._delays_s: dict[frozenset[str], float] = {}
        self._choked: set[tuple[str, str]] = set()
        self._last_serial = 0

    # --- what the processes do ---------------------------------------------------------------------------------------

    def listen(self, address: Address, party: Party) -> None:
        """Accept connections at ``address`` from now on. Raises UsageError when somebody does already."""
        if address in self._listeners:
            raise UsageError(f"{self._listeners[address].name!r} listens at {address} already")
        self._listeners[address] = party

    def unlisten(self, address: Address) -> None:
        """Refuse connections at ``address``. Those that stand are not touched."""
        self._listeners.pop(address, None)

    def dial(self, party: Party, link: int, address: Address) -> None:
        """Connect. ``LinkOpened`` or ``LinkClosed`` follows, or silence when the path is a black hole."""
        self._dialing.add((party, link))
        listener = self._listeners.get(address)
        latency_s = self._latency_s(party.name, party.name if listener is None else listener.name)
        self._schedule(latency_s, lambda: self._connect(party, link, address))

    def send(self, party: Party, link: Any, frames: Frames) -> bool:
        """Put a message on its way; ``False`` when the link is gone."""
        found = self._ends.get((party, link))
        if found is None or not found[0].is_open:
            return False
        connection, end = found
        there = connection.other(end)
        if (party.name, there.party.name) in self._choked:
            self._choked.discard((party.name, there.party.name))
            self.hang_up(party, link)
            return False
        if connection.is_severed:
            self._watched(InTransit(party.name, there.party.name, frames), "lost")
            return True
        there.queue.append(LinkMessage(there.link, frames))
        self._pump(connection, there)
        return True

    def peer(self, party: Party, link: Any) -> Party | None:
        """The process at the other end of a link, which may be over; ``None`` for one that never stood. An engine that
        was frozen may handle what came over it long afterwards."""
        return self._peers.get((party, link))

    def links_of(self, party: Party) -> list[Any]:
        """What a process calls its links, oldest first."""
        return [link for owner, link in self._ends if owner is party]

    def pristine(self, dialer: Party, listener: Party) -> set[int]:
        """The serial numbers of links that stand between two processes and that no fault has ever touched."""
        return {
            connection.serial
            for connection, end in self._ends.values()
            if end is connection.listener
            and end.party is listener
            and connection.dialer.party is dialer
            and connection.is_pristine
            and self._is_whole(connection)
        }

    def hang_up(self, party: Party, link: Any) -> None:
        """Close this end. What was sent before arrives; this side is told nothing more, the other that it is over."""
        self._dialing.discard((party, link))
        found = self._ends.pop((party, link), None)
        if found is None:
            return
        connection, end = found
        end.is_told = False
        end.queue.clear()
        if connection.is_open:
            connection.is_open = False
            if not connection.is_severed:
                self._tell_closed(connection, connection.other(end), "closed by the peer")

    def leave(self, party: Party, *, in_order: bool = False) -> None:
        """The process is gone: it hears nothing more, and its peers' connections are reset.

        ``in_order``: it closed them itself, so that what it sent before arrives.
        """
        for address in [address for address, listener in self._listeners.items() if listener is party]:
            del self._listeners[address]
        self._dialing = {dial for dial in self._dialing if dial[0] is not party}
        for key in [key for key in self._ends if key[0] is party]:
            connection, end = self._ends.pop(key)
            end.is_told = False
            end.queue.clear()
            other = connection.other(end)
            if connection.is_open:
                connection.is_open = False
                if connection.is_severed:
                    continue
                if not in_order:
                    other.queue.clear()
                self._tell_closed(connection, other, "closed by the peer" if in_order else "connection reset")

    # --- faults ------------------------------------------------------------------------------------------------------

    def cut(self, one: str, other: str) -> int:
        """Break every link between two processes, and say how many. What is under way is lost; both sides are told."""
        broken = 0
        for connection in self._between(one, other):
            connection.is_open = False
            broken += 1
            for end in (connection.dialer, connection.listener):
                self._lose(connection, end, 0)
                self._tell_closed(connection, end, "connection reset")
        return broken

    def sever(self, one: str, other: str, *, arriving: int, notice_s: tuple[float, float]) -> int:
        """Break every link between two processes, and say how many. ``notice_s``: when the dialer and the listener are
        told; until then what they send is lost in silence. The first ``arriving`` messages under way to each arrive
        just before that, later than those of the link that may stand by then; the rest is lost."""
        severed = self._between(one, other)
        for connection in severed:
            connection.is_severed, connection.is_pristine = True, False
            for end, after_s in zip((connection.dialer, connection.listener), notice_s, strict=True):
                late = self._lose(connection, end, arriving)
                self._schedule(after_s, partial(self._notice, connection, end, late))
        return len(severed)

    def choke(self, sender: str, receiver: str) -> bool:
        """The next message finds the send queue full, so its link ends. Whether there is a link."""
        if not self._between(sender, receiver):
            return False
        self._choked.add((sender, receiver))
        return True

    def relax(self) -> None:
        """End :meth:`choke`, :attr:`mischief` and :attr:`tamper`."""
        self._choked.clear()
        self.mischief = self.tamper = None

    def disturb(self, name: str) -> None:
        """A fault touches every link of a process, or a process itself."""
        for connection, end in self._ends.values():
            if end.party.name == name:
                connection.is_pristine = False

    def black_hole(self, one: str, other: str) -> None:
        """Deliver nothing between the two until :meth:`heal`; nobody is told."""
        self._black_holes.add(frozenset((one, other)))
        self._touch(one, other)

    def heal(self, one: str, other: str) -> None:
        """End a black hole: what waited in it is delivered."""
        self._black_holes.discard(frozenset((one, other)))
        for connection, end in list(self._ends.values()):
            if self._path(connection) == frozenset((one, other)):
                self._pump(connection, end)

    def heal_all(self) -> None:
        """End every black hole and every delay."""
        self._black_holes.clear()
        self._delays_s.clear()
        for connection, end in list(self._ends.values()):
            self._pump(connection, end)

    def delay(self, one: str, other: str, delay_s: float) -> None:
        """Every delivery between the two takes that much longer from now on."""
        self._delays_s[frozenset((one, other))] = delay_s
        if delay_s:
            self._touch(one, other)

    def release(self) -> None:
        """Hold nothing back any more, and deliver what was held, to the links that are still up."""
        self.hold = None
        held, self._held = self._held, []
        for end, event in held:
            if end.is_told:
                self._schedule(self._latency_s("held", end.party.name), partial(end.party.link_event, event))

    def num_links(self, one: str, other: str) -> int:
        """Links that stand between two processes."""
        return len(self._between(one, other))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _connect(self, party: Party, link: int, address: Address) -> None:
        if (party, link) not in self._dialing:
            return  # hung up in the meantime
        self._dialing.discard((party, link))
        listener = self._listeners.get(address)
        if listener is None:
            party.link_event(LinkClosed(link, refused=True, reason="connection refused"))
            return
        if frozenset((party.name, listener.name)) in self._black_holes:
            return
        self._last_serial += 1
        there = self._last_serial.to_bytes(4, "big")
        connection = _Connection(self._last_serial, _End(party, link), _End(listener, there))
        connection.is_pristine = not self._delays_s.get(self._path(connection))
        self._ends[party, link] = (connection, connection.dialer)
        self._ends[listener, there] = (connection, connection.listener)
        self._peers[party, link] = listener
        self._peers[listener, there] = party
        connection.dialer.queue.append(LinkOpened(link))
        self._pump(connection, connection.dialer)

    def _tell_closed(self, connection: _Connection, end: _End, reason: str) -> None:
        end.queue.append(LinkClosed(end.link, refused=False, reason=reason))
        self._pump(connection, end)

    def _pump(self, connection: _Connection, end: _End) -> None:
        """Deliver the head of the queue in a while, and then the next: order is kept whatever the latencies are."""
        if end.is_delivering or not end.queue or not end.is_told:
            return
        end.is_delivering = True
        delay_s = self._delays_s.get(self._path(connection), 0.0)
        latency_s = self._latency_s(connection.dialer.party.name, connection.listener.party.name)
        self._schedule(latency_s + delay_s, lambda: self._deliver(connection, end))

    def _deliver(self, connection: _Connection, end: _End) -> None:
        end.is_delivering = False
        if not end.queue or not end.is_told or self._path(connection) in self._black_holes:
            return
        event = end.queue.popleft()
        if isinstance(event, LinkMessage):
            for arrived in self._inspected(connection, end, event):
                end.party.link_event(arrived)
        else:
            if isinstance(event, LinkClosed):
                self._ends.pop((end.party, end.link), None)
                end.is_told = False
            end.party.link_event(event)
        self._pump(connection, end)

    def _inspected(self, connection: _Connection, end: _End, event: LinkMessage[Any]) -> list[LinkMessage[Any]]:
        message = InTransit(connection.other(end).party.name, end.party.name, event.frames)
        if self.hold is not None and self.hold(message):
            connection.is_pristine = False
            self._held.append((end, event))
            self._watched(message, "held")
            return []
        frames = message.frames if self.tamper is None else self.tamper(message)
        arrived = [] if frames is None else [frames]
        if arrived and self.mischief is not None:
            arrived = self.mischief(message)
        if arrived != [message.frames]:
            connection.is_pristine = False
        self._watched(message, "lost" if not arrived else "duplicated" if len(arrived) > 1 else "delivered")
        return [LinkMessage(event.link, frames) for frames in arrived]

    def _watched(self, message: InTransit, fate: str) -> None:
        if self.watch is not None:
            self.watch(message, fate)

    def _lose(self, connection: _Connection, end: _End, kept: int) -> list[LinkEvent[Any]]:
        """Empty the queue to one end; all messages but the first few are lost."""
        sender = connection.other(end).party.name
        messages = [event for event in end.queue if isinstance(event, LinkMessage)]
        for event in messages[kept:]:
            self._watched(InTransit(sender, end.party.name, event.frames), "lost")
        opened = [event for event in end.queue if isinstance(event, LinkOpened)]
        end.queue.clear()
        return [*opened, *messages[:kept]]

    def _notice(self, connection: _Connection, end: _End, late: list[LinkEvent[Any]]) -> None:
        """What came late arrives, and then the end of the link."""
        end.queue.extend(late)
        self._tell_closed(connection, end, "connection reset")

    def _touch(self, one: str, other: str) -> None:
        for connection in self._between(one, other):
            connection.is_pristine = False

    def _between(self, one: str, other: str) -> list[_Connection]:
        path = frozenset((one, other))
        return [
            connection
            for connection, end in self._ends.values()
            if end is connection.listener and self._is_whole(connection) and self._path(connection) == path
        ]

    @staticmethod
    def _is_whole(connection: _Connection) -> bool:
        return connection.is_open and not connection.is_severed

    @staticmethod
    def _path(connection: _Connection) -> frozenset[str]:
        return frozenset((connection.dialer.party.name, connection.listener.party.name))
