"""The pure core of the decode side: events and the time in, effects out. No clock, thread, socket or NIXL in here.

It dials prefill engines, registers receives with them, counts the positions that have arrived, and gives every receive
its one outcome. :mod:`kvpush.receiver` is the loop around it; ``kvpush.testing`` drives the same code under a fake
clock.

Caller's duties: as in :mod:`kvpush.prefill`. Every :class:`Dial` is answered by ``link_opened`` or ``link_closed``, and
a link that was opened by one ``link_closed``, unless this side hung it up.

A receive has a *leg* for each rank of the prefill engine that has something to write for this rank of decode: one,
unless the two engines are spread over their ranks differently. Which ranks these are follows from heads and sizes; what
each of them has of the layers it says in ``Welcome``. The receive is done when every leg is; when one leg fails, it
fails, and prefill is told on the others. Ranks that write nothing here, but would otherwise never hear how their push
ends, are told too.

What makes blocks reusable. A WRITE that was posted cannot be revoked, so after a failure, a cancel or the deadline the
blocks are *held* until one of these proves that no write can touch them: prefill says ``Drained`` or
``Failed(settled)``, every position has arrived, or prefill's process is gone (its port refuses, another incarnation
answers there, or it said goodbye, which it does only after its agent is destroyed). A receive that was never registered
holds nothing. A hold that outlives ``hold_timeout_s`` ends by ``hold_policy``.

A link that closes says nothing about the process behind it: decode dials again, and what answers decides.
"""

from __future__ import annotations

from collections import Counter

from kvpush import metadata, wire
from kvpush.config import Config, HoldPolicy
from kvpush.decode_effects import Dial, Effect, Emit, HangUp, Send
from kvpush.errors import Failure, FailureCode, Incompatible, QueueFull, RemoteProtocolError
from kvpush.events import BlocksReleased, Outcome, ReceiveFinished, StaleReason
from kvpush.identity import Identity
from kvpush.layout import CacheGeometry
from kvpush.lifecycle import RECEIVE, ReceiveTrigger
from kvpush.needs import Needs
from kvpush.parallel import Share
from kvpush.receives import (
    Address,
    Beat,
    Deadline,
    Due,
    HoldEnd,
    Leg,
    LinkId,
    Notice,
    Place,
    PrefillRank,
    Receive,
    Source,
)
from kvpush.registry import (
    Evicted,
    HandshakeTimedOut,
    Need,
    Registry,
    RegistryEffect,
    RetryDue,
    WentStale,
)
from kvpush.timers import Timers

MAX_NOTICES = 1024  # kept for one engine that is not connected yet

# An engine that was superseded or dropped is not asked again what became of it.
_FORSAKEN = {
    StaleReason.superseded: FailureCode.superseded,
    StaleReason.dropped: FailureCode.engine_dropped,
}


