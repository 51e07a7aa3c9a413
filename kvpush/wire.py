"""The control plane's messages, protocol version, codec and limits.

A message is two frames: a preamble that never changes its form, and a msgpack body, decoded only when the preamble
names our version. ``Hello`` and ``Metadata`` keep their second part raw until the first has been verified: the
fingerprint is compared before a byte of geometry is decoded. Unknown fields are ignored, so messages can grow.

Times travel as *remaining* milliseconds: monotonic clocks of two processes have nothing in common.
Nothing is unpickled, and sizes are capped before decoding.
"""

from __future__ import annotations

from typing import Annotated, TypeVar, get_args

import msgspec
import msgspec.structs
import numpy as np
import numpy.typing as npt

from kvpush.errors import FailureCode, RemoteProtocolError, UsageError
from kvpush.parallel import Share

_T = TypeVar("_T")

PROTOCOL_VERSION = 1
_MAGIC = b"kvpush/"

MAX_ID_BYTES = 512
MAX_REASON_BYTES = 4096
MAX_RENEWALS = 4096  # transfer ids in one Renew
MAX_GROUPS = 15
MAX_LAYERS = 4096
MAX_NAME_CHARS = 512
MAX_SPANS = 32  # in one notification
MAX_WRITTEN_BYTES = 2048  # 32 spans of five numbers, and room
ATTENTION_S = (
    0.02  # after a receive was registered or blocks arrived, the next WRITE is likely near: decode looks often
)
MAX_REMAINING_MS = 10 * 365 * 86_400_000  # ten years: more is a peer's mistake

