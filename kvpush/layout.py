"""KV geometry: from an engine's tensors to the addresses and strides of their blocks.

Axes are named by letters (``KVCacheSpec.dims``), so that two sides can be matched by meaning and not by position:
``B`` block, ``K`` key/value, ``H`` head, ``N`` token in the block, ``D`` head size. Sizes, strides, dtype and device
are read from the tensors and never asked for.

A :class:`CacheGeometry` describes one process's cache and crosses the wire. Ours comes from :func:`geometry_of`; a
peer's comes from :func:`decode_geometry` and is believed only after :func:`check_geometry`.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvpush.errors import ConfigurationError, Failure, FailureCode, RemoteProtocolError
from kvpush.wire import MAX_REASON_BYTES

MAX_LAYERS = 4096
MAX_BLOCKS = 2**31 - 1  # block ids travel as uint32 and NIXL's indices are int32
MAX_NAME_CHARS = 512
MAX_MODEL_CHARS = 4096
MAX_GEOMETRY_BYTES = 4 << 20  # 4096 layers with names of 512 characters need 2.4 MiB
_ADDRESS_END = 2**63  # one past the last address: strides, spans and sums of them stay within int64

_KNOWN_AXES = "BKHND"
_REQUIRED_AXES = "BND"

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
class KVCacheSpec:
    """What the tensors cannot tell about a KV cache. Raises ConfigurationError naming the field and the value.

    ``dims`` names the axes of every tensor in order: ``B`` block, ``K`` key/value (size 2), ``H`` head, ``N`` token in
    the block, ``D`` head size. ``B``, ``N`` and ``D`` are required; a cache whose keys and values are separate tensors
    has no ``K``, one without heads (MLA) no ``H``.

    ``model`` is the engine's own compatibility string: weights, revision, quantization, whatever changes the meaning of
    the bytes. Two sides work together only if theirs are equal, character by character.

    ``total_kv_heads`` counts the model's KV heads over all tensor-parallel ranks; the default is the heads found here
    times ``tp_size``, which is wrong only where ranks hold copies of a head.
    """

    dims: str
    model: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    total_kv_heads: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dims, str):
            raise ConfigurationError(f"dims={self.dims!r} must be a string")
        if defect := _dims_defect(self.dims):
            raise ConfigurationError(defect)
        if not isinstance(self.model, str):
            raise ConfigurationError(f"model={self.model!r} must be a string")
        if defect := _text_defect(self.model, MAX_MODEL_CHARS):
            raise ConfigurationError(f"model={self.model[:64]!r} {defect}")
        self._check_rank("tp_rank", "tp_size")
        self._check_rank("pp_rank", "pp_size")
        if self.total_kv_heads is not None:
            self._check_count("total_kv_heads", least=1)

    @property
    def rank(self) -> tuple[int, int]:
        """``(pp_rank, tp_rank)``, as on the wire."""
        return self.pp_rank, self.tp_rank

    def _check_rank(self, rank_field: str, size_field: str) -> None:
        self._check_count(size_field, least=1)
        self._check_count(rank_field, least=0)
        rank, size = getattr(self, rank_field), getattr(self, size_field)
        if rank >= size:
            raise ConfigurationError(f"{rank_field}={rank!r} must be below {size_field}={size!r}")

    def _check_count(self, field: str, *, least: int) -> None:
        value = getattr(self, field)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise ConfigurationError(f"{field}={value!r} must be a whole number from {least} to {2**31 - 1}")


_Size = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_PerAxis = msgspec.Meta(max_length=len(_KNOWN_AXES))


class LayerGeometry(msgspec.Struct, frozen=True):
    """One named tensor. ``shape`` and ``strides_bytes`` are in the order of the cache's ``dims``.

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


class CacheGeometry(msgspec.Struct, frozen=True):
    """One process's KV cache: every layer has the same shape, dtype and kind of memory.

    ``num_blocks`` 0 or no layers can be decoded, because a peer may publish before it has registered its memory;
    :func:`check_geometry` tells that apart from a broken geometry.
    """

    memory: MemoryKind
    dims: Annotated[str, msgspec.Meta(max_length=len(_KNOWN_AXES))]
    dtype: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]  # torch's name without the module: "bfloat16"
    itemsize_bytes: Annotated[int, msgspec.Meta(ge=1, le=64)]
    num_blocks: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]
    layers: Annotated[tuple[LayerGeometry, ...], msgspec.Meta(max_length=MAX_LAYERS)]

    def axis_size(self, axis: str) -> int | None:
        """Size of an axis by its letter, ``None`` for an axis that this cache has not. There must be a layer."""
        return self.layers[0].shape[self.dims.index(axis)] if axis in self.dims else None


# --- ours: from tensors ----------------------------------------------------------------------------------------------


