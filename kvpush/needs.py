"""What this rank of decode needs of each rank of a prefill engine, and whether all of them together have it. Pure."""

from __future__ import annotations

from kvpush import wire
from kvpush.arrivals import Arrivals
from kvpush.identity import Identity
from kvpush.layout import CacheGeometry, totals_of
from kvpush.parallel import Share, writers, written_heads
from kvpush.receives import Leg, PrefillRank, Receive, Source
from kvpush.terms import group_terms, slot_range
from kvpush.wire import Rank


class Needs:
    """Of one rank."""

    def __init__(self, identity: Identity, geometry: CacheGeometry) -> None:
        """``geometry``: what this rank holds."""
        self._identity = identity
        self._totals = dict(zip(identity.block_sizes_tokens, totals_of(geometry), strict=True))  # by group
        self._block_sizes_tokens = identity.block_sizes_tokens
        # by group, in the order in which people are told of them
        self._layers = {
            group.name: dict.fromkeys(sorted(each.name for each in group.layers)) for group in geometry.groups
        }

    def writers(self, source: Source) -> frozenset[Rank]:
        """The ranks of this prefill engine that write to us. Raises Incompatible where the sizes do not fit."""
        return writers(self._identity.share, source.pp_size, source.tp_size, self._totals.values())

    def is_written_by(self, share: Share) -> bool:
        """Whether this rank of prefill has heads for us, in any group. Of layers nothing is known yet."""
        return any(written_heads(share.tp, self._identity.share.tp, total) for total in self._totals.values())

    def ask(self, prefill: PrefillRank, leg: Leg) -> tuple[wire.Want, ...]:
        """What to ask of this rank of prefill, and from now on to expect of it."""
        places = {place.group: place for place in leg.receive.places}
        wants: list[wire.Want] = []
        for number, held in enumerate(prefill.holdings):
            place, ours = places.get(held.group), self._layers.get(held.group, {})
            common = [layer in ours for layer in held.layers]
            if place is None or not any(common):
                continue
            if not written_heads(prefill.share.tp, self._identity.share.tp, self._totals[held.group]):
                continue
            terms = group_terms(held.group, held.block_size_tokens, self._block_sizes_tokens[held.group])
            first_slot, num_slots = slot_range(place.first_block, len(place.block_ids), place.num_tokens, terms)
            if number not in leg.arrivals:  # asked again on a new link, what has arrived stays
                leg.arrivals[number] = arrivals = Arrivals(len(common), first_slot, num_slots)
                for layer, is_common in enumerate(common):
                    if not is_common:  # another rank of this side asks for it
                        arrivals.mark(layer, 1, first_slot, num_slots)
            packed = wire.pack_block_ids(place.block_ids)
            wants.append(wire.Want(place.group, place.first_block, packed, place.num_tokens))
        return tuple(wants)

    def coverage_defect(self, receive: Receive) -> str | None:
        """Which of our layers no stage of prefill holds, or two: known once every stage has said what it holds."""
        if not all(leg.holdings for leg in receive.legs.values()):
            return None
        stages: dict[tuple[str, str], set[int]] = {}
        for leg in receive.legs.values():
            for held in leg.holdings:
                for layer in held.layers:
                    stages.setdefault((held.group, layer), set()).add(leg.rank[0])
        ours = [(place.group, layer) for place in receive.places for layer in self._layers[place.group]]
        missing = [repr(layer) for group, layer in ours if (group, layer) not in stages]
        double = [repr(layer) for group, layer in ours if len(stages.get((group, layer), ())) > 1]
        for what, layers in (("no stage of it holds", missing), ("more than one stage of it holds", double)):
            if layers:
                more = f" and {len(layers) - 4} more" if len(layers) > 4 else ""
                return (
                    f"layers: of the {len(ours)} layers of decode engine {self._identity.engine_id!r}, {what} "
                    f"{', '.join(layers[:4])}{more}; prefill engine {receive.engine_id!r} has {len(stages)}"
                )
        return None
