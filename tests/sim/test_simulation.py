"""Many seeds against the cores: no rule is broken, every fault strikes, every row of every table is taken.

``make sim SEEDS=20000`` is the same for longer. ``python -m kvpush.testing replay SEED`` shows one seed.
"""

import pytest

from kvpush.testing.campaign import run_batch
from kvpush.testing.rows import counting_rows

SEEDS = range(500)


@pytest.mark.timeout(900)
def test_no_seed_breaks_a_rule_and_everything_is_reached():
    totals = run_batch(SEEDS)
    print(totals.report())
    assert not totals.failures, totals.report()
    assert not totals.faults_missing
    assert not totals.rows_missing
    for outcome in ("done", "failed", "cancelled", "expired"):
        assert totals.outcomes[f"push {outcome}"] > len(SEEDS) / 10
        assert totals.outcomes[f"receive {outcome}"] > len(SEEDS) / 10
    check_ranks(totals)


def check_ranks(totals):
    """Engines of several ranks were served, whichever of the two is spread over more, and however."""
    assert totals.num_with_ranks > len(SEEDS) / 4
    pairs = [(prefill, decode) for (prefill, decode), count in totals.served.items() if count]
    assert any(prefill.tp_size > decode.tp_size > 1 for prefill, decode in pairs), "a decode rank has several writers"
    assert any(1 < prefill.tp_size < decode.tp_size for prefill, decode in pairs), "a push has several legs"
    assert any(prefill.tp_size == decode.tp_size > 1 for prefill, decode in pairs)
    assert any(prefill.pp_size > decode.pp_size for prefill, decode in pairs)
    assert any(prefill.pp_size < decode.pp_size for prefill, decode in pairs)
    assert any(set(prefill.stages) != {1} and prefill.pp_size > 1 for prefill, _ in pairs), "stages of unequal length"
    assert any(4 in (prefill.tp_size, decode.tp_size) for prefill, decode in pairs), "more ranks than heads: copies"


def test_rows_are_counted_only_for_as_long_as_it_is_asked_for():
    with counting_rows() as rows:
        run_batch([1])
    counted = rows.copy()
    run_batch([1])
    assert rows == counted
    assert sum(counted.values()) > 0
