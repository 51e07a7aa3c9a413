"""A stable address whose backend is swapped while the old process still lives."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time

import peers
from chaos import QUICK

import kvpush


class Proxy:
    """A TCP proxy. ``backend`` is whom new connections reach; those that stand stay where they are."""

    def __init__(self, backend):
        self.backend = backend
        self._selector = selectors.DefaultSelector()
        self._port = socket.create_server(("127.0.0.1", 0))
        self.address = self._port.getsockname()
        self._wake, wake = socket.socketpair()
        self._selector.register(self._port, selectors.EVENT_READ, None)
        self._selector.register(wake, selectors.EVENT_READ, wake)
        self._open = [self._port, wake]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._accept()
                elif key.data is key.fileobj:
                    return
                else:
                    self._forward(key.fileobj, key.data)

    def _accept(self):
        near, _ = self._port.accept()
        far = socket.create_connection(self.backend)
        for one, other in ((near, far), (far, near)):
            self._selector.register(one, selectors.EVENT_READ, other)
            self._open.append(one)

    def _forward(self, source, target):
        data = b""
        with contextlib.suppress(OSError):
            data = source.recv(65536)
            target.sendall(data)
        if not data:
            for end in (source, target):
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(end)
                end.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._wake.send(b"x")
        self._thread.join(10)
        for end in [*self._open, self._wake]:
            end.close()
        self._selector.close()


def test_b14_a_swapped_backend_is_found_without_a_request_that_waits_for_its_deadline():
    """B14: the old process drains: what is asked of it fails at once. When it leaves, the fresh connection meets the
    new one, whose incarnation is another; and no request had to find that out."""
    with peers.Prefill("p0", **QUICK) as old, Proxy(old.address) as proxy, peers.Decode(**QUICK) as decode:
        decode.expect("t1", [1], proxy.address)
        old.push("t1", [1])
        assert decode.inbox.outcome("t1").outcome == "done"
        (first,) = decode.receiver.engines()
        with peers.Prefill("p0", **QUICK) as new:
            proxy.backend = new.address  # same id, same address as decode sees it
            assert old.pusher.drain(peers.PATIENCE_S)
            start_s = time.monotonic()
            decode.expect("t2", [2], proxy.address)
            event = decode.inbox.outcome("t2")
            assert event.outcome == "failed" and event.code == "closing" and event.blocks_reusable
            assert time.monotonic() - start_s < 1.0, "it waited for a timeout"
            assert old.pusher.close() == kvpush.CloseReport()
            peers.until(lambda: decode.receiver.engines()[0].state in ("stale", "evicted"), 2.0, "before any request")
            decode.expect("t3", [3], proxy.address)
            new.push("t3", [4])
            assert decode.inbox.outcome("t3").outcome == "done" and decode.arena.holds("t3", [3])
            live = [engine for engine in decode.receiver.engines() if engine.state == "connected"]
            assert len(live) == 1 and live[0].incarnation != first.incarnation
