"""How often something is said: about one subject once in a while, and not too much in all. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

INTERVAL_S = 60.0  # between two warnings about one subject
MAX_PER_INTERVAL = 20  # about all of them: whoever makes up subjects must not fill the log


class Rarely:
    """Remembers what was said when, in a bounded memory."""

    def __init__(self) -> None:
        self._said_s: OrderedDict[Hashable, float] = OrderedDict()  # longest ago first

    def is_due(self, subject: Hashable, now_s: float) -> bool:
        """Whether it is time to say something about this subject. Asking counts as saying it."""
        while self._said_s and next(iter(self._said_s.values())) <= now_s - INTERVAL_S:
            self._said_s.popitem(last=False)
        if subject in self._said_s or len(self._said_s) >= MAX_PER_INTERVAL:
            return False
        self._said_s[subject] = now_s
        return True
