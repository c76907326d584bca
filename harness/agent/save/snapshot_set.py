"""Sets: the sealed slots of one step, of all ranks. Only a whole set is a snapshot; a slot alone is none.

Owns which slots belong together, and what is waited for. Knows neither tiers nor who holds a slot. Main thread.

    seal of rank 0 ──▶ waits ┐
    seal of rank 1 ──────────┴─▶ a set ──▶ the tiers' turn
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.agent.resume_point import SealedSlot, SnapshotSet

_Step = tuple[int, int]  # generation and step


def _step_of(sealed: SealedSlot) -> _Step:
    return sealed.record.generation, sealed.record.step


class Gathering:
    """Seals that wait for those of the other ranks."""

    def __init__(self) -> None:
        """Nothing waits."""
        self._waiting: dict[_Step, dict[int, SealedSlot]] = {}

    @property
    def indexes(self) -> set[int]:
        """Of the slots that wait."""
        return {sealed.index for ranks in self._waiting.values() for sealed in ranks.values()}

    def add(self, sealed: SealedSlot) -> SnapshotSet | None:
        """A rank has sealed; the set, if it was the last one of its step. Sets of earlier seals never come to be then.

        A rank seals its steps in order, so whoever is complete has been overtaken by nobody.
        """
        self._waiting.setdefault(_step_of(sealed), {})[sealed.record.rank] = sealed
        ranks = self._waiting[_step_of(sealed)]
        if len(ranks) < sealed.record.world_size:
            return None
        self._waiting.clear()
        return tuple(ranks[rank] for rank in sorted(ranks))

    def forget(self) -> None:
        """Whoever is waited for is gone."""
        self._waiting.clear()


def whole_sets(slots: Iterable[SealedSlot]) -> list[SnapshotSet]:
    """The sets that `slots` make, newest seals first; what is of no whole set is left out.

    A rank may hold one step twice: once as it sealed it, once as it was fetched. Each is of a set of its own.
    """
    by_step: dict[_Step, dict[int, list[SealedSlot]]] = {}
    for sealed in sorted(slots, key=lambda sealed: sealed.slot.sequence, reverse=True):
        by_step.setdefault(_step_of(sealed), {}).setdefault(sealed.record.rank, []).append(sealed)
    return [
        found
        for ranks in by_step.values()
        for found in zip(*(ranks[rank] for rank in sorted(ranks)), strict=False)
        if len(found) == found[0].record.world_size
    ]
