"""Engines that are killed, come back under the same id, host and port, freeze, or talk nonsense. The order of these
tests matters: each leaves the engines that the next one starts from, since starting one takes a while."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import OVER_TCP, EngineProcess, Nursery, free_port
from strangers import Stranger, malformed_registrations, overheard_hello

from kvpush.integrations.vllm.params import prompt_digest

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

NUM_BLOCKS = 199
SOON_S = 10.0  # a time-out of vLLM's own connector would be minutes
LEASE_S = 10.0
NUM_RESTARTS = 10

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
        return self._start("producer", "fp", self._prefill_port, environ=OVER_TCP, lease_s=LEASE_S, stall_timeout_s=6.0)

    def start_decode(self, name: str, nursery: Nursery | None = None) -> EngineProcess:
        policy = {"f0": "recompute", "f1": "fail"}[name]
        return self._start("consumer", name, environ=OVER_TCP, nursery=nursery, kv_load_failure_policy=policy)

    @property
    def port(self) -> int:
        """Where prefill listens."""
        return self._prefill_port

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


def test_new_decode_engines_do_not_wait_behind_those_that_never_answer(fleet: Fleet, make_prompt: MakePrompt) -> None:
    """Prefill asks a decode engine for its metadata before it writes. Three never answer; a fourth is new and well."""
    prompt = make_prompt(200)
    expected = fleet.prefill.generate("hole-reference", prompt, 6)["tokens"]
    hello = overheard_hello(fleet.decodes["f0"], "fp")
    holes = [Stranger(fleet.port, f"hole-{number}") for number in range(3)]
    try:
        for hole in holes:
            kv = fleet.prefill.generate(hole.engine_id, prompt, 1, {"do_remote_decode": True})["kv"]
            hole.enter(hello)
            hole.register(kv["remote_transfer"], 7)
        fleet.prefill.wait_for_stats("pusher", lambda now: now.get("handshakes_started", 0) >= 3, "three handshakes")
        assert "f1 connected" not in fleet.prefill.stats("pusher")["engines"]
        assert fleet.serve("f1", "beside-holes", prompt) == expected
        now = fleet.prefill.stats("pusher")
        assert all(f"hole-{number} handshaking" in now["engines"] for number in range(3)), now
        failed = [name for name in now["stats"] if name.startswith("handshakes_failed")]
        assert not failed, "served before the first of them was given up"
    finally:
        for hole in holes:
            hole.close()
    fleet.prefill.wait_for_free_blocks(NUM_BLOCKS, LEASE_S + SOON_S)


def has_read(num_malformed: int, stats: dict[str, int]) -> bool:
    return stats.get("messages_malformed", 0) >= num_malformed


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
def test_malformed_registrations_do_not_touch_the_request_they_name(
    fleet: Fleet, make_prompt: MakePrompt, dispatch: str
) -> None:
    prompt, name = make_prompt(300), f"attacked-{dispatch}"
    expected = fleet.prefill.generate(f"{name}-reference", prompt, 6)["tokens"]
    decode, prefill = fleet.decodes["f0"], fleet.prefill
    asked: dict[str, Any] = {"do_remote_decode": True}
    if dispatch == "concurrent":
        asked |= {"transfer_id": name}
        decode.ask(name, prompt, 6, fleet.source | {"transfer_id": name})
        decode.call("free", "free")
        transfer_id = f"{name}#{prompt_digest(prompt)}"
    else:
        kv = prefill.generate(name, prompt, 1, asked)["kv"]
        transfer_id = kv["remote_transfer"]
    messages = malformed_registrations(transfer_id)
    num_read = prefill.stats("pusher")["stats"].get("messages_malformed", 0)
    for stranger in (Stranger(fleet.port, "unknown"), Stranger(fleet.port, "known")):
        if stranger.engine_id == "known":
            stranger.enter(overheard_hello(fleet.decodes["f1"], "fp"))
        for message in messages:
            stranger.say(*message)
        num_read += len(messages)
        are_read = functools.partial(has_read, num_read)
        prefill.wait_for_stats("pusher", are_read, "all of it has been read")
        stranger.close()
    if dispatch == "concurrent":
        prefill.generate(name, prompt, 1, asked)
    else:
        decode.ask(name, prompt, 6, kv)
    assert decode.result(name, SOON_S)["tokens"] == expected
    assert decode.stats("receiver")["stats"].get("receives_failed", 0) == 0, "it was computed by prefill, not here"
    assert fleet.serve("f1", f"{name}-after", prompt) == expected
    assert prefill.stats("pusher")["stats"]["internal_errors"] == 0
    prefill.wait_for_free_blocks(NUM_BLOCKS, SOON_S)


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


def test_decode_wakes_after_the_lease_with_writes_in_flight(fleet: Fleet, make_prompt: MakePrompt) -> None:
    """Prefill gives the blocks to other prompts meanwhile. What was half written must not be taken for the prompt's."""
    prompts = [make_prompt(1500) for _ in range(4)]  # nearly all of prefill's cache
    names = [f"in-flight-{number}" for number in range(len(prompts))]
    expected = []
    for name, prompt in zip(names, prompts, strict=True):
        expected.append(fleet.prefill.generate(f"{name}-reference", prompt, 6)["tokens"])
    fleet.prefill.forget()
    assert fleet.serve("f0", "before-in-flight", make_prompt(50))
    fleet.prefill.wait_for_free_blocks(NUM_BLOCKS, SOON_S)
    decode = fleet.decodes["f0"]
    for name, prompt in zip(names, prompts, strict=True):
        decode.ask(name, prompt, 6, fleet.source | {"transfer_id": name})
    decode.call("free", "free")
    fleet.prefill.wait_for_stats("pusher", lambda now: now["registrations_waiting"] >= len(names), "all are registered")
    decode.signal(signal.SIGSTOP)
    frozen_s = time.monotonic()
    for name, prompt in zip(names, prompts, strict=True):
        fleet.prefill.ask(name, prompt, 1, {"do_remote_decode": True, "transfer_id": name})
    for name in names:
        fleet.prefill.result(name)
    assert fleet.prefill.stats("pusher")["stats"]["writes_in_flight"] > 0, "decode cannot have taken all of it"
    fleet.prefill.wait_for_free_blocks(NUM_BLOCKS, 40)
    number = 0
    while number < 4 or time.monotonic() - frozen_s < 1.5 * LEASE_S:  # every block has another prompt's KV now
        assert fleet.serve("f1", f"meanwhile-{number}", make_prompt(1500))
        number += 1
    decode.signal(signal.SIGCONT)
    assert [decode.result(name, 30)["tokens"] for name in names] == expected
    decode.wait_for_free_blocks(NUM_BLOCKS, 90)
    assert fleet.serve("f0", "after-in-flight", prompts[0]) == expected[0]


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    with contextlib.closing(Nursery(tmp_path)) as nursery:
        yield nursery


def test_restarts_of_decode_leave_no_descriptor_at_prefill(
    fleet: Fleet, nursery: Nursery, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(100)
    expected = fleet.prefill.generate("restarts-reference", prompt, 6)["tokens"]
    counts: list[int] = []
    for number in range(NUM_RESTARTS + 1):
        if number:
            fleet.decodes["f0"].kill()
            gone_s = time.monotonic()
            while "f0 connected" in fleet.prefill.stats("pusher")["engines"]:
                assert time.monotonic() - gone_s < SOON_S, "released while idle, and not by the next one to come"
            counts.append(fleet.prefill.num_descriptors())
            while counts[-1] > counts[0]:  # a connection that is given up closes in its own time
                assert time.monotonic() - gone_s < SOON_S, f"descriptors of prefill after each kill: {counts}"
                fleet.prefill.stats("pusher")
                counts[-1] = fleet.prefill.num_descriptors()
            fleet.decodes["f0"] = fleet.start_decode("f0", nursery).started()
        assert fleet.serve("f0", f"restarted-{number}", prompt) == expected
    assert len(counts) == NUM_RESTARTS


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
