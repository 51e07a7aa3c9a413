"""kvpush.endpoint: h4 (IPv6 forms), h6 (types and ranges), h2 (ports above 65535), and what may be advertised."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpush.endpoint import Endpoint, advertised, check_advertised, parse_address, parse_listen
from kvpush.errors import ConfigurationError

GOOD = [
    # given, host, port, as ZeroMQ takes it
    ("127.0.0.1:5600", "127.0.0.1", 5600, "tcp://127.0.0.1:5600"),
    ("[::1]:5600", "::1", 5600, "tcp://[::1]:5600"),
    ("[fe80::1%lo]:5600", "fe80::1%lo", 5600, "tcp://[fe80::1%lo]:5600"),
    ("[::ffff:127.0.0.1]:5600", "::ffff:127.0.0.1", 5600, "tcp://[::ffff:127.0.0.1]:5600"),
    ("[2001:db8::1]:65535", "2001:db8::1", 65535, "tcp://[2001:db8::1]:65535"),
    ("localhost:1", "localhost", 1, "tcp://localhost:1"),
    ("decode-7.cluster_a.internal.:5600", "decode-7.cluster_a.internal.", 5600, None),
    ("7up:5600", "7up", 5600, None),
    ("h:05600", "h", 5600, None),
    (("127.0.0.1", 5600), "127.0.0.1", 5600, None),
    (["127.0.0.1", 5600], "127.0.0.1", 5600, None),
    (("::1", 5600), "::1", 5600, "tcp://[::1]:5600"),
    (("[::1]", 5600), "::1", 5600, "tcp://[::1]:5600"),
    (("fe80::1%lo", 5600), "fe80::1%lo", 5600, "tcp://[fe80::1%lo]:5600"),
]

LISTEN_ONLY = [
    ("127.0.0.1:0", "127.0.0.1", 0),
    ("[::1]:0", "::1", 0),
    (("localhost", 0), "localhost", 0),
    ("0.0.0.0:5600", "0.0.0.0", 5600),
    ("*:5600", "*", 5600),
    ("[::]:5600", "::", 5600),
    (("::", 0), "::", 0),
]

BAD_PORTS = ["abc", -1, 65536, True, False, None, 5600.0, "5600", b"5600", [5600]]
BAD_PORT_TEXTS = [
    "abc",
    "-1",
    "65536",
    "",
    " 5600",
    "5600 ",
    "+5600",
    "5_600",
    "0x15e0",
    "5600.0",
    "５６００",
    "99999999",
    "True",
]
BAD_HOSTS = [
    "",
    " ",
    "a b",
    "a\nb",
    "a\x00b",
    "\u200b",
    "bücher",
    "a/b",
    "tcp://h",
    "-a",
    "a-",
    "a@b",
    "[",
    "]",
    "[]",
    "h,g",
]
BAD_HOSTS += ["256.0.0.1", "1.2.3", "127.1", "1", "1.2.3.4.5", "x" * 254, "**"]
BAD_IPV6 = [
    ":",
    ":::",
    "::1::",
    "12345::1",
    "g::1",
    "fe80::1%",
    "fe80::1% lo",
    "fe80::1%a/b",
    "::1%" + "x" * 16,
    "1:2:3",
    "::1\n",
]
BAD_TYPES = [None, 5600, 1.5, True, b"127.0.0.1:5600", {"host": "h", "port": 1}, (), ("h",), ("h", 1, 2), object]


@pytest.mark.parametrize("parse", [parse_listen, parse_address])
@pytest.mark.parametrize(("given_as", "host", "port", "zmq"), GOOD, ids=repr)
def test_h4_good_addresses(parse, given_as, host, port, zmq):
    endpoint = parse(given_as)
    assert endpoint == Endpoint(host, port)
    assert endpoint.address == (host, port)
    assert endpoint.zmq() == zmq or zmq is None
    assert parse(str(endpoint)) == parse(endpoint.address) == endpoint


@pytest.mark.parametrize(("given_as", "host", "port"), LISTEN_ONLY, ids=repr)
def test_what_one_can_listen_on_but_not_dial(given_as, host, port):
    assert parse_listen(given_as) == Endpoint(host, port)
    with pytest.raises(ConfigurationError):
        parse_address(given_as)


def refused(parse, value, field) -> str:
    """The message of a refusal, which names field and value."""
    with pytest.raises(ConfigurationError) as caught:
        parse(value, field)
    assert str(caught.value).startswith(f"{field}={value!r}: ")
    return str(caught.value)


@pytest.mark.parametrize("parse", [parse_listen, parse_address])
class TestRefusals:
    @pytest.mark.parametrize("port", BAD_PORTS, ids=repr)
    def test_h6_ports(self, parse, port):
        assert f"port {port!r}" in refused(parse, ("h", port), "listen")

    @pytest.mark.parametrize("port", BAD_PORT_TEXTS)
    def test_h6_ports_in_text(self, parse, port):
        assert "port" in refused(parse, f"h:{port}", "listen")
        assert "port" in refused(parse, f"[::1]:{port}", "source")

    @pytest.mark.parametrize("value", ["h", "127.0.0.1", "[::1]"])
    def test_missing_port(self, parse, value):
        assert "no port" in refused(parse, value, "listen")

    @pytest.mark.parametrize(
        "value", ["::1:5600", "::1", "2001:db8::1:5600", "fe80::1%lo:5600", "a:b:1", "::ffff:127.0.0.1:1"]
    )
    def test_h4_ipv6_without_brackets_is_ambiguous(self, parse, value):
        assert "brackets" in refused(parse, value, "listen")

    @pytest.mark.parametrize("host", BAD_HOSTS, ids=repr)
    def test_hosts(self, parse, host):
        refused(parse, (host, 5600), "listen")
        refused(parse, f"{host}:5600", "listen")

    @pytest.mark.parametrize("host", BAD_IPV6, ids=repr)
    def test_h4_ipv6_hosts(self, parse, host):
        refused(parse, (host, 5600), "listen")
        refused(parse, f"[{host}]:5600", "listen")

    @pytest.mark.parametrize(
        "value", ["[127.0.0.1]:1", "[localhost]:1", "[[::1]]:1", "[::1]5600", "[::1:5600", "::1]:5600", "[::1]:1:2"]
    )
    def test_h4_misplaced_brackets(self, parse, value):
        refused(parse, value, "listen")

    @pytest.mark.parametrize(
        "host", ["[127.0.0.1]", "[[::1]]", "[::1", "::1]", "[]", "[h]", None, 7, True, b"h"], ids=repr
    )
    def test_hosts_in_a_tuple(self, parse, host):
        refused(parse, (host, 5600), "source")

    @pytest.mark.parametrize("value", BAD_TYPES, ids=repr)
    def test_h6_types(self, parse, value):
        refused(parse, value, "listen")


def test_h2_a_port_computed_beyond_the_range_is_refused():
    assert "65540" in refused(parse_listen, ("127.0.0.1", 65534 + 6), "listen")


@pytest.mark.parametrize(
    ("host", "is_wildcard", "is_numeric", "is_ipv6"),
    [
        ("*", True, False, False),
        ("0.0.0.0", True, True, False),
        ("::", True, True, True),
        ("0:0:0:0:0:0:0:0", True, True, True),
        ("::ffff:0.0.0.0", True, True, True),
        ("127.0.0.1", False, True, False),
        ("::1", False, True, True),
        ("fe80::1%lo", False, True, True),
        ("localhost", False, False, False),
    ],
)
def test_kinds_of_hosts(host, is_wildcard, is_numeric, is_ipv6):
    endpoint = Endpoint(host, 1)
    assert (endpoint.is_wildcard, endpoint.is_numeric, endpoint.is_ipv6) == (is_wildcard, is_numeric, is_ipv6)


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused(text):
    with contextlib.suppress(ConfigurationError):
        endpoint = parse_listen(text)
        assert parse_listen(str(endpoint)) == endpoint


@given(st.ip_addresses(), st.integers(1, 65535))
def test_every_address_survives_its_text(address, port):
    endpoint = Endpoint(str(address), port)
    assert parse_listen(str(endpoint)) == parse_listen((f"[{address}]" if address.version == 6 else str(address), port))
    assert endpoint.zmq() == "tcp://" + str(endpoint)


# --- advertise --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "advertise", "expected"),
    [
        (Endpoint("127.0.0.1", 5600), None, Endpoint("127.0.0.1", 5600)),
        (Endpoint("127.0.0.1", 5600), "nat.example", Endpoint("nat.example", 5600)),
        (Endpoint("0.0.0.0", 5600), "10.0.0.7", Endpoint("10.0.0.7", 5600)),
        (Endpoint("0.0.0.0", 5600), "10.0.0.7:31000", Endpoint("10.0.0.7", 31000)),
        (Endpoint("::", 5600), "[2001:db8::1]", Endpoint("2001:db8::1", 5600)),
        (Endpoint("*", 5600), "[2001:db8::1]:7", Endpoint("2001:db8::1", 7)),
        (Endpoint("*", 5600), ("::1", 7), Endpoint("::1", 7)),
    ],
)
def test_advertised(bound, advertise, expected):
    assert advertised(bound, advertise) == expected


def test_a_port_that_the_system_chooses_is_no_reason_to_complain_early():
    check_advertised(Endpoint("0.0.0.0", 0), "10.0.0.7")
    check_advertised(Endpoint("127.0.0.1", 0))
    with pytest.raises(ConfigurationError, match="advertise="):
        check_advertised(Endpoint("0.0.0.0", 0))
    with pytest.raises(ConfigurationError, match="advertise="):
        check_advertised(Endpoint("0.0.0.0", 0), "h:0")


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "::"])
def test_a_wildcard_cannot_be_advertised(host):
    with pytest.raises(ConfigurationError, match="advertise="):
        advertised(Endpoint(host, 5600))
    with pytest.raises(ConfigurationError, match="advertise="):
        advertised(Endpoint("127.0.0.1", 5600), (host, 5600))


@pytest.mark.parametrize(
    "advertise", ["", "::1", "h:0", "h:abc", ("h", 0), ("h", True), ("h", None), ("h",), 5600, "a b"], ids=repr
)
def test_bad_advertise_values_are_refused(advertise):
    with pytest.raises(ConfigurationError, match="advertise="):
        advertised(Endpoint("0.0.0.0", 5600), advertise)
