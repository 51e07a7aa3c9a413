"""PrefillPusher: the prefill engine's end, as its users see it, and the loop around :mod:`kvpush.prefill`.

**Threads.** Every public method may be called from any thread, returns in microseconds unless it says otherwise, and
never raises for a peer's fault. The loop thread owns the NIXL agent, the ROUTER and the core
(:mod:`kvpush.loop` says what wakes it and how it stops).

**Queues.** ``push()`` and ``cancel()`` append to the loop's commands; the loop appends to the events that ``poll()``
and ``wait()`` take. Both are bounded: a transfer counts against ``max_pending_pushes`` until its end has been polled.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvpush import wire
from kvpush.chunks import Chunk, Chunks, CutShort
from kvpush.config import Config
from kvpush.endpoint import Endpoint, advertised, check_advertised, parse_listen
from kvpush.errors import Closed, Failure, FailureCode, TransferEnded, TransportError, UsageError
from kvpush.events import BlocksReleased, Outcome, PushFinished
from kvpush.identity import Identity, new_identity
from kvpush.layout import CacheGeometry, KVCacheSpec, geometry_of, memory_ranges
from kvpush.link import LinkClosed, LinkEvent, LinkMessage, Listener, make_context
from kvpush.loop import BYTES_PER_TURN, GOODBYE_LINGER_S, MESSAGES_PER_TURN, Loop, logger
from kvpush.nixl_transport import NixlTransport
from kvpush.peer import Peer, load, unload
from kvpush.placement import GroupBlocks, Placement
from kvpush.plan import check_writable
from kvpush.prefill import PrefillCore
from kvpush.prefill_effects import AbandonWrite, Effect, Emit, LoadPeer, PostWrite, ReleasePeer, Send, Warn
from kvpush.registry import Clock, Registry
from kvpush.side import EventQueue, Ledger, Side, check_engine_id, check_setup, check_timeout
from kvpush.transport import Transport, TransportFactory, WriteHandle

FENCES_PER_TURN = 64  # that are asked for each transfer

BlockList = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor


class Fence(Protocol):
    """What ``ready=`` must offer; a recorded ``torch.cuda.Event`` does."""

    def query(self) -> bool:
        """Whether the device has passed it. Called on the loop thread until it says so; must not block."""


class PrefillPusher(Side[PushFinished, Chunks]):
    """Pushes finished KV blocks into the decode engines that registered for them.

    ``kv_caches`` maps layer names to tensors whose axes ``spec.dims`` names. They are registered with NIXL here and
    must stay allocated until :meth:`close` has returned. ``listen`` is where decode engines dial (``"127.0.0.1:0"``,
    ``"[::1]:5600"``, ``"0.0.0.0:5600"``); ``advertise`` is the address to tell them when it is another one.

    Attributes: :attr:`engine_id` as given; :attr:`rank`, ``(pp_rank, tp_rank)`` of the spec; :attr:`address`, the
    ``(host, port)`` for the ``source=`` of ``expect()``; :attr:`incarnation`, the identity of this very object, for its
    ``source_incarnation=``.

    Any thread may call any method. Caller's duties: leave the blocks of a push untouched until an event says that they
    are reusable (of each push that named them, when there are several); call :meth:`poll` (or :meth:`wait`) regularly.

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
        listen: str | tuple[str, int] = "127.0.0.1:0",
        advertise: str | tuple[str, int] | None = None,
        config: Config | None = None,
        clock: Clock = time.monotonic,
        transport_factory: TransportFactory = NixlTransport,
    ) -> None:
        check_setup(spec, config)
        config = config or Config()
        engine_id = check_engine_id(engine_id)
        geometry = geometry_of(kv_caches, spec)
        check_writable(geometry, min_tile_bytes=config.min_tile_bytes)  # complains before anything is opened
        placement = Placement(geometry, spec)
        identity = new_identity(engine_id, spec, geometry)
        endpoint = parse_listen(listen)
        check_advertised(endpoint, advertise)
        registry = Registry(config, clock, random.Random())
        ledger: Ledger[Chunks] = Ledger(f"PrefillPusher {engine_id!r}", config.max_pending_pushes)
        events: EventQueue[PushFinished] = EventQueue()
        super().__init__(config, engine_id, identity.incarnation, identity.rank, registry, ledger, events)
        self._kv_caches = dict(kv_caches)  # keeps the memory alive for as long as NIXL may touch it
        self._placement = placement
        self._layers = {
            layer.name: (number, i)
            for number, group in enumerate(geometry.groups)
            for i, layer in enumerate(group.layers)
        }
        self._all_layers = tuple((1 << len(group.layers)) - 1 for group in geometry.groups)
        self._is_draining = False
        self._clock = clock
        self._cut_short = CutShort(config.max_tombstones, config.tombstone_ttl_s)  # guarded by the ledger's lock
        self._loop = _PushLoop(identity, geometry, config, clock, registry, ledger, events, endpoint, transport_factory)
        self._run(self._loop)
        self.address: tuple[str, int] = advertised(self._loop.bound, advertise).address

    def push(
        self,
        transfer_id: str,
        block_ids: BlockList | Mapping[str, BlockList],
        *,
        first_block: int | Mapping[str, int] = 0,
        last: bool = True,
        ready: Fence | None = None,
    ) -> None:
        """Position ``first_block + i`` of this transfer's KV is final in local block ``block_ids[i]``, in every layer.

        With ``last=False`` more calls follow (chunked prefill), in any order of positions, over positions that no chunk
        named before; ``last=True`` belongs to the last *call*, which may bring no block. ``ready``, a recorded
        ``torch.cuda.Event``, delays the WRITE until the device has passed it. An identical repetition of a chunk is
        folded into the first.

        A cache with several groups takes ``{group name: list}`` for ``block_ids`` and ``{group name: number}`` for
        ``first_block``; a plain number goes for every group named. Where decode's blocks have another size, positions
        still count *this* cache's blocks, from the transfer's first token.

        The blocks belong to kvpush until :class:`PushFinished` with ``blocks_reusable``, or :class:`BlocksReleased`.

        Raises :class:`UsageError` for a bad id, block, group or position, :class:`TransferEnded` for a chunk of a push
        whose end has been polled, :class:`QueueFull` (retryable: poll first) and :class:`Closed`. Nothing has been
        taken then.
        """
        self._push("push", transfer_id, block_ids, self._all_layers, first_block, last, ready)

    def push_layers(
        self,
        transfer_id: str,
        block_ids: BlockList | Mapping[str, BlockList],
        *,
        layers: Sequence[str],
        first_block: int | Mapping[str, int] = 0,
        last: bool = False,
        ready: Fence | None = None,
    ) -> None:
        """As :meth:`push`, for engines that call back after each layer: only these ``layers`` are final in the blocks.

        A position is complete when every layer of this rank has been pushed for it; ``last=True`` belongs to the last
        call of the transfer, which may be an empty ``push(transfer_id, [])`` (``{}`` where there are groups). Small
        pieces are put together while an earlier WRITE of the transfer is in flight.

        Raises as :meth:`push` does, and :class:`UsageError` for a layer that this cache has not, for one of a group
        that ``block_ids`` leaves out, and for one that is named twice.
        """
        masks = [0] * len(self._all_layers)
        if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
            raise UsageError(f"push_layers: layers={layers!r} must list the names of layers")
        for layer in layers:
            if not isinstance(layer, str) or layer not in self._layers:
                raise UsageError(f"push_layers: this cache has no layer {layer!r}")
            group, number = self._layers[layer]
            if masks[group] >> number & 1:
                raise UsageError(f"push_layers: layers names {layer!r} twice")
            masks[group] |= 1 << number
        self._push("push_layers", transfer_id, block_ids, tuple(masks), first_block, last, ready)

    def _push(
        self,
        call: str,
        transfer_id: str,
        block_ids: BlockList | Mapping[str, BlockList],
        layers: tuple[int, ...],
        first_block: int | Mapping[str, int],
        last: bool,
        ready: Fence | None,
    ) -> None:
        transfer_id = wire.check_id(transfer_id, "transfer_id")
        if type(last) is not bool and not isinstance(last, np.bool_):
            raise UsageError(f"{call}: last={last!r} must be True or False")
        parts = self._placement.parse(block_ids, first_block, call=call, unique=False)
        if layers is not self._all_layers:
            self._check_groups(call, parts, layers)
        chunk = Chunk(parts, tuple([layers[part.group] for part in parts]), bool(last))
        if ready is not None and (isinstance(ready, type) or not callable(getattr(ready, "query", None))):
            raise UsageError(f"{call}: ready={ready!r} has no query(): give a recorded torch.cuda.Event")
        with self._ledger.lock:
            self._loop.check_room(call)
            index = self._admit(transfer_id, chunk)
            if index is not None:
                self._loop.submit(partial(self._loop.push, transfer_id, chunk, index, ready))

    def _check_groups(self, call: str, parts: tuple[GroupBlocks, ...], layers: tuple[int, ...]) -> None:
        named = {part.group for part in parts}
        for group, mask in enumerate(layers):
            if mask and group not in named:
                name = self._placement.name_of(group)
                raise UsageError(f"{call}: layers of group {name!r} are named, but block_ids has no list for it")

    def cancel(self, transfer_id: str) -> None:
        """Give up, whatever state the transfer is in, known or not. Its outcome arrives as an event; after the end it
        is ignored. Before the first ``push()`` it makes that push end as cancelled."""
        transfer_id = wire.check_id(transfer_id, "transfer_id")
        self._ledger.check_open("cancel")
        self._loop.check_room("cancel")
        self._loop.submit(partial(self._loop.cancel, transfer_id))

    def drop_engine(self, engine_id: str) -> None:
        """The router knows that this decode engine is gone, or must go: what waits for it fails, what is in flight
        settles, then it is released. It may come back as a new generation."""
        engine_id = check_engine_id(engine_id)
        self._ledger.check_open("drop_engine")
        self._loop.check_room("drop_engine")
        self._loop.submit(partial(self._loop.drop_engine, engine_id))

    def drain(self, timeout_s: float) -> bool:
        """No new transfer is taken, registrations without blocks are refused, what was pushed finishes.

        Waits up to ``timeout_s``; ``True`` when every push has its outcome and no block is held. Poll them afterwards.
        """
        wait_s = check_timeout(timeout_s, "drain")
        with self._ledger.lock:
            self._is_draining = True
        if not self._loop.ask(self._loop.drain, default=False):
            return False
        return self._loop.idle.wait(wait_s) and bool(self._loop.health())

    def _admit(self, transfer_id: str, chunk: Chunk) -> int | None:
        """The chunk's index; ``None`` for an identical repetition. Under the ledger's lock."""
        self._ledger.check_open("push")
        chunks = self._ledger.find(transfer_id)
        if chunks is None:
            if (how := self._cut_short.continued(transfer_id, chunk, self._clock())) is not None:
                raise TransferEnded(
                    f"push: transfer {transfer_id!r} has ended before this chunk ({how}), which was not taken: drop "
                    f"its remaining chunks; another attempt needs a new transfer_id, or begins with its first chunk"
                )
            if self._is_draining:
                raise Closed(f"push: PrefillPusher {self.engine_id!r} is draining and takes no new transfer")
            chunks = Chunks()
            self._ledger.open(transfer_id, chunks, "push")
        elif chunks.has_same(chunk):
            return None
        else:
            self._check_further(transfer_id, chunks, chunk)
        return chunks.add(chunk)

    def _check_further(self, transfer_id: str, chunks: Chunks, chunk: Chunk) -> None:
        if chunks.has_last:
            raise UsageError(
                f"push: transfer {transfer_id!r} has its last chunk already, and this is another one; "
                f"use a new transfer_id, or poll the end of the old one first"
            )
        if (both := chunks.overlap(chunk)) is not None:
            new, old = (self._placement.positions(part) for part in both)
            raise UsageError(
                f"push: transfer {transfer_id!r}: positions {new.start} to {new.stop - 1} overlap "
                f"{old.start} to {old.stop - 1}, which an earlier chunk named (group {both[0].name!r})"
            )

    def _account_closed(self, event: PushFinished | BlocksReleased, account: Chunks) -> None:
        if not account.has_last:
            how = event.outcome if isinstance(event, PushFinished) else "its blocks were released"
            self._cut_short.note(event.transfer_id, account, how, self._clock())

    def __repr__(self) -> str:
        host, port = self.address
        return f"<PrefillPusher {self.engine_id!r} at {host} port {port}: {len(self._registry)} engines>"


