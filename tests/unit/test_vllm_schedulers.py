"""The scheduler's halves of the vLLM connector: which blocks are pushed, asked for and pinned, step by step."""

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from kvpush.integrations.vllm.decode_scheduler import DecodeScheduler
from kvpush.integrations.vllm.params import DecodeLeg, Source
from kvpush.integrations.vllm.pins import Pins
from kvpush.integrations.vllm.prefill_scheduler import STUCK_S, PrefillScheduler
from kvpush.integrations.vllm.work import Report

BLOCK = 4
DECODE = {"do_remote_decode": True, "transfer_id": "t"}
SOURCE = {"do_remote_prefill": True, "remote_engine_id": "p0", "remote_host": "h", "remote_port": 5, "transfer_id": "t"}
LEG = DecodeLeg("t", "p0", {(0, 0): Source(("h", 5))})


@dataclass
class Request:
    request_id: str = "r"
    num_prompt_tokens: int = 10
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    kv_transfer_params: dict | None = None
    prompt_token_ids: list | None = None


@dataclass
class Pool:
    """Counts users of blocks, as vLLM does."""

    users: Counter = field(default_factory=Counter)
    blocks: list = field(default_factory=lambda: [SimpleNamespace(id=i) for i in range(100)])

    def touch(self, blocks):
        self.users.update(block.id for block in blocks)

    def free_blocks(self, ordered_blocks):
        for block in ordered_blocks:
            self.users[block.id] -= 1
            assert self.users[block.id] >= 0

    @property
    def used(self):
        return {block_id for block_id, count in self.users.items() if count}


@pytest.fixture
def pool():
    return Pool()


@pytest.fixture
def prefill(pool):
    scheduler = PrefillScheduler("p0", BLOCK, num_workers=1, sources={(0, 0): Source(("h", 5))})
    scheduler.pins.bind(pool)
    return scheduler


def step(scheduler, request, num_tokens, block_ids):
    """Plan a step that computes so many tokens of one request, and carry it out."""
    scheduler.planned({request.request_id: num_tokens}, lambda _: block_ids)
    request.num_computed_tokens += num_tokens
    return scheduler.take_work()


def chunks(work):
    return [(chunk.first_block, list(chunk.block_ids), chunk.last) for chunk in work.chunks]


def test_blocks_are_pushed_in_the_step_that_completes_them(prefill):
    request = Request(kv_transfer_params=DECODE)
    assert prefill.arrived(request)
    assert chunks(step(prefill, request, 3, [7])) == []
    assert chunks(step(prefill, request, 3, [7, 8])) == [(0, [7], False)]
    assert chunks(step(prefill, request, 2, [7, 8])) == [(1, [8], False)]
    assert chunks(step(prefill, request, 2, [7, 8, 9])) == [(2, [9], True)]
    assert chunks(step(prefill, request, 1, [7, 8, 9, 10])) == []


def test_blocks_that_prefill_has_cached_go_with_the_first_chunk(prefill):
    request = Request(num_computed_tokens=8, kv_transfer_params=DECODE)
    prefill.arrived(request)
    assert chunks(step(prefill, request, 2, [7, 8, 9])) == [(0, [7, 8, 9], True)]


def test_without_chunks_everything_goes_at_the_end(prefill):
    prefill.push_chunks = False
    request = Request(kv_transfer_params=DECODE)
    prefill.arrived(request)
    assert chunks(step(prefill, request, 8, [7, 8])) == []
    assert chunks(step(prefill, request, 2, [7, 8, 9])) == [(0, [7, 8, 9], True)]


def test_a_request_that_no_one_else_decodes_is_left_alone(prefill, pool):
    request = Request()
    assert not prefill.arrived(request)
    assert chunks(step(prefill, request, 10, [7, 8, 9])) == []
    assert prefill.finished("r", is_whole=True) is None
    assert not prefill.is_busy


