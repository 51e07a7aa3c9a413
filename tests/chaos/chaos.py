"""What the chaos tests share: pushes that are checked byte for byte, stuck WRITEs, and base lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import peers

import kvpush
from kvpush.nixl_transport import NixlTransport
from kvpush.transport import TransportCounts

SMALL = peers.Shape(blocks=64)
BIG = peers.Shape(blocks=128, layers=1, heads=8, tokens=64, head_size=128)  # 256 KiB a block, 32 MiB in all
# over TCP a WRITE to a frozen process fills the socket and stays there; nothing but the test may end it
STUCK = {"ucx_options": "TLS=tcp", "tcp_user_timeout_s": 60.0, "liveness_timeout_s": 60.0, "stall_timeout_s": 60.0}
QUICK = {"heartbeat_interval_s": 0.2, "liveness_timeout_s": 1.5}
RELEASE_BUDGET_S = 2.0  # the budget is 1 s on a quiet machine; this one may be busy

EMPTY_AT_REST = (
    "pushes_open",
    "pushes_held",
    "registrations_waiting",
    "blocks_registered",
    "pushes_behind_handshakes",
    "pushes_in_lines",
    "writes_in_flight",
    "bytes_in_flight",
    "writes_doubtful",
    "internal_errors",
)


class Prefill(peers.Prefill):
    """A pusher in the test's own process whose NIXL handles are counted."""

    def __init__(self, engine_id: str = "p0", shape: peers.Shape = SMALL, listen: str = "127.0.0.1:0", **settings: Any):
        self.arena = peers.Arena(shape)
        self._transports: list[NixlTransport] = []
        self.pusher = kvpush.PrefillPusher(
            engine_id,
            self.arena.caches,
            shape.spec(),
            listen=listen,
            config=peers.config(**settings),
            transport_factory=self._make_transport,
        )
        self.inbox = peers.Inbox(self.pusher)
        self.address = self.pusher.address

    def _make_transport(self, *args: Any) -> NixlTransport:
        self._transports.append(NixlTransport(*args))
        return self._transports[-1]

    @property
    def counts(self) -> TransportCounts:
        return self._transports[-1].counts

    def engine(self, engine_id: str) -> kvpush.EngineSnapshot:
        return next(engine for engine in self.pusher.engines() if engine.engine_id == engine_id)

    def reasons(self, engine_id: str) -> list[str]:
        """Why this engine went stale, each time."""
        changes = [change for change in self.pusher.transitions() if change.engine_id == engine_id]
        return [change.detail.partition(":")[0] for change in changes if change.dest == "stale"]


@dataclass(frozen=True)
class BaseLine:
    """What this process and a pusher in it had at one moment, everything at rest."""

    resources: peers.Resources
    num_remotes: int
    num_lists: int
    num_links: int

    @classmethod
    def of(cls, prefill: Prefill) -> BaseLine:
        counts = prefill.counts
        return cls(
            peers.resources(),
            counts.remotes_added - counts.remotes_removed,
            counts.lists_prepared - counts.lists_released,
            prefill.pusher.stats()["links"],
        )

    def check(self, prefill: Prefill, *, more_descriptors: int = 2) -> None:
        """Everything is back where it was. What is still on its way out gets a moment."""

        def left() -> list[str]:
            stats, counts, now = prefill.pusher.stats(), prefill.counts, BaseLine.of(prefill)
            allowed = self.resources.descriptors + more_descriptors
            found = [f"{name}={stats[name]}" for name in EMPTY_AT_REST if stats[name]]
            found += [f"{counts}"] if counts.writes_posted != counts.writes_released else []
            found += [f"descriptors={now.resources.descriptors}"] if now.resources.descriptors > allowed else []
            found += [f"threads={now.resources.threads}"] if now.resources.threads > self.resources.threads else []
            same = ("num_remotes", "num_lists", "num_links")
            return found + [f"{name}={getattr(now, name)}" for name in same if getattr(now, name) > getattr(self, name)]

        try:
            peers.until(lambda: not left(), 10.0, "back to the base line")
        except AssertionError:
            raise AssertionError(f"{left()} left, the base line was {self}") from None
        rss_mib = peers.resources().rss_mib
        assert rss_mib <= self.resources.rss_mib * 1.05 + 16, (rss_mib, self)
        assert prefill.pusher.healthy()


def push_and_check(
    prefill: peers.Prefill, decode: peers.Peer, transfer_id: str, source: Sequence[int], target: Sequence[int]
) -> None:
    """A push that must succeed, byte for byte."""
    decode.call("expect", transfer_id, list(target), prefill.address)
    prefill.push(transfer_id, source)
    sent = prefill.inbox.outcome(transfer_id)
    assert sent.outcome == "done", sent
    got = decode.call("outcome", transfer_id)
    assert got.outcome == "done", got
    assert decode.call("holds", transfer_id, list(target))


def is_up_now(peer: peers.Peer) -> bool:
    """Whether a process that was started without waiting has answered."""
    return bool(peer._pipe.poll())


def register(prefill: peers.Prefill, decode: peers.Peer, transfer_id: str, target: Sequence[int]) -> None:
    """Expect it on decode, and wait until prefill knows."""
    before = prefill.pusher.stats().get("registrations", 0)
    decode.call("expect", transfer_id, list(target), prefill.address)
    peers.until(lambda: prefill.pusher.stats().get("registrations", 0) > before, what=f"{transfer_id} is registered")


def get_stuck(prefill: peers.Prefill, decode: peers.Peer, transfer_id: str, count: int) -> None:
    """A WRITE of ``count`` blocks in flight to a process that is frozen from now on."""
    register(prefill, decode, transfer_id, range(count))
    decode.freeze()
    before = prefill.pusher.stats()["writes_in_flight"]
    prefill.push(transfer_id, range(count))
    peers.until(lambda: prefill.pusher.stats()["writes_in_flight"] > before, what="the WRITE is posted")
    assert transfer_id not in prefill.inbox.finished
