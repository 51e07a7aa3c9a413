"""The registry alone, with ten thousand engines, and with a hundred thousand that come and go. One process, no NIXL, a
clock that is set by hand."""

from __future__ import annotations

import gc
import random
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

from kvpush.cli.bench.context import Bench
from kvpush.cli.bench.report import Figure, Samples
from kvpush.config import Config
from kvpush.registry import Registry

POSTED_LIMIT_S = 10e-6
SWEEP_LIMIT_S = 1e-3
MEMORY_LIMIT_BYTES = 4096.0
GROWTH_LIMIT_BYTES = 1.0 * (1 << 20)  # "flat": less than what one engine in a hundred would keep, in Python's allocator
LOCKED_LOOKUP = "a lock and a dictionary"
_RESOURCE = object()


class _Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def measure(bench: Bench) -> list[Figure]:
    """The budgets at the full number of engines, then fewer engines, then engines that pass by."""
    figures = _crowded(bench.sizes.engines, bench.sizes.registry_calls, is_budget=True)
    if bench.has_sweeps:
        for num_engines in bench.points(bench.sizes.sweep_registry, "smaller registries"):
            figures += _crowded(num_engines, min(bench.sizes.registry_calls, 2000), is_budget=False)
    return [*figures, _passing(bench.sizes.passing_engines, bench.sizes.engines)]


def _crowded(num_engines: int, repetitions: int, *, is_budget: bool) -> list[Figure]:
    """All engines are connected; in the end they all fall silent in the same moment."""
    clock = _Clock()
    config = Config(max_engines=num_engines, liveness_timeout_s=60.0)
    registry = Registry(config, clock, random.Random(3))
    gc.collect()
    tracemalloc.start()
    generations = [_connect(registry, number) for number in range(num_engines)]
    gc.collect()
    memory_bytes = tracemalloc.get_traced_memory()[0] / num_engines
    tracemalloc.stop()

    rng = random.Random(4)
    chosen = [rng.choice(generations) for _ in range(repetitions)]
    posted, settled = [], []
    for generation in chosen:
        posted.append(_timed(partial(registry.pin, generation)))
        settled.append(_timed(partial(registry.settle, generation, ok=True)))

    clock.now_s += 30.0
    while (due_s := registry.next_due_s()) is not None and due_s <= clock.now_s:
        registry.sweep()  # timers of handshakes that ended long ago
    quiet_sweeps = [_timed(registry.sweep) for _ in range(100)]
    clock.now_s += 60.0
    busy_sweeps = []
    while len(registry):
        busy_sweeps.append(_timed(registry.sweep))

    locked = Samples.of(_locked_lookups(generations, repetitions))

    engines = f"{num_engines:,} engines"
    posted_figure = Figure.of_seconds(
        f"push_posted, {engines}",
        Samples.of(posted),
        limit=POSTED_LIMIT_S if is_budget else None,
        budget="registry-posted" if is_budget else "",
        beside={LOCKED_LOOKUP: locked.median},
        note="Registry.pin()",
        series="push_posted, by engines in the registry",
        x=num_engines,
        x_name="engines",
    )
    memory_figure = Figure(
        f"memory per engine, {engines}",
        memory_bytes,
        "B",
        limit=MEMORY_LIMIT_BYTES if is_budget else None,
        budget="registry-memory" if is_budget else "",
        note="tracemalloc, the registry's record, timer and share of the trace; NIXL's own memory is not in it",
        series="memory per engine, by engines in the registry",
        x=num_engines,
        x_name="engines",
    )
    if not is_budget:
        return [posted_figure, memory_figure]
    return [
        posted_figure,
        Figure.of_seconds(f"push_settled, {engines}", Samples.of(settled), note="Registry.settle()"),
        Figure.of_seconds(
            f"one sweep tick, nothing due, {engines}",
            Samples.of(quiet_sweeps),
            limit=SWEEP_LIMIT_S,
            budget="registry-sweep",
        ),
        Figure.of_seconds(
            f"one sweep tick, all due, {engines}",
            Samples.of(busy_sweeps),
            limit=SWEEP_LIMIT_S,
            budget="registry-sweep",
            note="every engine fell silent at once: each tick evicts a batch, and pushes are served in between",
        ),
        memory_figure,
    ]


def _locked_lookups(generations: list[int], repetitions: int) -> list[float]:
    """What any registry of this kind costs at least."""
    lock, table = threading.Lock(), dict.fromkeys(generations, 0)
    rng = random.Random(4)

    def look_up(generation: int) -> None:
        with lock:
            table[generation] += 1

    return [_timed(partial(look_up, rng.choice(generations))) for _ in range(repetitions)]


def _passing(num_engines: int, at_a_time: int) -> Figure:
    """Engines that come, serve one push, are lost and are evicted; the memory that is left behind by all but the first.

    The first tenth fills what is bounded: the trace, and the memory of evicted engines.
    """
    clock = _Clock()
    at_a_time = min(at_a_time, max(1, num_engines // 100))
    config = Config(max_engines=at_a_time, max_tombstones=at_a_time)
    registry = Registry(config, clock, random.Random(5))

    def pass_by(first: int, count: int) -> None:
        for number in range(first, first + count):
            generation = _connect(registry, number)
            registry.pin(generation)
            registry.settle(generation, ok=True)
            registry.lost(generation, "its link was closed", link_is_up=False)
            clock.now_s += 0.001
            registry.sweep()

    warm_up = num_engines // 10
    tracemalloc.start()
    pass_by(0, warm_up)
    gc.collect()
    before_bytes = tracemalloc.get_traced_memory()[0]
    pass_by(warm_up, num_engines - warm_up)
    gc.collect()
    grown_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
    tracemalloc.stop()
    return Figure(
        f"memory left behind by {num_engines:,} engines that came and went",
        max(0, grown_bytes),
        "B",
        limit=GROWTH_LIMIT_BYTES,
        budget="come-and-go",
        note="tracemalloc, between the first tenth of them and the last; the registry alone, or it would take days",
    )


def _connect(registry: Registry, number: int) -> int:
    generation, _ = registry.admit(f"decode-{number}", f"incarnation-{number}", f"link {number:010x}")
    attempt = registry.begin_handshake(generation)
    assert attempt is not None, "a new engine is unknown, and no backoff runs"
    assert registry.handshake_succeeded(generation, attempt, _RESOURCE), "the attempt is current"
    return generation


def _timed(call: Callable[[], object]) -> float:
    begun_ns = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begun_ns) / 1e9
