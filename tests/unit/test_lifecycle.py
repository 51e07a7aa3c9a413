"""The three tables, against matrices typed by hand: the whole product of states and triggers, allowed or not."""

import copy
import itertools
import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transitions import Machine

from kvpush import errors, lifecycle
from kvpush.errors import IllegalTransition, UsageError
from kvpush.lifecycle import (
    ENGINE,
    LIFECYCLES,
    PUSH,
    RECEIVE,
    Lifecycle,
    PushState,
    PushTrigger,
    ReceiveState,
    ReceiveTrigger,
    Row,
    State,
    Trigger,
)

# fmt: off
ENGINE_EXPECTED: dict[tuple[State, Trigger], State] = {
    (State.unknown, Trigger.handshake_started): State.handshaking,
    (State.unknown, Trigger.evict): State.evicted,
    (State.handshaking, Trigger.handshake_succeeded): State.connected,
    (State.handshaking, Trigger.handshake_failed): State.unknown,
    (State.connected, Trigger.push_posted): State.connected,
    (State.connected, Trigger.push_settled): State.connected,
    (State.connected, Trigger.peer_heard): State.connected,
    (State.connected, Trigger.ttl_expired): State.stale,
    (State.connected, Trigger.peer_lost): State.stale,
    (State.connected, Trigger.retired): State.stale,
    (State.stale, Trigger.push_settled): State.stale,
    (State.stale, Trigger.revived): State.connected,
    (State.stale, Trigger.evict): State.evicted,
}

PUSH_EXPECTED: dict[tuple[PushState, PushTrigger], PushState] = {
    (PushState.waiting, PushTrigger.engine_awaited): PushState.deferred,
    (PushState.waiting, PushTrigger.write_posted): PushState.writing,
    (PushState.waiting, PushTrigger.completed): PushState.done,
    (PushState.waiting, PushTrigger.failure_settled): PushState.failed,
    (PushState.waiting, PushTrigger.cancel_settled): PushState.cancelled,
    (PushState.waiting, PushTrigger.expiry_settled): PushState.expired,
    (PushState.deferred, PushTrigger.write_posted): PushState.writing,
    (PushState.deferred, PushTrigger.completed): PushState.done,
    (PushState.deferred, PushTrigger.failure_settled): PushState.failed,
    (PushState.deferred, PushTrigger.cancel_settled): PushState.cancelled,
    (PushState.deferred, PushTrigger.expiry_settled): PushState.expired,
    (PushState.writing, PushTrigger.write_posted): PushState.writing,
    (PushState.writing, PushTrigger.caught_up): PushState.waiting,
    (PushState.writing, PushTrigger.given_up): PushState.draining,
    (PushState.writing, PushTrigger.stalled): PushState.in_doubt,
    (PushState.writing, PushTrigger.completed): PushState.done,
    (PushState.writing, PushTrigger.failure_settled): PushState.failed,
    (PushState.draining, PushTrigger.stalled): PushState.in_doubt,
    (PushState.draining, PushTrigger.failure_settled): PushState.failed,
    (PushState.draining, PushTrigger.cancel_settled): PushState.cancelled,
    (PushState.in_doubt, PushTrigger.failure_settled): PushState.failed,
    (PushState.in_doubt, PushTrigger.cancel_settled): PushState.cancelled,
}

RECEIVE_EXPECTED: dict[tuple[ReceiveState, ReceiveTrigger], ReceiveState] = {
    (ReceiveState.registered, ReceiveTrigger.blocks_arrived): ReceiveState.receiving,
    (ReceiveState.registered, ReceiveTrigger.completed): ReceiveState.settled,
    (ReceiveState.registered, ReceiveTrigger.ended_quiet): ReceiveState.settled,
    (ReceiveState.registered, ReceiveTrigger.ended_unquiet): ReceiveState.holding,
    (ReceiveState.receiving, ReceiveTrigger.blocks_arrived): ReceiveState.receiving,
    (ReceiveState.receiving, ReceiveTrigger.completed): ReceiveState.settled,
    (ReceiveState.receiving, ReceiveTrigger.ended_quiet): ReceiveState.settled,
    (ReceiveState.receiving, ReceiveTrigger.ended_unquiet): ReceiveState.holding,
    (ReceiveState.holding, ReceiveTrigger.proven_quiet): ReceiveState.released,
    (ReceiveState.holding, ReceiveTrigger.hold_expired): ReceiveState.released,
}

