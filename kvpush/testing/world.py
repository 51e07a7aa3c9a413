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

Time moves by :meth:`World.advance` and :meth:`World.run_until` alone, from one event to the next. The same seed gives
the same run.

**Memory.** The world plays both callers, and plays them mean. Prefill's blocks are filled with bytes that tell the
transfer, position and layer; the moment that an event calls blocks reusable they are scribbled over, as their next
owner would. Every block of decode that is not granted to a receive holds a canary. Each WRITE is checked when it lands
(:class:`Oracle`): may these source blocks be read, may these destination blocks be written, is this the block that was
asked for.

A broken rule raises :class:`Violation` where it is broken; :meth:`World.check` and :meth:`World.check_settled` look at
everything that can be seen from outside.
"""

from __future__ import annotations

import heapq
import random
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvpush import decode, prefill, prefill_effects, wire
from kvpush.config import Config
from kvpush.errors import Failure, FailureCode, TransportError, UsageError
from kvpush.events import BlocksReleased, Outcome, PushFinished, ReceiveFinished
from kvpush.identity import Identity
from kvpush.layout import KVCacheSpec, fingerprint, geometry_of, memory_ranges
from kvpush.link import LinkClosed, LinkEvent, LinkOpened
from kvpush.plan import PairPlan, pair
from kvpush.registry import Registry
from kvpush.testing.clock import FakeClock
from kvpush.testing.fake_transport import Delivery, FakeFabric, FakeTransport, FakeWrite, WriteState
from kvpush.testing.network import Address, FakeNetwork
from kvpush.transport import RemoteHandle, WriteHandle

CANARY = 0xEE  # in every block of decode that nobody may write to
SCRIBBLE = 0xDD  # in every block of prefill that is not in use by a push

MAX_TICKS = 10_000  # of one engine at one instant: more is a timer that never gets past now
_ROUNDING_S = 1e-9  # between two clocks that are a million seconds apart

LATENCY_S = (0.0001, 0.001)  # of a message, and of a WRITE


class Violation(AssertionError):
    """A rule was broken. The message names the engines, the transfer and the blocks."""


class Stuck(AssertionError):
    """What was waited for did not happen in time."""


# --- accounts --------------------------------------------------------------------------------------------------------

F = TypeVar("F", PushFinished, ReceiveFinished)


@dataclass(slots=True, eq=False)
class Account(Generic[F]):
    """What the caller of one side knows of one transfer: what it gave, and the events that came back."""

    transfer_id: str
    block_ids: dict[int, int]  # position -> local block
    finished: F | None = None
    released: BlocksReleased | None = None

    @property
    def is_over(self) -> bool:
        """It has its outcome."""
        return self.finished is not None

    @property
    def is_free(self) -> bool:
        """An event said that the blocks are the caller's again."""
        return self.released is not None or (self.finished is not None and self.finished.blocks_reusable)

    @property
    def is_free_for_sure(self) -> bool:
        """As :attr:`is_free`, and no write can touch the blocks any more."""
        return self.is_free and (self.released is None or self.released.proven)

    @property
    def outcome(self) -> Outcome | None:
        return None if self.finished is None else self.finished.outcome

    @property
    def code(self) -> FailureCode | None:
        return None if self.finished is None else self.finished.code

    def take(self, event: F | BlocksReleased) -> None:
        """One outcome; one release after it, and only when the blocks were held."""
        if isinstance(event, BlocksReleased):
            if self.finished is None or self.finished.blocks_reusable or self.released is not None:
                raise Violation(f"{event!r} follows {self.finished!r} and {self.released!r}")
            self.released = event
        elif self.finished is not None:
            raise Violation(f"two outcomes: {self.finished!r}, then {event!r}")
        else:
            self.finished = event


@dataclass(slots=True, eq=False)
class Push(Account[PushFinished]):
    """One transfer on prefill."""

    num_chunks: int = 0
    has_last: bool = False
    receive: Receive | None = None  # whom it writes to, once a WRITE was posted


@dataclass(slots=True, eq=False)
class Receive(Account[ReceiveFinished]):
    """One expect() on decode."""

    epoch: int | None = None  # known once it has been registered
    landed: set[int] = field(default_factory=set)  # positions that a WRITE has reached


# --- engines ---------------------------------------------------------------------------------------------------------


