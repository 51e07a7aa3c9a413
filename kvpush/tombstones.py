"""What is remembered of ended transfers: bounded in number and in time, expired on look-up. Pure.

A tombstone answers two late arrivals: a registration for a transfer that was served, failed or cancelled already, and
a push for one that was cancelled before its blocks existed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpush.errors import FailureCode


@dataclass(slots=True)
class Tombstone:
    """How a transfer ended.

    ``is_push_awaited``: it was cancelled before any of its blocks were pushed, so the push still to come ends with it.
    ``epochs`` name the registrations that it had, one for each incarnation (of one rank of decode) that sent one: while
    ``is_push_awaited``, a newer one is another transfer's beginning.
    """

    code: FailureCode
    reason: str
    is_push_awaited: bool
    epochs: Mapping[str, int] = field(default_factory=dict)
    until_s: float = 0.0

    def is_before(self, incarnation: str, epoch: int) -> bool:
        """Whether this registration came after those of the transfer that ended."""
        return epoch > self.epochs.get(incarnation, -1)


class Tombstones:
    """Transfer id -> :class:`Tombstone`, oldest dropped first above ``limit``."""

    def __init__(self, limit: int, ttl_s: float) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._entries: OrderedDict[str, Tombstone] = OrderedDict()

    def bury(self, transfer_id: str, tombstone: Tombstone, now_s: float) -> None:
        """Remember, from now for one time to live."""
        tombstone.until_s = now_s + self._ttl_s
        self._entries[transfer_id] = tombstone
        self._entries.move_to_end(transfer_id)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def find(self, transfer_id: str, now_s: float) -> Tombstone | None:
        """The tombstone, unless its time is over."""
        tombstone = self._entries.get(transfer_id)
        if tombstone is None or tombstone.until_s > now_s:
            return tombstone
        del self._entries[transfer_id]
        return None

    def forget(self, transfer_id: str) -> None:
        """The id is in use again."""
        self._entries.pop(transfer_id, None)

    def __len__(self) -> int:
        return len(self._entries)
