"""The pure core of the prefill side: events and the time in, effects out. No clock, thread, socket or NIXL in here.

It matches pushes with registrations, starts handshakes, defers and re-checks, posts, settles, and gives every push its
one outcome. :mod:`kvpush.pusher` is the loop around it; ``kvpush.testing`` drives the same code under a fake clock.

The parts that have a life of their own are next door: the records (:mod:`kvpush.pushes`), who may register for what
(:mod:`kvpush.registrations`), who may post next (:mod:`kvpush.lines`), WRITEs that may still land
(:mod:`kvpush.writes`), how a push ends (:mod:`kvpush.endings`), what is asked of the loop
(:mod:`kvpush.prefill_effects`).

Caller's duties: call every method on one thread with a monotonic ``now_s`` (the registry's clock); carry out all
returned effects, in order, before the next call; answer every :class:`PostWrite` with exactly one
:meth:`PrefillCore.write_settled` or :meth:`PrefillCore.write_doubted`, unless :class:`AbandonWrite` came first, and
every :class:`LoadPeer` with one ``peer_loaded`` or ``peer_failed``; call :meth:`PrefillCore.tick` no later than
:meth:`PrefillCore.next_due_s`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from kvpush import metadata, wire
from kvpush.config import Config, HoldPolicy
from kvpush.endings import Endings
from kvpush.errors import Failure, FailureCode, Incompatible, QueueFull, TransportError
from kvpush.events import Outcome, StaleReason
from kvpush.identity import Identity, mismatch, totals_told
from kvpush.layout import CacheGeometry, totals_of
from kvpush.lifecycle import PUSH, PushState, PushTrigger
from kvpush.lines import Lines
from kvpush.links import Links
from kvpush.namesakes import Namesakes
from kvpush.parallel import readers
from kvpush.prefill_effects import (
    AbandonWrite,
    Effect,
    LoadedPeer,
    LoadPeer,
    Outbox,
    PostWrite,
    ReleasePeer,
    Send,
    Warn,
)
from kvpush.pushes import (
    DONE,
    Cause,
    Chunk,
    Cut,
    Due,
    HeldGroup,
    HoldEnd,
    LeaseEnd,
    Leg,
    Link,
    LinkId,
    Part,
    Piece,
    Push,
    Registration,
    RegistrationEnd,
    Stall,
)
from kvpush.rarely import Rarely
from kvpush.registrations import Registrations
from kvpush.registry import (
    Evicted,
    HandshakeTimedOut,
    Need,
    Registry,
    RegistryEffect,
    RetryDue,
    WentStale,
)
from kvpush.terms import Wanted, all_terms
from kvpush.timers import Timers
from kvpush.tombstones import Tombstone, Tombstones
from kvpush.writes import Write, Writes

REGISTRATION_GRACE_S = 5.0  # after a registration's own deadline: decode's Cancel should have come by then


class PrefillCore:
    """All decisions of a :class:`kvpush.PrefillPusher`."""

    def __init__(self, identity: Identity, config: Config, registry: Registry, geometry: CacheGeometry) -> None:
        """``geometry``: what this rank holds."""
        self.counters: Counter[str] = Counter()
        self._is_closing = False
        self._identity = identity
        self._config = config
        self._registry = registry
        self._namesakes = Namesakes(config.max_tombstones)
        self._rarely = Rarely()
        self._links = Links()
        self._outbox = Outbox(self._links)
        self._timers: Timers[Due] = Timers()
        self._lines = Lines(config.max_deferred_per_engine)
        self._groups = held_groups(geometry)
        self._totals = totals_of(geometry)
        self._cut = Cut(self._groups, config.max_write_bytes)
        least_len_bytes = max(held.block_len_bytes * held.num_layers for held in self._groups)
        self._writes = Writes(config, least_len_bytes)
        self._tombstones = Tombstones(config.max_tombstones, config.tombstone_ttl_s)
        self._registrations = Registrations(config, self._tombstones, self._timers, self._outbox)
        self._endings = Endings(
            config,
            registry,
            self._tombstones,
            self._registrations,
            self._timers,
            self._lines,
            self._outbox,
            self.counters,
        )
        self._pushes = self._endings.open

    # --- from the caller ---------------------------------------------------------------------------------------------

    def push(
        self,
        transfer_id: str,
        parts: tuple[Part, ...],
        *,
        last: bool,
        fenced: bool,
        index: int,
        now_s: float,
    ) -> list[Effect]:
        """One chunk. ``last``: the caller has nothing more to push.

        ``fenced``: not computed yet; :meth:`fences_reached` follows. ``index`` counts the chunks of one transfer from
        0: only the first begins a push. A later one of a push that is ending or over is dropped, since its outcome
        covers it.
        """
        push = self._pushes.get(transfer_id) if index else self._open_push(transfer_id, now_s)
        if push is None or push.cause is not None:
            self.counters["chunks_after_end"] += index > 0
            return self._outbox.take()
        push.chunks.append(Chunk(parts, fenced))
        push.is_last_known = last
        push.lease_until_s = now_s + self._config.lease_s
        for leg in push.legs.values():
            leg.cut(len(push.chunks) - 1, self._cut)
        self._advance(push, now_s)
        if push.cause is None and push.state is not PushState.writing:
            self._timers.set(LeaseEnd(transfer_id), push.lease_until_s)
        return self._outbox.take()

    def fences_reached(self, transfer_id: str, chunk_indices: Sequence[int], now_s: float) -> list[Effect]:
        """The device finished computing the blocks of these chunks."""
        push = self._pushes.get(transfer_id)
        if push is not None:
            for index in chunk_indices:
                if index < len(push.chunks):
                    push.chunks[index].is_fenced = False
                    for leg in push.legs.values():
                        leg.unfence(index)
            if push.cause is None:
                self._advance(push, now_s)
        return self._outbox.take()

    def is_fenced(self, transfer_id: str, chunk_index: int) -> bool:
        """Whether this chunk was taken and waits for :meth:`fences_reached`."""
        push = self._pushes.get(transfer_id)
        return push is not None and chunk_index < len(push.chunks) and push.chunks[chunk_index].is_fenced

    def fail(self, transfer_id: str, failure: Failure, now_s: float) -> list[Effect]:
        """The loop could not go on with this push, say because its fence raised."""
        push = self._pushes.get(transfer_id)
        if push is not None:
            self._endings.give_up(push, Cause(Outcome.failed, failure.code, failure.reason), now_s)
        return self._outbox.take()

    def cancel(self, transfer_id: str, now_s: float) -> list[Effect]:
        """The caller gives up. Known or not, in any state, twice: never an error."""
        reason = f"cancelled by prefill engine {self._identity.engine_id!r}"
        cause = Cause(Outcome.cancelled, FailureCode.cancelled_by_caller, reason)
        push = self._pushes.get(transfer_id)
        if push is not None:
            self._endings.give_up(push, cause, now_s)
            return self._outbox.take()
        if self._registrations.waiting_for(transfer_id):
            self._registrations.end_transfer(transfer_id, FailureCode.cancelled_by_caller, cause.reason, now_s)
        elif self._tombstones.find(transfer_id, now_s) is None:
            tombstone = Tombstone(FailureCode.cancelled_by_caller, cause.reason, is_push_awaited=True)
            self._tombstones.bury(transfer_id, tombstone, now_s)
        return self._outbox.take()

    def drop_engine(self, engine_id: str, now_s: float) -> list[Effect]:
        """The operator or router knows that this engine is gone. Unknown ids are fine."""
        reason = f"engine {engine_id!r} was dropped"
        links = self._links.of_engine(engine_id)
        for link in links:
            self._end_registrations(link, FailureCode.engine_dropped, reason, now_s, tell=True)
        for link in links:
            self._absorb(self._registry.retire(link.generation, StaleReason.dropped, reason), now_s)
        return self._outbox.take()

    def drain(self, now_s: float) -> list[Effect]:
        """No new work: registrations that nothing was pushed for are refused, what was pushed finishes."""
        self._drain(now_s)
        return self._outbox.take()

    def _drain(self, now_s: float) -> None:
        self._registrations.shut(f"prefill engine {self._identity.engine_id!r} takes no new work")
        reason = f"prefill engine {self._identity.engine_id!r} is draining"
        for transfer_id in self._registrations.transfer_ids():
            self._registrations.end_transfer(transfer_id, FailureCode.closing, reason, now_s)

    def close(self, now_s: float) -> list[Effect]:
        """End everything. Pushes with a WRITE in flight drain; the rest ends now."""
        self._is_closing = True
        self._drain(now_s)
        cause = self._closing_cause()
        for push in list(self._pushes.values()):
            self._endings.give_up(push, cause, now_s)
        for link in list(self._links.values()):
            self._absorb(self._registry.retire(link.generation, StaleReason.closing, cause.reason), now_s)
        return self._outbox.take()

    def abandon(self, now_s: float) -> list[Effect]:
        """close() ran out of time: report what could not be settled, with its blocks held."""
        for push in list(self._pushes.values()):
            if push.is_writing:
                cause = Cause(Outcome.failed, FailureCode.closing, "closed with a WRITE in flight")
                self._endings.doubt(push, cause, now_s)
        return self._outbox.take()

    def transport_closed(self, now_s: float) -> list[Effect]:
        """The agent is destroyed: nothing reads or writes any more. Release what is held, say goodbye."""
        reason = "this side's agent is destroyed"
        proven = self._writes.prove_all()
        for push in list(self._endings.held):
            self._endings.end_hold(push, proven=True, reason=reason)
        for registration in proven:  # of pushes whose hold had run out
            self._endings.pay_drain(registration)
        for link in self._links.values():
            self._outbox.send(link, wire.Goodbye(reason))
        self._links.clear()
        return self._outbox.take()

    # --- from the links ----------------------------------------------------------------------------------------------

    def message(self, link: LinkId, message: wire.ToPrefill, now_s: float) -> list[Effect]:
        """A decoded message. Nothing in it is believed beyond what concerns its own sender."""
        known = self._links.get(link)
        if isinstance(message, wire.Hello):
            self._hello(link, message, now_s)
        elif known is None:
            self.counters["messages_before_hello"] += 1
            self._outbox.add(Send(link, wire.Goodbye("this link is not known here: say Hello first")))
        else:
            self._registry.heard(known.generation, activity=not isinstance(message, wire.Heartbeat))
            self._dispatch(known, message, now_s)
        return self._outbox.take()

    def malformed(self, link: LinkId, failure: Failure, now_s: float) -> list[Effect]:
        """A message that could not be decoded. It is counted and answered; the link goes on."""
        self.counters["messages_malformed"] += 1
        self._outbox.add(Send(link, wire.Refused(failure.code, wire.clip_reason(failure.reason))))
        return self._outbox.take()

    def link_closed(self, link: LinkId, reason: str, now_s: float) -> list[Effect]:
        """The connection is gone. Closing one that is not known is fine."""
        known = self._links.remove(link)
        if known is not None:
            self._drop_link(known, reason, now_s)
        return self._outbox.take()

    def _dispatch(self, link: Link, message: wire.ToPrefill, now_s: float) -> None:
        match message:
            case wire.Register():
                self._register(link, message, now_s)
            case wire.Cancel():
                self._cancelled_by_peer(link, message, now_s)
            case wire.Withdraw():
                self._withdraw(link, message, now_s)
            case wire.Renew():
                self._renew(link, message, now_s)
            case wire.Metadata():
                self._metadata(link, message, now_s)
            case wire.MetadataUnavailable():
                failure = Failure(message.code, f"engine {link.hello.engine_id!r}: {message.reason}")
                self._fail_handshake(link.generation, message.attempt, failure, now_s)
            case wire.Heartbeat():
                self._outbox.send(link, wire.Heartbeat())
            case wire.Goodbye():
                self._goodbye(link, message, now_s)

    def _hello(self, link: LinkId, hello: wire.Hello, now_s: float) -> None:
        if self._is_late(link, hello):
            self.counters["hellos_late"] += 1
            return
        known = self._links.get(link)
        if known is not None and known.hello != hello:
            reason = f"this link belongs to engine {known.hello.engine_id!r}: one link, one engine"
            refusal: Failure | None = Failure(FailureCode.malformed, reason)
        else:
            refusal = mismatch(self._identity, hello)
        refusal = refusal or self._refusal_of_namesake(hello)
        if refusal is None:
            try:
                self._welcome(link, hello, now_s)
            except QueueFull as exc:
                refusal = Failure(FailureCode.queue_full, str(exc))
            except Failure as exc:
                refusal = exc
        if refusal is not None:
            self.counters[f"hellos_refused_{refusal.code}"] += 1
            self._endings.note_refused(hello.engine_id, refusal.reason, now_s)
            if self._rarely.is_due((hello.engine_id, hello.share.rank, refusal.code), now_s):
                self._outbox.add(Warn(f"refused decode engine {hello.engine_id!r} ({refusal.code}): {refusal.reason}"))
            self._outbox.add(Send(link, wire.Refused(refusal.code, wire.clip_reason(refusal.reason))))

    def _is_late(self, link: LinkId, hello: wire.Hello) -> bool:
        """It was sent over a link that its sender has given up, and was overtaken by what came over the next one: links
        are read in turn. It must not take the place of the link that is up."""
        return any(
            other.hello.incarnation == hello.incarnation and other.link != link and other.hello.dial > hello.dial
            for other in self._links.of_rank(hello.engine_id, hello.share.rank)
        )

    def _refusal_of_namesake(self, hello: wire.Hello) -> Failure | None:
        """An incarnation whose place was taken is back, and whoever took it is still linked: two processes live."""
        engine = (hello.engine_id, hello.share.rank)
        if not self._namesakes.has_been_replaced(engine, hello.incarnation):
            return None
        newer = self._links.of_rank(*engine)  # its own link went when its place was taken
        if not newer:
            return None
        self.counters["namesakes_refused"] += 1
        return Failure(
            FailureCode.superseded,
            f"two living processes call themselves engine {hello.engine_id!r}: incarnation {hello.incarnation}, "
            f"superseded by {newer[0].hello.incarnation}, came back; engine ids must be unique",
        )

    def _welcome(self, link: LinkId, hello: wire.Hello, now_s: float) -> None:
        known = self._links.get(link)
        new = known or self._introduced(link, hello)
        for other in self._links.of_rank(hello.engine_id, new.rank):
            if other.link != link:
                self._supersede_link(other, hello, now_s)
        generation, effects = self._registry.admit(hello.engine_id, hello.incarnation, _shown(link), new.rank)
        self._absorb(effects, now_s)
        self._namesakes.admitted((hello.engine_id, new.rank), hello.incarnation)
        new.generation = generation
        self._links.add(new)
        ours = self._identity
        self._outbox.send(
            new, wire.Welcome(ours.engine_id, ours.incarnation, ours.share, ours.holdings, ours.agent_name)
        )
        if self._config.eager_handshake:
            self._begin_handshake(new, generation)

    def _introduced(self, link: LinkId, hello: wire.Hello) -> Link:
        """Raises Incompatible for a rank that has nothing to do with this one."""
        ours, theirs = self._identity.share, hello.share
        met = readers(ours, theirs.pp_size, theirs.tp_size, self._totals)
        if theirs.rank not in met:
            raise Incompatible(
                f"rank (pp, tp) {theirs.rank} of decode engine {hello.engine_id!r} (pp_size={theirs.pp_size}, "
                f"tp_size={theirs.tp_size}) has nothing in common with rank {ours.rank} of prefill engine "
                f"{self._identity.engine_id!r} (pp_size={ours.pp_size}, tp_size={ours.tp_size}), which writes to "
                f"{sorted(met)[:8]}"
            )
        if hello.block_sizes_tokens.keys() != self._identity.block_sizes_tokens.keys():
            self._check_groups(hello)
        own_sizes = {held.name: held.block_size_tokens for held in self._groups}
        return Link(link, hello, met, all_terms(own_sizes, hello.block_sizes_tokens))

    def _check_groups(self, hello: wire.Hello) -> None:
        """Either side works out who writes to whom from the groups that it has. Where one lacks some, both must come to
        the same all the same, or a push would wait for ranks that never come. Raises Incompatible."""
        ours, theirs = self._identity.share, hello.share
        told = totals_told(hello)
        stage = [replace(ours, tp_rank=tp_rank) for tp_rank in range(ours.tp_size)]
        if any(
            readers(rank, theirs.pp_size, theirs.tp_size, self._totals)
            != readers(rank, theirs.pp_size, theirs.tp_size, told)
            for rank in stage
        ):
            odd = sorted(hello.block_sizes_tokens.keys() ^ self._identity.block_sizes_tokens.keys())
            raise Incompatible(
                f"group {odd[0]!r} is only on one side, {theirs} of decode engine {hello.engine_id!r} or {ours} of "
                f"prefill engine {self._identity.engine_id!r}: with these sizes the two do not agree about who writes "
                f"to whom; give every pipeline stage a layer of every group, or both engines the same tp_size"
            )

    def _supersede_link(self, old: Link, hello: wire.Hello, now_s: float) -> None:
        """The connection came back, or the engine restarted, before the old link's end was noticed."""
        self._links.remove(old.link)
        if old.hello.incarnation == hello.incarnation:
            self._drop_link(old, "its connection broke and came back", now_s)
        else:  # the registry retires the old incarnation when it admits the new one
            reason = f"decode engine {hello.engine_id!r} restarted"
            self._end_registrations(old, FailureCode.peer_restarted, reason, now_s, tell=False)

    def _goodbye(self, link: Link, message: wire.Goodbye, now_s: float) -> None:
        self._links.remove(link.link)
        reason = f"decode engine {link.hello.engine_id!r} said goodbye: {message.reason}"
        self._end_registrations(link, FailureCode.closing, reason, now_s, tell=False)
        self._absorb(self._registry.retire(link.generation, StaleReason.closing, reason), now_s)

    def _drop_link(self, link: Link, detail: str, now_s: float) -> None:
        reason = f"decode engine {link.hello.engine_id!r} is lost: {detail}"
        self._end_registrations(link, FailureCode.peer_lost, reason, now_s, tell=False)
        self._absorb(self._registry.lost(link.generation, detail, link_is_up=False), now_s)

    def _end_registrations(self, link: Link, code: FailureCode, reason: str, now_s: float, *, tell: bool) -> None:
        """Everything that came over this link and has not ended, ends."""
        for transfer_id in list(link.transfer_ids):
            registration = self._registrations.find(transfer_id, link.rank)
            if registration is None:  # its push came
                self._endings.give_up(self._pushes[transfer_id], Cause(Outcome.failed, code, reason), now_s)
            elif tell:
                self._registrations.end_transfer(transfer_id, code, reason, now_s)
            else:
                self._registrations.end(registration)
                self._registrations.remember_end(registration)

    # --- registrations -----------------------------------------------------------------------------------------------

    def _register(self, link: Link, message: wire.Register, now_s: float) -> None:
        self.counters["registrations"] += 1
        due_s = now_s + message.remaining_ms / 1000 + REGISTRATION_GRACE_S
        new = Registration(link, message.transfer_id, message.epoch, message.wants, due_s)
        refusal = self._place(new, now_s)
        if refusal is not None:
            self.counters[f"registrations_refused_{refusal.code}"] += 1
            # asked again on a new link: a WRITE for the old one may still be in flight, and Drained follows its end
            is_settled = not self._owe_drain(link, message.transfer_id, message.epoch)
            self._outbox.send_failed(new, refusal.code, refusal.reason, settled=is_settled)

    def _place(self, new: Registration, now_s: float) -> Failure | None:
        """Match or park a registration; the reason when it is refused. Long lists are looked at last."""
        push = self._pushes.get(new.transfer_id)
        leg = None if push is None else push.legs.get(new.rank)
        old = self._registrations.find(new.transfer_id, new.rank) if leg is None else leg.registration
        if old is not None and old.is_of(new.link, new.epoch):
            return None
        refusal = self._registrations.refusal(new, push, now_s) or self._refusal_by_late_write(new)
        if refusal is not None:
            return refusal
        try:
            wanted = new.unpacked()
        except Failure as exc:
            return exc
        if old is not None:
            self._registrations.end(old)
            self._outbox.send_failed(old, FailureCode.superseded, "registered again")
        self._registrations.admit(new)
        if push is None:
            self._registrations.park(new)
        else:
            self._match(push, new, wanted)
            self._advance(push, now_s)
        return None

    def _match(self, push: Push, registration: Registration, wanted: dict[str, Wanted]) -> None:
        push.readers = registration.link.readers
        leg = push.legs.get(registration.rank)
        if leg is None:
            leg = push.legs[registration.rank] = Leg(push, registration, {})
        leg.match(registration, wanted, self._cut)

    def _refusal_by_late_write(self, new: Registration) -> Failure | None:
        """Bytes of an earlier push for this very registration may still land, over those of another."""
        if self._writes.unproven(new.link, new.transfer_id, new.epoch) is None:
            return None
        reason = f"transfer {new.transfer_id!r}: an earlier WRITE for epoch {new.epoch} may still land"
        return Failure(FailureCode.already_served, reason)

    def _cancelled_by_peer(self, link: Link, message: wire.Cancel, now_s: float) -> None:
        """Answer Drained when no write of this epoch is or will be in flight: at once, or when the last one ends."""
        self.counters["cancels"] += 1
        transfer_id = message.transfer_id
        is_owed = self._owe_drain(link, transfer_id, message.epoch)
        push = self._pushes.get(transfer_id)
        leg = None if push is None else push.legs.get(link.rank)
        if push is not None and leg is not None and leg.registration.is_of(link, message.epoch):
            leg.registration.is_drain_owed = True
            cause = Cause(Outcome.cancelled, FailureCode.cancelled_by_peer, message.reason)
            self._endings.give_up(push, cause, now_s)
            if not leg.registration.num_unproven:
                self._endings.pay_drain(leg.registration)  # while other legs are still being written
            return
        waiting = self._registrations.find(transfer_id, link.rank)
        if waiting is not None and waiting.is_of(link, message.epoch):
            self._registrations.end_transfer(
                transfer_id, FailureCode.cancelled_by_peer, message.reason, now_s, silent=waiting
            )
        if not is_owed:
            self._outbox.send(link, wire.Drained(transfer_id, message.epoch))

    def _withdraw(self, link: Link, message: wire.Withdraw, now_s: float) -> None:
        """As if its registration had come just before: the push that waits for it, or is still to come, ends with it.

        Whoever could not have registered cannot withdraw, either.
        """
        self.counters["withdrawals"] += 1
        transfer_id = message.transfer_id
        never_came = Registration(link, transfer_id, message.epoch, (), now_s)
        push = self._pushes.get(transfer_id)
        has_registered = self._registrations.find(transfer_id, link.rank) if push is None else push.legs.get(link.rank)
        if has_registered is not None or self._registrations.refusal(never_came, push, now_s) is not None:
            return
        if push is not None:
            cause = Cause(Outcome.cancelled, FailureCode.cancelled_by_peer, message.reason)
            self._endings.give_up(push, cause, now_s)
        else:
            self._registrations.end_transfer(
                transfer_id, FailureCode.cancelled_by_peer, message.reason, now_s, never_came=never_came
            )

    def _owe_drain(self, link: Link, transfer_id: str, epoch: int) -> bool:
        """Whether a WRITE for this engine's registration may still land: ``Drained`` goes to ``link`` when none may."""
        owed = self._writes.unproven(link, transfer_id, epoch)
        if owed is None:
            return False
        owed.is_drain_owed = True
        if owed.link is not link:  # decode came back on a new one
            self._registrations.end(owed)  # what it took was the old one's
            owed.link = link
        return True

    def _renew(self, link: Link, message: wire.Renew, now_s: float) -> None:
        for transfer_id in message.transfer_ids:
            push = self._pushes.get(transfer_id)
            if push is None or push.cause is not None:
                continue
            if push.engine_id in (None, link.hello.engine_id):  # whichever of its ranks still queues
                self.counters["leases_renewed"] += 1
                self._renew_lease(push, now_s)

    # --- a push on its way -------------------------------------------------------------------------------------------

    def _closing_cause(self) -> Cause:
        reason = f"prefill engine {self._identity.engine_id!r} shuts down"
        return Cause(Outcome.failed, FailureCode.closing, reason)

    def _open_push(self, transfer_id: str, now_s: float) -> Push | None:
        """A new push; ``None`` when it ends at once, because it was cancelled before its blocks existed."""
        self.counters["pushes"] += 1
        push = Push(transfer_id, now_s)
        tombstone = self._tombstones.find(transfer_id, now_s)
        self._pushes[transfer_id] = push
        if tombstone is not None and tombstone.is_push_awaited:
            self._endings.give_up(push, Cause(Outcome.cancelled, tombstone.code, tombstone.reason), now_s)
            return None
        if self._is_closing:
            self._endings.give_up(push, self._closing_cause(), now_s)
            return None
        for registration in self._registrations.take(transfer_id):
            self._match(push, registration, registration.unpacked())
        return push

    def _advance(self, push: Push, now_s: float) -> None:
        """Take a push as far as it can go now."""
        assert push.cause is None, "an ending push does not advance"
        legs = list(push.legs.values())
        shortage = next((short for leg in legs if (short := leg.shortage(self._cut)) is not None), None)
        if shortage is not None:
            self._endings.give_up(push, Cause(Outcome.failed, FailureCode.bad_blocks, shortage), now_s)
        elif push.is_last_known and push.is_served:
            self._endings.conclude(push, DONE, now_s)
        else:
            for leg in legs:
                if leg.has_pieces:
                    self._queue(leg, now_s)
                elif push.is_last_known and not leg.wanted_cells:
                    self._registrations.end(leg.registration)  # it asked for nothing: its link does not matter, either
            if push.state is PushState.writing and not push.is_in_flight:
                PUSH.fire(push, PushTrigger.caught_up)
                self._renew_lease(push, now_s)

    def _queue(self, leg: Leg, now_s: float) -> None:
        """Put a leg with pieces into its engine's line, or behind its handshake."""
        link = leg.registration.link
        generation, need = self._serving_generation(link, now_s)
        if generation is None:
            return  # the link's engine was refused room; the push has been given up
        leg.generation = generation
        if need is Need.write:
            self._lines.join(leg, generation)
            self._pump(now_s)
            return
        self._defer(leg, link, generation, now_s)
        if need is Need.handshake:
            self._begin_handshake(link, generation)

    def _serving_generation(self, link: Link, now_s: float) -> tuple[int | None, Need]:
        """The generation that serves this link's engine, a new one when the last is over while the link lives on, and
        what a push has to do there."""
        need = self._registry.need(link.generation)
        if need is not Need.gone:
            return link.generation, need
        hello = link.hello
        try:
            link.generation, effects = self._registry.admit(
                hello.engine_id, hello.incarnation, _shown(link.link), link.rank
            )
        except QueueFull as exc:
            self._end_registrations(link, FailureCode.queue_full, str(exc), now_s, tell=True)
            return None, Need.gone
        self._absorb(effects, now_s)
        return link.generation, self._registry.need(link.generation)

    def _defer(self, leg: Leg, link: Link, generation: int, now_s: float) -> None:
        if self._lines.is_deferred(leg, generation):
            return
        push = leg.push
        if not self._lines.has_room_behind(generation):
            limit = self._config.max_deferred_per_engine
            reason = f"max_deferred_per_engine={limit} pushes wait for engine {link.hello.engine_id!r} already"
            self._endings.give_up(push, Cause(Outcome.failed, FailureCode.queue_full, reason), now_s)
            return
        self._lines.defer(leg, generation)
        self.counters["pushes_deferred"] += 1
        if push.state is PushState.waiting:
            PUSH.fire(push, PushTrigger.engine_awaited)

    def _pump(self, now_s: float) -> None:
        """Post what is ready and has room, one WRITE of each engine's line in turn."""
        self._lines.serve(partial(self._post_next, now_s))

    def _post_next(self, now_s: float, leg: Leg, generation: int) -> bool:
        """Post the next WRITE of the first leg in its line. ``False``: nothing of this line can be posted for now."""
        pieces, num_bytes = leg.next_pieces(self._cut)
        if not pieces or self._is_worth_waiting(leg, num_bytes):
            self._lines.leave(generation)
            return True
        if not self._writes.has_room(generation, num_bytes):
            return False
        if not self._recheck(leg.push, now_s):
            self._lines.leave(generation)
            return True
        peer = self._registry.pin(generation)
        if peer is None:
            return False  # the engine has just ended: what becomes of its line comes with the news of that
        for _ in pieces:
            leg.pieces.popleft()
        if not leg.pieces:
            self._lines.leave(generation)
        self._post(leg, generation, pieces, peer, now_s)
        return True

    def _is_worth_waiting(self, leg: Leg, num_bytes: int) -> bool:
        """Small pieces of a push that is still growing are put together while the WRITE before them is in flight: its
        end, at the latest, lets them go."""
        enough_bytes = min(self._config.coalesce_bytes, self._config.max_write_bytes)
        return bool(leg.in_flight) and not leg.push.is_last_known and num_bytes < enough_bytes

    def _recheck(self, push: Push, now_s: float) -> bool:
        """Just before a WRITE: still wanted, same registration, lease alive. (The pin checks the generation.)"""
        if push.state is not PushState.writing and now_s >= push.lease_until_s:
            self._endings.expire(push, now_s)
            return False
        return True

    def _post(self, leg: Leg, generation: int, pieces: list[Piece], peer: LoadedPeer, now_s: float) -> None:
        """The engine is pinned. The WRITE ends settled, doubted or abandoned: exactly one of them."""
        push, wanted = leg.push, leg.registration
        lengths_bytes = [peer.len_bytes(piece) for piece in pieces]
        write = self._writes.post(leg, generation, sum(piece.num_cells for piece in pieces), sum(lengths_bytes))
        write_id = write.write_id
        self._timers.cancel(LeaseEnd(push.transfer_id))
        PUSH.fire(push, PushTrigger.write_posted)
        for group, each in leg.wanted.items():
            num_blocks = peer.num_blocks(group)
            if each.highest_block >= num_blocks:
                reason = (
                    f"transfer {push.transfer_id!r}: rank (pp, tp) {wanted.rank} of engine {wanted.engine_id!r} asks "
                    f"for block {each.highest_block} of group {self._groups[group].name!r}, but its cache has "
                    f"{num_blocks}"
                )
                self._settled(write_id, Failure(FailureCode.bad_blocks, reason), now_s)
                return
        pieces = [piece for piece, length_bytes in zip(pieces, lengths_bytes, strict=True) if length_bytes]
        if not pieces:  # layers that this rank of decode does not hold: another one does
            self._settled(write_id, None, now_s)
            return
        self._timers.set(Stall(write_id), now_s + self._config.stall_timeout_s)
        spans = tuple(piece.span for piece in pieces)
        notification = wire.encode_written(wire.Written(wanted.epoch, self._identity.rank, pieces[0].chunk, spans))
        post = PostWrite(write_id, peer, tuple(pieces), notification)
        if now_s - wanted.link.hinted_s > wire.ATTENTION_S:
            self._outbox.send(wanted.link, wire.Writing(wanted.epoch))  # decode sleeps: it wakes while this is posted
            self._outbox.add(post)
        else:
            self._outbox.add(post)
            self._outbox.send(wanted.link, wire.Writing(wanted.epoch))
        wanted.link.hinted_s = now_s

    # --- from the transport ------------------------------------------------------------------------------------------

    def peer_loaded(self, generation: int, attempt: int, peer: LoadedPeer, now_s: float) -> list[Effect]:
        """The agent and the descriptors are ready. Deferred pushes go on, each checked again before its WRITE."""
        if not self._registry.handshake_succeeded(generation, attempt, peer):
            self.counters["handshakes_late"] += 1
            self._outbox.add(ReleasePeer(peer))
            return self._outbox.take()
        self.counters["handshakes_succeeded"] += 1
        self._resume(generation, now_s)
        return self._outbox.take()

    def peer_failed(self, generation: int, attempt: int, failure: Failure, now_s: float) -> list[Effect]:
        """Loading failed, and left nothing behind."""
        self._fail_handshake(generation, attempt, failure, now_s)
        return self._outbox.take()

    def write_settled(self, write_id: int, failure: Failure | None, now_s: float) -> list[Effect]:
        """A WRITE ended: confirmed, or failed so that no byte of it lands later."""
        self._settled(write_id, failure, now_s)
        self._pump(now_s)
        return self._outbox.take()

    def write_doubted(self, write_id: int, failure: Failure, now_s: float) -> list[Effect]:
        """A WRITE failed and cannot be asked about again, but bytes of it may still land: only our agent's end proves
        it quiet. Until then, or until the hold runs out, its blocks are held."""
        self._timers.cancel(Stall(write_id))
        write = self._writes.doubt(write_id)
        self.counters[f"writes_failed_{failure.code}"] += 1
        if write.leg.push.is_writing:
            self._endings.doubt(write.leg.push, Cause(Outcome.failed, failure.code, failure.reason), now_s)
        self._absorb(self._registry.settle(write.generation, ok=False), now_s)
        self._absorb(self._registry.lost(write.generation, failure.reason, link_is_up=True), now_s)
        self._pump(now_s)
        return self._outbox.take()

    def _settled(self, write_id: int, failure: Failure | None, now_s: float) -> None:
        self._timers.cancel(Stall(write_id))
        write = self._writes.prove(write_id)
        leg = write.leg
        self._absorb(self._registry.settle(write.generation, ok=failure is None), now_s)
        if failure is None:
            leg.confirmed_cells += write.num_cells
            leg.push.num_bytes += write.num_bytes
            self.counters["bytes_written"] += write.num_bytes
            if leg.is_served and leg.push.is_last_known:
                self._registrations.end(leg.registration)  # what becomes of its link does not matter to it any more
        else:
            self._write_failed(write, failure, now_s)
        self._after_settle(leg, now_s)

    def _write_failed(self, write: Write, failure: Failure, now_s: float) -> None:
        self.counters[f"writes_failed_{failure.code}"] += 1
        push = write.leg.push
        if push.cause is None:
            self._endings.begin_end(push, Cause(Outcome.failed, failure.code, failure.reason), now_s)
        if isinstance(failure, TransportError):
            # NIXL keeps a failed agent loaded and broken: only a new generation with a new handshake heals it
            self._absorb(self._registry.lost(write.generation, failure.reason, link_is_up=True), now_s)

    def _after_settle(self, leg: Leg, now_s: float) -> None:
        push = leg.push
        if push.cause is None:
            self._advance(push, now_s)
        elif not push.is_in_flight:
            if push.state is PushState.in_doubt:
                self._endings.end_hold(push, proven=True, reason="the WRITE ended")
            else:
                self._endings.conclude(push, push.cause, now_s)
        elif not leg.registration.num_unproven:
            self._endings.pay_drain(leg.registration)  # while other legs are still being written

    # --- handshakes --------------------------------------------------------------------------------------------------

    def _begin_handshake(self, link: Link, generation: int) -> None:
        attempt = self._registry.begin_handshake(generation)
        if attempt is not None:
            self.counters["handshakes_started"] += 1
            self._outbox.send(link, wire.MetadataRequest(attempt))

    def _metadata(self, link: Link, message: wire.Metadata, now_s: float) -> None:
        generation = link.generation
        if not self._registry.is_attempt_current(generation, message.attempt):
            self.counters["handshakes_late"] += 1
            return
        hello = link.hello
        try:
            geometry = metadata.verify(message, incarnation=hello.incarnation, agent_name=hello.agent_name)
            metadata.check_block_sizes(geometry, hello.block_sizes_tokens)
        except Failure as exc:
            self._fail_handshake(generation, message.attempt, exc, now_s)
            return
        self._outbox.add(
            LoadPeer(
                hello.engine_id, generation, message.attempt, hello.agent_name, hello.share, message.blob, geometry
            )
        )

    def _fail_handshake(self, generation: int, attempt: int, failure: Failure, now_s: float) -> None:
        if not self._registry.handshake_failed(generation, attempt, failure.reason):
            self.counters["handshakes_late"] += 1
            return
        self.counters[f"handshakes_failed_{failure.code}"] += 1
        self._tell_waiters(generation, failure, now_s)

    def _tell_waiters(self, generation: int, failure: Failure, now_s: float) -> None:
        """Every deferred push learns of the failure: it waits for the next attempt, or ends with this cause."""
        behind = self._lines.deferred(generation)
        for leg in behind:
            leg.failed_attempts += 1
            if not failure.is_retryable or leg.failed_attempts >= self._config.handshake_attempts:
                self._endings.give_up(leg.push, Cause(Outcome.failed, failure.code, failure.reason), now_s)
        if behind:
            self._registry.need(generation)  # asks for RetryDue when the backoff is over

    def _resume(self, generation: int, now_s: float) -> None:
        for leg in self._lines.take_deferred(generation):
            if leg.push.cause is None:  # one before it may have ended everything of this link
                self._advance(leg.push, now_s)

    # --- what the registry decided -----------------------------------------------------------------------------------

    def _absorb(self, effects: list[RegistryEffect], now_s: float) -> None:
        for effect in effects:
            match effect:
                case HandshakeTimedOut():
                    reason = f"engine {effect.engine_id!r}: no metadata within {self._config.handshake_timeout_s:g} s"
                    failure = Failure(FailureCode.handshake_timeout, reason)
                    self._fail_handshake(effect.generation, effect.attempt, failure, now_s)
                case RetryDue():
                    self._resume(effect.generation, now_s)
                case WentStale():
                    self._went_stale(effect, now_s)
                case Evicted():
                    self.counters["engines_evicted"] += 1
                    if effect.resource is not None:
                        self._outbox.add(ReleasePeer(effect.resource))
                    self._resume(effect.generation, now_s)  # an unknown engine may age out behind its backoff

    def _went_stale(self, effect: WentStale, now_s: float) -> None:
        """What waits for this generation over a live link goes on under a new one. All else has ended, or ends here."""
        self.counters[f"engines_stale_{effect.reason}"] += 1
        for link in self._links.of_engine(effect.engine_id):
            if link.generation == effect.generation and not effect.link_is_up:
                self._links.remove(link.link)
                reason = f"decode engine {effect.engine_id!r} is lost: {effect.detail}"
                self._end_registrations(link, FailureCode.peer_lost, reason, now_s, tell=False)
        for leg in self._lines.disband(effect.generation):
            if leg.push.cause is None:
                self._advance(leg.push, now_s)

    # --- time --------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Effect]:
        """Whatever is due: leases, stalls, holds, registrations, and the registry's sweep."""
        for key in self._timers.pop_due(now_s):
            self._timer_fired(key, now_s)
        self._absorb(self._registry.sweep(), now_s)
        self._pump(now_s)
        return self._outbox.take()

    def next_due_s(self) -> float | None:
        """When :meth:`tick` is due next; ``None`` when only an event can change anything."""
        times = [due_s for due_s in (self._timers.next_due_s(), self._registry.next_due_s()) if due_s is not None]
        return min(times, default=None)

    def _timer_fired(self, key: Due, now_s: float) -> None:
        match key:
            case LeaseEnd(transfer_id):
                push = self._pushes[transfer_id]  # its end cancels the timer
                if push.is_lease_running:
                    self._endings.expire(push, now_s)
            case RegistrationEnd(transfer_id):
                self.counters["registrations_expired"] += 1
                reason = f"transfer {transfer_id!r}: nothing was pushed before the registration's deadline"
                self._registrations.end_transfer(transfer_id, FailureCode.deadline, reason, now_s)
            case Stall(write_id):
                self._stalled(write_id, now_s)
            case HoldEnd(push):
                self._hold_timed_out(push, now_s)

    def _stalled(self, write_id: int, now_s: float) -> None:
        write = self._writes.stall(write_id)
        self.counters["writes_stalled"] += 1
        reason = (
            f"transfer {write.leg.transfer_id!r}: the WRITE to engine {write.registration.engine_id!r} neither ended "
            f"nor failed within {self._config.stall_timeout_s:g} s"
        )
        if write.leg.push.is_writing:
            cause = Cause(Outcome.failed, FailureCode.write_stalled, reason)
            self._endings.doubt(write.leg.push, cause, now_s)
        self._absorb(self._registry.lost(write.generation, reason, link_is_up=True), now_s)

    def _hold_timed_out(self, push: Push, now_s: float) -> None:
        self.counters["holds_timed_out"] += 1
        if self._config.hold_policy is HoldPolicy.release:
            reason = f"hold_timeout_s={self._config.hold_timeout_s:g} passed: a late WRITE may still read the blocks"
            self._abandon_writes(push, now_s)
            self._endings.end_hold(push, proven=False, reason=reason)

    def _abandon_writes(self, push: Push, now_s: float) -> None:
        """The caller gets its blocks back although a WRITE may still read them. What lands then is nobody's KV, so
        decode must never be told that it is: without another look at the handle, its notification is never sent."""
        for write_id in self._writes.tracked_of(push):
            self._timers.cancel(Stall(write_id))
            write = self._writes.doubt(write_id)
            self.counters["writes_abandoned"] += 1
            self._outbox.add(AbandonWrite(write_id))
            self._absorb(self._registry.settle(write.generation, ok=False), now_s)

    # --- small things ------------------------------------------------------------------------------------------------

    @property
    def num_pushes(self) -> int:
        """Pushes without an outcome, and those whose blocks are held."""
        return len(self._pushes) + len(self._endings.held)

    def gauges(self) -> dict[str, int]:
        """Sizes of everything that is bounded."""
        return {
            "links": len(self._links),
            "pushes_open": len(self._pushes),
            **self._registrations.gauges(),
            **self._lines.gauges(),
            **self._writes.gauges(),
            "pushes_held": len(self._endings.held),
            "tombstones": len(self._tombstones),
            "timers": len(self._timers),
        }

    def _renew_lease(self, push: Push, now_s: float) -> None:
        push.lease_until_s = now_s + self._config.lease_s
        if push.state is not PushState.writing:
            self._timers.set(LeaseEnd(push.transfer_id), push.lease_until_s)


def held_groups(geometry: CacheGeometry) -> tuple[HeldGroup, ...]:
    """What a rank holds, by group number."""
    return tuple(
        HeldGroup(
            group.name,
            tuple(layer.name for layer in group.layers),
            group.block_size_tokens,
            group.block_len_bytes // len(group.layers),
        )
        for group in geometry.groups
    )


def _shown(link: LinkId) -> str:
    """A link's id for people: decode dials, so prefill knows it by its connection and not by an address."""
    return f"link {link.hex()}"
