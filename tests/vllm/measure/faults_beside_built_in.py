"""The same faults, with kvpush and with vLLM's own push connector: outcome beside outcome.

Run it, in an environment with vLLM:  python tests/vllm/measure/faults_beside_built_in.py MODEL_DIRECTORY

A request that has not ended after ``--patience`` seconds counts as hanging. ``--only`` takes a regular expression.
The first faults share a pair of engines, in an order in which each leaves the pair whole or says that it does not; the
last have one each.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from built_in_stranger import BuiltInStranger
from children import OVER_TCP, Nursery
from pairs import Pair, make_prompt
from strangers import Stranger, malformed_registrations, overheard_hello

NUM_BLOCKS = 199
NUM_RESTARTS = 30
NUM_HOLES = 3
TO_SETTLE_S = 2.0  # for a connector that cannot be asked whether it has read what it was sent
SHORT_LEASE_S = 6
SHORT_LEASE = {"kvpush": {"lease_s": float(SHORT_LEASE_S)}, "push": {"kv_lease_duration": SHORT_LEASE_S}}
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


class Faults:
    """Pairs of one kind, and what becomes of them."""

    def __init__(self, kind: str, model: Path, logs: Path, patience_s: float) -> None:
        self.kind = kind
        self._model, self._logs, self._patience_s = model, logs, patience_s
        self._source = random.Random(3)
        self._pair: Pair
        self._has_pair = False
        self._free_before: dict[str, int] = {}

    @contextlib.contextmanager
    def pair(self, environ: dict[str, str] | None = None, **settings: Any) -> Iterator[None]:
        """One prefill and one decode engine."""
        logs = Path(tempfile.mkdtemp(dir=self._logs, prefix=f"{self.kind}-"))
        self._pair = Pair(self.kind, self._model, logs, environ, **settings).started()
        self._has_pair = True
        try:
            yield
        finally:
            self._has_pair = False
            self._pair.close()

    def prompt(self, num_tokens: int = 200) -> list[int]:
        return make_prompt(self._source, num_tokens)

    def outcome(self, name: str, expected: list[int] | None = None) -> str:
        """How decode's request ended, and when."""
        started_s = time.monotonic()
        ended = self.end(name, self._patience_s, expected)
        took_s = time.monotonic() - started_s
        return ended if ended in ("hangs", "the engine died") else f"{ended} after {took_s:.1f} s"

    def end(self, name: str, patience_s: float, expected: list[int] | None) -> str:
        try:
            result = self._pair.decode.result(name, patience_s)
        except AssertionError:
            is_dead = self._pair.decode.process.poll() is not None
            return "the engine died" if is_dead else "hangs"
        if result["reason"] != "length":
            return str(result["reason"])
        return "tokens" if expected is None else "right tokens" if result["tokens"] == expected else "WRONG TOKENS"

    def alone(self, prompt: list[int]) -> list[int]:
        """What prefill says by itself. It remembers nothing of it."""
        tokens = self._pair.prefill.generate(self._pair.name(), prompt, 4)["tokens"]
        self._pair.prefill.forget()
        return list(tokens)

    def served(self) -> str:
        """A plain request through both engines."""
        prompt = self.prompt()
        expected = self.alone(prompt)
        name, kv = self._pair.prefilled(prompt)
        self._pair.decode.ask(name, prompt, 4, kv)
        return self.outcome(name, expected)

    def blocks(self, which: str) -> str:
        """Whether an engine has all the blocks back that it had when the fault began."""
        engine, num_blocks = getattr(self._pair, which), self._free_before[which]
        try:
            took_s = engine.wait_for_free_blocks(num_blocks, self._patience_s)
        except AssertionError:
            return f"{num_blocks - engine.free_blocks()} blocks of {which} not back after {self._patience_s:g} s"
        return f"blocks of {which} back after {took_s:.1f} s"

    # --- one pair for all of these -----------------------------------------------------------------------------------

    def none(self) -> str:
        return self.served()

    def a_malformed_registration_for_a_request_of_prefill(self) -> str:
        """The request waits at prefill, then somebody sends registrations for it that are none."""
        name, prompt = self._pair.name(), self.prompt()
        expected = self.alone(prompt)
        answer = self._pair.prefill.generate(name, prompt, 1, ASKED)["kv"]
        with self.stranger("stranger") as stranger:
            if isinstance(stranger, Stranger):
                for message in malformed_registrations(answer["remote_transfer"]):
                    stranger.say(*message)
            else:
                stranger.register(request_id=7)
                stranger.register(request_id=answer["remote_request_id"])
            time.sleep(TO_SETTLE_S)
        self._pair.decode.ask(name, prompt, 4, answer)
        return f"{self.outcome(name, expected)}; {self.blocks('prefill')}; the next: {self.served()}"

    def decode_engines_that_accept_and_never_answer(self) -> str:
        """Each has registered for a request of its own. Then a new, healthy one has its first request."""
        prompt = self.prompt()
        with contextlib.ExitStack() as stack:
            port = stack.enter_context(_black_hole())
            for number in range(NUM_HOLES):
                name, answer = self._pair.prefilled(prompt)
                stranger = stack.enter_context(self.stranger(f"hole-{number}", is_mute=True))
                transfer_id = answer["remote_request_id"]
                if isinstance(stranger, Stranger):
                    stranger.register(answer["remote_transfer"], 7)
                else:
                    stranger.register(
                        request_id=transfer_id,
                        decode_engine_id=f"hole-{number}",
                        decode_host="127.0.0.1",
                        decode_port=port,
                        decode_tp_size=1,
                        local_block_ids=[[1, 2, 3, 4, 5, 6, 7]],
                    )
            return f"the first request of the new one: {self.of_newcomer(prompt)}"

    def of_newcomer(self, prompt: list[int]) -> str:
        """The first request of a decode engine that prefill has not met; it has been started before."""
        decode, self._pair.decode = self._pair.decode, self._newcomer
        try:
            name, kv = self._pair.prefilled(prompt)
            self._pair.decode.ask(name, prompt, 4, kv)
            return self.outcome(name)
        finally:
            self._pair.decode = decode

    def decode_aborts_and_prefill_never_runs(self) -> str:
        name = self._pair.name()
        self._pair.decode.ask(name, self.prompt(), 4, self._pair.source(name))
        self._pair.decode.free_blocks()
        self._pair.decode.abort(name)
        return self.blocks("decode")

    def same_request_id_again_after_an_abort(self) -> str:
        name, prompt = self._pair.name(), self.prompt()
        self._pair.decode.ask(name, prompt, 4, self._pair.prefill.generate(name, prompt, 1, ASKED)["kv"])
        self._pair.decode.abort(name)
        again = self._pair.prefill.generate(name, prompt, 1, ASKED)["kv"]
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
        time.sleep(TO_SETTLE_S)
        self._pair.prefill.kill()
        return f"{self.outcome(name)}; {self.blocks('decode')}"

    def prefill_is_back_under_its_id(self) -> str:
        self._pair.prefill = self._pair.start("producer").started()
        return f"{self.served()}, the next: {self.served()}"

    def in_one_pair(self, only: str) -> dict[str, str]:
        """Each once."""
        steps: list[Callable[[], str]] = [
            self.none,
            self.a_malformed_registration_for_a_request_of_prefill,
            self.decode_engines_that_accept_and_never_answer,
            self.decode_aborts_and_prefill_never_runs,
            self.same_request_id_again_after_an_abort,
            self.decode_is_killed_and_comes_back,
            self.prefill_is_killed_while_decode_waits,
            self.prefill_is_back_under_its_id,
        ]
        if not any(re.search(only, _fault(step)) for step in steps):
            return {}
        with self.pair():
            self._newcomer = self._pair.start("newcomer").started()
            try:
                return self.all_of(steps, only)
            finally:
                self._newcomer.kill()
                self._newcomer.close()

    # --- a pair for each of these ------------------------------------------------------------------------------------

    def decode_frozen_beyond_the_lease_with_writes_in_flight(self) -> str:
        """Prefill's whole cache is on its way when decode freezes; after the lease other prompts use it."""
        with self.pair(OVER_TCP, **SHORT_LEASE[self.kind]):
            self.served()
            prompts = [self.prompt(1500) for _ in range(4)]
            expected = [self.alone(prompt) for prompt in prompts]
            names = [self._pair.name() for _ in prompts]
            for name, prompt in zip(names, prompts, strict=True):
                self._pair.decode.ask(name, prompt, 4, self._pair.source(name))
            self._pair.decode.free_blocks()
            time.sleep(TO_SETTLE_S)
            self._pair.decode.signal(signal.SIGSTOP)
            for name, prompt in zip(names, prompts, strict=True):
                self._pair.prefill.ask(name, prompt, 1, self._pair.asked(name))
            for name in names:
                self._pair.prefill.result(name)
            freed = self.blocks("prefill")
            time.sleep(2 * SHORT_LEASE_S)
            for _ in range(8):
                self.alone(self.prompt(1500))
            self._pair.decode.signal(signal.SIGCONT)
            give_up_s = time.monotonic() + self._patience_s
            ends = [
                self.end(name, max(1.0, give_up_s - time.monotonic()), tokens)
                for name, tokens in zip(names, expected, strict=True)
            ]
            counted = ", ".join(f"{ends.count(end)} of {len(ends)}: {end}" for end in dict.fromkeys(ends))
            return f"{counted}; {freed}; the next: {self.served()}"

    def nonsense_on_prefill_s_control_port(self) -> str:
        """Then a decode engine that prefill has not met yet."""
        with self.pair():
            self.served()
            self._newcomer = self._pair.start("newcomer").started()
            try:
                with contextlib.closing(Stranger(self._pair.ports["producer"], "babbler")) as stranger:
                    stranger.say(b"nonsense")
                    stranger.say(b"", b"nonsense")
                    time.sleep(TO_SETTLE_S)
                return f"the next: {self.served()}; a new decode engine: {self.of_newcomer(self.prompt())}"
            finally:
                self._newcomer.kill()
                self._newcomer.close()

    def thirty_restarts_of_decode(self) -> str:
        """Under the same host and port and, as vLLM does it by default, with a new engine id each time."""
        with self.pair(), contextlib.closing(Nursery(Path(tempfile.mkdtemp(dir=self._logs)))) as nursery:
            self.served()
            prefill, counts, num_served = self._pair.prefill, [], 0
            for number in range(NUM_RESTARTS):
                self._pair.decode.kill()
                time.sleep(TO_SETTLE_S)
                counts.append(prefill.num_descriptors())
                self._pair.decode = self._pair.start("consumer", f"life-{number}", nursery).started()
                num_served += self.served().startswith("right tokens")
                print(f"{self.kind}: {number + 1} restarts, descriptors {counts[-1]}", file=sys.stderr, flush=True)
            self._pair.decode.kill()
            before = prefill.num_descriptors()
            time.sleep(self._patience_s)
            after = prefill.num_descriptors()
            return (
                f"{num_served} of {NUM_RESTARTS} served; descriptors of prefill: {counts[0]} with no decode engine "
                f"before, {before} after, {after} when {self._patience_s:g} s idle"
            )

    def all(self, only: str) -> dict[str, str]:
        """Every fault once."""
        found = self.in_one_pair(only)
        alone = [
            self.nonsense_on_prefill_s_control_port,
            self.decode_frozen_beyond_the_lease_with_writes_in_flight,
            self.thirty_restarts_of_decode,
        ]
        return found | self.all_of(alone, only)

    def all_of(self, steps: list[Callable[[], str]], only: str) -> dict[str, str]:
        found = {}
        for step in steps:
            fault = _fault(step)
            if not re.search(only, fault):
                continue
            try:
                self._note_free_blocks()
                found[fault] = step()
            except (AssertionError, BrokenPipeError) as exc:
                found[fault] = f"an engine is gone: {str(exc).splitlines()[0]}"
            print(f"{self.kind}: {fault}: {found[fault]}", flush=True)
        return found

    def _note_free_blocks(self) -> None:
        """An earlier fault may have cost some for good. An engine that is gone has none."""
        self._free_before = {"prefill": NUM_BLOCKS, "decode": NUM_BLOCKS}
        for which in self._free_before if self._has_pair else ():
            engine = getattr(self._pair, which)
            if engine.process.poll() is None:
                self._free_before[which] = engine.free_blocks()

    @contextlib.contextmanager
    def stranger(self, engine_id: str, *, is_mute: bool = False) -> Iterator[Stranger | BuiltInStranger]:
        """A decode engine that is none, in the language of the connector. A mute one has been let in, as a real one."""
        port = self._pair.ports["producer"]
        if self.kind != "kvpush":
            with contextlib.closing(BuiltInStranger(port)) as built_in:
                yield built_in
            return
        with contextlib.closing(Stranger(port, engine_id)) as stranger:
            if is_mute:
                stranger.enter(overheard_hello(self._pair.decode, self._pair.engine_id("producer")))
            yield stranger


def _fault(step: Callable[[], str]) -> str:
    return step.__name__.replace("_", " ")


@contextlib.contextmanager
def _black_hole() -> Iterator[int]:
    """A TCP port that accepts and never says anything."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as door:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(door.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield door.getsockname()[1]
        door.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    for connection in kept:
        connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--patience", type=float, default=40.0)
    parser.add_argument("--kinds", default="kvpush,push")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="faults-"))
    columns = {
        kind: Faults(kind, options.model, logs, options.patience).all(options.only) for kind in options.kinds.split(",")
    }
    print("| fault | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))
    for fault in next(iter(columns.values())):
        print(f"| {fault} | " + " | ".join(column[fault] for column in columns.values()) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
