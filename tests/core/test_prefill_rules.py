"""What prefill's core decides by itself: lines, limits, leases, and what it makes of peers that do not play along."""

import ast
import tracemalloc
from pathlib import Path

import msgspec.structs
import pytest
from core_worlds import (
    CONFIG,
    SOON_S,
    connect,
    is_a,
    lose,
    make_config,
    make_connected,
    make_pair,
    make_world,
    only_engine,
    part,
    register,
    replace,
    run_to_the_end,
    states,
)
from rank_cores import ALONE, Other, Prefill

import kvpush
from kvpush import wire
from kvpush.errors import Failure, FailureCode, QueueFull
from kvpush.events import BlocksReleased
from kvpush.lifecycle import PushState
from kvpush.parallel import Share
from kvpush.prefill_effects import Emit, ReleasePeer, Send
from kvpush.testing import World

PACKAGE = Path(kvpush.__file__).parent
BLOCK_BYTES = 128  # of the world's engines, over all layers


def link_to(prefill, decode):
    (link,) = [link.link for link in prefill.core._links.values() if link.hello.engine_id == decode.engine_id]
    return link


# --- rules 1, 3, 4, 5, 6, 8 ------------------------------------------------------------------------------------------


def test_rule01_nothing_but_the_lifecycles_writes_a_state():
    for name in (
        "pushes.py",
        "writes.py",
        "lines.py",
        "registrations.py",
        "endings.py",
        "prefill.py",
        "decode.py",
        "registry.py",
    ):
        tree = ast.parse((PACKAGE / name).read_text())
        written = [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr == "state" and not isinstance(node.ctx, ast.Load)
        ]
        assert not written, f"{name} writes a state in lines {written}"


def test_rule03_a_posted_write_keeps_its_agent_loaded_whatever_happens_to_the_engine():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(SOON_S)
    prefill.drop_engine("d0")
    world.advance(1)
    assert prefill.transport.counts.remotes_removed == 0
    assert only_engine(prefill).in_flight == 1
    assert (receive.outcome, receive.is_free) == ("failed", False)
    world.hold_writes = False
    world.resume_writes()
    world.settle(1)
    assert (push.outcome, push.code) == ("failed", "engine_dropped")
    assert prefill.transport.counts.remotes_removed == 1
    run_to_the_end(world)


def test_rule04_a_write_longer_than_the_ttl_does_not_age_its_engine():
    world, prefill, decode = make_connected(engine_ttl_s=2, evict_grace_s=1, stall_timeout_s=100)
    world.hold_writes = True
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(20)
    assert only_engine(prefill).state == "connected"
    world.hold_writes = False
    world.resume_writes()
    world.settle(1)
    assert push.outcome == receive.outcome == "done"
    world.advance(1.5)  # counted from the end of the WRITE, not from its beginning
    assert only_engine(prefill).state == "connected"
    run_to_the_end(world)


def test_rule04_pushing_alone_keeps_an_engine_connected():
    world, prefill, decode = make_connected(engine_ttl_s=2)
    for i in range(12):
        decode.expect(f"t{i}", [7], prefill)
        prefill.push(f"t{i}", [3])
        world.advance(1)
    assert states(prefill, "d0") == ["handshaking", "connected"]
    run_to_the_end(world)


def test_rule05_an_idle_engine_is_stale_and_evicted_by_the_clock_alone():
    world, prefill, decode = make_connected()
    world.advance(CONFIG.engine_ttl_s - 1)
    assert only_engine(prefill).state == "connected"
    world.advance(1)
    assert only_engine(prefill).state == only_engine(decode).state == "stale"
    world.advance(CONFIG.evict_grace_s)
    assert only_engine(prefill).state == only_engine(decode).state == "evicted"
    assert prefill.transport.counts.remotes_removed == 1
    again = decode.expect("again", [7], prefill)
    prefill.push("again", [3])
    run_to_the_end(world)
    assert again.outcome == "done"


def test_rule05_an_idle_engine_is_revived_by_a_push():
    world, prefill, decode = make_connected(evict_grace_s=50)
    world.advance(CONFIG.engine_ttl_s + 1)
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    run_to_the_end(world)
    assert push.outcome == receive.outcome == "done"
    assert states(prefill, "d0") == ["handshaking", "connected", "stale", "connected"]
    assert prefill.transport.counts.remotes_added == 1


def test_rule06_the_end_of_a_write_of_an_old_generation_changes_nothing_in_the_new_one():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    decode.expect("old", [7], prefill)
    prefill.push("old", [3])
    world.advance(SOON_S)
    (old_write,) = world.writes
    prefill.drop_engine("d0")
    world.hold_writes = False
    new = decode.expect("new", [8], prefill)
    prefill.push("new", [4])
    world.advance(SOON_S)
    before = [engine for engine in prefill.registry.snapshot() if engine.reason is None]
    world.finish(old_write)
    world.advance(SOON_S)
    (after,) = [engine for engine in prefill.registry.snapshot() if engine.reason is None]
    assert [engine.generation for engine in before] == [after.generation]
    run_to_the_end(world)
    assert new.outcome == "done"


