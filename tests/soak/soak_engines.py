"""The engines of the soak: each owns a pool of blocks, checks every byte itself, and reports what ended."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "processes"))

import peers  # noqa: E402

import kvpush  # noqa: E402


@dataclass(frozen=True)
class Ended:
    """What ``harvest()`` says of one transfer: its outcome, or that its blocks came back later."""

    transfer_id: str
    outcome: str  # "" for BlocksReleased
    code: str
    num_bytes: int = 0


class _Pool:
    """Blocks that nobody uses. They hold canaries."""

    def __init__(self, arena: peers.Arena, seed: str) -> None:
        self._arena = arena
        self._free = list(range(arena.shape.blocks))
        self._random = random.Random(seed)
        self.broken: list[str] = []

    def take(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        self._random.shuffle(self._free)
        taken, self._free = self._free[:count], self._free[count:]
        if not self._arena.is_clean(taken):
            self.broken.append("a free block was written to")
            self._arena.clear(taken)
        return taken

    def give_back(self, block_ids: list[int]) -> None:
        self._arena.clear(block_ids)
        self._free += block_ids

    def final_check(self) -> list[str]:
        """Everything is back, and everything is a canary."""
        missing = self._arena.shape.blocks - len(self._free)
        self.broken += [f"{missing} blocks never came back"] if missing else []
        self.broken += [] if self._arena.is_clean(self._free) else ["a canary changed in a free block"]
        self.broken += [] if self._arena.guards_are_intact() else ["a guard changed"]
        return self.broken


class _Pooled:
    """What both services add."""

    arena: peers.Arena
    side: Any

    def pool_up(self, seed: str) -> None:
        self.pool = _Pool(self.arena, seed)
        self.blocks: dict[str, list[int]] = {}  # what is in use, by transfer

    def harvest(self) -> tuple[list[Ended], list[str]]:
        """What ended since the last call, and what was found broken."""
        ended = []
        for event in self.side.poll():
            if isinstance(event, kvpush.BlocksReleased):
                if not event.proven:
                    self.pool.broken.append(f"{event.transfer_id}: released without proof: {event.reason}")
                self.pool.give_back(self.blocks.pop(event.transfer_id))
                ended.append(Ended(event.transfer_id, "", ""))
                continue
            if event.outcome == "done":
                self.check_done(event)
            if event.blocks_reusable:
                self.pool.give_back(self.blocks.pop(event.transfer_id, []))
            num_bytes = getattr(event, "num_bytes", 0)
            ended.append(Ended(event.transfer_id, str(event.outcome), str(event.code or ""), num_bytes))
        broken, self.pool.broken = self.pool.broken, []
        return ended, broken

    def check_done(self, event: Any) -> None:
        pass

    def num_in_use(self) -> int:
        return len(self.blocks)

    def final_check(self) -> list[str]:
        return self.pool.final_check()

    def drop_engine(self, engine_id: str) -> None:
        self.side.drop_engine(engine_id)

    def cancel(self, transfer_id: str) -> None:
        self.side.cancel(transfer_id)

    def transitions(self) -> list[Any]:
        return list(self.side.transitions())


class SoakPrefill(_Pooled, peers.PrefillService):
    def __init__(self, engine_id: str, shape: peers.Shape, listen: str, settings: dict[str, Any], seed: str) -> None:
        super().__init__(engine_id, shape, listen, settings)
        self.pool_up(seed)

    def push_chunk(self, transfer_id: str, first_block: int, count: int, *, last: bool) -> bool:
        """``False`` when there is no room for it now."""
        block_ids = self.pool.take(count)
        if block_ids is None:
            return False
        self.arena.fill(transfer_id, block_ids, first_block)
        try:
            self.side.push(transfer_id, block_ids, first_block=first_block, last=last)
        except kvpush.QueueFull:
            self.pool.give_back(block_ids)
            return False
        self.blocks.setdefault(transfer_id, []).extend(block_ids)
        return True


class SoakDecode(_Pooled, peers.DecodeService):
    def __init__(self, engine_id: str, shape: peers.Shape, settings: dict[str, Any], seed: str) -> None:
        super().__init__(engine_id, shape, settings)
        self.pool_up(seed)
        self.first_blocks: dict[str, int] = {}

    def expect_some(
        self, transfer_id: str, first_block: int, count: int, source: tuple[str, int], deadline_s: float
    ) -> bool:
        block_ids = self.pool.take(count)
        if block_ids is None:
            return False
        try:
            self.expect(transfer_id, block_ids, source, first_block=first_block, deadline_s=deadline_s)
        except kvpush.QueueFull:
            self.pool.give_back(block_ids)
            return False
        self.blocks[transfer_id], self.first_blocks[transfer_id] = block_ids, first_block
        return True

    def check_done(self, event: Any) -> None:
        transfer_id = event.transfer_id
        if not self.arena.holds(transfer_id, self.blocks[transfer_id], self.first_blocks.pop(transfer_id)):
            self.pool.broken.append(f"{transfer_id}: done, and not the bytes that were pushed")
