"""DecodeReceiver: the decode engine's end, as its users see it, and the loop around :mod:`kvpush.decode`.

**Threads.** Every public method may be called from any thread, returns in microseconds unless it says otherwise, and
never raises for a peer's fault. The loop thread owns the NIXL agent, the DEALERs and the core
(:mod:`kvpush.loop` says what wakes it and how it stops).

**Queues.** ``expect()`` and ``cancel()`` append to the loop's commands; the loop appends to the events that ``poll()``
and ``wait()`` take. Both are bounded: a transfer counts against ``max_pending_pushes`` until its end has been polled.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpush import wire
from kvpush.config import Config
from kvpush.decode import DecodeCore
from kvpush.decode_effects import Dial, Effect, Emit, HangUp, Send
from kvpush.endpoint import Endpoint, parse_address
from kvpush.errors import Closed, ConfigurationError, Failure, FailureCode, UsageError
from kvpush.events import BlocksReleased, Outcome, ReceiveFinished
from kvpush.identity import Identity, new_identity
from kvpush.layout import CacheGeometry, KVCacheSpec, geometry_of, memory_ranges
from kvpush.link import Dialer, LinkClosed, LinkEvent, LinkMessage, LinkOpened, make_context
from kvpush.loop import BYTES_PER_TURN, GOODBYE_LINGER_S, MESSAGES_PER_TURN, Loop
from kvpush.nixl_transport import NixlTransport
from kvpush.parallel import MAX_RANKS
from kvpush.placement import GroupBlocks, Placement
from kvpush.plan import check_writable
from kvpush.probe import Prober
from kvpush.receives import Address, Place, Source
from kvpush.registry import Clock, Registry
from kvpush.side import EventQueue, Ledger, Side, check_engine_id, check_setup, check_timeout
from kvpush.transport import Notification, Transport, TransportFactory

BlockList = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
Addresses = Address | Mapping[tuple[int, int], Address]

LEISURELY_LOOK_S = 0.01  # at NIXL, while receives wait and no WRITE has been announced: prefill's hint takes its time


@dataclass(frozen=True, slots=True)
class _Account:
    """A receive that expect() took."""

    parts: tuple[GroupBlocks, ...]
    num_tokens: tuple[int, ...]  # one for each part; 0: every block whole
    source: Source

    def is_same(self, other: _Account) -> bool:
        if self.source != other.source or self.num_tokens != other.num_tokens or len(self.parts) != len(other.parts):
            return False
        return all(mine.is_same(theirs) for mine, theirs in zip(self.parts, other.parts, strict=True))

    def places(self) -> tuple[Place, ...]:
        return tuple(
            Place(part.name, part.first_block, part.block_ids, num_tokens)
            for part, num_tokens in zip(self.parts, self.num_tokens, strict=True)
        )


class DecodeReceiver(Side[ReceiveFinished, _Account]):
    """Receives KV blocks that prefill engines push into this engine's own cache.

    ``kv_caches`` maps layer names to tensors whose axes ``spec.dims`` names. They are registered with NIXL here and
    must stay allocated until :meth:`close` has returned.

    Attributes: :attr:`engine_id` as given; :attr:`rank`, ``(pp_rank, tp_rank)`` of the spec; :attr:`incarnation`, the
    identity of this very object.

    Any thread may call any method. Caller's duties: leave the blocks of a receive untouched until an event says that
    they are reusable; call :meth:`poll` (or :meth:`wait`) regularly.

    Raises :class:`kvpush.ConfigurationError`, and :class:`kvpush.TransportError` when NIXL does not start. The methods
    raise :class:`kvpush.UsageError` for what no caller can mean, :class:`kvpush.QueueFull` (retryable) when the loop is
    far behind, and :class:`kvpush.Closed`; nothing has been taken then.
    """

    def __init__(
        self,
        engine_id: str,
        kv_caches: Mapping[str, torch.Tensor],
        spec: KVCacheSpec,
        *,
        config: Config | None = None,
        clock: Clock = time.monotonic,
        transport_factory: TransportFactory = NixlTransport,
    ) -> None:
        check_setup(spec, config)
        config = config or Config()
        engine_id = check_engine_id(engine_id)
        geometry = geometry_of(kv_caches, spec)
        check_writable(geometry, min_tile_bytes=config.min_tile_bytes)  # complains before anything is opened
        self._placement = Placement(geometry, spec)
        identity = new_identity(engine_id, spec, geometry)
        registry = Registry(config, clock, random.Random())
        ledger: Ledger[_Account] = Ledger(f"DecodeReceiver {engine_id!r}", config.max_pending_pushes)
        events: EventQueue[ReceiveFinished] = EventQueue()
        super().__init__(config, engine_id, identity.incarnation, identity.rank, registry, ledger, events)
        self._kv_caches = dict(kv_caches)  # keeps the memory alive for as long as NIXL may touch it
        self._is_draining = False
        # by group and block; guarded by the ledger's lock. Groups that share memory share their blocks' numbers, too.
        sizes = self._placement.num_pages()
        shared = np.zeros(max(sizes), dtype=np.bool_)
        self._is_in_use = [shared if spec.groups_share_memory else np.zeros(size, dtype=np.bool_) for size in sizes]
        self._loop = _ReceiveLoop(identity, geometry, config, clock, registry, ledger, events, transport_factory)
        self._run(self._loop)

    def expect(
        self,
        transfer_id: str,
        block_ids: BlockList | Mapping[str, BlockList],
        *,
        source: Addresses,
        source_engine_id: str,
        source_incarnation: str | Mapping[tuple[int, int], str] = "",
        first_block: int | Mapping[str, int] = 0,
        num_tokens: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Have prefill engine ``source_engine_id`` write position ``first_block + i`` of this transfer into local block
        ``block_ids[i]``.

        ``source`` is the address of a prefill engine that is one process, or ``{(pp_rank, tp_rank): address}`` with an
        entry for each of its ranks, however they are spread: this rank finds those that hold its heads and layers.
        ``source_incarnation`` is :attr:`PrefillPusher.incarnation` of the process (or processes, by rank) that holds
        the blocks, where the caller knows it: when another one answers, the receive fails at once and does not wait for
        its deadline.
        ``first_block`` says how many leading blocks this side has already (a prefix hit). ``num_tokens``, the length
        of the prompt (from its first token, those that ``first_block`` skips included), is needed where prefill's
        blocks are smaller and the last block is only partly filled; by default every block is wanted whole. An
        empty list is done at once. ``deadline_s`` (default ``receive_deadline_s``) counts from now. An identical
        repetition is folded into the first.

        A cache with several groups takes ``{group name: list}`` for ``block_ids`` and ``{group name: number}`` for
        ``first_block``; a plain number goes for every group named. A group that is left out is not waited for: the
        receive is done without it.

        The blocks belong to kvpush until :class:`ReceiveFinished` with ``blocks_reusable``, or :class:`BlocksReleased`.

        Raises :class:`UsageError` for a bad id, block, group, position, number of tokens or deadline, for blocks that
        another receive still uses and for a transfer that is expected already, :class:`ConfigurationError` for a bad
        address, :class:`QueueFull` and :class:`Closed`. Nothing has been taken then.
        """
        transfer_id = wire.check_id(transfer_id, "transfer_id")
        parts = self._placement.parse(block_ids, first_block, call="expect", unique=True)
        source_engine_id = check_engine_id(source_engine_id)
        found = self._source(source, source_engine_id, source_incarnation)
        tokens = self._checked_tokens(num_tokens, parts)
        account = _Account(parts, tuple(tokens if self._placement.has_tokens(part) else 0 for part in parts), found)
        limit_s = self._config.receive_deadline_s if deadline_s is None else _checked_deadline(deadline_s)
        with self._ledger.lock:
            self._loop.check_room("expect")
            if self._admit(transfer_id, account):
                num_blocks = self._placement.num_blocks(parts)
                self._loop.submit(partial(self._loop.expect, transfer_id, account, num_blocks, limit_s))

    def cancel(self, transfer_id: str) -> None:
        """Give up, whatever state the transfer is in, known or not. Its outcome arrives as an event, and the blocks
        with it or in :class:`BlocksReleased` once prefill has confirmed that it writes no more. After the end it is
        ignored."""
        transfer_id = wire.check_id(transfer_id, "transfer_id")
        self._ledger.check_open("cancel")
        self._loop.check_room("cancel")
        self._loop.submit(partial(self._loop.cancel, transfer_id))

    def renew(self, transfer_ids: Sequence[str], *, source: Addresses, source_engine_id: str) -> None:
        """Requests for these transfers still queue here and have not been expected: ask prefill to keep their blocks
        for one more of its leases. Call it more often than prefill's ``lease_s``, and on every rank."""
        if isinstance(transfer_ids, str | bytes) or not isinstance(transfer_ids, Sequence):
            raise UsageError(f"renew: transfer_ids={transfer_ids!r} must be a sequence of transfer ids")
        ids = [wire.check_id(transfer_id, "transfer_id") for transfer_id in transfer_ids]
        found = self._source(source, check_engine_id(source_engine_id))
        self._ledger.check_open("renew")
        self._loop.check_room("renew")
        self._loop.submit(partial(self._loop.renew, ids, found))

    def drop_engine(self, engine_id: str) -> None:
        """The router knows that this prefill engine is gone, or must go: its receives fail. Their blocks are held until
        it confirms that it writes no more, or ``hold_timeout_s`` passes."""
        engine_id = check_engine_id(engine_id)
        self._ledger.check_open("drop_engine")
        self._loop.check_room("drop_engine")
        self._loop.submit(partial(self._loop.drop_engine, engine_id))

    def drain(self, timeout_s: float) -> bool:
        """No new receive is taken; those that are open go on to their ends.

        Waits up to ``timeout_s``; ``True`` when every receive has its outcome and no block is held. Poll them
        afterwards.
        """
        wait_s = check_timeout(timeout_s, "drain")
        with self._ledger.lock:
            self._is_draining = True
        if not self._loop.ask(self._loop.drain, default=False):
            return False
        return self._loop.idle.wait(wait_s) and bool(self._loop.health())

    def _admit(self, transfer_id: str, account: _Account) -> bool:
        """``False`` for an identical repetition. Under the ledger's lock."""
        self._ledger.check_open("expect")
        known = self._ledger.find(transfer_id)
        if known is not None:
            if known.is_same(account):
                return False
            raise UsageError(
                f"expect: transfer {transfer_id!r} is expected already, with other blocks or from another source; "
                f"cancel() it and poll its end first"
            )
        if self._is_draining:
            raise Closed(f"expect: DecodeReceiver {self.engine_id!r} is draining and takes no new receive")
        for part in account.parts:
            pages = self._placement.pages(part)
            taken = pages[self._is_in_use[part.group][pages]]
            if taken.size:
                raise UsageError(
                    f"expect: transfer {transfer_id!r}: block {taken[0]} of group {part.name!r} belongs to a receive "
                    f"that has not been polled to its end, so a WRITE may still land in it"
                )
        self._ledger.open(transfer_id, account, "expect")
        self._mark(account, is_in_use=True)
        return True

    def _checked_tokens(self, num_tokens: object, parts: Sequence[GroupBlocks]) -> int:
        if num_tokens is None:
            return 0
        if not isinstance(num_tokens, int | np.integer) or isinstance(num_tokens, bool) or not 0 < num_tokens < 2**63:
            raise UsageError(f"expect: num_tokens={num_tokens!r} must be a whole number above 0")
        for part in parts:
            begins_at = self._placement.last_block_begins_at(part)
            if begins_at >= num_tokens:
                raise UsageError(
                    f"expect: num_tokens={num_tokens} counts from the prompt's first token, and the last block of "
                    f"group {part.name!r} that is asked for begins at token {begins_at}: ask for fewer blocks"
                )
        return int(num_tokens)

    def _mark(self, account: _Account, *, is_in_use: bool) -> None:
        for part in account.parts:
            self._is_in_use[part.group][self._placement.pages(part)] = is_in_use

    def _account_closed(self, event: ReceiveFinished | BlocksReleased, account: _Account) -> None:
        self._mark(account, is_in_use=False)

    @staticmethod
    def _source(source: Addresses, engine_id: str, incarnation: str | Mapping[tuple[int, int], str] = "") -> Source:
        """How many ranks the engine has follows from the map, so it must name every one of them."""
        incarnations = incarnation if isinstance(incarnation, Mapping) else {(0, 0): incarnation}
        if not all(isinstance(each, str) for each in incarnations.values()):
            raise UsageError(f"expect: source_incarnation={incarnation!r} must be a string, or one for each rank")
        if not isinstance(source, Mapping):
            return Source(engine_id, 1, 1, {(0, 0): parse_address(source, "source").address}, dict(incarnations))
        addresses = {_checked_rank(rank): parse_address(each, "source").address for rank, each in source.items()}
        if not addresses:
            raise ConfigurationError("source={} names no address")
        pp_size, tp_size = (1 + max(rank[i] for rank in addresses) for i in (0, 1))
        if len(addresses) != pp_size * tp_size:
            every = ((pp, tp) for pp in range(pp_size) for tp in range(tp_size))
            missing = next(rank for rank in every if rank not in addresses)
            raise ConfigurationError(
                f"source names ranks (pp, tp) up to pp {pp_size - 1} and tp {tp_size - 1}, but no address for {missing}"
            )
        return Source(engine_id, pp_size, tp_size, addresses, dict(incarnations))

    def __repr__(self) -> str:
        return f"<DecodeReceiver {self.engine_id!r}: {len(self._registry)} engines>"


