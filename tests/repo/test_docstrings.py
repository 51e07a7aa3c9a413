"""Every public name says what it is, and every public call says what it raises. Walks the syntax trees."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import kvpush
import kvpush.testing

ROOT = Path(__file__).parents[2]
PACKAGES = (kvpush, kvpush.testing)


def public_classes_and_functions():
    """(dotted name, definition) of everything in the ``__all__`` of the public packages, and of their public bases."""
    found = {}
    for package in PACKAGES:
        for name in package.__all__:
            value = getattr(package, name)
            owners = value.__mro__ if inspect.isclass(value) else [value]
            for owner in owners:
                module = getattr(owner, "__module__", "")
                if module.startswith("kvpush."):
                    found[f"{module}.{owner.__name__}"] = definition_of(module, owner.__name__)
    return found


def definition_of(module, name):
    tree = ast.parse(Path(importlib.import_module(module).__file__).read_text())
    kinds = ast.ClassDef | ast.FunctionDef
    return next(node for node in tree.body if isinstance(node, kinds) and node.name == name)


# What these do, and what they raise, is said where it is stated for all of them: implementation -> contract.
CONTRACTS = {"kvpush.testing.fake_transport.FakeTransport": "kvpush.transport.Transport"}
# Verbs of the public classes, played by the world on their behalf: its module says so once.
PLAYED = "kvpush.testing.world."

DEFINITIONS = {
    name: node for name, node in sorted(public_classes_and_functions().items()) if not name.startswith(PLAYED)
}


def contract_of(name):
    """The text that speaks for an implementation, and the calls that it describes."""
    module, _, owner = CONTRACTS[name].rpartition(".")
    tree = ast.parse(Path(importlib.import_module(module).__file__).read_text())
    node = definition_of(module, owner)
    texts = [ast.get_docstring(each) or "" for each in (tree, node, *public_calls(node))]
    return "\n".join(texts), {call.name for call in public_calls(node) if ast.get_docstring(call)}


def public_calls(node):
    """The function itself, or the public methods and properties of the class, and its constructor."""
    if isinstance(node, ast.FunctionDef):
        return [node]
    members = [member for member in node.body if isinstance(member, ast.FunctionDef)]
    return [m for m in members if not m.name.startswith("_") or m.name == "__init__"]


def is_small(call):
    """A property of one line whose name says it all, or a method that only raises or returns what it was given."""
    return any(getattr(decorator, "id", "") == "property" for decorator in call.decorator_list) and len(call.body) == 1


# helper: what it raises for its caller
CHECKS = {
    "check_open": "Closed",
    "check_room": "QueueFull",
    "check_id": "UsageError",
    "check_engine_id": "UsageError",
    "check_block_ids": "UsageError",
    "check_position": "UsageError",
    "check_timeout": "UsageError",
}


def raised_in(call):
    """The errors that the body raises by name, or has a check raise."""
    for node in ast.walk(call):
        if isinstance(node, ast.Call) and (checked := ast.unparse(node.func).rpartition(".")[2]) in CHECKS:
            yield CHECKS[checked]
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            made = ast.unparse(node.exc.func)
            if made[0].isupper():  # not a function that makes the error
                yield made


def silent(node, described=frozenset()):
    return [
        call.name
        for call in public_calls(node)
        if call.name not in ("__init__", *described) and not ast.get_docstring(call) and not is_small(call)
    ]


def unsaid_errors(node, about_all=""):
    about_all += ast.get_docstring(node) or ""
    return [
        f"{call.name} raises {error}"
        for call in public_calls(node)
        for error in raised_in(call)
        if error not in about_all + (ast.get_docstring(call) or "")
    ]


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_public_name_and_call_has_a_summary(name):
    node = DEFINITIONS[name]
    summary = (ast.get_docstring(node) or "").partition("\n\n")[0]
    assert summary.rstrip().endswith((".", ":", "``", "?")), f"{name}: a docstring begins with a sentence: {summary!r}"
    described = contract_of(name)[1] if name in CONTRACTS else frozenset()
    assert not silent(node, described), f"{name}: no docstring: {silent(node, described)}"


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_public_call_says_what_it_raises(name):
    about_all = contract_of(name)[0] if name in CONTRACTS else ""
    assert not unsaid_errors(DEFINITIONS[name], about_all)


def test_the_checks_would_see_it():
    source = '''
class Thing:
    """A thing. Raises KeyError."""

    def said(self):
        """Fine. Raises :class:`ValueError`."""
        raise ValueError("x")

    def known(self):
        """Fine."""
        raise KeyError("x")

    def unsaid(self):
        """Not fine."""
        raise TypeError("x")

    def silent(self):
        return 1
'''
    (node,) = ast.parse(source).body
    assert unsaid_errors(node) == ["unsaid raises TypeError"]
    assert silent(node) == ["silent"]
