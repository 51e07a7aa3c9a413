"""The chunks of one transfer, against a model that walks through all cells of all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpush.chunks import Chunk, Chunks, CutShort
from kvpush.placement import GroupBlocks

NUM_LAYERS = 4


def part_of(group, first_block, block_ids):
    return GroupBlocks(group, f"g{group}", first_block, np.array(block_ids, dtype=np.int64))


def chunk_of(*parts, last=False):
    """Each part: group, layers, first position, block ids."""
    made = tuple(part_of(group, first, ids) for group, _, first, ids in parts)
    return Chunk(made, tuple(layers for _, layers, _, _ in parts), last)


def cells_of(chunk):
    return {
        (part.group, layer, part.first_block + i)
        for part, layers in zip(chunk.parts, chunk.layers, strict=True)
        for layer in range(NUM_LAYERS)
        if layers >> layer & 1
        for i in range(len(part.block_ids))
    }


def said(chunk):
    return chunk.last, chunk.layers, [(p.group, p.first_block, p.block_ids.tolist()) for p in chunk.parts]


def a_part(group):
    return st.tuples(
        st.just(group),
        st.integers(0, 2**NUM_LAYERS - 1),
        st.integers(0, 12),
        st.lists(st.integers(0, 1), max_size=4),
    )


a_chunk = st.builds(
    lambda parts, last: chunk_of(*parts, last=last),
    st.one_of(a_part(0).map(lambda p: [p]), a_part(1).map(lambda p: [p]), st.tuples(a_part(0), a_part(1))),
    st.booleans(),
)


@given(st.lists(a_chunk, max_size=30))
def test_what_is_found_is_what_looking_at_every_chunk_finds(offered):
    chunks, taken = Chunks(), []
    for chunk in offered:
        is_repetition = any(said(earlier) == said(chunk) for earlier in taken)
        assert chunks.has_same(chunk) is is_repetition
        both = chunks.overlap(chunk)
        cells = cells_of(chunk)
        assert (both is not None) is any(cells & cells_of(earlier) for earlier in taken)
        if both is not None:
            mine, theirs = both
            assert any(mine is part for part in chunk.parts)
            assert any(theirs is part for earlier in taken for part in earlier.parts)
            assert mine.group == theirs.group
            assert mine.first_block < theirs.end_block
            assert theirs.first_block < mine.end_block
        elif not is_repetition:
            assert chunks.add(chunk) == len(taken)
            taken.append(chunk)
            assert len(chunks) == len(taken)
            assert chunks.has_last is any(earlier.last for earlier in taken)


def test_two_chunks_are_the_same_when_all_of_their_parts_are():
    chunks = Chunks()
    chunks.add(chunk_of((0, 1, 0, [5]), (1, 1, 0, [6])))
    assert chunks.has_same(chunk_of((0, 1, 0, [5]), (1, 1, 0, [6])))
    for other in (
        chunk_of((0, 1, 0, [5])),
        chunk_of((0, 1, 0, [5]), (1, 2, 0, [6])),
        chunk_of((0, 1, 0, [5]), (1, 1, 0, [7])),
        chunk_of((0, 1, 0, [5]), (1, 1, 1, [6])),
        chunk_of((0, 1, 0, [5]), (1, 1, 0, [6]), last=True),
    ):
        assert not chunks.has_same(other)
        assert chunks.overlap(other) is not None


def test_positions_side_by_side_are_one_run_and_those_apart_are_two():
    chunks = Chunks()
    for first_block, block_ids in ((4, [1, 2]), (0, [3]), (9, [4]), (1, [5, 6, 7])):
        chunks.add(chunk_of((0, 3, first_block, block_ids)))
    assert chunks.runs() == {(0, 3): [range(6), range(9, 10)]}


def test_an_empty_chunk_says_something_only_by_being_the_last():
    chunks = Chunks()
    chunks.add(chunk_of((0, 1, 0, [5])))
    assert chunks.overlap(chunk_of((0, 1, 0, []))) is None
    assert not chunks.has_same(chunk_of((0, 1, 0, [])))
    chunks.add(chunk_of((0, 1, 0, [])))
    assert chunks.has_same(chunk_of((0, 1, 0, [])))
    assert not chunks.has_same(chunk_of((0, 1, 0, []), last=True))


@pytest.mark.parametrize("num_chunks", [64, 1024])
def test_chunks_without_a_position_are_not_compared_with_each_other(num_chunks, monkeypatch):
    compared = []
    is_same = Chunk.is_same
    monkeypatch.setattr(Chunk, "is_same", lambda *both: compared.append(both) or is_same(*both))
    chunks = Chunks()
    for i in range(num_chunks):
        chunks.add(chunk_of((0, 1, i, [])))
    assert chunks.has_same(chunk_of((0, 1, 5, [])))
    assert not chunks.has_same(chunk_of((0, 1, num_chunks, [])))
    assert len(compared) == 1


class Counted(int):
    """A position that counts how often it is compared."""

    compared = 0

    def __lt__(self, other):
        Counted.compared += 1
        return int(self) < int(other)


@pytest.mark.parametrize("num_chunks", [64, 4096])
def test_one_more_chunk_is_not_compared_with_all_others(num_chunks):
    # 64 layers and 60 chunks of a prompt took 30 seconds when each was
    chunks = Chunks()
    for i in range(num_chunks):
        chunks.add(chunk_of((0, 1 << i % NUM_LAYERS, Counted(i // NUM_LAYERS), [5])))
    assert chunks.overlap(chunk_of((0, 1, num_chunks, [5]))) is None
    Counted.compared = 0
    new = chunk_of((0, 1, Counted(num_chunks), [5]))
    assert not chunks.has_same(new)
    assert chunks.overlap(new) is None
    assert 0 < Counted.compared <= 3 * num_chunks.bit_length()


@pytest.mark.parametrize(
    ("layers", "runs"),
    [
        (0b1, [range(1)]),
        (0b1111, [range(4)]),
        (0b0110, [range(1, 3)]),
        (0b1011, [range(2), range(3, 4)]),
        (0b10101, [range(1), range(2, 3), range(4, 5)]),
        (1 << 79, [range(79, 80)]),
    ],
)
def test_layers_go_to_the_core_as_runs(layers, runs):
    (part,) = chunk_of((0, layers, 3, [7, 8])).for_core()
    assert list(part.layers) == runs
    assert (part.group, part.first_block, part.block_ids.tolist()) == (0, 3, [7, 8])


# --- transfers that ended before their last chunk --------------------------------------------------------------------


def cut_short(*chunks, limit=10, ttl_s=60.0):
    memory, pushed = CutShort(limit, ttl_s), Chunks()
    for chunk in chunks:
        pushed.add(chunk)
    memory.note("t", pushed, "cancelled", 100.0)
    return memory


@pytest.mark.parametrize(
    ("what", "chunk", "goes_on"),
    [
        ("the next positions", chunk_of((0, 3, 2, [7])), True),
        ("positions after a gap", chunk_of((0, 3, 5, [7])), True),
        ("the next layer of the same positions", chunk_of((0, 4, 0, [5, 6])), True),
        ("another group", chunk_of((1, 3, 0, [5])), True),
        ("no position", chunk_of((0, 3, 2, []), last=True), True),
        ("the first chunk again", chunk_of((0, 3, 0, [5, 6])), False),
        ("the first chunk again, in other blocks", chunk_of((0, 3, 0, [8, 9, 1])), False),
        ("the last position again", chunk_of((0, 3, 1, [7])), False),
        ("all layers of the first position", chunk_of((0, 15, 0, [5]), last=True), False),
    ],
)
def test_a_chunk_goes_on_with_what_ended_unless_it_names_again_what_was_pushed(what, chunk, goes_on):
    memory = cut_short(chunk_of((0, 3, 0, [5])), chunk_of((0, 3, 1, [6])))
    assert memory.continued("another", chunk, 101.0) is None
    assert memory.continued("t", chunk, 101.0) == ("cancelled" if goes_on else None)
    assert memory.continued("t", chunk_of((0, 3, 2, [7])), 102.0) == ("cancelled" if goes_on else None)


def test_rule16_what_ended_before_its_last_chunk_is_remembered_for_a_while_and_not_without_bound():
    memory = cut_short(chunk_of((0, 3, 0, [5])))
    more = chunk_of((0, 3, 1, [6]))
    assert memory.continued("t", more, 159.9) == "cancelled"
    assert memory.continued("t", more, 160.0) is None
    assert len(memory) == 0
    for number in range(100):
        memory.note(str(number), Chunks(), "failed", 200.0)
    assert len(memory) == 10


def test_a_chunk_of_the_positions_just_before_goes_on_with_what_ended():
    assert cut_short(chunk_of((0, 3, 2, [5]))).continued("t", chunk_of((0, 3, 0, [6, 7])), 101.0) == "cancelled"


def test_a_chunk_that_names_again_one_of_several_runs_begins_another_attempt():
    memory = cut_short(chunk_of((0, 3, 0, [5])), chunk_of((0, 3, 4, [6])))
    assert memory.continued("t", chunk_of((0, 3, 4, [7])), 101.0) is None


def test_what_ended_again_is_the_youngest():
    memory = CutShort(limit=2, ttl_s=60.0)
    pushed = Chunks()
    pushed.add(chunk_of((0, 3, 0, [5])))
    for name in ("a", "b", "a", "c"):
        memory.note(name, pushed, "cancelled", 100.0)
    more = chunk_of((0, 3, 1, [6]))
    assert [name for name in "abc" if memory.continued(name, more, 101.0)] == ["a", "c"]
