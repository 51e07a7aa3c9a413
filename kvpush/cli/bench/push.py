"""``kvpush bench push``: what a push costs, each figure next to its budget."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvpush.cli.bench import crowd, end_to_end, first_push, fleet, idle, own_time
from kvpush.cli.bench.pair import BenchError, DecodeProcess, Shape
from kvpush.cli.bench.report import Figure, Report
from kvpush.config import Config
from kvpush.errors import ConfigurationError

HELP = "time one push: kvpush's own share, end to end against bare NIXL, idle CPU, handshake, registry"
DESCRIPTION = (
    "Measures two processes on this machine over real NIXL on CPU memory, each figure next to its budget. Run it on a "
    "machine that does nothing else; the load average is part of the report."
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    pushes: int = 480
    one_block: int = 200
    bulk: int = 25
    bulk_blocks: int = 1024
    idle_s: float = 4.0
    handshakes: int = 9
    advertised: Shape = Shape(num_layers=64, num_blocks=100_000, block_bytes=64)
    engines: int = 10_000
    registry_calls: int = 20_000
    crowd_rounds: int = 8
    crowd_engines: int = 20


QUICK = Sizes(
    pushes=96,
    one_block=40,
    bulk=7,
    idle_s=1.0,
    handshakes=3,
    registry_calls=4_000,
    crowd_rounds=2,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be said on the command line."""
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: half a minute instead of minutes")
    parser.add_argument("--only", choices=tuple(_MEASUREMENTS), action="append", help="this measurement (repeatable)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    form.add_argument("--plain", action="store_true", help="print plain text, even where rich is installed")
    parser.add_argument("--net-devices", default="lo", help="UCX's network device (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Exits with 1 when a measurement could not be made."""
    if args.json is not None and not args.json.parent.is_dir():
        raise ConfigurationError(f"--json {args.json}: there is no folder {args.json.parent}")
    if args.json is not None and args.json.is_dir():
        raise ConfigurationError(f"--json {args.json}: this is a folder; name a file")
    sizes = QUICK if args.quick else Sizes()
    config = Config(net_devices=args.net_devices)
    command = "kvpush bench push" + (" --quick" if args.quick else "")
    try:
        report = measure(sizes, config, args.only or list(_MEASUREMENTS), command)
    except BenchError as exc:
        print(f"kvpush bench push: {exc}", file=sys.stderr)
        return 1
    if args.json is not None:
        args.json.write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
    if args.markdown:
        print(report.as_markdown())
    elif args.plain:
        print(report.as_text())
    else:
        report.print_to_terminal()
    return 0


def measure(sizes: Sizes, config: Config, names: list[str], command: str = "kvpush bench push") -> Report:
    """Run the named measurements one after the other. Raises :class:`BenchError`."""
    report = Report("One push", command)
    with DecodeProcess() as decode:
        for name in names:
            print(f"measuring: {name} ...", file=sys.stderr, flush=True)
            report.figures += _MEASUREMENTS[name](decode, config, sizes)
    report.machine["load average after (1, 5, 15 min)"] = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return report


def _own_time(decode: DecodeProcess, config: Config, sizes: Sizes) -> list[Figure]:
    return own_time.measure(decode, config, sizes.pushes)


def _one_block(decode: DecodeProcess, config: Config, sizes: Sizes) -> list[Figure]:
    return end_to_end.measure_one_block(decode, config, sizes.one_block)


def _bulk(decode: DecodeProcess, config: Config, sizes: Sizes) -> list[Figure]:
    over_tcp = dataclasses.replace(config, ucx_options="TLS=tcp")
    return [
        *end_to_end.measure_bulk(decode, config, sizes.bulk, sizes.bulk_blocks, "UCX's choice (cma)"),
        *end_to_end.measure_bulk(decode, over_tcp, sizes.bulk, sizes.bulk_blocks, "tcp"),
    ]


def _idle(decode: DecodeProcess, config: Config, sizes: Sizes) -> list[Figure]:
    return idle.measure(decode, config, sizes.idle_s)


def _first_push(decode: DecodeProcess, config: Config, sizes: Sizes) -> list[Figure]:
    return first_push.measure(decode, config, sizes.handshakes, sizes.advertised)


def _fleet(decode: DecodeProcess, config: Config, sizes: Sizes) -> list[Figure]:
    return fleet.measure(sizes.engines, sizes.registry_calls)


def _crowd(decode: DecodeProcess, config: Config, sizes: Sizes) -> list[Figure]:
    return crowd.measure(decode, config, sizes.crowd_rounds, sizes.crowd_engines)


_MEASUREMENTS: dict[str, Callable[[DecodeProcess, Config, Sizes], list[Figure]]] = {
    "own-time": _own_time,
    "one-block": _one_block,
    "bulk": _bulk,
    "idle": _idle,
    "first-push": _first_push,
    "registry": _fleet,
    "crowd": _crowd,
}
