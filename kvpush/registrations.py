"""Who may register for what, and how much. Keeps the registrations that nothing has been pushed for yet. Pure.

A transfer has one decode engine, and one registration at a time from each of its ranks. Until the first byte is
written to a rank, its newest registration wins; what comes after the end is refused with the cause of the end, which a
tombstone remembers.

Registrations are bounded in number while they wait, and in size until they end: nobody else's list of block ids is
limited by anything but a message's size. Every refusal here costs the same, however long the list is.
"""

from __future__ import annotations

from collections import OrderedDict

from kvpush.config import Config
from kvpush.errors import Failure, FailureCode
from kvpush.prefill_effects import Outbox
from kvpush.pushes import Due, Leg, Push, Registration, RegistrationEnd, as_decode_sees_it, tombstone_of
from kvpush.timers import Timers
from kvpush.tombstones import Tombstone, Tombstones
from kvpush.wire import Rank

# What ends a registration says nothing about the transfer: another engine, or the same one later, may ask for it.
_LEAVE_THE_PUSH_ALONE = (FailureCode.closing, FailureCode.engine_dropped, FailureCode.queue_full)


class Registrations:
    """The registrations of one pusher that wait for their push."""

    def __init__(self, config: Config, tombstones: Tombstones, timers: Timers[Due], outbox: Outbox) -> None:
        self._config = config
        self._tombstones = tombstones
        self._timers = timers
        self._outbox = outbox
        self._waiting: dict[str, dict[Rank, Registration]] = {}
        self._num_waiting = 0
        self._num_blocks = 0  # block ids in all that were admitted and have not ended
        # transfer id -> the engine that its registration ended with
        self._owners: OrderedDict[str, str] = OrderedDict()
        self._closed = ""  # why no new transfer is taken

    def shut(self, why: str) -> None:
        """Take no new transfer from now on."""
        self._closed = why

    def find(self, transfer_id: str, rank: Rank) -> Registration | None:
        """The one of this rank that waits for this transfer's push."""
        return self._waiting.get(transfer_id, {}).get(rank)

    def admit(self, registration: Registration) -> None:
        """It takes its place, until :meth:`end`."""
        registration.link.transfer_ids[registration.transfer_id] = None
        self._owners.pop(registration.transfer_id, None)
        self._count_blocks(registration, registration.num_blocks)

    def end(self, registration: Registration) -> None:
        """One that was admitted has ended, whether it waited or its push had come. It does not end with its link any
        more. Twice is fine."""
        if registration.is_over:
            return
        registration.is_over = True
        if self.find(registration.transfer_id, registration.rank) is registration:
            self._remove(registration)
        registration.link.transfer_ids.pop(registration.transfer_id, None)
        self._count_blocks(registration, -registration.num_blocks)

    def remember_end(self, registration: Registration) -> None:
        """It ended with its engine, and nobody was told: a push that waits in vain can say for whom it waited."""
        self._owners[registration.transfer_id] = registration.engine_id
        self._owners.move_to_end(registration.transfer_id)
        while len(self._owners) > self._config.max_tombstones:
            self._owners.popitem(last=False)

    def last_owner(self, transfer_id: str) -> str | None:
        """The engine that the transfer's registration ended with. Forgotten with the answer."""
        return self._owners.pop(transfer_id, None)

    def _count_blocks(self, registration: Registration, num_blocks: int) -> None:
        registration.link.num_blocks += num_blocks
        self._num_blocks += num_blocks

    def park(self, registration: Registration) -> None:
        """Nothing was pushed for it yet: wait, until it is due."""
        self._waiting.setdefault(registration.transfer_id, {})[registration.rank] = registration
        self._num_waiting += 1
        self._timers.set(_timer_of(registration), registration.due_s)

    def waiting_for(self, transfer_id: str) -> list[Registration]:
        """Those of all ranks that wait for this transfer's push."""
        return list(self._waiting.get(transfer_id, {}).values())

    def take(self, transfer_id: str) -> list[Registration]:
        """The push has come: the registrations of this transfer do not wait any more."""
        registrations = self.waiting_for(transfer_id)
        for registration in registrations:
            self._remove(registration)
        return registrations

    def end_transfer(
        self,
        transfer_id: str,
        code: FailureCode,
        reason: str,
        now_s: float,
        *,
        silent: Registration | None = None,
        never_came: Registration | None = None,
    ) -> None:
        """A transfer that waits ends, and the push that may still come ends with it. Decode is told on each of its
        ranks but ``silent``, which asked for it and is answered otherwise. ``never_came``: of a rank that will not
        register after all."""
        registrations = self.waiting_for(transfer_id)
        for registration in registrations:
            self.end(registration)
            if registration is not silent:
                self._outbox.send_failed(registration, as_decode_sees_it(code), reason)
        if never_came is not None:
            registrations.append(never_came)
        if code not in _LEAVE_THE_PUSH_ALONE:
            tombstone = tombstone_of(registrations, code, reason, is_push_awaited=True)
            self._tombstones.bury(transfer_id, tombstone, now_s)

    def transfer_ids(self) -> list[str]:
        """The transfers that wait for their push, longest first."""
        return list(self._waiting)

    def gauges(self) -> dict[str, int]:
        """Sizes."""
        return {"registrations_waiting": self._num_waiting, "blocks_registered": self._num_blocks}

    def _remove(self, registration: Registration) -> None:
        of_transfer = self._waiting[registration.transfer_id]
        del of_transfer[registration.rank]
        if not of_transfer:
            del self._waiting[registration.transfer_id]
        self._num_waiting -= 1
        self._timers.cancel(_timer_of(registration))

    def refusal(self, new: Registration, push: Push | None, now_s: float) -> Failure | None:
        """Why ``new`` cannot take its place. ``push``: its transfer's, if it is open."""
        others = self.waiting_for(new.transfer_id) if push is None else push.registrations
        claimant = next((other for other in others if other.engine_id != new.engine_id), None)
        if claimant is not None:
            what = f"transfer {new.transfer_id!r}: engine {claimant.engine_id!r} has registered for it"
            return Failure(FailureCode.claimed, f"{what}; all ranks of one decode engine have one engine_id")
        leg = None if push is None else push.legs.get(new.rank)
        old = self.find(new.transfer_id, new.rank) if leg is None else leg.registration
        if old is not None:
            refusal = _refusal_after(old, new, leg)
        elif push is not None:
            refusal = _refusal_by_push(new, push) or self._refusal_by_earlier_use(new, now_s)
        else:
            refusal = self._refusal_by_end(new, now_s) or self._refusal_for_room(new)
        return refusal or self._refusal_by_size(new, old)

    def _refusal_by_earlier_use(self, new: Registration, now_s: float) -> Failure | None:
        """A registration of an earlier use of the id, asked again on a new link, is not for the push that is open now:
        its positions may have been written, and writing them twice would outlast decode's count of them."""
        tombstone = self._tombstones.find(new.transfer_id, now_s)
        if tombstone is None or tombstone.is_before(new.incarnation, new.epoch):
            return None
        return _failure_of(tombstone)

    def _refusal_by_end(self, new: Registration, now_s: float) -> Failure | None:
        tombstone = self._tombstones.find(new.transfer_id, now_s)
        if tombstone is None:
            return None
        is_newer = tombstone.epochs and tombstone.is_before(new.incarnation, new.epoch)
        if not (tombstone.is_push_awaited and is_newer):
            return _failure_of(tombstone)
        self._tombstones.forget(new.transfer_id)  # decode cancelled an earlier use of the id
        return None

    def _refusal_for_room(self, new: Registration) -> Failure | None:
        if self._closed:
            return Failure(FailureCode.closing, self._closed)
        limit = self._config.max_registrations
        if self._num_waiting >= limit:
            return Failure(FailureCode.queue_full, f"max_registrations={limit} are waiting")
        limit = self._config.max_registrations_per_engine
        if len(new.link.transfer_ids) >= limit:
            reason = f"max_registrations_per_engine={limit} of {new.engine_id!r} are waiting"
            return Failure(FailureCode.queue_full, reason)
        return None

    def _refusal_by_size(self, new: Registration, old: Registration | None) -> Failure | None:
        """``old`` makes room for ``new``."""
        config = self._config
        limit = config.max_registered_blocks_per_engine
        if new.num_blocks > limit:
            reason = f"transfer {new.transfer_id!r} asks for {new.num_blocks} blocks"
            return Failure(FailureCode.bad_blocks, f"{reason}, more than max_registered_blocks_per_engine={limit}")
        makes_room = 0 if old is None or old.is_over else old.num_blocks
        of_engine = new.link.num_blocks - makes_room
        if of_engine + new.num_blocks > limit:
            reason = f"{of_engine} blocks of {new.engine_id!r} are registered, {new.num_blocks} more are above"
            return Failure(FailureCode.queue_full, f"{reason} max_registered_blocks_per_engine={limit}")
        limit, of_all = config.max_registered_blocks, self._num_blocks - makes_room
        if of_all + new.num_blocks > limit:
            reason = f"{of_all} blocks are registered, {new.num_blocks} more are above max_registered_blocks={limit}"
            return Failure(FailureCode.queue_full, reason)
        return None


