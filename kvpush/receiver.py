"""DecodeReceiver: the decode engine's end, as its users see it, and the loop around :mod:`kvpush.decode`.

**Threads.** Every public method may be called from any thread, returns in microseconds unless it says otherwise, and
never raises for a peer's fault. The loop thread owns the NIXL agent, the DEALERs and the core
(:mod:`kvpush.loop` says what wakes it and how it stops).

**Queues.** ``expect()`` and ``cancel()`` append to the loop's commands; the loop appends to the events that ``poll()``
and ``wait()`` take. Both are bounded: a transfer counts against ``max_pending_pushes`` until its end has been polled.
"""

from __future__ import annotations

import errno
import math
import random
import socket
import threading
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
from kvpush.decode import DecodeCore, Dial, Effect, Emit, HangUp, Send
from kvpush.endpoint import Endpoint, parse_address
from kvpush.errors import Closed, ConfigurationError, Failure, FailureCode, UsageError
from kvpush.events import Outcome, ReceiveFinished
from kvpush.identity import Identity, new_identity
from kvpush.layout import CacheGeometry, KVCacheSpec, geometry_of, memory_ranges
from kvpush.link import Dialer, LinkClosed, LinkEvent, LinkMessage, LinkOpened, make_context
from kvpush.loop import GOODBYE_LINGER_S, MESSAGES_PER_TURN, Loop
from kvpush.nixl_transport import NixlTransport
from kvpush.plan import block_len_bytes, check_block_ids
from kvpush.registry import Clock, Registry
from kvpush.side import EventQueue, Ledger, Side, check_engine_id, check_position, check_setup, check_timeout
from kvpush.transport import Notification, Transport, TransportFactory

BlockIds = npt.NDArray[np.int64]
Address = tuple[str, int]
Source = Address | Mapping[tuple[int, int], Address]

ATTENTION_S = 0.02  # after a receive was registered or blocks arrived, the next WRITE is likely near: look often
LEISURELY_LOOK_S = 0.01  # at NIXL, while receives wait and no WRITE has been announced: prefill's hint takes its time
MAX_PROBES = 16  # refused addresses that are asked a second time at the same time
PROBE_TIMEOUT_S = 1.0  # a host that refuses answers within one round trip


@dataclass(frozen=True, slots=True)
class _Account:
    """A transfer that expect() took. Its blocks are in use until the account is closed."""

    block_ids: BlockIds
    first_block: int
    engine_id: str
    address: Address
    incarnation: str

    def is_same(self, other: _Account) -> bool:
        ours, theirs = ((a.engine_id, a.address, a.incarnation) for a in (self, other))
        return (
            ours == theirs and self.first_block == other.first_block and np.array_equal(self.block_ids, other.block_ids)
        )


