"""What the router and the engines of the demo say to each other, over one pipe per engine.

Orders go to an engine, reports come from it. A real proxy would say the same over HTTP: text to both engines, the first
token from prefill to decode, and a ``transfer_id`` that both of them hand to kvpush. The keys and values themselves
never come this way.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

import kvpush


class Role(enum.StrEnum):
    """What an engine does."""

    prefill = "prefill"
    decode = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What every engine process is started with."""

    seed: int
    hf_path: str | None
    num_blocks: int
    block_size_tokens: int
    chunk_tokens: int  # longer prompts are prefilled, and pushed, in chunks of this many tokens
    net_devices: str
    is_sabotaged: bool  # decode damages one block that it received: shows that the check can fail


# --- orders ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prefill:
    """To prefill: compute this prompt and push its cache."""

    transfer_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Reference:
    """To prefill: generate from this prompt without disaggregation, in a cache that kvpush does not know."""

    prompt_id: int
    text: str
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Expect:
    """To decode: set blocks aside, have ``source`` fill them, then generate."""

    transfer_id: str
    text: str
    max_new_tokens: int
    source: tuple[str, int]
    source_engine_id: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    """To decode: the token that prefill drew at the end of the prompt."""

    transfer_id: str
    token: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """To either: this transfer has no use any more."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """To either: say goodbye to your peers and end."""


Order: TypeAlias = Prefill | Reference | Expect | FirstToken | Cancel | Stop

# --- reports ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """From either: takes orders from now on. ``address`` is where prefill listens; decode has none."""

    address: tuple[str, int] | None
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefillStatus:
    """From prefill, several times a second. ``transitions`` are those since the last report."""

    transitions: tuple[kvpush.Transition, ...]
    queued: int  # prompts that wait or are being computed
    pushing: int  # transfers that kvpush has not finished
    free_blocks: int


@dataclass(frozen=True, slots=True)
class DecodeStatus:
    """From decode, several times a second."""

    receiving: int  # requests whose cache is on its way, or that wait for blocks
    running: int  # requests in the batch
    num_tokens: int  # generated so far
    free_blocks: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """From prefill: the prompt is computed, and all of its chunks are pushed."""

    transfer_id: str
    first_token: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """From prefill: kvpush's own account of a push."""

    event: kvpush.PushFinished
    num_chunks: int
    at_s: float  # time.monotonic() counts for all processes of a machine


@dataclass(frozen=True, slots=True)
class Referenced:
    """From prefill: what the prompt generates without disaggregation."""

    prompt_id: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Received:
    """From decode: kvpush's own account of a receive, and which blocks changed that should not have."""

    event: kvpush.ReceiveFinished
    checked_blocks: int
    changed_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """From decode: the request is complete."""

    transfer_id: str
    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """From either: cannot go on. ``is_users_mistake`` tells a wrong option from a bug or a broken machine."""

    reason: str
    is_users_mistake: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """From either, the last one: how kvpush closed, and whether every block came back."""

    unsettled: tuple[str, ...]
    lost_blocks: int
    internal_errors: int
    transitions: tuple[kvpush.Transition, ...]


Status: TypeAlias = PrefillStatus | DecodeStatus
Report: TypeAlias = Ready | Status | Prefilled | Pushed | Referenced | Received | Generated | Failed | Stopped

RouterPipe: TypeAlias = "Connection[Order, Report]"
EnginePipe: TypeAlias = "Connection[Report, Order]"
