"""What has arrived, against a set that knows nothing of rows, arrays or counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpush.arrivals import Arrivals


class Model:
    """The same, told with a set of (layer, slot) pairs."""

    def __init__(self, num_layers, first_slot, num_slots):
        self.wanted = {(layer, first_slot + slot) for layer in range(num_layers) for slot in range(num_slots)}
        self.arrived = set()

    def mark(self, first_layer, num_layers, first_slot, num_slots):
        span = {(first_layer + layer, first_slot + slot) for layer in range(num_layers) for slot in range(num_slots)}
        if num_layers < 1 or num_slots < 1 or not span <= self.wanted:
            return False
        self.arrived |= span
        return True

    @property
    def num_missing(self):
        return len(self.wanted - self.arrived)


SHAPES = st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 8))
# mostly all layers, as in life; around the edges, so that what lies outside by one is drawn too
SPANS = st.lists(
    st.tuples(st.integers(-1, 4), st.integers(-1, 5), st.integers(-1, 15), st.integers(-1, 9)), max_size=12
)


@given(SHAPES, SPANS, st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), max_size=6))
def test_arrivals_agree_with_a_set(shape, spans, whole):
    num_layers, first_slot, num_slots = shape
    arrivals, model = Arrivals(*shape), Model(*shape)
    reports = [(0, num_layers, first_slot + start, length) for start, length in whole] + spans
    for report in reports:
        assert arrivals.mark(*report) == model.mark(*report), report
        assert arrivals.num_missing == model.num_missing, report


@given(SHAPES, SPANS)
def test_the_first_that_is_missing_is_what_the_set_says(shape, spans):
    arrivals, model = Arrivals(*shape), Model(*shape)
    for report in spans:
        arrivals.mark(*report)
        model.mark(*report)
    missing = model.wanted - model.arrived
    first = arrivals.first_missing()
    assert (first is None) is not bool(missing)
    if first is None:
        return
    layers, slots = first
    assert slots.start == min(slot for _, slot in missing)
    for slot in slots:
        assert {layer for layer, its in missing if its == slot} == set(layers)
    assert {layer for layer, its in missing if its == slots.stop} != set(layers)


def test_the_first_that_is_missing_moves_on_with_what_arrives():
    arrivals = Arrivals(3, 10, 6)
    for report, layers, slots in (
        ((0, 3, 10, 2), [0, 1, 2], range(12, 16)),
        ((0, 3, 15, 1), [0, 1, 2], range(12, 15)),
        ((1, 1, 12, 2), [0, 2], range(12, 14)),
        ((0, 1, 10, 3), [2], range(12, 13)),
        ((2, 1, 12, 1), [0, 2], range(13, 14)),
        ((0, 3, 12, 2), [0, 1, 2], range(14, 15)),
    ):
        assert arrivals.mark(*report)
        assert arrivals.first_missing() == (layers, slots)
    arrivals.mark(0, 3, 14, 1)
    assert arrivals.first_missing() is None


@given(st.integers(1, 4), st.integers(0, 5), st.integers(1, 8), st.randoms(use_true_random=False))
def test_every_cell_once_in_any_order_is_everything(num_layers, first_slot, num_slots, rng):
    arrivals = Arrivals(num_layers, first_slot, num_slots)
    cells = [(layer, first_slot + slot) for layer in range(num_layers) for slot in range(num_slots)]
    rng.shuffle(cells)
    for missing, (layer, slot) in zip(range(len(cells), 0, -1), cells, strict=True):
        assert arrivals.num_missing == missing
        assert arrivals.mark(layer, 1, slot, 1)
    assert arrivals.num_missing == 0


def test_a_repeated_report_changes_nothing():
    arrivals = Arrivals(3, 10, 4)
    for _ in range(3):
        assert arrivals.mark(0, 3, 11, 2)
        assert arrivals.num_missing == 6
    for _ in range(3):
        assert arrivals.mark(1, 1, 10, 4)  # of one layer: two of its slots are there already
        assert arrivals.num_missing == 4


@pytest.mark.parametrize(
    "outside",
    [
        (0, 3, 9, 2),
        (0, 3, 9, 1),
        (0, 3, 13, 2),
        (0, 3, 14, 1),
        (0, 3, 0, 2**31 - 1),
        (0, 4, 10, 1),
        (3, 1, 10, 1),
        (1, 3, 10, 1),
        (-1, 1, 10, 1),
        (0, 2**31 - 1, 10, 1),
        (0, 1, 2**63 - 1, 2**31 - 1),
        (0, 0, 10, 1),
        (0, 3, 10, 0),
        (0, 3, 10, -1),
    ],
)
def test_what_is_not_all_ours_is_refused_and_marks_nothing(outside):
    arrivals = Arrivals(3, 10, 4)
    assert not arrivals.mark(*outside)
    assert arrivals.num_missing == 12
    assert arrivals.mark(0, 3, 10, 4)
    assert arrivals.num_missing == 0


@pytest.mark.parametrize("shape", [(0, 0, 4), (3, 5, 0), (0, 0, 0)])
def test_nothing_wanted_is_nothing_missing(shape):
    arrivals = Arrivals(*shape)
    assert arrivals.num_missing == 0
    assert not arrivals.mark(0, 1, shape[1], 1)


def test_layers_cost_memory_only_when_a_report_names_some_of_them():
    arrivals = Arrivals(80, 0, 1000)
    assert arrivals.mark(0, 80, 0, 500)
    assert arrivals._arrived.nbytes == 1000
    assert arrivals.mark(7, 1, 0, 600)
    assert arrivals._arrived.nbytes == 80_000
    assert arrivals.num_missing == 80 * 500 - 100
