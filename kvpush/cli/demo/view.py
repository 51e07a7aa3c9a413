"""What the demo shows while it runs: a live table for people, or lines for logs."""

from __future__ import annotations

import importlib.util
import sys
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from kvpush.cli.demo.board import Board, EngineRow, ProcessState
from kvpush.cli.demo.messages import DecodeStatus, PrefillStatus, Role
from kvpush.cli.demo.router import Phase

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

LOG_LINES = 9  # below the live table
REFRESH_S = 0.1


class View(Protocol):
    """Shows a run. Log lines arrive once and in order; the board is shown again and again."""

    def log(self, at_s: float, line: str) -> None:
        """Something happened, ``at_s`` seconds into the run."""

    def show(self, board: Board) -> None:
        """How things stand."""

    def conclude(self, text: str) -> None:
        """The summary, after the end of the run. Its first line is the verdict."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_view(*, plain: bool) -> View:
    """The live table, where there is a terminal and rich; lines elsewhere."""
    if plain or not sys.stdout.isatty():
        return PlainView()
    if importlib.util.find_spec("rich") is None:
        print("kvpush: no live table without rich (pip install 'kvpush[cli]'), so plain lines", file=sys.stderr)
        return PlainView()
    return LiveView()


def mib(num_bytes: float) -> str:
    """A size that fits into a table."""
    return f"{num_bytes / 2**20:.1f} MiB"


class PlainView:
    """One line per event."""

    def log(self, at_s: float, line: str) -> None:
        print(f"{at_s:7.2f} s  {line}", flush=True)

    def show(self, board: Board) -> None:
        """Lines tell all of it."""

    def conclude(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class LiveView:
    """A table of the engines that is drawn in place, with the last events below."""

    def __init__(self) -> None:
        from rich.live import Live

        self._lines: deque[tuple[float, str]] = deque(maxlen=LOG_LINES)
        self._live = Live(auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._shown_s = 0.0
        self._board: Board | None = None

    def log(self, at_s: float, line: str) -> None:
        self._lines.append((at_s, line))

    def show(self, board: Board) -> None:
        self._board = board
        now_s = board.since_start_s()
        if now_s - self._shown_s >= REFRESH_S:
            self._shown_s = now_s
            self._draw(board)

    def conclude(self, text: str) -> None:
        verdict, _, rest = text.partition("\n")
        style = "bold red" if "FAILED" in verdict else "bold green"
        self._live.console.print(verdict, style=style, highlight=False, markup=False)
        self._live.console.print(rest, highlight=False, markup=False, soft_wrap=True)

    def _draw(self, board: Board) -> None:
        self._live.update(render(board, list(self._lines)), refresh=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._board is not None:
            self._draw(self._board)  # the last word
        self._live.__exit__(kind, error, trace)


# --- the live table --------------------------------------------------------------------------------------------------

_STATE_STYLE = {
    "unknown": "dim",
    "handshaking": "yellow",
    "connected": "green",
    "stale": "red",
    "evicted": "red",
}
# Widths in characters, of the longest cell to be expected: so the table stands still, and fits into 80 columns.
_LEFT_COLUMNS = {"engine": 10, "process": 8, "state at p0": 14}
_RIGHT_COLUMNS = {"moving": 6, "batch": 5, "answers": 7, "MiB": 6, "MiB/s": 5}
_PROCESS_STYLE = {
    ProcessState.starting: "yellow",
    ProcessState.ready: "green",
    ProcessState.killed: "bold red",
    ProcessState.stopped: "dim",
}


def render(board: Board, lines: list[tuple[float, str]]) -> RenderableType:
    """One picture of a run, 80 columns or more."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    return Group(
        _heading(board),
        _engine_table(board),
        _progress(board),
        Padding(Group(*(_log_line(at_s, line) for at_s, line in lines)), (1, 0, 0, 1)),
        Text(""),
    )


def _heading(board: Board) -> RenderableType:
    from rich.table import Table

    num_decodes = sum(row.role is Role.decode for row in board.rows.values())
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_row(
        f"[bold] kvpush demo[/]  1 prefill and {num_decodes} decode processes, NIXL over loopback",
        f"[dim]{board.since_start_s():.1f} s [/]",
    )
    return grid


def _engine_table(board: Board) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.ROUNDED, expand=True, border_style="dim", header_style="bold", collapse_padding=True)
    for header, width in _LEFT_COLUMNS.items():
        table.add_column(header, no_wrap=True, min_width=width)
    for header, width in _RIGHT_COLUMNS.items():
        table.add_column(header, justify="right", no_wrap=True, min_width=width)
    for row in board.rows.values():
        table.add_row(*(_prefill_cells(board, row) if row.role is Role.prefill else _decode_cells(board, row)))
    return table


def _prefill_cells(board: Board, row: EngineRow) -> list[str]:
    status = row.status if isinstance(row.status, PrefillStatus) else None
    return [
        _name_cell(row),
        _process_cell(row),
        "" if status is None else f"[dim]{status.queued} to compute[/]",
        "" if status is None else str(status.pushing),
        "",
        "",
        _mib(board.num_bytes),
        _mib(board.rate_now()),
    ]


def _decode_cells(board: Board, row: EngineRow) -> list[str]:
    status = row.status if isinstance(row.status, DecodeStatus) else None
    return [
        _name_cell(row),
        _process_cell(row),
        f"[{_STATE_STYLE[row.state]}]{row.state}[/] [dim]g{row.generation}[/]" if row.state else "[dim]not met[/]",
        str(board.pushes_under_way(row.engine_id)),
        "" if status is None else str(status.running),
        str(row.answered),
        _mib(row.num_bytes),
        _mib(board.rate_now(row.engine_id)),
    ]


def _name_cell(row: EngineRow) -> str:
    return f"[bold]{row.engine_id}[/] [dim]{row.role}[/]"


def _process_cell(row: EngineRow) -> str:
    return f"[{_PROCESS_STYLE[row.process]}]{row.process}[/]"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}" if num_bytes else "[dim]-[/]"


def _progress(board: Board) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    router = board.router
    checked, total = router.count(Phase.checked), len(router.requests)
    problems = router.findings.problems
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    verdict = f"[bold red]{len(problems)} problems[/]" if problems else "[green]no problems[/]"
    grid.add_row(
        f" {checked}/{total} requests checked",
        ProgressBar(total=total, completed=checked, complete_style="cyan", finished_style="green"),
        f"{router.findings.compared_tokens} tokens compared, {verdict} ",
    )
    return grid


def _log_line(at_s: float, line: str) -> RenderableType:
    from rich.text import Text

    text = Text(f"{at_s:6.2f}  ", style="dim", no_wrap=True, overflow="ellipsis")
    return text.append(line, style="default")
