"""What can be seen of a world from outside. A checker, a trace, a count of anything: subclass and add it to
:attr:`kvpush.testing.World.observers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpush import wire
from kvpush.errors import Failure
from kvpush.events import BlocksReleased, PushFinished, ReceiveFinished
from kvpush.testing.accounts import Push, Receive
from kvpush.testing.fake_transport import FakeWrite

if TYPE_CHECKING:
    from kvpush.testing.engine import Engine
    from kvpush.testing.oracle import Grant
    from kvpush.testing.prefill_engine import PrefillEngine


class Observer:
    """Every method does nothing unless a subclass says otherwise; to object, raise :class:`Violation`."""

    def born(self, engine: Engine) -> None:
        """A new life of an engine begins."""

    def called(self, engine: Engine, call: str, transfer_id: str, detail: str) -> None:
        """The caller of this engine is about to call."""

    def sent(self, engine: Engine, peer: Engine | None, message: wire.Message) -> None:
        """The core wants this message sent. ``peer``: the process at the other end of the link, if there is one."""

    def handled(self, engine: Engine, peer: Engine | None, message: wire.Message) -> None:
        """The core is about to be given this message."""

    def travelled(self, sender: str, receiver: str, frames: list[bytes], fate: str) -> None:
        """What the network did with a message: delivered, lost, duplicated, held."""

    def emitted(
        self, engine: Engine, account: Push | Receive, event: PushFinished | ReceiveFinished | BlocksReleased
    ) -> None:
        """An event reached the caller."""

    def posted(self, engine: PrefillEngine, write: FakeWrite, grant: Grant) -> None:
        """A WRITE was posted."""

    def landed(self, write: FakeWrite, grant: Grant) -> None:
        """Its bytes are in place."""

    def write_ended(self, engine: PrefillEngine, grant: Grant, failure: Failure | None) -> None:
        """The writer has seen its end and is about to tell the core."""

    def struck(self, fault: str, detail: str) -> None:
        """A fault."""

    def noted(self, text: str) -> None:
        """Something worth a line: the world heals, a check begins."""

    def turned(self) -> None:
        """Every engine has done what there was to do at this instant."""

    def checked(self) -> None:
        """A step of the scenario is over: time for what is too slow for :meth:`turned`."""
