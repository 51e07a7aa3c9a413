"""The demo's engines leave in order: SIGTERM lets what is under way arrive, and peers see `closing`, not `lost`."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from peers import until

import kvpush
from kvpush.cli.demo.fleet import Died, Fleet
from kvpush.cli.demo.messages import EngineSettings, Expect, Ready, Received, Role, Stopped
from kvpush.cli.model import Llama, ModelConfig, PagedKVCache

pytestmark = [pytest.mark.processes, pytest.mark.nixl, pytest.mark.timeout(120)]

SETTINGS = EngineSettings(
    seed=3,
    hf_path=None,
    num_blocks=16,
    block_size_tokens=16,
    chunk_tokens=256,
    net_devices="lo",
    is_sabotaged=False,
)
TEXT = "sixteen tokens and a few more"
QUIET_S = 0.5  # an engine that serves reports its status ten times as often


@pytest.fixture
def pusher() -> Any:
    model = Llama.from_seed(ModelConfig.small(), SETTINGS.seed)
    cache = PagedKVCache(model.config, SETTINGS.num_blocks, SETTINGS.block_size_tokens)
    spec = kvpush.KVCacheSpec(dims="BKHND", model=f"kvpush-demo/{SETTINGS.seed}")
    config = kvpush.Config(net_devices="lo", heartbeat_interval_s=0.2)
    with kvpush.PrefillPusher("p0", cache.kv_caches, spec, listen="127.0.0.1:0", config=config) as pusher:
        pusher.num_blocks_of_prompt = cache.blocks_for(len(model.tokenizer.encode(TEXT)))
        yield pusher


def terminated(fleet: Fleet, pusher: Any, transfer_id: str) -> list[Any]:
    """Have d0 expect a transfer and tell it to go. What it said until it was quiet, which is in the middle of its
    drain, or after its end."""
    pid = fleet.start(Role.decode, "d0")
    news: list[Any] = []

    def listen(timeout_s: float = 0.05) -> list[Any]:
        fresh = [item for _, item in fleet.receive(timeout_s)]
        news.extend(fresh)
        return fresh

    until(lambda: listen() and any(isinstance(item, Ready) for item in news), what="d0 is ready")
    fleet.send("d0", Expect(transfer_id, TEXT, 4, pusher.address, "p0"))
    until(lambda: listen() is not None and pusher.stats()["registrations_waiting"] == 1, what="registered")
    os.kill(pid, signal.SIGTERM)
    until(lambda: not listen(QUIET_S), what="it has left its loop")
    return news


def rest_of(fleet: Fleet, news: list[Any]) -> list[Any]:
    until(
        lambda: news.extend(i for _, i in fleet.receive(0.1)) or any(isinstance(i, Died) for i in news), what="its end"
    )
    return news


def test_f9_sigterm_lets_a_decode_engine_receive_what_is_on_its_way(pusher: Any) -> None:
    with Fleet(SETTINGS) as fleet:
        news = terminated(fleet, pusher, "t")
        pusher.push("t", list(range(pusher.num_blocks_of_prompt)))
        (pushed,) = pusher.wait(timeout_s=20)
        assert (pushed.outcome, pushed.engine_id) == ("done", "d0")
        rest_of(fleet, news)
    assert [item.event.outcome for item in news if isinstance(item, Received)] == ["done"]
    assert [(item.unsettled, item.lost_blocks) for item in news if isinstance(item, Stopped)] == [((), 0)]
    (engine,) = pusher.engines()
    assert (engine.state, engine.reason) == ("evicted", "closing")


def test_f9_sigterm_waits_for_nobody_for_long(pusher: Any) -> None:
    """Nothing is ever pushed: the receive ends when the time to drain is over, and the engine says goodbye."""
    with Fleet(SETTINGS) as fleet:
        news = rest_of(fleet, terminated(fleet, pusher, "t"))
    (stopped,) = [item for item in news if isinstance(item, Stopped)]
    assert stopped.unsettled == ()
    (received,) = [item for item in news if isinstance(item, Received)]
    assert received.event.code == "closing" and received.event.blocks_reusable is False
    until(lambda: pusher.engines()[0].reason == "closing")
