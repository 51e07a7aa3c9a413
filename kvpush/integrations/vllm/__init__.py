"""kvpush as a KV connector of vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvPushConnector",
        "kv_connector_module_path": "kvpush.integrations.vllm", "kv_role": "kv_producer"}'

Only :mod:`kvpush.integrations.vllm.connector` imports vLLM. Everything else here is plain Python over
``PrefillPusher`` and ``DecodeReceiver``, split as vLLM splits it: what the scheduler's process decides
(``prefill_scheduler``, ``decode_scheduler``), what a worker does with the library (``prefill_worker``,
``decode_worker``), and what travels between the two (``work``).
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvPushConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvPushConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpush.integrations.vllm.connector import KvPushConnector

    return KvPushConnector
