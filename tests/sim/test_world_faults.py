"""The faults of the world do what their names say."""

from kvpush.config import Config
from kvpush.testing import Observer, World
from kvpush.testing.checkers import all_checkers
from kvpush.testing.scenario import CONFIG, draw
from kvpush.testing.simulation import ACTIONS

SOON_S = 0.05


def make_pair(**settings):
    world = World(3, Config(**settings) if settings else CONFIG)
    world.observers += all_checkers(world)
    prefill, decode = world.prefill("p0"), world.decode("d0")
    decode.expect("first", [0], prefill)
    prefill.push("first", [0])
    world.advance(SOON_S)
    return world, prefill, decode


class Handled(Observer):
    """What prefill was given, and over which links its sender was still there."""

    def __init__(self):
        self.names = []

    def handled(self, engine, peer, message):
        if engine.engine_id == "p0":
            self.names.append(type(message).__name__)


def test_a_severed_link_s_messages_come_after_the_next_link_s_first():
    world, prefill, decode = make_pair()
    seen = Handled()
    world.observers.append(seen)
    decode.expect("t", [1], prefill)  # its Register is under way when the link breaks
    assert world.network.sever("p0", "d0", arriving=1, notice_s=(0.0001, 1.0)) == 1
    world.advance(2.0)
    assert seen.names.index("Hello") < seen.names.index("Register")
    assert seen.names.count("Register") == 2, "late over the old link, and again over the new one"
    prefill.push("t", [1])
    world.settle(20)


def test_what_is_sent_into_a_severed_link_is_lost_until_its_end_is_noticed():
    world, prefill, decode = make_pair()
    world.network.sever("p0", "d0", arriving=0, notice_s=(0.5, 0.5))
    seen = Handled()
    world.observers.append(seen)
    decode.expect("t", [1], prefill)
    world.advance(0.4)
    assert seen.names == []
    world.advance(2.0)
    assert seen.names[:2] == ["Hello", "Register"]


def test_a_full_send_queue_ends_the_link_on_both_sides():
    world, prefill, decode = make_pair()
    assert world.network.choke("d0", "p0")
    decode.expect("t", [1], prefill)
    world.advance(0.01)
    assert world.network.num_links("p0", "d0") == 0
    prefill.push("t", [1])
    world.settle(20)
    assert decode.receives[-1].outcome == "done"


def test_a_doubtful_write_is_reported_as_failed_and_lands():
    world, prefill, decode = make_pair()
    world.write_fate = lambda write: world.doubt_write(write, 1.0) is None
    receive, push = decode.expect("t", [1], prefill), prefill.push("t", [1])
    world.advance(0.5)
    assert (push.code, push.is_free, receive.landed) == ("write_failed", False, set())
    world.advance(1.0)
    assert receive.landed == {0}
    world.heal()
    world.settle(20)


def test_a_suspended_machine_s_clock_misses_the_pause():
    world, prefill, decode = make_pair()
    before_s = decode.now_s()
    decode.freeze()
    world.advance(3.0)
    decode.thaw(clock_stood_s=3.0)
    assert decode.now_s() == before_s
    world.advance(1.0)
    assert abs(decode.now_s() - before_s - 1.0) < 1e-9


def test_untouched_links_are_told_from_touched_ones():
    world, prefill, decode = make_pair()
    assert len(world.network.pristine(decode, prefill)) == 1
    world.network.delay("p0", "d0", 0.001)
    assert world.network.pristine(decode, prefill) == set()


def test_a_seed_means_the_same_steps_every_time_and_another_seed_others():
    assert draw(5, ACTIONS) == draw(5, ACTIONS)
    assert draw(5, ACTIONS).steps != draw(6, ACTIONS).steps