# msgspec counts characters; the limit in bytes is checked after decoding
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_BYTES)]
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Serial = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
RemainingMs = Annotated[int, msgspec.Meta(ge=0, le=MAX_REMAINING_MS)]
Rank = tuple[Count, Count]  # (pp_rank, tp_rank)
BlockIds = Annotated[bytes, msgspec.Meta(max_length=4 * (2**22))]  # little-endian uint32, packed
Fingerprint = Annotated[dict[str, str], msgspec.Meta(max_length=64)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
GroupName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
LayerName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
BlockSizes = Annotated[dict[GroupName, Tokens], msgspec.Meta(max_length=MAX_GROUPS)]


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# --- decode to prefill ---------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag=True):
    """First message on every link: between one rank of a decode engine and one rank of a prefill engine."""

    engine_id: Id
    incarnation: Id
    share: Share
    expected_engine_id: Id  # whom the sender means to talk to
    expected_share: Share  # as which rank of it
    fingerprint: Fingerprint
    block_sizes_tokens: BlockSizes
    agent_name: Id
    dial: Serial  # grows with every link that this incarnation opens: tells the newest from one that comes late


class Metadata(_Message, frozen=True, tag=True):
    """Answer to ``MetadataRequest``. ``geometry`` (raw msgpack) is decoded only when the digest agrees."""

    attempt: Serial
    incarnation: Id
    agent_name: Id
    blob_len_bytes: Count
    digest: bytes  # see kvpush.metadata
    blob: bytes
    geometry: bytes


class MetadataUnavailable(_Message, frozen=True, tag=True):
    """The other answer to ``MetadataRequest``."""

    attempt: Serial
    code: FailureCode
    reason: Reason


class Want(msgspec.Struct, frozen=True, array_like=True):
    """Where one group's blocks go: position ``first_block + i``, in decode's blocks, goes into ``block_ids[i]``.

    ``num_tokens`` ends the last block early: only tokens below it are wanted. 0: every block whole.
    """

    group: GroupName
    first_block: Count
    block_ids: BlockIds
    num_tokens: Serial = 0


class Register(_Message, frozen=True, tag=True):
    """Where the blocks of a transfer go; no ``wants``, or only empty ones: decode needs nothing from this rank.

    ``epoch`` is unique for each registration of one incarnation and grows; it keeps a re-used transfer id apart from
    its past.
    """

    transfer_id: Id
    epoch: Serial
    wants: Annotated[tuple[Want, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    remaining_ms: RemainingMs


class Cancel(_Message, frozen=True, tag=True):
    """Give up. ``Drained`` answers when no write of this epoch is or will be in flight."""

    transfer_id: Id
    epoch: Serial
    code: FailureCode
    reason: Reason


class Withdraw(_Message, frozen=True, tag=True):
    """A receive ended before its ``Register`` could be sent: a push that waits for it would wait in vain.

    It counts where that registration would have counted, and nowhere else. Nothing was granted, so nothing answers.
    """

    transfer_id: Id
    epoch: Serial
    code: FailureCode
    reason: Reason


class Renew(_Message, frozen=True, tag=True):
    """Requests for these transfers still queue at the sender: keep their blocks. Grants one more lease, never less."""

    transfer_ids: Annotated[list[Id], msgspec.Meta(max_length=MAX_RENEWALS)]


# --- prefill to decode ---------------------------------------------------------------------------------------------


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """The part of a group that prefill's rank holds. Its place in :class:`Welcome` and the layers' order number them
    for :class:`Span`."""

    group: GroupName
    block_size_tokens: Tokens
    layers: Annotated[tuple[LayerName, ...], msgspec.Meta(max_length=MAX_LAYERS)]


class Welcome(_Message, frozen=True, tag=True):
    """The link is up."""

    engine_id: Id
    incarnation: Id
    share: Share
    holdings: Annotated[tuple[Holding, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    agent_name: Id


class Refused(_Message, frozen=True, tag=True):
    """The link is not accepted. ``reason`` names both values. Its form never changes: every version understands it."""

    code: FailureCode
    reason: Reason


class MetadataRequest(_Message, frozen=True, tag=True):
    """A push needs this engine."""

    attempt: Serial


class Writing(_Message, frozen=True, tag=True):
    """A WRITE has been posted: a hint to look at NIXL often until its notification has come.

    Nothing depends on it. Decode would see the notification anyway, at its next leisurely look.
    """

    epoch: Serial


class Failed(_Message, frozen=True, tag=True):
    """This registration will not be served.

    ``settled``: no write of it is or will be in flight; if not, ``Drained`` follows.
    """

    transfer_id: Id
    epoch: Serial
    code: FailureCode
    reason: Reason
    settled: bool


class Drained(_Message, frozen=True, tag=True):
    """No write of this epoch is or will be in flight."""

    transfer_id: Id
    epoch: Serial


# --- both ways -----------------------------------------------------------------------------------------------------


class Heartbeat(_Message, frozen=True, tag=True):
    """The loop is alive. Prefill answers each one of decode's."""


class Goodbye(_Message, frozen=True, tag=True):
    """The sender leaves in order. ``reason`` is for people."""

    reason: Reason


ToPrefill = Hello | Metadata | MetadataUnavailable | Register | Cancel | Withdraw | Renew | Heartbeat | Goodbye
ToDecode = Welcome | Refused | MetadataRequest | Writing | Failed | Drained | Heartbeat | Goodbye
Message = ToPrefill | ToDecode


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Slots of some layers of one group. A slot is the greatest run of tokens that both sides' blocks are multiples of.

    Group and layers are numbered as in prefill's :class:`Welcome`, slots from the transfer's first token.
    """

    group: Count
    first_layer: Count
    num_layers: AtLeastOne
    first_slot: Serial
    num_slots: AtLeastOne


class Written(msgspec.Struct, frozen=True, array_like=True):
    """The notification bound to a WRITE: these slots of this registration are in place.

    Decode counts slots of layers, not messages, so a repeated one is harmless and no "last" marker is needed.
    """

    epoch: Serial
    rank: Rank  # of the writer
    chunk: Count  # for people and traces
    spans: Annotated[tuple[Span, ...], msgspec.Meta(min_length=1, max_length=MAX_SPANS)]


_encoder = msgspec.msgpack.Encoder()
_to_prefill = msgspec.msgpack.Decoder(ToPrefill)
_to_decode = msgspec.msgpack.Decoder(ToDecode)
_written = msgspec.msgpack.Decoder(Written)

_PREAMBLE = _MAGIC + str(PROTOCOL_VERSION).encode()


_ID_FIELDS = {
    kind: tuple(field.name for field in msgspec.structs.fields(kind) if field.type == Id)
    for kind in (*get_args(ToPrefill), *get_args(ToDecode))
}


class VersionMismatch(RemoteProtocolError):
    """The peer speaks another protocol version; nothing but the preamble was read."""

    def __init__(self, theirs: str) -> None:
        super().__init__(f"protocol version: this side speaks {PROTOCOL_VERSION}, the peer {theirs}")
        self.code = FailureCode.protocol_version


def encode(message: Message) -> list[bytes]:
    """The frames of a message."""
    return [_PREAMBLE, _encoder.encode(message)]


def decode_to_prefill(frames: list[bytes]) -> ToPrefill:
    """A message from a decode engine. Raises RemoteProtocolError (VersionMismatch before the body is touched)."""
    return _decode(_to_prefill, frames)


def decode_to_decode(frames: list[bytes]) -> ToDecode:
    """A message from a prefill engine. A ``Refused`` is understood whatever version the peer speaks."""
    try:
        return _decode(_to_decode, frames)
    except VersionMismatch:
        try:
            message = _to_decode.decode(frames[1])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError):
            message = None
        if isinstance(message, Refused):
            return message
        raise


def _decode(decoder: msgspec.msgpack.Decoder[_T], frames: list[bytes]) -> _T:
    _check_preamble(frames)
    if len(frames) != 2:
        raise RemoteProtocolError(f"a message has 2 frames, not {len(frames)}")
    try:
        message = decoder.decode(frames[1])
    # RecursionError: deeply nested junk; UnicodeDecodeError: a str that is not UTF-8
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RemoteProtocolError(f"undecodable message: {exc}"[:MAX_REASON_BYTES]) from exc
    _check_id_lengths(message)
    return message


def _check_id_lengths(message: object) -> None:
    for name in _ID_FIELDS[type(message)]:
        if _is_too_long(getattr(message, name)):
            raise RemoteProtocolError(f"{type(message).__name__}.{name} is longer than {MAX_ID_BYTES} bytes")
    if isinstance(message, Renew) and any(map(_is_too_long, message.transfer_ids)):
        raise RemoteProtocolError(f"Renew: a transfer id is longer than {MAX_ID_BYTES} bytes")


def _is_too_long(identifier: str) -> bool:
    # UTF-8 takes 4 bytes at most, so nearly every id is known to fit without being encoded
    return 4 * len(identifier) > MAX_ID_BYTES and len(identifier.encode()) > MAX_ID_BYTES


def check_id(value: object, what: str) -> str:
    """An id that fits into a message, whatever characters it has. Raises UsageError naming ``what`` and the value."""
    if not isinstance(value, str):
        raise UsageError(f"{what}={value!r} must be a string, not {type(value).__name__}")
    if not value:
        raise UsageError(f"{what} must not be empty")
    try:
        length_bytes = len(value.encode())
    except UnicodeEncodeError:
        raise UsageError(f"{what}={value[:64]!r} has a lone surrogate, which UTF-8 cannot carry") from None
    if length_bytes > MAX_ID_BYTES:
        raise UsageError(f"{what}={value[:64]!r}... has {length_bytes} bytes in UTF-8, more than {MAX_ID_BYTES}")
    return str.__str__(value)  # of a subclass, which the codec would refuse, the plain string


def _check_preamble(frames: list[bytes]) -> None:
    preamble = frames[0] if frames else b""
    if preamble == _PREAMBLE:
        return
    version = preamble.removeprefix(_MAGIC)
    if preamble.startswith(_MAGIC) and version.isdigit() and len(version) <= 9:
        raise VersionMismatch(version.decode())
    raise RemoteProtocolError(f"not a kvpush message: preamble {preamble[:32]!r}")


def encode_written(written: Written) -> bytes:
    """A notification's payload: about 30 bytes, and 10 more for each further span."""
    return _encoder.encode(written)


def decode_written(payload: bytes) -> Written:
    """Raises RemoteProtocolError."""
    if len(payload) > MAX_WRITTEN_BYTES:
        raise RemoteProtocolError(f"a notification of {len(payload)} bytes")
    try:
        return _written.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RemoteProtocolError(f"undecodable notification: {exc}"[:MAX_REASON_BYTES]) from exc


def pack_block_ids(block_ids: npt.NDArray[np.integer]) -> bytes:
    """Little-endian uint32. The ids are validated before: 0 <= id < 2**31."""
    return block_ids.astype("<u4", copy=False).tobytes()


def unpack_block_ids(packed: bytes) -> npt.NDArray[np.uint32]:
    """A view of the packed bytes: costs nothing, whatever their number. Bounds are the receiver's to check.

    Raises RemoteProtocolError when the length is no multiple of 4.
    """
    if len(packed) % 4:
        raise RemoteProtocolError(f"block ids: {len(packed)} bytes are no multiple of 4")
    return np.frombuffer(packed, dtype="<u4")


def clip_reason(reason: str) -> str:
    """A reason that fits into a message, cut at a character boundary (the limit counts characters)."""
    return reason if len(reason) <= MAX_REASON_BYTES else reason[: MAX_REASON_BYTES - 1] + "…"
