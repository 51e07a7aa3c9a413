"""A vLLM engine in this process, driven by lines of JSON on its standard input: what the tests start as a child.

It is a whole engine (scheduler, worker, connector) with vLLM's own busy loop written out, so that the tests can look at
the block pool between two steps. Usage: ``python tests/vllm/engine.py '{"model": ..., "kv_transfer_config": {...}}'``
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any

IDLE_STEP_S = 0.001  # what vLLM sleeps after a step that ran no model


def set_environment() -> None:
    """One thread, no network, no telemetry, everything in this process."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        VLLM_HOST_IP="127.0.0.1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        VLLM_LOGGING_STREAM="ext://sys.stderr",  # standard output is for answers
    )


class Runner:
    """One engine and what was asked of it."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        defaults = {
            "dtype": "float32",
            "max_model_len": 2048,
            "enforce_eager": True,
            "block_size": 32,
            "num_gpu_blocks_override": 200,
            "distributed_executor_backend": "uni",
            "disable_log_stats": True,
        }
        self.engine = LLMEngine.from_engine_args(EngineArgs(**defaults | options))
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.commands: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.out = os.fdopen(os.dup(1), "w", buffering=1)
        self.victim: tuple[str, int] | None = None

    def read(self) -> None:
        """Commands, one a line, until the pipe closes."""
        for line in sys.stdin:
            self.commands.put(json.loads(line))
        self.commands.put(None)

    def say(self, **answer: Any) -> None:
        print(json.dumps(answer), file=self.out)

    def run(self) -> None:
        """vLLM's busy loop: commands, a step, a short sleep when no model ran."""
        threading.Thread(target=self.read, daemon=True).start()
        self.say(event="ready", free_blocks=self.num_free_blocks())
        while True:
            is_busy = self.scheduler.has_requests()
            try:
                while True:
                    command = self.commands.get(block=not is_busy)
                    if command is None:
                        self.engine.engine_core.shutdown()
                        self.say(event="closed")
                        os._exit(0)  # vLLM leaves threads behind that a normal exit would wait for
                    self.obey(command)
                    is_busy = self.scheduler.has_requests() or not self.commands.empty()
                    if is_busy and self.commands.empty():
                        break
            except queue.Empty:
                pass
            if self.scheduler.has_requests():
                self.step()

    def step(self) -> None:
        started_s = time.monotonic()
        self.preempt()
        for output in self.engine.step():
            self.say(
                event="output",
                id=output.request_id,
                tokens=list(output.outputs[0].token_ids),
                finished=output.finished,
                reason=output.outputs[0].finish_reason,
                kv=output.kv_transfer_params,
                cached=output.num_cached_tokens,
                at_s=time.monotonic(),
                step_s=time.monotonic() - started_s,
            )
        if not self.scheduler.running:
            time.sleep(IDLE_STEP_S)

    def obey(self, command: dict[str, Any]) -> None:
        from vllm import SamplingParams

        match command["op"]:
            case "generate":
                params = SamplingParams(
                    max_tokens=command["max_tokens"],
                    temperature=0,
                    ignore_eos=True,
                    extra_args={"kv_transfer_params": command["kv"]} if command.get("kv") else None,
                )
                prompt = {"prompt_token_ids": command["prompt"]}
                self.engine.add_request(command["id"], prompt, params)
            case "abort":
                was_here = any(name.startswith(command["id"] + "-") for name in self.scheduler.requests)
                self.engine.abort_request([command["id"]])
                self.say(event=f"aborted {command['id']}", was_here=was_here)
            case "free":
                self.say(
                    event="free",
                    blocks=self.num_free_blocks(),
                    requests=len(self.scheduler.requests),
                )
            case "preempt":
                self.victim = command["id"], command["at_tokens"]
                self.say(event="preempting")
            case "corrupt":
                self.corrupt(command["position"])
                self.say(event="corrupting")
            case "forget":
                self.engine.reset_prefix_cache()
                self.say(event="forgotten")
            case "stats":
                self.say(event="stats", **self.stats())

    def preempt(self) -> None:
        """Take a request's blocks away, as the scheduler does when others need them."""
        if self.victim is None:
            return
        name, num_tokens = self.victim
        for request in self.scheduler.running:
            if request.request_id.startswith(name) and request.num_computed_tokens >= num_tokens:
                self.scheduler.running.remove(request)
                self.scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
                self.victim = None
                self.say(event="preempted", at_tokens=num_tokens)
                return

    def corrupt(self, position: int) -> None:
        """Zero one block of the next receive, after it has come and before vLLM knows."""
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()._worker
        expect, results = worker._decode.expect, worker.results
        expected: dict[str, Any] = {}

        def remember(wanted: Any) -> None:
            expected[wanted.request_id] = wanted
            expect(wanted)

        def spoil() -> Any:
            ends = results()
            for request_id in ends.finished_recving & expected.keys():
                block_id = expected[request_id].block_ids[position]
                for cache in worker._receiver._kv_caches.values():
                    assert torch.any(cache[block_id] != 0), "there was something to spoil"
                    cache[block_id] = 0
                worker._decode.expect, worker.results = expect, results
            return ends

        worker._decode.expect, worker.results = remember, spoil

    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def stats(self) -> dict[str, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()._worker
        sides = {"pusher": worker._pusher, "receiver": worker._receiver}
        return {
            name: {"stats": side.stats(), "engines": [f"{e.engine_id} {e.state}" for e in side.engines()]}
            for name, side in sides.items()
            if side is not None
        }


if __name__ == "__main__":
    set_environment()
    Runner(json.loads(sys.argv[1])).run()
