"""Addresses: a host and a port, parsed once and kept apart.

``host:port`` is split at the last colon, and an IPv6 host wears brackets there, because ``::1:5600`` could be cut in
two places. Inside an :class:`Endpoint` the host has no brackets; :meth:`Endpoint.zmq` and ``str()`` put them back.
Names are not looked up here.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import NoReturn

from kvpush.errors import ConfigurationError

MAX_PORT = 65535
_MAX_HOST_CHARS = 253  # the longest name that DNS can carry

_ANY_HOST = "*"  # ZeroMQ's word for every interface
_BRACKETED = re.compile(r"\[([^\[\]]*)\](?::(.*))?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_SCOPED = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]{1,15})?")  # a scope is an interface: 15 characters at most


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a listener is. ``host`` is a name or a numeric address as given, without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"

    def zmq(self) -> str:
        """The form that ZeroMQ binds and connects: ``tcp://[::1]:5600``."""
        return f"tcp://{self}"

    @property
    def address(self) -> tuple[str, int]:
        """The form that callers see: ``("::1", 5600)``."""
        return self.host, self.port

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is a numeric IPv6 address."""
        return ":" in self.host

    @property
    def is_numeric(self) -> bool:
        """Whether the host is an address, which needs no look-up."""
        return _numeric(self.host) is not None

    @property
    def is_wildcard(self) -> bool:
        """Whether the host stands for every interface: good to listen on, useless to dial."""
        numeric = _numeric(self.host)
        return self.host == _ANY_HOST or (numeric is not None and _is_unspecified(numeric))


def parse_listen(value: object, field: str = "listen") -> Endpoint:
    """An address to bind: ``"127.0.0.1:0"``, ``"[::1]:5600"``, ``"*:5600"`` or ``(host, port)``.

    Port 0 lets the system choose. Raises ConfigurationError naming ``field`` and the value.
    """
    host, port = _host_and_port(value, field)
    if port is None:
        _fail(field, value, "has no port; write host:port, with port 0 to let the system choose")
    return _endpoint(host, port, value, field, lowest_port=0)


def parse_address(value: object, field: str = "address") -> Endpoint:
    """A peer's address to dial: ``("10.0.0.7", 5600)``, ``"decode-7:5600"``, ``"[::1]:5600"``.

    Raises ConfigurationError naming ``field`` and the value; also for a wildcard, which names no host.
    """
    host, port = _host_and_port(value, field)
    if port is None:
        _fail(field, value, "has no port; write host:port")
    endpoint = _endpoint(host, port, value, field, lowest_port=1)
    if endpoint.is_wildcard:
        _fail(field, value, f"{endpoint.host!r} is every interface and names no host; give the peer's own address")
    return endpoint


def advertised(bound: Endpoint, advertise: object = None, field: str = "advertise") -> Endpoint:
    """The address that peers are told to dial, which may differ from the bound one (NAT, containers, wildcards).

    ``advertise`` is a host, ``host:port`` or ``(host, port)``; without a port it is the bound port.
    Raises ConfigurationError for a bad value, and when a wildcard is bound and nothing is advertised.
    """
    if advertise is None:
        if bound.is_wildcard:
            raise ConfigurationError(
                f"listen={str(bound)!r} is bound on every interface, so peers cannot tell which one to dial: "
                f"give {field}= the host that they reach"
            )
        return bound
    host, port = _host_and_port(advertise, field)
    return parse_address((host, bound.port if port is None else port), field)


def check_advertised(listen: Endpoint, advertise: object = None, field: str = "advertise") -> None:
    """Complain now about what :func:`advertised` will refuse once it is bound; port 0 will be another one by then."""
    advertised(listen if listen.port else Endpoint(listen.host, MAX_PORT), advertise, field)


def _host_and_port(value: object, field: str) -> tuple[object, object | None]:
    """The two parts, not yet checked; the port is ``None`` when there is none."""
    if isinstance(value, str):
        host, port = _split(value, field)
        return host, None if port is None else _port_number(port, value, field)
    if isinstance(value, tuple | list):
        if len(value) != 2:
            _fail(field, value, f"has {len(value)} parts; write (host, port)")
        host, port = value
        if port is None:
            _fail(field, value, "port None is not a whole number")
        return host, port
    return _fail(field, value, "must be 'host:port' or (host, port)")


def _split(text: str, field: str) -> tuple[str, str | None]:
    if bracketed := _BRACKETED.fullmatch(text):
        host, port = bracketed.groups()
        if ":" not in host:
            _fail(field, text, "has brackets around something that is no IPv6 address")
        return host, port
    if text.count(":") > 1:
        _fail(field, text, "has several colons; put an IPv6 host into brackets, as in '[::1]:5600'")
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _port_number(text: str, value: object, field: str) -> int:
    # int() alone would take "+5", " 5", "5_0" and digits of other scripts
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        _fail(field, value, f"port {text!r} is not a whole number from 0 to {MAX_PORT}")
    return int(text)


def _endpoint(host: object, port: object, value: object, field: str, *, lowest_port: int) -> Endpoint:
    if not isinstance(host, str):
        _fail(field, value, f"host {host!r} is not a string")
    if isinstance(port, bool) or not isinstance(port, int) or not lowest_port <= port <= MAX_PORT:
        _fail(field, value, f"port {port!r} is not a whole number from {lowest_port} to {MAX_PORT}")
    if host.startswith("[") and host.endswith("]") and ":" in host:
        host = host[1:-1]
    if complaint := _complaint(host):
        _fail(field, value, complaint)
    return Endpoint(host, port)


def _complaint(host: str) -> str | None:
    """What is wrong with a host, if anything."""
    if not host:
        return "has an empty host"
    if host == _ANY_HOST:
        return None
    if ":" in host:
        return None if _SCOPED.fullmatch(host) and _numeric(host) else f"host {host!r} is not an IPv6 address"
    if not _NAME.fullmatch(host) or len(host) > _MAX_HOST_CHARS:
        return f"host {host!r} is neither a name nor an address"
    # the resolver would read "127.1" and "1" as addresses nobody meant
    if host.replace(".", "").isdigit() and _numeric(host) is None:
        return f"host {host!r} is not an IPv4 address"
    return None


def _numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_unspecified(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified


def _fail(field: str, value: object, complaint: str) -> NoReturn:
    raise ConfigurationError(f"{field}={value!r}: {complaint}")
