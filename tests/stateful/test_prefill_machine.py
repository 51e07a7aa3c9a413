"""The prefill core against a model that knows transfers and WRITEs, and neither generations, lines nor timers.

Hypothesis plays two decode engines, the transport and the caller. After every step the model predicts which events the
caller gets, which ``Failed`` and ``Drained`` go out, and which positions are written for which registration. When to
shake hands is the core's own business; that it does is checked at the end.
"""

import random

import numpy as np
import pytest
from covering import run_to_cover
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpush import metadata, prefill_effects, wire
from kvpush.config import Config
from kvpush.errors import FailureCode, TransportError
from kvpush.events import BlocksReleased
from kvpush.identity import Identity, holdings_of
from kvpush.layout import DEFAULT_GROUP, KVCacheSpec, geometry_of
from kvpush.lifecycle import PUSH
from kvpush.parallel import Share
from kvpush.prefill import PrefillCore
from kvpush.pushes import Part
from kvpush.registry import Registry
from kvpush.testing import FakeClock
from kvpush.testing.memory import Memory
from kvpush.testing.rows import counting_rows
from kvpush.testing.slices import Model, Slice

NEVER_S = 1e6
LEASE_S, STALL_S, HOLD_S = 5.01, 3.03, 4.07
CONFIG = Config(
    handshake_timeout_s=NEVER_S,
    handshake_backoff_min_s=0.001,
    handshake_backoff_max_s=0.001,
    heartbeat_interval_s=NEVER_S / 10,
    liveness_timeout_s=NEVER_S,
    engine_ttl_s=NEVER_S,
    evict_grace_s=NEVER_S,
    lease_s=LEASE_S,
    stall_timeout_s=STALL_S,
    hold_timeout_s=HOLD_S,
)
ENGINES = ("d0", "d1")
SPEC = KVCacheSpec(dims="BKHND", model="m")
GEOMETRY = geometry_of(Memory("BKHND", 64, Slice(Model(1))).tensors, SPEC)
HOLDINGS = holdings_of(GEOMETRY)
FINGERPRINT = {"dtype": "same"}
MAX_BLOCKS = 3


class Peer:
    """What the loop would have loaded."""

    def num_blocks(self, group):
        return 64

    def len_bytes(self, piece):
        return piece.num_cells