class Engine(ABC):
    """One life of one engine: what a process is. Made by :meth:`World.prefill` and :meth:`World.decode`."""

    core: prefill.PrefillCore | decode.DecodeCore

    def __init__(
        self, world: World, engine_id: str, life: int, dims: str, num_blocks: int, config: Config, clock_offset_s: float
    ) -> None:
        self.world = world
        self.clock_offset_s = clock_offset_s
        self.engine_id = engine_id
        self.config = config
        self.num_blocks = num_blocks
        self.is_alive = True
        self.is_frozen = False
        self.was_killed = False
        self.life = life
        self.memory = _Memory(dims, num_blocks, world.num_layers)
        spec = KVCacheSpec(dims=dims, model=world.model)
        self.geometry = geometry_of(self.memory.tensors, spec)
        self.identity = Identity(
            engine_id,
            incarnation=f"life {life}",
            rank=spec.rank,
            agent_name=f"{engine_id}/0.0#{life}",
            fingerprint=fingerprint(self.geometry, spec),
        )
        self.registry = Registry(config, self.now_s, random.Random(world.random.random()))
        self.transport: FakeTransport = world.fabric.transport(
            self.identity.agent_name, self.geometry.memory, memory_ranges(self.geometry), config
        )
        self._inbox: deque[LinkEvent[Any]] = deque()

    @property
    def name(self) -> str:
        """Its name on the network, which a restarted engine inherits."""
        return self.engine_id

    def now_s(self) -> float:
        """Its own monotonic clock, which started at another time than everybody else's."""
        return self.world.clock() + self.clock_offset_s

    # --- the process -------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """SIGSTOP: nothing of it runs; its links look alive."""
        self.is_frozen = True
        self.world.fabric.freeze(self.identity.agent_name)

    def thaw(self) -> None:
        """SIGCONT: everything that waited comes at once."""
        self.is_frozen = False
        self.world.fabric.thaw(self.identity.agent_name)
        self.world.resume_writes()

    def kill(self) -> None:
        """SIGKILL: its links are reset, its memory is gone."""
        self.is_alive = False
        self.was_killed = True
        self._inbox.clear()
        self.world.network.leave(self)
        self.world.fabric.kill(self.identity.agent_name)

    def drop_engine(self, engine_id: str) -> None:
        """The router knows that a remote engine is gone."""
        self._perform(self.core.drop_engine(engine_id, self.now_s()))

    def link_event(self, event: LinkEvent[Any]) -> None:
        """From the network; looked at in the engine's next turn."""
        if self.is_alive:
            self._inbox.append(event)

    def turn(self) -> bool:
        """What a loop does in one turn. Whether something happened."""
        if not self.is_alive or self.is_frozen:
            return False
        has_progressed = bool(self._inbox)
        while self._inbox:
            self._perform(self._handled(self._inbox.popleft()))
        has_progressed |= self._look_at_transport()
        return has_progressed | self._tick()

    def _tick(self) -> bool:
        now_s = self.now_s()
        for count in range(MAX_TICKS):
            due_s = self.core.next_due_s()
            if due_s is None or due_s > now_s:
                return count > 0
            self._perform(self.core.tick(now_s))
        raise Violation(f"{self!r}: a timer is due now however often it fires")

    def next_due_s(self) -> float | None:
        """When :meth:`turn` has something to do by itself, on the world's clock."""
        due_s = self.core.next_due_s() if self.is_alive and not self.is_frozen else None
        return None if due_s is None else due_s - self.clock_offset_s + (_ROUNDING_S if self.clock_offset_s else 0.0)

    @abstractmethod
    def _handled(self, event: LinkEvent[Any]) -> list[Any]: ...

    @abstractmethod
    def _look_at_transport(self) -> bool: ...

    @abstractmethod
    def _perform(self, effects: Iterable[Any]) -> None: ...

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.engine_id!r} life {self.life}>"


@dataclass(slots=True)
class _Peer:
    """As the pusher's: what was loaded for one generation of a decode engine."""

    remote: RemoteHandle
    plan: PairPlan

    @property
    def num_blocks(self) -> int:
        return self.plan.remote_num_blocks


