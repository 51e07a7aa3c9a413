"""``kvpush bench`` runs, and its reports have what people and programs look for. Nothing is asserted about time."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpush.cli.bench import limits, page, patterns, plot, progress, suite
from kvpush.cli.bench.context import SIZES
from kvpush.cli.bench.report import Check, Figure, Report, Samples, markdown_table
from kvpush.cli.main import main

ROOT = Path(__file__).parents[2]
needs_matplotlib = pytest.mark.filterwarnings("default")  # of matplotlib's own dependencies

# benchmark: what its figures' names begin with, in tiny sizes
FIGURES = {
    "overhead": [
        "own time to the posted WRITE, 1 block",
        "state machine's part of it, 16 blocks",
        "own time by blocks: 2 blocks",
        "own time by layers: 16 blocks, 2 layers",
        "own time by chunks: 64 blocks, 1 layers, 2 chunks",
    ],
    "latency": ["64 KiB end to end, after 50 ms", "64 KiB end to end, one after the other"],
    "throughput": [
        "0.25 MiB in 64 KiB blocks, UCX's choice",
        "0.25 MiB in 64 KiB blocks, tcp",
        "0.25 MiB in 64 KiB blocks, in order",
        "4 x 64 KiB in one push",
        "16 blocks of 2 layers",
        "1 MiB in 2 chunks",
        "1 MiB in blocks of 4 KiB",
    ],
    "streaming": [
        "1 MiB pushed layer by layer, after the last layer",
        "1 MiB pushed in 4 chunks",
        "1 MiB pushed layer by layer of 4 chunks",
        "one of 4 calls of push_layers()",
    ],
    "fan-out": ["64 x 64 KiB to each of 2 engines"],
    "handshake": ["first push to a new engine", "first push by layers", "first push by blocks"],
    "idle": ["idle CPU, prefill", "idle CPU, decode", "idle CPU of prefill with 2 engines"],
    "registry": [
        "push_posted, 50 engines",
        "push_posted, 10 engines",
        "memory per engine",
        "memory left behind by 200",
    ],
    "churn": [
        "first push to an engine that has just come",
        "descriptors that prefill keeps",
        "memory that prefill keeps",
    ],
    "fairness": ["p99 of pushes to 3 engines beside a slow one", "evenness among the 3, quiet"],
    "crowd": ["p99 of pushes while 2 engines connect"],
    "failures": ["kill -9 of a decode engine", "SIGSTOP of a decode engine"],
}
# section 9 of the design, and fairness
BUDGETS = {
    "overhead": {"own-time", "state-machine"},
    "latency": {"one-block"},
    "throughput": {"bulk"},
    "handshake": {"first-push"},
    "idle": {"idle"},
    "registry": {"registry-posted", "registry-sweep", "registry-memory", "come-and-go"},
    "fairness": {"fairness"},
    "crowd": {"crowd"},
    "failures": {"kill", "freeze"},
}


def run(*arguments: str) -> int:
    return main(["bench", *arguments])


# --- every benchmark -------------------------------------------------------------------------------------------------


def test_every_benchmark_is_tested() -> None:
    assert [benchmark.name for benchmark in suite.BENCHMARKS] == list(FIGURES)


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FIGURES)
def test_a_benchmark_reports_its_figures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert run(name, "--size", "tiny", "--plain", "--json", str(file)) == 0
    written = json.loads(file.read_text())
    assert written["machine"].keys() >= {"date", "machine", "software", "Python's speed", "caches"}
    assert written["command"] == f"kvpush bench {name} --size tiny"
    report = Report.load(file)
    names = [figure.name for figure in report.figures]
    assert len(set(names)) == len(names)
    for beginning in FIGURES[name]:
        assert any(figure_name.startswith(beginning) for figure_name in names), beginning
    for figure in report.figures:
        check_figure(figure)
        assert figure.group == name
    assert {figure.budget for figure in report.figures if figure.budget} == BUDGETS.get(name, set())
    text = capsys.readouterr().out
    assert all(figure_name in text for figure_name in names)


def check_figure(figure: Figure) -> None:
    assert figure.value >= 0
    assert (figure.limit is None) == (figure.is_met is None) == (not figure.budget)
    assert (figure.baseline is None) == (figure.ratio is None) == (not figure.baseline_name)
    assert bool(figure.series) == (figure.x is not None) == bool(figure.x_name)
    if figure.unit == "s" and figure.num_bytes:
        assert figure.rate == figure.num_bytes / figure.value


@pytest.mark.nixl
@pytest.mark.processes
def test_throughput_stands_beside_every_limit(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert run("throughput", "--size", "tiny", "--no-sweeps", "--plain", "--json", str(file)) == 0
    figures = Report.load(file).figures
    assert len(figures) == 2
    for figure in figures:
        assert figure.baseline_name == "bare loop"
        assert figure.beside.keys() == {"TCP stream", "memcpy"}
        assert figure.num_bytes == 4 * 65536


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_gpu_script_runs_on_cpu_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    assert run("gpu", "--device", "cpu", "--size", "tiny", "--plain", "--json", str(file)) == 0
    report = Report.load(file)
    names = [check.name for check in report.checks]
    assert [name.split(",")[0].split(":")[0] for name in names] == [
        "bytes",
        "fences",
        "control",
        "a push without a fence overtakes one that waits for its kernel",
    ]
    assert all(check.is_ok for check in report.checks)
    assert len(report.figures) == 1
    assert "shows the script, and nothing about CUDA" in capsys.readouterr().out


def test_a_failed_check_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from kvpush.cli.bench import gpu

    failed = report_of(checks=[Check("bytes", is_ok=False, detail="3 wrong")])
    monkeypatch.setattr(gpu, "measure", lambda *_: failed)
    assert run("gpu", "--device", "cpu", "--plain") == 1
    assert "FAIL  bytes: 3 wrong" in capsys.readouterr().out


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a run would have measured, without measuring."""
    calls: list[dict[str, Any]] = []

    def measure(names: tuple[str, ...], size: str, _config: object, **options: Any) -> Report:
        calls.append({"names": names, "size": size} | options)
        return report_of(Figure("row", 1.0, "s"))

    monkeypatch.setattr(suite, "measure", measure)
    return calls


