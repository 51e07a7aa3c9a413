"""The pure core of the prefill side: events and the time in, effects out. No clock, thread, socket or NIXL in here.

It matches pushes with registrations, starts handshakes, defers and re-checks, posts, settles, and gives every push its
one outcome. :mod:`kvpush.pusher` is the loop around it; ``kvpush.testing`` drives the same code under a fake clock.

Caller's duties: call every method on one thread with a monotonic ``now_s`` (the registry's clock); carry out all
returned effects, in order, before the next call; answer every :class:`PostWrite` with exactly one
:meth:`PrefillCore.write_settled` and every :class:`LoadPeer` with one ``peer_loaded`` or ``peer_failed``; call
:meth:`PrefillCore.tick` no later than :meth:`PrefillCore.next_due_s`.

How a push ends. A cause (failed, cancelled, expired) is kept from the first moment that it is known and never replaced.
While a WRITE is in flight the outcome waits for its end (``draining``); one that does not end within
``stall_timeout_s`` makes the push ``in_doubt``: the outcome is reported with its blocks held, and
:class:`BlocksReleased` follows when the WRITE ends after all, or when the hold runs out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpush import metadata, wire
from kvpush.config import Config, HoldPolicy
from kvpush.errors import Failure, FailureCode, QueueFull, TransportError
from kvpush.events import BlocksReleased, Outcome, PushFinished, StaleReason
from kvpush.identity import Identity
from kvpush.layout import CacheGeometry, compare
from kvpush.lifecycle import PUSH, PushState, PushTrigger
from kvpush.plan import check_remote_ids, overlap
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
from kvpush.tombstones import Tombstone, Tombstones

LinkId = bytes
BlockIds = npt.NDArray[np.int64]

_MAX_NUM_BLOCKS = 2**31 - 1  # until the handshake has told the real number, which is checked before the WRITE
REGISTRATION_GRACE_S = 5.0  # after a registration's own deadline: decode's Cancel should have come by then

_TRIGGER_OF = {
    Outcome.done: PushTrigger.completed,
    Outcome.failed: PushTrigger.failure_settled,
    Outcome.cancelled: PushTrigger.cancel_settled,
    Outcome.expired: PushTrigger.expiry_settled,
}


class LoadedPeer(Protocol):
    """What the loop loaded for one generation of an engine; opaque but for its size."""

    @property
    def num_blocks(self) -> int:
        """Of the remote cache: the bound of its block ids."""


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` on ``link``. A link that is gone or full ends: answer with ``link_closed``."""

    link: LinkId
    message: wire.ToDecode


@dataclass(frozen=True, slots=True)
class LoadPeer:
    """Load a verified metadata blob and prepare its descriptors."""

    engine_id: str
    generation: int
    attempt: int
    agent_name: str
    blob: bytes
    geometry: CacheGeometry


@dataclass(frozen=True, slots=True)
class ReleasePeer:
    """Unload. Nothing is in flight to it."""

    peer: Any


@dataclass(frozen=True, slots=True)
class PostWrite:
    """Post one WRITE of ``local_ids[i]`` into ``remote_ids[i]`` on every row of the peer's plan."""

    write_id: int
    peer: Any
    local_ids: BlockIds
    remote_ids: BlockIds
    notification: bytes


@dataclass(frozen=True, slots=True)
class Emit:
    """Give the caller an event."""

    event: PushFinished | BlocksReleased


Effect = Send | LoadPeer | ReleasePeer | PostWrite | Emit


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Link:
    """One control link of a decode engine that has said Hello."""

    link: LinkId
    hello: wire.Hello
    generation: int | None = None
    transfer_ids: set[str] = field(default_factory=set)  # registered over it and not ended


@dataclass(slots=True, eq=False)
class _Registration:
    """Where one decode engine wants the blocks of one transfer."""

    link: _Link
    transfer_id: str
    epoch: int
    first_block: int
    block_ids: BlockIds
    highest_id: int  # of the block ids; -1 when there are none
    is_drain_owed: bool = False  # decode waits for Drained

    @property
    def engine_id(self) -> str:
        return self.link.hello.engine_id


@dataclass(slots=True, eq=False)
class _Piece:
    """A run of positions that is ready to be written, or will be when its fence is reached."""

    chunk: int
    first_block: int
    local_ids: BlockIds
    remote_ids: BlockIds


@dataclass(slots=True, eq=False)
class _Chunk:
    """What one push() call brought."""

    first_block: int
    block_ids: BlockIds
    is_fenced: bool


@dataclass(frozen=True, slots=True)
class _Cause:
    """Why a push ends: the first root cause."""

    outcome: Outcome
    code: FailureCode | None
    reason: str


@dataclass(slots=True, eq=False)
class _Push:
    """One transfer whose blocks have been pushed, in part or whole. ``state`` is written by the lifecycle alone."""

    transfer_id: str
    opened_s: float
    lease_until_s: float
    state: PushState = PUSH.initial
    chunks: list[_Chunk] = field(default_factory=list)
    is_last_known: bool = False
    registration: _Registration | None = None
    pieces: deque[_Piece] = field(default_factory=deque)  # not posted
    generation: int | None = None  # of the engine that it waits for or writes to
    failed_attempts: int = 0  # handshakes that it waited through
    in_flight: set[int] = field(default_factory=set)  # write ids
    is_queued: bool = False  # in its generation's line
    covered_blocks: int = 0  # of the positions that decode asked for, those that chunks so far hold
    confirmed_blocks: int = 0
    num_bytes: int = 0
    cause: _Cause | None = None

    @property
    def held_blocks(self) -> int:
        return sum(len(chunk.block_ids) for chunk in self.chunks)


@dataclass(slots=True, eq=False)
class _Write:
    """A posted WRITE. It outlives its push when the hold runs out first."""

    push: _Push
    registration: _Registration
    generation: int
    num_blocks: int
    num_bytes: int
    counted_bytes: int  # against max_in_flight_bytes; 0 once it has stalled


# timer keys
@dataclass(frozen=True, slots=True)
class _Lease:
    transfer_id: str


@dataclass(frozen=True, slots=True)
class _Unmatched:
    transfer_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class _Stall:
    write_id: int


@dataclass(frozen=True, slots=True)
class _Hold:
    push: _Push


_TimerKey = _Lease | _Unmatched | _Stall | _Hold


