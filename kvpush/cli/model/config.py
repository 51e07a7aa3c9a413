"""The sizes of a Llama, validated when they are made."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Self

import torch

from kvpush.cli.model.tokens import ByteTokenizer
from kvpush.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """How Llama 3.1 and later stretch rotary embeddings beyond the context they were first trained on."""

    factor: float  # slow rotations are divided by this
    low_freq_factor: float  # "slow": fewer turns than this in the original context
    high_freq_factor: float  # more turns than this: left as they are; in between: blended
    original_max_position: int

    def __post_init__(self) -> None:
        if min(self.factor, self.low_freq_factor, self.original_max_position) <= 0:
            raise ConfigurationError(f"{self} must hold numbers above 0")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ConfigurationError(
                f"low_freq_factor={self.low_freq_factor} must be below high_freq_factor={self.high_freq_factor}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that shapes a Llama and its KV cache. Raises :class:`ConfigurationError` naming the field and value.

    Two engines whose configurations are equal can read each other's blocks, if their weights are the same.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int  # query heads share them in groups of num_heads / num_kv_heads
    head_size: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 10_000.0
    rope_scaling: Llama3RopeScaling | None = None
    rms_eps: float = 1e-5
    max_position: int = 4096
    dtype: torch.dtype = torch.float32  # of the weights and of the cache

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigurationError(f"{field.name}={value!r} must be a whole number above 0")
            if field.type == "float" and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ConfigurationError(f"{field.name}={value!r} must be a number above 0")
        if self.num_heads % self.num_kv_heads:
            raise ConfigurationError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ConfigurationError(
                f"head_size={self.head_size} must be even: rotary embeddings turn pairs of numbers"
            )
        if not self.dtype.is_floating_point:
            raise ConfigurationError(f"dtype={self.dtype} must be a floating-point type")

    @classmethod
    def small(cls) -> Self:
        """The demo's default: 25 MB of weights, 16 KiB of KV per token (3 MiB for a prompt of 200), some ms per step.

        Heads are wide and many for the hidden size, so that the cache weighs much and the arithmetic little.
        """
        return cls(
            num_layers=8,
            hidden_size=256,
            num_heads=8,
            num_kv_heads=4,
            head_size=64,
            intermediate_size=512,
            vocab_size=ByteTokenizer.vocab_size,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token leaves in the cache, all layers together."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_size * self.dtype.itemsize
