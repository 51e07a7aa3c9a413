"""A decode engine in a world, or one rank of it: its core, the effects of it, and its caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpush import decode, decode_effects, receives, wire
from kvpush.config import Config
from kvpush.errors import Failure, UsageError
from kvpush.events import BlocksReleased, Outcome, ReceiveFinished
from kvpush.layout import DEFAULT_GROUP
from kvpush.link import LinkClosed, LinkEvent, LinkOpened
from kvpush.testing.accounts import Receive
from kvpush.testing.engine import Engine
from kvpush.testing.memory import CANARY
from kvpush.testing.slices import Slice
from kvpush.testing.violations import Violation

if TYPE_CHECKING:
    from kvpush.testing.prefill_engine import PrefillEngine
    from kvpush.testing.world import World


class DecodeEngine(Engine):
    """Made by :meth:`World.decode`."""

    def __init__(
        self,
        world: World,
        engine_id: str,
        life: int,
        num_blocks: int,
        held: Slice,
        config: Config,
        clock_offset_s: float,
    ) -> None:
        super().__init__(world, engine_id, life, "KBHND", num_blocks, held, config, clock_offset_s)
        self.memory.fill(range(num_blocks), CANARY)
        self.receives: list[Receive] = []
        # block -> its units that a late WRITE has hit after they were given up unproven
        self.tainted: dict[int, int] = {}
        self._open: dict[str, Receive] = {}
        self._held: dict[str, deque[Receive]] = {}
        self._by_epoch: dict[int, Receive] = {}
        self._granted: dict[int, Receive] = {}
        self.metadata = self.transport.metadata()
        self.core: decode.DecodeCore = decode.DecodeCore(
            self.identity, self.metadata, self.geometry, config, self.registry
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
        """As ``DecodeReceiver.expect``. ``source``: any rank of the prefill engine, and ``incarnation`` is that rank's.

        Raises UsageError for an id or a block that is in use.
        """
        if transfer_id in self._open:
            raise UsageError(f"{self!r}: {transfer_id!r} is expected already")
        if taken := [block for block in block_ids if block in self._granted]:
            raise UsageError(f"{self!r}: blocks {taken} belong to {self._granted[taken[0]]!r}")
        limit_s = self.config.receive_deadline_s if deadline_s is None else deadline_s
        positions = {first_block + i: block for i, block in enumerate(block_ids)}
        receive = Receive(transfer_id=transfer_id, block_ids=positions, held=self.held, source=source)
        receive.deadline_s = self.now_s() + limit_s
        self.receives.append(receive)
        self._open[transfer_id] = receive
        self._granted |= dict.fromkeys(block_ids, receive)
        self._called("expect", transfer_id, f"{list(block_ids)} from {first_block}, of {source.engine_id}")
        self._perform(
            self.core.expect(
                transfer_id,
                (receives.Place(DEFAULT_GROUP, first_block, np.array(block_ids, dtype=np.int64)),),
                num_blocks=len(block_ids),
                source=_source(source, incarnation),
                deadline_s=limit_s,
                now_s=self.now_s(),
            )
        )
        return receive

    def cancel(self, transfer_id: str) -> None:
        """As ``DecodeReceiver.cancel``."""
        self._called("cancel", transfer_id)
        if transfer_id in self._open:
            self._open[transfer_id].is_cancelled = True
        self._perform(self.core.cancel(transfer_id, self.now_s()))

    def renew(self, transfer_ids: Sequence[str], source: PrefillEngine) -> None:
        """As ``DecodeReceiver.renew``."""
        self._called("renew", " ".join(transfer_ids))
        self._perform(self.core.renew(list(transfer_ids), source=_source(source), now_s=self.now_s()))

    def close(self) -> None:
        """As the loop ends."""
        self._called("close", "")
        self.is_closing = True
        self._perform(self.core.close(self.now_s()))
        self.world.run_for(self.config.close_timeout_s, until=lambda: self.core.num_receives == 0)
        self.transport.close()
        self._perform(self.core.transport_closed(self.now_s()))
        self._end()
        self.world.network.leave(self, in_order=True)

    def restart(self) -> DecodeEngine:
        """Another process with the same id. The old one is killed if it lives."""
        if self.is_alive:
            self.kill()
        return self.world.decode(
            self.engine_id,
            num_blocks=self.num_blocks,
            config=self.config,
            share=self.held.share,
            layers=self.held.layers,
        )

    @property
    def last_epoch(self) -> int:
        """The greatest that it has registered anything under; 0 before."""
        return max(self._by_epoch, default=0)

    def receive_of(self, epoch: int) -> Receive | None:
        """The receive that was registered under this epoch."""
        return self._by_epoch.get(epoch)

    def open_receive(self, transfer_id: str) -> Receive | None:
        """The one without an outcome."""
        return self._open.get(transfer_id)

    def is_held(self, transfer_id: str) -> bool:
        """Whether blocks of an earlier use of this id are held."""
        return transfer_id in self._held

    def free_blocks(self) -> list[int]:
        """Blocks that are the caller's."""
        return [block for block in range(self.num_blocks) if block not in self._granted]

    @property
    def forbidden(self) -> list[int]:
        """Blocks that must hold the canary now."""
        return [block for block in range(self.num_blocks) if block not in self._granted and block not in self.tainted]

    def _take(self, event: ReceiveFinished | BlocksReleased) -> None:
        if isinstance(event, BlocksReleased):
            held = self._held.get(event.transfer_id)
            if not held:
                reason = f"{self!r}: blocks of {event.transfer_id!r} are released, but none are held"
                raise Violation("one-outcome", reason)
            receive = held.popleft()
            if not held:
                del self._held[event.transfer_id]
        else:
            found = self._open.pop(event.transfer_id, None)
            if found is None:
                raise Violation("one-outcome", f"{self!r}: {event!r} is for no open receive")
            receive = found
            if not event.blocks_reusable:
                self._held.setdefault(event.transfer_id, deque()).append(receive)
        receive.take(event, self.now_s())
        for observer in self.world.observers:
            observer.emitted(self, receive, event)
        if isinstance(event, ReceiveFinished) and event.outcome is Outcome.done:
            self.world.oracle.check_received(self, receive)
        if receive.is_free:
            self.world.oracle.sink_freed(self, receive)
            self._reuse(receive)

    def _reuse(self, receive: Receive) -> None:
        self.memory.fill(receive.block_ids.values(), CANARY)
        for block in receive.block_ids.values():
            del self._granted[block]
            self.tainted.pop(block, None)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _handled(self, event: LinkEvent[Any]) -> list[decode_effects.Effect]:
        now_s = self.now_s()
        if isinstance(event, LinkOpened):
            return self.core.link_opened(event.link, now_s)
        if isinstance(event, LinkClosed):
            return self.core.link_closed(event.link, event.reason, now_s, refused=event.refused)
        try:
            message = wire.decode_to_decode(event.frames)
        except Failure as exc:
            return self.core.malformed(event.link, exc, now_s)
        peer = self.world.peer_of(self, event.link)
        for observer in self.world.observers:
            observer.handled(self, peer, message)
        if isinstance(message, wire.Failed) and peer is not None:
            receive = self._by_epoch.get(message.epoch)
            if receive is not None and not receive.is_over:
                receive.told_by.setdefault(peer.life, message.code)
        return self.core.message(event.link, message, now_s)

    def _look_at_transport(self) -> bool:
        if not self.transport.has_news:
            return False
        notifications = self.transport.notifications()
        for notification in notifications:
            self._perform(self.core.notified(notification.agent_name, notification.payload, self.now_s()))
        return bool(notifications)

    def _perform(self, effects: Iterable[decode_effects.Effect]) -> None:
        self._is_due_known = False
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            match effect:
                case decode_effects.Emit():
                    self._take(effect.event)
                case decode_effects.Send():
                    queue.extend(self._send(effect))
                case decode_effects.Dial():
                    self.world.network.dial(self, effect.link, effect.address)
                case decode_effects.HangUp():
                    self.world.network.hang_up(self, effect.link)

    def _send(self, effect: decode_effects.Send) -> list[decode_effects.Effect]:
        if isinstance(effect.message, wire.Register):
            self._note_epoch(effect.message)
        peer = self.world.peer_of(self, effect.link)
        for observer in self.world.observers:
            observer.sent(self, peer, effect.message)
        if self.world.network.send(self, effect.link, wire.encode(effect.message)):
            return []
        reason = "its connection is gone, or it does not read"
        return self.core.link_closed(effect.link, reason, self.now_s(), refused=False)

    def _note_epoch(self, message: wire.Register) -> None:
        receive = self._open.get(message.transfer_id)
        if receive is None or receive.epoch is not None:
            return  # over already, or the late notice of an earlier use of the id that asked for nothing
        asked = [block for want in message.wants for block in wire.unpack_block_ids(want.block_ids).tolist()]
        if asked == list(receive.block_ids.values()):
            receive.epoch = message.epoch
            self._by_epoch[message.epoch] = receive


def _source(engine: PrefillEngine, incarnation: str = "") -> receives.Source:
    """All ranks of its engine, as far as they have ever started."""
    addresses = {other.rank: other.address for other in engine.siblings()} | {engine.rank: engine.address}
    share = engine.held.share
    return receives.Source(engine.engine_id, share.pp_size, share.tp_size, addresses, {engine.rank: incarnation})
