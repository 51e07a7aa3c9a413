"""Who may post next: pushes wait behind their engine's handshake, then in its line, and lines are served in turn.

Pure. An engine (one rank of it) is known by its generation. One leg of a push waits in one place at a time, and no
engine's line holds up another's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from kvpush.pushes import Leg


class Lines:
    """The pushes of one pusher that wait for an engine."""

    def __init__(self, max_deferred: int) -> None:
        """``max_deferred``: pushes that may wait behind one handshake."""
        self._max_deferred = max_deferred
        self._deferred: dict[int, OrderedDict[str, Leg]] = {}
        self._lines: OrderedDict[int, deque[Leg]] = OrderedDict()  # the one whose turn is next comes first
        self._is_serving = False

    # --- behind a handshake ------------------------------------------------------------------------------------------

    def is_deferred(self, leg: Leg, generation: int) -> bool:
        """Whether the push waits behind the handshake of this generation."""
        return leg.transfer_id in self._deferred.get(generation, ())

    def has_room_behind(self, generation: int) -> bool:
        """Whether another push may wait behind the handshake of this generation."""
        return len(self._deferred.get(generation, ())) < self._max_deferred

    def defer(self, leg: Leg, generation: int) -> None:
        """Wait behind the handshake of this generation."""
        self._deferred.setdefault(generation, OrderedDict())[leg.transfer_id] = leg

    def deferred(self, generation: int) -> list[Leg]:
        """Who waits behind the handshake of this generation, longest first."""
        return list(self._deferred.get(generation, OrderedDict()).values())

    def undefer(self, leg: Leg) -> None:
        """Stop waiting behind a handshake, if it does."""
        generation = leg.generation
        if generation is None or generation not in self._deferred:
            return
        behind = self._deferred[generation]
        behind.pop(leg.transfer_id, None)
        if not behind:
            del self._deferred[generation]

    def take_deferred(self, generation: int) -> list[Leg]:
        """The handshake is over, either way: nobody waits behind it any more."""
        return list(self._deferred.pop(generation, OrderedDict()).values())

    # --- in an engine's line -----------------------------------------------------------------------------------------

    def join(self, leg: Leg, generation: int) -> None:
        """Stand in the line of a connected engine, once."""
        if not leg.is_queued:
            leg.is_queued = True
            self._lines.setdefault(generation, deque()).append(leg)

    def leave(self, generation: int) -> None:
        """The first of this line leaves it."""
        line = self._lines[generation]
        line.popleft().is_queued = False
        if not line:
            del self._lines[generation]

    def disband(self, generation: int) -> list[Leg]:
        """Everybody who waits for this generation, in a line or behind a handshake, waits no more."""
        waiting = [*self.take_deferred(generation), *self._lines.pop(generation, ())]
        for leg in waiting:
            leg.is_queued = False
        return waiting

    def serve(self, post_next: Callable[[Leg, int], bool]) -> None:
        """Give every line its turn, one piece each, until none can go on.

        ``post_next`` is given the first push of a line and its generation. It posts a piece of it or has it
        :meth:`leave`; ``False`` says that nothing of this line can be posted for now. It may call anything else here,
        this method too, which leaves what came of that to the turns that are being given already: a push of which
        thousands of pieces end at once, because decode does not hold these layers, must not be a stack as deep.
        """
        if self._is_serving:
            return
        self._is_serving = True
        try:
            while self._serve_round(post_next):
                pass
        finally:
            self._is_serving = False

    def _serve_round(self, post_next: Callable[[Leg, int], bool]) -> bool:
        has_posted = False
        for generation in list(self._lines):
            line = self._lines.get(generation)
            if line is None or not post_next(line[0], generation):
                continue
            has_posted = True
            if generation in self._lines:
                self._lines.move_to_end(generation)  # so that the next round begins with another engine
        return has_posted

    def gauges(self) -> dict[str, int]:
        """Sizes."""
        return {
            "pushes_behind_handshakes": sum(map(len, self._deferred.values())),
            "pushes_in_lines": sum(map(len, self._lines.values())),
        }
