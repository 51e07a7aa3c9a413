"""Fixtures of the tests with real processes, which are all marked as such."""

from __future__ import annotations

from pathlib import Path

import peers
import pytest

HERE = Path(__file__).parent


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
