"""The control plane's codec: round trips, the bytes of version 1, and everything a stranger may send instead."""

from __future__ import annotations

import contextlib
import pickle
import struct
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpush import wire
from kvpush.errors import FailureCode, RemoteProtocolError, UsageError
from kvpush.parallel import MAX_RANKS, Share

# --- one example of every message, and strategies for the rest ------------------------------------------------------

TO_PREFILL: list[wire.ToPrefill] = [
    wire.Hello(
        "d0", "b7e1", Share(0, 1, 1, 2), "p0", Share(1, 2), {"kv.dtype": "bfloat16"}, {"kv": 16}, "d0/0.1#b7e1", 3
    ),
    wire.Metadata(3, "b7e1", "d0/0.1#b7e1", 4, b"\x01\x02", b"blob", b"\x80"),
    wire.MetadataUnavailable(3, FailureCode.not_ready, "no memory yet"),
    wire.Register("t1", 7, (wire.Want("kv", 2, wire.pack_block_ids(np.array([7, 8, 2])), 70),), 5000),
    wire.Cancel("t1", 7, FailureCode.deadline, "too late"),
    wire.Withdraw("t1", 7, FailureCode.deadline, "too late"),
    wire.Renew(["t1", "t2"]),
    wire.Heartbeat(),
    wire.Goodbye("closing"),
]
TO_DECODE: list[wire.ToDecode] = [
    wire.Welcome("p0", "c0de", Share(1, 2), (wire.Holding("kv", 16, ("layers.8", "layers.9")),), "p0/1.0#c0de"),
    wire.Refused(FailureCode.incompatible, "dtype: here bfloat16, there float16"),
    wire.MetadataRequest(3),
    wire.Writing(7),
    wire.Failed("t1", 7, FailureCode.write_failed, "NIXL: disconnected", False),
    wire.Drained("t1", 7),
    wire.Heartbeat(),
    wire.Goodbye("closing"),
]
EVERY_MESSAGE = [(wire.decode_to_prefill, m) for m in TO_PREFILL] + [(wire.decode_to_decode, m) for m in TO_DECODE]


def named(case: Any) -> str:
    return type(case[1]).__name__


ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=wire.MAX_ID_BYTES // 4)
reasons = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@st.composite
def shares(draw: st.DrawFn) -> Share:
    pp_size, tp_size = draw(st.integers(1, MAX_RANKS)), draw(st.integers(1, MAX_RANKS))
    return Share(draw(st.integers(0, pp_size - 1)), pp_size, draw(st.integers(0, tp_size - 1)), tp_size)


FIELD_STRATEGIES: dict[Any, st.SearchStrategy[Any]] = {
    wire.Id: ids,
    wire.Reason: reasons,
    wire.Count: st.integers(0, 2**31 - 1),
    wire.Serial: st.integers(0, 2**63 - 1),
    wire.RemainingMs: st.integers(0, wire.MAX_REMAINING_MS),
    wire.BlockIds: st.binary(max_size=64),
    wire.Fingerprint: st.dictionaries(st.text(max_size=9), reasons, max_size=8),
    wire.Tokens: st.integers(1, 2**31 - 1),  # and wire.AtLeastOne, which is the same type
    wire.GroupName: ids,  # and wire.LayerName
    wire.BlockSizes: st.dictionaries(ids, st.integers(1, 2**31 - 1), max_size=4),
    Share: shares(),
    FailureCode: st.sampled_from(FailureCode),
    bytes: st.binary(max_size=64),
    bool: st.booleans(),
}


