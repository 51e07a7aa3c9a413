"""The two cores and everything that can happen to them next, as one value that can be copied, compared and continued.

A :class:`Universe` is one prefill and one decode engine, what is under way between them, and what their callers still
may do. :meth:`Universe.enabled` lists what can happen next, in every order that a network, a transport and two callers
allow; :meth:`Universe.fire` lets one of them happen. The cores are the unmodified ones, driven through their methods
and effects as the loops drive them; a broken rule raises :class:`Broken` at once.

What is left out: messages lost inside a link that lives, WRITEs that fail in doubt, more than one block a transfer. The
seeded simulation has those. Here it is the orders that are complete, not the faults.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from kvpush import decode_effects, prefill, prefill_effects, receives, wire
from kvpush.config import Config
from kvpush.errors import FailureCode, TransportError
from kvpush.events import BlocksReleased, PushFinished, ReceiveFinished
from kvpush.identity import Identity
from kvpush.layout import DEFAULT_GROUP, CacheGeometry
from kvpush.lifecycle import State
from kvpush.parallel import Share
from kvpush.pushes import Part, Piece
from kvpush.registry import Registry
from kvpush.testing import World
from kvpush.timers import Timers

START_S = 1000.0  # above every duration in CONFIG, so that a number tells whether it is a time
ALL_LAYERS = range(1)
BLOCKS = {"t1": 1, "t2": 2}  # the one block of each transfer, on both sides

# Heartbeats and liveness far away: they would only pad the orders of what is looked at here.
CONFIG = Config(
    handshake_timeout_s=1,
    handshake_backoff_min_s=0.1,
    handshake_backoff_max_s=0.1,
    heartbeat_interval_s=200,
    liveness_timeout_s=400,
    engine_ttl_s=100,
    evict_grace_s=5,
    stall_timeout_s=3,
    hold_timeout_s=6,
    lease_s=10,
    receive_deadline_s=30,
    tombstone_ttl_s=300,
)


class Broken(AssertionError):
    """A rule does not hold."""


# --- what the real ones hold that cannot be copied -------------------------------------------------------------------


class Clock:
    """Moved by the universe alone."""

    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


class NoLock:
    """One thread needs none."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


class NoJitter:
    """The shortest backoff."""

    @staticmethod
    def uniform(low: float, high: float) -> float:
        return low


# --- what is under way -----------------------------------------------------------------------------------------------


@dataclass
class Process:
    """One life of one engine."""

    core: Any
    registry: Registry
    agent_name: str
    life: int


@dataclass
class Account:
    """What one caller has heard of one transfer."""

    transfer_id: str
    life: int
    epoch: int | None = None
    finished: PushFinished | ReceiveFinished | None = None
    released: BlocksReleased | None = None

    @property
    def is_free(self) -> bool:
        return self.released is not None or (self.finished is not None and self.finished.blocks_reusable)

    @property
    def is_free_for_sure(self) -> bool:
        return self.is_free and (self.released is None or self.released.proven)


@dataclass
class Connection:
    """One TCP connection. A queue ends with ``None``: the other end has closed."""

    decode_life: int
    prefill_life: int
    link: int  # decode's name for it
    to_prefill: deque[Any] = field(default_factory=deque)
    to_decode: deque[Any] = field(default_factory=deque)
    is_up_at_prefill: bool = True
    is_up_at_decode: bool = True

    @property
    def prefill_link(self) -> bytes:
        return bytes([self.decode_life, self.link])


@dataclass
class Peer:
    """What prefill loaded."""

    generation: int
    agent_name: str
    is_loaded: bool = True

    def num_blocks(self, group: int) -> int:
        return 16

    def len_bytes(self, piece: Piece) -> int:
        return piece.num_cells


@dataclass
class Flight:
    """A WRITE that may still land. ``write_id``: ``None`` once prefill never asks about it again."""

    write_id: int | None
    peer: Peer
    transfer_id: str
    epoch: int
    decode_life: int
    payload: bytes