class Model:
    """What the caller, decode and the transport must see. A transfer id is used once."""

    def __init__(self):
        self.pushes = {}  # id -> record of an open push
        self.held = {}  # id -> record of a push in doubt
        self.waiting = {}  # id -> (engine, epoch, count): registrations without a push
        self.registered = set()
        self.events, self.sent, self.posted = [], [], []

    def push(self, name, count, *, last, now_s):
        if name in self.waiting and self.waiting[name] == "cancelled":
            del self.waiting[name]
            self.events.append((name, "cancelled", "cancelled_by_caller", True))
            return
        record = self.pushes.setdefault(
            name, {"count": 0, "last": False, "reg": None, "done": set(), "flying": {}, "cause": None, "told": False}
        )
        record["lease"] = now_s + LEASE_S
        record["count"] += count
        record["last"] |= last
        if name in self.waiting:
            record["reg"] = self.waiting.pop(name)
        self.advance(name)

    def register(self, name, engine, epoch, count):
        self.registered.add(name)
        if name in self.pushes:
            self.pushes[name]["reg"] = (engine, epoch, count)
            self.advance(name)
        else:
            self.waiting[name] = (engine, epoch, count)

    def advance(self, name):
        """Matched: too few blocks ends it, everything written ends it, what is there is written."""
        record = self.pushes[name]
        if record["reg"] is None or record["cause"]:
            return
        engine, epoch, wanted = record["reg"]
        if record["last"] and record["count"] < wanted:
            self.give_up(name, "failed", "bad_blocks")
        elif record["last"] and len(record["done"]) == wanted:
            self.over(name, "done", None)
        else:
            flying = set().union(*record["flying"].values()) if record["flying"] else set()
            new = set(range(min(record["count"], wanted))) - record["done"] - flying - record.get("queued", set())
            if new:
                record.setdefault("queued", set()).update(new)

    def wrote(self, name, write_id, positions):
        """The core has posted; what, is checked by the caller of this."""
        record = self.pushes[name]
        record["queued"] -= positions
        record["flying"][write_id] = positions

    def give_up(self, name, outcome, code):
        record = self.pushes[name]
        if record["cause"]:
            return  # the first root cause stays
        record["cause"] = (outcome, code)
        record["queued"] = set()
        if not record["flying"]:
            self.over(name, outcome, code)
        elif not record["told"]:
            record["told"] = True
            self.tell(record, "Failed", code, settled=False)

    def tell(self, record, kind, code=None, *, settled=True):
        if record["reg"] is not None and not record.get("unlinked"):
            engine, epoch, wanted = record["reg"]
            if kind == "Failed" and len(record["done"]) == wanted:
                return  # decode has everything that it asked for, and waits for nothing
            seen = "cancelled_by_peer" if code == "cancelled_by_caller" else code
            self.sent.append((kind, engine, epoch, seen, settled) if kind == "Failed" else (kind, engine, epoch))

    def over(self, name, outcome, code):
        record = self.pushes.pop(name)
        self.events.append((name, outcome, code, True))
        self.account(record, outcome, code)

    def account(self, record, outcome, code):
        if record["told"]:
            self.tell(record, "Drained")
        elif outcome != "done":
            self.tell(record, "Failed", code)

    def cancelled_by_peer(self, name, engine, epoch):
        record = self.pushes.get(name)
        if record and record["reg"] and record["reg"][:2] == (engine, epoch) and not record.get("unlinked"):
            record["told"] = True
            if not record["cause"]:
                self.give_up(name, "cancelled", "cancelled_by_peer")
            return
        held = self.held.get(name)
        if held and held["reg"][:2] == (engine, epoch):
            held["told"] = True
            return
        if name in self.waiting and self.waiting[name][:2] == (engine, epoch):
            self.waiting[name] = "peer gave up"
        self.sent.append(("Drained", engine, epoch))

    def settled(self, name, write_id, code, now_s):
        record = self.pushes.get(name)
        if record is None:
            record = self.held[name]
            del record["flying"][write_id]
            if not record["flying"] and not record["doubtful"]:
                del self.held[name]
                self.events.append((name, "released", True))
                self.account(record, *record["cause"])
            return
        positions = record["flying"].pop(write_id)
        if code is None:
            record["done"] |= positions
        elif not record["cause"]:
            record["cause"] = ("failed", code)
            record["queued"] = set()
            if record["flying"]:
                record["told"] = True
                self.tell(record, "Failed", code, settled=False)
        if record["flying"]:
            return
        if record["cause"]:
            self.over(name, *record["cause"])
        else:
            record["lease"] = now_s + LEASE_S  # it stood still while it wrote, and begins anew
            self.advance(name)

    def doubt(self, name, code, now_s):
        """A WRITE does not end, or nobody knows how it did: the outcome is out, the blocks are held."""
        record = self.pushes.get(name)
        if record is None:
            return
        record["cause"] = record["cause"] or ("failed", code)
        if not record["told"]:
            record["told"] = True
            self.tell(record, "Failed", record["cause"][1], settled=False)
        del self.pushes[name]
        self.events.append((name, *record["cause"], False))
        record.update(hold=now_s + HOLD_S, queued=set())
        record.setdefault("doubtful", set())
        self.held[name] = record

    def link_lost(self, engine):
        for name, record in list(self.pushes.items()):
            if record["reg"] and record["reg"][0] == engine and not record.get("unlinked"):
                record["unlinked"] = True
                self.give_up(name, "failed", "peer_lost")
        for record in self.held.values():
            if record["reg"][0] == engine:
                record["unlinked"] = True
        for name in [name for name, entry in self.waiting.items() if entry[0] == engine]:
            del self.waiting[name]

    def time_is(self, now_s):
        for name, record in list(self.pushes.items()):
            waits = record["reg"] is None or record.get("queued") or len(record["done"]) == record["reg"][2]
            if not record["flying"] and not record["cause"] and waits and record["lease"] <= now_s:
                if record["reg"] and len(record["done"]) == record["reg"][2]:
                    self.over(name, "done", None)
                else:
                    self.give_up(name, "expired", "lease_expired")
        for name, record in list(self.held.items()):
            if record["hold"] <= now_s:
                del self.held[name]
                self.events.append((name, "released", False))


