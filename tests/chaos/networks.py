"""A network of this test's own: namespaces joined by a bridge, links that can be cut, and engines that live in them.

Nothing leaves the machine: the only addresses are on interfaces inside namespaces made here, and removing the
namespaces removes everything. It needs the ``ip`` command (Debian: ``iproute2``) and the right to make namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import peers

INSIDE = Path(__file__).parent / "inside.py"
COMMAND_TIMEOUT_S = 30.0


class Unavailable(Exception):
    """This machine does not let us make networks. The message says why."""


def _ip(*arguments: str) -> None:
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )  # fmt: skip
    if done.returncode:
        raise Unavailable(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")


class Network:
    """Hosts on one switch. ``hosts[i]`` has the address 10.0.0.(i+1) on its only interface, ``eth0``."""

    def __init__(self, hosts: Sequence[str]) -> None:
        prefix = f"kvpush-{os.getpid()}"
        self._switch = f"{prefix}-switch"
        self._namespaces = {host: f"{prefix}-{host}" for host in hosts}
        self._made: list[str] = []
        self.addresses = {host: f"10.0.0.{number}" for number, host in enumerate(hosts, 1)}

    def build(self) -> None:
        self._add(self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for host, namespace in self._namespaces.items():
            self._add(namespace)
            port = ("-n", self._switch, "link")
            _ip(*port, "add", f"to-{host}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip(*port, "set", f"to-{host}", "master", "br0", "up")
            _ip("-n", namespace, "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")

    def _add(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._made.append(namespace)

    def remove(self) -> None:
        for namespace in self._made:
            with contextlib.suppress(Unavailable):
                _ip("netns", "delete", namespace)

    def cut(self, host: str) -> None:
        """Pull the plug at the switch: the others see silence."""
        _ip("-n", self._switch, "link", "set", f"to-{host}", "down")

    def heal(self, host: str) -> None:
        _ip("-n", self._switch, "link", "set", f"to-{host}", "up")

    def start(self, host: str, service: str, **arguments: Any) -> FarPeer:
        """A process on this host. ``service`` is a class in inside.py."""
        return FarPeer(self._namespaces[host], service, **arguments)


@contextlib.contextmanager
def network(*hosts: str) -> Iterator[Network]:
    """Raises :class:`Unavailable`."""
    if shutil.which("ip") is None:
        raise Unavailable("the ip command is not installed (Debian: iproute2)")
    made = Network(hosts)
    try:
        made.build()
        yield made
    finally:
        made.remove()


class _Popen:
    """Looks like a multiprocessing.Process to :class:`peers.Peer`."""

    def __init__(self, command: Sequence[str], descriptor: int) -> None:
        self._popen = subprocess.Popen(command, pass_fds=[descriptor])
        self.pid = self._popen.pid

    @property
    def exitcode(self) -> int | None:
        return self._popen.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)

    def close(self) -> None:
        self._popen.wait(0)


class FarPeer(peers.Peer):
    """A process in a network namespace."""

    def __init__(self, namespace: str, service: str, **arguments: Any) -> None:
        ours, theirs = socket.socketpair()
        command = ["ip", "netns", "exec", namespace, sys.executable, str(INSIDE), str(theirs.fileno())]
        with theirs:
            self._process = _Popen(command, theirs.fileno())
        self._pipe = Connection(ours.detach())
        self._pipe.send((service, arguments))
        self._unanswered = 1
        self._is_over = False
