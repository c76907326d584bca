"""The safetensors layout of a slot: names, dtypes and shapes in, byte ranges out; and a header back into ranges.

Owns the order of tensors in a shard, how they are divided among shards, and the header's bytes. A slot's bytes are the
files' bytes, so that writing a shard is one sequential copy and the trainer copies straight into place:

    | 8 bytes: length of JSON | JSON, padded with spaces | tensor | tensor | ... |
    0                         8                 a multiple of 4096              size

safetensors allows no holes between tensors. Every view is aligned all the same, because element sizes only fall: after
tensors of 8-byte elements comes a multiple of 8. Within one element size, multiples of 64 bytes come first, so that big
tensors also start on a cache line.

Knows no torch and does no I/O: sizes and names only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import msgspec

from harness.errors import SnapshotCorrupt, StateError

DTYPE_BYTES: Final = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
}
"""Bytes per element of every dtype that may stand in a shard."""

ALIGNMENT: Final = 4096
"""Where a shard's data starts: a page and a disk block, so that it can be mapped and written past the page cache."""

MAX_SHARD_BYTES: Final = 1024**3
MAX_FROZEN_SHARD_BYTES: Final = 256 * 1024**2
"""Smaller, because a store copies unchanged tensors by whole shards: if one frozen tensor changes after all (an average
that is kept by hand, say), no more than this is sent again."""
MAX_HEADER_BYTES: Final = 100_000_000
"""safetensors' own limit."""

