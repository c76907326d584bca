"""The small state of several ranks: each holds what differs from the first rank's.

Owns how two small states are compared, field by field and state by state, and put together again. Both are JSON text,
and what is equal in them is never decoded. `core/tree.py` owns what their values mean.

    rank 0: all of it        rank r: split ──▶ what differs, and what it lacks ──▶ join ──▶ all of it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from harness.core.manifest import Manifest
from harness.errors import SnapshotCorrupt

_STATES: Final = "states"
_TAG: Final = "$"
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])  # made once: see core/manifest.py
_Fields = dict[str, msgspec.Raw]


def split(first: bytes, other: bytes) -> tuple[bytes, tuple[str, ...]]:
    """Return what of the small state `other` differs from `first`, and the names of what it lacks.

    The result depends on the values alone: what `join` has put together is split into the same bytes again.
    """
    mine, theirs = _fields(first), _fields(other)
    lacks = [name for name in mine if name not in theirs]
    differing = _differing(mine, theirs)
    if _STATES in differing and (inner := _states(mine)) is not None and (other_inner := _states(theirs)) is not None:
        differing[_STATES] = msgspec.Raw(_text(_differing(inner, other_inner)))
        lacks += [f"{_STATES}/{name}" for name in inner if name not in other_inner]
    return _text(differing), tuple(sorted(lacks))


def join(first: bytes, differing: bytes, lacks: Iterable[str]) -> bytes:
    """The inverse of `split`, but for the order of fields and of states, which means nothing.

    Raises:
        SnapshotCorrupt: `split` has not made this.
    """
    mine, theirs, gone = _fields(first), _fields(differing), set(lacks)
    whole = {**mine, **theirs}
    inner, other_inner = _states(mine), _states(theirs)
    if _STATES in theirs and inner is not None and other_inner is not None:
        of_states = f"{_STATES}/"
        without = {name.removeprefix(of_states) for name in gone if name.startswith(of_states)}
        whole[_STATES] = msgspec.Raw(_text(_without({**inner, **other_inner}, without)))
    return _text(_without(whole, gone))


def whole_states(manifest: Manifest) -> tuple[bytes, ...]:
    """Return the whole small state of each rank of a snapshot, in rank order. Raises SnapshotCorrupt."""
    first = bytes(manifest.parts[0].state)
    others = (
        join(first, bytes(part.state), () if part.lacks is msgspec.UNSET else part.lacks) for part in manifest.parts[1:]
    )
    return (first, *others)


def _differing(mine: _Fields, theirs: _Fields) -> _Fields:
    both = {name: theirs[name] for name in mine if name in theirs and bytes(mine[name]) != bytes(theirs[name])}
    return both | {name: theirs[name] for name in sorted(theirs.keys() - mine.keys())}


def _without(fields: Mapping[str, msgspec.Raw], names: set[str]) -> _Fields:
    return {name: value for name, value in fields.items() if name not in names}


def _states(fields: _Fields) -> _Fields | None:
    """Return the states by name; `None` if they are not a plain object."""
    if _STATES not in fields:
        return {}
    try:
        found = _FIELDS.decode(fields[_STATES])
    except msgspec.MsgspecError:
        return None
    return None if _TAG in found else found


def _fields(state: bytes) -> _Fields:
    try:
        return _FIELDS.decode(state)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise SnapshotCorrupt(f"small state is not a JSON object: {err}") from err


def _text(fields: Mapping[str, msgspec.Raw]) -> bytes:
    return msgspec.json.encode(fields)
