"""Which rows of the three tables were taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvpush.lifecycle import LIFECYCLES, HasState, Lifecycle

Row = tuple[str, str, str]  # lifecycle, state, trigger


def all_rows() -> set[Row]:
    """Every row of every table, one for each of its source states."""
    return {
        (lifecycle.name, str(state), str(row.trigger))
        for lifecycle in LIFECYCLES
        for row in lifecycle.rows
        for state in row.sources
    }


@contextmanager
def counting_rows() -> Iterator[Counter[Row]]:
    """How often each row is taken by anything in this process, for as long as the context lasts."""
    counts: Counter[Row] = Counter()
    fire: Any = Lifecycle.fire

    def counted(lifecycle: Lifecycle[Any, Any], subject: HasState[Any], trigger: Any) -> None:
        state = str(subject.state)
        fire(lifecycle, subject, trigger)
        counts[lifecycle.name, state, str(trigger)] += 1

    holder: Any = Lifecycle
    holder.fire = counted
    try:
        yield counts
    finally:
        holder.fire = fire
