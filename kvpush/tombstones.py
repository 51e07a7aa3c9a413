"""What is remembered of ended transfers: bounded in number and in time, expired on look-up. Pure.

A tombstone answers two late arrivals: a registration for a transfer that was served, failed or cancelled already, and
a push for one that was cancelled before its blocks existed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvpush.errors import FailureCode


@dataclass(slots=True)
class Tombstone:
    """How a transfer ended.

    ``is_push_awaited``: it was cancelled before any of its blocks were pushed, so the push still to come ends with it.
    ``incarnation`` and ``epoch`` name the registration it belonged to (empty and -1 without one): while
    ``is_push_awaited``, a newer one is another transfer's beginning.
    """

    code: FailureCode
    reason: str
    is_push_awaited: bool
    incarnation: str = ""
    epoch: int = -1
    until_s: float = 0.0


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
