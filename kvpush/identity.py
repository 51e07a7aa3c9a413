"""Who one rank of an engine is: its names, its boot identity, and what must agree with a peer's."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass

from kvpush import wire
from kvpush.errors import Failure, FailureCode, Incompatible
from kvpush.layout import CacheGeometry, KVCacheSpec, compare, fingerprint

# NIXL documents no limit for agent names, so a long engine id is cut and told apart by its hash
_MAX_SHOWN_BYTES = 128


@dataclass(frozen=True, slots=True)
class Identity:
    """One rank of one engine, in one life of its process."""

    engine_id: str
    incarnation: str  # random, new with every object: a restarted engine is another incarnation
    rank: tuple[int, int]  # (pp_rank, tp_rank)
    agent_name: str  # of its NIXL agent; carries the incarnation, so it is unique in the fleet and never used twice
    fingerprint: dict[str, str]


def new_identity(engine_id: str, spec: KVCacheSpec, geometry: CacheGeometry) -> Identity:
    """A new incarnation of this engine's rank."""
    incarnation = uuid.uuid4().hex
    shown = engine_id
    if len(engine_id.encode()) > _MAX_SHOWN_BYTES:
        shown = f"{engine_id[:32]}~{hashlib.blake2b(engine_id.encode(), digest_size=8).hexdigest()}"
    agent_name = f"{shown}/{spec.pp_rank}.{spec.tp_rank}#{incarnation}"
    return Identity(engine_id, incarnation, spec.rank, agent_name, fingerprint(geometry, spec))


def mismatch(ours: Identity, hello: wire.Hello) -> Failure | None:
    """Why the decode engine that says Hello and this prefill engine cannot work together. It names both values."""
    if hello.expected_engine_id != ours.engine_id:
        return Failure(
            FailureCode.wrong_engine,
            f"decode engine {hello.engine_id!r} looks for prefill engine {hello.expected_engine_id!r}, "
            f"but {ours.engine_id!r} answers at this address",
        )
    differences = compare(
        ours.fingerprint, hello.fingerprint, f"prefill engine {ours.engine_id!r}", f"decode {hello.engine_id!r}"
    )
    if differences is not None:
        return Incompatible(differences)
    if hello.rank != ours.rank:
        return Incompatible(
            f"rank (pp, tp): prefill engine {ours.engine_id!r} has {ours.rank}, "
            f"decode {hello.engine_id!r} has {hello.rank}"
        )
    return None
