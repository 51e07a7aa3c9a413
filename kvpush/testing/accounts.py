"""What the caller of one side knows of one transfer: what it gave, what it did, and the events that came back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from kvpush.errors import FailureCode
from kvpush.events import BlocksReleased, Outcome, PushFinished, ReceiveFinished
from kvpush.testing.slices import Slice, units_between
from kvpush.testing.violations import Violation
from kvpush.wire import Rank

if TYPE_CHECKING:
    from kvpush.testing.prefill_engine import PrefillEngine

F = TypeVar("F", PushFinished, ReceiveFinished)


@dataclass(slots=True, eq=False)
class Account(Generic[F]):
    """One transfer on one side. Times are of the engine's own clock."""

    transfer_id: str
    block_ids: dict[int, int]  # position -> local block
    finished: F | None = None
    released: BlocksReleased | None = None
    finished_s: float = 0.0
    is_cancelled: bool = False  # by the caller

    @property
    def is_over(self) -> bool:
        """It has its outcome."""
        return self.finished is not None

    @property
    def is_free(self) -> bool:
        """An event said that the blocks are the caller's again."""
        return self.released is not None or (self.finished is not None and self.finished.blocks_reusable)

    @property
    def is_free_for_sure(self) -> bool:
        """As :attr:`is_free`, and no write can touch the blocks any more."""
        return self.is_free and (self.released is None or self.released.proven)

    @property
    def outcome(self) -> Outcome | None:
        return None if self.finished is None else self.finished.outcome

    @property
    def code(self) -> FailureCode | None:
        return None if self.finished is None else self.finished.code

    def take(self, event: F | BlocksReleased, now_s: float) -> None:
        """One outcome; one release after it, and only when the blocks were held. Raises Violation otherwise."""
        if isinstance(event, BlocksReleased):
            if self.finished is None or self.finished.blocks_reusable or self.released is not None:
                raise Violation("one-outcome", f"{event!r} follows {self.finished!r} and {self.released!r}")
            self.released = event
        elif self.finished is not None:
            raise Violation("one-outcome", f"two outcomes: {self.finished!r}, then {event!r}")
        else:
            self.finished, self.finished_s = event, now_s


@dataclass(slots=True, eq=False)
class Push(Account[PushFinished]):
    """One transfer on one rank of prefill."""

    num_chunks: int = 0
    num_fenced: int = 0  # chunks that the device has not computed
    has_last: bool = False
    # whom it writes to, by rank of decode, once a WRITE was posted
    receives: dict[Rank, Receive] = field(default_factory=dict, repr=False)
    lease_from_s: float = 0.0  # the last thing that can have extended its lease
    pushed_s: float = 0.0  # its last chunk, which has extended it for certain
    told_code: FailureCode | None = None  # the first cause that decode was told while a WRITE was in flight


@dataclass(slots=True, eq=False, kw_only=True)
class Receive(Account[ReceiveFinished]):
    """One expect() on one rank of decode."""

    held: Slice  # of the model, by its rank
    source: PrefillEngine  # any rank of it
    deadline_s: float = 0.0
    epoch: int | None = None  # known once it has been registered
    posted_units: int = field(default=0, repr=False)  # those that a WRITE was posted for, by whichever rank
    landed_units: int = field(default=0, repr=False)  # those that a WRITE has reached
    # life of a rank of prefill -> the first cause that it gave for serving this no more, while this was open
    told_by: dict[int, FailureCode] = field(default_factory=dict, repr=False)

    @property
    def landed(self) -> set[int]:
        """Positions that are there whole, from all ranks that write them."""
        model, units = self.held.model, self.held.units
        return {position for position in self.block_ids if model.at(self.landed_units, position) == units}

    def units_from(self, writer: Slice) -> int:
        """What this rank of prefill has to write of it."""
        return self.held.model.spread(units_between(writer, self.held), self.block_ids)

    def has_all_from(self, writer: Slice) -> bool:
        """Whether everything that this rank of prefill has to write has landed."""
        owed = self.units_from(writer)
        return self.landed_units & owed == owed

    def blames_only(self, writer: Slice, life: int) -> bool:
        """Whether it ended otherwise than done because of this life of a rank of prefill, and of no other rank."""
        tellers = [teller for teller, code in self.told_by.items() if code is self.code]
        return writer.is_whole_engine or tellers == [life]
