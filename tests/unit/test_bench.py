"""``kvpush bench push`` runs, and its report has what people and programs look for. Nothing is asserted about time."""

import argparse
import dataclasses
import json
import sys

import pytest

from kvpush.cli import bench
from kvpush.cli.bench import push
from kvpush.cli.bench.pair import Shape
from kvpush.cli.bench.report import Figure, Report, Samples

TINY = push.Sizes(
    pushes=16,
    one_block=2,
    bulk=1,
    bulk_blocks=4,
    idle_s=0.1,
    handshakes=1,
    advertised=Shape(num_layers=2, num_blocks=64, block_bytes=64),
    engines=50,
    registry_calls=20,
    crowd_rounds=1,
    crowd_engines=2,
)


def run_bench(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["push", *arguments]))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(push, "QUICK", TINY)


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_every_measurement_reports_its_figures(tiny, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert run_bench("--quick", "--plain", "--json", str(file)) == 0
    report = json.loads(file.read_text())
    assert report["machine"].keys() >= {"date", "machine", "software", "Python's speed"}
    figures = report["figures"]
    names = [figure["name"] for figure in figures]
    assert len(set(names)) == len(names)
    fields = {field.name for field in dataclasses.fields(Figure)}
    for figure in figures:
        assert figure.keys() == fields | {"ratio", "ratio_of_minima", "is_met"}
        assert figure["value"] >= 0
        assert (figure["limit"] is None) == (figure["is_met"] is None)
        assert (figure["baseline"] is None) == (figure["ratio"] is None)
    for beginning in (
        "own time to the posted WRITE, 1 block",
        "state machine's part of it, 1 block",
        "64 KiB end to end, after 50 ms",
        "64 KiB end to end, one after the other",
        "0.25 MiB in 64 KiB blocks, UCX's choice",
        "0.25 MiB in 64 KiB blocks, tcp",
        "idle CPU, prefill",
        "idle CPU, decode",
        "first push to a new engine",
        "push_posted, 50 engines",
        "one sweep tick",
        "memory per engine",
        "p99 of pushes while 2 engines connect",
    ):
        assert any(name.startswith(beginning) for name in names), beginning
    text = capsys.readouterr().out
    assert all(name in text for name in names)


def test_one_measurement_alone_as_markdown(tiny, capsys):
    assert run_bench("--quick", "--markdown", "--only", "registry") == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 5
    assert len({line.count("|") for line in table}) == 1


def test_a_limit_bounds_the_value_or_both_ratios():
    assert Figure("alone", 3.0, "s").is_met is None
    assert Figure("alone", 3.0, "s", limit=3.0).is_met is True
    assert Figure("alone", 3.0, "s", limit=2.0).verdict == "MISSED x1.50"
    quick, slow = Samples.of([1.0, 3.0, 3.0]), Samples.of([2.0, 2.0, 2.0])
    figure = Figure.against("pair", quick, "other", slow, limit=1.6)
    assert (figure.ratio, figure.ratio_of_minima, figure.is_met) == (1.5, 0.5, True)
    assert Figure.against("pair", slow, "other", quick, limit=1.6).verdict == "MISSED x1.25"  # the minima's 2x


def test_percentile_and_median_are_samples():
    samples = Samples.of(range(1, 201))
    assert (samples.minimum, samples.median, samples.p99) == (1, 100.5, 198)
    assert Samples.of([7.0]).p99 == 7.0


def test_without_rich_the_table_is_plain_text(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    report = Report("title", "command", machine={"machine": "this one"}, figures=[Figure("row", 0.00001, "s")])
    report.print_to_terminal()
    out = capsys.readouterr().out
    assert "row" in out
    assert "10 us" in out
