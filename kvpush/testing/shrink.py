"""From a scenario that breaks a rule to a short one that breaks the same rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvpush.testing.scenario import Scenario, Step
from kvpush.testing.simulation import Simulation

MAX_RUNS = 600


class Shrinker:
    """Drops steps, then shortens what is left, for as long as the same checker objects. ``num_runs`` counts."""

    def __init__(self, run: Callable[[Scenario], str | None], max_runs: int = MAX_RUNS) -> None:
        """``run``: the name of the checker that objects to a scenario, if one does."""
        self.num_runs = 0
        self._run = run
        self._max_runs = max_runs

    def shrink(self, scenario: Scenario) -> Scenario:
        """The smallest that was found."""
        checker = self._run(scenario)
        if checker is None:
            return scenario
        while self.num_runs < self._max_runs:
            smaller = self._shorter(self._fewer(scenario, checker), checker)
            if smaller.steps == scenario.steps:
                break
            scenario = smaller
        return scenario

    def _fails(self, scenario: Scenario, steps: tuple[Step, ...], checker: str) -> bool:
        if self.num_runs >= self._max_runs:
            return False
        self.num_runs += 1
        return self._run(replace(scenario, steps=steps)) == checker

    def _fewer(self, scenario: Scenario, checker: str) -> Scenario:
        """Without runs of steps, long ones first."""
        steps = scenario.steps
        length = max(1, len(steps) // 2)
        while True:
            start = 0
            while start < len(steps):
                rest = steps[:start] + steps[start + length :]
                if self._fails(scenario, rest, checker):
                    steps = rest
                else:
                    start += length
            if length == 1:
                return replace(scenario, steps=steps)
            length //= 2

    def _shorter(self, scenario: Scenario, checker: str) -> Scenario:
        """With less time between steps, and with smaller numbers."""
        steps = scenario.steps
        for index, step in enumerate(steps):
            for delay_s in (0.0, 0.001, 0.1):
                if delay_s < step.delay_s:
                    steps = self._try(scenario, steps, index, replace(steps[index], delay_s=delay_s), checker)
            for place in range(len(step.numbers)):
                for number in (0, 1):
                    if steps[index].numbers[place] > number:
                        numbers = list(steps[index].numbers)
                        numbers[place] = number
                        steps = self._try(
                            scenario, steps, index, replace(steps[index], numbers=tuple(numbers)), checker
                        )
        return replace(scenario, steps=steps)

    def _try(
        self, scenario: Scenario, steps: tuple[Step, ...], index: int, step: Step, checker: str
    ) -> tuple[Step, ...]:
        tried = (*steps[:index], step, *steps[index + 1 :])
        return tried if self._fails(scenario, tried, checker) else steps


def checker_of(scenario: Scenario) -> str | None:
    """Run it; the name of the checker that objects, if one does."""
    failure = Simulation(scenario).run().failure
    return None if failure is None else failure.checker
