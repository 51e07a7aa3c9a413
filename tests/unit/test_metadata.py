"""kvpush.metadata: nothing that is not what its owner sealed reaches NIXL."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpush import wire
from kvpush.errors import Failure, FailureCode
from kvpush.layout import KVCacheSpec, geometry_of
from kvpush.metadata import MAX_BLOB_BYTES, build, verify

CACHES = {name: torch.zeros(4, 2, 3, dtype=torch.bfloat16) for name in "ab"}
GEOMETRY = geometry_of(CACHES, KVCacheSpec(dims="BND"))
BLOB = bytes(range(256)) + b"the rest of a blob"
SEALED = build(7, "incarnation-1", "d0/0.0#incarnation-1", BLOB, GEOMETRY)
FRAMES = wire.encode(SEALED)
LINK = {"incarnation": "incarnation-1", "agent_name": "d0/0.0#incarnation-1"}


def with_group(**changes):
    return msgspec.structs.replace(GEOMETRY, groups=(msgspec.structs.replace(GEOMETRY.groups[0], **changes),))


OTHER = build(7, "incarnation-2", "d1/0.0#incarnation-2", BLOB[::-1], with_group(num_blocks=5))


def changed(**changes):
    return msgspec.structs.replace(SEALED, **changes)


def refused(message, link=LINK):
    with pytest.raises(Failure) as caught:
        verify(message, **link)
    return caught.value


def test_what_was_sealed_is_believed():
    (arrived,) = [wire.decode_to_prefill(FRAMES)]
    assert isinstance(arrived, wire.Metadata) and arrived.attempt == 7 and arrived.blob == BLOB
    assert verify(arrived, **LINK) == GEOMETRY


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_j5_no_flipped_byte_gets_through(mask):
    """Every byte of the message as it travels: it does not decode, or is refused, or only named another attempt."""
    preamble, body = FRAMES
    outcomes = {"undecodable": 0, "refused": 0, "another attempt": 0}
    for position in range(len(body)):
        flipped = body[:position] + bytes([body[position] ^ mask]) + body[position + 1 :]
        try:
            message = wire.decode_to_prefill([preamble, flipped])
        except Failure:
            outcomes["undecodable"] += 1
            continue
        assert isinstance(message, wire.Metadata)
        try:
            verify(message, **LINK)
        except Failure:
            outcomes["refused"] += 1
        else:
            assert message == changed(attempt=message.attempt)
            outcomes["another attempt"] += 1
    assert outcomes["refused"] > len(BLOB) and outcomes["another attempt"] <= 1


@pytest.mark.parametrize("field", ["blob", "geometry", "digest"])
def test_j5_no_flipped_bit_of_a_part_gets_through(field):
    part = getattr(SEALED, field)
    for position in range(len(part)):
        for bit in range(8):
            flipped = part[:position] + bytes([part[position] ^ (1 << bit)]) + part[position + 1 :]
            assert refused(changed(**{field: flipped})).code is FailureCode.bad_metadata


@pytest.mark.parametrize("field", ["blob", "geometry", "digest"])
def test_j6_no_truncation_gets_through(field):
    part = getattr(SEALED, field)
    for length in range(len(part)):
        message = changed(**{field: part[:length]})
        assert refused(message).code is FailureCode.bad_metadata
        assert (
            refused(msgspec.structs.replace(message, blob_len_bytes=len(message.blob))).code is FailureCode.bad_metadata
        )


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (OTHER, ["incarnation-1", "incarnation-2"]),
        (changed(incarnation="incarnation-2"), ["incarnation-1", "incarnation-2"]),
        (changed(agent_name="d1/0.0#incarnation-2"), ["d0/0.0#incarnation-1", "d1/0.0#incarnation-2"]),
        (changed(blob=b""), ["0 bytes", "274"]),
        (changed(blob=b"", blob_len_bytes=0), ["0 bytes"]),
        (changed(blob_len_bytes=275), ["274", "275"]),
        (changed(blob=BLOB + b"x"), ["275", "274"]),
        (changed(blob=OTHER.blob), ["digest"]),
        (changed(digest=OTHER.digest), ["digest"]),
        (changed(geometry=OTHER.geometry + b"\x00"), ["digest"]),
        (changed(digest=b""), ["digest"]),
        (changed(blob=SEALED.geometry, geometry=BLOB, blob_len_bytes=len(SEALED.geometry)), ["digest"]),
        (changed(blob=BLOB[:-1], geometry=BLOB[-1:] + SEALED.geometry, blob_len_bytes=len(BLOB) - 1), ["digest"]),
    ],
)
def test_j5_foreign_and_swapped_parts_are_refused(message, named):
    failure = refused(message)
    assert failure.code is FailureCode.bad_metadata and failure.is_retryable
    assert all(text in failure.reason for text in named), failure.reason


def test_j5_the_seal_of_another_agent_does_not_open_here():
    """Both names replaced by this link's: the digest still tells."""
    assert "digest" in refused(msgspec.structs.replace(OTHER, **LINK)).reason


def test_names_cannot_flow_into_each_other():
    one, two = build(1, "a", "bc", BLOB, GEOMETRY), build(1, "ab", "c", BLOB, GEOMETRY)
    assert one.digest != two.digest


def test_a_blob_above_the_limit_is_refused_unread():
    huge = build(7, **LINK, blob=bytes(MAX_BLOB_BYTES + 1), geometry=GEOMETRY)
    assert str(MAX_BLOB_BYTES) in refused(huge).reason
    verify(build(7, **LINK, blob=bytes(MAX_BLOB_BYTES), geometry=GEOMETRY), **LINK)


@pytest.mark.parametrize(
    "early", [with_group(num_blocks=0), with_group(layers=()), msgspec.structs.replace(GEOMETRY, groups=())]
)
def test_a9_well_sealed_but_too_early_is_not_ready(early):
    failure = refused(build(7, **LINK, blob=BLOB, geometry=early))
    assert failure.code is FailureCode.not_ready and failure.is_retryable


def test_well_sealed_nonsense_is_refused_all_the_same():
    nonsense = with_group(num_blocks=99)
    assert refused(build(7, **LINK, blob=BLOB, geometry=nonsense)).code is FailureCode.bad_metadata


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "incarnation": st.text(min_size=1, max_size=20),
            "agent_name": st.text(min_size=1, max_size=20),
            "blob_len_bytes": st.integers(0, 2**31 - 1),
            "digest": st.binary(max_size=64),
            "blob": st.binary(max_size=64),
            "geometry": st.binary(max_size=64),
        },
    ).filter(bool)
)
def test_j5_whatever_a_peer_makes_up_ends_in_a_failure(changes):
    refused(changed(**changes))
