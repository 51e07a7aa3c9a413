"""One side of one peer, in a process of its own, driven by run.py with a line of JSON a call.

    python worker.py PEER reader|writer LAYERS BLOCKS BLOCK_BYTES

A peer is a module ``peer_PEER.py`` with a class ``Reader`` and a class ``Writer``. Both get the shape; their methods
take and return what JSON can carry. Instants are of CLOCK_MONOTONIC, in nanoseconds.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

CANARY = 0xEE


@dataclass(frozen=True)
class Shape:
    layers: int
    blocks: int
    block_bytes: int

    def cache(self) -> list[torch.Tensor]:
        """One tensor of bytes a layer."""
        return [torch.full((self.blocks, self.block_bytes), CANARY, dtype=torch.uint8) for _ in range(self.layers)]


class Patience:
    """A deadline for a loop that waits."""

    def __init__(self, what: str, timeout_s: float = 60.0) -> None:
        self._what = what
        self._end_s = time.monotonic() + timeout_s

    def check(self) -> None:
        if time.monotonic() > self._end_s:
            raise TimeoutError(f"waited in vain for {self._what}")


def pattern(shape: Shape, layer: int, seed: int, count: int) -> npt.NDArray[np.uint8]:
    """What the positions of a transfer hold in one layer; never a canary."""
    inside = np.arange(shape.block_bytes, dtype=np.int64) * 31
    positions = np.arange(count, dtype=np.int64)[:, None] * 13
    return ((inside + positions + seed * 17 + layer * 7) % 233).astype(np.uint8)


class Memory:
    """What readers and writers have in common."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.layers = shape.cache()

    def clear(self) -> None:
        for layer in self.layers:
            layer.fill_(CANARY)

    def fill(self, seed: int, block_ids: list[int]) -> None:
        for number, layer in enumerate(self.layers):
            layer.numpy()[block_ids] = pattern(self.shape, number, seed, len(block_ids))

    def wrong_bytes(self, seed: int, block_ids: list[int]) -> int:
        """In the whole cache, after clear() and a transfer of fill()'s bytes."""
        wrong = 0
        for number, layer in enumerate(self.layers):
            expected = np.full((self.shape.blocks, self.shape.block_bytes), CANARY, dtype=np.uint8)
            expected[block_ids] = pattern(self.shape, number, seed, len(block_ids))
            wrong += int((layer.numpy() != expected).sum())
        return wrong


def serve(peer: Any, lines: Any, answers: Any) -> None:
    for line in lines:
        name, arguments = json.loads(line)
        try:
            answer = {"ok": getattr(peer, name)(*arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> int:
    name, role, *numbers = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print what they like; the answers have a line of their own
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    module = importlib.import_module(f"peer_{name}")
    shape = Shape(*map(int, numbers))
    peer = (module.Reader if role == "reader" else module.Writer)(shape)
    answers.write(json.dumps({"ok": peer.versions()}) + "\n")
    answers.flush()
    serve(peer, sys.stdin, answers)
    peer.close()
    answers.flush()
    os._exit(0)  # some peers leave threads behind that never end


if __name__ == "__main__":
    sys.exit(main())
