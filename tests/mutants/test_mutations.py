"""The tool itself: what it changes, what it leaves alone, and that its list of survivors is about what exists."""

from __future__ import annotations

import ast

import pytest
from mutations import mutations_of
from run import MODULES, PACKAGE, MutatedImport, explained

SOURCE = '''
"""Words."""
LIMIT = 3
Alias = tuple[str, int]


def decide(count: int, names: list[str] | None = None) -> bool:
    """More words."""
    assert count > -7, "ours"
    reason = f"{count + 1}"
    if count < LIMIT and names is not None:
        names.append("x")
        return True
    while not names:
        break
    return bool(min(count, 2))
'''


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(SOURCE)
    return path


def test_what_is_tried_is_this(path):
    assert {mutation.name.removeprefix("sample:") for mutation in mutations_of(path, "sample")} == {
        "<module>: 3 -> 4",
        "decide: count < LIMIT and names is not None -> count < LIMIT or names is not None",
        "decide: count < LIMIT and names is not None -> names is not None",
        "decide: count < LIMIT and names is not None -> count < LIMIT",
        "decide: count < LIMIT -> count <= LIMIT",
        "decide: names is not None -> names is None",
        "decide: names.append('x') -> pass",
        "decide: True -> False",
        "decide: not names -> names",
        "decide: break -> continue",
        "decide: return bool(min(count, 2)) -> return None",
        "decide: min(count, 2) -> max(count, 2)",
        "decide: 2 -> 3",
    }


def test_each_changes_one_place_and_the_file_stays_as_it_is(path):
    tree = ast.parse(SOURCE)
    for mutation in mutations_of(path, "sample"):
        changed = ast.unparse(mutation.applied(tree)).splitlines()
        differing = [pair for pair in zip(ast.unparse(tree).splitlines(), changed, strict=True) if pair[0] != pair[1]]
        assert len(differing) == 1, mutation.name
    assert path.read_text() == SOURCE


def test_the_mutated_code_takes_the_files_place(path):
    (wanted,) = [m for m in mutations_of(path, "sample") if m.name.endswith("min(count, 2) -> max(count, 2)")]
    code = compile(wanted.applied(ast.parse(SOURCE)), str(path), "exec")
    finder = MutatedImport("sample", code)
    spec = finder.find_spec("kvpush.sample", None)
    assert spec.origin == str(path)
    assert finder.find_spec("kvpush.other", None) is None
    module = type(ast)("kvpush.sample")
    finder.exec_module(module)
    assert module.LIMIT == 3


def test_every_module_has_mutations_and_every_explained_survivor_is_one_of_them():
    names = set()
    for module in MODULES:
        found = {mutation.name for mutation in mutations_of(PACKAGE / f"{module}.py", module)}
        assert found, module
        names |= found
    gone = [name for name in explained() if name not in names]
    assert not gone, f"survivors.toml explains mutations that do not exist any more: {gone}"


def test_a_mutation_goes_by_the_function_around_it(path):
    def sources():
        return {mutation.name: mutation.source for mutation in mutations_of(path, "sample")}

    before = sources()
    path.write_text(SOURCE + "\n\ndef other():\n    return 5\n")
    assert {name: source for name, source in sources().items() if "decide" in name} == {
        name: source for name, source in before.items() if "decide" in name
    }
    assert sources()["sample:<module>: 3 -> 4"] != before["sample:<module>: 3 -> 4"]
    path.write_text(SOURCE.replace("while not names", "while names"))
    assert sources()["sample:decide: 2 -> 3"] != before["sample:decide: 2 -> 3"]