class PrefillEngine(Engine):
    """A prefill engine and its caller."""

    def __init__(
        self,
        world: World,
        engine_id: str,
        life: int,
        num_blocks: int,
        config: Config,
        clock_offset_s: float,
        address: Address,
    ) -> None:
        super().__init__(world, engine_id, life, "BKHND", num_blocks, config, clock_offset_s)
        self.address = address
        self.memory.fill(range(num_blocks), SCRIBBLE)
        self.pushes: list[Push] = []
        self._open: dict[str, Push] = {}
        self._held: dict[str, deque[Push]] = {}
        self._owners: dict[int, Push] = {}  # block -> the push that it is lent to
        self._handles: dict[int, WriteHandle] = {}
        block_len_bytes = pair(self.geometry, self.geometry).block_len_bytes
        self.core: prefill.PrefillCore = prefill.PrefillCore(self.identity, config, self.registry, block_len_bytes)
        world.network.listen(address, self)

    # --- the caller --------------------------------------------------------------------------------------------------

    def push(
        self,
        transfer_id: str,
        block_ids: Sequence[int],
        *,
        first_block: int = 0,
        last: bool = True,
        fenced: bool = False,
    ) -> Push:
        """As ``PrefillPusher.push``. The blocks get the transfer's bytes; with ``fenced`` only at :meth:`compute`."""
        positions = {first_block + i: block for i, block in enumerate(block_ids)}
        if taken := [block for block in block_ids if block in self._owners]:
            raise UsageError(f"{self!r}: blocks {taken} belong to {self._owners[taken[0]]!r}")
        push = self._open.get(transfer_id)
        if push is None:
            push = self._open[transfer_id] = Push(transfer_id, {})
            self.pushes.append(push)
        push.block_ids |= positions
        index, push.num_chunks = push.num_chunks, push.num_chunks + 1
        push.has_last = push.has_last or last
        self._owners |= dict.fromkeys(block_ids, push)
        if not fenced:
            self._compute(transfer_id, positions)
        self._perform(
            self.core.push(
                transfer_id,
                first_block,
                np.array(block_ids, dtype=np.int64),
                last=last,
                fenced=fenced,
                now_s=self.now_s(),
                index=index,
            )
        )
        return push

    def compute(self, push: Push, chunk_index: int, positions: Iterable[int]) -> None:
        """The device has computed a fenced chunk."""
        self._compute(push.transfer_id, {position: push.block_ids[position] for position in positions})
        self._perform(self.core.fence_reached(push.transfer_id, chunk_index, self.now_s()))

    def cancel(self, transfer_id: str) -> None:
        self._perform(self.core.cancel(transfer_id, self.now_s()))

    def fail(self, transfer_id: str, failure: Failure) -> None:
        """As the loop does when a fence raises."""
        self._perform(self.core.fail(transfer_id, failure, self.now_s()))

    def drain(self) -> None:
        self._perform(self.core.drain(self.now_s()))

    def close(self) -> None:
        """As the loop ends: settle what settles within ``close_timeout_s``, abandon the rest, destroy the agent."""
        self._perform(self.core.close(self.now_s()))
        self.world.run_for(self.config.close_timeout_s, until=lambda: not self._handles)
        self._perform(self.core.abandon(self.now_s()))
        for handle in self._handles.values():
            self.transport.abandon_write(handle)
        self._handles.clear()
        self.transport.close()
        self._perform(self.core.transport_closed(self.now_s()))
        self.is_alive = False
        self.world.network.leave(self, in_order=True)

    def restart(self) -> PrefillEngine:
        """Another process with the same id at the same address. The old one is killed if it lives."""
        if self.is_alive:
            self.kill()
        return self.world.prefill(self.engine_id, num_blocks=self.num_blocks, config=self.config, address=self.address)

    def owner_of(self, block_id: int) -> Push | None:
        """The push that this block is lent to."""
        return self._owners.get(block_id)

    def _compute(self, transfer_id: str, positions: dict[int, int]) -> None:
        for position, block in positions.items():
            for layer in range(self.world.num_layers):
                self.memory.write(layer, block, self.world.pattern(transfer_id, layer, position))

    def _take(self, event: PushFinished | BlocksReleased) -> None:
        if isinstance(event, BlocksReleased):
            push = self._released(event.transfer_id)
        else:
            found = self._open.pop(event.transfer_id, None)
            if found is None:
                raise Violation(f"{self!r}: {event!r} is for no open push")
            push = found
            if not event.blocks_reusable:
                self._held.setdefault(event.transfer_id, deque()).append(push)
        push.take(event)
        if push.is_free:
            self.memory.fill(push.block_ids.values(), SCRIBBLE)
            for block in push.block_ids.values():
                del self._owners[block]

    def _released(self, transfer_id: str) -> Push:
        held = self._held.get(transfer_id)
        if not held:
            raise Violation(f"{self!r}: blocks of {transfer_id!r} are released, but none are held")
        push = held.popleft()
        if not held:
            del self._held[transfer_id]
        return push

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _handled(self, event: LinkEvent[Any]) -> list[prefill_effects.Effect]:
        now_s = self.now_s()
        if isinstance(event, LinkClosed):
            return self.core.link_closed(event.link, event.reason, now_s)
        if isinstance(event, LinkOpened):
            return []
        try:
            message = wire.decode_to_prefill(event.frames)
        except Failure as exc:
            return self.core.malformed(event.link, exc, now_s)
        return self.core.message(event.link, message, now_s)

    def _look_at_transport(self) -> bool:
        has_progressed = False
        for write_id, handle in list(self._handles.items()):
            failure: Failure | None = None
            try:
                if not self.transport.poll_write(handle):
                    continue
            except Failure as exc:
                failure = exc
            has_progressed = True
            del self._handles[write_id]
            self._perform(self._settled(write_id, failure))
        return has_progressed

    def _settled(self, write_id: int, failure: Failure | None) -> list[prefill_effects.Effect]:
        if isinstance(failure, TransportError) and not failure.disconnected:
            return self.core.write_doubted(write_id, failure, self.now_s())
        return self.core.write_settled(write_id, failure, self.now_s())

    def _perform(self, effects: Iterable[prefill_effects.Effect]) -> None:
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            match effect:
                case prefill_effects.Emit():
                    self._take(effect.event)
                case prefill_effects.Send():
                    if not self.world.network.send(self, effect.link, wire.encode(effect.message)):
                        queue.extend(self.core.link_closed(effect.link, "its connection is gone", self.now_s()))
                case prefill_effects.PostWrite():
                    queue.extend(self._post(effect))
                case prefill_effects.AbandonWrite():
                    self.transport.abandon_write(self._handles.pop(effect.write_id))
                case prefill_effects.LoadPeer():
                    queue.extend(self._load(effect))
                case prefill_effects.ReleasePeer():
                    self.transport.remove_remote(effect.peer.remote)

    def _post(self, effect: prefill_effects.PostWrite) -> list[prefill_effects.Effect]:
        peer: _Peer = effect.peer
        local, remote = peer.plan.local_indices(effect.local_ids), peer.plan.remote_indices(effect.remote_ids)
        try:
            handle = self.transport.post_write(peer.remote, local, remote, effect.notification)
        except Failure as exc:
            return self.core.write_settled(effect.write_id, exc, self.now_s())
        self._handles[effect.write_id] = handle
        return []

    def _load(self, effect: prefill_effects.LoadPeer) -> list[prefill_effects.Effect]:
        now_s = self.now_s()
        try:
            plan = pair(self.geometry, effect.geometry)
            remote = self.transport.add_remote(
                effect.agent_name, effect.blob, effect.geometry.memory, plan.local_rows, plan.remote_rows
            )
        except Failure as exc:
            return self.core.peer_failed(effect.generation, effect.attempt, exc, now_s)
        return self.core.peer_loaded(effect.generation, effect.attempt, _Peer(remote, plan), now_s)


