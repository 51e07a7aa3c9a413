"""kvpush's own time per push: from ``push()`` to the posted WRITE, less what NIXL takes for itself.

The push meets a connected engine that has registered for it, and a loop that sleeps: the time to wake the loop's thread
is part of it. NIXL's part is timed at its own calls. The state machine's part is what the calls into the registry and
the push's lifecycle take in between, locks, clocks and bookkeeping included. Both that and the stages that a push
passes are timed in pushes of their own, so that the clock reads of one measurement are not in the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpush.cli.bench import limits
from kvpush.cli.bench.context import Bench
from kvpush.cli.bench.pair import DecodeProcess, Shape, await_pushed, await_registered, connected_pair
from kvpush.cli.bench.report import Figure, Samples
from kvpush.config import Config
from kvpush.layout import MemoryKind, MemoryRange
from kvpush.lifecycle import PUSH
from kvpush.nixl_transport import NixlTransport
from kvpush.pusher import PrefillPusher
from kvpush.registry import Registry
from kvpush.transport import Indices, RemoteHandle, WriteHandle

OWN_LIMIT_S = 60e-6
FSM_LIMIT_S = 10e-6
_BATCH = 16  # pushes whose registrations wait at the same time
_PAUSE_S = 0.001
_BLOCK_BYTES = 65536
_SMALL_BLOCK_BYTES = 1024  # in the sweeps: their subject is not how long bytes take
_CHUNKED_BLOCKS = 64
# What a push passes, in order, and after which call each part ends. Times are those of one push, so they add up.
_STAGES = {
    "its arguments are checked": "checked",
    "the loop's thread wakes": "woken",
    "the core decides": "decided",
    "indices are made": "indexed",
    "the WRITE is handed over": "posted",
}
WAKE_UP = "waking a thread"
NIXL = "NIXL's calls"


class Stopwatch:
    """Adds up the time that is spent in some calls. One thread at a time."""

    def __init__(self) -> None:
        self.total_ns = 0
        self.ended_ns = 0  # the last of these calls

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun_ns = time.monotonic_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.ended_ns = time.monotonic_ns()
                self.total_ns += self.ended_ns - begun_ns

        return timed


class _TimedAgent:
    """NIXL's agent, with the two calls that post a WRITE timed."""

    def __init__(self, agent: Any, watch: Stopwatch) -> None:
        self._agent = agent
        self.make_prepped_xfer = watch.around(agent.make_prepped_xfer)
        self.transfer = watch.around(agent.transfer)
        self.get_new_notifs = agent.get_new_notifs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