def strategy_of(annotation: Any) -> st.SearchStrategy[Any]:
    if annotation in FIELD_STRATEGIES:
        return FIELD_STRATEGIES[annotation]
    if annotation == wire.Rank:
        return st.tuples(FIELD_STRATEGIES[wire.Count], FIELD_STRATEGIES[wire.Count])
    if "Renew" in repr(annotation) or annotation == msgspec.structs.fields(wire.Renew)[0].type:
        return st.lists(ids, max_size=5)
    for kind, name, item, most in TUPLES:
        if annotation == type_of(kind, name):
            least = int(kind is wire.Written)
            items = strategy_of(item) if item is wire.LayerName else built(item)
            return st.lists(items, min_size=least, max_size=most).map(tuple)
    raise AssertionError(f"no strategy for {annotation}")


TUPLES: list[tuple[Any, str, Any, int]] = [
    (wire.Register, "wants", wire.Want, 4),
    (wire.Welcome, "holdings", wire.Holding, 4),
    (wire.Holding, "layers", wire.LayerName, 4),
    (wire.Written, "spans", wire.Span, wire.MAX_SPANS),
]


def type_of(kind: Any, name: str) -> Any:
    return next(field.type for field in msgspec.structs.fields(kind) if field.name == name)


def built(kind: Any) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{field.name: strategy_of(field.type) for field in msgspec.structs.fields(kind)})


def messages(union: Any) -> st.SearchStrategy[Any]:
    return st.one_of(built(kind) for kind in get_args(union))


# --- round trips ----------------------------------------------------------------------------------------------------


def test_every_message_type_has_an_example():
    assert {type(m) for m in TO_PREFILL} == set(get_args(wire.ToPrefill))
    assert {type(m) for m in TO_DECODE} == set(get_args(wire.ToDecode))


@given(messages(wire.ToPrefill))
def test_round_trip_to_prefill(message):
    assert wire.decode_to_prefill(wire.encode(message)) == message


@given(messages(wire.ToDecode))
def test_round_trip_to_decode(message):
    assert wire.decode_to_decode(wire.encode(message)) == message


@given(built(wire.Written))
def test_round_trip_written(written):
    payload = wire.encode_written(written)
    assert wire.decode_written(payload) == written
    assert len(payload) <= 29 + 30 * len(written.spans) <= wire.MAX_WRITTEN_BYTES


def test_the_notification_of_a_usual_write_is_short():
    one = wire.Span(0, 0, 80, 1000, 512)
    assert len(wire.encode_written(wire.Written(10**6, (1, 7), 3, (one,)))) <= 30
    assert len(wire.encode_written(wire.Written(10**6, (1, 7), 3, (one, one)))) <= 40


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_round_trip_block_ids(block_ids):
    packed = wire.pack_block_ids(np.array(block_ids, dtype=np.int64))
    assert packed == struct.pack(f"<{len(block_ids)}I", *block_ids)
    assert wire.unpack_block_ids(packed).tolist() == block_ids


def test_block_ids_of_a_torn_length_are_refused():
    with pytest.raises(RemoteProtocolError, match="7 bytes"):
        wire.unpack_block_ids(b"\0" * 7)


@pytest.mark.parametrize("case", EVERY_MESSAGE, ids=named)
def test_the_wrong_direction_is_refused(case):
    decode, message = case
    other = wire.decode_to_decode if decode is wire.decode_to_prefill else wire.decode_to_prefill
    if isinstance(message, wire.Heartbeat | wire.Goodbye):
        assert other(wire.encode(message)) == message
    else:
        with pytest.raises(RemoteProtocolError):
            other(wire.encode(message))


# --- the bytes of protocol version 1: a change here is a new version ------------------------------------------------