def test_blocks_are_pinned_until_every_worker_has_reported(pool):
    scheduler = PrefillScheduler("p0", BLOCK, num_workers=2, sources={(0, 0): Source(("h", 5))})
    scheduler.pins.bind(pool)
    request = Request(kv_transfer_params=DECODE)
    scheduler.arrived(request)
    (chunk,) = step(scheduler, request, 10, [7, 8, 9]).chunks
    said = scheduler.finished("r", is_whole=True)
    assert said["remote_port"] == 5 and said["transfer_id"] == "t" and said["remote_request_id"] == "r"
    assert pool.used == {7, 8, 9} and scheduler.is_busy
    scheduler.reported(Report(ended_sends=Counter({chunk.send: 1})))
    assert pool.used == {7, 8, 9}
    scheduler.reported(Report(ended_sends=Counter({chunk.send: 1})))
    assert pool.used == set() and not scheduler.is_busy
    scheduler.reported(Report(ended_sends=Counter({chunk.send: 1})))  # late, twice: no matter


def test_a_preempted_prompt_goes_on_where_it_stopped(prefill, pool):
    request = Request(kv_transfer_params=DECODE)
    prefill.arrived(request)
    (first,) = step(prefill, request, 8, [7, 8]).chunks
    request.num_computed_tokens, request.num_preemptions = 0, 1
    prefill.planned({"another": 1}, lambda _: None)
    request.num_computed_tokens = 4  # of its prefix cache, block 8 has been given to somebody else's prompt, as a copy
    work = step(prefill, request, 2, [7, 20])
    assert not work.withdrawals and chunks(work) == []
    work = step(prefill, request, 4, [7, 20, 21])
    assert chunks(work) == [(2, [21], True)] and work.chunks[0].send == first.send
    assert pool.used == {7, 8, 21}


def test_without_a_prefix_cache_a_preempted_prompt_is_withdrawn_and_begins_anew(prefill, pool):
    prefill.has_prefix_cache = False
    request = Request(kv_transfer_params=DECODE)
    prefill.arrived(request)
    (first,) = step(prefill, request, 8, [7, 8]).chunks
    request.num_computed_tokens, request.num_preemptions = 0, 1
    work = step(prefill, request, 6, [20, 21])
    assert work.withdrawals == [first.send]
    assert chunks(work) == [(0, [20], False)]
    assert work.chunks[0].send != first.send
    assert prefill.has_blocks_about_to_come_back
    assert pool.used == {7, 8, 20}, "a WRITE may still read the old ones"
    prefill.reported(Report(ended_sends=Counter([first.send])))
    assert pool.used == {20} and not prefill.has_blocks_about_to_come_back


def test_a_complete_push_outlives_a_preemption(prefill, pool):
    request = Request(kv_transfer_params=DECODE)
    prefill.arrived(request)
    step(prefill, request, 10, [7, 8, 9])
    request.num_computed_tokens, request.num_preemptions = 0, 1
    work = step(prefill, request, 10, [20, 21, 22])
    assert not work.withdrawals and not work.chunks
    assert prefill.finished("r", is_whole=True) is not None
    assert pool.used == {7, 8, 9}


@pytest.mark.parametrize("num_tokens", [8, 10], ids=["in the middle of the prompt", "after it"])
def test_an_aborted_prompt_is_withdrawn(prefill, num_tokens):
    request = Request(kv_transfer_params=DECODE)
    prefill.arrived(request)
    (chunk,) = step(prefill, request, num_tokens, [7, 8, 9]).chunks
    assert prefill.finished("r", is_whole=False) is None
    assert prefill.take_work().withdrawals == [chunk.send]
    assert prefill.is_busy


def test_a_prompt_that_was_aborted_before_its_first_chunk_is_refused(prefill):
    request = Request(kv_transfer_params=DECODE)
    prefill.arrived(request)
    assert prefill.finished("r", is_whole=False) is None
    assert prefill.is_busy, "a step is needed to tell the workers"
    assert prefill.take_work().refusals == [("t",)]
    assert not prefill.is_busy


def test_a_push_that_ended_early_gets_no_more_chunks(prefill, pool):
    request = Request(kv_transfer_params=DECODE)
    prefill.arrived(request)
    (chunk,) = step(prefill, request, 4, [7]).chunks
    prefill.reported(Report(ended_sends=Counter([chunk.send])))  # decode hung up, or nobody came in time
    assert chunks(step(prefill, request, 6, [7, 8, 9])) == []
    assert prefill.finished("r", is_whole=True) is None, "decode computes it"
    assert pool.used == set() and not prefill.is_busy