class DecodeEngine(Engine):
    """A decode engine and its caller."""

    def __init__(
        self, world: World, engine_id: str, life: int, num_blocks: int, config: Config, clock_offset_s: float
    ) -> None:
        super().__init__(world, engine_id, life, "KBHND", num_blocks, config, clock_offset_s)
        self.memory.fill(range(num_blocks), CANARY)
        self.receives: list[Receive] = []
        self.tainted: set[int] = set()  # blocks that a late WRITE has hit after they were given up unproven
        self._open: dict[str, Receive] = {}
        self._held: dict[str, deque[Receive]] = {}
        self._by_epoch: dict[int, Receive] = {}
        self._granted: dict[int, Receive] = {}
        self.core: decode.DecodeCore = decode.DecodeCore(
            self.identity, self.transport.metadata(), self.geometry, config, self.registry
        )

    # --- the caller --------------------------------------------------------------------------------------------------

    def expect(
        self,
        transfer_id: str,
        block_ids: Sequence[int],
        source: PrefillEngine,
        *,
        first_block: int = 0,
        deadline_s: float | None = None,
        incarnation: str = "",
    ) -> Receive:
        """As ``DecodeReceiver.expect``."""
        if transfer_id in self._open:
            raise UsageError(f"{self!r}: {transfer_id!r} is expected already")
        if taken := [block for block in block_ids if block in self._granted]:
            raise UsageError(f"{self!r}: blocks {taken} belong to {self._granted[taken[0]]!r}")
        receive = Receive(transfer_id, {first_block + i: block for i, block in enumerate(block_ids)})
        self.receives.append(receive)
        self._open[transfer_id] = receive
        self._granted |= dict.fromkeys(block_ids, receive)
        self._perform(
            self.core.expect(
                transfer_id,
                np.array(block_ids, dtype=np.int64),
                address=source.address,
                engine_id=source.engine_id,
                first_block=first_block,
                deadline_s=self.config.receive_deadline_s if deadline_s is None else deadline_s,
                now_s=self.now_s(),
                incarnation=incarnation,
            )
        )
        return receive

    def cancel(self, transfer_id: str) -> None:
        self._perform(self.core.cancel(transfer_id, self.now_s()))

    def renew(self, transfer_ids: Sequence[str], source: PrefillEngine) -> None:
        self._perform(
            self.core.renew(list(transfer_ids), address=source.address, engine_id=source.engine_id, now_s=self.now_s())
        )

    def close(self) -> None:
        """As the loop ends."""
        self._perform(self.core.close(self.now_s()))
        self.world.run_for(self.config.close_timeout_s, until=lambda: self.core.num_receives == 0)
        self.transport.close()
        self._perform(self.core.transport_closed(self.now_s()))
        self.is_alive = False
        self.world.network.leave(self, in_order=True)

    def restart(self) -> DecodeEngine:
        """Another process with the same id. The old one is killed if it lives."""
        if self.is_alive:
            self.kill()
        return self.world.decode(self.engine_id, num_blocks=self.num_blocks, config=self.config)

    def receive_of(self, epoch: int) -> Receive | None:
        """The receive that was registered under this epoch."""
        return self._by_epoch.get(epoch)

    @property
    def forbidden(self) -> list[int]:
        """Blocks that must hold the canary now."""
        return [block for block in range(self.num_blocks) if block not in self._granted and block not in self.tainted]

    def _take(self, event: ReceiveFinished | BlocksReleased) -> None:
        if isinstance(event, BlocksReleased):
            held = self._held.get(event.transfer_id)
            if not held:
                raise Violation(f"{self!r}: blocks of {event.transfer_id!r} are released, but none are held")
            receive = held.popleft()
            if not held:
                del self._held[event.transfer_id]
        else:
            found = self._open.pop(event.transfer_id, None)
            if found is None:
                raise Violation(f"{self!r}: {event!r} is for no open receive")
            receive = found
            if not event.blocks_reusable:
                self._held.setdefault(event.transfer_id, deque()).append(receive)
        receive.take(event)
        if isinstance(event, ReceiveFinished) and event.outcome is Outcome.done:
            self.world.oracle.check_received(self, receive)
        if receive.is_free:
            self._reuse(receive)

    def _reuse(self, receive: Receive) -> None:
        self.memory.fill(receive.block_ids.values(), CANARY)
        for block in receive.block_ids.values():
            del self._granted[block]
            self.tainted.discard(block)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _handled(self, event: LinkEvent[Any]) -> list[decode.Effect]:
        now_s = self.now_s()
        if isinstance(event, LinkOpened):
            return self.core.link_opened(event.link, now_s)
        if isinstance(event, LinkClosed):
            return self.core.link_closed(event.link, event.reason, now_s, refused=event.refused)
        try:
            message = wire.decode_to_decode(event.frames)
        except Failure as exc:
            return self.core.malformed(event.link, exc, now_s)
        return self.core.message(event.link, message, now_s)

    def _look_at_transport(self) -> bool:
        notifications = self.transport.notifications()
        for notification in notifications:
            self._perform(self.core.notified(notification.agent_name, notification.payload, self.now_s()))
        return bool(notifications)

    def _perform(self, effects: Iterable[decode.Effect]) -> None:
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            match effect:
                case decode.Emit():
                    self._take(effect.event)
                case decode.Send():
                    if isinstance(effect.message, wire.Register):
                        self._note_epoch(effect.message)
                    if not self.world.network.send(self, effect.link, wire.encode(effect.message)):
                        reason = "its connection is gone"
                        queue.extend(self.core.link_closed(effect.link, reason, self.now_s(), refused=False))
                case decode.Dial():
                    self.world.network.dial(self, effect.link, effect.address)
                case decode.HangUp():
                    self.world.network.hang_up(self, effect.link)

    def _note_epoch(self, message: wire.Register) -> None:
        receive = self._open.get(message.transfer_id)
        if receive is not None and message.epoch not in self._by_epoch:
            receive.epoch = message.epoch
            self._by_epoch[message.epoch] = receive


