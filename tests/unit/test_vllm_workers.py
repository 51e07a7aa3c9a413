"""The workers' halves of the vLLM connector, over a pusher and a receiver that only write down what they are told."""

from collections import Counter

import pytest

from kvpush import BlocksReleased, FailureCode, Outcome, PushFinished, QueueFull, ReceiveFinished, UsageError
from kvpush.integrations.vllm.decode_worker import IDLE_WAIT_S, NEAR_S, DecodeWorker
from kvpush.integrations.vllm.params import DecodeLeg, Source
from kvpush.integrations.vllm.prefill_worker import PrefillWorker
from kvpush.integrations.vllm.tally import Tally, added, summary
from kvpush.integrations.vllm.work import Expect, PushChunk, Renewal, Report

NUM_TOKENS = 90


class Scribe:
    """Stands for a pusher or a receiver."""

    def __init__(self):
        self.calls = []
        self.events = []
        self.error = None
        self.waited_s = []

    def poll(self):
        events, self.events = self.events, []
        return events

    def wait(self, timeout_s):
        self.waited_s.append(timeout_s)
        return self.poll()

    def push(self, transfer_id, block_ids, *, first_block, last, ready):
        self._take(("push", transfer_id, first_block, tuple(block_ids), last))

    def expect(self, transfer_id, block_ids, *, source, source_engine_id, source_incarnation, first_block, num_tokens):
        assert (source, source_incarnation) == ({(0, 0): ("h", 5)}, {(0, 0): "life 1"})
        assert num_tokens == NUM_TOKENS
        self._take(("expect", transfer_id, first_block, tuple(block_ids)))

    def renew(self, transfer_ids, *, source, source_engine_id):
        self._take(("renew", *transfer_ids))

    def cancel(self, transfer_id):
        self.calls.append(("cancel", transfer_id))

    def _take(self, call):
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.calls.append(call)

    def take(self):
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def scribe():
    return Scribe()


@pytest.fixture
def tally():
    return Tally()


def push_ended(transfer_id, outcome=Outcome.done, *, engine_id="d0", reusable=True, code=None):
    return PushFinished(transfer_id, outcome, engine_id, code, "because", reusable, 10, 0.5)


def receive_ended(transfer_id, outcome=Outcome.done, *, reusable=True, code=None):
    return ReceiveFinished(transfer_id, outcome, "p0", code, "because", reusable, 3, 0.25)


def released(transfer_id):
    return BlocksReleased(transfer_id, True, "quiet")


# --- prefill ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def prefill(scribe, tally):
    return PrefillWorker(scribe, tally)


def chunk(send=1, ids=("t",), first=0, blocks=(7,), last=True):
    return PushChunk(send, ids, first, blocks, last)


def over(prefill):
    numbers, _ = prefill.poll()
    return numbers


def test_chunks_are_handed_on_and_the_end_is_told_once(prefill, scribe):
    prefill.push(chunk(last=False), None)
    prefill.push(chunk(first=1, blocks=(8,)), None)
    assert scribe.take() == [("push", "t", 0, (7,), False), ("push", "t", 1, (8,), True)]
    scribe.events = [push_ended("t")]
    assert over(prefill) == [1] and over(prefill) == [] and prefill.num_sends == 0


def test_blocks_that_are_held_end_the_send_when_they_are_released(prefill, scribe):
    prefill.push(chunk(), None)
    scribe.events = [push_ended("t", Outcome.failed, reusable=False)]
    assert over(prefill) == []
    scribe.events = [released("t")]
    assert over(prefill) == [1]


def test_the_name_that_decode_asks_for_decides(prefill, scribe, tally):
    prefill.push(chunk(ids=("r-0", "r")), None)
    assert sorted(scribe.take()) == [("push", "r", 0, (7,), True), ("push", "r-0", 0, (7,), True)]
    scribe.events = [push_ended("r-0")]
    assert over(prefill) == []
    assert scribe.take() == [("cancel", "r")]
    scribe.events = [push_ended("r", Outcome.cancelled, engine_id=None)]
    assert over(prefill) == [1]
    assert tally.take() == {"pushes_done": 1, "pushed_bytes": 10, "push_s": [0.5]}


