"""The same faults, with kvpush and with vLLM's own push connector: outcome beside outcome.

Run it, in an environment with vLLM:  python tests/vllm/measure/faults_beside_built_in.py MODEL_DIRECTORY

A request that has not ended after ``--patience`` seconds counts as hanging.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pairs import Pair, make_prompt

NUM_BLOCKS = 199


class Faults:
    """One pair, and what becomes of it."""

    def __init__(self, pair: Pair, patience_s: float) -> None:
        self._pair = pair
        self._patience_s = patience_s
        self._source = random.Random(3)

    def prompt(self, num_tokens: int = 200) -> list[int]:
        return make_prompt(self._source, num_tokens)

    def outcome(self, name: str) -> str:
        """How decode's request ended, and when."""
        started_s = time.monotonic()
        try:
            result = self._pair.decode.result(name, self._patience_s)
        except AssertionError:
            is_dead = self._pair.decode.process.poll() is not None
            return "the engine died" if is_dead else f"hangs (not ended after {self._patience_s:g} s)"
        took_s = time.monotonic() - started_s
        return f"{'tokens' if result['reason'] == 'length' else result['reason']} after {took_s:.1f} s"

    def served(self) -> str:
        """A plain request through both engines."""
        prompt = self.prompt()
        name, kv = self._pair.prefilled(prompt)
        self._pair.decode.ask(name, prompt, 4, kv)
        return self.outcome(name)

    def blocks(self, which: str) -> str:
        """Whether an engine has all its blocks back."""
        engine = getattr(self._pair, which)
        try:
            took_s = engine.wait_for_free_blocks(NUM_BLOCKS, self._patience_s)
        except AssertionError:
            return f"{NUM_BLOCKS - engine.free_blocks()} blocks of {which} not back after {self._patience_s:g} s"
        return f"blocks of {which} back after {took_s:.1f} s"

    # --- the faults, in an order in which each leaves the pair whole or says that it does not ------------------------

    def decode_aborts_and_prefill_never_runs(self) -> str:
        name = self._pair.name()
        self._pair.decode.ask(name, self.prompt(), 4, self._pair.source(name))
        self._pair.decode.free_blocks()
        self._pair.decode.abort(name)
        return self.blocks("decode")

    def same_request_id_again_after_an_abort(self) -> str:
        name, prompt = self._pair.name(), self.prompt()
        kv = {"do_remote_decode": True, "do_remote_prefill": False}
        self._pair.decode.ask(name, prompt, 4, self._pair.prefill.generate(name, prompt, 1, kv)["kv"])
        self._pair.decode.abort(name)
        again = self._pair.prefill.generate(name, prompt, 1, kv)["kv"]
        self._pair.decode.ask(name, prompt, 4, again)
        return f"{self.outcome(name)}; {self.blocks('prefill')}"

    def decode_is_killed_and_comes_back(self) -> str:
        self._pair.decode.kill()
        self._pair.decode = self._pair.start("consumer").started()
        return f"{self.served()}, the next: {self.served()}"

    def prefill_is_killed_while_decode_waits(self) -> str:
        name = self._pair.name()
        self._pair.decode.ask(name, self.prompt(), 4, self._pair.source(name))
        self._pair.decode.free_blocks()
        time.sleep(2.0)  # long enough for any connector to have registered
        self._pair.prefill.kill()
        return f"{self.outcome(name)}; {self.blocks('decode')}"

    def prefill_is_back_under_its_id(self) -> str:
        self._pair.prefill = self._pair.start("producer").started()
        return f"{self.served()}, the next: {self.served()}"

    def all(self) -> dict[str, str]:
        """Every fault once."""
        steps: list[Callable[[], str]] = [
            self.served,
            self.decode_aborts_and_prefill_never_runs,
            self.same_request_id_again_after_an_abort,
            self.decode_is_killed_and_comes_back,
            self.prefill_is_killed_while_decode_waits,
            self.prefill_is_back_under_its_id,
        ]
        found = {}
        for step in steps:
            fault = step.__name__.replace("_", " ")
            try:
                found[fault] = step()
            except (AssertionError, BrokenPipeError) as exc:
                found[fault] = f"an engine is gone: {str(exc).splitlines()[0]}"
            print(f"{self._pair.kind}: {fault}: {found[fault]}", flush=True)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--patience", type=float, default=60.0)
    parser.add_argument("--kinds", default="kvpush,push")
    options = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="faults-"))
    columns = {}
    for kind in options.kinds.split(","):
        pair = Pair(kind, options.model, logs).started()
        try:
            columns[kind] = Faults(pair, options.patience).all()
        finally:
            pair.close()
    print("| fault | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))
    for fault in next(iter(columns.values())):
        print(f"| {fault} | " + " | ".join(column[fault] for column in columns.values()) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
