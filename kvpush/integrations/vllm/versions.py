"""Which releases of vLLM the connector is for. Checked when it is loaded, so that nobody finds out in production."""

from __future__ import annotations

import re

from kvpush.errors import ConfigurationError

FIRST = (0, 32)
BEYOND = (0, 33)
ALLOW_SETTING = "allow_untested_vllm"


def check_version(version: str, *, allow_untested: bool) -> None:
    """Raise ConfigurationError for a release of vLLM that the connector was not tested with."""
    if allow_untested or FIRST <= _release(version) < BEYOND:
        return
    raise ConfigurationError(
        f"vllm {version}: KvPushConnector is tested with vLLM {_shown(FIRST)} up to, but not including, "
        f"{_shown(BEYOND)}. Install one of these, or set {ALLOW_SETTING}: true in kv_connector_extra_config to try it"
    )


def minor_of(version: str) -> str:
    """``0.32`` of ``0.32.0+cpu``: the part that two engines must share."""
    return _shown(_release(version))


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _shown(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
