"""What several ranks hold of the state, who stores what of it, and whether what should be equal is equal.

Owns the ranks' tables, and what comparisons have shown; `core/pieces.py` assigns. Main thread of the agent.

    Holds of every rank ──▶ assign ──▶ Stores for each
    records of a set, with sums ──▶ judge ──▶ a difference: that tensor is each rank's own from now on

What no wrapper keeps equal is compared in every set: it may be equal today, and differ tomorrow. What a wrapper keeps
equal is compared in some sets, and in the last one: that wrapper is trusted, the program around it is not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.agent.save.snapshot_set import differing
from harness.core.messages import HeldTensor, Holds, Rows, Stores
from harness.core.pieces import Held, Holding, Piece, assign, label
from harness.errors import StateError
from harness.ipc.slots import SlotRecord

_FIRST_COMPARED = 2
_COMPARED_EVERY = 16
_ROUNDS = 3
"""So often all ranks tell what they hold until it counts as not fitting together: they tell it at different steps."""


@dataclass(frozen=True)
class Difference:
    """A tensor that was taken for equal, and is not. `ranks` have other bytes than the first rank that holds it."""

    tensor: str
    ranks: tuple[int, ...]


class _Key(NamedTuple):
    """A piece as ranks tell it. Two that have the same one hold the same piece."""

    name: str
    offset: tuple[int, ...] | None
    shape: tuple[int, ...]
    dtype: str


class Holdings:
    """The tables of all ranks of one attempt."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._tables: dict[int, Holds] = {}
        self._equal: set[str] = set()
        self._unequal: set[str] = set()
        self._sets = 0
        self._told: set[int] = set()
        self._rounds = 0
        self._wanted = False
        self._known: dict[int, Stores] = {}  # what each rank was told last
        self.assignment = ""
        """Identity of what all ranks store, as they were told last; empty before."""

    def forget(self) -> None:
        """Forget the tables: their ranks are gone. What was compared is still known."""
        self._tables.clear()
        self._told.clear()
        self._known.clear()
        self.assignment = ""
        self._sets = self._rounds = 0
        self._wanted = False

    def tell(self, rank: int, holds: Holds) -> None:
        """Note what a rank holds now."""
        self._tables[rank] = holds
        self._told.add(rank)

    def news(self, count: int) -> dict[int, Stores]:
        """Return what each of `count` ranks stores, by rank, where that has changed; empty while it is not known.

        Tables that do not fit together may be of different steps: then they are wanted again (`take_wanted`).

        Raises:
            StateError: the tables do not fit together, however often they are told.
        """
        if len(self._tables) < count:
            return {}
        try:
            found = self._assigned([self._tables[rank] for rank in range(count)])
        except StateError:
            if len(self._told) < count:
                return {}  # others tell theirs in a moment
            self._rounds += 1
            if self._rounds == _ROUNDS:
                raise
            self._told.clear()
            self._wanted = True
            return {}
        self._rounds = 0
        self._told.update(range(count))  # those that were asked again, and have not answered, have told it before
        news = {rank: stores for rank, stores in enumerate(found) if self._known.get(rank) != stores}
        self._known |= news
        self.assignment = found[0].assignment
        return news

    def take_wanted(self) -> bool:
        """Return, once, whether all ranks have to tell again what they hold."""
        wanted, self._wanted = self._wanted, False
        if wanted:
            self._known.clear()
        return wanted

    def _assigned(self, tables: Sequence[Holds]) -> list[Stores]:
        _check_groups(tables)
        alike = _alike(tables)
        held = [[self._held(tensor, alike) for tensor in table.tensors] for table in tables]
        sources = [_by_name(one for one in row if one.how is Holding.SHARED) for row in held]
        compared = {key: how for key, (how, _) in self._compared(tables).items()}
        keys = [{_key(tensor): tensor.name for tensor in table.tensors} for table in tables]
        assigned = assign(held)
        assignment = _identity_of(assigned)
        return [
            Stores(
                rows=tuple(
                    _rows_of(piece, sources[rank][piece.name]) for piece in pieces if piece.name in sources[rank]
                ),
                own=tuple(one.piece.name for one in held[rank] if one.how is Holding.OWN),
                compared=tuple(name for key, name in keys[rank].items() if compared.get(key) is Holding.MAYBE),
                kept_equal=tuple(name for key, name in keys[rank].items() if compared.get(key) is Holding.SHARED),
                number=tables[rank].number,
                assignment=assignment,
            )
            for rank, pieces in enumerate(assigned)
        ]

    @property
    def compares(self) -> bool:
        """Whether what a wrapper keeps equal is to be compared in the next snapshot."""
        return self._sets < _FIRST_COMPARED or self._sets % _COMPARED_EVERY == 0

    def judge(self, records: Sequence[SlotRecord]) -> tuple[list[Difference], bool]:
        """Take note of the sums that came with a snapshot of all ranks. A rank that has no tensor in common has none.

        Args:
            records: of all ranks, in order.

        Returns:
            What was taken for equal and is not: that snapshot must not be used. And whether `stores` has changed.
        """
        before = (set(self._equal), set(self._unequal))
        differences = [Difference(name, ranks) for name, ranks in differing(records).items()]
        self._unequal.update(difference.tensor for difference in differences)
        all_told = len(self._tables) == len(records)  # else the ranks have yet to tell this agent what they hold
        compared = self._compared([self._tables[rank] for rank in range(len(records))]) if all_told else {}
        for key, (_, ranks) in compared.items():
            found = [records[rank].sums.get(_label(key)) for rank in ranks]
            if None in found:  # an agent that died may have asked for less
                all_told = False
            elif len(set(found)) == 1:
                self._equal.add(key.name)
            else:
                self._unequal.add(key.name)
        self._sets += all_told or not self.compares
        return differences, (self._equal, self._unequal) != before

    def _held(self, tensor: HeldTensor, alike: Collection[str]) -> Held:
        how = Holding(tensor.how)
        if tensor.name in self._unequal:
            how = Holding.OWN
        elif how is Holding.MAYBE:
            how = Holding.SHARED if tensor.name in self._equal and tensor.name in alike else Holding.OWN
        whole = tensor.shape if tensor.whole is None else tensor.whole
        offset = (0,) * len(tensor.shape) if tensor.offset is None else tensor.offset
        return Held(Piece(tensor.name, offset, tensor.shape, whole, tensor.dtype), how)

    def _compared(self, tables: Sequence[Holds]) -> dict[_Key, tuple[Holding, list[int]]]:
        """Return how several ranks hold the same piece of a tensor, and which ranks.

        It is `MAYBE` if it is that for one of them, and else `SHARED`.
        """
        holders: dict[_Key, dict[int, Holding]] = {}
        for rank, table in enumerate(tables):
            for tensor in table.tensors:
                if tensor.how != Holding.OWN.value and tensor.name not in self._unequal:
                    holders.setdefault(_key(tensor), {})[rank] = Holding(tensor.how)
        return {
            key: (Holding.MAYBE if Holding.MAYBE in ranks.values() else Holding.SHARED, list(ranks))
            for key, ranks in holders.items()
            if len(ranks) > 1
        }


