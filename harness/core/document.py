"""The export of a snapshot: which document is exported, and the layout of its one safetensors file. No I/O.

Owns the *document*: small state, or one state of it, in the tagged encoding of `harness.core.tree`, still encoded: to
decode a numpy scalar, numpy would be needed. Its tensor references say which tensors the file holds.

    {"model": {key: reference, ...}, "optimizer": {...}, "step": 12000, "rng": ..., ...}       the whole
    {key: reference, ...}                                                                      only "model"
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from harness.core import tree
from harness.core.shard import ALIGNMENT, MAX_HEADER_BYTES, Placed, TensorSpec, plan_shards
from harness.core.tree import TensorRef
from harness.errors import ConfigError, SnapshotCorrupt, StateError

_LENGTH: Final = struct.Struct("<Q")
_METADATA: Final = "__metadata__"
_ONE_FILE: Final = 2**63 - 1

_Path = tuple[str, ...]


@dataclass(frozen=True)
class FileLayout:
    """The layout of a safetensors file, before its tensors are written.

    Attributes:
        header: its first bytes.
        size: bytes of the whole file.
        targets: where in the file each stored tensor goes; a tied one may go to several places.
    """

    header: bytes
    size: int
    targets: Mapping[str, Sequence[int]]

    @property
    def tensors(self) -> int:
        """Number of tensor names in the file; every name of a tied tensor counts."""
        return sum(map(len, self.targets.values()))


def pick(states: Sequence[bytes], only: str | None) -> Any:
    """Return the document: the state named `only`, or every state by its name, together with step, rng and the rest.

    Of several ranks it is the first one's, and what of a model others have besides (a stage of a pipeline).

    Args:
        states: the whole small state of each rank.
        only: a state's name, or `None` for everything.

    Raises:
        ConfigError: the snapshot has no such state, or no states because no Checkpointer has written it.
        SnapshotCorrupt: a Checkpointer does not write such small state.
    """
    try:
        small, *others = (msgspec.json.decode(state) for state in states)
    except (ValueError, RecursionError) as err:
        raise SnapshotCorrupt(f"small state is not JSON: {str(err)[:200]}") from err
    for other in others:
        if isinstance(small, dict) and isinstance(other, dict):
            _add_missing(small.get("states"), other.get("states"))
    nodes = small.pop("states", None) if isinstance(small, dict) else None
    if nodes is None:
        raise ConfigError("this snapshot was not written by a Checkpointer: it holds no named states")
    if not isinstance(nodes, dict) or not all(isinstance(node, dict) and "state" in node for node in nodes.values()):
        raise SnapshotCorrupt("the states in small state do not have the form that a Checkpointer writes")
    if only is None:
        return small | {name: node["state"] for name, node in nodes.items()}
    if only not in nodes:
        raise ConfigError(f"this snapshot holds no state {only[:80]!r}; it holds {', '.join(nodes)}")
    return nodes[only]["state"]


def _add_missing(into: Any, other: Any, depth: int = 0) -> None:
    """Add to an encoded tree the keys of another that it lacks, in plain dicts of both."""
    if not (isinstance(into, dict) and isinstance(other, dict)) or "$" in into or "$" in other:
        return
    if depth > 4 * tree.MAX_DEPTH:
        raise SnapshotCorrupt("small state: nested too deep")
    for key, value in other.items():
        if key in into:
            _add_missing(into[key], value, depth + 1)
        else:
            into[key] = value


def lay_out(document: Any, stored: Mapping[str, Placed], metadata: Mapping[str, str]) -> FileLayout:
    """Lay out the file, with every tensor under its path in the document, as in the state_dict.

    Each name has bytes of its own, since readers of safetensors know no tied weights. If the document holds more than
    names and tensors, the metadata has it as "state". The references in `document` get the new names.

    Args:
        document: what `pick` returned; changed.
        stored: the tensors in the snapshot's shards, by name.
        metadata: further metadata of the file.

    Raises:
        SnapshotCorrupt: the document refers to a tensor that is not there.
        StateError: its header would be larger than safetensors allows.
    """
    named: dict[str, Placed] = {}
    for path, reference in _references(document):
        placed = _find(reference, stored)
        reference["name"] = _unused("/".join(path), named)
        named[reference["name"]] = placed
    if not _is_flat(document):
        metadata = {**metadata, "state": msgspec.json.encode(document).decode()}
    return _lay_out(named, metadata)


def _references(value: Any, path: _Path = (), depth: int = 0) -> Iterator[tuple[_Path, dict[str, Any]]]:
    """Yield every tensor reference in an encoded tree, in order, with the path to it."""
    if depth > 4 * tree.MAX_DEPTH:  # a container is an object and a list or two
        raise SnapshotCorrupt("small state: nested too deep")
    inside: Iterable[tuple[_Path, Any]] = ()
    if isinstance(value, list):
        inside = (((*path, str(index)), item) for index, item in enumerate(value))
    elif isinstance(value, dict) and "$" not in value:
        inside = (((*path, key), item) for key, item in value.items())
    elif isinstance(value, dict) and value["$"] == "tensor":
        yield path, value
    elif isinstance(value, dict) and value["$"] in ("dict", "ordered_dict", "counter"):
        inside = (((*path, _word(key)), item) for key, item in _pairs(value))
    elif isinstance(value, dict):  # a tuple, an enum member; no other has tensors
        inside = [(path, value.get("items", value.get("value")))]
    for where, item in inside:
        yield from _references(item, where, depth + 1)


def _pairs(value: dict[str, Any]) -> list[list[Any]]:
    items = value.get("items")
    if not isinstance(items, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in items):
        raise SnapshotCorrupt("small state: a dict without pairs")
    return items


def _word(key: Any) -> str:
    return key if isinstance(key, str) else msgspec.json.encode(key).decode()


def _find(reference: dict[str, Any], stored: Mapping[str, Placed]) -> Placed:
    ref: TensorRef = tree.decode(reference)
    placed = stored.get(ref.name)
    if placed is None or placed.dtype != ref.dtype:
        raise SnapshotCorrupt(f"no {ref.dtype[:20]} tensor {ref.name[:120]!r} in the shards")
    return placed


def _unused(name: str, taken: Mapping[str, object]) -> str:
    """Return `name`, or if it is taken, with "~2" behind it, as in a shard."""
    unused, copies = name, 1
    while unused in taken or unused in ("", _METADATA):
        copies += 1
        unused = f"{name}~{copies}"
    return unused


def _is_flat(document: Any) -> bool:
    """Return whether the document holds only names and tensors, as a module's state_dict does."""
    return isinstance(document, dict) and all(
        isinstance(value, dict) and value.get("$") == "tensor" for value in document.values()
    )


def _lay_out(named: Mapping[str, Placed], metadata: Mapping[str, str]) -> FileLayout:
    shards = plan_shards([TensorSpec(name, source.dtype, source.shape) for name, source in named.items()], _ONE_FILE)
    planned = shards[0].tensors if shards else ()
    start = len(shards[0].header) if shards else 0
    entries: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    for place in planned:
        begin = place.offset - start
        offsets = [begin, begin + place.size]
        entries[place.name] = {"dtype": place.dtype, "shape": place.shape, "data_offsets": offsets}
    text = msgspec.json.encode(entries)
    text += b" " * (-(_LENGTH.size + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise StateError(
            f"names and small state need a header of {len(text)} bytes; safetensors allows {MAX_HEADER_BYTES}: "
            "export one state with --only"
        )
    header = _LENGTH.pack(len(text)) + text
    targets: dict[str, list[int]] = {}
    for place in planned:
        targets.setdefault(named[place.name].name, []).append(len(header) + place.offset - start)
    return FileLayout(header, len(header) + sum(place.size for place in planned), targets)
