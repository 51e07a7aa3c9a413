"""The command line without its processes: options and errors, the router's decisions, canaries, what is shown."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpush
from kvpush.cli.demo import command as demo
from kvpush.cli.demo.board import Board
from kvpush.cli.demo.canary import Canaries
from kvpush.cli.demo.messages import (
    Cancel,
    DecodeStatus,
    Expect,
    FirstToken,
    Generated,
    Order,
    Prefill,
    Prefilled,
    PrefillStatus,
    Pushed,
    Received,
    Reference,
    Referenced,
    Role,
)
from kvpush.cli.demo.router import MAX_ATTEMPTS, SLOTS_PER_ENGINE, Orders, Phase, Router
from kvpush.cli.demo.summary import summary
from kvpush.cli.demo.view import LiveView, PlainView, make_view, render
from kvpush.cli.main import main
from kvpush.cli.model import ModelConfig, PagedKVCache

ADDRESS = ("127.0.0.1", 4711)

# --- options and errors ----------------------------------------------------------------------------------------------


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a command that ends with exit code 2 and says nothing else."""
    try:
        code = main(argv)
    except SystemExit as exc:  # argparse's own
        code = exc.code
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err
    return output.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"kvpush {kvpush.__version__}\n"


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"], ["doctor", "--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 0
    assert "usage: kvpush" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["demo", "--requests", "0"], "'0' is not a whole number above 0"),
        (["demo", "--decodes", "many"], "'many' is not a whole number above 0"),
        (["demo", "--nope"], "--nope"),
        (["demo", "--prompts", "/does/not/exist"], "/does/not/exist: No such file"),
        (["demo", "--prompt", " "], "--prompt is empty"),
        (["demo", "--hf", "/does/not/exist"], "--hf /does/not/exist: no such directory"),
        (["bench", "push", "--json", "/does/not/exist.json"], "there is no folder /does/not"),
        (["bench", "push", "--json", "/tmp"], "/tmp: this is a folder"),
        (["statecharts", "--check", "--directory", "/does/not/exist"], "part of kvpush's source tree"),
        (["statecharts", "--write", "--directory", "/dev/null/x"], "--directory /dev/null/x: Not a directory"),
    ],
)
def test_a_users_mistake_is_one_line(argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in error_of(capsys, *argv)


@pytest.mark.nixl
def test_a_device_that_is_not_there_is_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "overhead", "--size", "tiny", "--net-devices", "nope0"]
    assert main(argv) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("kvpush: error: ") and "NET_DEVICES=nope0" in last


