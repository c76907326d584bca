"""The tagged JSON encoding of small state: counters, RNG, loader position, schedulers, options of an optimizer.

Owns which Python values small state may hold, and what they look like as JSON. Plain JSON forgets too much (a Counter's
int keys, tuples, infinities), pickle remembers too much (classes, hence code). So there is a closed set of types and no
class name anywhere; what is not in the set is refused with its path and a remedy.

    None, bool, int of 64 bits, finite float, str, list    themselves
    dict with str keys, none of them "$"                   a JSON object
    everything else below                                  {"$": tag, ...}

    tuple, set, frozenset                  {"$": "tuple", "items": [...]}      sets are sorted by their JSON
    other dict, OrderedDict, Counter       {"$": "dict", "items": [[key, value], ...]}      "ordered_dict", "counter"
    bytes, bytearray                       {"$": "bytes", "base64": "..."}     "bytearray"
    longer int                             {"$": "int", "hex": "-1f..."}
    nan, inf, -inf                         {"$": "float", "value": "nan"}
    str with lone surrogates               {"$": "str", "base64": "..."}       UTF-8, surrogates passed through
    numpy scalar                           {"$": "numpy", "dtype": "<f4", "base64": "..."}
    enum member                            {"$": "enum", "value": ...}         decodes to EnumValue
    TensorRef                              {"$": "tensor", "name": "...", "dtype": "F32"}   "kind", "order" if needed

Types must match exactly: a subclass would come back as its base, so it is refused. That holds for namedtuples too: a
restore could find their class only in a live object that has one, and an optimizer before its first step has none.
Dicts keep their order.

Knows no torch, and uses numpy only if it is already imported or a stored value needs it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import enum
import gc
import importlib
import math
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import msgspec

from harness.errors import SnapshotCorrupt, StateError

MAX_VALUES: Final = 10_000_000
"""Values in one small state, containers included: decoding them takes a few seconds and a gigabyte or two."""
MAX_DEPTH: Final = 64
"""Containers inside containers; more is a cycle or an attack. Some 6 frames each, so Python's limit of 1000 is far."""

_JSON_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_TAG: Final = "$"
_INT64: Final = range(-(2**63), 2**63)
_HEX: Final = re.compile(r"-?[1-9a-f][0-9a-f]*")
_NON_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_NUMPY_DTYPES: Final = frozenset(
    ("|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")
)

Path = tuple[str | int, ...]
"""Where a value is, from the root: str for a key, int for a position or an int key."""


@dataclass(frozen=True)
class TensorRef:
    """Stands in a tree in place of a tensor, whose bytes are in a shard.

    Attributes:
        name: the tensor's name in the shards, e.g. "model/transformer.h.0.weight".
        dtype: how a shard stores it, e.g. "F32".
        kind: how the stored elements become the value: "plain" as they are; "complex" pairs of reals in the last
            dimension; "numpy" and "numpy-complex" likewise, for a numpy array.
        order: dimensions from the slowest to the fastest in the live tensor's memory; empty when row-major. Shards are
            always row-major, but kernels may sum in memory order, so bit-identity needs it back.
    """

    name: str
    dtype: str
    kind: str = "plain"
    order: tuple[int, ...] = ()


KINDS: Final = frozenset({"plain", "complex", "numpy", "numpy-complex"})
"""What `TensorRef.kind` may be."""


@dataclass(frozen=True)
class EnumValue:
    """An enum member by its value. A restore looks up the class in the live object."""

    value: Any


def encode(tree: object, path: Path = ()) -> Any:
    """Return `tree` as a value that any JSON writer can write.

    Args:
        tree: small state.
        path: where `tree` itself stands, for messages.

    Raises:
        StateError: a type outside the closed set, or too deep; names the path, the type and the remedy.
    """
    return _encode(tree, list(path))


def decode(value: object) -> Any:
    """The inverse of `encode`. Executes nothing and imports nothing but numpy, where a numpy scalar was stored.

    Raises:
        SnapshotCorrupt: `encode` cannot have made this.
    """
    try:
        return _decode(value, 0)
    except RecursionError as err:  # the caller's own stack was nearly full
        raise SnapshotCorrupt("small state: nested too deep") from err


def dumps(tree: object) -> bytes:
    """`encode`, as JSON text. Equal trees give equal bytes. Raises StateError."""
    data = msgspec.json.encode(encode(tree))
    if _has_too_many(data):
        raise StateError(
            f"small state has more than {MAX_VALUES:,} values, and could not be read back: keep long lists of numbers "
            "in tensors"
        )
    return data


