"""Two real processes, a thousand pushes of mixed sizes in any order: every byte in its place, none anywhere else."""

from __future__ import annotations

import random
import time

import peers
import pytest

NUM_PUSHES = 1000
MAX_BLOCKS = 64
POOL = 512
SHAPE = peers.Shape(blocks=POOL)


class BusyDecode(peers.DecodeService):
    """Takes blocks from a pool, checks every transfer at its end, and gives the blocks back as canaries."""

    def __init__(self, engine_id, shape, settings):
        super().__init__(engine_id, shape, settings)
        self._free = list(range(shape.blocks))
        self._held: dict[str, list[int]] = {}
        self._random = random.Random(2)

    def num_free(self):
        return len(self._free)

    def expect_some(self, transfer_id, count, source):
        self._random.shuffle(self._free)
        block_ids, self._free = self._free[:count], self._free[count:]
        assert self.arena.is_clean(block_ids), f"written to before {transfer_id} was expected"
        self._held[transfer_id] = block_ids
        self.expect(transfer_id, block_ids, source)

    def harvest(self):
        """Ids of the transfers that have ended well since the last call."""
        ended = []
        for event in self.side.poll():
            assert event.outcome == "done" and event.blocks_reusable, event
            block_ids = self._held.pop(event.transfer_id)  # a second end of one transfer is a KeyError
            assert event.num_blocks == len(block_ids)
            assert self.arena.holds(event.transfer_id, block_ids), (
                f"{event.transfer_id}: not the bytes that were pushed"
            )
            self.arena.clear(block_ids)
            self._free += block_ids
            ended.append(event.transfer_id)
        return ended


class Driver:
    """Submits both halves of every transfer in a random order, as blocks allow."""

    def __init__(self, prefill: peers.Prefill, decode: peers.Peer, seed: int) -> None:
        self.random = random.Random(seed)
        self.prefill, self.decode = prefill, decode
        self.sizes = {f"t{i}": self.random.randint(1, MAX_BLOCKS) for i in range(NUM_PUSHES)}
        self.free = list(range(POOL))  # prefill's
        self.held: dict[str, list[int]] = {}
        self.unfinished = {*self.sizes}
        self.most_open = 0
        self.orders: set[str] = set()

    def run(self) -> None:
        waiting = list(self.sizes)
        self.random.shuffle(waiting)
        while waiting:
            batch = [waiting.pop() for _ in range(min(len(waiting), self.random.randint(1, 8)))]
            halves = [(half, transfer_id) for transfer_id in batch for half in ("expect", "push")]
            self.random.shuffle(halves)
            self.make_room(sum(self.sizes[transfer_id] for transfer_id in batch))
            for half, transfer_id in halves:
                self.submit(half, transfer_id)
            first = {}
            for half, transfer_id in halves:
                first.setdefault(transfer_id, half)
            self.orders |= set(first.values())
        while self.unfinished:
            self.harvest()

    def submit(self, half: str, transfer_id: str) -> None:
        count = self.sizes[transfer_id]
        if half == "expect":
            self.decode.call("expect_some", transfer_id, count, self.prefill.address)
        else:
            self.random.shuffle(self.free)
            block_ids, self.free = self.free[:count], self.free[count:]
            self.held[transfer_id] = block_ids
            self.prefill.push(transfer_id, block_ids)

    def make_room(self, count: int) -> None:
        def has_room():
            self.harvest()
            return len(self.free) >= count and self.decode.call("num_free") >= count

        peers.until(has_room, what=f"room for {count} blocks")

    def harvest(self) -> None:
        self.most_open = max(self.most_open, len(self.held))
        for event in self.prefill.pusher.poll():
            assert event.outcome == "done" and event.blocks_reusable, event
            block_ids = self.held.pop(event.transfer_id)
            assert event.num_bytes == len(block_ids) * SHAPE.layers * SHAPE.block_bytes
            self.prefill.arena.clear(block_ids)  # whoever reads the source after this reads canaries
            self.free += block_ids
        self.unfinished -= set(self.decode.call("harvest"))


@pytest.mark.parametrize("ucx_options", ["", "TLS=tcp"], ids=["cma", "tcp"])
def test_a_thousand_pushes_between_two_processes(ucx_options):
    start_s = time.monotonic()
    with (
        peers.Peer(BusyDecode, engine_id="d0", shape=SHAPE, settings={"ucx_options": ucx_options}) as decode,
        peers.Prefill(shape=SHAPE, ucx_options=ucx_options) as prefill,
    ):
        driver = Driver(prefill, decode, seed=1)
        driver.run()
        peers.until(lambda: driver.harvest() or not driver.held, what="the last ends on prefill")

        assert driver.orders == {"expect", "push"} and driver.most_open > 4, "the orders were not mixed"
        assert decode.call("is_clean") and decode.call("guards_are_intact")
        assert prefill.arena.is_clean() and prefill.arena.guards_are_intact()
        stats = prefill.pusher.stats()
        assert stats["pushes_done"] == stats["pushes"] == NUM_PUSHES
        assert stats["bytes_written"] == sum(driver.sizes.values()) * SHAPE.layers * SHAPE.block_bytes
        assert stats["writes_in_flight"] == stats["pushes_open"] == stats["internal_errors"] == 0
        (engine,) = prefill.pusher.engines()
        assert engine.state == "connected" and engine.generation == 1 and engine.pushes == NUM_PUSHES
    assert time.monotonic() - start_s < 60
