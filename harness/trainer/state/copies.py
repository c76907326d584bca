"""Copies: whether a snapshot has the values of a tensor that is in no state itself. Compares; changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from torch import Tensor

from harness.trainer.digests import of_tensor
from harness.trainer.state.capture import EXTRA, Captured

_MOST_NUMBERS: Final = 1000
"""More of them are kept in a tensor or an array."""


class Copies:
    """The tensors and the numbers that some states and the user's plain values hold."""

    def __init__(self, captured: Captured, states: Collection[str]) -> None:
        """Look at these states, and at `ckpt.extra`.

        Args:
            captured: of a snapshot.
            states: their names.
        """
        kept = (*(f"{name}/" for name in states), f"{EXTRA}/")
        self._tensors: dict[tuple[int, ...], list[Tensor]] = {}
        for name, tensor in captured.tensors.items():
            if name.startswith(kept):
                self._tensors.setdefault(tuple(tensor.shape), []).append(tensor)
        self._digests: dict[tuple[int, ...], set[str]] = {}
        self._numbers = [*_numbers([captured.tree[name]["state"] for name in states]), *_numbers(captured.extra)]

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether a tensor of the same bytes is there, or numbers of the same values."""
        shape = tuple(tensor.shape)
        if shape not in self._digests:
            self._digests[shape] = {of_tensor(each) for each in self._tensors.get(shape, ())}
        if of_tensor(tensor) in self._digests[shape]:
            return True
        if tensor.numel() > _MOST_NUMBERS:
            return False
        return tensor.tolist() in self._numbers or (tensor.numel() == 1 and tensor.item() in self._numbers)


def _numbers(value: Any) -> Iterator[Any]:
    """Yield every number and every list in a captured tree; a tuple as a list."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, (list, tuple)) and len(value) <= _MOST_NUMBERS:
        yield _listed(value)
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, float):
        yield value


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value
