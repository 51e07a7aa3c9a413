"""The records of the prefill side: who is linked, who asked for what, what was pushed. Pure, and without a decision.

A *push* is one transfer, with one outcome. It has a *leg* for each rank of the decode engine that this rank writes to:
one, unless the two engines are spread over their ranks differently. All ranks of decode must be served; when one leg
fails, the push fails.

What a record can tell from itself alone it answers here; :mod:`kvpush.prefill` decides what comes of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvpush import wire
from kvpush.arrivals import Arrivals
from kvpush.blocks import BlockIds, shared_positions, slots_between
from kvpush.errors import FailureCode
from kvpush.events import Outcome, PushFinished
from kvpush.lifecycle import PUSH, PushState
from kvpush.terms import GroupTerms, Slots, Wanted, wanted_slots
from kvpush.tombstones import Tombstone
from kvpush.wire import Rank

LinkId = bytes

SHORT_LIST_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """What this rank holds of one group."""

    name: str
    layers: tuple[str, ...]
    block_size_tokens: int
    block_len_bytes: int  # of one layer

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(slots=True, eq=False)
class Link:
    """One control link of a decode engine's rank that has said Hello."""

    link: LinkId
    hello: wire.Hello
    readers: frozenset[Rank]  # the ranks of its engine that this rank writes to, it among them
    terms: Mapping[str, GroupTerms]  # by group
    generation: int = field(init=False)  # that serves its engine; from the Welcome on
    # registered over it and not ended, oldest first: a set of strings would end them in another order in every process
    transfer_ids: dict[str, None] = field(default_factory=dict)
    num_blocks: int = 0  # block ids in these registrations
    hinted_s: float = -math.inf  # when decode was last told that a WRITE is on its way
    rank: Rank = field(init=False)  # told by the Hello

    def __post_init__(self) -> None:
        self.rank = self.hello.share.rank