def test_rule06_what_a_late_attempt_loaded_is_unloaded():
    world, prefill, decode = make_connected()
    late = object()
    (effect,) = prefill.core.peer_loaded(1, 99, late, world.clock())
    assert isinstance(effect, ReleasePeer)
    assert effect.peer is late
    failure = Failure(FailureCode.handshake_failed, "late")
    assert prefill.core.peer_failed(1, 99, failure, world.clock()) == []
    assert only_engine(prefill).state == "connected"
    assert prefill.core.counters["handshakes_late"] == 2
    run_to_the_end(world)
    assert decode.core.counters["receives_done"] == 1


def test_rule08_pushes_to_an_unknown_engine_start_one_handshake_and_share_its_outcome():
    world, prefill, decode = make_pair()
    receives = [decode.expect(f"t{i}", [i], prefill) for i in range(10)]
    for i in range(10):
        prefill.push(f"t{i}", [i])
    run_to_the_end(world)
    assert {receive.outcome for receive in receives} == {"done"}
    assert prefill.core.counters["handshakes_started"] == decode.core.counters["handshakes_started"] == 1


def test_rule08_an_eager_handshake_is_over_before_the_first_push():
    world, prefill, decode = make_pair(eager_handshake=True)
    decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    assert only_engine(prefill).state == "connected"
    prefill.push("t", [3])
    run_to_the_end(world)
    assert prefill.core.counters["pushes_deferred"] == 0


# --- rule 7: lines ---------------------------------------------------------------------------------------------------


def test_rule07_a_handshake_with_a_black_hole_delays_nobody():
    world = make_world(handshake_attempts=1)
    prefill, dark, bright = world.prefill("p0"), world.decode("d0"), world.decode("d1")
    connect(world, prefill, bright)
    world.network.tamper = lose(wire.Metadata)
    dark.expect("dark", [1], prefill)
    late = prefill.push("dark", [1])
    world.advance(SOON_S)
    bright.expect("bright", [2], prefill)
    push = prefill.push("bright", [2])
    assert world.run_until(lambda: push.is_over, 1) < SOON_S
    world.network.tamper = None
    run_to_the_end(world)
    assert late.outcome == "failed"


def test_rule07_one_engines_long_line_does_not_starve_the_others():
    world = make_world(max_in_flight_bytes=4 * BLOCK_BYTES)
    prefill = world.prefill("p0", num_blocks=64)
    decodes = [world.decode(f"d{i}", num_blocks=64) for i in range(3)]
    connect(world, prefill, *decodes)
    world.hold_writes = True
    for i in range(40):
        decodes[0].expect(f"long {i}", [i], prefill)
        prefill.push(f"long {i}", [i])
    for index in (1, 2):
        decodes[index].expect(f"short {index}", [1], prefill)
        prefill.push(f"short {index}", [40 + index])
    world.advance(SOON_S)
    targets = [write.target[:2] for write in world.writes]
    assert len(targets) == 4
    assert set(targets) == {"d0", "d1", "d2"}
    world.hold_writes = False
    world.resume_writes()
    run_to_the_end(world)


def test_rule07_lines_are_served_in_turn():
    world = make_world(max_in_flight_bytes=4 * BLOCK_BYTES)
    prefill = world.prefill("p0", num_blocks=64)
    decodes = [world.decode(f"d{i}", num_blocks=64) for i in range(3)]
    connect(world, prefill, *decodes)
    world.hold_writes = True
    for index, decode in enumerate(decodes):
        for i in range(10):
            decode.expect(f"{index} {i}", [i], prefill)
            prefill.push(f"{index} {i}", [10 * index + i])
    world.advance(SOON_S)
    served = []
    while world.writes:
        write = world.writes[0]
        served.append(write.target[:2])
        world.finish(write)
        world.advance(0.01)
    assert len(served) == 30
    for end in range(6, 28, 3):  # nobody gets the slot that is left over twice as often as the others
        assert all(abs(served[:end].count(name) - end / 3) <= 2 for name in ("d0", "d1", "d2")), served
    assert prefill.core.gauges()["pushes_in_lines"] == 0
    run_to_the_end(world)