def test_all_and_push_run_everything(measured: list[dict[str, Any]]) -> None:
    assert run("all", "--plain") == 0
    assert run("push", "--quick", "--plain") == 0
    everything, budgets = measured
    assert everything["names"] == budgets["names"] == tuple(FIGURES)
    assert everything["has_sweeps"] and not budgets["has_sweeps"]
    assert (everything["size"], budgets["size"]) == ("full", "quick")
    assert everything["command"] == "kvpush bench all"
    assert budgets["command"] == "kvpush bench push --size quick"


def test_what_cannot_be_measured_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: object, **__: object) -> Report:
        raise suite.BenchError("the decode process ended")

    monkeypatch.setattr(suite, "measure", measure)
    assert run("latency", "--plain") == 1
    assert capsys.readouterr().err == "kvpush bench latency: the decode process ended\n"


# --- bad arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "BENCHMARK"),
        (["speed"], "invalid choice: 'speed'"),
        (["latency", "--size", "huge"], "--size"),
        (["latency", "--device", "tpu"], "--device tpu: cpu, cuda or cuda:N"),
        (["latency", "--device", "cpu:0"], "--device cpu:0"),
        (["latency", "--json", "/does/not/exist/x.json"], "there is no folder /does/not/exist"),
        (["latency", "--plot", "/does/not/exist/x.svg"], "there is no folder /does/not/exist"),
        (["latency", "--plot", "figures.pdf"], "the name ends in .png or .svg"),
        (["latency", "--plain", "--markdown"], "not allowed with"),
        (["report", "/does/not/exist.json"], "/does/not/exist.json: No such file"),
        (["report"], "FILE.json"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_measured(
    arguments: list[str], part: str, measured: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = run(*arguments)
    except SystemExit as exc:  # argparse's own
        code = exc.code
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert part in output.err
    assert not measured


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("name", ["latency", "gpu"])
def test_no_cuda_device_is_said(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "--device", "cuda") == 2
    assert "finds no CUDA device here" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    measured: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    find_spec = plot.importlib.util.find_spec
    monkeypatch.setattr(
        plot.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    assert run("latency", "--plot", str(tmp_path / "x.svg")) == 2
    assert "pip install 'kvpush[bench]'" in capsys.readouterr().err
    assert not measured


# --- reports ---------------------------------------------------------------------------------------------------------


def report_of(*figures: Figure, checks: list[Check] | None = None) -> Report:
    return Report("title", "command", machine={"machine": "this one"}, figures=list(figures), checks=checks or [])


SAMPLE = report_of(
    Figure.against(
        "met",
        Samples.of([0.001, 0.002]),
        "bare loop",
        Samples.of([0.001, 0.0015]),
        limit=2.0,
        budget="bulk",
        num_bytes=1_500_000,
        beside={"memcpy": 0.0001},
        note="as it was",
        group="throughput",
    ),
    Figure("missed", 0.00005, "s", limit=0.00001, budget="state-machine", note="as it was", group="overhead"),
    Figure("one", 0.001, "s", series="by blocks", x=1, x_name="blocks", group="throughput"),
    Figure("ten", 0.003, "s", series="by blocks", x=10, x_name="blocks", group="throughput"),
    Figure("idle", 0.001, "core", series="by engines", x=1, x_name="engines", group="idle"),
)


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    SAMPLE.save(tmp_path / "r.json")
    assert Report.load(tmp_path / "r.json") == SAMPLE
    figure = json.loads((tmp_path / "r.json").read_text())["figures"][0]
    fields = {field.name for field in dataclasses.fields(Figure)}
    assert figure.keys() == fields | {"ratio", "ratio_of_minima", "rate", "is_met"}
    assert figure["rate"] == pytest.approx(1e9)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"format": 1}, "format 1"),
        ({"figures": [{"name": "x"}]}, "missing required field `value`"),
        ({"figures": [{"name": "x", "value": "1", "unit": "s"}]}, "Expected `float`"),
        ({"machine": None}, "machine"),
    ],
)
def test_another_file_is_not_read(change: dict[str, Any], part: str, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(SAMPLE.as_dict() | change))
    with pytest.raises(suite.ConfigurationError, match=part):
        Report.load(file)
    file.write_text("{")
    with pytest.raises(suite.ConfigurationError, match="not what kvpush bench"):
        Report.load(file)


