"""What ``import kvpush`` offers: a sorted list, nothing more, and a docstring for every name."""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata as metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvpush

PUBLIC = [name for name in kvpush.__all__ if name != "__version__"]


def test_all_is_sorted_and_complete():
    assert sorted(kvpush.__all__) == kvpush.__all__
    assert len(set(kvpush.__all__)) == len(kvpush.__all__)
    offered = {name for name in dir(kvpush) if getattr(getattr(kvpush, name), "__module__", "").startswith("kvpush.")}
    assert offered == set(PUBLIC)


def test_importing_kvpush_loads_neither_torch_nor_nixl():
    program = "import sys, kvpush; sys.exit(any(name in sys.modules for name in ('torch', 'nixl')))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_says_what_it_is(name):
    value = getattr(kvpush, name)
    assert inspect.getdoc(value), f"kvpush.{name} has no docstring"
    assert value.__doc__ is not None and not value.__doc__.startswith(f"{name}("), f"{name}'s docstring is generated"


# an enum's members are explained beside their values
CLASSES = [
    name
    for name in PUBLIC
    if inspect.isclass(getattr(kvpush, name)) and not isinstance(getattr(kvpush, name), enum.EnumType)
]


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_says_what_it_does(name):
    owner = getattr(kvpush, name)
    silent = [
        attribute
        for attribute, value in inspect.getmembers(owner)
        if not attribute.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property))
        and not inspect.getdoc(value)
    ]
    assert not silent


def test_the_version_is_the_distribution_s():
    try:
        installed = metadata.version("kvpush")
    except metadata.PackageNotFoundError:
        pytest.skip("kvpush is imported from its source, without an installation")
    assert kvpush.__version__ == installed


def test_importing_it_starts_nothing():
    """No thread, no socket, nothing on stdout: an import is free of side effects."""
    code = (
        "import threading, os; import kvpush; "
        "assert threading.active_count() == 1, threading.enumerate(); "
        "sockets = [f for f in os.listdir('/proc/self/fd') "
        "if os.path.exists(f'/proc/self/fd/{f}') and 'socket' in os.readlink(f'/proc/self/fd/{f}')]; "
        "assert not sockets, sockets"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


NAMES_PAGE = Path(__file__).parents[2] / "docs/public-names.md"


def summary_of(name):
    """The first paragraph of its docstring, as a cell of a table, without the markup that only Sphinx reads."""
    text = " ".join(inspect.getdoc(getattr(kvpush, name)).partition("\n\n")[0].split())
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    return text.replace("|", "\\|")


def test_the_page_of_public_names_lists_each_with_its_summary():
    rows = "\n".join(f"| `{name}` | {summary_of(name)} |" for name in PUBLIC)
    assert rows in NAMES_PAGE.read_text(), f"{NAMES_PAGE.name} is not current; its rows:\n{rows}"


GIVEN_BY_THE_CALLER = {"Config", "KVCacheSpec", "KVGroup"}
RECORDS = [name for name in PUBLIC if dataclasses.is_dataclass(getattr(kvpush, name))]


def fields_of(name):
    return [field.name for field in dataclasses.fields(getattr(kvpush, name))]


def table_below(heading):
    """First cell -> the names in backticks of each further cell."""
    section = NAMES_PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {first.strip(" `"): [re.findall(r"`(\w+)`", cell) for cell in rest] for first, *rest in rows}


def test_the_page_of_public_names_lists_the_fields_of_what_callers_are_given():
    expected = {name: [fields_of(name)] for name in RECORDS if name not in GIVEN_BY_THE_CALLER}
    assert table_below("Fields") == expected


@pytest.mark.parametrize("name", [name for name in RECORDS if name != "Config"])
def test_a_docstring_says_what_each_field_is(name):
    text = inspect.getdoc(getattr(kvpush, name)) or ""
    said = set(re.findall(r"``(\w+)``|:attr:`(\w+)`", text))
    named = {one or other for one, other in said}
    assert [field for field in fields_of(name) if field not in named] == OBVIOUS.get(name, [])


OBVIOUS = {"KVCacheSpec": ["tp_rank", "pp_rank", "pp_size"], "KVGroup": ["name", "layers"]}


def test_the_page_of_public_names_lists_every_call_and_attribute():
    rows = table_below("Calls and attributes")
    assert rows.keys() == {"PrefillPusher", "DecodeReceiver"}
    for name, (calls, attributes) in rows.items():
        owner = getattr(kvpush, name)
        public = {each for each, _ in inspect.getmembers(owner, callable) if not each.startswith("_")}
        assert set(calls) == public
        assert len(calls) == len(public)
        assert attributes == re.findall(r":attr:`(\w+)`", inspect.getdoc(owner).split("Attributes:")[1])
        assert all(re.search(rf"^\s+self\.{each}\b.* = ", source_of(owner), re.MULTILINE) for each in attributes)


def source_of(owner):
    """Of the class and its own bases."""
    return "\n".join(inspect.getsource(each) for each in owner.__mro__ if each.__module__.startswith("kvpush."))
