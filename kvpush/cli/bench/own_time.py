"""kvpush's own time per push: from ``push()`` to the posted WRITE, less what NIXL takes for itself.

The push meets a connected engine that has registered for it, and a loop that sleeps: the time to wake the loop's thread
is part of it. NIXL's part is timed at its own calls. The state machine's part is what the calls into the registry and
the push's lifecycle take in between, locks, clocks and bookkeeping included, timed in separate pushes so that the
clock reads of one measurement are not in the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvpush.cli.bench.pair import DecodeProcess, Shape, await_pushed, await_registered, connected_pair
from kvpush.cli.bench.report import Figure, Samples
from kvpush.config import Config
from kvpush.layout import MemoryKind, MemoryRange
from kvpush.lifecycle import PUSH
from kvpush.nixl_transport import NixlTransport
from kvpush.pusher import PrefillPusher
from kvpush.registry import Registry
from kvpush.transport import Indices, RemoteHandle, WriteHandle

OWN_LIMIT_S = 60e-6
FSM_LIMIT_S = 10e-6
SHAPE = Shape(num_layers=1, num_blocks=512, block_bytes=65536)
_BATCH = 16  # pushes whose registrations wait at the same time
_PAUSE_S = 0.001


class Stopwatch:
    """Adds up the time that is spent in some calls. One thread at a time."""

    def __init__(self) -> None:
        self.total_ns = 0
        self.ended_ns = 0  # the last of these calls

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun_ns = time.monotonic_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.ended_ns = time.monotonic_ns()
                self.total_ns += self.ended_ns - begun_ns

        return timed


class _TimedAgent:
    """NIXL's agent, with the two calls that post a WRITE timed."""

    def __init__(self, agent: Any, watch: Stopwatch) -> None:
        self._agent = agent
        self.make_prepped_xfer = watch.around(agent.make_prepped_xfer)
        self.transfer = watch.around(agent.transfer)
        self.get_new_notifs = agent.get_new_notifs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


class _Probe:
    """Watches a pusher from the outside: its transport, its registry and the push's lifecycle."""

    def __init__(self) -> None:
        self.nixl = Stopwatch()
        self.fsm = Stopwatch()
        self.fsm_until_posted_ns = 0

    def make_transport(
        self, agent_name: str, kind: MemoryKind, ranges: Sequence[MemoryRange], config: Config
    ) -> NixlTransport:
        """A transport factory."""
        return _WatchedTransport(self, agent_name, kind, ranges, config)

    def watch_fsm(self, registry: Registry) -> Callable[[], None]:
        """Time every call that reads or moves a state on the way of a push. Returns how to stop that."""
        watched: list[tuple[Any, str]] = [(registry, "need"), (registry, "pin"), (registry, "settle"), (PUSH, "fire")]
        for owner, name in watched:
            setattr(owner, name, self.fsm.around(getattr(owner, name)))

        def stop() -> None:
            for owner, name in watched:
                delattr(owner, name)  # the class's own method shows again

        return stop


class _WatchedTransport(NixlTransport):
    """Tells a probe when a WRITE is posted and what NIXL took for it."""

    def __init__(
        self, probe: _Probe, agent_name: str, kind: MemoryKind, ranges: Sequence[MemoryRange], config: Config
    ) -> None:
        super().__init__(agent_name, kind, ranges, config)
        self._probe = probe
        self._agent = _TimedAgent(self._agent, probe.nixl)

    def post_write(
        self, remote: RemoteHandle, local_indices: Indices, remote_indices: Indices, notification: bytes
    ) -> WriteHandle:
        self._probe.fsm_until_posted_ns = self._probe.fsm.total_ns
        return super().post_write(remote, local_indices, remote_indices, notification)


def measure(decode: DecodeProcess, config: Config, repetitions: int) -> list[Figure]:
    """Two processes, one push at a time."""
    probe = _Probe()
    figures = []
    with connected_pair(SHAPE, config, decode, "own", transport_factory=probe.make_transport) as pusher:
        for num_blocks, pause_s, what in (
            (1, _PAUSE_S, "1 block"),
            (1, 0.0, "1 block, one after the other"),
            (16, _PAUSE_S, "16 blocks"),
        ):
            own, nixl, _, _ = _pushes(pusher, decode, probe, num_blocks, repetitions, pause_s)
            stop = probe.watch_fsm(pusher._registry)
            try:
                _, _, fsm_posted, fsm_whole = _pushes(pusher, decode, probe, num_blocks, repetitions, pause_s)
            finally:
                stop()
            figures += [
                Figure.of_seconds(
                    f"own time to the posted WRITE, {what}",
                    own,
                    limit=OWN_LIMIT_S,
                    note="wall time from push() to the return of NIXL's transfer(), NIXL's own calls subtracted; the "
                    "loop's thread sleeps when the push comes, so its wake-up is included"
                    + ("; after 1 ms of nothing" if pause_s else ""),
                ),
                Figure.of_seconds(
                    f"state machine's part of it, {what}",
                    fsm_posted,
                    limit=FSM_LIMIT_S,
                    note="Registry.need(), Registry.pin() and the push's trigger, with lock and bookkeeping",
                ),
                Figure.of_seconds(
                    f"state machine, whole push, {what}",
                    fsm_whole,
                    note="the same, up to the outcome: Registry.settle() and the last trigger in addition",
                ),
                Figure.of_seconds(
                    f"NIXL's part, {what}",
                    nixl,
                    note="make_prepped_xfer() and transfer(); over cma the latter copies the bytes",
                ),
            ]
    return figures


def _pushes(
    pusher: PrefillPusher, decode: DecodeProcess, probe: _Probe, num_blocks: int, repetitions: int, pause_s: float
) -> tuple[Samples, Samples, Samples, Samples]:
    """Own time, NIXL's, and the state machine's up to the WRITE and in all."""
    rng = np.random.default_rng(1)
    own, nixl, fsm_posted, fsm_whole = [], [], [], []
    for batch in range(0, repetitions, _BATCH):
        block_ids = rng.permutation(SHAPE.num_blocks)[: _BATCH * num_blocks].reshape(_BATCH, num_blocks).tolist()
        ids = [f"{num_blocks}-{batch}-{index}-{probe.nixl.ended_ns}" for index in range(_BATCH)]
        decode.call("expect", "own", list(zip(ids, block_ids, strict=True)), pusher.address)
        await_registered(pusher, len(ids))
        decode.start("await_done", "own", len(ids))
        for transfer_id, blocks in zip(ids, block_ids, strict=True):
            if pause_s:
                time.sleep(pause_s)
            nixl_ns, fsm_ns = probe.nixl.total_ns, probe.fsm.total_ns
            begun_ns = time.monotonic_ns()
            pusher.push(transfer_id, blocks)
            await_pushed(pusher)
            nixl_ns = probe.nixl.total_ns - nixl_ns
            own.append((probe.nixl.ended_ns - begun_ns - nixl_ns) / 1e9)
            nixl.append(nixl_ns / 1e9)
            fsm_posted.append((probe.fsm_until_posted_ns - fsm_ns) / 1e9)
            fsm_whole.append((probe.fsm.total_ns - fsm_ns) / 1e9)
        decode.result()
    return Samples.of(own), Samples.of(nixl), Samples.of(fsm_posted), Samples.of(fsm_whole)
