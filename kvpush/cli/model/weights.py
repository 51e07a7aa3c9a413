"""The parameters of a Llama, and how to draw them from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpush.cli.model.config import ModelConfig

# A model drawn at random must still mind its whole cache, or the demo would print the right text from wrong bytes. Flat
# attention averages that away: all positions grow alike and the text ends in one letter for ever. With scores this far
# apart each head picks one or two tokens of hundreds, and other ones at the next step. Measured with a prompt of 229
# tokens: of 224 caches with one block of one layer wrong, in keys or in values, 221 change the text within 16 tokens;
# with a gain of 3 about half of them do.
SCORE_GAIN = 7.0
PRINTABLE = range(0x20, 0x7F)  # the only tokens that a seeded model generates, so that a terminal can show them


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are ``[out, in]``, as in checkpoints."""

    attention_norm: Tensor  # [hidden]
    query: Tensor  # [num_heads * head_size, hidden]
    key: Tensor  # [num_kv_heads * head_size, hidden]
    value: Tensor  # [num_kv_heads * head_size, hidden]
    output: Tensor  # [hidden, num_heads * head_size]
    mlp_norm: Tensor  # [hidden]
    gate: Tensor  # [intermediate, hidden]
    up: Tensor  # [intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class Weights:
    """All parameters."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself where the checkpoint ties them


def seeded(config: ModelConfig, seed: int, device: torch.device | str) -> Weights:
    """Draw weights that depend on ``config`` and ``seed`` alone: not on the process, its threads or the device."""
    draw = _Draw(config, seed, device)
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    embedding = draw.matrix(config.vocab_size, hidden, gain=hidden**0.5)  # rows of unit size per element
    layers = tuple(
        LayerWeights(
            attention_norm=draw.ones(hidden),
            query=draw.matrix(query_size, hidden, gain=SCORE_GAIN),
            key=draw.matrix(kv_size, hidden),
            value=draw.matrix(kv_size, hidden),
            output=draw.matrix(hidden, query_size),
            mlp_norm=draw.ones(hidden),
            gate=draw.matrix(intermediate, hidden),
            up=draw.matrix(intermediate, hidden),
            down=draw.matrix(hidden, intermediate),
        )
        for _ in range(config.num_layers)
    )
    head = draw.matrix(config.vocab_size, hidden)
    head[: PRINTABLE.start] = 0  # a logit of zero never wins against the best of many random ones
    head[PRINTABLE.stop :] = 0
    return Weights(embedding=embedding, layers=layers, norm=draw.ones(hidden), head=head)


class _Draw:
    """Random matrices in a fixed order."""

    def __init__(self, config: ModelConfig, seed: int, device: torch.device | str) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = config.dtype
        self._device = device

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        """``[rows, columns]`` that multiplies the size of what it is applied to by ``gain``.

        Uniform rather than normal numbers: they take no logarithm or cosine, so every machine draws the same bits.
        """
        bound = gain * (3.0 / columns) ** 0.5
        unit = torch.rand(rows, columns, generator=self._generator, dtype=torch.float32)
        matrix: Tensor = (unit * 2 - 1) * bound
        return matrix.to(device=self._device, dtype=self._dtype)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self._dtype, device=self._device)
