"""What prefill has loaded for one rank of a decode engine: its NIXL agent, and the plan of how to write to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpush.layout import CacheGeometry
from kvpush.parallel import Share
from kvpush.plan import PairPlan, pair
from kvpush.prefill_effects import LoadPeer
from kvpush.pushes import Piece
from kvpush.rows import Indices
from kvpush.transport import RemoteHandle, Transport


@dataclass(frozen=True, slots=True)
class Peer:
    """One generation of one rank."""

    remote: RemoteHandle | None  # None when there is nothing to write to it: it holds none of our layers
    plan: PairPlan

    def num_blocks(self, group: int) -> int:
        """Of its cache, in one of our groups."""
        return self.plan.groups[group].remote_num_blocks

    def len_bytes(self, piece: Piece) -> int:
        """What writing this piece moves."""
        return self.plan.groups[piece.group].slot_len_bytes(piece.layers) * len(piece.local_slots)

    def indices(self, pieces: Sequence[Piece]) -> tuple[Indices, Indices]:
        """Of all cells of these pieces, in the local and in the remote list."""
        pairs = [
            self.plan.groups[piece.group].indices(piece.layers, piece.local_slots, piece.remote_slots)
            for piece in pieces
        ]
        if len(pairs) == 1:
            return pairs[0]
        return np.concatenate([local for local, _ in pairs]), np.concatenate([remote for _, remote in pairs])


def load(effect: LoadPeer, transport: Transport, geometry: CacheGeometry, share: Share, min_tile_bytes: int) -> Peer:
    """Load a verified peer and prepare the descriptors of both sides. ``geometry`` and ``share`` are our own.

    Raises Failure: Incompatible when the two caches do not fit, TransportError from NIXL. Nothing stays loaded then.
    """
    plan = pair(
        geometry,
        effect.geometry,
        local_share=share,
        remote_share=effect.share,
        min_tile_bytes=min_tile_bytes,
    )
    if plan.writes_nothing:
        return Peer(None, plan)
    remote = transport.add_remote(
        effect.agent_name, effect.blob, effect.geometry.memory, plan.local_rows, plan.remote_rows
    )
    return Peer(remote, plan)


def unload(peer: Peer, transport: Transport) -> None:
    """Nothing is in flight to it."""
    if peer.remote is not None:
        transport.remove_remote(peer.remote)
