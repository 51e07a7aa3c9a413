"""Which slots of which layers one writer has written so far. Pure.

A writer reports *spans*: some layers times some slots. What counts is the set of (layer, slot) pairs, not how many
reports there were: a repeated report changes nothing, and a missing one is missed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(slots=True, eq=False)
class Arrivals:
    """Of one group from one writer: ``num_layers`` layers, slots ``first_slot`` .. ``first_slot + num_slots`` - 1."""

    num_layers: int
    first_slot: int
    num_slots: int
    num_missing: int = field(init=False)  # (layer, slot) pairs
    # One row stands for all layers until a report names only some of them: nearly all reports name all.
    _arrived: npt.NDArray[np.bool_] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.num_missing = self.num_layers * self.num_slots
        self._arrived = np.zeros((min(1, self.num_layers), self.num_slots), dtype=np.bool_)

    def mark(self, first_layer: int, num_layers: int, first_slot: int, num_slots: int) -> bool:
        """These have been written. ``False``, and nothing is marked, when they are not all among ours."""
        start = first_slot - self.first_slot
        if min(first_layer, start) < 0 or min(num_layers, num_slots) < 1:
            return False
        if first_layer + num_layers > self.num_layers or start + num_slots > self.num_slots:
            return False
        if num_layers < self.num_layers and len(self._arrived) == 1:
            self._arrived = np.repeat(self._arrived, self.num_layers, axis=0)
        is_compact = len(self._arrived) == 1
        window = self._arrived[
            slice(None) if is_compact else slice(first_layer, first_layer + num_layers), start : start + num_slots
        ]
        new = window.size - int(np.count_nonzero(window))
        self.num_missing -= new * (self.num_layers if is_compact else 1)
        window[:] = True
        return True

    def first_missing(self) -> tuple[list[int], range] | None:
        """Layers, and the first run of slots that is missing in just these; ``None`` when nothing is missing."""
        missing = ~self._arrived
        somewhere = missing.any(axis=0)
        if not somewhere.any():
            return None
        start = int(somewhere.argmax())
        differs = (missing[:, start:] != missing[:, start : start + 1]).any(axis=0)
        length = int(differs.argmax()) if differs.any() else self.num_slots - start
        is_compact = len(missing) < self.num_layers
        layers = range(self.num_layers) if is_compact else np.flatnonzero(missing[:, start]).tolist()
        return list(layers), range(self.first_slot + start, self.first_slot + start + length)
