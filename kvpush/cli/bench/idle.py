"""What both sides cost while nothing moves: CPU time of the whole process over wall time."""

from __future__ import annotations

import time

from kvpush.cli.bench.context import Bench
from kvpush.cli.bench.pair import DecodeProcess, await_registered, connect, connected_pair
from kvpush.cli.bench.report import Figure
from kvpush.pusher import PrefillPusher

IDLE_LIMIT_CORES = 0.02
WAITING = 100
_ENGINE_ID = "idle"


def measure(bench: Bench) -> list[Figure]:
    """A connected pair, first with nothing to do, then with receives that wait for their blocks; then more engines."""
    decode, seconds = bench.decode, bench.sizes.idle_s
    shape = bench.shape(1, 2 * WAITING, 4096)
    bench.progress.point("without kvpush", 0, 4)
    nothing = _cores(decode, seconds)
    with connected_pair(shape, bench.config, decode, _ENGINE_ID) as pusher:
        bench.progress.point("nothing to do", 1, 4)
        idle = _cores(decode, seconds)
        bench.progress.point("1 receive waits", 2, 4)
        decode.call("expect", _ENGINE_ID, [("idle0", [0])], pusher.address)
        one_waiting = _cores_while_waiting(decode, pusher, 1, seconds)
        receives = [(f"idle{n}", [n]) for n in range(1, WAITING)]
        bench.progress.point(f"{WAITING} receives wait", 3, 4)
        decode.call("expect", _ENGINE_ID, receives, pusher.address)
        many_waiting = _cores_while_waiting(decode, pusher, WAITING, seconds)
        decode.call("cancel", _ENGINE_ID, [f"idle{n}" for n in range(WAITING)])
    note = f"CPU time over {seconds:g} s"
    figures = [
        Figure(
            f"idle CPU, {side}",
            cores,
            "core",
            limit=IDLE_LIMIT_CORES,
            budget="idle",
            beside={"without kvpush": without},
            note=note,
        )
        for side, cores, without in zip(("prefill", "decode"), idle, nothing, strict=True)
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
    return [*figures, *(_more_engines(bench) if bench.has_sweeps else [])]


def _more_engines(bench: Bench) -> list[Figure]:
    """Prefill's share with more and more decode engines connected and idle."""
    shape = bench.shape(1, 16, 4096)
    figures = []
    with connected_pair(shape, bench.config, bench.decode, "idle 1") as pusher:
        num_connected = 1
        for count in bench.points(bench.sizes.sweep_engines, "idle engines"):
            for number in range(num_connected + 1, count + 1):
                bench.decode.call("open", f"idle {number}", shape, bench.config, True)
                connect(pusher, bench.decode, f"idle {number}")
            num_connected = max(num_connected, count)
            here, _ = _cores(bench.decode, bench.sizes.idle_s)
            figures.append(
                Figure(
                    f"idle CPU of prefill with {count} engine{'s' if count > 1 else ''} connected",
                    here,
                    "core",
                    note=f"CPU time over {bench.sizes.idle_s:g} s",
                    series="idle CPU of prefill, by engines connected",
                    x=count,
                    x_name="engines",
                )
            )
        for number in range(2, num_connected + 1):
            bench.decode.call("shut", f"idle {number}")
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
