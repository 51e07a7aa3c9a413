"""The examples run as they stand, and are right: each checks its own result and says so with its exit code."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 100

LAST_LINES = {
    "two_processes.py": "every block is right",
    "engine_step_loop.py": "40 requests in",
    "chunked_prefill.py": "every position is right",
    "layer_by_layer.py": "every layer is right",
    "tensor_parallel.py": "every head is right",
}


def test_every_example_is_tested_and_listed():
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert files == LAST_LINES.keys()
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"[`{name}`]({name})" in listed for name in files)


@functools.cache
def run(name):
    """Each runs once, however many tests look at it."""
    return subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name],
        cwd="/",  # it needs nothing beside it
        env=os.environ | {"UCX_NET_DEVICES": "lo"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(LAST_LINES))
def test_the_example_runs(name):
    ended = run(name)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith(LAST_LINES[name])
    assert not ended.stderr


@pytest.mark.nixl
@pytest.mark.processes
def test_sigterm_ends_both_processes_in_order():
    said = run("two_processes.py").stdout.splitlines()
    assert sum(line.startswith("prefill: request") and " done" in line for line in said) == 3
    assert said.index("decode: drained and closed") < said.index("prefill: drained and closed")


@pytest.mark.parametrize("name", sorted(LAST_LINES))
def test_the_example_says_how_to_run_it_and_is_short(name):
    text = (EXAMPLES / name).read_text()
    assert f"Run it:  python examples/{name}" in text
    assert len(text.splitlines()) <= 120
