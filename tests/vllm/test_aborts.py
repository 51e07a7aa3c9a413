"""Clients hang up whenever they like, on either side: no block is lost, and nobody else waits for ever."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from children import EngineProcess

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

NUM_BLOCKS = 199
NUM_REQUESTS = 200

MakePrompt = Callable[[int], list[int]]


@pytest.fixture
def source(prefill: EngineProcess, decode: EngineProcess) -> dict[str, Any]:
    """What a router that dispatches to both at once knows of prefill."""
    kv = prefill.generate("who", [5], 1, {"do_remote_decode": True})["kv"]
    decode.generate("who", [5], 1, kv)
    del kv["remote_request_id"]
    return dict(kv)


def all_come_back(prefill: EngineProcess, decode: EngineProcess, timeout_s: float = 45.0) -> None:
    prefill.wait_for_free_blocks(NUM_BLOCKS, timeout_s)
    decode.wait_for_free_blocks(NUM_BLOCKS, timeout_s)
    prefill.forget()
    decode.forget()


def test_decode_hangs_up_before_prefill_has_begun(
    prefill: EngineProcess, decode: EngineProcess, source: dict[str, Any], make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(300)
    decode.ask("early", prompt, 4, source | {"transfer_id": "early"})
    decode.abort("early")
    decode.wait_for_free_blocks(NUM_BLOCKS, 5)
    prefill.generate("early", prompt, 1, {"do_remote_decode": True, "transfer_id": "early"})
    prefill.wait_for_free_blocks(NUM_BLOCKS, 5)  # the push ends as cancelled, long before its lease


def test_decode_hangs_up_after_the_transfer(
    prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(300)
    kv = prefill.generate("late", prompt, 1, {"do_remote_decode": True})["kv"]
    decode.ask("late", prompt, 1500, kv)
    prefill.wait_for_free_blocks(NUM_BLOCKS, 10)  # so it has been sent
    decode.abort("late")
    decode.wait_for_free_blocks(NUM_BLOCKS, 5)


def half_pushed(
    prefill: EngineProcess, decode: EngineProcess, source: dict[str, Any], name: str, prompt: list[int]
) -> None:
    """Decode waits, prefill computes chunk by chunk, and the first of them have been written."""
    before = prefill.stats("pusher")["stats"]["bytes_written"]
    decode.ask(name, prompt, 4, source | {"transfer_id": name})
    prefill.ask(name, prompt, 1, {"do_remote_decode": True, "transfer_id": name})
    prefill.wait_for_stats("pusher", lambda now: now["bytes_written"] > before, "a chunk has been written")


def test_decode_hangs_up_during_the_transfer(
    prefill: EngineProcess, decode: EngineProcess, source: dict[str, Any], make_prompt: MakePrompt
) -> None:
    half_pushed(prefill, decode, source, "midway", make_prompt(1500))
    assert decode.abort_in_time("midway")
    assert prefill.result("midway")["reason"] == "length", "prefill's own answer does not suffer"
    all_come_back(prefill, decode, 10)
    assert decode.stats("receiver")["stats"].get("receives_cancelled", 0) >= 1


def test_prefill_hangs_up_while_it_computes(
    prefill: EngineProcess, decode: EngineProcess, source: dict[str, Any], make_prompt: MakePrompt
) -> None:
    half_pushed(prefill, decode, source, "torn", make_prompt(1500))
    assert prefill.abort_in_time("torn")
    assert decode.result("torn", 10)["reason"] == "error"  # vLLM's policy here: fail
    all_come_back(prefill, decode, 10)


def test_prefill_hangs_up_before_it_has_begun(
    prefill: EngineProcess, decode: EngineProcess, source: dict[str, Any], make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(1500)
    others = [f"crowd-{number}" for number in range(4)]
    for other in others:
        prefill.ask(other, make_prompt(1500), 1)  # so that it queues
    decode.ask("unbegun", prompt, 4, source | {"transfer_id": "unbegun"})
    prefill.ask("unbegun", prompt, 1, {"do_remote_decode": True, "transfer_id": "unbegun"})
    assert prefill.abort_in_time("unbegun")
    assert decode.result("unbegun", 10)["reason"] == "error"
    for other in others:
        prefill.result(other)
    all_come_back(prefill, decode, 10)


def test_the_same_request_again_after_an_abort(
    prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt
) -> None:
    """Prefill first, as most routers do: every attempt has its own name, whatever the client calls it."""
    prompt = make_prompt(200)
    expected = prefill.generate("again-reference", prompt, 8)["tokens"]
    for _ in range(3):
        kv = prefill.generate("again", prompt, 1, {"do_remote_decode": True})["kv"]
        decode.ask("again", prompt, 8, kv)
        decode.abort("again")
    kv = prefill.generate("again", prompt, 1, {"do_remote_decode": True})["kv"]
    decode.ask("again-at-last", prompt, 8, kv)
    assert decode.result("again-at-last")["tokens"] == expected
    all_come_back(prefill, decode)


def test_two_hundred_requests_with_random_aborts(
    prefill: EngineProcess, decode: EngineProcess, source: dict[str, Any], make_prompt: MakePrompt
) -> None:
    chance = random.Random(20)
    prompts = [make_prompt(chance.choice((1, 20, 40, 100, 300, 700))) for _ in range(20)]
    expected: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        expected[i] = prefill.generate(f"abort-reference-{i}", prompt, 6)["tokens"]
    prefill.forget()
    due: list[tuple[int, EngineProcess, str]] = []  # when to hang up, counted in requests
    waiting: dict[str, tuple[int, bool]] = {}  # decode's requests that nobody hangs up on: prompt, and whether P's was
    for number in range(NUM_REQUESTS):
        which, name = chance.randrange(len(prompts)), f"random-{number}"
        prompt, quits = prompts[which], chance.choice(("", "", "decode", "prefill", "both"))
        if chance.random() < 0.5:  # both at once
            router = {"transfer_id": f"router-{name}"}
            decode.ask(name, prompt, 6, source | router)
            prefill.ask(name, prompt, 1, {"do_remote_decode": True} | router)
        else:
            quits = quits if quits == "decode" else ""
            decode.ask(name, prompt, 6, prefill.generate(name, prompt, 1, {"do_remote_decode": True})["kv"])
        if quits in ("decode", "both"):
            due.append((number + chance.randrange(4), decode, name))
        else:
            waiting[name] = (which, quits == "prefill")
        if quits in ("prefill", "both"):
            due.append((number + chance.randrange(4), prefill, name))
        for when, engine, victim in [entry for entry in due if entry[0] <= number]:
            engine.abort(victim)
            due.remove((when, engine, victim))
    for _, engine, victim in due:
        engine.abort(victim)
    for name, (which, is_torn) in waiting.items():
        result = decode.result(name)
        if result["reason"] == "length":
            assert result["tokens"] == expected[which]
        else:
            assert is_torn, f"{name} failed, and nobody hung up on it"
    all_come_back(prefill, decode)
    assert decode.stats("receiver")["stats"]["internal_errors"] == 0
    assert prefill.stats("pusher")["stats"]["internal_errors"] == 0