def test_a_name_that_nobody_asked_for_leaves_the_other_alone(prefill, scribe):
    prefill.push(chunk(ids=("r-0", "r")), None)
    scribe.take()
    scribe.events = [push_ended("r", Outcome.expired, engine_id=None)]
    assert over(prefill) == [] and scribe.take() == []


def test_the_end_of_its_own_name_is_the_end_of_a_send(prefill, scribe):
    prefill.push(chunk(1, ids=("r-0", "r")), None)
    prefill.push(chunk(2, ids=("r-1", "r")), None)
    scribe.take()
    scribe.events = [push_ended("r-1", Outcome.expired, engine_id=None)]
    assert over(prefill) == [2], "it does not wait for its turn with the name that both share"
    scribe.events = [push_ended("r-0", Outcome.expired, engine_id=None)]
    assert over(prefill) == [] and scribe.take() == [("cancel", "r")]


def test_a_withdrawn_send_is_cancelled_once(prefill, scribe):
    prefill.push(chunk(last=False), None)
    scribe.take()
    prefill.withdraw(1)
    prefill.withdraw(1)
    prefill.withdraw(99)
    assert scribe.take() == [("cancel", "t")]


def test_a_second_send_of_the_same_name_waits_for_the_end_of_the_first(prefill, scribe):
    prefill.push(chunk(1, last=False), None)
    prefill.withdraw(1)
    prefill.push(chunk(2, blocks=(20,), last=False), None)
    prefill.push(chunk(2, first=1, blocks=(21,)), None)
    assert scribe.take() == [("push", "t", 0, (7,), False), ("cancel", "t")]
    scribe.events = [push_ended("t", Outcome.cancelled, reusable=False)]
    assert over(prefill) == [] and scribe.take() == []
    scribe.events = [released("t")]
    assert over(prefill) == [1]
    assert scribe.take() == [("push", "t", 0, (20,), False), ("push", "t", 1, (21,), True)]
    scribe.events = [push_ended("t")]
    assert over(prefill) == [2]


def test_a_send_that_is_withdrawn_while_it_waits_was_never_begun(prefill, scribe):
    prefill.push(chunk(1), None)
    prefill.push(chunk(2), None)
    scribe.take()
    prefill.withdraw(2)
    assert scribe.take() == [] and over(prefill) == [2]


def test_a_send_that_the_library_does_not_take_is_over_at_once(prefill, scribe, tally):
    scribe.error = QueueFull("full")
    prefill.push(chunk(last=False), None)
    assert scribe.take() == [("cancel", "t")], "decode hears of it"
    assert over(prefill) == [1] and tally.take() == {"pushes_rejected": 1}
    prefill.push(chunk(first=1), None)
    assert scribe.take() == [] and over(prefill) == [] and prefill.num_sends == 0


def test_a_later_chunk_that_is_not_taken_ends_the_push(prefill, scribe):
    prefill.push(chunk(last=False), None)
    scribe.error = UsageError("no")
    prefill.push(chunk(first=1), None)
    assert scribe.take() == [("push", "t", 0, (7,), False), ("cancel", "t")]
    assert over(prefill) == [], "its event comes"


@pytest.mark.parametrize(
    ("outcome", "engine_id", "withdrawn", "lost"),
    [
        (Outcome.done, "d0", False, False),
        (Outcome.done, "d0", True, False),
        (Outcome.expired, None, False, True),
        (Outcome.failed, "d0", False, True),
        (Outcome.cancelled, "d0", False, True),
        (Outcome.cancelled, "d0", True, True),  # decode was told
        (Outcome.cancelled, None, True, False),  # nobody has asked for it: it may begin anew
    ],
)
def test_a_send_that_decode_did_not_get_and_will_not_get_is_lost(prefill, scribe, outcome, engine_id, withdrawn, lost):
    prefill.push(chunk(ids=("r-0", "r")), None)
    if withdrawn:
        prefill.withdraw(1)
    scribe.events = [
        push_ended("r-0", outcome, engine_id=engine_id),
        push_ended("r", Outcome.cancelled, engine_id=None),
    ]
    assert prefill.poll() == ([1], {1} if lost else set())
    assert prefill.poll() == ([], set())


