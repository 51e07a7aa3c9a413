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


def test_rows_are_counted_only_for_as_long_as_it_is_asked_for():
    with counting_rows() as rows:
        run_batch([1])
    counted = rows.copy()
    run_batch([1])
    assert rows == counted
    assert sum(counted.values()) > 0
