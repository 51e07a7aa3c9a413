"""How soon prefill knows that a decode engine is gone: killed with a WRITE in flight, and frozen."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from kvpush.cli.bench.context import Bench
from kvpush.cli.bench.pair import BenchError, DecodeProcess, Shape, await_registered, connected_pair
from kvpush.cli.bench.report import Figure, Samples
from kvpush.config import Config
from kvpush.events import BlocksReleased, PushFinished
from kvpush.lifecycle import State
from kvpush.pusher import PrefillPusher

KILL_LIMIT_S = 1.0
FREEZE_GRACE_S = 1.0
_ENGINE_ID = "doomed"
_TRANSFER_ID = "hit"
_TIMEOUT_S = 30.0


def measure(bench: Bench) -> list[Figure]:
    """Each run makes the process that it ends."""
    liveness_s = bench.sizes.liveness_timeout_s
    config = dataclasses.replace(
        bench.config,
        # a socket takes the whole of a WRITE only when its reader reads: so it is in flight when the process dies
        ucx_options="TLS=tcp" if bench.device == "cpu" else bench.config.ucx_options,
        liveness_timeout_s=liveness_s,
        stall_timeout_s=Config().stall_timeout_s,
        heartbeat_interval_s=min(bench.config.heartbeat_interval_s, liveness_s / 5),
    )
    shape = bench.shape(1, 512, 65536)
    kills = [_killed(shape, config) for _ in bench.points(range(bench.sizes.kills), "kill -9")]
    freezes = [_frozen(shape, config) for _ in bench.points(range(bench.sizes.freezes), "SIGSTOP")]
    return [
        Figure.of_seconds(
            "kill -9 of a decode engine, 32 MiB in flight to it",
            Samples.of(kills),
            limit=KILL_LIMIT_S,
            budget="kill",
            note="until prefill has evicted it and its source blocks are reusable",
        ),
        Figure.of_seconds(
            "SIGSTOP of a decode engine",
            Samples.of(freezes),
            limit=liveness_s + FREEZE_GRACE_S,
            budget="freeze",
            note=f"until prefill counts it as lost; liveness_timeout_s is {liveness_s:g}",
        ),
    ]


def _killed(shape: Shape, config: Config) -> float:
    with DecodeProcess() as decode:
        lasting = connected_pair(shape, config, decode, _ENGINE_ID, close_decode=False)
        with lasting as pusher:
            block_ids = list(range(shape.num_blocks))
            decode.call("expect", _ENGINE_ID, [(_TRANSFER_ID, block_ids)], pusher.address)
            await_registered(pusher, 1)
            decode.freeze()
            pusher.push(_TRANSFER_ID, block_ids)
            _await(lambda: pusher.stats()["writes_in_flight"] > 0, "a WRITE in flight")
            begun_s = time.monotonic()
            decode.kill()
            _await_reusable(pusher)
            _await(lambda: _state(pusher) == State.evicted, "the eviction of a killed engine")
            return time.monotonic() - begun_s


def _frozen(shape: Shape, config: Config) -> float:
    with DecodeProcess() as decode:
        lasting = connected_pair(shape, config, decode, _ENGINE_ID, close_decode=False)
        with lasting as pusher:
            begun_s = time.monotonic()
            decode.freeze()
            _await(lambda: _state(pusher) != State.connected, "the loss of a frozen engine")
            return time.monotonic() - begun_s


def _state(pusher: PrefillPusher) -> str:
    (engine,) = pusher.engines()
    return engine.state


def _await_reusable(pusher: PrefillPusher) -> None:
    give_up_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < give_up_s:
        for event in pusher.wait(0.1):
            if isinstance(event, BlocksReleased) or (isinstance(event, PushFinished) and event.blocks_reusable):
                return
    raise BenchError("the source blocks of a push to a killed engine were never reusable")


def _await(condition: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + _TIMEOUT_S
    while not condition():
        if time.monotonic() > give_up_s:
            raise BenchError(f"not within {_TIMEOUT_S:g} s: {what}")
        time.sleep(0.0005)
