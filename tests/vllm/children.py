"""The parent's end of ``engine.py``: starts engines as processes, asks them for tokens, looks at their block pools."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S = 400.0  # importing vLLM takes most of a minute of one core
ANSWER_S = 90.0


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to everybody who asks for any."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def kv_config(role: str, engine_id: str, port: int = 0, **changes: Any) -> dict[str, Any]:
    """``--kv-transfer-config`` of an engine with kvpush. Names with ``kv_`` are vLLM's, the rest are kvpush's."""
    extra = {"listen": f"127.0.0.1:{port}"} | {k: v for k, v in changes.items() if not k.startswith("kv_")}
    return {
        "kv_connector": "KvPushConnector",
        "kv_connector_module_path": "kvpush.integrations.vllm",
        "kv_role": f"kv_{role}",
        "engine_id": engine_id,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra,
    } | {k: v for k, v in changes.items() if k.startswith("kv_")}


def built_in_config(role: str, engine_id: str, connector: str, **extra: Any) -> dict[str, Any]:
    """The same with one of vLLM's own connectors; where it listens is said in the environment."""
    return {
        "kv_connector": connector,
        "kv_role": f"kv_{role}",
        "engine_id": engine_id,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra,
    }


class ForkedProcess:
    """An engine that a :class:`Nursery` has forked: the part of ``subprocess.Popen`` that is used of it."""

    def __init__(self, door: Path, wanted: dict[str, Any]) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(door))
        self.stdin = self._connection.makefile("w", buffering=1)
        self.stdout = self._connection.makefile("r")
        self.stdin.write(json.dumps(wanted) + "\n")
        self.stdin.flush()
        self.pid = int(json.loads(self.stdout.readline())["pid"])
        self._handle = os.pidfd_open(self.pid)

    def _has_ended(self, timeout_s: float) -> bool:
        return bool(select.select([self._handle], [], [], timeout_s)[0])

    def poll(self) -> int | None:
        """Not ``None`` once it has ended; with what code, its parent knows."""
        return -1 if self._has_ended(0) else None

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> None:
        if not self._has_ended(timeout_s):
            raise subprocess.TimeoutExpired("an engine of the nursery", timeout_s)

    def end_of_commands(self) -> None:
        """It sees the end of its standard input, and may still answer."""
        self.stdin.close()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def release(self) -> None:
        """What this side holds of it."""
        self._connection.close()
        os.close(self._handle)


class Nursery:
    """A process that forks engines; see ``nursery.py``."""

    def __init__(self, directory: Path) -> None:
        self._door, log = directory / "door", directory / "nursery.log"
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("nursery.py")), str(self._door)],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {"PYTHONPATH": _python_path()},
            )
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], START_S)
        if not readable or not self._process.stdout.readline():
            self.close()
            raise AssertionError(f"the nursery does not open:\n{log.read_text()[-3000:]}")

    def fork(self, options: dict[str, Any], environ: dict[str, str], log: Path) -> ForkedProcess:
        return ForkedProcess(self._door, {"options": options, "environ": environ, "log": str(log)})

    def close(self) -> None:
        """The engines that it has forked live on."""
        self._process.kill()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))


# The data goes over TCP, and no socket's buffer swallows it whole: so a WRITE to a frozen engine stays unfinished, as
# it would between two machines.
OVER_TCP = {"UCX_TLS": "tcp", "UCX_TCP_SNDBUF": "64k", "UCX_TCP_RCVBUF": "64k"}


