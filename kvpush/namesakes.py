"""Two living processes under one engine id: telling them from a restart. Pure.

A restart and a namesake begin alike: another incarnation says Hello under a known id, and takes its place. What tells
them apart comes later: a process that has restarted is never heard of again, while a namesake comes back. So an
incarnation that lost its place is remembered, and when it says Hello again while the newer one is still linked, it is
refused. Without that the two would push each other out for ever, and every transfer of either would fail now and then.
When the newer one is gone, the older may come back.
"""

from __future__ import annotations

from collections import OrderedDict

Engine = tuple[str, tuple[int, int]]  # engine id and rank (pp, tp)


class Namesakes:
    """Who took whose place, in a bounded memory."""

    def __init__(self, limit: int) -> None:
        """``limit``: engine ids, and incarnations that lost their place, that are remembered; the oldest go first."""
        self._limit = limit
        self._newest: OrderedDict[Engine, str] = OrderedDict()
        self._replaced: OrderedDict[tuple[Engine, str], None] = OrderedDict()

    def admitted(self, engine: Engine, incarnation: str) -> None:
        """This incarnation has the id now, whoever had it before."""
        before = self._newest.get(engine)
        if before is not None and before != incarnation:
            self._replaced[engine, before] = None
        self._replaced.pop((engine, incarnation), None)
        self._newest[engine] = incarnation
        self._newest.move_to_end(engine)
        for memory in (self._newest, self._replaced):
            while len(memory) > self._limit:
                memory.popitem(last=False)

    def has_been_replaced(self, engine: Engine, incarnation: str) -> bool:
        """Whether another incarnation took this one's place, so that its Hello tells of two living processes."""
        return (engine, incarnation) in self._replaced
