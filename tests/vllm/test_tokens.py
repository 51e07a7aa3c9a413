"""The tokens of prefill and decode together are those of one engine, whatever way the cache took."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from children import EngineProcess

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

BLOCK = 32
LENGTHS = (1, 2, 31, 32, 33, 64, 65, 97, 255, 256, 257, 512, 900, 1024, 1500)
NUM_TOKENS = 16
NUM_BLOCKS = 199  # of the pool, without vLLM's own null block

MakePrompt = Callable[[int], list[int]]
_names = (f"t{i}" for i in itertools.count())


def of_one_engine(engine: EngineProcess, prompts: list[list[int]]) -> list[list[int]]:
    """What an engine says without any transfer. It remembers nothing of it."""
    names = [next(_names) for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        engine.ask(name, prompt, NUM_TOKENS)
    tokens = [engine.result(name)["tokens"] for name in names]
    engine.forget()
    return tokens


def sequential(prefill: EngineProcess, decode: EngineProcess, prompts: list[list[int]]) -> list[list[int]]:
    """Prefill first; decode gets what its answer brings. All prompts at once on either side."""
    names = [next(_names) for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        prefill.ask(name, prompt, 1, {"do_remote_decode": True})
    for name, prompt in zip(names, prompts, strict=True):
        decode.ask(name, prompt, NUM_TOKENS, prefill.result(name)["kv"])
    return [decode.result(name)["tokens"] for name in names]


def concurrent(
    prefill: EngineProcess, decode: EngineProcess, prompts: list[list[int]], *, named: bool = True
) -> list[list[int]]:
    """Both at once, decode first. Without names from the router, both sides go by what their request ids share."""
    source = prefill.generate(next(_names), [5], 1, {"do_remote_decode": True})["kv"]
    decode.generate(next(_names), [5], 1, source)  # so that prefill need not keep it
    source = source | {"remote_request_id": None}
    names = [next(_names) for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        router = {"transfer_id": f"router-{name}"} if named else {}
        decode.ask(name, prompt, NUM_TOKENS, source | router)
        prefill.ask(name, prompt, 1, {"do_remote_decode": True} | router)
    return [decode.result(name)["tokens"] for name in names]


@pytest.fixture(autouse=True)
def _nothing_is_left(prefill: EngineProcess, decode: EngineProcess):
    yield
    prefill.wait_for_free_blocks(NUM_BLOCKS)
    decode.wait_for_free_blocks(NUM_BLOCKS)
    prefill.forget()
    decode.forget()


def test_one_at_a_time(prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt) -> None:
    for length in LENGTHS:
        prompt = make_prompt(length)
        (expected,) = of_one_engine(prefill, [prompt])
        assert sequential(prefill, decode, [prompt]) == [expected], f"{length} tokens"
    assert decode.stats("receiver")["stats"]["receives_done"] >= len(LENGTHS)


def test_all_in_one_batch(prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt) -> None:
    prompts = [make_prompt(length) for length in LENGTHS]
    expected = of_one_engine(prefill, prompts)
    assert sequential(prefill, decode, prompts) == expected


@pytest.mark.parametrize("named", [True, False], ids=["the router names it", "nobody names it"])
def test_both_at_once(prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt, named: bool) -> None:
    prompts = [make_prompt(length) for length in (1, 33, 257, 900, 1500)]
    expected = of_one_engine(prefill, prompts)
    assert concurrent(prefill, decode, prompts, named=named) == expected


@pytest.mark.parametrize("named", [True, False], ids=["the router names it", "nobody names it"])
def test_a_name_that_is_used_again_brings_no_blocks_of_another_prompt(
    prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt, named: bool
) -> None:
    """The first prompt under it was computed, and nobody asked for it: its router died. It still waits at prefill."""
    forgotten, name = make_prompt(200), next(_names)
    router = {"transfer_id": f"router-{name}"} if named else {}
    source = prefill.generate(name, forgotten, 1, {"do_remote_decode": True} | router)["kv"]
    for key in ("remote_request_id", "remote_transfer"):
        del source[key]
    for length in (200, 150, 260):
        prompt = make_prompt(length)
        (expected,) = of_one_engine(prefill, [prompt])
        decode.ask(name, prompt, NUM_TOKENS, source)
        prefill.ask(name, prompt, 1, {"do_remote_decode": True} | router)
        assert decode.result(name)["tokens"] == expected
        assert prefill.result(name)["reason"] == "length"
    decode.generate(name, forgotten, 1, source)  # so that prefill need not keep it


def test_a_prompt_that_is_to_be_answered_several_times_is_received_once(
    prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt
) -> None:
    """As vLLM splits a request with ``n``, and a list of prompts: they share all parameters."""
    prompts = [make_prompt(300), make_prompt(100)]
    expected = of_one_engine(prefill, prompts)
    source = prefill.generate(next(_names), [5], 1, {"do_remote_decode": True, "transfer_id": "warm"})["kv"]
    decode.generate(next(_names), [5], 1, source)
    del source["remote_request_id"]
    written, before = prefill.stats("pusher")["stats"]["bytes_written"], decode.stats("receiver")["stats"]
    names = [next(_names) for _ in range(6)]
    for i, name in enumerate(names):
        decode.ask(name, prompts[i % 2], NUM_TOKENS, source | {"transfer_id": "list"})
    for prompt in prompts:
        prefill.ask(next(_names), prompt, 1, {"do_remote_decode": True, "transfer_id": "list"})
    assert [decode.result(name)["tokens"] for name in names] == 3 * expected
    after = decode.stats("receiver")["stats"]
    assert after.get("receives_failed", 0) == before.get("receives_failed", 0)
    assert after["receives"] - before["receives"] == 6, "two with blocks, four that say that nothing is needed"
    per_token = 4 * 2 * 2 * 32 * 4  # layers, key and value, heads, head size, bytes
    written = prefill.stats("pusher")["stats"]["bytes_written"] - written
    assert written <= per_token * (10 + 4) * BLOCK, "every block once"


def test_only_missing_blocks_are_asked_for(
    prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt
) -> None:
    """A prefix that decode has cached is not sent again; prefill has its own prefix hits."""
    common = make_prompt(10 * BLOCK)
    prompts = [common + make_prompt(length) for length in (1, 2, 70, 300)]
    expected = of_one_engine(prefill, prompts)
    before = prefill.stats("pusher")["stats"].get("bytes_written", 0)
    assert sequential(prefill, decode, prompts[:1]) == expected[:1]
    one = prefill.stats("pusher")["stats"]["bytes_written"] - before
    assert sequential(prefill, decode, prompts[1:]) == expected[1:]
    others = prefill.stats("pusher")["stats"]["bytes_written"] - before - one
    per_block = one // 10
    assert others == per_block * (1 + 3 + 10), "positions 0 to 9 were there, and no last token was sent"


def test_any_length_with_any_part_of_it_cached_on_either_side(
    prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt
) -> None:
    """Prompts that begin as others before them did, some of which only one of the two has seen; in batches, both ways
    of dispatch."""
    chance = random.Random(5)
    seen = [make_prompt(1500)]
    for _ in range(12):
        prompts = []
        for _ in range(4):
            length = chance.randint(1, 1500)
            shared = chance.choice(seen)[: chance.randint(0, length)] if chance.random() < 0.6 else []
            prompts.append(shared + make_prompt(length - len(shared)))
        seen += prompts
        expected = of_one_engine(prefill, prompts)  # forgets what prefill has cached
        if chance.random() < 0.5:
            prefill.generate(next(_names), chance.choice(prompts), 1)
        if chance.random() < 0.5:
            decode.generate(next(_names), chance.choice(prompts), 1)
        dispatch = chance.choice((sequential, concurrent))
        assert dispatch(prefill, decode, prompts) == expected, [len(prompt) for prompt in prompts]


def test_prefill_pushes_what_it_has_cached(
    prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(20 * BLOCK)
    (expected,) = of_one_engine(prefill, [prompt])
    prefill.generate(next(_names), prompt, 1)
    name = next(_names)
    answer = prefill.generate(name, prompt, 1, {"do_remote_decode": True})
    assert answer["cached"] >= 10 * BLOCK
    assert decode.generate(name, prompt, NUM_TOKENS, answer["kv"])["tokens"] == expected


def test_a_prompt_that_decode_has_needs_nothing(
    prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(4 * BLOCK + 1)
    (expected,) = of_one_engine(prefill, [prompt])
    assert sequential(prefill, decode, [prompt]) == [expected]
    before = prefill.stats("pusher")["stats"]["bytes_written"]
    assert sequential(prefill, decode, [prompt]) == [expected]
    assert prefill.stats("pusher")["stats"]["bytes_written"] == before
    prefill.wait_for_free_blocks(NUM_BLOCKS, timeout_s=5)  # told to let go, not left to the lease


@pytest.mark.parametrize("length", [97, 512, 1500])
def test_one_wrong_block_would_show(
    prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt, length: int
) -> None:
    """The control: with any one block spoiled after it came, the tokens differ. So equal tokens prove every block."""
    prompt = make_prompt(length)
    (expected,) = of_one_engine(prefill, [prompt])
    num_blocks = -(-(length - 1) // BLOCK)
    for position in {0, num_blocks // 2, num_blocks - 1}:
        decode.call("corrupt", "corrupting", position=position)
        assert sequential(prefill, decode, [prompt]) != [expected], f"block {position} of {num_blocks}"
        decode.wait_for_free_blocks(NUM_BLOCKS)
        decode.forget()
    assert sequential(prefill, decode, [prompt]) == [expected]


def test_more_than_both_caches_hold(prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt) -> None:
    """Requests queue on both sides: nobody waits for ever, and every token is right."""
    prompts = [make_prompt(1500) for _ in range(8)]  # 47 blocks each
    expected = [of_one_engine(prefill, [prompt])[0] for prompt in prompts]
    assert sequential(prefill, decode, prompts) == expected


@pytest.mark.parametrize("dispatch", [sequential, concurrent])
def test_prefill_preempts_a_prompt_that_is_half_pushed(
    prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt, dispatch: Any
) -> None:
    prompt = make_prompt(1500)
    (expected,) = of_one_engine(prefill, [prompt])
    prefill.preempt("t", at_tokens=700)
    assert dispatch(prefill, decode, [prompt]) == [expected]
    prefill.was_preempted()


def test_decode_preempts_what_it_has_received(
    prefill: EngineProcess, decode: EngineProcess, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(500)
    (expected,) = of_one_engine(prefill, [prompt])
    decode.preempt("t", at_tokens=505)
    assert sequential(prefill, decode, [prompt]) == [expected]
    decode.was_preempted()
