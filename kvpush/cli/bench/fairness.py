"""Nine engines that take what they are sent, beside a tenth that is slow, and beside a tenth that is sent very much.

The slow one is a process of its own that is stopped nine tenths of the time, over TCP, where a WRITE waits for its
reader: its link stays up, its heartbeats are answered, and pushes to it take long. Prefill has more pushes for it than
it can take throughout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Iterator, Sequence

from kvpush.cli.bench.context import Bench
from kvpush.cli.bench.pair import BenchError, DecodeProcess, await_registered, connect, connected_pair
from kvpush.cli.bench.report import Figure, Samples
from kvpush.events import Outcome, PushFinished
from kvpush.pusher import PrefillPusher

LIMIT = 2.0
_SLOW = "slow"
_GREEDY = "greedy"
_PUSHES_PER_ROUND = 4  # to each fast engine
_BLOCKS = 4  # of a push to a fast engine
_BLOCK_BYTES = 65536
_SLOW_PUSHES, _GREEDY_PUSHES = 2, 8
_SLOW_SHARE = 4  # of what the greedy engine is sent, one part in so many
_STOPPED_S, _RUNNING_S = 0.045, 0.005
_TIMEOUT_S = 60.0


def measure(bench: Bench) -> list[Figure]:
    """Quiet rounds, rounds beside the slow engine and rounds beside the greedy one, in turn."""
    config = dataclasses.replace(bench.config, ucx_options="TLS=tcp") if bench.device == "cpu" else bench.config
    greedy_blocks, num_fast = bench.sizes.fair_blocks, bench.sizes.fair_engines
    large, small = bench.shape(1, greedy_blocks, _BLOCK_BYTES), bench.shape(1, 4 * _BLOCKS, _BLOCK_BYTES)
    decode = bench.decode
    fast = tuple(f"fast {number}" for number in range(num_fast))
    quiet, beside_slow, beside_greedy = _Rounds(fast), _Rounds(fast), _Rounds(fast)
    with (
        DecodeProcess() as slow,
        connected_pair(large, config, decode, _GREEDY) as pusher,
    ):
        for name in fast:
            decode.call("open", name, small, config, True)
            connect(pusher, decode, name)
        slow.call("open", _SLOW, large, config, True)
        connect(pusher, slow, _SLOW)
        collector = _Collector(pusher)
        for number in bench.points(range(-1, bench.sizes.fair_rounds), "rounds"):
            if number == 0:
                quiet, beside_slow, beside_greedy = _Rounds(fast), _Rounds(fast), _Rounds(fast)
            _fast_round(pusher, decode, collector, f"quiet {number}", quiet)
            with (
                _pushing(pusher, slow, collector, _SLOW, f"slow {number}", greedy_blocks // _SLOW_SHARE, _SLOW_PUSHES),
                _mostly_stopped(slow),
            ):
                _fast_round(pusher, decode, collector, f"beside slow {number}", beside_slow)
            with _pushing(pusher, decode, collector, _GREEDY, f"greedy {number}", greedy_blocks, _GREEDY_PUSHES):
                _fast_round(pusher, decode, collector, f"beside greedy {number}", beside_greedy)
        for name in fast:
            decode.call("shut", name)
    figures = []
    for rounds, what in ((beside_slow, "a slow one"), (beside_greedy, f"one with {greedy_blocks // 16} MiB to take")):
        samples, alone = Samples.of(rounds.durations_s), Samples.of(quiet.durations_s)
        figures.append(
            Figure(
                f"p99 of pushes to {num_fast} engines beside {what}",
                samples.p99,
                "s",
                samples=len(samples.values),
                minimum=samples.minimum,
                baseline=alone.p99,
                baseline_name="quiet",
                baseline_minimum=alone.minimum,
                limit=LIMIT if rounds is beside_slow else None,
                budget="fairness" if rounds is beside_slow else "",
                note=f"push() to PushFinished, {_BLOCKS} blocks of 64 KiB to all {num_fast} at once; medians "
                f"{samples.median * 1e6:.0f} us, quiet {alone.median * 1e6:.0f} us",
            )
        )
    for rounds, what in ((quiet, "quiet"), (beside_slow, "beside a slow one"), (beside_greedy, "beside a greedy one")):
        figures.append(
            Figure(
                f"evenness among the {num_fast}, {what}",
                rounds.evenness(),
                "of 1",
                samples=len(rounds.durations_s),
                note="Jain's index of each engine's mean time: 1 when all are served alike",
            )
        )
    return figures


class _Rounds:
    """What pushes to the fast engines took."""

    def __init__(self, fast: Sequence[str]) -> None:
        self.by_engine: dict[str, list[float]] = {name: [] for name in fast}

    @property
    def durations_s(self) -> list[float]:
        return [duration for durations in self.by_engine.values() for duration in durations]

    def evenness(self) -> float:
        means = [statistics.fmean(durations) for durations in self.by_engine.values()]
        return sum(means) ** 2 / (len(means) * sum(mean * mean for mean in means))


class _Collector:
    """When pushes ended, whoever they were for."""

    def __init__(self, pusher: PrefillPusher) -> None:
        self._pusher = pusher
        self._ended_ns: dict[str, int] = {}

    def await_ends(self, transfer_ids: Sequence[str]) -> list[int]:
        give_up_s = time.monotonic() + _TIMEOUT_S
        while any(transfer_id not in self._ended_ns for transfer_id in transfer_ids):
            for event in self._pusher.wait(1.0):
                if isinstance(event, PushFinished):
                    if event.outcome is not Outcome.done:
                        raise BenchError(f"a push failed: {event}")
                    self._ended_ns[event.transfer_id] = time.monotonic_ns()
            if time.monotonic() > give_up_s:
                raise BenchError("pushes did not end")
        return [self._ended_ns.pop(transfer_id) for transfer_id in transfer_ids]


def _fast_round(
    pusher: PrefillPusher, decode: DecodeProcess, collector: _Collector, label: str, rounds: _Rounds
) -> None:
    fast = list(rounds.by_engine)
    for turn in range(_PUSHES_PER_ROUND):
        ids = [f"{label} {turn} {name}" for name in fast]
        for transfer_id, name in zip(ids, fast, strict=True):
            decode.call("expect", name, [(transfer_id, list(range(_BLOCKS)))], pusher.address)
        decode.start("await_done_by_all", fast)
        await_registered(pusher, len(fast))
        begun_ns = []
        for transfer_id in ids:
            begun_ns.append(time.monotonic_ns())
            pusher.push(transfer_id, list(range(_BLOCKS)))
        for name, begun, ended in zip(fast, begun_ns, collector.await_ends(ids), strict=True):
            rounds.by_engine[name].append((ended - begun) / 1e9)
        decode.result()


@contextlib.contextmanager
def _pushing(
    pusher: PrefillPusher,
    decode: DecodeProcess,
    collector: _Collector,
    engine_id: str,
    label: str,
    num_blocks: int,
    count: int,
) -> Iterator[None]:
    """Pushes to one engine are under way, all submitted at once."""
    share = num_blocks // count
    ids = [f"{label} {number}" for number in range(count)]
    receives = [(name, list(range(number * share, (number + 1) * share))) for number, name in enumerate(ids)]
    decode.call("expect", engine_id, receives, pusher.address)
    await_registered(pusher, count)
    for transfer_id, block_ids in receives:
        pusher.push(transfer_id, block_ids)
    yield
    collector.await_ends(ids)
    decode.call("await_done", engine_id, count)


@contextlib.contextmanager
def _mostly_stopped(process: DecodeProcess) -> Iterator[None]:
    """The process runs a tenth of the time."""
    is_over = threading.Event()

    def stop_and_go() -> None:
        while not is_over.is_set():
            process.freeze()
            is_over.wait(_STOPPED_S)
            process.thaw()
            is_over.wait(_RUNNING_S)

    thread = threading.Thread(target=stop_and_go, name="bench: stop and go")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
