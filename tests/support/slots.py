"""Slots that hold a snapshot, as a trainer sealed them or a search fetched them."""

from __future__ import annotations

from cloud.testing.memory import MemoryStore
from harness.agent.resume_point import ResumePoint, SealedSlot
from harness.agent.save.slot_pool import SlotPool
from harness.ipc.slots import Slot
from harness.snapshots import commit
from tests.support.protocol import FOREVER, KEYS, SLOT_BYTES, Content


def a_slot(content: Content, sequence: int = 1, rank: int = 0) -> Slot:
    """One that is sealed."""
    slot = Slot.create(SLOT_BYTES)
    content.seal(slot, sequence, rank)
    return slot


def pooled(pool: SlotPool, content: Content, sequence: int = 1) -> tuple[SealedSlot, ...]:
    """The set of `content`, in slots of `pool`."""
    slots = [a_slot(content, sequence, rank) for rank in range(content.world_size)]
    return tuple(SealedSlot(pool.add(slot, rank), slot, content.record(rank)) for rank, slot in enumerate(slots))


def fetched(content: Content, tier: str = "remote") -> ResumePoint:
    """What a search gives that has read `content` from a store."""
    manifest = commit.publish(MemoryStore(), KEYS, content.staged(), tier, FOREVER, lambda event: None)
    ranks = range(content.world_size)
    return ResumePoint(
        id=content.id,
        tier=tier,
        slots=tuple(a_slot(content, 0, rank) for rank in ranks),
        records=tuple(content.record(rank) for rank in ranks),
        indexes=(),
        verified=True,
        manifest=manifest,
    )
