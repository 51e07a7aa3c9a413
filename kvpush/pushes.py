"""The records of the prefill side: who is linked, who asked for what, what was pushed. Pure, and without a decision.

What a record can tell from itself alone it answers here; :mod:`kvpush.prefill` decides what comes of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpush import wire
from kvpush.errors import FailureCode
from kvpush.events import Outcome, PushFinished
from kvpush.lifecycle import PUSH, PushState
from kvpush.plan import overlap
from kvpush.tombstones import Tombstone

LinkId = bytes
BlockIds = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Link:
    """One control link of a decode engine that has said Hello."""

    link: LinkId
    hello: wire.Hello
    generation: int | None = None
    transfer_ids: dict[str, None] = field(default_factory=dict)  # registered over it and not ended, oldest first


@dataclass(slots=True, eq=False)
class Registration:
    """Where one decode engine wants the blocks of one transfer."""

    link: Link
    transfer_id: str
    epoch: int
    first_block: int
    block_ids: BlockIds
    due_s: float  # when it ends if nothing is pushed for it
    highest_id: int = field(init=False)  # of the block ids; -1 when there are none
    num_unproven: int = 0  # WRITEs for it that may still land
    is_drain_owed: bool = False  # decode waits for Drained

    def __post_init__(self) -> None:
        self.highest_id = int(self.block_ids.max(initial=-1))

    @property
    def engine_id(self) -> str:
        return self.link.hello.engine_id

    def is_of(self, link: Link, epoch: int) -> bool:
        """Whether a message with this epoch that came over ``link`` means this registration."""
        return self.epoch == epoch and self.link is link

    def tombstone(self, code: FailureCode, reason: str, *, is_push_awaited: bool) -> Tombstone:
        """What is remembered of it."""
        return Tombstone(code, reason, is_push_awaited, self.link.hello.incarnation, self.epoch)

    def unlink(self) -> None:
        """It has ended, and does not end with its link any more."""
        self.link.transfer_ids.pop(self.transfer_id, None)


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


@dataclass(slots=True, eq=False)
class Chunk:
    """What one push() call brought: position ``first_block + i`` is in local block ``block_ids[i]``."""

    first_block: int
    block_ids: BlockIds
    is_fenced: bool  # not computed yet


@dataclass(slots=True, eq=False)
class Piece:
    """Positions of one chunk that go into one WRITE, as soon as the chunk is computed."""

    chunk: int
    first_block: int
    local_ids: BlockIds
    remote_ids: BlockIds

    @property
    def num_blocks(self) -> int:
        return len(self.local_ids)

    def sliced(self, max_blocks: int) -> Iterator[Piece]:
        """The same positions in pieces of at most so many blocks."""
        for start in range(0, self.num_blocks, max_blocks):
            part = slice(start, start + max_blocks)
            yield Piece(self.chunk, self.first_block + start, self.local_ids[part], self.remote_ids[part])


@dataclass(slots=True, eq=False)
class Push:
    """One transfer whose blocks have been pushed, in part or whole. ``state`` is written by the lifecycle alone."""

    transfer_id: str
    opened_s: float
    lease_until_s: float
    state: PushState = PUSH.initial
    chunks: list[Chunk] = field(default_factory=list)
    is_last_known: bool = False
    registration: Registration | None = None
    pieces: deque[Piece] = field(default_factory=deque)  # not posted
    generation: int | None = None  # of the engine that it waits for or writes to
    failed_attempts: int = 0  # handshakes that it waited through
    in_flight: set[int] = field(default_factory=set)  # ids of WRITEs that may still read its blocks
    is_queued: bool = False  # in its generation's line
    covered_blocks: int = 0  # of the positions that decode asked for, those that chunks so far hold
    confirmed_blocks: int = 0
    num_bytes: int = 0
    cause: Cause | None = None

    @property
    def held_blocks(self) -> int:
        return sum(len(chunk.block_ids) for chunk in self.chunks)

    @property
    def is_writing(self) -> bool:
        """A WRITE was posted and has not been given up: the push may end only with it."""
        return self.state in (PushState.writing, PushState.draining)

    @property
    def is_begun(self) -> bool:
        """Another registration comes too late for it."""
        return bool(self.in_flight or self.confirmed_blocks) or self.cause is not None

    @property
    def is_served(self) -> bool:
        """Decode has every position that it asked for."""
        return self.registration is not None and self.confirmed_blocks == len(self.registration.block_ids)

    @property
    def is_lease_running(self) -> bool:
        """Blocks wait for a registration or an engine, or decode has been served and waits no more. Not while decode
        waits for the caller's next chunk: its own deadline ends that."""
        waits = self.registration is None or bool(self.pieces) or self.is_served
        return waits and self.cause is None and self.state is not PushState.writing

    def match(self, registration: Registration, max_blocks: int) -> None:
        """From now on the push is for this registration, and nothing of it has been written."""
        self.registration = registration
        self.pieces.clear()
        self.covered_blocks = 0
        for index in range(len(self.chunks)):
            self.cut(index, max_blocks)

    def cut(self, index: int, max_blocks: int) -> None:
        """Queue the positions of one chunk that decode asked for, in pieces of at most ``max_blocks``."""
        chunk, wanted = self.chunks[index], self.registration
        assert wanted is not None, "only a matched push is cut"
        part = overlap(wanted.first_block, wanted.block_ids, chunk.first_block, chunk.block_ids)
        if part is not None:
            self.covered_blocks += len(part.local_ids)
            whole = Piece(index, part.first_block, part.local_ids, part.remote_ids)
            self.pieces.extend(whole.sliced(max_blocks))

    def next_piece(self) -> Piece | None:
        """The first one that is computed."""
        return next((piece for piece in self.pieces if not self.chunks[piece.chunk].is_fenced), None)

    def shortage(self) -> str | None:
        """Prefill must hold every position that decode asks for; known once the last chunk is there."""
        wanted = self.registration
        assert wanted is not None, "only a matched push can fall short"
        if not self.is_last_known or self.covered_blocks == len(wanted.block_ids):
            return None
        return (
            f"transfer {self.transfer_id!r}: decode engine {wanted.engine_id!r} asks for {len(wanted.block_ids)} "
            f"blocks from position {wanted.first_block}, prefill pushed {self.held_blocks}, which cover "
            f"{self.covered_blocks} of these"
        )

    def finished(self, cause: Cause, now_s: float, *, blocks_reusable: bool) -> PushFinished:
        """The event that tells the caller."""
        return PushFinished(
            transfer_id=self.transfer_id,
            outcome=cause.outcome,
            engine_id=None if self.registration is None else self.registration.engine_id,
            code=cause.code,
            reason=cause.reason,
            blocks_reusable=blocks_reusable,
            num_bytes=self.num_bytes,
            duration_s=now_s - self.opened_s,
        )


# --- what may become due ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseEnd:
    """Of an open push that waits."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class RegistrationEnd:
    """Of a registration that waits for its push."""

    transfer_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Of a WRITE that is tracked."""

    write_id: int


@dataclass(frozen=True, slots=True)
class HoldEnd:
    """Of a push in doubt."""

    push: Push


Due = LeaseEnd | RegistrationEnd | Stall | HoldEnd
