"""How long the handover from prefill to decode takes, and what an idle engine costs: kvpush beside vLLM's connectors.

Run it, in an environment with vLLM:  python tests/vllm/measure/handover.py MODEL_DIRECTORY

Handover, sequential dispatch: from the request's arrival at decode to its first token, less one decode step. Concurrent
dispatch: from prefill's token to decode's first token, less one decode step. All pairs live at the same time and take
turns; while one is measured the others are stopped, so that they share nothing but the machine's mood.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from pairs import Pair, make_prompt

LENGTHS = (97, 512, 1500)
IDLE_S = 10.0


class Bench:
    """Pairs that take turns."""

    def __init__(self, kinds: list[str], model: Path, logs: Path) -> None:
        self.pairs = {}
        for kind in kinds:
            # a pair that is stopped for a while must not take itself for dead
            settings = {"liveness_timeout_s": 3000.0} if kind == "kvpush" else {}
            self.pairs[kind] = Pair(kind, model, logs, **settings)
        for kind, pair in self.pairs.items():
            pair.started()
            self.stop(kind)
        self.source = random.Random(11)
        self.handovers: dict[tuple[str, str, int], list[float]] = {}
        self.first: dict[tuple[str, str], float] = {}

    def stop(self, kind: str) -> None:
        for engine in (self.pairs[kind].prefill, self.pairs[kind].decode):
            engine.signal(signal.SIGSTOP)

    def wake(self, kind: str) -> None:
        for engine in (self.pairs[kind].prefill, self.pairs[kind].decode):
            engine.signal(signal.SIGCONT)

    def round(self, number: int, lengths: tuple[int, ...]) -> None:
        """Every pair once, both ways of dispatch."""
        for kind in self.pairs:
            self.wake(kind)
            if number:
                self.sequential(kind, 97)  # wakes caches and links
            for length in lengths:
                for dispatch, measure in (("sequential", self.sequential), ("concurrent", self.concurrent)):
                    if (kind, dispatch) == ("pull", "concurrent"):
                        continue  # it pulls only what prefill's answer names
                    took_s = measure(kind, length)
                    if number:
                        self.handovers.setdefault((kind, dispatch, length), []).append(took_s)
                    else:
                        self.first.setdefault((kind, dispatch), took_s)
            self.stop(kind)

    def sequential(self, kind: str, length: int) -> float:
        pair = self.pairs[kind]
        prompt = make_prompt(self.source, length)
        name, kv = pair.prefilled(prompt)
        started_s = time.monotonic()
        result = pair.decode.generate(name, prompt, 6, kv)
        assert result["reason"] == "length", result
        return float(result["first_at_s"]) - started_s - self.step_s(result)

    def concurrent(self, kind: str, length: int) -> float:
        pair = self.pairs[kind]
        prompt = make_prompt(self.source, length)
        name = pair.name()
        pair.decode.ask(name, prompt, 6, pair.source(name))
        pair.prefill.ask(name, prompt, 1, pair.asked(name))
        prefilled = pair.prefill.result(name)
        result = pair.decode.result(name)
        assert result["reason"] == "length", result
        return float(result["first_at_s"]) - float(prefilled["at_s"]) - self.step_s(result)

    @staticmethod
    def step_s(result: dict[str, float]) -> float:
        """One decode step: five more tokens came after the first."""
        return (result["at_s"] - result["first_at_s"]) / 5

    def idle_cores(self, kind: str) -> dict[str, float]:
        """Cores that each process of an idle pair uses."""
        self.wake(kind)
        pair = self.pairs[kind]
        found = {}
        time.sleep(1.0)
        for role, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
            process = psutil.Process(engine.process.pid)
            before = process.cpu_times()
            started_s = time.monotonic()
            time.sleep(IDLE_S)
            after = process.cpu_times()
            used_s = after.user + after.system - before.user - before.system
            found[role] = used_s / (time.monotonic() - started_s)
        self.stop(kind)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kinds", default="kvpush,push,pull,none")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    bench = Bench(kinds, options.model, Path(tempfile.mkdtemp(prefix="handover-")))
    everybody = bench.pairs
    transfers = {kind: pair for kind, pair in everybody.items() if kind != "none"}
    try:
        idle = {kind: bench.idle_cores(kind) for kind in kinds}
        bench.pairs = transfers
        for number in range(options.rounds + 1):
            bench.round(number, LENGTHS)
            print(f"round {number}", file=sys.stderr, flush=True)
    finally:
        for pair in everybody.values():
            pair.close()
    print("| dispatch | tokens | " + " | ".join(f"{kind}, ms: median (quartiles)" for kind in transfers) + " |")
    print("|---|---|" + "---|" * len(transfers))
    for dispatch in ("sequential", "concurrent"):
        for length in LENGTHS:
            cells = []
            for kind in transfers:
                if (kind, dispatch, length) not in bench.handovers:
                    cells.append("not offered")
                    continue
                low, middle, high = statistics.quantiles(bench.handovers[kind, dispatch, length], n=4)
                cells.append(f"{middle * 1000:.1f} ({low * 1000:.1f} to {high * 1000:.1f})")
            print(f"| {dispatch} | {length} | " + " | ".join(cells) + " |")
    print("first request to a peer, ms:", {key: round(took_s * 1000, 1) for key, took_s in bench.first.items()})
    print("idle, cores:", {kind: {role: round(cores, 4) for role, cores in idle[kind].items()} for kind in kinds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
