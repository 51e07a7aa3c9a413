"""Who may read and write where, at every instant. Looks at each WRITE when it is posted and when it lands, and at each
block when it is called reusable.

It knows blocks by their units (:mod:`kvpush.testing.slices`): of each one it knows which rank of prefill may write it,
that it is written once, and that a block is there when all of its units are, whoever writes them.

A hold that ended by policy (``proven=False``) is the caller's own risk, and is modelled: what lands afterwards *taints*
the block until its next owner's bytes, or the next owner, take its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpush import prefill_effects, wire
from kvpush.testing.accounts import Push, Receive
from kvpush.testing.decode_engine import DecodeEngine
from kvpush.testing.fake_transport import FakeWrite
from kvpush.testing.prefill_engine import PrefillEngine
from kvpush.testing.slices import units_between
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
    places: list[tuple[int, int]]  # of each of its segments: position, and the number of its first unit in the block
    units: int  # that it fills
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
        sources = [source.memory.place_at.get(address, (-1, -1)) for address in write.sources.tolist()]
        blocks = sorted({block for block, _ in sources})
        owners = [source.owner_of(block) for block in blocks]
        push = owners[0]
        if push is None or any(owner is not push for owner in owners) or push.is_over:
            raise Violation("owner-writes", f"{source!r} posts a WRITE of blocks {blocks}, which belong to {owners}")
        position_of = {block: position for position, block in push.block_ids.items()}
        places = [(position_of[block], unit) for block, unit in sources]
        units = self._units(places, write)
        receive = sink.receive_of(written.epoch)
        grant = Grant(source, sink, push, receive, written, places, units, write_id, source.now_s())
        if units != (announced := _announced(grant)):
            reason = f"{source!r}: {push!r}: a WRITE to {sink!r} has units {units:#x}, and announces {announced:#x}"
            raise Violation("only-its-slice", reason)
        if receive is not None:
            if receive.posted_units & units:
                reason = f"{source!r}: positions {grant.positions} of {receive!r} are written twice"
                raise Violation("each-position-once", reason)
            receive.posted_units |= units
            push.receives[sink.rank] = receive
        self.grants[write] = grant
        self._by_id[source.life, write_id] = grant
        return grant

    def lands(self, write: FakeWrite, *, is_whole: bool = True) -> Grant:
        """Called just before bytes of it are copied."""
        grant = self.grants[write]
        push, receive, sink = grant.push, grant.receive, grant.sink
        if receive is None or receive.transfer_id != push.transfer_id:
            reason = f"{sink!r}: {push!r} is written for epoch {grant.written.epoch}, which is {receive!r}"
            raise Violation("only-granted-blocks", reason)
        granted = [(receive.block_ids.get(position), unit) for position, unit in grant.places]
        if [sink.memory.place_at.get(address) for address in write.destinations.tolist()] != granted:
            reason = f"{sink!r}: {receive!r}: a WRITE of {grant.positions} goes where nobody asked for it"
            raise Violation("only-granted-blocks", reason)
        if receive.is_free_for_sure:
            reason = f"{sink!r}: {grant.positions} are written after {receive.released or receive.finished!r}"
            raise Violation("only-granted-blocks", reason)
        if push.is_free_for_sure:
            reason = f"{write.writer}: blocks are read after {push.released or push.finished!r}"
            raise Violation("source-kept", reason)
        if receive.is_free:
            self._taint(grant, receive)
        elif is_whole:
            self._cleanse(grant, receive)
        if is_whole:
            receive.landed_units |= grant.units
        return grant

    def _taint(self, grant: Grant, receive: Receive) -> None:
        for position in grant.positions:
            block = receive.block_ids[position]
            hit = self._world.shape.at(grant.units, position)
            grant.sink.tainted[block] = grant.sink.tainted.get(block, 0) | hit

    def _cleanse(self, grant: Grant, receive: Receive) -> None:
        for position in grant.positions if grant.sink.tainted else ():
            block = receive.block_ids[position]
            left = grant.sink.tainted.pop(block, 0) & ~self._world.shape.at(grant.units, position)
            if left:
                grant.sink.tainted[block] = left

    def _units(self, places: list[tuple[int, int]], write: FakeWrite) -> int:
        """Those that the segments of a WRITE read, if none of them is read twice."""
        shape, units = self._world.shape, 0
        for (position, unit), length_bytes in zip(places, write.lengths_bytes.tolist(), strict=True):
            run = (1 << length_bytes // shape.unit_bytes) - 1 << position * shape.units_per_block + unit
            if not run or units & run or length_bytes % shape.unit_bytes:
                raise Violation("only-its-slice", f"{write.writer}: {length_bytes} bytes of position {position}")
            units |= run
        return units

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
            for layer in sink.held.layers:
                if not sink.memory.holds(layer, block, self._world.pattern(receive.transfer_id, layer, position)):
                    reason = f"{sink!r}: {receive!r} is done, but position {position} has other bytes"
                    raise Violation("done-means-there", reason)

    # --- metadata ----------------------------------------------------------------------------------------------------

    def loads(self, source: PrefillEngine, effect: prefill_effects.LoadPeer) -> None:
        """What reaches NIXL is what the named agent made, bit by bit."""
        named = self._world.by_agent.get(effect.agent_name)
        is_named = isinstance(named, DecodeEngine) and named.engine_id == effect.engine_id
        if not isinstance(named, DecodeEngine) or not is_named or named.held.share != effect.share:
            reason = f"{source!r} loads agent {effect.agent_name!r} for engine {effect.engine_id!r}"
            raise Violation("metadata-verified", reason)
        if named.metadata != effect.blob or named.geometry != effect.geometry:
            raise Violation("metadata-verified", f"{source!r} loads damaged metadata of {named!r}")


def _announced(grant: Grant) -> int:
    """What the WRITE's notification says it fills: all that its writer has to write of these slots and layers."""
    source, shape = grant.source, grant.source.held.model
    owed = units_between(source.held, grant.sink.held)
    found = 0
    for span in grant.written.spans:
        layers = source.held.layers[span.first_layer : span.first_layer + span.num_layers]
        units = owed & shape.units(layers, range(shape.num_heads))
        found |= shape.spread(units, range(span.first_slot, span.first_slot + span.num_slots))
    return found
