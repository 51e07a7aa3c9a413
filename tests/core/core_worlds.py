"""What the tests of the two cores share: short times, a world with one pair in it, and messages by name."""

import numpy as np

from kvpush import wire
from kvpush.config import Config
from kvpush.layout import DEFAULT_GROUP
from kvpush.parallel import Share
from kvpush.pushes import Leg, Link, Part, Push, Registration
from kvpush.testing import World

# Short enough that a test reads well; heartbeats, stall, hold, lease and deadline follow each other in this order.
CONFIG = Config(
    handshake_timeout_s=1,
    handshake_backoff_min_s=0.1,
    handshake_backoff_max_s=0.5,
    heartbeat_interval_s=0.5,
    liveness_timeout_s=2,
    engine_ttl_s=60,
    evict_grace_s=5,
    stall_timeout_s=3,
    hold_timeout_s=6,
    lease_s=10,
    receive_deadline_s=30,
)

SOON_S = 0.05  # a few messages to and fro
SETTLED_S = 120.0  # longer than any chain of timeouts above


def make_config(**overrides):
    values = {name: getattr(CONFIG, name) for name in CONFIG.__slots__}
    return Config(**(values | overrides))


def make_world(seed=0, **overrides):
    return World(seed, make_config(**overrides))


def make_pair(seed=0, **overrides):
    """A world with one prefill and one decode engine that have not met."""
    world = make_world(seed, **overrides)
    return world, world.prefill("p0"), world.decode("d0")


def connect(world, prefill, *decodes):
    """Have one transfer of one block done with each, so that every handshake is over."""
    for decode in decodes:
        receive = decode.expect(f"connect {decode.engine_id}", [15], prefill)
        prefill.push(f"connect {decode.engine_id}", [15])
        world.run_until(lambda receive=receive: receive.is_over, SETTLED_S)
        assert receive.outcome == "done"
    world.advance(SOON_S)


def make_connected(seed=0, **overrides):
    world, prefill, decode = make_pair(seed, **overrides)
    connect(world, prefill, decode)
    return world, prefill, decode


def run_to_the_end(world):
    """Every transfer has its outcome and its blocks, late WRITEs have ended, and nothing is left of any."""
    world.settle(SETTLED_S)
    world.advance(SOON_S)
    world.check_settled()


def decoded(message):
    """A message in transit, whichever way it goes."""
    for decode_it in (wire.decode_to_prefill, wire.decode_to_decode):
        try:
            return decode_it(message.frames)
        except wire.RemoteProtocolError:
            continue
    return None


def is_a(kind):
    """For FakeNetwork.hold: messages of this kind."""
    return lambda message: isinstance(decoded(message), kind)


def lose(kind):
    """For FakeNetwork.tamper: lose messages of this kind."""
    return lambda message: None if isinstance(decoded(message), kind) else message.frames


def replace(kind, change):
    """For FakeNetwork.tamper: ``change`` makes another message of each of this kind."""

    def tamper(message):
        found = decoded(message)
        return wire.encode(change(found)) if isinstance(found, kind) else message.frames

    return tamper


def part(first_block, *blocks):
    """What one call brings of the only group, in all its layers."""
    return (Part(0, (range(2),), first_block, np.array(blocks, dtype=np.int64)),)


def make_leg(name="t", epoch=1, engine_id="d0"):
    """A push with one leg."""
    hello = wire.Hello(engine_id, "life 1", Share(), "p0", Share(), {}, {}, f"{engine_id}/0.0#1", 1)
    link = Link(b"1", hello, frozenset({(0, 0)}), {})
    push = Push(name, opened_s=0.0)
    leg = push.legs[link.rank] = Leg(push, Registration(link, name, epoch, (), due_s=1.0), {})
    return leg


def register(transfer_id, epoch, block_ids, first_block=0, remaining_ms=10_000, group=DEFAULT_GROUP):
    """A Register with one list of blocks: ids, or bytes that are sent as they are."""
    packed = block_ids if isinstance(block_ids, bytes) else wire.pack_block_ids(np.array(block_ids, dtype=np.int64))
    return wire.Register(transfer_id, epoch, (wire.Want(group, first_block, packed),), remaining_ms)


def written(epoch, *spans, rank=(0, 0), num_layers=2, chunk=0):
    """A notification's payload. A span is (first slot, number of slots) of all layers of the only group, or whole."""
    whole = tuple(wire.Span(0, 0, num_layers, *span) if len(span) == 2 else wire.Span(*span) for span in spans)
    return wire.encode_written(wire.Written(epoch, rank, chunk, whole))


def welcome_of(prefill):
    """What this prefill engine says to those that it accepts."""
    ours = prefill.identity
    return wire.Welcome(ours.engine_id, ours.incarnation, ours.share, ours.holdings, ours.agent_name)


def only_engine(owner):
    """The only engine that it knows, living or remembered."""
    (snapshot,) = owner.registry.snapshot()
    return snapshot


def states(owner, engine_id):
    """The states that an engine went through, oldest first."""
    return [str(change.dest) for change in owner.registry.transitions() if change.engine_id == engine_id]
