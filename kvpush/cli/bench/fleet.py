"""The registry alone, with ten thousand engines. One process, no NIXL, a clock that is set by hand."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

from kvpush.cli.bench.report import Figure, Samples
from kvpush.config import Config
from kvpush.registry import Registry

POSTED_LIMIT_S = 10e-6
SWEEP_LIMIT_S = 1e-3
MEMORY_LIMIT_BYTES = 4096.0
_RESOURCE = object()


class _Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def measure(num_engines: int, repetitions: int) -> list[Figure]:
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

    engines = f"{num_engines:,} engines"
    return [
        Figure.of_seconds(f"push_posted, {engines}", Samples.of(posted), limit=POSTED_LIMIT_S, note="Registry.pin()"),
        Figure.of_seconds(f"push_settled, {engines}", Samples.of(settled), note="Registry.settle()"),
        Figure.of_seconds(f"one sweep tick, nothing due, {engines}", Samples.of(quiet_sweeps), limit=SWEEP_LIMIT_S),
        Figure.of_seconds(
            f"one sweep tick, all due, {engines}",
            Samples.of(busy_sweeps),
            limit=SWEEP_LIMIT_S,
            note="every engine fell silent at once: each tick evicts a batch, and pushes are served in between",
        ),
        Figure(
            f"memory per engine, {engines}",
            memory_bytes,
            "B",
            limit=MEMORY_LIMIT_BYTES,
            note="tracemalloc, the registry's record, timer and share of the trace; NIXL's own memory is not in it",
        ),
    ]


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
