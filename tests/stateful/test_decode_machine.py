"""The decode core against a model that knows receives and links, and neither generations, lines nor timers.

Hypothesis plays two prefill processes and the caller. After every step the model predicts which events the caller gets
and which ``Register`` and ``Cancel`` go out. When to dial is the core's own business; that it dials is checked.
"""

import random

import numpy as np
import pytest
from covering import run_to_cover
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpush import decode_effects, receives, wire
from kvpush.config import Config
from kvpush.decode import DecodeCore
from kvpush.errors import FailureCode
from kvpush.events import BlocksReleased
from kvpush.identity import Identity, holdings_of
from kvpush.layout import DEFAULT_GROUP, KVCacheSpec, geometry_of
from kvpush.lifecycle import RECEIVE
from kvpush.parallel import Share
from kvpush.registry import Registry
from kvpush.testing import FakeClock
from kvpush.testing.memory import Memory
from kvpush.testing.rows import counting_rows
from kvpush.testing.slices import Model, Slice

NEVER_S = 1e6
DEADLINE_S, HOLD_S, TIMEOUT_S, BACKOFF_S = 7.01, 4.03, 2.07, 0.5
CONFIG = Config(
    handshake_timeout_s=TIMEOUT_S,
    handshake_attempts=3,
    handshake_backoff_min_s=BACKOFF_S,
    handshake_backoff_max_s=BACKOFF_S,
    heartbeat_interval_s=NEVER_S / 10,
    liveness_timeout_s=NEVER_S,
    engine_ttl_s=NEVER_S,
    evict_grace_s=NEVER_S,
    hold_timeout_s=HOLD_S,
)
ENGINES = ("p0", "p1")
ADDRESSES = {name: ("10.0.0.1", 1 + index) for index, name in enumerate(ENGINES)}
MEMORY = Memory("BKHND", 8, Slice(Model(1)))
SPEC = KVCacheSpec(dims="BKHND", model="m")
GEOMETRY = geometry_of(MEMORY.tensors, SPEC)
HOLDINGS = holdings_of(GEOMETRY)


class Model:
    """What the caller and the wire must see."""

    def __init__(self):
        self.receives = {}  # epoch -> record: open or held
        self.up = {}  # engine id -> incarnation, while its link is up
        self.epochs = 0
        self.events, self.sent = [], []

    def expect(self, transfer_id, engine, count, now_s):
        self.epochs += 1
        if count == 0:
            self.events.append((transfer_id, "done", None, True))
            return
        record = {"id": transfer_id, "engine": engine, "missing": set(range(count)), "with": None, "open": True}
        record |= {"until": now_s + DEADLINE_S, "attempts": 0}
        self.receives[self.epochs] = record
        if engine in self.up:
            self.register(self.epochs)

    def register(self, epoch):
        record = self.receives[epoch]
        record["with"] = self.up[record["engine"]]
        self.sent.append(("Register", record["engine"], epoch))

    def end(self, epoch, outcome, code, *, is_quiet, now_s):
        record = self.receives[epoch]
        self.events.append((record["id"], outcome, code, is_quiet))
        if is_quiet:
            del self.receives[epoch]
        else:
            record.update(open=False, until=now_s + HOLD_S)

    def release(self, epoch, proven):
        self.events.append((self.receives.pop(epoch)["id"], "released", proven))

    def give_up(self, epoch, outcome, code, now_s):
        record = self.receives[epoch]
        if record["with"] is not None and record["engine"] in self.up:
            self.sent.append(("Cancel", record["engine"], epoch))
        self.end(epoch, outcome, code, is_quiet=record["with"] is None, now_s=now_s)

    def of(self, engine):
        return [epoch for epoch, record in self.receives.items() if record["engine"] == engine]

    def gone(self, epoch, code, now_s):
        """The process that was to write is proven gone."""
        if self.receives[epoch]["open"]:
            self.end(epoch, "failed", code, is_quiet=True, now_s=now_s)
        else:
            self.release(epoch, proven=True)

    def welcomed(self, engine, incarnation, now_s):
        self.up[engine] = incarnation
        for epoch in self.of(engine):
            if self.receives[epoch]["with"] not in (None, incarnation):
                self.gone(epoch, "peer_restarted", now_s)
        for epoch in self.of(engine):
            if self.receives[epoch]["open"]:
                self.register(epoch)
            else:
                self.sent.append(("Cancel", engine, epoch))

    def lost(self, engine):
        """A link that was up is over. Nothing is decided: the core dials again."""
        del self.up[engine]
        for epoch in self.of(engine):
            self.receives[epoch]["attempts"] = 0

    def dial_failed(self, engine, code, now_s, *, is_gone=False):
        for epoch in self.of(engine) if is_gone else []:
            if self.receives[epoch]["with"] is not None:
                self.gone(epoch, "peer_lost" if code == "peer_lost" else "peer_restarted", now_s)
        for epoch in self.of(engine):
            record = self.receives[epoch]
            record["attempts"] += 1
            is_final = code in ("wrong_engine", "closing") or record["attempts"] >= CONFIG.handshake_attempts
            if is_final and record["open"] and record["with"] is None:
                self.end(epoch, "failed", code, is_quiet=True, now_s=now_s)

    def arrived(self, epoch, positions):
        record = self.receives.get(epoch)
        if record is None:
            return
        record["missing"] -= positions
        if not record["missing"] and record["open"]:
            self.end(epoch, "done", None, is_quiet=True, now_s=0.0)
        elif not record["missing"]:
            self.release(epoch, proven=True)

    def failed(self, epoch, code, settled, now_s):
        record = self.receives[epoch]
        if record["open"]:
            outcome = "cancelled" if code == "cancelled_by_peer" else "failed"
            self.end(epoch, outcome, code, is_quiet=settled, now_s=now_s)
        elif settled:
            self.release(epoch, proven=True)

    def time_is(self, now_s):
        for epoch, record in list(self.receives.items()):
            if record["until"] <= now_s:
                if record["open"]:
                    self.give_up(epoch, "expired", "deadline", now_s)
                else:
                    self.release(epoch, proven=False)


