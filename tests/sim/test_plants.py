"""Each bug of a list is planted, and something that ``make test`` runs anyway must object. ``-s`` shows who did."""

import pytest
from concurrency import an_intruder_gets_in, messages_handled_after_a_bad_one
from plants import LOCK, LOOP, RANKS, SIMULATED, Edit, Plant, planted

from kvpush.registry import Registry
from kvpush.testing.scenario import draw
from kvpush.testing.simulation import ACTIONS, Simulation

MAX_SEEDS = 250


@pytest.mark.timeout(300)
@pytest.mark.parametrize("plant", SIMULATED + RANKS, ids=lambda plant: plant.name)
def test_the_simulator_finds(plant):
    scenarios = [draw(seed, ACTIONS) for seed in range(MAX_SEEDS)]
    with planted(plant):
        for scenario in scenarios:
            if plant in RANKS and not scenario.setup.has_ranks:
                continue  # it is none there
            failure = Simulation(scenario).run().failure
            if failure is not None and failure.checker in plant.catchers:
                print(f"{plant.name}: seed {scenario.seed}, {failure.checker}")
                return
    pytest.fail(f"{MAX_SEEDS} seeds do not find it")


def test_nothing_fits_between_reading_the_agent_and_pinning_it():
    """Origin 3: whoever has the agent has the pin."""
    assert not an_intruder_gets_in()
    with planted(LOCK):
        assert an_intruder_gets_in()


def test_rule17_one_bad_message_ends_no_loop():
    assert messages_handled_after_a_bad_one() == 2
    with planted(LOOP):
        assert messages_handled_after_a_bad_one() == 0


def test_a_plant_that_does_not_fit_the_code_any_more_says_so():
    stale = Plant("x", [Edit(Registry, "pin", "these words", "others")])
    with pytest.raises(AssertionError, match="not there any more"), planted(stale):
        pass


def test_a_plant_is_gone_afterwards():
    before = Registry.pin
    with planted(LOCK):
        assert Registry.pin is not before
    assert Registry.pin is before
