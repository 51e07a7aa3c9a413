"""Caches that are full of what is pushed, or kept for others: somebody has to give way, and nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from children import EngineProcess, Nursery, free_port

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

NUM_BLOCKS = 64  # of each pool; a long prompt needs 47 of them
LONG = 1500
LEASE_S = 25.0
DEADLINE_S = 6.0
AT_ONCE_S = 15.0  # well before any lease ends, on a busy machine
ASKED = {"do_remote_decode": True}

MakePrompt = Callable[[int], list[int]]
Engines = dict[str, EngineProcess]


@pytest.fixture(scope="module")
def engines(start: Callable[..., EngineProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Two servers that can do both, and a prefill server without a prefix cache."""
    options: dict[str, Any] = {
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": NUM_BLOCKS + 1,
        "max_model_len": 1600,
    }
    without = options | {"enable_prefix_caching": False, "long_prefill_token_threshold": 64}
    settings = {"lease_s": LEASE_S, "receive_deadline_s": DEADLINE_S, "kv_load_failure_policy": "recompute"}
    nursery = Nursery(tmp_path_factory.mktemp("full"))
    try:
        started = {
            name: start(role, name, free_port(), options=each, nursery=nursery, **settings)
            for name, role, each in (("a", "both", options), ("b", "both", options), ("c", "producer", without))
        }
        yield {name: engine.started() for name, engine in started.items()}
    finally:
        nursery.close()


@pytest.fixture(autouse=True)
def _nothing_is_left(engines: Engines) -> Iterator[None]:
    yield
    for engine in engines.values():
        engine.wait_for_free_blocks(NUM_BLOCKS, LEASE_S + AT_ONCE_S)
        engine.forget()


def alone(engine: EngineProcess, prompt: list[int]) -> list[int]:
    tokens = engine.generate("alone", prompt, 4)["tokens"]
    engine.forget()
    return list(tokens)


def test_a_prompt_that_was_preempted_half_pushed_keeps_nobody_waiting(
    engines: Engines, make_prompt: MakePrompt
) -> None:
    """Its pins and a request that generates need more blocks than there are: both are preempted, and nothing runs."""
    generating, pushed = make_prompt(540), make_prompt(LONG)
    expected = alone(engines["b"], pushed)
    engines["a"].ask("generating", generating, 300)
    engines["a"].ask("pushed", pushed, 1, ASKED)
    answer = engines["a"].result("pushed", AT_ONCE_S)
    assert engines["a"].result("generating", AT_ONCE_S)["reason"] == "length"
    engines["b"].ask("pushed", pushed, 4, answer["kv"])
    assert engines["b"].result("pushed")["tokens"] == expected


def test_without_a_prefix_cache_two_prompts_do_not_preempt_each_other_for_ever(
    engines: Engines, make_prompt: MakePrompt
) -> None:
    prompts = {"x": make_prompt(LONG), "y": make_prompt(LONG - 10)}
    expected = {name: alone(engines["b"], prompt) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        engines["c"].ask(name, prompt, 1, ASKED)
    for name, prompt in prompts.items():  # the second has room when the first has been fetched
        engines["b"].ask(name, prompt, 4, engines["c"].result(name, AT_ONCE_S)["kv"])
        assert engines["b"].result(name)["tokens"] == expected[name]


def test_two_servers_that_are_full_for_each_other_let_go(engines: Engines, make_prompt: MakePrompt) -> None:
    """Each keeps a prompt for the other, whose request finds no room."""
    prompts = {"for b": make_prompt(LONG), "for a": make_prompt(LONG)}
    expected = {name: alone(engines["a"], prompt) for name, prompt in prompts.items()}
    kept = {
        "for b": engines["a"].generate("for b", prompts["for b"], 1, ASKED)["kv"],
        "for a": engines["b"].generate("for a", prompts["for a"], 1, ASKED)["kv"],
    }
    began_s = time.monotonic()
    for name, engine in (("for b", engines["b"]), ("for a", engines["a"])):
        engine.ask(f"{name}, there", prompts[name], 4, kept[name])
    for name, engine in (("for b", engines["b"]), ("for a", engines["a"])):
        result = engine.result(f"{name}, there", DEADLINE_S + LEASE_S + AT_ONCE_S)
        assert result["tokens"] == expected[name]
    assert time.monotonic() < began_s + DEADLINE_S + LEASE_S + AT_ONCE_S