def test_a_limit_bounds_the_value_or_both_ratios() -> None:
    assert Figure("alone", 3.0, "s").is_met is None
    assert Figure("alone", 3.0, "s", limit=3.0).is_met is True
    assert Figure("alone", 3.0, "s", limit=2.0).verdict == "MISSED x1.50"
    quick, slow = Samples.of([1.0, 3.0, 3.0]), Samples.of([2.0, 2.0, 2.0])
    figure = Figure.against("pair", quick, "other", slow, limit=1.6)
    assert (figure.ratio, figure.ratio_of_minima, figure.is_met) == (1.5, 0.5, True)
    assert Figure.against("pair", slow, "other", quick, limit=1.6).verdict == "MISSED x1.25"  # the minima's 2x


def test_percentile_and_median_are_samples() -> None:
    samples = Samples.of(range(1, 201))
    assert (samples.minimum, samples.median, samples.p99) == (1, 100.5, 198)
    assert Samples.of([7.0]).p99 == 7.0


def test_a_table_has_no_empty_column_and_says_a_note_once() -> None:
    lines = markdown_table(SAMPLE.figures[:2]).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4
    assert len({line.count("|") for line in table}) == 1
    assert "bare loop 1.25 ms, memcpy 100 us" in table[2]
    assert "| 1.00 |" in table[2]
    assert lines[-1] == "- *met; missed*: as it was."
    assert "GB/s" not in markdown_table(SAMPLE.figures[1:2])