_CACHE_LINE: Final = 64
_LENGTH: Final = struct.Struct("<Q")
_METADATA: Final = "__metadata__"
_MAX_INT: Final = 2**63 - 1


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be stored.

    Attributes:
        name: unique within the plan.
        dtype: a key of `DTYPE_BYTES`.
        shape: sizes of its dimensions; empty for a scalar.
        frozen: whether it is expected not to change during the run.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    frozen: bool = False

    @property
    def size(self) -> int:
        """Size in bytes."""
        return _tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Placed:
    """A tensor's place in a shard.

    Attributes:
        name: of the tensor.
        dtype: a key of `DTYPE_BYTES`.
        shape: sizes of its dimensions.
        offset: its first byte, from the start of the file; a multiple of its element size.
        size: bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class ShardLayout:
    """One shard, byte by byte.

    Attributes:
        index: its number within the rank, from 0.
        header: everything before the data.
        tensors: by offset, without holes.
        size: bytes of the whole file.
    """

    index: int
    header: bytes
    tensors: tuple[Placed, ...]
    size: int


def plan_shards(specs: Iterable[TensorSpec], max_shard_bytes: int = MAX_SHARD_BYTES) -> tuple[ShardLayout, ...]:
    """Divide tensors among shards and place every one. The same specs in any order give the same plan.

    Frozen tensors come first, in smaller shards of their own, which keep their numbers when the optimizer's state grows
    and are not sent again while they do not change. A tensor larger than a shard has a shard to itself.

    Raises:
        StateError: so many or so long names that a header exceeds safetensors' limit.
        ValueError: a name twice or not allowed, an unknown dtype, a negative dimension.
    """
    ordered = sorted(specs, key=_placement)
    names = {spec.name for spec in ordered}
    if len(names) != len(ordered) or _METADATA in names:
        raise ValueError(f"tensor names must be unique, and none of them {_METADATA}")
    groups = _divide([spec for spec in ordered if spec.frozen], min(max_shard_bytes, MAX_FROZEN_SHARD_BYTES))
    groups += _divide([spec for spec in ordered if not spec.frozen], max_shard_bytes)
    return tuple(_lay_out(index, group) for index, group in enumerate(groups))


def header_bytes(prefix: bytes, file_size: int) -> int:
    """Return how many bytes of a shard come before its data, from its first 8. `parse_header` needs so many.

    Raises:
        SnapshotCorrupt: the file cannot hold such a header.
    """
    if len(prefix) < _LENGTH.size or file_size < _LENGTH.size:
        _corrupt(f"a shard of {file_size} bytes has no header")
    (length,) = _LENGTH.unpack_from(prefix)
    if length > MAX_HEADER_BYTES:
        _corrupt(f"a shard's header of {length} bytes")
    if _LENGTH.size + length > file_size:
        _corrupt(f"a shard of {file_size} bytes ends inside its header of {length}")
    return _LENGTH.size + int(length)


def parse_header(prefix: bytes, file_size: int, index: int = 0) -> ShardLayout:
    """Parse a shard's header without trusting it. The result is as safe to map as a layout of `plan_shards`.

    Args:
        prefix: the file's first bytes, at least `header_bytes` of them.
        file_size: bytes of the whole file.
        index: the shard's number.

    Raises:
        SnapshotCorrupt: `plan_shards` and a copy of tensors cannot have made this file.
    """
    start = header_bytes(prefix, file_size)
    if len(prefix) < start:
        raise ValueError(f"{len(prefix)} bytes given of a header of {start}")
    if start % ALIGNMENT:
        _corrupt(f"a shard's data starts at {start}, not at a multiple of {ALIGNMENT}")
    header = bytes(prefix[:start])
    tensors = [_parse_tensor(name, entry, start) for name, entry in _parse_json(header[_LENGTH.size :]).items()]
    tensors.sort(key=lambda placed: (placed.offset, placed.size))
    end = start
    for placed in tensors:
        if placed.offset != end:
            _corrupt(f"tensor {placed.name[:120]!r} starts at {placed.offset}, the one before it ends at {end}")
        if placed.offset % DTYPE_BYTES[placed.dtype]:
            _corrupt(f"tensor {placed.name[:120]!r} is not aligned")
        end += placed.size
    if end != file_size:
        _corrupt(f"a shard has {file_size} bytes, its header says {end}")
    return ShardLayout(index, header, tuple(tensors), file_size)


# Planning ------------------------------------------------------------------------------------------------------------


def _placement(spec: TensorSpec) -> tuple[int, bool, int, str]:
    size = spec.size
    return -DTYPE_BYTES[spec.dtype], size % _CACHE_LINE != 0, -size, spec.name


def _divide(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not groups or spec.size > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(spec)
        room -= spec.size
    return groups


def _lay_out(index: int, specs: Sequence[TensorSpec]) -> ShardLayout:
    entries = {}
    offset = 0
    for spec in specs:
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offset, offset + spec.size]}
        offset += spec.size
    text = msgspec.json.encode(entries)
    text += b" " * (-(_LENGTH.size + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise StateError(
            f"the names of {len(specs)} tensors need a header of {len(text)} bytes; safetensors allows "
            f"{MAX_HEADER_BYTES}: pack small tensors into larger ones in state_dict()"
        )
    header = _LENGTH.pack(len(text)) + text
    tensors = []
    offset = len(header)
    for spec in specs:
        tensors.append(Placed(spec.name, spec.dtype, spec.shape, offset, spec.size))
        offset += spec.size
    return ShardLayout(index, header, tuple(tensors), offset)


def _tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"a shard cannot hold dtype {dtype[:40]!r}")
    size = DTYPE_BYTES[dtype]
    for dim in shape:
        if not 0 <= dim <= _MAX_INT:
            raise ValueError(f"a dimension of {dim}")
        size *= dim
        if size > _MAX_INT:  # checked at every step, so that a long hostile shape costs no big-integer arithmetic
            raise ValueError("a tensor of more than 2**63 bytes")
    return size


# Parsing -------------------------------------------------------------------------------------------------------------


def _parse_json(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        _corrupt("a shard's header does not start with '{'")
    try:
        # The standard library's parser, because it alone shows a key that appears twice.
        header = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_corrupt)
    except (ValueError, RecursionError) as err:
        raise SnapshotCorrupt(f"a shard's header is not JSON: {str(err)[:200]}") from err
    metadata = header.pop(_METADATA, {})
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        _corrupt("a shard's metadata is not a map of strings")
    return dict(header)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    return unique if len(unique) == len(pairs) else _corrupt("a name appears twice in a shard's header")


def _parse_tensor(name: str, entry: Any, start: int) -> Placed:
    if not (isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}):
        _corrupt(f"tensor {name[:120]!r} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and _is_int_list(shape) and _is_int_list(offsets) and len(offsets) == 2):
        _corrupt(f"tensor {name[:120]!r} has a field of a wrong type")
    try:
        size = _tensor_bytes(dtype, tuple(shape))
    except ValueError as err:
        raise SnapshotCorrupt(f"tensor {name[:120]!r}: {err}") from err
    begin, end = offsets
    if not 0 <= begin <= end <= _MAX_INT or end - begin != size:
        _corrupt(f"tensor {name[:120]!r} of {size} bytes has data_offsets {begin} to {end}")
    return Placed(name, dtype, tuple(shape), start + begin, size)


def _is_int_list(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _corrupt(why: str) -> NoReturn:
    raise SnapshotCorrupt(why)