class Universe:
    """See the module. ``budget`` is what the callers, the operator and fate may still do, and how often."""

    def __init__(self, budget: dict[str, int], *, num_lives: int = 2) -> None:
        self.clock = Clock()
        self.budget = Counter(budget)
        world = World(0, CONFIG, num_layers=1)  # makes the cores, and is not used again
        prefills = [self._process(world.prefill("p0", address=("p", 1 + i)), i) for i in range(num_lives)]
        decodes = [self._process(world.decode("d0"), i) for i in range(num_lives)]
        self.prefill, self.decode = prefills[0], decodes[0]
        self._decode_agents = [decode.agent_name for decode in decodes]
        self.pushed: list[Account] = []
        self.expected: list[Account] = []
        self.connections: list[Connection] = []
        self.dialing: list[tuple[int, int]] = []  # decode's life, link
        self.flights: list[Flight] = []
        self.notifications: list[tuple[int, str, bytes]] = []  # decode's life, writer's agent, payload
        self.peers: list[Peer] = []
        self.greeted_life = 0  # decode's newest life that has said Hello to this prefill
        _LIVES["prefill"], _LIVES["decode"] = ([_dumped(process) for process in lives] for lives in (prefills, decodes))

    def _process(self, engine: Any, life: int) -> Process:
        registry = engine.registry
        registry._clock, registry._lock, registry._rng = self.clock, NoLock(), NoJitter()
        return Process(engine.core, registry, engine.identity.agent_name, life)

    def _reborn(self, which: str, life: int) -> Process:
        process: Process = pickle.loads(_LIVES[which][life])
        process.registry._clock = self.clock
        return process

    # --- what can happen -----------------------------------------------------------------------------------------

    def enabled(self) -> list[tuple[Any, ...]]:
        """Everything that can happen next."""
        return self.chores() + self._deeds()

    def chores(self) -> list[tuple[Any, ...]]:
        """What happens by itself sooner or later."""
        found: list[tuple[Any, ...]] = [("dialled", *dial) for dial in self.dialing]
        for index, connection in enumerate(self.connections):
            if connection.to_prefill and connection.is_up_at_prefill:
                found.append(("prefill reads", index))
            if connection.to_decode and connection.is_up_at_decode:
                found.append(("decode reads", index))
        found += [("write ends", i) for i, flight in enumerate(self.flights) if flight.write_id is not None]
        if self.notifications:
            found.append(("decode is notified",))
        return found

    def _deeds(self) -> list[tuple[Any, ...]]:
        can = {name for name, count in self.budget.items() if count > 0}
        found: list[tuple[Any, ...]] = []
        for transfer_id in BLOCKS:
            if f"expect {transfer_id}" in can and not self._open(self.expected, self.decode.life, transfer_id):
                found.append(("expect", transfer_id))
            if f"push {transfer_id}" in can and not self._open(self.pushed, self.prefill.life, transfer_id):
                found.append(("push", transfer_id))
        found += [(name,) for name in ("cancel at prefill", "cancel at decode", "drop") if name in can]
        if "restart decode" in can and self.decode.life + 1 < len(_LIVES["decode"]):
            found.append(("restart decode",))
        if "restart prefill" in can and self.prefill.life + 1 < len(_LIVES["prefill"]):
            found.append(("restart prefill",))
        if "time" in can and self.next_due_s() is not None:
            found.append(("time",))
        return found

    @staticmethod
    def _open(accounts: list[Account], life: int, transfer_id: str) -> bool:
        """Whether the caller must not use the id again yet."""
        return any(a.life == life and a.transfer_id == transfer_id and not a.is_free for a in accounts)

    def next_due_s(self) -> float | None:
        dues = [process.core.next_due_s() for process in (self.prefill, self.decode)]
        return min((due_s for due_s in dues if due_s is not None), default=None)

    # --- letting it happen ---------------------------------------------------------------------------------------

    def fire(self, event: tuple[Any, ...]) -> None:
        name, *rest = event
        now_s = self.clock.now_s
        prefill_core, decode_core = self.prefill.core, self.decode.core
        spend = " ".join(map(str, event))
        if spend in self.budget:
            self.budget[spend] -= 1
        match name:
            case "expect":
                self._expect(rest[0])
            case "push":
                self._push(rest[0])
            case "cancel at prefill":
                self._p(prefill_core.cancel("t1", now_s))
            case "cancel at decode":
                self._d(decode_core.cancel("t1", now_s))
            case "drop":
                self._p(prefill_core.drop_engine("d0", now_s))
            case "restart decode":
                self._restart_decode()
            case "restart prefill":
                self._restart_prefill()
            case "dialled":
                self._dialled(*rest)
            case "prefill reads":
                self._prefill_reads(self.connections[rest[0]])
            case "decode reads":
                self._decode_reads(self.connections[rest[0]])
            case "write ends":
                self._write_ends(self.flights[rest[0]])
            case "decode is notified":
                life, agent_name, payload = self.notifications.pop(0)
                if self.decode.life == life:
                    self._d(decode_core.notified(agent_name, payload, now_s))
            case "time":
                self._pass_time()
            case _:
                raise ValueError(event)
        self.check()

    def _expect(self, transfer_id: str) -> None:
        self.expected.append(Account(transfer_id, self.decode.life))
        blocks = np.array([BLOCKS[transfer_id]], dtype=np.int64)
        self._d(
            self.decode.core.expect(
                transfer_id,
                (receives.Place(DEFAULT_GROUP, 0, blocks),),
                num_blocks=1,
                source=receives.Source("p0", 1, 1, {(0, 0): ("p", 1)}),
                deadline_s=CONFIG.receive_deadline_s,
                now_s=self.clock.now_s,
            )
        )

    def _push(self, transfer_id: str) -> None:
        self.pushed.append(Account(transfer_id, self.prefill.life))
        blocks = np.array([BLOCKS[transfer_id]], dtype=np.int64)
        self._p(
            self.prefill.core.push(
                transfer_id,
                (Part(0, (ALL_LAYERS,), 0, blocks),),
                last=True,
                fenced=False,
                index=0,
                now_s=self.clock.now_s,
            )
        )

    def _pass_time(self) -> None:
        due_s = self.next_due_s()
        assert due_s is not None
        self.clock.now_s = max(due_s, self.clock.now_s)
        for process, carry_out in ((self.prefill, self._p), (self.decode, self._d)):
            due_s = process.core.next_due_s()
            if due_s is not None and due_s <= self.clock.now_s:
                carry_out(process.core.tick(self.clock.now_s))

    def _restart_decode(self) -> None:
        """SIGKILL, and another process under the same id. What it sent arrives, then the end of each connection."""
        self.decode = self._reborn("decode", self.decode.life + 1)
        self.dialing.clear()
        self.notifications.clear()
        for connection in self.connections:
            if connection.is_up_at_decode:
                connection.is_up_at_decode = False
                connection.to_decode.clear()
                connection.to_prefill.append(None)

    def _restart_prefill(self) -> None:
        """Likewise. Its WRITEs go with it: its agent is what sent them."""
        self.prefill = self._reborn("prefill", self.prefill.life + 1)
        self.flights.clear()
        self.peers.clear()
        self.greeted_life = 0
        for connection in self.connections:
            if connection.is_up_at_prefill:
                connection.is_up_at_prefill = False
                connection.to_prefill.clear()
                connection.to_decode.append(None)

    # --- the network ---------------------------------------------------------------------------------------------

    def _dialled(self, life: int, link: int) -> None:
        self.dialing.remove((life, link))
        self.connections.append(Connection(life, self.prefill.life, link))
        self._d(self.decode.core.link_opened(link, self.clock.now_s))

    def _prefill_reads(self, connection: Connection) -> None:
        message = connection.to_prefill.popleft()
        if message is None:
            connection.is_up_at_prefill = False
            self._p(self.prefill.core.link_closed(connection.prefill_link, "reset", self.clock.now_s))
        else:
            if isinstance(message, wire.Hello):
                self.greeted_life = max(self.greeted_life, connection.decode_life)
            self._p(self.prefill.core.message(connection.prefill_link, message, self.clock.now_s))
        self._sweep()

    def _decode_reads(self, connection: Connection) -> None:
        message = connection.to_decode.popleft()
        if message is None:
            connection.is_up_at_decode = False
            self._d(self.decode.core.link_closed(connection.link, "reset", self.clock.now_s, refused=False))
        else:
            self._d(self.decode.core.message(connection.link, message, self.clock.now_s))
        self._sweep()

    def _sweep(self) -> None:
        """Forget connections that are over on both sides."""
        self.connections = [c for c in self.connections if c.is_up_at_prefill or c.is_up_at_decode]

    # --- prefill's effects ---------------------------------------------------------------------------------------

    def _p(self, effects: Iterable[Any]) -> None:
        queue = deque(effects)
        core = self.prefill.core
        while queue:
            effect = queue.popleft()
            match effect:
                case prefill_effects.Emit(event):
                    self._heard(self.pushed, self.prefill.life, event)
                case prefill_effects.Send(link, message):
                    queue.extend(self._send_to_decode(link, message))
                case prefill_effects.PostWrite():
                    self._post(effect)
                case prefill_effects.AbandonWrite(write_id):
                    self._flight(write_id).write_id = None
                case prefill_effects.LoadPeer():
                    queue.extend(self._load(core, effect))
                case prefill_effects.ReleasePeer(peer):
                    self._release(peer)

    def _send_to_decode(self, link: bytes, message: Any) -> list[Any]:
        for connection in self.connections:
            if connection.prefill_link == link and connection.is_up_at_prefill:
                self._check_claim(connection.decode_life, message)
                if isinstance(message, wire.MetadataRequest):
                    self._check_request(message)
                if connection.is_up_at_decode:
                    connection.to_decode.append(message)
                return []
        return self.prefill.core.link_closed(link, "gone", self.clock.now_s)

    def _check_request(self, message: wire.MetadataRequest) -> None:
        handshaking = [s for s in self.prefill.registry.snapshot() if s.state is State.handshaking]
        if len(handshaking) != 1 or not self.prefill.registry.is_attempt_current(
            handshaking[0].generation, message.attempt
        ):
            raise Broken(f"rule 8: {message!r} is sent while {handshaking!r} shake hands")

    def _check_claim(self, life: int, message: Any) -> None:
        """Drained, and Failed with settled set, say that nothing of an epoch lands from now on."""
        is_drained = isinstance(message, wire.Drained)
        if is_drained or (isinstance(message, wire.Failed) and message.settled):
            late = [f for f in self.flights if (f.decode_life, f.epoch) == (life, message.epoch)]
            if late:
                raise Broken(f"rule 12: {message!r} is sent while {late!r} may land")

    def _post(self, effect: prefill_effects.PostWrite) -> None:
        peer: Peer = effect.peer
        if not peer.is_loaded or self.prefill.registry.pins_of(peer.generation) < 1:
            raise Broken(f"rule 3: a WRITE is posted to {peer!r} without a pin")
        written = wire.decode_written(effect.notification)
        life = self._decode_agents.index(peer.agent_name)
        if life < self.greeted_life:
            raise Broken(f"rule 14: a WRITE is posted to {peer!r} after another incarnation has said Hello")
        (piece,) = effect.pieces
        transfer_id = next(tid for tid, block in BLOCKS.items() if [block] == piece.local_slots.tolist())
        push = self._last(self.pushed, self.prefill.life, transfer_id)
        wanted = [r for r in self.expected if (r.life, r.epoch) == (life, written.epoch)]
        if push.finished is not None:
            raise Broken(f"rule 9: {transfer_id} is written after {push.finished!r}")
        if [r.transfer_id for r in wanted] != [transfer_id] or piece.remote_slots.tolist() != [BLOCKS[transfer_id]]:
            raise Broken(f"rule 14: {transfer_id} is written for epoch {written.epoch} of life {life}, {wanted!r}")
        if wanted[0].is_free_for_sure and life == self.decode.life:
            raise Broken(f"rule 12: {transfer_id} is written into blocks that are free: {wanted[0]!r}")
        if any((f.decode_life, f.epoch) == (life, written.epoch) for f in self.flights):
            raise Broken(f"a second WRITE for epoch {written.epoch} is posted")
        self.flights.append(Flight(effect.write_id, peer, transfer_id, written.epoch, life, effect.notification))

    def _flight(self, write_id: int) -> Flight:
        return next(flight for flight in self.flights if flight.write_id == write_id)

    def _write_ends(self, flight: Flight) -> None:
        self.flights.remove(flight)
        failure = None
        if flight.decode_life == self.decode.life:
            receive = next(r for r in self.expected if (r.life, r.epoch) == (flight.decode_life, flight.epoch))
            push = self._last(self.pushed, self.prefill.life, flight.transfer_id)
            if receive.is_free_for_sure:
                raise Broken(f"rule 12: a WRITE lands in blocks that are free: {receive!r}")
            if push.is_free_for_sure:
                raise Broken(f"rule 12: a WRITE reads blocks that are free: {push!r}")
            self.notifications.append((flight.decode_life, self.prefill.agent_name, flight.payload))
        else:
            failure = TransportError(FailureCode.peer_lost, "the process is gone", disconnected=True)
        self._p(self.prefill.core.write_settled(flight.write_id, failure, self.clock.now_s))

    def _load(self, core: prefill.PrefillCore, effect: prefill_effects.LoadPeer) -> list[Any]:
        now_s = self.clock.now_s
        if self.decode.agent_name != effect.agent_name:
            failure = TransportError(FailureCode.handshake_failed, "the process is gone")
            return core.peer_failed(effect.generation, effect.attempt, failure, now_s)
        if any(peer.agent_name == effect.agent_name and peer.is_loaded for peer in self.peers):
            raise Broken(f"rule 8: {effect.agent_name} is loaded twice")
        peer = Peer(effect.generation, effect.agent_name)
        self.peers.append(peer)
        return core.peer_loaded(effect.generation, effect.attempt, peer, now_s)

    def _release(self, peer: Peer) -> None:
        if not peer.is_loaded:
            raise Broken(f"{peer!r} is released twice")
        if any(flight.peer is peer and flight.write_id is not None for flight in self.flights):
            raise Broken(f"rule 3: {peer!r} is released while a WRITE to it is in flight")
        peer.is_loaded = False
        self.peers.remove(peer)

    # --- decode's effects ----------------------------------------------------------------------------------------

    def _d(self, effects: Iterable[Any]) -> None:
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            match effect:
                case decode_effects.Emit(event):
                    self._heard(self.expected, self.decode.life, event)
                case decode_effects.Send(link, message):
                    queue.extend(self._send_to_prefill(link, message))
                case decode_effects.Dial(link, _):
                    self.dialing.append((self.decode.life, link))
                case decode_effects.HangUp(link):
                    self._hang_up(link)

    def _send_to_prefill(self, link: int, message: Any) -> list[Any]:
        if isinstance(message, wire.Register) and message.wants:
            receive = self._last(self.expected, self.decode.life, message.transfer_id)
            receive.epoch = receive.epoch or message.epoch
        for connection in self.connections:
            if (connection.decode_life, connection.link) == (self.decode.life, link) and connection.is_up_at_decode:
                if connection.is_up_at_prefill:
                    connection.to_prefill.append(message)
                return []
        return self.decode.core.link_closed(link, "gone", self.clock.now_s, refused=False)

    def _hang_up(self, link: int) -> None:
        if (self.decode.life, link) in self.dialing:
            self.dialing.remove((self.decode.life, link))
        for connection in self.connections:
            if (connection.decode_life, connection.link) == (self.decode.life, link) and connection.is_up_at_decode:
                connection.is_up_at_decode = False
                connection.to_decode.clear()
                connection.to_prefill.append(None)
        self._sweep()

    # --- callers -------------------------------------------------------------------------------------------------

    @staticmethod
    def _last(accounts: list[Account], life: int, transfer_id: str) -> Account:
        return [a for a in accounts if a.life == life and a.transfer_id == transfer_id][-1]

    def _heard(self, accounts: list[Account], life: int, event: Any) -> None:
        account = self._last(accounts, life, event.transfer_id)
        if isinstance(event, BlocksReleased):
            if account.finished is None or account.finished.blocks_reusable or account.released is not None:
                raise Broken(f"rule 10: {event!r} follows {account!r}")
            account.released = event
        elif account.finished is not None:
            raise Broken(f"rule 10: two outcomes, {account.finished!r} and {event!r}")
        else:
            account.finished = event
        if account.is_free_for_sure:
            self._check_quiet(accounts, account)

    def _check_quiet(self, accounts: list[Account], account: Account) -> None:
        """Blocks are the caller's again: no WRITE may touch them from now on."""
        if accounts is self.pushed:
            late = [f for f in self.flights if f.transfer_id == account.transfer_id]
        else:
            late = [f for f in self.flights if (f.decode_life, f.epoch) == (account.life, account.epoch)]
        if late:
            raise Broken(f"rule 12: {account!r} is free while {late!r} may land")

    # --- what must hold now --------------------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold between any two events."""
        registry = self.prefill.registry
        pins = Counter(flight.peer.generation for flight in self.flights if flight.write_id is not None)
        for generation, count in pins.items():
            if registry.pins_of(generation) != count:
                raise Broken(f"rule 3: {count} WRITEs in flight, {registry.pins_of(generation)} pins")
            if registry.state_of(generation) not in (State.connected, State.stale):
                raise Broken(f"rule 3: WRITEs in flight to an engine that is {registry.state_of(generation)}")
        snapshots = [s for s in registry.snapshot() if s.state is not State.evicted]
        if sum(s.in_flight for s in snapshots) != sum(pins.values()):
            raise Broken(f"rule 3: pins without a WRITE: {snapshots!r}")
        if sum(s.state is State.connected for s in snapshots) > 1:
            raise Broken(f"rule 14: two generations are connected: {snapshots!r}")
        loaded = {s.generation for s in snapshots if s.state in (State.connected, State.stale)}
        if {peer.generation for peer in self.peers} != loaded & {peer.generation for peer in self.peers}:
            raise Broken(f"rule 3: {self.peers!r} are loaded, but {snapshots!r} are known")
        for receive in self.expected:
            if receive.finished is not None and receive.finished.outcome == "done":
                pushes = [p for p in self.pushed if p.transfer_id == receive.transfer_id]
                if not pushes:
                    raise Broken(f"{receive!r} is done, and nothing was pushed")

    def check_settled(self) -> None:
        """What must hold when everything has come to its end."""
        for accounts, life in ((self.pushed, self.prefill.life), (self.expected, self.decode.life)):
            for account in accounts:
                if account.life == life and not account.is_free:
                    raise Broken(f"rule 10: {account!r} has not come to its end")

    def run_out(self, max_steps: int = 400) -> None:
        """Nothing more is done to it: let happen what happens by itself, in order, then time, until all is settled."""
        for _ in range(max_steps):
            chores = self.chores()
            if chores:
                self.fire(chores[0])
                continue
            living = [a for a in self.pushed if a.life == self.prefill.life]
            living += [a for a in self.expected if a.life == self.decode.life]
            if all(account.is_free for account in living):
                return
            self.budget["time"] += 1
            self.fire(("time",))
        self.check_settled()

    # --- is it the same? -----------------------------------------------------------------------------------------

    def copy(self) -> bytes:
        """Everything that can change, so that it can be continued more than once."""
        return _dumped(self)

    @staticmethod
    def of(frozen: bytes) -> Universe:
        """What :meth:`copy` made."""
        universe: Universe = pickle.loads(frozen)
        return universe

    def state(self) -> int:
        """Two universes with the same value go on in the same ways. Times count from now; what is only counted, traced
        or shown does not matter."""
        return hash(_Walk(self.clock.now_s)(self))