# --- memory ----------------------------------------------------------------------------------------------------------

_HEADS, _TOKENS, _HEAD_SIZE = 1, 2, 16
BLOCK_BYTES = 2 * _HEADS * _TOKENS * _HEAD_SIZE  # of one layer


class _Memory:
    """A cache of a few layers. Blocks are seen as flat bytes in one order, however the tensors lie in memory."""

    def __init__(self, dims: str, num_blocks: int, num_layers: int) -> None:
        sizes = {"B": num_blocks, "K": 2, "H": _HEADS, "N": _TOKENS, "D": _HEAD_SIZE}
        self.tensors = {
            f"layers.{layer}": torch.zeros([sizes[axis] for axis in dims], dtype=torch.uint8)
            for layer in range(num_layers)
        }
        order = [dims.index(axis) for axis in "BKHND"]
        self._views = [tensor.permute(order).numpy() for tensor in self.tensors.values()]
        self.block_at = {
            view[block, part].__array_interface__["data"][0]: block
            for view in self._views
            for block in range(num_blocks)
            for part in range(2)
        }

    def read(self, layer: int, block: int) -> bytes:
        """One block of one layer."""
        return bytes(self._views[layer][block].tobytes())

    def write(self, layer: int, block: int, data: bytes) -> None:
        """Overwrite one block of one layer."""
        view = self._views[layer][block]
        view[...] = np.frombuffer(data, dtype=np.uint8).reshape(view.shape)

    def fill(self, blocks: Iterable[int], value: int) -> None:
        """Overwrite whole blocks in all layers."""
        for view in self._views:
            for block in blocks:
                view[block] = value

    def is_filled(self, block: int, value: int) -> bool:
        """Whether every byte of the block is ``value``."""
        return all(bool((view[block] == value).all()) for view in self._views)


