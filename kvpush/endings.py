"""How a push ends: its one outcome, what decode is told, and when the blocks are the caller's again. Pure.

A cause (failed, cancelled, expired) is kept from the first moment that it is known and never replaced. While a WRITE is
in flight the outcome waits for its end (``draining``). One that does not end in time makes the push ``in_doubt``: the
outcome is reported with its blocks held, and :class:`BlocksReleased` follows when the WRITE ends after all, or when the
hold runs out.

Decode is told ``Failed`` at once. ``settled`` in it, or ``Drained`` later, says that nothing of its registration can
land any more; neither is ever said while a WRITE may.
"""

from __future__ import annotations

from collections import Counter

from kvpush import wire
from kvpush.config import Config
from kvpush.errors import FailureCode
from kvpush.events import BlocksReleased, Outcome
from kvpush.lifecycle import PUSH, PushTrigger
from kvpush.lines import Lines
from kvpush.prefill_effects import Emit, Outbox
from kvpush.pushes import DONE, Cause, Due, HoldEnd, LeaseEnd, Push, Registration, tombstone_of
from kvpush.registrations import Registrations
from kvpush.registry import Registry
from kvpush.timers import Timers
from kvpush.tombstones import Tombstones

_TRIGGER_OF = {
    Outcome.done: PushTrigger.completed,
    Outcome.failed: PushTrigger.failure_settled,
    Outcome.cancelled: PushTrigger.cancel_settled,
    Outcome.expired: PushTrigger.expiry_settled,
}


