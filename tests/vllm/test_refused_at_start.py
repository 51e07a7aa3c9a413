"""What the connector cannot do is said when the engine starts, in words, and not found out later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from children import EngineProcess

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

NUM_BLOCKS = 199
WINDOW = "sliding_attention"
FULL = "full_attention"


def with_layers(*kinds: str) -> dict[str, Any]:
    """Options of an engine whose layers look at so much."""
    return {"hf_overrides": {"layer_types": list(kinds), "sliding_window": 64}}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sliding windows": (with_layers(WINDOW, WINDOW, WINDOW, WINDOW), {}, "transfers full attention"),
    "two groups of layers": (with_layers(WINDOW, FULL, WINDOW, FULL), {}, "--disable-hybrid-kv-cache-manager"),
    "a setting of vLLM's connector": ({}, {"push_registration_timeout": 5}, "its counterpart is receive_deadline_s"),
    "a setting out of range": ({}, {"lease_s": -1.0}, "lease_s=-1.0"),
}


@pytest.fixture(scope="module")
def engines(start: Any) -> dict[str, EngineProcess]:
    """All at once: each takes a while to fail. And one that starts."""
    found = {
        case: start("both", f"refused-{number}", options=options, **settings)
        for number, (case, (options, settings, _)) in enumerate(CASES.items())
    }
    return found | {"large blocks": start("both", "large-blocks", options={"block_size": 64})}


@pytest.mark.parametrize("case", CASES)
def test_it_does_not_start_and_says_why(engines: dict[str, EngineProcess], case: str) -> None:
    engine, words = engines[case], CASES[case][2]
    with pytest.raises(AssertionError, match="has ended"):
        engine.started()
    log = engine.log.read_text()
    assert "kvpush.errors.ConfigurationError" in log and words in log, log[-3000:]


@pytest.mark.parametrize("large_side", ["decode", "prefill"])
def test_blocks_of_another_size_are_refused_with_both_sizes(
    engines: dict[str, EngineProcess],
    pair: tuple[EngineProcess, EngineProcess],
    make_prompt: Callable[[int], list[int]],
    large_side: str,
) -> None:
    """vLLM's CPU kernels pack the tokens of a block in an order of their own, so a part of a block is not usable."""
    large = engines["large blocks"].started()
    prefill, decode = (pair[0], large) if large_side == "decode" else (large, pair[1])
    name, prompt = f"large-{large_side}", make_prompt(128)
    kv = prefill.generate(name, prompt, 1, {"do_remote_decode": True})["kv"]
    assert decode.generate(name, prompt, 4, kv)["reason"] == "error"  # vLLM's policy here: fail
    log = decode.log.read_text()
    assert "block_size=32" in log and "block_size=64" in log, log[-3000:]
    prefill.wait_for_free_blocks(NUM_BLOCKS, 45)  # its lease
    decode.wait_for_free_blocks(NUM_BLOCKS, 10)
