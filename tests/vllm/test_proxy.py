"""``examples/vllm/proxy.py`` in front of servers that only pretend: what it sends, and what it does when they fail."""

from __future__ import annotations

import http.client
import json
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from children import ROOT, free_port

pytestmark = pytest.mark.processes

PATIENCE_S = 60.0
BOTH = pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
BAD = {"error": {"message": "no such model", "code": 404}}


class Server(ThreadingHTTPServer):
    """Answers as it is told, and remembers what it was asked and who hung up."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.forget()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *request: Any) -> None:
        """A proxy that hangs up is no error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(*request)

    def forget(self) -> None:
        """Answer well from here on."""
        self.behaviour = "answer"
        self.asked: list[dict[str, Any]] = []
        self.begun, self.left = threading.Event(), threading.Event()
        self.is_after: Server | None = None  # which has to have begun


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._say(200, {"data": [{"id": "tiny"}], "path": self.path})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if not raw:
            return  # the proxy hung up after the head
        self.server.asked.append(json.loads(raw))
        if self.server.is_after is not None:
            assert self.server.is_after.begun.wait(PATIENCE_S)
        if self.server.behaviour == "answer":
            self._say(200, {"text": "fine", "kv_transfer_params": {"remote_request_id": "r"}})
        elif self.server.behaviour == "refuse":
            self._say(404, BAD)
        elif self.server.behaviour == "break off":
            self.connection.shutdown(socket.SHUT_RDWR)
        else:  # wait, with a first piece sent or without
            if self.server.behaviour == "stream":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"data: first\n\n")
            self.server.begun.set()
            if select.select([self.connection], [], [], PATIENCE_S)[0]:
                self.server.left.set()

    def _say(self, status: int, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


class Proxies:
    """One process for each combination of servers."""

    def __init__(self, log: Path, prefill: Server, decode: Server) -> None:
        self.log = log
        self._servers = {"prefill": prefill.url, "decode": decode.url}
        self._found: dict[tuple[str, str], tuple[subprocess.Popen[str], int]] = {}

    def port(self, dispatch: str, missing: str = "") -> int:
        """Where one listens. ``missing``: the server that is not there."""
        if (dispatch, missing) not in self._found:
            urls = self._servers | ({missing: f"http://127.0.0.1:{free_port()}"} if missing else {})
            port = free_port()
            command = [sys.executable, str(ROOT / "examples" / "vllm" / "proxy.py"), "--port", str(port)]
            command += ["--dispatch", dispatch, "--decode", urls["decode"]]
            with self.log.open("a") as errors:
                process = subprocess.Popen(
                    [*command, "--prefill", f"{urls['prefill']},p0,127.0.0.1:5600"],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            self._found[dispatch, missing] = process, port
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == f"proxy listens on http://127.0.0.1:{port}, dispatch {dispatch}\n", self.log.read_text()
        return self._found[dispatch, missing][1]

    def close(self) -> None:
        for process, _ in self._found.values():
            process.terminate()
        for process, _ in self._found.values():
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture(scope="module")
def all_servers() -> Iterator[tuple[Server, Server]]:
    found = Server(), Server()
    yield found
    for server in found:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def proxies(all_servers: tuple[Server, Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxies]:
    found = Proxies(tmp_path_factory.mktemp("proxies") / "log", *all_servers)
    yield found
    found.close()


@pytest.fixture
def servers(all_servers: tuple[Server, Server]) -> tuple[Server, Server]:
    for server in all_servers:
        server.forget()
    return all_servers


def connect(port: int, body: Any) -> http.client.HTTPConnection:
    """A request that was sent."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def ask(port: int, **body: Any) -> tuple[int, dict[str, Any]]:
    """Status and answer."""
    connection = connect(port, {"model": "tiny", "prompt": "x"} | body)
    answer = connection.getresponse()
    found = answer.status, dict(json.load(answer))
    connection.close()
    return found


@BOTH
def test_prefill_computes_the_prompt_once(proxies: Proxies, servers: tuple[Server, Server], dispatch: str) -> None:
    prefill, decode = servers
    options = {"n": 3, "best_of": 4, "max_tokens": 9, "max_completion_tokens": 9, "min_tokens": 5}
    assert ask(proxies.port(dispatch), **options)[0] == 200
    asked = prefill.asked[0]
    assert [asked[name] for name in ("n", "best_of", "max_tokens", "max_completion_tokens")] == [1, 1, 1, 1]
    assert "min_tokens" not in asked and asked["kv_transfer_params"]["do_remote_decode"]
    assert {name: decode.asked[0][name] for name in options} == options
    kv = decode.asked[0]["kv_transfer_params"]
    if dispatch == "sequential":
        assert kv == {"remote_request_id": "r"}
    else:
        assert kv["transfer_id"] == asked["kv_transfer_params"]["transfer_id"]
        assert (kv["remote_engine_id"], kv["remote_host"], kv["remote_port"]) == ("p0", "127.0.0.1", 5600)


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]])
def test_a_list_of_prompts_goes_to_both_at_once_or_is_refused(
    proxies: Proxies, servers: tuple[Server, Server], prompt: Any
) -> None:
    status, answer = ask(proxies.port("sequential"), prompt=prompt)
    assert status == 400 and "--dispatch concurrent" in answer["error"]["message"]
    assert not servers[0].asked
    assert ask(proxies.port("concurrent"), prompt=prompt)[0] == 200


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [[1, 2]], []])
def test_one_prompt_is_no_list(proxies: Proxies, servers: tuple[Server, Server], prompt: Any) -> None:
    assert ask(proxies.port("sequential"), prompt=prompt)[0] == 200


def test_decode_tells_which_models_there_are(proxies: Proxies, servers: tuple[Server, Server]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxies.port("sequential"), timeout=PATIENCE_S)
    connection.request("GET", "/v1/models")
    assert json.load(connection.getresponse()) == {"data": [{"id": "tiny"}], "path": "/v1/models"}
    connection.close()


@pytest.mark.parametrize("body", ["text", [1]])
def test_what_is_no_object_is_refused(proxies: Proxies, servers: tuple[Server, Server], body: Any) -> None:
    connection = connect(proxies.port("sequential"), body)
    assert connection.getresponse().status == 400
    connection.close()


@BOTH
@pytest.mark.parametrize("missing", ["prefill", "decode"])
def test_a_server_that_is_not_there_is_named(
    proxies: Proxies, servers: tuple[Server, Server], dispatch: str, missing: str
) -> None:
    """And the other one is not left waiting for it."""
    other = servers[missing == "prefill"]
    if dispatch == "concurrent":
        other.behaviour = "wait"
    port = proxies.port(dispatch, missing)
    old_log = proxies.log.read_text()
    status, answer = ask(port)
    assert status == 503 and answer["error"]["code"] == 503
    new_log = proxies.log.read_text().removeprefix(old_log)
    assert new_log.count("\n") == 1 and answer["error"]["message"] in new_log
    assert not other.begun.is_set() or other.left.wait(PATIENCE_S)


@BOTH
@pytest.mark.parametrize("broken", [0, 1])
def test_a_server_that_breaks_off_is_a_bad_gateway(
    proxies: Proxies, servers: tuple[Server, Server], dispatch: str, broken: int
) -> None:
    servers[broken].behaviour = "break off"
    status, answer = ask(proxies.port(dispatch))
    assert status == 502 and servers[broken].url in answer["error"]["message"]


@pytest.mark.parametrize("waiting", ["wait", "stream"])
@pytest.mark.parametrize(("failing", "status"), [("refuse", 404), ("break off", 502)])
def test_decode_does_not_wait_for_a_prefill_that_has_failed(
    proxies: Proxies, servers: tuple[Server, Server], failing: str, status: int, waiting: str
) -> None:
    """Prefill's error is the answer, also if decode has begun to answer."""
    prefill, decode = servers
    prefill.behaviour, decode.behaviour, prefill.is_after = failing, waiting, decode
    found = ask(proxies.port("concurrent"), stream=waiting == "stream")
    assert found[0] == status and (failing != "refuse" or found[1] == BAD)
    assert decode.left.wait(PATIENCE_S)


def test_prefill_does_not_go_on_for_a_decode_that_has_failed(proxies: Proxies, servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    prefill.behaviour, decode.behaviour, decode.is_after = "wait", "refuse", prefill
    assert ask(proxies.port("concurrent")) == (404, BAD)
    assert prefill.left.wait(PATIENCE_S)


@BOTH
def test_a_client_that_hangs_up_is_not_served(proxies: Proxies, servers: tuple[Server, Server], dispatch: str) -> None:
    prefill, decode = servers
    prefill.behaviour = decode.behaviour = "wait"
    connection = connect(proxies.port(dispatch), {"prompt": "x"})
    assert prefill.begun.wait(PATIENCE_S)
    if dispatch == "concurrent":
        assert decode.begun.wait(PATIENCE_S)
    connection.close()
    assert prefill.left.wait(PATIENCE_S)
    assert decode.left.wait(PATIENCE_S) if dispatch == "concurrent" else not decode.asked


@BOTH
@pytest.mark.parametrize("behaviour", ["wait", "stream"])
def test_a_client_that_hangs_up_on_decode(
    proxies: Proxies, servers: tuple[Server, Server], dispatch: str, behaviour: str
) -> None:
    decode = servers[1]
    decode.behaviour = behaviour
    connection = connect(proxies.port(dispatch), {"prompt": "x", "stream": behaviour == "stream"})
    if behaviour == "stream":
        answer = connection.getresponse()
        assert answer.readline() == b"data: first\n"
        answer.close()
    assert decode.begun.wait(PATIENCE_S)
    connection.close()
    assert decode.left.wait(PATIENCE_S)
