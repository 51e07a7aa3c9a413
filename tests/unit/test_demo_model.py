"""The demo's model: right against a dense oracle, indifferent to block ids, and sensitive to every cached token."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpush.cli.model import (
    ByteTokenizer,
    Llama,
    Llama3RopeScaling,
    ModelConfig,
    OutOfBlocks,
    PagedKVCache,
    deterministic,
    generate,
    greedy,
    stream,
)
from kvpush.cli.model.checkpoint import model_config
from kvpush.errors import ConfigurationError, UsageError

BLOCK_SIZE_TOKENS = 16
NEW_TOKENS = 16
PROMPT = "In disaggregated serving, prefill engines compute the cache and decode engines read it."

LLAMA3_ROPE = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
TINY = ModelConfig(
    num_layers=2, hidden_size=48, num_heads=4, num_kv_heads=2, head_size=16, intermediate_size=80, vocab_size=257
)
SHAPES = {
    "grouped": TINY,
    "one_kv_head": dataclasses.replace(TINY, num_kv_heads=1),
    "no_groups": dataclasses.replace(TINY, num_kv_heads=4),
    "wide_heads": dataclasses.replace(TINY, head_size=32, rope_theta=500.0),
    "llama3_rope": dataclasses.replace(TINY, rope_scaling=LLAMA3_ROPE),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    deterministic()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def small() -> Llama:
    return Llama.from_seed(ModelConfig.small(), seed=7)


@dataclasses.dataclass
class Prefilled:
    """A prompt whose keys and values lie in a cache."""

    model: Llama
    tokens: list[int]
    cache: PagedKVCache
    block_ids: list[int]
    logits: Tensor

    @property
    def first_token(self) -> int:
        return greedy(self.logits)

    @property
    def full_blocks(self) -> int:
        """Blocks that the prompt fills to the last token."""
        return len(self.tokens) // BLOCK_SIZE_TOKENS

    def next_logits(self) -> Tensor:
        return self.model.decode_step(self.first_token, len(self.tokens), self.cache, self.block_ids)

    def stream(self) -> Iterator[int]:
        return stream(
            self.model,
            self.cache,
            self.tokens,
            self.block_ids,
            max_new_tokens=NEW_TOKENS,
            first_token=self.first_token,
        )


def prefilled(model: Llama, text: str = PROMPT, *, chunk: int | None = None, spare_blocks: int = 0) -> Prefilled:
    tokens = model.tokenizer.encode(text)
    num_blocks = -(-(len(tokens) + NEW_TOKENS) // BLOCK_SIZE_TOKENS)
    cache = PagedKVCache(model.config, num_blocks + spare_blocks, BLOCK_SIZE_TOKENS)
    block_ids = cache.allocate(num_blocks)
    logits = torch.empty(0)
    for start in range(0, len(tokens), chunk or len(tokens)):
        logits = model.prefill(tokens[start : start + (chunk or len(tokens))], cache, block_ids, start=start)
    return Prefilled(model, tokens, cache, block_ids, logits)


def moved(source: Prefilled, num_blocks: int, block_ids: list[int]) -> Prefilled:
    """The same prompt in another cache, copied block by block to other ids, among blocks full of rubbish."""
    cache = PagedKVCache(source.model.config, num_blocks, BLOCK_SIZE_TOKENS)
    for name, layer in cache.kv_caches.items():
        layer.fill_(math.nan)
        for ours, theirs in zip(block_ids, source.block_ids, strict=True):
            layer[ours] = source.cache.kv_caches[name][theirs]
    return dataclasses.replace(source, cache=cache, block_ids=block_ids)


# --- an oracle that shares nothing with the model but its weights -----------------------------------------------------


def dense_logits(model: Llama, tokens: list[int]) -> Tensor:
    """Logits ``[token, vocab]`` of a whole sequence in float64: no cache, no chunks, rotation by complex numbers."""
    config, weights = model.config, model.weights
    hidden = weights.embedding.double()[tokens]
    angles = torch.outer(torch.arange(len(tokens)).double(), dense_frequencies(config))
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)

    def rotate(heads: Tensor) -> Tensor:
        turned = torch.complex(*heads.split(config.head_size // 2, dim=-1)) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    def norm(rows: Tensor, weight: Tensor) -> Tensor:
        return rows / (rows.pow(2).mean(1, keepdim=True) + config.rms_eps).sqrt() * weight.double()

    group = config.num_heads // config.num_kv_heads
    for layer in weights.layers:
        rows = norm(hidden, layer.attention_norm)
        queries, keys, values = (
            torch.einsum("th,oh->to", rows, matrix.double()).unflatten(1, (-1, config.head_size))
            for matrix in (layer.query, layer.key, layer.value)
        )
        keys, values = (shared.repeat_interleave(group, dim=1) for shared in (rotate(keys), values))
        scores = torch.einsum("qhd,khd->hqk", rotate(queries), keys) / math.sqrt(config.head_size)
        scores += torch.full(scores.shape[1:], -math.inf, dtype=torch.float64).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
        hidden = hidden + mixed @ layer.output.double().T
        rows = norm(hidden, layer.mlp_norm)
        gate = rows @ layer.gate.double().T
        hidden = hidden + (gate / (1 + (-gate).exp()) * (rows @ layer.up.double().T)) @ layer.down.double().T
    return norm(hidden, weights.norm) @ weights.head.double().T


def dense_frequencies(config: ModelConfig) -> Tensor:
    scaled = []
    for pair in range(config.head_size // 2):
        frequency = config.rope_theta ** (-2 * pair / config.head_size)
        if (scaling := config.rope_scaling) is not None:
            wavelength = 2 * math.pi / frequency
            if wavelength > scaling.original_max_position / scaling.low_freq_factor:
                frequency /= scaling.factor
            elif wavelength > scaling.original_max_position / scaling.high_freq_factor:
                smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        scaled.append(frequency)
    return torch.tensor(scaled, dtype=torch.float64)


def dense_tokens(model: Llama, tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(greedy(dense_logits(model, tokens)[-1]))
    return tokens[-count:]


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_and_decode_match_the_dense_oracle(shape: str) -> None:
    model = Llama.from_seed(SHAPES[shape], seed=3)
    prompt = prefilled(model)

    torch.testing.assert_close(
        prompt.logits.double(), dense_logits(model, prompt.tokens)[-1], atol=1e-3, rtol=0, check_dtype=False
    )
    assert list(prompt.stream()) == dense_tokens(model, prompt.tokens, NEW_TOKENS)


def test_the_default_model_matches_the_dense_oracle(small: Llama) -> None:
    prompt = prefilled(small)

    assert list(prompt.stream()) == dense_tokens(small, prompt.tokens, NEW_TOKENS)


def test_the_oracle_would_see_another_rotation() -> None:
    model = Llama.from_seed(TINY, seed=3)
    scaled = Llama(SHAPES["llama3_rope"], model.weights, model.tokenizer)
    tokens = model.tokenizer.encode(PROMPT)

    assert dense_tokens(model, tokens, 8) != dense_tokens(scaled, tokens, 8)


# --- chunks, moves, interleaving, processes: none of them changes a token ---------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, BLOCK_SIZE_TOKENS, 40])
def test_chunks_of_a_prompt_add_up(small: Llama, chunk: int) -> None:
    whole, chunked = prefilled(small), prefilled(small, chunk=chunk)

    torch.testing.assert_close(chunked.logits, whole.logits, atol=1e-3, rtol=0)
    assert list(chunked.stream()) == list(whole.stream())


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(12)), st.sampled_from([None, 24]))
def test_moved_blocks_give_identical_logits(places: list[int], chunk: int | None) -> None:
    model = Llama.from_seed(TINY, seed=5)
    source = prefilled(model, chunk=chunk)
    target = moved(source, len(places), places[: len(source.block_ids)])

    assert torch.equal(source.next_logits(), target.next_logits())
    assert list(source.stream()) == list(target.stream())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moved_blocks_of_the_default_model_give_identical_tokens(dtype: torch.dtype) -> None:
    model = Llama.from_seed(dataclasses.replace(ModelConfig.small(), dtype=dtype), seed=7)
    source = prefilled(model)
    num_blocks = len(source.block_ids)
    target = moved(source, 2 * num_blocks + 1, [2 * block_id + 1 for block_id in reversed(range(num_blocks))])

    assert list(source.stream()) == list(target.stream())


def test_more_blocks_than_needed_change_nothing(small: Llama) -> None:
    tight, ample = prefilled(small), prefilled(small, spare_blocks=3)
    ample.block_ids += ample.cache.allocate(3)

    assert torch.equal(tight.next_logits(), ample.next_logits())


def test_interleaved_requests_do_not_touch_each_other(small: Llama) -> None:
    texts = [PROMPT, "Hello", "x" * 40]
    alone = [list(prefilled(small, text).stream()) for text in texts]
    cache = PagedKVCache(small.config, 32, BLOCK_SIZE_TOKENS)
    streams = []
    for text in texts:
        tokens = small.tokenizer.encode(text)
        block_ids = cache.allocate(cache.blocks_for(len(tokens) + NEW_TOKENS))
        streams.append(stream(small, cache, tokens, block_ids, max_new_tokens=NEW_TOKENS))

    assert [list(tokens) for tokens in zip(*zip(*streams, strict=True), strict=True)] == alone


DECODE_PROCESS = """
import sys, torch
from kvpush.cli.model import Llama, ModelConfig, PagedKVCache, deterministic, generate

