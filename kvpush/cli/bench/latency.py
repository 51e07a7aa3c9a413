"""One block, from ``push()`` on prefill to ``ReceiveFinished`` on decode."""

from __future__ import annotations

from kvpush.cli.bench.contest import Times, contest
from kvpush.cli.bench.context import Bench
from kvpush.cli.bench.report import Figure

LIMIT = 2.0
_BLOCK_BYTES = 65536
_STREAM = 16  # pushes whose receives are registered before the first of them starts
_BARE_PER_PUSH = 3  # so that some of them find both CPUs free on a machine that is not idle


def measure(bench: Bench) -> list[Figure]:
    """Twice: after a pause, as while a prompt is computed, and one push after the other."""
    repetitions = bench.sizes.one_block
    with contest(bench, bench.shape(1, 64, _BLOCK_BYTES)) as between:
        bench.progress.point("after a pause", 0, 2)
        paused = between.run(repetitions, 1, waited_s=0.05, bare_per_push=_BARE_PER_PUSH)
        bench.progress.point("one after the other", 1, 2)
        stream = Times(bare=paused.bare, stream=paused.stream, memcpy=paused.memcpy)
        for _ in range(max(1, repetitions // _STREAM)):
            stream.kvpush += between.push_stream(_STREAM)
            # what the bare loop does is the same in both: all its runs are likelier to have some that nothing disturbed
            stream.bare += [between.write_one() for _ in range(_STREAM)]
    note = "one block, push() to ReceiveFinished returned by the receiver's wait()"
    shared = {"limit": LIMIT, "budget": "one-block", "num_bytes": _BLOCK_BYTES}
    return [
        paused.figure(
            "64 KiB end to end, after 50 ms of nothing",
            note=f"{note}; both sides have slept, and the receive has waited for that long",
            **shared,
        ),
        stream.figure(
            "64 KiB end to end, one after the other",
            note=f"{note}; the next push starts when prefill has seen the end of the last",
            **shared,
        ),
    ]
