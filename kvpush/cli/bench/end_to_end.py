"""From ``push()`` on prefill to ``ReceiveFinished`` on decode, against a bare NIXL loop in the same two processes.

kvpush and the bare loop take turns, over the same memory and the same descriptors, in random order of blocks so that
NIXL cannot merge neighbours. The bare loop spins on both sides; kvpush sleeps until it is called, and its callers wait
in ``wait()``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpush.cli.bench.bare_nixl import BareWriter
from kvpush.cli.bench.pair import SPEC, DecodeProcess, Shape, await_pushed, await_registered, connected_pair
from kvpush.cli.bench.report import Figure, Samples
from kvpush.config import Config
from kvpush.pusher import PrefillPusher

ONE_BLOCK_LIMIT = 2.0
BULK_LIMIT = 1.05
BLOCK_BYTES = 65536
_ENGINE_ID = "e2e"
_WARM_UP = 3
_STREAM = 16  # pushes whose receives are registered before the first of them starts
_BARE_PER_PUSH = 3  # of one block: so that some of them find both CPUs free on a machine that is not idle
_READY_S = 0.002  # for the other side's thread to reach its wait


@dataclass(frozen=True, slots=True)
class _Runs:
    """What was measured in turn."""

    kvpush: Samples
    bare: Samples


def measure_one_block(decode: DecodeProcess, config: Config, repetitions: int) -> list[Figure]:
    """Twice: after a pause, as while a prompt is computed, and one push after the other."""
    shape = Shape(1, 64, BLOCK_BYTES)
    with connected_pair(shape, config, decode, _ENGINE_ID) as pusher:
        bare = _bare_writer(shape, config, decode)
        after_pause = _alternate(pusher, bare, decode, shape, 1, repetitions, waited_s=0.05)
        in_stream = _alternate_streams(pusher, bare, decode, shape, repetitions)
    # the bare loop does the same in both: all its runs together are likelier to have some that nothing disturbed
    bare_runs = Samples.of([*after_pause.bare.values, *in_stream.bare.values])
    note = "one block, push() to ReceiveFinished returned by the receiver's wait()"
    return [
        Figure.against(
            "64 KiB end to end, after 50 ms of nothing",
            after_pause.kvpush,
            "bare loop",
            bare_runs,
            limit=ONE_BLOCK_LIMIT,
            note=f"{note}; both sides have slept, and the receive has waited for that long",
        ),
        Figure.against(
            "64 KiB end to end, one after the other",
            in_stream.kvpush,
            "bare loop",
            bare_runs,
            limit=ONE_BLOCK_LIMIT,
            note=f"{note}; the next push starts when prefill has seen the end of the last",
        ),
    ]


def measure_bulk(decode: DecodeProcess, config: Config, repetitions: int, num_blocks: int, label: str) -> list[Figure]:
    """Many blocks in one push."""
    shape = Shape(1, num_blocks, BLOCK_BYTES)
    with connected_pair(shape, config, decode, _ENGINE_ID) as pusher:
        bare = _bare_writer(shape, config, decode)
        runs = _alternate(pusher, bare, decode, shape, num_blocks, repetitions, waited_s=0.02)
    num_bytes = num_blocks * BLOCK_BYTES
    rates = [num_bytes / samples.median / 1e9 for samples in (runs.kvpush, runs.bare)]
    return [
        Figure.against(
            f"{num_bytes / 2**20:g} MiB in 64 KiB blocks, {label}",
            runs.kvpush,
            "bare loop",
            runs.bare,
            limit=BULK_LIMIT,
            note=f"one push, blocks in random order on both sides: {rates[0]:.2f} GB/s, bare loop {rates[1]:.2f} GB/s",
        )
    ]


def _bare_writer(shape: Shape, config: Config, decode: DecodeProcess) -> BareWriter:
    writer = BareWriter(shape.tensors(fill=True), SPEC, config)
    writer.connect(*decode.call("open_bare", _ENGINE_ID, config))
    return writer


def _alternate(
    pusher: PrefillPusher,
    bare: BareWriter,
    decode: DecodeProcess,
    shape: Shape,
    num_blocks: int,
    repetitions: int,
    waited_s: float,
) -> _Runs:
    rng = np.random.default_rng(2)
    kvpush_s, bare_s = [], []
    for repetition in range(-_WARM_UP, repetitions):
        local_ids = rng.permutation(shape.num_blocks)[:num_blocks]
        remote_ids = rng.permutation(shape.num_blocks)[:num_blocks]
        through_kvpush = _push_once(pusher, decode, f"{waited_s}/{repetition}", local_ids, remote_ids, waited_s)
        num_bare = _BARE_PER_PUSH if num_blocks == 1 else 1
        through_bare = [_write_once(bare, decode, local_ids, remote_ids) for _ in range(num_bare)]
        if repetition >= 0:
            kvpush_s.append(through_kvpush)
            bare_s += through_bare
    return _Runs(Samples.of(kvpush_s), Samples.of(bare_s))


def _alternate_streams(
    pusher: PrefillPusher, bare: BareWriter, decode: DecodeProcess, shape: Shape, repetitions: int
) -> _Runs:
    rng = np.random.default_rng(5)
    kvpush_s, bare_s = [], []
    for stream in range(max(1, repetitions // _STREAM)):
        local_ids = rng.permutation(shape.num_blocks)[:_STREAM]
        remote_ids = rng.permutation(shape.num_blocks)[:_STREAM]
        ids = [f"stream{stream}.{index}" for index in range(_STREAM)]
        decode.call(
            "expect", _ENGINE_ID, [(name, [block]) for name, block in zip(ids, remote_ids, strict=True)], pusher.address
        )
        decode.start("await_done", _ENGINE_ID, _STREAM)
        await_registered(pusher, _STREAM)
        begun_ns = {}
        for transfer_id, block_id in zip(ids, local_ids, strict=True):
            begun_ns[transfer_id] = time.monotonic_ns()
            pusher.push(transfer_id, [block_id])
            await_pushed(pusher)
        done_ns: dict[str, int] = decode.result()
        kvpush_s += [(done_ns[transfer_id] - begun_ns[transfer_id]) / 1e9 for transfer_id in ids]
        bare_s += [_write_once(bare, decode, local_ids[:1], remote_ids[:1]) for _ in range(_STREAM)]
    return _Runs(Samples.of(kvpush_s), Samples.of(bare_s))


def _push_once(
    pusher: PrefillPusher,
    decode: DecodeProcess,
    transfer_id: str,
    local_ids: npt.NDArray[np.int64],
    remote_ids: npt.NDArray[np.int64],
    waited_s: float,
) -> float:
    decode.call("expect", _ENGINE_ID, [(transfer_id, remote_ids)], pusher.address)
    decode.start("await_done", _ENGINE_ID, 1)
    await_registered(pusher, 1)
    time.sleep(waited_s)
    begun_ns = time.monotonic_ns()
    pusher.push(transfer_id, local_ids)
    await_pushed(pusher)
    done_ns: int = decode.result()[transfer_id]
    return (done_ns - begun_ns) / 1e9


def _write_once(
    bare: BareWriter, decode: DecodeProcess, local_ids: npt.NDArray[np.int64], remote_ids: npt.NDArray[np.int64]
) -> float:
    decode.start("await_bare")
    local_indices, remote_indices = bare.indices(local_ids), bare.indices(remote_ids)
    time.sleep(_READY_S)
    begun_ns = bare.write(local_indices, remote_indices)
    done_ns: int = decode.result()
    return (done_ns - begun_ns) / 1e9
