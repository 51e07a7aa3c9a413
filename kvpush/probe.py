"""Asking a port a second time whether really nobody listens there.

ZeroMQ does not say why a dial failed, and a host that vanished from the network ends one early, too. What hangs on the
difference are blocks: only a refusal by the kernel proves that the process which was to write them is gone.

**Who owns what.** A probe blocks for up to ``PROBE_TIMEOUT_S``, so each runs on a daemon thread of its own, at most
``MAX_PROBES`` at a time. The answer is submitted to the owner's loop; it is the only thing that leaves the thread.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from functools import partial

MAX_PROBES = 16  # addresses that are asked at the same time
PROBE_TIMEOUT_S = 1.0  # a host that refuses answers within one round trip

Answer = Callable[[bool], None]


def refuses(address: tuple[str, int]) -> bool:
    """Whether every address of this name answers that nobody listens there. Blocks."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, sockaddr in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.settimeout(PROBE_TIMEOUT_S)
            if probe.connect_ex(sockaddr) != errno.ECONNREFUSED:
                return False
    return True


class Prober:
    """The probes of one loop. Only that loop's thread calls :meth:`ask`, and runs the answers."""

    def __init__(self, owner: str, submit: Callable[[Callable[[], None]], None]) -> None:
        """``submit`` hands a command to the owner's loop, from any thread."""
        self._owner = owner
        self._submit = submit
        self._num_probes = 0

    def ask(self, address: tuple[str, int], answer: Answer) -> None:
        """Have ``answer(is_refused)`` called on the loop's thread: soon, or at once with ``False``, which proves
        nothing, when there are too many probes already or the system has no thread for one more."""
        if self._num_probes >= MAX_PROBES:
            answer(False)
            return
        self._num_probes += 1

        def probe() -> None:
            is_refused = refuses(address)
            self._submit(partial(self._answered, answer, is_refused))

        try:
            threading.Thread(target=probe, name=f"{self._owner} probe", daemon=True).start()
        except RuntimeError:
            self._answered(answer, is_refused=False)

    def _answered(self, answer: Answer, is_refused: bool) -> None:
        self._num_probes -= 1
        answer(is_refused)
