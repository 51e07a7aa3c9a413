"""The engines of the demo: what runs in the prefill process and in each decode process.

Both are step loops, as engines are: take orders, take what kvpush has to say, compute one step, and again. kvpush's own
thread moves the bytes meanwhile; the calls into it return in microseconds. Each class is an example of how an engine
embeds one side of kvpush.
"""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import kvpush
from kvpush.cli.demo.canary import Canaries
from kvpush.cli.demo.messages import (
    Cancel,
    DecodeStatus,
    EnginePipe,
    EngineSettings,
    Expect,
    Failed,
    FirstToken,
    Generated,
    Order,
    Prefill,
    Prefilled,
    PrefillStatus,
    Pushed,
    Ready,
    Received,
    Reference,
    Referenced,
    Report,
    Role,
    Status,
    Stop,
    Stopped,
)
from kvpush.cli.model import (
    Llama,
    ModelConfig,
    OutOfBlocks,
    PagedKVCache,
    deterministic,
    greedy,
    stream,
)

STATUS_INTERVAL_S = 0.1
REST_S = 0.1  # nothing to do at all: wait this long for an order
DRAIN_TIMEOUT_S = 1.5  # of the router's STOP_TIMEOUT_S; the rest is for close()
SHORT_REST_S = 0.001  # a transfer is under way: look again soon


def run_engine(role: Role, engine_id: str, pipe: EnginePipe, settings: EngineSettings) -> None:
    """The whole life of an engine process. Errors become a report, so that the router can say what happened."""
    try:
        engine = _ENGINES[role](engine_id, pipe, settings)
        signal.signal(
            signal.SIGTERM, lambda *_: engine.stop()
        )  # SIGINT stays blocked: the router gets it and orders a stop
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        engine.run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the router is gone, and nobody is left to tell
    except Exception as exc:  # noqa: BLE001  # the router reports it, and fails the run
        is_users_mistake = isinstance(exc, kvpush.ConfigurationError | kvpush.UsageError)
        reason = str(exc) if isinstance(exc, kvpush.KvpushError) else repr(exc)
        pipe.send(Failed(reason, is_users_mistake))


