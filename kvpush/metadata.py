"""The envelope in which NIXL's metadata travels, sealed by its owner and verified before NIXL sees a byte of it.

NIXL parses metadata in native code that believes every byte: one flipped bit can crash the process, and a blob that is
cut short spoils the agent's name for good. The digest guards against corruption and mix-ups, not against an attacker,
who could compute one too.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from kvpush import wire
from kvpush.errors import Failure, FailureCode
from kvpush.layout import CacheGeometry, check_geometry, decode_geometry, encode_geometry

MAX_BLOB_BYTES = 8 << 20  # about 42 bytes a registered range: far above anything that NIXL makes

_DIGEST_BYTES = 32
_DOMAIN = b"kvpush metadata 1"


def build(attempt: int, incarnation: str, agent_name: str, blob: bytes, geometry: CacheGeometry) -> wire.Metadata:
    """Seal our agent's ``blob`` and geometry, as the answer to request ``attempt``."""
    raw = encode_geometry(geometry)
    return wire.Metadata(
        attempt=attempt,
        incarnation=incarnation,
        agent_name=agent_name,
        blob_len_bytes=len(blob),
        digest=_digest(incarnation, agent_name, blob, raw),
        blob=blob,
        geometry=raw,
    )


def verify(message: wire.Metadata, *, incarnation: str, agent_name: str) -> CacheGeometry:
    """The peer's geometry, once everything has proven right; ``message.blob`` may then be given to NIXL.

    ``incarnation`` and ``agent_name`` are those of the link that the message came over. Whether ``message.attempt`` is
    the one under way is the caller's to check.

    Raises ``Failure``: ``bad_metadata`` for another incarnation or agent, a wrong length or digest and a geometry that
    contradicts itself, ``malformed`` for one that cannot be decoded, ``not_ready`` for one without memory.
    """
    _check_equal("incarnation", incarnation, message.incarnation)
    _check_equal("agent name", agent_name, message.agent_name)
    _check_blob(message)
    check = _digest(message.incarnation, message.agent_name, message.blob, message.geometry)
    if not hmac.compare_digest(check, message.digest):
        raise _bad(f"digest {message.digest[:_DIGEST_BYTES].hex()} is not that of what arrived, {check.hex()}")
    geometry = decode_geometry(message.geometry)
    check_geometry(geometry)
    return geometry


def check_block_sizes(geometry: CacheGeometry, claimed: Mapping[str, int]) -> None:
    """Blocks are cut into slots by what the peer said in ``Hello`` and lie where its geometry says: both must agree, or
    slots of one would be written for those of another. Raises ``Failure(bad_metadata)`` naming the group and both."""
    for group in geometry.groups:
        if claimed.get(group.name) != group.block_size_tokens:
            raise _bad(
                f"group {group.name!r} has blocks of {group.block_size_tokens} tokens, but Hello said "
                f"{claimed.get(group.name, 'nothing of it')}"
            )


def _check_equal(what: str, expected: str, got: str) -> None:
    if got != expected:
        raise _bad(f"{what} {got!r} is not this link's, {expected!r}")


def _check_blob(message: wire.Metadata) -> None:
    length = len(message.blob)
    if length != message.blob_len_bytes:
        raise _bad(f"{length} bytes arrived of {message.blob_len_bytes}")
    if not 0 < length <= MAX_BLOB_BYTES:
        raise _bad(f"{length} bytes; 1 to {MAX_BLOB_BYTES} are accepted")


def _digest(incarnation: str, agent_name: str, blob: bytes, geometry: bytes) -> bytes:
    """Over every part with its length, so that no byte can move from one part into the next unnoticed."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in (_DOMAIN, agent_name.encode(), incarnation.encode(), blob, geometry):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _bad(reason: str) -> Failure:
    return Failure(FailureCode.bad_metadata, f"NIXL metadata: {reason}")
