"""A deterministic world of prefill and decode engines: the real cores, a fake clock, a fake network, real bytes.

    world = World(seed=7)
    prefill, decode = world.prefill("p0"), world.decode("d0")
    receive = decode.expect("t1", [7, 8], prefill)
    push = prefill.push("t1", [3, 4])
    world.run_until(lambda: push.is_over and receive.is_over)
    assert receive.outcome == "done"
    world.check_settled()

Every engine is an unmodified :class:`~kvpush.prefill.PrefillCore` or :class:`~kvpush.decode.DecodeCore` with a registry
of its own, driven the way the loops of ``PrefillPusher`` and ``DecodeReceiver`` drive it: messages are encoded and
decoded, effects are carried out in order, timers fire when they are due. Only the clock, the sockets and NIXL are
fakes.

**Ranks.** An engine that is spread over several ranks is as many processes, each with a core, a network name and a
memory of its own, and each called by itself (:func:`kvpush.testing.slices.shares` names all of them):

    prefills = [world.prefill("p0", share=share) for share in shares(tp_size=2)]
    decodes = [world.decode("d0", share=share) for share in shares(tp_size=3)]   # of a World(num_heads=6)
    receives = [rank.expect("t1", [7, 8], prefills[0]) for rank in decodes]
    pushes = [rank.push("t1", [3, 4]) for rank in prefills]

Time moves by :meth:`World.advance` and :meth:`World.run_until` alone, from one event to the next. The same seed gives
the same run.

**Memory.** The world plays both callers, and plays them mean. Prefill's blocks are filled with bytes that tell the
transfer, position and layer; the moment that an event calls blocks reusable they are scribbled over, as their next
owner would. Every block of decode that is not granted to a receive holds a canary. Each WRITE is checked when it lands
(:mod:`kvpush.testing.oracle`): may these source blocks be read, may these destination blocks be written, is this the
block that was asked for.

A broken rule raises :class:`Violation` where it is broken; :meth:`World.check` and :meth:`World.check_settled` look at
everything that can be seen from outside. :attr:`World.observers` may add more (:mod:`kvpush.testing.checkers`).
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvpush.config import Config
from kvpush.errors import Failure, FailureCode, TransportError
from kvpush.events import Outcome
from kvpush.parallel import Share
from kvpush.testing.accounts import Push, Receive
from kvpush.testing.clock import FakeClock
from kvpush.testing.decode_engine import DecodeEngine
from kvpush.testing.engine import Engine
from kvpush.testing.fake_transport import Delivery, FakeFabric, FakeWrite, WriteState
from kvpush.testing.memory import CANARY
from kvpush.testing.network import Address, FakeNetwork, InTransit
from kvpush.testing.observer import Observer
from kvpush.testing.oracle import Oracle
from kvpush.testing.prefill_engine import PrefillEngine
from kvpush.testing.slices import Model, Slice
from kvpush.testing.violations import Stuck, Violation
from kvpush.wire import Rank

LATENCY_S = (0.0001, 0.001)  # of a message, and of a WRITE

_ALONE = Share()
_EVEN = range(0)

# Why the two sides of a served transfer may disagree: one of them had decided before the news reached it.
_DECISIONS = {
    FailureCode.already_served,  # asked again on a new link, when prefill was done
    FailureCode.cancelled_by_caller,
    FailureCode.closing,
    FailureCode.deadline,
    FailureCode.engine_dropped,
    FailureCode.lease_expired,
    FailureCode.peer_lost,
    FailureCode.peer_restarted,
    FailureCode.superseded,
    FailureCode.write_failed,
    FailureCode.write_stalled,
}


class World:
    """See the module. ``config`` is every engine's, unless it is given its own. ``num_heads``: 1, 2, 4 or 6.

    Faults: an engine's own ``freeze()``, ``thaw()``, ``kill()`` and ``restart()``; :meth:`black_hole` and :meth:`mend`
    of two engines; ``network.cut()``, ``sever()``, ``delay()`` and ``choke()`` of two names (``engine.name``);
    ``network.tamper`` and ``network.hold``, functions that see every message; ``stalling.add(engine_id)`` of a decode
    engine to which WRITEs stall from now on; ``hold_writes = True``, after which a WRITE waits in :attr:`writes` for
    :meth:`finish`, :meth:`land`, :meth:`fail_write` or :meth:`doubt_write`. :meth:`heal` ends all that can end.
    """

    def __init__(
        self,
        seed: int = 0,
        config: Config | None = None,
        *,
        num_layers: int = 2,
        num_heads: int = 1,
        model: str = "m",
    ) -> None:
        self.seed = seed
        self.config = config or Config()
        self.shape = Model(num_layers, num_heads)
        self.model = model
        self.random = random.Random(seed)
        self.observers: list[Observer] = []
        self.clock = FakeClock()
        self.network = FakeNetwork(self.schedule, self._latency_s)
        self.network.watch = self._travelled
        self.fabric = FakeFabric(delivery=Delivery.manual, seed=seed, check_threads=False)
        self.fabric.on_post = self._posted
        self.oracle = Oracle(self)
        self.engines: list[Engine] = []  # every life that ever was, oldest first
        self.by_agent: dict[str, Engine] = {}
        self.hold_writes = False  # new WRITEs land only when the test says so
        self.stalling: set[str] = set()  # engine ids of decode to which new WRITEs stall
        self.write_latency_s = LATENCY_S
        self.write_fate: Callable[[FakeWrite], bool] | None = None  # told of each new WRITE; True: it sees to its end
        self.num_steps = 0  # events carried out so far
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._num_addresses = 0
        self._write_id = 0  # of the WRITE that is being posted
        self._alive: list[Engine] = []  # oldest first; few, however many lives there were
        self._latencies: dict[tuple[str, str], random.Random] = {}
        self._ranks: dict[str, dict[Rank, Engine]] = {}  # by engine id: the newest life of each

    def __repr__(self) -> str:
        return f"World(seed={self.seed}) at {self.clock():.6g} s"

    # --- who is there ------------------------------------------------------------------------------------------------

    def prefill(
        self,
        engine_id: str,
        *,
        num_blocks: int = 16,
        config: Config | None = None,
        clock_offset_s: float = 0.0,
        address: Address | None = None,
        share: Share = _ALONE,
        layers: range = _EVEN,
    ) -> PrefillEngine:
        """A new prefill engine, or a new life of one; at an address of its own unless it is given one.

        Of an engine of several ranks each is made by itself: ``share`` says which one it is. ``layers``: those of its
        stage, where stages do not have equally many.
        """
        if address is None:
            self._num_addresses += 1
            address = ("10.0.0.1", self._num_addresses)
        held = Slice(self.shape, share, layers)
        engine = PrefillEngine(
            self, engine_id, self._next_life(), num_blocks, held, config or self.config, clock_offset_s, address
        )
        self._add(engine)
        return engine

    def decode(
        self,
        engine_id: str,
        *,
        num_blocks: int = 16,
        config: Config | None = None,
        clock_offset_s: float = 0.0,
        share: Share = _ALONE,
        layers: range = _EVEN,
    ) -> DecodeEngine:
        """A new decode engine, or a new life of one; or one rank of it, as with :meth:`prefill`."""
        held = Slice(self.shape, share, layers)
        engine = DecodeEngine(
            self, engine_id, self._next_life(), num_blocks, held, config or self.config, clock_offset_s
        )
        self._add(engine)
        return engine

    def pattern(self, transfer_id: str, layer: int, position: int) -> bytes:
        """The bytes of one block of one layer of a transfer, of all heads."""
        key = f"{self.seed} {transfer_id} {layer} {position}".encode()
        return random.Random(zlib.crc32(key)).randbytes(self.shape.block_bytes)

    def _next_life(self) -> int:
        return len(self.engines) + 1

    def _add(self, engine: Engine) -> None:
        self.engines.append(engine)
        self._alive.append(engine)
        self.by_agent[engine.agent_name] = engine
        ranks = self._ranks.setdefault(engine.engine_id, {})
        if any(other.held.is_of_another_spread(engine.held) for other in ranks.values()):
            ranks.clear()  # its predecessor was spread differently
        ranks[engine.rank] = engine
        for observer in self.observers:
            observer.born(engine)

    def ranks_of(self, engine_id: str) -> list[Engine]:
        """The newest life of each rank of an engine, in the order of their ranks; dead ones too."""
        return [engine for _, engine in sorted(self._ranks.get(engine_id, {}).items())]

    def alive(self) -> Iterator[Engine]:
        """Oldest first."""
        return iter(list(self._alive))

    def running(self) -> Iterator[Engine]:
        """Alive and awake, oldest first."""
        return (engine for engine in self.alive() if engine.is_running)

    def peer_of(self, engine: Engine, link: Any) -> Engine | None:
        """The process at the other end of a link, which may be over."""
        peer = self.network.peer(engine, link)
        return peer if isinstance(peer, Engine) else None

    # --- time --------------------------------------------------------------------------------------------------------

    def schedule(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later."""
        self._serial += 1
        heapq.heappush(self._agenda, (self.clock() + delay_s, self._serial, action))

    def step(self, until_s: float = float("inf")) -> bool:
        """Jump to the next event no later than ``until_s`` and carry it out; ``False`` when there is none."""
        dues = [due_s for engine in self._alive if (due_s := engine.next_due_s()) is not None]
        dues += [self._agenda[0][0]] if self._agenda else []
        due_s = max(self.clock(), min(dues, default=float("inf")))
        if due_s > until_s or due_s == float("inf"):
            return False
        self.clock.set(due_s)
        self.num_steps += 1
        if self._agenda and self._agenda[0][0] <= due_s:
            heapq.heappop(self._agenda)[2]()
        self._turn()
        return True

    def advance(self, duration_s: float) -> None:
        """Let so much time pass, with everything that happens in it."""
        self.run_for(duration_s, until=lambda: False)

    def run_for(self, duration_s: float, until: Callable[[], bool]) -> bool:
        """As :meth:`advance`, but stop as soon as the condition holds. Whether it does."""
        end_s = self.clock() + duration_s
        self._turn()
        while not until():
            if not self.step(end_s):
                self.clock.set(end_s)
                self._turn()
                return until()
        return True

    def run_until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> float:
        """Run until the condition holds; how long it took. Raises :class:`Stuck` after ``limit_s``."""
        start_s = self.clock()
        if not self.run_for(limit_s, condition):
            raise Stuck(f"{self!r}: not within {limit_s:g} s")
        return self.clock() - start_s

    def _turn(self) -> None:
        has_progressed = True
        while has_progressed:
            has_progressed = False
            for engine in self.alive():
                has_progressed |= engine.turn()
        for observer in self.observers:
            observer.turned()

    def died(self, engine: Engine) -> None:
        """An engine's process is gone."""
        self._alive.remove(engine)

    def _latency_s(self, one: str, other: str, limits_s: tuple[float, float] = LATENCY_S) -> float:
        """Every path has random numbers of its own, so that a run without one fault is like the run with it
        everywhere else."""
        path = (one, other) if one < other else (other, one)
        if path not in self._latencies:
            self._latencies[path] = random.Random(f"{self.seed} latency {path}")
        return self._latencies[path].uniform(*limits_s)

    def _travelled(self, message: InTransit, fate: str) -> None:
        for observer in self.observers:
            observer.travelled(message.sender, message.receiver, message.frames, fate)

    def struck(self, fault: str, detail: str) -> None:
        """Tell the observers of a fault."""
        for observer in self.observers:
            observer.struck(fault, detail)

    def noted(self, text: str) -> None:
        """Tell the observers something worth a line."""
        for observer in self.observers:
            observer.noted(text)

    # --- WRITEs ------------------------------------------------------------------------------------------------------

    @property
    def writes(self) -> list[FakeWrite]:
        """WRITEs that neither landed nor failed, oldest first."""
        return list(self.fabric.in_flight)

    def posting(self, engine: PrefillEngine, write_id: int) -> None:
        """An engine is about to post a WRITE that its core knows by this id."""
        self._write_id = write_id

    def _posted(self, write: FakeWrite) -> None:
        grant = self.oracle.posted(write, self._write_id)
        for observer in self.observers:
            observer.posted(grant.source, write, grant)
        if grant.sink.engine_id in self.stalling:
            self.fabric.stall(write)
        if self.write_fate is not None and self.write_fate(write):
            return
        if not self.hold_writes:
            self.finish_soon(write)

    def finish_soon(self, write: FakeWrite) -> None:
        """As :meth:`finish`, after the time that a WRITE takes."""
        grant = self.oracle.grants[write]
        path = f"WRITE {grant.source.name}", grant.sink.name
        self.schedule(self._latency_s(*path, self.write_latency_s), partial(self.finish, write))

    def finish(self, write: FakeWrite) -> None:
        """The WRITE lands and its writer can see the end, unless something holds it up."""
        if self.fabric.can_complete(write):
            grant = self.oracle.lands(write)
            self.fabric.complete(write)
            for observer in self.observers:
                observer.landed(write, grant)

    def land(self, write: FakeWrite) -> None:
        """The bytes land; the writer sees no end, neither now nor later."""
        if write.state is WriteState.in_flight:
            grant = self.oracle.lands(write)
            self.fabric.land(write)
            for observer in self.observers:
                observer.landed(write, grant)

    def fail_write(self, write: FakeWrite, *, disconnected: bool, landed_segments: int = 0) -> None:
        """The WRITE ends in an error, after some of it has landed: the connection is gone, or nobody knows whether the
        rest lands (it does not; :meth:`doubt_write` is for one that does)."""
        if landed_segments:
            self.oracle.lands(write, is_whole=False)
        code = FailureCode.peer_lost if disconnected else FailureCode.write_failed
        error = TransportError(code, f"write to {write.target}: made to fail by the world", disconnected=disconnected)
        self.fabric.fail(write, error, landed_segments=landed_segments)

    def doubt_write(self, write: FakeWrite, lands_after_s: float) -> None:
        """The writer is told of an error, asks no more, and the bytes land all the same."""
        self.fabric.doubt(write)
        self.schedule(lands_after_s, partial(self.finish, write))

    def write_ended(self, engine: PrefillEngine, write_id: int, failure: Failure | None) -> None:
        """An engine has seen the end of its WRITE."""
        grant = self.oracle.ended(engine, write_id)
        if grant is not None:
            is_quiet = isinstance(failure, TransportError) and failure.disconnected
            if is_quiet and grant.receive is not None:  # nothing of it lands any more, so it may be written again
                grant.receive.posted_units &= ~grant.units
            for observer in self.observers:
                observer.write_ended(engine, grant, failure)

    def resume_writes(self) -> None:
        """Stalled WRITEs go on, and those that were held up get another chance."""
        for write in self.writes:
            if self.by_agent[write.target].engine_id not in self.stalling:
                self.fabric.resume(write)
                self.finish_soon(write)

    # --- faults ------------------------------------------------------------------------------------------------------

    def black_hole(self, one: Engine, other: Engine) -> None:
        """Neither messages nor WRITEs get from one to the other, and nobody is told, until :meth:`mend`."""
        self.network.black_hole(one.name, other.name)
        for writer, target in ((one, other), (other, one)):
            self.fabric.partition(writer.identity.agent_name, target.identity.agent_name)

    def mend(self, one: Engine, other: Engine) -> None:
        """End a black hole."""
        self.network.heal(one.name, other.name)
        for writer, target in ((one, other), (other, one)):
            self.fabric.heal(writer.identity.agent_name, target.identity.agent_name)
        self.resume_writes()

    def heal(self) -> None:
        """All faults are over: what is alive can reach what is alive."""
        self.network.relax()
        self.network.release()
        self.write_fate = None
        self.stalling.clear()
        self.hold_writes = False
        for engine in list(self.alive()):
            if engine.is_frozen:
                engine.thaw()
        self.network.heal_all()
        self.fabric.heal_all()
        self.resume_writes()

    # --- checks ------------------------------------------------------------------------------------------------------

    @property
    def accounts(self) -> list[Push | Receive]:
        """Every transfer of every engine that was not killed. What a decode engine still held when it closed has its
        end there: it was reported, and the memory went with the process."""
        found: list[Push | Receive] = []
        for engine in self.engines:
            if engine.was_killed:
                continue
            if isinstance(engine, PrefillEngine):
                found += engine.pushes
            elif isinstance(engine, DecodeEngine):
                found += [receive for receive in engine.receives if engine.is_alive or not receive.is_over]
        return found

    def settle(self, limit_s: float) -> float:
        """Run until every transfer has its outcome and its blocks back; how long it took."""
        return self.run_until(lambda: all(account.is_free for account in self.accounts), limit_s)

    def check(self) -> None:
        """What must hold at every moment."""
        for engine in self.engines:
            if isinstance(engine, DecodeEngine):
                if written := engine.memory.not_filled(engine.forbidden, CANARY):
                    raise Violation("only-granted-blocks", f"{engine!r}: nobody may write to blocks {written}")
            elif isinstance(engine, PrefillEngine):
                for push in engine.pushes:
                    self._check_agreement(engine, push)

    def _check_agreement(self, engine: PrefillEngine, push: Push) -> None:
        """Of one rank of prefill with each rank of decode that it has written to."""
        for receive in push.receives.values():
            if push.outcome is Outcome.done and not receive.has_all_from(engine.held):
                reason = f"{engine!r}: {push!r} is done, but only {receive.landed} of {receive!r} landed"
                raise Violation("agreement", reason)
            if not push.is_over or not receive.is_over or push.outcome is receive.outcome:
                continue
            # where there are other ranks, the end may have come from one of them
            is_pushs_fault = receive.outcome is Outcome.done and receive.held.is_whole_engine
            is_receives_fault = push.outcome is Outcome.done and receive.blames_only(engine.held, engine.life)
            for other, is_at_fault in ((push, is_pushs_fault), (receive, is_receives_fault)):
                if is_at_fault and other.code not in _DECISIONS:
                    reason = f"{engine!r}: the two sides disagree: {push.finished!r}, {receive.finished!r}"
                    raise Violation("agreement", reason)

    def check_settled(self) -> None:
        """What must hold when every transfer is over: nothing is left of any."""
        self.check()
        for account in self.accounts:
            if not account.is_free:
                raise Violation("settles", f"{account!r} has not come to its end")
        for engine in self.engines:
            if engine.is_alive:
                self._check_empty(engine)

    @staticmethod
    def _check_empty(engine: Engine) -> None:
        gauges = engine.core.gauges()
        counts = engine.transport.counts
        links = gauges["links"] if isinstance(engine, DecodeEngine) else 0  # each has its heartbeat's timer
        left = {name: gauges[name] for name in _EMPTY_AT_REST & gauges.keys() if gauges[name]}
        if isinstance(engine, DecodeEngine) and (engine.core.is_written_to or engine.core.is_write_under_way):
            raise Violation("nothing-is-left", f"{engine!r} is at rest, but looks for WRITEs")
        if left or gauges["timers"] > links or counts.writes_posted != counts.writes_released:
            reason = f"{engine!r} is at rest, but has {left}, {gauges['timers']} timers, {counts}"
            raise Violation("nothing-is-left", reason)


_EMPTY_AT_REST = {
    "pushes_open",
    "pushes_held",
    "registrations_waiting",
    "blocks_registered",
    "pushes_behind_handshakes",
    "pushes_in_lines",
    "writes_in_flight",
    "bytes_in_flight",
    "receives_open",
    "receives_held",
}
