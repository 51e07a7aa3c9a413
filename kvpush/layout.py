"""KV geometry: from an engine's tensors to the addresses and strides of their blocks.

Axes are named by letters (``KVCacheSpec.dims``), so that two sides can be matched by meaning and not by position:
``B`` block, ``K`` key/value, ``H`` head, ``N`` token in the block, ``D`` head size; or ``B`` and ``S``, opaque state
that is copied whole. Sizes, strides, dtype and device are read from the tensors and never asked for.

Layers that share one block table are a *group*: full attention, sliding window, opaque state. Layers of one group are
alike in everything but their place; groups may differ in all of it.

A :class:`CacheGeometry` describes one process's cache and crosses the wire. Ours comes from :func:`geometry_of`; a
peer's comes from :func:`decode_geometry` and is believed only after :func:`check_geometry`.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch

from kvpush.errors import ConfigurationError, Failure, FailureCode, Incompatible, RemoteProtocolError
from kvpush.parallel import MAX_RANKS, NO_HEADS, PER_RANK, Share, heads_of
from kvpush.strided import Strided, axes_of, shared_bytes_defect
from kvpush.wire import MAX_REASON_BYTES

MAX_LAYERS = 4096  # of all groups together
MAX_GROUPS = 15  # a fingerprint has room for 64 values: the model, and four of each group
MAX_BLOCKS = 2**31 - 1  # block ids travel as uint32 and NIXL's indices are int32
MAX_NAME_CHARS = 512
MAX_GROUP_NAME_CHARS = 48
MAX_MODEL_CHARS = 4096
MAX_GEOMETRY_BYTES = 4 << 20  # 4096 layers with names of 512 characters need 2.4 MiB
_ADDRESS_END = 2**63  # one past the last address: strides, spans and sums of them stay within int64

DEFAULT_GROUP = "kv"  # its name where the spec names no groups

_KNOWN_AXES = "BKHNDS"
_MAX_AXES = 5
_REQUIRED_AXES = "BND"
_OPAQUE_AXES = "BS"

# Built once, so that a peer's dtype is looked up in a table and never as an attribute of a module.
_ITEMSIZE_BYTES = {
    str(value).removeprefix("torch."): value.itemsize
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


class MemoryKind(enum.StrEnum):
    """Where a cache lives, in NIXL's terms."""

    dram = "DRAM"
    vram = "VRAM"


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """A contiguous range of this process's memory that NIXL registers. ``length_bytes`` > 0."""

    address: int
    length_bytes: int
    device_id: int


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of a cache that share one block table. Raises ConfigurationError naming the field and the value.

    ``dims``, ``total_kv_heads`` and ``block_size_tokens`` default to those of the spec.

    A group with the axes ``B`` and ``S`` is opaque state:
    one block is copied whole, as one token, and nothing is known of its inside. Such state belongs to its
    tensor-parallel rank, so both sides must be equally parallel.
    """

    name: str
    layers: Sequence[str]
    dims: str | None = None
    total_kv_heads: int | None = None
    block_size_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"group name={self.name!r} must be a string that is not empty")
        if defect := _text_defect(self.name, MAX_GROUP_NAME_CHARS):
            raise ConfigurationError(f"group name={self.name[:64]!r} {defect}")
        if isinstance(self.layers, str) or not isinstance(self.layers, Sequence) or not self.layers:
            raise ConfigurationError(f"group {self.name!r}: layers={self.layers!r} must list the names of its layers")
        for layer in self.layers:
            if not isinstance(layer, str):
                raise ConfigurationError(f"group {self.name!r}: layers has {layer!r}; layer names are strings")
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.dims is not None:
            _check_dims(self.dims)
        if self.total_kv_heads is not None:
            _check_count("total_kv_heads", self.total_kv_heads, least=1)
        if self.block_size_tokens is not None:
            _check_count("block_size_tokens", self.block_size_tokens, least=1)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What the tensors cannot tell about a KV cache. Raises ConfigurationError naming the field and the value.

    ``dims`` names the axes of every tensor in order: ``B`` block, ``K`` key/value (size 2), ``H`` head, ``N`` token in
    the block, ``D`` head size. ``B``, ``N`` and ``D`` are required; a cache whose keys and values are separate tensors
    has no ``K``, one without heads (MLA) no ``H``: all tensor-parallel ranks hold the same bytes of it. ``BS`` is
    opaque state, see :class:`KVGroup`.

    ``model`` is the engine's own compatibility string: weights, revision, quantization, whatever changes the meaning of
    the bytes. Two sides work together only if theirs are equal, character by character.

    ``total_kv_heads`` counts the model's KV heads over all tensor-parallel ranks; the default is the heads found here
    times ``tp_size``, which is wrong only where ranks hold copies of a head.

    ``block_size_tokens`` is the engine's own block size where that is a multiple of the tensors' (one logical block is
    several kernel blocks, one after the other): block ids and positions then count the engine's blocks. The default is
    the size of the axis ``N``.

    ``groups`` says which layers share a block table, when not all of them do; every layer is in exactly one group.
    ``groups_share_memory`` permits layers of *different* groups to use the same bytes, for engines that give a page of
    memory to one group at a time: then a block of one group and a block of another may be the same page, and it is the
    engine's duty that a page belongs to one of them only. Layers of one group never share bytes.
    """

    dims: str
    model: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    total_kv_heads: int | None = None
    block_size_tokens: int | None = None
    groups: Sequence[KVGroup] = ()
    groups_share_memory: bool = False

    def __post_init__(self) -> None:
        _check_dims(self.dims)
        if not isinstance(self.model, str):
            raise ConfigurationError(f"model={self.model!r} must be a string")
        if defect := _text_defect(self.model, MAX_MODEL_CHARS):
            raise ConfigurationError(f"model={self.model[:64]!r} {defect}")
        self._check_rank("tp_rank", "tp_size")
        self._check_rank("pp_rank", "pp_size")
        if self.total_kv_heads is not None:
            _check_count("total_kv_heads", self.total_kv_heads, least=1)
        if self.block_size_tokens is not None:
            _check_count("block_size_tokens", self.block_size_tokens, least=1)
        if not isinstance(self.groups_share_memory, bool):
            raise ConfigurationError(f"groups_share_memory={self.groups_share_memory!r} must be True or False")
        self._check_groups()

    @property
    def rank(self) -> tuple[int, int]:
        """``(pp_rank, tp_rank)``, as on the wire."""
        return self.pp_rank, self.tp_rank

    @property
    def share(self) -> Share:
        """Which part of the model this rank holds."""
        return Share(self.pp_rank, self.pp_size, self.tp_rank, self.tp_size)

    def _check_rank(self, rank_field: str, size_field: str) -> None:
        rank, size = getattr(self, rank_field), getattr(self, size_field)
        _check_count(size_field, size, least=1, most=MAX_RANKS)
        _check_count(rank_field, rank, least=0, most=MAX_RANKS)
        if rank >= size:
            raise ConfigurationError(f"{rank_field}={rank!r} must be below {size_field}={size!r}")

    def _check_groups(self) -> None:
        if isinstance(self.groups, str) or not isinstance(self.groups, Sequence):
            raise ConfigurationError(f"groups={self.groups!r} must be a sequence of KVGroup")
        object.__setattr__(self, "groups", tuple(self.groups))
        if len(self.groups) > MAX_GROUPS:
            raise ConfigurationError(f"groups has {len(self.groups)} entries; at most {MAX_GROUPS} are possible")
        holders: dict[str, str] = {}
        names: set[str] = set()
        for group in self.groups:
            if not isinstance(group, KVGroup):
                raise ConfigurationError(f"groups has {group!r}, which is not a KVGroup")
            if group.name in names:
                raise ConfigurationError(f"groups: two are named {group.name!r}")
            names.add(group.name)
            for layer in group.layers:
                if layer in holders:
                    raise ConfigurationError(
                        f"groups: layer {layer!r} is in {holders[layer]!r} and in {group.name!r}; one is allowed"
                    )
                holders[layer] = group.name


