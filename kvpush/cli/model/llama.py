"""The decoder itself: prefill and decode steps over a paged cache, and greedy generation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from kvpush.cli.model import checkpoint
from kvpush.cli.model.cache import PagedKVCache, Span
from kvpush.cli.model.config import ModelConfig
from kvpush.cli.model.tokens import ByteTokenizer, Tokenizer
from kvpush.cli.model.weights import LayerWeights, Weights, seeded
from kvpush.errors import ConfigurationError, UsageError


def deterministic() -> None:
    """Make this process compute with one thread: how work is split among threads decides how sums are rounded."""
    torch.set_num_threads(1)


class Llama:
    """A Llama decoder whose keys and values live in a :class:`PagedKVCache` that the caller brings.

    It holds no state of any request: several may be interleaved, each with its own blocks, step by step.
    """

    def __init__(self, config: ModelConfig, weights: Weights, tokenizer: Tokenizer) -> None:
        self.config = config
        self.weights = weights
        self.tokenizer = tokenizer
        self._inverse_frequencies = _inverse_frequencies(config).to(weights.embedding.device)

    @classmethod
    def from_seed(cls, config: ModelConfig, seed: int, *, device: torch.device | str = "cpu") -> Self:
        """A byte-level model with random weights: the same in every process that names the same seed."""
        if config.vocab_size != ByteTokenizer.vocab_size:
            raise ConfigurationError(
                f"vocab_size={config.vocab_size} must be {ByteTokenizer.vocab_size}: bytes and BOS"
            )
        return cls(config, seeded(config, seed, device), ByteTokenizer())

    @classmethod
    def from_hf(cls, path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Self:
        """A checkpoint that transformers can load, with its tokenizer; ``dtype`` defaults to the checkpoint's own.

        Raises :class:`ConfigurationError` where transformers is missing or the checkpoint is no plain Llama.
        """
        return cls(*checkpoint.load(path, dtype=dtype, device=device))

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], cache: PagedKVCache, block_ids: Sequence[int], start: int = 0) -> Tensor:
        """Write keys and values of ``tokens`` at positions from ``start`` on; return the last one's logits ``[vocab]``.

        For a prompt in chunks call it once per chunk, in order: each attends to all positions before it, through the
        cache. Scores take memory in proportion to chunk times position, so long prompts want chunks.

        Caller's duty: ``block_ids`` hold the sequence from position 0 on, and positions before ``start`` are written.
        """
        span = self._span(tokens, cache, block_ids, start)
        hidden = functional.embedding(self._tensor(tokens), self.weights.embedding)  # [token, hidden]
        rotation = self._rotation(span.stop)
        for index, layer in enumerate(self.weights.layers):
            hidden = hidden + self._attention(index, layer, hidden, rotation, cache, span)
            hidden = hidden + self._mlp(layer, hidden)
        return functional.linear(self._norm(hidden[-1], self.weights.norm), self.weights.head)

    def decode_step(self, token: int, position: int, cache: PagedKVCache, block_ids: Sequence[int]) -> Tensor:
        """Append one token: write its keys and values at ``position``, return the logits ``[vocab]`` of the next."""
        return self.prefill([token], cache, block_ids, start=position)

    def _span(self, tokens: Sequence[int], cache: PagedKVCache, block_ids: Sequence[int], start: int) -> Span:
        """Check the caller's arguments, so that a mistake is named instead of read from the wrong place."""
        stop = start + len(tokens)
        if cache.config != self.config:
            raise UsageError(f"the cache was made for {cache.config}, the model is {self.config}")
        if stop > self.config.max_position:
            raise UsageError(f"position {stop - 1} is beyond max_position={self.config.max_position}")
        span = cache.span(block_ids, start, stop)
        if not 0 <= min(tokens) <= max(tokens) < self.config.vocab_size:
            raise UsageError(f"tokens must lie in [0, {self.config.vocab_size})")
        return span

    def _attention(
        self,
        layer_index: int,
        layer: LayerWeights,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: PagedKVCache,
        span: Span,
    ) -> Tensor:
        """Self-attention of the span's tokens to everything up to them, by way of the cache. ``[token, hidden]``.

        Keys are cached as they are before the rotation, and turned when they are read. Cached afterwards, as many
        engines do, they carry their positions along, attention does not care for their order, and a block that lies in
        another one's place goes unnoticed. Here it turns by the wrong angle: as wrong as any other bytes.
        """
        normed = self._norm(hidden, layer.attention_norm)
        queries, keys, values = (
            functional.linear(normed, matrix).view(len(hidden), -1, self.config.head_size)
            for matrix in (layer.query, layer.key, layer.value)
        )
        cache.write(layer_index, span, keys, values)
        keys, values = cache.read(layer_index, span)
        cosine, sine = rotation
        start = span.stop - len(hidden)
        turned_queries = _rotate(queries.transpose(0, 1), cosine[start:], sine[start:])
        return functional.linear(_attend(turned_queries, _rotate(keys, cosine, sine), values), layer.output)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        normed = self._norm(hidden, layer.mlp_norm)
        gated = functional.silu(functional.linear(normed, layer.gate)) * functional.linear(normed, layer.up)
        return functional.linear(gated, layer.down)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Divide each row by its root mean square, in float32 whatever the dtype."""
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_eps)
        return weight * normed.to(hidden.dtype)

    def _rotation(self, stop: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine ``[position, head_size]`` of the angles at positions ``[0, stop)``; all heads share them."""
        positions = torch.arange(stop, device=self._inverse_frequencies.device, dtype=torch.float32)
        angles = torch.outer(positions, self._inverse_frequencies)
        cosine, sine = (each.to(self.config.dtype).repeat(1, 2) for each in (angles.cos(), angles.sin()))
        return cosine, sine

    def _tensor(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, device=self.weights.embedding.device)


