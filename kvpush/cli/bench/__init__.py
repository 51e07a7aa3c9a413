"""``kvpush bench``: measures the library on this machine, next to its budgets.

``add_arguments`` and ``run`` are all that the command line needs. One module per measurement; :mod:`.pair` runs the two
processes, :mod:`.bare_nixl` is what kvpush is compared with, :mod:`.report` says what came out.
"""

from __future__ import annotations

import argparse

from kvpush.cli.bench import push

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmarks, as subcommands of ``parser``."""
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    one_push = benchmarks.add_parser("push", help=push.HELP, description=push.DESCRIPTION)
    push.add_arguments(one_push)
    one_push.set_defaults(run_benchmark=push.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark. The exit status: 0 when it ran, whether or not every budget was met."""
    status: int = args.run_benchmark(args)
    return status
