"""The processes of the demo, and the pipes to them. Nothing in here waits without a limit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TypeAlias

from kvpush.cli.demo.engines import run_engine
from kvpush.cli.demo.messages import EngineSettings, Order, Report, Role, RouterPipe, Stop

SEND_TIMEOUT_S = 5  # an engine that does not read its orders for so long is not going to
STOP_TIMEOUT_S = 5.0  # to say goodbye and end

# NIXL and UCX complain on stderr of a peer that was killed in the middle of a WRITE. Here that is the plan, and kvpush
# reports it; set the variables to hear them all the same.
_QUIET_LIBRARIES = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}

_SPAWN = multiprocessing.get_context("spawn")  # fork() would copy NIXL's and torch's threads half


@dataclass(frozen=True, slots=True)
class Died:
    """An engine's process ended, and everything that it reported before has been delivered."""

    exit_code: int

    @property
    def how(self) -> str:
        """In words."""
        if self.exit_code < 0:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        return f"ended with exit code {self.exit_code}"


News: TypeAlias = Report | Died


@dataclass(slots=True, eq=False)
class _Member:
    process: SpawnProcess
    pipe: RouterPipe
    is_open: bool = True  # more may come through the pipe


class Fleet:
    """Engine processes by engine id. As a context manager, it leaves none behind."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._members: dict[str, _Member] = {}
        for name, level in _QUIET_LIBRARIES.items():
            os.environ.setdefault(name, level)  # inherited

    def start(self, role: Role, engine_id: str) -> int:
        """Start an engine in a process of its own; the process id."""
        ours, theirs = _SPAWN.Pipe(duplex=True)
        _limit_send_time(ours)
        process = _SPAWN.Process(
            target=run_engine,
            args=(role, engine_id, theirs, self._settings),
            name=f"kvpush-demo {engine_id}",
            daemon=True,
        )
        with (
            _signals_blocked()
        ):  # inherited: Ctrl-C goes to every process of a terminal, and the router shall order the end
            process.start()
        theirs.close()
        self._members[engine_id] = _Member(process, ours)
        assert process.pid is not None, "it was started"
        return process.pid

    def send(self, engine_id: str, order: Order) -> None:
        """Hand over an order. What cannot be delivered is dropped: :meth:`receive` tells of the death."""
        member = self._members[engine_id]
        if not member.is_open:
            return
        try:
            member.pipe.send(order)
        except BlockingIOError:  # it does not read: frozen, or worse
            member.process.kill()
        except (BrokenPipeError, ConnectionResetError):
            pass

    def receive(self, timeout_s: float) -> list[tuple[str, News]]:
        """What engines have reported, and which of them died, after waiting up to ``timeout_s`` for the first."""
        pipes = {member.pipe: engine_id for engine_id, member in self._members.items() if member.is_open}
        news: list[tuple[str, News]] = []
        for pipe in wait(list(pipes), timeout_s):
            engine_id = pipes[pipe]  # type: ignore[index]  # wait() returns what it was given
            news += [(engine_id, item) for item in self._read(self._members[engine_id])]
        return news

    def _read(self, member: _Member) -> Iterator[News]:
        try:
            while member.pipe.poll():
                yield member.pipe.recv()
        except (EOFError, ConnectionResetError):
            yield self._bury(member)

    def _bury(self, member: _Member) -> Died:
        """The pipe is closed, so the process has ended or is about to."""
        member.is_open = False
        member.pipe.close()
        member.process.join(STOP_TIMEOUT_S)
        if member.process.exitcode is None:
            member.process.kill()
            member.process.join(STOP_TIMEOUT_S)
        return Died(member.process.exitcode or 0)

    def kill(self, engine_id: str) -> float:
        """SIGKILL, and when that was."""
        killed_at_s = time.monotonic()
        self._members[engine_id].process.kill()
        return killed_at_s

    def stop(self, engine_ids: list[str]) -> list[tuple[str, News]]:
        """End these in order, at the same time. Those that do not come to an end are killed. What they had to say."""
        for engine_id in engine_ids:
            self.send(engine_id, Stop())
        news: list[tuple[str, News]] = []
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while any(self._members[engine_id].is_open for engine_id in engine_ids):
            news += self.receive(0.1)
            if time.monotonic() >= deadline_s:
                for engine_id in engine_ids:
                    self.kill(engine_id)
        return news

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members.values():
            member.process.kill()
        for member in self._members.values():
            member.process.join(STOP_TIMEOUT_S)
            member.pipe.close()


def _limit_send_time(pipe: Connection[Order, Report]) -> None:
    """Writing to an engine that does not read ends after a while, with BlockingIOError."""
    with socket.socket(fileno=pipe.fileno()) as endpoint:
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        endpoint.detach()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """SIGINT and SIGTERM wait until the end of this block. A child that is started in it begins life like that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
