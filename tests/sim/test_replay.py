"""One seed is one run, in every process; a failure is shrunk, and drawn so that people can read it."""

import hashlib
import os
import subprocess
import sys

import pytest
from plants import SIMULATED, planted

from kvpush.testing import Trace, World
from kvpush.testing.command_line import main, traced
from kvpush.testing.scenario import draw
from kvpush.testing.shrink import Shrinker, checker_of
from kvpush.testing.simulation import ACTIONS

PROGRAM = """
import hashlib
from kvpush.testing.command_line import traced
from kvpush.testing.scenario import draw
from kvpush.testing.simulation import ACTIONS
for seed in {seeds!r}:
    print(hashlib.sha256(traced(draw(seed, ACTIONS))[1].chart().encode()).hexdigest())
"""
SEEDS = list(range(12))


def digest(seed):
    chart = traced(draw(seed, ACTIONS), with_heartbeats=False)[1].chart()
    return hashlib.sha256(chart.encode()).hexdigest()


def digests_elsewhere(hash_seed):
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(sys.path)}
    program = PROGRAM.format(seeds=SEEDS)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True, env=environment
    )
    return ended.stdout.split()


def test_the_same_seed_gives_the_same_chart_in_every_process_byte_for_byte():
    here = [digest(seed) for seed in SEEDS]
    assert len(set(here)) == len(SEEDS)
    assert digests_elsewhere(1) == here == digests_elsewhere(2)


def plant(name):
    return next(plant for plant in SIMULATED if plant.name == name)


@pytest.fixture(scope="module")
def failing():
    """A scenario that fails because of a plant, and the plant."""
    bug = plant("D not told of a failed handshake")
    with planted(bug):
        for seed in range(20):
            if checker_of(draw(seed, ACTIONS)) == "told-at-once":
                return bug, draw(seed, ACTIONS)
    pytest.fail("no seed of these finds the plant")


def test_a_failure_shrinks_to_a_few_steps_that_break_the_same_rule(failing):
    bug, scenario = failing
    with planted(bug):
        shrinker = Shrinker(checker_of, max_runs=150)
        smallest = shrinker.shrink(scenario)
        assert checker_of(smallest) == "told-at-once"
    assert len(smallest.steps) <= 5 < len(scenario.steps)
    assert shrinker.num_runs <= 150
    assert checker_of(smallest) is None


def test_what_does_not_fail_is_not_shrunk():
    scenario = draw(1, ACTIONS)
    shrinker = Shrinker(lambda scenario: None)
    assert shrinker.shrink(scenario) is scenario
    assert shrinker.num_runs == 0


def test_another_rule_s_failure_does_not_count_when_shrinking():
    scenario = draw(1, ACTIONS)

    def run(tried):
        return "this rule" if len(tried.steps) == len(scenario.steps) else "another"

    assert Shrinker(run, max_runs=50).shrink(scenario).steps[-1].action == scenario.steps[-1].action
    assert len(Shrinker(run, max_runs=50).shrink(scenario).steps) == len(scenario.steps)


def test_replay_draws_the_run(capsys):
    assert main(["replay", "3", "--heartbeats"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("seed 3: ")
    assert "time s     p0" in out
    assert "-- all faults are over" in out
    assert "Heartbeat" in out
    assert out.rstrip().endswith("no rule was broken")


def test_replay_of_a_failure_draws_the_shrunk_run_and_names_the_rule(failing, capsys, monkeypatch):
    bug, scenario = failing
    monkeypatch.setattr("kvpush.testing.shrink.MAX_RUNS", 100)
    with planted(bug):
        assert main(["replay", str(scenario.seed), "--last", "40"]) == 1
    out = capsys.readouterr().out
    assert "BROKEN told-at-once" in out
    assert f" of {len(scenario.steps)} steps" in out


def test_sim_says_what_it_reached(capsys):
    assert main(["sim", "--seeds", "3", "--start", "7"]) == 0
    out, err = capsys.readouterr()
    for word in ("seeds       3, 0 of them broke a rule", "faults", "engine rows", "push rows", "receive rows", "time"):
        assert word in out
    assert "3 of 3 seeds" in err


def test_sim_shows_the_first_seed_that_breaks_a_rule(failing, capsys, monkeypatch):
    bug, scenario = failing
    monkeypatch.setattr("kvpush.testing.command_line.show", lambda seed, **_: print(f"shown {seed}"))
    with planted(bug):
        assert main(["sim", "--seeds", "1", "--start", str(scenario.seed)]) == 1
    out = capsys.readouterr().out
    assert f"python -m kvpush.testing replay {scenario.seed}" in out
    assert f"shown {scenario.seed}" in out


def test_a_world_of_ones_own_is_drawn_too():
    world = World(seed=1)
    prefill, decode = world.prefill("p0"), world.decode("d0")
    trace = Trace()
    trace.watch(world)
    world.observers.append(trace)
    decode.expect("t", [7], prefill)
    prefill.push("t", [3])
    world.settle(60)
    chart = trace.chart()
    assert chart.splitlines()[0].split() == ["time", "s", "p0", "d0"]
    assert "expect t" in chart and "WRITE t" in chart and "* t done" in chart
    assert not chart.splitlines()[-1].startswith("0.0000")