def test_a_push_that_was_lost_after_its_last_chunk_is_not_offered(prefill, pool):
    request = Request(kv_transfer_params=DECODE)
    prefill.arrived(request)
    (chunk,) = step(prefill, request, 10, [7, 8, 9]).chunks
    prefill.reported(Report(ended_sends=Counter([chunk.send]), lost_sends={chunk.send}))
    assert prefill.finished("r", is_whole=True) is None


def test_a_push_that_decode_was_told_to_give_up_does_not_begin_anew(prefill, pool):
    """Its receive has failed. A second push would keep its blocks for a whole lease, for nobody."""
    prefill.has_prefix_cache = False
    request = Request(kv_transfer_params=DECODE)
    prefill.arrived(request)
    (first,) = step(prefill, request, 8, [7, 8]).chunks
    request.num_computed_tokens, request.num_preemptions = 0, 1
    (second,) = step(prefill, request, 6, [20, 21]).chunks
    prefill.reported(Report(ended_sends=Counter([first.send]), lost_sends={first.send}))
    work = step(prefill, request, 4, [20, 21, 22])
    assert (work.withdrawals, chunks(work)) == ([second.send], [])
    prefill.reported(Report(ended_sends=Counter([second.send])))
    assert prefill.finished("r", is_whole=True) is None
    assert pool.used == set() and not prefill.is_busy


def preempted(prefill, *names):
    """Prompts of which a half is pushed, and which have lost their blocks."""
    found = [Request(name, kv_transfer_params=DECODE | {"transfer_id": name}) for name in names]
    for number, request in enumerate(found):
        prefill.arrived(request)
        step(prefill, request, 8, [10 * number, 10 * number + 1])
        request.num_computed_tokens, request.num_preemptions = 0, 1
    return found


def test_when_nothing_can_run_the_newest_that_was_preempted_begins_anew(prefill, pool, clock):
    prefill.clock = clock
    preempted(prefill, "a", "b")
    prefill.planned({"another": 1}, lambda _: None)
    prefill.planned({}, lambda _: None)
    clock.now_s += STUCK_S / 2
    prefill.planned({"another": 1}, lambda _: None)
    prefill.planned({}, lambda _: None)
    clock.now_s += STUCK_S / 2
    prefill.planned({}, lambda _: None)
    assert prefill.take_work().withdrawals == [], "it has stood still for less than that"
    clock.now_s += STUCK_S
    prefill.planned({}, lambda _: None)
    (withdrawn,) = prefill.take_work().withdrawals
    clock.now_s += STUCK_S
    prefill.planned({}, lambda _: None)
    assert prefill.take_work().withdrawals == [], "its blocks may be enough"
    prefill.reported(Report(ended_sends=Counter([withdrawn])))
    assert pool.used == {0, 1}
    prefill.planned({}, lambda _: None)
    assert len(prefill.take_work().withdrawals) == 1


