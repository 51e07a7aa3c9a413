"""Pushes to a connected engine while others connect, one of them frozen before it could answer the handshake.

All engines run on this machine, so on a small one this also measures how they share its CPUs.
"""

from __future__ import annotations

import time

from kvpush.cli.bench.context import Bench
from kvpush.cli.bench.pair import DecodeProcess, await_registered, connected_pair
from kvpush.cli.bench.report import Figure, Samples
from kvpush.events import PushFinished
from kvpush.pusher import PrefillPusher

LIMIT = 2.0
_STEADY = "steady"
_PUSHES_PER_ROUND = 24
_PAUSE_S = 0.001


def measure(bench: Bench) -> list[Figure]:
    """Quiet and crowded rounds in turn."""
    decode, config, num_new = bench.decode, bench.config, bench.sizes.crowd_engines
    shape = bench.shape(1, 64, 65536)
    quiet_s: list[float] = []
    crowded_s: list[float] = []
    with (
        DecodeProcess() as crowd,
        DecodeProcess() as black_hole,
        connected_pair(shape, config, decode, _STEADY) as pusher,
    ):
        black_hole.call("open", "black hole", shape, config, False)
        black_hole.call("expect", "black hole", [("swallowed", [0])], pusher.address)
        await_registered(pusher, 1)
        for number in bench.points(range(bench.sizes.crowd_rounds), "rounds"):
            quiet_s += _steady_pushes(pusher, decode, f"quiet{number}", [])
            names = [f"new{number}.{index}" for index in range(num_new)]
            for name in names:
                crowd.call("open", name, shape, config, False)
                crowd.call("expect", name, [(name, [0])], pusher.address)
            if number == 0:
                await_registered(pusher, num_new + 1)
                black_hole.freeze()
                names = ["swallowed", *names]
            else:
                await_registered(pusher, num_new)
            crowded_s += _steady_pushes(pusher, decode, f"crowded{number}", names)
            for name in names:
                if name != "swallowed":
                    crowd.call("await_done", name, 1)
                    crowd.call("shut", name)
    quiet, crowded = Samples.of(quiet_s), Samples.of(crowded_s)
    return [
        Figure(
            f"p99 of pushes while {num_new} engines connect and one is a black hole",
            crowded.p99,
            "s",
            samples=len(crowded_s),
            minimum=crowded.minimum,
            baseline=quiet.p99,
            baseline_name="quiet",
            baseline_minimum=quiet.minimum,
            limit=LIMIT,
            budget="crowd",
            note=f"push() to PushFinished, 64 KiB; medians {crowded.median * 1e6:.0f} us, {quiet.median * 1e6:.0f} us",
        )
    ]


def _steady_pushes(pusher: PrefillPusher, decode: DecodeProcess, label: str, newcomers: list[str]) -> list[float]:
    """Time pushes to the connected engine, one after the other, with a push to a newcomer before each."""
    mine = [f"{label}.{index}" for index in range(_PUSHES_PER_ROUND)]
    receives = [(transfer_id, [index]) for index, transfer_id in enumerate(mine)]
    decode.call("expect", _STEADY, receives, pusher.address)
    await_registered(pusher, len(mine) + len(newcomers))
    decode.start("await_done", _STEADY, len(mine))
    waiting = [*newcomers]
    durations_s = []
    for transfer_id, [block_id] in receives:
        if waiting:
            pusher.push(waiting.pop(0), [0])
        begun_ns = time.monotonic_ns()
        pusher.push(transfer_id, [block_id])
        durations_s.append((_await_outcome(pusher, transfer_id) - begun_ns) / 1e9)
        time.sleep(_PAUSE_S)
    decode.result()
    return durations_s


def _await_outcome(pusher: PrefillPusher, transfer_id: str) -> int:
    give_up_s = time.monotonic() + 30.0
    while time.monotonic() < give_up_s:
        events = pusher.wait(1.0)
        if any(isinstance(event, PushFinished) and event.transfer_id == transfer_id for event in events):
            return time.monotonic_ns()
    raise TimeoutError(f"push {transfer_id!r} did not end")
