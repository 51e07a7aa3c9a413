"""Two processes: this one pushes, and a spawned one receives and does as it is told over a pipe.

Both read ``time.monotonic_ns()``, which on Linux is one clock for the whole machine, so an instant in one process and
an instant in the other can be subtracted.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from kvpush.cli.bench import patterns
from kvpush.cli.bench.bare_nixl import BareReader, await_writes
from kvpush.cli.bench.limits import TcpSink
from kvpush.config import Config
from kvpush.errors import ConfigurationError
from kvpush.events import Outcome, PushFinished, ReceiveFinished
from kvpush.layout import KVCacheSpec
from kvpush.pusher import PrefillPusher
from kvpush.receiver import DecodeReceiver

ANSWER_TIMEOUT_S = 120.0  # spawning imports torch, and opening makes the process's first NIXL agent
EXIT_TIMEOUT_S = 5.0
REGISTERED_TIMEOUT_S = 60.0
TOKENS = 16  # per block
SPEC = KVCacheSpec(dims="BND", model="kvpush bench")
PREFILL_ID = "p0"


def patient(net_devices: str) -> Config:
    """What is measured with, but for failures: defaults, and nobody is given up for lost because the CPUs are taken."""
    return Config(net_devices=net_devices, liveness_timeout_s=60.0, stall_timeout_s=60.0)


class BenchError(Exception):
    """A measurement could not be made."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A cache: so many layers of so many blocks, each of ``block_bytes`` in one piece, on one device."""

    num_layers: int
    num_blocks: int
    block_bytes: int
    device: str = "cpu"

    @property
    def num_bytes(self) -> int:
        """Of all blocks of all layers."""
        return self.num_layers * self.num_blocks * self.block_bytes

    def on(self, device: str) -> Shape:
        """The same shape there."""
        return replace(self, device=device)

    def tensors(self, *, fill: bool) -> dict[str, torch.Tensor]:
        """The cache. Filled, its pages exist before they are measured; if not, it takes no memory until written."""
        sizes = (self.num_blocks, TOKENS, self.block_bytes // TOKENS)
        make = torch.ones if fill else torch.empty
        cache = {
            f"layers.{layer}": make(sizes, dtype=torch.uint8, device=self.device) for layer in range(self.num_layers)
        }
        if self.device != "cpu":
            torch.cuda.synchronize()  # NIXL reads the memory without asking the stream that filled it
        return cache


class DecodeProcess:
    """The other process. Calls are answered one at a time, in order."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, name: str, *args: Any) -> None:
        """Begin a call; :meth:`result` waits for its answer."""
        self._pipe.send((name, args))

    def result(self) -> Any:
        """The answer of the call that was started. Raises :class:`BenchError`, and what the user got wrong."""
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise BenchError(f"the decode process did not answer within {ANSWER_TIMEOUT_S:g} s")
        try:
            is_ok, answer = self._pipe.recv()
        except EOFError:
            raise BenchError("the decode process ended") from None
        if isinstance(answer, ConfigurationError):  # what the command line said, such as a device that is not there
            raise answer
        if not is_ok:
            raise BenchError(f"the decode process failed:\n{answer}")
        return answer

    def call(self, name: str, *args: Any) -> Any:
        """Have :class:`_Decode` run a method, and wait."""
        self.start(name, *args)
        return self.result()

    def freeze(self) -> None:
        """Stop the process where it stands: its sockets stay open and nobody answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without a word, as ``kill -9`` does."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None, "the process was started"
        os.kill(self._process.pid, number)

    def close(self) -> None:
        """End the process, frozen or not."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGCONT)
        self._process.join(EXIT_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(EXIT_TIMEOUT_S)
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: multiprocessing.connection.Connection) -> None:
    decode = _Decode()
    try:
        while (request := pipe.recv()) is not None:
            name, args = request
            try:
                answer = True, getattr(decode, name)(*args)
            except ConfigurationError as exc:
                answer = False, exc
            except Exception:  # noqa: BLE001  # told to the other process, which decides
                answer = False, traceback.format_exc()
            pipe.send(answer)
    except (EOFError, OSError):
        pass  # the other process is gone
    finally:
        decode.close()


class _Decode:
    """What the decode process can be asked to do."""

    def __init__(self) -> None:
        self._receivers: dict[str, DecodeReceiver] = {}
        self._caches: dict[str, dict[str, torch.Tensor]] = {}
        self._bare: dict[str, BareReader] = {}
        self._sink: TcpSink | None = None

    def open(self, engine_id: str, shape: Shape, config: Config, fill: bool) -> None:
        cache = self._caches[engine_id] = shape.tensors(fill=fill)
        self._receivers[engine_id] = DecodeReceiver(engine_id, cache, SPEC, config=config)

    def shut(self, engine_id: str) -> None:
        if engine_id in self._bare:
            self.shut_bare(engine_id)
        self._receivers.pop(engine_id).close()
        del self._caches[engine_id]

    def expect(self, engine_id: str, receives: Sequence[tuple[str, Any]], source: tuple[str, int]) -> None:
        for transfer_id, block_ids in receives:
            self._receivers[engine_id].expect(transfer_id, block_ids, source=source, source_engine_id=PREFILL_ID)

    def cancel(self, engine_id: str, transfer_ids: Sequence[str]) -> None:
        for transfer_id in transfer_ids:
            self._receivers[engine_id].cancel(transfer_id)
        self._finished(engine_id, len(transfer_ids))

    def await_done(self, engine_id: str, count: int) -> dict[str, int]:
        """When each of the next ``count`` receives was seen to be done."""
        seen = self._finished(engine_id, count)
        failed = [event for event, _ in seen if event.outcome is not Outcome.done]
        if failed:
            raise BenchError(f"a receive failed: {failed[0]}")
        return {event.transfer_id: at_ns for event, at_ns in seen}

    def await_done_by_all(self, engine_ids: Sequence[str]) -> int:
        """When the next receive of each of these was done, and seen."""
        last_ns = 0
        for engine_id in engine_ids:
            last_ns = max(last_ns, *self.await_done(engine_id, 1).values())
        return last_ns

    def _finished(self, engine_id: str, count: int) -> list[tuple[ReceiveFinished, int]]:
        receiver = self._receivers[engine_id]
        seen: list[tuple[ReceiveFinished, int]] = []
        give_up_s = time.monotonic() + ANSWER_TIMEOUT_S / 2
        while len(seen) < count:
            events = receiver.wait(1.0)
            at_ns = time.monotonic_ns()
            seen += [(event, at_ns) for event in events if isinstance(event, ReceiveFinished)]
            if time.monotonic() > give_up_s:
                raise BenchError(f"{count - len(seen)} of {count} receives did not end")
        return seen

    def clear(self, engine_id: str) -> None:
        """Canaries in every block."""
        patterns.clear(self._caches[engine_id])

    def compare(self, engine_id: str, seed: int, block_ids: Sequence[int]) -> patterns.Comparison:
        """Every byte, with what prefill painted."""
        return patterns.compare(self._caches[engine_id], seed, block_ids)

    def cpu_s(self) -> float:
        return time.process_time()

    def open_bare(self, engine_id: str, config: Config) -> tuple[str, bytes, Any]:
        """A bare NIXL agent beside the receiver, over the same memory."""
        reader = self._bare[engine_id] = BareReader(self._caches[engine_id], config)
        return reader.agent_name, reader.metadata, reader.rows

    def open_lone_bare(self, engine_id: str, shape: Shape, config: Config) -> tuple[str, bytes, Any]:
        """A bare NIXL agent without a receiver, over memory of its own."""
        reader = self._bare[engine_id] = BareReader(shape.tensors(fill=False), config)
        return reader.agent_name, reader.metadata, reader.rows

    def shut_bare(self, engine_id: str) -> None:
        self._bare.pop(engine_id).close()

    def await_bare(self, engine_ids: Sequence[str], count: int) -> int:
        """When ``count`` bare WRITEs to each of these had arrived."""
        return await_writes([self._bare[engine_id] for engine_id in engine_ids], count)

    def open_sink(self, num_bytes: int) -> tuple[str, int]:
        """A TCP socket to send up to ``num_bytes`` at a time to."""
        self.shut_sink()
        self._sink = TcpSink(num_bytes)
        return self._sink.address

    def await_stream(self, num_bytes: int) -> int:
        """When so many bytes had been read from it."""
        assert self._sink is not None, "open_sink() comes first"
        return self._sink.receive(num_bytes)

    def shut_sink(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    def close(self) -> None:
        self.shut_sink()
        for reader in self._bare.values():
            reader.close()
        for receiver in self._receivers.values():
            receiver.close()


@contextlib.contextmanager
def connected_pair(
    shape: Shape,
    config: Config,
    decode: DecodeProcess,
    engine_id: str,
    *,
    close_decode: bool = True,
    **pusher_options: Any,
) -> Iterator[PrefillPusher]:
    """A pusher here and a receiver there, which have served one transfer: what follows meets a connected engine.

    With ``close_decode=False`` the other process may be gone in the end.
    """
    decode.call("open", engine_id, shape, config, True)
    with PrefillPusher(PREFILL_ID, shape.tensors(fill=True), SPEC, config=config, **pusher_options) as pusher:
        connect(pusher, decode, engine_id)
        yield pusher
    if close_decode:
        decode.call("shut", engine_id)  # after an error the other process may be in any state, and ends with this one


def connect(pusher: PrefillPusher, decode: DecodeProcess, engine_id: str) -> None:
    """Serve one transfer to an engine that is open there."""
    transfer_id = f"connect {engine_id}"
    decode.call("expect", engine_id, [(transfer_id, [0])], pusher.address)
    pusher.push(transfer_id, [0])
    await_pushed(pusher)
    decode.call("await_done", engine_id, 1)


def await_registered(pusher: PrefillPusher, count: int) -> None:
    """Wait until ``count`` registrations have arrived and nothing has been pushed for them."""
    give_up_s = time.monotonic() + REGISTERED_TIMEOUT_S
    while (arrived := pusher.stats().get("registrations_waiting", 0)) < count:
        if time.monotonic() > give_up_s:
            raise BenchError(f"{arrived} of {count} registrations arrived within {REGISTERED_TIMEOUT_S:g} s")
        time.sleep(0.0002)


def await_pushed(pusher: PrefillPusher, count: int = 1) -> int:
    """Wait until ``count`` pushes are done. When that was."""
    give_up_s = time.monotonic() + ANSWER_TIMEOUT_S / 2
    while count > 0:
        for event in pusher.wait(1.0):
            if isinstance(event, PushFinished):
                if event.outcome is not Outcome.done:
                    raise BenchError(f"a push failed: {event}")
                count -= 1
        if time.monotonic() > give_up_s:
            raise BenchError(f"{count} pushes did not end")
    return time.monotonic_ns()