def test_a_send_that_the_library_does_not_take_is_lost(prefill, scribe):
    scribe.error = QueueFull("full")
    prefill.push(chunk(), None)
    assert prefill.poll() == ([1], {1})


def test_a_push_that_ends_badly_is_said_once_whatever_it_goes_by(prefill, scribe, caplog):
    prefill.push(chunk(ids=("r-0", "r")), None)
    scribe.events = [push_ended(name, Outcome.expired, engine_id=None) for name in ("r", "r-0")]
    prefill.poll()
    assert [record.getMessage() for record in caplog.records] == ["push r-0: expired: because"]


def test_any_number_of_sends_and_receives_may_wait_for_one_name(prefill, decode, scribe):
    """And the library may take none of them."""
    for number in range(2000):
        prefill.push(chunk(number), None)
        decode.expect(expect(f"r{number}"))
    scribe.events = [push_ended("t")]
    scribe.push = scribe.expect = refuse
    assert len(over(prefill)) == 2000
    scribe.events = [receive_ended("t")]
    assert len(decode.poll().finished) == 2000


def refuse(*args, **kwargs):
    raise QueueFull("full")


def test_names_in_use_are_not_refused(prefill, scribe):
    prefill.push(chunk(), None)
    scribe.take()
    prefill.refuse(("t", "u"))
    assert scribe.take() == [("cancel", "u")]


# --- decode ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def decode(scribe, tally):
    return DecodeWorker(scribe, tally)


def expect(request_id="r", transfer_id="t", blocks=(7, 8)):
    return Expect(request_id, DecodeLeg(transfer_id, "p0", {(0, 0): Source(("h", 5), "life 1")}), 1, blocks, NUM_TOKENS)


def ends(decode):
    found = decode.poll()
    return found.finished, found.failed, found.held, found.released


def test_a_receive_is_asked_for_and_reported(decode, scribe):
    decode.expect(expect())
    assert scribe.take() == [("expect", "t", 1, (7, 8))]
    scribe.events = [receive_ended("t")]
    assert ends(decode) == ({"r"}, set(), [], [])
    assert ends(decode) == (set(), set(), [], []) and decode.num_receives == 0


def test_an_end_that_is_near_is_waited_for_in_a_step_that_runs_no_model(scribe, tally):
    now_s = 100.0
    decode = DecodeWorker(scribe, tally, clock=lambda: now_s)
    decode.poll(may_wait=True)  # nothing to wait for
    decode.expect(expect())
    decode.poll()  # a step with other requests
    assert scribe.waited_s == []
    decode.poll(may_wait=True)
    assert scribe.waited_s == [IDLE_WAIT_S]
    now_s += NEAR_S  # prefill is still computing: vLLM's own pace will do
    decode.poll(may_wait=True)
    assert scribe.waited_s == [IDLE_WAIT_S]
    decode.expect(expect("r2", "t2"))
    scribe.events = [receive_ended("t2")]
    assert decode.poll(may_wait=True).finished == {"r2"}
    assert scribe.waited_s == [IDLE_WAIT_S] * 2
    decode.poll(may_wait=True)
    assert scribe.waited_s == [IDLE_WAIT_S] * 2


def test_a_failed_receive_is_reported_as_such(decode, scribe):
    decode.expect(expect())
    scribe.events = [receive_ended("t", Outcome.failed, code=FailureCode.peer_lost)]
    assert ends(decode) == ({"r"}, {"r"}, [], [])


def test_held_blocks_do_not_keep_the_request_waiting(decode, scribe):
    decode.expect(expect())
    scribe.events = [receive_ended("t", Outcome.expired, reusable=False)]
    assert ends(decode) == ({"r"}, {"r"}, ["r"], [])
    decode.cancel("r")  # it failed, so vLLM ends it
    scribe.take()
    scribe.events = [released("t")]
    assert ends(decode) == (set(), set(), [], ["r"])


