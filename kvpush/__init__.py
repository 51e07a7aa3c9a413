"""kvpush: push the KV cache of finished prompts from prefill engines into remote decode engines with NIXL WRITE."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvpush.config import Config, HoldPolicy
from kvpush.errors import (
    Closed,
    ConfigurationError,
    Failure,
    FailureCode,
    IllegalTransition,
    Incompatible,
    KvpushError,
    QueueFull,
    RemoteProtocolError,
    TransferEnded,
    TransportError,
    UsageError,
)
from kvpush.events import (
    BlocksReleased,
    EngineSnapshot,
    Outcome,
    PushFinished,
    ReceiveFinished,
    StaleReason,
    Transition,
)
from kvpush.lifecycle import State

if TYPE_CHECKING:
    from kvpush.layout import KVCacheSpec, KVGroup
    from kvpush.loop import Health
    from kvpush.pusher import PrefillPusher
    from kvpush.receiver import DecodeReceiver
    from kvpush.side import CloseReport

__version__ = "0.1.0"

__all__ = [
    "BlocksReleased",
    "CloseReport",
    "Closed",
    "Config",
    "ConfigurationError",
    "DecodeReceiver",
    "EngineSnapshot",
    "Failure",
    "FailureCode",
    "Health",
    "HoldPolicy",
    "IllegalTransition",
    "Incompatible",
    "KVCacheSpec",
    "KVGroup",
    "KvpushError",
    "Outcome",
    "PrefillPusher",
    "PushFinished",
    "QueueFull",
    "ReceiveFinished",
    "RemoteProtocolError",
    "StaleReason",
    "State",
    "TransferEnded",
    "Transition",
    "TransportError",
    "UsageError",
    "__version__",
]

# What needs torch and nixl is imported when it is first asked for: a second faster for those who only read errors and
# settings, and `kvpush doctor` can say what is wrong with an installation that cannot import them.
_LAZY = {
    "CloseReport": "kvpush.side",
    "DecodeReceiver": "kvpush.receiver",
    "Health": "kvpush.loop",
    "KVCacheSpec": "kvpush.layout",
    "KVGroup": "kvpush.layout",
    "PrefillPusher": "kvpush.pusher",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvpush' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
