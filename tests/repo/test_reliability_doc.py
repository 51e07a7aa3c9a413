"""docs/reliability.md claims only what a test shows: every fault it names has one, and every scenario is in it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reliability.md"

# liveness, concurrency, failure, restart and scale, leaks
SCENARIOS = {
    "B": (1, 2, 3, 4, 5, 8, 9, 10, 14),
    "C": (1, 2, 3, 4, 6, 7, 8, 11, 13),
    "E": (1, 2, 3, 4, 6, 7, 8, 9, 10, 14, 15, 16, 18, 20),
    "F": (1, 2, 3, 5, 7, 9),
    "G": (1, 2, 4, 6, 9),
}
IDS = [f"{group}{number}" for group, numbers in SCENARIOS.items() for number in numbers]

NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NAMED_FILE = re.compile(r"\btests/[\w/]+\.py")


def rows(section):
    """The cells of every row of a section's tables, headings left out."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells for before, cells in zip([None, *found], found, strict=False) if before and not is_ruler(cells)]


def is_ruler(cells):
    return all(set(cell) <= {"-"} for cell in cells)


@cache
def functions_in(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED_TEST.findall(PAGE.read_text()))))
def test_every_test_it_names_exists(path, name):
    assert (ROOT / path).exists(), f"{PAGE.name} names {path}"
    assert name.startswith("test_") and name in functions_in(path), f"{PAGE.name} names {path}::{name}"


def test_every_file_it_names_exists():
    missing = [path for path in NAMED_FILE.findall(PAGE.read_text()) if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("section", ["Fault by fault", "Limits"])
def test_every_fault_is_shown_by_a_test(section):
    found = rows(section)
    assert len(found) > 10
    for cells in found:
        assert NAMED_TEST.search(cells[-1]), f"no test shows {cells[0]!r}"


def test_every_scenario_is_shown_by_a_test_or_explained():
    explained = {cells[0]: cells[-1] for cells in rows("Scenario by scenario")}
    assert list(explained) == IDS
    for scenario, how in explained.items():
        assert NAMED_TEST.search(how), f"{scenario}: {how!r}"


def test_every_row_has_all_its_cells():
    for section, width in (("Fault by fault", 7), ("Limits", 4), ("Scenario by scenario", 3)):
        assert {len(cells) for cells in rows(section)} == {width}, section
