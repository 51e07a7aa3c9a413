"""Prefill, in the scheduler's process: which blocks are pushed in which step, and which are pinned until when.

A prompt is pushed as its chunks are computed: after the step that completes a block, the block is final. The blocks
are pinned from that step until every worker has said that the push is over (:mod:`kvpush.integrations.vllm.pins`).
A request that is preempted loses its blocks, but the pins keep those that were pushed as they are. When it runs again,
vLLM finds them in its prefix cache, and the push goes on where it stopped. Without a prefix cache the prompt needs room
for all of it once more, so the push is withdrawn and begins anew. The same when nothing can run any more, since the
pins of what was preempted are in the way.

A push that decode has not got, and that decode was told of or came too late for, is *lost*: it is not begun again, and
the answer brings no parameters, so that decode computes the prompt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvpush.integrations.vllm.params import PrefillLeg, Rank, Source, answer, prefill_leg
from kvpush.integrations.vllm.pins import Pins
from kvpush.integrations.vllm.work import PushChunk, Report, StepWork

STUCK_S = 0.2  # without anything that runs: longer than blocks take that are on their way back


class Request(Protocol):
    """The part of vLLM's request that is read."""

    @property
    def request_id(self) -> str:
        """Unique within the engine."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """The prompt; ``None`` for one of embeddings."""

    @property
    def num_computed_tokens(self) -> int:
        """Before the step that is being planned."""

    @property
    def num_preemptions(self) -> int:
        """So far."""

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """What the router said."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """A request whose KV decode will ask for."""

    request: Request
    leg: PrefillLeg
    num_preemptions: int = 0
    send: int | None = None  # the attempt that chunks are pushed under
    num_pushed: int = 0  # positions
    is_complete: bool = False  # the last chunk has been handed over
    is_lost: bool = False


@dataclass(slots=True)
class _Send:
    """One attempt, until all workers have reported its end."""

    prompt: _Prompt
    num_workers_left: int
    is_withdrawn: bool = False


@dataclass(slots=True)
class PrefillScheduler:
    """Bookkeeping of the prompts that are pushed."""

    engine_id: str
    block_size_tokens: int
    num_workers: int
    push_chunks: bool = True
    has_prefix_cache: bool = True
    lease_s: float = 30.0
    clock: Callable[[], float] = time.monotonic
    pins: Pins[int] = field(default_factory=Pins)
    sources: Mapping[Rank, Source] = field(default_factory=dict)  # this engine's ranks
    _prompts: dict[str, _Prompt] = field(default_factory=dict)  # by request id
    _sends: dict[int, _Send] = field(default_factory=dict)
    _last_send: int = 0
    _stuck_since_s: float = math.inf
    _work: StepWork = field(default_factory=StepWork)

    def arrived(self, request: Request) -> bool:
        """A new request. Whether its prompt is to be pushed. Raises BadParams."""
        leg = prefill_leg(request.kv_transfer_params, request.request_id, request.prompt_token_ids)
        if leg is not None:
            self._prompts[request.request_id] = _Prompt(request, leg, request.num_preemptions)
        return leg is not None

    def planned(self, scheduled: Mapping[str, int], block_ids_of: Callable[[str], Sequence[int] | None]) -> None:
        """A step was planned: ``scheduled`` says how many tokens of which requests it computes."""
        for prompt in self._prompts.values():
            if prompt.send is not None and prompt.request.num_preemptions != prompt.num_preemptions:
                self._preempted(prompt)
        for request_id, num_tokens in scheduled.items():
            prompt_here = self._prompts.get(request_id)
            if prompt_here is not None and not (prompt_here.is_complete or prompt_here.is_lost):
                self._computed(prompt_here, num_tokens, block_ids_of)
        self._make_room(is_stuck=not scheduled)

    def _preempted(self, prompt: _Prompt) -> None:
        prompt.num_preemptions = prompt.request.num_preemptions
        if not (prompt.is_complete or self.has_prefix_cache):
            self._withdraw(prompt)

    def _make_room(self, *, is_stuck: bool) -> None:
        """If nothing can run because prompts were preempted half pushed, the newest of them begins anew."""
        now_s = self.clock()
        self._stuck_since_s = min(self._stuck_since_s, now_s) if is_stuck else math.inf
        if now_s < self._stuck_since_s + STUCK_S or self._is_withdrawing:
            return
        for prompt in reversed(self._prompts.values()):
            if self._is_half_pushed(prompt) and self._is_out(prompt):
                self._withdraw(prompt)
                return

    def _is_half_pushed(self, prompt: _Prompt) -> bool:
        return prompt.send in self._sends and not prompt.is_complete

    @staticmethod
    def _is_out(prompt: _Prompt) -> bool:
        """It was preempted, and has not run since."""
        return prompt.request.num_preemptions > 0 and not prompt.request.num_computed_tokens

    def _computed(self, prompt: _Prompt, num_tokens: int, block_ids_of: Callable[[str], Sequence[int] | None]) -> None:
        request = prompt.request
        if prompt.send is not None and prompt.send not in self._sends:
            prompt.is_lost = True  # it ended early: there is nothing to add to it
            return
        end_tokens = request.num_computed_tokens + num_tokens
        is_last = end_tokens >= request.num_prompt_tokens
        if is_last:
            end_block = -(-request.num_prompt_tokens // self.block_size_tokens)
        else:
            end_block = end_tokens // self.block_size_tokens if self.push_chunks else 0
        if end_block <= prompt.num_pushed and not is_last:
            return
        block_ids = block_ids_of(request.request_id)
        if block_ids is None:
            return
        new_ids = list(block_ids[prompt.num_pushed : end_block])
        if prompt.send is None:
            self._last_send += 1
            prompt.send = self._last_send
            prompt.num_preemptions = request.num_preemptions
            self._sends[prompt.send] = _Send(prompt, self.num_workers)
        self.pins.add(prompt.send, new_ids)
        self._work.chunks.append(PushChunk(prompt.send, prompt.leg.transfer_ids, prompt.num_pushed, new_ids, is_last))
        prompt.num_pushed = end_block
        prompt.is_complete = is_last

    def finished(self, request_id: str, *, is_whole: bool) -> dict[str, Any] | None:
        """A request ended. ``is_whole``: as it should, and not by an abort. What its answer brings for decode."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return None
        if prompt.is_complete and is_whole and not prompt.is_lost:
            return answer(
                engine_id=self.engine_id,
                request_id=request_id,
                leg=prompt.leg,
                sources=self.sources,
                num_tokens=prompt.request.num_prompt_tokens,
                lease_s=self.lease_s,
            )
        if prompt.send is not None:
            self._withdraw(prompt)
        elif not prompt.is_lost:  # decode may wait for it already
            self._work.refusals.append(prompt.leg.transfer_ids)
        return None

    def _withdraw(self, prompt: _Prompt) -> None:
        assert prompt.send is not None, "only an attempt can be withdrawn"
        send = self._sends.get(prompt.send)
        if send is not None:
            send.is_withdrawn = True
            self._work.withdrawals.append(prompt.send)
        prompt.send, prompt.num_pushed = None, 0

    def reported(self, report: Report) -> None:
        """Workers have seen the ends of sends."""
        for number in report.lost_sends & self._sends.keys():
            prompt = self._sends[number].prompt
            prompt.is_lost = True
            if prompt.send is not None and prompt.send != number:  # it has begun anew, for nobody
                self._withdraw(prompt)
        for number, num_workers in report.ended_sends.items():
            send = self._sends.get(number)
            if send is None:
                continue
            send.num_workers_left -= num_workers
            if send.num_workers_left <= 0:
                del self._sends[number]
                self.pins.drop(number)

    def take_work(self) -> StepWork:
        """What was decided since the last call."""
        work, self._work = self._work, StepWork()
        return work

    @property
    def is_busy(self) -> bool:
        """Whether the engine must go on stepping, so that workers can report."""
        return bool(self._sends or self._work)

    @property
    def has_blocks_about_to_come_back(self) -> bool:
        """Whether waiting a moment may free blocks that nobody needs any more. vLLM asks this while it preempts, before
        the step that will withdraw the push of what it has preempted."""
        return self._is_withdrawing or (
            not self.has_prefix_cache
            and any(
                self._is_half_pushed(prompt) and prompt.request.num_preemptions != prompt.num_preemptions
                for prompt in self._prompts.values()
            )
        )

    @property
    def _is_withdrawing(self) -> bool:
        return any(send.is_withdrawn for send in self._sends.values())