def test_a_prompt_that_runs_or_is_whole_is_not_in_anybody_s_way(prefill, clock):
    prefill.clock = clock
    whole, running = (Request(name, kv_transfer_params=DECODE | {"transfer_id": name}) for name in "ab")
    for request, num_tokens in ((whole, 10), (running, 8)):
        prefill.arrived(request)
        step(prefill, request, num_tokens, [7, 8, 9][: num_tokens // 3])
        request.num_preemptions = 1
    whole.num_computed_tokens = 0
    for _ in range(3):
        prefill.planned({}, lambda _: None)
        clock.now_s += STUCK_S
    assert prefill.take_work().withdrawals == []


def test_without_a_prefix_cache_what_was_just_preempted_is_about_to_come_back(prefill):
    """vLLM asks before the step that withdraws it: else it preempts whoever asks, and both begin anew, for ever."""
    preempted(prefill, "a")
    assert not prefill.has_blocks_about_to_come_back, "the prefix cache has them"
    prefill.has_prefix_cache = False
    assert prefill.has_blocks_about_to_come_back


# --- decode ----------------------------------------------------------------------------------------------------------


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def decode(pool, clock):
    scheduler = DecodeScheduler(BLOCK, lease_s=30.0, receive_deadline_s=120.0, clock=clock)
    scheduler.pins.bind(pool)
    scheduler.take_work()  # so that the next renewal is a while away
    return scheduler


def asked(work):
    return [(e.request_id, e.first_block, list(e.block_ids)) for e in work.expects]


@pytest.mark.parametrize(
    ("num_prompt", "num_cached", "missing", "expected"),
    [
        (10, 0, 9, (0, [7, 8, 9])),
        (9, 0, 8, (0, [7, 8])),  # the last token is computed here, and nothing else is in its block
        (10, 4, 5, (1, [8, 9])),
        (10, 8, 1, (2, [9])),
        (2, 0, 1, (0, [7])),
    ],
)
def test_only_what_is_missing_is_asked_for(decode, num_prompt, num_cached, missing, expected):
    request = Request(num_prompt_tokens=num_prompt, kv_transfer_params=dict(SOURCE))
    assert decode.arrived(request)
    assert decode.num_missing_tokens(request, num_cached) == missing
    decode.allocated(request, [7, 8, 9], missing)
    (expect,) = decode.take_work().expects
    assert (expect.request_id, expect.first_block, list(expect.block_ids)) == ("r", *expected)
    assert expect.num_tokens == num_prompt - 1, "prefill's blocks may be smaller, and end there"
    assert request.kv_transfer_params["do_remote_prefill"] is False
    assert decode.num_missing_tokens(request, 0) == 0, "asked once; what fails is computed here"
    decode.allocated(request, [7, 8, 9], 0)
    assert asked(decode.take_work()) == []


@pytest.mark.parametrize(("num_prompt", "num_cached"), [(1, 0), (9, 8)])
def test_nothing_is_missing_so_prefill_may_let_go(decode, num_prompt, num_cached):
    request = Request(num_prompt_tokens=num_prompt, kv_transfer_params=dict(SOURCE))
    decode.arrived(request)
    assert decode.num_missing_tokens(request, num_cached) == 0
    decode.allocated(request, [7, 8, 9], 0)
    (expect,) = decode.take_work().expects
    assert (expect.request_id, expect.leg, list(expect.block_ids)) == (None, LEG, [])
    decode.finished("r")
    assert not decode.is_busy


def test_a_request_that_never_got_its_turn_lets_prefill_go(decode):
    decode.arrived(Request(kv_transfer_params=dict(SOURCE)))
    decode.finished("r")
    assert decode.is_busy, "a step is needed to tell the workers"
    assert asked(decode.take_work()) == [(None, 0, [])]
    assert not decode.is_busy


def receiving(decode):
    request = Request(kv_transfer_params=dict(SOURCE))
    decode.arrived(request)
    decode.allocated(request, [7, 8, 9], decode.num_missing_tokens(request, 0))
    decode.take_work()


def test_an_abort_cancels_a_receive_that_is_open(decode):
    receiving(decode)
    decode.finished("r")
    assert decode.take_work().cancels == ["r"]


def test_an_end_after_the_receive_cancels_nothing(decode):
    receiving(decode)
    decode.reported(Report(), ["r"])
    decode.finished("r")
    assert decode.take_work().cancels == []


def siblings(decode, *names, prompts=((1, 2), (1, 2))):
    """Requests with one name; those with the same prompt have one transfer."""
    found = [
        Request(name, kv_transfer_params=dict(SOURCE), prompt_token_ids=list(prompt))
        for name, prompt in zip(names, prompts, strict=True)
    ]
    for request in found:
        decode.arrived(request)
    return found


def test_a_prompt_that_comes_twice_is_received_once_and_the_other_finds_it(decode):
    first, second = siblings(decode, "a", "b")
    decode.allocated(first, [7, 8, 9], decode.num_missing_tokens(first, 0))
    assert decode.num_missing_tokens(second, 0) is None
    assert [name for name, *_ in asked(decode.take_work())] == ["a"]
    decode.reported(Report(), ["a"])
    assert decode.num_missing_tokens(second, 8) == 0
    decode.allocated(second, [7, 8, 10], 0)
    assert asked(decode.take_work()) == [(None, 0, [])], "whatever prefill still has of it may go"


@pytest.mark.parametrize("failed", [True, False], ids=["failed", "aborted"])
def test_when_the_one_that_received_it_did_not_get_it_the_next_one_asks(decode, failed):
    first, second = siblings(decode, "a", "b")
    decode.allocated(first, [7, 8, 9], decode.num_missing_tokens(first, 0))
    assert decode.num_missing_tokens(second, 0) is None
    if not failed:
        decode.finished("a")
    decode.reported(Report(), ["a"], ["a"] if failed else [])
    assert decode.num_missing_tokens(second, 0) == 9
    decode.allocated(second, [4, 5, 6], 9)
    assert [name for name, *_ in asked(decode.take_work())] == ["a", "b"]


def test_other_prompts_under_the_same_name_are_other_transfers(decode):
    first, second = siblings(decode, "a", "b", prompts=((1, 2), (1, 3)))
    for request, block_ids in ((first, [7, 8, 9]), (second, [4, 5, 6])):
        decode.allocated(request, block_ids, decode.num_missing_tokens(request, 0))
    one, other = decode.take_work().expects
    assert one.leg.transfer_id != other.leg.transfer_id


def test_a_second_attempt_after_the_first_has_come_asks_for_itself(decode):
    (first,) = siblings(decode, "a", prompts=((1, 2),))
    decode.allocated(first, [7, 8, 9], decode.num_missing_tokens(first, 0))
    decode.reported(Report(), ["a"])
    (second,) = siblings(decode, "b", prompts=((1, 2),))
    assert decode.num_missing_tokens(second, 0) == 9


def test_held_blocks_stay_pinned_until_every_worker_that_holds_them_lets_go(decode, pool):
    receiving(decode)
    decode.reported(Report(held=Counter("r")), [])
    decode.reported(Report(held=Counter("r")), ["r"])
    assert pool.users == Counter([7, 8, 9]) and decode.is_busy
    decode.reported(Report(released=Counter("r")), [])
    assert pool.used == {7, 8, 9}
    decode.reported(Report(released=Counter("r")), [])
    assert pool.used == set() and not decode.is_busy


def test_leases_of_requests_that_queue_are_renewed_in_time(decode, clock):
    decode.arrived(Request("a", kv_transfer_params=dict(SOURCE)))
    decode.arrived(Request("b", kv_transfer_params=SOURCE | {"transfer_id": "u"}))
    decode.arrived(Request("c", kv_transfer_params=SOURCE | {"transfer_id": "v", "remote_engine_id": "p1"}))
    assert decode.take_work().renewals == []
    clock.now_s += 10.0
    renewed = [(r.leg.engine_id, r.transfer_ids) for r in decode.take_work().renewals]
    assert renewed == [("p0", ("t", "u")), ("p1", ("v",))]
    assert decode.take_work().renewals == []


def test_pins_are_per_key(pool):
    pins = Pins()
    pins.bind(pool)
    pins.add("a", [1, 2])
    pins.add("a", [3])
    pins.add("b", [3])
    assert pool.users == Counter([1, 2, 3, 3]) and pins.num_blocks == 4
    pins.drop("a")
    pins.drop("a")
    assert pool.used == {3} and "b" in pins and len(pins) == 1


def test_pins_need_a_pool():
    with pytest.raises(RuntimeError, match="block pool"):
        Pins().add("a", [1])


def test_two_servers_that_wait_for_each_other_do_not_keep_each_other_s_blocks_for_ever(decode, clock):
    decode.arrived(Request("a", kv_transfer_params=dict(SOURCE)))
    clock.now_s += decode.receive_deadline_s - 1
    assert len(decode.take_work().renewals) == 1
    clock.now_s += decode.lease_s
    assert decode.take_work().renewals == []


def test_leases_are_renewed_as_often_as_the_shortest_needs(decode, clock):
    decode.arrived(Request("a", kv_transfer_params=SOURCE | {"remote_lease_s": 3.0}))
    decode.arrived(Request("b", kv_transfer_params=SOURCE | {"remote_lease_s": 300.0, "transfer_id": "u"}))
    clock.now_s += 1.0
    assert len(decode.take_work().renewals) == 1


def test_a_lease_of_next_to_nothing_does_not_have_every_step_renew(decode, clock):
    decode.arrived(Request("a", kv_transfer_params=SOURCE | {"remote_lease_s": 1e-9}))
    clock.now_s += 0.1
    assert decode.take_work().renewals == []
    clock.now_s += 0.3
    assert len(decode.take_work().renewals) == 1