class Endings:
    """The pushes of one pusher that are not over, and how they come to be."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        tombstones: Tombstones,
        registrations: Registrations,
        timers: Timers[Due],
        lines: Lines,
        outbox: Outbox,
        counters: Counter[str],
    ) -> None:
        self.open: dict[str, Push] = {}  # without an outcome
        self.held: dict[Push, None] = {}  # in doubt: outcome reported, blocks held; the id may be in use again
        self._config = config
        self._registry = registry
        self._tombstones = tombstones
        self._registrations = registrations
        self._timers = timers
        self._lines = lines
        self._outbox = outbox
        self._counters = counters
        self._refused: tuple[str, str, float] | None = None  # engine id, reason, when: the last one

    def expire(self, push: Push, now_s: float) -> None:
        """Its lease has ended while it waited."""
        if push.is_served:
            # decode has everything that it asked for; the caller, it seems, forgot the last chunk
            self.conclude(push, DONE, now_s)
            return
        reason = (
            f"transfer {push.transfer_id!r}: the lease of {self._config.lease_s:g} s ended and {self._obstacle(push)}"
        )
        self.give_up(push, Cause(Outcome.expired, FailureCode.lease_expired, reason), now_s)

    def _obstacle(self, push: Push) -> str:
        """What the push waited for, as far as this side can know."""
        if not push.legs:
            engine_id = self._registrations.last_owner(push.transfer_id)
            if engine_id is None:
                return "no decode engine has registered for it" + self._refused_since(push.opened_s)
            return f"its registration had ended with its decode engine: {self._registry.describe(engine_id)}"
        if not push.is_complete:
            missing = ", ".join(map(str, sorted(push.readers - push.legs.keys())[:8]))
            return f"ranks (pp, tp) {missing} of decode engine {push.engine_id!r} have not registered for it"
        waiting = [leg.registration for leg in push.legs.values() if not leg.is_served]
        states = "; ".join(self._registry.describe(each.engine_id, each.rank) for each in waiting[:4])
        return f"it could not be written: {states}"

    def note_refused(self, engine_id: str, reason: str, now_s: float) -> None:
        """A decode engine was not let in: what waits in vain may have waited for it."""
        self._refused = (engine_id, reason, now_s)

    def _refused_since(self, opened_s: float) -> str:
        if self._refused is None or self._refused[2] < opened_s:
            return ""
        engine_id, reason, _ = self._refused
        return f"; decode engine {engine_id!r} was refused meanwhile: {reason}"

    def give_up(self, push: Push, cause: Cause, now_s: float) -> None:
        """End a push for ``cause``, unless it is ending already: the first root cause stays."""
        if push.cause is None:
            self.begin_end(push, cause, now_s)
            if not push.is_in_flight:
                self.conclude(push, cause, now_s)

    def begin_end(self, push: Push, cause: Cause, now_s: float) -> None:
        """Keep the cause, post nothing more, and tell decode at once when a WRITE is still in flight."""
        push.cause = cause
        self._leave_lines(push)
        if push.is_in_flight:
            PUSH.fire(push, PushTrigger.given_up)
            self._tell(push, cause)

    def _leave_lines(self, push: Push) -> None:
        for leg in push.legs.values():
            leg.drop_pieces()
            self._lines.undefer(leg)

    def _tell(self, push: Push, cause: Cause) -> None:
        """Tell every rank of decode that still waits for something that it will not come."""
        for leg in push.legs.values():
            wanted = leg.registration
            if wanted.is_told or wanted.is_drain_owed or leg.is_served:
                continue
            is_settled = not leg.in_flight
            wanted.is_told = True
            wanted.is_drain_owed = not is_settled
            self._outbox.send_failed(wanted, cause.code_for_decode, cause.reason, settled=is_settled)

    def conclude(self, push: Push, cause: Cause, now_s: float) -> None:
        """The one outcome. Nothing is in flight, so the blocks are the caller's."""
        assert not push.is_in_flight, "an outcome with reusable blocks needs every WRITE to have ended"
        push.cause = cause
        self._leave_lines(push)
        PUSH.fire(push, _TRIGGER_OF[cause.outcome])
        self._report(push, cause, now_s, blocks_reusable=True)
        self._forget(push, cause, now_s)
        self._settle_account(push, cause)

    def doubt(self, push: Push, cause: Cause, now_s: float) -> None:
        """A WRITE neither ends nor proves itself ended: report the outcome, hold the blocks."""
        cause = push.cause = push.cause or cause
        self._leave_lines(push)
        self._counters["pushes_in_doubt"] += 1
        PUSH.fire(push, PushTrigger.stalled)
        self._tell(push, cause)
        self._report(push, cause, now_s, blocks_reusable=False)
        self._forget(push, cause, now_s)
        self.held[push] = None
        self._timers.set(HoldEnd(push), now_s + self._config.hold_timeout_s)

    def end_hold(self, push: Push, *, proven: bool, reason: str) -> None:
        """Give the blocks of a push in doubt back. ``proven``: no WRITE can touch them any more."""
        cause = push.cause
        assert cause is not None, "a push in doubt has its cause"
        PUSH.fire(push, _TRIGGER_OF[cause.outcome])
        self._timers.cancel(HoldEnd(push))
        del self.held[push]
        self._outbox.add(Emit(BlocksReleased(push.transfer_id, proven, reason)))
        if proven:
            self._settle_account(push, cause)

    def _report(self, push: Push, cause: Cause, now_s: float, *, blocks_reusable: bool) -> None:
        self._counters[f"pushes_{cause.outcome}"] += 1
        self._outbox.add(Emit(push.finished(cause, now_s, blocks_reusable=blocks_reusable)))

    def _forget(self, push: Push, cause: Cause, now_s: float) -> None:
        """Leave a tombstone: the id may be used again."""
        del self.open[push.transfer_id]
        self._timers.cancel(LeaseEnd(push.transfer_id))
        code = cause.code or FailureCode.already_served
        reason = cause.reason or f"transfer {push.transfer_id!r} was served already"
        for registration in push.registrations:
            self._registrations.end(registration)
        tombstone = tombstone_of(push.registrations, code, reason, is_push_awaited=False)
        self._tombstones.bury(push.transfer_id, tombstone, now_s)

    def _settle_account(self, push: Push, cause: Cause) -> None:
        """Nothing is in flight: give decode the news, or the proof that it waits for."""
        if cause.outcome is not Outcome.done:
            self._tell(push, cause)
        for registration in push.registrations:
            self.pay_drain(registration)

    def pay_drain(self, registration: Registration) -> None:
        """Nothing of this registration can land any more: tell decode, if it waits to hear that."""
        if registration.is_drain_owed:
            assert not registration.num_unproven, "Drained says that nothing can land"
            registration.is_drain_owed = False
            self._outbox.send(registration.link, wire.Drained(registration.transfer_id, registration.epoch))
