"""What the demo says at its end: the figures, how they were measured, and every state change."""

from __future__ import annotations

import shutil
import textwrap

from kvpush.cli.demo.board import Board, Kill
from kvpush.cli.demo.router import Phase
from kvpush.cli.demo.view import mib

_LABEL_WIDTH = 11
_MAX_WIDTH = 110


def summary(board: Board, problems: list[str]) -> str:
    """The whole text."""
    facts = [_requests(board), _tokens(board), _canaries(board), _moved(board), _rate(board), *_kill(board)]
    verdict = f"FAILED, {len(problems)} problems" if problems else "OK"
    lines = [f"kvpush demo: {verdict}, after {board.since_start_s():.1f} s", ""]
    for label, fact in facts:
        lines += _wrapped(f"  {label:<{_LABEL_WIDTH}}", fact)
    lines += ["", *_transitions(board)]
    if problems:
        lines.append("")
    for problem in problems:
        lines += _wrapped(f"  {'problem':<{_LABEL_WIDTH}}", problem)
    return "\n".join(lines)


def _wrapped(label: str, text: str) -> list[str]:
    """The text beside its label, no wider than the terminal."""
    width = min(shutil.get_terminal_size((_MAX_WIDTH, 24)).columns, _MAX_WIDTH)
    return textwrap.wrap(text, max(width, len(label) + 20), initial_indent=label, subsequent_indent=" " * len(label))


def _requests(board: Board) -> tuple[str, str]:
    router = board.router
    unfinished = len(router.requests) - router.count(Phase.checked, Phase.lost)
    text = f"{router.count(Phase.checked)} answered, {router.count(Phase.lost) + unfinished} lost"
    if router.resent:
        text += f"; {len(router.resent)} sent again: {', '.join(router.resent)}"
    return "requests", text


def _tokens(board: Board) -> tuple[str, str]:
    differing = sum("without disaggregation" in problem for problem in board.router.findings.problems)
    result = f"{differing} requests differ" if differing else "all equal"
    return "tokens", f"{board.router.findings.compared_tokens} compared with a run without disaggregation, {result}"


def _canaries(board: Board) -> tuple[str, str]:
    findings = board.router.findings
    changed = sum("was granted to nobody" in problem for problem in findings.problems)
    return "canaries", (
        f"{changed} changed; {findings.num_block_checks} checks, one after each receive, "
        f"looked at {findings.checked_blocks} blocks outside the granted ones"
    )


def _moved(board: Board) -> tuple[str, str]:
    num_chunks = sum(report.num_chunks for report in board.pushed)
    return (
        "moved",
        f"{mib(board.num_bytes)} ({board.num_bytes} bytes) in {len(board.pushed)} pushes, {num_chunks} chunks",
    )


def _rate(board: Board) -> tuple[str, str]:
    rate = board.push_rate()
    if rate is None:
        return "rate", "not measured: no push in one chunk to an engine that was connected already"
    return "rate", (
        f"{rate.median / 1e9:.3g} GB/s median, {rate.best / 1e9:.3g} best of {rate.num_pushes} pushes "
        "(bytes of a push / time from push() to PushFinished, while all engines compute on the same cores; "
        "chunked pushes and the first one to each process left out)"
    )


def _kill(board: Board) -> list[tuple[str, str]]:
    kill = board.kill
    if kill is None:
        return [("kill", "none")]
    return [
        (
            "kill",
            f"SIGKILL to {kill.engine_id} at {board.since_start_s(kill.killed_s):.2f} s with "
            f"{', '.join(kill.interrupted) or 'nothing'} unfinished; "
            f"p0 had released it after {_ms(kill.killed_s, kill.released_s)}",
        ),
        ("restart", _restart(kill)),
    ]


def _restart(kill: Kill) -> str:
    if kill.restarted_s is None or kill.ready_s is None or kill.first_push_s is None:
        return f"the run ended before anything was pushed into the new {kill.engine_id}"
    return (
        f"first push into the new {kill.engine_id} done {kill.first_push_s - kill.restarted_s:.2f} s after its process "
        f"was started and {_ms(kill.ready_s, kill.first_push_s)} after it was ready, prefill and handshake included"
    )


def _ms(start_s: float, end_s: float | None) -> str:
    return "(never)" if end_s is None else f"{(end_s - start_s) * 1000:.1f} ms"


def _transitions(board: Board) -> list[str]:
    heading = (
        f"  {len(board.transitions)} state changes of the decode engines, as p0 sees them "
        "(time, engine and generation, change, trigger)"
    )
    lines = [heading]
    for change in board.transitions:
        at_s = board.since_start_s(change.at_s)
        label = f"  {at_s:7.3f} s  {change.engine_id} g{change.generation}  {change.source:>11} -> {change.dest:<11}  "
        lines += _wrapped(label, f"{change.trigger}{': ' if change.detail else ''}{change.detail}")
    return lines
