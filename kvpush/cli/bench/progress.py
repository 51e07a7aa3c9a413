"""How far a run is: a bar on a terminal, a line for each benchmark elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpush.cli.bench.context import Progress

if TYPE_CHECKING:
    import rich.progress


@contextlib.contextmanager
def shown(num_benchmarks: int) -> Iterator[Progress]:
    """On stderr, so that stdout has nothing but the report."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars
        except ImportError:
            pass
        else:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
                yield _Bars(bars, num_benchmarks)
            return
    yield _Lines()


class _Lines(Progress):
    def begin(self, name: str) -> None:
        print(f"measuring: {name} ...", file=sys.stderr, flush=True)

    def point(self, what: str, done: int, total: int) -> None:
        pass


class _Bars(Progress):
    """One bar for all benchmarks, one for the points of the current."""

    def __init__(self, bars: rich.progress.Progress, num_benchmarks: int) -> None:
        self._bars = bars
        self._all = bars.add_task("benchmarks", total=num_benchmarks)
        self._current = bars.add_task("", total=None)
        self._num_begun = 0

    def begin(self, name: str) -> None:
        self._bars.update(self._all, completed=self._num_begun, description=name)
        self._bars.update(self._current, completed=0, total=None, description="")
        self._num_begun += 1

    def point(self, what: str, done: int, total: int) -> None:
        self._bars.update(self._current, completed=done, total=total, description=what)