class EngineProcess:
    """One engine. Requests are asked for with :meth:`ask` and waited for with :meth:`result`."""

    def __init__(
        self,
        model: Path,
        log: Path,
        kv: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        nursery: Nursery | None = None,
        **options: Any,
    ) -> None:
        engine_options = {"model": str(model)} | options | ({"kv_transfer_config": kv} if kv else {})
        self.log = log
        self.process: subprocess.Popen[str] | ForkedProcess
        if nursery is not None:
            self.process = nursery.fork(engine_options, environ or {}, log)
        else:
            with log.open("a") as errors:
                self.process = subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("engine.py")), json.dumps(engine_options)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    bufsize=1,
                    env=os.environ | {"PYTHONPATH": _python_path()} | (environ or {}),
                )
        self._changed = threading.Condition()
        self._outputs: dict[str, dict[str, Any]] = {}
        self._answers: dict[str, dict[str, Any]] = {}
        self._is_over = False
        threading.Thread(target=self._read, name=f"reader of {log.name}", daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer = json.loads(line)
                with self._changed:
                    if answer["event"] == "output":
                        first = self._outputs.get(answer["id"], answer)
                        answer["first_at_s"] = first.get("first_at_s", answer["at_s"])
                        self._outputs[answer["id"]] = answer
                    else:
                        self._answers[answer["event"]] = answer
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _wait(self, what: str, ready: Any, timeout_s: float) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: ready() is not None or self._is_over, timeout_s)
            found = ready()
        if found is None:
            state = f"has ended with {self.process.poll()}" if self._is_over else f"is silent for {timeout_s:g} s"
            raise AssertionError(f"{what}: {self.log.name} {state}:\n{self.log.read_text()[-3000:]}")
        return found

    def _send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def call(self, op: str, event: str, timeout_s: float = ANSWER_S, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        with self._changed:
            self._answers.pop(event, None)
        self._send(op=op, **command)
        return dict(self._wait(op, lambda: self._answers.get(event), timeout_s))

    def started(self) -> EngineProcess:
        """Wait until it is ready."""
        self._wait("start", lambda: self._answers.get("ready"), START_S)
        return self

    def ask(self, request_id: str, prompt: list[int], num_tokens: int, kv: dict[str, Any] | None = None) -> None:
        """Ask for tokens; see :meth:`result`. A name may be used again."""
        with self._changed:
            self._outputs.pop(request_id, None)
        self._send(op="generate", id=request_id, prompt=prompt, max_tokens=num_tokens, kv=kv)

    def result(self, request_id: str, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """The last output of a request, once it has finished."""

        def finished() -> dict[str, Any] | None:
            output = self._outputs.get(request_id)
            return output if output is not None and output["finished"] else None

        return dict(self._wait(f"request {request_id}", finished, timeout_s))

    def generate(
        self, request_id: str, prompt: list[int], num_tokens: int, kv: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Ask and wait."""
        self.ask(request_id, prompt, num_tokens, kv)
        return self.result(request_id)

    def abort(self, request_id: str) -> None:
        """As a client that hangs up."""
        self._send(op="abort", id=request_id)

    def abort_in_time(self, request_id: str) -> bool:
        """The same. Whether the engine still had the request."""
        return bool(self.call("abort", f"aborted {request_id}", id=request_id)["was_here"])

    def preempt(self, request_id: str, at_tokens: int) -> None:
        """Have a request lose its blocks once it has computed so many tokens. Asked for before the request."""
        with self._changed:
            self._answers.pop("preempted", None)
        self.call("preempt", "preempting", id=request_id, at_tokens=at_tokens)

    def was_preempted(self) -> None:
        """Wait until it has happened."""
        self._wait("preempt", lambda: self._answers.get("preempted"), ANSWER_S)

    def free_blocks(self) -> int:
        """How many blocks nobody uses."""
        return int(self.call("free", "free")["blocks"])

    def wait_for_free_blocks(self, num_blocks: int, timeout_s: float = 30.0) -> float:
        """Seconds until so many are free."""
        started_s = time.monotonic()
        while (free := self.free_blocks()) != num_blocks:
            if time.monotonic() - started_s > timeout_s:
                raise AssertionError(f"{self.log.name}: {free} blocks are free, not {num_blocks}, after {timeout_s} s")
        return time.monotonic() - started_s

    def wait_for_stats(self, side: str, ready: Any, what: str, timeout_s: float = 30.0) -> dict[str, int]:
        """The library's numbers as soon as ``ready`` says yes to them."""
        give_up_s = time.monotonic() + timeout_s
        while not ready(stats := self.stats(side)["stats"]):
            if time.monotonic() > give_up_s:
                raise AssertionError(f"{self.log.name}: after {timeout_s} s not yet: {what}; {stats}")
        return dict(stats)

    def num_descriptors(self) -> int:
        """How many the process has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def forget(self) -> None:
        """Empty the prefix cache."""
        self.call("forget", "forgotten")

    def stats(self, side: str) -> dict[str, Any]:
        """The library's own numbers."""
        return dict(self.call("stats", "stats")[side])

    def signal(self, number: signal.Signals) -> None:
        """Freeze, wake or kill it."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait(30)

    def close(self) -> None:
        """In order, if it still can."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            if isinstance(self.process, ForkedProcess):
                self.process.end_of_commands()
            else:
                self.process.stdin.close()
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        assert self.process.stdout is not None
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, 10)
        self.process.stdout.close()
        if isinstance(self.process, ForkedProcess):
            self.process.release()
