"""Engines that come, receive one push and die, by the thousand; and one that restarts under its id again and again.

    python tests/soak/crowd.py                    # 2,000 engines, then 200 restarts; some minutes
    python tests/soak/crowd.py --engines 200 --restarts 20

The prefill engine is a process of its own with real NIXL. A host process makes fifty decode engines, each with its own
receiver, NIXL agent, connection and memory; every one receives a push whose bytes are checked, and then the whole host
gets SIGKILL, so that all fifty die at once. The restarts are real processes, killed one after the other.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "processes"))

import peers  # noqa: E402

SHAPE = peers.Shape(blocks=16)
PER_HOST = 50
# soon full: what grows after the warm-up is a leak, and not yet another remembered transfer
SETTINGS: dict[str, Any] = {"max_tombstones": 64}


class Host:
    """Fifty decode engines in one process."""

    def __init__(self, first: int, count: int) -> None:
        self.decodes = {f"d{number}": peers.Decode(f"d{number}", SHAPE) for number in range(first, first + count)}

    def expect_all(self, source: tuple[str, int]) -> list[str]:
        for engine_id, decode in self.decodes.items():
            decode.expect(f"to-{engine_id}", [3, 5], source)
        return list(self.decodes)

    def all_hold(self) -> bool:
        for engine_id, decode in self.decodes.items():
            event = decode.inbox.outcome(f"to-{engine_id}")
            if event.outcome != "done" or not decode.arena.holds(f"to-{engine_id}", [3, 5]):
                return False
        return True

    def close(self) -> None:
        for decode in self.decodes.values():
            decode.receiver.close()


class CrowdPrefill(peers.PrefillService):
    def push_to(self, engine_ids: list[str]) -> bool:
        for engine_id in engine_ids:
            self.push(f"to-{engine_id}", [1, 2])
        ends = self.inbox.outcomes([f"to-{engine_id}" for engine_id in engine_ids])
        self.inbox.finished.clear()
        return all(event.outcome == "done" for event in ends.values())

    def num_live(self) -> int:
        return sum(engine.state != "evicted" for engine in self.side.engines())


def come_and_die(prefill: peers.Peer, source: tuple[str, int], first: int, count: int) -> None:
    with peers.Peer(Host, first=first, count=count) as host:
        engine_ids = host.call("expect_all", source)
        # blocks 1 and 2 hold what each transfer's pattern says only while it is pushed: one after the other
        for engine_id in engine_ids:
            assert prefill.call("push_to", [engine_id]), f"{engine_id} was not served"
        assert host.call("all_hold"), "wrong bytes"
        host.kill()
    peers.until(lambda: not prefill.call("num_live"), what="all are released")


def restart(prefill: peers.Peer, source: tuple[str, int], life: int) -> None:
    with peers.Peer(peers.DecodeService, engine_id="again", shape=SHAPE, settings={}) as decode:
        decode.call("expect", f"to-{life}", [3, 5], source)
        assert prefill.call("push_to", [str(life)])
        assert decode.call("outcome", f"to-{life}").outcome == "done"
        assert decode.call("holds", f"to-{life}", [3, 5])
        decode.kill()


def report(what: str, before: peers.Resources, after: peers.Resources, took_s: float) -> bool:
    print(f"| {what} | {before.rss_mib:.1f} / {after.rss_mib:.1f} MiB | {before.descriptors} / {after.descriptors} "
          f"| {before.threads} / {after.threads} | {took_s:.0f} s |", flush=True)  # fmt: skip
    is_flat = after.descriptors <= before.descriptors + 2 and after.threads <= before.threads
    return is_flat and after.rss_mib <= before.rss_mib * 1.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2000)
    parser.add_argument("--restarts", type=int, default=200)
    options = parser.parse_args()
    is_good = True
    arguments = {"engine_id": "p0", "shape": SHAPE, "listen": "127.0.0.1:0", "settings": SETTINGS}
    with peers.Peer(CrowdPrefill, **arguments) as prefill:
        source = prefill.call("address")
        come_and_die(prefill, source, 0, PER_HOST)  # warms up pools
        come_and_die(prefill, source, PER_HOST, PER_HOST)
        print("| prefill, before / after | RSS | descriptors | threads | took |\n|---|---|---|---|---|")
        before, start_s = prefill.call("resources"), time.monotonic()
        for first in range(2 * PER_HOST, 2 * PER_HOST + options.engines, PER_HOST):
            come_and_die(prefill, source, first, min(PER_HOST, 2 * PER_HOST + options.engines - first))
        after = prefill.call("resources")
        is_good &= report(f"{options.engines} engines", before, after, time.monotonic() - start_s)
        before, start_s = after, time.monotonic()
        for life in range(options.restarts):
            restart(prefill, source, life)
        peers.until(lambda: not prefill.call("num_live"), what="the last life is released")
        after = prefill.call("resources")
        is_good &= report(f"{options.restarts} restarts", before, after, time.monotonic() - start_s)
        stats = prefill.call("stats")
        is_good &= not any(stats[name] for name in ("links", "pushes_open", "writes_in_flight", "internal_errors"))
    print("flat" if is_good else "NOT FLAT")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