GOLDEN = {
    "Hello": (
        "8aa474797065a548656c6c6fa9656e67696e655f6964a26430ab696e6361726e6174696f6ea462376531a5736861726584a7"
        "70705f72616e6b00a770705f73697a6501a774705f72616e6b01a774705f73697a6502b265787065637465645f656e67696e"
        "655f6964a27030ae65787065637465645f736861726584a770705f72616e6b01a770705f73697a6502a774705f72616e6b00"
        "a774705f73697a6501ab66696e6765727072696e7481a86b762e6474797065a862666c6f61743136b2626c6f636b5f73697a"
        "65735f746f6b656e7381a26b7610aa6167656e745f6e616d65ab64302f302e312362376531a46469616c03"
    ),
    "Metadata": (
        "88a474797065a84d65746164617461a7617474656d707403ab696e6361726e6174696f6ea462376531aa6167656e745f"
        "6e616d65ab64302f302e312362376531ae626c6f625f6c656e5f627974657304a6646967657374c4020102a4626c6f62"
        "c404626c6f62a867656f6d65747279c40180"
    ),
    "MetadataUnavailable": (
        "84a474797065b34d65746164617461556e617661696c61626c65a7617474656d707403a4636f6465a96e6f745f726561"
        "6479a6726561736f6ead6e6f206d656d6f727920796574"
    ),
    "Register": (
        "85a474797065a85265676973746572ab7472616e736665725f6964a27431a565706f636807a577616e74739194a26b7602c4"
        "0c07000000080000000200000046ac72656d61696e696e675f6d73cd1388"
    ),
    "Cancel": (
        "85a474797065a643616e63656cab7472616e736665725f6964a27431a565706f636807a4636f6465a8646561646c696e"
        "65a6726561736f6ea8746f6f206c617465"
    ),
    "Withdraw": (
        "85a474797065a85769746864726177ab7472616e736665725f6964a27431a565706f636807a4636f6465a8646561646c"
        "696e65a6726561736f6ea8746f6f206c617465"
    ),
    "Renew": "82a474797065a552656e6577ac7472616e736665725f69647392a27431a27432",
    "Heartbeat": "81a474797065a9486561727462656174",
    "Goodbye": "82a474797065a7476f6f64627965a6726561736f6ea7636c6f73696e67",
    "Welcome": (
        "86a474797065a757656c636f6d65a9656e67696e655f6964a27030ab696e6361726e6174696f6ea463306465a57368617265"
        "84a770705f72616e6b01a770705f73697a6502a774705f72616e6b00a774705f73697a6501a8686f6c64696e67739193a26b"
        "761092a86c61796572732e38a86c61796572732e39aa6167656e745f6e616d65ab70302f312e302363306465"
    ),
    "Refused": (
        "83a474797065a752656675736564a4636f6465ac696e636f6d70617469626c65a6726561736f6ed92364747970653a20"
        "686572652062666c6f617431362c20746865726520666c6f61743136"
    ),
    "Writing": "82a474797065a757726974696e67a565706f636807",
    "MetadataRequest": "82a474797065af4d6574616461746152657175657374a7617474656d707403",
    "Failed": (
        "86a474797065a64661696c6564ab7472616e736665725f6964a27431a565706f636807a4636f6465ac77726974655f66"
        "61696c6564a6726561736f6eb24e49584c3a20646973636f6e6e6563746564a7736574746c6564c2"
    ),
    "Drained": "83a474797065a7447261696e6564ab7472616e736665725f6964a27431a565706f636807",
}


def test_the_preamble_of_version_1():
    assert wire.PROTOCOL_VERSION == 1
    assert wire.encode(wire.Heartbeat())[0] == b"kvpush/1"


@pytest.mark.parametrize("case", EVERY_MESSAGE, ids=named)
def test_golden_bytes(case):
    decode, message = case
    golden = bytes.fromhex(GOLDEN[named(case)])
    assert wire.encode(message)[1] == golden
    assert decode([b"kvpush/1", golden]) == message


def test_golden_bytes_of_the_notification():
    written = wire.Written(7, (1, 0), 2, (wire.Span(0, 4, 2, 5, 3), wire.Span(1, 0, 1, 0, 9)))
    golden = bytes.fromhex("940792010002" + "92" + "950004020503" + "950100010009")
    assert wire.encode_written(written) == golden
    assert wire.decode_written(golden) == written


