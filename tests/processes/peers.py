"""Real processes with a pusher or a receiver in them, driven over pipes; and memory that knows what belongs where.

A :class:`Peer` is one process. The test calls the methods of its :class:`PrefillService` or :class:`DecodeService` by
name, signals it by its process id, and always gets rid of it: use it as a context manager, or take it from a fixture.

An :class:`Arena` is a KV cache whose blocks lie between guards. Every byte that nobody may write holds ``CANARY``; what
a transfer writes is a function of (transfer id, layer, position), so a block in the wrong place, of the wrong request
or of an earlier life is told from the right one.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import torch

import kvpush
from kvpush import wire
from kvpush.identity import holdings_of
from kvpush.layout import DEFAULT_GROUP, geometry_of
from kvpush.parallel import Share

CANARY = 0xEE
PATIENCE_S = 60.0  # for anything that must happen; a busy machine makes it slow, not wrong

# Forked from a server that has imported the heavy modules, a process is up in half a second and shares nothing.
_processes = mp.get_context("forkserver")
_processes.set_forkserver_preload(["torch", "kvpush"])


def until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S, what: str = "") -> Any:
    """The first truthy value of ``condition()``. Fails when none comes in time."""
    end_s = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        if time.monotonic() >= end_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what or condition}")
        time.sleep(0.001)


def config(**settings: Any) -> kvpush.Config:
    """Over loopback, whatever other networks the machine has."""
    return kvpush.Config(net_devices="lo", **settings)


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Two layers of 4 KiB blocks, unless told otherwise."""

    blocks: int = 64
    layers: int = 2
    heads: int = 2
    tokens: int = 16
    head_size: int = 32
    guard_bytes: int = 64

    @property
    def block_bytes(self) -> int:
        return 2 * self.heads * self.tokens * self.head_size * 2

    def spec(self, model: str = "tests/bf16") -> kvpush.KVCacheSpec:
        return kvpush.KVCacheSpec(dims="BKHND", model=model)


