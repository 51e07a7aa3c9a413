"""``examples/vllm/serve.py``: one command, the ``curl`` that it prints, and its end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from children import ROOT, START_S, free_port

sys.path.insert(0, str(ROOT / "examples" / "vllm"))

pytestmark = [pytest.mark.nixl, pytest.mark.processes]


def chat(port: int) -> str:
    """What a server says to a user."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8}
    raw = json.dumps(body | {"temperature": 0}).encode()
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, raw, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as page:
        return str(json.load(page)["choices"][0]["message"]["content"])


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
        said = next(lines)
        for line in lines:
            said += line
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
        assert chat(port) == chat(port + 100)
        children = psutil.Process(example.pid).children(recursive=True)
        directory = Path(said.split("logs are in ")[1].splitlines()[0])
        assert len(children) >= 3 and directory.is_dir()
    finally:
        example.send_signal(signal.SIGTERM)
        assert example.wait(60) == 0
        example.stdout.close()
    assert not psutil.wait_procs(children, 10)[1]
    assert not directory.exists()


@pytest.fixture
def _signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize(
    ("end", "is_well"), [(True, True), (KeyboardInterrupt(), True), (False, False), (SystemExit("p0 has ended"), False)]
)
def test_the_logs_stay_if_something_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, end: Any, is_well: bool
) -> None:
    import serve

    def run(*_: object) -> bool:
        if isinstance(end, BaseException):
            raise end
        return bool(end)

    monkeypatch.setattr(serve, "run", run)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["serve.py"])
    try:
        code: Any = serve.main()
    except SystemExit as exc:
        code = exc.code
    assert (code == 0) == is_well
    left = list(tmp_path.iterdir())
    assert len(left) == (not is_well)
    assert all(str(directory) in capsys.readouterr().err for directory in left)
