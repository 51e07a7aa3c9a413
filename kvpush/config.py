"""Every setting, validated when it is made. Units are in the names; times are seconds."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, get_type_hints

from kvpush.errors import ConfigurationError


class HoldPolicy(enum.StrEnum):
    """What happens to held blocks when ``hold_timeout_s`` passes and nothing proves them quiet."""

    release = "release"  # give them back, with BlocksReleased(proven=False)
    keep = "keep"  # keep them until something proves them quiet, or until close()


_FOREVER_S = 10 * 365 * 86400.0  # ten years


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one pusher or receiver. Immutable; raises :class:`ConfigurationError` naming the field and value.

    ``Config.from_env()`` reads ``KVPUSH_<FIELD>`` (``KVPUSH_ENGINE_TTL_S=600``) over these defaults.
    """

    handshake_timeout_s: float = 5.0  # one attempt, from the request to prepared descriptors
    handshake_attempts: int = 3  # failed attempts that one push waits through before it fails
    handshake_backoff_min_s: float = 0.1  # first delay of the exponential backoff with full jitter
    handshake_backoff_max_s: float = 30.0  # its cap
    eager_handshake: bool = False  # start at Hello instead of at the first push that needs the engine
    heartbeat_interval_s: float = 1.0
    liveness_timeout_s: float = 5.0  # nothing heard for this long: the engine is lost
    engine_ttl_s: float = 3600.0  # no work for this long and nothing in flight: stale (idle)
    evict_grace_s: float = 30.0  # stale (idle) for this long: evicted
    lease_s: float = 30.0  # prefill keeps finished blocks for this long; renewable, never shortened
    receive_deadline_s: float = 120.0  # decode's own limit, from expect()
    stall_timeout_s: float = 10.0  # a WRITE that does not end: in doubt, engine lost
    hold_timeout_s: float = 60.0  # longest quarantine of blocks
    hold_policy: HoldPolicy = HoldPolicy.release
    close_timeout_s: float = 2.0  # close() returns within this
    max_pending_pushes: int = 8192  # pushes (or receives) not yet reported through poll()
    max_registrations: int = 65536  # on prefill, all decode engines together
    max_registrations_per_engine: int = 16384
    max_registered_blocks: int = 1 << 24  # block ids in registrations that have not ended: 4 bytes each
    max_registered_blocks_per_engine: int = 1 << 20  # no engine needs more than its cache has blocks
    max_engines: int = 16384  # live records
    max_deferred_per_engine: int = 4096  # pushes that wait behind one handshake
    max_in_flight_bytes: int = 4 << 30  # posted and not settled
    max_write_bytes: int = 64 << 20  # of one WRITE: a larger push goes slice by slice, two of them at a time
    coalesce_bytes: int = 1 << 20  # smaller pieces of a growing push are put together while a WRITE of it is in flight
    min_tile_bytes: int = 1024  # the shortest piece into which two sides' layouts may cut a block
    max_message_bytes: int = 8 << 20  # control messages above this are refused unread
    max_tombstones: int = 65536  # remembered ids of ended transfers, and as many evicted engines in engines()
    tombstone_ttl_s: float = 300.0
    net_devices: str = ""  # a UCX network device ("lo", "mlx5_0:1"); empty: UCX or UCX_NET_DEVICES says
    ucx_options: str = ""  # more of UCX's per-agent options, "KEY=VALUE,KEY=VALUE"
    tcp_user_timeout_s: float = 3.0  # bounds UCX's TCP failure detection
    poll_min_s: float = 0.00005  # finest NIXL progress interval while something is in flight
    poll_max_s: float = 0.001  # coarsest one

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field.name, getattr(self, field.name), field.default))
        self._order("heartbeat_interval_s", "liveness_timeout_s", strict=True)
        self._order("handshake_backoff_min_s", "handshake_backoff_max_s")
        self._order("max_registrations_per_engine", "max_registrations")
        self._order("max_registered_blocks_per_engine", "max_registered_blocks")
        self._order("poll_min_s", "poll_max_s")

    def _order(self, low: str, high: str, *, strict: bool = False) -> None:
        a, b = getattr(self, low), getattr(self, high)
        if a > b or (strict and a == b):
            raise ConfigurationError(f"{low}={a!r} must be {'below' if strict else 'at most'} {high}={b!r}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Defaults, then ``KVPUSH_*`` from the environment, then ``overrides``. An unknown name is an error."""
        environ = os.environ if environ is None else environ
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for name, text in environ.items():
            if not name.startswith("KVPUSH_"):
                continue
            field = name.removeprefix("KVPUSH_").lower()
            if field not in hints:
                raise ConfigurationError(f"{name}={text!r} names no setting; known: {', '.join(sorted(hints))}")
            values[field] = _parsed(name, text, hints[field])
        return cls(**(values | overrides))


def _parsed(name: str, text: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.strip().lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise ConfigurationError(f"{name}={text!r} is not a valid {kind.__name__}") from None


def _checked(name: str, value: Any, default: Any) -> Any:
    """The value in its canonical type, or ConfigurationError. The default tells the type: no silent conversion."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name}={value!r} must be True or False")
    elif isinstance(default, HoldPolicy):
        try:
            return HoldPolicy(value)
        except ValueError:
            raise ConfigurationError(f"{name}={value!r} must be one of {', '.join(HoldPolicy)}") from None
    elif isinstance(default, str):
        if not isinstance(value, str):
            raise ConfigurationError(f"{name}={value!r} must be a string")
    elif isinstance(default, int):
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigurationError(f"{name}={value!r} must be a whole number above 0")
    else:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigurationError(f"{name}={value!r} must be a number of seconds")
        if not math.isfinite(value) or value <= 0:
            raise ConfigurationError(f"{name}={value!r} must be above 0 and finite")
        if value > _FOREVER_S:
            raise ConfigurationError(f"{name}={value!r} must be at most {_FOREVER_S:.0f} seconds, which is ten years")
        return float(value)
    return value
