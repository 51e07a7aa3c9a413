"""Many threads on one pusher and one receiver: every transfer has one end, every byte is right, nothing crashes."""

from __future__ import annotations

import hashlib
import random
import sys
import threading
import time
from collections import Counter

import peers
import pytest
import torch
from peers import until

import kvpush


@pytest.fixture(autouse=True)
def _switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_all(*workers):
    """Run them at a barrier; the first error of any of them is the test's."""
    barrier = threading.Barrier(len(workers))
    errors = []

    def run(worker):
        try:
            barrier.wait(peers.PATIENCE_S)
            worker()
        except BaseException as exc:  # noqa: BLE001  # raised again on the test's thread
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(peers.PATIENCE_S)
        assert not thread.is_alive(), "a call does not return"
    if errors:
        raise errors[0]


class Collector:
    """Polls both sides on whatever thread calls it, and remembers who ended how often."""

    def __init__(self, *sides):
        self.sides = sides
        self.ends = [Counter() for _ in sides]
        self.outcomes = [{} for _ in sides]
        self.released = [Counter() for _ in sides]
        self.lock = threading.Lock()

    def poll(self):
        for index, side in enumerate(self.sides):
            for event in side.poll():
                with self.lock:
                    if isinstance(event, kvpush.BlocksReleased):
                        self.released[index][event.transfer_id] += 1
                    else:
                        self.ends[index][event.transfer_id] += 1
                        self.outcomes[index][event.transfer_id] = event

    def has_all(self, transfer_ids):
        self.poll()
        return all(transfer_ids <= ends.keys() for ends in self.ends)


def test_d21_eight_threads_push_a_hundred_times_each_and_every_block_is_right():
    """D21: mixed sizes, disjoint blocks for each thread, digests compared block by block."""
    threads, pushes, share = 8, 100, 16
    shape = peers.Shape(blocks=threads * share, heads=4, head_size=64)  # 16 KiB a block
    with peers.Prefill(shape=shape) as prefill, peers.Decode(shape=shape) as decode:
        collector = Collector(prefill.pusher, decode.receiver)

        def work(number):
            chance = random.Random(number)
            own = list(range(number * share, (number + 1) * share))
            for turn in range(pushes):
                transfer_id = f"{number}/{turn}"
                source = chance.sample(own, chance.randint(1, share))
                target = chance.sample(own, len(source))
                calls = [
                    lambda: decode.expect(transfer_id, target, prefill.address),  # noqa: B023  # called in this turn
                    lambda: prefill.push(transfer_id, source),  # noqa: B023
                ]
                for call in chance.sample(calls, 2):
                    call()
                until(lambda: collector.has_all({transfer_id}))  # noqa: B023
                assert digests(prefill, source) == digests(decode, target), transfer_id
                assert decode.arena.holds(transfer_id, target), transfer_id
                decode.arena.clear(target)

        run_all(*(lambda number=number: work(number) for number in range(threads)))
        for ends in collector.ends:
            assert len(ends) == threads * pushes and set(ends.values()) == {1}
        assert {e.outcome for found in collector.outcomes for e in found.values()} == {"done"}
        assert decode.arena.is_clean() and decode.arena.guards_are_intact() and prefill.arena.guards_are_intact()
        (engine,) = prefill.pusher.engines()
        assert engine.generation == 1 and engine.in_flight == 0


def digests(side, block_ids):
    """Of every block of every layer."""
    blocks = [layer[block_id].contiguous() for layer in side.arena.caches.values() for block_id in block_ids]
    return [hashlib.sha256(block.view(torch.uint8).numpy()).hexdigest() for block in blocks]


