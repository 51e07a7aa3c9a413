"""Pairs of engines with kvpush and with vLLM's own connectors, for scripts that compare them."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from children import EngineProcess, Nursery, built_in_config, free_port, kv_config

CONNECTORS = {"kvpush": "KvPushConnector", "push": "NixlPushConnector", "pull": "NixlPullConnector", "none": ""}


class Pair:
    """One prefill and one decode engine with the same connector."""

    def __init__(
        self, kind: str, model: Path, logs: Path, environ: dict[str, str] | None = None, **settings: Any
    ) -> None:
        """``settings``: those of the connector."""
        self.kind = kind
        self.ports = {"producer": free_port(), "consumer": free_port()}
        self._model, self._logs, self._settings, self._environ = model, logs, settings, environ or {}
        self._names = (f"{kind}-{i}" for i in itertools.count())
        self.prefill = self.start("producer")
        self.decode = self.start("consumer")

    def engine_id(self, role: str) -> str:
        return f"{self.kind}-{role}"

    def start(self, role: str, engine_id: str = "", nursery: Nursery | None = None) -> EngineProcess:
        """An engine, at the same host and port every time, and under the same id unless another is given. A role that
        is neither ``producer`` nor ``consumer`` is one more decode engine."""
        port = self.ports.setdefault(role, free_port())
        engine_id = engine_id or self.engine_id(role)
        environ = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        vllm_role = "producer" if role == "producer" else "consumer"
        kv: dict[str, Any] | None = None
        if self.kind == "kvpush":
            kv = kv_config(vllm_role, engine_id, port, **self._settings)
        elif self.kind != "none":
            kv = built_in_config(vllm_role, engine_id, CONNECTORS[self.kind], **self._settings)
        return EngineProcess(self._model, self._logs / f"{engine_id}.log", kv, environ | self._environ, nursery)

    def started(self) -> Pair:
        self.prefill.started()
        self.decode.started()
        return self

    def name(self) -> str:
        return next(self._names)

    def source(self, name: str) -> dict[str, Any]:
        """What a router that dispatches to both at once tells decode."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id("producer"),
            "remote_request_id": name,  # vLLM's own connector stops the engine without it
            "remote_host": "127.0.0.1",
            "remote_port": self.ports["producer"],
            "tp_size": 1,
            "transfer_id": f"router-{name}",
        }

    def asked(self, name: str) -> dict[str, Any]:
        """What it tells prefill."""
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"router-{name}"}

    def prefilled(self, prompt: list[int]) -> tuple[str, dict[str, Any]]:
        """Prefill alone; what its answer brings."""
        name = self.name()
        answer = self.prefill.generate(name, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        return name, answer["kv"]

    def close(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.kill()
            engine.close()


def make_prompt(source: random.Random, num_tokens: int) -> list[int]:
    return [source.randrange(2, 258) for _ in range(num_tokens)]
