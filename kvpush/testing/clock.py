"""A clock that moves only when a test moves it."""

from __future__ import annotations

from kvpush.errors import UsageError


class FakeClock:
    """A drop-in for ``time.monotonic``: calling it returns seconds. Does not start at 0."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def __repr__(self) -> str:
        return f"FakeClock({self._now_s!r})"

    def advance(self, duration_s: float) -> float:
        """Move forward and return the new time. Refused when negative: monotonic clocks do not go back."""
        return self.set(self._now_s + duration_s)

    def set(self, now_s: float) -> float:
        """Jump to a time at or after the current one and return it. Raises UsageError for an earlier one."""
        if not now_s >= self._now_s:
            raise UsageError(f"a monotonic clock does not go back from {self._now_s!r} to {now_s!r}")
        self._now_s = now_s
        return now_s