def _inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position ``[head_size / 2]`` by which each pair of numbers in a head is turned."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    fast = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = fast.clamp(0, 1)  # 1: left alone, 0: slowed down by the whole factor
    scaled: Tensor = frequencies * (kept + (1 - kept) / scaling.factor)
    return scaled


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn ``[head, token, head_size]`` by its tokens' angles; pairs are an element and the one half a head on."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last tokens of a sequence to all of it.

    ``queries`` is ``[head, token, head_size]``, ``keys`` and ``values`` are ``[kv_head, sequence, head_size]``; the
    result is ``[token, head * head_size]``. Query heads that share a KV head are rows of one product: no copies of it.
    """
    num_heads, num_tokens, head_size = queries.shape
    num_kv_heads, num_sequence, _ = keys.shape
    rows = queries.reshape(num_kv_heads, -1, head_size)  # [kv_head, group * token, head_size]
    scores = (rows @ keys.transpose(1, 2) * head_size**-0.5).view(num_heads, num_tokens, num_sequence)
    if num_tokens > 1:
        seen = torch.ones(num_tokens, num_sequence, dtype=torch.bool, device=queries.device)
        scores = scores.masked_fill(~seen.tril(num_sequence - num_tokens), -math.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    attended: Tensor = weights.view(num_kv_heads, -1, num_sequence) @ values  # [kv_head, group * token, head_size]
    return attended.view(num_heads, num_tokens, head_size).transpose(0, 1).flatten(1)


def greedy(logits: Tensor) -> int:
    """The likeliest token; the smallest of them where several are equally likely."""
    return int(logits.argmax())


def stream(
    model: Llama,
    cache: PagedKVCache,
    prompt_tokens: Sequence[int],
    block_ids: Sequence[int],
    *,
    max_new_tokens: int,
    first_token: int | None = None,
) -> Iterator[int]:
    """Yield greedy tokens one by one; advance several of these in turn to interleave requests.

    With ``first_token`` the prompt is not computed here: its keys and values are in the cache already, and this is the
    token that the prefill engine drew from them; it is yielded first. Without it, the prompt is prefilled at once.

    Caller's duty: blocks for ``len(prompt_tokens) + max_new_tokens - 1`` tokens (the last token is never written).
    """
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens={max_new_tokens} must be above 0")
    token = greedy(model.prefill(prompt_tokens, cache, block_ids)) if first_token is None else first_token
    yield token
    for position in range(len(prompt_tokens), len(prompt_tokens) + max_new_tokens - 1):
        if token in model.tokenizer.stop_tokens:
            return
        token = greedy(model.decode_step(token, position, cache, block_ids))
        yield token


def generate(
    model: Llama,
    cache: PagedKVCache,
    prompt_tokens: Sequence[int],
    block_ids: Sequence[int],
    *,
    max_new_tokens: int,
    first_token: int | None = None,
) -> list[int]:
    """All tokens of :func:`stream`: at most ``max_new_tokens``, the first one and a stop token included."""
    return list(stream(model, cache, prompt_tokens, block_ids, max_new_tokens=max_new_tokens, first_token=first_token))
