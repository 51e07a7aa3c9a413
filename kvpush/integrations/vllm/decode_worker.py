"""Decode, in a worker: asks the :class:`kvpush.DecodeReceiver` for a request's blocks and tells how it ended.

vLLM frees or recomputes the blocks of a receive that is reported, so a receive is reported when its blocks are
reusable, with one exception: a request that waits is reported as failed at once, and as *held*, so that the
scheduler's process pins the blocks until they are released. A request that was given up waits for that here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import kvpush
from kvpush.integrations.vllm.tally import Tally
from kvpush.integrations.vllm.work import Expect, Renewal

IDLE_WAIT_S = 0.004  # in a step that runs no model: less than one that does takes; vLLM then sleeps for a millisecond
NEAR_S = 0.02  # a receive that was asked for so lately may end at any moment: when prefill is ready already, it does

logger = logging.getLogger("vllm.kvpush")


@dataclass(slots=True, eq=False)
class _Receive:
    expect: Expect
    since_s: float
    is_given_up: bool = False
    is_reported: bool = False

    @property
    def transfer_id(self) -> str:
        return self.expect.leg.transfer_id


@dataclass(slots=True)
class Ends:
    """What vLLM has to be told after a step. Every receive with a request is in ``finished`` exactly once."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)  # also in ``finished``
    held: list[str] = field(default_factory=list)  # also in ``failed``: pin the blocks
    released: list[str] = field(default_factory=list)  # of those that were held


class DecodeWorker:
    """One worker's receives."""

    def __init__(
        self, receiver: kvpush.DecodeReceiver, tally: Tally, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._receiver = receiver
        self._tally = tally
        self._receives: dict[str, _Receive] = {}  # by request id: not reported
        self._users: dict[str, deque[_Receive]] = {}  # transfer id -> its receives; the first uses it, the others wait
        self._ends = Ends()

    def expect(self, expect: Expect) -> None:
        """Register a receive. One that cannot be registered is reported as failed."""
        receive = _Receive(expect, self._clock())
        if expect.request_id is not None:
            self._receives[expect.request_id] = receive
        users = self._users.setdefault(receive.transfer_id, deque())
        users.append(receive)
        if users[0] is receive and not self._begin(receive):
            self._over(receive)

    def _begin(self, receive: _Receive) -> bool:
        """Whether the library took it. Else it is reported, and over."""
        expect = receive.expect
        try:
            self._receiver.expect(
                receive.transfer_id,
                list(expect.block_ids),
                source=expect.leg.addresses,
                source_engine_id=expect.leg.engine_id,
                source_incarnation=expect.leg.incarnations,
                first_block=expect.first_block,
                num_tokens=expect.num_tokens,
            )
        except kvpush.KvpushError as exc:
            logger.warning("request %s: %s", expect.request_id, exc)
            self._tally.count("receives_rejected")
            self._report(receive, is_failed=True)
            return False
        return True

    def cancel(self, request_id: str) -> None:
        """The request is gone. Its blocks are reported once nothing writes into them."""
        receive = self._receives.get(request_id)
        if receive is None:
            return
        receive.is_given_up = True
        if self._users[receive.transfer_id][0] is receive:
            self._receiver.cancel(receive.transfer_id)
        else:  # it waits for its turn: nothing was asked for
            self._report(receive, is_failed=True)
            self._over(receive)

    def renew(self, renewal: Renewal) -> None:
        """Keep prefill's leases alive."""
        try:
            self._receiver.renew(
                renewal.transfer_ids, source=renewal.leg.addresses, source_engine_id=renewal.leg.engine_id
            )
        except kvpush.KvpushError as exc:
            logger.warning("%s", exc)

    def poll(self, *, may_wait: bool = False) -> Ends:
        """What has ended since the last call. ``may_wait``: nothing else is to be done, so that an end that is near is
        waited for. vLLM would look again a step later, which is a millisecond or two."""
        for event in self._receiver.wait(IDLE_WAIT_S) if may_wait and self._is_end_near() else self._receiver.poll():
            users = self._users.get(event.transfer_id)
            if users is None:
                continue
            receive = users[0]
            if isinstance(event, kvpush.ReceiveFinished):
                self._tally.received(event)
                self._finished(receive, event)
            elif receive.is_reported:
                assert receive.expect.request_id is not None, "an empty receive holds nothing"
                self._ends.released.append(receive.expect.request_id)
                self._over(receive)
            else:
                self._report(receive, is_failed=True)
                self._over(receive)
        ends, self._ends = self._ends, Ends()
        return ends

    def _is_end_near(self) -> bool:
        newest = next(reversed(self._receives.values()), None)
        return newest is not None and self._clock() < newest.since_s + NEAR_S

    def _finished(self, receive: _Receive, event: kvpush.ReceiveFinished) -> None:
        is_done = event.outcome == kvpush.Outcome.done
        if not is_done and not receive.is_given_up:
            request_id = receive.expect.request_id
            logger.warning("request %s: receive %s: %s: %s", request_id, event.transfer_id, event.outcome, event.reason)
        if event.blocks_reusable:
            self._report(receive, is_failed=not is_done)
            self._over(receive)
        elif not receive.is_given_up and receive.expect.request_id is not None:
            self._report(receive, is_failed=True)
            self._ends.held.append(receive.expect.request_id)

    def _report(self, receive: _Receive, *, is_failed: bool) -> None:
        """Once a receive; one that nobody waits for is not reported."""
        request_id = receive.expect.request_id
        receive.is_reported = True
        if request_id is None:
            return
        self._receives.pop(request_id, None)
        self._ends.finished.add(request_id)
        if is_failed:
            self._ends.failed.add(request_id)

    def _over(self, receive: _Receive) -> None:
        """Its transfer id is free: the next receive that goes by it may begin."""
        users = self._users[receive.transfer_id]
        was_using_it = users[0] is receive
        users.remove(receive)
        while was_using_it and users and not self._begin(users[0]):
            users.popleft()
        if not users:
            del self._users[receive.transfer_id]

    @property
    def num_receives(self) -> int:
        """That a request waits for."""
        return len(self._receives)
