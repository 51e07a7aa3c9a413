"""One prefill engine pushes to more and more decode engines at once."""

from __future__ import annotations

import contextlib
import time

import numpy as np

from kvpush.cli.bench import limits
from kvpush.cli.bench.bare_nixl import BareWriter
from kvpush.cli.bench.contest import BARE
from kvpush.cli.bench.context import Bench
from kvpush.cli.bench.pair import await_pushed, await_registered, connect, connected_pair
from kvpush.cli.bench.report import Figure, Samples

_BLOCKS = 64
_BLOCK_BYTES = 65536
_READY_S = 0.002


def measure(bench: Bench) -> list[Figure]:
    """All engines are in the other process, each with a receiver, a NIXL agent and memory of its own."""
    decode, config = bench.decode, bench.config
    shape = bench.shape(1, _BLOCKS, _BLOCK_BYTES)
    rng = np.random.default_rng(7)
    figures = []
    most = max(bench.sizes.sweep_engines)
    names = [f"fan {number}" for number in range(most)]
    bare = BareWriter(shape.tensors(fill=True), config)
    try:
        with contextlib.ExitStack() as stack:
            pusher = stack.enter_context(connected_pair(shape, config, decode, names[0]))
            for name in names[1:]:
                decode.call("open", name, shape, config, True)
                connect(pusher, decode, name)
            remotes = [bare.connect(*decode.call("open_bare", name, config)) for name in names]
            all_bytes = most * shape.num_bytes
            stream = stack.enter_context(limits.TcpSource(decode.call("open_sink", all_bytes), all_bytes))
            for count in bench.points(bench.sizes.sweep_engines, "engines at once"):
                num_bytes = count * shape.num_bytes
                copy = limits.copier(num_bytes, bench.device)
                through_kvpush, through_bare, streamed, copied = [], [], [], []
                for repetition in range(-1, bench.sizes.points):
                    local_ids, remote_ids = rng.permutation(_BLOCKS), rng.permutation(_BLOCKS)
                    for name in names[:count]:
                        decode.call("expect", name, [(f"{count}/{repetition}/{name}", remote_ids)], pusher.address)
                    decode.start("await_done_by_all", names[:count])
                    await_registered(pusher, count)
                    begun_ns = time.monotonic_ns()
                    for name in names[:count]:
                        pusher.push(f"{count}/{repetition}/{name}", local_ids)
                    await_pushed(pusher, count)
                    kvpush_s = (decode.result() - begun_ns) / 1e9

                    decode.start("await_bare", names[:count], 1)
                    writes = [bare.write_of(remote, local_ids, remote_ids) for remote in remotes[:count]]
                    time.sleep(_READY_S)
                    begun_ns = bare.write(writes)
                    bare_s = (decode.result() - begun_ns) / 1e9

                    decode.start("await_stream", num_bytes)
                    time.sleep(_READY_S)
                    begun_ns = stream.send(num_bytes)
                    stream_s = (decode.result() - begun_ns) / 1e9
                    copy_s = copy()
                    if repetition >= 0:
                        through_kvpush.append(kvpush_s)
                        through_bare.append(bare_s)
                        streamed.append(stream_s)
                        copied.append(copy_s)
                figures.append(
                    Figure.against(
                        f"{_BLOCKS} x 64 KiB to each of {count} engine{'s' if count > 1 else ''}",
                        Samples.of(through_kvpush),
                        BARE,
                        Samples.of(through_bare),
                        num_bytes=num_bytes,
                        beside={
                            limits.STREAM: Samples.of(streamed).median,
                            limits.MEMCPY: Samples.of(copied).median,
                        },
                        note="from the first push() until the last engine has its ReceiveFinished; the bare loop posts "
                        "a WRITE to each, then waits for all",
                        series="the same 4 MiB to each, by number of engines",
                        x=count,
                        x_name="engines",
                    )
                )
            decode.call("shut_sink")
            for name in names[1:]:
                decode.call("shut", name)
    finally:
        bare.close()
    return figures
