"""The pure core of the decode side: events and the time in, effects out. No clock, thread, socket or NIXL in here.

It dials prefill engines, registers receives with them, counts the positions that have arrived, and gives every receive
its one outcome. :mod:`kvpush.receiver` is the loop around it; ``kvpush.testing`` drives the same code under a fake
clock.

Caller's duties: as in :mod:`kvpush.prefill`. Every :class:`Dial` is answered by ``link_opened`` or ``link_closed``, and
a link that was opened by one ``link_closed``, unless this side hung it up.

What makes blocks reusable. A WRITE that was posted cannot be revoked, so after a failure, a cancel or the deadline the
blocks are *held* until one of these proves that no write can touch them: prefill says ``Drained`` or
``Failed(settled)``, every position has arrived, or prefill's process is gone (its port refuses, another incarnation
answers there, or it said goodbye, which it does only after its agent is destroyed). A receive that was never registered
holds nothing. A hold that outlives ``hold_timeout_s`` ends by ``hold_policy``.

A link that closes says nothing about the process behind it: decode dials again, and what answers decides.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpush import metadata, wire
from kvpush.config import Config, HoldPolicy
from kvpush.errors import Failure, FailureCode, QueueFull, RemoteProtocolError
from kvpush.events import BlocksReleased, Outcome, ReceiveFinished, StaleReason
from kvpush.identity import Identity
from kvpush.layout import CacheGeometry
from kvpush.lifecycle import RECEIVE, ReceiveState, ReceiveTrigger
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

LinkId = int
BlockIds = npt.NDArray[np.int64]
Address = tuple[str, int]

MAX_NOTICES = 1024  # empty registrations kept for one engine that is not connected yet

# An engine that was superseded or dropped is not asked again what became of it.
_FORSAKEN = {
    StaleReason.superseded: FailureCode.superseded,
    StaleReason.dropped: FailureCode.engine_dropped,
}
_CANCELLED_CODES = (FailureCode.cancelled_by_peer, FailureCode.cancelled_by_caller)


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a connection to ``address`` under this link id, which is never used twice."""

    link: LinkId
    address: Address


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the connection; what was sent before may be delivered still. No ``link_closed`` follows."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` on ``link``. A link that is gone or full ends: answer with ``link_closed``."""

    link: LinkId
    message: wire.ToPrefill


@dataclass(frozen=True, slots=True)
class Emit:
    """Give the caller an event."""

    event: ReceiveFinished | BlocksReleased


Effect = Dial | HangUp | Send | Emit


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Receive:
    """One expect(). ``state`` is written by the lifecycle alone."""

    transfer_id: str
    epoch: int
    engine_id: str
    first_block: int
    block_ids: BlockIds
    opened_s: float
    deadline_s: float
    arrived: npt.NDArray[np.bool_]  # by position, relative to first_block
    num_missing: int
    state: ReceiveState = RECEIVE.initial
    wanted_incarnation: str = ""  # of prefill, when the caller knows which one holds the blocks
    registered_with: str | None = None  # prefill's incarnation, once Register was sent to it
    writer_agent: str = ""  # prefill's NIXL agent, the only one whose notifications count
    home: int | None = None  # the generation whose record lists it
    pinned: int | None = None  # the generation that it pins
    failed_attempts: int = 0  # dials that it waited through
    num_under_way: int = 0  # positions that prefill said it writes, less those that arrived; negative: it came late

    @property
    def is_open(self) -> bool:
        """No outcome yet."""
        return self.state in (ReceiveState.registered, ReceiveState.receiving)


@dataclass(slots=True, eq=False)
class _Prefill:
    """One generation of a prefill engine, with the link to it and the receives that need it."""

    engine_id: str
    address: Address
    generation: int
    link: LinkId | None = None
    attempt: int = 0
    is_up: bool = False  # Welcome came
    incarnation: str = ""
    agent_name: str = ""
    receives: dict[int, _Receive] = field(default_factory=dict)  # by epoch: open or holding
    unsent: dict[int, _Receive] = field(default_factory=dict)  # those of them that this link has not told prefill about
    notices: list[wire.Register] = field(default_factory=list)  # empty registrations, to be sent once it is up
    renewals: dict[str, None] = field(default_factory=dict)  # transfer ids to renew once it is up


# timer keys
@dataclass(frozen=True, slots=True)
class _Deadline:
    epoch: int


@dataclass(frozen=True, slots=True)
class _Hold:
    epoch: int