class _PushLoop(Loop):
    """The loop thread's side; everything but the constructor runs there."""

    def __init__(
        self,
        identity: Identity,
        geometry: CacheGeometry,
        config: Config,
        clock: Clock,
        registry: Registry,
        ledger: Ledger[Chunks],
        events: EventQueue[PushFinished],
        listen: Endpoint,
        transport_factory: TransportFactory,
    ) -> None:
        super().__init__(f"pusher {identity.engine_id!r}", config, clock, registry)
        self.bound = listen
        self._identity = identity
        self._geometry = geometry
        self._ledger = ledger
        self._events = events
        self._transport_factory = transport_factory
        self._context = make_context()
        self._transport: Transport | None = None
        self._listener: Listener | None = None
        self._writes: dict[int, WriteHandle] = {}
        self._fences: dict[str, dict[int, Fence]] = {}  # transfer id -> chunk index -> not passed yet
        self._core = PrefillCore(identity, config, registry, geometry)

    # --- commands ----------------------------------------------------------------------------------------------------

    def push(self, transfer_id: str, chunk: Chunk, index: int, fence: Fence | None) -> None:
        """Chunk number ``index`` of a transfer."""
        self._perform(
            self._core.push(
                transfer_id,
                chunk.for_core(),
                last=chunk.last,
                fenced=fence is not None,
                index=index,
                now_s=self._clock(),
            )
        )
        # not of a chunk that came after the end: its fence would speak for the next use of the id
        if fence is not None and self._core.is_fenced(transfer_id, index):
            self._fences.setdefault(transfer_id, {})[index] = fence

    def cancel(self, transfer_id: str) -> None:
        """The caller gives up."""
        self._perform(self._core.cancel(transfer_id, self._clock()))

    def drop_engine(self, engine_id: str) -> None:
        """The router knows better."""
        self._perform(self._core.drop_engine(engine_id, self._clock()))

    def drain(self) -> bool:
        """No new work."""
        self._perform(self._core.drain(self._clock()))
        self.note_idle(self._core.num_pushes)
        return True

    def stats(self) -> dict[str, int]:
        return dict(self._core.counters) | self._core.gauges() | {"internal_errors": self.internal_errors}

    # --- the loop ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        self._listener = Listener(self._context, self._poller, self.bound, self._config)
        self.bound = self._listener.bound
        self._transport = self._transport_factory(
            self._identity.agent_name, self._geometry.memory, memory_ranges(self._geometry), self._config
        )

    def turn(self, ready: set[object]) -> bool:
        assert self._listener is not None
        assert self._transport is not None
        events = self._listener.receive(MESSAGES_PER_TURN, BYTES_PER_TURN) if ready else []
        for event in events:
            self._guarded(self._link_event, event)
        has_progressed = bool(events) | self._poll_fences() | self._poll_writes()
        if not self._writes:
            self._transport.notifications()  # nobody writes here: this lets NIXL notice connections that ended
        now_s = self._clock()
        due_s = self._core.next_due_s()
        if due_s is not None and due_s <= now_s:
            self._perform(self._core.tick(now_s))
        self.note_idle(self._core.num_pushes)
        return has_progressed

    def is_busy(self) -> bool:
        return bool(self._writes or self._fences)

    def next_due_s(self) -> float | None:
        return self._core.next_due_s()

    def begin_stop(self) -> None:
        self._perform(self._core.close(self._clock()))

    def is_settled(self) -> bool:
        return not self._writes

    def shut(self) -> None:
        self._fences.clear()
        self._guarded(lambda: self._perform(self._core.abandon(self._clock())))
        is_destroyed = self._guarded(self._close_transport)
        if is_destroyed:  # else nothing is proven, and a goodbye would say that it were
            self._guarded(lambda: self._perform(self._core.transport_closed(self._clock())))
            # nothing reads any more what a loop that died left behind
            for transfer_id in self._events.held():
                self._events.put(BlocksReleased(transfer_id, proven=True, reason="this side's agent is destroyed"))
        if self._listener is not None:
            self._guarded(partial(self._listener.close, GOODBYE_LINGER_S))
        self._guarded(self._context.term)
        self.idle.set()

    def died(self, reason: str) -> None:
        self._ledger.shut(f"cannot go on, its loop died: {reason}")
        for transfer_id in self._ledger.without_outcome(self._events):
            self._events.put(
                PushFinished(transfer_id, Outcome.failed, None, FailureCode.internal, reason, False, 0, 0.0)
            )
        self._events.seal()

    def _close_transport(self) -> bool:
        transport, self._transport = self._transport, None
        if transport is not None:
            for handle in self._writes.values():
                transport.abandon_write(handle)
            self._writes.clear()
            transport.close()
        return True

    def _link_event(self, event: LinkEvent[bytes]) -> None:
        now_s = self._clock()
        if isinstance(event, LinkClosed):
            self._perform(self._core.link_closed(event.link, event.reason, now_s))
        elif isinstance(event, LinkMessage):
            try:
                message = wire.decode_to_prefill(event.frames)
            except Failure as exc:
                self._perform(self._core.malformed(event.link, exc, now_s))
            else:
                self._perform(self._core.message(event.link, message, now_s))

    def _poll_writes(self) -> bool:
        assert self._transport is not None
        has_progressed = False
        for write_id, handle in list(self._writes.items()):
            failure: TransportError | None = None
            try:
                if not self._transport.poll_write(handle):
                    continue
            except TransportError as exc:
                failure = exc
            has_progressed = True
            del self._writes[write_id]
            self._guarded(partial(self._write_ended, write_id, failure))
        return has_progressed

    def _write_ended(self, write_id: int, failure: TransportError | None) -> None:
        if failure is None or failure.disconnected:
            self._perform(self._core.write_settled(write_id, failure, self._clock()))
        else:  # NIXL posts segment by segment: after any other error, some of them may still be under way
            self._perform(self._core.write_doubted(write_id, failure, self._clock()))

    def _drop_fences(self, transfer_id: str) -> None:
        """Its outcome is known, and the id may be used again: an old fence must not speak for a new chunk."""
        self._fences.pop(transfer_id, None)

    def _poll_fences(self) -> bool:
        has_progressed = False
        for transfer_id, fences in list(self._fences.items()):
            if self._fences.get(transfer_id) is fences:  # else its push ended meanwhile
                has_progressed |= self._poll_fences_of(transfer_id, fences)
        return has_progressed

    def _poll_fences_of(self, transfer_id: str, fences: dict[int, Fence]) -> bool:
        """Ask some, from the oldest on: those of one stream are passed in their order, and others' turn comes."""
        passed: list[int] = []
        for index, fence in itertools.islice(fences.items(), FENCES_PER_TURN):
            try:
                if fence.query():
                    passed.append(index)
            except Exception as exc:  # noqa: BLE001  # whatever the device or the caller's object raises fails this push only
                reason = f"transfer {transfer_id!r}: its ready event raised {exc!r}"
                self._perform(self._core.fail(transfer_id, Failure(FailureCode.write_failed, reason), self._clock()))
                return True
        for index in passed:
            del fences[index]
        if not fences:
            del self._fences[transfer_id]
        if passed:
            self._perform(self._core.fences_reached(transfer_id, passed, self._clock()))
        return bool(passed)

    # --- effects -----------------------------------------------------------------------------------------------------

    def _perform(self, effects: list[Effect]) -> None:
        """Carry out effects in order; what comes of them is appended. One that meets a bug takes no other with it."""
        queue = deque(effects)
        while queue:
            queue.extend(self._guarded(partial(self._carry_out, queue.popleft())) or ())

    def _carry_out(self, effect: Effect) -> list[Effect]:
        match effect:
            case PostWrite():
                return self._post(effect)
            case Emit():
                self._drop_fences(effect.event.transfer_id)
                self._events.put(effect.event)
            case Warn():
                logger.warning("%s: %s", self._name, effect.text)
            case AbandonWrite():
                handle = self._writes.pop(effect.write_id)
                if self._transport is not None:
                    self._transport.abandon_write(handle)
            case Send():
                return self._send(effect)
            case LoadPeer():
                return self._load(effect)
            case ReleasePeer():
                if self._transport is not None:
                    unload(effect.peer, self._transport)
        return []

    def _post(self, effect: PostWrite) -> list[Effect]:
        assert self._transport is not None
        peer: Peer = effect.peer
        assert peer.remote is not None, "pieces without a byte are not posted"
        try:
            local, remote = peer.indices(effect.pieces)
            handle = self._transport.post_write(peer.remote, local, remote, effect.notification)
        except Exception as exc:  # noqa: BLE001  # the core waits for exactly one answer
            return self._core.write_settled(effect.write_id, self._as_failure(exc), self._clock())
        self._writes[effect.write_id] = handle
        return []

    def _send(self, effect: Send) -> list[Effect]:
        assert self._listener is not None
        if self._listener.send(effect.link, wire.encode(effect.message)):
            return []
        self._listener.forget(effect.link)
        return self._core.link_closed(effect.link, "its connection is gone, or it does not read", self._clock())

    def _load(self, effect: LoadPeer) -> list[Effect]:
        assert self._transport is not None
        try:
            peer = load(effect, self._transport, self._geometry, self._identity.share, self._config.min_tile_bytes)
        except Exception as exc:  # noqa: BLE001  # likewise
            return self._core.peer_failed(effect.generation, effect.attempt, self._as_failure(exc), self._clock())
        return self._core.peer_loaded(effect.generation, effect.attempt, peer, self._clock())
