"""Shards: which files the `.metadata` of torch.distributed.checkpoint names, and how long each has to be at least.

Owns how such a file is read: it is a pickle, and no class of it is imported, nor any function of it called.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from harness.core.manifest import is_inside

_UNREADABLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What the bytes of any other file may come to."""


def named_in(data: bytes) -> dict[str, int]:
    """Return the paths beside a `.metadata`, each with the bytes that it has at least.

    Empty if the file is of another form: there are storage writers that keep their shards in a form of their own.
    """
    try:
        stored = vars(_Reader(io.BytesIO(data)).load()).get("storage_data")
    except _UNREADABLE:
        return {}
    if not isinstance(stored, dict):
        return {}
    found: dict[str, int] = {}
    for info in stored.values():
        fields = vars(info) if isinstance(info, _Inert) else {}
        path, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
        if isinstance(path, str) and isinstance(offset, int) and isinstance(length, int) and is_inside(path):
            found[path] = max(found.get(path, 0), offset + length)
    return found


class _Inert:
    """Stands for every class and function of a pickle: takes whatever it is given, and does nothing with it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Inert]:
        return _Inert