PICKS = st.integers(0, 7)
SHORT_CUTS = (
    "",
    "cancel",
    "cancel, end",
    "no link",
    "no link, end",
    "fail",
    "chunk",
    "chunk, end",
    "chunk, more",
    "no answer",
    "no answer, late",
    "nothing asked",
)
# Two rows need what this machine leaves out: a decode engine that registers again for nothing, and a fenced chunk.
# The pair machine and the simulator take them.
ELSEWHERE = {("push", "deferred", "completed")}


class PrefillMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        registry = Registry(CONFIG, self.clock, random.Random(1))
        self.core = PrefillCore(
            Identity("p0", "p one", Share(), "p0/0.0#1", FINGERPRINT, HOLDINGS), CONFIG, registry, GEOMETRY
        )
        self.model = Model()
        self.links = {}  # engine id -> link
        self.asked = {}  # engine id -> attempt, while decode has not answered
        self.writes = {}  # write id -> (transfer id, stall time), while the transport is asked about it
        self.names, self.epochs, self.num_links = 0, 0, 0
        self.lives = dict.fromkeys(ENGINES, 0)

    # --- comparing ---------------------------------------------------------------------------------------------------

    def perform(self, effects):
        """Carry out what the core asks for, and compare what can be seen with the model's prediction."""
        events, sent = [], []
        engine_of = {link: engine for engine, link in self.links.items()}
        queue = list(effects)
        while queue:
            effect = queue.pop(0)
            match effect:
                case prefill_effects.Emit(event=BlocksReleased() as event):
                    events.append((event.transfer_id, "released", event.proven))
                case prefill_effects.Emit(event=event):
                    code = None if event.code is None else str(event.code)
                    events.append((event.transfer_id, str(event.outcome), code, event.blocks_reusable))
                case prefill_effects.Send(link=link, message=wire.Failed() as message):
                    sent.append(("Failed", engine_of[link], message.epoch, str(message.code), message.settled))
                case prefill_effects.Send(link=link, message=wire.Drained() as message):
                    sent.append(("Drained", engine_of[link], message.epoch))
                case prefill_effects.Send(link=link, message=wire.MetadataRequest() as message):
                    self.asked[engine_of[link]] = message.attempt
                case prefill_effects.PostWrite():
                    self.posted(effect)
                case prefill_effects.AbandonWrite(write_id=write_id):
                    del self.writes[write_id]
                case prefill_effects.LoadPeer():
                    now_s = self.clock()
                    queue += self.core.peer_loaded(effect.generation, effect.attempt, Peer(), now_s)
        assert sorted(events, key=repr) == sorted(self.model.events, key=repr)
        assert sorted(sent, key=repr) == sorted(self.model.sent, key=repr)
        self.model.events.clear()
        self.model.sent.clear()

    def posted(self, effect):
        """It is for an open push that is still wanted, of positions that wait to be written."""
        written = wire.decode_written(effect.notification)
        positions = {slot for s in written.spans for slot in range(s.first_slot, s.first_slot + s.num_slots)}
        (name,) = [n for n, r in self.model.pushes.items() if r["reg"] and r["reg"][1] == written.epoch]
        record = self.model.pushes[name]
        assert not record["cause"]
        assert positions <= record["queued"], (positions, record)
        local = [slot for piece in effect.pieces for slot in piece.local_slots.tolist()]
        remote = [slot for piece in effect.pieces for slot in piece.remote_slots.tolist()]
        assert local == sorted(positions)  # the caller's block of position i is i
        assert remote == [10 + position for position in sorted(positions)]
        self.model.wrote(name, effect.write_id, positions)
        self.writes[effect.write_id] = (name, self.clock() + STALL_S)

    # --- decode ------------------------------------------------------------------------------------------------------

    @rule(engine=st.sampled_from(ENGINES))
    def hello(self, engine):
        if engine not in self.links:
            self.num_links += 1
            self.lives[engine] += 1
            self.links[engine] = self.num_links.to_bytes(4, "big")
            self.say(engine, self.hello_of(engine))

    def hello_of(self, engine):
        life = self.lives[engine]
        sizes = {DEFAULT_GROUP: GEOMETRY.groups[0].block_size_tokens}
        agent = f"{engine}/0.0#{life}"
        return wire.Hello(engine, f"{engine} {life}", Share(), "p0", Share(), FINGERPRINT, sizes, agent, 1)

    def say(self, engine, message):
        self.perform(self.core.message(self.links[engine], message, self.clock()))

    @precondition(lambda self: self.asked)
    @rule(is_good=st.booleans())
    def metadata_comes(self, is_good):
        engine, attempt = next(iter(self.asked.items()))
        del self.asked[engine]
        if engine in self.links:
            hello = self.hello_of(engine)
            answer = metadata.build(attempt, hello.incarnation, hello.agent_name, b"blob", GEOMETRY)
            if is_good:
                self.say(engine, answer)

    def register_one(self, engine, name, count):
        self.epochs += 1
        packed = wire.pack_block_ids(np.arange(10, 10 + count))
        self.model.register(name, engine, self.epochs, count)
        wants = (wire.Want(DEFAULT_GROUP, 0, packed),)
        self.say(engine, wire.Register(name, self.epochs, wants, int(NEVER_S * 1000)))

    @precondition(lambda self: self.links)
    @rule(engine=st.sampled_from(ENGINES), index=PICKS, count=st.integers(0, MAX_BLOCKS))
    def register(self, engine, index, count):
        names = [name for name in self.model.pushes if name not in self.model.registered]
        if engine in self.links:
            self.register_one(engine, names[index % len(names)] if names else self.fresh(), count)

    def registrations(self):
        return [
            (name, *record["reg"][:2])
            for name, record in [*self.model.pushes.items(), *self.model.held.items()]
            if record["reg"] and record["reg"][0] in self.links and not record.get("unlinked")
        ] + [(name, *entry[:2]) for name, entry in self.model.waiting.items() if not isinstance(entry, str)]

    @rule(index=PICKS, is_foreign=st.booleans())
    def decode_cancels(self, index, is_foreign):
        known = self.registrations()
        if known:
            name, engine, epoch = known[index % len(known)]
            speaker = ENGINES[1 - ENGINES.index(engine)] if is_foreign else engine
            if speaker in self.links:
                self.model.cancelled_by_peer(name, speaker, epoch)
                self.say(speaker, wire.Cancel(name, epoch, FailureCode.cancelled_by_caller, "because"))

    @rule(engine=st.sampled_from(ENGINES))
    def a_link_ends(self, engine):
        if engine in self.links:
            self.model.link_lost(engine)
            link = self.links.pop(engine)
            self.asked.pop(engine, None)
            self.perform(self.core.link_closed(link, "cable", self.clock()))

    # --- the caller --------------------------------------------------------------------------------------------------

    def fresh(self):
        self.names += 1
        return f"t{self.names}"

    def push_one(self, name, count, *, last):
        record = self.model.pushes.get(name)
        first = 0 if record is None else record["count"]
        index = 0 if record is None else record["chunks"]
        self.model.push(name, count, last=last, now_s=self.clock())
        if name in self.model.pushes:
            self.model.pushes[name]["chunks"] = index + 1
        blocks = np.arange(first, first + count)
        now_s = self.clock()
        part = Part(0, (range(1),), first, blocks)
        self.perform(self.core.push(name, (part,), last=last, fenced=False, index=index, now_s=now_s))

    @rule(index=PICKS, count=st.integers(1, MAX_BLOCKS), last=st.booleans())
    def push(self, index, count, last):
        names = [name for name, entry in self.model.waiting.items() if entry != "peer gave up"]
        self.push_one(names[index % len(names)] if names and index < 6 else self.fresh(), count, last=last)

    @rule(index=PICKS, last=st.booleans())
    def push_more(self, index, last):
        names = [n for n, record in self.model.pushes.items() if not record["last"] and not record["cause"]]
        if names:
            self.push_one(names[index % len(names)], 1, last=last)

    @rule(engine=st.sampled_from(ENGINES), count=st.integers(1, MAX_BLOCKS), then=st.sampled_from(SHORT_CUTS))
    def in_flight(self, engine, count, then):
        """The short cuts to the deep states: a WRITE is posted, or would be; and then something happens to it."""
        self.hello(engine)
        name = self.fresh()
        self.push_one(name, count, last="chunk" not in then)
        self.register_one(engine, name, 0 if then == "nothing asked" else count + ("chunk" in then))
        while engine in self.asked and "no answer" not in then:
            self.metadata_comes(is_good=True)
        if "cancel" in then:
            self.cancel_one(name)
        if "no link" in then:
            self.a_link_ends(engine)
        if "more" in then and name in self.model.pushes:
            self.push_one(name, 1, last=True)
        if "late" in then:
            self.time_passes(5.1)
        for write_id in [write_id for write_id, (named, _) in self.writes.items() if named == name]:
            if "end" in then:
                self.end_write(write_id, "done")
            elif "fail" in then:
                self.end_write(write_id, "lost")

    @rule(index=PICKS)
    def cancel(self, index):
        names = [*self.model.pushes]
        if names:
            self.cancel_one(names[index % len(names)])

    def cancel_one(self, name):
        if name in self.model.pushes:
            self.model.give_up(name, "cancelled", "cancelled_by_caller")
        self.perform(self.core.cancel(name, self.clock()))

    # --- the transport -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.writes)
    @rule(index=PICKS, how=st.sampled_from(["done", "done", "done", "lost", "doubtful"]))
    def a_write_ends(self, index, how):
        self.end_write(list(self.writes)[index % len(self.writes)], how)

    def end_write(self, write_id, how):
        name, _ = self.writes.pop(write_id)
        if how == "doubtful":
            failure = TransportError(FailureCode.write_failed, "nobody knows")
            record = self.model.pushes.get(name) or self.model.held[name]
            del record["flying"][write_id]
            record.setdefault("doubtful", set()).add(write_id)
            self.model.doubt(name, "write_failed", self.clock())
            self.perform(self.core.write_doubted(write_id, failure, self.clock()))
            return
        failure = None if how == "done" else TransportError(FailureCode.peer_lost, "reset", disconnected=True)
        self.model.settled(name, write_id, None if failure is None else "peer_lost", self.clock())
        self.perform(self.core.write_settled(write_id, failure, self.clock()))

    # --- time --------------------------------------------------------------------------------------------------------

    @rule(step_s=st.sampled_from([0.01, 0.5, 1.0, 3.1, 5.1]))
    def time_passes(self, step_s):
        end_s = self.clock() + step_s
        while (due_s := self.core.next_due_s()) is not None and due_s <= end_s:
            self.clock.set(max(due_s, self.clock()))
            now_s = self.clock()
            for name, stall_s in list(self.writes.values()):
                if stall_s <= now_s:
                    self.model.doubt(name, "write_stalled", now_s)
            self.model.time_is(now_s)
            self.perform(self.core.tick(now_s))
        self.clock.set(end_s)

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def sizes_agree(self):
        gauges = self.core.gauges()
        waiting = [entry for entry in self.model.waiting.values() if not isinstance(entry, str)]
        assert gauges["pushes_open"] == len(self.model.pushes)
        assert gauges["pushes_held"] == len(self.model.held)
        assert gauges["registrations_waiting"] == len(waiting)
        assert gauges["writes_in_flight"] == len(self.writes)

    def teardown(self):
        """With no link left, everything ends by its own time."""
        for engine in ENGINES:
            self.a_link_ends(engine)
        for _ in range(4):
            self.time_passes(5.1)
        assert not self.model.pushes
        assert not self.model.held
        assert self.core.num_pushes == 0


@pytest.mark.timeout(600)
def test_the_prefill_core_agrees_with_the_model_and_every_row_is_taken():
    wanted = {("push", str(state), str(row.trigger)) for row in PUSH.rows for state in row.sources} - ELSEWHERE
    with counting_rows() as rows:
        run_to_cover(PrefillMachine, lambda: wanted - set(rows), steps=40)
