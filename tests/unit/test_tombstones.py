"""What is remembered of ended transfers: bounded in number and in time."""

from kvpush.errors import FailureCode
from kvpush.tombstones import Tombstone, Tombstones


def stone(reason="ended"):
    return Tombstone(FailureCode.closing, reason, is_push_awaited=False)


def test_the_oldest_is_dropped_above_the_limit():
    stones = Tombstones(limit=2, ttl_s=10)
    for name in ("a", "b", "c"):
        stones.bury(name, stone(), now_s=0)
    assert [name for name in ("a", "b", "c") if stones.find(name, 0)] == ["b", "c"]
    assert len(stones) == 2


def test_one_that_is_buried_again_is_the_youngest():
    stones = Tombstones(limit=2, ttl_s=10)
    for name in ("a", "b", "a", "c"):
        stones.bury(name, stone(), now_s=0)
    assert [name for name in ("a", "b", "c") if stones.find(name, 0)] == ["a", "c"]


def test_it_is_there_until_its_time_is_over_and_then_it_is_gone():
    stones = Tombstones(limit=2, ttl_s=10)
    stones.bury("a", stone(), now_s=5)
    assert stones.find("a", 14.999).reason == "ended"
    assert len(stones) == 1
    assert stones.find("a", 15) is None
    assert len(stones) == 0


def test_one_that_belonged_to_no_registration_is_older_than_any():
    assert stone().is_before("anybody", 0) and not stone().epochs


def test_a_registration_that_is_repeated_is_no_newer_than_its_transfer():
    ended = Tombstone(FailureCode.closing, "ended", is_push_awaited=True, epochs={"one life": 5})
    assert [ended.is_before("one life", epoch) for epoch in (4, 5, 6)] == [False, False, True]
    assert ended.is_before("another life", 1)