# The design's engine table, row for row: trigger, from, to (None: internal).
DESIGN_ROWS = [
    ("handshake_started",   {"unknown"},            "handshaking"),
    ("handshake_succeeded", {"handshaking"},        "connected"),
    ("handshake_failed",    {"handshaking"},        "unknown"),
    ("push_posted",         {"connected"},          None),
    ("push_settled",        {"connected", "stale"}, None),
    ("peer_heard",          {"connected"},          None),
    ("ttl_expired",         {"connected"},          "stale"),
    ("peer_lost",           {"connected"},          "stale"),
    ("retired",             {"connected"},          "stale"),
    ("revived",             {"stale"},              "connected"),
    ("evict",               {"unknown", "stale"},   "evicted"),
]
# fmt: on

EXPECTED: dict[str, dict[tuple[Any, Any], Any]] = {
    "engine": ENGINE_EXPECTED,
    "push": PUSH_EXPECTED,
    "receive": RECEIVE_EXPECTED,
}
FINAL = {
    "engine": {State.evicted},
    "push": {PushState.done, PushState.failed, PushState.cancelled, PushState.expired},
    "receive": {ReceiveState.settled, ReceiveState.released},
}
INITIAL = {"engine": State.unknown, "push": PushState.waiting, "receive": ReceiveState.registered}
PRODUCT = [
    pytest.param(table, state, trigger, id=f"{table.name}-{state}-{trigger}")
    for table in LIFECYCLES
    for state, trigger in itertools.product(table.states, table.triggers)
]


@dataclass(slots=True)
class Subject:
    """The least that a lifecycle can move; ``note`` shows that nothing but the state is touched."""

    state: Any
    note: str = "untouched"


by_table = pytest.mark.parametrize("table", LIFECYCLES, ids=lambda table: table.name)


@pytest.mark.parametrize(("table", "state", "trigger"), PRODUCT)
def test_rule1_every_pair_of_state_and_trigger(table, state, trigger):
    subject = Subject(state)
    expected = EXPECTED[table.name].get((state, trigger))
    assert table.dest(state, trigger) is expected
    assert (trigger in table.allowed(state)) is (expected is not None)
    if expected is None:
        before = copy.copy(subject)
        with pytest.raises(IllegalTransition) as caught:
            table.fire(subject, trigger)
        assert subject.state is state
        assert subject == before
        assert (caught.value.lifecycle, caught.value.state, caught.value.trigger) == (table.name, state, trigger)
    else:
        table.fire(subject, trigger)
        assert subject.state is expected
    assert subject.note == "untouched"


@by_table
def test_matrices_name_only_what_exists(table):
    assert set(EXPECTED[table.name]) <= set(itertools.product(table.states, table.triggers))


def test_rule1_engine_table_is_the_designs_row_for_row():
    rows = [(str(row.trigger), set(map(str, row.sources)), row.dest and str(row.dest)) for row in ENGINE.rows]
    assert rows == DESIGN_ROWS


@by_table
def test_initial_and_final_states(table):
    assert table.initial is INITIAL[table.name]
    assert table.final == FINAL[table.name]


@by_table
def test_nothing_leaves_a_final_state(table):
    for state in table.final:
        assert table.allowed(state) == []
        for trigger in table.triggers:
            with pytest.raises(IllegalTransition, match="final state"):
                table.fire(Subject(state), trigger)


@by_table
def test_every_state_is_reached_from_the_initial_one(table):
    reached, frontier = {table.initial}, [table.initial]
    while frontier:
        state = frontier.pop()
        for trigger in table.allowed(state):
            subject = Subject(state)
            table.fire(subject, trigger)
            if subject.state not in reached:
                reached.add(subject.state)
                frontier.append(subject.state)
    assert reached == set(table.states)


@by_table
def test_a_final_state_is_reached_from_everywhere(table):
    """Rule 10 needs it: whatever happens to an engine, a push or a receive, there is a way to its end."""
    ends = set(table.final)
    while True:
        more = {
            state for state in table.states for trigger in table.allowed(state) if table.dest(state, trigger) in ends
        } - ends
        if not more:
            break
        ends |= more
    assert ends == set(table.states)


@by_table
def test_one_row_per_state_and_trigger(table):
    """``transitions`` takes a second row for the same pair silently, and never fires it."""
    pairs = [(state, row.trigger) for row in table.rows for state in row.sources]
    assert len(pairs) == len(set(pairs))


