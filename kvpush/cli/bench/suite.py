"""The benchmarks by name, and how some of them are run and reported."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvpush.cli.bench import (
    churn,
    crowd,
    failures,
    fairness,
    fan_out,
    handshake,
    idle,
    latency,
    overhead,
    plot,
    progress,
    registry_size,
    streaming,
    throughput,
)
from kvpush.cli.bench.context import SIZES, Bench
from kvpush.cli.bench.pair import BenchError, DecodeProcess, patient
from kvpush.cli.bench.report import Figure, Report
from kvpush.config import Config
from kvpush.errors import ConfigurationError

DESCRIPTION = (
    "Measures processes on this machine over real NIXL, each figure next to its budget and next to what bare NIXL, a "
    "TCP stream and memcpy do in the same run. Run it on a machine that does nothing else; the load average is part of "
    "the report."
)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One of them."""

    name: str
    help: str
    measure: Callable[[Bench], list[Figure]]


BENCHMARKS = (
    Benchmark("overhead", "kvpush's own time from push() to the posted WRITE", overhead.measure),
    Benchmark("latency", "one block end to end", latency.measure),
    Benchmark("throughput", "many blocks end to end, by blocks, layers, chunks, size of a block", throughput.measure),
    Benchmark("streaming", "what is left when the last layer is computed; thousands of pieces", streaming.measure),
    Benchmark("fan-out", "one prefill engine to more and more decode engines at once", fan_out.measure),
    Benchmark("handshake", "the first push to a new engine", handshake.measure),
    Benchmark("idle", "CPU time while nothing moves", idle.measure),
    Benchmark("registry", "the registry alone with 10,000 engines", registry_size.measure),
    Benchmark("churn", "engines that come, receive and leave", churn.measure),
    Benchmark("fairness", "nine engines beside a slow one, and beside a greedy one", fairness.measure),
    Benchmark("crowd", "pushes while twenty engines connect and one is a black hole", crowd.measure),
    Benchmark("failures", "a decode engine is killed, or frozen: when prefill knows", failures.measure),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What one subcommand runs."""

    name: str
    help: str
    names: tuple[str, ...]
    has_sweeps: bool = True


_EVERY = tuple(benchmark.name for benchmark in BENCHMARKS)
CHOICES = (
    *(Choice(benchmark.name, benchmark.help, (benchmark.name,)) for benchmark in BENCHMARKS),
    Choice("push", "every budget, without the sweeps", _EVERY, has_sweeps=False),
    Choice("all", "every benchmark", _EVERY),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be said to any of them."""
    parser.add_argument("--size", choices=tuple(SIZES), default="full", help="how much of everything (default: full)")
    parser.add_argument("--quick", dest="size", action="store_const", const="quick", help="the same as --size quick")
    parser.add_argument("--no-sweeps", action="store_true", help="only what has a budget")
    add_output_arguments(parser)
    parser.add_argument("--net-devices", default="lo", help="UCX's network device (default: %(default)s)")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Where, and where to."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda: where the caches are (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them as FILE.png or FILE.svg (kvpush[bench])")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    form.add_argument("--plain", action="store_true", help="print plain text, even where rich is installed")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Exits with 1 when a measurement could not be made."""
    choice: Choice = args.choice
    check_output_arguments(args)
    command = f"kvpush bench {choice.name}"
    command += "".join(
        f" {text}"
        for text, is_given in (
            (f"--size {args.size}", args.size != "full"),
            ("--no-sweeps", args.no_sweeps),
            (f"--device {args.device}", args.device != "cpu"),
        )
        if is_given
    )
    config = patient(args.net_devices)
    try:
        report = measure(
            choice.names,
            args.size,
            config,
            device=args.device,
            has_sweeps=choice.has_sweeps and not args.no_sweeps,
            command=command,
        )
    except BenchError as exc:
        print(f"{command}: {exc}", file=sys.stderr)
        return 1
    put_out(report, args)
    return 0


def check_output_arguments(args: argparse.Namespace) -> None:
    """Complain before anything is measured. Raises :class:`ConfigurationError`."""
    check_device(args.device)
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and not path.parent.is_dir():
            raise ConfigurationError(f"{option} {path}: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise ConfigurationError(f"{option} {path}: this is a folder; name a file")
    if args.plot is not None:
        plot.check(args.plot)


def check_device(device: str) -> None:
    """That caches can be made there. Raises :class:`ConfigurationError`."""
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
        raise ConfigurationError(f"--device {device}: cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"--device {device}: torch {torch.__version__} finds no CUDA device here")


def put_out(report: Report, args: argparse.Namespace) -> None:
    """Wherever the arguments say."""
    if args.json is not None:
        report.save(args.json)
    if args.plot is not None:
        plot.draw(report, args.plot)
    if args.markdown:
        print(report.as_markdown())
    elif args.plain:
        print(report.as_text())
    else:
        report.print_to_terminal()


def measure(
    names: Sequence[str],
    size: str,
    config: Config,
    *,
    device: str = "cpu",
    has_sweeps: bool = True,
    command: str = "kvpush bench",
) -> Report:
    """Run the named benchmarks one after the other. Raises :class:`BenchError`."""
    chosen = [benchmark for benchmark in BENCHMARKS if benchmark.name in names]
    report = Report("kvpush bench", command)
    report.machine["caches"] = device if device == "cpu" else f"{device}, {torch.cuda.get_device_name(device)}"
    with progress.shown(len(chosen)) as shown, DecodeProcess() as decode:
        bench = Bench(decode, config, SIZES[size], shown, device, has_sweeps)
        for benchmark in chosen:
            shown.begin(benchmark.name)
            figures = benchmark.measure(bench)
            report.figures += [dataclasses.replace(figure, group=benchmark.name) for figure in figures]
    report.machine["load average after (1, 5, 15 min)"] = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return report
