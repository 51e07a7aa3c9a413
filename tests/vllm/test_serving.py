"""``vllm serve`` and the proxy of the examples, asked by OpenAI's client: several engines on either side at once."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from children import ROOT, free_port

sys.path.insert(0, str(ROOT / "examples" / "vllm"))

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

NUM_REQUESTS = 100
NUM_TOKENS = 8
NAMES = ("s0", "s1", "s2")


class Servers:
    """Three servers, each of which can do either part, and proxies in front of them."""

    def __init__(self, fleet: Any, logs: Path) -> None:
        self._fleet, self.logs = fleet, logs
        self.ports = {name: free_port() for name in NAMES}
        self.kv_ports = {name: free_port() for name in NAMES}
        for name in NAMES:
            fleet.serve("kv_both", name, self.ports[name], self.kv_ports[name])
        for name in NAMES:
            fleet.wait_for(self.url(name), name)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def proxy(self, prefills: list[str], decodes: list[str], dispatch: str) -> str:
        """A proxy in front of some of them."""
        name, port = f"proxy-{dispatch}-{'-'.join(prefills)}-to-{'-'.join(decodes)}", free_port()
        arguments = ["--port", str(port), "--dispatch", dispatch]
        for server in prefills:
            arguments += ["--prefill", f"{self.url(server)},{server},127.0.0.1:{self.kv_ports[server]}"]
        for server in decodes:
            arguments += ["--decode", self.url(server)]
        self._fleet.start(name, str(ROOT / "examples" / "vllm" / "proxy.py"), *arguments)
        url = f"http://127.0.0.1:{port}"
        self._fleet.wait_for(url, name)
        return url

    @functools.cached_property
    def proxy_of_all(self) -> str:
        return self.proxy(["s0"], ["s2"], "concurrent")

    def stop(self, server: str) -> None:
        """SIGTERM, and wait for its end."""
        self._fleet.stop(server)

    def metric(self, server: str, name: str) -> float:
        """The sum over its labels."""
        with urllib.request.urlopen(f"{self.url(server)}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    from serve import Fleet

    logs = tmp_path_factory.mktemp("servers")
    fleet = Fleet(model, logs)
    try:
        yield Servers(fleet, logs)
    finally:
        fleet.stop()


def texts(url: str, prompts: list[list[int]], *, stream: bool = False) -> list[str]:
    """What the servers behind a URL say to all prompts at once."""
    from openai import AsyncOpenAI

    async def one(client: AsyncOpenAI, prompt: list[int]) -> str:
        options: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        options["extra_body"] = {"ignore_eos": True}
        if not stream:
            return (await client.completions.create(**options)).choices[0].text
        pieces = await client.completions.create(stream=True, **options)
        return "".join([piece.choices[0].text async for piece in pieces if piece.choices])

    async def everything() -> list[str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0) as client:
            return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))

    return asyncio.run(everything())


@pytest.mark.parametrize(
    ("prefills", "decodes", "dispatch", "stream"),
    [
        (["s0"], ["s1", "s2"], "sequential", False),
        (["s0"], ["s1", "s2"], "concurrent", True),
        (["s0", "s1"], ["s2"], "sequential", True),
        (["s0", "s1"], ["s2"], "concurrent", False),
    ],
)
def test_a_hundred_requests_at_once(
    servers: Servers, prefills: list[str], decodes: list[str], dispatch: str, stream: bool
) -> None:
    chance = random.Random(f"{prefills} {dispatch}")
    prompts = [[chance.randrange(2, 258) for _ in range(chance.randrange(1, 400))] for _ in range(NUM_REQUESTS)]
    before = {name: servers.metric(name, "vllm:kvpush_receives_done_total") for name in decodes}
    found = texts(servers.proxy(prefills, decodes, dispatch), prompts, stream=stream)
    received = {name: servers.metric(name, "vllm:kvpush_receives_done_total") - before[name] for name in decodes}
    assert found == texts(servers.url(prefills[0]), prompts)
    needed = sum(len(prompt) > 1 for prompt in prompts)
    assert needed <= sum(received.values()) <= NUM_REQUESTS, "every prompt's cache came from prefill"
    assert all(received.values()), "every decode engine had its share"


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
def test_samples_and_lists_of_prompts_have_the_right_text(servers: Servers, dispatch: str) -> None:
    """Prefill computes a prompt once. A list goes to both servers at once, or not at all."""
    from openai import BadRequestError, OpenAI

    url = servers.proxy(["s0"], ["s1"], dispatch)
    first, second = list(range(2, 150)), list(range(99, 2, -1))
    alone = texts(servers.url("s2"), [first, second])
    options: dict[str, Any] = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0}
    options["extra_body"] = {"ignore_eos": True}
    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        samples = client.completions.create(prompt=first, n=3, **options | {"temperature": 1e-3}).choices
        assert [choice.text for choice in samples] == alone[:1] * 3
        if dispatch == "sequential":
            with pytest.raises(BadRequestError, match="dispatch concurrent"):
                client.completions.create(prompt=[first, second], **options)
        else:
            choices = client.completions.create(prompt=[first, second], **options).choices
            assert [choice.text for choice in choices] == alone


def answer(url: str, body: dict[str, Any]) -> str:
    raw = json.dumps({"model": "tiny", "max_tokens": 4, "temperature": 0} | body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", raw, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as page:
        return str(json.load(page)["choices"][0]["text"])


def test_a_request_that_leads_nowhere_is_computed_here(servers: Servers) -> None:
    answers = set()
    for kv in (None, {"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_engine_id": "x"}):
        body: dict[str, Any] = {"prompt": [5, 6, 7]}
        answers.add(answer(servers.url("s0"), body | ({"kv_transfer_params": kv} if kv else {})))
    assert len(answers) == 1


def test_the_log_and_the_metrics_tell_what_was_transferred(servers: Servers) -> None:
    """vLLM writes a line about every interval in which something happened."""
    give_up_s = time.monotonic() + 60
    while "KV Transfer metrics: " not in (log := (servers.logs / "s2.log").read_text(errors="replace")):
        assert time.monotonic() < give_up_s, log[-3000:]
        texts(servers.proxy_of_all, [[7] * 100])
    assert "receives_done=" in log and "receive_median_ms=" in log
    pushed = servers.metric("s0", "vllm:kvpush_pushes_done_total")
    assert pushed > 0 and servers.metric("s0", "vllm:kvpush_pushed_bytes_total") > pushed
    assert servers.metric("s0", "vllm:kvpush_push_seconds_count") == pushed
    assert servers.metric("s2", "vllm:kvpush_receive_seconds_count") > 0


def test_a_server_that_is_stopped_lets_nobody_wait(servers: Servers) -> None:
    """SIGTERM. What waits for it fails at once, and is computed where it is, by vLLM's policy here. Whether its worker
    comes to say goodbye or is killed by vLLM before, makes no difference."""
    body = {"prompt": list(range(2, 200))}
    expected = answer(servers.url("s1"), body)
    source = {"do_remote_prefill": True, "remote_engine_id": "s0", "remote_host": "127.0.0.1"}
    kv = source | {"remote_port": servers.kv_ports["s0"], "transfer_id": "never-pushed"}
    names = ("vllm:kvpush_receives_failed_total", "vllm:kvpush_receive_failures_total{code=")
    before = [servers.metric("s2", name) for name in names]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(answer, servers.url("s2"), body | {"kv_transfer_params": kv})
        give_up_s = time.monotonic() + 30
        while not servers.metric("s2", "vllm:num_requests_waiting{"):
            assert time.monotonic() < give_up_s, "the request does not arrive"
        assert not waiting.done()
        servers.stop("s0")
        assert waiting.result(30) == expected
    assert [servers.metric("s2", name) for name in names] == [number + 1 for number in before]
    assert ": receive never-pushed#" in (servers.logs / "s2.log").read_text(errors="replace")
