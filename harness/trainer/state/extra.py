"""Extra: the dict of the user's plain values, `ckpt.extra`. Refuses at the assignment what a snapshot could not store.

Owns when a value is looked at: as it is assigned, unless it is so large that looking would cost the loop time. What is
put into a list or dict inside of it is looked at with the next snapshot. So is what shares memory with something else:
after a resume it would not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from harness.errors import StateError
from harness.trainer.state.capture import EXTRA, alias_of, check_value
from harness.trainer.state.kinds import is_array, is_tensor

_LOOKED_AT: Final = 1000
"""The most values that are looked at in one assignment."""


class Extra(dict[str, Any]):
    """A dict that raises StateError when a value is assigned that cannot be stored; names it, and the remedy."""

    def __setitem__(self, key: str, value: Any) -> None:
        check(key, value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As a dict does."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **values: Any) -> None:
        """As a dict does."""
        for key, value in dict(*args, **values).items():
            self[key] = value

    def __ior__(self, other: Any) -> Extra:  # type: ignore[override,misc]
        self.update(other)
        return self


def check(key: Any, value: Any) -> None:
    """Raise StateError if a value cannot be stored under a key."""
    if is_tensor(value) and value.requires_grad:
        raise StateError(f"{EXTRA}.{key}: a tensor that requires a gradient: keep it in a module, or detach() it")
    if _size(value, _LOOKED_AT) < _LOOKED_AT:
        check_value({key: value}, [EXTRA])


def shared_in(extra: Mapping[str, Any], of_states: Mapping[str, Tensor]) -> str | None:
    """Return in words the first value that is, or shares memory with, something else; `None` if there is none.

    Args:
        extra: the user's plain values. Of more than 1000 none is looked at.
        of_states: the tensors of the states, by name.
    """
    if _size(extra, _LOOKED_AT) >= _LOOKED_AT:
        return None
    places: dict[Any, str] | None = None
    seen: dict[Any, tuple[str, Any]] = {}
    waiting: list[tuple[str, Any]] = [(f"{EXTRA}.{key}", value) for key, value in extra.items()]
    for path, value in waiting:
        found = _found(value)
        if found is not None:
            place, form = found
            if places is None:
                places = {_storage(tensor): name for name, tensor in of_states.items() if tensor.numel()}
            if (state := places.get(place)) is not None:
                return f"{path} is in the memory of {state}, and follows it. After a resume it would not: clone() it"
            other, first = seen.setdefault(place, (path, form))
            if first != form:
                return (
                    f"{path} shares memory with {other}. After a resume it would not: keep one of them, and take the "
                    "other one from it"
                )
        elif isinstance(value, (dict, list)):
            if id(value) in seen:
                return f"{path} and {seen[id(value)][0]} are one {type(value).__name__}. After a resume they are two"
            seen[id(value)] = path, None
        if isinstance(value, (dict, list, tuple)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{path}[{key!r}]", item) for key, item in items]
    return None


def _found(value: Any) -> tuple[Any, Any] | None:
    """Return in which memory a tensor or an array is, and its form there; `None` for anything else."""
    if is_array(value):
        whole = value
        while is_array(whole.base):
            whole = whole.base
        return ("cpu", whole.ctypes.data), (value.ctypes.data, value.dtype.str, value.shape, value.strides)
    if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and value.numel():
        return _storage(value), alias_of(value)
    return None


def _storage(tensor: Tensor) -> tuple[str, int]:
    """Return a key that is equal for tensors in the same memory."""
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _size(value: Any, most: int) -> int:
    """Return the number of values in a value, nested ones included; `most` if there are more."""
    found, waiting = 0, [value]
    while waiting and found < most:
        item = waiting.pop()
        found += 1
        if isinstance(item, Mapping):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple)):
            waiting.extend(item[: most - found])
    return found
