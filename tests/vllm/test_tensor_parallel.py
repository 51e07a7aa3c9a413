"""Two workers on either side: each is served by its counterpart, and a request goes on when both are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from children import EngineProcess, free_port

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

NUM_BLOCKS = 199
OPTIONS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "max_num_batched_tokens": 256}


def first_of_two_free_ports() -> int:
    while True:
        port = free_port()
        if port < 65000 and not _is_taken(port + 1):
            return port


def _is_taken(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def wide_pair(start: Any) -> tuple[EngineProcess, EngineProcess, int]:
    port = first_of_two_free_ports()
    prefill = start("producer", "wp", port, options=OPTIONS)
    decode = start("consumer", "wd", options=OPTIONS)
    return prefill.started(), decode.started(), port


def test_tokens_are_those_of_one_engine(
    wide_pair: tuple[EngineProcess, EngineProcess, int], make_prompt: Callable[[int], list[int]]
) -> None:
    prefill, decode, port = wide_pair
    prompts = [make_prompt(length) for length in (1, 40, 700)]
    expected = [prefill.generate(f"reference-{i}", prompt, 12)["tokens"] for i, prompt in enumerate(prompts)]
    prefill.forget()
    for i, prompt in enumerate(prompts):
        kv = prefill.generate(f"sequential-{i}", prompt, 1, {"do_remote_decode": True})["kv"]
        assert [source[:4] for source in kv["remote_sources"]] == [
            [0, 0, "127.0.0.1", port],
            [0, 1, "127.0.0.1", port + 1],
        ]
        assert decode.generate(f"sequential-{i}", prompt, 12, kv)["tokens"] == expected[i]
    prefill.forget()
    decode.forget()
    source = {"do_remote_prefill": True, "remote_engine_id": "wp", "remote_host": "127.0.0.1", "remote_port": port}
    for i, prompt in enumerate(prompts):
        decode.ask(f"both-{i}", prompt, 12, source | {"tp_size": 2, "transfer_id": f"both-{i}"})
        prefill.ask(f"both-{i}", prompt, 1, {"do_remote_decode": True, "transfer_id": f"both-{i}"})
    for i in range(len(prompts)):
        assert decode.result(f"both-{i}")["tokens"] == expected[i]
    decode.ask("gone", prompts[2], 12, source | {"tp_size": 2, "transfer_id": "gone"})
    decode.abort("gone")
    for engine in (prefill, decode):
        engine.wait_for_free_blocks(NUM_BLOCKS, 20)
