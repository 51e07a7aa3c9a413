"""How ranks share a model out, and what the memory oracle knows of it."""

from itertools import product

import numpy as np
import pytest

from kvpush import wire
from kvpush.errors import UsageError
from kvpush.testing import Observer, Violation, World
from kvpush.testing.checkers import all_checkers
from kvpush.testing.memory import Memory
from kvpush.testing.scenario import CONFIG, draw
from kvpush.testing.simulation import ACTIONS
from kvpush.testing.slices import Model, Slice, Spread, shares, units_between

SOON_S = 0.05
SPREADS = [Spread(1, tp_size) for tp_size in (1, 2, 3)] + [Spread(2, 2, (1, 2)), Spread(2, 3, (2, 1)), Spread(2, 1)]


def slices(model, spread):
    return [Slice(model, share, layers) for share, layers in spread.parts]


@pytest.mark.parametrize(("prefill", "decode"), list(product(SPREADS, SPREADS)), ids=str)
@pytest.mark.parametrize("num_heads", [6, 1])
def test_each_unit_of_each_decode_rank_has_one_writer_that_holds_it(prefill, decode, num_heads):
    model = Model(3, num_heads)
    for reader in slices(model, decode):
        written = 0
        for writer in slices(model, prefill):
            units = units_between(writer, reader)
            assert not units & written, "two write it"
            assert not units & ~writer.units, "it does not have it"
            written |= units
        assert written == reader.units


def test_ranks_hold_their_heads_and_layers_and_find_them_by_address():
    model = Model(3, 6)
    held = Slice(model, shares(2, 2)[3], range(1, 3))
    assert (list(held.layers), list(held.heads), held.units.bit_count()) == ([1, 2], [3, 4, 5], 2 * 2 * 3)
    memory = Memory("KBHND", 4, held)
    assert sorted(memory.tensors) == ["layers.1", "layers.2"]
    first = memory.tensors["layers.2"]
    assert memory.place_at[first[1, 2, 1].data_ptr()] == (2, model.unit(2, 1, 4))
    whole = bytes(range(model.block_bytes))
    memory.write(2, 3, whole)
    mine = np.frombuffer(whole, dtype=np.uint8).reshape(model.block_shape)[:, 3:6]
    assert memory.read(2, 3) == mine.tobytes()
    assert memory.holds(2, 3, whole) and not memory.holds(2, 3, whole[::-1])
    assert Memory("KBHND", 4, Slice(model)).place_at.keys().isdisjoint(memory.place_at)


def test_a_stage_has_at_least_one_layer_and_none_that_the_model_does_not_have():
    for layers in (range(0), range(2, 5)):
        with pytest.raises(UsageError, match="stage"):
            Slice(Model(2) if layers else Model(1), shares(1, 2)[0], layers)


class Posted(Observer):
    """Grants, in order."""

    def __init__(self):
        self.grants = []

    def posted(self, engine, write, grant):
        self.grants.append(grant)


def make_engines(prefill_tp=2, decode_tp=3, config=CONFIG):
    """One engine on either side, spread over so many ranks."""
    world = World(5, config, num_heads=6)
    world.observers += all_checkers(world)
    prefills = [world.prefill("p0", share=share) for share in shares(prefill_tp)]
    decodes = [world.decode("d0", share=share) for share in shares(decode_tp)]
    return world, prefills, decodes


def test_every_rank_pushes_and_expects_its_share_and_every_byte_arrives():
    world, prefills, decodes = make_engines()
    seen = Posted()
    world.observers.append(seen)
    receives = [rank.expect("t", [7 + i, 3], prefills[0]) for i, rank in enumerate(decodes)]
    pushes = [rank.push("t", [5, 9 - i]) for i, rank in enumerate(prefills)]
    world.settle(20)
    assert {account.outcome for account in (*receives, *pushes)} == {"done"}
    assert all(receive.landed == {0, 1} for receive in receives)
    assert {(grant.source.name, grant.sink.name) for grant in seen.grants} == {
        ("p0/0.0", "d0/0.0"),
        ("p0/0.0", "d0/0.1"),
        ("p0/0.1", "d0/0.1"),
        ("p0/0.1", "d0/0.2"),
    }
    world.check_settled()


def test_a_rank_of_prefill_that_pushes_nothing_keeps_its_readers_waiting_and_no_others():
    world, prefills, decodes = make_engines()
    receives = [rank.expect("t", [7], prefills[0]) for rank in decodes]
    prefills[0].push("t", [5])
    world.advance(SOON_S)
    assert [receive.outcome for receive in receives] == ["done", None, None]
    assert receives[1].landed == set(), "a position counts when all of its writers have written it"
    assert receives[1].landed_units
    world.settle(20)
    assert [receive.outcome for receive in receives] == ["done", "expired", "expired"]


