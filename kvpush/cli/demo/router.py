"""The router: which engine serves which request, under which transfer id, and whether the answer is right.

Pure: reports in, orders out, no process and no clock. A real proxy decides the same things. It alone knows both engines
of a request, so it makes the transfer ids; and it alone sees that an attempt came to nothing, so it makes the next one.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvpush.cli.demo.messages import (
    Cancel,
    Expect,
    FirstToken,
    Generated,
    Order,
    Prefill,
    Prefilled,
    Pushed,
    Received,
    Reference,
    Referenced,
)

MAX_ATTEMPTS = 4
SLOTS_PER_ENGINE = 3  # requests that a decode engine has at a time

Orders = list[tuple[str, Order]]  # (engine id, order)


class Phase(enum.StrEnum):
    """How far a request has come."""

    waiting = "waiting"  # for a decode engine
    moving = "moving"  # prompt being computed, cache on its way
    decoding = "decoding"
    generated = "generated"  # complete, and the run without disaggregation is not
    checked = "checked"
    lost = "lost"


_OPEN = (Phase.moving, Phase.decoding)  # it occupies a decode engine


@dataclass(slots=True, eq=False)
class Request:
    """One request, through all of its attempts."""

    request_id: str
    prompt_id: int
    phase: Phase = Phase.waiting
    attempt: int = 0
    engine_id: str = ""  # decode's, of this attempt; while waiting: the only one that may take it, if any
    tokens: tuple[int, ...] = ()
    text: str = ""

    @property
    def transfer_id(self) -> str:
        """A name for this attempt: kvpush knows transfers, and each of them ends once."""
        return self.request_id if self.attempt == 1 else f"{self.request_id}#{self.attempt}"


@dataclass(slots=True)
class Findings:
    """What the checks have found so far."""

    compared_tokens: int = 0
    checked_blocks: int = 0
    num_block_checks: int = 0
    problems: list[str] = field(default_factory=list)


class Router:
    """Requests, their attempts, and the decode engines that are up."""

    def __init__(
        self,
        prompts: Sequence[str],
        num_requests: int,
        max_new_tokens: int,
        *,
        prefill_id: str,
        decode_ids: Sequence[str],
    ) -> None:
        self.requests = [Request(f"r{i + 1}", i % len(prompts)) for i in range(num_requests)]
        self.findings = Findings()
        self.resent: list[str] = []  # transfer ids of second and further attempts
        self._prompts = prompts
        self._max_new_tokens = max_new_tokens
        self._prefill_id = prefill_id
        self._source: tuple[str, int] | None = None
        self._up: deque[str] = deque()  # the next one to be asked comes first
        self._never_up = set(decode_ids)  # traffic begins when all engines are there
        self._waiting = deque(self.requests)
        self._by_transfer: dict[str, Request] = {}
        self._references: dict[int, tuple[int, ...] | None] = {}  # None: ordered

    # --- engines come and go -----------------------------------------------------------------------------------------

    def prefill_up(self, address: tuple[str, int]) -> Orders:
        """Prefill listens here."""
        self._source = address
        return self._dispatch()

    def decode_up(self, engine_id: str) -> Orders:
        """A decode engine takes requests."""
        self._up.append(engine_id)
        self._never_up.discard(engine_id)
        return self._dispatch()

    def decode_down(self, engine_id: str) -> Orders:
        """A decode engine died, and its cache with it. What it had starts again from the prompt, when it is back."""
        if engine_id in self._up:
            self._up.remove(engine_id)
        orders: Orders = []
        for request in reversed(self.open_requests(engine_id)):
            orders.append((self._prefill_id, Cancel(request.transfer_id)))
            self._send_again(request, only_to=engine_id)
        return orders + self._dispatch()

    # --- reports -----------------------------------------------------------------------------------------------------

    def prefilled(self, report: Prefilled) -> Orders:
        """The prompt is computed: its first token goes to decode."""
        request = self._by_transfer.get(report.transfer_id)
        if request is None:
            return []
        return [(request.engine_id, FirstToken(request.transfer_id, report.first_token))]

    def pushed(self, report: Pushed) -> Orders:
        """Prefill's account of a transfer. When it failed, decode must not wait for it."""
        event = report.event
        request = self._by_transfer.get(event.transfer_id)
        if event.outcome == "done" or request is None:
            return []
        return self._attempt_failed(request, f"push {event.outcome}: {event.reason}")

    def received(self, engine_id: str, report: Received) -> Orders:
        """Decode's account of a transfer, and what it found in blocks that nobody may write."""
        event = report.event
        self.findings.num_block_checks += 1
        self.findings.checked_blocks += report.checked_blocks
        for block in report.changed_blocks:
            self._problem(
                f"{engine_id}: block {block} was granted to nobody and changed before {event.transfer_id} ended"
            )
        request = self._by_transfer.get(event.transfer_id)
        if request is None:
            return []
        if event.outcome == "done":
            request.phase = Phase.decoding
            return []
        return self._attempt_failed(request, f"receive {event.outcome}: {event.reason}")

    def generated(self, report: Generated) -> Orders:
        """The answer is complete."""
        request = self._by_transfer.pop(report.transfer_id, None)
        if request is None:
            return []
        request.phase = Phase.generated
        request.tokens, request.text = report.tokens, report.text
        self._check(request)
        return self._dispatch()

    def referenced(self, report: Referenced) -> None:
        """The run without disaggregation is complete for this prompt."""
        self._references[report.prompt_id] = report.tokens
        for request in self.requests:
            if request.prompt_id == report.prompt_id and request.phase is Phase.generated:
                self._check(request)

    # --- looking at it -----------------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """Every request has come to its end, good or bad."""
        return all(request.phase in (Phase.checked, Phase.lost) for request in self.requests)

    def count(self, *phases: Phase) -> int:
        """Requests in any of these phases."""
        return sum(request.phase in phases for request in self.requests)

    def open_requests(self, engine_id: str) -> list[Request]:
        """What a decode engine has, oldest first."""
        return [request for request in self.requests if request.engine_id == engine_id and request.phase in _OPEN]

    # --- placement ---------------------------------------------------------------------------------------------------

    def _dispatch(self) -> Orders:
        """Start waiting requests on engines with a free slot, in turn."""
        orders: Orders = []
        if self._source is not None and not self._never_up:
            for request, engine_id in self._placements():
                orders += self._start(request, engine_id, self._source)
        return orders

    def _placements(self) -> Iterator[tuple[Request, str]]:
        still_waiting: deque[Request] = deque()
        while self._waiting:
            request = self._waiting.popleft()
            engine_id = self._engine_for(request)
            if engine_id is None:
                still_waiting.append(request)
            else:
                yield request, engine_id
        self._waiting = still_waiting

    def _engine_for(self, request: Request) -> str | None:
        """The next engine in turn with a free slot."""
        for engine_id in self._up:
            if request.engine_id in ("", engine_id) and len(self.open_requests(engine_id)) < SLOTS_PER_ENGINE:
                self._up.remove(engine_id)
                self._up.append(engine_id)
                return engine_id
        return None

    def _start(self, request: Request, engine_id: str, source: tuple[str, int]) -> Orders:
        """Tell both engines. Whichever comes first waits for the other one: neither needs an order of events."""
        request.attempt += 1
        request.engine_id = engine_id
        request.phase = Phase.moving
        transfer_id, text = request.transfer_id, self._prompts[request.prompt_id]
        self._by_transfer[transfer_id] = request
        if request.attempt > 1:
            self.resent.append(transfer_id)
        orders: Orders = [
            (engine_id, Expect(transfer_id, text, self._max_new_tokens, source, self._prefill_id)),
            (self._prefill_id, Prefill(transfer_id, text)),
        ]
        if request.prompt_id not in self._references:
            self._references[request.prompt_id] = None
            orders.append((self._prefill_id, Reference(request.prompt_id, text, self._max_new_tokens)))
        return orders

    def _attempt_failed(self, request: Request, reason: str) -> Orders:
        """Both sides must forget this attempt; then comes the next one, or none."""
        transfer_id, engine_id = request.transfer_id, request.engine_id
        orders: Orders = [(self._prefill_id, Cancel(transfer_id)), (engine_id, Cancel(transfer_id))]
        if request.attempt < MAX_ATTEMPTS:
            self._send_again(request)
        else:
            del self._by_transfer[transfer_id]
            request.phase = Phase.lost
            self._problem(f"{request.request_id} is lost after {MAX_ATTEMPTS} attempts; the last one: {reason}")
        return orders + self._dispatch()

    def _send_again(self, request: Request, only_to: str = "") -> None:
        """Back to the head of the line. The next attempt has another transfer id: nothing late can be taken for it."""
        del self._by_transfer[request.transfer_id]
        request.phase = Phase.waiting
        request.engine_id = only_to
        self._waiting.appendleft(request)

    # --- the check ---------------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        """Token by token, as soon as both runs are there."""
        expected = self._references.get(request.prompt_id)
        if expected is None:
            return
        request.phase = Phase.checked
        self.findings.compared_tokens += len(expected)
        if difference := _difference(request.tokens, expected):
            self._problem(f"{request.transfer_id} on {request.engine_id}: {difference}")

    def _problem(self, sentence: str) -> None:
        self.findings.problems.append(sentence)


def _difference(tokens: Sequence[int], expected: Sequence[int]) -> str | None:
    """Where two answers part."""
    for index, (token, wanted) in enumerate(zip(tokens, expected, strict=False), start=1):
        if token != wanted:
            return f"token {index} of {len(expected)} is {token}, without disaggregation it is {wanted}"
    if len(tokens) != len(expected):
        return f"{len(tokens)} tokens, without disaggregation it is {len(expected)}"
    return None