deterministic()
sent = torch.load(sys.argv[1])
model = Llama.from_seed(ModelConfig.small(), seed=7)
cache = PagedKVCache(model.config, 40, sent["block_size_tokens"])
cache.allocate(5)
block_ids = cache.allocate(len(sent["blocks"]["layers.0"]))[::-1]
for name, blocks in sent["blocks"].items():
    cache.kv_caches[name][block_ids] = blocks
prompt, count = sent["prompt"], sent["max_new_tokens"]
print(generate(model, cache, prompt, block_ids, max_new_tokens=count, first_token=sent["first_token"]))
print(generate(model, cache, prompt, block_ids, max_new_tokens=count))
"""


@pytest.mark.processes
def test_another_process_continues_from_moved_blocks(small: Llama, tmp_path: Path) -> None:
    source = prefilled(small)
    sent = {
        "blocks": {name: layer[source.block_ids] for name, layer in source.cache.kv_caches.items()},
        "block_size_tokens": BLOCK_SIZE_TOKENS,
        "prompt": source.tokens,
        "first_token": source.first_token,
        "max_new_tokens": NEW_TOKENS,
    }
    torch.save(sent, tmp_path / "sent.pt")
    command = [sys.executable, "-c", DECODE_PROCESS, str(tmp_path / "sent.pt")]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603

    here = list(source.stream())
    assert child.stdout.splitlines() == [str(here), str(here)], "first from our blocks, then from its own prefill"


def test_weights_depend_on_the_seed_alone() -> None:
    torch.set_num_threads(1)
    one = Llama.from_seed(TINY, seed=1).weights
    torch.set_num_threads(4)
    torch.manual_seed(99)
    again, other = Llama.from_seed(TINY, seed=1).weights, Llama.from_seed(TINY, seed=2).weights

    assert torch.equal(one.head, again.head)  # drawn last: equal only if all draws before it were
    assert not torch.equal(one.embedding, other.embedding)


def test_drawing_weights_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    Llama.from_seed(TINY, seed=1)

    assert torch.equal(before, torch.get_rng_state())


# --- wrong bytes must not go unnoticed --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stale(small: Llama) -> PagedKVCache:
    """Another request's keys and values, at least as many blocks: what a block holds that was never written."""
    return prefilled(small, "The quick brown fox jumps over the lazy dog, " * 3).cache


