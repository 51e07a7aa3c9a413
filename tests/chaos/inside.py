"""The program of a :class:`networks.FarPeer`: one service, on the other end of the socket that argv names."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "processes"))

import peers  # noqa: E402

import kvpush  # noqa: E402


def config(settings: dict[str, Any]) -> kvpush.Config:
    return kvpush.Config(net_devices="eth0", **settings)


class FarPrefill(peers.PrefillService):
    def __init__(self, engine_id: str, shape: peers.Shape, listen: str, settings: dict[str, Any]) -> None:
        self.arena = peers.Arena(shape)
        self.side = kvpush.PrefillPusher(
            engine_id, self.arena.caches, shape.spec(), listen=listen, config=config(settings)
        )
        self.inbox = peers.Inbox(self.side)

    def drop_engine(self, engine_id: str) -> None:
        self.side.drop_engine(engine_id)


class FarDecode(peers.DecodeService):
    def __init__(self, engine_id: str, shape: peers.Shape, settings: dict[str, Any]) -> None:
        self.arena = peers.Arena(shape)
        self.side = kvpush.DecodeReceiver(engine_id, self.arena.caches, shape.spec(), config=config(settings))
        self.inbox = peers.Inbox(self.side)


if __name__ == "__main__":
    pipe = Connection(int(sys.argv[1]))
    name, arguments = pipe.recv()
    peers._serve({"FarPrefill": FarPrefill, "FarDecode": FarDecode}[name], arguments, pipe)
