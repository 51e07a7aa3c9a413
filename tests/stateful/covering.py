"""Runs a rule-based machine until every row that it can reach was taken."""

from collections.abc import Callable

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

EXAMPLES = 150  # or more, where the profile says so


def run_to_cover(machine: type[RuleBasedStateMachine], missing: Callable[[], set[object]], *, steps: int) -> None:
    """With new inputs each time, as the profile wants; these may miss a rare row, so that inputs follow which are the
    same every time. ``missing``: rows that were never taken so far."""
    examples = max(EXAMPLES, settings().max_examples)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=steps))
    if missing():
        run_state_machine_as_test(
            machine, settings=settings(max_examples=2 * examples, stateful_step_count=steps, derandomize=True)
        )
    assert not missing(), f"rows that were never taken: {sorted(map(str, missing()))}"
