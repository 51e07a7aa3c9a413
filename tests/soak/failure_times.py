"""How long until the survivors know: medians and maxima of every kind of failure, over real processes and real NIXL.

    python tests/soak/failure_times.py            # some minutes, prints the table of docs/reliability.md
    python tests/soak/failure_times.py --runs 5   # a quick look

Each run makes its processes anew.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "chaos"))
sys.path.insert(0, str(Path(__file__).parent.parent / "processes"))

import chaos  # noqa: E402
import peers  # noqa: E402

DEFAULTS = {"ucx_options": "TLS=tcp"}


def kill_idle(fleet: peers.Fleet) -> float:
    """A decode engine that is connected and has registered dies."""
    with chaos.Prefill(**DEFAULTS) as prefill:
        decode = fleet.decode(**DEFAULTS)
        chaos.push_and_check(prefill, decode, "before", [1], [1])
        chaos.register(prefill, decode, "waiting", [2])
        start_s = time.monotonic()
        decode.kill()
        peers.until(lambda: prefill.states()["d0"] == "evicted")
        return time.monotonic() - start_s


def kill_in_write(fleet: peers.Fleet) -> float:
    """32 MiB are in flight to it: released, the outcome known, and the source blocks reusable."""
    with chaos.Prefill(shape=chaos.BIG, **chaos.STUCK) as prefill:
        decode = fleet.decode(shape=chaos.BIG, **DEFAULTS)
        chaos.push_and_check(prefill, decode, "before", [1], [1])
        chaos.get_stuck(prefill, decode, "hit", chaos.BIG.blocks)
        start_s = time.monotonic()
        decode.kill()
        prefill.inbox.outcome("hit")
        assert prefill.inbox.reusable("hit") in ("outcome", "proven")
        peers.until(lambda: prefill.states()["d0"] == "evicted")
        return time.monotonic() - start_s


def freeze_idle(fleet: peers.Fleet) -> float:
    """SIGSTOP, default settings: liveness_timeout_s is 5."""
    with chaos.Prefill(**DEFAULTS) as prefill:
        decode = fleet.decode(**DEFAULTS)
        chaos.push_and_check(prefill, decode, "before", [1], [1])
        start_s = time.monotonic()
        decode.freeze()
        peers.until(lambda: prefill.states()["d0"] != "connected")
        return time.monotonic() - start_s


def freeze_in_write(fleet: peers.Fleet) -> float:
    """The same with a WRITE in flight that its socket cannot take."""
    settings = DEFAULTS | {"tcp_user_timeout_s": 60.0}
    with chaos.Prefill(shape=chaos.BIG, **settings) as prefill:
        decode = fleet.decode(shape=chaos.BIG, **settings)
        chaos.push_and_check(prefill, decode, "before", [1], [1])
        chaos.register(prefill, decode, "hit", range(chaos.BIG.blocks))
        start_s = time.monotonic()
        decode.freeze()
        prefill.push("hit", range(chaos.BIG.blocks))
        peers.until(lambda: prefill.states()["d0"] != "connected")
        return time.monotonic() - start_s


def _with_prefill(end: Callable[[peers.Peer], Any]) -> Callable[[peers.Fleet], float]:
    def measure(fleet: peers.Fleet) -> float:
        prefill = fleet.prefill(**DEFAULTS)
        with peers.Decode(**DEFAULTS) as decode:
            decode.expect("t", [1, 2], prefill.call("address"))
            peers.until(lambda: prefill.call("stats")["registrations_waiting"])
            start_s = time.monotonic()
            end(prefill)
            event = decode.inbox.outcome("t")
            took_s = time.monotonic() - start_s
            assert event.outcome in ("failed", "cancelled") and event.blocks_reusable, event
            return took_s

    return measure


def prefill_cannot_write(fleet: peers.Fleet) -> float:
    """Prefill lacks blocks that decode asks for: told at once."""
    with chaos.Prefill(**DEFAULTS) as prefill, peers.Decode(**DEFAULTS) as decode:
        decode.expect("t", [1, 2], prefill.address)
        peers.until(lambda: prefill.pusher.stats()["registrations_waiting"])
        start_s = time.monotonic()
        prefill.push("t", [1])
        event = decode.inbox.outcome("t")
        took_s = time.monotonic() - start_s
        assert event.code == "bad_blocks", event
        return took_s


def prefill_killed_in_write(fleet: peers.Fleet) -> float:
    """Decode was frozen so that the WRITE cannot end, and wakes when prefill is gone."""
    prefill = fleet.prefill(shape=chaos.BIG, **chaos.STUCK)
    decode = fleet.decode(shape=chaos.BIG, **chaos.STUCK)
    whole, source = list(range(chaos.BIG.blocks)), prefill.call("address")
    decode.call("expect", "warm", [0], source)
    prefill.call("push", "warm", [0])
    assert decode.call("outcome", "warm").outcome == "done"
    decode.call("expect", "t", whole, source)
    peers.until(lambda: prefill.call("stats")["registrations_waiting"])
    decode.freeze()
    prefill.call("push", "t", whole)
    peers.until(lambda: prefill.call("stats")["writes_in_flight"])
    start_s = time.monotonic()
    prefill.kill()
    decode.thaw()
    assert decode.call("outcome", "t").outcome in ("failed", "done")
    assert decode.call("reusable", "t") in ("outcome", "proven")
    return time.monotonic() - start_s


MEASUREMENTS: dict[str, Callable[[peers.Fleet], float]] = {
    "`kill -9` of decode, idle: released by prefill": kill_idle,
    "`kill -9` of decode, 32 MiB in flight: released, source blocks reusable": kill_in_write,
    "SIGSTOP of decode, idle: known as lost (`liveness_timeout_s` = 5)": freeze_idle,
    "SIGSTOP of decode, WRITE in flight: known as lost": freeze_in_write,
    "`kill -9` of prefill: decode's event, blocks reusable": _with_prefill(lambda prefill: prefill.kill()),
    "`kill -9` of prefill, WRITE in flight: decode's event, blocks reusable": prefill_killed_in_write,
    "`close()` of prefill: decode's event, blocks reusable": _with_prefill(lambda prefill: prefill.begin("close")),
    "push that prefill cannot serve: decode's event": prefill_cannot_write,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--only", default="", help="measurements with this text in their name")
    options = parser.parse_args()
    print("| from, to | median | maximum | runs |\n|---|---|---|---|")
    for name, measure in MEASUREMENTS.items():
        if options.only not in name:
            continue
        times_s = []
        for _ in range(options.runs):
            with peers.fleet() as fleet:
                times_s.append(measure(fleet))
        median, maximum = _shown(statistics.median(times_s)), _shown(max(times_s))
        print(f"| {name} | {median} | {maximum} | {options.runs} |", flush=True)
    return 0


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
