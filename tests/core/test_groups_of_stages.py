"""Pipeline stages that lack a group: served where both sides come to the same about who writes, else refused."""

import random

import numpy as np
import pytest
import torch
from core_worlds import make_config

from kvpush import wire
from kvpush.decode import DecodeCore
from kvpush.decode_effects import Dial, Send
from kvpush.identity import new_identity
from kvpush.layout import KVCacheSpec, KVGroup, geometry_of
from kvpush.parallel import Share
from kvpush.prefill import PrefillCore
from kvpush.receives import Place, Source
from kvpush.registry import Registry

BOTH = ("att", "mla")


def rank_of(engine_id, share, groups):
    """Four heads in one group, none in the other: its identity and its geometry."""
    tensors = {
        "att": ("a", torch.zeros(4, 2, max(1, 4 // share.tp_size), 16, 64), "BKHND", 4),
        "mla": ("m", torch.zeros(4, 16, 64), "BND", None),
    }
    cache = {tensors[group][0]: tensors[group][1] for group in groups}
    spec = KVCacheSpec(
        dims="BKHND",
        tp_rank=share.tp_rank,
        tp_size=share.tp_size,
        pp_rank=share.pp_rank,
        pp_size=share.pp_size,
        groups=[
            KVGroup(group, [tensors[group][0]], dims=tensors[group][2], total_kv_heads=tensors[group][3])
            for group in groups
        ],
    )
    geometry = geometry_of(cache, spec)
    return new_identity(engine_id, spec, geometry), geometry


def answer(prefill_share, prefill_groups, decode_share, decode_groups):
    """What prefill says to a decode rank's Hello."""
    ours, geometry = rank_of("p0", prefill_share, prefill_groups)
    theirs, _ = rank_of("d0", decode_share, decode_groups)
    config = make_config()
    core = PrefillCore(ours, config, Registry(config, lambda: 100.0, random.Random(1)), geometry)
    hello = wire.Hello(
        "d0",
        theirs.incarnation,
        theirs.share,
        "p0",
        ours.share,
        theirs.fingerprint,
        theirs.block_sizes_tokens,
        theirs.agent_name,
        dial=1,
    )
    return core.message(b"link", hello, 100.0)[-1].message


def share_of(tp, tp_size, pp=0, pp_size=1):
    return Share(pp_rank=pp, pp_size=pp_size, tp_rank=tp, tp_size=tp_size)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((share_of(2, 4), BOTH), (share_of(1, 2, 1, 2), ["mla"])),  # decode has the stages
        ((share_of(2, 4, 1, 2), ["mla"]), (share_of(1, 2), BOTH)),  # prefill has them
    ],
)
def test_where_they_would_not_agree_it_is_said_and_not_waited_out(prefill, decode):
    refused = answer(*prefill, *decode)
    assert isinstance(refused, wire.Refused)
    assert refused.code == "incompatible"
    assert "group 'att' is only on one side" in refused.reason
    assert "give every pipeline stage a layer of every group" in refused.reason


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((share_of(2, 4), BOTH), (share_of(1, 2, 1, 2), BOTH)),
        ((share_of(1, 2), BOTH), (share_of(1, 2, 1, 2), ["mla"])),  # equal tp
        ((share_of(0, 1), BOTH), (share_of(0, 1, 1, 2), ["att"])),
    ],
)
def test_where_they_agree_a_stage_may_lack_a_group(prefill, decode):
    assert isinstance(answer(*prefill, *decode), wire.Welcome)


def groups_asked_for(decode_share, decode_groups, prefill_share, prefill_groups, with_blocks=None):
    """Of a prefill rank, in the order in which that rank holds them. ``with_blocks``: some of the groups of decode."""
    ours, geometry = rank_of("d0", decode_share, decode_groups)
    theirs, _ = rank_of("p0", prefill_share, prefill_groups)
    config = make_config()
    core = DecodeCore(ours, b"blob", geometry, config, Registry(config, lambda: 100.0, random.Random(1)))
    addresses = {
        (pp, tp): ("host", 10 * pp + tp) for pp in range(theirs.share.pp_size) for tp in range(theirs.share.tp_size)
    }
    effects = core.expect(
        "t",
        tuple(Place(group, 0, np.array([1, 2])) for group in with_blocks or decode_groups),
        num_blocks=2,
        source=Source("p0", theirs.share.pp_size, theirs.share.tp_size, addresses),
        deadline_s=10.0,
        now_s=100.0,
    )
    (link,) = [e.link for e in effects if isinstance(e, Dial) and e.address == addresses[theirs.share.rank]]
    core.link_opened(link, 100.0)
    welcome = wire.Welcome("p0", theirs.incarnation, theirs.share, theirs.holdings, theirs.agent_name)
    (registration,) = [
        effect.message
        for effect in core.message(link, welcome, 100.0)
        if isinstance(effect, Send) and isinstance(effect.message, wire.Register)
    ]
    return [want.group for want in registration.wants]


def test_a_group_that_decode_lacks_is_passed_over():
    assert groups_asked_for(share_of(0, 1), ["mla"], share_of(0, 1), ["att", "mla"]) == ["mla"]


def test_a_group_that_the_transfer_has_no_block_in_is_passed_over():
    assert groups_asked_for(share_of(0, 1), BOTH, share_of(0, 1), BOTH, with_blocks=["mla"]) == ["mla"]


def test_a_group_that_another_rank_writes_is_passed_over():
    """The second of two ranks has heads for us; what has none is the first one's to write."""
    assert groups_asked_for(share_of(0, 1), BOTH, share_of(0, 2), ["mla", "att"]) == ["mla", "att"]
    assert groups_asked_for(share_of(0, 1), BOTH, share_of(1, 2), ["mla", "att"]) == ["att"]


@pytest.mark.parametrize("heads", ["", "x", "-1", "1" * 5000, "٣"])
def test_rule19_whatever_a_stranger_says_about_its_heads_ends_no_loop(heads):
    ours, geometry = rank_of("p0", share_of(2, 4), BOTH)
    config = make_config()
    core = PrefillCore(ours, config, Registry(config, lambda: 100.0, random.Random(1)), geometry)
    hello = wire.Hello(
        "d0",
        "i",
        share_of(1, 2),
        "p0",
        ours.share,
        {"model": "", "other.total_kv_heads": heads},
        {"other": 16},
        "agent",
        dial=1,
    )
    assert isinstance(core.message(b"link", hello, 100.0)[-1].message, wire.Refused | wire.Welcome)
