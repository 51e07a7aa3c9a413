"""Every order in which two pushes, a handshake, a cancel, an eviction and a restart can happen, up to a depth.

``EXHAUSTIVE_DEEPER=2`` looks that many events further, from every start. The numbers of states are printed. A rule that
breaks is reported with the shortest way that leads there.
"""

from __future__ import annotations

import os

import pytest
from explore import Found, explore
from universe import Universe, served, shaking_hands, strangers, writing

from kvpush.endings import Endings
from kvpush.registry import Registry

DEEPER = int(os.environ.get("EXHAUSTIVE_DEEPER", "0"))

TRANSFERS = {"expect t1": 1, "expect t2": 1, "push t1": 1, "push t2": 1}
FAULTS = {"cancel at prefill": 1, "cancel at decode": 1, "drop": 1, "restart decode": 1, "time": 2}

# start, what may be done, depth, states that are at least there: fewer would mean that something cannot happen any more
STARTS = {
    "strangers": (strangers, TRANSFERS | {"cancel at decode": 1, "drop": 1, "restart decode": 1}, 7, 1500),
    "shaking hands": (shaking_hands, FAULTS, 5, 1000),
    "writing": (writing, FAULTS, 4, 900),
    "writing, and prefill restarts": (
        writing,
        {"restart prefill": 1, "cancel at decode": 1, "time": 1, "expect t1": 1, "push t1": 1},
        5,
        600,
    ),
    "served, and decode restarts": (
        served,
        {"restart decode": 1, "expect t1": 1, "push t1": 1, "cancel at decode": 1, "drop": 1},
        8,
        400,
    ),
}


@pytest.mark.timeout(600 if not DEEPER else 24 * 3600)
@pytest.mark.parametrize("name", STARTS)
def test_rules_hold_in_every_order(name, capsys):
    start, budget, depth, least = STARTS[name]
    found = explore(start(budget), depth + DEEPER)
    with capsys.disabled():
        print(f"\n{name}: {found}")
    assert found.states >= least or found.is_complete


def ways_to_the_end(universe, limit):
    """Everything done, in order: what the exploration passes through."""
    names = []
    for _ in range(limit):
        chores = universe.chores()
        if not chores:
            return names
        names.append(chores[0][0])
        universe.fire(chores[0])
    raise AssertionError("it does not come to rest")


def test_left_alone_both_transfers_are_done():
    universe = shaking_hands({})
    names = ways_to_the_end(universe, 100)
    assert names.count("write ends") == names.count("decode is notified") == 2
    assert [a.finished.outcome for a in universe.pushed + universe.expected] == ["done"] * 4
    assert len(universe.peers) == 1


def test_a_copy_goes_its_own_way():
    universe = writing({"drop": 1})
    before, frozen = universe.state(), universe.copy()
    universe.fire(("drop",))
    assert universe.state() != before == Universe.of(frozen).state()
    again = Universe.of(frozen)
    again.fire(("drop",))
    assert again.state() == universe.state()


def test_the_order_of_what_does_not_touch_makes_no_difference():
    one, other = strangers(TRANSFERS), strangers(TRANSFERS)
    for deed in ("push", "t1"), ("expect", "t2"):
        one.fire(deed)
    for deed in ("expect", "t2"), ("push", "t1"):
        other.fire(deed)
    assert one.state() == other.state()


@pytest.mark.parametrize("what", ["pushed", "expected", "flights", "notifications", "budget", "connections"])
def test_everything_that_decides_makes_a_difference(what):
    universe = writing({"drop": 1})
    universe.fire(("write ends", 0))
    before = universe.state()
    value = getattr(universe, what)
    value.clear()
    assert universe.state() != before


# --- it would notice -------------------------------------------------------------------------------------------------


def drained_too_early(monkeypatch):
    """Decode is told that nothing can land while a WRITE is in flight."""

    def tell(self, push, cause):
        for registration in push.registrations:
            self._outbox.send_failed(registration, cause.code_for_decode, cause.reason, settled=True)

    monkeypatch.setattr(Endings, "_tell", tell)


def pin_not_taken(monkeypatch):
    """The agent is read, and not pinned."""
    pin = Registry.pin

    def without(self, generation):
        resource = pin(self, generation)
        if resource is not None:
            self._by_generation[generation].pins -= 1
        return resource

    monkeypatch.setattr(Registry, "pin", without)


def evicted_under_a_pin(monkeypatch):
    """What was dropped is released at once."""
    due_s = Registry._evict_at_s

    def without(self, engine):
        pins, engine.pins = engine.pins, 0
        try:
            return due_s(self, engine)
        finally:
            engine.pins = pins

    monkeypatch.setattr(Registry, "_evict_at_s", without)


def restart_not_seen(monkeypatch):
    """A new incarnation is taken for the old one."""
    admit = Registry.admit

    def without(self, engine_id, incarnation, address, rank):
        current = self._current_of((engine_id, rank))
        return admit(self, engine_id, incarnation if current is None else current.incarnation, address, rank)

    monkeypatch.setattr(Registry, "admit", without)


def attempt_not_compared(monkeypatch):
    """A late answer is taken for the current attempt's: two handshakes of one generation may both load."""

    def without(self, generation, attempt):
        return self._by_generation.get(generation)

    monkeypatch.setattr(Registry, "_attempted", without)


PLANTED = {
    drained_too_early: ("writing", "rule 12"),
    pin_not_taken: ("shaking hands", "rule 3"),
    evicted_under_a_pin: ("writing", None),  # the registry's own assertion, or rule 3
    restart_not_seen: ("served, and decode restarts", "rule 14"),
    attempt_not_compared: ("shaking hands", None),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug, monkeypatch):
    name, rule = PLANTED[bug]
    start, budget, depth, _ = STARTS[name]
    universe = start(budget)  # on the way there all is well
    bug(monkeypatch)
    with pytest.raises(Found, match=rule) as caught:
        explore(universe, depth)
    assert 0 < len(caught.value.way) <= depth
