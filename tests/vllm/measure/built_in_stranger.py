"""A decode engine that is none, for vLLM's own push connector. There a registration is a NIXL notification, so it needs
prefill's agent metadata, which prefill's side channel gives to everybody who asks."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
import zmq
from nixl._api import nixl_agent, nixl_agent_config

WAIT_S = 20.0


class BuiltInStranger:
    """Sends registrations to prefill."""

    def __init__(self, side_channel_port: int) -> None:
        context = zmq.Context()
        with context.socket(zmq.REQ) as line:
            line.setsockopt(zmq.LINGER, 0)
            line.connect(f"tcp://127.0.0.1:{side_channel_port}")
            line.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
            if not line.poll(int(WAIT_S * 1000)):
                raise AssertionError("prefill's side channel does not answer")
            payload = msgspec.msgpack.decode(line.recv_multipart()[0])
        context.term()
        self._agent = nixl_agent(f"stranger-{uuid.uuid4().hex}", nixl_agent_config(enable_prog_thread=True))
        metadata = msgspec.msgpack.decode(payload["agent_metadata_bytes"])
        self._prefill = self._agent.add_remote_agent(metadata["agent_metadata"])

    def register(self, **fields: Any) -> None:
        """Whatever the fields are."""
        self._agent.send_notif(self._prefill, b"PUSH_REG:" + msgspec.msgpack.encode(fields))

    def close(self) -> None:
        del self._agent
