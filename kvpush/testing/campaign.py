"""Many seeds, and what they reached in all."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from kvpush.testing.rows import Row, all_rows, counting_rows
from kvpush.testing.scenario import draw
from kvpush.testing.simulation import ACTIONS, BrokenRule, Result, Simulation
from kvpush.testing.slices import Spread

MAX_WORKERS = 2
SEEDS_PER_BATCH = 25
SPREADS_SHOWN = 12  # in a report, the most frequent

ALONE = Spread()  # an engine of one process


@dataclass(slots=True)
class Totals:
    """Sums over runs."""

    num_seeds: int = 0
    num_steps: int = 0
    simulated_s: float = 0.0
    elapsed_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    # how a prefill and a decode engine were spread over ranks -> receives that were done between them
    served: Counter[tuple[Spread, Spread]] = field(default_factory=Counter)
    num_with_ranks: int = 0  # seeds in which some engine had several
    rows: Counter[Row] = field(default_factory=Counter)
    failures: dict[int, BrokenRule] = field(default_factory=dict)  # by seed

    def add(self, result: Result) -> None:
        """One more run."""
        self.num_seeds += 1
        self.num_steps += result.num_steps
        self.simulated_s += result.simulated_s
        self.faults += result.faults
        self.outcomes += result.outcomes
        self.served += result.served
        self.num_with_ranks += any(spread != ALONE for pair in result.served for spread in pair)
        if result.failure is not None:
            self.failures[result.seed] = result.failure

    def merge(self, other: Totals) -> None:
        """Those of another worker."""
        self.num_seeds += other.num_seeds
        self.num_steps += other.num_steps
        self.simulated_s += other.simulated_s
        self.faults += other.faults
        self.outcomes += other.outcomes
        self.served += other.served
        self.num_with_ranks += other.num_with_ranks
        self.rows += other.rows
        self.failures |= other.failures

    @property
    def rows_missing(self) -> list[Row]:
        """Rows of the tables that no run took."""
        return sorted(all_rows() - set(self.rows))

    @property
    def faults_missing(self) -> list[str]:
        """Faults that struck in no run."""
        return sorted(name for name, action in ACTIONS.items() if action.is_fault and not self.faults[name])

    def report(self) -> str:
        """For people."""
        alone = self.served[ALONE, ALONE]
        unequal = sum(count for (prefill, decode), count in self.served.items() if prefill != decode)
        pairs = ", ".join(f"{one} to {other} {count}" for (one, other), count in self.served.most_common(SPREADS_SHOWN))
        lines = [
            f"seeds       {self.num_seeds}, {len(self.failures)} of them broke a rule",
            f"steps       {self.num_steps} events in {self.simulated_s / 3600:.1f} simulated hours",
            f"time        {self.elapsed_s:.0f} s",
            f"faults      {sum(self.faults.values())}: "
            + ", ".join(f"{name} {count}" for name, count in self.faults.most_common()),
            "outcomes    " + ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items())),
            f"ranks       {self.num_with_ranks} seeds with engines of several; {sum(self.served.values()) - alone} "
            f"receives done there, {unequal} between engines that are spread unequally",
            f"spreads     {len(self.served)} pairs: {pairs}{', ...' if len(self.served) > SPREADS_SHOWN else ''}",
        ]
        for table in dict.fromkeys(row[0] for row in sorted(all_rows())):
            rows = {row for row in all_rows() if row[0] == table}
            taken = sum(self.rows[row] for row in rows)
            lines.append(
                f"{table + ' rows':<12}{len(rows & set(self.rows))} of {len(rows)} reached, taken {taken} times"
            )
        for row in self.rows_missing:
            lines.append(f"not reached: {' '.join(row)}")
        for name in self.faults_missing:
            lines.append(f"never struck: {name}")
        for seed, failure in sorted(self.failures.items()):
            lines.append(f"seed {seed}: {failure.checker}: {failure.message[:300]}")
            lines.append(f"            python -m kvpush.testing replay {seed}")
        return "\n".join(lines)


def run_batch(seeds: Sequence[int]) -> Totals:
    """In this process."""
    start_s = time.perf_counter()
    totals = Totals()
    with counting_rows() as rows:
        for seed in seeds:
            totals.add(Simulation(draw(seed, ACTIONS)).run())
    totals.rows, totals.elapsed_s = rows, time.perf_counter() - start_s
    return totals


def run_seeds(
    seeds: Sequence[int],
    *,
    workers: int = 1,
    limit_s: float = math.inf,
    progress: Callable[[Totals], None] = lambda totals: None,
) -> Totals:
    """All of them, or as many as fit into ``limit_s``. ``progress`` is called now and then with the sums so far."""
    start_s = time.perf_counter()
    totals = Totals()
    for part in _batches_run(seeds, min(workers, MAX_WORKERS)):
        totals.merge(part)
        totals.elapsed_s = time.perf_counter() - start_s
        progress(totals)
        if totals.elapsed_s > limit_s:
            break
    return totals


def _end_with_parent() -> None:
    """In a worker: a campaign that is killed must not leave it behind, waiting for work or doing it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker was started by somebody"

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="campaign: parent", daemon=True).start()


def _batches_run(seeds: Sequence[int], workers: int) -> Iterator[Totals]:
    batches = iter([seeds[start : start + SEEDS_PER_BATCH] for start in range(0, len(seeds), SEEDS_PER_BATCH)])
    if workers == 1:
        yield from map(run_batch, batches)
        return
    # spawned: a fork would copy threads of torch in an unknown state
    with ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent
    ) as pool:
        under_way = deque(pool.submit(run_batch, batch) for batch in islice(batches, 2 * workers))
        while under_way:  # never many ahead, so that a run that is stopped ends soon
            yield under_way.popleft().result()
            under_way.extend(pool.submit(run_batch, batch) for batch in islice(batches, 1))