def loads(data: bytes) -> Any:
    """The inverse of `dumps`. Raises SnapshotCorrupt."""
    if _has_too_many(data):
        raise SnapshotCorrupt(f"small state has more than {MAX_VALUES:,} values")
    with _no_collections():
        try:
            value = msgspec.json.decode(data)
        except (ValueError, RecursionError) as err:
            raise SnapshotCorrupt(f"small state is not JSON: {str(err)[:200]}") from err
        return decode(value)


def _has_too_many(data: bytes) -> bool:
    """Return whether a JSON text has more values than a small state may have, without decoding it."""
    return _most_values(data) > MAX_VALUES and _most_values(_JSON_STRING.sub(b"", data)) > MAX_VALUES


def _most_values(data: bytes) -> int:
    """Return an upper bound of the number of values: each follows a comma or an opening bracket, or stands alone."""
    return 1 + data.count(b",") + data.count(b"[") + data.count(b"{")


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Suspend garbage collection: with millions of new containers, all reachable, it takes most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def same(a: object, b: object) -> bool:
    """Return whether two trees are equal with their types: True is not 1, 0.0 is not -0.0, and nan is nan.

    The order of a dict counts. A value outside the closed set equals only itself.
    """
    if a is b:
        return True
    if _is_numpy_scalar(a) and _is_numpy_scalar(b):
        return bool(a.dtype == b.dtype) and a.tobytes() == b.tobytes()  # type: ignore[attr-defined]
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    if isinstance(a, dict) and isinstance(b, dict):
        return len(a) == len(b) and all(
            same(key_a, key_b) and same(a[key_a], b[key_b]) for key_a, key_b in zip(a, b, strict=True)
        )
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (set, frozenset)) and isinstance(b, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, EnumValue) and isinstance(b, EnumValue):
        return same(a.value, b.value)
    return type(a) in (str, bytes, bytearray, int, bool, TensorRef) and a == b


