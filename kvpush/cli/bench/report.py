"""What a benchmark found: figures beside their budgets and limits, as text, as a table for a terminal, as Markdown and
as JSON, from which it can be read again."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from kvpush.errors import ConfigurationError

FORMAT = 2  # of the JSON; another number is not read
_SI_STEPS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


@dataclass(frozen=True, slots=True)
class Samples:
    """Repetitions of one measurement, in its unit. The minimum is what the code costs on a machine that is not busy."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Samples:
        """At least one value."""
        samples = cls(tuple(values))
        assert samples.values, "a measurement has at least one sample"
        return samples

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def minimum(self) -> float:
        return min(self.values)

    @property
    def p99(self) -> float:
        """The smallest sample that 99 of 100 do not exceed."""
        return sorted(self.values)[math.ceil(0.99 * len(self.values)) - 1]


@dataclass(frozen=True, slots=True)
class Figure:
    """One row. ``limit`` bounds ``value`` or, where there is a ``baseline``, both ratios; without it the row informs.

    Both, because a busy machine flatters a library that sleeps: a spinning baseline loses its CPU to others, so the
    ratio of medians shrinks, while the ratio of minima is that of undisturbed runs, if there were any.

    ``beside`` are other limits that were measured in the same run, in the same unit. Figures of one ``series`` are the
    same measurement at growing ``x``, and a curve in the plot.
    """

    name: str
    value: float
    unit: str  # "s", "core", "B", ...
    p99: float | None = None
    minimum: float | None = None
    samples: int = 1
    baseline: float | None = None
    baseline_name: str = ""
    baseline_minimum: float | None = None
    limit: float | None = None
    note: str = ""
    group: str = ""  # the benchmark that it belongs to
    budget: str = ""  # which of the project's budgets ``limit`` is
    num_bytes: int | None = None  # that were moved in ``value`` seconds
    beside: dict[str, float] = field(default_factory=dict)
    series: str = ""
    x: float | None = None
    x_name: str = ""

    @classmethod
    def of_seconds(cls, name: str, samples: Samples, **rest: Any) -> Figure:
        """The median of some durations."""
        spread = {"p99": samples.p99, "minimum": samples.minimum, "samples": len(samples.values)}
        return cls(name, samples.median, "s", **(spread | rest))

    @classmethod
    def against(cls, name: str, samples: Samples, baseline_name: str, baseline: Samples, **rest: Any) -> Figure:
        """The median of some durations, over the median of others that were taken in turn with them."""
        return cls.of_seconds(
            name,
            samples,
            baseline=baseline.median,
            baseline_name=baseline_name,
            baseline_minimum=baseline.minimum,
            **rest,
        )

    @property
    def ratio(self) -> float | None:
        """Of ``value`` to ``baseline``."""
        return self.value / self.baseline if self.baseline else None

    @property
    def ratio_of_minima(self) -> float | None:
        """What the ratio is when nothing else runs on the machine, as far as that can be told."""
        if self.minimum is None or not self.baseline_minimum:
            return None
        return self.minimum / self.baseline_minimum

    @property
    def rate(self) -> float | None:
        """Bytes per second, where bytes were moved."""
        return self.num_bytes / self.value if self.num_bytes and self.value else None

    @property
    def excess(self) -> float | None:
        """What the limit bounds, over the limit; above 1 it is broken. ``None`` when there is no limit."""
        if self.limit is None:
            return None
        if self.baseline is None:
            return self.value / self.limit
        return max(ratio for ratio in (self.ratio, self.ratio_of_minima, 0.0) if ratio is not None) / self.limit

    @property
    def is_met(self) -> bool | None:
        """Whether the budget is kept; ``None`` when there is none."""
        return None if self.excess is None else self.excess <= 1

    @property
    def verdict(self) -> str:
        """One word for people; a miss says by how much."""
        if self.excess is None:
            return ""
        return "met" if self.excess <= 1 else f"MISSED x{self.excess:.2f}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: all fields, and what follows from them."""
        derived = {
            "ratio": self.ratio,
            "ratio_of_minima": self.ratio_of_minima,
            "rate": self.rate,
            "is_met": self.is_met,
        }
        return dataclasses.asdict(self) | derived


@dataclass(frozen=True, slots=True)
class Check:
    """Something that is right or wrong."""

    name: str
    is_ok: bool
    detail: str

    def __str__(self) -> str:
        return f"{'OK  ' if self.is_ok else 'FAIL'}  {self.name}: {self.detail}"


