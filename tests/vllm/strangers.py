"""Decode engines that are none: they open a link to a prefill engine of vLLM's as a real one does, and then say what
nobody should say, or nothing any more."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
import zmq
from children import EngineProcess

from kvpush import wire
from kvpush.errors import RemoteProtocolError

WAIT_S = 20.0


def overheard_hello(decode: EngineProcess, prefill_id: str) -> wire.Hello:
    """What a real decode engine says first to the prefill engine of that id."""
    context = zmq.Context()
    try:
        with context.socket(zmq.ROUTER) as ear:
            ear.setsockopt(zmq.LINGER, 0)
            source = {
                "do_remote_prefill": True,
                "remote_engine_id": prefill_id,
                "remote_host": "127.0.0.1",
                "remote_port": ear.bind_to_random_port("tcp://127.0.0.1"),
                "transfer_id": "overheard",
            }
            decode.ask("overheard", [5] * 40, 1, source)
            if not ear.poll(int(WAIT_S * 1000)):
                raise AssertionError(f"{decode.log.name}: the decode engine dials nobody")
            _, *frames = ear.recv_multipart()
            decode.abort("overheard")
    finally:
        context.term()
    hello = wire.decode_to_prefill(frames)
    assert isinstance(hello, wire.Hello)
    return hello


class Stranger:
    """A link of its own to prefill's control port."""

    def __init__(self, port: int, engine_id: str) -> None:
        self.engine_id = engine_id
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, int(WAIT_S * 1000))
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def say(self, *frames: bytes) -> None:
        self._socket.send_multipart(list(frames))

    def hear(self) -> wire.ToDecode:
        """The next answer."""
        if not self._socket.poll(int(WAIT_S * 1000)):
            raise AssertionError(f"{self.engine_id} gets no answer")
        return wire.decode_to_decode(self._socket.recv_multipart())

    def enter(self, hello: wire.Hello) -> None:
        """Be taken for a decode engine with the same cache as the one that was overheard."""
        incarnation = uuid.uuid4().hex
        name = f"{self.engine_id}/0.0#{incarnation}"
        changes = {"engine_id": self.engine_id, "incarnation": incarnation, "agent_name": name}
        self.say(*wire.encode(msgspec.structs.replace(hello, **changes)))
        answer = self.hear()
        assert isinstance(answer, wire.Welcome), answer

    def register(self, transfer_id: str, num_blocks: int) -> None:
        """Ask for a transfer, as a real one would."""
        blocks = b"".join(block_id.to_bytes(4, "little") for block_id in range(1, num_blocks + 1))
        self.say(*wire.encode(wire.Register(transfer_id, 1, (wire.Want("kv", 0, blocks),), 60_000)))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def malformed_registrations(transfer_id: str) -> list[list[bytes]]:
    """Registrations of that transfer that are none: nothing of them can be used but the name."""
    register = wire.Register(transfer_id, 1, (wire.Want("kv", 0, b"\0" * 4),), 60_000)
    good = msgspec.to_builtins(register, builtin_types=(bytes,))
    fields = [field for field in good if field != "type"]
    odd: list[dict[str, Any]] = [{k: v for k, v in good.items() if k != field} for field in fields]
    odd += [good | {field: value} for field in fields for value in (None, -1, {}, "", 1e308)]
    odd += [good | {"wants": [want]} for want in (["kv"], ["kv", -1, b"", 0], ["kv", 0, "text", 0], [[], {}, 7])]
    preamble = wire.encode(wire.Heartbeat())[0]
    bodies = [msgspec.msgpack.encode(each) for each in odd]
    bodies += [b"", b"\xff" * 100, transfer_id.encode(), bodies[0][: len(bodies[0]) // 2]]
    messages = [[preamble, body] for body in bodies]
    messages += [[b"PUSH_REG:" + bodies[0]], [preamble], [preamble, bodies[0], b""]]
    for message in messages:
        try:
            wire.decode_to_prefill(message)
        except RemoteProtocolError:
            continue
        raise AssertionError(f"{message} is a proper message")
    return messages
