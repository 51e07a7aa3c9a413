"""``kvpush bench report``: a page from the JSON of a run, so that a page never says what was not measured.

With a template, hand-written text stays, and these places are filled:

``{{machine}}`` ``{{command}}`` ``{{budgets}}`` ``{{summary}}`` ``{{missed}}`` ``{{tables}}``, ``{{table NAME}}`` (of
one benchmark), and single values: ``{{median: FIGURE}}``, ``{{minimum: FIGURE}}``, ``{{p99: FIGURE}}``,
``{{baseline: FIGURE}}``, ``{{ratio: FIGURE}}``, ``{{ratio of minima: FIGURE}}``, ``{{rate: FIGURE}}`` and
``{{excess: FIGURE}}`` (over the budget).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from kvpush.cli.bench.report import Figure, Report, markdown_table, shown
from kvpush.errors import ConfigurationError

HELP = "write a page from the JSON of a run"
DESCRIPTION = "Prints a page in Markdown from what --json wrote. With --template, hand-written text stays around it."

_PLACE = re.compile(r"\{\{(.*?)\}\}")
_VALUES: dict[str, Callable[[Figure], str]] = {
    "median": lambda figure: shown(figure.value, figure.unit),
    "minimum": lambda figure: shown(figure.minimum, figure.unit),
    "p99": lambda figure: shown(figure.p99, figure.unit),
    "baseline": lambda figure: shown(figure.baseline, figure.unit),
    "ratio": lambda figure: shown(figure.ratio, "x"),
    "ratio of minima": lambda figure: shown(figure.ratio_of_minima, "x"),
    "rate": lambda figure: "" if figure.rate is None else f"{figure.rate / 1e9:.2f} GB/s",
    "excess": lambda figure: shown(figure.excess, "x"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be said on the command line."""
    parser.add_argument("file", type=Path, metavar="FILE.json", help="what --json wrote")
    parser.add_argument("--template", type=Path, metavar="FILE", help="the text to fill in")


def run(args: argparse.Namespace) -> int:
    """Print the page."""
    report = Report.load(args.file)
    if args.template is None:
        print(f"# {report.title}\n\n`{report.command}`\n\n{report.as_markdown()}")
        return 0
    try:
        template = args.template.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigurationError(f"--template {args.template}: {exc.strerror}") from None
    print(fill(template, report), end="")
    return 0


def fill(template: str, report: Report) -> str:
    """The page. Raises :class:`ConfigurationError` for a place that the run has nothing for."""
    return _PLACE.sub(lambda match: _filling(match[1].strip(), report), template)


def _filling(place: str, report: Report) -> str:
    judged = [figure for figure in report.figures if figure.is_met is not None]
    match place:
        case "machine":
            return "\n".join(f"- {line}" for line in report.machine_lines())
        case "command":
            return report.command
        case "budgets":
            return markdown_table(judged)
        case "summary":
            return report.summary()
        case "missed":
            missed = [figure for figure in judged if not figure.is_met]
            return "\n".join(
                f"- `{figure.budget}`: {figure.name}, {figure.excess or 0:.2f} times the budget" for figure in missed
            )
        case "tables":
            return "\n\n".join(markdown_table(figures, f"### {name}") for name, figures in report.groups().items())
    kind, _, name = place.partition(":")
    if kind in _VALUES:
        return _VALUES[kind](_named(name.strip(), report))
    kind, _, name = place.partition(" ")
    if kind == "table" and name in report.groups():
        return markdown_table(report.groups()[name])
    raise ConfigurationError(f"the template has {{{{{place}}}}}, and the run has nothing of that name")


def _named(name: str, report: Report) -> Figure:
    figure = next((figure for figure in report.figures if figure.name == name), None)
    if figure is None:
        raise ConfigurationError(f"the template asks for the figure {name!r}, and the run has none of that name")
    return figure
