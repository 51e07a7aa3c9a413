"""What a benchmark found: figures beside their budgets, as text, as a table for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
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
    """

    name: str
    value: float
    unit: str  # "s", "core", "B", "GB/s"
    p99: float | None = None
    minimum: float | None = None
    samples: int = 1
    baseline: float | None = None
    baseline_name: str = ""
    baseline_minimum: float | None = None
    limit: float | None = None
    note: str = ""

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
        derived = {"ratio": self.ratio, "ratio_of_minima": self.ratio_of_minima, "is_met": self.is_met}
        return dataclasses.asdict(self) | derived


@dataclass(slots=True)
class Report:
    """A run."""

    title: str
    command: str
    machine: dict[str, str] = field(default_factory=lambda: describe_machine())
    figures: list[Figure] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        figures = [figure.as_dict() for figure in self.figures]
        return {"title": self.title, "command": self.command, "machine": self.machine, "figures": figures}

    def as_text(self) -> str:
        """Plain columns, for logs."""
        rows = [_HEADINGS, *map(_cells, self.figures)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*self._machine_lines(), "", *lines, "", self._summary()])

    def as_markdown(self) -> str:
        """A page."""
        rows = [_HEADINGS, tuple("---" for _ in _HEADINGS), *map(_cells, self.figures)]
        table = ["| " + " | ".join(row) + " |" for row in rows]
        noted: dict[str, list[str]] = {}
        for figure in self.figures:
            if figure.note:
                noted.setdefault(figure.note, []).append(figure.name)
        notes = [f"- *{'; '.join(names)}*: {note}." for note, names in noted.items()]
        machine = [f"- {line}" for line in self._machine_lines()]
        return "\n".join([*machine, "", *table, "", f"{self._summary()}.", "", *notes])

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
        for figure in self.figures:
            style = {True: "green", False: "red", None: "dim"}[figure.is_met]
            table.add_row(*_cells(figure), style=style)
        for line in self._machine_lines():
            console.print(line, highlight=False)
        console.print(table)
        console.print(self._summary(), highlight=False)

    def _machine_lines(self) -> list[str]:
        return [f"{name}: {value}" for name, value in self.machine.items()]

    def _summary(self) -> str:
        judged = [figure for figure in self.figures if figure.is_met is not None]
        missed = [figure.name for figure in judged if not figure.is_met]
        summary = f"{len(judged) - len(missed)} of {len(judged)} budgets met"
        return f"{summary}; missed: {'; '.join(missed)}" if missed else summary


MIN_TABLE_WIDTH = 150  # columns; in fewer the table's cells are cut, and plain lines read better
_HEADINGS = ("what", "median", "p99", "min", "n", "compared with", "ratio", "of minima", "budget", "")


def _cells(figure: Figure) -> Sequence[str]:
    unit = figure.unit
    compared = ""
    if figure.baseline is not None:
        compared = f"{figure.baseline_name} {_shown(figure.baseline, unit)}"
    if figure.limit is None:
        budget = ""
    elif figure.baseline is not None:
        budget = f"{figure.limit:g}x"
    else:
        budget = _shown(figure.limit, unit)
    return (
        figure.name,
        _shown(figure.value, unit),
        _shown(figure.p99, unit),
        _shown(figure.minimum, unit),
        str(figure.samples),
        compared,
        _shown(figure.ratio, "x"),
        _shown(figure.ratio_of_minima, "x"),
        budget,
        figure.verdict,
    )


def _shown(value: float | None, unit: str) -> str:
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