_LIVES: dict[str, list[bytes]] = {}  # every process as it is when it starts


# --- copies and comparisons ------------------------------------------------------------------------------------------

# Never changed by anybody: a copy refers to them.
_SHARED: dict[int, Any] = {}


def _shared(key: int) -> Any:
    return _SHARED[key]


def _by_reference(value: Any) -> tuple[Callable[[int], Any], tuple[int]]:
    _SHARED.setdefault(id(value), value)
    return _shared, (id(value),)


_TABLE = copyreg.dispatch_table | dict.fromkeys(
    (Config, Identity, CacheGeometry, Share, wire.Metadata, wire.Hello), _by_reference
)


def _dumped(value: Any) -> bytes:
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _TABLE
    pickler.dump(value)
    return out.getvalue()


# Not part of what decides: settings, counters, the trace, and numbers that are only made to differ.
_IGNORED = {"counters", "_config", "_identity", "_trace", "_rng", "_lock", "_clock", "_agent_metadata", "_geometry"}
_IGNORED |= {"opened_s", "duration_s", "detail", "last_error", "pushes", "num_bytes", "clock"}
_IGNORED |= {"hinted_s"}  # whether a hint goes before or after the WRITE that it announces


class _Walk:
    """An object graph as nested tuples: equal for graphs that look and share alike."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self._seen: dict[int, int] = {}

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is float:
            return self.time(value)
        seen = self._seen
        place = seen.get(id(value))
        if place is not None:
            return place
        seen[id(value)] = len(seen)
        how = _HOW.get(kind) or _HOW.setdefault(kind, _how(kind))
        return how(self, value)

    def time(self, value: float) -> float:
        """Counted from now, when it is one."""
        return round(value - self._now_s, 6) if value >= START_S else value


_PLAIN = {str, bytes, bool, int, type(None)}
_HOW: dict[type, Callable[[_Walk, Any], Any]] = {
    dict: lambda walk, value: tuple([(walk(key), walk(item)) for key, item in value.items()]),
    list: lambda walk, value: tuple([walk(item) for item in value]),
    set: lambda walk, value: tuple(sorted(map(repr, value))),
    np.ndarray: lambda walk, value: value.tobytes(),
    # A dead entry decides nothing. Of two that are due at once the one set first comes first.
    Timers: lambda walk, value: tuple(
        [(walk.time(due_s), walk(key)) for key, (due_s, _) in sorted(value._due_s.items(), key=lambda item: item[1])]
    ),
}
_HOW[OrderedDict] = _HOW[Counter] = _HOW[dict]
_HOW[deque] = _HOW[tuple] = _HOW[list]


def _how(kind: type) -> Callable[[_Walk, Any], Any]:
    """How to walk one kind of object: by its fields."""
    if issubclass(kind, Enum):
        return lambda walk, value: value.name
    if issubclass(kind, msgspec.Struct):
        names: tuple[str, ...] = kind.__struct_fields__
    else:
        names = tuple(name for base in kind.__mro__ for name in base.__dict__.get("__slots__", ()))
    wanted = [name for name in names if name not in _IGNORED]

    def walked(walk: _Walk, value: Any) -> Any:
        own = [name for name in getattr(value, "__dict__", ()) if name not in _IGNORED]
        return (kind.__name__, *[walk(getattr(value, name, None)) for name in (*wanted, *own)])

    return walked


# --- where an exploration may start ----------------------------------------------------------------------------------


def strangers(budget: dict[str, int]) -> Universe:
    """Nothing has happened."""
    return Universe(budget)


def shaking_hands(budget: dict[str, int]) -> Universe:
    """Both transfers are pushed and expected and wait for the handshake: decode has been asked for its metadata."""
    universe = Universe({"expect t1": 1, "expect t2": 1, "push t1": 1, "push t2": 1})
    for deed in (("expect", "t1"), ("expect", "t2"), ("push", "t1"), ("push", "t2")):
        universe.fire(deed)
    while not any(isinstance(m, wire.MetadataRequest) for c in universe.connections for m in c.to_decode):
        universe.fire(universe.chores()[0])
    universe.budget = Counter(budget)
    return universe


def writing(budget: dict[str, int]) -> Universe:
    """A WRITE of each transfer is in flight."""
    universe = shaking_hands(budget)
    while len(universe.flights) < len(BLOCKS):
        universe.fire(next(chore for chore in universe.chores() if chore[0] != "write ends"))
    return universe


def served(budget: dict[str, int]) -> Universe:
    """Both transfers are done, and the engine is connected."""
    universe = writing(budget)
    while universe.chores():
        universe.fire(universe.chores()[0])
    return universe