# --- j1, j3: junk -----------------------------------------------------------------------------------------------------

packed = msgspec.msgpack.encode
SPAN = [0, 0, 1, 0, 1]
JUNK_VALUES: list[Any] = [None, -1, [], {}, "", 1e308, b"\xff", 2**64 - 1]


def body(message: wire.Message) -> dict[str, Any]:
    return msgspec.msgpack.decode(wire.encode(message)[1])


def refused(decode: Any, raw: bytes) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        decode([b"kvpush/1", raw])
    assert caught.value.code == FailureCode.malformed
    assert len(caught.value.reason) <= wire.MAX_REASON_BYTES
    return caught.value


BOTH = pytest.mark.parametrize("decode", [wire.decode_to_prefill, wire.decode_to_decode])


@BOTH
@pytest.mark.parametrize("value", [{}, [], None, 7, "x", {"type": "Nobody"}, {"type": None}, {"type": ["Hello"]}, True])
def test_j1_no_message_at_all(decode, value):
    refused(decode, packed(value))


@BOTH
@given(raw=st.binary(max_size=200))
def test_j1_random_bytes_decode_or_are_refused(decode, raw):
    with contextlib.suppress(RemoteProtocolError):
        decode([b"kvpush/1", raw])


@BOTH
@pytest.mark.parametrize("cut", [0, 1, 5, -1])
def test_j1_torn_bodies(decode, cut):
    message = wire.Goodbye("closing")
    refused(decode, wire.encode(message)[1][:cut])


@pytest.mark.parametrize("case", EVERY_MESSAGE, ids=named)
def test_j1_each_field_removed(case):
    decode, message = case
    for name in body(message):
        fields = body(message)
        del fields[name]
        refused(decode, packed(fields))


@pytest.mark.parametrize("case", EVERY_MESSAGE, ids=named)
def test_j1_each_field_replaced(case):
    decode, message = case
    for name in body(message):
        for junk in JUNK_VALUES:
            raw = packed(body(message) | {name: junk})
            try:
                decoded = decode([b"kvpush/1", raw])
            except RemoteProtocolError:
                continue
            # what is let through is a legal value of that field, and nothing was converted on the way
            assert (type(message).__name__, name) in LEGAL_REPLACEMENTS, (name, junk)
            again = body(decoded)[name]
            if name in ("share", "expected_share"):
                assert junk == {} and getattr(decoded, name) == Share()
            else:
                assert again == junk and type(again) is type(junk)


LEGAL_REPLACEMENTS = {
    ("Hello", "fingerprint"),  # {}
    ("Hello", "block_sizes_tokens"),
    ("Hello", "share"),  # {}: every field has a default, that of an engine of one rank
    ("Hello", "expected_share"),
    ("Welcome", "share"),
    ("Welcome", "holdings"),  # []
    ("Register", "wants"),  # []: decode needs nothing
    ("Metadata", "digest"),  # b"\xff"; the digest's own check refuses it
    ("Metadata", "blob"),
    ("Metadata", "geometry"),
    ("MetadataUnavailable", "reason"),  # ""
    ("Cancel", "reason"),
    ("Withdraw", "reason"),
    ("Failed", "reason"),
    ("Refused", "reason"),
    ("Goodbye", "reason"),
    ("Renew", "transfer_ids"),  # []
}


ODD_SHARES: list[Any] = ["0", None, 1.5, True, [0], [0, 1, 0, 1]]
ODD_SHARES += [{"tp_rank": odd} for odd in (-1, 1, "0", None, 0.0, True, [0])]  # 1 of 1 is none
ODD_SHARES += [{"pp_size": odd} for odd in (0, -1, MAX_RANKS + 1, 2**64 - 1, "1", None)]
ODD_SHARES += [{"pp_rank": 4, "pp_size": 4}, {"tp_rank": MAX_RANKS, "tp_size": MAX_RANKS}]