PICKS = st.integers(0, 7)


class DecodeMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        registry = Registry(CONFIG, self.clock, random.Random(1))
        identity = Identity("d0", "d one", Share(), "d0/0.0#1", {"dtype": "same"}, HOLDINGS)
        self.core = DecodeCore(identity, b"blob", GEOMETRY, CONFIG, registry)
        self.model = Model()
        self.links = {}  # link -> [engine id, "dialling" | "open" | "up", when it was dialled]
        self.lives = dict.fromkeys(ENGINES, 1)
        self.num_transfers = 0

    # --- comparing ---------------------------------------------------------------------------------------------------

    def perform(self, effects):
        """Carry out what the core asks for, and compare what can be seen with the model's prediction."""
        events, sent = [], []
        for effect in effects:
            match effect:
                case decode_effects.Dial(link=link, address=address):
                    (engine,) = [name for name, known in ADDRESSES.items() if known == address]
                    assert engine not in [known[0] for known in self.links.values()], "one link to an engine"
                    self.links[link] = [engine, "dialling", self.clock()]
                case decode_effects.HangUp(link=link):
                    self.links.pop(link, None)
                case decode_effects.Emit(event=BlocksReleased() as event):
                    events.append((event.transfer_id, "released", event.proven))
                case decode_effects.Emit(event=event):
                    code = None if event.code is None else str(event.code)
                    events.append((event.transfer_id, str(event.outcome), code, event.blocks_reusable))
                case decode_effects.Send(link=link, message=wire.Register() | wire.Cancel() as message):
                    if message.__class__ is wire.Register and not message.wants:
                        continue  # a notice: decode waits for nothing
                    sent.append((type(message).__name__, self.links[link][0], message.epoch))
        assert sorted(events, key=repr) == sorted(self.model.events, key=repr)
        assert sorted(sent) == sorted(self.model.sent)
        self.model.events.clear()
        self.model.sent.clear()

    def link_of(self, engine, *states):
        return next((link for link, known in self.links.items() if known[0] == engine and known[1] in states), None)

    def agent(self, engine, incarnation=None):
        return f"{engine}/0.0#{incarnation or self.lives[engine]}"

    # --- the caller --------------------------------------------------------------------------------------------------

    @rule(engine=st.sampled_from(ENGINES), count=st.integers(0, 3))
    def expect(self, engine, count):
        self.num_transfers += 1
        name, now_s = f"t{self.num_transfers}", self.clock()
        self.model.expect(name, engine, count, now_s)
        self.perform(
            self.core.expect(
                name,
                (receives.Place(DEFAULT_GROUP, 0, np.arange(count)),),
                num_blocks=count,
                source=receives.Source(engine, 1, 1, {(0, 0): ADDRESSES[engine]}),
                deadline_s=DEADLINE_S,
                now_s=now_s,
            )
        )

    @rule(
        engine=st.sampled_from(ENGINES),
        count=st.integers(1, 3),
        then=st.sampled_from(["", "arrive", "arrive, fail", "arrive, arrive", "cancel", "fail"]),
    )
    def registered(self, engine, count, then):
        """The short cut to the deep states: the engine is there, and perhaps the receive is on its way."""
        self.expect(engine, count)
        link = self.link_of(engine, "dialling")
        if link is not None:
            self.links[link][1] = "open"
            self.perform(self.core.link_opened(link, self.clock()))
            self.welcome(link, engine)
        epoch = self.model.epochs
        if then == "cancel":
            self.model.give_up(epoch, "cancelled", "cancelled_by_caller", self.clock())
            self.perform(self.core.cancel(f"t{self.num_transfers}", self.clock()))
        if "arrive" in then:
            self.arrive(epoch, 0, 1, is_foreign=False)
        if then == "arrive, arrive" and epoch in self.model.receives:
            self.arrive(epoch, 1, 1, is_foreign=False)
            if epoch in self.model.receives:
                self.arrive(epoch, 2, 1, is_foreign=False)
        if "fail" in then and engine in self.model.up and epoch in self.model.receives:
            settled = "arrive" in then
            self.model.failed(epoch, "write_stalled", settled, self.clock())
            message = wire.Failed("t", epoch, FailureCode.write_stalled, "because", settled)
            self.perform(self.core.message(self.link_of(engine, "up"), message, self.clock()))

    def pick(self, index, *, is_open=None):
        epochs = [epoch for epoch, record in self.model.receives.items() if is_open in (None, record["open"])]
        return epochs[index % len(epochs)] if epochs else None

    @rule(index=PICKS)
    def cancel(self, index):
        epoch = self.pick(index, is_open=True)
        name = "unknown" if epoch is None else self.model.receives[epoch]["id"]
        if epoch is not None:
            self.model.give_up(epoch, "cancelled", "cancelled_by_caller", self.clock())
        self.perform(self.core.cancel(name, self.clock()))

    # --- links -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(known[1] == "dialling" for known in self.links.values()))
    @rule(index=PICKS, is_heard=st.booleans())
    def a_dial_succeeds(self, index, is_heard):
        links = [link for link, known in self.links.items() if known[1] == "dialling"]
        link = links[index % len(links)]
        engine = self.links[link][0]
        self.links[link][1] = "open"
        self.perform(self.core.link_opened(link, self.clock()))
        if is_heard:
            self.welcome(link, engine)

    def welcome(self, link, engine):
        self.links[link][1] = "up"
        incarnation = f"{engine} {self.lives[engine]}"
        self.model.welcomed(engine, incarnation, self.clock())
        welcome = wire.Welcome(engine, incarnation, Share(), HOLDINGS, self.agent(engine))
        self.perform(self.core.message(link, welcome, self.clock()))

    @precondition(lambda self: any(known[1] == "open" for known in self.links.values()))
    @rule(how=st.sampled_from(["late", "another", "refused", "closing"]))
    def an_open_link_is_answered(self, how):
        link, (engine, _, _) = next((link, known) for link, known in self.links.items() if known[1] == "open")
        if how == "late":
            self.welcome(link, engine)
            return
        if how == "another":
            message = wire.Welcome("px", "px one", Share(), HOLDINGS, "px/0.0#1")
            self.model.dial_failed(engine, "wrong_engine", self.clock(), is_gone=True)
        elif how == "refused":
            message = wire.Refused(FailureCode.queue_full, "no room")
            self.model.dial_failed(engine, "queue_full", self.clock())
        else:
            message = wire.Goodbye("leaving")
            self.model.dial_failed(engine, "closing", self.clock())
        self.perform(self.core.message(link, message, self.clock()))

    @precondition(lambda self: self.links)
    @rule(index=PICKS, refused=st.booleans())
    def a_link_ends(self, index, refused):
        link = list(self.links)[index % len(self.links)]
        engine, state, _ = self.links.pop(link)
        if state == "up":
            self.model.lost(engine)
        else:
            self.model.dial_failed(engine, "peer_lost", self.clock(), is_gone=refused)
        self.perform(self.core.link_closed(link, "cable", self.clock(), refused=refused and state != "up"))

    @rule(engine=st.sampled_from(ENGINES))
    def prefill_restarts(self, engine):
        """It is another incarnation from now on; the link ends, if there was one."""
        self.lives[engine] += 1
        link = self.link_of(engine, "up")
        if link is not None:
            del self.links[link]
            self.model.lost(engine)
            self.perform(self.core.link_closed(link, "reset", self.clock(), refused=False))

    @rule(engine=st.sampled_from(ENGINES))
    def prefill_says_goodbye(self, engine):
        link = self.link_of(engine, "up")
        if link is not None:
            self.model.lost(engine)
            self.perform(self.core.message(link, wire.Goodbye("leaving"), self.clock()))

    # --- what prefill does -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.receives)
    @rule(index=PICKS, first=st.integers(0, 2), count=st.integers(1, 3), is_foreign=st.booleans())
    def blocks_arrive(self, index, first, count, is_foreign):
        self.arrive(self.pick(index), first, count, is_foreign=is_foreign)

    def arrive(self, epoch, first, count, *, is_foreign):
        record = self.model.receives[epoch]
        size = 3  # no receive is larger: what is outside of it is not believed
        positions = set(range(first, min(size, first + count)))
        wanted = max(record["missing"], default=-1)
        agent = "somebody/0.0#9"
        if record["with"] is not None and not is_foreign and positions and max(positions) <= wanted:
            agent = self.agent(record["engine"], record["with"].split()[1])
            self.model.arrived(epoch, positions)
        span = wire.Span(0, 0, 1, first, max(1, len(positions)))
        written = wire.Written(epoch, (0, 0), 0, (span,))
        self.perform(self.core.notified(agent, wire.encode_written(written), self.clock()))

    @precondition(lambda self: self.model.receives and self.model.up)
    @rule(
        index=PICKS,
        code=st.sampled_from(["write_failed", "cancelled_by_peer", "lease_expired"]),
        settled=st.booleans(),
        is_drained=st.booleans(),
    )
    def prefill_speaks(self, index, code, settled, is_drained):
        epoch = self.pick(index)
        record = self.model.receives[epoch]
        for engine in list(self.model.up):
            is_its_own = engine == record["engine"]
            message = wire.Failed(record["id"], epoch, FailureCode(code), "because", settled)
            if is_drained:
                message = wire.Drained(record["id"], epoch)
            if is_its_own and epoch in self.model.receives:
                if not is_drained:
                    self.model.failed(epoch, code, settled, self.clock())
                elif not record["open"]:
                    self.model.release(epoch, proven=True)
            self.perform(self.core.message(self.link_of(engine, "up"), message, self.clock()))

    @rule(engine=st.sampled_from(ENGINES), junk=st.binary(max_size=20))
    def junk_arrives(self, engine, junk):
        self.perform(self.core.notified(self.agent(engine), b"\xc1" + junk, self.clock()))

    # --- time --------------------------------------------------------------------------------------------------------

    @rule(step_s=st.sampled_from([0.1, 0.6, 1.0, 2.1, 4.1]))
    def time_passes(self, step_s):
        end_s = self.clock() + step_s
        while (due_s := self.core.next_due_s()) is not None and due_s <= end_s:
            self.clock.set(max(due_s, self.clock()))
            now_s = self.clock()
            self.model.time_is(now_s)
            for engine, state, dialled_s in list(self.links.values()):
                if state != "up" and dialled_s + TIMEOUT_S <= now_s:
                    self.model.dial_failed(engine, "handshake_timeout", now_s)
            self.perform(self.core.tick(now_s))
        self.clock.set(end_s)

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def sizes_agree(self):
        gauges = self.core.gauges()
        is_open = [record["open"] for record in self.model.receives.values()]
        assert (gauges["receives_open"], gauges["receives_held"]) == (is_open.count(True), is_open.count(False))
        assert gauges["links"] == len(self.links)

    @invariant()
    def whoever_waits_is_dialled_or_will_be(self):
        for record in self.model.receives.values():
            is_linked = any(known[0] == record["engine"] for known in self.links.values())
            assert is_linked or self.core.next_due_s() is not None

    def teardown(self):
        """With nobody answering, everything ends by its own time."""
        for _ in range(4):
            self.time_passes(4.1)
        assert not self.model.receives
        assert self.core.num_receives == 0


@pytest.mark.timeout(600)
def test_the_decode_core_agrees_with_the_model_and_every_row_is_taken():
    wanted = {("receive", str(state), str(row.trigger)) for row in RECEIVE.rows for state in row.sources}
    with counting_rows() as rows:
        run_to_cover(DecodeMachine, lambda: wanted - set(rows), steps=40)
