"""Snapshots in this host's memory: a rank's slot, a set of them, and the one that the trainers restore.

They are handed from one part of the agent to the next: `save/` has the slots, `resume/` chooses, `trainers/` sends.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.manifest import Manifest
from harness.core.snapshot import SnapshotId
from harness.ipc.slots import Slot, SlotRecord


@dataclass(frozen=True)
class SealedSlot:
    """One rank's share of a snapshot.

    Attributes:
        index: the slot's, in the node's pool.
        slot: the slot.
        record: what it holds.
    """

    index: int
    slot: Slot
    record: SlotRecord

    @property
    def payload_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(span.size for span in self.record.shards)


SnapshotSet = tuple[SealedSlot, ...]
"""One sealed slot of each rank, in rank order: only a complete set is a snapshot."""


@dataclass(frozen=True)
class MemoryCopy:
    """A snapshot in slots of this host; `manifest`, which verifies it, is known once a tier has published it."""

    id: SnapshotId
    slots: SnapshotSet
    manifest: Manifest | None = None

    tier = "memory"

    @property
    def records(self) -> tuple[SlotRecord, ...]:
        """The slots' records, in rank order."""
        return tuple(sealed.record for sealed in self.slots)


@dataclass(frozen=True)
class ResumePoint:
    """The snapshot that the trainers will restore: in slots, with verified content.

    Attributes:
        id: the snapshot.
        tier: where it came from.
        slots: in rank order.
        records: of the slots, in rank order.
        indexes: of the slots, if they are in the node's pool already; empty if they were fetched just now.
        verified: False only for a memory copy that no tier had digests of yet.
        filling_s: seconds that fetching and verifying it took.
        manifest: of the commit, if the snapshot came from a store.
    """

    id: SnapshotId
    tier: str
    slots: tuple[Slot, ...]
    records: tuple[SlotRecord, ...]
    indexes: tuple[int, ...]
    verified: bool
    filling_s: float = 0.0
    manifest: Manifest | None = None

    def close(self) -> None:
        """Close the slots that were fetched for it: no trainer will restore it."""
        if not self.indexes:
            for slot in self.slots:
                slot.close()