def _check_dims(dims: object) -> None:
    if not isinstance(dims, str):
        raise ConfigurationError(f"dims={dims!r} must be a string")
    if defect := _dims_defect(dims):
        raise ConfigurationError(defect)


def _check_count(field: str, value: object, *, least: int, most: int = 2**31 - 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigurationError(f"{field}={value!r} must be a whole number from {least} to {most}")


_Size = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_PerAxis = msgspec.Meta(max_length=_MAX_AXES)


class LayerGeometry(msgspec.Struct, frozen=True):
    """One named tensor. ``shape`` and ``strides_bytes`` are in the order of the group's ``dims``.

    ``address`` is the byte address of element 0 of block 0. The stride of an axis of size 1 means nothing.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    shape: Annotated[tuple[_Size, ...], _PerAxis]
    strides_bytes: Annotated[tuple[_Bytes, ...], _PerAxis]
    address: _Bytes
    device_id: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

    def span_bytes(self, itemsize_bytes: int) -> int:
        """Bytes from the first byte of the tensor to its last, gaps included."""
        steps = zip(self.shape, self.strides_bytes, strict=True)
        return itemsize_bytes + sum((size - 1) * stride for size, stride in steps if size > 1)


class GroupGeometry(msgspec.Struct, frozen=True):
    """Layers that share one block table: every layer has the same shape and dtype. ``total_kv_heads`` counts the
    model's KV heads over all ranks; 0 in a group without the axis ``H``.

    ``num_blocks`` 0 or no layers can be decoded, because a peer may publish before it has registered its memory;
    :func:`check_geometry` tells that apart from a broken geometry.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GROUP_NAME_CHARS)]
    dims: Annotated[str, msgspec.Meta(max_length=_MAX_AXES)]
    dtype: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]  # torch's name without the module: "bfloat16"
    itemsize_bytes: Annotated[int, msgspec.Meta(ge=1, le=64)]
    num_blocks: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]
    total_kv_heads: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    layers: Annotated[tuple[LayerGeometry, ...], msgspec.Meta(max_length=MAX_LAYERS)]

    @property
    def is_opaque(self) -> bool:
        """Whether a block is state that is copied whole."""
        return "S" in self.dims

    @property
    def block_size_tokens(self) -> int:
        """Tokens in a block; 1 where a block is opaque state. There must be a layer."""
        return self.axis_size("N") or 1

    @property
    def block_len_bytes(self) -> int:
        """Length of one block over all layers. There must be a layer."""
        sizes = (size for axis, size in zip(self.dims, self.layers[0].shape, strict=True) if axis != "B")
        return len(self.layers) * self.itemsize_bytes * math.prod(sizes)

    @property
    def total(self) -> int:
        """How the group is spread over tensor-parallel ranks, in the terms of :mod:`kvpush.parallel`."""
        return PER_RANK if self.is_opaque else self.total_kv_heads

    def axis_size(self, axis: str) -> int | None:
        """Size of an axis by its letter, ``None`` for an axis that this group has not. There must be a layer."""
        return self.layers[0].shape[self.dims.index(axis)] if axis in self.dims else None


