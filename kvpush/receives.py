"""The records of the decode side: what is expected, from whom, and what has come. Pure, and without a decision.

A *receive* is one transfer, with one outcome. It has a *leg* for each rank of the prefill engine that writes to this
rank: one, unless the two engines are spread over their ranks differently. It is done when every leg is.

What a record can tell from itself alone it answers here; :mod:`kvpush.decode` decides what comes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from kvpush import wire
from kvpush.arrivals import Arrivals
from kvpush.blocks import BlockIds
from kvpush.lifecycle import RECEIVE, ReceiveState
from kvpush.parallel import Share
from kvpush.wire import Rank

LinkId = int
Address = tuple[str, int]

# What prefill must learn to give its blocks back, while this side waits for nothing: a registration that asks for no
# block, or the end of a receive that could not be registered.
Notice = wire.Register | wire.Withdraw


@dataclass(frozen=True, slots=True)
class Source:
    """Where a prefill engine is: how many ranks it has, and the address of each that matters here.

    ``incarnations``: of ranks, the only one that can serve; one that is empty or left out: whichever answers.
    """

    engine_id: str
    pp_size: int
    tp_size: int
    addresses: Mapping[Rank, Address]
    incarnations: Mapping[Rank, str] = field(default_factory=dict)

    def share(self, rank: Rank) -> Share:
        """Of one of its ranks."""
        return Share(rank[0], self.pp_size, rank[1], self.tp_size)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where one group's blocks go: position ``first_block + i`` goes into ``block_ids[i]``.

    ``num_tokens``: only tokens below it are wanted; 0: every block whole.
    """

    group: str
    first_block: int
    block_ids: BlockIds
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class Receive:
    """One expect(). ``state`` is written by the lifecycle alone."""

    transfer_id: str
    epoch: int
    engine_id: str
    places: tuple[Place, ...]
    num_blocks: int
    opened_s: float
    deadline_s: float
    state: ReceiveState = RECEIVE.initial
    legs: dict[Rank, Leg] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """No outcome yet."""
        return self.state in (ReceiveState.registered, ReceiveState.receiving)

    @property
    def is_complete(self) -> bool:
        """Everything has arrived, from every rank."""
        return all(leg.is_complete for leg in self.legs.values())

    @property
    def is_quiet(self) -> bool:
        """No WRITE can come any more."""
        return all(leg.is_quiet for leg in self.legs.values())

    @property
    def progress(self) -> str:
        """For people."""
        missing = [leg for leg in self.legs.values() if not leg.is_complete]
        if len(self.legs) == 1:
            return missing[0].progress
        ranks = "; ".join(f"of {leg.rank} {leg.progress}" for leg in missing[:8])
        return f"the parts of {len(self.legs) - len(missing)} of {len(self.legs)} ranks (pp, tp) ({ranks})"


@dataclass(slots=True, eq=False)
class Leg:
    """What one rank of prefill writes of a receive."""

    receive: Receive
    rank: Rank
    home: int  # the generation whose record lists it
    wanted_incarnation: str = ""  # of prefill, when the caller knows which one holds the blocks
    registered_with: str | None = None  # prefill's incarnation, once Register was sent to it
    writer_agent: str = ""  # its NIXL agent, the only one whose notifications count
    arrivals: dict[int, Arrivals] = field(default_factory=dict)  # by prefill's number of the group
    pinned: int | None = None  # the generation that it pins
    failed_attempts: int = 0  # dials that it waited through
    num_under_way: int = 0  # WRITEs that prefill announced, less those that arrived; negative: the news came late
    is_proven: bool = False  # prefill said, or its end says, that no WRITE will come any more
    holdings: tuple[wire.Holding, ...] = ()  # what this rank holds; known once it is registered

    @property
    def num_missing(self) -> int:
        """Cells (slots times layers) that are still to come."""
        return sum(arrivals.num_missing for arrivals in self.arrivals.values())

    @property
    def is_complete(self) -> bool:
        """Registered, and everything has arrived."""
        return self.registered_with is not None and self.num_missing == 0

    @property
    def is_quiet(self) -> bool:
        """No WRITE can come any more."""
        return self.registered_with is None or self.is_proven or self.num_missing == 0

    @property
    def progress(self) -> str:
        """For people."""
        if self.registered_with is None:
            return f"0 of {self.receive.num_blocks} blocks"
        num_blocks = self.receive.num_blocks
        num_cells = sum(each.num_layers * each.num_slots for each in self.arrivals.values())
        arrived = num_blocks * (num_cells - self.num_missing) // num_cells
        return f"{arrived} of {num_blocks} blocks"


@dataclass(slots=True, eq=False)
class PrefillRank:
    """One generation of a rank of a prefill engine, with the link to it and the legs that need it."""

    engine_id: str
    share: Share
    address: Address
    generation: int
    link: LinkId | None = None
    attempt: int = 0
    is_up: bool = False  # Welcome came
    incarnation: str = ""
    agent_name: str = ""
    holdings: tuple[wire.Holding, ...] = ()
    legs: dict[int, Leg] = field(default_factory=dict)  # by epoch: open or holding
    unsent: dict[int, Leg] = field(default_factory=dict)  # those of them that this link has not told prefill about
    notices: list[Notice] = field(default_factory=list)  # to be sent once it is up
    failed_dials: int = 0  # in a row
    renewals: dict[str, None] = field(default_factory=dict)  # transfer ids to renew once it is up


# --- what may become due ---------------------------------------------------------------------------------------------


class Deadline(msgspec.Struct, frozen=True):
    """Of an open receive."""

    epoch: int


class HoldEnd(msgspec.Struct, frozen=True):
    """Of a receive whose blocks are held."""

    epoch: int


class Beat(msgspec.Struct, frozen=True):
    """A link's next heartbeat."""

    link: LinkId


Due = Deadline | HoldEnd | Beat
