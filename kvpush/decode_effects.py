"""What the decode core asks of its loop: the effects. Pure.

:mod:`kvpush.decode` says in which order they are carried out, and how each is answered.
"""

from __future__ import annotations

import msgspec

from kvpush import wire
from kvpush.events import BlocksReleased, ReceiveFinished
from kvpush.receives import Address, LinkId


class Dial(msgspec.Struct, frozen=True):
    """Open a connection to ``address`` under this link id, which is never used twice."""

    link: LinkId
    address: Address


class HangUp(msgspec.Struct, frozen=True):
    """Close the connection; what was sent before may be delivered still. No ``link_closed`` follows."""

    link: LinkId


class Send(msgspec.Struct, frozen=True):
    """Send ``message`` on ``link``. A link that is gone or full ends: answer with ``link_closed``."""

    link: LinkId
    message: wire.ToPrefill


class Emit(msgspec.Struct, frozen=True):
    """Give the caller an event."""

    event: ReceiveFinished | BlocksReleased


Effect = Dial | HangUp | Send | Emit
