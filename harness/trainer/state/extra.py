"""Extra: the dict of the user's plain values, `ckpt.extra`. Refuses at the assignment what a snapshot could not store.

Owns when a value is looked at: as it is assigned, unless it is so large that looking would cost the loop time. What is
put into a list or dict inside of it is looked at with the next snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from harness.errors import StateError
from harness.trainer.state.capture import EXTRA, check_value
from harness.trainer.state.kinds import is_tensor

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
