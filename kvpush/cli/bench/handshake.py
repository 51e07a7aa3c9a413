"""The first push to an engine that prefill knows only by its registration: the handshake and the first WRITE."""

from __future__ import annotations

import time

import numpy as np

from kvpush.cli.bench.bare_nixl import BareWriter
from kvpush.cli.bench.contest import BARE
from kvpush.cli.bench.context import Bench
from kvpush.cli.bench.pair import PREFILL_ID, SPEC, Shape, await_pushed, await_registered
from kvpush.cli.bench.report import Figure, Samples
from kvpush.pusher import PrefillPusher

LIMIT_S = 0.05
_BLOCK_BYTES = 64
_NOTE = (
    "push() to PushFinished: metadata asked for and verified, agent loaded, descriptors prepared, UCX's connection "
    "made, one block of every layer written; the bare loop has the metadata already"
)


def measure(bench: Bench) -> list[Figure]:
    """The budget, then how it grows with what an engine advertises."""
    advertised = bench.sizes.advertised.on(bench.device)
    bench.progress.point(_advertised(advertised), 0, 1)
    to_prefill, to_decode, bare = _first_pushes(bench, advertised, bench.sizes.handshakes)
    figures = [
        # in seconds, not as a ratio: the bare loop is what of it is NIXL's
        Figure.of_seconds(
            f"first push to a new engine, {_advertised(advertised)}",
            to_prefill,
            limit=LIMIT_S,
            budget="first-push",
            beside={BARE: bare.median},
            note=_NOTE,
        ),
        Figure.of_seconds(f"the same, to ReceiveFinished, {_advertised(advertised)}", to_decode, note="seen by decode"),
    ]
    if bench.has_sweeps:
        layers = [bench.shape(count, advertised.num_blocks // 10, _BLOCK_BYTES) for count in bench.sizes.sweep_layers]
        blocks = [bench.shape(16, count, _BLOCK_BYTES) for count in bench.sizes.sweep_advertised]
        for shape in bench.points([*layers, *blocks], "engines that advertise more"):
            to_prefill, _, bare = _first_pushes(bench, shape, bench.sizes.handshakes)
            grows = "layers" if shape in layers else "blocks"
            figures.append(
                Figure.against(
                    f"first push by {grows}, {_advertised(shape)}",
                    to_prefill,
                    BARE,
                    bare,
                    note=_NOTE,
                    series=f"first push to a new engine, by {grows} advertised",
                    x=shape.num_layers if grows == "layers" else shape.num_blocks,
                    x_name=grows,
                )
            )
    return figures


def _advertised(shape: Shape) -> str:
    return f"{shape.num_blocks:,} blocks in {shape.num_layers} layer{'s' if shape.num_layers > 1 else ''}"


def _first_pushes(bench: Bench, shape: Shape, repetitions: int) -> tuple[Samples, Samples, Samples]:
    """Until prefill knows, until decode knows, and the bare loop's.

    Every repetition meets a new engine. The caches are advertised whole and hardly written: they take no memory.
    """
    decode, config = bench.decode, bench.config
    to_prefill, to_decode, bare = [], [], []
    block_ids = np.zeros(1, dtype=np.int64)
    writer = BareWriter(shape.tensors(fill=False), config)
    try:
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

                reader = decode.call("open_lone_bare", engine_id, shape, config)
                decode.start("await_bare", [engine_id], 1)
                begun_ns = time.monotonic_ns()
                remote = writer.connect(*reader)
                writer.write([writer.write_of(remote, block_ids, block_ids)])
                bare.append((time.monotonic_ns() - begun_ns) / 1e9)
                decode.result()
                decode.call("shut_bare", engine_id)
                writer.disconnect(remote)
    finally:
        writer.close()
    return Samples.of(to_prefill), Samples.of(to_decode), Samples.of(bare)
