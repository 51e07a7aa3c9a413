"""``kvpush demo`` as a user runs it: real processes, real NIXL, a real SIGKILL; and what it does when things break."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.nixl, pytest.mark.timeout(240)]

DEMO = [sys.executable, "-m", "kvpush", "demo", "--plain"]
RUN_TIMEOUT_S = 200.0


@contextlib.contextmanager
def started(*options: str) -> Iterator[subprocess.Popen[str]]:
    """A demo that is running. It is gone at the end, and so are its engines."""
    demo = subprocess.Popen([*DEMO, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(RUN_TIMEOUT_S, demo.kill)
    watchdog.start()
    try:
        yield demo
    finally:
        watchdog.cancel()
        watchdog.join()
        demo.kill()
        demo.communicate()


def lines_until(demo: subprocess.Popen[str], text: str) -> str:
    """Its output up to the line with ``text``."""
    assert demo.stdout is not None
    seen = ""
    for line in demo.stdout:
        seen += line
        if text in line:
            return seen
    pytest.fail(f"no {text!r} in {seen}\n{demo.stderr.read() if demo.stderr else ''}")


def completed(*options: str) -> tuple[int, str, str]:
    with started(*options) as demo:
        stdout, stderr = demo.communicate()
    return demo.returncode, stdout, stderr


def engine_pids(output: str) -> dict[str, int]:
    return {engine: int(pid) for engine, pid in re.findall(r"(\w\d+): \w+ process (\d+) started", output)}


def assert_gone(pids: dict[str, int]) -> None:
    left = {engine: pid for engine, pid in pids.items() if psutil.pid_exists(pid)}
    assert not left, f"engines left behind: {left}"


def test_every_token_is_right_although_a_decode_engine_is_killed_half_way() -> None:
    code, stdout, stderr = completed("--requests", "8", "--max-new-tokens", "12")
    assert code == 0, stdout + stderr
    assert stderr == ""
    assert "kvpush demo: OK" in stdout
    assert re.search(r"requests +8 answered, 0 lost; \d sent again: r\d#2", stdout)
    assert re.search(r"tokens +96 compared with a run without disaggregation, all equal", stdout)
    assert re.search(r"canaries +0 changed; \d+ checks", stdout)
    assert re.search(r"moved +\d+\.\d MiB \(\d+ bytes\) in \d+ pushes", stdout)
    assert re.search(r"GB/s median", stdout)
    killed = re.search(r"SIGKILL to (d\d) at", stdout)
    assert killed is not None
    unwrapped = " ".join(stdout.split())
    assert re.search(rf"released it after [\d.]+ ms restart first push into the new {killed[1]} done", unwrapped)
    changes = re.findall(rf"{killed[1]} g(\d+) +(\w+) -> (\w+) +(\w+)", stdout)
    first, second = changes[0][0], changes[-1][0]
    assert changes == [
        (first, "unknown", "handshaking", "handshake_started"),
        (first, "handshaking", "connected", "handshake_succeeded"),
        (first, "connected", "stale", "peer_lost"),
        (first, "stale", "evicted", "evict"),
        (second, "unknown", "handshaking", "handshake_started"),
        (second, "handshaking", "connected", "handshake_succeeded"),
        (second, "connected", "stale", "retired"),
        (second, "stale", "evicted", "evict"),
    ]
    assert int(second) > int(first)
    assert_gone(engine_pids(stdout))


def test_one_damaged_block_is_found() -> None:
    code, stdout, _ = completed("--requests", "2", "--decodes", "1", "--no-kill", "--sabotage")
    assert code == 1
    assert "kvpush demo: FAILED, 1 problems" in stdout
    assert re.search(r"problem +r\d on d0: token \d+ of 32 is \d+, without disaggregation it is \d+", stdout)


def test_a_prompt_that_fits_no_engine_is_the_users_mistake() -> None:
    code, _, stderr = completed("--prompt", "x" * 5000, "--decodes", "1")
    assert code == 2
    assert re.fullmatch(r"kvpush: error: the prompt 'x+'\.\.\. has 5001 tokens, .*\n", stderr)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(signum: signal.Signals) -> None:
    with started("--decodes", "1", "--requests", "200") as demo:
        output = lines_until(demo, "pushed to d0")
        demo.send_signal(signum)
        stdout, stderr = demo.communicate()
    assert demo.returncode == 128 + signum
    assert stderr == f"kvpush: interrupted by {signum.name}; every engine has been stopped\n"
    assert "d0: stopped" in stdout  # it said goodbye
    assert "p0: stopped" in stdout
    assert_gone(engine_pids(output))


@pytest.mark.parametrize("engine_id", ["p0", "d0"])
def test_an_engine_that_dies_fails_the_run(engine_id: str) -> None:
    with started("--decodes", "1", "--requests", "200", "--no-kill") as demo:
        pids = engine_pids(lines_until(demo, "pushed to d0"))
        os.kill(pids[engine_id], signal.SIGKILL)
        _, stderr = demo.communicate()
    assert demo.returncode == 1
    assert f"{engine_id} (process {pids[engine_id]}) was killed by SIGKILL, and nobody had asked it to" in stderr
    assert_gone(pids)


def test_engines_end_when_the_router_is_gone() -> None:
    with started("--decodes", "1", "--requests", "200") as demo:
        pids = engine_pids(lines_until(demo, "pushed to d0"))
        engines = [psutil.Process(pid) for pid in pids.values()]
        demo.kill()
        _, alive = psutil.wait_procs(engines, timeout=30)
    assert not alive