@by_table
def test_every_trigger_has_a_row_and_every_row_a_reason(table):
    assert {row.trigger for row in table.rows} == set(table.triggers)
    assert all(row.why.strip() == row.why and row.why for row in table.rows)


@by_table
def test_names_are_values_because_the_machine_keys_states_by_name(table):
    for member in (*table.states, *table.triggers):
        assert member.name == member.value
    assert all(type(state) is type(table.initial) for state in table.states)


def test_a_refusal_says_what_would_have_been_allowed():
    with pytest.raises(IllegalTransition) as caught:
        ENGINE.fire(Subject(State.handshaking), Trigger.push_posted)
    assert str(caught.value) == (
        "engine: trigger 'push_posted' is not allowed in state 'handshaking'; "
        "allowed there: handshake_succeeded, handshake_failed"
    )
    assert isinstance(caught.value, UsageError)
    assert caught.value.__cause__ is None


def test_a_refusal_keeps_a_subject_usable():
    subject = Subject(State.unknown)
    with pytest.raises(IllegalTransition):
        ENGINE.fire(subject, Trigger.push_posted)
    for trigger in (Trigger.handshake_started, Trigger.handshake_succeeded, Trigger.push_posted):
        ENGINE.fire(subject, trigger)
    assert subject.state is State.connected


def test_subjects_are_not_registered_with_the_machine():
    """The flyweight: no list of models to search, nothing that keeps an engine alive, nothing put on it."""
    subject = Subject(State.unknown)
    ENGINE.fire(subject, Trigger.handshake_started)
    machine: Machine = ENGINE._fire[Trigger.evict].__self__.machine
    assert machine.models == []
    assert not hasattr(subject, "__dict__")


def test_dest_none_is_the_only_internal_form():
    """A reflexive row would leave and enter its state; in these tables that has no meaning."""
    for table in LIFECYCLES:
        assert all(row.dest not in row.sources for row in table.rows)


def test_transitions_does_not_log_each_trigger(caplog):
    with caplog.at_level(logging.DEBUG):
        ENGINE.fire(Subject(State.unknown), Trigger.handshake_started)
    assert caplog.records == []


def test_lifecycles_lists_them_all():
    tables = {value for value in vars(lifecycle).values() if isinstance(value, Lifecycle)}
    assert tables == set(LIFECYCLES) == {ENGINE, PUSH, RECEIVE}


def test_dest_of_a_trigger_with_two_rows():
    assert PUSH.dest(PushState.waiting, PushTrigger.write_posted) is PushState.writing
    assert PUSH.dest(PushState.writing, PushTrigger.write_posted) is PushState.writing
    assert PUSH.dest(PushState.draining, PushTrigger.write_posted) is None


def test_a_row_is_a_value():
    row = Row(Trigger.evict, (State.stale,), State.evicted, "why")
    assert row == Row(Trigger.evict, (State.stale,), State.evicted, "why")
    with pytest.raises(AttributeError):
        row.dest = State.unknown  # type: ignore[misc]


MISTYPED = """\
from kvpush.lifecycle import ENGINE, PUSH, PushTrigger, Row, State, Trigger

class Engine:
    state: State = State.unknown

ENGINE.fire(Engine(), Trigger.evict)
ENGINE.fire(Engine(), Trigger.evicct)
ENGINE.fire(Engine(), "evict")
ENGINE.fire(Engine(), PushTrigger.completed)
PUSH.fire(Engine(), PushTrigger.completed)
"""


def test_mypy_sees_a_mistyped_trigger(tmp_path):
    """Bound triggers of ``transitions`` are invisible to mypy; ``fire()`` must not be."""
    pytest.importorskip("mypy")
    source = tmp_path / "mistyped.py"
    source.write_text(MISTYPED)
    # only these files: following kvpush/__init__.py would lead into torch, and take minutes
    files = [source, Path(lifecycle.__file__), Path(errors.__file__)]
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--no-pretty", "--config-file="]
    command += [f"--cache-dir={tmp_path / 'cache'}", "--follow-imports=skip", *map(str, files)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    wrong_lines = {int(line.split(":")[1]) for line in done.stdout.splitlines() if line.startswith("mistyped.py")}
    assert wrong_lines == {7, 8, 9, 10}, done.stdout + done.stderr


def test_every_table_has_its_name():
    assert [table.name for table in LIFECYCLES] == ["engine", "push", "receive"]
