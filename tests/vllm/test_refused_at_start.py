"""What the connector cannot do is said when the engine starts, in words, and not found out later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import ROOT, EngineProcess

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

NUM_BLOCKS = 199
WINDOW = "sliding_attention"
FULL = "full_attention"


def with_layers(*kinds: str) -> dict[str, Any]:
    """Options of an engine whose layers look at so much."""
    return {"hf_overrides": {"layer_types": list(kinds), "sliding_window": 64}}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sliding windows": (with_layers(WINDOW, WINDOW, WINDOW, WINDOW), {}, "transfers full attention"),
    "two groups of layers": (with_layers(WINDOW, FULL, WINDOW, FULL), {}, "--disable-hybrid-kv-cache-manager"),
    "a setting of vLLM's connector": ({}, {"push_registration_timeout": 5}, "its counterpart is receive_deadline_s"),
    "a setting out of range": ({}, {"lease_s": -1.0}, "lease_s=-1.0"),
}


# The configuration alone, on a CPU that is said to have CUDA graphs: with those vLLM asks the connector about them.
CONFIGURE = """
import json, sys
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform

def with_graphs(cls, config, keep=CpuPlatform.check_and_update_config.__func__):
    keep(cls, config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE

CpuPlatform.check_and_update_config = classmethod(with_graphs)
CpuPlatform.support_static_graph_mode = classmethod(lambda cls: True)
for extra in json.loads(sys.argv[2]):
    kv = {
        "kv_connector": "KvPushConnector",
        "kv_connector_module_path": "kvpush.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    try:
        config = EngineArgs(model=sys.argv[1], max_model_len=2048, kv_transfer_config=kv).create_engine_config()
        print("accepted with", config.compilation_config.cudagraph_mode.name)
    except ValueError as exc:
        print("refused:", str(exc).replace(chr(10), " "))
"""


def test_with_cuda_graphs_wrong_settings_are_found_before_the_model_is_loaded(model: Path) -> None:
    cases = json.dumps([{"eager_handshake": "yes"}, {"lease": 5}, {}])
    found = subprocess.run(
        [sys.executable, "-c", CONFIGURE, str(model), cases],
        check=True,
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
    ).stdout.splitlines()[-3:]
    assert "eager_handshake='yes' must be true or false" in found[0]
    assert "lease=5 is no setting of KvPushConnector" in found[1]
    assert found[2].startswith("accepted with FULL_"), found


@pytest.fixture(scope="module")
def engines(start: Any) -> dict[str, EngineProcess]:
    """All at once: each takes a while to fail. And one that starts."""
    found = {
        case: start("both", f"refused-{number}", options=options, **settings)
        for number, (case, (options, settings, _)) in enumerate(CASES.items())
    }
    return found | {"large blocks": start("both", "large-blocks", options={"block_size": 64})}


@pytest.mark.parametrize("case", CASES)
def test_it_does_not_start_and_says_why(engines: dict[str, EngineProcess], case: str) -> None:
    engine, words = engines[case], CASES[case][2]
    with pytest.raises(AssertionError, match="has ended"):
        engine.started()
    log = engine.log.read_text()
    assert "kvpush.errors.ConfigurationError" in log and words in log, log[-3000:]


@pytest.mark.parametrize("large_side", ["decode", "prefill"])
def test_blocks_of_another_size_are_refused_with_both_sizes(
    engines: dict[str, EngineProcess],
    pair: tuple[EngineProcess, EngineProcess],
    make_prompt: Callable[[int], list[int]],
    large_side: str,
) -> None:
    """vLLM's CPU kernels pack the tokens of a block in an order of their own, so a part of a block is not usable."""
    large = engines["large blocks"].started()
    prefill, decode = (pair[0], large) if large_side == "decode" else (large, pair[1])
    name, prompt = f"large-{large_side}", make_prompt(128)
    kv = prefill.generate(name, prompt, 1, {"do_remote_decode": True})["kv"]
    assert decode.generate(name, prompt, 4, kv)["reason"] == "error"  # vLLM's policy here: fail
    log = decode.log.read_text()
    assert "block_size=32" in log and "block_size=64" in log, log[-3000:]
    prefill.wait_for_free_blocks(NUM_BLOCKS, 45)  # its lease
    decode.wait_for_free_blocks(NUM_BLOCKS, 10)
