"""Breadth-first over every order of events, each state looked at once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from universe import Broken, Universe

Event = tuple[Any, ...]


class Found(AssertionError):
    """A broken rule, and the shortest way that leads to it."""

    def __init__(self, way: tuple[Event, ...], cause: Exception) -> None:
        steps = "\n".join(f"  {number:2}. {' '.join(map(str, event))}" for number, event in enumerate(way, 1))
        super().__init__(f"{cause}\nthe shortest way there:\n{steps}")
        self.way = way


@dataclass
class Exploration:
    """What was seen."""

    states_at: list[int] = field(default_factory=list)  # new states at each depth
    transitions: int = 0
    run_out: int = 0  # states from which everything was let come to its end
    is_complete: bool = False  # nothing is left to happen beyond the depth
    seconds: float = 0.0

    @property
    def states(self) -> int:
        return sum(self.states_at)

    def __str__(self) -> str:
        reach = "every state there is" if self.is_complete else f"every state within {len(self.states_at) - 1} events"
        return (
            f"{self.states} states, {reach}; {self.transitions} transitions, "
            f"{self.run_out} states run to their end, {self.seconds:.1f} s"
        )


def explore(start: Universe, depth: int, *, run_out_every: int = 16) -> Exploration:
    """Visit every state within ``depth`` events of ``start``. Raises :class:`Found`.

    From every ``run_out_every``-th state all that is under way is let come to its end.
    """
    began_s = time.perf_counter()
    seen = {start.state()}
    frontier: list[tuple[bytes, tuple[Event, ...]]] = [(start.copy(), ())]
    result = Exploration([1])
    for _ in range(depth):
        following: list[tuple[bytes, tuple[Event, ...]]] = []
        for frozen, way in frontier:
            for event in Universe.of(frozen).enabled():
                universe = Universe.of(frozen)
                try:
                    universe.fire(event)
                    state = universe.state()
                    result.transitions += 1
                    if state in seen:
                        continue
                    seen.add(state)
                    following.append((universe.copy(), (*way, event)))
                    if len(seen) % run_out_every == 0:
                        result.run_out += 1
                        universe.run_out()
                except Exception as exc:  # noqa: BLE001  # an assertion of the cores is as good as one of ours
                    raise Found((*way, event), exc) from exc
        frontier = following
        result.states_at.append(len(frontier))
        if not frontier:
            result.is_complete = True
            break
    result.seconds = time.perf_counter() - began_s
    return result


__all__ = ["Broken", "Exploration", "Found", "explore"]
