"""What several ranks hold of the state, who stores what of it, and whether what is said to be equal is equal.

Owns the ranks' tables, and what comparisons have shown; `core/pieces.py` assigns. Main thread of the agent.

    Holds of every rank ──▶ assign ──▶ Stores for each
    Sealed of every rank, with sums ──▶ judge ──▶ a difference: that tensor is each rank's own from now on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.core.messages import HeldTensor, Holds, Rows, Stores
from harness.core.pieces import Held, Holding, Piece, assign

_FIRST_COMPARED = 2
_COMPARED_EVERY = 16


@dataclass(frozen=True)
class Difference:
    """A tensor that was taken for equal, and is not. `ranks` have other bytes than the first rank that holds it."""

    tensor: str
    ranks: tuple[int, ...]


class Holdings:
    """The tables of all ranks of one attempt."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._tables: dict[int, Holds] = {}
        self._equal: set[str] = set()
        self._unequal: set[str] = set()
        self._sets = 0

    def forget(self) -> None:
        """Forget the tables: their ranks are gone. What was compared is still known."""
        self._tables.clear()
        self._sets = 0

    def tell(self, rank: int, holds: Holds) -> None:
        """Note what a rank holds now."""
        self._tables[rank] = holds

    def stores(self, count: int) -> list[Stores] | None:
        """Return what each of `count` ranks stores; `None` while the table of one is not known.

        Raises:
            StateError: the tables do not fit together.
        """
        if len(self._tables) < count:
            return None
        tables = [self._tables[rank] for rank in range(count)]
        held = [[self._held(tensor) for tensor in table.tensors] for table in tables]
        shared = [[one for one in row if one.how is Holding.SHARED] for row in held]
        sources = [_by_name(row) for row in shared]
        compared = self._compared(tables)
        return [
            Stores(
                rows=tuple(_rows_of(piece, sources[rank][piece.name]) for piece in pieces),
                own=tuple(one.piece.name for one in held[rank] if one.how is Holding.OWN),
                compared=tuple(tensor.name for tensor in tables[rank].tensors if _key(tensor) in compared),
                number=tables[rank].number,
            )
            for rank, pieces in enumerate(assign(shared))
        ]

    @property
    def compares(self) -> bool:
        """Whether the next snapshot is to be compared."""
        return self._sets < _FIRST_COMPARED or self._sets % _COMPARED_EVERY == 0

    def judge(self, sums: Sequence[Mapping[str, int]]) -> tuple[list[Difference], bool]:
        """Take note of the sums that came with a snapshot of all ranks, in rank order; empty if it was not compared.

        Returns:
            What was taken for equal and is not: that snapshot must not be used. And whether `stores` has changed.
        """
        self._sets += 1
        if not all(sums):
            return [], False
        before = (set(self._equal), set(self._unequal))
        differences = []
        for (name, _, _), ranks in self._compared([self._tables[rank] for rank in range(len(sums))]).items():
            found = [sums[rank].get(name) for rank in ranks]
            others = tuple(rank for rank, value in zip(ranks, found, strict=True) if value != found[0])
            how = next(tensor.how for tensor in self._tables[ranks[0]].tensors if tensor.name == name)
            if not others:
                self._equal.add(name)
            elif how == Holding.SHARED.value or name in self._equal:
                differences.append(Difference(name, others))
            if others:
                self._unequal.add(name)
        return differences, (self._equal, self._unequal) != before

    def _held(self, tensor: HeldTensor) -> Held:
        how = Holding(tensor.how)
        if tensor.name in self._unequal:
            how = Holding.OWN
        elif how is Holding.MAYBE:
            how = Holding.SHARED if tensor.name in self._equal else Holding.OWN
        whole = tensor.shape if tensor.whole is None else tensor.whole
        offset = (0,) * len(tensor.shape) if tensor.offset is None else tensor.offset
        return Held(Piece(tensor.name, offset, tensor.shape, whole, tensor.dtype), how)

    def _compared(self, tables: Sequence[Holds]) -> dict[tuple[str, object, object], list[int]]:
        """Return which ranks hold the same piece of a tensor, of those that more than one holds."""
        holders: dict[tuple[str, object, object], list[int]] = {}
        for rank, table in enumerate(tables):
            for tensor in table.tensors:
                if tensor.how != Holding.OWN.value and tensor.name not in self._unequal:
                    holders.setdefault(_key(tensor), []).append(rank)
        return {key: ranks for key, ranks in holders.items() if len(ranks) > 1}


def _key(tensor: HeldTensor) -> tuple[str, object, object]:
    return tensor.name, tensor.offset, tensor.shape


def _by_name(held: Sequence[Held]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for one in held:
        found.setdefault(one.piece.name, []).append(one.piece)
    return found


def _rows_of(piece: Piece, sources: Sequence[Piece]) -> Rows:
    """Return the rows of what a rank holds, `sources`, that `piece` is."""
    held = next(source for source in sources if source.contains(piece))
    first = piece.offset[0] - held.offset[0] if piece.shape else 0
    return Rows(piece.name, first, first + piece.rows)