class CacheGeometry(msgspec.Struct, frozen=True):
    """One process's KV cache: groups of layers, all in one kind of memory."""

    memory: MemoryKind
    groups: Annotated[tuple[GroupGeometry, ...], msgspec.Meta(max_length=MAX_GROUPS)]


def totals_of(geometry: CacheGeometry) -> tuple[int, ...]:
    """How each group is spread over tensor-parallel ranks, as :mod:`kvpush.parallel` wants to know."""
    return tuple(group.total for group in geometry.groups)


# --- ours: from tensors ----------------------------------------------------------------------------------------------


def geometry_of(kv_caches: Mapping[str, torch.Tensor], spec: KVCacheSpec) -> CacheGeometry:
    """Read the geometry of a cache from its tensors, one a name, each of the shape that its group's ``dims`` name.

    Tensors may be any strided views: permuted, sliced, several over one storage, interleaved. The caller keeps them
    alive and in place for as long as the geometry is in use.

    Raises ConfigurationError, naming the tensor and both values, when a layer is in no group, or in a group but not in
    ``kv_caches``; when a tensor does not have the axes of its group; when two of a group differ in shape or dtype, or
    any two in their device; when bytes are shared within a tensor or between two (see ``groups_share_memory``); when
    heads do not fit the spec's share; or when the memory is neither a CPU's nor a CUDA device's.
    """
    groups = _groups_of(kv_caches, spec)
    dims_by_layer = {layer: group.dims or spec.dims for group in groups for layer in group.layers}
    for name, tensor in kv_caches.items():
        _check_tensor(name, tensor, dims_by_layer[name])
    first_name, first = next(iter(kv_caches.items()))
    for name, tensor in kv_caches.items():
        _check_alike("device", first_name, first, name, tensor)
    geometry = CacheGeometry(
        memory=_memory_kind(first_name, first),
        groups=tuple(_group_of(group, kv_caches, spec) for group in groups),
    )
    defect = (
        _geometry_defect(geometry)
        or _shared_defect(geometry, spec.groups_share_memory)
        or _each(_heads_defect(group, spec.share) for group in geometry.groups)
    )
    if defect:
        raise ConfigurationError(f"kv_caches: {defect}")
    return geometry