def test_rule07_a_frozen_engine_with_the_whole_budget_in_flight_does_not_stop_the_others():
    world = make_world(max_in_flight_bytes=2 * BLOCK_BYTES, hold_timeout_s=1)
    prefill = world.prefill("p0", num_blocks=64)
    frozen, awake = world.decode("d0"), world.decode("d1")
    connect(world, prefill, frozen, awake)
    world.stalling.add("d0")
    for i in range(6):
        frozen.expect(f"stuck {i}", [i], prefill)
        prefill.push(f"stuck {i}", [i])
    world.advance(SOON_S)
    assert prefill.core.gauges()["bytes_in_flight"] == 2 * BLOCK_BYTES
    for i in range(4):
        awake.expect(f"t{i}", [i], prefill)
        push = prefill.push(f"t{i}", [20 + i])
        assert world.run_until(lambda push=push: push.is_over, 1) < SOON_S
        assert push.outcome == "done"
    world.advance(CONFIG.stall_timeout_s)
    gauges = prefill.core.gauges()
    assert (gauges["bytes_in_flight"], gauges["writes_in_flight"]) == (0, 2)  # stalled: they take no room from others
    world.advance(2)
    gauges = prefill.core.gauges()
    assert (gauges["writes_in_flight"], gauges["writes_doubtful"]) == (0, 2)  # the hold is over: nobody asks any more
    world.heal()
    run_to_the_end(world)


def test_rule07_a_piece_above_the_limit_is_posted_when_its_engine_has_nothing_else_in_flight():
    world, prefill, decode = make_connected(max_in_flight_bytes=1)
    world.hold_writes = True
    for name, blocks in (("one", [1, 2, 3]), ("two", [4, 5])):
        decode.expect(name, blocks, prefill)
        prefill.push(name, blocks)
    world.advance(SOON_S)
    assert len(world.writes) == 1
    world.finish(world.writes[0])
    world.advance(SOON_S)
    assert len(world.writes) == 1
    world.hold_writes = False
    world.resume_writes()
    run_to_the_end(world)


# --- rule 10: exactly one outcome ------------------------------------------------------------------------------------


def test_rule10_a_chunk_that_comes_after_the_outcome_begins_no_second_push():
    """The caller has not polled yet and pushes its next chunk: the outcome covers it."""
    world, prefill, decode = make_connected()
    core, now_s = prefill.core, world.clock
    core.push("t", part(0, 3), last=False, fenced=False, now_s=now_s(), index=0)
    events = [effect for effect in core.cancel("t", now_s()) if isinstance(effect, Emit)]
    assert len(events) == 1
    effects = core.push("t", part(1, 4), last=True, fenced=False, now_s=now_s(), index=1)
    assert effects == []
    assert core.num_pushes == 0
    assert core.counters["chunks_after_end"] == 1
    refused = decode.expect("t", [7, 8], prefill)
    run_to_the_end(world)
    assert refused.outcome == "cancelled"


def test_rule10_an_id_is_free_again_while_its_earlier_blocks_are_held():
    world, prefill, decode = make_connected(hold_timeout_s=100)
    world.stalling.add("d0")
    first, stuck = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(CONFIG.stall_timeout_s + SOON_S)
    assert (stuck.outcome, stuck.is_free) == ("failed", False)
    assert (first.outcome, first.is_free) == ("failed", False)
    second = prefill.push("t", [4])
    assert second is not stuck
    prefill.cancel("t")
    world.advance(SOON_S)
    assert second.outcome == "cancelled"
    third = prefill.push("t", [5])
    world.heal()
    world.run_until(lambda: stuck.is_free, 1)
    assert stuck.released.proven
    again = decode.expect("t", [8], prefill)
    run_to_the_end(world)
    assert third.outcome == again.outcome == "done"


def test_rule10_a_deferred_push_whose_registration_becomes_empty_leaves_the_line_behind_the_handshake():
    world, prefill, decode = make_pair()
    world.network.hold = is_a(wire.Metadata)
    decode.expect("t", [7], prefill)
    push = prefill.push("t", [3])
    other, receive = prefill.push("other", [4]), decode.expect("other", [8], prefill)
    world.advance(SOON_S)
    assert prefill.core.gauges()["pushes_behind_handshakes"] == 2
    message = wire.Register("t", 99, (), 1000)
    prefill._perform(prefill.core.message(link_to(prefill, decode), message, world.clock()))
    assert push.outcome == "done"
    assert prefill.core.gauges()["pushes_behind_handshakes"] == 1
    world.network.release()
    world.run_until(lambda: other.is_over and receive.is_over, 1)
    assert other.outcome == receive.outcome == "done"
    run_to_the_end(world)


