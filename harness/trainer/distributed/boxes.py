"""Boxes: which part of a whole tensor this rank holds.

Owns the arithmetic of DTensor's placements, as far as a snapshot needs it: a rank's local tensor is one box of the
whole one, or it is refused. Makes no collective call; imports torch.distributed.tensor only where a program has it.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from harness.core.tree import format_path
from harness.errors import StateError

_MODULE: Final = "torch.distributed.tensor"


@dataclass(frozen=True)
class Both:
    """What two boxes have in common: the slices `here`, of the one, and `there`, of the other."""

    here: tuple[slice, ...]
    there: tuple[slice, ...]


@dataclass(frozen=True)
class Box:
    """Where a rank's local tensor lies in the whole one.

    Attributes:
        whole: shape of the whole tensor.
        offset: where the local one begins in it, in each dimension.
        shape: of the local one.
    """

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: torch.Size | tuple[int, ...]) -> Box:
        """Return the box that is all of a tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.whole == self.shape

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def meets(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Both | None:
        """Return what it has in common with another box of the same tensor; `None` if nothing."""
        begins = [max(a, b) for a, b in zip(self.offset, offset, strict=True)]
        ends = [
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, offset, shape, strict=True)
        ]  # fmt: skip
        if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
            return None
        spans = list(zip(begins, ends, strict=True))
        here = tuple(slice(begin - at, end - at) for (begin, end), at in zip(spans, self.offset, strict=True))
        there = tuple(slice(begin - at, end - at) for (begin, end), at in zip(spans, offset, strict=True))
        return Both(here, there)

    @property
    def of_pairs(self) -> Box:
        """The box of a complex tensor, whose numbers are stored as pairs of reals."""
        return Box((*self.whole, 2), (*self.offset, 0), (*self.shape, 2))


def is_dtensor(value: object) -> bool:
    """Whether `value` is a DTensor. Imports nothing."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: Any) -> Tensor:
    """Return a DTensor's local tensor, without autograd and without waiting for another rank."""
    local: Tensor = tensor.detach()._local_tensor
    return local


def box_of(tensor: Any, path: list[str | int]) -> Box:
    """Return where a DTensor's local tensor lies in the whole one.

    Args:
        tensor: the DTensor.
        path: to it, for messages.

    Raises:
        StateError: it is not one box: a partial sum, or a strided shard with holes.
    """
    mesh, whole, shape = tensor.device_mesh, tuple(tensor.shape), tuple(local_of(tensor).shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return Box(whole, (0,) * len(whole), shape)
    try:
        return _box_at(tuple(coordinate), tuple(mesh.shape), tensor.placements, whole, shape)
    except _NotOneBox as err:
        raise StateError(f"{format_path(path)}: cannot store a DTensor {err}") from err


class _NotOneBox(Exception):
    pass


@functools.lru_cache(maxsize=1 << 16)  # a state may have that many; the arithmetic takes a moment for each
def _box_at(
    coordinate: tuple[int, ...],
    mesh: tuple[int, ...],
    placements: tuple[Any, ...],
    whole: tuple[int, ...],
    shape: tuple[int, ...],
) -> Box:
    indexes: dict[int, Tensor] = {}
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise _NotOneBox(
                f"that is a partial sum ({placement}): redistribute it to Shard or Replicate before the boundary"
            )
        dim = getattr(placement, "dim", None)
        if dim is not None:  # Shard, and its strided form, which is no subclass of it in every version of torch
            dim %= len(whole)
            there = indexes.get(dim, torch.arange(whole[dim])).reshape((1,) * dim + (-1,))
            indexes[dim] = placement._split_tensor(there, mesh[axis], with_padding=False)[0][coordinate[axis]]
    offset = [0] * len(whole)
    for dim, split in indexes.items():
        there, count = split.flatten(), split.numel()
        offset[dim] = int(there[0]) if count else whole[dim]
        if count != shape[dim] or (count and int(there[-1]) - offset[dim] != count - 1):
            raise _NotOneBox(
                f"whose local part is not one block ({placements} over {mesh}): order the mesh so that "
                "each rank has neighbouring rows"
            )
    return Box(whole, tuple(offset), shape)


def like(tensor: Any, local: Tensor) -> Any:
    """Return a DTensor with the placements of `tensor` and this local tensor."""
    module = sys.modules[_MODULE]
    return module.DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
