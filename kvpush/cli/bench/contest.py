"""kvpush, and the limits that the machine sets, in turn: same memory at decode, same descriptors, same number of bytes.

The bare NIXL loop spins on both sides; kvpush sleeps until it is called, and its callers wait in ``wait()``. The TCP
stream is one socket that is written and read by one thread each. Blocks are in random order unless told otherwise, so
that NIXL cannot merge neighbours.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpush.cli.bench import limits
from kvpush.cli.bench.bare_nixl import BareRemote, BareWriter
from kvpush.cli.bench.context import Bench
from kvpush.cli.bench.pair import DecodeProcess, Shape, await_pushed, await_registered, connected_pair
from kvpush.cli.bench.report import Figure, Samples
from kvpush.config import Config
from kvpush.pusher import PrefillPusher

BARE = "bare loop"
BlockIds = npt.NDArray[np.int64]

_ENGINE_ID = "contest"
_READY_S = 0.002  # for the other side's thread to reach its wait
_WARM_UP = 2


@dataclass(slots=True)
class Times:
    """Seconds from the begin on one side to the end seen on the other."""

    kvpush: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    stream: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)

    def figure(self, name: str, **rest: Any) -> Figure:
        """kvpush's median against the bare loop's, with the other limits beside it."""
        others = {limits.STREAM: self.stream, limits.MEMCPY: self.memcpy}
        beside = {name: Samples.of(values).median for name, values in others.items() if values}
        return Figure.against(name, Samples.of(self.kvpush), BARE, Samples.of(self.bare), beside=beside, **rest)

    def clear(self) -> None:
        """Forget what was for warming up."""
        for values in (self.kvpush, self.bare, self.stream, self.memcpy):
            values.clear()


class Contest:
    """Between one pair of processes, for one shape of cache."""

    def __init__(
        self,
        decode: DecodeProcess,
        pusher: PrefillPusher,
        shape: Shape,
        bare: BareWriter,
        remote: BareRemote,
        stream: limits.TcpSource,
    ) -> None:
        self._decode = decode
        self._pusher = pusher
        self._shape = shape
        self._bare = bare
        self._remote = remote
        self._stream = stream
        self._rng = np.random.default_rng(2)
        self._names = map(str, itertools.count())

    def shuffled(self, num_blocks: int) -> tuple[BlockIds, BlockIds]:
        """Some of prefill's blocks and as many of decode's, in random order."""
        local_ids, remote_ids = (self._rng.permutation(self._shape.num_blocks)[:num_blocks] for _ in range(2))
        return local_ids, remote_ids

    def run(
        self,
        repetitions: int,
        num_blocks: int,
        *,
        num_chunks: int = 1,
        waited_s: float = 0.01,
        in_order: bool = False,
        bare_per_push: int = 1,
    ) -> Times:
        """Everybody in turn, ``repetitions`` times. ``waited_s``: how long kvpush has had nothing to do."""
        times = Times()
        num_bytes = num_blocks * self._shape.num_layers * self._shape.block_bytes
        copy = limits.copier(num_bytes, self._shape.device)
        for repetition in range(-_WARM_UP, repetitions):
            if repetition == 0:
                times.clear()
            chosen = self.shuffled(num_blocks)
            local_ids, remote_ids = (np.sort(ids) for ids in chosen) if in_order else chosen
            chunks = np.array_split(np.arange(num_blocks), num_chunks)
            times.kvpush.append(self.push(local_ids, remote_ids, chunks, waited_s))
            times.bare += [self.write(local_ids, remote_ids, chunks) for _ in range(bare_per_push)]
            times.stream.append(self.send(num_bytes))
            times.memcpy.append(copy())
        return times

    def push(self, local_ids: BlockIds, remote_ids: BlockIds, chunks: Sequence[BlockIds], waited_s: float) -> float:
        """From the first ``push()`` of a transfer to the ``ReceiveFinished`` that ``wait()`` returns on decode."""
        transfer_id = next(self._names)
        self._decode.call("expect", _ENGINE_ID, [(transfer_id, remote_ids)], self._pusher.address)
        self._decode.start("await_done", _ENGINE_ID, 1)
        await_registered(self._pusher, 1)
        time.sleep(waited_s)
        begun_ns = time.monotonic_ns()
        for chunk in chunks:
            first = int(chunk[0])
            last = chunk is chunks[-1]
            self._pusher.push(transfer_id, local_ids[chunk], first_block=first, last=last)
        await_pushed(self._pusher)
        done_ns: int = self._decode.result()[transfer_id]
        return (done_ns - begun_ns) / 1e9

    def push_stream(self, count: int) -> list[float]:
        """Pushes of one block, the next as soon as prefill has seen the end of the last."""
        local_ids, remote_ids = self.shuffled(count)
        ids = [next(self._names) for _ in range(count)]
        receives = [(name, [block]) for name, block in zip(ids, remote_ids, strict=True)]
        self._decode.call("expect", _ENGINE_ID, receives, self._pusher.address)
        self._decode.start("await_done", _ENGINE_ID, count)
        await_registered(self._pusher, count)
        begun_ns = {}
        for transfer_id, block_id in zip(ids, local_ids, strict=True):
            begun_ns[transfer_id] = time.monotonic_ns()
            self._pusher.push(transfer_id, [block_id])
            await_pushed(self._pusher)
        done_ns: dict[str, int] = self._decode.result()
        return [(done_ns[transfer_id] - begun_ns[transfer_id]) / 1e9 for transfer_id in ids]

    def write(self, local_ids: BlockIds, remote_ids: BlockIds, chunks: Sequence[BlockIds]) -> float:
        """The same by the bare loop, one WRITE a chunk."""
        self._decode.start("await_bare", [_ENGINE_ID], len(chunks))
        writes = [self._bare.write_of(self._remote, local_ids[chunk], remote_ids[chunk]) for chunk in chunks]
        time.sleep(_READY_S)
        begun_ns = self._bare.write(writes)
        done_ns: int = self._decode.result()
        return (done_ns - begun_ns) / 1e9

    def write_one(self) -> float:
        """One block by the bare loop."""
        local_ids, remote_ids = self.shuffled(1)
        return self.write(local_ids, remote_ids, [np.arange(1)])

    def send(self, num_bytes: int) -> float:
        """As many bytes over the TCP stream."""
        self._decode.start("await_stream", num_bytes)
        time.sleep(_READY_S)
        begun_ns = self._stream.send(num_bytes)
        done_ns: int = self._decode.result()
        return (done_ns - begun_ns) / 1e9


@contextlib.contextmanager
def contest(bench: Bench, shape: Shape, config: Config | None = None) -> Iterator[Contest]:
    """Connected, all of them."""
    config = config or bench.config
    decode = bench.decode
    with connected_pair(shape, config, decode, _ENGINE_ID) as pusher:
        bare = BareWriter(shape.tensors(fill=True), config)
        try:
            remote = bare.connect(*decode.call("open_bare", _ENGINE_ID, config))
            with limits.TcpSource(decode.call("open_sink", shape.num_bytes), shape.num_bytes) as stream:
                yield Contest(decode, pusher, shape, bare, remote, stream)
            decode.call("shut_sink")
        finally:
            bare.close()
