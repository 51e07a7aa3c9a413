"""Fixtures of the chaos tests. Memory, processes and event book-keeping are those of tests/processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "processes"))  # where peers.py lives

import peers  # noqa: E402


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.nixl)


@pytest.fixture
def fleet():
    """Makes processes; none outlives the test."""
    with peers.fleet() as made:
        yield made