def test_rule10_no_room_for_a_new_generation_fails_every_push_of_the_link_once():
    """The engine is lost while pinned, and the registry is full: one push finds no room, and takes the others along."""
    world = make_world(max_engines=1, stall_timeout_s=100, hold_timeout_s=200, engine_ttl_s=0.5, evict_grace_s=0.5)
    prefill, decode = world.prefill("p0"), world.decode("d0")
    connect(world, prefill, decode)
    world.hold_writes = True
    for i in range(2):
        decode.expect(f"flying {i}", [i], prefill)
        prefill.push(f"flying {i}", [i])
    world.advance(SOON_S)
    one, two = world.writes
    world.fabric.stall(two)
    prefill._perform(prefill.core.write_doubted(*_doubt(prefill, one), world.clock()))
    pushes = [prefill.push(f"t{i}", [4 + i]) for i in range(3)]
    receives = [decode.expect(f"t{i}", [4 + i], prefill) for i in range(3)]
    world.advance(SOON_S)
    assert {(push.outcome, push.code) for push in pushes} == {("failed", "queue_full")}
    assert {receive.code for receive in receives} == {"queue_full"}
    world.hold_writes = False
    world.heal()
    world.advance(300)
    world.check()


def test_rule10_no_room_behind_a_backoff_fails_every_deferred_push_once():
    """An engine ages out while its handshake backs off, and somebody else has taken its place in the registry."""
    world, prefill, decode = make_pair(
        handshake_attempts=9, handshake_backoff_min_s=20, handshake_backoff_max_s=30, engine_ttl_s=1, evict_grace_s=1
    )
    world.network.tamper = lose(wire.Metadata)
    receives = [decode.expect(f"t{i}", [i], prefill) for i in range(3)]
    pushes = [prefill.push(f"t{i}", [i]) for i in range(3)]
    world.run_until(lambda: prefill.core.counters["handshakes_failed_handshake_timeout"] == 1)

    def full(*_):
        raise QueueFull("max_engines=1")

    prefill.registry.admit = full
    world.settle(5)
    assert {(push.outcome, push.code) for push in pushes} == {("failed", "queue_full")}
    assert {receive.code for receive in receives} == {"queue_full"}
    del prefill.registry.admit
    world.network.tamper = None
    run_to_the_end(world)


def _doubt(prefill, write):
    """Take a WRITE from its loop, as one that failed and cannot be asked any more."""
    for write_id, handle in list(prefill._handles.items()):
        if prefill.transport._writes[handle][1] is write:
            prefill.transport.abandon_write(handle)
            del prefill._handles[write_id]
            return write_id, Failure(FailureCode.write_failed, "status ERR")
    raise AssertionError("not in flight")


def test_rule10_a_push_that_decode_has_been_served_from_ends_though_its_last_chunk_never_comes():
    world, prefill, decode = make_connected()
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3], last=False)
    world.advance(1)
    assert receive.outcome == "done"
    assert not push.is_over
    prefill.push("t", [4], first_block=1, last=False)
    world.settle(CONFIG.lease_s + 1)
    assert push.outcome == "done"
    nothing, empty = decode.expect("empty", [], prefill), prefill.push("empty", [3], last=False)
    world.settle(CONFIG.lease_s + 1)
    assert nothing.outcome == empty.outcome == "done"
    run_to_the_end(world)


def test_rule10_the_first_root_cause_stays():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(SOON_S)
    prefill.cancel("t")
    prefill.drop_engine("d0")
    world.network.cut("p0", "d0")
    world.fail_write(world.writes[0], disconnected=True)
    world.settle(CONFIG.hold_timeout_s)
    assert (push.outcome, push.code) == ("cancelled", "cancelled_by_caller")
    assert receive.is_over
    run_to_the_end(world)


def test_rule10_a_fence_that_raises_fails_this_push_only():
    world, prefill, decode = make_connected()
    one = decode.expect("one", [7], prefill)
    push = prefill.push("one", [3], fenced=True)
    two, _ = decode.expect("two", [8], prefill), prefill.push("two", [4])
    world.advance(SOON_S)
    prefill.fail("one", Failure(FailureCode.write_failed, "its ready event raised"))
    prefill.fail("unknown", Failure(FailureCode.write_failed, "?"))
    run_to_the_end(world)
    assert (push.outcome, one.outcome, two.outcome) == ("failed", "failed", "done")


def test_rule10_a_fence_of_a_push_that_is_over_changes_nothing():
    world, prefill, _ = make_pair()
    push = prefill.push("t", [3], fenced=True)
    prefill.cancel("t")
    prefill.core.fences_reached("t", [0], world.clock())
    prefill.core.fences_reached("unknown", [7], world.clock())
    assert push.outcome == "cancelled"
    run_to_the_end(world)


# --- rule 12: released is not quiesced -------------------------------------------------------------------------------


def test_rule12_a_write_that_failed_in_doubt_holds_its_blocks_and_is_never_called_drained():
    world, prefill, decode = make_connected(hold_timeout_s=6)
    world.hold_writes = True
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(SOON_S)
    world.fail_write(world.writes[0], disconnected=False)
    world.advance(SOON_S)
    assert (push.outcome, push.code, push.is_free) == ("failed", "write_failed", False)
    assert (receive.outcome, receive.code, receive.is_free) == ("failed", "write_failed", False)
    assert prefill.core.gauges()["writes_doubtful"] == 1
    decode.cancel("t")
    world.network.cut("p0", "d0")  # decode asks on a new link what became of it
    world.advance(2)
    assert not receive.is_free
    world.settle(CONFIG.hold_timeout_s)
    assert not push.released.proven
    assert not receive.released.proven
    world.hold_writes = False
    again, _ = decode.expect("again", [7], prefill), prefill.push("again", [3])
    run_to_the_end(world)
    assert again.outcome == "done"  # by a new generation: the old agent was not pinned for ever


