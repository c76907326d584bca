"""Shares: what one of several ranks stores of what it holds.

Owns this rank's table for the agent, and what the agent's answer means for its tensors. `core/pieces.py` assigns, in
the agent, which knows the tables of all ranks. Copies nothing.

    captured ─▶ table ─▶ Holds ─▶ agent, once it has all tables ─▶ Stores ─▶ entries of this rank's shards
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.core.manifest import StoredPiece
from harness.core.messages import HeldTensor, Holds, Stores
from harness.core.pieces import Holding, label
from harness.core.shard import TensorSpec
from harness.trainer.copy.to_slot import DTYPE_NAMES
from harness.trainer.digests import weighted_sums
from harness.trainer.link import Link
from harness.trainer.state.capture import Captured


@dataclass(frozen=True)
class Entry:
    """An entry of this rank's shards.

    Attributes:
        name: in the shard.
        tensor: name of the captured tensor.
        rows: the first of its rows, and the one after the last; `None` for all of it.
        piece: what it is, if it is not a whole tensor that all ranks share.
    """

    name: str
    tensor: str
    rows: tuple[int, int] | None
    piece: StoredPiece | None

    def of(self, captured: Mapping[str, Tensor]) -> Tensor:
        """Return its elements, without a copy."""
        tensor = captured[self.tensor]
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


class Shares:
    """What this rank has told of its tensors, and what it has to store of them."""

    def __init__(self, link: Link) -> None:
        """Tell nothing yet."""
        self._link = link
        self._told: tuple[HeldTensor, ...] | None = None
        self._groups: tuple[tuple[int, ...], ...] = ()
        self._number = 0
        self._used: Stores | None = None

    @property
    def stale(self) -> bool:
        """Whether the agent has said something that no entries were made of yet, or wants to be told again."""
        return self._link.holds_wanted or self._link.stores is not self._used

    @property
    def assignment(self) -> str:
        """Identity of what all ranks store, by the agent's answer that the entries were made of."""
        return "" if self._used is None else self._used.assignment

    def is_told(self, captured: Captured) -> bool:
        """Whether the agent's last answer is about what was captured."""
        return self._told == _table(captured)

    def tell(self, captured: Captured) -> None:
        """Tell the agent what this rank holds, unless it knows or wants it again. Does not wait."""
        table = _table(captured)
        if (table, captured.groups) == (self._told, self._groups) and not self._link.holds_wanted:
            return
        self._link.holds_wanted = False
        self._told, self._groups, self._number = table, captured.groups, self._number + 1
        self._link.send(Holds(table, self._number, captured.groups), repeat=True)

    def entries(self, captured: Captured) -> tuple[Entry, ...] | None:
        """Return what this rank stores; `None` while the agent has not answered, or wants to be told again."""
        stores = self._link.stores
        if stores is None or stores.number != self._number or self._link.holds_wanted:
            return None
        self._used = stores
        own = [Entry(name, name, None, StoredPiece(own=True)) for name in stores.own]
        return (*own, *(_rows(row.name, row.first, row.last, captured) for row in stores.rows))

    def sums(self, captured: Captured, *, thoroughly: bool) -> dict[str, int]:
        """Return a sum of the bytes of each piece that is compared between ranks, by its label. Reads all of them.

        Args:
            captured: the states.
            thoroughly: include what a wrapper keeps equal.
        """
        if self._used is None:
            return {}
        names = (*self._used.compared, *(self._used.kept_equal if thoroughly else ()))
        sums = weighted_sums({name: captured.tensors[name] for name in names if name in captured.tensors})
        return {_label(name, captured): value for name, value in sums.items()}


def specs(entries: Iterable[Entry], captured: Captured) -> list[TensorSpec]:
    """Return the descriptions of entries that `plan_shards` needs."""
    found = []
    for entry in entries:
        tensor = entry.of(captured.tensors)
        frozen = entry.tensor in captured.frozen
        found.append(TensorSpec(entry.name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), frozen=frozen))
    return found


def byte_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return, for each tensor, the sum of its bytes as 64-bit integers, modulo 2^64: equal for equal bytes."""
    sums = {name: _byte_sum(tensor) for name, tensor in tensors.items()}
    found: dict[str, int] = {}
    for device in {total.device for total in sums.values()}:  # one wait for each device
        names = [name for name, total in sums.items() if total.device == device]
        found |= dict(zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True))
    return found


def _byte_sum(tensor: Tensor) -> Tensor:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    rest = data[whole:].to(torch.int64).sum()
    return data[:whole].view(torch.int64).sum() + rest if whole else rest


def _label(name: str, captured: Captured) -> str:
    box = captured.boxes.get(name)
    return label(name, None if box is None else box.offset, captured.tensors[name].shape)


def _table(captured: Captured) -> tuple[HeldTensor, ...]:
    table = []
    for name, tensor in captured.tensors.items():
        box = captured.boxes.get(name)
        how = captured.holdings.get(name, Holding.OWN).value
        whole, offset = (None, None) if box is None else (box.whole, box.offset)
        group = captured.kept_equal.get(name)
        table.append(HeldTensor(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), how, whole, offset, group))
    return tuple(table)


def _rows(name: str, first: int, last: int, captured: Captured) -> Entry:
    shape, box = tuple(captured.tensors[name].shape), captured.boxes.get(name)
    whole = shape if box is None else box.whole
    start = (0,) * len(shape) if box is None else box.offset
    rows = None if not shape or (first, last) == (0, shape[0]) else (first, last)
    offset = start if rows is None else (start[0] + first, *start[1:])
    if rows is None and whole == shape:
        return Entry(name, name, None, None)
    piece = StoredPiece(tensor=name, whole=whole, offset=offset)
    return Entry(f"{name}@{','.join(map(str, offset))}", name, rows, piece)
