"""What the two callers of a simulation do: the engines' step loops and the router, as a list of actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvpush.events import Outcome
from kvpush.testing.accounts import Push, Receive
from kvpush.testing.decode_engine import DecodeEngine
from kvpush.testing.prefill_engine import PrefillEngine
from kvpush.testing.scenario import Action
from kvpush.testing.violations import Violation

if TYPE_CHECKING:
    from kvpush.testing.simulation import Simulation

MAX_BLOCKS = 4  # of one transfer
BYSTANDER_PATIENCE_S = 0.5  # for a transfer of the engine that nothing is wrong with, its handshake included


def expect(run: Simulation, numbers: Sequence[int]) -> bool:
    """A request reaches decode."""
    decode, source = run.decode(numbers[0]), run.source(numbers[1])
    if decode is not None:
        expect_blocks(run, decode, source, run.transfer(numbers[2]), numbers[3] % (MAX_BLOCKS + 1), numbers[4] % 2)
    return True


def expect_blocks(
    run: Simulation, decode: DecodeEngine, source: PrefillEngine, transfer_id: str, count: int, first_block: int
) -> Receive | None:
    """Unless something stands in its way that the public class would refuse at once."""
    free = decode.free_blocks()
    is_in_use = decode.open_receive(transfer_id) is not None or decode.is_held(transfer_id)
    if is_in_use or len(free) < count:
        return None
    return decode.expect(transfer_id, free[::-1][:count], source, first_block=first_block)


def push(run: Simulation, numbers: Sequence[int]) -> bool:
    """Prefill has computed a prompt, or its first chunk."""
    prefill = run.prefill(numbers[1])
    transfer_id = run.transfer(numbers[2])
    if prefill is not None and prefill.open_push(transfer_id) is None and not prefill.is_held(transfer_id):
        count, mood = 1 + numbers[3] % MAX_BLOCKS, numbers[4] % 8
        push_chunk(run, prefill, transfer_id, 0, count, last=mood > 1, is_fenced=mood in (0, 7))
    return True


def push_more(run: Simulation, numbers: Sequence[int]) -> bool:
    """The next chunk of a push that is not complete."""
    prefill = run.prefill(numbers[1])
    if prefill is not None:
        unfinished = [push for push in prefill.pushes if not push.is_over and not push.has_last]
        if unfinished:
            push = unfinished[numbers[2] % len(unfinished)]
            first_block, mood = max(push.block_ids, default=-1) + 1, numbers[4] % 4
            count = 1 + numbers[3] % 2
            push_chunk(run, prefill, push.transfer_id, first_block, count, last=mood > 0, is_fenced=mood == 3)
    return True


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
    if len(free) < count:
        return None
    made = prefill.push(transfer_id, free, first_block=first_block, last=last, fenced=is_fenced)
    if is_fenced:
        run.fenced.append((prefill, made, made.num_chunks - 1, range(first_block, first_block + count)))
    return made


def transfer(run: Simulation, numbers: Sequence[int]) -> bool:
    """Both calls, in either order, in one chunk or several: most of what happens in production."""
    decode, source, prefill = run.decode(numbers[0]), run.source(numbers[1]), run.prefill(numbers[1])
    transfer_id, count, mood = run.transfer(numbers[2]), 1 + numbers[3] % MAX_BLOCKS, numbers[4]
    calls: list[Callable[[], object]] = []
    if decode is not None:
        calls.append(partial(expect_blocks, run, decode, source, transfer_id, count, 0))
    if prefill is not None and prefill.open_push(transfer_id) is None and not prefill.is_held(transfer_id):
        is_whole = mood % 4 > 0
        last = is_whole or count == 1
        calls.append(partial(push_chunk, run, prefill, transfer_id, 0, count, last=last, is_fenced=mood % 16 == 5))
    for call in calls if mood % 32 < 16 else calls[::-1]:
        call()
    return True


def transfer_in_chunks(run: Simulation, numbers: Sequence[int]) -> bool:
    """Chunked prefill: the first chunk is there, the last is being computed."""
    decode, source, prefill = run.decode(numbers[0]), run.source(numbers[1]), run.prefill(numbers[1])
    transfer_id, count = run.transfer(numbers[2]), 2 + numbers[3] % (MAX_BLOCKS - 1)
    if decode is not None:
        expect_blocks(run, decode, source, transfer_id, count, 0)
    if prefill is not None and prefill.open_push(transfer_id) is None and not prefill.is_held(transfer_id):
        first = push_chunk(run, prefill, transfer_id, 0, 1, last=False, is_fenced=False)
        if first is not None and not first.is_over:
            push_chunk(run, prefill, transfer_id, 1, count - 1, last=True, is_fenced=True)
    if numbers[4] % 4 == 0 and prefill is not None:
        run.world.advance(0.05)
        if prefill.is_running:
            prefill.cancel(transfer_id)
    return True


def bystander(run: Simulation, numbers: Sequence[int]) -> bool:
    """A transfer to the engine that no fault touches: it must be served as if nothing were wrong elsewhere."""
    if not run.scenario.setup.has_bystander:
        return False
    decode, prefill = run.bystander, run.prefill(numbers[1])
    assert prefill is not None, "no fault touches prefill beside a bystander"
    run.num_bystanders += 1
    transfer_id, count = f"b{run.num_bystanders}", 1 + numbers[3] % 2
    if len(prefill.free_blocks()) < count or len(decode.free_blocks()) < count:
        return True
    receive = expect_blocks(run, decode, prefill, transfer_id, count, 0)
    push_chunk(run, prefill, transfer_id, 0, count, last=True, is_fenced=False)

    def check() -> None:
        if receive is not None and receive.outcome is not Outcome.done:
            reason = f"{decode!r}: {receive!r} is not served within {BYSTANDER_PATIENCE_S:g} s, though it is healthy"
            raise Violation("nobody-waits-for-others", reason)

    run.world.schedule(BYSTANDER_PATIENCE_S, check)
    return True


def fence_reached(run: Simulation, numbers: Sequence[int]) -> bool:
    """The device has computed a fenced chunk."""
    if run.fenced:
        prefill, push, chunk, positions = run.fenced.pop(numbers[0] % len(run.fenced))
        if prefill.is_running and prefill.open_push(push.transfer_id) is push:
            prefill.compute(push, chunk, positions)
    return True


def cancel_push(run: Simulation, numbers: Sequence[int]) -> bool:
    """The client went away, prefill's router says."""
    prefill = run.prefill(numbers[1])
    if prefill is not None:
        prefill.cancel(run.transfer(numbers[2]))
    return True


