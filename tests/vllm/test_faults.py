"""Engines that are killed, come back under the same id, host and port, or freeze. The order of these tests matters:
each leaves the engines that the next one starts from, since starting one takes most of a minute."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from children import EngineProcess, free_port

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

NUM_BLOCKS = 199
SOON_S = 10.0  # a time-out of vLLM's own connector would be minutes

MakePrompt = Callable[[int], list[int]]


class Fleet:
    """One prefill engine and two decode engines, with what is needed to start them again as they were."""

    def __init__(self, start: Any, prefill_port: int) -> None:
        self._start = start
        self._prefill_port = prefill_port
        self.prefill = self.start_prefill()
        self.decodes = {name: self.start_decode(name) for name in ("f0", "f1")}
        self.prefill.started()
        for decode in self.decodes.values():
            decode.started()

    def start_prefill(self) -> EngineProcess:
        return self._start("producer", "fp", self._prefill_port, lease_s=10.0, stall_timeout_s=6.0)

    def start_decode(self, name: str) -> EngineProcess:
        policy = {"f0": "recompute", "f1": "fail"}[name]
        return self._start("consumer", name, kv_load_failure_policy=policy)

    @property
    def source(self) -> dict[str, Any]:
        port = self._prefill_port
        return {"do_remote_prefill": True, "remote_engine_id": "fp", "remote_host": "127.0.0.1", "remote_port": port}

    def serve(self, decode: str, name: str, prompt: list[int]) -> list[int]:
        kv = self.prefill.generate(name, prompt, 1, {"do_remote_decode": True})["kv"]
        return list(self.decodes[decode].generate(name, prompt, 6, kv)["tokens"])


@pytest.fixture(scope="module")
def fleet(start: Any) -> Fleet:
    return Fleet(start, free_port())


def test_a_frozen_decode_engine_delays_nobody_else(fleet: Fleet, make_prompt: MakePrompt) -> None:
    prompt = make_prompt(200)
    expected = fleet.prefill.generate("freeze-reference", prompt, 6)["tokens"]
    assert fleet.serve("f0", "warm0", prompt) == fleet.serve("f1", "warm1", prompt) == expected
    fleet.decodes["f0"].signal(signal.SIGSTOP)
    for number in range(3):
        kv = fleet.prefill.generate(f"to-frozen-{number}", prompt, 1, {"do_remote_decode": True})["kv"]
        fleet.decodes["f0"].ask(f"to-frozen-{number}", prompt, 6, kv)
    for number in range(10):
        started_s = time.monotonic()
        assert fleet.serve("f1", f"beside-{number}", make_prompt(60) + prompt)
        assert time.monotonic() - started_s < SOON_S
    fleet.prefill.wait_for_free_blocks(NUM_BLOCKS, 30)
    fleet.decodes["f0"].signal(signal.SIGCONT)
    for number in range(3):  # late, and computed where it is, but right
        assert fleet.decodes["f0"].result(f"to-frozen-{number}", 30)["tokens"] == expected
    assert fleet.serve("f0", "awake", prompt) == expected


def test_a_decode_engine_that_comes_back_is_served_at_once(fleet: Fleet, make_prompt: MakePrompt) -> None:
    prompt = make_prompt(700)
    expected = fleet.prefill.generate("restart-reference", prompt, 6)["tokens"]
    fleet.decodes["f0"].ask("orphan", prompt, 6, fleet.source | {"transfer_id": "orphan"})
    fleet.decodes["f0"].call("free", "free")  # so the request is there
    fleet.decodes["f0"].kill()
    fleet.prefill.generate("orphan", prompt, 1, {"do_remote_decode": True, "transfer_id": "orphan"})
    fleet.decodes["f0"] = fleet.start_decode("f0")
    engines = fleet.prefill.stats("pusher")["engines"]
    assert "f0 connected" not in engines, "known as gone long before it is back"
    fleet.decodes["f0"].started()
    for number in range(3):
        assert fleet.serve("f0", f"back-{number}", prompt) == expected
    fleet.prefill.wait_for_free_blocks(NUM_BLOCKS, 20)


def test_decode_s_request_ends_when_prefill_is_killed(fleet: Fleet, make_prompt: MakePrompt) -> None:
    prompt = make_prompt(300)
    decode = fleet.decodes["f1"]
    decode.ask("waiting", prompt, 6, fleet.source | {"transfer_id": "waiting"})
    decode.call("free", "free")
    fleet.prefill.kill()
    started_s = time.monotonic()
    assert decode.result("waiting", SOON_S)["reason"] == "error"  # vLLM's policy here: fail
    assert time.monotonic() - started_s < SOON_S
    decode.wait_for_free_blocks(NUM_BLOCKS, SOON_S)
    decode.ask("after", prompt, 6, fleet.source | {"transfer_id": "after"})  # nobody listens there
    assert decode.result("after", SOON_S)["reason"] == "error"
    fleet.prefill = fleet.start_prefill()
    fleet.prefill.started()
    expected = fleet.prefill.generate("reborn-reference", prompt, 6)["tokens"]
    assert fleet.serve("f1", "reborn", prompt) == expected
    assert fleet.serve("f0", "reborn-too", prompt) == expected


def test_a_prefill_engine_that_leaves_in_order_says_so(fleet: Fleet, make_prompt: MakePrompt) -> None:
    decode = fleet.decodes["f1"]
    decode.ask("left", make_prompt(300), 6, fleet.source | {"transfer_id": "left"})
    decode.call("free", "free")
    fleet.prefill.close()
    assert decode.result("left", SOON_S)["reason"] == "error"
    assert decode.stats("receiver")["stats"]["engines_stale_closing"] >= 1, "it was not taken for dead"
    decode.wait_for_free_blocks(NUM_BLOCKS, SOON_S)
