"""``kvpush demo``: one prefill and several decode processes serve prompts, and every token is checked.

This file runs the show. What it consists of, one file each: the engines' processes and pipes (``fleet``), what
runs in them (``engines``), what they and the router tell each other (``messages``), who serves what and
whether it is right (``router``), what is known of the run (``board``), and how that is shown (``view``,
``summary``).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kvpush
from kvpush.cli.demo.board import Board, ProcessState
from kvpush.cli.demo.fleet import Died, Fleet, News
from kvpush.cli.demo.messages import (
    DecodeStatus,
    EngineSettings,
    Failed,
    Generated,
    Prefilled,
    PrefillStatus,
    Pushed,
    Ready,
    Received,
    Referenced,
    Role,
    Stopped,
)
from kvpush.cli.demo.router import Orders, Phase, Router
from kvpush.cli.demo.summary import summary
from kvpush.cli.demo.view import View, make_view, mib

PREFILL_ID = "p0"
DEFAULT_REQUESTS = 20
MAX_DECODES = 32  # a process is some 300 MB
SILENCE_LIMIT_S = 120.0  # an engine reports ten times a second, unless it starts or computes a large model's chunk
TURN_S = 0.05

PROMPTS = (
    "Why is the sky blue?",
    "In disaggregated serving one engine computes the prompt, another one writes the answer.",
    "A paged cache hands out blocks of keys and values like an operating system hands out pages of memory. The blocks "
    "of one sequence may lie anywhere, as long as a table says in which order they belong together.",
    "Write a haiku about a network cable.",
    "Translate into German: the block has arrived, and every byte of it is in its place.",
    "Everything that moves needs somebody who knows where it is going. A prompt arrives at the router, and the router "
    "names a transfer. The decode engine sets blocks aside and says where they lie. The prefill engine computes keys "
    "and values for every token, layer by layer, and writes them there; the last thing to arrive is a notice that "
    "nothing is missing. Only then may anybody read. If one of them dies on the way, the other one must notice, let go "
    "of what it held, and be ready when its partner comes back under the same name with a different memory. None of "
    "this is visible in the answer, which is the point of it.",
    "1 1 2 3 5 8 13 21 34",
    "Summarize: the engine was killed, the engine came back, and nobody who read the answers could tell.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvpush demo``."""
    prompts = parser.add_argument_group("what is asked")
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    prompts.add_argument("--prompts", metavar="FILE", help="prompts from a file, one a line")
    prompts.add_argument(
        "--requests",
        type=_positive,
        metavar="N",
        help="how many requests; prompts are used in turn (default: each "
        f"of your prompts once, or {DEFAULT_REQUESTS} of the built-in ones)",
    )
    prompts.add_argument(
        "--max-new-tokens", type=_positive, default=32, metavar="N", help="tokens per answer (default: %(default)s)"
    )
    model = parser.add_argument_group("who answers")
    model.add_argument("--hf", metavar="PATH", help="a Llama-family checkpoint instead of the small seeded model")
    model.add_argument("--seed", type=int, default=0, metavar="N", help="of the seeded weights (default: %(default)s)")
    model.add_argument(
        "--decodes", type=_decodes, default=2, metavar="N", help="decode processes (default: %(default)s)"
    )
    parser.add_argument("--no-kill", action="store_true", help="do not kill and restart a decode process half-way")
    parser.add_argument(
        "--sabotage", action="store_true", help="damage one received block on purpose: shows that the check can fail"
    )
    parser.add_argument(
        "--plain", action="store_true", help="lines instead of a live table; so it is without a terminal, too"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _decodes(text: str) -> int:
    number = _positive(text)
    if number > MAX_DECODES:
        raise argparse.ArgumentTypeError(f"{number} processes, each with torch and a model: at most {MAX_DECODES}")
    return number


def run(args: argparse.Namespace) -> int:
    """Run the demo. 0: all is well; 1: a check failed, or an engine; 128 + n: ended by signal n."""
    options = _options(args)
    with _caught_signals() as caught:
        demo = Demo(options, make_view(plain=args.plain), caught)
        try:
            problems = demo.run()
        except Interrupted as exc:
            print(
                f"kvpush: interrupted by {signal.Signals(exc.signum).name}; every engine has been stopped",
                file=sys.stderr,
            )
            return 128 + exc.signum
        except EngineTrouble as exc:
            print(f"kvpush: error: {exc}", file=sys.stderr)
            return 1
    demo.view.conclude(summary(demo.board, problems))
    return 1 if problems else 0


# --- options ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for, checked."""

    prompts: tuple[str, ...]
    num_requests: int
    max_new_tokens: int
    num_decodes: int
    is_kill_wanted: bool
    engines: EngineSettings


def _options(args: argparse.Namespace) -> Options:
    """Raises :class:`kvpush.ConfigurationError` for what cannot work."""
    prompts = [*args.prompt, *_prompts_in(args.prompts)]
    if any(not prompt.strip() for prompt in prompts):
        raise kvpush.ConfigurationError("--prompt is empty")
    return Options(
        prompts=tuple(prompts) or PROMPTS,
        num_requests=args.requests or len(prompts) or DEFAULT_REQUESTS,
        max_new_tokens=args.max_new_tokens,
        num_decodes=args.decodes,
        is_kill_wanted=not args.no_kill,
        engines=EngineSettings(
            seed=args.seed,
            hf_path=_checkpoint(args.hf),
            num_blocks=256,
            block_size_tokens=16,
            chunk_tokens=256,
            net_devices="lo",
            is_sabotaged=args.sabotage,
        ),
    )


def _prompts_in(file_name: str | None) -> list[str]:
    if file_name is None:
        return []
    try:
        text = Path(file_name).read_text(encoding="utf-8")
    except OSError as exc:
        raise kvpush.ConfigurationError(f"--prompts {file_name}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise kvpush.ConfigurationError(f"--prompts {file_name}: not UTF-8 ({exc.reason} at byte {exc.start})") from exc
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise kvpush.ConfigurationError(f"--prompts {file_name}: no prompt in it")
    return prompts


def _checkpoint(path: str | None) -> str | None:
    if path is None:
        return None
    if not Path(path).exists():
        raise kvpush.ConfigurationError(f"--hf {path}: no such directory")
    if importlib.util.find_spec("transformers") is None:
        raise kvpush.ConfigurationError("--hf needs transformers: pip install 'kvpush[hf]'")
    return str(Path(path).resolve())


# --- the run ---------------------------------------------------------------------------------------------------------


class EngineTrouble(Exception):
    """An engine died, fell silent or gave up, and nobody had asked for it."""


class Interrupted(Exception):
    """SIGINT or SIGTERM came."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signum)


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM end up in this list, and the run ends at its next turn instead of anywhere."""
    caught: list[int] = []
    before = {
        signum: signal.signal(signum, lambda number, _: caught.append(number))
        for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield caught
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class Demo:
    """One run, from the start of the engines to their goodbye."""

    def __init__(self, options: Options, view: View, caught_signals: list[int]) -> None:
        self._decode_ids = [f"d{i}" for i in range(options.num_decodes)]
        self.router = Router(
            options.prompts,
            options.num_requests,
            options.max_new_tokens,
            prefill_id=PREFILL_ID,
            decode_ids=self._decode_ids,
        )
        self.board = Board(self.router)
        self._options = options
        self.view = view
        self._caught_signals = caught_signals
        self._fleet = Fleet(options.engines)
        self._troubles: list[str] = []  # on the way out

    def run(self) -> list[str]:
        """What is wrong with the result: nothing, if all is well.

        Raises :class:`Interrupted`, :class:`EngineTrouble`, and :class:`kvpush.ConfigurationError` where an engine
        found a mistake in the options. Engines are stopped in order all the same.
        """
        with self.view, self._fleet:
            try:
                self._start(Role.prefill, PREFILL_ID)
                for engine_id in self._decode_ids:
                    self._start(Role.decode, engine_id)
                while not self.router.is_finished:
                    self._turn()
            finally:
                self._stop()
                self.view.show(self.board)
        return self.router.findings.problems + self._troubles

    def _turn(self) -> None:
        for engine_id, news in self._fleet.receive(TURN_S):
            self._take(engine_id, news)
        self._kill_when_due()
        self._check_silence()
        self.view.show(self.board)
        if self._caught_signals:
            raise Interrupted(self._caught_signals[0])

    def _start(self, role: Role, engine_id: str) -> None:
        pid = self._fleet.start(role, engine_id)
        self.board.add_engine(role, engine_id, pid)
        self._log(f"{engine_id}: {role} process {pid} started")

    # --- news --------------------------------------------------------------------------------------------------------

    def _take(self, engine_id: str, news: News) -> None:
        """Something was reported: note it, and pass on what the router orders."""
        self.board.rows[engine_id].heard_s = time.monotonic()
        match news:
            case Ready():
                self._send(self._ready(engine_id, news))
            case PrefillStatus() | DecodeStatus():
                self._status(engine_id, news)
            case Prefilled():
                self._send(self.router.prefilled(news))
            case Pushed():
                self._pushed(news)
            case Received():
                self._send(self.router.received(engine_id, news))
            case Generated():
                self._generated(engine_id, news)
            case Referenced():
                self.router.referenced(news)
            case Failed():
                self._failed(engine_id, news)
            case Died():
                self._died(engine_id, news)
            case Stopped():
                self._stopped(engine_id, news)

    def _send(self, orders: Orders) -> None:
        for engine_id, order in orders:
            self._fleet.send(engine_id, order)

    def _ready(self, engine_id: str, report: Ready) -> Orders:
        self.board.add_ready(engine_id, report.num_blocks)
        if report.address is None:
            self._log(f"{engine_id}: ready, {report.num_blocks} blocks")
            return self.router.decode_up(engine_id)
        host, port = report.address
        self._log(f"{engine_id}: ready, {report.num_blocks} blocks, listens on {host}:{port}")
        return self.router.prefill_up(report.address)

    def _status(self, engine_id: str, status: PrefillStatus | DecodeStatus) -> None:
        self.board.add_status(engine_id, status)
        if isinstance(status, PrefillStatus):
            self._changed(status.transitions)

    def _changed(self, transitions: tuple[kvpush.Transition, ...]) -> None:
        for change in transitions:
            self.board.add_transition(change)
            self._log(
                f"{PREFILL_ID}: {change.engine_id} is {change.dest}, was {change.source} ({change.trigger}"
                f"{': ' if change.detail else ''}{change.detail})"
            )

    def _pushed(self, report: Pushed) -> None:
        event = report.event
        if event.outcome == "done":
            self.board.add_pushed(report)
            chunks = f" in {report.num_chunks} chunks" if report.num_chunks > 1 else ""
            self._log(
                f"{event.transfer_id}: {mib(event.num_bytes)} pushed to {event.engine_id}{chunks}, "
                f"{event.duration_s * 1000:.1f} ms"
            )
        else:
            self._log(f"{event.transfer_id}: push {event.outcome}, {event.reason}")
        self._send(self.router.pushed(report))

    def _generated(self, engine_id: str, report: Generated) -> None:
        self.board.rows[engine_id].answered += 1
        self._log(f"{report.transfer_id}: {len(report.tokens)} tokens from {engine_id}: {report.text!r}")
        self._send(self.router.generated(report))

    def _failed(self, engine_id: str, report: Failed) -> None:
        if report.is_users_mistake:
            raise kvpush.ConfigurationError(report.reason)
        raise EngineTrouble(f"{engine_id} gave up: {report.reason}")

    # --- death and return --------------------------------------------------------------------------------------------

    def _kill_when_due(self) -> None:
        """Half-way, as soon as a decode engine that prefill knows is in the middle of something; best of a push."""
        if not self._options.is_kill_wanted or self.board.kill is not None:
            return
        num_answered = self.router.count(Phase.generated, Phase.checked)
        if 2 * num_answered < len(self.router.requests):
            return
        victims = [
            engine_id
            for engine_id in reversed(self._decode_ids)
            if self.board.rows[engine_id].pushes and self.router.open_requests(engine_id)
        ]
        if victims:
            victim = max(victims, key=self.board.pushes_under_way)
            if self.board.pushes_under_way(victim) or not self.router.count(Phase.waiting):
                self._kill(victim)

    def _kill(self, engine_id: str) -> None:
        self.board.add_kill(engine_id, self._fleet.kill(engine_id))
        self._log(f"{engine_id}: killed with SIGKILL")

    def _died(self, engine_id: str, died: Died) -> None:
        kill, row = self.board.kill, self.board.rows[engine_id]
        if kill is None or kill.engine_id != engine_id or row.process is not ProcessState.killed:
            raise EngineTrouble(f"{engine_id} (process {row.pid}) {died.how}, and nobody had asked it to")
        self.board.add_death()
        self._log(f"{engine_id}: gone, in the middle of {', '.join(kill.interrupted) or 'nothing'}")
        self._send(self.router.decode_down(engine_id))
        self._start(Role.decode, engine_id)

    def _check_silence(self) -> None:
        for row in self.board.rows.values():
            if time.monotonic() - row.heard_s > SILENCE_LIMIT_S:
                raise EngineTrouble(
                    f"{row.engine_id} (process {row.pid}) has reported nothing for {SILENCE_LIMIT_S:g} s"
                )

    # --- the end -----------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Decode engines say goodbye first, so that prefill sees them off. Bounded, whatever state they are in."""
        for engine_ids in (self._decode_ids, [PREFILL_ID]):
            rows = [self.board.rows[engine_id] for engine_id in engine_ids if engine_id in self.board.rows]
            for row in rows:
                if row.process is ProcessState.starting:
                    self._fleet.kill(row.engine_id)  # it knows nobody yet, and takes no orders
            for engine_id, news in self._fleet.stop([row.engine_id for row in rows]):
                self._take_last(engine_id, news)

    def _take_last(self, engine_id: str, news: News) -> None:
        """Only what belongs to the end is of interest any more."""
        match news:
            case PrefillStatus():
                self._status(engine_id, news)
            case Stopped():
                self._stopped(engine_id, news)
            case Died() if self.board.rows[engine_id].process is ProcessState.ready:
                self._troubles.append(f"{engine_id} {news.how} instead of stopping in order")
            case _:
                pass

    def _stopped(self, engine_id: str, report: Stopped) -> None:
        self._changed(report.transitions)
        self.board.rows[engine_id].process = ProcessState.stopped
        self._log(f"{engine_id}: stopped")
        if report.unsettled:
            self._troubles.append(f"{engine_id} closed with {', '.join(report.unsettled)} unsettled")
        if report.lost_blocks:
            self._troubles.append(f"{engine_id} has lost {report.lost_blocks} blocks")
        if report.internal_errors:
            self._troubles.append(f"{engine_id} had {report.internal_errors} internal errors")

    def _log(self, line: str) -> None:
        self.view.log(self.board.since_start_s(), line)