def format_path(path: Sequence[str | int]) -> str:
    """Return a path as a user would write it: `scheduler.lr_lambdas[0]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[\w.]+", part):
            text += f".{part}" if text else part
        else:
            text += f"[{part[:80]!r}]"
    return text or "the state"


# Encoding ------------------------------------------------------------------------------------------------------------


def _encode(value: Any, path: list[str | int]) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if isinstance(value, enum.Enum):  # before int and str: an IntEnum is both
        return {_TAG: "enum", "value": _encode_inside(value.value, path, "value")}
    if kind is int:
        return value if value in _INT64 else {_TAG: "int", "hex": format(value, "x")}
    if kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if kind is str:
        return value if _is_unicode(value) else _bytes("str", value.encode(errors="surrogatepass"))
    if kind in (bytes, bytearray):
        return _bytes(kind.__name__, value)
    if kind is list:
        return _encode_items(value, path)
    if kind is tuple:
        return {_TAG: "tuple", "items": _encode_items(value, path)}
    if kind in (set, frozenset):
        return {_TAG: kind.__name__, "items": sorted(_encode_items(value, path), key=msgspec.json.encode)}
    if kind in _MAPPING_TAGS:
        return _encode_mapping(value, _MAPPING_TAGS[kind], path)
    if isinstance(value, EnumValue):
        return {_TAG: "enum", "value": _encode_inside(value.value, path, "value")}
    if isinstance(value, TensorRef):
        return _encode_tensor_ref(value)
    if _is_numpy_scalar(value):
        return _encode_numpy(value, path)
    return _refuse(value, path)


_MAPPING_TAGS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "ordered_dict", Counter: "counter"}


def _encode_inside(value: object, path: list[str | int], part: str | int) -> Any:
    if len(path) >= MAX_DEPTH:
        raise StateError(
            f"{format_path(path[:6])}… is nested more than {MAX_DEPTH} deep, or contains itself: "
            "keep a flat record of it in the state instead"
        )
    path.append(part)
    encoded = _encode(value, path)
    path.pop()
    return encoded


def _encode_items(items: Sequence[object] | set[object] | frozenset[object], path: list[str | int]) -> list[Any]:
    if len(path) < MAX_DEPTH and _are_plain_numbers(items):
        return list(items)
    return [_encode_inside(item, path, position) for position, item in enumerate(items)]


def _are_plain_numbers(items: Collection[Any]) -> bool:
    """Whether all are integers, or all floats, that are themselves in JSON. Of 600 in 30 µs; one by one takes 190."""
    kinds = set(map(type, items))
    if kinds == {int}:
        return min(items) in _INT64 and max(items) in _INT64
    return kinds == {float} and all(map(math.isfinite, items))


def _encode_mapping(mapping: dict[Any, Any], tag: str, path: list[str | int]) -> Any:
    if tag == "dict" and all(type(key) is str and key != _TAG and _is_unicode(key) for key in mapping):
        return {key: _encode_inside(value, path, key) for key, value in mapping.items()}
    items = []
    for key, value in mapping.items():
        part = key if type(key) in (str, int) else repr(key)[:80]
        items.append([_encode_inside(key, path, part), _encode_inside(value, path, part)])
    return {_TAG: tag, "items": items}


def _encode_tensor_ref(ref: TensorRef) -> Any:
    encoded: dict[str, Any] = {_TAG: "tensor", "name": ref.name, "dtype": ref.dtype}
    if ref.kind != "plain":
        encoded["kind"] = ref.kind
    if ref.order:
        encoded["order"] = list(ref.order)
    return encoded


def _encode_numpy(value: Any, path: list[str | int]) -> Any:
    dtype = value.dtype.newbyteorder("<")
    if dtype.str not in _NUMPY_DTYPES:
        _refuse(value, path, f"numpy {value.dtype}", "use .item(), or a numpy type of a fixed width of at most 64 bits")
    return {_TAG: "numpy", "dtype": dtype.str, "base64": _base64(value.astype(dtype).tobytes())}


def _bytes(tag: str, value: bytes | bytearray) -> Any:
    return {_TAG: tag, "base64": _base64(value)}


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_numpy_scalar(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _refuse(value: object, path: Sequence[str | int], what: str = "", remedy: str = "") -> NoReturn:
    kind = type(value)
    raise StateError(
        f"{format_path(path)}: cannot store {what or f'a {kind.__module__}.{kind.__qualname__}'}; "
        f"{remedy or _remedy(value)}"
    )


def _remedy(value: object) -> str:
    if isinstance(value, tuple):
        return "its type would be lost: use a plain tuple, or a dict with its fields"
    for base in (dict, list, set, frozenset, str, bytes, int, float):
        if isinstance(value, base):
            return f"its type would be lost: convert it to a plain {base.__name__} in state_dict()"
    if callable(value):
        return "keep the name or the numbers that it is made from in the state, and make it again in load_state_dict()"
    if hasattr(value, "state_dict"):
        return "call its state_dict() in yours, and its load_state_dict() in yours"
    if hasattr(value, "__array__"):
        return "arrays and tensors must be in the state_dict() of an object that is given to the Checkpointer"
    return "keep plain values (numbers, strings, lists, dicts, tensors) that it can be made from in the state instead"


# Decoding ------------------------------------------------------------------------------------------------------------


def _decode(value: object, depth: int) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if value in _INT64 else _corrupt("an integer beyond 64 bits without its tag")
    if isinstance(value, float):
        return value if math.isfinite(value) else _corrupt("a non-finite number without its tag")
    if depth >= 2 * MAX_DEPTH:
        _corrupt(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, list):
        return _decode_list(value, depth + 1)
    if not isinstance(value, dict):
        _corrupt(f"a {type(value).__name__}")
    if _TAG not in value:
        return {_string(key): _decode(item, depth + 1) for key, item in value.items()}
    tag = value[_TAG]
    decoder = _DECODERS.get(tag) if isinstance(tag, str) else None
    if decoder is None:
        _corrupt(f"unknown tag {str(tag)[:40]!r}")
    return decoder(value, depth + 1)


def _decode_items(value: dict[str, Any], depth: int) -> list[Any]:
    (items,) = _fields(value, "items")
    if not isinstance(items, list):
        _corrupt("items that are not a list")
    return _decode_list(items, depth)


def _decode_list(items: list[Any], depth: int) -> list[Any]:
    return list(items) if _are_plain_numbers(items) else [_decode(item, depth) for item in items]


def _decode_tuple(value: dict[str, Any], depth: int) -> Any:
    return tuple(_decode_items(value, depth))


def _decode_set(value: dict[str, Any], depth: int) -> Any:
    return _hashed(set, _decode_items(value, depth))


def _decode_frozenset(value: dict[str, Any], depth: int) -> Any:
    return _hashed(frozenset, _decode_items(value, depth))


def _decode_dict(value: dict[str, Any], depth: int) -> Any:
    pairs = _decode_items(value, depth)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        _corrupt("a dict's item that is not a pair")
    return _hashed(dict, pairs)


def _decode_ordered_dict(value: dict[str, Any], depth: int) -> Any:
    return OrderedDict(_decode_dict(value, depth))


def _decode_counter(value: dict[str, Any], depth: int) -> Any:
    return Counter(_decode_dict(value, depth))


def _hashed(build: Callable[[list[Any]], Any], items: list[Any]) -> Any:
    try:
        built = build(items)
    except TypeError as err:
        raise SnapshotCorrupt(f"small state: {err}") from err
    return built if len(built) == len(items) else _corrupt("a key or member twice")


def _decode_bytes(value: dict[str, Any], depth: int) -> Any:
    (text,) = _fields(value, "base64")
    return _unbase64(text)


def _decode_bytearray(value: dict[str, Any], depth: int) -> Any:
    return bytearray(_decode_bytes(value, depth))


def _decode_str(value: dict[str, Any], depth: int) -> Any:
    try:
        return _decode_bytes(value, depth).decode(errors="surrogatepass")
    except UnicodeDecodeError as err:
        raise SnapshotCorrupt(f"small state: {err}") from err


def _decode_int(value: dict[str, Any], depth: int) -> Any:
    (text,) = _fields(value, "hex")
    if not (isinstance(text, str) and _HEX.fullmatch(text)):
        _corrupt("an integer that is not hexadecimal")
    return int(text, 16)


def _decode_float(value: dict[str, Any], depth: int) -> Any:
    (text,) = _fields(value, "value")
    if not (isinstance(text, str) and text in _NON_FINITE):
        _corrupt("a float that is not one of nan, inf, -inf")
    return _NON_FINITE[text]


def _decode_numpy(value: dict[str, Any], depth: int) -> Any:
    dtype, text = _fields(value, "dtype", "base64")
    if not (isinstance(dtype, str) and dtype in _NUMPY_DTYPES):
        _corrupt(f"numpy dtype {str(dtype)[:40]!r}")
    data = _unbase64(text)
    if len(data) != int(dtype[2:]):
        _corrupt(f"{len(data)} bytes for a numpy {dtype}")
    try:
        # By name: this package does not depend on numpy, and only a process whose state holds numpy values comes here.
        numpy = importlib.import_module("numpy")
    except ImportError as err:
        raise StateError("this snapshot holds numpy values, and numpy is not installed: install it") from err
    return numpy.frombuffer(data, dtype).astype(numpy.dtype(dtype).newbyteorder("="))[0]


def _decode_enum(value: dict[str, Any], depth: int) -> Any:
    (inner,) = _fields(value, "value")
    return EnumValue(_decode(inner, depth))


def _decode_tensor(value: dict[str, Any], depth: int) -> Any:
    if not set(value) <= {_TAG, "name", "dtype", "kind", "order"} or not {"name", "dtype"} <= set(value):
        _corrupt(f"wrong fields of a tensor: {sorted(value)[:6]}")
    kind, order = value.get("kind", "plain"), value.get("order", [])
    if not (isinstance(kind, str) and kind in KINDS):
        _corrupt(f"tensor kind {str(kind)[:40]!r}")
    if not (isinstance(order, list) and all(type(dim) is int for dim in order)):
        _corrupt("a tensor's order that is not a list of integers")
    if sorted(order) != list(range(len(order))):
        _corrupt("a tensor's order that is not a permutation")
    return TensorRef(_string(value["name"]), _string(value["dtype"]), kind, tuple(order))


_DECODERS: Final[dict[str, Callable[[dict[str, Any], int], Any]]] = {
    "tuple": _decode_tuple,
    "set": _decode_set,
    "frozenset": _decode_frozenset,
    "dict": _decode_dict,
    "ordered_dict": _decode_ordered_dict,
    "counter": _decode_counter,
    "bytes": _decode_bytes,
    "bytearray": _decode_bytearray,
    "str": _decode_str,
    "int": _decode_int,
    "float": _decode_float,
    "numpy": _decode_numpy,
    "enum": _decode_enum,
    "tensor": _decode_tensor,
}


def _fields(value: dict[str, Any], *names: str) -> list[Any]:
    if set(value) != {_TAG, *names}:
        _corrupt(f"wrong fields of a {value[_TAG]}: {sorted(map(str, value))[:6]}")
    return [value[name] for name in names]


def _string(value: object) -> str:
    return value if isinstance(value, str) else _corrupt(f"a {type(value).__name__} instead of a string")


def _unbase64(text: object) -> bytes:
    try:
        return base64.b64decode(_string(text), validate=True)
    except (binascii.Error, ValueError) as err:
        raise SnapshotCorrupt(f"small state: not base64: {err}") from err


def _corrupt(why: str) -> NoReturn:
    raise SnapshotCorrupt(f"small state: {why}")
