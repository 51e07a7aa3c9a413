"""Settings of the connector: ``kv_connector_extra_config``, checked when the engine starts.

Every field of :class:`kvpush.Config` may stand there under its own name, and a few more that say where the connector
listens. ``KVPUSH_*`` in the environment comes below them, as everywhere.

One default is another one here: a decode server that finds prefill's port shut tries again within a second, and not
within half a minute. Its request can be computed where it is, so that it had better fail soon.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpush.config import Config
from kvpush.endpoint import MAX_PORT, check_advertised, parse_listen
from kvpush.errors import ConfigurationError
from kvpush.integrations.vllm.versions import ALLOW_SETTING

# Settings of vLLM's own NIXL connectors that people have in their configurations, and what they are called here.
_BUILT_IN_NAMES = {
    "kv_lease_duration": "lease_s",
    "push_registration_timeout": "receive_deadline_s",
    "decoder_kv_blocks_ttl": "receive_deadline_s",
    "backends": "ucx_options, net_devices",
}
BACKOFF_MAX_S = 1.0
_CONFIG_NAMES = frozenset(field.name for field in dataclasses.fields(Config))
_CONFIG_FLAGS = frozenset(field.name for field in dataclasses.fields(Config) if isinstance(field.default, bool))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator may say. Raises ConfigurationError naming the setting and the value."""

    config: Config
    listen: str  # "host:port" of the first rank; the others take the ports after it. Port 0: the system chooses
    advertise: str  # the host that decode engines dial, when it is another one; empty: the one listened on
    model: str  # names what must be equal on both sides; empty: vLLM's own model name
    push_chunks: bool  # push while the prompt is still being computed
    allow_untested_vllm: bool

    @classmethod
    def of(cls, extra: Mapping[str, Any], *, default_listen: str, environ: Mapping[str, str] | None = None) -> Settings:
        """From ``kv_connector_extra_config``."""
        rest = dict(extra)
        overrides = {name: rest.pop(name) for name in extra if name in _CONFIG_NAMES}
        settings = cls(
            config=_config(environ, overrides),
            listen=_text(rest, "listen", default_listen),
            advertise=_text(rest, "advertise", ""),
            model=_text(rest, "model", ""),
            push_chunks=_flag(rest, "push_chunks", default=True),
            allow_untested_vllm=_flag(rest, ALLOW_SETTING, default=False),
        )
        for name, value in rest.items():
            hint = _BUILT_IN_NAMES.get(name)
            raise ConfigurationError(
                f"kv_connector_extra_config: {name}={value!r} is no setting of KvPushConnector; "
                + (f"its counterpart is {hint}" if hint else f"known: {', '.join(sorted(_known()))}")
            )
        return settings

    def listen_of_rank(self, rank: int) -> tuple[str, int]:
        """Where worker number ``rank`` listens."""
        endpoint = parse_listen(self.listen)
        return endpoint.host, endpoint.port + rank if endpoint.port else 0

    def check_listen(self, num_ranks: int) -> None:
        """For an engine that others dial, on ``num_ranks`` ports: complain before anything is opened."""
        endpoint = parse_listen(self.listen)
        last_port = self.listen_of_rank(num_ranks - 1)[1]
        if last_port > MAX_PORT:
            raise ConfigurationError(
                f"listen={self.listen!r}: each of {num_ranks} ranks takes a port, up to {last_port}; "
                f"the highest port is {MAX_PORT}"
            )
        check_advertised(endpoint, self.advertise or None)
        if self.advertise and parse_host(self.advertise) != self.advertise:
            raise ConfigurationError(f"advertise={self.advertise!r}: give a host without a port; each rank has its own")


def default_listen(host: str, port: int) -> str:
    """One text of vLLM's host and port. A host with colons wears brackets, whether it brings them or not."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def parse_host(text: str) -> str:
    """A host without its port."""
    return text.rpartition(":")[0] if text.count(":") == 1 or text.startswith("[") and "]:" in text else text


def _known() -> set[str]:
    own = {field.name for field in dataclasses.fields(Settings)} - {"config"}
    return own | _CONFIG_NAMES


def _config(environ: Mapping[str, str] | None, overrides: dict[str, Any]) -> Config:
    environ = os.environ if environ is None else environ
    for name in _CONFIG_FLAGS & overrides.keys():
        _checked_flag(name, overrides[name])
    is_said = "handshake_backoff_max_s" in overrides or "KVPUSH_HANDSHAKE_BACKOFF_MAX_S" in environ
    config = Config.from_env(environ, **overrides)
    if is_said:
        return config
    return dataclasses.replace(config, handshake_backoff_max_s=max(BACKOFF_MAX_S, config.handshake_backoff_min_s))


def _text(rest: dict[str, Any], name: str, default: str) -> str:
    value = rest.pop(name, default)
    if not isinstance(value, str):
        raise ConfigurationError(f"{name}={value!r} must be a string")
    return value


def _flag(rest: dict[str, Any], name: str, *, default: bool) -> bool:
    return _checked_flag(name, rest.pop(name, default))


def _checked_flag(name: str, value: object) -> bool:
    """In the words of JSON, where it was written."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r} must be true or false")
    return value
