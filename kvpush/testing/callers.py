"""What the two callers of a simulation do: the engines' step loops and the router, as a list of actions.

An engine of several ranks acts on all of them: each one pushes, expects and cancels its own share.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvpush.events import Outcome
from kvpush.testing.accounts import Push, Receive
from kvpush.testing.decode_engine import DecodeEngine
from kvpush.testing.engine import Engine
from kvpush.testing.prefill_engine import PrefillEngine
from kvpush.testing.scenario import Action
from kvpush.testing.violations import Violation

if TYPE_CHECKING:
    from kvpush.testing.simulation import Simulation

E = TypeVar("E", bound=Engine)
Call = Callable[[], object]

MAX_BLOCKS = 4  # of one transfer
STAGGERS_S = (0.0, 0.0, 0.001, 0.02, 0.5)  # between the first and the last rank of an engine that acts
BYSTANDER_PATIENCE_S = 0.5  # for a transfer of the engine that nothing is wrong with, its handshake included


def expect(run: Simulation, numbers: Sequence[int]) -> bool:
    """A request reaches decode."""
    calls = expecting(run, numbers, run.transfer(numbers[2]), numbers[3] % (MAX_BLOCKS + 1), numbers[4] % 2)
    call_all(run, numbers, calls)
    return True


def expecting(run: Simulation, numbers: Sequence[int], transfer_id: str, count: int, first_block: int) -> list[Call]:
    """One call for each rank of a decode engine that runs."""
    source = run.source_ranks(numbers[1])[0]
    ranks = run.decode_ranks(numbers[0])
    return [partial(expect_blocks, run, rank, source, transfer_id, count, first_block) for rank in ranks]


def call_all(run: Simulation, numbers: Sequence[int], calls: Sequence[Call]) -> None:
    """The ranks of engines act at about the same time, in any order; sometimes one is late, or is never asked."""
    if not run.scenario.setup.has_ranks:
        for call in calls:
            call()
        return
    rng = random.Random(numbers[5])
    stagger_s = rng.choice(STAGGERS_S)
    left_out = rng.choice(calls) if len(calls) > 1 and rng.random() < 0.1 else None
    for call in rng.sample(calls, len(calls)):
        if call is not left_out:
            run.later(rng.random() * stagger_s, call)


def expect_blocks(
    run: Simulation, decode: DecodeEngine, source: PrefillEngine, transfer_id: str, count: int, first_block: int
) -> Receive | None:
    """On one rank, unless something stands in its way that the public class would refuse at once."""
    free = decode.free_blocks()
    is_in_use = decode.open_receive(transfer_id) is not None or decode.is_held(transfer_id)
    if is_in_use or len(free) < count or not decode.is_serving:
        return None
    return decode.expect(transfer_id, free[::-1][:count], source, first_block=first_block)


def push(run: Simulation, numbers: Sequence[int]) -> bool:
    """Prefill has computed a prompt, or its first chunk."""
    count, mood = 1 + numbers[3] % MAX_BLOCKS, numbers[4] % 8
    call_all(run, numbers, pushing(run, numbers, count, last=mood > 1, is_fenced=mood in (0, 7)))
    return True


def pushing(run: Simulation, numbers: Sequence[int], count: int, *, last: bool, is_fenced: bool) -> list[Call]:
    """One call for each rank of a prefill engine that runs: what begins a push there."""
    transfer_id = run.transfer(numbers[2])
    return [
        partial(push_first, run, rank, transfer_id, count, last=last, is_fenced=is_fenced)
        for rank in run.prefill_ranks(numbers[1])
    ]


def push_first(
    run: Simulation, prefill: PrefillEngine, transfer_id: str, count: int, *, last: bool, is_fenced: bool
) -> Push | None:
    """Unless the id is in use."""
    if prefill.open_push(transfer_id) is not None or prefill.is_held(transfer_id):
        return None
    return push_chunk(run, prefill, transfer_id, 0, count, last=last, is_fenced=is_fenced)


def push_more(run: Simulation, numbers: Sequence[int]) -> bool:
    """The next chunk of a push that is not complete, on every rank where it is open."""
    ranks = run.prefill_ranks(numbers[1])
    unfinished = dict.fromkeys(
        push.transfer_id for rank in ranks for push in rank.pushes if not push.is_over and not push.has_last
    )
    if unfinished:
        transfer_id = list(unfinished)[numbers[2] % len(unfinished)]
        count, mood = 1 + numbers[3] % 2, numbers[4] % 4
        more = [partial(push_on, run, rank, transfer_id, count, last=mood > 0, is_fenced=mood == 3) for rank in ranks]
        call_all(run, numbers, more)
    return True


def push_on(
    run: Simulation, prefill: PrefillEngine, transfer_id: str, count: int, *, last: bool, is_fenced: bool
) -> Push | None:
    """Where the last chunk ended, if the push waits for another."""
    push = prefill.open_push(transfer_id)
    if push is None or push.has_last:
        return None
    first_block = max(push.block_ids, default=-1) + 1
    return push_chunk(run, prefill, transfer_id, first_block, count, last=last, is_fenced=is_fenced)


def push_chunk(
    run: Simulation,
    prefill: PrefillEngine,
    transfer_id: str,
    first_block: int,
    count: int,
    *,
    last: bool,
    is_fenced: bool,
) -> Push | None:
    """Unless the cache is full."""
    free = prefill.free_blocks()[:count]
    if len(free) < count or not prefill.is_serving:
        return None
    made = prefill.push(transfer_id, free, first_block=first_block, last=last, fenced=is_fenced)
    if is_fenced:
        run.fenced.append((prefill, made, made.num_chunks - 1, range(first_block, first_block + count)))
    return made


def transfer(run: Simulation, numbers: Sequence[int]) -> bool:
    """Both calls, in either order, in one chunk or several: most of what happens in production."""
    count, mood = 1 + numbers[3] % MAX_BLOCKS, numbers[4]
    last = mood % 4 > 0 or count == 1
    calls = [
        *expecting(run, numbers, run.transfer(numbers[2]), count, 0),
        *pushing(run, numbers, count, last=last, is_fenced=mood % 16 == 5),
    ]
    call_all(run, numbers, calls if mood % 32 < 16 else calls[::-1])
    return True


def transfer_in_chunks(run: Simulation, numbers: Sequence[int]) -> bool:
    """Chunked prefill: the first chunk is there, the last is being computed."""
    transfer_id, count = run.transfer(numbers[2]), 2 + numbers[3] % (MAX_BLOCKS - 1)
    call_all(run, numbers, expecting(run, numbers, transfer_id, count, 0))
    ranks = run.prefill_ranks(numbers[1])
    call_all(run, numbers, [partial(push_two_chunks, run, rank, transfer_id, count) for rank in ranks])
    if numbers[4] % 4 == 0 and ranks:
        run.world.advance(0.05)
        call_all(run, numbers, [partial(cancel_there, rank, transfer_id) for rank in ranks])
    return True


def push_two_chunks(run: Simulation, prefill: PrefillEngine, transfer_id: str, count: int) -> None:
    """The second one not computed yet."""
    first = push_first(run, prefill, transfer_id, 1, last=False, is_fenced=False)
    if first is not None and not first.is_over:
        push_chunk(run, prefill, transfer_id, 1, count - 1, last=True, is_fenced=True)


def cancel_there(engine: Engine, transfer_id: str) -> None:
    """On this rank, if it serves."""
    if engine.is_serving:
        engine.cancel(transfer_id)


def bystander(run: Simulation, numbers: Sequence[int]) -> bool:
    """A transfer to the engine that no fault touches: it must be served as if nothing were wrong elsewhere."""
    if not run.scenario.setup.has_bystander:
        return False
    decodes, prefills = run.bystander, run.prefill_ranks(numbers[1])
    assert prefills == run.source_ranks(numbers[1]), "no fault touches prefill beside a bystander"
    run.num_bystanders += 1
    transfer_id, count = f"b{run.num_bystanders}", 1 + numbers[3] % 2
    if any(len(rank.free_blocks()) < count for rank in prefills) or any(
        len(rank.free_blocks()) < count for rank in decodes
    ):
        return True
    receives = [expect_blocks(run, rank, prefills[0], transfer_id, count, 0) for rank in decodes]
    for prefill in prefills:
        push_chunk(run, prefill, transfer_id, 0, count, last=True, is_fenced=False)

    def check() -> None:
        for decode, receive in zip(decodes, receives, strict=True):
            if receive is not None and receive.outcome is not Outcome.done:
                reason = (
                    f"{decode!r}: {receive!r} is not served within {BYSTANDER_PATIENCE_S:g} s, though it is healthy"
                )
                raise Violation("nobody-waits-for-others", reason)

    run.world.schedule(BYSTANDER_PATIENCE_S, check)
    return True


def fence_reached(run: Simulation, numbers: Sequence[int]) -> bool:
    """The device has computed a fenced chunk."""
    if run.fenced:
        prefill, push, chunk, positions = run.fenced.pop(numbers[0] % len(run.fenced))
        if prefill.is_serving and prefill.open_push(push.transfer_id) is push:
            prefill.compute(push, chunk, positions)
    return True


def cancel_push(run: Simulation, numbers: Sequence[int]) -> bool:
    """The client went away, prefill's router says."""
    cancel_on_ranks(run, numbers, run.prefill_ranks(numbers[1]))
    return True


