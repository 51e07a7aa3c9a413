"""``python -m kvpush.testing sim`` and ``python -m kvpush.testing replay SEED``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from kvpush.testing.campaign import MAX_WORKERS, Totals, run_seeds
from kvpush.testing.scenario import Scenario, draw
from kvpush.testing.shrink import Shrinker, checker_of
from kvpush.testing.simulation import ACTIONS, Result, Simulation
from kvpush.testing.trace import Trace


def main(arguments: Sequence[str] | None = None) -> int:
    """0: no rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m kvpush.testing", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sim = commands.add_parser("sim", help="run many seeds; print what they reached, and the first that breaks a rule")
    sim.add_argument("--seeds", type=int, default=500, help="how many (default 500)")
    sim.add_argument("--start", type=int, default=0, help="the first one")
    sim.add_argument("--workers", type=int, default=1, choices=range(1, MAX_WORKERS + 1), help="processes")
    sim.add_argument("--limit-s", type=float, default=math.inf, help="stop after so many seconds, whatever was run")
    replay = commands.add_parser("replay", help="run one seed again; a failure is shrunk and drawn")
    replay.add_argument("seed", type=int)
    replay.add_argument("--whole", action="store_true", help="draw the run as it is, without shrinking it")
    replay.add_argument("--heartbeats", action="store_true", help="draw heartbeats and hints, too")
    replay.add_argument("--last", type=int, default=None, help="only the last lines of the chart")
    options = parser.parse_args(arguments)
    if options.command == "sim":
        return simulate(options.seeds, options.start, options.workers, options.limit_s)
    return show(options.seed, is_whole=options.whole, with_heartbeats=options.heartbeats, last=options.last)


def simulate(num_seeds: int, start: int, workers: int, limit_s: float) -> int:
    """Run many seeds. A failure is shrunk and drawn."""

    def progress(totals: Totals) -> None:
        rate = totals.num_seeds / totals.elapsed_s
        text = f"{totals.num_seeds} of {num_seeds} seeds, {rate:.1f} a second, {len(totals.failures)} broke a rule"
        if totals.failures:
            text += f": {', '.join(map(str, sorted(totals.failures)[:5]))}"
        end = "\n" if totals.num_seeds >= num_seeds else ""
        sys.stderr.write(f"\r{text}{end}" if sys.stderr.isatty() else f"{text}\n")
        sys.stderr.flush()

    seeds = range(start, start + num_seeds)
    totals = run_seeds(seeds, workers=workers, limit_s=limit_s, progress=progress)
    print(totals.report())
    if totals.failures:
        print()
        show(min(totals.failures), is_whole=False, with_heartbeats=False, last=None)
    return 1 if totals.failures else 0


def show(seed: int, *, is_whole: bool, with_heartbeats: bool, last: int | None) -> int:
    """Run one seed and draw it."""
    scenario = draw(seed, ACTIONS)
    smallest = scenario if is_whole else Shrinker(checker_of).shrink(scenario)
    result, trace = traced(smallest, with_heartbeats=with_heartbeats)
    print(f"seed {seed}: {scenario.setup}")
    print(f"{len(smallest.steps)} of {len(scenario.steps)} steps")
    print(trace.chart(last=last))
    print()
    print("no rule was broken" if result.failure is None else f"BROKEN {result.failure}")
    return 0 if result.failure is None else 1


def traced(scenario: Scenario, *, with_heartbeats: bool = False) -> tuple[Result, Trace]:
    """Run a scenario and record it."""
    trace = Trace(with_heartbeats=with_heartbeats)
    simulation = Simulation(scenario, [trace])
    trace.watch(simulation.world)
    return simulation.run(), trace