@pytest.mark.parametrize("share", ODD_SHARES, ids=repr)
def test_a1_odd_ranks_are_refused(share):
    for name in ("share", "expected_share"):
        refused(wire.decode_to_prefill, packed(body(TO_PREFILL[0]) | {name: share}))
    refused(wire.decode_to_decode, packed(body(TO_DECODE[0]) | {"share": share}))


@pytest.mark.parametrize("block_ids", ["34", {"0": 3}, [3, 4], 3, None])
def test_j1_block_ids_in_another_form_are_refused(block_ids):
    refused(wire.decode_to_prefill, packed(body(TO_PREFILL[3]) | {"wants": [["kv", 2, block_ids, 0]]}))


ODD_WANTS: list[Any] = [
    "kv",
    {"kv": []},
    ["kv"],
    [[]],
    [["kv", 2]],
    [{"group": "kv", "first_block": 2, "block_ids": b""}],
    [["", 2, b""]],
    [["x" * (wire.MAX_NAME_CHARS + 1), 2, b""]],
    [["kv", -1, b""]],
    [["kv", 2**31, b""]],
    [["kv", True, b""]],
    [["kv", 2, b"", -1]],
    [["kv", 2, b"", 2**63]],
    [["kv", 2, b"", None]],
    [["kv", 2, b"", 1.5]],
    [["kv", 0, b""]] * (wire.MAX_GROUPS + 1),
]


@pytest.mark.parametrize("wants", ODD_WANTS, ids=range(len(ODD_WANTS)))
def test_j1_odd_wants_are_refused(wants):
    refused(wire.decode_to_prefill, packed(body(TO_PREFILL[3]) | {"wants": wants}))


ODD_HOLDINGS: list[Any] = [
    [["kv", 16]],
    [["kv", 0, []]],
    [["kv", 2**31, []]],
    [["kv", "16", []]],
    [["", 16, []]],
    [["kv", 16, "layers.0"]],
    [["kv", 16, [""]]],
    [["kv", 16, [0]]],
    [["kv", 16, ["x" * (wire.MAX_NAME_CHARS + 1)]]],
    [["kv", 16, ["x"] * (wire.MAX_LAYERS + 1)]],
    [["kv", 16, []]] * (wire.MAX_GROUPS + 1),
]


@pytest.mark.parametrize("holdings", ODD_HOLDINGS, ids=range(len(ODD_HOLDINGS)))
def test_j1_odd_holdings_are_refused(holdings):
    refused(wire.decode_to_decode, packed(body(TO_DECODE[0]) | {"holdings": holdings}))


@pytest.mark.parametrize(
    "sizes",
    [{"kv": 0}, {"kv": 2**31}, {"kv": "16"}, {"": 16}, {1: 16}, {str(i): 1 for i in range(wire.MAX_GROUPS + 1)}],
    ids=range(6),
)
def test_j1_odd_block_sizes_are_refused(sizes):
    refused(wire.decode_to_prefill, packed(body(TO_PREFILL[0]) | {"block_sizes_tokens": sizes}))


def test_a_want_without_an_end_wants_every_block_whole():
    raw = packed(body(TO_PREFILL[3]) | {"wants": [["kv", 2, b""]]})
    message = wire.decode_to_prefill([b"kvpush/1", raw])
    assert isinstance(message, wire.Register)
    assert message.wants == (wire.Want("kv", 2, b"", num_tokens=0),)


def test_structs_without_names_can_grow():
    wants, holdings = [["kv", 2, b"", 0, "more"]], [["kv", 16, ["layers.0"], {"more": 1}]]
    message = wire.decode_to_prefill([b"kvpush/1", packed(body(TO_PREFILL[3]) | {"wants": wants})])
    assert isinstance(message, wire.Register) and message.wants == (wire.Want("kv", 2, b""),)
    welcome = wire.decode_to_decode([b"kvpush/1", packed(body(TO_DECODE[0]) | {"holdings": holdings})])
    assert isinstance(welcome, wire.Welcome) and welcome.holdings == (wire.Holding("kv", 16, ("layers.0",)),)


