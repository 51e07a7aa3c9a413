"""The ``kvpush`` command. A user's mistake is one line on stderr and exit code 2; each command says its other codes."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn

import kvpush


@dataclass(frozen=True, slots=True)
class _Command:
    """A subcommand. Its module is imported when it is needed, so that one command's needs are not the others'."""

    name: str
    module_name: str
    help: str

    def module(self) -> ModuleType:
        """``add_arguments(parser)`` and ``run(args) -> int``; or ``main(argv) -> int``, for a program of its own."""
        return importlib.import_module(self.module_name)


_COMMANDS = (
    _Command("demo", "kvpush.cli.demo", "serve prompts with prefill and decode processes, and check every token"),
    _Command("doctor", "kvpush.cli.doctor", "check that this machine can run kvpush"),
    _Command("bench", "kvpush.cli.bench", "measure kvpush next to bare NIXL, TCP and memcpy; check GPU memory"),
    _Command("statecharts", "kvpush.statecharts", "write or check docs/statecharts, from the tables that run"),
)


class _Parser(argparse.ArgumentParser):
    """Errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _run(argv)
        sys.stdout.flush()
    except (kvpush.ConfigurationError, kvpush.UsageError) as exc:
        print(f"kvpush: error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nobody reads any more, as with `kvpush demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        return 1
    return code


def _run(argv: list[str]) -> int:
    command = next((command for command in _COMMANDS if command.name in argv[:1]), None)
    module = None if command is None else command.module()
    if module is not None and hasattr(module, "main"):
        return int(module.main(argv[1:]))
    args = _parser(command, module).parse_args(argv)
    return int(args.run(args))


def _parser(chosen: _Command | None, module: ModuleType | None) -> argparse.ArgumentParser:
    """All commands, and the options of the one that was chosen."""
    parser = _Parser(
        prog="kvpush", description="Push the KV cache of finished prompts from prefill into decode engines, with NIXL."
    )
    parser.add_argument("--version", action="version", version=f"kvpush {kvpush.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        subparser = subparsers.add_parser(
            command.name, help=command.help, description=f"{command.help[0].upper()}{command.help[1:]}."
        )
        if command is chosen and module is not None:
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
