"""Three worlds for the same contract tests: the fake, NIXL inside one process, NIXL with peers in another process."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from contract_peer import CONFIG, Arrival, Cache, Peer

from kvpush.layout import MemoryKind
from kvpush.testing.fake_transport import Delivery, FakeFabric

FAKE = "fake"
IN_PROCESS = "nixl"
PROCESSES = "nixl-processes"

_START_TIMEOUT_S = 60.0  # importing NIXL imports torch
_ANSWER_TIMEOUT_S = 20.0
_serial = itertools.count(1)


def unique(name: str) -> str:
    """Agent names are never used twice."""
    return f"{name}#{os.getpid()}.{next(_serial)}"


class World:
    """Where a test's transports live. Everything that was made here is closed at the end of the test."""

    name: str

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def transport(self, agent_name, cache):
        """A transport of the kind under test."""
        raise NotImplementedError

    def writer(self, layers=2, blocks=8, block_bytes=256, *, name="writer"):
        """A transport to push from, and its cache, filled with noise."""
        cache = Cache(layers, blocks, block_bytes)
        cache.fill(next(_serial))
        transport = self.transport(unique(name), cache)
        self._stack.callback(transport.close)
        return transport, cache

    def peer(self, layers=2, blocks=8, block_bytes=256, *, name="peer"):
        """An agent to push to. Its cache has another layout than the writer's."""
        cache = Cache(layers, blocks, block_bytes, interleaved=True)
        peer = Peer(self.transport(unique(name), cache), cache)
        self._stack.callback(peer.close)
        return peer

    def close(self) -> None:
        self._stack.close()


class FakeWorld(World):
    name = FAKE

    def __init__(self) -> None:
        super().__init__()
        self.fabric = FakeFabric(delivery=Delivery.progress)

    def transport(self, agent_name, cache):
        return self.fabric.transport(agent_name, MemoryKind.dram, [cache.range], CONFIG)

    def kill(self, peer) -> None:
        self.fabric.kill(peer.agent_name)
        peer.progress = lambda: None

    def freeze(self, peer) -> None:
        self.fabric.freeze(peer.agent_name)

    def thaw(self, peer) -> None:
        self.fabric.thaw(peer.agent_name)


class InProcessWorld(World):
    name = IN_PROCESS

    def transport(self, agent_name, cache):
        from kvpush.nixl_transport import NixlTransport

        return NixlTransport(agent_name, MemoryKind.dram, [cache.range], CONFIG)


class PeerHost:
    """The process that hosts peers. It is shared by tests until one of them kills it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("contract_peer.py")), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, command, agent_name, *args):
        if not self._is_ready:
            assert self._answer(_START_TIMEOUT_S) == "ready"
            self._is_ready = True
        self._connection.send((command, agent_name, *args))
        return self._answer(_ANSWER_TIMEOUT_S)

    def _answer(self, timeout_s):
        assert self._connection.poll(timeout_s), "the peers' process does not answer"
        return self._connection.recv()

    def send_signal(self, number) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()


class RemotePeer:
    """A peer in another process, which drives its own progress unless it is paused."""

    def __init__(self, host: PeerHost, agent_name, layers, blocks, block_bytes) -> None:
        self.host = host
        self.agent_name = agent_name
        self.arrivals: list[Arrival] = []
        self._is_silent = False  # paused, frozen, killed or closed: it is not asked
        self.metadata, self.rows = host.ask("open", agent_name, layers, blocks, block_bytes)

    def progress(self) -> None:
        if not self._is_silent:
            self.arrivals += self.host.ask("arrivals", self.agent_name, len(self.arrivals))

    def blocks(self) -> np.ndarray:
        return self.host.ask("blocks", self.agent_name)

    def pause(self) -> None:
        self.host.ask("pause", self.agent_name, True)

    def resume(self) -> None:
        self.host.ask("pause", self.agent_name, False)

    def silence(self, is_silent=True) -> None:
        self._is_silent = is_silent

    def close(self) -> None:
        if self.host.is_alive and not self._is_silent:
            self.host.ask("close", self.agent_name)
        self.silence()


class HostPool:
    """One host in use and one that starts meanwhile, for the test after one that kills."""

    def __init__(self) -> None:
        self._hosts: list[PeerHost] = []

    def current(self) -> PeerHost:
        self._hosts = [host for host in self._hosts if host.is_alive]
        while len(self._hosts) < 2:
            self._hosts.append(PeerHost())
        return self._hosts[0]

    def close(self) -> None:
        for host in self._hosts:
            if host.is_alive:
                host.kill()


class ProcessWorld(InProcessWorld):
    name = PROCESSES

    def __init__(self, hosts: HostPool) -> None:
        super().__init__()
        self._hosts = hosts

    def peer(self, layers=2, blocks=8, block_bytes=256, *, name="peer"):
        peer = RemotePeer(self._hosts.current(), unique(name), layers, blocks, block_bytes)
        self._stack.callback(peer.close)
        self._stack.callback(lambda: peer.host.is_alive and peer.resume())
        return peer

    def kill(self, peer) -> None:
        """SIGKILL, for all peers of that host."""
        peer.host.kill()
        peer.silence()

    def freeze(self, peer) -> None:
        peer.host.send_signal(signal.SIGSTOP)
        peer.silence()
        self._stack.callback(lambda: peer.host.is_alive and self.thaw(peer))

    def thaw(self, peer) -> None:
        peer.host.send_signal(signal.SIGCONT)
        peer.silence(False)