def test_every_group_and_layer_that_a_cache_may_have_fits_into_a_message():
    group = wire.Holding("g" * 48, 16, tuple(f"{i:0512}" for i in range(wire.MAX_LAYERS)))
    welcome = wire.Welcome("p0", "c0de", Share(), (group,), "p0/0.0#c0de")
    assert wire.decode_to_decode(wire.encode(welcome)) == welcome
    wants = tuple(wire.Want(f"{i:048}", 2**31 - 1, b"", 2**63 - 1) for i in range(wire.MAX_GROUPS))
    register = wire.Register("t1", 7, wants, 1)
    assert wire.decode_to_prefill(wire.encode(register)) == register


@pytest.mark.parametrize("case", EVERY_MESSAGE, ids=named)
def test_j1_unknown_fields_are_tolerated(case):
    decode, message = case
    extra = {"colour": "blue", "nested": {"a": [1, {"b": None}]}, "binary": b"\xff"}
    assert decode([b"kvpush/1", packed(extra | body(message) | {"later": 1})]) == message


def test_j1_a_million_unknown_fields_are_tolerated():
    raw = packed({"type": "Goodbye", "reason": "closing"} | {str(i): None for i in range(10**6)})
    assert wire.decode_to_prefill([b"kvpush/1", raw]) == wire.Goodbye("closing")


@BOTH
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x"], ids=["lists", "maps"])
def test_j1_deep_nesting_is_refused(decode, opening):
    refused(decode, opening * 10_000 + b"\xc0")
    refused(decode, b"\x83\xa4type\xa7Goodbye\xa6reason\xa0\xa1x" + opening * 10_000 + b"\xc0")


def test_j1_of_duplicate_keys_the_last_one_counts():
    raw = b"\x83\xa4type\xa7Goodbye\xa6reason\xa1a\xa6reason\xa1b"
    assert wire.decode_to_prefill([b"kvpush/1", raw]) == wire.Goodbye("b")


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("unpickled",)


@BOTH
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_j3_a_pickle_is_junk(decode, protocol):
    bomb = pickle.dumps(Bomb(), protocol)
    refused(decode, bomb)
    with pytest.raises(RemoteProtocolError):
        decode([bomb])
    with pytest.raises(RemoteProtocolError):
        wire.decode_written(bomb)


@BOTH
def test_j3_msgpack_extensions_have_no_hook(decode):
    refused(decode, packed(msgspec.msgpack.Ext(1, pickle.dumps(Bomb()))))


@BOTH
@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"kvpush/1"],
        [b"kvpush/1", b"", b""],
        [b"", b"kvpush/1"],
        [b"kvpush/", b""],
        [b"kvpush/-1", b""],
        [b"kvpush/1x", b""],
        [b"kvpush/" + b"9" * 10, b""],
        [b"KVPUSH/1", b""],
        [b"\xff" * 10**6, b""],
    ],
    ids=repr,
)
def test_odd_frames_are_refused(decode, frames):
    with pytest.raises(RemoteProtocolError) as caught:
        decode(frames)
    assert caught.value.code == FailureCode.malformed
    assert len(caught.value.reason) < 200


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"HB:x",
        packed([]),
        packed([7, [0, 0], 0]),
        packed([7, [0, 0], 0, []]),
        packed({}),
        b"\x91" * 128,
        b"\0" * (wire.MAX_WRITTEN_BYTES + 1),
        packed([-1, [0, 0], 0, [SPAN]]),
        packed([7, [0], 0, [SPAN]]),
        packed([True, [0, 0], 0, [SPAN]]),
        packed([7, [0, 0], -1, [SPAN]]),
        packed([7, [0, 0], 0, SPAN]),
        packed([7, [0, 0], 0, [SPAN] * (wire.MAX_SPANS + 1)]),
    ],
)
def test_odd_notifications_are_refused(payload):
    with pytest.raises(RemoteProtocolError):
        wire.decode_written(payload)


