"""The receiving end of the contract tests: an agent with a cache. Also the program that hosts such peers elsewhere.

Run as a program with the number of an inherited socket, it makes peers when told to and drives their progress all the
time, as a receiver's loop does. Commands are ``(name, agent_name, *args)``; every one gets an answer.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from kvpush.config import Config
from kvpush.layout import MemoryKind, MemoryRange
from kvpush.transport import Notification

CONFIG = Config(net_devices="lo")


class Cache:
    """Blocks of several layers in one buffer. ``interleaved`` keeps a block's layers together, so rows have strides."""

    def __init__(self, layers: int, blocks: int, block_bytes: int, *, interleaved: bool = False) -> None:
        shape = (blocks, layers, block_bytes) if interleaved else (layers, blocks, block_bytes)
        self._buffer = np.zeros(shape, np.uint8)
        self.blocks = self._buffer.swapaxes(0, 1) if interleaved else self._buffer  # [layer, block] is its bytes

    @property
    def range(self) -> MemoryRange:
        return MemoryRange(self._buffer.ctypes.data, self._buffer.nbytes, 0)

    @property
    def rows(self) -> np.ndarray:
        layers, blocks, block_bytes = self.blocks.shape
        layer_bytes, stride_bytes, _ = self.blocks.strides
        base = self._buffer.ctypes.data
        rows = [(base + layer * layer_bytes, block_bytes, 0, stride_bytes, blocks) for layer in range(layers)]
        return np.array(rows, np.uint64)

    def fill(self, seed: int) -> None:
        self.blocks[:] = np.random.default_rng(seed).integers(0, 256, self.blocks.shape, np.uint8)


@dataclass
class Arrival:
    """A notification, and the cache as it was when the notification was read."""

    notification: Notification
    blocks: np.ndarray


class Peer:
    """An agent that is written to, in this process."""

    def __init__(self, transport, cache: Cache) -> None:
        self.transport = transport
        self.cache = cache
        self.arrivals: list[Arrival] = []
        self.agent_name = transport.agent_name
        self.metadata = transport.metadata()
        self.rows = cache.rows

    def progress(self) -> None:
        """One turn of a receiver's loop."""
        for notification in self.transport.notifications():
            self.arrivals.append(Arrival(notification, self.cache.blocks.copy()))

    def blocks(self) -> np.ndarray:
        return self.cache.blocks.copy()

    def pause(self) -> None:
        """From now on the peer makes no progress by itself. Here it never does."""

    def resume(self) -> None:
        pass

    def close(self) -> None:
        self.transport.close()


def serve(connection: Connection) -> None:
    from kvpush.nixl_transport import NixlTransport

    peers: dict[str, Peer] = {}
    is_paused = False
    connection.send("ready")
    while True:
        if not is_paused:
            for peer in peers.values():
                peer.progress()
        if not connection.poll(None if is_paused or not peers else 0.0002):
            continue
        command, agent_name, *args = connection.recv()
        answer: object = None
        if command == "open":
            layers, blocks, block_bytes = args
            cache = Cache(layers, blocks, block_bytes, interleaved=True)
            peer = peers[agent_name] = Peer(NixlTransport(agent_name, MemoryKind.dram, [cache.range], CONFIG), cache)
            answer = (peer.metadata, peer.rows)
        elif command == "arrivals":
            answer = peers[agent_name].arrivals[args[0] :]
        elif command == "blocks":
            answer = peers[agent_name].blocks()
        elif command == "close":
            peers.pop(agent_name).close()
        elif command == "pause":
            is_paused = args[0]
        connection.send(answer)


if __name__ == "__main__":
    import contract_peer  # by its name: what is sent must not belong to __main__

    with contextlib.suppress(EOFError):  # the tests are over
        contract_peer.serve(Connection(int(sys.argv[1])))
