"""A run as one picture: the budgets as bars, and a curve for everything that was measured at growing sizes.

matplotlib comes with the extra ``bench`` and is imported when it is needed.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpush.cli.bench.report import Figure, Report
from kvpush.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
_COLUMNS = 3
_MET, _MISSED, _LINE = "#2a7f62", "#c0392b", "#1f4e79"
_UNITS = {"s": (1e3, "ms"), "B": (1.0, "bytes"), "core": (1.0, "cores")}


def check(path: Path) -> None:
    """Complain before anything is measured. Raises :class:`ConfigurationError`."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigurationError(f"--plot {path}: the name ends in {' or '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib: pip install 'kvpush[bench]'")


def draw(report: Report, path: Path) -> None:
    """Write the picture."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    judged = [figure for figure in report.figures if figure.excess is not None]
    series: dict[str, list[Figure]] = {}
    for figure in report.figures:
        if figure.series:
            series.setdefault(figure.series, []).append(figure)
    curves = {name: sorted(figures, key=_x) for name, figures in series.items()}
    num_rows = math.ceil(len(curves) / _COLUMNS)
    bars_height = (0.26 * len(judged) + 1.2) if judged else 0.0
    height = max(2.0, bars_height + 3.2 * num_rows)
    # text stays text, and the same figures give the same file
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvpush", "font.size": 8.0}):
        picture = Picture(figsize=(5.2 * _COLUMNS, height), layout="constrained")
        FigureCanvasAgg(picture)
        # apart, so that the long names of the bars do not push the curves aside
        heights = [max(bars_height, 0.01), max(3.2 * num_rows, 0.01)]
        halves: Any = picture.subfigures(2, 1, height_ratios=heights)  # its type says that there may be one only
        above, below = halves
        if judged:
            _draw_budgets(above.add_subplot(), judged)
        for number, (name, figures) in enumerate(curves.items(), 1):
            _draw_curve(below.add_subplot(num_rows, _COLUMNS, number), name, figures)
        is_svg = path.suffix.lower() == ".svg"
        picture.savefig(path, dpi=110, metadata={"Date": None} if is_svg else None)


def _x(figure: Figure) -> float:
    assert figure.x is not None, "a figure of a series has its place in it"
    return figure.x


def _draw_budgets(axes: Axes, judged: list[Figure]) -> None:
    excesses = [max(figure.excess or 0.0, 1e-4) for figure in judged]
    places = range(len(judged))
    axes.barh(places, excesses, color=[_MET if figure.is_met else _MISSED for figure in judged])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(places, [figure.name for figure in judged])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("measured / budget; left of 1 it is met")
    axes.set_title("budgets")
    for place, excess in zip(places, excesses, strict=True):
        axes.annotate(f" {excess:.2g}", (excess, place), va="center", fontsize=7)


def _draw_curve(axes: Axes, name: str, figures: list[Figure]) -> None:
    scale, unit = _UNITS.get(figures[0].unit, (1.0, figures[0].unit))
    if unit == "ms" and max(figure.value for figure in figures) < 1e-4:
        scale, unit = 1e6, "us"
    x = [_x(figure) for figure in figures]
    lines: dict[str, list[float | None]] = {"kvpush": [figure.value for figure in figures]}
    for other in dict.fromkeys(name for figure in figures for name in _limits(figure)):
        lines[other] = [_limits(figure).get(other) for figure in figures]
    for label, values in lines.items():
        is_ours = label == "kvpush"
        style: dict[str, Any] = {"color": _LINE, "linewidth": 2} if is_ours else {"linestyle": "--", "linewidth": 1}
        scaled = [math.nan if value is None else value * scale for value in values]
        axes.plot(x, scaled, marker="o", markersize=3, label=label, **style)
    if max(x) > 8 * min(x) > 0:
        axes.set_xscale("log", base=2)
    drawn = [value for values in lines.values() for value in values if value is not None]
    if min(drawn) > 0 and max(drawn) > 5 * min(drawn):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(name)
    axes.set_xlabel(figures[0].x_name)
    axes.set_ylabel(unit)
    axes.legend(fontsize=7)


def _limits(figure: Figure) -> dict[str, float]:
    baseline = {} if figure.baseline is None else {figure.baseline_name: figure.baseline}
    return baseline | figure.beside