def _refusal_after(old: Registration, new: Registration, leg: Leg | None) -> Failure | None:
    """Another registration of a rank that has one: the newest wins until the first byte."""
    what = f"transfer {new.transfer_id!r}"
    if old.incarnation == new.incarnation and new.epoch < old.epoch:
        return Failure(FailureCode.superseded, f"{what}: epoch {old.epoch} is registered already")
    if leg is not None and leg.is_begun:
        return Failure(FailureCode.already_served, f"{what} is being written to epoch {old.epoch}")
    return None


def _refusal_by_push(new: Registration, push: Push) -> Failure | None:
    """A further rank of the decode engine asks for a transfer that goes to others of its ranks already."""
    if push.cause is not None:
        return Failure(push.cause.code_for_decode, push.cause.reason)
    if push.readers and push.readers != new.link.readers:
        reason = (
            f"transfer {new.transfer_id!r}: the ranks of decode engine {new.engine_id!r} do not agree about how many "
            f"they are: (pp, tp) {sorted(push.readers)[:8]} says one, {sorted(new.link.readers)[:8]} another"
        )
        return Failure(FailureCode.incompatible, reason)
    return None


def _timer_of(registration: Registration) -> RegistrationEnd:
    return RegistrationEnd(registration.transfer_id, registration.rank, registration.epoch)


def _failure_of(tombstone: Tombstone) -> Failure:
    return Failure(as_decode_sees_it(tombstone.code), tombstone.reason)
