"""``kv_transfer_params`` of a request: the words of vLLM's NIXL connectors, so that their routers and proxies need no
change.

A router sends a request to prefill with ``do_remote_decode``, and to decode with ``do_remote_prefill`` and prefill's
coordinates. *Sequential dispatch*: decode gets what prefill's answer brought. *Concurrent dispatch*: both get the
request at once, with a ``transfer_id`` that the router made up.

The transfer's name is the router's ``transfer_id``; without one, prefill's own request id, which its answer brings as
``remote_request_id``; last, the part of the request id that both sides share. Prefill cannot know which of the last
two decode will use, so it answers to both.

A name is somebody else's word: a list of prompts has one, and clients may use theirs again. So both sides add a digest
of the prompt to it, and what comes under a name is the KV of this very prompt.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpush import wire
from kvpush.endpoint import MAX_PORT, parse_address
from kvpush.errors import ConfigurationError, UsageError

Address = tuple[str, int]
Rank = tuple[int, int]  # pipeline rank, tensor rank

MAX_RANKS = 4096
DIGEST_BYTES = 12
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}")  # vLLM appends it to every request id that it takes in


class BadParams(ValueError):
    """Parameters that do not say where the KV of a prompt comes from, or that it is another prompt's. It is computed
    here instead."""


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """This engine computes the prompt; decode may ask for it by any of these names."""

    names: tuple[str, ...]
    prompt_digest: str

    @property
    def transfer_ids(self) -> tuple[str, ...]:
        """What the library knows it by."""
        return tuple(_transfer_id(name, self.prompt_digest) for name in self.names)


@dataclass(frozen=True, slots=True)
class Source:
    """One rank of a prefill engine. ``incarnation`` is empty where nobody has said which process it was."""

    address: Address
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """This engine generates; the prompt's KV comes from that engine."""

    transfer_id: str  # what the library knows it by
    engine_id: str
    sources: dict[Rank, Source]
    lease_s: float = 0.0  # for which prefill keeps the blocks, where it has said so

    @property
    def addresses(self) -> dict[Rank, Address]:
        """Where its ranks listen."""
        return {rank: source.address for rank, source in self.sources.items()}

    @property
    def incarnations(self) -> dict[Rank, str]:
        """Which processes hold the prompt's blocks."""
        return {rank: source.incarnation for rank, source in self.sources.items()}


def base_request_id(request_id: str) -> str:
    """The request id without the random end that vLLM gave it: the same on both sides of one request."""
    base, end = request_id[:-9], request_id[-9:]
    return base if base and _RANDOM_SUFFIX.fullmatch(end.lower()) else request_id


def prompt_digest(token_ids: Sequence[int] | None) -> str:
    """The same for the same tokens, on every engine; empty for a prompt that has none (embeddings)."""
    if token_ids is None:
        return ""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES).hexdigest()


def check_role(params: Mapping[str, Any] | None, *, is_producer: bool, is_consumer: bool) -> None:
    """Raise BadParams where a request asks for what this server does not do: a router that has mixed two up."""
    for asked, is_able, role in (
        ("do_remote_decode", is_producer, "kv_producer"),
        ("do_remote_prefill", is_consumer, "kv_consumer"),
    ):
        if params and params.get(asked) and not is_able:
            raise BadParams(f"{asked}: this server's kv_role is neither {role} nor kv_both")


def _transfer_id(name: str, digest: str) -> str:
    return f"{name}#{digest}" if digest else name


def prefill_leg(
    params: Mapping[str, Any] | None, request_id: str, token_ids: Sequence[int] | None = None
) -> PrefillLeg | None:
    """What a request to prefill asks for; ``None`` when it asks for nothing. Raises BadParams."""
    if not params or not params.get("do_remote_decode"):
        return None
    digest = prompt_digest(token_ids)
    given = params.get("transfer_id")
    if given is not None:
        return PrefillLeg((_name(given, "transfer_id", digest),), digest)
    own = _name(request_id, "request id", digest)
    return PrefillLeg(tuple(dict.fromkeys((own, base_request_id(own)))), digest)


