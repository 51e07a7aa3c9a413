"""What every measurement is given: how much of everything, the other process, the device, and whom to tell how far it
is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from kvpush.cli.bench.pair import DecodeProcess, Shape
from kvpush.config import Config

T = TypeVar("T")


class Progress(Protocol):
    """Is told how far a run is."""

    def begin(self, name: str) -> None:
        """The next benchmark begins."""

    def point(self, what: str, done: int, total: int) -> None:
        """So many points of this benchmark are done, and ``what`` is measured next."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    own_pushes: int = 480
    one_block: int = 200
    bulk: int = 25
    bulk_blocks: int = 1024
    idle_s: float = 4.0
    handshakes: int = 9
    advertised: Shape = Shape(num_layers=64, num_blocks=100_000, block_bytes=64)
    engines: int = 10_000
    registry_calls: int = 20_000
    passing_engines: int = 100_000
    crowd_rounds: int = 8
    crowd_engines: int = 20
    fair_rounds: int = 12
    fair_engines: int = 9
    fair_blocks: int = 2048  # that the greedy engine is sent in a round
    churn: int = 150
    kills: int = 5
    freezes: int = 2
    liveness_timeout_s: float = 5.0  # what a frozen engine is measured with: the default
    # the sweeps
    points: int = 15  # repetitions of each
    sweep_blocks: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    sweep_layers: tuple[int, ...] = (1, 4, 16, 64)
    sweep_chunks: tuple[int, ...] = (1, 4, 16, 64)
    sweep_block_bytes: tuple[int, ...] = (4096, 16384, 65536, 262144, 1048576)
    sweep_engines: tuple[int, ...] = (1, 2, 4, 8, 16)
    sweep_advertised: tuple[int, ...] = (1_000, 10_000, 100_000)
    sweep_registry: tuple[int, ...] = (10, 100, 1_000)
    sweep_own_blocks: tuple[int, ...] = (1, 16, 256, 2048)
    stream_layers: int = 32
    sweep_calls: tuple[int, ...] = (64, 512, 4096)  # of push_layers(), in one transfer
    sweep_megabytes: int = 16  # of one transfer where the size of a block or the number of chunks grows


QUICK = replace(
    Sizes(),
    own_pushes=96,
    one_block=40,
    bulk=7,
    idle_s=1.0,
    handshakes=3,
    registry_calls=4_000,
    passing_engines=10_000,
    crowd_rounds=2,
    fair_rounds=4,
    churn=20,
    kills=2,
    freezes=1,
    points=5,
    sweep_blocks=(1, 32, 1024),
    sweep_layers=(1, 8, 64),
    sweep_chunks=(1, 8, 64),
    sweep_block_bytes=(4096, 65536, 1048576),
    sweep_engines=(1, 4, 8),
    sweep_own_blocks=(1, 64, 2048),
    sweep_calls=(64, 4096),
)

# enough to see that everything runs; the figures mean nothing
TINY = replace(
    Sizes(),
    own_pushes=16,
    one_block=2,
    bulk=1,
    bulk_blocks=4,
    idle_s=0.1,
    handshakes=1,
    advertised=Shape(num_layers=2, num_blocks=64, block_bytes=64),
    engines=50,
    registry_calls=20,
    passing_engines=200,
    crowd_rounds=1,
    crowd_engines=2,
    fair_rounds=1,
    fair_engines=3,
    fair_blocks=64,
    churn=2,
    kills=1,
    freezes=1,
    liveness_timeout_s=0.5,
    points=1,
    sweep_blocks=(1, 4),
    sweep_layers=(1, 2),
    sweep_chunks=(1, 2),
    sweep_block_bytes=(4096, 65536),
    sweep_engines=(1, 2),
    sweep_advertised=(100, 200),
    sweep_registry=(10,),
    sweep_own_blocks=(1, 2),
    stream_layers=2,
    sweep_calls=(2, 4),
    sweep_megabytes=1,
)
SIZES = {"full": Sizes(), "quick": QUICK, "tiny": TINY}


@dataclass(frozen=True, slots=True)
class Bench:
    """One run."""

    decode: DecodeProcess
    config: Config
    sizes: Sizes
    progress: Progress
    device: str = "cpu"
    has_sweeps: bool = True

    def shape(self, num_layers: int, num_blocks: int, block_bytes: int) -> Shape:
        """On the run's device."""
        return Shape(num_layers, num_blocks, block_bytes, self.device)

    def points(self, points: Iterable[T], what: str) -> Iterator[T]:
        """Each point in turn, and the progress told."""
        listed = list(points)
        for number, point in enumerate(listed):
            self.progress.point(what, number, len(listed))
            yield point
