"""Prefill, in a worker: hands chunks to the :class:`kvpush.PrefillPusher` and tells when a send is over.

A send goes by one transfer id, or by two when the router gave none and either may be asked for. The one that decode
asks for decides, and the end of the first is the end of both. A send is over when the blocks of all its ids are
reusable.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import kvpush
from kvpush.integrations.vllm.tally import Tally
from kvpush.integrations.vllm.work import PushChunk
from kvpush.pusher import Fence

logger = logging.getLogger("vllm.kvpush")


@dataclass(slots=True, eq=False)
class _Send:
    number: int
    main_id: str
    open_ids: set[str]  # transfer ids that are not over
    is_given_up: bool = False
    is_counted: bool = False
    is_lost: bool = False  # decode does not get it, and either knows that or had not asked for it in time
    parked: deque[tuple[PushChunk, Fence | None]] = field(default_factory=deque)


class PrefillWorker:
    """One worker's pushes."""

    def __init__(self, pusher: kvpush.PrefillPusher, tally: Tally) -> None:
        self._pusher = pusher
        self._tally = tally
        self._sends: dict[int, _Send] = {}
        self._users: dict[str, deque[_Send]] = {}  # transfer id -> its sends; the first uses it, the others wait
        self._ended: list[int] = []
        self._lost: set[int] = set()

    def withdraw(self, number: int) -> None:
        """Give a send up. It is over as soon as nothing reads its blocks."""
        send = self._sends.get(number)
        if send is not None and not send.is_given_up:
            send.is_given_up = True
            self._cancel(send, send.open_ids)

    def refuse(self, transfer_ids: Iterable[str]) -> None:
        """These will never be pushed: tell whoever registered for them."""
        for transfer_id in transfer_ids:
            if transfer_id not in self._users:
                self._pusher.cancel(transfer_id)

    def push(self, chunk: PushChunk, ready: Fence | None) -> None:
        """Push one chunk under every id of its send. ``ready``: passed when the device has computed it."""
        send = self._sends.get(chunk.send)
        if send is None:
            if chunk.first_block:
                return  # the send ended before its prompt did
            send = self._sends[chunk.send] = _Send(chunk.send, chunk.transfer_ids[0], set(chunk.transfer_ids))
            for transfer_id in chunk.transfer_ids:
                self._users.setdefault(transfer_id, deque()).append(send)
        send.parked.append((chunk, ready))
        for transfer_id in list(send.open_ids):
            if self._users[transfer_id][0] is send and not self._push_as(transfer_id, chunk, ready):
                send.is_lost = True
                self._over(send, transfer_id)

    def _push_as(self, transfer_id: str, chunk: PushChunk, ready: Fence | None) -> bool:
        """``False``: nothing of it was taken, so no event will come."""
        try:
            self._pusher.push(
                transfer_id, list(chunk.block_ids), first_block=chunk.first_block, last=chunk.last, ready=ready
            )
        except kvpush.KvpushError as exc:
            logger.warning("%s", exc)
            self._tally.count("pushes_rejected")
            self._pusher.cancel(transfer_id)  # ends what earlier chunks began, and tells decode
            return chunk.first_block > 0
        return True

    def poll(self) -> tuple[list[int], set[int]]:
        """Sends that are over since the last call, each once; and those of them that are lost."""
        for event in self._pusher.poll():
            users = self._users.get(event.transfer_id)
            if users is None:
                continue
            if isinstance(event, kvpush.PushFinished):
                self._finished(users[0], event)
            if isinstance(event, kvpush.BlocksReleased) or event.blocks_reusable:
                self._over(users[0], event.transfer_id)
        ended, self._ended = self._ended, []
        lost, self._lost = self._lost, set()
        return ended, lost

    def _finished(self, send: _Send, event: kvpush.PushFinished) -> None:
        if event.engine_id is not None or event.transfer_id == send.main_id:
            if not send.is_counted:  # one send, one outcome, whatever it goes by
                send.is_counted = True
                send.is_lost = event.outcome != kvpush.Outcome.done and not (send.is_given_up and not event.engine_id)
                self._tally.pushed(event)
                if event.outcome not in (kvpush.Outcome.done, kvpush.Outcome.cancelled):
                    logger.warning("push %s: %s: %s", event.transfer_id, event.outcome, event.reason)
            self._cancel(send, send.open_ids - {event.transfer_id})

    def _cancel(self, send: _Send, transfer_ids: Iterable[str]) -> None:
        for transfer_id in list(transfer_ids):
            if self._users[transfer_id][0] is send:
                self._pusher.cancel(transfer_id)
            else:  # it waits for its turn and has pushed nothing
                self._over(send, transfer_id)

    def _over(self, send: _Send, transfer_id: str) -> None:
        """This id of a send is over; the next send that goes by it may begin."""
        users = self._users[transfer_id]
        was_using_it = users[0] is send
        users.remove(send)
        self._close(send, transfer_id)
        while was_using_it and users and not self._begin(users[0], transfer_id):
            users[0].is_lost = True
            self._close(users.popleft(), transfer_id)
        if not users:
            del self._users[transfer_id]

    def _close(self, send: _Send, transfer_id: str) -> None:
        send.open_ids.discard(transfer_id)
        if not send.open_ids:
            del self._sends[send.number]
            self._ended.append(send.number)
            if send.is_lost:
                self._lost.add(send.number)

    def _begin(self, send: _Send, transfer_id: str) -> bool:
        """Push what has waited. ``False``: nothing of it was taken."""
        return all(self._push_as(transfer_id, chunk, ready) for chunk, ready in send.parked)

    @property
    def num_sends(self) -> int:
        """Not over."""
        return len(self._sends)
