"""What the machine itself can do, measured in the same run: a TCP stream over loopback, a copy in memory, a wake-up."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

import numpy as np
import torch

MEMCPY = "memcpy"
STREAM = "TCP stream"
_RECEIVE_BYTES = 1 << 20  # by one call
_TIMEOUT_S = 30.0


class TcpSink:
    """The end of a loopback TCP stream that reads, into one buffer."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = memoryview(bytearray(num_bytes))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_TIMEOUT_S)
        self._socket: socket.socket | None = None
        self.address: tuple[str, int] = self._listener.getsockname()

    def receive(self, num_bytes: int) -> int:
        """Read so many bytes. When the last of them was there."""
        if self._socket is None:
            self._socket, _ = self._listener.accept()
            self._socket.settimeout(_TIMEOUT_S)
        got = 0
        while got < num_bytes:
            size = self._socket.recv_into(self._buffer[got : min(num_bytes, got + _RECEIVE_BYTES)])
            if not size:
                raise EOFError("the stream ended")
            got += size
        return time.monotonic_ns()

    def close(self) -> None:
        """Close both sockets."""
        self._listener.close()
        if self._socket is not None:
            self._socket.close()


class TcpSource:
    """The end that sends."""

    def __init__(self, address: tuple[str, int], num_bytes: int) -> None:
        self._buffer = memoryview(bytearray(b"\1") * num_bytes)
        self._socket = socket.create_connection(address, _TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, num_bytes: int) -> int:
        """Send so many bytes. When that was begun."""
        begun_ns = time.monotonic_ns()
        self._socket.sendall(self._buffer[:num_bytes])
        return begun_ns

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def copier(num_bytes: int, device: str) -> Callable[[], float]:
    """Copies so many bytes from one buffer to another, on one device and in one thread. How long it took."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    if device == "cpu":
        from_array, to_array = source.numpy(), target.numpy()

        def copy() -> float:
            begun_ns = time.perf_counter_ns()
            np.copyto(to_array, from_array)
            return (time.perf_counter_ns() - begun_ns) / 1e9

    else:

        def copy() -> float:
            torch.cuda.synchronize()
            begun_ns = time.perf_counter_ns()
            target.copy_(source)
            torch.cuda.synchronize()
            return (time.perf_counter_ns() - begun_ns) / 1e9

    return copy


def wake_ups(repetitions: int, pause_s: float) -> list[float]:
    """How long a thread that sleeps in ``poll()`` takes to run after another wrote to its eventfd."""
    woken_ns: list[int] = []
    seen = threading.Event()
    event_fd = os.eventfd(0, os.EFD_NONBLOCK)

    def sleep() -> None:
        poller = select.poll()
        poller.register(event_fd, select.POLLIN)
        for _ in range(repetitions):
            if not poller.poll(_TIMEOUT_S * 1000):
                return
            woken_ns.append(time.monotonic_ns())
            os.eventfd_read(event_fd)
            seen.set()

    thread = threading.Thread(target=sleep, name="bench: sleeper")
    thread.start()
    durations_s = []
    try:
        for _ in range(repetitions):
            time.sleep(max(pause_s, 0.0001))  # until the thread sleeps again
            seen.clear()
            begun_ns = time.monotonic_ns()
            os.eventfd_write(event_fd, 1)
            if not seen.wait(_TIMEOUT_S):
                raise TimeoutError("a thread did not wake up")
            durations_s.append((woken_ns[-1] - begun_ns) / 1e9)
    finally:
        thread.join()
        os.close(event_fd)
    return durations_s
