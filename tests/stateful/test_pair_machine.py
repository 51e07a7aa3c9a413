"""One prefill and two decode engines in a world where anything may break at any moment.

Hypothesis draws what the callers do, which faults strike, and how time passes; the world's oracle watches every byte,
and its checks hold after every step. Transfer ids are few, so that uses of one id collide. At the end everything is
healed, and then every transfer must come to its end within a bounded time, with nothing left of any.

Every row of the three tables must have been taken in the whole run, apart from those listed as out of reach.
"""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvpush import wire
from kvpush.config import Config
from kvpush.link import LinkMessage
from kvpush.prefill import REGISTRATION_GRACE_S
from kvpush.testing import World, scenario
from kvpush.testing.checkers import all_checkers
from kvpush.testing.rows import all_rows, counting_rows

CONFIG = replace(
    scenario.CONFIG,
    receive_deadline_s=10,
    coalesce_bytes=200,  # one block of a growing push waits for the WRITE before it, two do not
    max_tombstones=Config().max_tombstones,
    tombstone_ttl_s=Config().tombstone_ttl_s,
)
BOUND_S = 2 * (CONFIG.receive_deadline_s + CONFIG.hold_timeout_s + CONFIG.lease_s + CONFIG.stall_timeout_s)
STEPS_S = (0.0, 1.7, 4.2, 0.0003, 0.001, 0.02, 0.3, 1.0, 3.1)

# An ending push with a WRITE in flight cannot have expired: its lease stands still while it writes.
IDS = st.sampled_from(["a", "b", "c", "d"])
DECODES = st.sampled_from(["d0", "d1"])
COUNTS = st.integers(1, 4)
PICKS = st.integers(0, 7)


class PairMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = World(0, CONFIG)
        self.world.observers += all_checkers(self.world)
        self.prefill = self.world.prefill("p0", num_blocks=32)
        self.decodes = {name: self.world.decode(name, num_blocks=24) for name in ("d0", "d1")}
        self.fenced = []  # (push, chunk index, positions)

    # --- the callers -------------------------------------------------------------------------------------------------

    def held(self, engine, transfer_id):
        """A release names its id only: two uses of one id whose blocks are held could not be told apart."""
        return transfer_id in engine._held

    @rule(transfer_id=IDS, name=DECODES, count=st.integers(0, 4), first_block=st.integers(0, 2))
    def expect(self, transfer_id, name, count, first_block):
        decode = self.decodes[name]
        free = [block for block in range(decode.num_blocks) if block not in decode._granted]
        if decode.is_frozen or transfer_id in decode._open or self.held(decode, transfer_id) or len(free) < count:
            return
        decode.expect(transfer_id, free[::-1][:count], self.prefill, first_block=first_block)

    def push_chunk(self, transfer_id, count, first_block, *, last, is_fenced):
        free = [block for block in range(self.prefill.num_blocks) if self.prefill.owner_of(block) is None][:count]
        if self.prefill.is_frozen or len(free) < count:
            return
        push = self.prefill.push(transfer_id, free, first_block=first_block, last=last, fenced=is_fenced)
        if is_fenced:
            self.fenced.append((push, push.num_chunks - 1, range(first_block, first_block + count)))

    @rule(transfer_id=IDS, count=COUNTS, last=st.booleans(), is_fenced=st.booleans())
    def push(self, transfer_id, count, last, is_fenced):
        if transfer_id not in self.prefill._open and not self.held(self.prefill, transfer_id):
            self.push_chunk(transfer_id, count, 0, last=last, is_fenced=is_fenced)

    @rule(transfer_id=IDS, count=COUNTS, last=st.booleans(), is_fenced=st.booleans())
    def push_more(self, transfer_id, count, last, is_fenced):
        push = self.prefill._open.get(transfer_id)
        if push is not None and not push.has_last:
            self.push_chunk(transfer_id, count, max(push.block_ids) + 1, last=last, is_fenced=is_fenced)

    @rule(transfer_id=IDS, name=DECODES, count=COUNTS)
    def transfer(self, transfer_id, name, count):
        """The short cuts to the deep states: this one, if nothing stands in its way, to the end."""
        self.expect(transfer_id, name, count, 0)
        self.push(transfer_id, count, last=True, is_fenced=False)

    @rule(transfer_id=IDS, name=DECODES, count=COUNTS, then=st.integers(0, 3))
    def transfer_up_to_the_handshake(self, transfer_id, name, count, then):
        self.world.heal()
        self.prefill.drop_engine(name)
        self.handshakes_get_lost(is_lost=True)
        self.transfer(transfer_id, name, count)
        self.world.advance(0.02)
        if then == 1:
            self.an_engine_registers_again_for_nothing(name, transfer_id)
        elif then == 2:
            self.world.advance(CONFIG.lease_s)

    @rule(
        transfer_id=IDS,
        name=DECODES,
        count=COUNTS,
        end=st.sampled_from(["", "prefill cancels", "decode cancels", "it fails"]),
        step_s=st.sampled_from(STEPS_S),
    )
    def transfer_up_to_the_write(self, transfer_id, name, count, end, step_s):
        self.world.heal()
        self.world.hold_writes = True
        self.transfer(transfer_id, name, count)
        self.world.advance(0.02)
        if end == "prefill cancels":
            self.cancel_on_prefill(transfer_id)
        elif end == "decode cancels":
            self.cancel_on_decode(transfer_id, name)
        elif end == "it fails" and self.world.writes:
            self.world.fail_write(self.world.writes[-1], disconnected=True)
        self.world.advance(step_s)

    @rule(
        transfer_id=IDS,
        name=DECODES,
        count=COUNTS,
        is_fenced=st.booleans(),
        num_chunks=st.integers(1, 3),
        pause_s=st.sampled_from([0.0, 0.02]),
        end=st.sampled_from(["", "prefill cancels", "decode cancels"]),
    )
    def transfer_up_to_a_further_chunk(self, transfer_id, name, count, is_fenced, num_chunks, pause_s, end):
        self.world.heal()
        self.expect(transfer_id, name, count + num_chunks - 1, 0)
        self.push(transfer_id, count, last=False, is_fenced=False)
        for chunk in range(num_chunks - 1):
            self.world.advance(pause_s)
            self.push_more(transfer_id, 1, last=chunk == num_chunks - 2, is_fenced=is_fenced)
        self.world.advance(0.02)
        if end == "prefill cancels":
            self.cancel_on_prefill(transfer_id)
        elif end == "decode cancels":
            self.cancel_on_decode(transfer_id, name)

    @precondition(lambda self: self.fenced)
    @rule(index=PICKS)
    def fence_reached(self, index):
        push, chunk_index, positions = self.fenced.pop(index % len(self.fenced))
        if self.prefill._open.get(push.transfer_id) is push and not self.prefill.is_frozen:
            self.prefill.compute(push, chunk_index, positions)

    @rule(transfer_id=IDS)
    def cancel_on_prefill(self, transfer_id):
        if not self.prefill.is_frozen:
            self.prefill.cancel(transfer_id)

    @rule(transfer_id=IDS, name=DECODES)
    def cancel_on_decode(self, transfer_id, name):
        if not self.decodes[name].is_frozen:
            self.decodes[name].cancel(transfer_id)

    @rule(transfer_id=IDS, name=DECODES)
    def renew(self, transfer_id, name):
        if not self.decodes[name].is_frozen:
            self.decodes[name].renew([transfer_id], self.prefill)

    @rule(name=DECODES)
    def drop_decode(self, name):
        if not self.prefill.is_frozen:
            self.prefill.drop_engine(name)

    @rule(name=DECODES)
    def drop_prefill(self, name):
        if not self.decodes[name].is_frozen:
            self.decodes[name].drop_engine("p0")

    # --- time --------------------------------------------------------------------------------------------------------

    @rule(step_s=st.sampled_from(STEPS_S))
    def advance(self, step_s):
        self.world.advance(step_s)

    @rule(count=st.integers(1, 6))
    def a_few_events(self, count):
        for _ in range(count):
            self.world.step()

    @rule()
    def calm(self):
        """Faults one after the other show more than all of them at once."""
        self.world.heal()

    # --- faults ------------------------------------------------------------------------------------------------------

    @rule(name=DECODES)
    def cut_the_link(self, name):
        self.world.network.cut("p0", name)

    @rule(name=DECODES)
    def black_hole(self, name):
        self.world.black_hole(self.prefill, self.decodes[name])

    @rule(name=DECODES)
    def mend(self, name):
        self.world.mend(self.prefill, self.decodes[name])

    @rule(name=st.sampled_from(["p0", "d0", "d1"]))
    def freeze_or_thaw(self, name):
        engine = self.prefill if name == "p0" else self.decodes[name]
        if engine.is_frozen:
            engine.thaw()
        else:
            engine.freeze()

    @rule(name=DECODES)
    def restart_decode(self, name):
        self.decodes[name] = self.decodes[name].restart()

    @rule(luck=st.integers(0, 3))
    def restart_prefill(self, luck):
        if luck == 0:  # every other rule is about what this one destroys
            self.fenced.clear()
            self.prefill = self.prefill.restart()

    @rule(name=DECODES)
    def writes_stall_or_go_on(self, name):
        if name in self.world.stalling:
            self.world.stalling.discard(name)
            self.world.resume_writes()
        else:
            self.world.stalling.add(name)

    @rule(is_held=st.booleans())
    def hold_writes(self, is_held):
        self.world.hold_writes = is_held
        if not is_held:
            self.world.resume_writes()

    @precondition(lambda self: self.world.writes)
    @rule(index=PICKS)
    def a_write_ends(self, index):
        writes = self.world.writes
        self.world.finish(writes[index % len(writes)])

    @precondition(lambda self: self.world.writes)
    @rule(index=PICKS, disconnected=st.booleans())
    def a_write_fails(self, index, disconnected):
        writes = self.world.writes
        self.world.fail_write(writes[index % len(writes)], disconnected=disconnected)

    @rule(is_lost=st.booleans())
    def handshakes_get_lost(self, is_lost):
        """Metadata does, and nothing else."""

        def tamper(message):
            is_metadata = message.receiver == "p0" and isinstance(wire.decode_to_prefill(message.frames), wire.Metadata)
            return None if is_metadata else message.frames

        self.world.network.tamper = tamper if is_lost else None

    @rule(name=DECODES, transfer_id=IDS)
    def an_engine_registers_again_for_nothing(self, name, transfer_id):
        """Past its core: a confused engine, whose newest registration wins."""
        for link, known in list(self.prefill.core._links.items()):
            if known.hello.engine_id == name and not self.prefill.is_frozen:
                message = wire.Register(transfer_id, 2**40, (), 5000)
                self.prefill.link_event(LinkMessage(link, wire.encode(message)))
                self.world.advance(0.0)

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def the_world_is_in_order(self):
        self.world.check()
        self.world.advance(0.0)  # who has just woken up has its turn
        for observer in self.world.observers:
            observer.checked()

    @invariant()
    def the_tables_are_bounded(self):
        gauges = self.prefill.core.gauges()
        assert (
            gauges["timers"]
            <= 2 * (gauges["pushes_open"] + gauges["pushes_held"])
            + gauges["registrations_waiting"]
            + gauges["writes_in_flight"]
        )
        assert gauges["links"] <= 2
        for generation in self.prefill.core._lines._deferred:
            assert str(self.prefill.registry.state_of(generation)) in ("unknown", "handshaking")
        for write in self.prefill.core._writes._tracked.values():
            assert self.prefill.registry.pins_of(write.generation) > 0

    def teardown(self):
        self.world.heal()
        for push, chunk_index, positions in self.fenced:
            if self.prefill._open.get(push.transfer_id) is push:
                self.prefill.compute(push, chunk_index, positions)
        for push in list(self.prefill._open.values()):
            if not push.has_last:
                self.prefill.cancel(push.transfer_id)
        self.world.settle(BOUND_S)
        # an empty registration that nothing is pushed for waits for its own deadline
        self.world.advance(CONFIG.receive_deadline_s + REGISTRATION_GRACE_S + 1)
        self.world.check_settled()
        self.it_works_again()
        for engine in (self.prefill, *self.decodes.values()):
            engine.close()
        self.world.advance(BOUND_S)
        self.world.check()

    def it_works_again(self):
        """After the storm a new transfer is served."""
        for name, decode in self.decodes.items():
            receive = decode.expect(f"after {name}", [0, 1], self.prefill)
            push = self.prefill.push(f"after {name}", [0, 1])
            self.world.settle(BOUND_S)
            assert push.outcome == receive.outcome == "done", (push.finished, receive.finished)


EXAMPLES = 200
STEPS = 50


@pytest.mark.timeout(600)
def test_rules_hold_whatever_happens_and_every_row_is_taken():
    with counting_rows() as rows:
        run_state_machine_as_test(
            PairMachine,
            settings=settings(
                max_examples=max(EXAMPLES, settings().max_examples),
                stateful_step_count=STEPS,
                derandomize=True,
                deadline=None,
            ),
        )
    missing = all_rows() - set(rows)
    assert not missing, f"rows that were never taken: {sorted(missing)}"