def test_an_aborted_request_is_reported_when_its_blocks_are_quiet(decode, scribe):
    decode.expect(expect())
    scribe.take()
    decode.cancel("r")
    assert scribe.take() == [("cancel", "t")]
    scribe.events = [receive_ended("t", Outcome.cancelled, reusable=False)]
    assert ends(decode) == (set(), set(), [], [])
    scribe.events = [released("t")]
    assert ends(decode) == ({"r"}, {"r"}, [], [])


def test_a_receive_that_the_library_does_not_take_fails_at_once(decode, scribe, tally):
    scribe.error = UsageError("no")
    decode.expect(expect())
    assert ends(decode) == ({"r"}, {"r"}, [], []) and tally.take() == {"receives_rejected": 1}


def test_a_second_receive_of_the_same_name_waits_for_the_end_of_the_first(decode, scribe):
    decode.expect(expect("r1"))
    decode.cancel("r1")
    decode.expect(expect("r2", blocks=(9,)))
    assert scribe.take() == [("expect", "t", 1, (7, 8)), ("cancel", "t")]
    scribe.events = [receive_ended("t", Outcome.cancelled)]
    assert ends(decode) == ({"r1"}, {"r1"}, [], [])
    assert scribe.take() == [("expect", "t", 1, (9,))]
    scribe.events = [receive_ended("t")]
    assert ends(decode) == ({"r2"}, set(), [], [])


def test_a_receive_that_is_cancelled_while_it_waits_asked_for_nothing(decode, scribe):
    decode.expect(expect("r1"))
    decode.expect(expect("r2"))
    scribe.take()
    decode.cancel("r2")
    assert scribe.take() == [] and ends(decode) == ({"r2"}, {"r2"}, [], [])


def test_a_receive_of_nothing_is_nobody_s(decode, scribe):
    decode.expect(expect(None, blocks=()))
    scribe.events = [receive_ended("t")]
    assert ends(decode) == (set(), set(), [], [])


def test_renewals_are_handed_on(decode, scribe):
    decode.renew(Renewal(("t", "u"), expect().leg))
    scribe.error = QueueFull("full")
    decode.renew(Renewal(("v",), expect().leg))
    assert scribe.take() == [("renew", "t", "u")]


# --- what is counted -------------------------------------------------------------------------------------------------


def test_numbers_add_up_and_are_summed_up(tally):
    tally.pushed(push_ended("t"))
    tally.pushed(push_ended("u", Outcome.failed, code=FailureCode.peer_lost))
    tally.received(receive_ended("v"))
    numbers = tally.take()
    assert tally.take() == {}
    total = added(numbers, {"pushes_done": 2, "push_s": [0.1]})
    assert total["pushes_done"] == 3 and total["push_s"] == [0.5, 0.1]
    assert numbers["push_s"] == [0.5], "neither side is changed"
    lines = summary(total)
    assert lines["pushed_bytes"] == 20 and lines["push_max_ms"] == 500.0 and lines["receive_median_ms"] == 250.0
    assert lines["push_failures_peer_lost"] == 1 and lines["received_blocks"] == 3


def test_failures_are_counted_by_cause(tally):
    tally.pushed(push_ended("t", Outcome.failed, code=FailureCode.write_failed))
    tally.pushed(push_ended("u", Outcome.expired, code=FailureCode.lease_expired))
    tally.pushed(push_ended("v", Outcome.cancelled, code=FailureCode.cancelled_by_peer))
    tally.received(receive_ended("t", Outcome.failed, code=FailureCode.peer_lost))
    tally.received(receive_ended("u", Outcome.expired, code=FailureCode.deadline))
    tally.received(receive_ended("v", Outcome.expired, code=FailureCode.deadline))
    tally.received(receive_ended("w", Outcome.cancelled, code=FailureCode.cancelled_by_caller))
    assert {name: value for name, value in tally.take().items() if "_failures_" in name} == {
        "push_failures_write_failed": 1,
        "push_failures_lease_expired": 1,
        "receive_failures_peer_lost": 1,
        "receive_failures_deadline": 2,
    }


def test_reports_of_several_workers_add_up():
    report = Report(Counter([1]), Counter("a"), Counter()).add(Report(Counter([1, 2]), Counter(), Counter("b")))
    assert report == Report(Counter({1: 2, 2: 1}), Counter("a"), Counter("b"))
    assert report and not Report()
