"""Who may read and write where, at every instant. Looks at each WRITE when it is posted and when it lands, and at each
block when it is called reusable.

A hold that ended by policy (``proven=False``) is the caller's own risk, and is modelled: what lands afterwards *taints*
the block until its next owner's bytes, or the next owner, take its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpush import prefill_effects, wire
from kvpush.testing.accounts import Push, Receive
from kvpush.testing.decode_engine import DecodeEngine
from kvpush.testing.fake_transport import FakeWrite
from kvpush.testing.prefill_engine import PrefillEngine
from kvpush.testing.violations import Violation

if TYPE_CHECKING:
    from kvpush.testing.world import World


@dataclass(slots=True, eq=False)
class Grant:
    """What the oracle knows of one WRITE."""

    source: PrefillEngine
    sink: DecodeEngine
    push: Push
    receive: Receive | None  # None: no receive of the target was ever registered under this epoch
    written: wire.Written
    write_id: int
    posted_s: float  # on the writer's clock

    @property
    def positions(self) -> list[int]:
        """Those that it fills."""
        spans = self.written.spans
        return [slot for span in spans for slot in range(span.first_slot, span.first_slot + span.num_slots)]


class Oracle:
    """See the module. A broken rule raises :class:`Violation` at once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.grants: dict[FakeWrite, Grant] = {}  # of every WRITE that can still land
        self._by_id: dict[tuple[int, int], Grant] = {}  # (life, write id) of those that are tracked

    # --- WRITEs ------------------------------------------------------------------------------------------------------

    def posted(self, write: FakeWrite, write_id: int) -> Grant:
        """The source blocks belong to one open push."""
        source, sink = self._world.by_agent[write.writer], self._world.by_agent[write.target]
        assert isinstance(source, PrefillEngine) and isinstance(sink, DecodeEngine), "prefill writes to decode"
        written = wire.decode_written(write.notification)
        blocks = _blocks(source, write.sources, written)
        owners = [source.owner_of(block) for block in blocks]
        push = owners[0]
        if push is None or any(owner is not push for owner in owners) or push.is_over:
            raise Violation("owner-writes", f"{source!r} posts a WRITE of blocks {blocks}, which belong to {owners}")
        receive = sink.receive_of(written.epoch)
        grant = Grant(source, sink, push, receive, written, write_id, source.now_s())
        if [push.block_ids.get(position) for position in grant.positions] != blocks:
            reason = f"{source!r}: {push!r}: blocks {blocks} are not positions {grant.positions}"
            raise Violation("owner-writes", reason)
        if receive is not None:
            if twice := receive.posted.intersection(grant.positions):
                raise Violation("each-position-once", f"{source!r}: positions {twice} of {receive!r} are written twice")
            receive.posted.update(grant.positions)
            push.receive = receive
        self.grants[write] = grant
        self._by_id[source.life, write_id] = grant
        return grant

    def lands(self, write: FakeWrite, *, is_whole: bool = True) -> Grant:
        """Called just before bytes of it are copied."""
        grant = self.grants[write]
        push, receive, sink = grant.push, grant.receive, grant.sink
        blocks = _blocks(sink, write.destinations, grant.written)
        if receive is None or receive.transfer_id != push.transfer_id:
            reason = f"{sink!r}: {push!r} is written for epoch {grant.written.epoch}, which is {receive!r}"
            raise Violation("only-granted-blocks", reason)
        if [receive.block_ids.get(position) for position in grant.positions] != blocks:
            raise Violation("only-granted-blocks", f"{sink!r}: {receive!r}: blocks {blocks} were not asked for")
        if receive.is_free_for_sure:
            reason = f"{sink!r}: blocks {blocks} are written after {receive.released or receive.finished!r}"
            raise Violation("only-granted-blocks", reason)
        if push.is_free_for_sure:
            reason = f"{write.writer}: blocks are read after {push.released or push.finished!r}"
            raise Violation("source-kept", reason)
        if receive.is_free:
            sink.tainted.update(blocks)
        elif is_whole:
            sink.tainted.difference_update(blocks)
        if is_whole:
            receive.landed.update(grant.positions)
        return grant

    def ended(self, source: PrefillEngine, write_id: int) -> Grant | None:
        """The writer has seen its end, and asks no more."""
        return self._by_id.pop((source.life, write_id), None)

    def in_flight(self) -> list[Grant]:
        """Of every WRITE that can still land, abandoned ones included."""
        return [self.grants[write] for write in self._world.fabric.in_flight]

    def tracked(self) -> list[Grant]:
        """Of every WRITE that its engine still asks about."""
        return list(self._by_id.values())

    def in_flight_of(self, push: Push) -> list[Grant]:
        """Those of one push that its engine still asks about."""
        tracked = self._by_id.values()
        return [grant for grant in tracked if grant.push is push]

    # --- blocks ------------------------------------------------------------------------------------------------------

    def source_freed(self, source: PrefillEngine, push: Push) -> None:
        """Prefill calls the blocks of a push reusable."""
        if push.is_free_for_sure:
            for grant in self.in_flight():
                if grant.push is push:
                    reason = f"{source!r}: {push!r} is called reusable, but a WRITE of {grant.positions} may read it"
                    raise Violation("source-kept", reason)

    def sink_freed(self, sink: DecodeEngine, receive: Receive) -> None:
        """Decode calls the blocks of a receive reusable."""
        if receive.is_free_for_sure:
            for grant in self.in_flight():
                if grant.receive is receive:
                    reason = f"{sink!r}: {receive!r} is called reusable, but a WRITE of {grant.positions} may land"
                    raise Violation("quiet-before-reuse", reason)

    def check_received(self, sink: DecodeEngine, receive: Receive) -> None:
        """What decode calls done is in place, byte by byte, but for blocks that a given-up WRITE has hit since."""
        for position, block in receive.block_ids.items():
            if block in sink.tainted:
                continue
            for layer in range(self._world.num_layers):
                if sink.memory.read(layer, block) != self._world.pattern(receive.transfer_id, layer, position):
                    reason = f"{sink!r}: {receive!r} is done, but position {position} has other bytes"
                    raise Violation("done-means-there", reason)

    # --- metadata ----------------------------------------------------------------------------------------------------

    def loads(self, source: PrefillEngine, effect: prefill_effects.LoadPeer) -> None:
        """What reaches NIXL is what the named agent made, bit by bit."""
        named = self._world.by_agent.get(effect.agent_name)
        if not isinstance(named, DecodeEngine) or named.engine_id != effect.engine_id:
            reason = f"{source!r} loads agent {effect.agent_name!r} for engine {effect.engine_id!r}"
            raise Violation("metadata-verified", reason)
        if named.metadata != effect.blob or named.geometry != effect.geometry:
            raise Violation("metadata-verified", f"{source!r} loads damaged metadata of {named!r}")


def _blocks(
    engine: PrefillEngine | DecodeEngine, addresses: npt.NDArray[np.uint64], written: wire.Written
) -> list[int]:
    """The block of each position; span by span, a WRITE has one segment a row for each."""
    segments = [engine.memory.block_at[address] for address in addresses.tolist()]
    num_rows = len(segments) // sum(span.num_slots for span in written.spans)
    blocks: list[int] = []
    start = 0
    for span in written.spans:
        of_span = segments[start : start + num_rows * span.num_slots]
        start += len(of_span)
        one_row = of_span[: span.num_slots]
        if of_span != one_row * num_rows:
            reason = f"{engine!r}: the rows of one WRITE name different blocks: {of_span}"
            raise Violation("only-granted-blocks", reason)
        blocks += one_row
    return blocks