def test_rule12_a_write_in_doubt_is_proven_quiet_by_the_end_of_our_agent():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    decode.expect("t", [7], prefill)
    push = prefill.push("t", [3])
    world.advance(SOON_S)
    world.fail_write(world.writes[0], disconnected=False)
    world.advance(SOON_S)
    prefill.close()
    assert push.released.proven
    world.hold_writes = False
    run_to_the_end(world)


def test_rule12_two_stalled_writes_of_one_push_are_released_at_the_end_of_both():
    world, prefill, decode = make_connected(hold_timeout_s=100)
    world.stalling.add("d0")
    receive = decode.expect("t", [7, 8], prefill)
    world.advance(SOON_S)  # registered: each chunk is a WRITE of its own
    push = prefill.push("t", [3], last=False)
    prefill.push("t", [4], first_block=1)
    world.advance(CONFIG.stall_timeout_s + SOON_S)
    one, two = world.writes
    assert (push.outcome, push.is_free) == ("failed", False)
    for write in (one, two):
        assert not push.is_free
        assert not receive.is_free
        world.fabric.resume(write)
        world.finish(write)
        world.advance(SOON_S)
    assert push.released.proven
    assert receive.released.proven
    world.heal()
    run_to_the_end(world)


def test_rule12_the_caller_cancels_while_the_write_runs():
    world, prefill, decode = make_connected()
    world.hold_writes = True
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3])
    world.advance(SOON_S)
    prefill.cancel("t")
    world.advance(SOON_S)
    assert not push.is_over
    assert (receive.outcome, receive.code, receive.is_free) == ("cancelled", "cancelled_by_peer", False)
    world.finish(world.writes[0])
    world.settle(SOON_S)
    assert (push.outcome, push.code) == ("cancelled", "cancelled_by_caller")
    world.check_settled()


# --- rules 13, 16, 17, 19, 20 ----------------------------------------------------------------------------------------


def test_rule13_a_cancel_before_everything_ends_the_push_and_the_registration_that_come():
    world, prefill, decode = make_connected()
    prefill.cancel("t")
    receive = decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    assert (receive.outcome, receive.code) == ("cancelled", "cancelled_by_peer")
    push = prefill.push("t", [3])
    assert (push.outcome, push.code) == ("cancelled", "cancelled_by_caller")
    later, again = decode.expect("t", [7], prefill), prefill.push("t", [3])
    run_to_the_end(world)
    assert again.is_over
    assert later.is_over


def test_rule13_the_callers_cancel_of_a_registered_transfer_is_the_callers_on_prefill_and_the_peers_on_decode():
    world, prefill, decode = make_connected()
    receive = decode.expect("t", [7], prefill)
    world.advance(SOON_S)
    prefill.cancel("t")
    world.settle(SOON_S)
    assert receive.code == "cancelled_by_peer"
    assert prefill.push("t", [3]).code == "cancelled_by_caller"
    run_to_the_end(world)


def test_b8_tombstones_expire_on_look_up_and_are_bounded():
    world, prefill, decode = make_connected(tombstone_ttl_s=300, max_tombstones=100)
    prefill.cancel("r1")
    world.advance(299)
    refused = decode.expect("r1", [7], prefill)
    world.advance(SOON_S)
    assert refused.outcome == "cancelled"
    world.advance(2)
    accepted = decode.expect("r1", [7], prefill)
    prefill.push("r1", [3])
    world.settle(1)
    assert accepted.outcome == "done"
    for i in range(1000):
        prefill.cancel(f"x{i}")
    assert prefill.core.gauges()["tombstones"] == 100
    run_to_the_end(world)


def test_rule16_the_line_behind_a_handshake_is_bounded_and_says_so_to_both_sides():
    world, prefill, decode = make_pair(max_deferred_per_engine=3)
    world.network.hold = is_a(wire.Metadata)
    receives = [decode.expect(f"t{i}", [i], prefill) for i in range(5)]
    pushes = [prefill.push(f"t{i}", [i]) for i in range(5)]
    world.advance(SOON_S)
    assert [push.code for push in pushes] == [None, None, None, "queue_full", "queue_full"]
    world.network.release()
    run_to_the_end(world)
    assert [receive.outcome for receive in receives] == ["done"] * 3 + ["failed"] * 2
    assert {receive.code for receive in receives[3:]} == {"queue_full"}


