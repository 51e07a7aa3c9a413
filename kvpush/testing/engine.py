"""One life of one rank of an engine in a world: what a process is, whichever side it is on.

It drives its core the way the loops of ``PrefillPusher`` and ``DecodeReceiver`` do: messages are encoded and decoded,
effects are carried out in order, timers fire when they are due.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvpush import decode, prefill
from kvpush.config import Config
from kvpush.identity import Identity, holdings_of
from kvpush.layout import KVCacheSpec, fingerprint, geometry_of, memory_ranges
from kvpush.link import LinkEvent
from kvpush.registry import Registry
from kvpush.testing.fake_transport import FakeTransport
from kvpush.testing.memory import Memory
from kvpush.testing.slices import Slice
from kvpush.testing.violations import Violation
from kvpush.wire import Rank

if TYPE_CHECKING:
    from kvpush.testing.world import World

MAX_TICKS = 10_000  # of one engine at one instant: more is a timer that never gets past now
ROUNDING_S = 1e-9  # between two clocks that are a million seconds apart


class Engine(ABC):
    """Made by :meth:`World.prefill` and :meth:`World.decode`."""

    core: prefill.PrefillCore | decode.DecodeCore

    def __init__(
        self,
        world: World,
        engine_id: str,
        life: int,
        dims: str,
        num_blocks: int,
        held: Slice,
        config: Config,
        clock_offset_s: float,
    ) -> None:
        self.world = world
        self.clock_offset_s = clock_offset_s
        self.engine_id = engine_id
        self.config = config
        self.num_blocks = num_blocks
        self.is_alive = True
        self.is_frozen = False
        self.is_closing = False
        self.was_killed = False
        self.life = life
        self.held = held
        self.memory = Memory(dims, num_blocks, held)
        share = held.share
        spec = KVCacheSpec(
            dims=dims,
            model=world.model,
            tp_rank=share.tp_rank,
            tp_size=share.tp_size,
            pp_rank=share.pp_rank,
            pp_size=share.pp_size,
            total_kv_heads=held.model.num_heads,
        )
        self.geometry = geometry_of(self.memory.tensors, spec)
        self.identity = Identity(
            engine_id,
            incarnation=f"life {life}",
            share=share,
            agent_name=f"{engine_id}/{share.pp_rank}.{share.tp_rank}#{life}",
            fingerprint=fingerprint(self.geometry, spec),
            holdings=holdings_of(self.geometry),
        )
        self.registry = Registry(config, self.now_s, random.Random(f"{world.seed} {self.name} {life}"))
        self.transport: FakeTransport = world.fabric.transport(
            self.identity.agent_name, self.geometry.memory, memory_ranges(self.geometry), config
        )
        self._inbox: deque[LinkEvent[Any]] = deque()
        self._due_s: float | None = None  # when the core's next timer is due, on its own clock
        self._is_due_known = False  # any call of the core may move it

    @property
    def name(self) -> str:
        """Its name on the network, which a restarted process inherits: its engine's, with its rank if it has others."""
        if self.held.is_whole_engine:
            return self.engine_id
        return f"{self.engine_id}/{self.rank[0]}.{self.rank[1]}"

    @property
    def rank(self) -> Rank:
        """``(pp_rank, tp_rank)``; (0, 0) for an engine that is one process."""
        return self.held.share.rank

    @property
    def agent_name(self) -> str:
        """Its name on the fabric, which no other life ever had."""
        return self.identity.agent_name

    @property
    def is_running(self) -> bool:
        """Alive and awake."""
        return self.is_alive and not self.is_frozen

    @property
    def is_serving(self) -> bool:
        """Running, and not about to close: its callers may call."""
        return self.is_running and not self.is_closing

    def now_s(self) -> float:
        """Its own monotonic clock, which started at another time than everybody else's."""
        return self.world.clock() + self.clock_offset_s

    # --- the process -------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """SIGSTOP: nothing of it runs; its links look alive."""
        self.is_frozen = True
        self.world.fabric.freeze(self.agent_name)
        self.world.network.disturb(self.name)

    def thaw(self, *, clock_stood_s: float = 0.0) -> None:
        """SIGCONT: everything that waited comes at once. ``clock_stood_s``: its clock missed that much of the pause, as
        a monotonic clock does when the whole machine is suspended."""
        self.is_frozen = False
        self.clock_offset_s -= clock_stood_s
        self.world.fabric.thaw(self.agent_name)
        self.world.resume_writes()

    def kill(self) -> None:
        """SIGKILL: its links are reset, its memory is gone."""
        self.was_killed = True
        self._end()
        self._inbox.clear()
        self.world.network.leave(self)
        self.world.fabric.kill(self.agent_name)

    def _end(self) -> None:
        self.is_alive = False
        self.world.died(self)

    def drop_engine(self, engine_id: str) -> None:
        """The router knows that a remote engine is gone."""
        self._called("drop_engine", "", engine_id)
        self._perform(self.core.drop_engine(engine_id, self.now_s()))

    def link_event(self, event: LinkEvent[Any]) -> None:
        """From the network; looked at in the engine's next turn."""
        if self.is_alive:
            self._inbox.append(event)

    def turn(self) -> bool:
        """What a loop does in one turn. Whether something happened."""
        if self.is_frozen or not self.is_alive:
            return False
        has_progressed = bool(self._inbox)
        while self._inbox:
            self._perform(self._handled(self._inbox.popleft()))
        has_progressed |= self._look_at_transport()
        due_s = self._core_due_s()
        if due_s is not None and due_s <= self.now_s():
            has_progressed |= self._tick()
        return has_progressed

    def _tick(self) -> bool:
        now_s = self.now_s()
        for count in range(MAX_TICKS):
            due_s = self._core_due_s()
            if due_s is None or due_s > now_s:
                return count > 0
            self._perform(self.core.tick(now_s))
        raise Violation("no-spinning", f"{self!r}: a timer is due now however often it fires")

    def next_due_s(self) -> float | None:
        """When :meth:`turn` has something to do by itself, on the world's clock."""
        due_s = self._core_due_s() if self.is_running else None
        return None if due_s is None else due_s - self.clock_offset_s + (ROUNDING_S if self.clock_offset_s else 0.0)

    def _core_due_s(self) -> float | None:
        if not self._is_due_known:
            self._due_s, self._is_due_known = self.core.next_due_s(), True
        return self._due_s

    def _called(self, call: str, transfer_id: str, detail: str = "") -> None:
        for observer in self.world.observers:
            observer.called(self, call, transfer_id, detail)

    @abstractmethod
    def restart(self) -> Engine:
        """Another process in its place, with the same names. The old one is killed if it lives."""

    @abstractmethod
    def cancel(self, transfer_id: str) -> None:
        """The caller gives a transfer up."""

    @abstractmethod
    def close(self) -> None:
        """In order, within ``close_timeout_s``."""

    @abstractmethod
    def _handled(self, event: LinkEvent[Any]) -> list[Any]: ...

    @abstractmethod
    def _look_at_transport(self) -> bool: ...

    @abstractmethod
    def _perform(self, effects: Iterable[Any]) -> None: ...

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} life {self.life}>"
