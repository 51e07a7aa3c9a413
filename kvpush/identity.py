"""Who one rank of an engine is: its names, its boot identity, and what must agree with a peer's."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from kvpush import wire
from kvpush.errors import Failure, FailureCode, Incompatible
from kvpush.layout import CacheGeometry, KVCacheSpec, compare, fingerprint
from kvpush.parallel import PER_RANK, Share
from kvpush.wire import Rank

# NIXL documents no limit for agent names, so a long engine id is cut and told apart by its hash
_MAX_SHOWN_BYTES = 128


@dataclass(frozen=True, slots=True)
class Identity:
    """One rank of one engine, in one life of its process."""

    engine_id: str
    incarnation: str  # random, new with every object: a restarted engine is another incarnation
    share: Share  # which rank of how many
    agent_name: str  # of its NIXL agent; carries the incarnation, so it is unique in the fleet and never used twice
    fingerprint: dict[str, str]
    holdings: tuple[wire.Holding, ...]  # by group: the size of its blocks, the names of its layers

    @property
    def rank(self) -> Rank:
        return self.share.rank

    @property
    def block_sizes_tokens(self) -> dict[str, int]:
        """By group."""
        return {holding.group: holding.block_size_tokens for holding in self.holdings}


def new_identity(engine_id: str, spec: KVCacheSpec, geometry: CacheGeometry) -> Identity:
    """A new incarnation of this engine's rank."""
    incarnation = uuid.uuid4().hex
    shown = engine_id
    if len(engine_id.encode()) > _MAX_SHOWN_BYTES:
        shown = f"{engine_id[:32]}~{hashlib.blake2b(engine_id.encode(), digest_size=8).hexdigest()}"
    agent_name = f"{shown}/{spec.pp_rank}.{spec.tp_rank}#{incarnation}"
    return Identity(engine_id, incarnation, spec.share, agent_name, fingerprint(geometry, spec), holdings_of(geometry))


def holdings_of(geometry: CacheGeometry) -> tuple[wire.Holding, ...]:
    """What a rank says it holds."""
    return tuple(
        wire.Holding(group.name, group.block_size_tokens, tuple(layer.name for layer in group.layers))
        for group in geometry.groups
    )


def mismatch(ours: Identity, hello: wire.Hello) -> Failure | None:
    """Why the decode engine that says Hello and this prefill engine cannot work together. It names both values."""
    if hello.expected_engine_id != ours.engine_id:
        return Failure(
            FailureCode.wrong_engine,
            f"decode engine {hello.engine_id!r} looks for prefill engine {hello.expected_engine_id!r}, "
            f"but {ours.engine_id!r} answers at this address",
        )
    differences = compare(
        _shared(ours.fingerprint, hello.block_sizes_tokens),
        _shared(hello.fingerprint, ours.block_sizes_tokens),
        f"prefill engine {ours.engine_id!r}",
        f"decode {hello.engine_id!r}",
    )
    if differences is not None:
        return Incompatible(differences)
    if hello.expected_share != ours.share:
        return Incompatible(
            f"decode engine {hello.engine_id!r} takes this address for {hello.expected_share}, but prefill "
            f"engine {ours.engine_id!r} is {ours.share} here: its source must name an address for each rank"
        )
    return None


def totals_told(hello: wire.Hello) -> tuple[int, ...]:
    """How the groups of whoever says Hello are spread over its ranks, as :mod:`kvpush.parallel` wants to know."""
    totals = []
    for group in hello.block_sizes_tokens:
        heads = hello.fingerprint.get(f"{group}.total_kv_heads")
        if heads is None:
            totals.append(PER_RANK)
        else:
            totals.append(int(heads) if heads.isascii() and heads.isdecimal() and len(heads) < 8 else 0)
    return tuple(totals)


def _shared(fingerprint: Mapping[str, str], groups: Mapping[str, int]) -> dict[str, str]:
    """Without the fields of groups that the other side has not: another stage of its pipeline may have them. That each
    layer of decode is written by one is decode's to check, when it knows all stages."""
    return {
        field: value for field, value in fingerprint.items() if "." not in field or field.rpartition(".")[0] in groups
    }
