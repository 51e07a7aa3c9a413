"""The documentation claims only what the code does: its code runs, its tables are the code's, its links lead on."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from kvpush import Config, FailureCode
from kvpush.metrics import GAUGES

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


@pytest.mark.nixl
def test_the_readme_s_code_runs() -> None:
    blocks = FENCE.findall((ROOT / "README.md").read_text())
    assert blocks, "the README shows how the library is used"
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.nixl
def test_the_guide_s_code_runs_from_top_to_bottom() -> None:
    blocks = FENCE.findall((ROOT / "docs/guide.md").read_text())
    assert len(blocks) > 3
    exec(compile("\n".join(blocks), "guide.md", "exec"), {"__name__": "guide"})


def test_an_engine_in_the_world_is_driven_as_the_page_says() -> None:
    (block,) = FENCE.findall((ROOT / "docs/testing.md").read_text())
    namespace = {"__name__": "testing"}
    exec(compile(block, "testing.md", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|\w+\.(?:py|md|toml))`")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:::(\w+))?`")
TARGET = re.compile(r"(?:^|`|[A-Z_]+=\S+ )make ([\w-]+)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_tests_and_commands_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    places = (ROOT, ROOT / "kvpush", page.parent)
    named = [name for name in FILE.findall(text) if not name.startswith(".venv/")]  # which `make` installs
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    for path, *names in TEST.findall(text):
        source = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        missing += [f"{path}::{name}" for name in names if name and not re.search(rf"(def|class) {name}\b", source)]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    missing += [f"make {name}" for name in TARGET.findall(text) if name not in targets]
    assert not missing, f"{page.relative_to(ROOT)} names {missing}, which do not exist"


def test_i5_every_setting_is_documented_with_its_default() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (?:`([^`]*)`)? ?\| (.+) \|$", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE
    )
    documented = {name: default for name, default, _ in rows}
    actual = {
        field.name: field.default if isinstance(field.default, str) else repr(field.default)
        for field in dataclasses.fields(Config)
    }
    assert documented == actual


def counted_keys() -> set[str]:
    """Every key that a counter of the package can have, ``<name>`` in place of what is filled in."""
    keys = set()
    for path in (ROOT / "kvpush").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("counters"):
                keys.add(re.sub(r"\{[^}]*?(\w+)\}", r"<\1>", ast.unparse(node.slice).removeprefix("f").strip("'\"")))
    return keys


def test_i5_every_key_of_stats_is_documented() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    table = page[page.index("## `stats()`") : page.index("## Prometheus")]
    documented = re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    assert len(documented) == len(set(documented))
    assert set(documented) == counted_keys() | GAUGES.keys() | {"internal_errors"}


def test_i5_modules_named_by_the_architecture_page_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`(\w+\.py)`", text))
    actual = {path.name for path in (ROOT / "kvpush").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert named == actual


def test_every_failure_code_has_its_row() -> None:
    """In the enum's order, so that a new code finds its place; a code that is no more is seen, too."""
    rows = re.findall(r"^\| `(\w+)` \|(.+)\|$", (ROOT / "docs/failure-codes.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [code.value for code in FailureCode]
    assert all(cell.strip() for _, cells in rows for cell in cells.split("|")), "a cell is empty"
    assert all(cells.count("|") == 3 for _, cells in rows)


def test_every_metric_to_alert_on_exists() -> None:
    page = (ROOT / "docs/observability.md").read_text()
    named = re.findall(r"`kvpush_(\w+(?:<\w+>\w*)?)`", page[page.index("### What to alert on") :])
    assert len(named) > 10
    counters = [re.sub(r"<\w+>", r"\\S+", key) for key in counted_keys() | {"internal_errors"}]
    for name in named:
        is_gauge = name in GAUGES or name == "healthy"
        assert is_gauge or any(re.fullmatch(f"{counter}_total", name) for counter in counters), name
