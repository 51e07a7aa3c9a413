"""Other libraries and kvpush in turn: the same blocks, the same machine, the same run. See README.md.

    python tests/side_by_side/run.py --peer bare --peer kvpush --peer mooncake=/path/to/venv/bin/python --json out.json

Every peer is a pair of processes. Those that are not on turn are stopped (SIGSTOP): some peers spin while idle.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PEERS = ("bare", "kvpush", "vllm", "mooncake", "dynamo")
NAMES = {
    "bare": "bare NIXL loop",
    "kvpush": "kvpush",
    "vllm": "vLLM's NixlPushConnector worker",
    "mooncake": "Mooncake transfer engine (tcp)",
    "dynamo": "Dynamo nixl_connect",
}


class PeerFailed(Exception):
    """A peer could not do what was asked; its own words."""


class Process:
    """One worker."""

    def __init__(self, python: str, peer: str, role: str, shape: list[int], environment: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        self._popen = subprocess.Popen(
            [python, str(HERE / "worker.py"), peer, role, *map(str, shape)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.version = ""

    def signal(self, number: signal.Signals) -> None:
        if self._popen.poll() is None:
            os.kill(self._popen.pid, number)

    def begin(self, name: str, *arguments: Any) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps([name, arguments]) + "\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(self.last_words()) from None

    def answer(self) -> Any:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            self._popen.wait(10)
            raise PeerFailed(f"ended with {self._popen.returncode}: {self.last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailed(answer["error"].strip())
        return answer["ok"]

    def call(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self.answer()

    def last_words(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().strip().splitlines()[-4:])

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self._popen.kill()
        self._popen.wait()


@dataclass
class Pair:
    """A reader and a writer of one peer, and what was measured."""

    peer: str
    reader: Process
    writer: Process
    reader_info: Any = None
    writer_info: Any = None
    version: str = ""
    first_s: float = 0.0
    to_writer_s: list[float] = field(default_factory=list)
    to_reader_s: list[float] = field(default_factory=list)

    def start(self) -> None:
        self.version = self.writer.answer()
        self.reader.answer()
        self.reader_info = self.reader.call("info")
        self.writer_info = self.writer.call("info")

    def stop(self) -> None:
        for process in (self.reader, self.writer):
            process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        for process in (self.reader, self.writer):
            process.signal(signal.SIGCONT)

    def transfer(self, transfer_id: str, local: list[int], remote: list[int]) -> tuple[float, float | None]:
        """Seconds until the writer knows, and until the reader does, where it is told."""
        message = self.reader.call("expect", transfer_id, remote, self.writer_info)
        self.reader.begin("await_done", transfer_id)
        self.writer.call("await_registered", transfer_id, message)
        time.sleep(0.005)
        begun_ns, ended_ns = self.writer.call("push", transfer_id, local, remote, self.reader_info, message)
        seen_ns = self.reader.answer()
        return (ended_ns - begun_ns) / 1e9, None if seen_ns is None else (seen_ns - begun_ns) / 1e9

    def check(self, local: list[int], remote: list[int]) -> None:
        """The first transfer: its bytes are compared, its time is that of the handshake too."""
        self.reader.call("clear")
        self.writer.call("fill", 5, local)
        to_writer, to_reader = self.transfer("first", local, remote)
        self.first_s = to_reader or to_writer
        wrong = self.reader.call("wrong_bytes", 5, remote)
        if wrong:
            raise PeerFailed(f"{wrong} bytes are wrong")

    def measure(self, transfer_id: str, local: list[int], remote: list[int]) -> None:
        to_writer, to_reader = self.transfer(transfer_id, local, remote)
        self.to_writer_s.append(to_writer)
        if to_reader is not None:
            self.to_reader_s.append(to_reader)

    def end(self) -> None:
        self.reader.end()
        self.writer.end()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start(peer: str, python: str, shape: list[int]) -> Pair:
    common = os.environ | {
        "PYTHONPATH": str(ROOT),
        "UCX_NET_DEVICES": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    processes = [
        Process(python, peer, role, shape, common | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())})
        for role in ("reader", "writer")
    ]
    return Pair(peer, *processes)


def run(pythons: dict[str, str], layers: int, blocks: int, block_bytes: int, rounds: int) -> dict[str, Any]:
    """All peers, one shape."""
    shape = [layers, 2 * blocks, block_bytes]
    rng = np.random.default_rng(3)
    pairs: list[Pair] = []
    started: list[Pair] = []
    excluded: dict[str, str] = {}

    def choose() -> tuple[list[int], list[int]]:
        local, remote = (rng.permutation(2 * blocks)[:blocks].tolist() for _ in range(2))
        return local, remote

    try:
        for peer, python in pythons.items():
            pair = start(peer, python, shape)
            started.append(pair)
            try:
                pair.start()
                pair.check(*choose())
            except PeerFailed as exc:
                excluded[peer] = str(exc).splitlines()[-1]
                pair.end()
                continue
            pair.stop()
            pairs.append(pair)
        for number in range(rounds):
            local, remote = choose()
            for pair in list(pairs):
                pair.go_on()
                try:
                    pair.measure(f"round {number}", local, remote)
                except PeerFailed as exc:
                    excluded[pair.peer] = str(exc).splitlines()[-1]
                    pairs.remove(pair)
                    pair.end()
                    continue
                pair.stop()
    finally:
        for pair in started:
            pair.end()
    return {
        "layers": layers,
        "blocks": blocks,
        "block_bytes": block_bytes,
        "rounds": rounds,
        "peers": {pair.peer: result_of(pair) for pair in pairs},
        "excluded": excluded,
    }


def result_of(pair: Pair) -> dict[str, Any]:
    def spread(values: list[float]) -> dict[str, float] | None:
        return {"median_s": statistics.median(values), "min_s": min(values)} if values else None

    return {
        "version": pair.version,
        "first_s": pair.first_s,
        "to_writer": spread(pair.to_writer_s),
        "to_reader": spread(pair.to_reader_s),
    }


def table(result: dict[str, Any]) -> str:
    """For people: seconds, and ratios to the bare loop."""
    num_bytes = result["layers"] * result["blocks"] * result["block_bytes"]
    lines = [
        f"### {result['blocks']} blocks of {result['block_bytes']} bytes in {result['layers']} layers: "
        f"{num_bytes / 2**20:g} MiB, {result['rounds']} rounds",
        "",
        "| | version | first, with its handshake | writer knows | ratio | reader knows | ratio | ratio of minima |",
        "|---|---|---|---|---|---|---|---|",
    ]
    bare = result["peers"].get("bare")
    for peer, found in result["peers"].items():
        cells = [NAMES[peer], found["version"], f"{found['first_s'] * 1e3:.2f} ms"]
        for side in ("to_writer", "to_reader"):
            values = found[side]
            cells.append("not told" if values is None else f"{values['median_s'] * 1e3:.2f} ms")
            cells.append(
                "" if values is None or bare is None else f"{values['median_s'] / bare[side]['median_s']:.2f}x"
            )
        side = "to_reader" if found["to_reader"] else "to_writer"
        cells.append("" if bare is None else f"{found[side]['min_s'] / bare[side]['min_s']:.2f}x")
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\nNot measured: {NAMES[peer]}: {why}" for peer, why in result["excluded"].items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", metavar="NAME[=PYTHON]", help=f"of {', '.join(PEERS)}; repeatable")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shape", action="append", metavar="LAYERSxBLOCKSxBYTES", help="repeatable")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the peers, too
    pythons = {}
    for text in options.peer or ("bare", "kvpush"):
        peer, _, python = text.partition("=")
        if peer not in PEERS:
            parser.error(f"--peer {peer}: one of {', '.join(PEERS)}")
        pythons[peer] = python or sys.executable
    results = []
    print(f"load average before: {os.getloadavg()}", file=sys.stderr)
    for text in options.shape or ("1x1x65536", "1x1024x65536", "16x64x65536"):
        layers, blocks, block_bytes = map(int, text.split("x"))
        results.append(run(pythons, layers, blocks, block_bytes, options.rounds))
        print(table(results[-1]), end="\n\n", flush=True)
    print(f"load average after: {os.getloadavg()}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