def geometry_of(kv_caches: Mapping[str, torch.Tensor], spec: KVCacheSpec) -> CacheGeometry:
    """Read the geometry of a cache from its tensors, one a name, each of shape ``spec.dims``.

    Tensors may be any strided views: permuted, sliced, several over one storage, interleaved. The caller keeps them
    alive and in place for as long as the geometry is in use.

    Raises ConfigurationError, naming the tensor and both values, when a tensor does not have the axes of ``spec.dims``,
    when two tensors differ in shape, dtype or device, when bytes are shared within a tensor or between two, or when the
    memory is neither a CPU's nor a CUDA device's.
    """
    first_name, first = _checked_tensors(kv_caches, spec)
    geometry = CacheGeometry(
        memory=_memory_kind(first_name, first),
        dims=spec.dims,
        dtype=str(first.dtype).removeprefix("torch."),
        itemsize_bytes=first.itemsize,
        num_blocks=first.shape[spec.dims.index("B")],
        layers=tuple(_layer_of(name, tensor) for name, tensor in kv_caches.items()),
    )
    if defect := _geometry_defect(geometry) or _shared_bytes_defect(geometry) or _heads_defect(geometry, spec):
        raise ConfigurationError(f"kv_caches: {defect}")
    return geometry


def _checked_tensors(kv_caches: Mapping[str, torch.Tensor], spec: KVCacheSpec) -> tuple[str, torch.Tensor]:
    """The first entry, once every entry is known to be a tensor like it."""
    if not isinstance(kv_caches, Mapping):
        raise ConfigurationError(f"kv_caches={type(kv_caches).__name__} must map layer names to tensors")
    if not 1 <= len(kv_caches) <= MAX_LAYERS:
        raise ConfigurationError(f"kv_caches has {len(kv_caches)} entries, not 1 to {MAX_LAYERS}")
    for name, tensor in kv_caches.items():
        _check_name(name)
        _check_tensor(name, tensor, spec.dims)
    first_name, first = next(iter(kv_caches.items()))
    for name, tensor in kv_caches.items():
        for attribute in ("dtype", "device"):
            ours, others = getattr(tensor, attribute), getattr(first, attribute)
            if ours != others:
                raise ConfigurationError(
                    f"kv_caches[{name!r}] has {attribute} {ours}, kv_caches[{first_name!r}] {others}"
                )
    return first_name, first


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


def _heads_defect(geometry: CacheGeometry, spec: KVCacheSpec) -> str | None:
    """Heads here against the model's heads: an even share, or one copy where there are more ranks than heads."""
    heads, total, tp_size = geometry.axis_size("H"), spec.total_kv_heads, spec.tp_size
    if heads is None or total is None or heads * tp_size == total:
        return None
    if heads == 1 and total < tp_size and tp_size % total == 0:
        return None
    return f"total_kv_heads={total} does not fit {heads} heads in each tensor and tp_size={tp_size}"