def _groups_of(kv_caches: Mapping[str, torch.Tensor], spec: KVCacheSpec) -> tuple[KVGroup, ...]:
    """The spec's groups, or one of all layers, once every layer is known to be in exactly one of them."""
    if not isinstance(kv_caches, Mapping):
        raise ConfigurationError(f"kv_caches={type(kv_caches).__name__} must map layer names to tensors")
    if not 1 <= len(kv_caches) <= MAX_LAYERS:
        raise ConfigurationError(f"kv_caches has {len(kv_caches)} entries, not 1 to {MAX_LAYERS}")
    for name in kv_caches:
        _check_name(name)
    groups = tuple(spec.groups) or (KVGroup(DEFAULT_GROUP, tuple(kv_caches)),)
    grouped = {layer: group.name for group in groups for layer in group.layers}
    for name in kv_caches:
        if name not in grouped:
            raise ConfigurationError(f"kv_caches[{name!r}] is in none of the groups {[g.name for g in groups]}")
    for layer, group in grouped.items():
        if layer not in kv_caches:
            raise ConfigurationError(f"group {group!r} names the layer {layer!r}, which kv_caches has not")
    return groups


def _group_of(group: KVGroup, kv_caches: Mapping[str, torch.Tensor], spec: KVCacheSpec) -> GroupGeometry:
    """A group's geometry, once its tensors are known to be of one dtype."""
    first_name = group.layers[0]
    first = kv_caches[first_name]
    for name in group.layers:
        _check_alike("dtype", first_name, first, name, kv_caches[name])
    dims = group.dims or spec.dims
    total = NO_HEADS
    if "H" in dims:
        total = group.total_kv_heads or spec.total_kv_heads or first.shape[dims.index("H")] * spec.tp_size
    return GroupGeometry(
        name=group.name,
        dims=dims,
        dtype=str(first.dtype).removeprefix("torch."),
        itemsize_bytes=first.itemsize,
        num_blocks=first.shape[dims.index("B")],
        total_kv_heads=total,
        layers=tuple(_layer_of(name, kv_caches[name]) for name in group.layers),
    )