class Oracle:
    """Who may read and write where. Looks at every WRITE when it is posted and when it lands."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pushes: dict[FakeWrite, Push] = {}  # the owner of the source blocks when it was posted

    def posted(self, write: FakeWrite) -> None:
        """The source blocks belong to one open push, the destination blocks to one receive."""
        source, written = self._source(write), wire.decode_written(write.notification)
        blocks = self._blocks(source, write.sources, written)
        owners = [source.owner_of(block) for block in blocks]
        push = owners[0]
        if push is None or any(owner is not push for owner in owners) or push.is_over:
            raise Violation(f"{source!r} posts a WRITE of blocks {blocks}, which belong to {owners}")
        if [push.block_ids.get(position) for position in _positions(written)] != blocks:
            raise Violation(f"{source!r}: {push!r}: blocks {blocks} are not positions {_positions(written)}")
        self._pushes[write] = push
        receive = self._receive(write, written)
        if receive is not None:
            push.receive = receive

    def lands(self, write: FakeWrite) -> None:
        """Called just before its bytes are copied."""
        written = wire.decode_written(write.notification)
        push = self._pushes[write]
        receive = self._receive(write, written)
        sink = self._sink(write)
        blocks = self._blocks(sink, write.destinations, written)
        if receive is None or receive.transfer_id != push.transfer_id:
            raise Violation(f"{sink!r}: {push!r} is written for epoch {written.epoch}, which is {receive!r}")
        if [receive.block_ids.get(position) for position in _positions(written)] != blocks:
            raise Violation(f"{sink!r}: {receive!r}: blocks {blocks} were not asked for")
        if receive.is_free_for_sure:
            raise Violation(f"{sink!r}: blocks {blocks} are written after {receive.released or receive.finished!r}")
        if push.is_free_for_sure:
            raise Violation(f"{write.writer}: blocks are read after {push.released or push.finished!r}")
        if receive.is_free:
            sink.tainted.update(blocks)
        receive.landed.update(_positions(written))

    def check_received(self, sink: DecodeEngine, receive: Receive) -> None:
        """What decode calls done is in place, byte by byte."""
        for position, block in receive.block_ids.items():
            for layer in range(self._world.num_layers):
                if sink.memory.read(layer, block) != self._world.pattern(receive.transfer_id, layer, position):
                    raise Violation(f"{sink!r}: {receive!r} is done, but position {position} has other bytes")

    def _source(self, write: FakeWrite) -> PrefillEngine:
        source = self._world.by_agent[write.writer]
        assert isinstance(source, PrefillEngine), "prefill writes"
        return source

    def _sink(self, write: FakeWrite) -> DecodeEngine:
        sink = self._world.by_agent[write.target]
        assert isinstance(sink, DecodeEngine), "decode is written to"
        return sink

    def _receive(self, write: FakeWrite, written: wire.Written) -> Receive | None:
        return self._sink(write).receive_of(written.epoch)

    @staticmethod
    def _blocks(engine: Engine, addresses: npt.NDArray[np.uint64], written: wire.Written) -> list[int]:
        """The block of each position; a WRITE has one segment a row for each."""
        blocks = [engine.memory.block_at[address] for address in addresses.tolist()]
        one_row = blocks[: written.num_blocks]
        if blocks != one_row * (len(blocks) // written.num_blocks):
            raise Violation(f"{engine!r}: the rows of one WRITE name different blocks: {blocks}")
        return one_row


def _positions(written: wire.Written) -> list[int]:
    return list(range(written.first_block, written.first_block + written.num_blocks))


# --- the world -------------------------------------------------------------------------------------------------------

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
    """See the module. ``config`` is every engine's, unless it is given its own."""

    def __init__(self, seed: int = 0, config: Config | None = None, *, num_layers: int = 2, model: str = "m") -> None:
        self.seed = seed
        self.config = config or Config()
        self.num_layers = num_layers
        self.model = model
        self.random = random.Random(seed)
        self.clock = FakeClock()
        self.network = FakeNetwork(self.schedule, self._latency_s)
        self.fabric = FakeFabric(delivery=Delivery.manual, seed=seed, check_threads=False)
        self.fabric.on_post = self._posted
        self.oracle = Oracle(self)
        self.engines: list[Engine] = []  # every life that ever was, oldest first
        self.by_agent: dict[str, Engine] = {}
        self.hold_writes = False  # new WRITEs land only when the test says so
        self.stalling: set[str] = set()  # engine ids of decode to which new WRITEs stall
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._num_addresses = 0

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
    ) -> PrefillEngine:
        """A new prefill engine, or a new life of one; at an address of its own unless it is given one."""
        if address is None:
            self._num_addresses += 1
            address = ("10.0.0.1", self._num_addresses)
        engine = PrefillEngine(
            self, engine_id, self._next_life(), num_blocks, config or self.config, clock_offset_s, address
        )
        self._add(engine)
        return engine

    def decode(
        self, engine_id: str, *, num_blocks: int = 16, config: Config | None = None, clock_offset_s: float = 0.0
    ) -> DecodeEngine:
        """A new decode engine, or a new life of one."""
        engine = DecodeEngine(self, engine_id, self._next_life(), num_blocks, config or self.config, clock_offset_s)
        self._add(engine)
        return engine

    def pattern(self, transfer_id: str, layer: int, position: int) -> bytes:
        """The bytes of one block of one layer of a transfer."""
        key = f"{self.seed} {transfer_id} {layer} {position}".encode()
        return random.Random(zlib.crc32(key)).randbytes(BLOCK_BYTES)

    def _next_life(self) -> int:
        return len(self.engines) + 1

    def _add(self, engine: Engine) -> None:
        self.engines.append(engine)
        self.by_agent[engine.identity.agent_name] = engine

    # --- time --------------------------------------------------------------------------------------------------------

    def schedule(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later."""
        self._serial += 1
        heapq.heappush(self._agenda, (self.clock() + delay_s, self._serial, action))

    def step(self, until_s: float = float("inf")) -> bool:
        """Jump to the next event no later than ``until_s`` and carry it out; ``False`` when there is none."""
        dues = [due_s for engine in self.engines if (due_s := engine.next_due_s()) is not None]
        dues += [self._agenda[0][0]] if self._agenda else []
        due_s = max(self.clock(), min(dues, default=float("inf")))
        if due_s > until_s or due_s == float("inf"):
            return False
        self.clock.set(due_s)
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
        while any(engine.turn() for engine in self.engines):
            pass

    def _latency_s(self) -> float:
        return self.random.uniform(*LATENCY_S)

    # --- WRITEs ------------------------------------------------------------------------------------------------------

    @property
    def writes(self) -> list[FakeWrite]:
        """WRITEs that neither landed nor failed, oldest first."""
        return list(self.fabric.in_flight)

    def _posted(self, write: FakeWrite) -> None:
        self.oracle.posted(write)
        if self.by_agent[write.target].engine_id in self.stalling:
            self.fabric.stall(write)
        if not self.hold_writes:
            self.schedule(self._latency_s(), partial(self.finish, write))

    def finish(self, write: FakeWrite) -> None:
        """The WRITE lands and its writer can see the end, unless something holds it up."""
        if self.fabric.can_complete(write):
            self.oracle.lands(write)
            self.fabric.complete(write)

    def land(self, write: FakeWrite) -> None:
        """The bytes land; the writer sees no end, neither now nor later."""
        if write.state is WriteState.in_flight:
            self.oracle.lands(write)
            self.fabric.land(write)

    def fail_write(self, write: FakeWrite, *, disconnected: bool) -> None:
        """The WRITE ends in an error: the connection is gone, or nobody knows whether its bytes land."""
        code = FailureCode.peer_lost if disconnected else FailureCode.write_failed
        error = TransportError(code, f"write to {write.target}: made to fail by the world", disconnected=disconnected)
        self.fabric.fail(write, error)

    def resume_writes(self) -> None:
        """Stalled WRITEs go on, and those that were held up get another chance."""
        for write in self.writes:
            if self.by_agent[write.target].engine_id not in self.stalling:
                self.fabric.resume(write)
                self.schedule(self._latency_s(), partial(self.finish, write))

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
        self.network.tamper = None
        self.network.release()
        self.stalling.clear()
        self.hold_writes = False
        alive = [engine for engine in self.engines if engine.is_alive]
        for engine in alive:
            if engine.is_frozen:
                engine.thaw()
        for one in self.engines:
            for other in self.engines:
                if one is not other:
                    self.network.delay(one.name, other.name, 0.0)
                    self.mend(one, other)

    # --- checks ------------------------------------------------------------------------------------------------------

    @property
    def accounts(self) -> list[Push | Receive]:
        """Every transfer of every engine that was not killed."""
        found: list[Push | Receive] = []
        for engine in self.engines:
            if not engine.was_killed:
                found += engine.pushes if isinstance(engine, PrefillEngine) else []
                found += engine.receives if isinstance(engine, DecodeEngine) else []
        return found

    def settle(self, limit_s: float) -> float:
        """Run until every transfer has its outcome and its blocks back; how long it took."""
        return self.run_until(lambda: all(account.is_free for account in self.accounts), limit_s)

    def check(self) -> None:
        """What must hold at every moment."""
        for engine in self.engines:
            if isinstance(engine, DecodeEngine):
                for block in engine.forbidden:
                    if not engine.memory.is_filled(block, CANARY):
                        raise Violation(f"{engine!r}: block {block} was written, though nobody may")
            elif isinstance(engine, PrefillEngine):
                for push in engine.pushes:
                    self._check_agreement(engine, push)

    def _check_agreement(self, engine: PrefillEngine, push: Push) -> None:
        receive = push.receive
        if receive is None:
            return
        if push.outcome is Outcome.done and receive.landed != set(receive.block_ids):
            raise Violation(f"{engine!r}: {push!r} is done, but only {receive.landed} of {receive!r} landed")
        if not push.is_over or not receive.is_over or push.outcome is receive.outcome:
            return
        for one, other in ((push, receive), (receive, push)):
            if one.outcome is Outcome.done and other.code not in _DECISIONS:
                raise Violation(f"{engine!r}: the two sides disagree: {push.finished!r}, {receive.finished!r}")

    def check_settled(self) -> None:
        """What must hold when every transfer is over: nothing is left of any."""
        self.check()
        for account in self.accounts:
            if not account.is_free:
                raise Violation(f"{account!r} has not come to its end")
        for engine in self.engines:
            if engine.is_alive:
                self._check_empty(engine)

    @staticmethod
    def _check_empty(engine: Engine) -> None:
        gauges = engine.core.gauges()
        counts = engine.transport.counts
        links = gauges["links"] if isinstance(engine, DecodeEngine) else 0  # each has its heartbeat's timer
        left = {name: gauges[name] for name in _EMPTY_AT_REST & gauges.keys() if gauges[name]}
        if left or gauges["timers"] > links or counts.writes_posted != counts.writes_released:
            raise Violation(f"{engine!r} is at rest, but has {left}, {gauges['timers']} timers, {counts}")


_EMPTY_AT_REST = {
    "pushes_open",
    "pushes_held",
    "registrations_waiting",
    "pushes_behind_handshakes",
    "pushes_in_lines",
    "writes_in_flight",
    "bytes_in_flight",
    "receives_open",
    "receives_held",
}