def memory_ranges(geometry: CacheGeometry) -> tuple[MemoryRange, ...]:
    """The ranges to register with NIXL, by device and address; every tensor lies in exactly one of them.

    Spans that intersect are merged, so views of one storage are registered once. In DRAM spans that merely touch are
    merged too. In VRAM they are not: two allocations may touch, and a range over both cannot be registered.
    """
    spans = sorted(
        (layer.device_id, layer.address, layer.address + layer.span_bytes(geometry.itemsize_bytes))
        for layer in geometry.layers
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
    if geometry.num_blocks == 0 or not geometry.layers:
        raise Failure(
            FailureCode.not_ready,
            f"the peer has published {geometry.num_blocks} blocks in {len(geometry.layers)} layers: no memory yet",
        )
    if defect := _geometry_defect(geometry):
        raise Failure(FailureCode.bad_metadata, f"geometry: {defect}")


# --- what must hold for any geometry ---------------------------------------------------------------------------------


def _geometry_defect(geometry: CacheGeometry) -> str | None:
    """What is wrong with a geometry that has layers, as a sentence; ``None`` when nothing is."""
    if defect := _dims_defect(geometry.dims):
        return defect
    itemsize = _ITEMSIZE_BYTES.get(geometry.dtype)
    if itemsize != geometry.itemsize_bytes:
        return f"dtype {geometry.dtype!r} has {itemsize or 'unknown'} bytes an item, not {geometry.itemsize_bytes}"
    first = geometry.layers[0]
    names = set()
    for layer in geometry.layers:
        if layer.name in names:
            return f"two layers are named {layer.name!r}"
        names.add(layer.name)
        if layer.shape != first.shape:
            return f"layer {layer.name!r} has shape {layer.shape}, layer {first.name!r} {first.shape}"
        if defect := _layer_defect(layer, geometry.itemsize_bytes):
            return f"layer {layer.name!r} {defect}"
    return _shape_defect(geometry)


def _shape_defect(geometry: CacheGeometry) -> str | None:
    shape = geometry.layers[0].shape
    if len(shape) != len(geometry.dims):
        return f"shape {shape} has {len(shape)} axes, dims {geometry.dims!r} names {len(geometry.dims)}"
    if geometry.axis_size("B") != geometry.num_blocks:
        return f"shape {shape} has {geometry.axis_size('B')} blocks, num_blocks is {geometry.num_blocks}"
    if geometry.num_blocks > MAX_BLOCKS:
        return f"{geometry.num_blocks} blocks; at most {MAX_BLOCKS} can be numbered"
    if geometry.axis_size("K") not in (None, 2):
        return f"axis K of shape {shape} has size {geometry.axis_size('K')}; key and value make 2"
    return None


def _layer_defect(layer: LayerGeometry, itemsize_bytes: int) -> str | None:
    if len(layer.strides_bytes) != len(layer.shape):
        return f"has {len(layer.strides_bytes)} strides for {len(layer.shape)} axes"
    covered = itemsize_bytes
    for stride, size in reversed(_axes(layer)):
        # Nested axes cannot overlap; slicing and permuting a tensor never makes any others.
        if stride < covered:
            return f"overlaps itself: shape {layer.shape} with strides of {layer.strides_bytes} bytes"
        covered += (size - 1) * stride
    if layer.address + covered > _ADDRESS_END:
        return f"ends beyond the address space: {covered} bytes from {layer.address:#x}"
    return None


def _axes(layer: LayerGeometry) -> tuple[tuple[int, int], ...]:
    """``(stride_bytes, size)`` of the axes longer than 1, longest stride first: they decide which bytes are used."""
    pairs = zip(layer.strides_bytes, layer.shape, strict=True)
    return tuple(sorted((pair for pair in pairs if pair[1] > 1), reverse=True))


def _shared_bytes_defect(geometry: CacheGeometry) -> str | None:
    """Two layers with a byte in common. Views of one storage may interleave: spans mix, bytes do not."""
    layers = sorted(geometry.layers, key=lambda layer: layer.address)
    addresses = np.array([layer.address for layer in layers], dtype=np.int64)
    for i, layer in enumerate(layers):
        end = layer.address + layer.span_bytes(geometry.itemsize_bytes)
        mixed = slice(i + 1, int(np.searchsorted(addresses, end)))
        axes = _axes(layer)
        if stranger := next((other for other in layers[mixed] if _axes(other) != axes), None):
            return (
                f"layers {layer.name!r} and {stranger.name!r} lie within each other with different strides, "
                "so they may share bytes"
            )
        shared = _meet(addresses[mixed] - layer.address, axes, geometry.itemsize_bytes)
        if shared.any():
            return f"layers {layer.name!r} and {layers[i + 1 + int(shared.argmax())].name!r} share bytes"
    return None


def _meet(
    distances: npt.NDArray[np.int64], axes: Sequence[tuple[int, int]], itemsize_bytes: int
) -> npt.NDArray[np.bool_]:
    """For each distance: does a tensor meet its own copy, moved by that many bytes?

    They meet when the distance is a sum of whole steps along the axes, each shorter than its axis. The axes are nested,
    so what is left after the longest one is shorter than its stride: only the two nearest numbers of steps can do.
    """
    if not axes:
        return np.abs(distances) < itemsize_bytes
    (stride, size), inner = axes[0], axes[1:]
    below = distances // stride
    meets = np.zeros(distances.shape, dtype=np.bool_)
    for steps in (below, below + 1):
        meets |= (np.abs(steps) < size) & _meet(distances - steps * stride, inner, itemsize_bytes)
    return meets


def _dims_defect(dims: str) -> str | None:
    for axis in dims:
        if axis not in _KNOWN_AXES:
            return f"dims={dims!r} has the axis {axis!r}; known: {', '.join(_KNOWN_AXES)}"
        if dims.count(axis) > 1:
            return f"dims={dims!r} names the axis {axis!r} twice"
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

_MAX_LISTED_CHARS = 2000
_MAX_SHOWN_CHARS = 200  # of one value in a refusal
_MAX_COMPARISON_CHARS = 3900
_ABSENT = "nothing"


def fingerprint(geometry: CacheGeometry, spec: KVCacheSpec) -> dict[str, str]:
    """Everything that two sides must have in common for the bytes to make sense, as text that a person can compare.

    Not part of it: how many blocks there are, where they lie, and in which order the axis ``B`` and the layers come.
    """
    return {
        "model": spec.model,
        "dtype": geometry.dtype,
        "axes": geometry.dims.replace("B", ""),
        "block_size_tokens": _text(geometry.axis_size("N")),
        "head_size": _text(geometry.axis_size("D")),
        "layers": _layer_names(geometry),
    } | _parallelism(geometry, spec)


def _parallelism(geometry: CacheGeometry, spec: KVCacheSpec) -> dict[str, str]:
    """How a model is spread over the ranks: both sides the same way."""
    heads = geometry.axis_size("H")
    total = None if heads is None else spec.total_kv_heads or heads * spec.tp_size
    return {
        "kv_heads": _text(heads),
        "total_kv_heads": _text(total),
        "tp_size": _text(spec.tp_size),
        "pp_size": _text(spec.pp_size),
    }


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


def _layer_names(geometry: CacheGeometry) -> str:
    """The names in order of the alphabet, or their number and digest where a list would be long or ambiguous."""
    names = sorted(layer.name for layer in geometry.layers)
    listed = ",".join(names)
    if len(listed) <= _MAX_LISTED_CHARS and listed.count(",") == len(names) - 1:
        return listed
    digest = hashlib.blake2b(msgspec.msgpack.encode(names), digest_size=16).hexdigest()
    return f"{len(names)} names, blake2b {digest}"


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
