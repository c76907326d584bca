"""Stored: a snapshot's tensors, checked against the tree's references, and copied out in one go.

Owns where each of them is copied to, so that shared tensors are shared again, and no tensor overwrites another. Of
several ranks, a tensor lies in pieces in the slots of all of them, and a live one may be a part of it only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.core.tree import TensorRef
from harness.errors import SnapshotCorrupt
from harness.trainer.copy.from_slot import copy_out
from harness.trainer.copy.to_slot import TORCH_DTYPES, Pair, describe
from harness.trainer.distributed.boxes import Box, box_of, is_dtensor, local_of
from harness.trainer.distributed.boxes import like as dtensor_like


@dataclass(frozen=True)
class Pieces:
    """A tensor that lies in pieces, which together are all of it.

    Attributes:
        whole: its shape.
        boxes: where each piece begins, and its elements.
    """

    whole: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], Tensor], ...]

    def checked(self, name: str) -> Pieces:
        """Return it, if its pieces are all of it, each element once.

        Raises:
            SnapshotCorrupt: they are not.
        """
        found = [Box(self.whole, offset, tuple(tensor.shape)) for offset, tensor in self.boxes]
        inside = all(
            len(box.shape) == len(box.whole)
            and all(at + n <= size for at, n, size in zip(box.offset, box.shape, box.whole, strict=True))
            for box in found
        )
        twice = inside and any(
            one.meets(other.offset, other.shape) for number, one in enumerate(found) for other in found[number + 1 :]
        )
        if not inside or twice or sum(box.count for box in found) != math.prod(self.whole):
            raise SnapshotCorrupt(f"{name}: its pieces are not all of it, each element once")
        return self

    @property
    def shown(self) -> Tensor:
        """A tensor of its shape and dtype, without its elements."""
        return self.boxes[0][1].new_empty(1).reshape((1,) * len(self.whole)).expand(self.whole)


class Stored:
    """The stored tensors. Checks them against their references, and copies each at most once, all in one go."""

    def __init__(self, tensors: Mapping[str, Tensor | Pieces], devices: Mapping[str, str] | None = None) -> None:
        """Copy nothing yet.

        Args:
            tensors: the stored tensors, by name.
            devices: the devices of copies that replace no live tensor; by default that of the stored one.
        """
        self._tensors, self._devices = tensors, devices or {}
        self._copies: dict[tuple[str, str], Tensor] = {}
        self._waiting: list[Pair] = []
        self._offered: dict[int, Tensor] = {}
        self._taken: set[int] = set()

    def view(self, ref: TensorRef) -> Tensor:
        """Return the stored tensor in its live form (complex if it was); valid as long as the snapshot's bytes are.

        One that lies in pieces has its form only, and not its elements.
        """
        found = self._tensors.get(ref.name)
        tensor = found.shown if isinstance(found, Pieces) else found
        if tensor is None or TORCH_DTYPES.get(ref.dtype) is not tensor.dtype:
            raise SnapshotCorrupt(f"{ref.name}: no such {ref.dtype} tensor in the shards")
        if ref.kind.endswith("complex"):
            if not tensor.is_floating_point() or tensor.shape[-1:] != (2,):
                raise SnapshotCorrupt(f"{ref.name}: {describe(tensor)} is not pairs of reals")
            tensor = _complex(tensor)
        if ref.order and len(ref.order) != tensor.dim():
            raise SnapshotCorrupt(f"{ref.name}: an order of {len(ref.order)} dimensions for {describe(tensor)}")
        return tensor

    def copy(self, ref: TensorRef, like: Tensor | None) -> Tensor:
        """Return a tensor on the device of `like`, which `fill` fills later; the same one for the same memory.

        It is `like` itself if that was offered and has the copy's form: new memory costs more time than the copy.
        """
        key = (ref.name, ref.kind)
        if key not in self._copies:
            view = self.view(ref)
            if like is not None and is_dtensor(like) and like.shape == view.shape:
                self._copies[key] = self._part_like(ref, like)
                self._wait(ref, self._copies[key])
                return self._copies[key]
            device = torch.device(self._devices.get(ref.name, view.device)) if like is None else like.device
            order = ref.order or tuple(range(view.dim()))
            place = sorted(range(len(order)), key=lambda dim: order[dim])

            def room(device: torch.device) -> Tensor:
                made = torch.empty([view.shape[dim] for dim in order], dtype=view.dtype, device=device)
                return made.permute(place)

            if like is not None and id(like) in self._offered and self._is_same_room(like, room(torch.device("meta"))):
                self._taken.add(like.untyped_storage().data_ptr())
                self._copies[key] = like
            else:
                self._copies[key] = room(device)
            self._wait(ref, self._copies[key])
        return self._copies[key]

    def _part_like(self, ref: TensorRef, like: Tensor) -> Tensor:
        """Return a DTensor with the placements of `like`, and new memory for its local part."""
        local = local_of(like)
        made: Tensor = dtensor_like(like, torch.empty(local.shape, dtype=self.view(ref).dtype, device=local.device))
        return made

    def _wait(self, ref: TensorRef, live: Any) -> None:
        """Have `fill` copy a stored tensor into `live`: of a DTensor its local part, from each piece that meets it."""
        box, into = Box.all_of(live.shape), live
        if is_dtensor(live):
            box, into = box_of(live, [ref.name]), local_of(live)
        found = self._tensors[ref.name]
        if isinstance(found, Tensor) and box.is_whole:
            self._waiting.append((into, self.view(ref)))
            return
        if ref.kind.endswith("complex"):
            box, into = box.of_pairs, torch.view_as_real(into)
        pieces = found if isinstance(found, Pieces) else Pieces(tuple(found.shape), (((0,) * found.dim(), found),))
        for offset, piece in pieces.boxes:
            if (both := box.meets(offset, tuple(piece.shape))) is not None:
                self._waiting.append((into[both.here], piece[both.there]))

    def offer(self, tensors: Iterable[Tensor]) -> None:
        """Allow `copy` to fill these tensors in place. Their owner alone has them, and gets them back."""
        self._offered.update((id(tensor), tensor) for tensor in tensors)

    def keep_off(self, tensors: Iterable[Tensor]) -> None:
        """Forbid filling an offered tensor that shares a storage with one of these."""
        self._taken.update(_storages(tensors))

    def _is_same_room(self, live: Tensor, room: Tensor) -> bool:
        """Whether `live` has the form of `room`, and its own storage, into which nothing is copied yet."""
        return (
            type(live) is Tensor
            and live.layout is torch.strided
            and not (live.requires_grad or live.is_inference() or live.is_conj() or live.is_neg())
            and (live.shape, live.dtype, live.stride()) == (room.shape, room.dtype, room.stride())
            and live.untyped_storage().nbytes() == live.nbytes > 0
            and live.untyped_storage().data_ptr() not in self._taken
        )

    def put(self, ref: TensorRef, live: Tensor) -> None:
        """Have `fill` copy a stored tensor into `live`, a module's own tensor."""
        if (ref.name, ref.kind) not in self._copies:
            self._wait(ref, live)
            self.tie(ref, live)
            self.keep_off([live])

    def tie(self, ref: TensorRef, live: Tensor) -> None:
        """Use `live`, a module's own tensor, as the copy of `ref`."""
        self._copies.setdefault((ref.name, ref.kind), live)

    def fill(self) -> None:
        """Copy all tensors that were asked for. Blocks until that is done."""
        copy_out(self._waiting)
        self._waiting.clear()


def _complex(pairs: Tensor) -> Tensor:
    if 0 in pairs.stride() and pairs.numel() > 1:  # shown only
        return (
            pairs.new_empty(1, dtype=pairs.dtype.to_complex())
            .reshape((1,) * (pairs.dim() - 1))
            .expand(pairs.shape[:-1])
        )
    return torch.view_as_complex(pairs)


def _storages(tensors: Iterable[Tensor]) -> Iterator[int]:
    """Yield the addresses of the tensors' storages; skips tensors that have no memory of their own."""
    for each in tensors:
        tensor = local_of(each) if is_dtensor(each) else each
        if tensor.layout is torch.strided and not tensor.is_meta and not nn.parameter.is_lazy(tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a wrapper around others
                yield tensor.untyped_storage().data_ptr()
