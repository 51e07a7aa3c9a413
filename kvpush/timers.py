"""One-shot timers as data: set, cancel, and ask which are due. Pure: the time is an argument.

A heap with lazy deletion. Re-setting or cancelling leaves a dead entry behind; the heap is rebuilt when dead entries
outnumber live ones, so it stays within twice the number of timers set.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_REBUILD_ABOVE = 64  # entries; below that, dead ones cost nothing


class Timers(Generic[K]):
    """At most one pending timer per key. Not thread-safe: owned by whoever owns the core."""

    __slots__ = ("_due_s", "_heap", "_serial")

    def __init__(self) -> None:
        self._due_s: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0

    def set(self, key: K, due_s: float) -> None:
        """Set or move the timer of ``key``."""
        self._serial += 1
        self._due_s[key] = (due_s, self._serial)
        heapq.heappush(self._heap, (due_s, self._serial, key))
        if len(self._heap) > max(_REBUILD_ABOVE, 2 * len(self._due_s)):
            self._heap = [(due_s, serial, key) for key, (due_s, serial) in self._due_s.items()]
            heapq.heapify(self._heap)

    def cancel(self, key: K) -> None:
        """Forget the timer of ``key``, if there is one."""
        self._due_s.pop(key, None)

    def is_set_before(self, key: K, due_s: float) -> bool:
        """Whether the timer of ``key`` is set and fires at ``due_s`` at the latest."""
        pending = self._due_s.get(key)
        return pending is not None and pending[0] <= due_s

    def pop_due(self, now_s: float) -> Iterator[K]:
        """Yield and forget every key that is due, earliest first; keys set while iterating count too."""
        while self._heap and self._heap[0][0] <= now_s:
            due_s, serial, key = heapq.heappop(self._heap)
            if self._due_s.get(key) == (due_s, serial):
                del self._due_s[key]
                yield key

    def next_due_s(self) -> float | None:
        """When the earliest timer is due; ``None`` when there is none."""
        while self._heap:
            due_s, serial, key = self._heap[0]
            if self._due_s.get(key) == (due_s, serial):
                return due_s
            heapq.heappop(self._heap)
        return None

    def __contains__(self, key: K) -> bool:
        return key in self._due_s

    def __len__(self) -> int:
        return len(self._due_s)