def test_rule16_a_full_registry_refuses_the_newcomer_and_keeps_what_it_has():
    world = make_world(liveness_timeout_s=1000, heartbeat_interval_s=10)
    prefill = world.prefill("p0", config=make_config(max_engines=2, liveness_timeout_s=1000, engine_ttl_s=50))
    decodes = [world.decode(f"d{i}") for i in range(3)]
    connect(world, prefill, *decodes[:2])
    refused = decodes[2].expect("t", [7], prefill)
    world.settle(5)
    assert (refused.outcome, refused.code) == ("failed", "queue_full")
    assert prefill.core.gauges()["links"] == 2
    connect(world, prefill, *decodes[:2])
    decodes[0].kill()
    world.advance(SOON_S)
    connect(world, prefill, decodes[2])
    run_to_the_end(world)


def test_rule16_registrations_superseded_for_ever_leave_nothing_behind():
    world, prefill, decode = make_connected()
    link = link_to(prefill, decode)
    before = prefill.core.gauges()
    for epoch in range(100, 2000):
        message = register("t", epoch, [0], remaining_ms=wire.MAX_REMAINING_MS)
        prefill.core.message(link, message, world.clock())
    cancel = wire.Cancel("t", 1999, FailureCode.cancelled_by_peer, "")
    prefill.core.message(link, cancel, world.clock())
    after = prefill.core.gauges()
    assert after | {"tombstones": 0} == before | {"tombstones": 0}


def test_rule16_engines_that_come_and_go_leave_nothing_behind():
    world = make_world(max_tombstones=16)
    prefill = world.prefill("p0")
    for life in range(60):
        decode = world.decode(f"d{life}")
        decode.expect(f"t{life}", [1], prefill)
        prefill.push(f"t{life}", [1])
        world.advance(SOON_S)
        decode.kill()
        world.advance(SOON_S)
    assert {push.outcome for push in prefill.pushes} == {"done"}
    gauges = prefill.core.gauges()
    assert {name: size for name, size in gauges.items() if size} == {"tombstones": 16}
    assert len(prefill.registry) == 0
    assert len(prefill.registry.snapshot()) <= 16
    counts = prefill.transport.counts
    assert counts.remotes_added == counts.remotes_removed == 60
    world.check_settled()


def test_rule17_malformed_messages_are_answered_and_the_next_one_works():
    world, prefill, decode = make_connected()
    for frames in ([], [b"junk"], [b"kvpush/1", b"\xc1"], [b"kvpush/1", b"x" * 100], [b"kvpush/999", b""]):
        (link,) = decode.core._links
        world.network.send(decode, link, frames)
    world.advance(SOON_S)
    assert prefill.core.counters["messages_malformed"] == 5
    receive, _ = decode.expect("t", [7], prefill), prefill.push("t", [3])
    run_to_the_end(world)
    assert receive.outcome == "done"


def test_rule17_a_message_before_hello_is_answered_with_goodbye():
    world, prefill, decode = make_connected()
    effects = prefill.core.message(b"stranger", wire.Heartbeat(), world.clock())
    assert [type(effect.message) for effect in effects] == [wire.Goodbye]
    assert prefill.core.link_closed(b"stranger", "gone", world.clock()) == []
    run_to_the_end(world)
    assert decode.core.counters["receives_done"] == 1


def test_rule17_a_second_hello_of_another_engine_on_one_link_is_refused():
    world, prefill, decode = make_connected()
    link = link_to(prefill, decode)
    hello = prefill.core._links[link].hello
    other = msgspec.structs.replace(hello, engine_id="d9", incarnation="life 9", agent_name="d9/0.0#9")
    warning, refusal = prefill.core.message(link, other, world.clock())
    assert isinstance(refusal.message, wire.Refused)
    assert "'d9'" in warning.text
    (welcome,) = prefill.core.message(link, hello, world.clock())
    assert isinstance(welcome.message, wire.Welcome)
    run_to_the_end(world)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("expected_engine_id", "p9", "wrong_engine"),
        ("fingerprint", {"model": "another"}, "incompatible"),
        ("expected_share", Share(tp_rank=1, tp_size=2), "incompatible"),
    ],
)
def test_a10_a_hello_that_does_not_fit_is_refused_and_names_both_values(field, value, code):
    world, prefill, decode = make_connected()
    hello = prefill.core._links[link_to(prefill, decode)].hello
    fields = {name: getattr(hello, name) for name in hello.__struct_fields__} | {field: value, "engine_id": "d9"}
    warning, refusal = prefill.core.message(b"new", wire.Hello(**fields), world.clock())
    assert refusal.message.code == code
    assert refusal.message.reason in warning.text
    assert "p0" in refusal.message.reason
    assert b"new" not in prefill.core._links