class Engine(ABC):
    """One engine process: a model, a paged cache, and one side of kvpush over it."""

    def __init__(self, engine_id: str, pipe: EnginePipe, settings: EngineSettings) -> None:
        deterministic()
        self.engine_id = engine_id
        self.settings = settings
        self.model = _load_model(settings)
        self.cache = PagedKVCache(self.model.config, settings.num_blocks, settings.block_size_tokens)
        self.spec = kvpush.KVCacheSpec(dims="BKHND", model=f"kvpush-demo/{settings.hf_path or settings.seed}")
        self.config = kvpush.Config(net_devices=settings.net_devices)
        self._pipe = pipe
        self._is_stopping = False
        self._status_due_s = 0.0

    def run(self) -> None:
        """Serve orders until one says stop, or the router is gone."""
        with self.side:
            self.report(Ready(self.address, self.cache.num_blocks))
            while not self._is_stopping:
                self._take_orders()
                self.take_events()
                if not self.step():
                    self._pipe.poll(SHORT_REST_S if self.is_transferring else REST_S)
                self._report_status()
            self.wind_down()
            internal_errors = self.side.stats().get("internal_errors", 0)
            unsettled = self.side.close().unsettled  # says goodbye; kvpush touches no block after this
            self.take_events()  # what close() settled
            self.report(Stopped(unsettled, self.lost_blocks(), internal_errors, self.new_transitions()))

    def stop(self) -> None:
        """End at the next step."""
        self._is_stopping = True

    def wind_down(self) -> None:
        """Nothing new is taken, and what is under way finishes; for a while, since the other side may never begin."""
        self.side.drain(DRAIN_TIMEOUT_S)

    def report(self, report: Report) -> None:
        """Tell the router."""
        self._pipe.send(report)

    def encode(self, text: str, max_new_tokens: int) -> list[int]:
        """The prompt's tokens. Raises :class:`kvpush.UsageError` when the request can never be served."""
        tokens = self.model.tokenizer.encode(text)
        num_tokens = len(tokens) + max_new_tokens
        limit = min(self.model.config.max_position, self.cache.num_blocks * self.cache.block_size_tokens)
        if num_tokens > limit:
            raise kvpush.UsageError(
                f"the prompt {text[:24]!r}... has {len(tokens)} tokens, and {max_new_tokens} more are to be generated; "
                f"the demo's engines hold {limit}"
            )
        return tokens

    def _take_orders(self) -> None:
        try:
            while self._pipe.poll():
                self._obey(self._pipe.recv())
        except EOFError:
            self.stop()

    def _obey(self, order: Order) -> None:
        if isinstance(order, Stop):
            self.stop()
        else:
            self.obey(order)

    def _report_status(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._status_due_s:
            self._status_due_s = now_s + STATUS_INTERVAL_S
            self.report(self.status())

    @property
    @abstractmethod
    def side(self) -> kvpush.PrefillPusher | kvpush.DecodeReceiver:
        """This engine's end of kvpush."""

    @property
    @abstractmethod
    def address(self) -> tuple[str, int] | None:
        """Where peers dial, if they do."""

    @property
    @abstractmethod
    def is_transferring(self) -> bool:
        """Whether kvpush has something under way."""

    @abstractmethod
    def obey(self, order: Order) -> None:
        """Take one order."""

    @abstractmethod
    def take_events(self) -> None:
        """Take what kvpush has to say."""

    @abstractmethod
    def step(self) -> bool:
        """Compute a little; false when there is nothing to compute."""

    @abstractmethod
    def status(self) -> Status:
        """For the live view."""

    @abstractmethod
    def lost_blocks(self) -> int:
        """Blocks that belong to no request and are not free, either."""

    def new_transitions(self) -> tuple[kvpush.Transition, ...]:
        """State changes of remote engines since the last call."""
        return ()


def _load_model(settings: EngineSettings) -> Llama:
    if settings.hf_path is not None:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the terminal is the router's
        return Llama.from_hf(settings.hf_path)
    return Llama.from_seed(ModelConfig.small(), settings.seed)


# --- prefill ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt on its way through prefill. Its blocks belong to kvpush from the first push on."""

    order: Prefill
    tokens: list[int]
    block_ids: list[int]
    num_computed: int = 0  # tokens
    num_chunks: int = 0  # pushed


class PrefillEngine(Engine):
    """Computes prompts, one chunk a step, and pushes every chunk as soon as it is computed."""

    def __init__(self, engine_id: str, pipe: EnginePipe, settings: EngineSettings) -> None:
        super().__init__(engine_id, pipe, settings)
        self._pusher = kvpush.PrefillPusher(
            engine_id, self.cache.kv_caches, self.spec, listen="127.0.0.1:0", config=self.config
        )
        self._waiting: deque[Prefill] = deque()
        self._current: _Prompt | None = None
        self._pushing: dict[str, _Prompt] = {}  # until kvpush says that the blocks are reusable
        self._references: deque[tuple[Reference, Iterator[int]]] = deque()
        self._reference_tokens: list[int] = []
        self._num_transitions = 0  # reported

    @property
    def side(self) -> kvpush.PrefillPusher:
        return self._pusher

    @property
    def address(self) -> tuple[str, int]:
        return self._pusher.address

    @property
    def is_transferring(self) -> bool:
        return bool(self._pushing)

    def obey(self, order: Order) -> None:
        match order:
            case Prefill():
                self._waiting.append(order)
            case Reference():
                self._references.append((order, self._generate(order)))
            case Cancel():
                self._cancel(order.transfer_id)
            case _:
                raise kvpush.UsageError(f"a prefill engine does not take {order}")

    def _cancel(self, transfer_id: str) -> None:
        self._waiting = deque(order for order in self._waiting if order.transfer_id != transfer_id)
        current = self._current
        if current is not None and current.order.transfer_id == transfer_id:
            self._current = None
            if transfer_id not in self._pushing:
                self.cache.free(current.block_ids)
        self._pusher.cancel(transfer_id)  # its end, if it had begun, arrives as an event like any other

    def wind_down(self) -> None:
        if self._current is not None:
            self._cancel(self._current.order.transfer_id)  # its last chunk will never be computed
        super().wind_down()

    def take_events(self) -> None:
        for event in self._pusher.poll():
            prompt = self._pushing[event.transfer_id]
            if isinstance(event, kvpush.PushFinished):
                self.report(Pushed(event, prompt.num_chunks, time.monotonic()))
                if prompt is self._current:
                    self._current = None  # it ended before its last chunk: nobody wants the rest
                if not event.blocks_reusable:
                    continue  # BlocksReleased follows
            del self._pushing[event.transfer_id]
            self.cache.free(prompt.block_ids)

    def step(self) -> bool:
        """One chunk of the current prompt; or, when no prompt waits, one token of a reference."""
        if self._current is None:
            self._current = self._next_prompt()
        if self._current is not None:
            self._compute_chunk(self._current)
            return True
        return self._advance_reference()

    def _next_prompt(self) -> _Prompt | None:
        if not self._waiting:
            return None
        tokens = self.encode(self._waiting[0].text, max_new_tokens=0)
        try:
            block_ids = self.cache.allocate(self.cache.blocks_for(len(tokens)))
        except OutOfBlocks:
            return None  # a push will end, and give blocks back
        return _Prompt(self._waiting.popleft(), tokens, block_ids)

    def _compute_chunk(self, prompt: _Prompt) -> None:
        """Compute the next chunk and push its blocks: they move while the one after it is computed."""
        start = prompt.num_computed
        stop = min(start + self.settings.chunk_tokens, len(prompt.tokens))
        logits = self.model.prefill(prompt.tokens[start:stop], self.cache, prompt.block_ids, start=start)
        is_last = stop == len(prompt.tokens)
        first_block, end_block = start // self.cache.block_size_tokens, self.cache.blocks_for(stop)
        transfer_id = prompt.order.transfer_id
        prompt.num_computed = stop
        prompt.num_chunks += 1
        self._pushing[transfer_id] = prompt
        self._pusher.push(transfer_id, prompt.block_ids[first_block:end_block], first_block=first_block, last=is_last)
        if is_last:
            self._current = None
            self.report(Prefilled(transfer_id, greedy(logits)))

    # --- the run without disaggregation ------------------------------------------------------------------------------

    def _generate(self, order: Reference) -> Iterator[int]:
        """Prompt and answer in one cache, cut into the same chunks: products of other shapes may round differently."""
        tokens = self.encode(order.text, order.max_new_tokens)
        num_blocks = self.cache.blocks_for(len(tokens) + order.max_new_tokens)
        cache = PagedKVCache(self.model.config, num_blocks, self.cache.block_size_tokens)
        block_ids = cache.allocate(num_blocks)
        for start in range(0, len(tokens), self.settings.chunk_tokens):
            chunk = tokens[start : start + self.settings.chunk_tokens]
            logits = self.model.prefill(chunk, cache, block_ids, start=start)
        yield from stream(
            self.model, cache, tokens, block_ids, max_new_tokens=order.max_new_tokens, first_token=greedy(logits)
        )

    def _advance_reference(self) -> bool:
        if not self._references:
            return False
        order, tokens = self._references[0]
        token = next(tokens, None)
        if token is not None:
            self._reference_tokens.append(token)
        else:
            self.report(Referenced(order.prompt_id, tuple(self._reference_tokens)))
            self._reference_tokens = []
            self._references.popleft()
        return True

    # --- looking at it -----------------------------------------------------------------------------------------------

    def status(self) -> PrefillStatus:
        return PrefillStatus(
            transitions=self.new_transitions(),
            queued=len(self._waiting) + (self._current is not None),
            pushing=len(self._pushing),
            free_blocks=self.cache.num_free,
        )

    def new_transitions(self) -> tuple[kvpush.Transition, ...]:
        transitions = self._pusher.transitions()
        new = tuple(transitions[self._num_transitions :])
        self._num_transitions = len(transitions)
        return new

    def lost_blocks(self) -> int:
        owned = {block for prompt in self._pushing.values() for block in prompt.block_ids}
        if self._current is not None:
            owned.update(self._current.block_ids)
        return self.cache.num_blocks - self.cache.num_free - len(owned)


# --- decode ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request at decode. The first ``num_granted`` of its blocks are kvpush's to fill."""

    order: Expect
    tokens: list[int]
    block_ids: list[int] = field(default_factory=list)  # none while it waits for them
    num_granted: int = 0
    first_token: int | None = None
    is_received: bool = False
    is_over: bool = False  # ended without an answer; kvpush may still hold its blocks
    generated: list[int] = field(default_factory=list)

    @property
    def granted_ids(self) -> list[int]:
        return self.block_ids[: self.num_granted]

    @property
    def growth_ids(self) -> list[int]:
        """Blocks for the tokens that are generated here."""
        return self.block_ids[self.num_granted :]


class DecodeEngine(Engine):
    """Receives prompts' caches and generates from them: one token for every request in the batch, each step."""

    def __init__(self, engine_id: str, pipe: EnginePipe, settings: EngineSettings) -> None:
        super().__init__(engine_id, pipe, settings)
        self._canaries = Canaries(self.cache)
        self._receiver = kvpush.DecodeReceiver(engine_id, self.cache.kv_caches, self.spec, config=self.config)
        self._sequences: dict[str, _Sequence] = {}  # all of them, by transfer
        self._waiting: deque[_Sequence] = deque()  # for blocks
        self._batch: dict[str, Iterator[int]] = {}  # those that generate
        self._num_tokens = 0
        self._is_sabotage_due = settings.is_sabotaged

    @property
    def side(self) -> kvpush.DecodeReceiver:
        return self._receiver

    @property
    def address(self) -> None:
        return None

    @property
    def is_transferring(self) -> bool:
        return len(self._sequences) > len(self._waiting) + len(self._batch)

    def obey(self, order: Order) -> None:
        match order:
            case Expect():
                sequence = _Sequence(order, self.encode(order.text, order.max_new_tokens))
                self._sequences[order.transfer_id] = sequence
                self._waiting.append(sequence)
                self._admit()
            case FirstToken():
                self._first_token(order)
            case Cancel():
                self._cancel(order.transfer_id)
            case _:
                raise kvpush.UsageError(f"a decode engine does not take {order}")

    def _admit(self) -> None:
        """Give the oldest waiting requests their blocks, as far as there are any, and have prefill fill them."""
        while self._waiting and not self._is_stopping:
            sequence = self._waiting[0]
            order = sequence.order
            num_granted = self.cache.blocks_for(len(sequence.tokens))
            try:
                # the last token is never written, so it needs no room
                sequence.block_ids = self.cache.allocate(
                    self.cache.blocks_for(len(sequence.tokens) + order.max_new_tokens - 1)
                )
            except OutOfBlocks:
                return
            self._waiting.popleft()
            sequence.num_granted = num_granted
            self._canaries.release(sequence.granted_ids)
            self._receiver.expect(
                order.transfer_id, sequence.granted_ids, source=order.source, source_engine_id=order.source_engine_id
            )

    def _first_token(self, order: FirstToken) -> None:
        sequence = self._sequences.get(order.transfer_id)
        if sequence is not None:  # else its receive failed meanwhile
            sequence.first_token = order.token
            self._start_if_complete(sequence)

    def _cancel(self, transfer_id: str) -> None:
        sequence = self._sequences.get(transfer_id)
        if sequence is None:
            return  # it has ended meanwhile
        self._batch.pop(transfer_id, None)
        sequence.is_over = True
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            del self._sequences[transfer_id]
        elif sequence.is_received:
            self._give_back(sequence)
        else:
            self._receiver.cancel(transfer_id)  # the blocks come back with its end

    def take_events(self) -> None:
        for event in self._receiver.poll():
            sequence = self._sequences[event.transfer_id]
            if isinstance(event, kvpush.BlocksReleased):
                self._give_back(sequence)
            else:
                self._receive(sequence, event)

    def _receive(self, sequence: _Sequence, event: kvpush.ReceiveFinished) -> None:
        """kvpush has finished with these blocks, well or badly. The first moment at which a stray write would show."""
        changed = self._canaries.changed()
        self.report(Received(event, self._canaries.num_watched, changed))
        if event.outcome == "done" and not sequence.is_over:
            sequence.is_received = True
            self._sabotage(sequence)
            self._start_if_complete(sequence)
            return
        sequence.is_over = True
        if event.blocks_reusable:
            self._give_back(sequence)  # else BlocksReleased follows

    def _sabotage(self, sequence: _Sequence) -> None:
        """Flip the sign bit of every number in one received block, once."""
        if self._is_sabotage_due:
            self._is_sabotage_due = False
            for layer in self.cache.kv_caches.values():
                layer[sequence.granted_ids[0]].neg_()

    def _start_if_complete(self, sequence: _Sequence) -> None:
        """Into the batch, when both the cache and the first token are here."""
        if not sequence.is_received or sequence.first_token is None or sequence.is_over:
            return
        self._canaries.release(sequence.growth_ids)
        self._batch[sequence.order.transfer_id] = stream(
            self.model,
            self.cache,
            sequence.tokens,
            sequence.block_ids,
            max_new_tokens=sequence.order.max_new_tokens,
            first_token=sequence.first_token,
        )

    def step(self) -> bool:
        """One token for every request in the batch; requests join and leave between two steps."""
        for transfer_id, tokens in list(self._batch.items()):
            token = next(tokens, None)
            if token is not None:
                self._sequences[transfer_id].generated.append(token)
                self._num_tokens += 1
            else:
                del self._batch[transfer_id]
                self._finish(self._sequences[transfer_id])
        return bool(self._batch)

    def _finish(self, sequence: _Sequence) -> None:
        text = self.model.tokenizer.decode(sequence.generated)
        self.report(Generated(sequence.order.transfer_id, tuple(sequence.generated), text))
        self._give_back(sequence)

    def _give_back(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.order.transfer_id]
        self._canaries.watch(sequence.block_ids)
        self.cache.free(sequence.block_ids)
        self._admit()

    def status(self) -> DecodeStatus:
        return DecodeStatus(
            receiving=len(self._sequences) - len(self._batch),
            running=len(self._batch),
            num_tokens=self._num_tokens,
            free_blocks=self.cache.num_free,
        )

    def lost_blocks(self) -> int:
        owned = sum(len(sequence.block_ids) for sequence in self._sequences.values())
        return self.cache.num_blocks - self.cache.num_free - owned


_ENGINES: dict[Role, type[Engine]] = {Role.prefill: PrefillEngine, Role.decode: DecodeEngine}
