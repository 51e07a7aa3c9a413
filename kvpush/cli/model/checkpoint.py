"""Llama checkpoints, read with transformers where it is installed (the extra ``kvpush[hf]``)."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpush.cli.model.config import Llama3RopeScaling, ModelConfig
from kvpush.cli.model.tokens import Tokenizer
from kvpush.cli.model.weights import LayerWeights, Weights
from kvpush.errors import ConfigurationError


def load(
    path: str | Path, *, dtype: torch.dtype | None, device: torch.device | str
) -> tuple[ModelConfig, Weights, Tokenizer]:
    """Read a checkpoint and its tokenizer. Raises :class:`ConfigurationError` naming what is missing or unsupported."""
    transformers = _transformers()
    try:
        hf_config = transformers.AutoConfig.from_pretrained(path)
        # The configuration is checked first: it costs nothing, the weights may be gigabytes.
        config = model_config(hf_config, dtype=dtype)
        hf_model = transformers.AutoModelForCausalLM.from_pretrained(path, config=hf_config)
        hf_tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except ConfigurationError:
        raise
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"cannot load a Llama from {str(path)!r}: {exc}") from exc
    weights = _weights(hf_model.state_dict(), config, device)
    return config, weights, _HfTokenizer(hf_tokenizer, _stop_tokens(hf_model))


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as exc:
        raise ConfigurationError("a checkpoint needs transformers: pip install 'kvpush[hf]'") from exc


def model_config(hf_config: Any, *, dtype: torch.dtype | None = None) -> ModelConfig:
    """Translate a ``LlamaConfig``. Raises :class:`ConfigurationError` naming a field that is not supported."""
    _require(hf_config, "model_type", "llama")
    _require(hf_config, "hidden_act", "silu")
    _require(hf_config, "attention_bias", False)
    _require(hf_config, "mlp_bias", False)
    theta, scaling = _rope(hf_config)
    return ModelConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_size=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads,
        intermediate_size=hf_config.intermediate_size,
        vocab_size=hf_config.vocab_size,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=hf_config.rms_norm_eps,
        max_position=hf_config.max_position_embeddings,
        dtype=dtype or _checkpoint_dtype(hf_config),
    )


def _require(hf_config: Any, field: str, expected: object) -> None:
    value = getattr(hf_config, field, expected)
    if value != expected:
        raise ConfigurationError(f"{field}={value!r} is not supported, only {expected!r}")


def _rope(hf_config: Any) -> tuple[float, Llama3RopeScaling | None]:
    """Base and scaling of the rotary embeddings. transformers 5 keeps them in one dictionary, 4 in two fields."""
    parameters: Mapping[str, Any] = (
        getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    )
    theta = float(
        parameters["rope_theta"] if "rope_theta" in parameters else getattr(hf_config, "rope_theta", 10_000.0)
    )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigurationError(
            f"partial_rotary_factor={parameters['partial_rotary_factor']} is not supported, only 1"
        )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigurationError(f"rope_type={kind!r} is not supported, only 'default' and 'llama3'")
    return theta, Llama3RopeScaling(
        factor=parameters["factor"],
        low_freq_factor=parameters["low_freq_factor"],
        high_freq_factor=parameters["high_freq_factor"],
        original_max_position=parameters["original_max_position_embeddings"],
    )


def _checkpoint_dtype(hf_config: Any) -> torch.dtype:
    """The dtype that the checkpoint was saved in: ``dtype``, or ``torch_dtype`` before transformers 4.56."""
    field = "dtype" if hasattr(hf_config, "dtype") else "torch_dtype"
    return getattr(hf_config, field, None) or torch.float32


def _weights(state: Mapping[str, Tensor], config: ModelConfig, device: torch.device | str) -> Weights:
    """Our weights under transformers' names; no copy where dtype and device fit already."""

    def take(name: str) -> Tensor:
        return state[name].to(device=device, dtype=config.dtype)

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        return LayerWeights(
            attention_norm=take(prefix + "input_layernorm.weight"),
            query=take(prefix + "self_attn.q_proj.weight"),
            key=take(prefix + "self_attn.k_proj.weight"),
            value=take(prefix + "self_attn.v_proj.weight"),
            output=take(prefix + "self_attn.o_proj.weight"),
            mlp_norm=take(prefix + "post_attention_layernorm.weight"),
            gate=take(prefix + "mlp.gate_proj.weight"),
            up=take(prefix + "mlp.up_proj.weight"),
            down=take(prefix + "mlp.down_proj.weight"),
        )

    return Weights(
        embedding=take("model.embed_tokens.weight"),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        norm=take("model.norm.weight"),
        head=take("lm_head.weight"),  # with tie_word_embeddings, transformers lists the embedding under this name too
    )


def _stop_tokens(hf_model: Any) -> frozenset[int]:
    """Tokens that end a generation: none, one or several, by the checkpoint's own settings."""
    ids = hf_model.generation_config.eos_token_id
    if ids is None:
        ids = hf_model.config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


class _HfTokenizer:
    """A checkpoint's own tokenizer."""

    def __init__(self, tokenizer: Any, stop_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.stop_tokens = stop_tokens

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
