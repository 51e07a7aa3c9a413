"""How fast bytes move, from ``push()`` on prefill to ``ReceiveFinished`` on decode, and how that grows with blocks,
layers, chunks and the size of a block."""

from __future__ import annotations

import dataclasses

from kvpush.cli.bench.contest import contest
from kvpush.cli.bench.context import Bench
from kvpush.cli.bench.report import Figure

LIMIT = 1.05
BLOCK_BYTES = 65536
_MIB = 1 << 20
_BLOCKS_PER_LAYER = 16


def measure(bench: Bench) -> list[Figure]:
    """The budget first, over both transports of one host."""
    figures = [_bulk(bench, "", "UCX's choice"), _bulk(bench, "TLS=tcp", "tcp")] if bench.device == "cpu" else []
    if not figures:  # over TCP alone, UCX does not reach device memory
        figures = [_bulk(bench, "", "UCX's choice")]
    if bench.has_sweeps:
        figures += [*_in_order(bench), *_blocks(bench), *_layers(bench), *_chunks(bench), *_block_bytes(bench)]
    return figures


def _bulk(bench: Bench, ucx_options: str, label: str) -> Figure:
    num_blocks = bench.sizes.bulk_blocks
    shape = bench.shape(1, num_blocks, BLOCK_BYTES)
    config = dataclasses.replace(bench.config, ucx_options=ucx_options) if ucx_options else bench.config
    bench.progress.point(f"{shape.num_bytes / _MIB:g} MiB, {label}", 0, 1)
    with contest(bench, shape, config) as between:
        times = between.run(bench.sizes.bulk, num_blocks, waited_s=0.02)
    return times.figure(
        f"{shape.num_bytes / _MIB:g} MiB in 64 KiB blocks, {label}",
        limit=LIMIT,
        budget="bulk",
        num_bytes=shape.num_bytes,
        note="one push, blocks in random order on both sides",
    )


def _in_order(bench: Bench) -> list[Figure]:
    num_blocks = bench.sizes.bulk_blocks
    shape = bench.shape(1, num_blocks, BLOCK_BYTES)
    with contest(bench, shape) as between:
        times = between.run(bench.sizes.points, num_blocks, in_order=True)
    name = f"{shape.num_bytes / _MIB:g} MiB in 64 KiB blocks, in order"
    return [times.figure(name, num_bytes=shape.num_bytes, note="neighbours on both sides, which NIXL merges")]


def _blocks(bench: Bench) -> list[Figure]:
    figures = []
    sizes = bench.sizes
    with contest(bench, bench.shape(1, max(sizes.sweep_blocks), BLOCK_BYTES)) as between:
        for count in bench.points(sizes.sweep_blocks, "number of blocks"):
            figures.append(
                between.run(sizes.points, count).figure(
                    f"{count} x 64 KiB in one push",
                    num_bytes=count * BLOCK_BYTES,
                    series="one push, by number of blocks of 64 KiB",
                    x=count,
                    x_name="blocks",
                )
            )
    return figures


def _layers(bench: Bench) -> list[Figure]:
    figures = []
    for count in bench.points(bench.sizes.sweep_layers, "number of layers"):
        shape = bench.shape(count, _BLOCKS_PER_LAYER, BLOCK_BYTES)
        with contest(bench, shape) as between:
            figures.append(
                between.run(bench.sizes.points, _BLOCKS_PER_LAYER).figure(
                    f"{_BLOCKS_PER_LAYER} blocks of {count} layers, 64 KiB each",
                    num_bytes=shape.num_bytes,
                    series=f"one push of {_BLOCKS_PER_LAYER} blocks of 64 KiB, by number of layers",
                    x=count,
                    x_name="layers",
                )
            )
    return figures


def _chunks(bench: Bench) -> list[Figure]:
    figures = []
    megabytes = bench.sizes.sweep_megabytes
    num_blocks = megabytes * _MIB // BLOCK_BYTES
    with contest(bench, bench.shape(1, num_blocks, BLOCK_BYTES)) as between:
        for count in bench.points(bench.sizes.sweep_chunks, "number of chunks"):
            figures.append(
                between.run(bench.sizes.points, num_blocks, num_chunks=count).figure(
                    f"{megabytes} MiB in {count} chunk{'s' if count > 1 else ''}",
                    num_bytes=num_blocks * BLOCK_BYTES,
                    series=f"{megabytes} MiB in 64 KiB blocks, by number of chunks",
                    x=count,
                    x_name="chunks",
                    note="push() for chunk after chunk without a pause; the bare loop posts a WRITE for each, then "
                    "waits for all",
                )
            )
    return figures


def _block_bytes(bench: Bench) -> list[Figure]:
    figures = []
    num_bytes = bench.sizes.sweep_megabytes * _MIB
    for block_bytes in bench.points(bench.sizes.sweep_block_bytes, "size of a block"):
        shape = bench.shape(1, num_bytes // block_bytes, block_bytes)
        with contest(bench, shape) as between:
            figures.append(
                between.run(bench.sizes.points, shape.num_blocks).figure(
                    f"{bench.sizes.sweep_megabytes} MiB in blocks of {block_bytes // 1024} KiB",
                    num_bytes=num_bytes,
                    series=f"{bench.sizes.sweep_megabytes} MiB, by size of a block",
                    x=block_bytes,
                    x_name="bytes per block",
                )
            )
    return figures