class PrefillCore:
    """All decisions of a :class:`kvpush.PrefillPusher`."""

    def __init__(self, identity: Identity, config: Config, registry: Registry, block_len_bytes: int) -> None:
        """``block_len_bytes``: one block over all layers, the unit of ``max_in_flight_bytes``."""
        self.counters: Counter[str] = Counter()
        self._identity = identity
        self._config = config
        self._registry = registry
        self._block_len_bytes = block_len_bytes
        self._out: list[Effect] = []
        self._links: dict[LinkId, _Link] = {}
        self._pushes: dict[str, _Push] = {}  # without an outcome
        self._held: dict[_Push, None] = {}  # in doubt: outcome reported, blocks held; the id may be in use again
        self._registrations: dict[str, _Registration] = {}  # not matched yet
        self._deferred: dict[int, OrderedDict[str, _Push]] = {}  # generation -> pushes behind its handshake
        self._lines: OrderedDict[int, deque[_Push]] = OrderedDict()  # generation -> pushes with pieces to post
        self._writes: dict[int, _Write] = {}
        self._doubtful: OrderedDict[int, _Write] = OrderedDict()  # not tracked any more, and nothing proves them quiet
        self._in_flight_bytes = 0
        self._last_write_id = 0
        self._timers: Timers[_TimerKey] = Timers()
        self._tombstones = Tombstones(config.max_tombstones, config.tombstone_ttl_s)
        self._is_draining = False

    # --- from the caller ---------------------------------------------------------------------------------------------

    def push(
        self,
        transfer_id: str,
        first_block: int,
        block_ids: BlockIds,
        *,
        last: bool,
        fenced: bool,
        index: int,
        now_s: float,
    ) -> list[Effect]:
        """One chunk: position ``first_block + i`` of the transfer is in local block ``block_ids[i]``.

        ``fenced``: not computed yet; :meth:`fence_reached` follows. ``index`` counts the chunks of one transfer from 0:
        only the first begins a push. A later one of a push that is ending or over is dropped, since its outcome covers
        it.
        """
        push = self._pushes.get(transfer_id)
        if push is None and index == 0:
            push = self._open_push(transfer_id, now_s)
        if push is None or push.cause is not None:
            self.counters["chunks_after_end"] += index > 0
            return self._effects()
        chunk = _Chunk(first_block, block_ids, fenced)
        push.chunks.append(chunk)
        push.is_last_known = push.is_last_known or last
        push.lease_until_s = max(push.lease_until_s, now_s + self._config.lease_s)
        if push.registration is not None:
            self._cut(push, len(push.chunks) - 1)
            self._advance(push, now_s)
        if push.cause is None and push.state is not PushState.writing:
            self._timers.set(_Lease(transfer_id), push.lease_until_s)
        return self._effects()

    def fence_reached(self, transfer_id: str, chunk_index: int, now_s: float) -> list[Effect]:
        """The device finished computing this chunk's blocks."""
        push = self._pushes.get(transfer_id)
        if push is not None and chunk_index < len(push.chunks):
            push.chunks[chunk_index].is_fenced = False
            if push.registration is not None and push.cause is None:
                self._advance(push, now_s)
        return self._effects()

    def fail(self, transfer_id: str, failure: Failure, now_s: float) -> list[Effect]:
        """The loop could not go on with this push, say because its fence raised."""
        push = self._pushes.get(transfer_id)
        if push is not None:
            self._give_up(push, _Cause(Outcome.failed, failure.code, failure.reason), now_s)
        return self._effects()

    def cancel(self, transfer_id: str, now_s: float) -> list[Effect]:
        """The caller gives up. Known or not, in any state, twice: never an error."""
        cause = _Cause(Outcome.cancelled, FailureCode.cancelled_by_caller, "cancelled by the prefill engine")
        push = self._pushes.get(transfer_id)
        if push is not None:
            self._give_up(push, cause, now_s)
            return self._effects()
        registration = self._registrations.get(transfer_id)
        if registration is not None:
            self._refuse_unmatched(registration, FailureCode.cancelled_by_caller, cause.reason, now_s)
        elif self._tombstones.find(transfer_id, now_s) is None:
            self._bury(transfer_id, None, FailureCode.cancelled_by_caller, cause.reason, now_s, is_push_awaited=True)
        return self._effects()

    def drop_engine(self, engine_id: str, now_s: float) -> list[Effect]:
        """The operator or router knows that this engine is gone. Unknown ids are fine."""
        reason = f"engine {engine_id!r} was dropped"
        generation = self._registry.generation_of(engine_id)
        for link in [link for link in self._links.values() if link.hello.engine_id == engine_id]:
            self._end_registrations(link, FailureCode.engine_dropped, reason, now_s, tell=True)
        if generation is not None:
            self._absorb(self._registry.retire(generation, StaleReason.dropped, reason), now_s)
        return self._effects()

    def drain(self, now_s: float) -> list[Effect]:
        """No new work: registrations that nothing was pushed for are refused, what was pushed finishes."""
        self._drain(now_s)
        return self._effects()

    def _drain(self, now_s: float) -> None:
        self._is_draining = True
        for registration in list(self._registrations.values()):
            self._refuse_unmatched(registration, FailureCode.closing, "the prefill engine is draining", now_s)

    def close(self, now_s: float) -> list[Effect]:
        """End everything. Pushes with a WRITE in flight drain; the rest ends now."""
        self._drain(now_s)
        cause = _Cause(Outcome.failed, FailureCode.closing, "the prefill engine shuts down")
        for push in list(self._pushes.values()):
            self._give_up(push, cause, now_s)
        for link in list(self._links.values()):
            if link.generation is not None:
                self._absorb(self._registry.retire(link.generation, StaleReason.closing, cause.reason), now_s)
        return self._effects()

    def abandon(self, now_s: float) -> list[Effect]:
        """close() ran out of time: report what could not be settled, with its blocks held."""
        for push in list(self._pushes.values()):
            if push.state in (PushState.writing, PushState.draining):
                self._doubt(push, _Cause(Outcome.failed, FailureCode.closing, "closed with a WRITE in flight"), now_s)
        return self._effects()

    def transport_closed(self, now_s: float) -> list[Effect]:
        """The agent is destroyed: nothing reads or writes any more. Release what is held, say goodbye."""
        reason = "this side's agent is destroyed"
        for push in list(self._held):
            self._end_hold(push, proven=True, reason=reason)
        for link in self._links.values():
            self._send(link, wire.Goodbye(reason))
        self._links.clear()
        return self._effects()

    # --- from the links ----------------------------------------------------------------------------------------------

    def message(self, link: LinkId, message: wire.ToPrefill, now_s: float) -> list[Effect]:
        """A decoded message. Nothing in it is believed beyond what concerns its own sender."""
        known = self._links.get(link)
        if isinstance(message, wire.Hello):
            self._hello(link, message, now_s)
        elif known is None:
            self.counters["messages_before_hello"] += 1
            self._out.append(Send(link, wire.Goodbye("this link is not known here: say Hello first")))
        else:
            if known.generation is not None:
                self._registry.heard(known.generation, activity=not isinstance(message, wire.Heartbeat))
            self._dispatch(known, message, now_s)
        return self._effects()

    def malformed(self, link: LinkId, failure: Failure, now_s: float) -> list[Effect]:
        """A message that could not be decoded. It is counted and answered; the link goes on."""
        self.counters["messages_malformed"] += 1
        self._out.append(Send(link, wire.Refused(failure.code, wire.clip_reason(failure.reason))))
        return self._effects()

    def link_closed(self, link: LinkId, reason: str, now_s: float) -> list[Effect]:
        """The connection is gone. Closing one that is not known is fine."""
        known = self._links.pop(link, None)
        if known is not None:
            self._drop_link(known, reason, now_s)
        return self._effects()

    def _dispatch(self, link: _Link, message: wire.ToPrefill, now_s: float) -> None:
        match message:
            case wire.Register():
                self._register(link, message, now_s)
            case wire.Cancel():
                self._cancelled_by_peer(link, message, now_s)
            case wire.Renew():
                self._renew(link, message, now_s)
            case wire.Metadata():
                self._metadata(link, message, now_s)
            case wire.MetadataUnavailable():
                if link.generation is not None:
                    failure = Failure(message.code, f"engine {link.hello.engine_id!r}: {message.reason}")
                    self._fail_handshake(link.generation, message.attempt, failure, now_s)
            case wire.Heartbeat():
                self._send(link, wire.Heartbeat())
            case wire.Goodbye():
                self._goodbye(link, message, now_s)

    def _hello(self, link: LinkId, hello: wire.Hello, now_s: float) -> None:
        known = self._links.get(link)
        if known is not None and known.hello != hello:
            reason = f"this link belongs to engine {known.hello.engine_id!r}: one link, one engine"
            refusal: tuple[FailureCode, str] | None = (FailureCode.malformed, reason)
        else:
            refusal = self._refusal_of(hello)
        if refusal is None:
            try:
                self._welcome(link, hello, now_s)
            except QueueFull as exc:
                refusal = (FailureCode.queue_full, str(exc))
        if refusal is not None:
            code, reason = refusal
            self.counters[f"hellos_refused_{code}"] += 1
            self._out.append(Send(link, wire.Refused(code, wire.clip_reason(reason))))

    def _refusal_of(self, hello: wire.Hello) -> tuple[FailureCode, str] | None:
        ours = self._identity
        if hello.expected_engine_id != ours.engine_id:
            return (
                FailureCode.wrong_engine,
                f"decode engine {hello.engine_id!r} looks for prefill engine {hello.expected_engine_id!r}, "
                f"but {ours.engine_id!r} answers at this address",
            )
        differences = compare(
            ours.fingerprint, hello.fingerprint, f"prefill engine {ours.engine_id!r}", f"decode {hello.engine_id!r}"
        )
        if differences is not None:
            return FailureCode.incompatible, differences
        if hello.rank != ours.rank:
            return (
                FailureCode.incompatible,
                f"rank (pp, tp): prefill engine {ours.engine_id!r} has {ours.rank}, "
                f"decode {hello.engine_id!r} has {hello.rank}",
            )
        return None

    def _welcome(self, link: LinkId, hello: wire.Hello, now_s: float) -> None:
        known = self._links.get(link)
        for other in [other for other in self._links.values() if other.hello.engine_id == hello.engine_id]:
            if other.link != link:
                self._supersede_link(other, hello, now_s)
        generation, effects = self._registry.admit(hello.engine_id, hello.incarnation, _shown(link))
        self._absorb(effects, now_s)
        if known is None:
            known = self._links[link] = _Link(link, hello)
        known.generation = generation
        ours = self._identity
        self._send(known, wire.Welcome(ours.engine_id, ours.incarnation, ours.rank, ours.agent_name))
        if self._config.eager_handshake and self._registry.need(generation) is Need.handshake:
            self._begin_handshake(known, generation)

    def _supersede_link(self, old: _Link, hello: wire.Hello, now_s: float) -> None:
        """The connection came back, or the engine restarted, before the old link's end was noticed."""
        del self._links[old.link]
        if old.hello.incarnation == hello.incarnation:
            self._drop_link(old, "its connection broke and came back", now_s)
        else:  # the registry retires the old incarnation when it admits the new one
            reason = f"decode engine {hello.engine_id!r} restarted"
            self._end_registrations(old, FailureCode.peer_restarted, reason, now_s, tell=False)

    def _goodbye(self, link: _Link, message: wire.Goodbye, now_s: float) -> None:
        self._links.pop(link.link, None)
        reason = f"decode engine {link.hello.engine_id!r} said goodbye: {message.reason}"
        self._end_registrations(link, FailureCode.closing, reason, now_s, tell=False)
        if link.generation is not None:
            self._absorb(self._registry.retire(link.generation, StaleReason.closing, reason), now_s)

    def _drop_link(self, link: _Link, detail: str, now_s: float) -> None:
        reason = f"decode engine {link.hello.engine_id!r} is lost: {detail}"
        self._end_registrations(link, FailureCode.peer_lost, reason, now_s, tell=False)
        if link.generation is not None:
            self._absorb(self._registry.lost(link.generation, detail, link_is_up=False), now_s)

    def _end_registrations(self, link: _Link, code: FailureCode, reason: str, now_s: float, *, tell: bool) -> None:
        """Everything that came over this link and has not ended, ends."""
        for transfer_id in list(link.transfer_ids):
            registration = self._registrations.get(transfer_id)
            if registration is not None and registration.link is link:
                if tell:
                    self._refuse_unmatched(registration, code, reason, now_s)
                else:
                    self._forget_unmatched(registration)
                continue
            push = self._pushes.get(transfer_id)
            if push is not None and push.registration is not None and push.registration.link is link:
                self._give_up(push, _Cause(Outcome.failed, code, reason), now_s)

    # --- registrations -----------------------------------------------------------------------------------------------

    def _register(self, link: _Link, message: wire.Register, now_s: float) -> None:
        self.counters["registrations"] += 1
        try:
            block_ids = wire.unpack_block_ids(message.block_ids)
            check_remote_ids(block_ids, _MAX_NUM_BLOCKS)
        except Failure as exc:
            self._send_failed(link, message.transfer_id, message.epoch, exc.code, exc.reason)
            return
        highest_id = int(block_ids.max()) if block_ids.size else -1
        registration = _Registration(
            link, message.transfer_id, message.epoch, message.first_block, block_ids, highest_id
        )
        refusal = self._place(registration, now_s)
        if refusal is not None:
            code, reason = refusal
            self.counters[f"registrations_refused_{code}"] += 1
            # asked again on a new link: a WRITE for the old one may still be in flight, and Drained follows its end
            is_settled = not self._owe_drain(link, message.epoch)
            self._send_failed(link, message.transfer_id, message.epoch, code, reason, settled=is_settled)
            return
        if self._registrations.get(message.transfer_id) is registration:
            due_s = now_s + message.remaining_ms / 1000 + REGISTRATION_GRACE_S
            self._timers.set(_Unmatched(message.transfer_id, message.epoch), due_s)

    def _place(self, new: _Registration, now_s: float) -> tuple[FailureCode, str] | None:
        """Match or park a registration; a code and reason when it is refused."""
        push = self._pushes.get(new.transfer_id)
        old = push.registration if push is not None else self._registrations.get(new.transfer_id)
        if old is not None:
            if _is_same(old, new):
                return None
            refusal = self._refuse_second(old, new, push)
            if refusal is not None:
                return refusal
        else:
            refusal = self._refuse_first(new, now_s) if push is None else self._refuse_again(new, now_s)
            if refusal is not None:
                return refusal
        if old is not None:
            self._timers.cancel(_Unmatched(old.transfer_id, old.epoch))
            self._unlink(old)
            self._send_failed(old.link, old.transfer_id, old.epoch, FailureCode.superseded, "registered again")
        new.link.transfer_ids.add(new.transfer_id)
        if push is None:
            self._registrations[new.transfer_id] = new
        else:
            self._match(push, new, now_s)
        return None

    def _refuse_second(
        self, old: _Registration, new: _Registration, push: _Push | None
    ) -> tuple[FailureCode, str] | None:
        """Another registration for a transfer that has one: the same engine's newest wins until the first byte."""
        if old.link.hello.engine_id != new.link.hello.engine_id:
            return FailureCode.claimed, f"transfer {new.transfer_id!r}: engine {old.engine_id!r} has registered for it"
        if old.link.hello.incarnation == new.link.hello.incarnation and new.epoch < old.epoch:
            return FailureCode.superseded, f"transfer {new.transfer_id!r}: epoch {old.epoch} is registered already"
        if push is not None and (push.in_flight or push.confirmed_blocks or push.cause is not None):
            return FailureCode.already_served, f"transfer {new.transfer_id!r} is being written to epoch {old.epoch}"
        return None

    def _refuse_first(self, new: _Registration, now_s: float) -> tuple[FailureCode, str] | None:
        tombstone = self._tombstones.find(new.transfer_id, now_s)
        if tombstone is not None:
            is_newer = new.link.hello.incarnation != tombstone.incarnation or new.epoch > tombstone.epoch
            if tombstone.is_push_awaited and tombstone.incarnation and is_newer:
                self._tombstones.forget(new.transfer_id)  # decode cancelled an earlier use of the id
            else:
                return _code_for_decode(tombstone.code), tombstone.reason
        if self._is_draining:
            return FailureCode.closing, f"prefill engine {self._identity.engine_id!r} takes no new work"
        if len(self._registrations) >= self._config.max_registrations:
            return FailureCode.queue_full, f"max_registrations={self._config.max_registrations} are waiting"
        if len(new.link.transfer_ids) >= self._config.max_registrations_per_engine:
            limit = self._config.max_registrations_per_engine
            return FailureCode.queue_full, f"max_registrations_per_engine={limit} of {new.engine_id!r} are waiting"
        return None

    def _refuse_again(self, new: _Registration, now_s: float) -> tuple[FailureCode, str] | None:
        """A registration of an earlier use of the id, asked again on a new link, is not for the push that is open now:
        its positions may have been written, and writing them twice would outlast decode's count of them."""
        tombstone = self._tombstones.find(new.transfer_id, now_s)
        if tombstone is None or tombstone.incarnation != new.link.hello.incarnation or new.epoch > tombstone.epoch:
            return None
        return _code_for_decode(tombstone.code), tombstone.reason

    def _cancelled_by_peer(self, link: _Link, message: wire.Cancel, now_s: float) -> None:
        """Answer Drained when no write of this epoch is or will be in flight: at once, or when the last one ends."""
        self.counters["cancels"] += 1
        transfer_id = message.transfer_id
        is_owed = self._owe_drain(link, message.epoch)
        push = self._pushes.get(transfer_id)
        if push is not None and push.registration is not None and _is_of(push.registration, link, message.epoch):
            push.registration.is_drain_owed = True
            reason = f"cancelled by decode engine {link.hello.engine_id!r}: {message.reason}"
            self._give_up(push, _Cause(Outcome.cancelled, FailureCode.cancelled_by_peer, reason), now_s)
            return
        waiting = self._registrations.get(transfer_id)
        if waiting is not None and _is_of(waiting, link, message.epoch):
            self._forget_unmatched(waiting)
            reason = f"cancelled by decode engine {link.hello.engine_id!r}: {message.reason}"
            self._bury(transfer_id, waiting, FailureCode.cancelled_by_peer, reason, now_s, is_push_awaited=True)
        if not is_owed:
            self._send(link, wire.Drained(transfer_id, message.epoch))

    def _owe_drain(self, link: _Link, epoch: int) -> bool:
        """Whether WRITEs of this engine's registration are in flight: ``Drained`` goes to ``link`` at their end."""
        owed = [
            write.registration
            for write in (*self._writes.values(), *self._doubtful.values())
            if write.registration.epoch == epoch and write.registration.link.hello.incarnation == link.hello.incarnation
        ]
        for registration in owed:
            registration.is_drain_owed = True
            registration.link = link  # decode may have come back on a new one
        return bool(owed)

    def _renew(self, link: _Link, message: wire.Renew, now_s: float) -> None:
        for transfer_id in message.transfer_ids:
            push = self._pushes.get(transfer_id)
            if push is None or push.cause is not None:
                continue
            if push.registration is None or push.registration.link is link:
                self.counters["leases_renewed"] += 1
                self._extend_lease(push, now_s + self._config.lease_s)

    def _refuse_unmatched(self, registration: _Registration, code: FailureCode, reason: str, now_s: float) -> None:
        """A registration that nothing was pushed for ends; the push that may still come ends with it."""
        self._forget_unmatched(registration)
        theirs = _code_for_decode(code)
        self._send_failed(registration.link, registration.transfer_id, registration.epoch, theirs, reason)
        if code not in (FailureCode.closing, FailureCode.engine_dropped, FailureCode.queue_full):
            self._bury(registration.transfer_id, registration, code, reason, now_s, is_push_awaited=True)

    def _forget_unmatched(self, registration: _Registration) -> None:
        del self._registrations[registration.transfer_id]
        self._timers.cancel(_Unmatched(registration.transfer_id, registration.epoch))
        self._unlink(registration)

    @staticmethod
    def _unlink(registration: _Registration) -> None:
        registration.link.transfer_ids.discard(registration.transfer_id)

    # --- a push on its way -------------------------------------------------------------------------------------------

    def _open_push(self, transfer_id: str, now_s: float) -> _Push | None:
        """A new push; ``None`` when it ends at once, because it was cancelled before its blocks existed."""
        self.counters["pushes"] += 1
        push = _Push(transfer_id, now_s, now_s + self._config.lease_s)
        tombstone = self._tombstones.find(transfer_id, now_s)
        self._pushes[transfer_id] = push
        if tombstone is not None and tombstone.is_push_awaited:
            self._give_up(push, _Cause(Outcome.cancelled, tombstone.code, tombstone.reason), now_s)
            return None
        registration = self._registrations.pop(transfer_id, None)
        if registration is not None:
            self._timers.cancel(_Unmatched(transfer_id, registration.epoch))
            push.registration = registration
        return push

    def _match(self, push: _Push, registration: _Registration, now_s: float) -> None:
        push.registration = registration
        push.pieces.clear()
        push.covered_blocks = 0
        for index in range(len(push.chunks)):
            self._cut(push, index)
        self._advance(push, now_s)

    @staticmethod
    def _cut(push: _Push, index: int) -> None:
        """Queue the positions of one chunk that decode asked for."""
        chunk, wanted = push.chunks[index], push.registration
        assert wanted is not None, "only a matched push is cut"
        part = overlap(wanted.first_block, wanted.block_ids, chunk.first_block, chunk.block_ids)
        if part is not None:
            push.covered_blocks += len(part.local_ids)
            push.pieces.append(_Piece(index, part.first_block, part.local_ids, part.remote_ids))

    def _advance(self, push: _Push, now_s: float) -> None:
        """Take a matched push as far as it can go now."""
        wanted = push.registration
        assert wanted is not None, "only a matched push advances"
        assert push.cause is None, "an ending push does not advance"
        shortage = self._shortage(push, wanted)
        if shortage is not None:
            self._give_up(push, _Cause(Outcome.failed, FailureCode.bad_blocks, shortage), now_s)
        elif push.is_last_known and push.confirmed_blocks == len(wanted.block_ids):
            self._conclude(push, _Cause(Outcome.done, None, ""), now_s)
        elif push.pieces:
            self._queue(push, now_s)
        elif push.state is PushState.writing and not push.in_flight:
            self._fire(push, PushTrigger.caught_up)
            self._extend_lease(push, now_s + self._config.lease_s)

    @staticmethod
    def _shortage(push: _Push, wanted: _Registration) -> str | None:
        """Prefill must hold every position that decode asks for; known once the last chunk is there."""
        if not push.is_last_known or push.covered_blocks == len(wanted.block_ids):
            return None
        return (
            f"transfer {push.transfer_id!r}: decode engine {wanted.engine_id!r} asks for {len(wanted.block_ids)} "
            f"blocks from position {wanted.first_block}, prefill pushed {push.held_blocks}, which cover "
            f"{push.covered_blocks} of these"
        )

    def _queue(self, push: _Push, now_s: float) -> None:
        """Put a push with pieces into its engine's line, or behind its handshake."""
        assert push.registration is not None, "only a matched push is queued"
        link = push.registration.link
        generation, need = self._serving_generation(link, now_s)
        if generation is None:
            return  # the link's engine was refused room; the push has been given up
        if push.generation != generation:
            self._undefer(push)
            push.generation = generation
        if need is Need.write:
            if not push.is_queued:
                push.is_queued = True
                self._lines.setdefault(generation, deque()).append(push)
            self._pump(now_s)
            return
        self._defer(push, link, generation, now_s)
        if need is Need.handshake:
            self._begin_handshake(link, generation)

    def _serving_generation(self, link: _Link, now_s: float) -> tuple[int | None, Need]:
        """The generation that serves this link's engine, a new one when the last is over while the link lives on, and
        what a push has to do there."""
        if link.generation is not None:
            need = self._registry.need(link.generation)
            if need is not Need.gone:
                return link.generation, need
        hello = link.hello
        try:
            link.generation, effects = self._registry.admit(hello.engine_id, hello.incarnation, _shown(link.link))
        except QueueFull as exc:
            self._end_registrations(link, FailureCode.queue_full, str(exc), now_s, tell=True)
            return None, Need.gone
        self._absorb(effects, now_s)
        return link.generation, self._registry.need(link.generation)

    def _defer(self, push: _Push, link: _Link, generation: int, now_s: float) -> None:
        behind = self._deferred.setdefault(generation, OrderedDict())
        if push.transfer_id in behind:
            return
        if len(behind) >= self._config.max_deferred_per_engine:
            limit = self._config.max_deferred_per_engine
            reason = f"max_deferred_per_engine={limit} pushes wait for engine {link.hello.engine_id!r} already"
            self._give_up(push, _Cause(Outcome.failed, FailureCode.queue_full, reason), now_s)
            return
        behind[push.transfer_id] = push
        self.counters["pushes_deferred"] += 1
        if push.state is PushState.waiting:
            self._fire(push, PushTrigger.engine_awaited)

    def _undefer(self, push: _Push) -> None:
        generation = push.generation
        if generation is None or generation not in self._deferred:
            return
        behind = self._deferred[generation]
        behind.pop(push.transfer_id, None)
        if not behind:
            del self._deferred[generation]

    def _pump(self, now_s: float) -> None:
        """Post what is ready, one piece of each engine's line in turn, within ``max_in_flight_bytes``."""
        has_posted = True
        while has_posted:
            has_posted = False
            for generation in list(self._lines):
                line = self._lines.get(generation)
                has_moved = bool(line and self._post_next(line, now_s))
                has_posted |= has_moved
                if not self._lines.get(generation):
                    self._lines.pop(generation, None)
                elif has_moved:
                    self._lines.move_to_end(generation)  # so that the next pump begins with another engine

    def _post_next(self, line: deque[_Push], now_s: float) -> bool:
        """Post the first push's next piece. ``False``: nothing of this line can be posted for now."""
        push = line[0]
        piece = self._next_piece(push)
        if push.cause is not None or piece is None:
            self._leave_line(line)
            return True
        num_bytes = len(piece.local_ids) * self._block_len_bytes
        if self._must_wait(push, num_bytes):
            return False
        if not self._recheck(push, now_s):
            self._leave_line(line)
            return True
        assert push.generation is not None, "a queued push has its generation"
        peer = self._registry.pin(push.generation)
        if peer is None:
            self._leave_line(line)
            self._queue(push, now_s)  # the engine changed between queueing and posting
            return True
        push.pieces.remove(piece)
        if not push.pieces:
            self._leave_line(line)
        self._post(push, piece, peer, num_bytes, now_s)
        return True

    def _must_wait(self, push: _Push, num_bytes: int) -> bool:
        """Back-pressure. An engine with nothing in flight may always post one piece, or a dead or busy one would hold
        up the others."""
        if self._in_flight_bytes + num_bytes <= self._config.max_in_flight_bytes:
            return False
        return push.generation is not None and self._registry.pins_of(push.generation) > 0

    @staticmethod
    def _leave_line(line: deque[_Push]) -> None:
        line.popleft().is_queued = False

    @staticmethod
    def _next_piece(push: _Push) -> _Piece | None:
        for piece in push.pieces:
            if not push.chunks[piece.chunk].is_fenced:
                return piece
        return None

    @staticmethod
    def _is_lease_running(push: _Push) -> bool:
        """Blocks wait for a registration or an engine, or decode has been served and waits no more. Not while decode
        waits for the caller's next chunk: its own deadline ends that."""
        wanted = push.registration
        waits = wanted is None or bool(push.pieces) or push.confirmed_blocks == len(wanted.block_ids)
        return waits and push.cause is None and push.state is not PushState.writing

    def _recheck(self, push: _Push, now_s: float) -> bool:
        """Just before a WRITE: still wanted, same registration, lease alive. (The pin checks the generation.)"""
        if push.state is not PushState.writing and now_s >= push.lease_until_s:
            self._expire(push, now_s)
            return False
        return True

    def _post(self, push: _Push, piece: _Piece, peer: LoadedPeer, num_bytes: int, now_s: float) -> None:
        """The engine is pinned. From here on exactly one :meth:`write_settled` follows."""
        wanted = push.registration
        assert wanted is not None
        assert push.generation is not None
        self._last_write_id += 1
        write_id = self._last_write_id
        self._writes[write_id] = _Write(push, wanted, push.generation, len(piece.local_ids), num_bytes, num_bytes)
        self._in_flight_bytes += num_bytes
        push.in_flight.add(write_id)
        self._timers.cancel(_Lease(push.transfer_id))
        self._fire(push, PushTrigger.write_posted)
        if wanted.highest_id >= peer.num_blocks:
            reason = (
                f"transfer {push.transfer_id!r}: engine {wanted.engine_id!r} asks for block {wanted.highest_id}, "
                f"but its cache has {peer.num_blocks}"
            )
            self._settled(write_id, Failure(FailureCode.bad_blocks, reason), now_s)
            return
        self._timers.set(_Stall(write_id), now_s + self._config.stall_timeout_s)
        notification = wire.encode_written(
            wire.Written(wanted.epoch, self._identity.rank, piece.chunk, piece.first_block, len(piece.local_ids))
        )
        self._out.append(PostWrite(write_id, peer, piece.local_ids, piece.remote_ids, notification))

    # --- from the transport ------------------------------------------------------------------------------------------

    def peer_loaded(self, generation: int, attempt: int, peer: LoadedPeer, now_s: float) -> list[Effect]:
        """The agent and the descriptors are ready. Deferred pushes go on, each checked again before its WRITE."""
        if not self._registry.handshake_succeeded(generation, attempt, peer):
            self.counters["handshakes_late"] += 1
            self._out.append(ReleasePeer(peer))
            return self._effects()
        self.counters["handshakes_succeeded"] += 1
        self._resume(generation, now_s)
        return self._effects()

    def peer_failed(self, generation: int, attempt: int, failure: Failure, now_s: float) -> list[Effect]:
        """Loading failed, and left nothing behind."""
        self._fail_handshake(generation, attempt, failure, now_s)
        return self._effects()

    def write_settled(self, write_id: int, failure: Failure | None, now_s: float) -> list[Effect]:
        """A WRITE ended: confirmed, or failed so that no byte of it lands later."""
        self._settled(write_id, failure, now_s)
        self._pump(now_s)
        return self._effects()

    def write_doubted(self, write_id: int, failure: Failure, now_s: float) -> list[Effect]:
        """A WRITE failed and cannot be asked any more, but bytes of it may still land: only our agent's end proves it
        quiet. Until then, or until the hold runs out, its blocks are held."""
        write = self._end_write(write_id)
        self.counters[f"writes_failed_{failure.code}"] += 1
        self._doubtful[write_id] = write
        while len(self._doubtful) > self._config.max_tombstones:
            self._doubtful.popitem(last=False)
        if write.push.state in (PushState.writing, PushState.draining):
            self._doubt(write.push, _Cause(Outcome.failed, failure.code, failure.reason), now_s)
        self._absorb(self._registry.settle(write.generation, ok=False), now_s)
        self._absorb(self._registry.lost(write.generation, failure.reason, link_is_up=True), now_s)
        self._pump(now_s)
        return self._effects()

    def _end_write(self, write_id: int) -> _Write:
        """Nobody asks for this WRITE any more."""
        write = self._writes.pop(write_id)
        self._timers.cancel(_Stall(write_id))
        self._discount(write)
        return write

    def _discount(self, write: _Write) -> None:
        self._in_flight_bytes -= write.counted_bytes
        write.counted_bytes = 0

    def _settled(self, write_id: int, failure: Failure | None, now_s: float) -> None:
        write = self._end_write(write_id)
        push = write.push
        push.in_flight.discard(write_id)
        self._absorb(self._registry.settle(write.generation, ok=failure is None), now_s)
        if failure is None:
            push.confirmed_blocks += write.num_blocks
            push.num_bytes += write.num_bytes
            self.counters["bytes_written"] += write.num_bytes
        else:
            self._write_failed(write, failure, now_s)
        self._after_settle(push, write.registration, now_s)

    def _write_failed(self, write: _Write, failure: Failure, now_s: float) -> None:
        self.counters[f"writes_failed_{failure.code}"] += 1
        push = write.push
        if push.cause is None:
            self._begin_end(push, _Cause(Outcome.failed, failure.code, failure.reason), now_s)
        if isinstance(failure, TransportError):
            # NIXL keeps a failed agent loaded and broken: only a new generation with a new handshake heals it
            self._absorb(self._registry.lost(write.generation, failure.reason, link_is_up=True), now_s)

    def _after_settle(self, push: _Push, registration: _Registration, now_s: float) -> None:
        if push.in_flight:
            return
        if push.state in PUSH.final:
            self._pay_drain(registration)  # the hold ran out before; decode may still wait for proof
        elif push.state is PushState.in_doubt:
            self._end_hold(push, proven=True, reason="the WRITE ended")
        elif push.cause is not None:
            self._conclude(push, push.cause, now_s)
        else:
            self._advance(push, now_s)

    # --- handshakes --------------------------------------------------------------------------------------------------

    def _begin_handshake(self, link: _Link, generation: int) -> None:
        attempt = self._registry.begin_handshake(generation)
        if attempt is not None:
            self.counters["handshakes_started"] += 1
            self._send(link, wire.MetadataRequest(attempt))

    def _metadata(self, link: _Link, message: wire.Metadata, now_s: float) -> None:
        generation = link.generation
        if generation is None or not self._registry.is_attempt_current(generation, message.attempt):
            self.counters["handshakes_late"] += 1
            return
        hello = link.hello
        try:
            geometry = metadata.verify(message, incarnation=hello.incarnation, agent_name=hello.agent_name)
        except Failure as exc:
            self._fail_handshake(generation, message.attempt, exc, now_s)
            return
        self._out.append(
            LoadPeer(hello.engine_id, generation, message.attempt, hello.agent_name, message.blob, geometry)
        )

    def _fail_handshake(self, generation: int, attempt: int, failure: Failure, now_s: float) -> None:
        if not self._registry.handshake_failed(generation, attempt, failure.reason):
            self.counters["handshakes_late"] += 1
            return
        self.counters[f"handshakes_failed_{failure.code}"] += 1
        self._tell_waiters(generation, failure, now_s)

    def _tell_waiters(self, generation: int, failure: Failure, now_s: float) -> None:
        """Every deferred push learns of the failure: it waits for the next attempt, or ends with this cause."""
        behind = self._deferred.get(generation, OrderedDict())
        for push in list(behind.values()):
            push.failed_attempts += 1
            if not failure.is_retryable or push.failed_attempts >= self._config.handshake_attempts:
                self._give_up(push, _Cause(Outcome.failed, failure.code, failure.reason), now_s)
        if behind:
            self._registry.need(generation)  # asks for RetryDue when the backoff is over

    def _resume(self, generation: int, now_s: float) -> None:
        for push in self._deferred.pop(generation, OrderedDict()).values():
            if push.cause is None:  # one before it may have ended everything of this link
                self._advance(push, now_s)

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
                        self._out.append(ReleasePeer(effect.resource))
                    self._resume(effect.generation, now_s)  # an unknown engine may age out behind its backoff

    def _went_stale(self, effect: WentStale, now_s: float) -> None:
        """Decide on what waits for this generation: a live link goes on under a new one, everything else fails."""
        self.counters[f"engines_stale_{effect.reason}"] += 1
        for link in [link for link in self._links.values() if link.generation == effect.generation]:
            if not effect.link_is_up:
                del self._links[link.link]
                reason = f"decode engine {effect.engine_id!r} is lost: {effect.detail}"
                self._end_registrations(link, FailureCode.peer_lost, reason, now_s, tell=False)
        waiting = list(self._deferred.pop(effect.generation, OrderedDict()).values())
        waiting += self._lines.pop(effect.generation, deque())
        for push in waiting:
            push.is_queued = False
            if push.cause is not None:
                continue
            if effect.reason in (StaleReason.lost, StaleReason.idle):
                self._advance(push, now_s)
            else:
                code = {
                    StaleReason.superseded: FailureCode.superseded,
                    StaleReason.dropped: FailureCode.engine_dropped,
                }.get(effect.reason, FailureCode.closing)
                self._give_up(push, _Cause(Outcome.failed, code, effect.detail), now_s)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _expire(self, push: _Push, now_s: float) -> None:
        if push.registration is not None and push.confirmed_blocks == len(push.registration.block_ids):
            # decode has everything that it asked for; the caller, it seems, forgot the last chunk
            self._conclude(push, _Cause(Outcome.done, None, ""), now_s)
            return
        registered = "no decode engine registered for it" if push.registration is None else "it could not be written"
        reason = f"transfer {push.transfer_id!r}: the lease of {self._config.lease_s:g} s ended and {registered}"
        self._give_up(push, _Cause(Outcome.expired, FailureCode.lease_expired, reason), now_s)

    def _give_up(self, push: _Push, cause: _Cause, now_s: float) -> None:
        """End a push for ``cause``, unless it is ending already: the first root cause stays."""
        if push.cause is None:
            self._begin_end(push, cause, now_s)
            if not push.in_flight:
                self._conclude(push, cause, now_s)

    def _begin_end(self, push: _Push, cause: _Cause, now_s: float) -> None:
        """Keep the cause, post nothing more, and tell decode at once when a WRITE is still in flight."""
        push.cause = cause
        push.pieces.clear()
        self._timers.cancel(_Lease(push.transfer_id))
        self._undefer(push)
        if push.in_flight:
            self._fire(push, PushTrigger.given_up)
            self._tell_unsettled(push, cause)

    def _tell_unsettled(self, push: _Push, cause: _Cause) -> None:
        wanted = push.registration
        if wanted is not None and not wanted.is_drain_owed:
            wanted.is_drain_owed = True
            code = _code_for_decode(cause.code or FailureCode.internal)
            self._send_failed(wanted.link, push.transfer_id, wanted.epoch, code, cause.reason, settled=False)

    def _conclude(self, push: _Push, cause: _Cause, now_s: float) -> None:
        """The one outcome. Nothing is in flight, so the blocks are the caller's."""
        assert not push.in_flight, "an outcome with reusable blocks needs every WRITE to have ended"
        push.cause = cause
        self._undefer(push)
        self._fire(push, _TRIGGER_OF[cause.outcome])
        self._report(push, cause, now_s, blocks_reusable=True)
        self._forget(push, cause, now_s)
        self._settle_account(push, cause)

    def _doubt(self, push: _Push, cause: _Cause, now_s: float) -> None:
        """A WRITE neither ends nor fails: report the outcome, hold the blocks, go on polling."""
        cause = push.cause = push.cause or cause
        push.pieces.clear()
        self._undefer(push)
        self.counters["pushes_in_doubt"] += 1
        self._fire(push, PushTrigger.stalled)
        self._tell_unsettled(push, cause)
        self._report(push, cause, now_s, blocks_reusable=False)
        self._forget(push, cause, now_s)
        self._held[push] = None
        self._timers.set(_Hold(push), now_s + self._config.hold_timeout_s)

    def _end_hold(self, push: _Push, *, proven: bool, reason: str) -> None:
        cause = push.cause
        assert cause is not None, "a push in doubt has its cause"
        self._fire(push, _TRIGGER_OF[cause.outcome])
        self._timers.cancel(_Hold(push))
        del self._held[push]
        self._out.append(Emit(BlocksReleased(push.transfer_id, proven, reason)))
        if proven:
            self._settle_account(push, cause)

    def _report(self, push: _Push, cause: _Cause, now_s: float, *, blocks_reusable: bool) -> None:
        self.counters[f"pushes_{cause.outcome}"] += 1
        wanted = push.registration
        self._out.append(
            Emit(
                PushFinished(
                    transfer_id=push.transfer_id,
                    outcome=cause.outcome,
                    engine_id=None if wanted is None else wanted.engine_id,
                    code=cause.code,
                    reason=cause.reason,
                    blocks_reusable=blocks_reusable,
                    num_bytes=push.num_bytes,
                    duration_s=now_s - push.opened_s,
                )
            )
        )

    def _forget(self, push: _Push, cause: _Cause, now_s: float) -> None:
        """Leave a tombstone: the id may be used again."""
        del self._pushes[push.transfer_id]
        self._timers.cancel(_Lease(push.transfer_id))
        wanted = push.registration
        code = cause.code or FailureCode.already_served
        reason = cause.reason or f"transfer {push.transfer_id!r} was served already"
        self._bury(push.transfer_id, wanted, code, reason, now_s, is_push_awaited=False)
        if wanted is not None:
            self._unlink(wanted)

    def _settle_account(self, push: _Push, cause: _Cause) -> None:
        """Nothing is in flight: give decode the proof that it waits for, or the news."""
        wanted = push.registration
        if wanted is None:
            return
        if wanted.is_drain_owed:
            self._pay_drain(wanted)
        elif cause.outcome is not Outcome.done:
            code = _code_for_decode(cause.code or FailureCode.internal)
            self._send_failed(wanted.link, push.transfer_id, wanted.epoch, code, cause.reason)

    def _pay_drain(self, registration: _Registration) -> None:
        if registration.is_drain_owed:
            registration.is_drain_owed = False
            self._send(registration.link, wire.Drained(registration.transfer_id, registration.epoch))

    def _bury(
        self,
        transfer_id: str,
        registration: _Registration | None,
        code: FailureCode,
        reason: str,
        now_s: float,
        *,
        is_push_awaited: bool,
    ) -> None:
        tombstone = Tombstone(code, reason, is_push_awaited)
        if registration is not None:
            tombstone.incarnation = registration.link.hello.incarnation
            tombstone.epoch = registration.epoch
        self._tombstones.bury(transfer_id, tombstone, now_s)

    # --- time --------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Effect]:
        """Whatever is due: leases, stalls, holds, registrations, and the registry's sweep."""
        for key in self._timers.pop_due(now_s):
            self._timer_fired(key, now_s)
        self._absorb(self._registry.sweep(), now_s)
        self._pump(now_s)
        return self._effects()

    def next_due_s(self) -> float | None:
        """When :meth:`tick` is due next; ``None`` when only an event can change anything."""
        times = [due_s for due_s in (self._timers.next_due_s(), self._registry.next_due_s()) if due_s is not None]
        return min(times, default=None)

    def _timer_fired(self, key: _TimerKey, now_s: float) -> None:
        match key:
            case _Lease(transfer_id):
                push = self._pushes.get(transfer_id)
                if push is not None and self._is_lease_running(push):
                    self._expire(push, now_s)
            case _Unmatched(transfer_id, epoch):
                registration = self._registrations.get(transfer_id)
                if registration is not None and registration.epoch == epoch:
                    self.counters["registrations_expired"] += 1
                    reason = f"transfer {transfer_id!r}: nothing was pushed before the registration's deadline"
                    self._refuse_unmatched(registration, FailureCode.deadline, reason, now_s)
            case _Stall(write_id):
                self._stalled(write_id, now_s)
            case _Hold(push):
                self._hold_timed_out(push)

    def _stalled(self, write_id: int, now_s: float) -> None:
        write = self._writes[write_id]
        self.counters["writes_stalled"] += 1
        self._discount(write)  # it may never end, and the others' WRITEs go on
        reason = (
            f"transfer {write.push.transfer_id!r}: the WRITE to engine {write.registration.engine_id!r} neither ended "
            f"nor failed within {self._config.stall_timeout_s:g} s"
        )
        if write.push.state in (PushState.writing, PushState.draining):
            self._doubt(write.push, _Cause(Outcome.failed, FailureCode.write_stalled, reason), now_s)
        self._absorb(self._registry.lost(write.generation, reason, link_is_up=True), now_s)

    def _hold_timed_out(self, push: _Push) -> None:
        self.counters["holds_timed_out"] += 1
        if self._config.hold_policy is HoldPolicy.release:
            reason = f"hold_timeout_s={self._config.hold_timeout_s:g} passed: a late WRITE may still read the blocks"
            self._end_hold(push, proven=False, reason=reason)

    # --- small things ------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """WRITEs that are posted and not settled."""
        return len(self._writes)

    @property
    def num_pushes(self) -> int:
        """Pushes without an outcome, and those whose blocks are held."""
        return len(self._pushes) + len(self._held)

    def gauges(self) -> dict[str, int]:
        """Sizes of everything that is bounded."""
        return {
            "links": len(self._links),
            "pushes_open": len(self._pushes),
            "registrations_waiting": len(self._registrations),
            "pushes_behind_handshakes": sum(map(len, self._deferred.values())),
            "pushes_in_lines": sum(map(len, self._lines.values())),
            "writes_in_flight": len(self._writes),
            "bytes_in_flight": self._in_flight_bytes,
            "pushes_held": len(self._held),
            "writes_doubtful": len(self._doubtful),
            "tombstones": len(self._tombstones),
            "timers": len(self._timers),
        }

    def _extend_lease(self, push: _Push, until_s: float) -> None:
        push.lease_until_s = max(push.lease_until_s, until_s)
        if push.state is not PushState.writing:
            self._timers.set(_Lease(push.transfer_id), push.lease_until_s)

    def _fire(self, push: _Push, trigger: PushTrigger) -> None:
        PUSH.fire(push, trigger)

    def _send(self, link: _Link, message: wire.ToDecode) -> None:
        if link.link in self._links:
            self._out.append(Send(link.link, message))

    def _send_failed(
        self, link: _Link, transfer_id: str, epoch: int, code: FailureCode, reason: str, *, settled: bool = True
    ) -> None:
        self._send(link, wire.Failed(transfer_id, epoch, code, wire.clip_reason(reason), settled))

    def _effects(self) -> list[Effect]:
        out, self._out = self._out, []
        return out


def _is_same(old: _Registration, new: _Registration) -> bool:
    return old.epoch == new.epoch and old.link is new.link


def _is_of(registration: _Registration, link: _Link, epoch: int) -> bool:
    return registration.epoch == epoch and registration.link is link


def _code_for_decode(code: FailureCode) -> FailureCode:
    """What prefill's own caller did is, to decode, what its peer did."""
    return FailureCode.cancelled_by_peer if code is FailureCode.cancelled_by_caller else code


def _shown(link: LinkId) -> str:
    """A link's id for people: decode dials, so prefill knows it by its connection and not by an address."""
    return f"link {link.hex()}"
