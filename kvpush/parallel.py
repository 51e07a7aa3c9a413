"""Which KV heads a rank holds, and which prefill rank writes to which decode rank. Pure arithmetic on ranks and sizes.

Both sides work out the same answers from the same numbers, so nothing about who writes to whom is ever negotiated.
Layers are not looked at: every pipeline stage of one side talks to every stage of the other, and what they have in
common may be nothing.

A *total* says how a group of layers is spread over tensor-parallel ranks: the model's number of KV heads, or
:data:`NO_HEADS` (every rank holds the whole, as with MLA), or :data:`PER_RANK` (each rank has its own part, which only
the same rank of an equally parallel engine can use).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from kvpush.errors import ConfigurationError, Incompatible

MAX_RANKS = 1024  # along each of the two dimensions: what a peer may claim, and so what its claim may cost

NO_HEADS = 0
PER_RANK = -1

_Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS - 1)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
_NOTHING = range(0)


class Share(msgspec.Struct, frozen=True):
    """Which part of a model one rank holds. Crosses the wire. Raises ConfigurationError naming field and value."""

    pp_rank: _Rank = 0
    pp_size: _Size = 1
    tp_rank: _Rank = 0
    tp_size: _Size = 1

    def __post_init__(self) -> None:  # msgspec checks its bounds when it decodes, and only then
        for kind in ("pp", "tp"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            for field, value, least in ((f"{kind}_size", size, 1), (f"{kind}_rank", rank, 0)):
                if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_RANKS:
                    raise ConfigurationError(f"{field}={value!r} must be a whole number from {least} to {MAX_RANKS}")
            if rank >= size:
                raise ConfigurationError(f"{kind}_rank={rank!r} must be below {kind}_size={size!r}")

    def __str__(self) -> str:
        return f"rank (pp, tp) {self.rank} of pp_size={self.pp_size}, tp_size={self.tp_size}"

    @property
    def rank(self) -> tuple[int, int]:
        """``(pp_rank, tp_rank)``, as on the wire."""
        return self.pp_rank, self.tp_rank

    @property
    def tp(self) -> tuple[int, int]:
        """``(tp_rank, tp_size)``."""
        return self.tp_rank, self.tp_size


def heads_of(tp_rank: int, tp_size: int, total: int) -> range:
    """The KV heads that a rank holds of ``total``, or of one where there are no heads to speak of.

    An even share; with more ranks than heads, one head, which ``tp_size / total`` neighbouring ranks hold alike.
    Raises Incompatible when neither number divides the other.
    """
    total = _heads(total)
    if total % tp_size == 0:
        share = total // tp_size
        return range(tp_rank * share, (tp_rank + 1) * share)
    if tp_size % total == 0:
        head = tp_rank // (tp_size // total)
        return range(head, head + 1)
    raise Incompatible(
        f"{total} KV heads cannot be spread over {tp_size} tensor-parallel ranks: one number must divide the other"
    )


def written_heads(prefill_tp: tuple[int, int], decode_tp: tuple[int, int], total: int) -> range:
    """The heads that a prefill rank writes to a decode rank; both are ``(tp_rank, tp_size)``.

    Empty when they have none in common, or when another holder of the same head is the one to write it: every head of
    every decode rank has exactly one writer. Copies at decode are spread over the copies at prefill, and between
    equally parallel engines each rank writes to its like. Raises Incompatible as :func:`heads_of` does, and for
    :data:`PER_RANK` with unequal sizes.
    """
    if total == PER_RANK:
        _check_equal_sizes(prefill_tp[1], decode_tp[1])
        return range(1) if prefill_tp[0] == decode_tp[0] else _NOTHING
    ours, theirs = heads_of(*prefill_tp, total), heads_of(*decode_tp, total)
    common = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
    if not common:
        return _NOTHING
    our_copies, their_copies = _copies(prefill_tp[1], total), _copies(decode_tp[1], total)
    writer = decode_tp[0] % their_copies * our_copies // their_copies
    return common if prefill_tp[0] % our_copies == writer else _NOTHING


def meets(prefill_tp: tuple[int, int], decode_tp: tuple[int, int], totals: Iterable[int]) -> bool:
    """Whether the two ranks talk; ``totals`` are those of all groups.

    They do when there is something to write in any group. A prefill rank that writes to nobody at all (all of its heads
    have other writers) meets its *witness*, the lowest decode rank that holds one of its heads, so that every prefill
    rank is told how a transfer ends.
    """
    totals = tuple(totals)
    # All of them are looked at: a pair that does not fit in one group is refused, whatever the others say.
    written = [written_heads(prefill_tp, decode_tp, total) for total in totals]
    if any(written):
        return True
    if not totals or any(_writes(prefill_tp, decode_tp[1], total) for total in totals):
        return False
    witness = min(_holders(heads_of(*prefill_tp, total), decode_tp[1], total).start for total in totals)
    return decode_tp[0] == witness


def readers(
    prefill: Share, decode_pp_size: int, decode_tp_size: int, totals: Iterable[int]
) -> frozenset[tuple[int, int]]:
    """The decode ranks ``(pp_rank, tp_rank)`` that talk to this prefill rank: all stages of those that it meets."""
    totals = tuple(totals)
    tp_ranks = [
        rank
        for rank in _candidates(prefill.tp, decode_tp_size, totals)
        if meets(prefill.tp, (rank, decode_tp_size), totals)
    ]
    return frozenset((stage, rank) for stage in range(decode_pp_size) for rank in tp_ranks)


def writers(
    decode: Share, prefill_pp_size: int, prefill_tp_size: int, totals: Iterable[int]
) -> frozenset[tuple[int, int]]:
    """The prefill ranks ``(pp_rank, tp_rank)`` that this decode rank hears of: exactly those that have it in their
    :func:`readers`."""
    totals = tuple(totals)
    tp_ranks = [
        rank
        for rank in _candidates(decode.tp, prefill_tp_size, totals)
        if meets((rank, prefill_tp_size), decode.tp, totals)
    ]
    return frozenset((stage, rank) for stage in range(prefill_pp_size) for rank in tp_ranks)


def _heads(total: int) -> int:
    return total if total > 0 else 1


def _copies(tp_size: int, total: int) -> int:
    """How many ranks hold the same head."""
    return max(1, tp_size // _heads(total))


def _holders(heads: range, tp_size: int, total: int) -> range:
    """The ranks of an engine that hold any of these heads. They are always neighbours."""
    copies = _copies(tp_size, total)
    if copies > 1:
        return range(heads.start * copies, heads.stop * copies)
    share = len(heads_of(0, tp_size, total))
    return range(heads.start // share, (heads.stop - 1) // share + 1)


def _candidates(tp: tuple[int, int], other_size: int, totals: tuple[int, ...]) -> list[int]:
    """Ranks of the other side that have a head in common with this one: nobody else can meet it. There is one at least,
    so that numbers that do not fit are refused when it is asked whether they meet."""
    found: set[int] = set()
    for total in totals:
        if total == PER_RANK:
            found.add(tp[0])
        else:
            found.update(_holders(heads_of(*tp, total), other_size, total))
    return sorted(found)


def _writes(prefill_tp: tuple[int, int], decode_size: int, total: int) -> bool:
    """Whether this rank is the writer of anything in a group."""
    if total == PER_RANK:
        return True
    our_copies, their_copies = _copies(prefill_tp[1], total), _copies(decode_size, total)
    copy = prefill_tp[0] % our_copies
    first = -(-copy * their_copies // our_copies)  # the first copy at decode that is not left to an earlier writer
    return first * our_copies // their_copies == copy


def _check_equal_sizes(prefill_size: int, decode_size: int) -> None:
    if prefill_size != decode_size:
        raise Incompatible(
            f"a group of opaque state (axis S) is each tensor-parallel rank's own: tp_size {prefill_size} on one side "
            f"and {decode_size} on the other; only equal sizes can be served"
        )
