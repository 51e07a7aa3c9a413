"""What both sides cost while nothing moves: CPU time of the whole process over wall time."""

from __future__ import annotations

import time

from kvpush.cli.bench.pair import DecodeProcess, Shape, await_registered, connected_pair
from kvpush.cli.bench.report import Figure
from kvpush.config import Config
from kvpush.pusher import PrefillPusher

IDLE_LIMIT_CORES = 0.02
WAITING = 100
_ENGINE_ID = "idle"


def measure(decode: DecodeProcess, config: Config, seconds: float) -> list[Figure]:
    """A connected pair, first with nothing to do, then with receives that wait for their blocks."""
    shape = Shape(1, 2 * WAITING, 4096)
    with connected_pair(shape, config, decode, _ENGINE_ID) as pusher:
        idle = _cores(decode, seconds)
        decode.call("expect", _ENGINE_ID, [(f"idle{n}", [n]) for n in range(1)], pusher.address)
        one_waiting = _cores_while_waiting(decode, pusher, 1, seconds)
        receives = [(f"idle{n}", [n]) for n in range(1, WAITING)]
        decode.call("expect", _ENGINE_ID, receives, pusher.address)
        many_waiting = _cores_while_waiting(decode, pusher, WAITING, seconds)
        decode.call("cancel", _ENGINE_ID, [f"idle{n}" for n in range(WAITING)])
    note = f"CPU time over {seconds:g} s"
    figures = [
        Figure(f"idle CPU, {side}", cores, "core", limit=IDLE_LIMIT_CORES, note=note)
        for side, cores in zip(("prefill", "decode"), idle, strict=True)
    ]
    for count, cores in ((1, one_waiting), (WAITING, many_waiting)):
        figures += [
            Figure(
                f"CPU with {count} receive{'s' if count > 1 else ''} waiting, {side}",
                share,
                "core",
                note=f"{note}; registered, and nothing pushed yet",
            )
            for side, share in zip(("prefill", "decode"), cores, strict=True)
        ]
    return figures


def _cores_while_waiting(
    decode: DecodeProcess, pusher: PrefillPusher, count: int, seconds: float
) -> tuple[float, float]:
    await_registered(pusher, count)
    return _cores(decode, seconds)


def _cores(decode: DecodeProcess, seconds: float) -> tuple[float, float]:
    """Of this process and of the other one."""
    time.sleep(seconds / 4)  # for what was done just now to be over
    begun_s, here_s, there_s = time.monotonic(), time.process_time(), decode.call("cpu_s")
    time.sleep(seconds)
    here_s, there_s = time.process_time() - here_s, decode.call("cpu_s") - there_s
    wall_s = time.monotonic() - begun_s
    return here_s / wall_s, there_s / wall_s
