"""How the ranks of a world's engines share a model out among themselves, to the last byte.

A *unit* is what one head has of the keys, or of the values, of one block in one layer: the least that one rank can have
and another not. Units of a block are numbered by layer, keys before values, and head; those of a transfer go on from
position to position. A set of them is the bits of an integer, so that thousands are compared at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from kvpush.errors import UsageError
from kvpush.parallel import Share, heads_of, written_heads

_TOKENS = 2  # of a block


@dataclass(frozen=True, slots=True)
class Model:
    """What all engines of a world hold, each of them spread over its ranks in its own way."""

    num_layers: int = 2
    num_heads: int = 1

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """Of one layer: keys and values, heads, tokens, bytes of a head."""
        return 2, self.num_heads, _TOKENS, max(4, 16 // self.num_heads)

    @property
    def unit_bytes(self) -> int:
        """The length of one unit."""
        return self.block_shape[2] * self.block_shape[3]

    @property
    def block_bytes(self) -> int:
        """Of one layer, all heads."""
        return 2 * self.num_heads * self.unit_bytes

    @property
    def units_per_block(self) -> int:
        """Over all layers and heads."""
        return self.num_layers * 2 * self.num_heads

    def unit(self, layer: int, part: int, head: int) -> int:
        """The number of a unit in its block. ``part``: 0 for keys, 1 for values."""
        return (layer * 2 + part) * self.num_heads + head

    def units(self, layers: Iterable[int], heads: range) -> int:
        """Those of a block in these layers and heads."""
        run = (1 << len(heads)) - 1
        found = 0
        for layer in layers:
            found |= run << self.unit(layer, 0, heads.start) | run << self.unit(layer, 1, heads.start)
        return found

    def spread(self, units: int, positions: Iterable[int]) -> int:
        """The same units of the blocks at all of these positions."""
        found = 0
        for position in positions:
            found |= units << position * self.units_per_block
        return found

    def at(self, units: int, position: int) -> int:
        """Those of a set that belong to this position, as units of a block."""
        return units >> position * self.units_per_block & (1 << self.units_per_block) - 1


@dataclass(frozen=True, slots=True)
class Slice:
    """What one rank holds of a model. ``layers``: its stage's; the default is an even share."""

    model: Model = Model()
    share: Share = Share()
    layers: range = range(0)
    heads: range = field(init=False)

    def __post_init__(self) -> None:
        stage, stages, layers = self.share.pp_rank, self.share.pp_size, self.model.num_layers
        if not self.layers:
            object.__setattr__(self, "layers", range(stage * layers // stages, (stage + 1) * layers // stages))
        if not self.layers or self.layers.stop > layers:
            raise UsageError(f"stage {stage} of {stages} cannot hold layers {self.layers} of {layers}")
        object.__setattr__(self, "heads", heads_of(*self.share.tp, self.model.num_heads))

    def is_of_another_spread(self, other: Slice) -> bool:
        """Whether one engine cannot have both: it would be of two shapes."""
        mine, theirs = self.share, other.share
        same_stage_differs = mine.pp_rank == theirs.pp_rank and self.layers != other.layers
        return (mine.pp_size, mine.tp_size) != (theirs.pp_size, theirs.tp_size) or same_stage_differs

    @property
    def is_whole_engine(self) -> bool:
        """Whether its engine has no other rank."""
        return self.share.pp_size == self.share.tp_size == 1

    @property
    def units(self) -> int:
        """Those of a block that this rank holds."""
        return _units(self)


@lru_cache(maxsize=1024)
def _units(held: Slice) -> int:
    return held.model.units(held.layers, held.heads)


@lru_cache(maxsize=4096)
def units_between(writer: Slice, reader: Slice) -> int:
    """Those of a block that a rank of prefill writes to a rank of decode: what both hold, unless it is for another rank
    that holds a copy to write it."""
    heads = written_heads(writer.share.tp, reader.share.tp, writer.model.num_heads)
    common = [layer for layer in writer.layers if layer in reader.layers]
    return writer.model.units(common, heads) if heads else 0


@dataclass(frozen=True, slots=True)
class Spread:
    """How an engine is spread over its ranks. ``stages``: how many layers each has; empty: an even share."""

    pp_size: int = 1
    tp_size: int = 1
    stages: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Processes of the engine."""
        return self.pp_size * self.tp_size

    @property
    def parts(self) -> list[tuple[Share, range]]:
        """Share and layers of every rank, in order; no layers: an even share."""
        ends = [sum(self.stages[:stage]) for stage in range(len(self.stages) + 1)]
        layers = [range(start, end) for start, end in pairwise(ends)] or [range(0)] * self.pp_size
        return [(share, layers[share.pp_rank]) for share in shares(self.tp_size, self.pp_size)]

    def __str__(self) -> str:
        stages = "+".join(map(str, self.stages)) or str(self.pp_size)
        return f"pp {stages} tp {self.tp_size}"


def shares(tp_size: int = 1, pp_size: int = 1) -> list[Share]:
    """Of all ranks of an engine, in order."""
    return [Share(stage, pp_size, rank, tp_size) for stage in range(pp_size) for rank in range(tp_size)]