def _checked_rank(rank: object) -> tuple[int, int]:
    match rank:
        case (int() | np.integer() as pp, int() | np.integer() as tp) if 0 <= pp < MAX_RANKS and 0 <= tp < MAX_RANKS:
            return int(pp), int(tp)
        case _:
            raise ConfigurationError(f"source has the key {rank!r}; ranks are (pp_rank, tp_rank) below {MAX_RANKS}")


def _checked_deadline(deadline_s: object) -> float:
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float | np.integer | np.floating):
        raise UsageError(f"expect: deadline_s={deadline_s!r} must be a number of seconds")
    if not 0 < deadline_s <= wire.MAX_REMAINING_MS / 1000:  # false for NaN, too
        raise UsageError(f"expect: deadline_s={deadline_s!r} must be above 0 and below ten years")
    return float(deadline_s)


class _ReceiveLoop(Loop):
    """The loop thread's side; everything but the constructor runs there."""

    def __init__(
        self,
        identity: Identity,
        geometry: CacheGeometry,
        config: Config,
        clock: Clock,
        registry: Registry,
        ledger: Ledger[_Account],
        events: EventQueue[ReceiveFinished],
        transport_factory: TransportFactory,
    ) -> None:
        super().__init__(f"receiver {identity.engine_id!r}", config, clock, registry)
        self._identity = identity
        self._geometry = geometry
        self._ledger = ledger
        self._events = events
        self._transport_factory = transport_factory
        self._context = make_context()
        self._transport: Transport | None = None
        self._dialer: Dialer | None = None
        self._attentive_until_s = 0.0
        self._prober = Prober(self._name, self.submit)
        self._core: DecodeCore | None = None  # made by open(), when NIXL's metadata is known

    # --- commands ----------------------------------------------------------------------------------------------------

    def expect(self, transfer_id: str, account: _Account, num_blocks: int, deadline_s: float) -> None:
        """Register a receive."""
        self._attentive_until_s = self._clock() + wire.ATTENTION_S
        self._perform(
            self.core.expect(
                transfer_id,
                account.places(),
                num_blocks=num_blocks,
                source=account.source,
                deadline_s=deadline_s,
                now_s=self._clock(),
            )
        )

    def cancel(self, transfer_id: str) -> None:
        """The caller gives up."""
        self._perform(self.core.cancel(transfer_id, self._clock()))

    def renew(self, transfer_ids: list[str], source: Source) -> None:
        """Keep leases alive."""
        self._perform(self.core.renew(transfer_ids, source=source, now_s=self._clock()))

    def drop_engine(self, engine_id: str) -> None:
        """The router knows better."""
        self._perform(self.core.drop_engine(engine_id, self._clock()))

    def drain(self) -> bool:
        """Every command before this one has been carried out."""
        self.note_idle(self.core.num_receives)
        return True

    def stats(self) -> dict[str, int]:
        return dict(self.core.counters) | self.core.gauges() | {"internal_errors": self.internal_errors}

    # --- the loop ----------------------------------------------------------------------------------------------------

    @property
    def core(self) -> DecodeCore:
        """Commands and turns come after open(), so it is there."""
        assert self._core is not None, "the loop has not been opened"
        return self._core

    def open(self) -> None:
        self._dialer = Dialer(self._context, self._poller, self._config, clock=self._clock)
        self._transport = self._transport_factory(
            self._identity.agent_name, self._geometry.memory, memory_ranges(self._geometry), self._config
        )
        self._core = DecodeCore(
            self._identity, self._transport.metadata(), self._geometry, self._config, self._registry
        )

    def turn(self, ready: set[object]) -> bool:
        assert self._dialer is not None
        assert self._transport is not None
        events: list[LinkEvent[int]] = []
        if ready or self._dialer.deadline_s() <= self._clock():
            events = self._dialer.receive(MESSAGES_PER_TURN, ready, BYTES_PER_TURN)
        for event in events:
            self._guarded(self._link_event, event)
        notifications = list(self._transport.notifications())
        if notifications:
            self._attentive_until_s = self._clock() + wire.ATTENTION_S
        for notification in notifications:
            self._guarded(self._notified, notification)
        now_s = self._clock()
        due_s = self.core.next_due_s()
        if due_s is not None and due_s <= now_s:
            self._perform(self.core.tick(now_s))
        self.note_idle(self.core.num_receives)
        return bool(events or notifications)

    def is_busy(self) -> bool:
        # a WRITE into this memory needs this side's progress, and its notification has to be asked for
        if self._core is None or not self._core.is_written_to:
            return False
        return self._core.is_write_under_way or self._clock() < self._attentive_until_s

    def next_due_s(self) -> float | None:
        assert self._dialer is not None
        due_s = self.core.next_due_s()
        look_s = self._clock() + LEISURELY_LOOK_S if self.core.is_written_to else math.inf
        return min(math.inf if due_s is None else due_s, self._dialer.deadline_s(), look_s)

    def begin_stop(self) -> None:
        self._perform(self.core.close(self._clock()))

    def is_settled(self) -> bool:
        return self._core is None or self._core.num_receives == 0

    def shut(self) -> None:
        self._guarded(self._close_transport)
        if self._core is not None:
            self._guarded(lambda: self._perform(self.core.transport_closed(self._clock())))
        if self._dialer is not None:
            self._guarded(partial(self._dialer.close, GOODBYE_LINGER_S))
        self._guarded(self._context.term)
        self.idle.set()

    def died(self, reason: str) -> None:
        self._ledger.shut(f"cannot go on, its loop died: {reason}")
        for transfer_id in self._ledger.without_outcome(self._events):
            self._events.put(
                ReceiveFinished(transfer_id, Outcome.failed, "", FailureCode.internal, reason, False, 0, 0.0)
            )
        self._events.seal()

    def _close_transport(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _notified(self, notification: Notification) -> None:
        self._perform(self.core.notified(notification.agent_name, notification.payload, self._clock()))

    def _link_event(self, event: LinkEvent[int]) -> None:
        now_s = self._clock()
        match event:
            case LinkOpened():
                self._perform(self.core.link_opened(event.link, now_s))
            case LinkClosed(refused=True):
                self._ask_again(event)
            case LinkClosed():
                self._perform(self.core.link_closed(event.link, event.reason, now_s, refused=False))
            case LinkMessage():
                try:
                    message = wire.decode_to_decode(event.frames)
                except Failure as exc:
                    self._perform(self.core.malformed(event.link, exc, now_s))
                else:
                    self._perform(self.core.message(event.link, message, now_s))

    def _ask_again(self, event: LinkClosed[int]) -> None:
        """Whether prefill's port really refuses, which proves its process gone and frees the blocks it was to write."""
        address = self.core.address_of(event.link)
        if address is not None:
            self._prober.ask(address, partial(self._probed, event))

    def _probed(self, event: LinkClosed[int], is_refused: bool) -> None:
        reason = event.reason if is_refused else "its host does not answer"
        self._perform(self.core.link_closed(event.link, reason, self._clock(), refused=is_refused))

    # --- effects -----------------------------------------------------------------------------------------------------

    def _perform(self, effects: list[Effect]) -> None:
        """Carry out effects in order; what comes of them is appended. One that meets a bug takes no other with it."""
        queue = deque(effects)
        while queue:
            queue.extend(self._guarded(partial(self._carry_out, queue.popleft())) or ())

    def _carry_out(self, effect: Effect) -> list[Effect]:
        assert self._dialer is not None
        match effect:
            case Emit():
                self._events.put(effect.event)
            case Send():
                if not self._dialer.send(effect.link, wire.encode(effect.message)):
                    self._dialer.hang_up(effect.link)
                    reason = "its connection is gone, or it does not read"
                    return self.core.link_closed(effect.link, reason, self._clock(), refused=False)
            case Dial():
                self._dialer.dial(effect.link, Endpoint(*effect.address))
            case HangUp():
                self._dialer.hang_up(effect.link, GOODBYE_LINGER_S)
        return []
