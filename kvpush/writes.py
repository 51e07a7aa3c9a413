"""WRITEs from the moment they are posted until no byte of them can land. Pure.

A WRITE is *tracked* while the transport is asked about it. It ends proven (complete, or failed for good), or it becomes
*doubtful*: nobody asks about it any more, and its bytes may still land until this side's agent is gone. For as long as
either lasts, its registration is *unproven*, and decode must not be told ``Drained``.

Bytes of tracked WRITEs are counted, for back-pressure: in all, and for each engine, so that the WRITEs of a huge push
leave room for those of others. A WRITE that has stalled counts no more: it may never end, and the others go on.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvpush.config import Config
from kvpush.pushes import Leg, Link, Push, Registration
from kvpush.wire import Rank

_Key = tuple[str, str, Rank, str, int]  # engine id, incarnation, rank, transfer id, epoch

WRITES_TO_ONE_ENGINE = 2  # of the largest size: while one moves, the next is posted already


@dataclass(slots=True, eq=False)
class Write:
    """One posted WRITE."""

    write_id: int
    leg: Leg
    registration: Registration
    generation: int
    num_cells: int
    num_bytes: int
    counted_bytes: int  # in flight; 0 once it has stalled or is not tracked


class Writes:
    """Every WRITE of one pusher that may still land."""

    def __init__(self, config: Config, least_len_bytes: int) -> None:
        """``least_len_bytes``: of the largest thing that cannot be cut, one block over all layers."""
        self._max_bytes = config.max_in_flight_bytes
        self._max_bytes_to_one = WRITES_TO_ONE_ENGINE * max(config.max_write_bytes, least_len_bytes)
        self._max_doubtful = config.max_tombstones
        self._tracked: dict[int, Write] = {}
        self._doubtful: OrderedDict[int, Write] = OrderedDict()
        self._unproven: dict[_Key, Registration] = {}
        self._in_flight_bytes = 0
        self._bytes_to: dict[int, int] = {}  # generation -> bytes in flight to it
        self._last_write_id = 0

    def has_room(self, generation: int, num_bytes: int) -> bool:
        """Whether one more WRITE may be posted now. An engine with nothing in flight may always have one, or a dead or
        busy one would hold up the others."""
        to_it = self._bytes_to.get(generation, 0)
        is_within = to_it + num_bytes <= self._max_bytes_to_one and self._in_flight_bytes + num_bytes <= self._max_bytes
        return is_within or to_it == 0

    def post(self, leg: Leg, generation: int, num_cells: int, num_bytes: int) -> Write:
        """A new WRITE for the leg's registration. It ends with exactly one :meth:`prove` or :meth:`doubt`."""
        self._last_write_id += 1
        write = Write(self._last_write_id, leg, leg.registration, generation, num_cells, num_bytes, num_bytes)
        self._tracked[write.write_id] = write
        self._in_flight_bytes += num_bytes
        self._bytes_to[generation] = self._bytes_to.get(generation, 0) + num_bytes
        write.registration.num_unproven += 1
        self._unproven[_key_of(write.registration)] = write.registration
        leg.in_flight.add(write.write_id)
        return write

    def stall(self, write_id: int) -> Write:
        """It does not end: count its bytes no more, but go on asking."""
        write = self._tracked[write_id]
        self._discount(write)
        return write

    def prove(self, write_id: int) -> Write:
        """It has ended: complete, or failed so that no byte of it lands later."""
        write = self._untrack(write_id)
        write.leg.in_flight.discard(write_id)
        self._forget(write)
        return write

    def doubt(self, write_id: int) -> Write:
        """Nobody asks about it any more, and its bytes may still land."""
        write = self._untrack(write_id)
        self._doubtful[write_id] = write
        while len(self._doubtful) > self._max_doubtful:
            self._forget(self._doubtful.popitem(last=False)[1])
        return write

    def prove_all(self) -> list[Registration]:
        """This side's agent is destroyed, and every WRITE with it. The registrations that this proves quiet."""
        proven = list(self._unproven.values())
        for write_id in list(self._tracked):
            self.prove(write_id)
        for write in self._doubtful.values():
            self._forget(write)
        self._doubtful.clear()
        return proven

    def tracked_of(self, push: Push) -> list[int]:
        """The ids of the push's WRITEs that the transport is still asked about."""
        in_flight = (write_id for leg in push.legs.values() for write_id in leg.in_flight)
        return [write_id for write_id in in_flight if write_id in self._tracked]

    def unproven(self, link: Link, transfer_id: str, epoch: int) -> Registration | None:
        """The registration of this epoch of this rank of decode, if a WRITE for it may still land."""
        return self._unproven.get(_key(link, transfer_id, epoch))

    def gauges(self) -> dict[str, int]:
        """Sizes."""
        return {
            "writes_in_flight": len(self._tracked),
            "bytes_in_flight": self._in_flight_bytes,
            "writes_doubtful": len(self._doubtful),
        }

    def __len__(self) -> int:
        """WRITEs that are tracked."""
        return len(self._tracked)

    def _untrack(self, write_id: int) -> Write:
        write = self._tracked.pop(write_id)
        self._discount(write)
        return write

    def _discount(self, write: Write) -> None:
        self._in_flight_bytes -= write.counted_bytes
        left_bytes = self._bytes_to.get(write.generation, 0) - write.counted_bytes
        if left_bytes:
            self._bytes_to[write.generation] = left_bytes
        else:
            self._bytes_to.pop(write.generation, None)
        write.counted_bytes = 0

    def _forget(self, write: Write) -> None:
        write.registration.num_unproven -= 1
        if not write.registration.num_unproven:
            del self._unproven[_key_of(write.registration)]


def _key(link: Link, transfer_id: str, epoch: int) -> _Key:
    """Survives the link: decode may come back on a new one. An epoch is decode's own number, and decode is not believed
    to give it only once: whatever concerns another rank or transfer is another registration."""
    return link.hello.engine_id, link.hello.incarnation, link.rank, transfer_id, epoch


def _key_of(registration: Registration) -> _Key:
    return _key(registration.link, registration.transfer_id, registration.epoch)
