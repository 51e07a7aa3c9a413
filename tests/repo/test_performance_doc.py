"""docs/performance.md says what was measured: it is made from the JSON of one run, and explains every missed budget."""

from __future__ import annotations

import re
from pathlib import Path

from kvpush.cli.bench import page
from kvpush.cli.bench.report import Report

DOCS = Path(__file__).parents[2] / "docs"
RUN = DOCS / "performance.json"
TEMPLATE = DOCS / "performance.md.in"


def test_the_page_is_made_from_the_run_beside_it() -> None:
    made = page.fill(TEMPLATE.read_text(encoding="utf-8"), Report.load(RUN))
    assert (DOCS / "performance.md").read_text(encoding="utf-8") == made, "run: make performance-page"


def test_every_missed_budget_is_explained() -> None:
    missed = {figure.budget for figure in Report.load(RUN).figures if figure.is_met is False}
    explained = set(re.findall(r"^\| `([\w-]+)` \| .{40,} \|$", TEMPLATE.read_text(encoding="utf-8"), re.MULTILINE))
    assert missed <= explained, f"performance.md.in does not say why {missed - explained} were missed"


def test_the_run_has_every_benchmark() -> None:
    from kvpush.cli.bench import suite

    assert list(Report.load(RUN).groups()) == [benchmark.name for benchmark in suite.BENCHMARKS]
