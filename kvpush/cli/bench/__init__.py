"""``kvpush bench``: measures the library on this machine, next to its budgets and to what the machine can do.

``add_arguments`` and ``run`` are all that the command line needs. One module per measurement; :mod:`.suite` names
them, :mod:`.pair` runs the two processes, :mod:`.bare_nixl` and :mod:`.limits` are what kvpush is compared with,
:mod:`.report` says what came out, :mod:`.plot` draws it and :mod:`.page` writes it into the documentation.
"""

from __future__ import annotations

import argparse

from kvpush.cli.bench import gpu, page, suite

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmarks, as subcommands of ``parser``."""
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for choice in suite.CHOICES:
        one = benchmarks.add_parser(choice.name, help=choice.help, description=suite.DESCRIPTION)
        suite.add_arguments(one)
        one.set_defaults(run_benchmark=suite.run, choice=choice)
    for name, module in (("gpu", gpu), ("report", page)):
        other = benchmarks.add_parser(name, help=module.HELP, description=module.DESCRIPTION)
        module.add_arguments(other)
        other.set_defaults(run_benchmark=module.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark. The exit status: 0 when it ran, whether or not every budget was met."""
    status: int = args.run_benchmark(args)
    return status