class DecodeReceiver(Side[ReceiveFinished, _Account]):
    """Receives KV blocks that prefill engines push into this engine's own cache.

    ``kv_caches`` maps layer names to tensors whose axes ``spec.dims`` names. They are registered with NIXL here and
    must stay allocated until :meth:`close` has returned.

    Caller's duties: leave the blocks of a receive untouched until an event says that they are reusable; call
    :meth:`poll` (or :meth:`wait`) regularly.

    Raises :class:`kvpush.ConfigurationError`, and :class:`kvpush.TransportError` when NIXL does not start.
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
        block_len_bytes(geometry)  # complains about a cache that cannot be written, before anything is opened
        identity = new_identity(engine_id, spec, geometry)
        registry = Registry(config, clock, random.Random())
        ledger: Ledger[_Account] = Ledger(f"DecodeReceiver {engine_id!r}", config.max_pending_pushes)
        events: EventQueue[ReceiveFinished] = EventQueue()
        super().__init__(config, engine_id, identity.incarnation, registry, ledger, events)
        self._kv_caches = dict(kv_caches)  # keeps the memory alive for as long as NIXL may touch it
        self._spec = spec
        self._is_draining = False
        self._is_in_use = np.zeros(geometry.num_blocks, dtype=np.bool_)  # by block; guarded by the ledger's lock
        self._loop = _ReceiveLoop(identity, geometry, config, clock, registry, ledger, events, transport_factory)
        self._run(self._loop)

    def expect(
        self,
        transfer_id: str,
        block_ids: Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor,
        *,
        source: Source,
        source_engine_id: str,
        source_incarnation: str | Mapping[tuple[int, int], str] = "",
        first_block: int = 0,
        deadline_s: float | None = None,
    ) -> None:
        """Have prefill engine ``source_engine_id`` write position ``first_block + i`` of this transfer into local block
        ``block_ids[i]``.

        ``source`` is the address of prefill's rank 0, or ``{(pp_rank, tp_rank): address}``; this rank is served by its
        counterpart. ``source_incarnation`` is :attr:`PrefillPusher.incarnation` of the process that holds the blocks,
        where the caller knows it: when another one answers, the receive fails at once and does not wait for its
        deadline. ``first_block`` says how many leading blocks this side has already (a prefix hit). An empty list is
        done at once. ``deadline_s`` (default ``receive_deadline_s``) counts from now. An identical repetition is folded
        into the first.

        The blocks belong to kvpush until :class:`ReceiveFinished` with ``blocks_reusable``, or :class:`BlocksReleased`.

        Raises :class:`UsageError` for a bad id, block, position or deadline, for blocks that another receive still uses
        and for a transfer that is expected already, :class:`ConfigurationError` for a bad address, :class:`QueueFull`
        and :class:`Closed`. Nothing has been taken then.
        """
        transfer_id = wire.check_id(transfer_id, "transfer_id")
        ids = check_block_ids(block_ids, len(self._is_in_use), what="expect: block_ids", unique=True)
        position = check_position(first_block, len(ids), "expect")
        address = self._address_in(source)
        incarnation = self._incarnation_in(source_incarnation)
        account = _Account(ids, position, check_engine_id(source_engine_id), address, incarnation)
        limit_s = self._config.receive_deadline_s if deadline_s is None else _checked_deadline(deadline_s)
        with self._ledger.lock:
            self._loop.check_room("expect")
            if self._admit(transfer_id, account):
                self._loop.submit(partial(self._loop.expect, transfer_id, account, limit_s))

    def cancel(self, transfer_id: str) -> None:
        """Give up, whatever state the transfer is in, known or not. Its outcome arrives as an event, and the blocks
        with it or in :class:`BlocksReleased` once prefill has confirmed that it writes no more. After the end it is
        ignored."""
        transfer_id = wire.check_id(transfer_id, "transfer_id")
        self._ledger.check_open("cancel")
        self._loop.check_room("cancel")
        self._loop.submit(partial(self._loop.cancel, transfer_id))

    def renew(self, transfer_ids: Sequence[str], *, source: Source, source_engine_id: str) -> None:
        """Requests for these transfers still queue here: ask prefill to keep their blocks for one more of its leases.
        Call it more often than prefill's ``lease_s``."""
        if isinstance(transfer_ids, str | bytes) or not isinstance(transfer_ids, Sequence):
            raise UsageError(f"renew: transfer_ids={transfer_ids!r} must be a sequence of transfer ids")
        ids = [wire.check_id(transfer_id, "transfer_id") for transfer_id in transfer_ids]
        address, engine_id = self._address_in(source), check_engine_id(source_engine_id)
        self._ledger.check_open("renew")
        self._loop.check_room("renew")
        self._loop.submit(partial(self._loop.renew, ids, address, engine_id))

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
        taken = account.block_ids[self._is_in_use[account.block_ids]]
        if taken.size:
            raise UsageError(
                f"expect: transfer {transfer_id!r}: block {taken[0]} belongs to a receive that has not been polled to "
                f"its end, so a WRITE may still land in it"
            )
        self._ledger.open(transfer_id, account, "expect")
        self._is_in_use[account.block_ids] = True
        return True

    def _account_closed(self, account: _Account) -> None:
        self._is_in_use[account.block_ids] = False

    def _address_in(self, source: Source) -> Address:
        rank = self._spec.rank
        if isinstance(source, Mapping):
            if rank not in source:
                raise ConfigurationError(f"source={dict(source)!r} names no address for rank (pp, tp) = {rank}")
            return parse_address(source[rank], "source").address
        if self._spec.tp_size > 1 or self._spec.pp_size > 1:
            raise ConfigurationError(
                f"source={source!r}: this cache has tp_size={self._spec.tp_size}, pp_size={self._spec.pp_size}, so "
                f"give an address for every rank: {{(pp_rank, tp_rank): (host, port)}}"
            )
        return parse_address(source, "source").address

    def _incarnation_in(self, source_incarnation: str | Mapping[tuple[int, int], str]) -> str:
        if isinstance(source_incarnation, Mapping):
            source_incarnation = source_incarnation.get(self._spec.rank, "")
        if not isinstance(source_incarnation, str):
            raise UsageError(f"expect: source_incarnation={source_incarnation!r} must be a string")
        return source_incarnation

    def __repr__(self) -> str:
        return f"<DecodeReceiver {self.engine_id!r}: {len(self._registry)} engines>"