@dataclass(frozen=True, slots=True)
class _Beat:
    link: LinkId


_TimerKey = _Deadline | _Hold | _Beat


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
        self._config = config
        self._registry = registry
        self._out: list[Effect] = []
        self._prefills: dict[int, _Prefill] = {}  # by generation
        self._links: dict[LinkId, _Prefill] = {}
        self._receives: dict[int, _Receive] = {}  # by epoch: open or holding
        self._open: dict[str, _Receive] = {}  # by transfer id: open
        self._under_way: set[int] = set()  # epochs of receives that a WRITE is under way to
        self._last_epoch = 0
        self._last_link = 0
        self._timers: Timers[_TimerKey] = Timers()

    # --- from the caller ---------------------------------------------------------------------------------------------

    def expect(
        self,
        transfer_id: str,
        block_ids: BlockIds,
        *,
        address: Address,
        engine_id: str,
        first_block: int,
        deadline_s: float,
        now_s: float,
        incarnation: str = "",
    ) -> list[Effect]:
        """Position ``first_block + i`` of the transfer goes into local block ``block_ids[i]``.

        ``deadline_s`` counts from now. ``incarnation``: the only one of prefill's that can serve it; empty: whichever
        answers. The blocks belong to kvpush until it says that they are reusable.
        """
        self.counters["receives"] += 1
        self._last_epoch += 1
        receive = _Receive(
            transfer_id,
            self._last_epoch,
            engine_id,
            first_block,
            block_ids,
            opened_s=now_s,
            deadline_s=now_s + deadline_s,
            arrived=np.zeros(len(block_ids), dtype=np.bool_),
            num_missing=len(block_ids),
            wanted_incarnation=incarnation,
        )
        self._receives[receive.epoch] = receive
        self._open[transfer_id] = receive
        try:
            prefill = self._prefill_at(engine_id, address, now_s)
        except QueueFull as exc:
            self._end(receive, Outcome.failed, FailureCode.queue_full, str(exc), now_s, is_quiet=True)
            return self._effects()
        if receive.num_missing == 0:
            self._notice(prefill, self._registration(receive, now_s))
            self._complete(receive, now_s)
        else:
            self._timers.set(_Deadline(receive.epoch), receive.deadline_s)
            self._house(prefill, receive)
        self._use(prefill, now_s)
        return self._effects()

    def cancel(self, transfer_id: str, now_s: float) -> list[Effect]:
        """The caller gives up. Known or not, in any state, twice: never an error."""
        receive = self._open.get(transfer_id)
        if receive is not None:
            reason = f"cancelled by decode engine {self._identity.engine_id!r}"
            self._give_up(receive, Outcome.cancelled, FailureCode.cancelled_by_caller, reason, now_s)
        return self._effects()

    def renew(self, transfer_ids: list[str], *, address: Address, engine_id: str, now_s: float) -> list[Effect]:
        """Requests for these transfers still queue here: ask prefill to keep their blocks for one more lease."""
        try:
            prefill = self._prefill_at(engine_id, address, now_s)
        except QueueFull:  # nobody waits for an answer, and the leases may outlast the queue
            self.counters["renewals_dropped"] += len(transfer_ids)
            return self._effects()
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
        generation = self._registry.generation_of(engine_id)
        if generation is not None:
            self._absorb(self._registry.retire(generation, StaleReason.dropped, reason), now_s)
        return self._effects()

    def close(self, now_s: float) -> list[Effect]:
        """Cancel everything. What prefill acknowledges in time is released; the rest is reported as held."""
        for receive in list(self._open.values()):
            self._give_up(
                receive,
                Outcome.failed,
                FailureCode.closing,
                f"decode engine {self._identity.engine_id!r} shuts down",
                now_s,
            )
        return self._effects()

    def transport_closed(self, now_s: float) -> list[Effect]:
        """The agent is destroyed. Say goodbye and hang up; what is still held stays unproven."""
        for link, prefill in list(self._links.items()):
            if prefill.is_up:
                self._out.append(Send(link, wire.Goodbye(f"decode engine {self._identity.engine_id!r} shuts down")))
            self._hang_up(prefill)
        return self._effects()

    # --- from the links ----------------------------------------------------------------------------------------------

    def link_opened(self, link: LinkId, now_s: float) -> list[Effect]:
        """The connection stands: introduce ourselves."""
        prefill = self._links.get(link)
        if prefill is not None:
            ours = self._identity
            hello = wire.Hello(
                ours.engine_id, ours.incarnation, ours.rank, prefill.engine_id, ours.fingerprint, ours.agent_name
            )
            self._out.append(Send(link, hello))
        return self._effects()

    def link_closed(self, link: LinkId, reason: str, now_s: float, *, refused: bool) -> list[Effect]:
        """The connection is gone, or never came up. ``refused``: nobody listens at the address."""
        prefill = self._links.pop(link, None)
        if prefill is not None:
            prefill.link = None
            self._timers.cancel(_Beat(link))
            detail = f"prefill engine {prefill.engine_id!r} at {_shown(prefill.address)}: {reason}"
            if prefill.is_up:
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

    def _welcomed(self, prefill: _Prefill, message: wire.Welcome, now_s: float) -> None:
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
        self._registry.name_incarnation(prefill.generation, message.incarnation)
        if not self._registry.handshake_succeeded(prefill.generation, prefill.attempt, prefill):
            return  # timed out a moment ago; the retry is under way
        self.counters["handshakes_succeeded"] += 1
        prefill.is_up = True
        prefill.incarnation = message.incarnation
        prefill.agent_name = message.agent_name
        assert prefill.link is not None, "a message came over it"
        self._timers.set(_Beat(prefill.link), now_s + self._config.heartbeat_interval_s)
        self._absorb(self._registry.retire_address(_shown(prefill.address), prefill.engine_id), now_s)
        self._bury_other_incarnations(prefill, now_s)
        self._use(prefill, now_s)

    def _bury_other_incarnations(self, prefill: _Prefill, now_s: float) -> None:
        """Another process answers: what an earlier one was to write will never come."""
        reason = f"prefill engine {prefill.engine_id!r} restarted"
        for receive in list(prefill.receives.values()):
            if receive.registered_with not in (None, prefill.incarnation):
                self._settle_gone(receive, FailureCode.peer_restarted, reason, now_s)

    def _refused(self, prefill: _Prefill, message: wire.Refused, now_s: float) -> None:
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

    def _goodbye(self, prefill: _Prefill, message: wire.Goodbye, now_s: float) -> None:
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
        elif receive.writer_agent != agent_name:
            self.counters["notifications_foreign"] += 1
        else:
            self._arrived(receive, written, now_s)
        return self._effects()

    def _arrived(self, receive: _Receive, written: wire.Written, now_s: float) -> None:
        start = written.first_block - receive.first_block
        window = receive.arrived[max(start, 0) : start + written.num_blocks] if start >= 0 else receive.arrived[:0]
        if len(window) != written.num_blocks:
            self.counters["notifications_malformed"] += 1
            return
        receive.num_missing -= int(len(window) - np.count_nonzero(window))
        window[:] = True
        self._count_under_way(receive, -written.num_blocks)
        if receive.num_missing:
            if receive.pinned is not None:
                self._registry.heard(receive.pinned, activity=True)
            if receive.is_open:
                self._fire(receive, ReceiveTrigger.blocks_arrived)
        elif receive.is_open:  # that the pin is settled is a sign of life, too
            self._complete(receive, now_s)
        else:
            self._release(receive, ReceiveTrigger.proven_quiet, "every position has been written", now_s, proven=True)

    def _writing(self, prefill: _Prefill, message: wire.Writing) -> None:
        receive = prefill.receives.get(message.epoch)
        if receive is not None:
            self._count_under_way(receive, message.num_blocks)

    def _count_under_way(self, receive: _Receive, num_blocks: int) -> None:
        receive.num_under_way += num_blocks
        if receive.num_under_way > 0:
            self._under_way.add(receive.epoch)
        else:
            self._under_way.discard(receive.epoch)

    def _failed(self, prefill: _Prefill, message: wire.Failed, now_s: float) -> None:
        receive = prefill.receives.get(message.epoch)
        if receive is None:
            self.counters["messages_late"] += 1
        elif receive.is_open:
            outcome = Outcome.cancelled if message.code in _CANCELLED_CODES else Outcome.failed
            self._end(receive, outcome, message.code, message.reason, now_s, is_quiet=message.settled)
        elif message.settled:
            self._release(receive, ReceiveTrigger.proven_quiet, "prefill never wrote", now_s, proven=True)

    def _drained(self, prefill: _Prefill, message: wire.Drained, now_s: float) -> None:
        receive = prefill.receives.get(message.epoch)
        if receive is None or receive.is_open:
            self.counters["messages_late"] += 1
        else:
            self._release(receive, ReceiveTrigger.proven_quiet, "drained", now_s, proven=True)

    def _register(self, prefill: _Prefill, receive: _Receive, now_s: float) -> None:
        """Send Register, and pin the engine until the receive is over."""
        if receive.wanted_incarnation not in ("", prefill.incarnation):
            reason = f"prefill engine {prefill.engine_id!r} restarted after it had computed the blocks"
            self._settle_gone(receive, FailureCode.peer_restarted, reason, now_s)
            return
        assert prefill.link is not None, "the engine is up"
        if self._registry.pin(prefill.generation) is None:
            return
        receive.pinned = prefill.generation
        receive.registered_with = prefill.incarnation
        receive.writer_agent = prefill.agent_name
        self._out.append(Send(prefill.link, self._registration(receive, now_s)))

    @staticmethod
    def _registration(receive: _Receive, now_s: float) -> wire.Register:
        remaining_ms = min(max(0, round((receive.deadline_s - now_s) * 1000)), wire.MAX_REMAINING_MS)
        packed = wire.pack_block_ids(receive.block_ids)
        return wire.Register(receive.transfer_id, receive.epoch, receive.first_block, packed, remaining_ms)

    def _send_cancel(self, prefill: _Prefill, receive: _Receive, code: FailureCode, reason: str) -> None:
        if prefill.is_up and prefill.link is not None:
            cancel = wire.Cancel(receive.transfer_id, receive.epoch, code, wire.clip_reason(reason))
            self._out.append(Send(prefill.link, cancel))

    # --- ends --------------------------------------------------------------------------------------------------------

    def _complete(self, receive: _Receive, now_s: float) -> None:
        self._fire(receive, ReceiveTrigger.completed)
        self._report(receive, Outcome.done, None, "", now_s, blocks_reusable=True)
        self._forget(receive, now_s, is_confirmed=True)

    def _give_up(self, receive: _Receive, outcome: Outcome, code: FailureCode, reason: str, now_s: float) -> None:
        """This side ends it: at once when it was never registered, else prefill is asked to drain."""
        if receive.registered_with is None:
            self._end(receive, outcome, code, reason, now_s, is_quiet=True)
            return
        prefill = self._prefill_of(receive)
        if prefill is not None:
            self._send_cancel(prefill, receive, code, reason)
        self._end(receive, outcome, code, reason, now_s, is_quiet=False)

    def _end(
        self, receive: _Receive, outcome: Outcome, code: FailureCode, reason: str, now_s: float, *, is_quiet: bool
    ) -> None:
        """The one outcome of a receive that did not complete."""
        trigger = ReceiveTrigger.ended_quiet if is_quiet else ReceiveTrigger.ended_unquiet
        self._fire(receive, trigger)
        self._report(receive, outcome, code, reason, now_s, blocks_reusable=is_quiet)
        if is_quiet:
            self._forget(receive, now_s, is_confirmed=False)
        else:
            self._timers.cancel(_Deadline(receive.epoch))
            self._timers.set(_Hold(receive.epoch), now_s + self._config.hold_timeout_s)
            self._open.pop(receive.transfer_id, None)

    def _settle_gone(self, receive: _Receive, code: FailureCode, reason: str, now_s: float) -> None:
        """The process that was to write is gone: that settles whatever state the receive is in."""
        if receive.is_open:
            self._end(receive, Outcome.failed, code, reason, now_s, is_quiet=True)
        else:
            self._release(receive, ReceiveTrigger.proven_quiet, reason, now_s, proven=True)

    def _release(self, receive: _Receive, trigger: ReceiveTrigger, reason: str, now_s: float, *, proven: bool) -> None:
        self._fire(receive, trigger)
        self._out.append(Emit(BlocksReleased(receive.transfer_id, proven, reason)))
        self._forget(receive, now_s, is_confirmed=proven)

    def _report(
        self,
        receive: _Receive,
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
                    num_blocks=len(receive.block_ids),
                    duration_s=now_s - receive.opened_s,
                )
            )
        )

    def _forget(self, receive: _Receive, now_s: float, *, is_confirmed: bool) -> None:
        del self._receives[receive.epoch]
        if self._open.get(receive.transfer_id) is receive:
            del self._open[receive.transfer_id]
        self._timers.cancel(_Deadline(receive.epoch))
        self._timers.cancel(_Hold(receive.epoch))
        prefill = self._prefill_of(receive)
        if prefill is not None:
            prefill.receives.pop(receive.epoch, None)
            prefill.unsent.pop(receive.epoch, None)
        self._unpin(receive, now_s, is_confirmed=is_confirmed)

    def _unpin(self, receive: _Receive, now_s: float, *, is_confirmed: bool) -> None:
        self._count_under_way(receive, -receive.num_under_way)
        if receive.pinned is not None:
            generation, receive.pinned = receive.pinned, None
            self._absorb(self._registry.settle(generation, ok=is_confirmed), now_s)

    # --- prefill engines ---------------------------------------------------------------------------------------------

    def _prefill_at(self, engine_id: str, address: Address, now_s: float) -> _Prefill:
        """The record to use for this engine at this address; a new generation when the last is over."""
        generation, effects = self._registry.admit_address(engine_id, _shown(address))
        prefill = self._prefills.get(generation)
        if prefill is None:
            prefill = self._prefills[generation] = _Prefill(engine_id, address, generation)
        self._absorb(effects, now_s)
        return prefill

    def _prefill_of(self, receive: _Receive) -> _Prefill | None:
        return None if receive.home is None else self._prefills.get(receive.home)

    @staticmethod
    def _house(prefill: _Prefill, receive: _Receive) -> None:
        receive.home = prefill.generation
        prefill.receives[receive.epoch] = prefill.unsent[receive.epoch] = receive

    def _use(self, prefill: _Prefill, now_s: float) -> None:
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

    def _flush(self, prefill: _Prefill, now_s: float) -> None:
        assert prefill.link is not None, "a connected engine has its link"
        unsent, prefill.unsent = prefill.unsent, {}
        for receive in unsent.values():
            if receive.is_open:
                self._register(prefill, receive, now_s)
            elif self._registry.pin(prefill.generation) is not None:  # its Cancel may have been lost with the old link
                receive.pinned = prefill.generation
                self._send_cancel(prefill, receive, FailureCode.cancelled_by_peer, "asked again on a new link")
        for notice in prefill.notices:
            self._out.append(Send(prefill.link, notice))
        prefill.notices.clear()
        renewals, prefill.renewals = list(prefill.renewals), {}
        for start in range(0, len(renewals), wire.MAX_RENEWALS):
            self._out.append(Send(prefill.link, wire.Renew(renewals[start : start + wire.MAX_RENEWALS])))

    def _notice(self, prefill: _Prefill, message: wire.Register) -> None:
        """Prefill must learn of an empty registration, to give its blocks back; this side waits for nothing."""
        if len(prefill.notices) < MAX_NOTICES:
            prefill.notices.append(message)
        else:
            self.counters["notices_dropped"] += 1

    def _dial_failed(self, prefill: _Prefill, failure: Failure, now_s: float) -> None:
        """The handshake failed: every receive that waits for it learns so. Those registered before the link broke go on
        waiting for their proof or their deadline."""
        self._hang_up(prefill)
        if failure.code is FailureCode.wrong_engine:
            self._process_is_gone(prefill, FailureCode.peer_restarted, failure.reason, now_s)
        if not self._registry.handshake_failed(prefill.generation, prefill.attempt, failure.reason):
            return
        self.counters[f"handshakes_failed_{failure.code}"] += 1
        for receive in list(prefill.receives.values()):
            receive.failed_attempts += 1
            is_final = not failure.is_retryable or receive.failed_attempts >= self._config.handshake_attempts
            if is_final and receive.is_open and receive.registered_with is None:
                self._end(receive, Outcome.failed, failure.code, failure.reason, now_s, is_quiet=True)
        if not failure.is_retryable:
            prefill.notices.clear()
            prefill.renewals.clear()
        if prefill.receives or prefill.notices:
            self._use(prefill, now_s)  # asks for RetryDue when the backoff is over

    def _process_is_gone(self, prefill: _Prefill, code: FailureCode, reason: str, now_s: float) -> None:
        """Nobody, or somebody else, listens at the address now: what was registered there will never be written."""
        prefill.notices.clear()
        for receive in list(prefill.receives.values()):
            if receive.registered_with is not None:
                self._settle_gone(receive, code, reason, now_s)

    def _lost(self, prefill: _Prefill, detail: str, now_s: float) -> None:
        self._absorb(self._registry.lost(prefill.generation, detail, link_is_up=False), now_s)

    def _hang_up(self, prefill: _Prefill) -> None:
        if prefill.link is not None:
            self._links.pop(prefill.link, None)
            self._timers.cancel(_Beat(prefill.link))
            self._out.append(HangUp(prefill.link))
            prefill.link = None
        prefill.is_up = False

    # --- what the registry decided -----------------------------------------------------------------------------------

    def _absorb(self, effects: list[RegistryEffect], now_s: float) -> None:
        for effect in effects:
            prefill = self._prefills.get(effect.generation)
            if prefill is None:
                continue
            match effect:
                case HandshakeTimedOut():
                    reason = (
                        f"prefill engine {prefill.engine_id!r} at {_shown(prefill.address)}: "
                        f"no Welcome within {self._config.handshake_timeout_s:g} s"
                    )
                    self._dial_failed(prefill, Failure(FailureCode.handshake_timeout, reason), now_s)
                case RetryDue():
                    if prefill.receives or prefill.notices or prefill.renewals:
                        self._use(prefill, now_s)
                case WentStale():
                    self._went_stale(prefill, effect, now_s)
                case Evicted():
                    self._evicted(prefill, effect.reason, now_s)

    def _evicted(self, prefill: _Prefill, reason: StaleReason | None, now_s: float) -> None:
        self.counters["engines_evicted"] += 1
        if prefill.is_up and prefill.link is not None:
            self._out.append(Send(prefill.link, wire.Goodbye("nothing to do")))
        self._hang_up(prefill)
        del self._prefills[prefill.generation]
        if reason not in _FORSAKEN:
            self._carry_over(prefill, now_s)

    def _went_stale(self, prefill: _Prefill, effect: WentStale, now_s: float) -> None:
        """Decide on the receives of a generation that serves no new one.

        Forsaken (superseded, dropped): open receives end, and the link stays for as long as one of them waits for
        ``Drained``. Lost or closing: the next generation finds out what became of prefill.
        """
        self.counters[f"engines_stale_{effect.reason}"] += 1
        if effect.reason in _FORSAKEN:
            code = _FORSAKEN[effect.reason]
            for receive in list(prefill.receives.values()):
                if receive.is_open:
                    self._give_up(receive, Outcome.failed, code, effect.detail, now_s)
        elif effect.reason is not StaleReason.idle:
            self._hang_up(prefill)
            self._carry_over(prefill, now_s)

    def _carry_over(self, old: _Prefill, now_s: float) -> None:
        """Move the receives of ``old`` to the engine's next generation, which dials again."""
        receives = list(old.receives.values())
        old.receives.clear()
        old.unsent.clear()
        if not receives:
            return
        for receive in receives:
            self._unpin(receive, now_s, is_confirmed=False)
        try:
            new = self._prefill_at(old.engine_id, old.address, now_s)
        except QueueFull as exc:
            for receive in receives:
                receive.home = None
                if receive.is_open:
                    is_quiet = receive.registered_with is None
                    self._end(receive, Outcome.failed, FailureCode.queue_full, str(exc), now_s, is_quiet=is_quiet)
        else:
            for receive in receives:
                receive.failed_attempts = 0
                self._house(new, receive)
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

    def _timer_fired(self, key: _TimerKey, now_s: float) -> None:
        match key:
            case _Deadline(epoch):
                receive = self._receives[epoch]
                waited_s = now_s - receive.opened_s
                num_blocks = len(receive.block_ids)
                reason = (
                    f"transfer {receive.transfer_id!r}: {num_blocks - receive.num_missing} of {num_blocks} blocks came "
                    f"from prefill engine {receive.engine_id!r} within {waited_s:.3g} s"
                )
                self._give_up(receive, Outcome.expired, FailureCode.deadline, reason, now_s)
            case _Hold(epoch):
                self._hold_timed_out(self._receives[epoch], now_s)
            case _Beat(link):
                self._out.append(Send(link, wire.Heartbeat()))
                self._timers.set(key, now_s + self._config.heartbeat_interval_s)

    def _hold_timed_out(self, receive: _Receive, now_s: float) -> None:
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
        return any(receive.pinned is not None for receive in self._receives.values())

    def gauges(self) -> dict[str, int]:
        """Sizes of everything that is bounded."""
        return {
            "links": len(self._links),
            "receives_open": len(self._open),
            "receives_held": len(self._receives) - len(self._open),
            "engines": len(self._prefills),
            "timers": len(self._timers),
        }

    def _fire(self, receive: _Receive, trigger: ReceiveTrigger) -> None:
        RECEIVE.fire(receive, trigger)

    def _effects(self) -> list[Effect]:
        out, self._out = self._out, []
        return out


def _shown(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
