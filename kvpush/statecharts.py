"""``docs/statecharts`` from the tables that run: ``python -m kvpush.statecharts --write | --check``.

Every lifecycle has a page and a picture. On the page, what stands between the two marker comments is generated: a
Mermaid diagram and a From/To table. What stands around them was written by hand and is left as it is. The picture shows
the same rows for viewers that do not draw Mermaid: each state is a column, each row an arrow, in table order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from kvpush.lifecycle import LIFECYCLES, Lifecycle

COMMAND = "python -m kvpush.statecharts --write"
DEFAULT_DIRECTORY = Path(__file__).resolve().parents[1] / "docs" / "statecharts"
BEGIN = f"<!-- begin: generated from kvpush/lifecycle.py by `{COMMAND}`; edits between these marks are lost -->"
END = "<!-- end: generated -->"


@dataclass(frozen=True, slots=True)
class Edge:
    """One way through a table: a row, for one of its sources."""

    source: str
    trigger: str
    dest: str
    is_internal: bool
    why: str


def edges(lifecycle: Lifecycle[Any, Any]) -> Iterator[Edge]:
    """All of them, in table order."""
    for row in lifecycle.rows:
        for source in row.sources:
            yield Edge(source.value, row.trigger.value, (row.dest or source).value, row.dest is None, row.why)


# --- the page --------------------------------------------------------------------------------------------------------


def mermaid(lifecycle: Lifecycle[Any, Any]) -> str:
    """A ``stateDiagram-v2``. Internal rows neither leave nor enter their state, so they are notes and not loops."""
    lines = ["stateDiagram-v2", f"    [*] --> {lifecycle.initial.value}"]
    lines += [f"    {edge.source} --> {edge.dest}: {edge.trigger}" for edge in edges(lifecycle) if not edge.is_internal]
    lines += [f"    {state.value} --> [*]" for state in lifecycle.states if state in lifecycle.final]
    for state in lifecycle.states:
        internal = [edge.trigger for edge in edges(lifecycle) if edge.is_internal and edge.source == state.value]
        if internal:
            lines += [f"    note right of {state.value}", f"        stays: {', '.join(internal)}", "    end note"]
    return "\n".join(lines)


def from_to_table(lifecycle: Lifecycle[Any, Any]) -> str:
    """Which trigger leads from the state of the row to the state of the column, and when it is fired."""
    names = [state.value for state in lifecycle.states]
    lines = ["| from \\ to | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [
        f"| **{source}** | " + " | ".join(_cell(lifecycle, source, dest) for dest in names) + " |" for source in names
    ]
    return "\n".join(lines)


def _cell(lifecycle: Lifecycle[Any, Any], source: str, dest: str) -> str:
    ways = [edge for edge in edges(lifecycle) if (edge.source, edge.dest) == (source, dest)]
    return "<br>".join(f"`{edge.trigger}`{' (stays)' if edge.is_internal else ''}: {edge.why}" for edge in ways)


def generated_block(lifecycle: Lifecycle[Any, Any]) -> str:
    """What belongs between the markers, markers included."""
    return "\n".join(
        [
            BEGIN,
            "",
            "```mermaid",
            mermaid(lifecycle),
            "```",
            "",
            f"The same as a picture: [{lifecycle.name}.svg]({lifecycle.name}.svg).",
            "",
            "A blank cell is forbidden: the trigger raises `IllegalTransition` there and changes nothing.",
            "",
            from_to_table(lifecycle),
            "",
            END,
        ]
    )


class MarkersMissing(ValueError):
    """A page has lost its markers, so nothing can be written into it."""


def page(lifecycle: Lifecycle[Any, Any], current: str | None) -> str:
    """The page as it should be: ``current`` with its generated block replaced, or a new one when there is none."""
    block = generated_block(lifecycle)
    if current is None:
        return f"# Lifecycle: {lifecycle.name}\n\n{block}\n"
    before, begin, rest = current.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise MarkersMissing(f"the markers {BEGIN!r} and {END!r} must both be there, in this order")
    return before + block + after


# --- the picture -----------------------------------------------------------------------------------------------------

# pixels
_CHAR = 6.7  # of the 11 px monospace font, rounded up
_COLUMN = 108  # at least, between two states
_LINE = 27  # between two arrows
_MARGIN = 18
_BOX_HEIGHT = 34
_TOP = 62  # upper edge of the boxes; the initial marker stands above
_HEAD = 7  # length of an arrow's head
_LOOP = 22  # reach of an internal row

_INK, _FAINT, _BAND = "#1f2328", "#b6bfc9", "#f5f7f9"
_BOX_FILL, _BOX_INK = "#e7f0fd", "#1b5fc1"
_FINAL_FILL, _FINAL_INK = "#eceff1", "#4d565f"
_MOVE, _STAY = "#1b5fc1", "#8a4b00"


class Picture:
    """The SVG of one lifecycle. Deterministic: the same table gives the same bytes."""

    def __init__(self, lifecycle: Lifecycle[Any, Any]) -> None:
        self._lifecycle = lifecycle
        self._edges = list(edges(lifecycle))
        names = [state.value for state in lifecycle.states]
        widest = max(_text_width(trigger.value) for trigger in lifecycle.triggers)
        self._column = max(_COLUMN, widest + 2 * _HEAD + 8)
        self._box = max(_text_width(name) for name in names) + 26
        self._x = {name: _MARGIN + self._column / 2 + index * self._column for index, name in enumerate(names)}
        self._first_line = _TOP + _BOX_HEIGHT + _LINE
        self._bottom = self._first_line + _LINE * (len(self._edges) - 1) + _LINE
        self._width = 2 * _MARGIN + self._column * len(names)
        self._height = self._bottom + 34

    def svg(self) -> str:
        """The whole document."""
        size = f'width="{self._width:.0f}" height="{self._height:.0f}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self._width:.0f} {self._height:.0f}" '
            'role="img" font-family="ui-monospace, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="11">',
            f"<title>Lifecycle: {escape(self._lifecycle.name)}</title>",
            f"<desc>Generated by {COMMAND}</desc>",
            f'<rect {size} fill="#ffffff"/>',
            *self._bands(),
            *self._lifelines(),
            *self._initial_marker(),
            *(part for index, edge in enumerate(self._edges) for part in self._arrow(edge, self._y(index))),
            *(part for state in self._lifecycle.states for part in self._state(state)),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _y(self, index: int) -> float:
        return self._first_line + _LINE * index

    def _bands(self) -> Iterator[str]:
        """Every second trigger on a grey band, so that the arrows of one trigger are seen as one row of the table."""
        index = 0
        for number, (_, group) in enumerate(groupby(self._edges, key=lambda edge: edge.trigger)):
            lines = len(list(group))
            if number % 2 == 0:
                y, height = self._y(index) - _LINE / 2 - 4, _LINE * lines
                yield f'<rect x="0" y="{y:.1f}" width="{self._width:.0f}" height="{height}" fill="{_BAND}"/>'
            index += lines

    def _lifelines(self) -> Iterator[str]:
        for x in self._x.values():
            yield _line(x, _TOP + _BOX_HEIGHT, x, self._bottom, _FAINT, dashes="3 4")

    def _initial_marker(self) -> Iterator[str]:
        x = self._x[self._lifecycle.initial.value]
        yield f'<circle cx="{x:.1f}" cy="{_MARGIN + 4}" r="6" fill="{_INK}"/>'
        yield _line(x, _MARGIN + 10, x, _TOP - _HEAD, _INK)
        yield _head(x, _TOP, 0, 1, _INK)

    def _state(self, state: Any) -> Iterator[str]:
        x, is_final = self._x[state.value], state in self._lifecycle.final
        fill, ink = (_FINAL_FILL, _FINAL_INK) if is_final else (_BOX_FILL, _BOX_INK)
        yield _box(x - self._box / 2, _TOP, self._box, _BOX_HEIGHT, fill, ink)
        yield _text(x, _TOP + _BOX_HEIGHT / 2 + 4, state.value, _INK, weight="bold")
        if is_final:
            yield f'<circle cx="{x:.1f}" cy="{self._bottom + 8:.1f}" r="8" fill="#ffffff" stroke="{_INK}"/>'
            yield f'<circle cx="{x:.1f}" cy="{self._bottom + 8:.1f}" r="4.5" fill="{_INK}"/>'

    def _arrow(self, edge: Edge, y: float) -> Iterator[str]:
        x, end = self._x[edge.source], self._x[edge.dest]
        if edge.is_internal:
            yield from self._loop(edge, x, y)
            return
        side = 1 if end > x else -1
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_MOVE}"/>'
        yield _line(x, y, end - side * _HEAD, y, _MOVE)
        yield _head(end, y, side, 0, _MOVE)
        # beside its source, where the eye starts: in the middle it would stand on another state's line
        yield _text(x + side * self._column / 2, y - 5, edge.trigger, _INK)

    def _loop(self, edge: Edge, x: float, y: float) -> Iterator[str]:
        top, low = y - 9, y + 3
        yield (
            f'<path d="M {x:.1f} {top:.1f} h {_LOOP - 6} a 6 6 0 0 1 0 12 h {6 + _HEAD - _LOOP}" fill="none" '
            f'stroke="{_STAY}" stroke-width="1.4" stroke-dasharray="4 3"/>'
        )
        yield _head(x, low, -1, 0, _STAY)
        yield _text(x + _LOOP + 5, y + 1, f"{edge.trigger} (stays)", _STAY, anchor="start")


def _text_width(text: str) -> float:
    return len(text) * _CHAR


def _text(x: float, y: float, text: str, ink: str, *, anchor: str = "middle", weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{ink}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, ink: str, *, dashes: str = "none") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{ink}" stroke-width="1.4" stroke-dasharray="{dashes}"/>'


def _head(x: float, y: float, dx: int, dy: int, ink: str) -> str:
    """A filled triangle with its tip at (x, y), pointing along (dx, dy)."""
    back_x, back_y, half = x - dx * _HEAD, y - dy * _HEAD, _HEAD * 0.55
    corners = [(x, y), (back_x + dy * half, back_y + dx * half), (back_x - dy * half, back_y - dx * half)]
    return f'<polygon points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in corners)}" fill="{ink}"/>'


def _box(x: float, y: float, width: float, height: float, fill: str, ink: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="8"'
    return f'<rect {place} fill="{fill}" stroke="{ink}" stroke-width="1.4"/>'


# --- the command -----------------------------------------------------------------------------------------------------


def expected_files(directory: Path) -> dict[Path, str]:
    """Every generated file and what it should hold. Raises :class:`MarkersMissing` for a page that cannot be kept."""
    files: dict[Path, str] = {}
    for lifecycle in LIFECYCLES:
        path = directory / f"{lifecycle.name}.md"
        try:
            files[path] = page(lifecycle, _read(path))
        except MarkersMissing as exc:
            raise MarkersMissing(f"{path}: {exc}") from None
        files[directory / f"{lifecycle.name}.svg"] = Picture(lifecycle).svg()
    return files


def stale_files(directory: Path) -> list[Path]:
    """Those that differ from the tables, or are missing."""
    return [path for path, content in expected_files(directory).items() if _read(path) != content]


def write(directory: Path) -> list[Path]:
    """Bring every file up to date; return those that changed."""
    files = expected_files(directory)
    changed = [path for path, content in files.items() if _read(path) != content]
    directory.mkdir(parents=True, exist_ok=True)
    for path in changed:
        path.write_text(files[path], encoding="utf-8")
    return changed


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def main(argv: Sequence[str] | None = None) -> int:
    """``0``: all is current; ``1``: ``--check`` found stale files, or a page has lost its markers; ``2``: there is no
    directory to check."""
    parser = argparse.ArgumentParser(prog="kvpush statecharts", description="docs/statecharts from the lifecycles")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="bring pages and pictures up to date")
    mode.add_argument("--check", action="store_true", help="exit 1 and name the files that are not")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, help="default: %(default)s")
    options = parser.parse_args(argv)
    if options.check and not options.directory.is_dir():
        return _say(
            f"kvpush statecharts: error: {options.directory} is not there, so there is nothing to check; the pages are "
            f"part of kvpush's source tree, not of an installed package: give --directory DOCS/statecharts",
            is_error=True,
            code=2,
        )
    try:
        paths = write(options.directory) if options.write else stale_files(options.directory)
    except MarkersMissing as exc:
        return _say(f"{exc}", is_error=True)
    except OSError as exc:
        text = f"kvpush statecharts: error: --directory {options.directory}: {exc.strerror}"
        return _say(text, is_error=True, code=2)
    if options.write:
        return _say("\n".join(f"wrote {path}" for path in paths) or "all statecharts are current")
    if paths:
        return _say("\n".join(f"{path} is stale; run: {COMMAND}" for path in paths), is_error=True)
    return _say("all statecharts are current")


def _say(text: str, *, is_error: bool = False, code: int = 1) -> int:
    (sys.stderr if is_error else sys.stdout).write(text + "\n")
    return code if is_error else 0


if __name__ == "__main__":
    sys.exit(main())
