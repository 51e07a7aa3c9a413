"""Said about one subject once in a while, and not too much in all."""

from kvpush.rarely import INTERVAL_S, MAX_PER_INTERVAL, Rarely


def test_one_subject_is_due_once_in_an_interval():
    rarely = Rarely()
    assert rarely.is_due("d0", 100.0)
    assert not rarely.is_due("d0", 100.0 + INTERVAL_S / 2)
    assert rarely.is_due("d1", 100.0 + INTERVAL_S / 2)
    assert rarely.is_due("d0", 100.0 + INTERVAL_S)  # what was refused in between did not put it off
    assert not rarely.is_due("d1", 100.0 + INTERVAL_S)


def test_rule16_subjects_that_somebody_makes_up_fill_neither_the_log_nor_the_memory():
    rarely = Rarely()
    due = [rarely.is_due(f"e{number}", 100.0 + number / 100) for number in range(1000)]
    assert due == [True] * MAX_PER_INTERVAL + [False] * (1000 - MAX_PER_INTERVAL)
    assert len(rarely._said_s) == MAX_PER_INTERVAL
    assert rarely.is_due("another", 200.0)
    assert len(rarely._said_s) == 1