def test_a_file_without_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n \n")
    assert "no prompt in it" in error_of(capsys, "demo", "--prompts", str(file))
    file.write_bytes(b"gr\xfcn\n")
    assert "not UTF-8" in error_of(capsys, "demo", "--prompts", str(file))


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """As if these were not installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name in modules else find_spec(name))


def test_a_checkpoint_needs_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "transformers")
    assert "pip install 'kvpush[hf]'" in error_of(capsys, "demo", "--hf", str(tmp_path))


def options(*argv: str) -> demo.Options:
    import argparse

    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo._options(parser.parse_args(argv))


def test_each_of_your_prompts_once_by_default(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("two\n\nthree\n")
    mine = options("--prompt", "one", "--prompts", str(file))
    assert mine.prompts == ("one", "two", "three")
    assert mine.num_requests == 3
    assert options("--prompt", "one", "--requests", "5").num_requests == 5
    assert options().prompts == demo.PROMPTS
    assert options().num_requests == demo.DEFAULT_REQUESTS


def test_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert isinstance(make_view(plain=False), PlainView)


def test_a_live_table_on_a_terminal_with_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert isinstance(make_view(plain=False), LiveView)
    assert isinstance(make_view(plain=True), PlainView)


def test_without_rich_lines_and_a_note(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    without(monkeypatch, "rich")
    assert isinstance(make_view(plain=False), PlainView)
    note = capsys.readouterr().err
    assert "kvpush[cli]" in note
    assert note.count("\n") == 1


@pytest.mark.nixl
def test_the_doctor_finds_this_machine_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "this machine can run kvpush"
    assert any(line.startswith("OK    round trip") for line in lines)


@pytest.mark.nixl
def test_the_doctor_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--net-devices", "nosuch0"]) == 1
    output = capsys.readouterr().out
    assert "FAIL  UCX backend" in output
    assert "-> try --net-devices" in output


# --- the router ------------------------------------------------------------------------------------------------------


def router(num_requests: int = 3, num_decodes: int = 2) -> tuple[Router, Orders]:
    """A router whose engines are all up, and what it ordered then."""
    made = Router(["a", "b"], num_requests, 2, prefill_id="p0", decode_ids=[f"d{i}" for i in range(num_decodes)])
    orders = made.prefill_up(ADDRESS)
    for i in range(num_decodes):
        orders += made.decode_up(f"d{i}")
    return made, orders


def received(transfer_id: str, outcome: str = "done", changed: tuple[int, ...] = ()) -> Received:
    code = None if outcome == "done" else kvpush.FailureCode.write_failed
    event = kvpush.ReceiveFinished(transfer_id, kvpush.Outcome(outcome), "p0", code, "why", True, 1, 0.1)
    return Received(event, 10, changed)


def pushed(transfer_id: str, outcome: str = "done", engine_id: str = "d0") -> Pushed:
    code = None if outcome == "done" else kvpush.FailureCode.write_failed
    event = kvpush.PushFinished(transfer_id, kvpush.Outcome(outcome), engine_id, code, "why", True, 1 << 20, 0.001)
    return Pushed(event, 1, 0.0)


def of_kind(orders: Orders, kind: type[Order]) -> list[tuple[str, Any]]:
    return [(engine_id, order) for engine_id, order in orders if isinstance(order, kind)]


def test_both_engines_are_told_at_once_and_decode_engines_take_turns() -> None:
    _, orders = router()
    assert of_kind(orders, Expect) == [
        ("d0", Expect("r1", "a", 2, ADDRESS, "p0")),
        ("d1", Expect("r2", "b", 2, ADDRESS, "p0")),
        ("d0", Expect("r3", "a", 2, ADDRESS, "p0")),
    ]
    assert of_kind(orders, Prefill) == [
        ("p0", Prefill("r1", "a")),
        ("p0", Prefill("r2", "b")),
        ("p0", Prefill("r3", "a")),
    ]
    assert of_kind(orders, Reference) == [("p0", Reference(0, "a", 2)), ("p0", Reference(1, "b", 2))]


def test_nothing_starts_before_every_engine_is_there() -> None:
    made = Router(["a"], 1, 2, prefill_id="p0", decode_ids=["d0", "d1"])
    assert made.decode_up("d0") == []
    assert made.prefill_up(ADDRESS) == []
    assert made.decode_up("d1") != []


def test_an_engine_has_so_many_requests_at_a_time_and_no_more() -> None:
    made, orders = router(num_requests=SLOTS_PER_ENGINE + 1, num_decodes=1)
    assert len(of_kind(orders, Expect)) == SLOTS_PER_ENGINE
    made.received("d0", received("r1"))
    (order,) = of_kind(made.generated(Generated("r1", (1, 2), "")), Expect)
    assert order[1].transfer_id == f"r{SLOTS_PER_ENGINE + 1}"


def test_the_first_token_goes_to_decode() -> None:
    made, _ = router()
    assert made.prefilled(Prefilled("r2", 7)) == [("d1", FirstToken("r2", 7))]


@pytest.mark.parametrize("reference_comes_first", [True, False])
def test_tokens_are_compared_whichever_run_ends_first(reference_comes_first: bool) -> None:
    made, _ = router(num_requests=1)
    steps = [lambda: made.referenced(Referenced(0, (1, 2))), lambda: made.generated(Generated("r1", (1, 2), ""))]
    for step in steps if reference_comes_first else reversed(steps):
        assert not made.is_finished
        step()
    assert made.is_finished
    assert made.findings.compared_tokens == 2
    assert made.findings.problems == []


@pytest.mark.parametrize(
    ("tokens", "part"), [((1, 3), "token 2 of 2 is 3"), ((1,), "1 tokens"), ((1, 2, 3), "3 tokens")]
)
def test_another_answer_is_a_problem(tokens: tuple[int, ...], part: str) -> None:
    made, _ = router(num_requests=1)
    made.referenced(Referenced(0, (1, 2)))
    made.generated(Generated("r1", tokens, ""))
    assert part in made.findings.problems[0]


def test_a_killed_engines_requests_wait_for_its_return_and_get_new_transfer_ids() -> None:
    made, _ = router(num_requests=4)
    orders = made.decode_down("d1")
    assert sorted(order.transfer_id for _, order in of_kind(orders, Cancel)) == ["r2", "r4"]
    assert of_kind(orders, Expect) == []
    orders = made.decode_up("d1")
    assert [(engine_id, order.transfer_id) for engine_id, order in of_kind(orders, Expect)] == [
        ("d1", "r2#2"),
        ("d1", "r4#2"),
    ]
    assert made.resent == ["r2#2", "r4#2"]


def test_late_reports_of_an_attempt_that_is_over_change_nothing() -> None:
    made, _ = router(num_requests=1, num_decodes=1)
    made.decode_down("d0")
    made.decode_up("d0")
    assert made.prefilled(Prefilled("r1", 7)) == []
    assert made.pushed(pushed("r1", "failed")) == []
    assert made.received("d0", received("r1", "failed")) == []
    assert made.generated(Generated("r1", (1, 2), "")) == []
    assert made.requests[0].phase is Phase.moving


def test_a_failed_attempt_is_forgotten_on_both_sides_and_made_again() -> None:
    made, _ = router(num_requests=1, num_decodes=1)
    orders = made.pushed(pushed("r1", "failed"))
    assert of_kind(orders, Cancel) == [("p0", Cancel("r1")), ("d0", Cancel("r1"))]
    assert of_kind(orders, Expect)[0][1].transfer_id == "r1#2"


def test_a_request_is_lost_after_so_many_attempts() -> None:
    made, _ = router(num_requests=1, num_decodes=1)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        made.received("d0", received("r1" if attempt == 1 else f"r1#{attempt}", "failed"))
    assert made.is_finished
    assert made.count(Phase.lost) == 1
    assert "r1 is lost" in made.findings.problems[0]


def test_a_changed_canary_is_a_problem() -> None:
    made, _ = router()
    made.received("d0", received("r1", changed=(17,)))
    assert "d0: block 17 was granted to nobody" in made.findings.problems[0]


# --- canaries --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache() -> PagedKVCache:
    config = ModelConfig(
        num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, head_size=8, intermediate_size=16, vocab_size=257
    )
    return PagedKVCache(config, num_blocks=6, block_size_tokens=4)


def test_untouched_blocks_are_unchanged(cache: PagedKVCache) -> None:
    canaries = Canaries(cache)
    assert canaries.num_watched == 6
    assert canaries.changed() == ()


def test_one_changed_byte_of_one_layer_is_found(cache: PagedKVCache) -> None:
    canaries = Canaries(cache)
    cache.kv_caches["layers.1"].view(torch.uint8)[4, 1, 0, 3, 31] ^= 1
    assert canaries.changed() == (4,)


def test_granted_blocks_may_change_and_are_watched_again_afterwards(cache: PagedKVCache) -> None:
    canaries = Canaries(cache)
    canaries.release([1, 2])
    cache.kv_caches["layers.0"][1:3] = 1.0
    assert canaries.num_watched == 4
    assert canaries.changed() == ()
    canaries.watch([1, 2])
    assert canaries.changed() == ()
    cache.kv_caches["layers.0"][2] = 1.0
    assert canaries.changed() == (2,)


# --- how a run is shown ----------------------------------------------------------------------------------------------


@pytest.fixture
def board() -> Board:
    """A run in its middle, with one engine killed and back."""
    made, _ = router(num_requests=4)
    shown = Board(made, started_s=0.0)
    for role, engine_id in ((Role.prefill, "p0"), (Role.decode, "d0"), (Role.decode, "d1")):
        shown.add_engine(role, engine_id, 4711)
        shown.add_ready(engine_id, 256)
    shown.add_transition(kvpush.Transition(1.0, "d0", 10, "unknown", "handshake_started", "handshaking", "attempt 1"))
    shown.add_pushed(pushed("r1"))
    shown.add_pushed(pushed("r3"))
    shown.add_kill("d1", 2.0)
    shown.add_death()
    shown.add_transition(kvpush.Transition(2.5, "d1", 2, "stale", "evict", "evicted", "lost"))
    shown.add_engine(Role.decode, "d1", 4712)
    shown.add_ready("d1", 256)
    shown.add_pushed(pushed("r2", engine_id="d1"))
    shown.add_status("p0", PrefillStatus((), 1, 2, 100))
    shown.add_status("d0", DecodeStatus(1, 2, 3, 100))
    return shown


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_table_fits(board: Board, width: int) -> None:
    from rich.console import Console

    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(render(board, [(1.0, "x" * 200)]))
    lines = console.export_text().splitlines()
    assert all(len(line) <= width for line in lines)
    header = next(line for line in lines if "engine" in line)
    assert header.replace("│", " ").split() == [
        "engine", "process", "state", "at", "p0", "moving", "batch", "answers", "MiB", "MiB/s"
    ]  # fmt: skip
    assert any("handshaking g10" in line for line in lines)


def test_the_summary_has_the_figures(board: Board) -> None:
    text = summary(board, [])
    assert "kvpush demo: OK" in text
    assert "0 answered, 4 lost" in text
    assert "3.0 MiB (3145728 bytes) in 3 pushes" in text
    assert "1.05 GB/s median" in text
    assert "SIGKILL to d1 at 2.00 s with r2, r4 unfinished; p0 had released it after 500.0 ms" in " ".join(text.split())
    assert "d1 g2        stale -> evicted      evict: lost" in text


def test_the_summary_names_every_problem(board: Board) -> None:
    text = summary(board, ["the sky fell", "twice"])
    assert "FAILED, 2 problems" in text
    assert "problem    the sky fell" in text
