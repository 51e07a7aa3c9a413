"""Engines of one, two and four workers in all combinations: every worker of decode is written by the workers of prefill
that hold its heads, and a request goes on when all have been. The model has two KV heads, so of four workers two and
two hold the same."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from children import EngineProcess, free_port

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

NUM_BLOCKS = 199
NUM_TOKENS = 12
LENGTHS = (1, 33, 97, 700)

MakePrompt = Callable[[int], list[int]]
_names = (f"wide-{i}" for i in itertools.count())


@dataclass(frozen=True)
class Wide:
    """An engine of several workers that can do either part."""

    engine: EngineProcess
    engine_id: str
    size: int
    port: int  # of its first worker

    @property
    def source(self) -> dict[str, Any]:
        """What a router that dispatches to both at once tells decode."""
        return {
            "do_remote_prefill": True,
            "remote_engine_id": self.engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": self.size,
        }


def first_of_free_ports(count: int) -> int:
    while True:
        port = free_port()
        if not any(_is_taken(port + i) for i in range(1, count)):
            return port


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def engines(start: Any) -> dict[str, Wide]:
    """By name; ``two`` and ``two too`` have two workers each."""
    found = {}
    for name, size in {"one": 1, "two": 2, "two too": 2, "four": 4}.items():
        port, engine_id = first_of_free_ports(size), f"w-{name.replace(' ', '-')}"
        options: dict[str, Any] = {"max_num_batched_tokens": 256}
        if size > 1:
            options |= {"tensor_parallel_size": size, "distributed_executor_backend": "mp"}
        found[name] = Wide(start("both", engine_id, port, options=options), engine_id, size, port)
    for wide in found.values():
        wide.engine.started()
    return found


def test_a_router_that_names_too_few_workers_is_told_and_spoils_nothing(
    engines: dict[str, Wide], make_prompt: MakePrompt
) -> None:
    """Without ``tp_size`` decode takes prefill for a single process, and would miss half of the heads. The first
    request between the two makes the mistake, and one that comes later."""
    p, d, prompt = engines["two"], engines["one"], make_prompt(100)
    expected = p.engine.generate(next(_names), prompt, NUM_TOKENS)["tokens"]
    for _ in range(2):
        name = next(_names)
        d.engine.ask(name, prompt, NUM_TOKENS, p.source | {"tp_size": None, "transfer_id": name})
        assert d.engine.result(name, 30)["reason"] == "error"  # vLLM's policy here: fail
        assert d.engine.log.read_text().count("its source must name an address for each rank") == 1
        d.engine.log.write_text("")
        name = next(_names)
        kv = p.engine.generate(name, prompt, 1, {"do_remote_decode": True})["kv"]
        assert d.engine.generate(name, prompt, NUM_TOKENS, kv)["tokens"] == expected
        for engine in (p.engine, d.engine):
            engine.wait_for_free_blocks(NUM_BLOCKS, 20)
            engine.forget()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("two", "two too"),
        ("two", "one"),
        ("one", "two"),
        ("four", "one"),
        ("one", "four"),
        ("four", "two"),
        ("two", "four"),
    ],
)
def test_tokens_are_those_of_one_engine(
    engines: dict[str, Wide], prefill: str, decode: str, make_prompt: MakePrompt
) -> None:
    p, d, alone = engines[prefill], engines[decode], engines["one"].engine
    prompts = [make_prompt(length) for length in LENGTHS]
    expected = [alone.generate(next(_names), prompt, NUM_TOKENS)["tokens"] for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) == len(prompts), "the prompts make a difference"
    alone.forget()

    names = [next(_names) for _ in prompts]
    for name, prompt, tokens in zip(names, prompts, expected, strict=True):
        kv = p.engine.generate(name, prompt, 1, {"do_remote_decode": True})["kv"]
        assert kv["tp_size"] == p.size
        assert [source[:4] for source in kv["remote_sources"]] == [
            [0, rank, "127.0.0.1", p.port + rank] for rank in range(p.size)
        ]
        assert d.engine.generate(name, prompt, NUM_TOKENS, kv)["tokens"] == tokens, f"{len(prompt)} tokens"
    for engine in (p.engine, d.engine):
        engine.wait_for_free_blocks(NUM_BLOCKS, 20)
        engine.forget()

    names = [next(_names) for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        d.engine.ask(name, prompt, NUM_TOKENS, p.source | {"transfer_id": name})
        p.engine.ask(name, prompt, 1, {"do_remote_decode": True, "transfer_id": name})
    assert [d.engine.result(name)["tokens"] for name in names] == expected
    gone = next(_names)
    d.engine.ask(gone, make_prompt(300), NUM_TOKENS, p.source | {"transfer_id": gone})
    d.engine.abort(gone)
    for engine in (p.engine, d.engine):
        engine.wait_for_free_blocks(NUM_BLOCKS, 20)
        engine.forget()
