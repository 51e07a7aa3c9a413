"""vLLM's KV caches in the library's words."""

import subprocess
import sys

import pytest
import torch

from kvpush import ConfigurationError
from kvpush.integrations.vllm.caches import Blocks, kernel_block_size_tokens, named_tensors, spec_of
from kvpush.integrations.vllm.params import DecodeLeg
from kvpush.integrations.vllm.work import Expect, PushChunk


def test_a_layer_is_blocks_heads_tokens_and_content():
    spec = spec_of(torch.zeros(4, 2, 32, 64), model="m", total_kv_heads=4, tp=(1, 2), pp=(0, 1))
    assert (spec.dims, spec.model, spec.rank, spec.tp_size, spec.total_kv_heads) == ("BHND", "m", (0, 1), 2, 4)


def test_a_latent_has_no_heads():
    spec = spec_of(torch.zeros(4, 32, 64), model="m", total_kv_heads=1, tp=(0, 1), pp=(0, 1))
    assert (spec.dims, spec.total_kv_heads) == ("BND", None)


@pytest.mark.parametrize("caches", [{}, {"layer": [torch.zeros(2)]}, {"layer": (torch.zeros(2), torch.zeros(2))}])
def test_what_is_no_attention_cache_is_refused(caches):
    with pytest.raises(ConfigurationError):
        named_tensors(caches)


def test_an_unknown_shape_is_refused():
    with pytest.raises(ConfigurationError, match="shape"):
        spec_of(torch.zeros(2, 4, 2, 32, 64), model="m", total_kv_heads=2, tp=(0, 1), pp=(0, 1))


@pytest.mark.parametrize(("shape", "tokens"), [((8, 2, 32, 64), 32), ((8, 16, 576), 16)])
def test_the_kernels_blocks_are_those_of_the_tensors(shape, tokens):
    assert kernel_block_size_tokens(torch.zeros(shape)) == tokens


def test_kernels_may_have_smaller_blocks():
    blocks = Blocks.of(torch.zeros(8, 1, 2, 1), 4)
    assert blocks.of_chunk(PushChunk(1, ("t",), 1, [3, 0], True)) == PushChunk(1, ("t",), 2, [6, 7, 0, 1], True)
    leg = DecodeLeg("t", "p0", {})
    assert blocks.of_expect(Expect("r", leg, 1, [2])) == Expect("r", leg, 2, [4, 5])
    same = PushChunk(1, ("t",), 1, [3, 0], True)
    assert Blocks.of(torch.zeros(4, 1), 4).of_chunk(same) is same


@pytest.mark.parametrize("num_blocks", [3, 9])
def test_blocks_that_do_not_fit_are_refused(num_blocks):
    with pytest.raises(ConfigurationError, match="blocks"):
        Blocks.of(torch.zeros(8, 1), num_blocks)


def test_neither_the_library_nor_the_pure_parts_import_vllm():
    code = (
        "import sys, kvpush.integrations.vllm as v, kvpush.integrations.vllm.prefill_worker, "
        "kvpush.integrations.vllm.decode_worker, kvpush.integrations.vllm.prefill_scheduler, "
        "kvpush.integrations.vllm.decode_scheduler; assert 'vllm' not in sys.modules; assert not hasattr(v, 'other')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