def cancel_receive(run: Simulation, numbers: Sequence[int]) -> bool:
    """The client went away, decode's router says."""
    cancel_on_ranks(run, numbers, run.decode_ranks(numbers[0]))
    return True


def cancel_on_ranks(run: Simulation, numbers: Sequence[int], ranks: Sequence[Engine]) -> None:
    """On all of them; now and then one is told and the others are not."""
    if numbers[3] % 3 == 0 and ranks:
        ranks = [ranks[numbers[4] % len(ranks)]]
    call_all(run, numbers, [partial(cancel_there, rank, run.transfer(numbers[2])) for rank in ranks])


def renew(run: Simulation, numbers: Sequence[int]) -> bool:
    """The request still queues at decode."""
    for decode in run.decode_ranks(numbers[0]):
        source = run.source_ranks(numbers[1])[0]
        decode.renew([run.transfer(numbers[2]), run.transfer(numbers[3])], source)
    return True


def drop_decode(run: Simulation, numbers: Sequence[int]) -> bool:
    """The router tells prefill that a decode engine is gone, which may not be true."""
    for prefill in some_of(run.prefill_ranks(numbers[1]), numbers):
        prefill.drop_engine(run.target(numbers[0]).engine_id)
    return True


def drop_prefill(run: Simulation, numbers: Sequence[int]) -> bool:
    """The router tells decode that a prefill engine is gone, which may not be true."""
    for decode in some_of(run.decode_ranks(numbers[0]), numbers):
        decode.drop_engine(run.source(numbers[1]).engine_id)
    return True


