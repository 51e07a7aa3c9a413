"""A run as a sequence chart in text: one column an engine, one line for each thing that happened.

    time s     p0                        d0
    0.0000     |                         expect t1 [7, 8] from 0, of p0
    0.0009     |<-------- Hello ---------|
    0.0021     |==== WRITE t1 [0, 1] ===>|

Times count from the beginning of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpush import wire
from kvpush.errors import Failure
from kvpush.events import BlocksReleased, PushFinished, ReceiveFinished
from kvpush.testing.accounts import Push, Receive
from kvpush.testing.engine import Engine
from kvpush.testing.fake_transport import FakeWrite
from kvpush.testing.observer import Observer
from kvpush.testing.oracle import Grant
from kvpush.testing.prefill_engine import PrefillEngine

if TYPE_CHECKING:
    from kvpush.testing.world import World

COLUMN = 34  # characters between two engines' lines
QUIET = (wire.Heartbeat, wire.Writing)  # left out of a chart: nothing depends on a single one


@dataclass(frozen=True, slots=True)
class _Line:
    at_s: float
    lane: str  # where it happens, or where an arrow begins; "" for a line across the chart
    text: str
    to: str = ""  # where an arrow ends
    shaft: str = "-"
    head: str = ">"


class Trace(Observer):
    """Records what happens in a world whose ``observers`` it is one of, best the first. :meth:`chart` shows it."""

    def __init__(self, *, with_heartbeats: bool = False) -> None:
        self._lines: list[_Line] = []
        self._lanes: list[str] = []
        self._with_heartbeats = with_heartbeats
        self._clock: Callable[[], float] = float  # nothing runs yet
        self._start_s = 0.0

    def watch(self, world: World) -> None:
        """Take the time from this world, and a column for each engine that it has. Call it before anything happens."""
        self._clock = world.clock
        self._start_s = world.clock()
        self._lanes = [engine.name for engine in world.engines]

    def _add(self, lane: str, text: str, to: str = "", shaft: str = "-", head: str = ">") -> None:
        for name in (lane, to):
            if name and name not in self._lanes:
                self._lanes.append(name)
        self._lines.append(_Line(self._clock() - self._start_s, lane, text, to, shaft, head))

    # --- recording ---------------------------------------------------------------------------------------------------

    def born(self, engine: Engine) -> None:
        """A line: its name and life."""
        self._add(engine.name, f"({engine.name}: life {engine.life})")

    def called(self, engine: Engine, call: str, transfer_id: str, detail: str) -> None:
        """A line under its caller."""
        self._add(engine.name, " ".join(part for part in (call, transfer_id, detail) if part))

    def travelled(self, sender: str, receiver: str, frames: list[bytes], fate: str) -> None:
        """An arrow; it ends in ``x`` when the message did not arrive."""
        message = _decoded(frames)
        if isinstance(message, QUIET) and not self._with_heartbeats and fate == "delivered":
            return
        text = _shown(message)
        if fate == "delivered":
            self._add(sender, text, receiver)
        elif fate == "duplicated":
            self._add(sender, f"{text} x2", receiver)
        else:
            self._add(sender, f"{text}: {fate}", receiver, head="x")

    def emitted(
        self, engine: Engine, account: Push | Receive, event: PushFinished | ReceiveFinished | BlocksReleased
    ) -> None:
        """A line with a star under the engine whose caller is told."""
        if isinstance(event, BlocksReleased):
            text = f"released, {'proven' if event.proven else 'NOT PROVEN'}: {event.reason}"
        else:
            code = "" if event.code is None else f" ({event.code})"
            text = f"{event.outcome}{code}{'' if event.blocks_reusable else ', blocks held'}"
        self._add(engine.name, f"* {event.transfer_id} {text}")

    def posted(self, engine: PrefillEngine, write: FakeWrite, grant: Grant) -> None:
        """A line under its writer."""
        self._add(engine.name, f"posts WRITE {_named(grant)}")

    def landed(self, write: FakeWrite, grant: Grant) -> None:
        """A double arrow."""
        self._add(grant.source.name, f"WRITE {_named(grant)}", grant.sink.name, shaft="=")

    def write_ended(self, engine: PrefillEngine, grant: Grant, failure: Failure | None) -> None:
        """A line for one that failed."""
        if failure is not None:
            self._add(engine.name, f"WRITE {_named(grant)}: {failure.code}")

    def struck(self, fault: str, detail: str) -> None:
        """A line across the chart."""
        self._add("", f"!! {fault}: {detail}")

    def noted(self, text: str) -> None:
        """A line across the chart."""
        self._add("", f"-- {text}")

    # --- showing -----------------------------------------------------------------------------------------------------

    def chart(self, *, last: int | None = None) -> str:
        """The whole run, or its last lines."""
        lines = self._lines if last is None else self._lines[-last:]
        rows = ["time s".ljust(11) + "".join(lane.ljust(COLUMN) for lane in self._lanes).rstrip()]
        if len(lines) < len(self._lines):
            rows.append(f"... {len(self._lines) - len(lines)} lines before this")
        rows += [f"{line.at_s:<10.4f} {self._row(line)}".rstrip() for line in lines]
        return "\n".join(rows)

    def _row(self, line: _Line) -> str:
        if not line.lane:
            return line.text
        row = [("|" + " " * (COLUMN - 1)) for _ in self._lanes]
        start = self._lanes.index(line.lane)
        if not line.to:
            return "".join(row[:start]) + line.text
        end = self._lanes.index(line.to)
        low, high = min(start, end), max(start, end)
        width = COLUMN * (high - low) - 1
        body = f" {line.text} "[:width].center(width - 1, line.shaft)
        arrow = body + line.head if start < end else ("<" if line.head == ">" else line.head) + body
        return "".join(row[:low]) + "|" + arrow + "".join(row[high:])


def _decoded(frames: list[bytes]) -> wire.Message | None:
    for decode_it in (wire.decode_to_prefill, wire.decode_to_decode):
        try:
            return decode_it(frames)
        except Failure:
            continue
    return None


def _named(grant: Grant) -> str:
    spans = ", ".join(f"{span.first_slot}..{span.first_slot + span.num_slots - 1}" for span in grant.written.spans)
    return f"{grant.push.transfer_id} e{grant.written.epoch} [{spans}]"


def _shown(message: wire.Message | None) -> str:
    match message:
        case None:
            return "junk"
        case wire.Register():
            wants = ", ".join(
                f"{wire.unpack_block_ids(want.block_ids).tolist()} from {want.first_block}" for want in message.wants
            )
            return f"Register {message.transfer_id} e{message.epoch} {wants}"
        case wire.Failed():
            settled = "settled" if message.settled else "not settled"
            return f"Failed {message.transfer_id} e{message.epoch} {message.code}, {settled}"
        case wire.Cancel():
            return f"Cancel {message.transfer_id} e{message.epoch} {message.code}"
        case wire.Drained():
            return f"Drained {message.transfer_id} e{message.epoch}"
        case wire.Hello() | wire.Welcome():
            return f"{type(message).__name__} {message.engine_id}, {message.incarnation}"
        case wire.Metadata() | wire.MetadataRequest() | wire.MetadataUnavailable():
            return f"{type(message).__name__} attempt {message.attempt}"
        case wire.Refused():
            return f"Refused {message.code}"
        case wire.Renew():
            return f"Renew {' '.join(message.transfer_ids)}"
        case wire.Writing():
            return f"Writing e{message.epoch}"
        case _:
            return type(message).__name__