class DecodeCore:
    """All decisions of a :class:`kvpush.DecodeReceiver`."""

    def __init__(
        self, identity: Identity, agent_metadata: bytes, geometry: CacheGeometry, config: Config, registry: Registry
    ) -> None:
        """``agent_metadata``: NIXL's blob for this side's memory. ``geometry``: what that memory holds."""
        self.counters: Counter[str] = Counter()
        self._identity = identity
        self._agent_metadata = agent_metadata
        self._geometry = geometry
        self._needs = Needs(identity, geometry)
        self._config = config
        self._registry = registry
        self._out: list[Effect] = []
        self._prefills: dict[int, PrefillRank] = {}  # by generation
        self._links: dict[LinkId, PrefillRank] = {}
        self._receives: dict[int, Receive] = {}  # by epoch: open or holding
        self._open: dict[str, Receive] = {}  # by transfer id: open
        self._under_way: set[Leg] = set()  # those that a WRITE is under way to
        self._num_pinned = 0  # legs
        self._last_epoch = 0
        self._last_link = 0
        self._timers: Timers[Due] = Timers()

    # --- from the caller ---------------------------------------------------------------------------------------------

    def expect(
        self,
        transfer_id: str,
        places: tuple[Place, ...],
        *,
        num_blocks: int,
        source: Source,
        deadline_s: float,
        now_s: float,
    ) -> list[Effect]:
        """Fill these places with the KV of a transfer, from this engine.

        ``num_blocks``: how many these are, as the caller counts them; 0 is done at once.
        ``deadline_s`` counts from now. The blocks belong to kvpush until it says that they are reusable.
        """
        self.counters["receives"] += 1
        self._last_epoch += 1
        receive = Receive(
            transfer_id,
            self._last_epoch,
            source.engine_id,
            places,
            num_blocks,
            opened_s=now_s,
            deadline_s=now_s + deadline_s,
        )
        self._receives[receive.epoch] = receive
        self._open[transfer_id] = receive
        try:
            prefills = self._prefills_of(source, now_s)
        except (QueueFull, Failure) as exc:
            failure = exc if isinstance(exc, Failure) else Failure(FailureCode.queue_full, str(exc))
            self._end(receive, Outcome.failed, failure.code, failure.reason, now_s)
            return self._effects()
        for prefill in prefills:
            if receive.num_blocks and self._needs.is_written_by(prefill.share):
                rank = prefill.share.rank
                wanted = source.incarnations.get(rank, "")
                leg = receive.legs[rank] = Leg(receive, rank, prefill.generation, wanted)
                self._house(prefill, leg)
            else:
                self._notice(prefill, self._registration(receive, (), now_s))
        if receive.num_blocks:
            self._timers.set(Deadline(receive.epoch), receive.deadline_s)
        else:
            self._complete(receive, now_s)
        for prefill in prefills:
            self._use(prefill, now_s)
        return self._effects()

    def _prefills_of(self, source: Source, now_s: float) -> list[PrefillRank]:
        """The records of all ranks to talk to. Raises QueueFull, and Incompatible where the sizes do not fit."""
        ranks = self._needs.writers(source)
        if missing := sorted(ranks - source.addresses.keys()):
            raise Incompatible(
                f"prefill engine {source.engine_id!r}: its source names no address for rank (pp, tp) {missing[0]}, "
                f"which writes to rank {self._identity.rank} here"
            )
        return [
            self._prefill_at(source.engine_id, source.share(rank), source.addresses[rank], now_s)
            for rank in sorted(ranks)
        ]

    def cancel(self, transfer_id: str, now_s: float) -> list[Effect]:
        """The caller gives up. Known or not, in any state, twice: never an error."""
        receive = self._open.get(transfer_id)
        if receive is not None:
            reason = f"cancelled by decode engine {self._identity.engine_id!r}"
            self._end(receive, Outcome.cancelled, FailureCode.cancelled_by_caller, reason, now_s)
        return self._effects()

    def renew(self, transfer_ids: list[str], *, source: Source, now_s: float) -> list[Effect]:
        """Requests for these transfers still queue here: ask prefill to keep their blocks for one more lease."""
        try:
            prefills = self._prefills_of(source, now_s)
        except (QueueFull, Failure):  # nobody waits for an answer, and the leases may outlast the queue
            self.counters["renewals_dropped"] += len(transfer_ids)
            return self._effects()
        for prefill in prefills:
            prefill.renewals |= dict.fromkeys(transfer_ids)
            excess = len(prefill.renewals) - self._config.max_pending_pushes
            for transfer_id in list(prefill.renewals)[: max(0, excess)]:
                del prefill.renewals[transfer_id]
                self.counters["renewals_dropped"] += 1
            self._use(prefill, now_s)
        return self._effects()

    def drop_engine(self, engine_id: str, now_s: float) -> list[Effect]:
        """The router knows that this prefill engine is gone. Its receives fail; their blocks are held until proven."""
        reason = f"engine {engine_id!r} was dropped"
        for prefill in [each for each in self._prefills.values() if each.engine_id == engine_id]:
            self._absorb(self._registry.retire(prefill.generation, StaleReason.dropped, reason), now_s)
        return self._effects()

    def close(self, now_s: float) -> list[Effect]:
        """Cancel everything. What prefill acknowledges in time is released; the rest is reported as held."""
        for receive in list(self._open.values()):
            self._end(
                receive,
                Outcome.failed,
                FailureCode.closing,
                f"decode engine {self._identity.engine_id!r} shuts down",
                now_s,
            )
        return self._effects()

    def transport_closed(self, now_s: float) -> list[Effect]:
        """The agent is destroyed. Say goodbye and hang up; what is still held stays unproven."""
        reason = f"decode engine {self._identity.engine_id!r} shuts down"
        for prefill in self._prefills.values():
            self._tell(prefill, wire.Goodbye(reason))
            self._hang_up(prefill)
            # what comes of it is nobody's business any more: no receive dials again, and no engine is left in a state
            self._registry.retire(prefill.generation, StaleReason.closing, reason)
        return self._effects()

    # --- from the links ----------------------------------------------------------------------------------------------

    def link_opened(self, link: LinkId, now_s: float) -> list[Effect]:
        """The connection stands: introduce ourselves."""
        prefill = self._links.get(link)
        if prefill is not None:
            ours = self._identity
            hello = wire.Hello(
                ours.engine_id,
                ours.incarnation,
                ours.share,
                prefill.engine_id,
                prefill.share,
                ours.fingerprint,
                ours.block_sizes_tokens,
                ours.agent_name,
                dial=link,
            )
            self._out.append(Send(link, hello))
        return self._effects()

    def link_closed(self, link: LinkId, reason: str, now_s: float, *, refused: bool) -> list[Effect]:
        """The connection is gone, or never came up. ``refused``: nobody listens at the address."""
        prefill = self._links.get(link)
        if prefill is not None:
            was_up = prefill.is_up
            self._unlink(prefill, link)
            detail = f"prefill engine {prefill.engine_id!r} at {_shown(prefill.address)}: {reason}"
            if was_up:
                self._lost(prefill, detail, now_s)
            else:
                if refused:
                    self._process_is_gone(prefill, FailureCode.peer_lost, detail, now_s)
                self._dial_failed(prefill, Failure(FailureCode.peer_lost, detail), now_s)
        return self._effects()

    def message(self, link: LinkId, message: wire.ToDecode, now_s: float) -> list[Effect]:
        """A decoded message. It concerns only receives of the engine that sent it."""
        prefill = self._links.get(link)
        if prefill is None:
            self.counters["messages_late"] += 1
            return self._effects()
        self._registry.heard(prefill.generation, activity=not isinstance(message, wire.Heartbeat))
        match message:
            case wire.Welcome():
                self._welcomed(prefill, message, now_s)
            case wire.Refused():
                self._refused(prefill, message, now_s)
            case wire.MetadataRequest():
                self._send_metadata(link, message.attempt)
            case wire.Writing():
                self._writing(prefill, message)
            case wire.Failed():
                self._failed(prefill, message, now_s)
            case wire.Drained():
                self._drained(prefill, message, now_s)
            case wire.Heartbeat():
                pass
            case wire.Goodbye():
                self._goodbye(prefill, message, now_s)
        return self._effects()

    def malformed(self, link: LinkId, failure: Failure, now_s: float) -> list[Effect]:
        """A message that could not be decoded. It is counted; the link goes on."""
        self.counters["messages_malformed"] += 1
        return self._effects()

    def _welcomed(self, prefill: PrefillRank, message: wire.Welcome, now_s: float) -> None:
        if prefill.is_up:
            self.counters["messages_unexpected"] += 1
            return
        if message.engine_id != prefill.engine_id:
            reason = (
                f"expected prefill engine {prefill.engine_id!r} at {_shown(prefill.address)}, "
                f"but {message.engine_id!r} answers there"
            )
            self._dial_failed(prefill, Failure(FailureCode.wrong_engine, reason), now_s)
            return
        if message.share != prefill.share:
            reason = (
                f"prefill engine {prefill.engine_id!r} at {_shown(prefill.address)} is another rank: {message.share}"
            )
            self._dial_failed(prefill, Incompatible(reason), now_s)
            return
        self._registry.name_incarnation(prefill.generation, message.incarnation)
        if not self._registry.handshake_succeeded(prefill.generation, prefill.attempt, prefill):
            return  # timed out a moment ago; the retry is under way
        self.counters["handshakes_succeeded"] += 1
        prefill.is_up = True
        prefill.incarnation = message.incarnation
        prefill.agent_name = message.agent_name
        prefill.holdings = message.holdings
        assert prefill.link is not None, "a message came over it"
        self._timers.set(Beat(prefill.link), now_s + self._config.heartbeat_interval_s)
        address = _shown(prefill.address)
        self._absorb(self._registry.retire_address(address, prefill.engine_id, prefill.share.rank), now_s)
        self._bury_other_incarnations(prefill, now_s)
        self._use(prefill, now_s)

    def _bury_other_incarnations(self, prefill: PrefillRank, now_s: float) -> None:
        """Another process answers: what an earlier one was to write will never come."""
        reason = f"prefill engine {prefill.engine_id!r} restarted"
        for leg in list(prefill.legs.values()):
            if leg.registered_with not in (None, prefill.incarnation):
                self._settle_gone(leg, FailureCode.peer_restarted, reason, now_s)

    def _refused(self, prefill: PrefillRank, message: wire.Refused, now_s: float) -> None:
        self.counters[f"refusals_{message.code}"] += 1
        if prefill.is_up:
            return  # one of our messages was not understood; its receive ends by its deadline
        failure = Failure(message.code, f"refused by {_shown(prefill.address)}: {message.reason}")
        self._dial_failed(prefill, failure, now_s)

    def _send_metadata(self, link: LinkId, attempt: int) -> None:
        ours = self._identity
        self._out.append(
            Send(
                link,
                metadata.build(attempt, ours.incarnation, ours.agent_name, self._agent_metadata, self._geometry),
            )
        )

    def _goodbye(self, prefill: PrefillRank, message: wire.Goodbye, now_s: float) -> None:
        """Prefill's agent is destroyed, or it does not know this link any more (then its port still answers)."""
        if not prefill.is_up:
            reason = f"prefill engine {prefill.engine_id!r}: {message.reason}"
            self._dial_failed(prefill, Failure(FailureCode.closing, reason), now_s)
            return
        detail = f"prefill engine {prefill.engine_id!r} said goodbye: {message.reason}"
        self._hang_up(prefill)
        self._absorb(self._registry.retire(prefill.generation, StaleReason.closing, detail), now_s)

    # --- receives ----------------------------------------------------------------------------------------------------

    def notified(self, agent_name: str, payload: bytes, now_s: float) -> list[Effect]:
        """A WRITE's notification: its bytes are visible. Believed only from the agent that was asked to write."""
        try:
            written = wire.decode_written(payload)
        except RemoteProtocolError:
            self.counters["notifications_malformed"] += 1
            return self._effects()
        receive = self._receives.get(written.epoch)
        if receive is None:
            self.counters["notifications_late"] += 1
            return self._effects()
        leg = receive.legs.get(written.rank)
        if leg is None or leg.writer_agent != agent_name:
            self.counters["notifications_foreign"] += 1
        else:
            self._arrived(leg, written, now_s)
        return self._effects()

    def _arrived(self, leg: Leg, written: wire.Written, now_s: float) -> None:
        for span in written.spans:
            arrivals = leg.arrivals.get(span.group)
            if arrivals is None or not arrivals.mark(
                span.first_layer, span.num_layers, span.first_slot, span.num_slots
            ):
                self.counters["notifications_malformed"] += 1
        self._count_under_way(leg, -1)
        receive = leg.receive
        if leg.num_missing == 0:
            self._leave(leg, now_s, is_confirmed=True)  # that it is settled is a sign of life, too
        elif leg.pinned is not None:
            self._registry.heard(leg.pinned, activity=True)
        if not receive.is_open:
            self._release_if_quiet(receive, "every position has been written", now_s)
        elif receive.is_complete:
            self._complete(receive, now_s)
        else:
            self._fire(receive, ReceiveTrigger.blocks_arrived)

    def _writing(self, prefill: PrefillRank, message: wire.Writing) -> None:
        leg = prefill.legs.get(message.epoch)
        if leg is not None:
            self._count_under_way(leg, 1)

    def _count_under_way(self, leg: Leg, num_writes: int) -> None:
        leg.num_under_way += num_writes
        if leg.num_under_way > 0:
            self._under_way.add(leg)
        else:
            self._under_way.discard(leg)

    def _failed(self, prefill: PrefillRank, message: wire.Failed, now_s: float) -> None:
        leg = prefill.legs.get(message.epoch)
        if leg is None or leg.registered_with is None:
            self.counters["messages_late"] += 1
            return
        if message.settled:
            self._prove(leg, now_s, is_confirmed=False)
        if leg.receive.is_open:
            outcome = Outcome.cancelled if message.code is FailureCode.cancelled_by_peer else Outcome.failed
            self._end(leg.receive, outcome, message.code, message.reason, now_s, told_by=leg)
        else:
            self._release_if_quiet(leg.receive, "prefill never wrote", now_s)

    def _drained(self, prefill: PrefillRank, message: wire.Drained, now_s: float) -> None:
        leg = prefill.legs.get(message.epoch)
        if leg is None or leg.receive.is_open:
            self.counters["messages_late"] += 1
        else:
            self._prove(leg, now_s, is_confirmed=True)
            self._release_if_quiet(leg.receive, "drained", now_s)

    def _register(self, prefill: PrefillRank, leg: Leg, now_s: float) -> None:
        """Send Register, and pin the engine until the leg is over."""
        assert prefill.link is not None, "the engine is up"
        receive = leg.receive
        if leg.wanted_incarnation not in ("", prefill.incarnation):
            reason = f"prefill engine {prefill.engine_id!r} restarted after it had computed the blocks"
            self._end(receive, Outcome.failed, FailureCode.peer_restarted, reason, now_s)
            return
        try:
            wants = self._needs.ask(prefill, leg)
        except Incompatible as exc:
            self._end(receive, Outcome.failed, exc.code, exc.reason, now_s)
            return
        leg.holdings = prefill.holdings
        defect = self._needs.coverage_defect(receive)
        if defect is not None:  # before this rank is asked: it would call its push done
            self._end(receive, Outcome.failed, FailureCode.incompatible, defect, now_s)
            return
        if self._registry.pin(prefill.generation) is None:
            return
        self._pinned(leg, prefill)
        leg.registered_with = prefill.incarnation
        leg.writer_agent = prefill.agent_name
        self._out.append(Send(prefill.link, self._registration(receive, wants, now_s)))
        if leg.num_missing == 0:  # it has none of our layers, or of the groups that this transfer has blocks in
            self._leave(leg, now_s, is_confirmed=False)
        if receive.is_complete:
            self._complete(receive, now_s)

    @staticmethod
    def _registration(receive: Receive, wants: tuple[wire.Want, ...], now_s: float) -> wire.Register:
        remaining_ms = min(max(0, round((receive.deadline_s - now_s) * 1000)), wire.MAX_REMAINING_MS)
        return wire.Register(receive.transfer_id, receive.epoch, wants, remaining_ms)

    def _send_cancel(self, prefill: PrefillRank, receive: Receive, code: FailureCode, reason: str) -> None:
        self._tell(prefill, wire.Cancel(receive.transfer_id, receive.epoch, code, wire.clip_reason(reason)))

    # --- ends --------------------------------------------------------------------------------------------------------

    def _complete(self, receive: Receive, now_s: float) -> None:
        self._fire(receive, ReceiveTrigger.completed)
        self._report(receive, Outcome.done, None, "", now_s, blocks_reusable=True)
        self._forget(receive, now_s)

    def _end(
        self,
        receive: Receive,
        outcome: Outcome,
        code: FailureCode,
        reason: str,
        now_s: float,
        *,
        told_by: Leg | None = None,
    ) -> None:
        """The one outcome of a receive that did not complete. Every rank of prefill that may still write is asked to
        stop, but ``told_by``, which knows; one that was never asked to write hears that nobody will."""
        for leg in receive.legs.values():
            prefill = self._prefills.get(leg.home)
            if prefill is None or leg is told_by:
                continue
            if leg.registered_with is None:
                withdraw = wire.Withdraw(receive.transfer_id, receive.epoch, code, wire.clip_reason(reason))
                self._notice(prefill, withdraw)
            elif not leg.is_quiet:
                self._send_cancel(prefill, receive, code, reason)
        is_quiet = receive.is_quiet
        self._fire(receive, ReceiveTrigger.ended_quiet if is_quiet else ReceiveTrigger.ended_unquiet)
        self._report(receive, outcome, code, reason, now_s, blocks_reusable=is_quiet)
        if is_quiet:
            self._forget(receive, now_s)
        else:
            self._timers.cancel(Deadline(receive.epoch))
            self._timers.set(HoldEnd(receive.epoch), now_s + self._config.hold_timeout_s)
            self._open.pop(receive.transfer_id, None)

    def _settle_gone(self, leg: Leg, code: FailureCode, reason: str, now_s: float) -> None:
        """The process that was to write is gone: that settles the leg, whatever state its receive is in."""
        if leg.is_quiet:
            return
        self._prove(leg, now_s, is_confirmed=False)
        if leg.receive.is_open:
            self._end(leg.receive, Outcome.failed, code, reason, now_s)
        else:
            self._release_if_quiet(leg.receive, reason, now_s)

    def _prove(self, leg: Leg, now_s: float, *, is_confirmed: bool) -> None:
        """No WRITE of this leg can come any more. ``is_confirmed``: prefill, alive, said so."""
        leg.is_proven = True
        self._unpin(leg, now_s, is_confirmed=is_confirmed)

    def _leave(self, leg: Leg, now_s: float, *, is_confirmed: bool) -> None:
        """What becomes of its writer does not matter to this leg any more: all of it has arrived, or it is over."""
        prefill = self._prefills.get(leg.home)
        if prefill is not None:
            prefill.legs.pop(leg.receive.epoch, None)
            prefill.unsent.pop(leg.receive.epoch, None)
        self._unpin(leg, now_s, is_confirmed=is_confirmed)

    def _release_if_quiet(self, receive: Receive, reason: str, now_s: float) -> None:
        if receive.is_quiet:
            self._release(receive, ReceiveTrigger.proven_quiet, reason, now_s, proven=True)

    def _release(self, receive: Receive, trigger: ReceiveTrigger, reason: str, now_s: float, *, proven: bool) -> None:
        self._fire(receive, trigger)
        self._out.append(Emit(BlocksReleased(receive.transfer_id, proven, reason)))
        self._forget(receive, now_s)

    def _report(
        self,
        receive: Receive,
        outcome: Outcome,
        code: FailureCode | None,
        reason: str,
        now_s: float,
        *,
        blocks_reusable: bool,
    ) -> None:
        self.counters[f"receives_{outcome}"] += 1
        self._out.append(
            Emit(
                ReceiveFinished(
                    transfer_id=receive.transfer_id,
                    outcome=outcome,
                    engine_id=receive.engine_id,
                    code=code,
                    reason=reason,
                    blocks_reusable=blocks_reusable,
                    num_blocks=receive.num_blocks,
                    duration_s=now_s - receive.opened_s,
                )
            )
        )

    def _forget(self, receive: Receive, now_s: float) -> None:
        del self._receives[receive.epoch]
        if self._open.get(receive.transfer_id) is receive:
            del self._open[receive.transfer_id]
        self._timers.cancel(Deadline(receive.epoch))
        self._timers.cancel(HoldEnd(receive.epoch))
        for leg in receive.legs.values():
            self._leave(leg, now_s, is_confirmed=False)

    def _pinned(self, leg: Leg, prefill: PrefillRank) -> None:
        assert leg.pinned is None, "a leg has one pin, and _unpin() gives it back"
        leg.pinned = prefill.generation
        self._num_pinned += 1

    def _unpin(self, leg: Leg, now_s: float, *, is_confirmed: bool) -> None:
        self._count_under_way(leg, -leg.num_under_way)
        if leg.pinned is not None:
            generation, leg.pinned = leg.pinned, None
            self._num_pinned -= 1
            self._absorb(self._registry.settle(generation, ok=is_confirmed), now_s)

    # --- prefill engines ---------------------------------------------------------------------------------------------

    def _prefill_at(self, engine_id: str, share: Share, address: Address, now_s: float) -> PrefillRank:
        """The record to use for this rank at this address; a new generation when the last is over."""
        generation, effects = self._registry.admit_address(engine_id, _shown(address), share.rank)
        prefill = self._prefills.get(generation)
        if prefill is None:
            prefill = self._prefills[generation] = PrefillRank(engine_id, share, address, generation)
        self._absorb(effects, now_s)
        if prefill.share != share:
            self._change_share(prefill, share, now_s)
        return prefill

    def _change_share(self, prefill: PrefillRank, share: Share, now_s: float) -> None:
        """The caller names other sizes of the engine than before. What prefill has confirmed stands, and so does what
        other receives wait for; but a mistake that nobody waits for must not keep the engine from being used."""
        if prefill.is_up or prefill.legs or prefill.notices:
            raise Incompatible(
                f"prefill engine {prefill.engine_id!r} at {_shown(prefill.address)} is known here as {prefill.share}, "
                f"not as {share}: its source must name an address for each rank"
            )
        if prefill.link is not None:
            failure = Failure(FailureCode.incompatible, f"dialled as {prefill.share}, wanted as {share}")
            self._dial_failed(prefill, failure, now_s)
        prefill.share = share

    @staticmethod
    def _house(prefill: PrefillRank, leg: Leg) -> None:
        leg.home = prefill.generation
        prefill.legs[leg.receive.epoch] = prefill.unsent[leg.receive.epoch] = leg

    def _use(self, prefill: PrefillRank, now_s: float) -> None:
        """Something is to be sent: send it, dial first, or wait for the dial that is under way."""
        need = self._registry.need(prefill.generation)
        if need is Need.write:
            self._flush(prefill, now_s)
        elif need is Need.handshake:
            attempt = self._registry.begin_handshake(prefill.generation)
            assert attempt is not None, "need() said so, and nobody else begins handshakes"
            self._last_link += 1
            prefill.attempt = attempt
            prefill.link = self._last_link
            self._links[prefill.link] = prefill
            self.counters["handshakes_started"] += 1
            self._out.append(Dial(prefill.link, prefill.address))

    def _flush(self, prefill: PrefillRank, now_s: float) -> None:
        assert prefill.link is not None, "a connected engine has its link"
        unsent, prefill.unsent = prefill.unsent, {}
        for leg in unsent.values():
            if leg.receive.is_open:
                self._register(prefill, leg, now_s)
            elif self._registry.pin(prefill.generation) is not None:  # its Cancel may have been lost with the old link
                self._pinned(leg, prefill)
                self._send_cancel(prefill, leg.receive, FailureCode.cancelled_by_peer, "asked again on a new link")
        for notice in prefill.notices:
            self._out.append(Send(prefill.link, notice))
        prefill.notices.clear()
        renewals, prefill.renewals = list(prefill.renewals), {}
        for start in range(0, len(renewals), wire.MAX_RENEWALS):
            self._out.append(Send(prefill.link, wire.Renew(renewals[start : start + wire.MAX_RENEWALS])))

    def _notice(self, prefill: PrefillRank, message: Notice) -> None:
        """Have prefill told as soon as its link is up, unless that takes more than ``handshake_attempts``."""
        if len(prefill.notices) < MAX_NOTICES:
            prefill.notices.append(message)
        else:
            self.counters["notices_dropped"] += 1

    def _dial_failed(self, prefill: PrefillRank, failure: Failure, now_s: float) -> None:
        """The handshake failed: every receive that waits for it learns so. Those registered before the link broke go on
        waiting for their proof or their deadline, unless another process has taken this one's place."""
        self._hang_up(prefill)
        if failure.code is FailureCode.wrong_engine:
            self._process_is_gone(prefill, FailureCode.peer_restarted, failure.reason, now_s)
        if not self._registry.handshake_failed(prefill.generation, prefill.attempt, failure.reason):
            return
        self.counters[f"handshakes_failed_{failure.code}"] += 1
        prefill.failed_dials += 1
        for leg in list(prefill.legs.values()):
            leg.failed_attempts += 1
            is_final = not failure.is_retryable or leg.failed_attempts >= self._config.handshake_attempts
            has_waited = is_final and leg.registered_with is None
            if leg.receive.is_open and (has_waited or failure.code is FailureCode.superseded):
                self._end(leg.receive, Outcome.failed, failure.code, failure.reason, now_s)
        if not failure.is_retryable or prefill.failed_dials >= self._config.handshake_attempts:
            prefill.notices.clear()
            prefill.renewals.clear()
        if prefill.legs or prefill.notices:
            self._use(prefill, now_s)  # asks for RetryDue when the backoff is over

    def _process_is_gone(self, prefill: PrefillRank, code: FailureCode, reason: str, now_s: float) -> None:
        """Nobody, or somebody else, listens at the address now: what was registered there will never be written."""
        prefill.notices.clear()
        for leg in list(prefill.legs.values()):
            self._settle_gone(leg, code, reason, now_s)

    def _lost(self, prefill: PrefillRank, detail: str, now_s: float) -> None:
        self._absorb(self._registry.lost(prefill.generation, detail, link_is_up=False), now_s)

    def _hang_up(self, prefill: PrefillRank) -> None:
        if prefill.link is not None:
            self._out.append(HangUp(prefill.link))
            self._unlink(prefill, prefill.link)

    def _unlink(self, prefill: PrefillRank, link: LinkId) -> None:
        """Whoever ended it."""
        del self._links[link]
        self._timers.cancel(Beat(link))
        prefill.link, prefill.is_up = None, False

    def _tell(self, prefill: PrefillRank, message: wire.ToPrefill) -> None:
        """Over its link, if that is up."""
        if prefill.is_up:
            assert prefill.link is not None, "Welcome came over it"
            self._out.append(Send(prefill.link, message))

    # --- what the registry decided -----------------------------------------------------------------------------------

    def _absorb(self, effects: list[RegistryEffect], now_s: float) -> None:
        for effect in effects:
            prefill = self._prefills[effect.generation]
            match effect:
                case HandshakeTimedOut():
                    reason = (
                        f"prefill engine {prefill.engine_id!r} at {_shown(prefill.address)}: "
                        f"no Welcome within {self._config.handshake_timeout_s:g} s"
                    )
                    self._dial_failed(prefill, Failure(FailureCode.handshake_timeout, reason), now_s)
                case RetryDue():
                    if prefill.legs or prefill.notices or prefill.renewals:
                        self._use(prefill, now_s)
                case WentStale():
                    self._went_stale(prefill, effect, now_s)
                case Evicted():
                    self._evicted(prefill, effect.reason, now_s)

    def _evicted(self, prefill: PrefillRank, reason: StaleReason | None, now_s: float) -> None:
        self.counters["engines_evicted"] += 1
        self._tell(prefill, wire.Goodbye("nothing to do"))
        self._hang_up(prefill)
        del self._prefills[prefill.generation]
        if reason not in _FORSAKEN:
            self._carry_over(prefill, now_s)

    def _went_stale(self, prefill: PrefillRank, effect: WentStale, now_s: float) -> None:
        """Decide on the receives of a generation that serves no new one.

        Forsaken (superseded, dropped): open receives end, and the link stays for as long as one of them waits for
        ``Drained``. Lost or closing: the next generation finds out what became of prefill.
        """
        self.counters[f"engines_stale_{effect.reason}"] += 1
        if effect.reason in _FORSAKEN:
            code = _FORSAKEN[effect.reason]
            for leg in list(prefill.legs.values()):
                if leg.receive.is_open:
                    self._end(leg.receive, Outcome.failed, code, effect.detail, now_s)
        elif effect.reason is not StaleReason.idle:
            self._hang_up(prefill)
            self._carry_over(prefill, now_s)

    def _carry_over(self, old: PrefillRank, now_s: float) -> None:
        """Move the legs of ``old`` that are not over to the engine's next generation, which dials again."""
        legs = list(old.legs.values())
        old.legs.clear()
        old.unsent.clear()
        for leg in legs:
            self._unpin(leg, now_s, is_confirmed=False)
        legs = [leg for leg in legs if not (leg.registered_with is not None and leg.is_quiet)]
        if not legs:
            return
        new = self._prefill_at(old.engine_id, old.share, old.address, now_s)  # ``old`` has just left its place
        for leg in legs:
            leg.failed_attempts = 0
            self._house(new, leg)
        self._use(new, now_s)

    # --- time --------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Effect]:
        """Whatever is due: deadlines, holds, heartbeats, and the registry's sweep."""
        for key in self._timers.pop_due(now_s):
            self._timer_fired(key, now_s)
        self._absorb(self._registry.sweep(), now_s)
        return self._effects()

    def next_due_s(self) -> float | None:
        """When :meth:`tick` is due next; ``None`` when only an event can change anything."""
        times = [due_s for due_s in (self._timers.next_due_s(), self._registry.next_due_s()) if due_s is not None]
        return min(times, default=None)

    def _timer_fired(self, key: Due, now_s: float) -> None:
        match key:
            case Deadline(epoch):
                receive = self._receives[epoch]
                waited_s = now_s - receive.opened_s
                reason = (
                    f"transfer {receive.transfer_id!r}: {receive.progress} came from prefill engine "
                    f"{receive.engine_id!r} within {waited_s:.3g} s"
                )
                self._end(receive, Outcome.expired, FailureCode.deadline, reason, now_s)
            case HoldEnd(epoch):
                self._hold_timed_out(self._receives[epoch], now_s)
            case Beat(link):
                self._out.append(Send(link, wire.Heartbeat()))
                self._timers.set(key, now_s + self._config.heartbeat_interval_s)

    def _hold_timed_out(self, receive: Receive, now_s: float) -> None:
        self.counters["holds_timed_out"] += 1
        if self._config.hold_policy is HoldPolicy.release:
            reason = f"hold_timeout_s={self._config.hold_timeout_s:g} passed: a late WRITE may still land"
            self._release(receive, ReceiveTrigger.hold_expired, reason, now_s, proven=False)

    # --- small things ------------------------------------------------------------------------------------------------

    @property
    def num_receives(self) -> int:
        """Receives without an outcome, and those whose blocks are held."""
        return len(self._receives)

    @property
    def is_write_under_way(self) -> bool:
        """Whether prefill says that it is writing to this side right now."""
        return bool(self._under_way)

    def address_of(self, link: LinkId) -> Address | None:
        """Whom this link was dialled to; ``None`` when it is over."""
        prefill = self._links.get(link)
        return None if prefill is None else prefill.address

    @property
    def is_written_to(self) -> bool:
        """Whether prefill may be writing into this memory at this moment."""
        return self._num_pinned > 0

    def gauges(self) -> dict[str, int]:
        """Sizes of everything that is bounded."""
        return {
            "links": len(self._links),
            "receives_open": len(self._open),
            "receives_held": len(self._receives) - len(self._open),
            "engines": len(self._prefills),
            "timers": len(self._timers),
        }

    def _fire(self, receive: Receive, trigger: ReceiveTrigger) -> None:
        RECEIVE.fire(receive, trigger)

    def _effects(self) -> list[Effect]:
        out, self._out = self._out, []
        return out


def _shown(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