@dataclass(slots=True)
class Report:
    """A run."""

    title: str
    command: str
    machine: dict[str, str] = field(default_factory=lambda: describe_machine())
    figures: list[Figure] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    format: int = FORMAT

    @classmethod
    def load(cls, path: Path) -> Report:
        """What :meth:`save` wrote. Raises :class:`ConfigurationError`."""
        try:
            report = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as exc:
            raise ConfigurationError(f"{path}: {exc.strerror}") from None
        except msgspec.MsgspecError as exc:
            raise ConfigurationError(f"{path} is not what kvpush bench --json writes: {exc}") from None
        if report.format != FORMAT:
            raise ConfigurationError(
                f"{path} has format {report.format}, and this version reads {FORMAT}: run it again"
            )
        return report

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "format": self.format,
            "title": self.title,
            "command": self.command,
            "machine": self.machine,
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "figures": [figure.as_dict() for figure in self.figures],
        }

    def groups(self) -> dict[str, list[Figure]]:
        """The figures of each benchmark, in order."""
        groups: dict[str, list[Figure]] = {}
        for figure in self.figures:
            groups.setdefault(figure.group, []).append(figure)
        return groups

    def as_text(self) -> str:
        """Plain columns, for logs."""
        rows = [_HEADINGS, *map(_cells, self.figures)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        checks = [*map(str, self.checks), ""] if self.checks else []
        return "\n".join([*self.machine_lines(), "", *checks, *lines, "", self.summary()])

    def as_markdown(self) -> str:
        """A page."""
        machine = [f"- {line}" for line in self.machine_lines()]
        tables = [markdown_table(figures, f"### {group}" if group else "") for group, figures in self.groups().items()]
        checks = ["\n".join(f"- {check}" for check in self.checks)] if self.checks else []
        return "\n\n".join(["\n".join(machine), *checks, *tables, f"{self.summary()}."])

    def print_to_terminal(self) -> None:
        """A table, with rich where it is installed."""
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            print(self.as_text())
            return
        console = Console()
        if console.width < MIN_TABLE_WIDTH:
            print(self.as_text())
            return
        table = Table(title=self.title)
        for column, heading in enumerate(_HEADINGS):
            table.add_column(heading, justify="left" if column in (0, len(_HEADINGS) - 1) else "right")
        for figures in self.groups().values():
            for figure in figures:
                style = {True: "green", False: "red", None: "dim"}[figure.is_met]
                table.add_row(*_cells(figure), style=style)
            table.add_section()
        for line in self.machine_lines():
            console.print(line, highlight=False)
        for check in self.checks:
            console.print(str(check), style="green" if check.is_ok else "bold red", highlight=False)
        console.print(table)
        console.print(self.summary(), highlight=False)

    def machine_lines(self) -> list[str]:
        """What the figures were measured on."""
        return [f"{name}: {value}" for name, value in self.machine.items()]

    def summary(self) -> str:
        """How many budgets are met, and which are not."""
        judged = [figure for figure in self.figures if figure.is_met is not None]
        missed = [figure.name for figure in judged if not figure.is_met]
        summary = f"{len(judged) - len(missed)} of {len(judged)} budgets met"
        return f"{summary}; missed: {'; '.join(missed)}" if missed else summary


def markdown_table(figures: Sequence[Figure], heading: str = "") -> str:
    """Some figures as a table without the columns that none of them fills, and their notes below it."""
    rows = [_HEADINGS, *map(_cells, figures)]
    used = [column for column in range(len(_HEADINGS)) if any(row[column] for row in rows[1:])]
    lines = ["| " + " | ".join(row[column] for column in used) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("---" for _ in used) + " |")
    noted: dict[str, list[str]] = {}
    for figure in figures:
        if figure.note:
            noted.setdefault(figure.note, []).append(figure.name)
    notes = [f"- *{'; '.join(names)}*: {note}." for note, names in noted.items()]
    return "\n\n".join(part for part in (heading, "\n".join(lines), "\n".join(notes)) if part)


MIN_TABLE_WIDTH = 150  # columns; in fewer the table's cells are cut, and plain lines read better
_HEADINGS = ("what", "median", "p99", "min", "n", "GB/s", "compared with", "ratio", "of minima", "budget", "")


def _cells(figure: Figure) -> Sequence[str]:
    unit = figure.unit
    limits = {} if figure.baseline is None else {figure.baseline_name: figure.baseline}
    compared = ", ".join(f"{name} {shown(value, unit)}" for name, value in (limits | figure.beside).items())
    if figure.limit is None:
        budget = ""
    elif figure.baseline is not None:
        budget = f"{figure.limit:g}x"
    else:
        budget = shown(figure.limit, unit)
    return (
        figure.name,
        shown(figure.value, unit),
        shown(figure.p99, unit),
        shown(figure.minimum, unit),
        str(figure.samples),
        "" if figure.rate is None else f"{figure.rate / 1e9:.2f}",
        compared,
        shown(figure.ratio, "x"),
        shown(figure.ratio_of_minima, "x"),
        budget,
        figure.verdict,
    )


def shown(value: float | None, unit: str) -> str:
    """A value for people; nothing for ``None``."""
    if value is None:
        return ""
    match unit:
        case "s":
            scale, name = next((step for step in _SI_STEPS if value >= step[0]), _SI_STEPS[-1])
            return f"{value / scale:.3g} {name}"
        case "x":
            return f"{value:.2f}x"
        case "core":
            return f"{value:.4f} core"
        case _:
            return f"{value:.4g} {unit}"


def describe_machine() -> dict[str, str]:
    """What a reader needs to judge the figures."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("kvpush", "nixl", "torch", "pyzmq"))
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} CPUs, {platform.system()} {platform.release()}",
        "software": f"Python {platform.python_version()}, {versions}",
        "Python's speed": f"{_loop_turn_ns():.0f} ns per turn of an empty loop (best of 20)",
        "load average before (1, 5, 15 min)": load,
    }


def _loop_turn_ns() -> float:
    """A yardstick: what a figure means depends on how fast this machine runs any Python at all."""
    turns = 20_000
    durations_s = []
    for _ in range(20):
        begun_s = time.perf_counter()
        for _ in range(turns):
            pass
        durations_s.append(time.perf_counter() - begun_s)
    return min(durations_s) / turns * 1e9


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