def some_of(ranks: list[E], numbers: Sequence[int]) -> list[E]:
    """All ranks of an engine, or those up to one of them."""
    return ranks[: 1 + numbers[4] % len(ranks)] if numbers[3] % 3 == 0 and ranks else ranks


def replace_decode(run: Simulation, numbers: Sequence[int]) -> bool:
    """A decode engine leaves in order, rank by rank, and its successor starts under the same id."""
    for decode in some_of(run.decode_ranks(numbers[0]), numbers):
        if decode.is_serving:  # closing the one before it took a while
            decode.close()
            run.restart(decode)
    return True


def replace_prefill(run: Simulation, numbers: Sequence[int]) -> bool:
    """A prefill engine drains, leaves in order, rank by rank, and its successor starts under the same id at the same
    addresses."""
    for prefill in some_of(run.prefill_ranks(numbers[1]), numbers):
        if not prefill.is_serving:  # closing the one before it took a while
            continue
        if numbers[2] % 2:
            prefill.drain()
            run.world.advance(0.1)
        if prefill.is_serving:
            prefill.close()
            run.restart(prefill)
    return True


ACTIONS = [
    Action("transfer", 30, False, transfer),
    Action("expect", 12, False, expect),
    Action("push", 12, False, push),
    Action("push_more", 8, False, push_more),
    Action("transfer_in_chunks", 6, False, transfer_in_chunks),
    Action("bystander", 14, False, bystander),
    Action("fence_reached", 5, False, fence_reached),
    Action("cancel_push", 4, False, cancel_push),
    Action("cancel_receive", 4, False, cancel_receive),
    Action("renew", 3, False, renew),
    Action("drop_decode", 1.5, False, drop_decode),
    Action("drop_prefill", 1, False, drop_prefill),
    Action("replace_decode", 1, False, replace_decode),
    Action("replace_prefill", 1, False, replace_prefill, spares_bystander=False),
]
