"""Sets of sealed slots: what belongs together, and what is no snapshot yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness.agent.generation import Generation
from harness.agent.resume_point import SealedSlot
from harness.agent.save.jobs import MemorySnapshot
from harness.agent.save.slot_pool import SlotPool
from harness.agent.save.snapshot_set import Gathering, differing, whole_sets
from harness.core.manifest import StoredPiece
from harness.core.pieces import label
from harness.core.snapshot import SnapshotId
from tests.support.protocol import RUN_ID, Content
from tests.support.slots import pooled


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool()
    yield pool
    pool.close()


def ranks_of(pool: SlotPool, step: int, world_size: int = 3, *, sequence: int = 1) -> tuple[SealedSlot, ...]:
    return pooled(pool, Content(SnapshotId(1, step), world_size=world_size), sequence)


def test_one_rank_is_a_set_by_itself(pool: SlotPool) -> None:
    (sealed,) = ranks_of(pool, 10, 1)
    gathering = Gathering()

    assert gathering.add(sealed) == (sealed,)
    assert gathering.indexes == set()


def test_a_set_is_there_with_its_last_rank_and_is_in_rank_order(pool: SlotPool) -> None:
    zero, one, two = ranks_of(pool, 10)
    gathering = Gathering()

    assert gathering.add(two) is None
    assert gathering.add(zero) is None
    assert gathering.indexes == {zero.index, two.index}
    assert gathering.add(one) == (zero, one, two)
    assert gathering.indexes == set()


def test_a_step_that_one_rank_never_sealed_is_given_up_for_a_later_whole_one(pool: SlotPool) -> None:
    zero, one, _two = ranks_of(pool, 10)
    later = ranks_of(pool, 20, sequence=2)
    gathering = Gathering()
    gathering.add(zero)
    gathering.add(one)

    assert [gathering.add(sealed) for sealed in later] == [None, None, later]
    assert gathering.indexes == set()


def test_a_step_that_one_rank_has_sealed_already_is_not_given_up_for_an_earlier_whole_one(pool: SlotPool) -> None:
    ten, twenty = ranks_of(pool, 10, 2), ranks_of(pool, 20, 2, sequence=2)
    gathering = Gathering()

    assert [gathering.add(sealed) for sealed in (ten[0], twenty[0], ten[1])] == [None, None, ten]
    assert gathering.indexes == {twenty[0].index}
    assert gathering.add(twenty[1]) == twenty


def test_seals_of_two_generations_never_make_a_set(pool: SlotPool) -> None:
    zero, _, _ = ranks_of(pool, 10)
    others = pooled(pool, Content(SnapshotId(2, 10), world_size=3), 2)
    gathering = Gathering()
    gathering.add(zero)

    assert [gathering.add(sealed) for sealed in others[1:]] == [None, None]


def test_what_is_of_no_whole_set_is_no_snapshot(pool: SlotPool) -> None:
    ten, twenty = ranks_of(pool, 10), ranks_of(pool, 20, sequence=2)

    assert whole_sets([*ten, *twenty]) == [twenty, ten]
    assert whole_sets([*ten, *twenty[1:]]) == [ten]
    assert whole_sets(twenty[:2]) == []


def test_a_step_that_was_sealed_and_fetched_is_there_twice(pool: SlotPool) -> None:
    fetched, sealed = ranks_of(pool, 10, 2, sequence=0), ranks_of(pool, 10, 2, sequence=4)

    assert whole_sets([*fetched, *sealed]) == [sealed, fetched]


def with_sums(slots: tuple[SealedSlot, ...], *sums: int, own: bool = False) -> tuple[SealedSlot, ...]:
    """The same slots, in each of which one tensor has that sum; `own`: each rank stores it for itself."""
    pieces = {"w": StoredPiece(own=True)} if own else {}
    return tuple(
        replace(sealed, record=replace(sealed.record, pieces=pieces, sums={label("w", None, (3,)): value}))
        for sealed, value in zip(slots, sums, strict=True)
    )


def test_a_set_whose_ranks_differ_in_what_one_stores_for_all_is_no_snapshot(pool: SlotPool) -> None:
    """However it is found: its ranks and their agent may be dead."""
    slots = ranks_of(pool, 10)

    assert differing(sealed.record for sealed in with_sums(slots, 1, 1, 2)) == {"w": (2,)}
    assert whole_sets(with_sums(slots, 1, 1, 2)) == []
    assert whole_sets(with_sums(slots, 1, 1, 1)) == [with_sums(slots, 1, 1, 1)]
    assert whole_sets(with_sums(slots, 1, 1, 2, own=True)) == [with_sums(slots, 1, 1, 2, own=True)]


@pytest.mark.parametrize("until", ["it is filled", "it is sealed anew"])
def test_a_slot_that_is_filled_anew_is_not_what_was_to_be_sent(pool: SlotPool, until: str) -> None:
    """By a trainer that a dead agent had granted it, while the next agent reads it."""
    slots = ranks_of(pool, 10, 2)
    parts = MemorySnapshot(slots, Generation(1, RUN_ID, "a" * 16), 0.0).stage().parts
    assert all(part.intact() for part in parts)

    slots[1].slot.begin()
    if until == "it is sealed anew":
        Content(SnapshotId(1, 20), world_size=2).seal(slots[1].slot, 2, 1)

    assert [part.intact() for part in parts] == [True, False]
