"""kvpush.parallel: which rank holds which heads, and who writes them to whom."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush import parallel
from kvpush.errors import ConfigurationError, Incompatible
from kvpush.parallel import MAX_RANKS, NO_HEADS, PER_RANK, Share, heads_of, meets, readers, writers, written_heads

# --- which heads a rank holds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp_size", "total", "held"),
    [
        (1, 6, [range(6)]),
        (2, 8, [range(4), range(4, 8)]),
        (3, 6, [range(2), range(2, 4), range(4, 6)]),
        (2, 2, [range(1), range(1, 2)]),
        (4, 2, [range(1), range(1), range(1, 2), range(1, 2)]),
        (6, 2, [range(1)] * 3 + [range(1, 2)] * 3),
        (3, NO_HEADS, [range(1)] * 3),
        (3, 1, [range(1)] * 3),
    ],
)
def test_heads_are_shared_evenly_or_copied_to_neighbours(tp_size, total, held):
    assert [heads_of(rank, tp_size, total) for rank in range(tp_size)] == held


@pytest.mark.parametrize(("tp_size", "total"), [(3, 8), (8, 3), (4, 6), (6, 4), (5, 16)])
def test_heads_that_cannot_be_spread_are_refused_with_both_numbers(tp_size, total):
    for refused in (
        lambda: heads_of(0, tp_size, total),
        lambda: written_heads((0, tp_size), (0, 1), total),
        lambda: written_heads((0, 1), (0, tp_size), total),
        lambda: meets((0, 1), (0, tp_size), [total]),
        lambda: readers(Share(tp_size=tp_size), 1, 1, [total]),
        lambda: readers(Share(), 1, tp_size, [total]),
        lambda: writers(Share(), 1, tp_size, [total]),
    ):
        with pytest.raises(Incompatible, match=f"{total} KV heads .* {tp_size} tensor-parallel ranks"):
            refused()


# --- who writes to whom ----------------------------------------------------------------------------------------------

H = range


@pytest.mark.parametrize(
    ("prefill_size", "decode_size", "total", "written"),
    [
        # (prefill rank, decode rank): heads; every other pair writes nothing
        (2, 1, 4, {(0, 0): H(2), (1, 0): H(2, 4)}),
        (1, 2, 4, {(0, 0): H(2), (0, 1): H(2, 4)}),
        (2, 2, 4, {(0, 0): H(2), (1, 1): H(2, 4)}),
        (4, 2, 2, {(0, 0): H(1), (2, 1): H(1, 2)}),
        (4, 1, 2, {(0, 0): H(1), (2, 0): H(1, 2)}),
        (2, 4, 2, {(0, 0): H(1), (0, 1): H(1), (1, 2): H(1, 2), (1, 3): H(1, 2)}),
        (1, 4, 2, {(0, 0): H(1), (0, 1): H(1), (0, 2): H(1, 2), (0, 3): H(1, 2)}),
        (4, 4, 2, {(0, 0): H(1), (1, 1): H(1), (2, 2): H(1, 2), (3, 3): H(1, 2)}),
        (4, 8, 2, {(0, 0): H(1), (0, 1): H(1), (1, 2): H(1), (1, 3): H(1),
                   (2, 4): H(1, 2), (2, 5): H(1, 2), (3, 6): H(1, 2), (3, 7): H(1, 2)}),
        (8, 4, 2, {(0, 0): H(1), (2, 1): H(1), (4, 2): H(1, 2), (6, 3): H(1, 2)}),
        (1, 2, NO_HEADS, {(0, 0): H(1), (0, 1): H(1)}),
        (2, 1, NO_HEADS, {(0, 0): H(1)}),
        (3, 3, NO_HEADS, {(0, 0): H(1), (1, 1): H(1), (2, 2): H(1)}),
        (2, 3, NO_HEADS, {(0, 0): H(1), (0, 1): H(1), (1, 2): H(1)}),
        (3, 2, 6, {(0, 0): H(2), (1, 0): H(2, 3), (1, 1): H(3, 4), (2, 1): H(4, 6)}),
        (2, 3, 6, {(0, 0): H(2), (0, 1): H(2, 3), (1, 1): H(3, 4), (1, 2): H(4, 6)}),
        (2, 2, PER_RANK, {(0, 0): H(1), (1, 1): H(1)}),
    ],
)  # fmt: skip
def test_d10_written_heads(prefill_size, decode_size, total, written):
    found = {
        (p, d): heads
        for p in range(prefill_size)
        for d in range(decode_size)
        if (heads := written_heads((p, prefill_size), (d, decode_size), total))
    }
    assert found == written


@pytest.mark.parametrize("call", [
    lambda: written_heads((0, 2), (0, 1), PER_RANK),
    lambda: meets((0, 2), (0, 1), [8, PER_RANK]),
    lambda: readers(Share(tp_size=2), 1, 1, [PER_RANK]),
    lambda: writers(Share(), 1, 2, [PER_RANK]),
])  # fmt: skip
def test_state_of_a_rank_is_refused_to_an_unequally_parallel_engine(call):
    with pytest.raises(Incompatible, match="tp_size 2 .* 1 on the other|tp_size 1 .* 2 on the other"):
        call()


@pytest.mark.parametrize(
    ("prefill_size", "decode_size", "totals", "met"),
    [
        (4, 2, [2], {0: [0], 1: [0], 2: [1], 3: [1]}),  # 1 and 3 write nothing: the witness is who holds their head
        (4, 1, [2], {0: [0], 1: [0], 2: [0], 3: [0]}),
        (2, 1, [NO_HEADS], {0: [0], 1: [0]}),
        (3, 2, [NO_HEADS], {0: [0], 1: [1], 2: [0]}),
        (2, 4, [4, NO_HEADS], {0: [0, 1], 1: [2, 3]}),
        (4, 2, [4, NO_HEADS], {0: [0], 1: [0], 2: [1], 3: [1]}),
        (2, 2, [PER_RANK, 4, NO_HEADS], {0: [0], 1: [1]}),
    ],
)
def test_every_prefill_rank_meets_somebody(prefill_size, decode_size, totals, met):
    assert met == {
        p: [d for d in range(decode_size) if meets((p, prefill_size), (d, decode_size), totals)]
        for p in range(prefill_size)
    }


def test_all_stages_of_the_other_side_take_part():
    assert readers(Share(pp_rank=1, pp_size=3, tp_rank=1, tp_size=2), 2, 1, [4]) == {(0, 0), (1, 0)}
    assert writers(Share(pp_rank=0, pp_size=2), 3, 2, [4]) == {(s, t) for s in range(3) for t in range(2)}


def test_ranks_that_have_their_state_to_themselves_meet_their_like_alone():
    assert [meets((1, 3), (rank, 3), [PER_RANK]) for rank in range(3)] == [False, True, False]


def test_without_groups_nobody_meets():
    assert not meets((0, 1), (0, 1), []) and not readers(Share(), 1, 1, []) and not writers(Share(), 1, 1, [])


# --- what holds for any two engines ----------------------------------------------------------------------------------


def fits(size, total):
    return total % size == 0 or size % total == 0


@st.composite
def engines(draw):
    prefill_size, decode_size = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    heads = [t for t in range(1, 17) if fits(prefill_size, t) and fits(decode_size, t)]
    totals = draw(st.lists(st.sampled_from([NO_HEADS, *heads]), min_size=1, max_size=3))
    if prefill_size == decode_size and draw(st.booleans()):
        totals.append(PER_RANK)
    return prefill_size, decode_size, totals


@settings(deadline=None, max_examples=400)
@given(engines())
def test_d10_every_head_of_every_decode_rank_has_exactly_one_writer(engine):
    prefill_size, decode_size, totals = engine
    for total in totals:
        if total == PER_RANK:
            continue
        load = dict.fromkeys(range(prefill_size), 0)
        for d in range(decode_size):
            written = [h for p in load for h in written_heads((p, prefill_size), (d, decode_size), total)]
            assert sorted(written) == list(heads_of(d, decode_size, total))
            for p in load:
                heads = written_heads((p, prefill_size), (d, decode_size), total)
                assert set(heads) <= set(heads_of(p, prefill_size, total))
                load[p] += bool(heads)
        # Copies at decode are spread evenly over the copies at prefill.
        for p in load if decode_size > max(total, 1) else ():
            copies = [q for q in load if heads_of(q, prefill_size, total) == heads_of(p, prefill_size, total)]
            assert max(load[q] for q in copies) - load[p] <= 1
        if prefill_size == decode_size:
            assert all(written_heads((p, prefill_size), (p, prefill_size), total) for p in load)  # each to its like


@settings(deadline=None, max_examples=400)
@given(engines(), st.integers(1, 3), st.integers(1, 3))
def test_both_sides_agree_on_who_talks_to_whom(engine, prefill_stages, decode_stages):
    """The oracle is the definition, pair by pair."""
    prefill_size, decode_size, totals = engine
    ranks = [(p, d) for p in range(prefill_size) for d in range(decode_size)]
    writes = {r for r in ranks if any(written_heads((r[0], prefill_size), (r[1], decode_size), t) for t in totals)}
    expected = set(writes)
    for p in range(prefill_size):
        if not any(writer == p for writer, _ in writes):
            expected.add((p, min(
                d for d in range(decode_size)
                if any(set(heads_of(p, prefill_size, t)) & set(heads_of(d, decode_size, t)) for t in totals)
            )))  # fmt: skip
    assert {(p, d) for p, d in ranks if meets((p, prefill_size), (d, decode_size), totals)} == expected
    for p in range(prefill_size):
        ours = readers(Share(0, prefill_stages, p, prefill_size), decode_stages, decode_size, totals)
        assert ours == {(s, d) for s in range(decode_stages) for d in range(decode_size) if (p, d) in expected}
        assert ours, "a prefill rank that nobody tells how a transfer ends"
    for d in range(decode_size):
        theirs = writers(Share(0, decode_stages, d, decode_size), prefill_stages, prefill_size, totals)
        assert theirs == {(s, p) for s in range(prefill_stages) for p in range(prefill_size) if (p, d) in expected}


def test_the_largest_engines_a_peer_may_claim_cost_little():
    everyone = writers(Share(tp_size=MAX_RANKS), 1, MAX_RANKS, [NO_HEADS])
    assert everyone == {(0, 0)}
    assert len(writers(Share(), 1, MAX_RANKS, [NO_HEADS])) == MAX_RANKS


@pytest.mark.parametrize(
    ("share", "other_size", "total", "candidates"),
    [
        (Share(tp_rank=1, tp_size=4), 8, 16, [2, 3]),
        (Share(tp_rank=5, tp_size=8), 4, 16, [2]),
        (Share(tp_rank=1, tp_size=2), 8, 4, [4, 5, 6, 7]),
        (Share(tp_rank=5, tp_size=8), 2, 4, [1]),
        (Share(tp_rank=1, tp_size=3), 3, PER_RANK, [1]),
    ],
)
def test_only_ranks_that_have_a_head_in_common_are_looked_at(share, other_size, total, candidates, monkeypatch):
    looked_at = []
    monkeypatch.setattr(parallel, "meets", lambda ours, theirs, totals: looked_at.append((ours[0], theirs[0])))
    readers(share, 1, other_size, [total])
    writers(share, 1, other_size, [total])
    rank = share.tp_rank
    assert looked_at == [(rank, each) for each in candidates] + [(each, rank) for each in candidates]


# --- the share on the wire -------------------------------------------------------------------------------------------


def test_a_share_knows_its_rank_and_crosses_the_wire():
    share = Share(pp_rank=1, pp_size=2, tp_rank=3, tp_size=4)
    assert share.rank == (1, 3) and share.tp == (3, 4)
    assert str(share) == "rank (pp, tp) (1, 3) of pp_size=2, tp_size=4"
    assert Share() == Share(pp_rank=0, pp_size=1, tp_rank=0, tp_size=1)
    assert len({share, Share(1, 2, 3, 4)}) == 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(share), type=Share) == share


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tp_rank", -1),
        ("tp_rank", 2),
        ("tp_rank", True),
        ("tp_rank", "0"),
        ("tp_rank", 0.0),
        ("tp_size", 0),
        ("tp_size", MAX_RANKS + 1),
        ("tp_size", None),
        ("pp_rank", 1),
        ("pp_size", -1),
        ("pp_size", 2**40),
    ],
)
def test_a_wrong_share_is_refused_here_and_on_the_wire(field, value):
    fields = {"pp_rank": 0, "pp_size": 1, "tp_rank": 0, "tp_size": 2} | {field: value}
    with pytest.raises(ConfigurationError, match=f"{field}="):
        Share(**fields)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Share)
