"""vLLM's KV cache in the library's words.

vLLM gives every layer one tensor ``[block, head, token, content]``, whatever the order in memory; ``content`` holds
key and value of one token and head together (MLA: the latent). That is the library's ``BHND``. Inside a block and head
a kernel may order tokens as it likes, so blocks are only ever moved whole, to blocks of the same size. Attention
kernels may use smaller blocks than the scheduler: then the tensor has a whole number of blocks for each of the
scheduler's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvpush.errors import ConfigurationError
from kvpush.integrations.vllm.work import Expect, PushChunk
from kvpush.layout import KVCacheSpec

_DIMS_BY_AXES = {4: "BHND", 3: "BND"}


def named_tensors(kv_caches: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The caches, once all of them are known to be plain tensors. Raises ConfigurationError."""
    if not kv_caches:
        raise ConfigurationError("vLLM has registered no KV cache that could be transferred")
    tensors: dict[str, torch.Tensor] = {}
    for name, cache in kv_caches.items():
        if not isinstance(cache, torch.Tensor):
            raise ConfigurationError(f"layer {name!r} has a cache of {type(cache).__name__}; attention layers have one")
        tensors[name] = cache
    return tensors


def spec_of(
    tensor: torch.Tensor, *, model: str, total_kv_heads: int, tp: tuple[int, int], pp: tuple[int, int]
) -> KVCacheSpec:
    """What the tensors cannot tell. ``tp`` and ``pp``: rank and size. Raises ConfigurationError."""
    dims = _dims_of(tensor)
    return KVCacheSpec(
        dims=dims,
        model=model,
        tp_rank=tp[0],
        tp_size=tp[1],
        pp_rank=pp[0],
        pp_size=pp[1],
        total_kv_heads=total_kv_heads if "H" in dims else None,
    )


def kernel_block_size_tokens(tensor: torch.Tensor) -> int:
    """Tokens in one of the tensor's blocks. Raises ConfigurationError."""
    return tensor.shape[_dims_of(tensor).index("N")]


def _dims_of(tensor: torch.Tensor) -> str:
    dims = _DIMS_BY_AXES.get(tensor.ndim)
    if dims is None:
        raise ConfigurationError(f"a KV cache of shape {tuple(tensor.shape)} is not one that is known of vLLM")
    return dims


@dataclass(frozen=True, slots=True)
class Blocks:
    """From the scheduler's blocks to those of the tensors."""

    ratio: int  # blocks of the tensors for each of the scheduler's

    @classmethod
    def of(cls, tensor: torch.Tensor, num_blocks: int) -> Blocks:
        """Raises ConfigurationError when the two do not fit."""
        if tensor.shape[0] < num_blocks or tensor.shape[0] % num_blocks:
            raise ConfigurationError(f"a KV cache of shape {tuple(tensor.shape)} does not hold {num_blocks} blocks")
        return cls(tensor.shape[0] // num_blocks)

    def of_chunk(self, chunk: PushChunk) -> PushChunk:
        """The same positions, in the tensors' blocks."""
        if self.ratio == 1:
            return chunk
        return replace(chunk, first_block=chunk.first_block * self.ratio, block_ids=self._expanded(chunk.block_ids))

    def of_expect(self, expect: Expect) -> Expect:
        """Likewise."""
        if self.ratio == 1:
            return expect
        return replace(expect, first_block=expect.first_block * self.ratio, block_ids=self._expanded(expect.block_ids))

    def _expanded(self, block_ids: Sequence[int]) -> list[int]:
        return [block_id * self.ratio + i for block_id in block_ids for i in range(self.ratio)]
