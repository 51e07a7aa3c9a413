"""What the caller of one side knows of one transfer: what it gave, what it did, and the events that came back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvpush.errors import FailureCode
from kvpush.events import BlocksReleased, Outcome, PushFinished, ReceiveFinished
from kvpush.testing.violations import Violation

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
    """One transfer on prefill."""

    num_chunks: int = 0
    num_fenced: int = 0  # chunks that the device has not computed
    has_last: bool = False
    receive: Receive | None = None  # whom it writes to, once a WRITE was posted
    lease_from_s: float = 0.0  # the last thing that can have extended its lease
    told_code: FailureCode | None = None  # the first cause that decode was told while a WRITE was in flight


@dataclass(slots=True, eq=False)
class Receive(Account[ReceiveFinished]):
    """One expect() on decode."""

    deadline_s: float = 0.0
    epoch: int | None = None  # known once it has been registered
    posted: set[int] = field(default_factory=set)  # positions that a WRITE was posted for
    landed: set[int] = field(default_factory=set)  # positions that a WRITE has reached
