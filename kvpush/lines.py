"""Who may post next: pushes wait behind their engine's handshake, then in its line, and lines are served in turn.

Pure. An engine is known by its generation. One push waits in one place at a time, and no engine's line holds up
another's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from kvpush.pushes import Push


class Lines:
    """The pushes of one pusher that wait for an engine."""

    def __init__(self, max_deferred: int) -> None:
        """``max_deferred``: pushes that may wait behind one handshake."""
        self._max_deferred = max_deferred
        self._deferred: dict[int, OrderedDict[str, Push]] = {}
        self._lines: OrderedDict[int, deque[Push]] = OrderedDict()  # the one whose turn is next comes first

    # --- behind a handshake ------------------------------------------------------------------------------------------

    def is_deferred(self, push: Push, generation: int) -> bool:
        """Whether the push waits behind the handshake of this generation."""
        return push.transfer_id in self._deferred.get(generation, ())

    def has_room_behind(self, generation: int) -> bool:
        """Whether another push may wait behind the handshake of this generation."""
        return len(self._deferred.get(generation, ())) < self._max_deferred

    def defer(self, push: Push, generation: int) -> None:
        """Wait behind the handshake of this generation."""
        self._deferred.setdefault(generation, OrderedDict())[push.transfer_id] = push

    def deferred(self, generation: int) -> list[Push]:
        """Who waits behind the handshake of this generation, longest first."""
        return list(self._deferred.get(generation, OrderedDict()).values())

    def undefer(self, push: Push) -> None:
        """Stop waiting behind a handshake, if it does."""
        generation = push.generation
        if generation is None or generation not in self._deferred:
            return
        behind = self._deferred[generation]
        behind.pop(push.transfer_id, None)
        if not behind:
            del self._deferred[generation]

    def take_deferred(self, generation: int) -> list[Push]:
        """The handshake is over, either way: nobody waits behind it any more."""
        return list(self._deferred.pop(generation, OrderedDict()).values())

    # --- in an engine's line -----------------------------------------------------------------------------------------

    def join(self, push: Push, generation: int) -> None:
        """Stand in the line of a connected engine, once."""
        if not push.is_queued:
            push.is_queued = True
            self._lines.setdefault(generation, deque()).append(push)

    def leave(self, generation: int) -> None:
        """The first of this line leaves it."""
        line = self._lines[generation]
        line.popleft().is_queued = False
        if not line:
            del self._lines[generation]

    def disband(self, generation: int) -> list[Push]:
        """Everybody who waits for this generation, in a line or behind a handshake, waits no more."""
        waiting = [*self.take_deferred(generation), *self._lines.pop(generation, ())]
        for push in waiting:
            push.is_queued = False
        return waiting

    def serve(self, post_next: Callable[[Push, int], bool]) -> None:
        """Give every line its turn, one piece each, until none can go on.

        ``post_next`` is given the first push of a line and its generation. It posts a piece of it or has it
        :meth:`leave`; ``False`` says that nothing of this line can be posted for now. It may call anything else here.
        """
        has_posted = True
        while has_posted:
            has_posted = False
            for generation in list(self._lines):
                line = self._lines.get(generation)
                if line is None or not post_next(line[0], generation):
                    continue
                has_posted = True
                if generation in self._lines:
                    self._lines.move_to_end(generation)  # so that the next round begins with another engine

    def gauges(self) -> dict[str, int]:
        """Sizes."""
        return {
            "pushes_behind_handshakes": sum(map(len, self._deferred.values())),
            "pushes_in_lines": sum(map(len, self._lines.values())),
        }
