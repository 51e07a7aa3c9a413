"""``examples/vllm/serve.py``: one command, and the ``curl`` that it prints."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from children import ROOT, START_S, free_port

pytestmark = [pytest.mark.nixl, pytest.mark.processes]


def test_the_curl_that_it_prints_answers_with_the_right_text(tmp_path: Path) -> None:
    assert shutil.which("curl"), "curl is not installed"
    command = [sys.executable, str(ROOT / "examples" / "vllm" / "serve.py")]
    port = free_port()  # of the proxy; the servers take those one, two and three hundred above
    with (tmp_path / "errors").open("w") as errors:
        example = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    try:
        assert example.stdout is not None
        give_up = threading.Timer(2 * START_S, example.kill)
        give_up.start()
        lines = iter(example.stdout.readline, "")
        for line in lines:
            if line.startswith("ready"):
                break
        curl = shlex.split(next(lines))
        give_up.cancel()
        assert curl[0] == "curl"
        together = subprocess.run([*curl, "--silent"], check=True, capture_output=True, text=True, timeout=60).stdout
        curl[1] = curl[1].replace(f":{port}/", f":{port + 100}/")
        alone = subprocess.run([*curl, "--silent"], check=True, capture_output=True, text=True, timeout=60).stdout
        answers = [json.loads(answer) for answer in (together, alone)]
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
        assert answers[0]["usage"]["completion_tokens"] == 12
    finally:
        example.send_signal(signal.SIGINT)
        assert example.wait(60) == 0
        example.stdout.close()