def test_a_push_that_is_called_done_before_every_rank_has_asked_is_objected_to(monkeypatch):
    world, prefills, decodes = make_engines(1, 2)
    monkeypatch.setattr("kvpush.pushes.Push.is_complete", property(lambda push: bool(push.legs)))
    decodes[0].expect("t", [7], prefills[0])
    prefills[0].push("t", [5])
    with pytest.raises(Violation, match=r"every-rank-served.*\(0, 1\)"):
        world.advance(SOON_S)


def test_a_receive_that_is_called_done_without_one_writer_s_part_is_objected_to(monkeypatch):
    world, prefills, decodes = make_engines(2, 1)
    decodes[0].expect("t", [7], prefills[0])
    monkeypatch.setattr(
        "kvpush.receives.Receive.is_complete",
        property(lambda receive: any(leg.is_complete for leg in receive.legs.values())),
    )
    prefills[1].push("t", [5])
    with pytest.raises(Violation, match="done-means-there"):
        world.advance(SOON_S)


def test_heads_that_are_another_rank_s_to_write_are_not_written(monkeypatch):
    """Both sides of the plan get the neighbour's share, as if a rank had mistaken itself for another."""
    world, prefills, decodes = make_engines(1, 2)
    monkeypatch.setattr("kvpush.plan.written_heads", lambda ours, theirs, total: range(1))
    decodes[0].expect("t", [7], prefills[0])
    prefills[0].push("t", [5])
    with pytest.raises(Violation, match="only-its-slice"):
        world.advance(SOON_S)


def test_a_write_that_says_less_than_it_writes_is_objected_to(monkeypatch):
    world, prefills, decodes = make_engines(1, 2)
    real = wire.encode_written

    def shorter(written):
        (span,) = written.spans
        return real(wire.Written(written.epoch, written.rank, written.chunk, (wire.Span(0, 0, 1, span.first_slot, 1),)))

    monkeypatch.setattr("kvpush.wire.encode_written", shorter)
    decodes[0].expect("t", [7], prefills[0])
    prefills[0].push("t", [5])
    with pytest.raises(Violation, match="only-its-slice"):
        world.advance(SOON_S)


def test_a_late_write_taints_the_units_that_it_hits_until_they_are_written_anew():
    """One writer of two is late; the next owner's bytes of the other do not make up for it."""
    world, prefills, decodes = make_engines(2, 1)
    decode = decodes[0]
    world.stalling.add("d0")
    decode.expect("t", [7], prefills[0])
    prefills[1].push("t", [5])
    world.advance(20)  # longer than stall and hold
    (late,) = world.writes
    world.stalling.clear()
    receive = decode.expect("u", [7], prefills[0])
    world.fabric.resume(late)
    world.land(late)
    upper_half = units_between(prefills[1].held, decode.held)
    assert decode.tainted == {7: upper_half}
    prefills[0].push("u", [6])
    world.advance(SOON_S)
    assert decode.tainted == {7: upper_half}
    prefills[1].push("u", [6])
    world.advance(SOON_S)
    assert (decode.tainted, receive.outcome) == ({}, "done")


def test_an_engine_that_comes_back_spread_differently_has_its_new_ranks_alone():
    world, prefills, decodes = make_engines(2, 1)
    decodes[0].kill()
    later = [world.decode("d0", share=share) for share in shares(3)]
    assert world.ranks_of("d0") == later
    restarted = later[1].restart()
    assert world.ranks_of("d0") == [later[0], restarted, later[2]]
    receives = [rank.expect("t", [7], prefills[1]) for rank in world.ranks_of("d0")]
    for rank in prefills:
        rank.push("t", [5])
    world.settle(20)
    assert {receive.outcome for receive in receives} == {"done"}


def test_what_is_drawn_for_ranks_changes_no_other_seed(monkeypatch):
    scenarios = [draw(seed, ACTIONS) for seed in range(60)]
    with_ranks = {scenario.seed for scenario in scenarios if scenario.setup.has_ranks}
    assert 10 <= len(with_ranks) <= 30
    monkeypatch.setattr("kvpush.testing.scenario.RANKS_RATE", 0)
    for scenario in scenarios:
        without = draw(scenario.seed, ACTIONS)
        assert not without.setup.has_ranks
        assert (scenario == without) is (scenario.seed not in with_ranks)