@pytest.mark.parametrize("packed", [b"\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\0\0\0\0\0"], ids=["odd", "huge", "twice"])
def test_rule19_block_ids_are_checked_before_anything_is_kept(packed):
    world, prefill, decode = make_connected()
    message = register("t", 99, packed, remaining_ms=1000)
    (failed,) = prefill.core.message(link_to(prefill, decode), message, world.clock())
    assert failed.message.settled
    assert failed.message.code in ("bad_blocks", "malformed")
    assert prefill.core.gauges()["registrations_waiting"] == 0
    run_to_the_end(world)


def test_rule19_a_block_outside_of_the_peers_cache_is_refused_before_the_write():
    world, prefill, decode = make_connected()
    link = link_to(prefill, decode)
    before = prefill.transport.counts.writes_posted
    prefill.core.message(link, register("t", 99, [1, 16], remaining_ms=9000), world.clock())
    push = prefill.push("t", [3, 4])
    assert (push.outcome, push.code) == ("failed", "bad_blocks")
    assert "16" in push.finished.reason
    assert prefill.transport.counts.writes_posted == before
    assert only_engine(prefill).state == "connected"  # its own mistake costs it this transfer only
    world.advance(SOON_S)
    run_to_the_end(world)


def test_rule20_nothing_is_due_when_nothing_is_known_and_little_when_it_is_idle():
    world, prefill, decode = make_pair()
    assert prefill.core.next_due_s() is None
    assert decode.core.next_due_s() is None
    connect(world, prefill, decode)
    world.advance(1)
    events = 0
    end_s = world.clock() + 20
    while world.step(end_s):
        events += 1
    heartbeats = 20 / CONFIG.heartbeat_interval_s
    assert events <= 6 * heartbeats


def test_rule18_close_ends_everything_at_once_when_nothing_is_in_flight():
    world = World(0, CONFIG)
    prefill, decode = world.prefill("p0"), world.decode("d0")
    connect(world, prefill, decode)
    pushes = [prefill.push("unmatched", [1]), prefill.push("fenced", [2], fenced=True)]
    receives = [decode.expect("fenced", [3], prefill), decode.expect("unmatched too", [4], prefill)]
    world.advance(SOON_S)
    start_s = world.clock()
    prefill.close()
    assert world.clock() == start_s
    assert {(push.outcome, push.code) for push in pushes} == {("failed", "closing")}
    world.settle(1)
    assert {receive.code for receive in receives} == {"closing"}
    assert prefill.core.gauges()["links"] == 0


def test_what_was_registered_over_a_link_ends_with_it_in_the_order_of_registration():
    """The same run ends them in the same order in every process, whatever strings hash to there."""
    world, prefill, decode = make_connected()
    names = [f"t{i}" for i in range(12)]
    for i, name in enumerate(names):
        decode.expect(name, [i], prefill)
        prefill.push(name, [i], fenced=True)
        world.advance(SOON_S)
    ended = []
    take = prefill._take
    prefill._take = lambda event: (ended.append(event.transfer_id), take(event))
    world.network.cut("p0", "d0")
    world.advance(SOON_S)
    assert ended == names


# --- block sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "blocks"), [(1, [7, 8, 9, 10]), (4, [7, 8])], ids=["shorter", "longer"])
def test_rule19_block_sizes_that_the_metadata_contradicts_move_nothing(tokens, blocks):
    """Hello says how blocks are cut into slots, the geometry where they are: a slot of the one is none of the other,
    and would be read from another transfer's block."""
    world, prefill, decode = make_pair()
    world.network.tamper = replace(
        wire.Hello, lambda hello: msgspec.structs.replace(hello, block_sizes_tokens={"kv": tokens})
    )
    prefill.push("another's", [5, 6, 7])
    receive, push = decode.expect("t", blocks, prefill), prefill.push("t", [2, 3, 0, 1])
    run_to_the_end(world)  # the oracle sees whose blocks are read
    assert push.outcome == receive.outcome == "failed"
    assert prefill.transport.counts.writes_posted == 0
    assert push.code in ("incompatible", "bad_metadata")


def test_rule19_a_block_of_millions_of_tokens_costs_no_memory_to_hear_of():
    world, prefill, decode = make_pair()
    world.network.tamper = replace(
        wire.Hello, lambda hello: msgspec.structs.replace(hello, block_sizes_tokens={"kv": 2 * 10**7})
    )
    decode.expect("t", [7], prefill)
    prefill.push("t", [3])
    tracemalloc.start()
    try:
        run_to_the_end(world)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20


