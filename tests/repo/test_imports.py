"""Imports point one way, each heavy dependency has one door, and nothing that runs foreign code gets in.

All checks walk the syntax tree: a module need not be importable here, and an import inside a function counts too.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvpush"
TESTS = ROOT / "tests"

# A module may import what stands above it. A directory is one entry: its modules may import each other. ``kvpush`` is
# the package's own __init__.py.
ORDER = [
    "errors",
    "config",
    "events",
    "timers",
    "tombstones",
    "arrivals",
    "namesakes",
    "rarely",
    "endpoint",
    "parallel",
    "wire",
    "strided",
    "layout",
    "blocks",
    "placement",
    "terms",
    "rows",
    "plan",
    "metadata",
    "identity",
    "lifecycle",
    "registry",
    "pushes",
    "links",
    "chunks",
    "prefill_effects",
    "writes",
    "lines",
    "registrations",
    "endings",
    "prefill",
    "receives",
    "decode_effects",
    "needs",
    "decode",
    "transport",
    "peer",
    "nixl_transport",
    "link",
    "probe",
    "loop",
    "side",
    "pusher",
    "receiver",
    "statecharts",
    "metrics",
    "kvpush",
    "testing",
    "cli",
    "integrations",
    "__main__",
]

# dependency: the modules that may import it; a trailing dot stands for everything below
DOORS = {
    "nixl": ("nixl_transport", "cli.bench."),  # the bench compares with a loop that uses nothing but NIXL
    "transitions": ("lifecycle",),
    "zmq": ("link", "loop", "pusher", "receiver"),
}

# What can run code that came over the network, or out of a file: scenario j3.
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "yaml"}
FORBIDDEN_NAMES = {"eval", "exec"}
FORBIDDEN_ATTRIBUTES = {"recv_pyobj", "send_pyobj"}
FORBIDDEN_QUALIFIED = {("yaml", "load"), ("torch", "load"), ("torch", "save")}
FORBIDDEN_KEYWORDS = {"allow_pickle"}

# test file, relative to tests/: why it cannot do without
SLEEPERS = {
    "threads/test_held_lock.py": "wraps it, to see that the loops do not call it under the registry's lock",
    "side_by_side/peer_kvpush.py": "no test but a measurement: waits for a registration without taking a CPU",
    "side_by_side/peer_vllm.py": "no test but a measurement: waits for a registration without taking a CPU",
    "side_by_side/run.py": "no test but a measurement: lets the reader's thread reach its wait",
    "vllm/engine.py": "is vLLM's own busy loop, which sleeps after a step that ran no model",
    "vllm/measure/faults_beside_built_in.py": "gives a connector that cannot be asked time to register; no test",
    "vllm/measure/handover.py": "measures what an idle engine costs; no test",
    "processes/peers.py": "until() asks real processes again and again, with a deadline; no fake clock reaches them",
}


@cache
def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path):
    """``cli.bench.report`` for kvpush/cli/bench/report.py; ``kvpush`` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "kvpush"


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(tree):
    """Every dotted name that the module imports, and the members that it takes from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide where they point"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__", "find_spec"):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def called_name(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def own_imports(tree):
    """The entries of ORDER that a module leans on. A name that is no module comes from kvpush/__init__.py."""
    for name in imported(tree):
        top, _, rest = name.partition(".")
        if top == "kvpush":
            entry = rest.split(".")[0]
            yield entry if entry in ENTRIES else "kvpush"


def entry_of(module):
    return module.split(".")[0]


ENTRIES = {entry_of(module) for module in MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_place(module):
    assert entry_of(module) in ORDER, (
        f"kvpush/{entry_of(module)} is new: put it into ORDER in {Path(__file__).name}, below all that it imports"
    )


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    entry = entry_of(module)
    if entry not in ORDER:
        pytest.skip("test_every_module_has_its_place says so")
    above = {*ORDER[: ORDER.index(entry)], entry}
    wrong = {name for name in own_imports(parse(MODULES[module])) if name in ORDER and name not in above}
    assert not wrong, f"{module} imports {', '.join(sorted(wrong))}, which stand below it in ORDER"


def test_order_names_each_entry_once():
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("dependency", DOORS)
def test_each_heavy_dependency_has_its_doors(dependency):
    importers = {
        module
        for module, path in MODULES.items()
        if any(
            name.split(".")[0] in (dependency, f"{dependency}_cu12", f"{dependency}_cu13")
            for name in imported(parse(path))
        )
    }
    strangers = {module for module in importers if not may_import(module, dependency)}
    assert not strangers, f"only {', '.join(DOORS[dependency])} may import {dependency}"


def may_import(module, dependency):
    return any(module == door or (door.endswith(".") and f"{module}.".startswith(door)) for door in DOORS[dependency])


@pytest.mark.parametrize("module", MODULES)
def test_j3_nothing_runs_what_came_over_the_network(module):
    tree = parse(MODULES[module])
    found = {name for name in imported(tree) if FORBIDDEN_IMPORTS & set(name.split("."))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            owner = getattr(node.value, "id", "")
            if node.attr in FORBIDDEN_ATTRIBUTES or (owner, node.attr) in FORBIDDEN_QUALIFIED:
                found.add(f"{owner}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg in FORBIDDEN_KEYWORDS:
            found.add(node.arg)
    assert not found, f"{module} uses {', '.join(sorted(found))}"


SLEEPING = ("time", "asyncio")


def sleeps(tree):
    """Lines that call ``time.sleep`` or ``asyncio.sleep``, under whatever name, or wait for an event nobody can set."""
    modules, functions = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name in SLEEPING}
        elif isinstance(node, ast.ImportFrom) and node.module in SLEEPING:
            functions |= {alias.asname or alias.name for alias in node.names if alias.name == "sleep"}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Event().wait"):
            yield node.lineno
    for node in ast.walk(tree):
        is_method = (
            isinstance(node, ast.Attribute) and node.attr == "sleep" and getattr(node.value, "id", "") in modules
        )
        if is_method or (isinstance(node, ast.Name) and node.id in functions):
            yield node.lineno


def test_no_test_sleeps():
    """A test that sleeps is slow on a good day and flaky on a bad one: wait for the event, or move a fake clock."""
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        lines = list(sleeps(parse(path)))
        if lines:
            found[path.relative_to(TESTS).as_posix()] = lines
    new = {name: lines for name, lines in found.items() if name not in SLEEPERS}
    assert not new, f"time.sleep in {new}: wait for the event, or say in SLEEPERS why that cannot be"
    assert all(name in found for name in SLEEPERS if (TESTS / name).exists()), (
        "SLEEPERS names a file that sleeps no more"
    )


def test_the_sleep_check_would_see_one():
    assert list(sleeps(ast.parse("import time\ntime.sleep(1)"))) == [2]
    assert list(sleeps(ast.parse("import time as t\nt.sleep(1)"))) == [2]
    assert list(sleeps(ast.parse("from time import sleep as nap\nnap(1)"))) == [2]
    assert list(sleeps(ast.parse("import asyncio\nasyncio.sleep(1)"))) == [2]
    assert list(sleeps(ast.parse("import threading\nthreading.Event().wait(1)"))) == [2]
    assert list(sleeps(ast.parse("import zzz\nzzz.sleep(1)"))) == []


def test_the_import_check_would_see_them():
    source = "import a.b\nfrom kvpush import wire, PrefillPusher\ndef f():\n    from kvpush.errors import Failure\n"
    assert list(imported(ast.parse(source))) == ["a.b", "kvpush.wire", "kvpush.PrefillPusher", "kvpush.errors.Failure"]
    assert list(own_imports(ast.parse(source))) == ["wire", "kvpush", "errors"]
    assert list(imported(ast.parse('importlib.import_module("nixl._api")'))) == ["nixl._api"]