def cancel_receive(run: Simulation, numbers: Sequence[int]) -> bool:
    """The client went away, decode's router says."""
    decode = run.decode(numbers[0])
    if decode is not None:
        decode.cancel(run.transfer(numbers[2]))
    return True


def renew(run: Simulation, numbers: Sequence[int]) -> bool:
    """The request still queues at decode."""
    decode = run.decode(numbers[0])
    if decode is not None:
        decode.renew([run.transfer(numbers[2]), run.transfer(numbers[3])], run.source(numbers[1]))
    return True


def drop_decode(run: Simulation, numbers: Sequence[int]) -> bool:
    """The router tells prefill that a decode engine is gone, which may not be true."""
    prefill = run.prefill(numbers[1])
    if prefill is not None:
        prefill.drop_engine(run.target(numbers[0]).engine_id)
    return True


def drop_prefill(run: Simulation, numbers: Sequence[int]) -> bool:
    """The router tells decode that a prefill engine is gone, which may not be true."""
    decode = run.decode(numbers[0])
    if decode is not None:
        decode.drop_engine(run.source(numbers[1]).engine_id)
    return True


def replace_decode(run: Simulation, numbers: Sequence[int]) -> bool:
    """A decode engine leaves in order, and its successor starts under the same id."""
    decode = run.decode(numbers[0])
    if decode is not None:
        decode.close()
        run.restart(decode)
    return True


def replace_prefill(run: Simulation, numbers: Sequence[int]) -> bool:
    """A prefill engine drains, leaves in order, and its successor starts under the same id at the same address."""
    prefill = run.prefill(numbers[1])
    if prefill is not None:
        if numbers[2] % 2:
            prefill.drain()
            run.world.advance(0.1)
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
