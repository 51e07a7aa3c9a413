"""Decode, in the scheduler's process: which positions are asked for, and which blocks stay pinned after a failure.

A request waits in vLLM's own state for remote KV until every worker has reported its receive. Only blocks that are
missing here are asked for. The prompt's last token is always computed here, since it yields the first new token; so
its KV is never asked for, and a prompt that is cached up to there needs nothing: prefill is told to let go.

A prompt that is to be answered several times (``n``, or twice in a list) comes as several requests with one transfer.
Prefill pushes it once. So one of them receives it, and the others wait for that and find it in the prefix cache.

While a request queues here, prefill's lease is renewed, so that its KV is there when its turn comes. Not for longer
than a receive may take: prefill may be what it waits for, when two servers are full of what each keeps for the other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvpush.integrations.vllm.params import DecodeLeg, decode_leg
from kvpush.integrations.vllm.pins import Pins
from kvpush.integrations.vllm.work import Expect, Renewal, Report, StepWork

RENEWALS_PER_LEASE = 3
MIN_LEASE_S = 1.0  # whatever a request says of its prefill engine's: not every step is to renew


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
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """What the router said. ``do_remote_prefill`` is cleared once it has been acted on, as vLLM does it."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """A request whose KV comes from elsewhere."""

    request: Request
    leg: DecodeLeg
    arrived_s: float
    is_asked: bool = False  # the transfer was registered, or declined
    has_come: bool = False  # for another request with the same transfer, which has been waited for
    num_cached_tokens: int = 0  # that were here when the rest was offered


@dataclass(slots=True, eq=False)
class _Receiving:
    """What a request is receiving, until every worker has reported its end."""

    transfer_id: str
    block_ids: Sequence[int]
    is_waited_for: bool = False  # by other requests with the same transfer


@dataclass(slots=True)
class DecodeScheduler:
    """Bookkeeping of the prompts that are received."""

    block_size_tokens: int
    lease_s: float  # the shortest of any prefill engine that has said its own
    receive_deadline_s: float
    clock: Callable[[], float] = time.monotonic
    pins: Pins[str] = field(default_factory=Pins)
    _prompts: dict[str, _Prompt] = field(default_factory=dict)  # by request id
    _receiving: dict[str, _Receiving] = field(default_factory=dict)  # by request id
    _transfers: dict[str, _Receiving] = field(default_factory=dict)  # the same by transfer id
    _holding: Counter[str] = field(default_factory=Counter)  # request id -> workers that hold its blocks
    _renewed_s: float = -1e9
    _work: StepWork = field(default_factory=StepWork)

    def arrived(self, request: Request) -> bool:
        """A new request. Whether its prompt comes from elsewhere. Raises BadParams."""
        params = request.kv_transfer_params
        leg = decode_leg(params, request.request_id, request.prompt_token_ids)
        if leg is not None:
            self._prompts[request.request_id] = _Prompt(request, leg, self.clock())
            self.lease_s = min(self.lease_s, max(MIN_LEASE_S, leg.lease_s or self.lease_s))
        return leg is not None

    def num_missing_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """How many tokens' KV will come, beyond those cached here; ``None``: ask again, another request is receiving
        them."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or prompt.is_asked or prompt.has_come:
            return 0
        if (receiving := self._transfers.get(prompt.leg.transfer_id)) is not None:
            receiving.is_waited_for = True
            return None
        prompt.num_cached_tokens = num_computed_tokens
        return max(0, request.num_prompt_tokens - 1 - num_computed_tokens)

    def allocated(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """vLLM gave the request its blocks. ``num_external_tokens``: what it lets come of what was offered."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or prompt.is_asked:
            return
        if num_external_tokens <= 0:
            self._decline(prompt)
            return
        num_tokens = prompt.num_cached_tokens + num_external_tokens
        first_block = prompt.num_cached_tokens // self.block_size_tokens
        end_block = -(-num_tokens // self.block_size_tokens)
        wanted = list(block_ids[first_block:end_block])
        self._mark_asked(prompt)
        receiving = _Receiving(prompt.leg.transfer_id, wanted)
        self._receiving[request.request_id] = self._transfers[receiving.transfer_id] = receiving
        self._work.expects.append(Expect(request.request_id, prompt.leg, first_block, wanted, num_tokens))

    def finished(self, request_id: str) -> None:
        """A request ended, in whatever way."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        if not prompt.is_asked:
            self._decline(prompt)
        elif request_id in self._receiving:
            self._work.cancels.append(request_id)

    def _decline(self, prompt: _Prompt) -> None:
        """Nothing is needed: prefill need not keep the blocks for us."""
        self._mark_asked(prompt)
        self._work.expects.append(Expect(None, prompt.leg))

    def _mark_asked(self, prompt: _Prompt) -> None:
        prompt.is_asked = True
        params = prompt.request.kv_transfer_params
        if params is not None:
            params["do_remote_prefill"] = False

    def reported(self, report: Report, finished: Collection[str], failed: Collection[str] = ()) -> None:
        """Workers have seen receives end, ``failed`` among them. Called before vLLM frees anything because of it."""
        for request_id, num_workers in report.held.items():
            if request_id not in self.pins and request_id in self._receiving:
                self.pins.add(request_id, self._receiving[request_id].block_ids)
            self._holding[request_id] += num_workers
        for request_id, num_workers in report.released.items():
            self._holding[request_id] -= num_workers
            if self._holding[request_id] <= 0:
                del self._holding[request_id]
                self.pins.drop(request_id)
        for request_id in finished:
            if (receiving := self._receiving.pop(request_id, None)) is not None:
                del self._transfers[receiving.transfer_id]
                if receiving.is_waited_for and request_id in self._prompts and request_id not in failed:
                    self._has_come(receiving.transfer_id)

    def _has_come(self, transfer_id: str) -> None:
        """Those who waited find it in the prefix cache. What is not there they compute: prefill pushed it once."""
        for prompt in self._prompts.values():
            prompt.has_come |= prompt.leg.transfer_id == transfer_id

    def take_work(self) -> StepWork:
        """What was decided since the last call."""
        self._renew()
        work, self._work = self._work, StepWork()
        return work

    def _renew(self) -> None:
        """Requests that queue here must find their KV when their turn comes."""
        now_s = self.clock()
        if now_s - self._renewed_s < self.lease_s / RENEWALS_PER_LEASE:
            return
        self._renewed_s = now_s
        waiting: dict[tuple[Any, ...], list[DecodeLeg]] = {}
        for prompt in self._prompts.values():
            if not prompt.is_asked and now_s < prompt.arrived_s + self.receive_deadline_s:
                leg = prompt.leg
                waiting.setdefault((leg.engine_id, *sorted(leg.addresses.items())), []).append(leg)
        for legs in waiting.values():
            self._work.renewals.append(Renewal(tuple(leg.transfer_id for leg in legs), legs[0]))

    @property
    def is_busy(self) -> bool:
        """Whether the engine must go on stepping, so that workers can report."""
        return bool(self._holding or self._work)