def test_every_wrong_block_changes_the_text(small: Llama, stale: PagedKVCache) -> None:
    prompt = prefilled(small)
    right_logits, right_tokens = prompt.next_logits(), list(prompt.stream())
    places = list(itertools.product(prompt.cache.kv_caches, (0, 1), range(prompt.full_blocks)))
    unnoticed = []
    for name, key_or_value, block_id in places:
        right = prompt.cache.kv_caches[name][block_id, key_or_value].clone()
        prompt.cache.kv_caches[name][block_id, key_or_value] = stale.kv_caches[name][block_id, key_or_value]
        assert not torch.equal(prompt.next_logits(), right_logits), (name, key_or_value, block_id)
        if all(got == right_token for got, right_token in zip(prompt.stream(), right_tokens, strict=True)):
            unnoticed.append((name, key_or_value, block_id))
        prompt.cache.kv_caches[name][block_id, key_or_value] = right

    assert list(prompt.stream()) == right_tokens, "the cache was put right again"
    assert len(unnoticed) <= len(places) // 20, unnoticed


def test_every_cached_token_counts(small: Llama) -> None:
    prompt = prefilled(small)
    right = prompt.next_logits()
    for position in range(len(prompt.tokens)):
        block_id, offset = prompt.block_ids[position // BLOCK_SIZE_TOKENS], position % BLOCK_SIZE_TOKENS
        originals = {name: layer[block_id, :, :, offset].clone() for name, layer in prompt.cache.kv_caches.items()}
        for name, original in originals.items():
            prompt.cache.kv_caches[name][block_id, :, :, offset] = -original
        assert not torch.equal(prompt.next_logits(), right), position
        for name, original in originals.items():
            prompt.cache.kv_caches[name][block_id, :, :, offset] = original

    assert torch.equal(prompt.next_logits(), right)


def test_blocks_in_the_wrong_order_change_the_text(small: Llama) -> None:
    prompt = prefilled(small)
    right = list(prompt.stream())
    full, rest = prompt.block_ids[: prompt.full_blocks], prompt.block_ids[prompt.full_blocks :]
    orders = {"shifted": full[1:] + full[:1], "reversed": full[::-1]}
    for first, second in itertools.combinations(range(len(full)), 2):
        swapped = list(full)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        orders[f"{first} and {second} swapped"] = swapped
    for name, order in orders.items():
        assert list(dataclasses.replace(prompt, block_ids=order + rest).stream()) != right, name


def test_prompts_differ_in_their_continuations(small: Llama) -> None:
    prompts = [
        PROMPT,
        "J" + PROMPT[1:],  # differs in the first letter, in one in the middle, in the last
        PROMPT[:40] + "#" + PROMPT[41:],
        PROMPT[:-1] + "!",
        PROMPT + " ",
        "",
        "Hello",
        "Grüße, 世界",
        "a" * 64,
        "a" * 65,
    ]
    continuations = [list(prefilled(small, text).stream()) for text in prompts]

    assert len({tuple(tokens) for tokens in continuations}) == len(prompts)
    assert all(len(set(tokens)) >= NEW_TOKENS // 3 for tokens in continuations), "no text repeats one letter for ever"
    assert all(small.tokenizer.decode(tokens).isprintable() for tokens in continuations)


# --- generation -------------------------------------------------------------------------------------------------------


def test_equally_likely_tokens_are_settled_by_the_smaller() -> None:
    assert greedy(torch.tensor([0.0, 3.0, 1.0, 3.0])) == 1


def test_generation_ends_with_a_stop_token(small: Llama) -> None:
    tokens = list(prefilled(small).stream())
    stop = next(index for index, token in enumerate(tokens) if index > 2 and token not in tokens[:index])
    tokenizer = ByteTokenizer()
    tokenizer.stop_tokens = frozenset({tokens[stop]})
    prompt = prefilled(Llama(small.config, small.weights, tokenizer))

    assert list(prompt.stream()) == tokens[: stop + 1]


def test_one_new_token_costs_no_decode_step() -> None:
    model = Llama.from_seed(TINY, seed=1)
    cache = PagedKVCache(TINY, 1, 4)

    assert len(generate(model, cache, [1, 2, 3, 4], cache.allocate(1), max_new_tokens=1)) == 1


@pytest.mark.parametrize(
    ("text", "tokens"), [("", [256]), ("Hi", [256, 72, 105]), ("é", [256, 0xC3, 0xA9]), ("\0", [256, 0])]
)
def test_tokens_are_bytes(text: str, tokens: list[int]) -> None:
    tokenizer = ByteTokenizer()

    assert tokenizer.encode(text) == tokens
    assert tokenizer.decode(tokens) == text


def test_half_a_letter_is_replaced() -> None:
    assert ByteTokenizer().decode([72, 0xC3]) == "H\N{REPLACEMENT CHARACTER}"


# --- the cache and its allocator --------------------------------------------------------------------------------------


def test_cache_tensors_are_laid_out_as_documented() -> None:
    cache = PagedKVCache(TINY, num_blocks=3, block_size_tokens=4)

    assert {name: tuple(layer.shape) for name, layer in cache.kv_caches.items()} == {
        "layers.0": (3, 2, 2, 4, 16),
        "layers.1": (3, 2, 2, 4, 16),
    }
    block_bytes = sum(layer[0].nbytes for layer in cache.kv_caches.values())
    assert block_bytes == 4 * TINY.kv_bytes_per_token
    assert ModelConfig.small().kv_bytes_per_token == 16 * 1024


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert PagedKVCache(TINY, 1, 4).blocks_for(tokens) == blocks


def test_blocks_are_handed_out_in_turn_and_come_back_last() -> None:
    cache = PagedKVCache(TINY, 4, 4)

    assert cache.allocate(3) == [0, 1, 2]
    cache.free([1])
    assert cache.num_free == 2
    assert cache.allocate(0) == []
    assert cache.allocate(2) == [3, 1]
    assert cache.num_free == 0


def test_an_exhausted_cache_gives_nothing_away() -> None:
    cache = PagedKVCache(TINY, 4, 4)
    taken = cache.allocate(3)

    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 4 are free") as caught:
        cache.allocate(2)
    assert caught.value.retryable
    assert cache.num_free == 1
    cache.free(taken)
    assert sorted(cache.allocate(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("block_ids", [[0, 0], [2], [-1], [4], [0, 1, 2]])
def test_only_allocated_blocks_can_be_freed_and_once(block_ids: list[int]) -> None:
    cache = PagedKVCache(TINY, 4, 4)
    cache.allocate(2)

    with pytest.raises(UsageError, match="cannot free"):
        cache.free(block_ids)
    assert cache.num_free == 2
    cache.free([0, 1])
    with pytest.raises(UsageError, match="cannot free"):
        cache.free([0])


# --- a caller's mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "block_ids", "start", "message"),
    [
        ([], [0], 0, "no tokens"),
        ([1], [0], -1, "no tokens"),
        ([1] * 5, [0], 0, "cannot hold 5 tokens"),
        ([1], [0], 4, "cannot hold 5 tokens"),
        ([1] * 5, [1, 1], 0, "must differ"),
        ([1], [-1], 0, r"lie in \[0, 3\)"),
        ([1], [3], 0, r"lie in \[0, 3\)"),
        ([257], [0], 0, r"tokens must lie in \[0, 257\)"),
        ([-1], [0], 0, r"tokens must lie in \[0, 257\)"),
        ([1], [0, 1, 2], 8, "position 8 is beyond max_position=8"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(
    tokens: list[int], block_ids: list[int], start: int, message: str
) -> None:
    model = Llama.from_seed(dataclasses.replace(TINY, max_position=8), seed=1)
    cache = PagedKVCache(model.config, 3, 4)

    with pytest.raises(UsageError, match=message):
        model.prefill(tokens, cache, block_ids, start=start)
    assert not any(layer.any() for layer in cache.kv_caches.values())


def test_a_cache_of_another_shape_is_refused() -> None:
    model = Llama.from_seed(TINY, seed=1)
    cache = PagedKVCache(SHAPES["one_kv_head"], 1, 4)

    with pytest.raises(UsageError, match="cache was made for"):
        model.prefill([1], cache, [0])


def test_no_tokens_cannot_be_generated() -> None:
    model = Llama.from_seed(TINY, seed=1)

    with pytest.raises(UsageError, match="max_new_tokens=0"):
        generate(model, PagedKVCache(TINY, 1, 4), [1], [0], max_new_tokens=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"head_size": 16.0}, "head_size=16.0"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads=3"),
        ({"head_size": 15}, "head_size=15 must be even"),
        ({"rope_theta": math.inf}, "rope_theta=inf"),
        ({"rms_eps": 0}, "rms_eps=0"),
        ({"dtype": torch.int8}, "dtype=torch.int8"),
    ],
)
def test_configurations_are_checked(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize("change", [{"factor": 0.0}, {"high_freq_factor": 1.0}, {"original_max_position": 0}])
def test_rope_scalings_are_checked(change: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        dataclasses.replace(LLAMA3_ROPE, **change)


def test_a_seeded_model_speaks_bytes_only() -> None:
    with pytest.raises(ConfigurationError, match="vocab_size=300"):
        Llama.from_seed(dataclasses.replace(TINY, vocab_size=300), seed=1)


@pytest.mark.parametrize(("num_blocks", "block_size_tokens"), [(0, 4), (4, 0)])
def test_empty_caches_are_refused(num_blocks: int, block_size_tokens: int) -> None:
    with pytest.raises(ConfigurationError, match="must be above 0"):
        PagedKVCache(TINY, num_blocks, block_size_tokens)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def hf_config(**changes: object) -> SimpleNamespace:
    """What transformers 4 makes of a config.json; changes may turn it into that of transformers 5."""
    fields = {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 320,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "torch_dtype": torch.bfloat16,
    }
    return SimpleNamespace(**(fields | changes))


LLAMA3_FIELDS = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"head_dim": 32}, {"head_size": 32}),
        ({"dtype": torch.float16}, {"dtype": torch.float16}),
        ({"torch_dtype": None}, {"dtype": torch.float32}),
        ({"rope_scaling": LLAMA3_FIELDS}, {"rope_scaling": LLAMA3_ROPE}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
        (
            {"rope_parameters": LLAMA3_FIELDS | {"rope_theta": 7.0}},
            {"rope_theta": 7.0, "rope_scaling": LLAMA3_ROPE},
        ),
    ],
)
def test_checkpoint_configurations_are_translated(changes: dict[str, object], expected: dict[str, object]) -> None:
    plain = ModelConfig(
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        intermediate_size=128,
        vocab_size=320,
        rope_theta=500_000.0,
        rms_eps=1e-6,
        max_position=512,
        dtype=torch.bfloat16,
    )

    assert model_config(hf_config(**changes)) == dataclasses.replace(plain, **expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type='yarn' is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
    ],
)
def test_unsupported_checkpoints_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        model_config(hf_config(**changes))


def test_the_extra_is_named_where_transformers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(ConfigurationError, match=r"pip install 'kvpush\[hf\]'"):
        Llama.from_hf("anywhere")


HF_CHANGES = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "llama3_rope": {"rope_scaling": LLAMA3_FIELDS},
    "wide_heads": {"head_dim": 32, "rope_theta": 500.0},
    "one_kv_head": {"num_key_value_heads": 1},
}


def save_checkpoint(path: Path, dtype: torch.dtype = torch.float32, **changes: object) -> None:
    """A tiny random Llama and a tokenizer of whole words, saved as transformers does."""
    transformers = pytest.importorskip("transformers", reason="transformers (extra kvpush[hf]) is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers (extra kvpush[hf]) is not installed")
    transformers.utils.logging.disable_progress_bar()  # it leaves a thread behind
    torch.manual_seed(11)
    fields = vars(hf_config()) | changes
    for name in ("model_type", "torch_dtype"):
        fields.pop(name)
    config = transformers.LlamaConfig(**fields, eos_token_id=[2, 5], initializer_range=0.15)
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(path)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "push": 3, "the": 4, "cache": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(path)


@pytest.mark.parametrize("case", HF_CHANGES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **HF_CHANGES[case])
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    model = Llama.from_hf(tmp_path)
    tokens = torch.randint(0, 320, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]

    cache = PagedKVCache(model.config, 8, BLOCK_SIZE_TOKENS)
    block_ids = cache.allocate(8)[::-1]
    got = [model.prefill(tokens[:60], cache, block_ids)]
    got += [model.decode_step(tokens[i], i, cache, block_ids) for i in range(60, 100)]
    torch.testing.assert_close(torch.stack(got), expected[59:], atol=1e-4, rtol=1e-4)


def test_checkpoints_keep_their_dtype_unless_told(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, torch.bfloat16)

    assert Llama.from_hf(tmp_path).weights.head.dtype == torch.bfloat16
    assert Llama.from_hf(tmp_path, dtype=torch.float32).weights.head.dtype == torch.float32


def test_checkpoints_bring_their_tokenizer(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    tokenizer = Llama.from_hf(tmp_path).tokenizer

    assert tokenizer.encode("push the cache") == [1, 3, 4, 5]
    assert tokenizer.decode([1, 3, 4, 5, 2]) == "push the cache"
    assert tokenizer.stop_tokens == {2, 5}


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers (extra kvpush[hf]) is not installed")

    with pytest.raises(ConfigurationError, match="cannot load a Llama from"):
        Llama.from_hf(tmp_path / "nothing")
