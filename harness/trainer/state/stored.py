"""Stored: a snapshot's tensors, checked against the tree's references, and copied out in one go.

Owns where each of them is copied to, so that shared tensors are shared again, and no tensor overwrites another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from harness.core.tree import TensorRef
from harness.errors import SnapshotCorrupt
from harness.trainer.copy.from_slot import copy_out
from harness.trainer.copy.to_slot import TORCH_DTYPES, Pair, describe


class Stored:
    """The stored tensors. Checks them against their references, and copies each at most once, all in one go."""

    def __init__(self, tensors: Mapping[str, Tensor], devices: Mapping[str, str] | None = None) -> None:
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
        """Return the stored tensor in its live form (complex if it was); valid as long as the snapshot's bytes are."""
        tensor = self._tensors.get(ref.name)
        if tensor is None or TORCH_DTYPES.get(ref.dtype) is not tensor.dtype:
            raise SnapshotCorrupt(f"{ref.name}: no such {ref.dtype} tensor in the shards")
        if ref.kind.endswith("complex"):
            if not tensor.is_floating_point() or tensor.shape[-1:] != (2,):
                raise SnapshotCorrupt(f"{ref.name}: {describe(tensor)} is not pairs of reals")
            tensor = torch.view_as_complex(tensor)
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
            self._waiting.append((self._copies[key], view))
        return self._copies[key]

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
            self._waiting.append((live, self.view(ref)))
            self.tie(ref, live)
            self.keep_off([live])

    def tie(self, ref: TensorRef, live: Tensor) -> None:
        """Use `live`, a module's own tensor, as the copy of `ref`."""
        self._copies.setdefault((ref.name, ref.kind), live)

    def fill(self) -> None:
        """Copy all tensors that were asked for. Blocks until that is done."""
        copy_out(self._waiting)
        self._waiting.clear()


def _storages(tensors: Iterable[Tensor]) -> Iterator[int]:
    """Yield the addresses of the tensors' storages; skips tensors that have no memory of their own."""
    for tensor in tensors:
        if tensor.layout is torch.strided and not tensor.is_meta and not nn.parameter.is_lazy(tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a wrapper around others
                yield tensor.untyped_storage().data_ptr()