@pytest.mark.parametrize("place", range(len(SPAN)))
@pytest.mark.parametrize("value", [-1, "1", None, True, 0.5, [], 2**64 - 1])
def test_odd_spans_are_refused(place, value):
    span = [*SPAN[:place], value, *SPAN[place + 1 :]]
    with pytest.raises(RemoteProtocolError):
        wire.decode_written(packed([7, [0, 0], 0, [SPAN, span]]))


@pytest.mark.parametrize("span", [SPAN[:4], [0, 0, 0, 0, 1], [0, 0, 1, 0, 0], {}], ids=repr)
def test_spans_of_nothing_are_refused(span):
    with pytest.raises(RemoteProtocolError):
        wire.decode_written(packed([7, [0, 0], 0, [span]]))


def test_a_notification_that_is_too_long_is_refused_unread():
    whole = packed([7, [0, 0], 0, [SPAN], b"x" * wire.MAX_WRITTEN_BYTES])
    with pytest.raises(RemoteProtocolError, match="a notification of"):
        wire.decode_written(whole)


def test_notifications_can_grow():
    grown = packed([7, [1, 0], 2, [[0, 4, 2, 5, 3, "more"]], "more"])
    assert wire.decode_written(grown) == wire.Written(7, (1, 0), 2, (wire.Span(0, 4, 2, 5, 3),))


# --- a10: versions ----------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("raw", [b"\xc1 undecodable", b"", packed({"type": "Hello"}), b"\x91" * 10_000])
@pytest.mark.parametrize("version", [b"0", b"2", b"999"])
def test_a10_the_version_is_compared_before_the_body_is_decoded(decode, raw, version):
    with pytest.raises(wire.VersionMismatch) as caught:
        decode([b"kvpush/" + version, raw])
    assert caught.value.code == FailureCode.protocol_version
    assert "speaks 1" in caught.value.reason
    assert version.decode() in caught.value.reason


def test_a10_another_version_is_told_apart_whatever_its_number_of_frames():
    for frames in ([b"kvpush/2"], [b"kvpush/2", b"", b"", b""]):
        with pytest.raises(wire.VersionMismatch):
            wire.decode_to_decode(frames)


def test_a10_refused_is_understood_across_versions():
    refusal = wire.Refused(FailureCode.protocol_version, "here 999, there 1")
    assert wire.decode_to_decode([b"kvpush/999", wire.encode(refusal)[1]]) == refusal


@pytest.mark.parametrize("message", [m for m in TO_DECODE if not isinstance(m, wire.Refused)], ids=repr)
def test_a10_nothing_else_is_believed_across_versions(message):
    with pytest.raises(wire.VersionMismatch):
        wire.decode_to_decode([b"kvpush/999", wire.encode(message)[1]])


# --- d15: ids ---------------------------------------------------------------------------------------------------------

LONGEST = ["x" * 512, "é" * 256, "☃" * 170 + "xx", "😀" * 128]
TOO_LONG = ["x" * 513, "é" * 256 + "x", "☃" * 171, "😀" * 128 + "x", "x" * 10_000]
ODD_IDS = [
    "a:b:1",
    "cmpl-1_kv_0",
    "r:9",
    "HB:x",
    "PUSH_REG:{}",
    "é☃",
    "\x00",
    "a\nb",
    " ",
    "a/b c",
    "[::1]:5600",
    "\ud7ff",
]


@pytest.mark.parametrize("identifier", ODD_IDS + LONGEST)
def test_d15_ids_are_carried_whole(identifier):
    assert wire.check_id(identifier, "transfer_id") == identifier
    for message in (
        wire.Register(identifier, 1, (), 1),
        wire.Renew([identifier]),
        wire.Hello(identifier, identifier, Share(), identifier, Share(), {}, {}, identifier, 1),
    ):
        assert wire.decode_to_prefill(wire.encode(message)) == message