def _check_alike(attribute: str, first_name: str, first: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
    ours, others = getattr(tensor, attribute), getattr(first, attribute)
    if ours != others:
        raise ConfigurationError(f"kv_caches[{name!r}] has {attribute} {ours}, kv_caches[{first_name!r}] {others}")


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise ConfigurationError(f"kv_caches has the key {name!r}; layer names are strings")
    if defect := _text_defect(name, MAX_NAME_CHARS):
        raise ConfigurationError(f"kv_caches has the key {name[:64]!r}, which {defect}")
    if not name:
        raise ConfigurationError("kv_caches has the key ''; a layer needs a name")


def _check_tensor(name: str, tensor: object, dims: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigurationError(f"kv_caches[{name!r}] is {type(tensor).__name__}, not a torch.Tensor")
    if tensor.layout is not torch.strided:
        raise ConfigurationError(f"kv_caches[{name!r}] has layout {tensor.layout}; only strided tensors have addresses")
    if tensor.ndim != len(dims):
        raise ConfigurationError(
            f"kv_caches[{name!r}] has {tensor.ndim} axes, shape {tuple(tensor.shape)}; dims={dims!r} names {len(dims)}"
        )
    if 0 in tensor.shape:
        raise ConfigurationError(f"kv_caches[{name!r}] has shape {tuple(tensor.shape)}: no axis may have size 0")


def _memory_kind(name: str, tensor: torch.Tensor) -> MemoryKind:
    kinds = {"cpu": MemoryKind.dram, "cuda": MemoryKind.vram}
    try:
        return kinds[tensor.device.type]
    except KeyError:
        raise ConfigurationError(f"kv_caches[{name!r}] is on {tensor.device}; supported: cpu, cuda") from None


def _layer_of(name: str, tensor: torch.Tensor) -> LayerGeometry:
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return LayerGeometry(
        name=name,
        shape=tuple(tensor.shape),
        # torch leaves arbitrary strides on axes of size 1
        strides_bytes=tuple(stride * tensor.itemsize if size > 1 else 0 for size, stride in axes),
        address=tensor.data_ptr(),
        device_id=max(tensor.get_device(), 0),  # -1 on the CPU
    )


def _heads_defect(group: GroupGeometry, share: Share) -> str | None:
    """Heads here against the model's heads: an even share, or one copy where there are more ranks than heads."""
    heads = group.axis_size("H")
    if heads is None:
        return None
    try:
        expected = len(heads_of(*share.tp, group.total_kv_heads))
    except Incompatible as exc:
        return f"group {group.name!r}: {exc.reason}"
    if heads == expected:
        return None
    return (
        f"group {group.name!r}: total_kv_heads={group.total_kv_heads} does not fit {heads} heads in each tensor and "
        f"tp_size={share.tp_size}, which makes {expected}"
    )


def memory_ranges(geometry: CacheGeometry) -> tuple[MemoryRange, ...]:
    """The ranges to register with NIXL, by device and address; every tensor lies in exactly one of them.

    Spans that intersect are merged, so views of one storage are registered once. In DRAM spans that merely touch are
    merged too. In VRAM they are not: two allocations may touch, and a range over both cannot be registered.
    """
    spans = sorted(
        (layer.device_id, layer.address, layer.address + layer.span_bytes(group.itemsize_bytes))
        for group in geometry.groups
        for layer in group.layers
    )
    reach = 1 if geometry.memory is MemoryKind.dram else 0
    merged: list[tuple[int, int, int]] = []
    for device_id, start, end in spans:
        if merged and merged[-1][0] == device_id and start < merged[-1][2] + reach:
            _, first, last = merged.pop()
            start, end = first, max(end, last)
        merged.append((device_id, start, end))
    return tuple(MemoryRange(start, end - start, device_id) for device_id, start, end in merged)


# --- a peer's: from the wire -----------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CacheGeometry)


def encode_geometry(geometry: CacheGeometry) -> bytes:
    """The wire form: msgpack, about 100 bytes a layer."""
    return _encoder.encode(geometry)


def decode_geometry(raw: bytes) -> CacheGeometry:
    """A peer's geometry, every number within its bounds but nothing more: :func:`check_geometry` comes next.

    Unknown fields are ignored. Raises RemoteProtocolError.
    """
    if len(raw) > MAX_GEOMETRY_BYTES:
        raise RemoteProtocolError(f"a geometry of {len(raw)} bytes; at most {MAX_GEOMETRY_BYTES} are read")
    try:
        return _decoder.decode(raw)
    # RecursionError: deeply nested junk; UnicodeDecodeError: a str that is not UTF-8
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RemoteProtocolError(f"undecodable geometry: {exc}"[:MAX_REASON_BYTES]) from exc


def check_geometry(geometry: CacheGeometry) -> None:
    """Refuse a geometry whose numbers contradict each other.

    Raises ``Failure(not_ready)`` when there is nothing to write into yet, ``Failure(bad_metadata)`` for all the rest.
    """
    if not geometry.groups:
        raise Failure(FailureCode.not_ready, "the peer has published no group of layers: no memory yet")
    for group in geometry.groups:
        if group.num_blocks == 0 or not group.layers:
            raise Failure(
                FailureCode.not_ready,
                f"the peer has published {group.num_blocks} blocks in {len(group.layers)} layers of group "
                f"{group.name!r}: no memory yet",
            )
    if defect := _geometry_defect(geometry):
        raise Failure(FailureCode.bad_metadata, f"geometry: {defect}")


# --- what must hold for any geometry ---------------------------------------------------------------------------------


def _geometry_defect(geometry: CacheGeometry) -> str | None:
    """What is wrong with a geometry whose groups have layers, as a sentence; ``None`` when nothing is."""
    holders: dict[str, str] = {}
    names: set[str] = set()
    for group in geometry.groups:
        if group.name in names:
            return f"two groups are named {group.name!r}"
        names.add(group.name)
        for layer in group.layers:
            if layer.name in holders:
                where = f"in groups {holders[layer.name]!r} and {group.name!r}"
                return f"two layers are named {layer.name!r}, {where}"
            holders[layer.name] = group.name
        if defect := _group_defect(group):
            return f"group {group.name!r}: {defect}"
    if len(holders) > MAX_LAYERS:
        return f"{len(holders)} layers; at most {MAX_LAYERS} are possible"
    return None


def _group_defect(group: GroupGeometry) -> str | None:
    if defect := _dims_defect(group.dims):
        return defect
    itemsize = _ITEMSIZE_BYTES.get(group.dtype)
    if itemsize != group.itemsize_bytes:
        return f"dtype {group.dtype!r} has {itemsize or 'unknown'} bytes an item, not {group.itemsize_bytes}"
    first = group.layers[0]
    for layer in group.layers:
        if layer.shape != first.shape:
            return f"layer {layer.name!r} has shape {layer.shape}, layer {first.name!r} {first.shape}"
        if defect := _layer_defect(layer, group.itemsize_bytes):
            return f"layer {layer.name!r} {defect}"
    return _shape_defect(group)


def _shape_defect(group: GroupGeometry) -> str | None:
    shape = group.layers[0].shape
    if len(shape) != len(group.dims):
        return f"shape {shape} has {len(shape)} axes, dims {group.dims!r} names {len(group.dims)}"
    if group.axis_size("B") != group.num_blocks:
        return f"shape {shape} has {group.axis_size('B')} blocks, num_blocks is {group.num_blocks}"
    if group.num_blocks > MAX_BLOCKS:
        return f"{group.num_blocks} blocks; at most {MAX_BLOCKS} can be numbered"
    if group.axis_size("K") not in (None, 2):
        return f"axis K of shape {shape} has size {group.axis_size('K')}; key and value make 2"
    return _total_defect(group)


def _total_defect(group: GroupGeometry) -> str | None:
    heads = group.axis_size("H") or 0
    if bool(heads) != bool(group.total_kv_heads) or heads > group.total_kv_heads:
        return f"{heads} heads in each tensor of {group.total_kv_heads} in all"
    return None


def _layer_defect(layer: LayerGeometry, itemsize_bytes: int) -> str | None:
    if len(layer.strides_bytes) != len(layer.shape):
        return f"has {len(layer.strides_bytes)} strides for {len(layer.shape)} axes"
    covered = itemsize_bytes
    for stride, size in reversed(axes_of(layer.shape, layer.strides_bytes)):
        # Nested axes cannot overlap; slicing and permuting a tensor never makes any others.
        if stride < covered:
            return f"overlaps itself: shape {layer.shape} with strides of {layer.strides_bytes} bytes"
        covered += (size - 1) * stride
    if layer.address + covered > _ADDRESS_END:
        return f"ends beyond the address space: {covered} bytes from {layer.address:#x}"
    return None


def _shared_defect(geometry: CacheGeometry, groups_share_memory: bool) -> str | None:
    """Two layers with a byte in common: any two, or any two of one group."""
    by_group = [
        [
            Strided(layer.name, layer.address, axes_of(layer.shape, layer.strides_bytes), group.itemsize_bytes)
            for layer in group.layers
        ]
        for group in geometry.groups
    ]
    if groups_share_memory:
        return _each(shared_bytes_defect(layers) for layers in by_group)
    defect = shared_bytes_defect(list(itertools.chain.from_iterable(by_group)))
    if defect and not _each(shared_bytes_defect(layers) for layers in by_group):
        return f"{defect}; layers of different groups may only with groups_share_memory=True"
    return defect


def _each(defects: Iterable[str | None]) -> str | None:
    """The first defect, if there is one."""
    return next(filter(None, defects), None)


def _dims_defect(dims: str) -> str | None:
    for axis in dims:
        if axis not in _KNOWN_AXES:
            return f"dims={dims!r} has the axis {axis!r}; known: {', '.join(_KNOWN_AXES)}"
        if dims.count(axis) > 1:
            return f"dims={dims!r} names the axis {axis!r} twice"
    if "S" in dims:
        return (
            None if sorted(dims) == sorted(_OPAQUE_AXES) else f"dims={dims!r}: opaque state has the axes B and S only"
        )
    missing = [axis for axis in _REQUIRED_AXES if axis not in dims]
    return f"dims={dims!r} lacks the axis {missing[0]!r}" if missing else None


def _text_defect(text: str, max_chars: int) -> str | None:
    """What keeps a text from crossing the wire."""
    if len(text) > max_chars:
        return f"has {len(text)} characters; at most {max_chars} are allowed"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has characters that UTF-8 cannot carry"
    return None


# --- what two sides must agree on ------------------------------------------------------------------------------------

_MAX_SHOWN_CHARS = 200  # of one value in a refusal
_MAX_COMPARISON_CHARS = 3900
_ABSENT = "nothing"


def fingerprint(geometry: CacheGeometry, spec: KVCacheSpec) -> dict[str, str]:
    """Everything that two sides must have in common for the bytes to make sense, as text that a person can compare.

    Not part of it: how a model is spread over ranks, which layers are here, how many tokens a block has, how many
    blocks there are, where they lie, and the order of anything. Plans bridge all that, or say why they cannot.
    """
    common = {"model": spec.model}
    for group in geometry.groups:
        common |= {f"{group.name}.{field}": value for field, value in _group_fingerprint(group).items()}
    return common


def _group_fingerprint(group: GroupGeometry) -> dict[str, str]:
    fields = {"dtype": group.dtype, "axes": "".join(sorted(group.dims.replace("B", "")))}
    if group.is_opaque:
        return fields | {"state_size": str(group.axis_size("S"))}
    return fields | {
        "head_size": str(group.axis_size("D")),
        "total_kv_heads": str(group.total_kv_heads or ""),
    }


def compare(ours: Mapping[str, str], theirs: Mapping[str, str], our_name: str, their_name: str) -> str | None:
    """``None`` when both fingerprints are equal; else one sentence that names each differing field with both values.

    The comparison is exact; a field that one side lacks differs. Long values are shown around their first difference,
    and the sentence always fits into a message.
    """
    fields = [*ours, *sorted(theirs.keys() - ours.keys())]
    differences = [
        f"{field[:64]}: {our_name} has {our_text}, {their_name} has {their_text}"
        for field in fields
        if ours.get(field) != theirs.get(field)
        for our_text, their_text in [_shown_pair(ours.get(field), theirs.get(field))]
    ]
    if not differences:
        return None
    sentence = "; ".join(differences)
    return sentence if len(sentence) <= _MAX_COMPARISON_CHARS else sentence[: _MAX_COMPARISON_CHARS - 1] + "…"


def _shown_pair(ours: str | None, theirs: str | None) -> tuple[str, str]:
    start = 0
    if ours is not None and theirs is not None and max(len(ours), len(theirs)) > _MAX_SHOWN_CHARS:
        start = max(0, _first_difference(ours, theirs) - _MAX_SHOWN_CHARS // 2)
    return _shown(ours, start), _shown(theirs, start)


def _shown(value: str | None, start: int) -> str:
    if value is None:
        return _ABSENT
    shown = repr(value[start : start + _MAX_SHOWN_CHARS])
    return f"{'…' if start else ''}{shown}{'…' if len(value) > start + _MAX_SHOWN_CHARS else ''}"


def _first_difference(ours: str, theirs: str) -> int:
    # Our own values are no longer than this; how long a peer's are is the peer's choice.
    pairs = zip(ours[:MAX_MODEL_CHARS], theirs[:MAX_MODEL_CHARS], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs), MAX_MODEL_CHARS))