def _checked_deadline(deadline_s: object) -> float:
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float):
        raise UsageError(f"expect: deadline_s={deadline_s!r} must be a number of seconds")
    if not 0 < deadline_s <= wire.MAX_REMAINING_MS / 1000:  # false for NaN, too
        raise UsageError(f"expect: deadline_s={deadline_s!r} must be above 0 and below ten years")
    return float(deadline_s)


def _refuses(address: Address) -> bool:
    """Whether every address of this name answers that nobody listens there. Blocks."""
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, sockaddr in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.settimeout(PROBE_TIMEOUT_S)
            if probe.connect_ex(sockaddr) != errno.ECONNREFUSED:
                return False
    return True


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
        self._num_probes = 0
        self._core: DecodeCore | None = None  # made by open(), when NIXL's metadata is known

    # --- commands ----------------------------------------------------------------------------------------------------

    def expect(self, transfer_id: str, account: _Account, deadline_s: float) -> None:
        """Register a receive."""
        self._attentive_until_s = self._clock() + ATTENTION_S
        self._perform(
            self.core.expect(
                transfer_id,
                account.block_ids,
                address=account.address,
                engine_id=account.engine_id,
                first_block=account.first_block,
                deadline_s=deadline_s,
                now_s=self._clock(),
                incarnation=account.incarnation,
            )
        )

    def cancel(self, transfer_id: str) -> None:
        """The caller gives up."""
        self._perform(self.core.cancel(transfer_id, self._clock()))

    def renew(self, transfer_ids: list[str], address: Address, engine_id: str) -> None:
        """Keep leases alive."""
        self._perform(self.core.renew(transfer_ids, address=address, engine_id=engine_id, now_s=self._clock()))

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
            events = self._dialer.receive(MESSAGES_PER_TURN, ready)
        for event in events:
            self._guarded(self._link_event, event)
        notifications = list(self._transport.notifications())
        if notifications:
            self._attentive_until_s = self._clock() + ATTENTION_S
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
        """Whether prefill's port really refuses, which proves its process gone and frees the blocks it was to write.

        ZeroMQ does not say why a dial failed, and a host that vanished from the network ends one early, too.
        """
        address = self.core.address_of(event.link)
        if address is None:
            return
        if self._num_probes >= MAX_PROBES:
            self._refusal_probed(event, is_refused=False)
            return

        def probe() -> None:
            is_refused = _refuses(address)
            self.submit(partial(self._refusal_probed, event, is_refused=is_refused, is_probe=True))

        self._num_probes += 1
        try:
            threading.Thread(target=probe, name=f"{self._name} probe", daemon=True).start()
        except RuntimeError:  # the system has no thread for us
            self._refusal_probed(event, is_refused=False, is_probe=True)

    def _refusal_probed(self, event: LinkClosed[int], *, is_refused: bool, is_probe: bool = False) -> None:
        self._num_probes -= is_probe
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