class Arena:
    """A cache in "BKHND" and bfloat16, a guard on either side of every block of every layer."""

    def __init__(self, shape: Shape = Shape()) -> None:
        self.shape = shape
        pitch = shape.block_bytes + 2 * shape.guard_bytes
        self._storages = [torch.full((shape.blocks, pitch), CANARY, dtype=torch.uint8) for _ in range(shape.layers)]
        self._bytes = [storage.numpy() for storage in self._storages]
        self._inside = slice(shape.guard_bytes, shape.guard_bytes + shape.block_bytes)
        axes = (2, shape.heads, shape.tokens, shape.head_size)
        self.caches = {
            f"layers.{layer}": storage[:, self._inside].view(torch.bfloat16).unflatten(1, axes)
            for layer, storage in enumerate(self._storages)
        }
        self._ramp = np.arange(shape.block_bytes // 4, dtype=np.uint32) * np.uint32(0x9E3779B1)

    def fill(self, transfer_id: str, block_ids: Sequence[int], first_block: int = 0) -> None:
        """Compute the transfer's positions into these blocks."""
        for layer in range(self.shape.layers):
            self._bytes[layer][list(block_ids), self._inside] = self._pattern(
                transfer_id, layer, first_block, len(block_ids)
            )

    def clear(self, block_ids: Sequence[int]) -> None:
        """Back to canaries."""
        for layer in self._bytes:
            layer[list(block_ids), self._inside] = CANARY

    def holds(self, transfer_id: str, block_ids: Sequence[int], first_block: int = 0) -> bool:
        """Whether these blocks hold exactly the transfer's positions, in every layer."""
        return all(
            np.array_equal(
                self._bytes[layer][list(block_ids), self._inside],
                self._pattern(transfer_id, layer, first_block, len(block_ids)),
            )
            for layer in range(self.shape.layers)
        )

    def is_clean(self, block_ids: Sequence[int] | None = None) -> bool:
        """Whether these blocks, by default all, hold nothing but canaries."""
        chosen = slice(None) if block_ids is None else list(block_ids)
        return all(bool((layer[chosen, self._inside] == CANARY).all()) for layer in self._bytes)

    def guards_are_intact(self) -> bool:
        """Whether not one byte between the blocks was touched."""
        guard = self.shape.guard_bytes
        return all(
            bool((layer[:, :guard] == CANARY).all() and (layer[:, -guard:] == CANARY).all()) for layer in self._bytes
        )

    def _pattern(self, transfer_id: str, layer: int, first_block: int, count: int) -> np.ndarray:
        positions = np.arange(first_block, first_block + count, dtype=np.uint32)
        key = np.uint32(zlib.crc32(f"{transfer_id}/{layer}".encode()))
        keys = (positions + np.uint32(1)) * np.uint32(0x85EBCA6B) ^ key
        return np.ascontiguousarray(self._ramp[np.newaxis, :] ^ keys[:, np.newaxis]).view(np.uint8)


# --- messages --------------------------------------------------------------------------------------------------------


def register(transfer_id: str, epoch: int, packed: bytes, remaining_ms: int = 60_000) -> wire.Register:
    """For a cache with one group. ``packed``: block ids as they travel."""
    return wire.Register(transfer_id, epoch, (wire.Want(DEFAULT_GROUP, 0, packed),), remaining_ms)


def welcome(engine_id: str, incarnation: str, agent_name: str, arena: Arena) -> wire.Welcome:
    """What a prefill engine of one rank, with the same cache, says to those that it accepts."""
    holdings = holdings_of(geometry_of(arena.caches, arena.shape.spec()))
    return wire.Welcome(engine_id, incarnation, Share(), holdings, agent_name)


# --- events ----------------------------------------------------------------------------------------------------------


class Inbox:
    """What a side's ``poll()`` has said so far."""

    def __init__(self, side: kvpush.PrefillPusher | kvpush.DecodeReceiver) -> None:
        self.side = side
        self.finished: dict[str, list[Any]] = {}
        self.released: dict[str, list[kvpush.BlocksReleased]] = {}

    def poll(self) -> None:
        for event in self.side.poll():
            kind = self.released if isinstance(event, kvpush.BlocksReleased) else self.finished
            kind.setdefault(event.transfer_id, []).append(event)

    def outcome(self, transfer_id: str, timeout_s: float = PATIENCE_S) -> Any:
        """The one end of a transfer."""

        def end() -> Any:
            self.poll()
            return self.finished.get(transfer_id)

        return only(until(end, timeout_s, f"the end of {transfer_id}"))

    def outcomes(self, transfer_ids: Iterable[str], timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        return {transfer_id: self.outcome(transfer_id, timeout_s) for transfer_id in transfer_ids}

    def reusable(self, transfer_id: str, timeout_s: float = PATIENCE_S) -> str:
        """Wait until the transfer's blocks are the caller's again: ``"outcome"``, ``"proven"`` or ``"unproven"``."""

        def given_back() -> str:
            self.poll()
            if transfer_id in self.released:
                return "proven" if only(self.released[transfer_id]).proven else "unproven"
            ends = self.finished.get(transfer_id)
            return "outcome" if ends and only(ends).blocks_reusable else ""

        return str(until(given_back, timeout_s, f"the blocks of {transfer_id}"))


def only(items: Sequence[Any]) -> Any:
    assert len(items) == 1, f"exactly one expected: {items}"
    return items[0]


@dataclass(frozen=True)
class Resources:
    """What a process must not collect."""

    descriptors: int
    threads: int
    rss_mib: float


def resources() -> Resources:
    """Of this process, now."""
    gc.collect()
    rss_mib = psutil.Process().memory_info().rss / 2**20
    return Resources(len(os.listdir("/proc/self/fd")), threading.active_count(), rss_mib)


# --- what runs in the process ----------------------------------------------------------------------------------------


class _Service:
    """Common to both ends. Its methods are what a test calls."""

    side: Any
    arena: Arena
    inbox: Inbox

    def outcome(self, transfer_id: str, timeout_s: float = PATIENCE_S) -> Any:
        return self.inbox.outcome(transfer_id, timeout_s)

    def outcomes(self, transfer_ids: list[str], timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        return self.inbox.outcomes(transfer_ids, timeout_s)

    def reusable(self, transfer_id: str, timeout_s: float = PATIENCE_S) -> str:
        return self.inbox.reusable(transfer_id, timeout_s)

    def engines(self) -> list[kvpush.EngineSnapshot]:
        return list(self.side.engines())

    def stats(self) -> dict[str, int]:
        return dict(self.side.stats())

    def is_healthy(self) -> bool:
        return bool(self.side.healthy())

    def resources(self) -> Resources:
        return resources()

    def holds(self, transfer_id: str, block_ids: list[int], first_block: int = 0) -> bool:
        return self.arena.holds(transfer_id, block_ids, first_block)

    def is_clean(self, block_ids: list[int] | None = None) -> bool:
        return self.arena.is_clean(block_ids)

    def guards_are_intact(self) -> bool:
        return self.arena.guards_are_intact()

    def close(self) -> kvpush.CloseReport:
        report: kvpush.CloseReport = self.side.close()
        return report


class PrefillService(_Service):
    """A prefill engine's process."""

    def __init__(self, engine_id: str, shape: Shape, listen: str, settings: dict[str, Any]) -> None:
        self.arena = Arena(shape)
        self.side = kvpush.PrefillPusher(
            engine_id, self.arena.caches, shape.spec(), listen=listen, config=config(**settings)
        )
        self.inbox = Inbox(self.side)

    def address(self) -> tuple[str, int]:
        address: tuple[str, int] = self.side.address
        return address

    def push(self, transfer_id: str, block_ids: list[int], **options: Any) -> None:
        self.arena.fill(transfer_id, block_ids, options.get("first_block", 0))
        self.side.push(transfer_id, block_ids, **options)


class DecodeService(_Service):
    """A decode engine's process."""

    def __init__(self, engine_id: str, shape: Shape, settings: dict[str, Any]) -> None:
        self.arena = Arena(shape)
        self.side = kvpush.DecodeReceiver(engine_id, self.arena.caches, shape.spec(), config=config(**settings))
        self.inbox = Inbox(self.side)

    def expect(self, transfer_id: str, block_ids: list[int], source: tuple[str, int], **options: Any) -> None:
        self.side.expect(transfer_id, block_ids, source=source, **{"source_engine_id": "p0"} | options)

    def cancel(self, transfer_id: str) -> None:
        self.side.cancel(transfer_id)


def _serve(service: type[Any], arguments: dict[str, Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    made = service(**arguments)
    pipe.send((True, None))
    with contextlib.suppress(EOFError):  # the test is over
        while True:
            method, args, options = pipe.recv()
            try:
                answer = (True, getattr(made, method)(*args, **options))
            except BaseException:  # noqa: BLE001  # the test shall see it, whatever it is
                answer = (False, traceback.format_exc())
            pipe.send(answer)
    made.close()


# --- the test's handle on it -----------------------------------------------------------------------------------------


class Peer:
    """One process. ``call`` runs a method of its service and returns or raises what came of it."""

    def __init__(self, service: type[Any], **arguments: Any) -> None:
        self._pipe, theirs = _processes.Pipe()
        self._process = _processes.Process(target=_serve, args=(service, arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._unanswered = 1
        self._is_over = False

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Run it and wait for the answer."""
        self.begin(method, *args, **options)
        return self.finish()

    def begin(self, method: str, *args: Any, **options: Any) -> None:
        """Run it; :meth:`finish` waits for the answer."""
        while self._unanswered:
            self.finish()
        self._pipe.send((method, args, options))
        self._unanswered += 1

    def finish(self) -> Any:
        """The answer to the oldest call. The first answer of all says that the process is up."""
        assert self._pipe.poll(PATIENCE_S + 10), f"process {self.pid} does not answer"
        is_good, answer = self._pipe.recv()
        self._unanswered -= 1
        assert is_good, f"in process {self.pid}:\n{answer}"
        return answer

    def wait_until_up(self) -> Peer:
        """Once the service is made."""
        while self._unanswered:
            self.finish()
        return self

    def freeze(self) -> None:
        """SIGSTOP, and wait until every thread has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        stopped = psutil.Process(self.pid)
        until(lambda: stopped.status() == psutil.STATUS_STOPPED, what=f"process {self.pid} stops")

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, frozen or not; gone and reaped when this returns."""
        os.kill(self.pid, signal.SIGKILL)
        self.join()

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def join(self) -> int:
        """Its exit code, once it has ended."""
        self._process.join(PATIENCE_S)
        code = self._process.exitcode
        assert code is not None, f"process {self.pid} does not end"
        return code

    def close(self) -> None:
        """End it, whatever state it is in. Twice is fine."""
        if self._is_over:
            return
        self._is_over = True
        with contextlib.suppress(ProcessLookupError):
            if self._process.is_alive():
                os.kill(self.pid, signal.SIGKILL)
        self.join()
        self._process.close()
        self._pipe.close()

    def __enter__(self) -> Peer:
        return self.wait_until_up()

    def __exit__(self, *_: object) -> None:
        self.close()

    def leave(self) -> int:
        """Let it close in order, by hanging up; its exit code."""
        self._pipe.close()
        return self.join()


class Fleet:
    """Makes peers and gets rid of them all."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []

    def prefill(
        self, engine_id: str = "p0", shape: Shape = Shape(), listen: str = "127.0.0.1:0", **settings: Any
    ) -> Peer:
        return self._add(
            Peer(PrefillService, engine_id=engine_id, shape=shape, listen=listen, settings=settings)
        ).wait_until_up()

    def decode(self, engine_id: str = "d0", shape: Shape = Shape(), *, wait: bool = True, **settings: Any) -> Peer:
        peer = self._add(Peer(DecodeService, engine_id=engine_id, shape=shape, settings=settings))
        return peer.wait_until_up() if wait else peer

    def _add(self, peer: Peer) -> Peer:
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


@contextlib.contextmanager
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    try:
        yield made
    finally:
        made.close()


# --- the test's own end ----------------------------------------------------------------------------------------------


class Prefill:
    """A pusher in the test's own process."""

    def __init__(self, engine_id: str = "p0", shape: Shape = Shape(), listen: str = "127.0.0.1:0", **settings: Any):
        self.arena = Arena(shape)
        self.pusher = kvpush.PrefillPusher(
            engine_id, self.arena.caches, shape.spec(), listen=listen, config=config(**settings)
        )
        self.inbox = Inbox(self.pusher)
        self.address = self.pusher.address

    def push(self, transfer_id: str, block_ids: Sequence[int], **options: Any) -> None:
        self.arena.fill(transfer_id, block_ids, options.get("first_block", 0))
        self.pusher.push(transfer_id, block_ids, **options)

    def states(self) -> dict[str, str]:
        return {engine.engine_id: engine.state for engine in self.pusher.engines()}

    def __enter__(self) -> Prefill:
        return self

    def __exit__(self, *_: object) -> None:
        self.pusher.close()


class Decode:
    """A receiver in the test's own process."""

    def __init__(self, engine_id: str = "d0", shape: Shape = Shape(), **settings: Any) -> None:
        self.arena = Arena(shape)
        self.receiver = kvpush.DecodeReceiver(engine_id, self.arena.caches, shape.spec(), config=config(**settings))
        self.inbox = Inbox(self.receiver)

    def expect(self, transfer_id: str, block_ids: Sequence[int], source: tuple[str, int], **options: Any) -> None:
        self.receiver.expect(transfer_id, block_ids, source=source, **{"source_engine_id": "p0"} | options)

    def __enter__(self) -> Decode:
        return self

    def __exit__(self, *_: object) -> None:
        self.receiver.close()


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