@dataclass(slots=True, eq=False)
class Registration:
    """Where one rank of a decode engine wants the blocks of one transfer.

    A long list of ids stays as packed as it came until a push has come. None is believed before :meth:`unpacked`.
    """

    link: Link
    transfer_id: str
    epoch: int
    wants: tuple[wire.Want, ...]
    due_s: float  # when it ends if nothing is pushed for it
    num_unproven: int = 0  # WRITEs for it that may still land
    is_drain_owed: bool = False  # decode waits for Drained
    is_told: bool = False  # decode knows that it will not be served
    is_over: bool = False  # it takes no room any more, and does not end with its link
    _unpacked: dict[str, Wanted] | None = None

    @property
    def engine_id(self) -> str:
        return self.link.hello.engine_id

    @property
    def rank(self) -> Rank:
        return self.link.rank

    @property
    def incarnation(self) -> str:
        return self.link.hello.incarnation

    @property
    def num_blocks(self) -> int:
        return sum(len(want.block_ids) // 4 for want in self.wants)

    def is_of(self, link: Link, epoch: int) -> bool:
        """Whether a message with this epoch that came over ``link`` means this registration."""
        return self.epoch == epoch and self.link is link

    def unpacked(self) -> dict[str, Wanted]:
        """What it wants of each group that this side has. Raises Failure for ids that cannot be.

        Looks at every id, which takes a while for a million. A short list is unpacked once: the push must not wait.
        """
        if self._unpacked is not None:
            return self._unpacked
        terms = self.link.terms
        wanted = {want.group: wanted_slots(want, terms[want.group]) for want in self.wants if want.group in terms}
        if self.num_blocks <= SHORT_LIST_BLOCKS:
            self._unpacked = wanted
        return wanted


def _nothing_of(held: HeldGroup, terms: GroupTerms, wanted: Wanted, layers: Sequence[int], slots: range) -> str:
    """What decode asks for and nobody pushed, for people."""
    names = ", ".join(repr(held.layers[layer]) for layer in layers[:4])
    more = f" and {len(layers) - 4} more" if len(layers) > 4 else ""
    which = "" if len(layers) == held.num_layers else f" layer{'s' if len(layers) > 1 else ''} {names}{more} of"
    per_block = terms.decode_slots_per_block
    first, last = slots.start // per_block, (slots.stop - 1) // per_block
    where = f"position {first}" if first == last else f"positions {first} to {last}"
    hint = ""
    if slots.start % per_block:  # its other slots are there
        where += f" from token {slots.start * terms.slot_size_tokens} on"
        if slots.stop == wanted.first_slot + wanted.num_slots:
            hint = "; where the last block is only partly filled, expect() needs num_tokens"
    return f"nothing for{which} {where} of group {held.name!r}{hint}"


def tombstone_of(
    registrations: Sequence[Registration], code: FailureCode, reason: str, *, is_push_awaited: bool
) -> Tombstone:
    """What is remembered of a transfer and of those who registered for it."""
    return Tombstone(code, reason, is_push_awaited, {each.incarnation: each.epoch for each in registrations})


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a push ends: the first root cause."""

    outcome: Outcome
    code: FailureCode | None = None
    reason: str = ""

    @property
    def code_for_decode(self) -> FailureCode:
        return as_decode_sees_it(self.code or FailureCode.internal)


DONE = Cause(Outcome.done)


def as_decode_sees_it(code: FailureCode) -> FailureCode:
    """What prefill's own caller did is, to decode, what its peer did."""
    return FailureCode.cancelled_by_peer if code is FailureCode.cancelled_by_caller else code


class Part(msgspec.Struct, frozen=True, eq=False):
    """What one call brought of one group: position ``first_block + i`` of these layers is in ``block_ids[i]``."""

    group: int  # its number in this side's cache
    layers: tuple[range, ...]  # runs of layers, by their numbers in the group
    first_block: int
    block_ids: BlockIds


@dataclass(slots=True, eq=False)
class Chunk:
    """What one push() or push_layers() call brought."""

    parts: tuple[Part, ...]
    is_fenced: bool  # not computed yet


class Piece(msgspec.Struct, frozen=True, eq=False):
    """Cells of one chunk that go into one WRITE, as soon as the chunk is computed."""

    chunk: int
    group: int
    layers: range
    first_slot: int
    local_slots: Slots
    remote_slots: Slots

    @property
    def num_cells(self) -> int:
        return len(self.layers) * len(self.local_slots)

    @property
    def span(self) -> wire.Span:
        return wire.Span(self.group, self.layers.start, len(self.layers), self.first_slot, len(self.local_slots))

    def sliced(self, max_slots: int) -> Iterator[Piece]:
        """The same cells in pieces of at most so many slots."""
        for start in range(0, len(self.local_slots), max_slots):
            part = slice(start, start + max_slots)
            yield Piece(
                self.chunk,
                self.group,
                self.layers,
                self.first_slot + start,
                self.local_slots[part],
                self.remote_slots[part],
            )


@dataclass(slots=True, eq=False)
class Leg:
    """The way of a push to one rank of the decode engine."""

    push: Push
    registration: Registration
    wanted: dict[int, Wanted]  # by group
    pieces: deque[Piece] = field(default_factory=deque)  # computed and not posted
    fenced: dict[int, list[Piece]] = field(default_factory=dict)  # by chunk: not computed
    generation: int | None = None  # of the engine that it waits for or writes to
    failed_attempts: int = 0  # handshakes that it waited through
    in_flight: set[int] = field(default_factory=set)  # ids of WRITEs that may still read its blocks
    is_queued: bool = False  # in its generation's line
    covered_cells: int = 0  # of those that decode asked for, those that chunks so far hold
    confirmed_cells: int = 0
    wanted_cells: int = 0

    @property
    def transfer_id(self) -> str:
        return self.push.transfer_id

    @property
    def has_pieces(self) -> bool:
        """Something is still to be posted."""
        return bool(self.pieces or self.fenced)

    @property
    def is_begun(self) -> bool:
        """Another registration comes too late for it."""
        return bool(self.in_flight or self.confirmed_cells) or self.push.cause is not None

    @property
    def is_served(self) -> bool:
        """This rank of decode has everything that it asked for."""
        return self.confirmed_cells == self.wanted_cells

    def match(self, registration: Registration, wanted: Mapping[str, Wanted], cut: Cut) -> None:
        """From now on it is for this registration, and nothing of it has been written."""
        self.registration = registration
        self.wanted = {i: wanted[held.name] for i, held in enumerate(cut.groups) if held.name in wanted}
        self.wanted_cells = sum(cut.groups[i].num_layers * each.num_slots for i, each in self.wanted.items())
        self.drop_pieces()
        self.covered_cells = 0
        for index in range(len(self.push.chunks)):
            self.cut(index, cut)

    def drop_pieces(self) -> None:
        """Nothing more is posted."""
        self.pieces.clear()
        self.fenced.clear()

    def unfence(self, index: int) -> None:
        """This chunk is computed: what decode asked for of it may be posted, after what was computed before."""
        self.pieces.extend(self.fenced.pop(index, ()))

    def cut(self, index: int, cut: Cut) -> None:
        """Queue what decode asked for of one chunk, in pieces that fit into one WRITE."""
        chunk = self.push.chunks[index]
        queue: deque[Piece] | list[Piece] = self.fenced.setdefault(index, []) if chunk.is_fenced else self.pieces
        for part in chunk.parts:
            wanted = self.wanted.get(part.group)
            if wanted is None:
                continue
            held = cut.groups[part.group]
            terms = self.registration.link.terms[held.name]
            per_block = terms.prefill_slots_per_block
            held_from = part.first_block * per_block
            num_held = len(part.block_ids) * per_block
            both = shared_positions(wanted.first_slot, wanted.num_slots, held_from, num_held)
            if not both:
                continue
            local = slots_between(part.block_ids, per_block, both.start - held_from, both.stop - held_from)
            remote = wanted.between(both.start, both.stop)
            for layers in part.layers:
                piece = Piece(index, part.group, layers, both.start, local, remote)
                self.covered_cells += piece.num_cells
                max_slots = cut.max_slots(held, terms, len(layers))
                queue.extend((piece,) if len(local) <= max_slots else piece.sliced(max_slots))
        if chunk.is_fenced and not queue:
            del self.fenced[index]

    def next_pieces(self, cut: Cut) -> tuple[list[Piece], int]:
        """For one WRITE, from the first on, and their bytes: one, then as many as fit."""
        taken: list[Piece] = []
        taken_bytes = 0
        for piece in self.pieces:
            num_bytes = cut.num_bytes(self, piece)
            if taken and (taken_bytes + num_bytes > cut.max_write_bytes or len(taken) == wire.MAX_SPANS):
                break
            taken.append(piece)
            taken_bytes += num_bytes
        return taken, taken_bytes

    def shortage(self, cut: Cut) -> str | None:
        """Prefill must hold everything that decode asks for; known once the last chunk is there."""
        if not self.push.is_last_known or self.covered_cells == self.wanted_cells:
            return None
        wanted = self.registration
        terms = wanted.link.terms
        asked = ", ".join(
            f"{len(want.block_ids) // 4} blocks"
            + (f" of {terms[want.group].decode_size_tokens} tokens" if want.group in terms else "")
            + f" from position {want.first_block}"
            + (f" of group {want.group!r}" if len(wanted.wants) > 1 else "")
            for want in wanted.wants
        )
        return (
            f"transfer {self.transfer_id!r}: decode engine {wanted.engine_id!r} asks for {asked}; prefill pushed "
            f"{self.push.held_blocks} blocks, but {self._missing(cut)}"
        )

    def _missing(self, cut: Cut) -> str:
        """The first that no chunk holds, for people."""
        for group, wanted in self.wanted.items():
            held = cut.groups[group]
            terms = self.registration.link.terms[held.name]
            per_block = terms.prefill_slots_per_block
            pushed = Arrivals(held.num_layers, wanted.first_slot, wanted.num_slots)
            for chunk in self.push.chunks:
                for part in chunk.parts:
                    if part.group != group:
                        continue
                    first_slot, num_slots = part.first_block * per_block, len(part.block_ids) * per_block
                    both = shared_positions(wanted.first_slot, wanted.num_slots, first_slot, num_slots)
                    for layers in part.layers:
                        pushed.mark(layers.start, len(layers), both.start, len(both))
            if (missing := pushed.first_missing()) is not None:
                return _nothing_of(held, terms, wanted, *missing)
        return "not all of these"


@dataclass(frozen=True, slots=True)
class Cut:
    """How large a piece may be."""

    groups: tuple[HeldGroup, ...]  # by number
    max_write_bytes: int

    def max_slots(self, held: HeldGroup, terms: GroupTerms, num_layers: int) -> int:
        """Slots of so many layers that fit into one WRITE, if decode takes every head of them; at least one."""
        return max(1, self.max_write_bytes // (self._slot_len_bytes(held, terms) * num_layers))

    def num_bytes(self, leg: Leg, piece: Piece) -> int:
        """What a piece moves at most: all heads of its layers."""
        held = self.groups[piece.group]
        return self._slot_len_bytes(held, leg.registration.link.terms[held.name]) * piece.num_cells

    @staticmethod
    def _slot_len_bytes(held: HeldGroup, terms: GroupTerms) -> int:
        return max(1, held.block_len_bytes // terms.prefill_slots_per_block)


@dataclass(slots=True, eq=False)
class Push:
    """One transfer whose blocks have been pushed, in part or whole. ``state`` is written by the lifecycle alone."""

    transfer_id: str
    opened_s: float
    lease_until_s: float = field(init=False)  # every chunk renews it
    state: PushState = PUSH.initial
    chunks: list[Chunk] = field(default_factory=list)
    is_last_known: bool = False
    readers: frozenset[Rank] = frozenset()  # the ranks of decode that must register; known with the first one that does
    legs: dict[Rank, Leg] = field(default_factory=dict)
    num_bytes: int = 0
    cause: Cause | None = None

    @property
    def held_blocks(self) -> int:
        return sum(len(part.block_ids) for chunk in self.chunks for part in chunk.parts)

    @property
    def engine_id(self) -> str | None:
        """Of the decode engine that it is for."""
        return next((leg.registration.engine_id for leg in self.legs.values()), None)

    @property
    def registrations(self) -> list[Registration]:
        return [leg.registration for leg in self.legs.values()]

    @property
    def is_in_flight(self) -> bool:
        """A WRITE may still read its blocks."""
        return any(leg.in_flight for leg in self.legs.values())

    @property
    def is_writing(self) -> bool:
        """A WRITE was posted and has not been given up: the push may end only with it."""
        return self.state in (PushState.writing, PushState.draining)

    @property
    def is_complete(self) -> bool:
        """Every rank of decode that this one writes to has registered."""
        return bool(self.legs) and self.legs.keys() >= self.readers

    @property
    def is_served(self) -> bool:
        """Decode has everything that it asked for, on every rank."""
        return self.is_complete and all(leg.is_served for leg in self.legs.values())

    @property
    def is_lease_running(self) -> bool:
        """Of one that is neither written nor ending: blocks wait for a registration or an engine, or decode has been
        served and waits no more. Not while decode waits for the caller's next chunk: its own deadline ends that."""
        return not self.is_complete or any(leg.has_pieces for leg in self.legs.values()) or self.is_served

    def finished(self, cause: Cause, now_s: float, *, blocks_reusable: bool) -> PushFinished:
        """The event that tells the caller."""
        return PushFinished(
            transfer_id=self.transfer_id,
            outcome=cause.outcome,
            engine_id=self.engine_id,
            code=cause.code,
            reason=cause.reason,
            blocks_reusable=blocks_reusable,
            num_bytes=self.num_bytes,
            duration_s=now_s - self.opened_s,
        )


# --- what may become due ---------------------------------------------------------------------------------------------


class LeaseEnd(msgspec.Struct, frozen=True):
    """Of an open push that waits."""

    transfer_id: str


class RegistrationEnd(msgspec.Struct, frozen=True):
    """Of a registration that waits for its push."""

    transfer_id: str
    rank: Rank
    epoch: int


class Stall(msgspec.Struct, frozen=True):
    """Of a WRITE that is tracked."""

    write_id: int


class HoldEnd(msgspec.Struct, frozen=True):
    """Of a push in doubt."""

    push: Push


Due = LeaseEnd | RegistrationEnd | Stall | HoldEnd