def test_a_hello_of_a_link_that_was_given_up_does_not_take_the_place_of_the_next_one():
    # found by a seed: a link was cut before its Hello was read, which came after the registrations of the next link
    world, prefill, decode = make_connected()
    link = link_to(prefill, decode)
    receive, push = decode.expect("t", [7], prefill), prefill.push("t", [3], last=False)
    world.advance(SOON_S)
    hello = prefill.core._links[link].hello
    late = msgspec.structs.replace(hello, dial=hello.dial - 1)
    assert prefill.core.message(b"given up", late, world.clock()) == []
    assert prefill.core.counters["hellos_late"] == 1
    assert link_to(prefill, decode) == link
    prefill.push("t", [], first_block=1)
    run_to_the_end(world)
    assert push.outcome == receive.outcome == "done"


def test_the_hello_of_a_newer_link_of_the_same_process_takes_the_older_one_s_place():
    world, prefill, decode = make_connected()
    hello = prefill.core._links[link_to(prefill, decode)].hello
    newer = msgspec.structs.replace(hello, dial=hello.dial + 1)
    effects = prefill.core.message(b"newer", newer, world.clock())
    answers = [each.message for each in effects if isinstance(each, Send)]
    assert any(isinstance(answer, wire.Welcome) for answer in answers)
    assert link_to(prefill, decode) == b"newer"


def test_rule12_a_hold_that_runs_out_before_another_write_of_the_push_has_stalled_takes_that_one_with_it():
    prefill, other = Prefill(hold_timeout_s=1, hold_policy="release", liveness_timeout_s=100), Other("d0", ALONE)
    prefill.meets(other)
    prefill.registers(other, "t", 1, [5, 6])
    prefill.push("t", [3], last=False)
    prefill.answers(other)
    prefill.advance(CONFIG.stall_timeout_s - 1)
    prefill.push("t", [4], index=1, first_block=1)
    assert len(prefill.posted) == 2
    prefill.advance(1)
    assert [(end.outcome, end.blocks_reusable) for end in prefill.events] == [("failed", False)]
    prefill.advance(1)
    assert [type(event) for event in prefill.events[1:]] == [BlocksReleased]
    prefill.advance(CONFIG.stall_timeout_s)
    assert len(prefill.events) == 2
    assert prefill.core.counters["writes_abandoned"] == 2
    assert prefill.core.counters["writes_stalled"] == 1


def test_rule10_a_push_waits_for_no_second_handshake_that_cannot_help():
    prefill, other = Prefill(handshake_attempts=3), Other("d0", ALONE)
    prefill.meets(other)
    prefill.registers(other, "t", 1, [5])
    prefill.push("t", [3])
    (asked,) = prefill.told(other, wire.MetadataRequest)
    prefill.hears(other, wire.MetadataUnavailable(asked.attempt, FailureCode.incompatible, "other layers"))
    assert [(end.outcome, end.code) for end in prefill.events] == [("failed", "incompatible")]


def test_a_push_behind_a_handshake_is_in_the_state_of_its_row():
    prefill, other = Prefill(), Other("d0", ALONE)
    prefill.meets(other)
    prefill.push("t", [3])
    push = prefill.core._pushes["t"]
    assert push.state is PushState.waiting
    prefill.registers(other, "t", 1, [5])
    assert push.state is PushState.deferred
    prefill.answers(other)
    assert push.state is PushState.writing


def test_rule12_a_stalled_write_that_fails_in_the_end_is_told_as_drained():
    prefill, other = Prefill(hold_timeout_s=100, liveness_timeout_s=1000), Other("d0", ALONE)
    prefill.meets(other)
    prefill.registers(other, "t", 1, [5])
    prefill.push("t", [1])
    prefill.answers(other)
    push, write_id = prefill.core._pushes["t"], prefill.write_to(other)
    prefill.advance(CONFIG.stall_timeout_s)
    assert push.state is PushState.in_doubt
    assert [failed.settled for failed in prefill.told(other, wire.Failed)] == [False]
    prefill.settles(write_id, Failure(FailureCode.write_failed, "?"))
    assert [drained.epoch for drained in prefill.told(other, wire.Drained)] == [1]
    assert push.state is PushState.failed


def test_rule12_nothing_more_is_written_of_a_push_in_doubt():
    """One rank's WRITE has stalled; another rank, whose engine lives on, waits in its line for the second block."""
    prefill = Prefill(hold_timeout_s=100, liveness_timeout_s=1000, max_write_bytes=1, max_in_flight_bytes=1)
    stalling, living = (Other("d0", Share(tp_rank=rank, tp_size=2)) for rank in (0, 1))
    prefill.meets(stalling, living)
    for other in (stalling, living):
        prefill.registers(other, "t", 1, [5, 6])
    prefill.push("t", [1, 2])
    prefill.answers(stalling)
    prefill.advance(0.5)
    prefill.answers(living)
    assert len(prefill.posted) == 2
    prefill.advance(CONFIG.stall_timeout_s - 0.5)
    assert [(end.outcome, end.blocks_reusable) for end in prefill.events] == [("failed", False)]
    prefill.settles(prefill.write_to(living))
    assert list(prefill.posted) == [prefill.write_to(stalling)]