@pytest.mark.parametrize("identifier", TOO_LONG)
def test_d15_ids_are_limited_in_bytes_at_the_api_and_on_the_wire(identifier):
    with pytest.raises(UsageError, match=r"transfer_id=.*513|transfer_id=.*10000"):
        wire.check_id(identifier, "transfer_id")
    refused(wire.decode_to_prefill, packed(body(TO_PREFILL[3]) | {"transfer_id": identifier}))
    refused(wire.decode_to_prefill, packed({"type": "Renew", "transfer_ids": ["ok", identifier]}))
    for name in ("engine_id", "incarnation", "expected_engine_id", "agent_name"):
        refused(wire.decode_to_prefill, packed(body(TO_PREFILL[0]) | {name: identifier}))
    for message in TO_DECODE:
        for name in set(body(message)) & {"engine_id", "incarnation", "agent_name", "transfer_id"}:
            refused(wire.decode_to_decode, packed(body(message) | {name: identifier}))


@pytest.mark.parametrize("identifier", [None, 7, b"t1", True, ["t1"], "", "\ud800", "a\udfffb", "\ud800" * 600])
def test_d15_what_is_no_id_is_refused_at_the_api(identifier):
    with pytest.raises(UsageError, match="transfer_id"):
        wire.check_id(identifier, "transfer_id")


@pytest.mark.parametrize("raw", [b"\xff", b"\xed\xa0\x80" * 200, b"\xc0\x80"], ids=["0xff", "surrogates", "overlong"])
def test_d15_ids_that_are_not_utf8_are_refused_on_the_wire(raw):
    text = b"\xda" + len(raw).to_bytes(2, "big") + raw
    refused(wire.decode_to_prefill, b"\x82\xa4type\xa5Renew\xactransfer_ids\x91" + text)


# --- b9: times --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remaining_ms", [-1, float("nan"), float("inf"), 2**63, 2**64 - 1, "5000", True, None, 1.5])
def test_b9_bad_remaining_times_are_refused(remaining_ms):
    refused(wire.decode_to_prefill, packed(body(TO_PREFILL[3]) | {"remaining_ms": remaining_ms}))


@pytest.mark.parametrize("remaining_ms", [0, 1, wire.MAX_REMAINING_MS])
def test_b9_good_remaining_times_are_carried(remaining_ms):
    message = wire.Register("t1", 1, (), remaining_ms)
    assert wire.decode_to_prefill(wire.encode(message)) == message


def test_b9_more_than_ten_years_is_a_mistake():
    refused(wire.decode_to_prefill, packed(body(TO_PREFILL[3]) | {"remaining_ms": wire.MAX_REMAINING_MS + 1}))


# --- reasons ----------------------------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=5000))
def test_clipped_reasons_fit(reason):
    message = wire.Goodbye(wire.clip_reason(reason))
    assert wire.decode_to_decode(wire.encode(message)) == message
    assert message.reason == reason or len(reason) > wire.MAX_REASON_BYTES


def test_a_long_reason_is_clipped_and_an_unclipped_one_refused():
    assert wire.clip_reason("x" * 10_000) == "x" * 4095 + "…"
    assert wire.clip_reason("x" * 4096) == "x" * 4096
    refused(wire.decode_to_decode, packed({"type": "Goodbye", "reason": "x" * 4097}))


def test_a_failure_code_of_a_newer_peer_is_understood_as_unknown() -> None:
    body = msgspec.msgpack.encode({"type": "Refused", "code": "invented_later", "reason": "because"})
    message = wire.decode_to_decode([wire.encode(wire.Heartbeat())[0], body])
    assert message == wire.Refused(FailureCode.unknown, "because")
