"""A prefill engine in a world, or one rank of it: its core, the effects of it, and its caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpush import peer, prefill, prefill_effects, wire
from kvpush.config import Config
from kvpush.errors import Failure, TransportError, UsageError
from kvpush.events import BlocksReleased, PushFinished
from kvpush.link import LinkClosed, LinkEvent, LinkOpened
from kvpush.pushes import Part
from kvpush.testing.accounts import Push
from kvpush.testing.engine import Engine
from kvpush.testing.memory import SCRIBBLE
from kvpush.testing.network import Address
from kvpush.testing.slices import Slice
from kvpush.testing.violations import Violation
from kvpush.transport import WriteHandle

if TYPE_CHECKING:
    from kvpush.testing.world import World


class PrefillEngine(Engine):
    """Made by :meth:`World.prefill`."""

    def __init__(
        self,
        world: World,
        engine_id: str,
        life: int,
        num_blocks: int,
        held: Slice,
        config: Config,
        clock_offset_s: float,
        address: Address,
    ) -> None:
        super().__init__(world, engine_id, life, "BKHND", num_blocks, held, config, clock_offset_s)
        self.address = address
        self.memory.fill(range(num_blocks), SCRIBBLE)
        self.pushes: list[Push] = []
        self.warnings: list[str] = []  # logged
        self._open: dict[str, Push] = {}
        self._held: dict[str, deque[Push]] = {}
        self._owners: dict[int, Push] = {}  # block -> the push that it is lent to
        self._handles: dict[int, WriteHandle] = {}
        self.core: prefill.PrefillCore = prefill.PrefillCore(self.identity, config, self.registry, self.geometry)
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
        """As ``PrefillPusher.push``. The blocks get the transfer's bytes; with ``fenced`` only at :meth:`compute`.

        Raises UsageError for a block that is in use.
        """
        positions = {first_block + i: block for i, block in enumerate(block_ids)}
        if taken := [block for block in block_ids if block in self._owners]:
            raise UsageError(f"{self!r}: blocks {taken} belong to {self._owners[taken[0]]!r}")
        push = self._open.get(transfer_id)
        if push is None:
            push = self._open[transfer_id] = Push(transfer_id, {})
            self.pushes.append(push)
        self._called("push", transfer_id, _shown(positions, last=last, fenced=fenced))
        push.block_ids |= positions
        push.lease_from_s = push.pushed_s = self.now_s()
        index, push.num_chunks = push.num_chunks, push.num_chunks + 1
        push.has_last = push.has_last or last
        self._owners |= dict.fromkeys(block_ids, push)
        if fenced:
            push.num_fenced += 1
        else:
            self._compute(transfer_id, positions)
        self._perform(
            self.core.push(
                transfer_id,
                (Part(0, (range(len(self.held.layers)),), first_block, np.array(block_ids, dtype=np.int64)),),
                last=last,
                fenced=fenced,
                now_s=self.now_s(),
                index=index,
            )
        )
        return push

    def compute(self, push: Push, chunk_index: int, positions: Iterable[int]) -> None:
        """The device has computed a fenced chunk."""
        self._called("fence reached", push.transfer_id, f"chunk {chunk_index}")
        push.num_fenced -= 1
        push.lease_from_s = self.now_s()
        self._compute(push.transfer_id, {position: push.block_ids[position] for position in positions})
        self._perform(self.core.fences_reached(push.transfer_id, [chunk_index], self.now_s()))

    def cancel(self, transfer_id: str) -> None:
        """As ``PrefillPusher.cancel``."""
        self._called("cancel", transfer_id)
        if transfer_id in self._open:
            self._open[transfer_id].is_cancelled = True
        self._perform(self.core.cancel(transfer_id, self.now_s()))

    def fail(self, transfer_id: str, failure: Failure) -> None:
        """As the loop does when a fence raises."""
        self._perform(self.core.fail(transfer_id, failure, self.now_s()))

    def drain(self) -> None:
        """As ``PrefillPusher.drain``."""
        self._called("drain", "")
        self._perform(self.core.drain(self.now_s()))

    def close(self) -> None:
        """As the loop ends: settle what settles within ``close_timeout_s``, abandon the rest, destroy the agent."""
        self._called("close", "")
        self.is_closing = True
        self._perform(self.core.close(self.now_s()))
        self.world.run_for(self.config.close_timeout_s, until=lambda: not self._handles)
        self._perform(self.core.abandon(self.now_s()))
        for handle in self._handles.values():
            self.transport.abandon_write(handle)
        self._handles.clear()
        self.transport.close()
        self._perform(self.core.transport_closed(self.now_s()))
        self._end()
        self.world.network.leave(self, in_order=True)

    def restart(self) -> PrefillEngine:
        """Another process with the same id at the same address. The old one is killed if it lives."""
        if self.is_alive:
            self.kill()
        return self.world.prefill(
            self.engine_id,
            num_blocks=self.num_blocks,
            config=self.config,
            address=self.address,
            share=self.held.share,
            layers=self.held.layers,
        )

    def siblings(self) -> list[PrefillEngine]:
        """The newest life of each rank of its engine, itself among them unless it has a later one."""
        return [rank for rank in self.world.ranks_of(self.engine_id) if isinstance(rank, PrefillEngine)]

    def owner_of(self, block_id: int) -> Push | None:
        """The push that this block is lent to."""
        return self._owners.get(block_id)

    def open_push(self, transfer_id: str) -> Push | None:
        """The one without an outcome."""
        return self._open.get(transfer_id)

    def is_held(self, transfer_id: str) -> bool:
        """Whether blocks of an earlier use of this id are held."""
        return transfer_id in self._held

    def free_blocks(self) -> list[int]:
        """Blocks that are the caller's."""
        return [block for block in range(self.num_blocks) if block not in self._owners]

    def _compute(self, transfer_id: str, positions: dict[int, int]) -> None:
        for position, block in positions.items():
            for layer in self.held.layers:
                self.memory.write(layer, block, self.world.pattern(transfer_id, layer, position))

    def _take(self, event: PushFinished | BlocksReleased) -> None:
        if isinstance(event, BlocksReleased):
            push = self._released(event.transfer_id)
        else:
            found = self._open.pop(event.transfer_id, None)
            if found is None:
                raise Violation("one-outcome", f"{self!r}: {event!r} is for no open push")
            push = found
            if not event.blocks_reusable:
                self._held.setdefault(event.transfer_id, deque()).append(push)
        push.take(event, self.now_s())
        for observer in self.world.observers:
            observer.emitted(self, push, event)
        if push.is_free:
            self.world.oracle.source_freed(self, push)
            self.memory.fill(push.block_ids.values(), SCRIBBLE)
            for block in push.block_ids.values():
                del self._owners[block]

    def _released(self, transfer_id: str) -> Push:
        held = self._held.get(transfer_id)
        if not held:
            raise Violation("one-outcome", f"{self!r}: blocks of {transfer_id!r} are released, but none are held")
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
        sender = self.world.peer_of(self, event.link)
        for observer in self.world.observers:
            observer.handled(self, sender, message)
        return self.core.message(event.link, message, now_s)

    def _look_at_transport(self) -> bool:
        if not self._handles:
            return False
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
            self.world.write_ended(self, write_id, failure)
            self._perform(self._settled(write_id, failure))
        return has_progressed

    def _settled(self, write_id: int, failure: Failure | None) -> list[prefill_effects.Effect]:
        if isinstance(failure, TransportError) and not failure.disconnected:
            return self.core.write_doubted(write_id, failure, self.now_s())
        return self.core.write_settled(write_id, failure, self.now_s())

    def _perform(self, effects: Iterable[prefill_effects.Effect]) -> None:
        self._is_due_known = False
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            match effect:
                case prefill_effects.Emit():
                    self._take(effect.event)
                case prefill_effects.Warn():
                    self.warnings.append(effect.text)
                case prefill_effects.Send():
                    queue.extend(self._send(effect))
                case prefill_effects.PostWrite():
                    queue.extend(self._post(effect))
                case prefill_effects.AbandonWrite():
                    self.world.oracle.ended(self, effect.write_id)
                    self.transport.abandon_write(self._handles.pop(effect.write_id))
                case prefill_effects.LoadPeer():
                    queue.extend(self._load(effect))
                case prefill_effects.ReleasePeer():
                    peer.unload(effect.peer, self.transport)

    def _send(self, effect: prefill_effects.Send) -> list[prefill_effects.Effect]:
        receiver = self.world.peer_of(self, effect.link)
        for observer in self.world.observers:
            observer.sent(self, receiver, effect.message)
        if self.world.network.send(self, effect.link, wire.encode(effect.message)):
            return []
        return self.core.link_closed(effect.link, "its connection is gone, or it does not read", self.now_s())

    def _post(self, effect: prefill_effects.PostWrite) -> list[prefill_effects.Effect]:
        loaded: peer.Peer = effect.peer
        assert loaded.remote is not None, "pieces without a byte are not posted"
        self.world.posting(self, effect.write_id)
        try:
            handle = self.transport.post_write(loaded.remote, *loaded.indices(effect.pieces), effect.notification)
        except Failure as exc:
            return self.core.write_settled(effect.write_id, exc, self.now_s())
        self._handles[effect.write_id] = handle
        return []

    def _load(self, effect: prefill_effects.LoadPeer) -> list[prefill_effects.Effect]:
        now_s = self.now_s()
        self.world.oracle.loads(self, effect)
        try:
            loaded = peer.load(effect, self.transport, self.geometry, self.identity.share, self.config.min_tile_bytes)
        except Failure as exc:
            return self.core.peer_failed(effect.generation, effect.attempt, exc, now_s)
        return self.core.peer_loaded(effect.generation, effect.attempt, loaded, now_s)


def _shown(positions: dict[int, int], *, last: bool, fenced: bool) -> str:
    """A chunk, for people."""
    marks = ("" if last else ", more to come") + (", fenced" if fenced else "")
    return f"{list(positions.values())} from {min(positions, default=0)}{marks}"