class _Probe:
    """Watches a pusher from the outside: its transport, its registry and the push's lifecycle."""

    def __init__(self) -> None:
        self.nixl = Stopwatch()
        self.fsm = Stopwatch()
        self.fsm_until_posted_ns = 0
        self.passed_ns: dict[str, int] = {}  # when the last push did

    def make_transport(
        self, agent_name: str, kind: MemoryKind, ranges: Sequence[MemoryRange], config: Config
    ) -> NixlTransport:
        """A transport factory."""
        return _WatchedTransport(self, agent_name, kind, ranges, config)

    def watch_fsm(self, registry: Registry) -> Callable[[], None]:
        """Time every call that reads or moves a state on the way of a push. Returns how to stop that."""
        watched: list[tuple[Any, str]] = [(registry, "need"), (registry, "pin"), (registry, "settle"), (PUSH, "fire")]
        return _wrapped({(owner, name): self.fsm.around(getattr(owner, name)) for owner, name in watched})

    def watch_stages(self, pusher: PrefillPusher) -> Callable[[], None]:
        """Note when a push passes from one part of the code to the next. Returns how to stop that."""
        loop, core = pusher._loop, pusher._loop._core
        return _wrapped(
            {
                (loop, "submit"): self._passing("checked", loop.submit),
                (loop, "push"): self._passing("woken", loop.push),
                (core, "push"): self._passing("decided", core.push, after=True),
            }
        )

    def _passing(self, what: str, call: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if not after:
                self.passed_ns[what] = time.monotonic_ns()
            result = call(*args, **kwargs)
            if after:
                self.passed_ns[what] = time.monotonic_ns()
            return result

        return noted


def _wrapped(calls: dict[tuple[Any, str], Callable[..., Any]]) -> Callable[[], None]:
    """Put these in place of methods of some objects. Returns how to undo that."""
    for (owner, name), call in calls.items():
        setattr(owner, name, call)

    def stop() -> None:
        for owner, name in calls:
            delattr(owner, name)  # the class's own method shows again

    return stop


class _WatchedTransport(NixlTransport):
    """Tells a probe when a WRITE is posted and what NIXL took for it."""

    def __init__(
        self, probe: _Probe, agent_name: str, kind: MemoryKind, ranges: Sequence[MemoryRange], config: Config
    ) -> None:
        super().__init__(agent_name, kind, ranges, config)
        self._probe = probe
        self._agent = _TimedAgent(self._agent, probe.nixl)

    def post_write(
        self, remote: RemoteHandle, local_indices: Indices, remote_indices: Indices, notification: bytes
    ) -> WriteHandle:
        self._probe.fsm_until_posted_ns = self._probe.fsm.total_ns
        self._probe.passed_ns["indexed"] = time.monotonic_ns()
        return super().post_write(remote, local_indices, remote_indices, notification)


@dataclass(frozen=True, slots=True)
class _Case:
    """One kind of push."""

    shape: Shape
    num_blocks: int
    num_chunks: int = 1
    pause_s: float = _PAUSE_S


@dataclass(frozen=True, slots=True)
class _Taken:
    """Seconds of many pushes of one kind."""

    own: Samples
    nixl: Samples
    fsm_posted: Samples
    fsm_whole: Samples
    stages: dict[str, Samples]  # empty unless they were watched


def measure(bench: Bench) -> list[Figure]:
    """Two processes, one push at a time."""
    return [*_budgets(bench), *(_sweeps(bench) if bench.has_sweeps else [])]


def _budgets(bench: Bench) -> list[Figure]:
    shape = bench.shape(1, 512, _BLOCK_BYTES)
    cases = {
        "1 block": _Case(shape, 1),
        "1 block, one after the other": _Case(shape, 1, pause_s=0.0),
        "16 blocks": _Case(shape, 16),
    }
    figures = []
    probe = _Probe()
    with connected_pair(shape, bench.config, bench.decode, "own", transport_factory=probe.make_transport) as pusher:
        for what in bench.points(cases, "a push"):
            case = cases[what]
            taken = _take(pusher, bench.decode, probe, case, bench.sizes.own_pushes)
            stop = probe.watch_fsm(pusher._registry)
            try:
                watched = _take(pusher, bench.decode, probe, case, bench.sizes.own_pushes)
            finally:
                stop()
            stop = probe.watch_stages(pusher)
            try:
                stages = _take(pusher, bench.decode, probe, case, bench.sizes.own_pushes).stages
            finally:
                stop()
            wake_up = Samples.of(limits.wake_ups(bench.sizes.own_pushes, case.pause_s))
            figures += [
                Figure.of_seconds(
                    f"own time to the posted WRITE, {what}",
                    taken.own,
                    limit=OWN_LIMIT_S,
                    budget="own-time",
                    beside={WAKE_UP: wake_up.median},
                    note="wall time from push() to the return of NIXL's transfer(), NIXL's own calls subtracted; the "
                    "loop's thread sleeps when the push comes, so its wake-up is included"
                    + ("; after 1 ms of nothing" if case.pause_s else ""),
                ),
                Figure.of_seconds(
                    f"state machine's part of it, {what}",
                    watched.fsm_posted,
                    limit=FSM_LIMIT_S,
                    budget="state-machine",
                    note="Registry.need(), Registry.pin() and the push's trigger, with lock and bookkeeping",
                ),
                Figure.of_seconds(
                    f"state machine, whole push, {what}",
                    watched.fsm_whole,
                    note="the same, up to the outcome: Registry.settle() and the last trigger in addition",
                ),
                Figure.of_seconds(
                    f"NIXL's part, {what}",
                    taken.nixl,
                    note="make_prepped_xfer() and transfer(); over cma the latter copies the bytes",
                ),
                *(
                    Figure.of_seconds(
                        f"{stage}, {what}",
                        samples,
                        note="the part of kvpush's own time, in pushes of their own, so that the sum of the medians is "
                        "near the whole and not equal to it",
                    )
                    for stage, samples in stages.items()
                ),
            ]
    return figures


def _sweeps(bench: Bench) -> list[Figure]:
    sizes = bench.sizes
    batch = min(_BATCH, 4)
    by_blocks = [_Case(bench.shape(1, batch * n, _SMALL_BLOCK_BYTES), n) for n in sizes.sweep_own_blocks]
    by_layers = [_Case(bench.shape(n, batch * 16, _SMALL_BLOCK_BYTES), 16) for n in sizes.sweep_layers]
    chunked = bench.shape(1, batch * _CHUNKED_BLOCKS, _SMALL_BLOCK_BYTES)
    by_chunks = [_Case(chunked, _CHUNKED_BLOCKS, n) for n in sizes.sweep_chunks]
    cases = {"blocks": by_blocks, "layers": by_layers, "chunks": by_chunks}
    figures = []
    for grows, case in bench.points(
        [(name, case) for name, listed in cases.items() for case in listed], "larger pushes"
    ):
        probe = _Probe()
        with connected_pair(
            case.shape, bench.config, bench.decode, "own", transport_factory=probe.make_transport
        ) as pusher:
            taken = _take(pusher, bench.decode, probe, case, max(batch, sizes.points), batch)
        x = {"blocks": case.num_blocks, "layers": case.shape.num_layers, "chunks": case.num_chunks}[grows]
        figures.append(
            Figure.of_seconds(
                f"own time by {grows}: {case.num_blocks} blocks, {case.shape.num_layers} layers, "
                f"{case.num_chunks} chunks",
                taken.own,
                baseline=taken.nixl.median,
                baseline_name=NIXL,
                baseline_minimum=taken.nixl.minimum,
                note="blocks of 1 KiB in random order, until the last WRITE is posted; beside it what NIXL's own calls "
                "took for the same push",
                series=f"own time of one push, by {grows}",
                x=x,
                x_name=grows,
            )
        )
    return figures


def _take(
    pusher: PrefillPusher, decode: DecodeProcess, probe: _Probe, case: _Case, repetitions: int, batch_size: int = _BATCH
) -> _Taken:
    rng = np.random.default_rng(1)
    own, nixl, fsm_posted, fsm_whole = [], [], [], []
    stages: dict[str, list[float]] = {}
    chunks = np.array_split(np.arange(case.num_blocks), case.num_chunks)
    for batch in range(0, repetitions, batch_size):
        chosen = rng.permutation(case.shape.num_blocks)[: batch_size * case.num_blocks]
        block_ids = chosen.reshape(batch_size, case.num_blocks)
        ids = [f"{case.num_blocks}-{batch}-{index}-{probe.nixl.ended_ns}" for index in range(batch_size)]
        decode.call("expect", "own", list(zip(ids, block_ids.tolist(), strict=True)), pusher.address)
        await_registered(pusher, len(ids))
        decode.start("await_done", "own", len(ids))
        for transfer_id, blocks in zip(ids, block_ids, strict=True):
            pieces = [(blocks[chunk].tolist(), int(chunk[0])) for chunk in chunks]
            if case.pause_s:
                time.sleep(case.pause_s)
            nixl_ns, fsm_ns = probe.nixl.total_ns, probe.fsm.total_ns
            probe.passed_ns.clear()
            begun_ns = time.monotonic_ns()
            for number, (piece, first_block) in enumerate(pieces, 1):
                pusher.push(transfer_id, piece, first_block=first_block, last=number == len(pieces))
            await_pushed(pusher)
            nixl_ns = probe.nixl.total_ns - nixl_ns
            own.append((probe.nixl.ended_ns - begun_ns - nixl_ns) / 1e9)
            nixl.append(nixl_ns / 1e9)
            fsm_posted.append((probe.fsm_until_posted_ns - fsm_ns) / 1e9)
            fsm_whole.append((probe.fsm.total_ns - fsm_ns) / 1e9)
            probe.passed_ns["posted"] = probe.nixl.ended_ns - nixl_ns
            for stage, duration_s in _durations(begun_ns, probe.passed_ns).items():
                stages.setdefault(stage, []).append(duration_s)
        decode.result()
    return _Taken(
        Samples.of(own),
        Samples.of(nixl),
        Samples.of(fsm_posted),
        Samples.of(fsm_whole),
        {stage: Samples.of(durations_s) for stage, durations_s in stages.items()},
    )


def _durations(begun_ns: int, passed_ns: dict[str, int]) -> dict[str, float]:
    """Of each stage; empty when they were not watched."""
    if not passed_ns.keys() >= set(_STAGES.values()):
        return {}
    durations_s = {}
    for stage, end in _STAGES.items():
        durations_s[stage] = (passed_ns[end] - begun_ns) / 1e9
        begun_ns = passed_ns[end]
    return durations_s