def test_c1_pushes_against_drops_cancels_and_looks_from_many_threads():
    """C1, C3: look-up then use with evictions in between; each push ends once, and nobody sees anything else."""
    engines, per_engine = 4, 60
    with peers.Prefill(handshake_backoff_min_s=0.001, handshake_backoff_max_s=0.01, lease_s=10.0) as prefill:
        decodes = [peers.Decode(f"d{i}") for i in range(engines)]
        try:
            collector = Collector(prefill.pusher, *(decode.receiver for decode in decodes))
            is_over = threading.Event()
            submitted = [set() for _ in decodes]

            def push_to(index):
                chance, decode = random.Random(index), decodes[index]
                for turn in range(per_engine):
                    transfer_id = f"{index}/{turn}"
                    submitted[index].add(transfer_id)
                    decode.expect(transfer_id, [turn], prefill.address, deadline_s=20.0)
                    prefill.pusher.push(transfer_id, [index * 8 + turn % 8])
                    if chance.random() < 0.1:
                        chance.choice([prefill.pusher, decode.receiver]).cancel(transfer_id)
                    until(lambda: collector.poll() or transfer_id in collector.ends[index + 1])  # noqa: B023

            def evict():
                chance = random.Random(99)
                while not is_over.is_set():
                    prefill.pusher.drop_engine(f"d{chance.randrange(engines)}")
                    is_over.wait(chance.random() * 0.01)

            def look():
                while not is_over.is_set():
                    for side in collector.sides:
                        assert side.healthy(), side.healthy().reason
                        assert all(e.in_flight >= 0 for e in side.engines())
                        side.stats()
                        repr(side)

            def push_all():
                try:
                    run_all(*(lambda index=index: push_to(index) for index in range(engines)))
                finally:
                    is_over.set()

            run_all(push_all, evict, look, look)
            for index, decode in enumerate(decodes):
                ends = collector.ends[index + 1]
                assert ends.keys() == submitted[index] and set(ends.values()) == {1}
                until(lambda: collector.poll() or not decode.receiver.stats()["receives_held"])  # noqa: B023
                assert decode.arena.guards_are_intact()
            everything = set().union(*submitted)
            until(lambda: collector.poll() or collector.ends[0].keys() == everything, what="prefill's ends")
            assert set(collector.ends[0].values()) == {1}
            codes = {e.code for e in collector.outcomes[0].values() if e.outcome == "failed"}
            assert codes <= {"engine_dropped", "superseded"}, codes  # nothing of NIXL's, no internal error
            assert prefill.pusher.stats()["internal_errors"] == 0
            generations = {(e.engine_id, e.generation) for e in prefill.pusher.transitions()}
            assert len(generations) > 2 * engines, "nobody was evicted in between"
        finally:
            for decode in decodes:
                decode.receiver.close()


def test_c2_rule_8_threads_that_meet_an_unknown_engine_start_one_handshake():
    """C2, C13: sixteen threads at a barrier, with a forced disconnect between the rounds."""
    threads, rounds = 16, 25
    with peers.Prefill() as prefill, peers.Decode() as decode:
        for turn in range(rounds):
            ids = [f"{turn}/{number}" for number in range(threads)]
            for number, transfer_id in enumerate(ids):
                decode.expect(transfer_id, [number], prefill.address)
            until(lambda: prefill.pusher.stats()["registrations_waiting"] == threads)
            run_all(*(lambda t=t, n=n: prefill.push(t, [n]) for n, t in enumerate(ids)))
            for transfer_id in ids:
                assert prefill.inbox.outcome(transfer_id).outcome == "done"
                assert decode.inbox.outcome(transfer_id).outcome == "done"
            stats = prefill.pusher.stats()
            assert stats["handshakes_started"] == stats["handshakes_succeeded"] == turn + 1
            prefill.pusher.drop_engine("d0")
            until(lambda: prefill.states() == {"d0": "evicted"})


def test_close_while_many_threads_are_in_the_middle_of_everything():
    """C6: each call either works or says Closed; close() answers all who call it with one report."""
    with peers.Prefill() as prefill, peers.Decode() as decode:
        is_closing = threading.Event()
        reports = []

        def busy(number):
            turn = 0
            while True:
                turn += 1
                try:
                    prefill.pusher.push(f"{number}/{turn}", [number])
                    prefill.pusher.cancel(f"{number}/{turn}")
                    decode.receiver.cancel(f"{number}/{turn}")
                    prefill.pusher.stats()
                    prefill.pusher.poll()
                except kvpush.Closed:
                    return
                except kvpush.QueueFull:
                    prefill.pusher.poll()
                if turn == 5:
                    is_closing.set()

        def close():
            assert is_closing.wait(peers.PATIENCE_S)
            start_s = time.monotonic()
            reports.append((prefill.pusher.close(), decode.receiver.close()))
            assert time.monotonic() - start_s < 10

        run_all(*(lambda number=number: busy(number) for number in range(4)), close, close)
        assert reports[0] == reports[1] == (kvpush.CloseReport(), kvpush.CloseReport())
