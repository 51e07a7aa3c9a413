"""One process, real NIXL, the public API. The memory and the event book-keeping are those of the process tests."""

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
            item.add_marker(pytest.mark.nixl)


@pytest.fixture
def pair():
    """A prefill and a decode side with default settings."""
    with peers.Prefill() as prefill, peers.Decode() as decode:
        yield prefill, decode
