"""The first push to an engine that prefill knows only by its registration: the handshake and the first WRITE."""

from __future__ import annotations

import time

from kvpush.cli.bench.pair import PREFILL_ID, SPEC, DecodeProcess, Shape, await_pushed, await_registered
from kvpush.cli.bench.report import Figure, Samples
from kvpush.config import Config
from kvpush.pusher import PrefillPusher

LIMIT_S = 0.05


def measure(decode: DecodeProcess, config: Config, repetitions: int, shape: Shape) -> list[Figure]:
    """Every repetition meets a new engine. The caches are advertised whole and hardly written: they take no memory."""
    to_prefill, to_decode = [], []
    with PrefillPusher(PREFILL_ID, shape.tensors(fill=False), SPEC, config=config) as pusher:
        for repetition in range(repetitions):
            engine_id = transfer_id = f"new{repetition}"
            decode.call("open", engine_id, shape, config, False)
            decode.call("expect", engine_id, [(transfer_id, [0])], pusher.address)
            decode.start("await_done", engine_id, 1)
            await_registered(pusher, 1)
            begun_ns = time.monotonic_ns()
            pusher.push(transfer_id, [0])
            to_prefill.append((await_pushed(pusher) - begun_ns) / 1e9)
            to_decode.append((decode.result()[transfer_id] - begun_ns) / 1e9)
            decode.call("shut", engine_id)
    what = f"{shape.num_blocks:,} blocks in {shape.num_layers} layers"
    return [
        Figure.of_seconds(
            f"first push to a new engine, {what}",
            Samples.of(to_prefill),
            limit=LIMIT_S,
            note="push() to PushFinished: metadata asked for and verified, agent loaded, descriptors prepared, UCX's "
            "connection made, one block of every layer written",
        ),
        Figure.of_seconds(f"the same, to ReceiveFinished, {what}", Samples.of(to_decode), note="seen by decode"),
    ]
