"""One core by itself, without a world: a rank of one engine, and the ranks of the other played by the test."""

from __future__ import annotations

import random

import numpy as np
import torch
from core_worlds import make_config

from kvpush import decode, decode_effects, metadata, prefill_effects, receives, wire
from kvpush.identity import new_identity
from kvpush.layout import KVCacheSpec, geometry_of
from kvpush.parallel import Share
from kvpush.peer import Peer
from kvpush.plan import pair
from kvpush.prefill import PrefillCore
from kvpush.pushes import Part
from kvpush.registry import Registry

LAYERS = ("a", "b")
BLOCKS = 16
TOTAL_HEADS = 4
ALONE = Share()
ALL_LAYERS = range(len(LAYERS))


def make_cache(share, layers=LAYERS, total_heads=TOTAL_HEADS, tokens=16, blocks=BLOCKS, groups=()):
    """Tensors of one rank, its spec and its geometry."""
    heads = max(1, total_heads // share.tp_size)
    tensors = {layer: torch.zeros(blocks, 2, heads, tokens, 64, dtype=torch.float16) for layer in layers}
    spec = KVCacheSpec(
        dims="BKHND",
        model="m",
        tp_rank=share.tp_rank,
        tp_size=share.tp_size,
        pp_rank=share.pp_rank,
        pp_size=share.pp_size,
        total_kv_heads=total_heads,
        groups=groups,
    )
    return tensors, spec, geometry_of(tensors, spec)


class Other:
    """A rank of the other engine: who it says it is."""

    def __init__(self, engine_id, share, **cache):
        self.tensors, spec, self.geometry = make_cache(share, **cache)
        self.identity = new_identity(engine_id, spec, self.geometry)
        self.link = self.identity.agent_name.encode()


class _Rank:
    """What the ranks of both sides have in common."""

    def __init__(self, share=ALONE, *, layers=LAYERS, total_heads=TOTAL_HEADS, tokens=16, groups=(), **settings):
        self.now_s = 100.0
        self.config = make_config(**settings)
        self.tensors, spec, self.geometry = make_cache(share, layers, total_heads, tokens, groups=groups)
        self.identity = new_identity(self.engine_id, spec, self.geometry)
        self.registry = Registry(self.config, lambda: self.now_s, random.Random(1))
        self.sent, self.events = [], []

    def advance(self, seconds):
        self.now_s += seconds
        due_s = self.core.next_due_s()
        while due_s is not None and due_s <= self.now_s:
            self.do(self.core.tick(self.now_s))
            due_s = self.core.next_due_s()


class Prefill(_Rank):
    """A prefill rank's core, and everything that it asked for so far."""

    engine_id = "p0"

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.core = PrefillCore(self.identity, self.config, self.registry, self.geometry)
        self.posted, self.released, self.warnings = {}, [], []

    def do(self, effects):
        for effect in effects:
            match effect:
                case prefill_effects.Send():
                    self.sent.append((effect.link, effect.message))
                case prefill_effects.PostWrite():
                    self.posted[effect.write_id] = effect
                case prefill_effects.Emit():
                    self.events.append(effect.event)
                case prefill_effects.Warn():
                    self.warnings.append(effect.text)
                case prefill_effects.ReleasePeer():
                    self.released.append(effect.peer)
                case prefill_effects.LoadPeer():
                    plan = pair(
                        self.geometry,
                        effect.geometry,
                        local_share=self.identity.share,
                        remote_share=effect.share,
                        min_tile_bytes=1,
                    )
                    peer = Peer(None if plan.writes_nothing else len(self.sent) + 1, plan)
                    self.do(self.core.peer_loaded(effect.generation, effect.attempt, peer, self.now_s))

    def hears(self, other, message):
        self.do(self.core.message(other.link, message, self.now_s))

    def meets(self, *others, expected_share=None, dial=1):
        """They say Hello; with their metadata when they are asked."""
        for other in others:
            theirs = other.identity
            hello = wire.Hello(
                theirs.engine_id,
                theirs.incarnation,
                theirs.share,
                "p0",
                expected_share or self.identity.share,
                theirs.fingerprint,
                theirs.block_sizes_tokens,
                theirs.agent_name,
                dial=dial,
            )
            self.hears(other, hello)

    def answers(self, *others):
        """Every handshake that waits for metadata gets it."""
        for other in others:
            asked = [m for link, m in self.sent if link == other.link and isinstance(m, wire.MetadataRequest)]
            ours = other.identity
            blob = metadata.build(asked[-1].attempt, ours.incarnation, ours.agent_name, b"blob", other.geometry)
            self.hears(other, blob)

    def registers(self, other, transfer_id, epoch, block_ids, **want):
        self.hears(other, register(transfer_id, epoch, block_ids, **want))

    def push(self, transfer_id, block_ids, *, index=0, first_block=0, last=True, layers=None, fenced=False):
        runs = (range(len(LAYERS)),) if layers is None else layers
        part = Part(0, runs, first_block, np.array(block_ids, dtype=np.int64))
        self.do(self.core.push(transfer_id, (part,), last=last, fenced=fenced, index=index, now_s=self.now_s))

    def settles(self, write_id, failure=None):
        del self.posted[write_id]
        self.do(self.core.write_settled(write_id, failure, self.now_s))

    def told(self, other, kind):
        """The messages of this kind that this rank was sent."""
        return [message for link, message in self.sent if link == other.link and isinstance(message, kind)]

    def write_to(self, other):
        """The id of the one WRITE in flight to this rank."""
        (write_id,) = [
            write_id
            for write_id, effect in self.posted.items()
            if effect.peer.plan.remote_rows[0, 0] in addresses(other)
        ]
        return write_id

    def spans(self, write_id):
        return wire.decode_written(self.posted[write_id].notification).spans


def addresses(other):
    """Where any head of any layer of this rank's cache begins."""
    heads = range(other.geometry.groups[0].axis_size("H"))
    step = other.geometry.groups[0].layers[0].strides_bytes[2]
    return {layer.address + head * step for layer in other.geometry.groups[0].layers for head in heads}


def register(transfer_id, epoch, block_ids, *, first_block=0, num_tokens=0, remaining_ms=60_000):
    packed = wire.pack_block_ids(np.array(block_ids, dtype=np.int64))
    wants = (wire.Want("kv", first_block, packed, num_tokens),) if len(block_ids) else ()
    return wire.Register(transfer_id, epoch, wants, remaining_ms)


class Decode(_Rank):
    """A decode rank's core, and everything that it asked for so far."""

    engine_id = "d0"

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.core = decode.DecodeCore(self.identity, b"blob", self.geometry, self.config, self.registry)
        self.dialled = {}

    def do(self, effects):
        for effect in effects:
            match effect:
                case decode_effects.Send():
                    self.sent.append((effect.link, effect.message))
                case decode_effects.Dial():
                    self.dialled[effect.address] = effect.link
                case decode_effects.Emit():
                    self.events.append(effect.event)

    def expect(self, transfer_id, block_ids, others, *, first_block=0, num_tokens=0, deadline_s=30.0):
        """``others``: all ranks of the prefill engine; the address of one is its rank."""
        place = receives.Place("kv", first_block, np.array(block_ids, dtype=np.int64), num_tokens)
        self.do(
            self.core.expect(
                transfer_id,
                (place,),
                num_blocks=len(block_ids),
                source=source_of(others),
                deadline_s=deadline_s,
                now_s=self.now_s,
            )
        )

    def hears(self, other, message):
        self.do(self.core.message(self.dialled[address_of(other)], message, self.now_s))

    def meets(self, *others):
        """Their connections stand, and they say Welcome."""
        for other in others:
            theirs = other.identity
            self.do(self.core.link_opened(self.dialled[address_of(other)], self.now_s))
            self.hears(
                other,
                wire.Welcome(theirs.engine_id, theirs.incarnation, theirs.share, theirs.holdings, theirs.agent_name),
            )

    def arrives(self, other, epoch, first_slot, num_slots, *, layers=ALL_LAYERS, agent=None):
        span = wire.Span(0, layers.start, len(layers), first_slot, num_slots)
        payload = wire.encode_written(wire.Written(epoch, other.identity.rank, 0, (span,)))
        self.do(self.core.notified(agent or other.identity.agent_name, payload, self.now_s))

    def loses(self, other, *, refused=False):
        self.do(self.core.link_closed(self.dialled[address_of(other)], "gone", self.now_s, refused=refused))

    def told(self, other, kind):
        link = self.dialled[address_of(other)]
        return [message for to, message in self.sent if to == link and isinstance(message, kind)]


def source_of(others):
    """All ranks of the prefill engine."""
    sizes = others[0].identity.share
    return receives.Source("p0", sizes.pp_size, sizes.tp_size, {o.identity.rank: address_of(o) for o in others})


def address_of(other):
    pp, tp = other.identity.rank
    return ("127.0.0.1", 1000 + 100 * pp + tp)