def test_without_rich_the_table_is_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    report_of(Figure("row", 0.00001, "s")).print_to_terminal()
    out = capsys.readouterr().out
    assert "row" in out
    assert "10 us" in out


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@needs_matplotlib
def test_a_plot_has_every_budget_and_every_curve(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra bench, is not installed")
    files = [tmp_path / f"{name}{suffix}" for name in ("a", "b")]
    for file in files:
        plot.draw(SAMPLE, file)
    content = files[0].read_bytes()
    assert content == files[1].read_bytes(), "the same figures give the same file"
    if suffix == ".png":
        assert content.startswith(b"\x89PNG")
    else:
        text = content.decode()
        assert all(f">{name}<" in text for name in ("met", "missed", "by blocks", "by engines"))


@needs_matplotlib
def test_a_plot_of_nothing_is_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra bench, is not installed")
    plot.draw(report_of(Figure("row", 1.0, "s")), tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 0


# --- the page --------------------------------------------------------------------------------------------------------


def test_a_template_keeps_its_text_and_gets_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = tmp_path / "page.md.in"
    SAMPLE.save(tmp_path / "r.json")
    template.write_text("by hand {{machine}}\n{{ratio: met}} {{median: missed}} {{excess: missed}}\n{{missed}}\n")
    assert run("report", str(tmp_path / "r.json"), "--template", str(template)) == 0
    assert capsys.readouterr().out == (
        "by hand - machine: this one\n1.20x 50 us 5.00x\n- `state-machine`: missed, 5.00 times the budget\n"
    )


def test_without_a_template_everything_is_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SAMPLE.save(tmp_path / "r.json")
    assert run("report", str(tmp_path / "r.json")) == 0
    out = capsys.readouterr().out
    assert all(figure.name in out for figure in SAMPLE.figures)
    assert "1 of 2 budgets met; missed: missed." in out


@pytest.mark.parametrize("place", ["{{speed}}", "{{median: no such}}", "{{table nothing}}"])
def test_a_place_without_a_figure_is_an_error(place: str) -> None:
    with pytest.raises(suite.ConfigurationError, match="the run has n"):
        page.fill(place, SAMPLE)


# --- limits, patterns, progress --------------------------------------------------------------------------------------


@pytest.fixture
def stream() -> Iterator[tuple[limits.TcpSource, limits.TcpSink]]:
    sink = limits.TcpSink(1 << 16)
    with limits.TcpSource(sink.address, 1 << 16) as source:
        yield source, sink
    sink.close()


def test_a_stream_moves_what_it_is_told_to(stream: tuple[limits.TcpSource, limits.TcpSink]) -> None:
    source, sink = stream
    for num_bytes in (1, 1 << 16, 5):
        begun_ns = source.send(num_bytes)
        assert sink.receive(num_bytes) >= begun_ns


def test_a_copy_and_a_wake_up_take_time() -> None:
    assert limits.copier(1 << 20, "cpu")() > 0
    durations_s = limits.wake_ups(5, 0.0)
    assert len(durations_s) == 5
    assert all(0 < duration < math.inf for duration in durations_s)


def test_every_wrong_and_every_touched_byte_is_counted() -> None:
    cache = {f"layers.{i}": torch.zeros((8, 16, 4), dtype=torch.uint8) for i in range(2)}
    patterns.clear(cache)
    patterns.paint(cache, 3, [5, 1])
    right = patterns.compare(cache, 3, [5, 1])
    assert right.is_right
    assert right.num_compared == 2 * 8 * 64
    assert patterns.compare(cache, 4, [5, 1]).num_wrong > 0
    assert patterns.compare(cache, 3, [1, 5]).num_wrong > 0
    cache["layers.1"][5, 0, 0] ^= 1
    cache["layers.0"][7, 3, 2] = 0
    wrong = patterns.compare(cache, 3, [5, 1])
    assert (wrong.num_wrong, wrong.num_touched, wrong.is_right) == (1, 1, False)


def test_a_transfer_s_bytes_are_never_canaries() -> None:
    cache = {"layers.0": torch.zeros((4, 16, 64), dtype=torch.uint8)}
    patterns.paint(cache, 9, range(4))
    assert not (cache["layers.0"] == patterns.CANARY).any()


def test_progress_is_a_line_a_benchmark_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown(2) as shown:
        shown.begin("latency")
        shown.point("blocks", 0, 3)
        shown.begin("idle")
    assert capsys.readouterr().err == "measuring: latency ...\nmeasuring: idle ...\n"


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.shown(2) as shown:
        shown.begin("latency")
        shown.point("blocks", 0, 3)
    assert "measuring" not in capsys.readouterr().err


def test_tiny_and_quick_are_smaller() -> None:
    full, quick, tiny = (dataclasses.asdict(SIZES[name]) for name in ("full", "quick", "tiny"))
    for name, most in full.items():
        if isinstance(most, int | float):
            assert tiny[name] <= quick[name] <= most, name


def test_every_subcommand_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in [*(choice.name for choice in suite.CHOICES), "gpu", "report"]:
        with pytest.raises(SystemExit) as ended:
            run(name, "--help")
        assert ended.value.code == 0
        assert f"kvpush bench {name}" in capsys.readouterr().out
