"""Sets: the sealed slots of one step, of all ranks. Only a whole set is a snapshot; a single slot is not.

Owns which slots belong together, which still wait for others, and whether what one rank stores for several is equal on
all of these: if not, the set is no snapshot, whatever way it was found. Knows neither tiers nor holders. Main thread.

    seal of rank 0 ──▶ waits ┐
    seal of rank 1 ──────────┴─▶ a set ──▶ the tiers' turn
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from harness.agent.resume_point import SealedSlot, SnapshotSet
from harness.core.pieces import tensor_of
from harness.ipc.slots import SlotRecord

_Set = tuple[int, int, str]  # generation, step and assignment


@dataclass(frozen=True)
class Dropped:
    """A rank's seal that no set will have: that rank must not wait for it. `sequence` is the seal's number."""

    rank: int
    sequence: int


def _set_of(sealed: SealedSlot) -> _Set:
    return sealed.record.generation, sealed.record.step, sealed.record.assignment


class Gathering:
    """Sealed slots that wait for those of the other ranks."""

    def __init__(self) -> None:
        """Start empty."""
        self._waiting: dict[_Set, dict[int, SealedSlot]] = {}

    @property
    def steps(self) -> dict[int, set[int]]:
        """The steps that wait, with the ranks that have sealed them."""
        found: dict[int, set[int]] = {}
        for (_, step, _), ranks in self._waiting.items():
            found.setdefault(step, set()).update(ranks)
        return found

    @property
    def indexes(self) -> set[int]:
        """Indexes of the slots that wait."""
        return {sealed.index for ranks in self._waiting.values() for sealed in ranks.values()}

    def add(self, sealed: SealedSlot) -> SnapshotSet | None:
        """Add a rank's sealed slot; return the set if it was the last one of its step.

        Then drop the slots of this step and of earlier ones: a rank seals its steps in order, so they will never be
        complete.
        """
        completed = _set_of(sealed)
        ranks = self._waiting.setdefault(completed, {})
        ranks[sealed.record.rank] = sealed
        if len(ranks) < sealed.record.world_size:
            return None
        self._waiting = {of: others for of, others in self._waiting.items() if of[:2] > completed[:2]}
        return tuple(ranks[rank] for rank in sorted(ranks))

    def forget(self, steps: Collection[int] | None = None) -> None:
        """Drop the waiting slots, of some steps or of all: the others will not seal those."""
        self._waiting = {at: ranks for at, ranks in self._waiting.items() if steps is not None and at[1] not in steps}


def whole_sets(slots: Iterable[SealedSlot]) -> list[SnapshotSet]:
    """Return the whole sets in `slots`, newest seals first; slots of incomplete sets are left out.

    A rank may hold one step twice: once as it sealed it, once as it was fetched. Each belongs to a set of its own.
    Sets in which ranks differ are left out too.
    """
    by_set: dict[_Set, dict[int, list[SealedSlot]]] = {}
    for sealed in sorted(slots, key=lambda sealed: sealed.slot.sequence, reverse=True):
        by_set.setdefault(_set_of(sealed), {}).setdefault(sealed.record.rank, []).append(sealed)
    return [
        found
        for ranks in by_set.values()
        for found in zip(*(ranks[rank] for rank in sorted(ranks)), strict=False)
        if len(found) == found[0].record.world_size and not differing(sealed.record for sealed in found)
    ]


def differing(records: Iterable[SlotRecord]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that are stored once for several ranks, and are not equal on them.

    Args:
        records: of all slots of a set, in rank order.

    Returns:
        By the tensor's name, the ranks that have other bytes than the first one that was compared.
    """
    first: dict[str, int] = {}
    others: dict[str, set[int]] = {}
    for record in records:
        own = {entry for entry, piece in (record.pieces or {}).items() if piece.own}
        for label, value in record.sums.items():
            if (name := tensor_of(label)) not in own and first.setdefault(label, value) != value:
                others.setdefault(name, set()).add(record.rank)
    return {name: tuple(sorted(ranks)) for name, ranks in others.items()}
