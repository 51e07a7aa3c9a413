"""What the scheduler's process and its workers tell each other, step by step. Values only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpush.integrations.vllm.params import DecodeLeg


@dataclass(frozen=True, slots=True)
class PushChunk:
    """Positions ``first_block + i`` of a prompt will be final in blocks ``block_ids[i]`` after this step's forward."""

    send: int  # number of the attempt: grows, never used twice
    transfer_ids: tuple[str, ...]
    first_block: int
    block_ids: Sequence[int]
    last: bool


@dataclass(frozen=True, slots=True)
class Expect:
    """Have positions ``first_block + i`` of a transfer written into blocks ``block_ids[i]``, up to its token
    ``num_tokens``: where prefill's blocks are smaller, it does not fill decode's last one.

    ``request_id`` is ``None`` when nobody waits: the list is empty, and prefill learns that it may let go.
    """

    request_id: str | None
    leg: DecodeLeg
    first_block: int = 0
    block_ids: Sequence[int] = ()
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Renewal:
    """Requests for these transfers of one prefill engine still queue."""

    transfer_ids: tuple[str, ...]
    leg: DecodeLeg  # any of them: they share the engine and its addresses


@dataclass(slots=True)
class StepWork:
    """From the scheduler to every worker, for one step."""

    withdrawals: list[int] = field(default_factory=list)  # sends that are given up
    refusals: list[tuple[str, ...]] = field(default_factory=list)  # names that will never be pushed
    chunks: list[PushChunk] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)  # requests whose receive is given up
    expects: list[Expect] = field(default_factory=list)
    renewals: list[Renewal] = field(default_factory=list)
    is_idle: bool = False  # no token is scheduled: the model does not run

    def __bool__(self) -> bool:
        return bool(self.withdrawals or self.refusals or self.chunks or self.cancels or self.expects or self.renewals)


@dataclass(slots=True)
class Report:
    """From the workers to the scheduler, added up over all of them: by how many of them each was reported."""

    ended_sends: Counter[int] = field(default_factory=Counter)  # their blocks are reusable
    lost_sends: set[int] = field(default_factory=set)  # those of them that decode did not get
    held: Counter[str] = field(default_factory=Counter)  # failed requests whose blocks a late WRITE may touch
    released: Counter[str] = field(default_factory=Counter)  # those whose blocks are quiet now

    def add(self, other: Report) -> Report:
        """The sum, in place."""
        self.ended_sends += other.ended_sends
        self.lost_sends |= other.lost_sends
        self.held += other.held
        self.released += other.released
        return self

    def __bool__(self) -> bool:
        return bool(self.ended_sends or self.held or self.released)
