"""What the prefill core asks of its loop: the effects, and the outbox that collects them. Pure.

:mod:`kvpush.prefill` says in which order they are carried out, and how each is answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from kvpush import wire
from kvpush.errors import FailureCode
from kvpush.events import BlocksReleased, PushFinished
from kvpush.layout import CacheGeometry
from kvpush.parallel import Share
from kvpush.pushes import Link, LinkId, Piece, Registration


class LoadedPeer(Protocol):
    """What the loop loaded for one generation of an engine; opaque but for its sizes."""

    def num_blocks(self, group: int) -> int:
        """Of the remote cache: the bound of its block ids. ``group`` is the number of ours."""

    def len_bytes(self, piece: Piece) -> int:
        """What writing this piece moves; 0 for layers that the peer does not hold."""


class Send(msgspec.Struct, frozen=True):
    """Send ``message`` on ``link``. A link that is gone or full ends: answer with ``link_closed``."""

    link: LinkId
    message: wire.ToDecode


class LoadPeer(msgspec.Struct, frozen=True):
    """Load a verified metadata blob and prepare its descriptors."""

    engine_id: str
    generation: int
    attempt: int
    agent_name: str
    share: Share  # the peer's
    blob: bytes
    geometry: CacheGeometry  # the peer's


class ReleasePeer(msgspec.Struct, frozen=True):
    """Unload. Nothing is in flight to it."""

    peer: Any


class PostWrite(msgspec.Struct, frozen=True):
    """Post one WRITE of the pieces' cells, as the peer's plan says."""

    write_id: int
    peer: Any
    pieces: tuple[Piece, ...]
    notification: bytes


class AbandonWrite(msgspec.Struct, frozen=True):
    """Never ask about this WRITE again: then its notification is never sent. Its source may hold other bytes by now."""

    write_id: int


class Emit(msgspec.Struct, frozen=True):
    """Give the caller an event."""

    event: PushFinished | BlocksReleased


class Warn(msgspec.Struct, frozen=True):
    """Log a warning: somebody must change a configuration."""

    text: str


Effect = Send | LoadPeer | ReleasePeer | PostWrite | AbandonWrite | Emit | Warn


class Outbox:
    """Effects, in the order in which they are to be carried out."""

    def __init__(self, links: Mapping[LinkId, Link]) -> None:
        """``links``: those that are up. A message for another is dropped: whoever dials again asks again."""
        self._links = links
        self._effects: list[Effect] = []

    def add(self, effect: Effect) -> None:
        """Append."""
        self._effects.append(effect)

    def send(self, link: Link, message: wire.ToDecode) -> None:
        """Append a message."""
        if link.link in self._links:
            self.add(Send(link.link, message))

    def send_failed(self, registration: Registration, code: FailureCode, reason: str, *, settled: bool = True) -> None:
        """Tell decode that its registration will not be served, or not any more."""
        failed = wire.Failed(
            registration.transfer_id, registration.epoch, code, wire.clip_reason(reason), settled=settled
        )
        self.send(registration.link, failed)

    def take(self) -> list[Effect]:
        """What has been collected since the last call."""
        taken, self._effects = self._effects, []
        return taken