def _alike(tables: Sequence[Holds]) -> set[str]:
    """Return the names of tensors that have one shape and one dtype on all ranks that hold them."""
    forms: dict[str, set[tuple[object, object]]] = {}
    for table in tables:
        for tensor in table.tensors:
            if tensor.how != Holding.OWN.value:
                forms.setdefault(tensor.name, set()).add((tensor.dtype, tensor.shape))
    return {name for name, found in forms.items() if len(found) == 1}


def _check_groups(tables: Sequence[Holds]) -> None:
    """Raise StateError unless the ranks of each group have the same parameters."""
    kept: dict[tuple[int, ...], dict[int, dict[str, str]]] = {}
    for rank, table in enumerate(tables):
        for tensor in table.tensors:
            if tensor.group is not None:
                form = f"{tensor.dtype} {list(tensor.shape)}"
                kept.setdefault(table.groups[tensor.group], {}).setdefault(rank, {})[tensor.name] = form
    for group, by_rank in kept.items():
        first = min(by_rank)
        for rank in group:
            mine, theirs = by_rank[first], by_rank.get(rank, {})
            for name in [*mine, *theirs]:
                if mine.get(name) != theirs.get(name):
                    raise StateError(
                        f"{name}: DistributedDataParallel keeps it equal on ranks {', '.join(map(str, group))}, and it "
                        f"is {mine.get(name, 'missing')} on rank {first} and {theirs.get(name, 'missing')} on rank "
                        f"{rank}: build the same model on all of them"
                    )


def _key(tensor: HeldTensor) -> _Key:
    return _Key(tensor.name, tensor.offset, tensor.shape, tensor.dtype)


def _label(key: _Key) -> str:
    return label(key.name, key.offset, key.shape)


def _identity_of(assigned: Sequence[Sequence[Piece]]) -> str:
    """Return the same for the same assignment, also to another agent of this host."""
    return hashlib.blake2b(repr(assigned).encode(), digest_size=8).hexdigest()


def _by_name(held: Iterable[Held]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for one in held:
        found.setdefault(one.piece.name, []).append(one.piece)
    return found


def _rows_of(piece: Piece, sources: Sequence[Piece]) -> Rows:
    """Return the rows of what a rank holds, `sources`, that `piece` is."""
    held = next(source for source in sources if source.contains(piece))
    first = piece.offset[0] - held.offset[0] if piece.shape else 0
    return Rows(piece.name, first, first + piece.rows)