def decode_leg(
    params: Mapping[str, Any] | None, request_id: str, token_ids: Sequence[int] | None = None
) -> DecodeLeg | None:
    """What a request to decode asks for; ``None`` when it asks for nothing. Raises BadParams."""
    if not params or not params.get("do_remote_prefill"):
        return None
    digest = prompt_digest(token_ids)
    if params.get("transfer_id") is not None:
        name = _name(params["transfer_id"], "transfer_id", digest)
    elif params.get("remote_request_id") is not None:
        name = _name(params["remote_request_id"], "remote_request_id", digest)
    else:
        name = base_request_id(_name(request_id, "request id", digest))
    transfer_id = _transfer_id(name, digest)
    engine_id = _name(params.get("remote_engine_id"), "remote_engine_id")
    _check_prompt(params.get("remote_transfer"), name, transfer_id, engine_id)
    return DecodeLeg(transfer_id, engine_id, _sources(params), _lease(params.get("remote_lease_s")))


def _check_prompt(remote: object, name: str, transfer_id: str, engine_id: str) -> None:
    """``remote``: the transfer that prefill's answer was about. A router may have put another name in its place."""
    if remote is None or remote == transfer_id:
        return
    if not isinstance(remote, str):
        raise BadParams(f"remote_transfer={remote!r} must be a string")
    if remote.rpartition("#")[0] == name:
        raise BadParams(f"prefill engine {engine_id!r} computed another prompt as {name!r}")


def answer(
    *,
    engine_id: str,
    request_id: str,
    leg: PrefillLeg,
    sources: Mapping[Rank, Source],
    num_tokens: int,
    lease_s: float,
) -> dict[str, Any]:
    """What prefill's answer brings: parameters that a router hands to decode as they are."""
    ranks = sorted(sources)
    host, port = sources[ranks[0]].address if ranks else ("", 0)
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_block_ids": [],  # decode does not need them: prefill writes
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1 + max((tp for _, tp in ranks), default=0),
        "pp_size": 1 + max((pp for pp, _ in ranks), default=0),
        "remote_num_tokens": num_tokens,
        "remote_transfer": leg.transfer_ids[0],
        "remote_lease_s": lease_s,
        "remote_sources": [[*rank, *sources[rank].address, sources[rank].incarnation] for rank in ranks],
        "transfer_mode": "push",
    }
    if len(leg.names) == 1:
        params["transfer_id"] = leg.names[0]
    return params


def _sources(params: Mapping[str, Any]) -> dict[Rank, Source]:
    """Prefill's ranks: as its answer said, or by the rule that their ports follow each other."""
    listed = params.get("remote_sources")
    try:
        if listed is not None:
            return _complete(
                {
                    (_count(pp), _count(tp)): Source(parse_address((host, port)).address, _text(incarnation))
                    for pp, tp, host, port, incarnation in listed
                }
            )
        host, first_port = params.get("remote_host"), _port(params.get("remote_port"))
        num_tp, num_pp = _size(params.get("tp_size")), _size(params.get("pp_size"))
        if num_tp * num_pp > MAX_RANKS:
            raise BadParams(f"tp_size={num_tp} times pp_size={num_pp} is more than {MAX_RANKS} ranks")
        return {
            (pp, tp): Source(parse_address((host, first_port + pp * num_tp + tp), "remote_host, remote_port").address)
            for pp in range(num_pp)
            for tp in range(num_tp)
        }
    except (ConfigurationError, TypeError, ValueError) as exc:
        raise BadParams(str(exc)) from exc


def _complete(sources: dict[Rank, Source]) -> dict[Rank, Source]:
    """An answer names every rank of its engine."""
    pp_size, tp_size = (1 + max((rank[i] for rank in sources), default=0) for i in (0, 1))
    if len(sources) != pp_size * tp_size:
        raise BadParams(
            f"remote_sources has ranks (pp, tp) {sorted(sources)[:8]}, and not all of {pp_size} x {tp_size}"
        )
    return sources


def _lease(value: object) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise BadParams(f"remote_lease_s={value!r} must be a number of seconds")
    return float(value)


def _name(value: object, what: str, digest: str = "") -> str:
    """It fits into a message, the digest and all."""
    try:
        name = wire.check_id(value, what)
        wire.check_id(_transfer_id(name, digest), f"{what} and the digest of the prompt")
    except UsageError as exc:
        raise BadParams(str(exc)) from exc
    return name


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise BadParams(f"{value!r} must be an incarnation")
    return value


def _port(value: object) -> int:
    """Some routers send it as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_PORT:
        raise BadParams(f"remote_port={value!r} must be a port")
    return value


def _size(value: object) -> int:
    return 1 if value is None else max(1, _count(value))


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_RANKS:
        raise BadParams(f"{value!r} must be a number of ranks")
    return value
