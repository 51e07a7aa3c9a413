"""What is left to do when the last layer is computed, and what each of very many small pieces costs.

The computation is a pause of the caller, as if a device did it: each layer of each chunk takes the same time. Clocks
start when the last of them is over, and stop when decode has seen the transfer's end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvpush.cli.bench.context import Bench
from kvpush.cli.bench.pair import DecodeProcess, Shape, await_pushed, await_registered, connected_pair
from kvpush.cli.bench.report import Figure, Samples
from kvpush.errors import QueueFull
from kvpush.pusher import PrefillPusher

AT_THE_END = "one push at the end"
_ENGINE_ID = "streaming"
_MIB = 1 << 20
_BLOCK_BYTES = 32768
_NUM_BLOCKS = 16
_NUM_CHUNKS = 4
_LAYER_S = 0.001  # to compute one layer of one chunk
_SMALL_BLOCK_BYTES = 1024
_MANY_LAYERS = 64
_FULL_PAUSE_S = 0.0002  # before a call that was refused is tried again


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some layers of some positions, pushed by one call once they are computed."""

    layers: Sequence[str]
    positions: range


Way = Callable[[Shape], Iterator[_Piece]]


def _names(shape: Shape) -> list[str]:
    return [f"layers.{layer}" for layer in range(shape.num_layers)]


def _chunks(num_blocks: int, num_chunks: int) -> list[range]:
    size = -(-num_blocks // num_chunks)
    return [range(start, min(num_blocks, start + size)) for start in range(0, num_blocks, size)]


def _whole(shape: Shape) -> Iterator[_Piece]:
    yield _Piece(_names(shape), range(shape.num_blocks))


def _by_layers(shape: Shape) -> Iterator[_Piece]:
    for layer in _names(shape):
        yield _Piece([layer], range(shape.num_blocks))


def _by_chunks(shape: Shape) -> Iterator[_Piece]:
    for positions in _chunks(shape.num_blocks, _NUM_CHUNKS):
        yield _Piece(_names(shape), positions)


def _by_layers_of_chunks(shape: Shape) -> Iterator[_Piece]:
    for positions in _chunks(shape.num_blocks, _NUM_CHUNKS):
        for layer in _names(shape):
            yield _Piece([layer], positions)


_WAYS: dict[str, Way] = {
    AT_THE_END: _whole,
    "layer by layer": _by_layers,
    f"in {_NUM_CHUNKS} chunks": _by_chunks,
    f"layer by layer of {_NUM_CHUNKS} chunks": _by_layers_of_chunks,
}


def measure(bench: Bench) -> list[Figure]:
    """Both."""
    return [*_left_over(bench), *(_many_calls(bench) if bench.has_sweeps else [])]


def _left_over(bench: Bench) -> list[Figure]:
    shape = bench.shape(bench.sizes.stream_layers, _NUM_BLOCKS, _BLOCK_BYTES)
    total_s = _LAYER_S * shape.num_layers * _NUM_CHUNKS
    taken: dict[str, list[float]] = {name: [] for name in _WAYS}
    with connected_pair(shape, bench.config, bench.decode, _ENGINE_ID) as pusher:
        ids = map(str, itertools.count())
        for _ in bench.points(range(bench.sizes.points), "streamed transfers"):
            for name, way in _WAYS.items():  # in turn
                pieces = list(way(shape))
                cells = [len(piece.layers) * len(piece.positions) for piece in pieces]
                computed_s = [total_s * count / sum(cells) for count in cells]
                taken[name].append(_transfer(pusher, bench.decode, next(ids), pieces, computed_s))
    samples = {name: Samples.of(durations_s) for name, durations_s in taken.items()}
    at_the_end = samples.pop(AT_THE_END)
    return [
        Figure.against(
            f"{shape.num_bytes / _MIB:g} MiB pushed {name}, after the last layer",
            each,
            AT_THE_END,
            at_the_end,
            note=f"{shape.num_layers} layers, computed in {total_s * 1000:g} ms; from the end of that to "
            "ReceiveFinished returned by the receiver's wait()",
        )
        for name, each in samples.items()
    ]


def _many_calls(bench: Bench) -> list[Figure]:
    figures = []
    num_layers = min(_MANY_LAYERS, *bench.sizes.sweep_calls)
    for num_calls in bench.points(bench.sizes.sweep_calls, "calls of push_layers()"):
        shape = bench.shape(num_layers, num_calls // num_layers, _SMALL_BLOCK_BYTES)
        pieces = [_Piece([layer], range(i, i + 1)) for i in range(shape.num_blocks) for layer in _names(shape)]
        with connected_pair(shape, bench.config, bench.decode, _ENGINE_ID) as pusher:
            durations_s = [
                _transfer(pusher, bench.decode, str(number), pieces, None) / num_calls
                for number in range(max(1, bench.sizes.points // 5))
            ]
        figures.append(
            Figure.of_seconds(
                f"one of {num_calls} calls of push_layers()",
                Samples.of(durations_s),
                note=f"{num_layers} layers, one block of 1 KiB by one call; from the first call to ReceiveFinished, "
                "over their number",
                series="one call of push_layers(), by their number in one transfer",
                x=num_calls,
                x_name="calls",
            )
        )
    return figures


def _transfer(
    pusher: PrefillPusher,
    decode: DecodeProcess,
    transfer_id: str,
    pieces: Sequence[_Piece],
    computed_s: Sequence[float] | None,
) -> float:
    """Seconds from the end of the last piece's computation; without computation, from the first call."""
    num_blocks = max(piece.positions.stop for piece in pieces)
    decode.call("expect", _ENGINE_ID, [(transfer_id, range(num_blocks))], pusher.address)
    decode.start("await_done", _ENGINE_ID, 1)
    await_registered(pusher, 1)
    begun_ns = time.monotonic_ns()
    for number, piece in enumerate(pieces, 1):
        if computed_s is not None:
            time.sleep(computed_s[number - 1])
            begun_ns = time.monotonic_ns()
        _push(pusher, transfer_id, piece, last=number == len(pieces))
    await_pushed(pusher)
    done_ns: int = decode.result()[transfer_id]
    return (done_ns - begun_ns) / 1e9


def _push(pusher: PrefillPusher, transfer_id: str, piece: _Piece, *, last: bool) -> None:
    while True:
        try:
            pusher.push_layers(
                transfer_id, piece.positions, layers=piece.layers, first_block=piece.positions.start, last=last
            )
        except QueueFull:
            time.sleep(_FULL_PAUSE_S)
        else:
            return
