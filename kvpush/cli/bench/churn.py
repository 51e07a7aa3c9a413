"""Decode engines that come, receive one push and leave, over real NIXL: how long that takes, and what they leave."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvpush.cli.bench.bare_nixl import BareWriter
from kvpush.cli.bench.contest import BARE
from kvpush.cli.bench.context import Bench
from kvpush.cli.bench.pair import (
    PREFILL_ID,
    SPEC,
    BenchError,
    Shape,
    await_pushed,
    await_registered,
)
from kvpush.cli.bench.report import Figure, Samples
from kvpush.lifecycle import State
from kvpush.pusher import PrefillPusher

_WARM_UP = 5
_TIMEOUT_S = 20.0
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Held:
    """What this process holds."""

    descriptors: int
    threads: int
    rss_bytes: int

    @classmethod
    def now(cls) -> _Held:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return cls(sum(1 for _ in Path("/proc/self/fd").iterdir()), threading.active_count(), pages * _PAGE_BYTES)


def measure(bench: Bench) -> list[Figure]:
    """kvpush first, whole, so that what it leaves behind is its own; then the bare loop."""
    shape = bench.shape(4, 64, 4096)
    served, released, before, after = _kvpush(bench, shape)
    bare = _bare(bench, shape)
    count = bench.sizes.churn
    figures = [
        Figure.against(
            "first push to an engine that has just come",
            Samples.of(served),
            BARE,
            Samples.of(bare),
            note="push() to PushFinished, 4 blocks in 4 layers; the bare loop has the metadata already",
        ),
        Figure.of_seconds(
            "an engine that leaves is released",
            Samples.of(released),
            note="from the begin of its close(), which ends its NIXL agent, until prefill has evicted it",
        ),
    ]
    for what, unit, grown in (
        ("descriptors", "fd", after.descriptors - before.descriptors),
        ("threads", "thread", after.threads - before.threads),
        ("memory", "B", after.rss_bytes - before.rss_bytes),
    ):
        figures.append(
            Figure(
                f"{what} that prefill keeps, per engine that came and went",
                max(0.0, grown / count),
                unit,
                samples=count,
                note=f"{count} engines after {_WARM_UP} to warm up; of the whole process, RSS for memory",
            )
        )
    return figures


def _kvpush(bench: Bench, shape: Shape) -> tuple[list[float], list[float], _Held, _Held]:
    decode, config = bench.decode, bench.config
    served: list[float] = []
    released: list[float] = []
    with PrefillPusher(PREFILL_ID, shape.tensors(fill=True), SPEC, config=config) as pusher:
        before = _Held.now()
        for number in bench.points(range(-_WARM_UP, bench.sizes.churn), "engines come and go"):
            if number == 0:
                before = _Held.now()
                served.clear()
                released.clear()
            engine_id = transfer_id = f"passing {number}"
            decode.call("open", engine_id, shape, config, False)
            decode.call("expect", engine_id, [(transfer_id, [0, 1, 2, 3])], pusher.address)
            await_registered(pusher, 1)
            begun_ns = time.monotonic_ns()
            pusher.push(transfer_id, [3, 2, 1, 0])
            served.append((await_pushed(pusher) - begun_ns) / 1e9)
            decode.call("await_done", engine_id, 1)
            begun_ns = time.monotonic_ns()
            decode.start("shut", engine_id)
            released.append((_await_evicted(pusher) - begun_ns) / 1e9)
            decode.result()
        after = _Held.now()
    return served, released, before, after


def _await_evicted(pusher: PrefillPusher) -> int:
    give_up_s = time.monotonic() + _TIMEOUT_S
    while any(engine.state != State.evicted for engine in pusher.engines()):
        if time.monotonic() > give_up_s:
            raise BenchError(f"an engine that left was not evicted within {_TIMEOUT_S:g} s")
        time.sleep(0.0005)
    return time.monotonic_ns()


def _bare(bench: Bench, shape: Shape) -> list[float]:
    decode, config = bench.decode, bench.config
    block_ids = np.arange(4)
    durations_s = []
    writer = BareWriter(shape.tensors(fill=True), config)
    try:
        for number in range(min(bench.sizes.churn, 50)):
            reader = decode.call("open_lone_bare", f"bare {number}", shape, config)
            decode.start("await_bare", [f"bare {number}"], 1)
            begun_ns = time.monotonic_ns()
            remote = writer.connect(*reader)
            writer.write([writer.write_of(remote, block_ids, block_ids)])
            durations_s.append((time.monotonic_ns() - begun_ns) / 1e9)
            decode.result()
            decode.call("shut_bare", f"bare {number}")
            writer.disconnect(remote)
    finally:
        writer.close()
    return durations_s
