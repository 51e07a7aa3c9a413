"""What is counted between two reports to vLLM's statistics: plain numbers and lists of durations, easily added up."""

from __future__ import annotations

from typing import Any

import kvpush

MAX_DURATIONS = 1000  # of one kind between two reports; more are counted and not kept

Numbers = dict[str, Any]  # name -> int, or list of seconds

_FAILURES = (kvpush.Outcome.failed, kvpush.Outcome.expired)  # a cancelled one has a code, too, and is none


class Tally:
    """Counts until it is taken."""

    def __init__(self) -> None:
        self._numbers: Numbers = {}

    def count(self, name: str, by: int = 1) -> None:
        """One more, or so many."""
        self._numbers[name] = self._numbers.get(name, 0) + by

    def pushed(self, event: kvpush.PushFinished) -> None:
        """A push ended."""
        self.count(f"pushes_{event.outcome}")
        self.count("pushed_bytes", event.num_bytes)
        if event.outcome == kvpush.Outcome.done:
            self._timed("push_s", event.duration_s)
        elif event.code is not None and event.outcome in _FAILURES:
            self.count(f"push_failures_{event.code}")

    def received(self, event: kvpush.ReceiveFinished) -> None:
        """A receive ended."""
        self.count(f"receives_{event.outcome}")
        if event.outcome == kvpush.Outcome.done:
            self.count("received_blocks", event.num_blocks)
            self._timed("receive_s", event.duration_s)
        elif event.code is not None and event.outcome in _FAILURES:
            self.count(f"receive_failures_{event.code}")

    def take(self) -> Numbers:
        """Everything so far; it starts again at nothing."""
        numbers, self._numbers = self._numbers, {}
        return numbers

    def _timed(self, name: str, duration_s: float) -> None:
        durations = self._numbers.setdefault(name, [])
        if len(durations) < MAX_DURATIONS:
            durations.append(duration_s)


def added(one: Numbers, other: Numbers) -> Numbers:
    """The sum of two tallies."""
    total = dict(one)
    for name, value in other.items():
        total[name] = total[name] + value if name in total else value
    return total


def summary(numbers: Numbers) -> dict[str, int | float]:
    """One number a line: durations become their median and their longest."""
    lines: dict[str, int | float] = {}
    for name, value in sorted(numbers.items()):
        if not isinstance(value, list):
            lines[name] = value
        elif value:
            stem = name.removesuffix("_s")
            lines[f"{stem}_median_ms"] = round(1000 * sorted(value)[len(value) // 2], 3)
            lines[f"{stem}_max_ms"] = round(1000 * max(value), 3)
    return lines
