"""Rules 17 and 19: peers that say anything at any time, from a handful of ids and epochs, so that everything meets."""

import random
from dataclasses import replace

import pytest
from rank_cores import Decode, Other, Prefill, address_of, source_of

from kvpush import wire
from kvpush.errors import Failure, FailureCode, TransportError
from kvpush.parallel import Share

NUM_SEEDS = 150
NUM_EVENTS = 120
NAMES = ("t", "u", "v")
SURVIVE = ("tombstones", "timers")  # what is remembered, and what is due for it
SETTINGS = {
    "max_engines": 4,
    "max_tombstones": 4,
    "max_deferred_per_engine": 3,
    "max_write_bytes": 1,
    "engine_ttl_s": 8,
    "tombstone_ttl_s": 5,
    "liveness_timeout_s": 6,
}


def withdrawn(kind, draw):
    return kind(draw.choice(NAMES), draw.randrange(4), FailureCode.cancelled_by_caller, "?")


def to_prefill(draw):
    """Anything but Hello and metadata, which :func:`test_nothing_that_decode_says_breaks_prefill` sends by the book."""
    name, epoch = draw.choice(NAMES), draw.randrange(4)
    packed = b"".join(draw.randrange(20).to_bytes(4, "little") for _ in range(draw.randrange(4)))
    want = wire.Want("kv", draw.randrange(2), packed)
    return draw.choice(
        [
            wire.Register(name, epoch, (want,) if packed else (), draw.choice([50, 3000])),
            wire.Register(name, epoch, (want,) if packed else (), 3000),
            withdrawn(wire.Cancel, draw),
            withdrawn(wire.Withdraw, draw),
            wire.Renew([name]),
            wire.Heartbeat(),
            wire.MetadataUnavailable(draw.randrange(6), FailureCode.not_ready, "?"),
            wire.Goodbye("?"),
        ]
    )


@pytest.mark.parametrize("first_seed", range(0, NUM_SEEDS, 50))
def test_nothing_that_decode_says_breaks_prefill(first_seed):
    for seed in range(first_seed, first_seed + 50):
        draw = random.Random(seed)
        prefill = Prefill(eager_handshake=draw.random() < 0.3, **SETTINGS)
        others = [Other(f"d{n % 2}", Share(tp_rank=n // 2, tp_size=2)) for n in range(4)]
        others[3].identity = replace(others[3].identity, incarnation=others[1].identity.incarnation)
        num_chunks = dict.fromkeys(NAMES, 0)
        for _ in range(NUM_EVENTS):
            other, name = draw.choice(others), draw.choice(NAMES)
            match draw.randrange(12):
                case 0:
                    prefill.meets(other)
                case 1 if any(link == other.link and isinstance(m, wire.MetadataRequest) for link, m in prefill.sent):
                    prefill.answers(other)
                case 2 | 3:
                    is_new = name not in prefill.core._pushes
                    num_chunks[name] = 0 if is_new else num_chunks[name] + 1
                    index = num_chunks[name]
                    prefill.push(name, [index % 8], index=index, first_block=index, last=draw.random() < 0.4)
                case 4 | 5 if prefill.posted:
                    ends = [
                        None,
                        None,
                        TransportError(FailureCode.write_failed, "?"),
                        Failure(FailureCode.internal, "?"),
                    ]
                    prefill.settles(draw.choice(list(prefill.posted)), draw.choice(ends))
                case 6:
                    prefill.do(prefill.core.cancel(name, prefill.now_s))
                case 7:
                    prefill.advance(draw.choice([0.05, 0.5, 2.0]))
                case 8 if draw.random() < 0.3:
                    prefill.do(prefill.core.link_closed(other.link, "gone", prefill.now_s))
                case _:
                    prefill.hears(other, to_prefill(draw))
        for write_id in list(prefill.posted):
            prefill.settles(write_id)
        prefill.do(prefill.core.close(prefill.now_s))
        for write_id in list(prefill.posted):
            prefill.settles(write_id)
        prefill.do(prefill.core.transport_closed(prefill.now_s))
        left = {gauge: size for gauge, size in prefill.core.gauges().items() if size and gauge not in SURVIVE}
        assert not left, (seed, left)
        assert len(prefill.registry) == 0, seed


def to_decode(draw):
    """Anything but Welcome, which :func:`test_nothing_that_prefill_says_breaks_decode` sends by the book."""
    name, epoch = draw.choice(NAMES), draw.randrange(1, 9)
    codes = [FailureCode.internal, FailureCode.queue_full, FailureCode.superseded, FailureCode.cancelled_by_peer]
    return draw.choice(
        [
            wire.Failed(name, epoch, draw.choice(codes), "?", settled=draw.random() < 0.5),
            wire.Drained(name, epoch),
            wire.Writing(epoch),
            wire.MetadataRequest(draw.randrange(4)),
            wire.Heartbeat(),
            wire.Refused(draw.choice([FailureCode.incompatible, FailureCode.queue_full]), "?"),
            wire.Goodbye("?"),
        ]
    )


@pytest.mark.parametrize("first_seed", range(0, NUM_SEEDS, 50))
def test_nothing_that_prefill_says_breaks_decode(first_seed):
    for seed in range(first_seed, first_seed + 50):
        draw = random.Random(seed)
        decode = Decode(handshake_attempts=draw.choice([2, 1000]), **(SETTINGS | {"max_engines": 2}))
        left, right = (Other("p0", Share(tp_rank=rank, tp_size=2)) for rank in (0, 1))
        for _ in range(NUM_EVENTS):
            other, name = draw.choice([left, right]), draw.choice(NAMES)
            is_linked = decode.dialled.get(address_of(other)) in decode.core._links
            epoch = draw.randrange(1, 9)
            match draw.randrange(12):
                case 0 | 1 if name not in decode.core._open:
                    decode.expect(name, [5, 6][: draw.randrange(3)], [left, right], deadline_s=draw.choice([1, 20]))
                case 2 | 3 if is_linked:
                    decode.meets(other)
                case 4 if is_linked:
                    decode.loses(other, refused=draw.random() < 0.3)
                case 5 | 6:
                    decode.arrives(other, epoch, draw.randrange(3), draw.randrange(1, 3))
                case 7:
                    decode.do(decode.core.cancel(name, decode.now_s))
                case 8:
                    decode.advance(draw.choice([0.05, 0.5, 2.0]))
                case 9 if draw.random() < 0.3:
                    source = source_of([left, right])
                    decode.do(decode.core.renew([name], source=source, now_s=decode.now_s))
                case 10 if draw.random() < 0.1:
                    decode.do(decode.core.drop_engine("p0", decode.now_s))
                case _ if is_linked:
                    decode.hears(other, to_decode(draw))
        decode.advance(20)  # all deadlines
        assert not decode.core._open, seed
        decode.advance(decode.config.hold_timeout_s)
        decode.do(decode.core.close(decode.now_s))
        decode.do(decode.core.transport_closed(decode.now_s))
        ended = [event.transfer_id for event in decode.events if hasattr(event, "outcome")]
        assert len(ended) == decode.core.counters["receives"], seed
        assert decode.core.num_receives == 0, seed
