"""``kvpush bench gpu``: GPU memory, checked and timed by two processes on one CUDA machine, in a few minutes.

* Bytes: pushes between caches of several shapes, every byte of decode's cache compared on the device.
* Fences: ``push(ready=event)`` returns while a kernel is still writing the blocks, and what arrives is what the kernel
  left. Without the fence, old bytes arrive: this shows that the check could fail. A push that has no fence overtakes.
* Times: next to the bare NIXL loop, a TCP stream and a copy from device memory to device memory.

``--device cpu`` runs the same on CPU memory, with a thread for the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kvpush.cli.bench import patterns, progress, suite
from kvpush.cli.bench.contest import contest
from kvpush.cli.bench.context import SIZES, Bench
from kvpush.cli.bench.pair import (
    PREFILL_ID,
    SPEC,
    BenchError,
    DecodeProcess,
    Shape,
    await_pushed,
    await_registered,
    connect,
    patient,
)
from kvpush.cli.bench.patterns import Comparison
from kvpush.cli.bench.report import Check, Figure, Report
from kvpush.config import Config
from kvpush.events import PushFinished
from kvpush.pusher import PrefillPusher

HELP = "check and time GPU memory with two processes on one machine"
DESCRIPTION = (
    "Checks and times pushes between GPU caches; exits with 1 when a check fails. --device cpu tries the script."
)

_cuda: Any = torch.cuda  # its events and streams have no types
_ENGINE_ID = "gpu"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GpuSizes:
    """How much of everything."""

    shapes: tuple[Shape, ...] = (
        Shape(1, 64, 65536),
        Shape(32, 256, 16384),
        Shape(4, 2048, 4096),
        Shape(2, 33, 1 << 20),
    )
    fence_turns: int = 10
    kernel_s: float = 0.1  # how long the kernel is busy before it writes
    bulk_blocks: int = 4096
    bulk_block_bytes: tuple[int, ...] = (65536, 1 << 20)
    repetitions: int = 25


GPU_SIZES = {
    "full": GpuSizes(),
    "quick": GpuSizes(fence_turns=3, bulk_blocks=1024, repetitions=7),
    "tiny": GpuSizes((Shape(2, 8, 4096),), fence_turns=1, bulk_blocks=4, bulk_block_bytes=(4096,), repetitions=1),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be said on the command line."""
    parser.add_argument("--size", choices=tuple(GPU_SIZES), default="full", help="how much (default: full)")
    suite.add_output_arguments(parser)
    parser.set_defaults(device="cuda")
    parser.add_argument("--net-devices", default="lo", help="UCX's network device (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Check, measure and print."""
    suite.check_output_arguments(args)
    config = patient(args.net_devices)
    try:
        report = measure(GPU_SIZES[args.size], config, args.device, f"kvpush bench gpu --device {args.device}")
    except BenchError as exc:
        print(f"kvpush bench gpu: {exc}", file=sys.stderr)
        return 1
    suite.put_out(report, args)
    return 0 if all(check.is_ok for check in report.checks) else 1


def measure(sizes: GpuSizes, config: Config, device: str, command: str) -> Report:
    """Everything, one after the other. Raises :class:`BenchError`."""
    report = Report("kvpush bench gpu", command)
    report.machine["caches"] = _described(device)
    with progress.shown(3) as shown, DecodeProcess() as decode:
        bench = Bench(decode, config, SIZES["full"], shown, device)
        shown.begin("bytes")
        report.checks += [_check_bytes(bench, shape.on(device)) for shape in bench.points(sizes.shapes, "shapes")]
        shown.begin("fences")
        report.checks += _check_fences(bench, sizes)
        shown.begin("times")
        for block_bytes in bench.points(sizes.bulk_block_bytes, "times"):
            report.figures.append(_time(bench, sizes, block_bytes))
    report.machine["load average after (1, 5, 15 min)"] = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    report.figures = [dataclasses.replace(figure, group="gpu") for figure in report.figures]
    return report


def _described(device: str) -> str:
    if device == "cpu":
        return "cpu: this run shows the script, and nothing about CUDA"
    properties = torch.cuda.get_device_properties(device)
    return f"{device}, {properties.name}, {properties.total_memory >> 30} GiB, CUDA {torch.version.cuda}"


@contextlib.contextmanager
def _pair(bench: Bench, shape: Shape) -> Iterator[tuple[PrefillPusher, dict[str, torch.Tensor]]]:
    """A connected pusher, and its cache. Decode's holds canaries."""
    cache = shape.tensors(fill=True)
    bench.decode.call("open", _ENGINE_ID, shape, bench.config, True)
    with PrefillPusher(PREFILL_ID, cache, SPEC, config=bench.config) as pusher:
        connect(pusher, bench.decode, _ENGINE_ID)
        yield pusher, cache
    bench.decode.call("shut", _ENGINE_ID)


# --- bytes -----------------------------------------------------------------------------------------------------------


def _check_bytes(bench: Bench, shape: Shape) -> Check:
    """Three pushes: scattered blocks, all blocks, and scattered blocks in three chunks."""
    rng = np.random.default_rng(11)
    scattered = max(1, shape.num_blocks // 3)
    seen = []
    with _pair(bench, shape) as (pusher, cache):
        for seed, (count, num_chunks) in enumerate(((scattered, 1), (shape.num_blocks, 1), (scattered, 3)), 1):
            local_ids = rng.permutation(shape.num_blocks)[:count].tolist()
            remote_ids = rng.permutation(shape.num_blocks)[:count].tolist()
            bench.decode.call("clear", _ENGINE_ID)
            patterns.clear(cache)
            patterns.paint(cache, seed, local_ids)
            _synchronize(bench.device)
            transfer_id = f"bytes {seed}"
            bench.decode.call("expect", _ENGINE_ID, [(transfer_id, remote_ids)], pusher.address)
            for chunk in (pieces := [p for p in np.array_split(np.arange(count), num_chunks) if len(p)]):
                ids = [local_ids[i] for i in chunk]
                pusher.push(transfer_id, ids, first_block=int(chunk[0]), last=chunk is pieces[-1])
            await_pushed(pusher)
            bench.decode.call("await_done", _ENGINE_ID, 1)
            seen.append(bench.decode.call("compare", _ENGINE_ID, seed, remote_ids))
    name = f"bytes, {shape.num_layers} layers of {shape.num_blocks} blocks of {shape.block_bytes} bytes"
    return _check(name, seen)


def _check(name: str, seen: list[Comparison], extra: str = "") -> Check:
    is_ok = all(comparison.is_right for comparison in seen)
    wrong, touched = sum(c.num_wrong for c in seen), sum(c.num_touched for c in seen)
    compared = sum(comparison.num_compared for comparison in seen)
    return Check(name, is_ok, f"{compared} bytes compared, {wrong} wrong, {touched} changed outside{extra}")


# --- fences ----------------------------------------------------------------------------------------------------------


class _Kernel(Protocol):
    """Writes blocks after having been busy for a while, behind the caller's back."""

    fence: Any

    def is_writing(self) -> bool:
        """Whether the blocks are not final yet."""

    def finish(self) -> None:
        """Wait for the end."""


class _CudaKernel:
    def __init__(self, write: Callable[[], None], busy_cycles: int) -> None:
        self._stream = _cuda.Stream()
        self.fence = _cuda.Event()
        with _cuda.stream(self._stream):
            _cuda._sleep(busy_cycles)
            write()
            self.fence.record()

    def is_writing(self) -> bool:
        return not bool(self.fence.query())

    def finish(self) -> None:
        self.fence.synchronize()


class _ThreadKernel:
    """The same for CPU memory: a thread writes, and ``query()`` says whether it has."""

    def __init__(self, write: Callable[[], None], busy_s: float) -> None:
        self._is_final = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(write, busy_s), name="bench: kernel")
        self.fence = self
        self._thread.start()

    def _work(self, write: Callable[[], None], busy_s: float) -> None:
        time.sleep(busy_s)
        write()
        self._is_final.set()

    def query(self) -> bool:
        return self._is_final.is_set()

    def is_writing(self) -> bool:
        return not self._is_final.is_set()

    def finish(self) -> None:
        self._thread.join()


def _kernels(device: str, busy_s: float) -> Callable[[Callable[[], None]], _Kernel]:
    if device == "cpu":
        return lambda write: _ThreadKernel(write, busy_s)
    cycles = int(busy_s / _seconds_per_cycle())
    return lambda write: _CudaKernel(write, cycles)


def _seconds_per_cycle() -> float:
    """How long the device is busy for one cycle of torch's sleeping kernel, at the clock that it runs at."""
    cycles = 20_000_000
    _cuda._sleep(cycles)
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    _cuda._sleep(cycles)
    torch.cuda.synchronize()
    return (time.perf_counter() - begun_s) / cycles


def _check_fences(bench: Bench, sizes: GpuSizes) -> list[Check]:
    shape = bench.shape(2, 64, 16384)
    make_kernel = _kernels(bench.device, sizes.kernel_s)
    with _pair(bench, shape) as (pusher, cache):
        _warm_up(cache, make_kernel)
        fenced = [
            _race(bench, pusher, cache, make_kernel, f"fenced {turn}", turn + 2, is_fenced=True)
            for turn in bench.points(range(sizes.fence_turns), "with a fence")
        ]
        bare = [
            _race(bench, pusher, cache, make_kernel, f"bare {turn}", turn + 50, is_fenced=False)
            for turn in bench.points(range(sizes.fence_turns), "without")
        ]
        overtook = _overtake(bench, pusher, cache, make_kernel)
    num_writing = sum(race.was_writing for race in fenced)
    in_time = _check(
        "fences: what the kernel left has arrived",
        [race.comparison for race in fenced],
        f"; the kernel was still at work when push() returned in {num_writing} of {len(fenced)} turns",
    )
    num_old = sum(race.was_writing and race.comparison.num_wrong > 0 for race in bare)
    return [
        dataclasses.replace(in_time, is_ok=in_time.is_ok and num_writing == len(fenced)),
        Check(
            "control: without a fence old bytes arrive",
            num_old == len(bare),
            f"in {num_old} of {len(bare)} turns: the check above can fail",
        ),
        overtook,
    ]


@dataclass(frozen=True, slots=True)
class _Race:
    was_writing: bool  # when push() had returned
    comparison: Comparison


def _warm_up(cache: Mapping[str, torch.Tensor], make_kernel: Callable[[Callable[[], None]], _Kernel]) -> None:
    """What the first use of a device operation costs must not keep the kernel from being late."""
    make_kernel(lambda: patterns.paint(cache, 1, [0, 1])).finish()


def _race(
    bench: Bench,
    pusher: PrefillPusher,
    cache: Mapping[str, torch.Tensor],
    make_kernel: Callable[[Callable[[], None]], _Kernel],
    transfer_id: str,
    seed: int,
    *,
    is_fenced: bool,
) -> _Race:
    """Push blocks that a kernel is about to write."""
    local_ids, remote_ids = [5, 3, 8, 1], [2, 9, 4, 7]
    bench.decode.call("clear", _ENGINE_ID)
    patterns.clear(cache)
    bench.decode.call("expect", _ENGINE_ID, [(transfer_id, remote_ids)], pusher.address)
    await_registered(pusher, 1)
    kernel = make_kernel(lambda: patterns.paint(cache, seed, local_ids))
    pusher.push(transfer_id, local_ids, ready=kernel.fence if is_fenced else None)
    was_writing = kernel.is_writing()
    await_pushed(pusher)
    bench.decode.call("await_done", _ENGINE_ID, 1)
    comparison = bench.decode.call("compare", _ENGINE_ID, seed, remote_ids)
    kernel.finish()
    return _Race(was_writing, comparison)


def _overtake(
    bench: Bench,
    pusher: PrefillPusher,
    cache: Mapping[str, torch.Tensor],
    make_kernel: Callable[[Callable[[], None]], _Kernel],
) -> Check:
    """A push without a fence, submitted after one whose kernel is at work."""
    bench.decode.call("expect", _ENGINE_ID, [("late", [10]), ("early", [11])], pusher.address)
    await_registered(pusher, 2)
    kernel = make_kernel(lambda: patterns.paint(cache, 99, [10]))
    pusher.push("late", [10], ready=kernel.fence)
    pusher.push("early", [11])
    order: list[str] = []
    was_writing = False
    give_up_s = time.monotonic() + 30.0
    while len(order) < 2:
        for event in pusher.wait(1.0):
            if isinstance(event, PushFinished):
                if not order:
                    was_writing = kernel.is_writing()
                order.append(event.transfer_id)
        if time.monotonic() > give_up_s:
            raise BenchError("a push behind a fence did not end")
    kernel.finish()
    bench.decode.call("await_done", _ENGINE_ID, 2)
    is_ok = order == ["early", "late"] and was_writing
    return Check("a push without a fence overtakes one that waits for its kernel", is_ok, f"ended: {', '.join(order)}")


# --- times -----------------------------------------------------------------------------------------------------------


def _time(bench: Bench, sizes: GpuSizes, block_bytes: int) -> Figure:
    num_blocks = max(1, sizes.bulk_blocks * sizes.bulk_block_bytes[0] // block_bytes)
    shape = bench.shape(1, num_blocks, block_bytes)
    with contest(bench, shape) as between:
        times = between.run(sizes.repetitions, num_blocks, waited_s=0.02)
    return times.figure(
        f"{shape.num_bytes / _MIB:g} MiB in blocks of {block_bytes // 1024} KiB",
        num_bytes=shape.num_bytes,
        limit=1.05,
        budget="bulk",
        note="push() to ReceiveFinished, blocks in random order on both sides; memcpy is a copy on the device of the "
        "caches",
    )


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
