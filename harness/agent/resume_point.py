"""What the trainers restore, and a copy of a snapshot that is in this host's memory already.

Both are handed from one part of the agent to the next: `save/` has the slots, `resume/` chooses, `trainers/` sends.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.manifest import Manifest
from harness.core.snapshot import SnapshotId
from harness.ipc.slots import Slot, SlotRecord


@dataclass(frozen=True)
class MemoryCopy:
    """A sealed slot of this host; `manifest` is known once a tier has published it, and verifies it."""

    id: SnapshotId
    index: int
    slot: Slot
    record: SlotRecord
    manifest: Manifest | None = None

    tier = "memory"


@dataclass(frozen=True)
class ResumePoint:
    """What the trainers will restore: a sealed slot with verified content.

    Attributes:
        id: the snapshot.
        tier: where it came from.
        index: the slot's index where it is one of the node's own already, else `None`.
        slot: the slot.
        record: what it holds.
        verified: False only for a memory copy that no tier had digests of yet.
        filling_s: what fetching and verifying it took.
        manifest: what is committed, where it came from a store.
    """

    id: SnapshotId
    tier: str
    index: int | None
    slot: Slot
    record: SlotRecord
    verified: bool
    filling_s: float = 0.0
    manifest: Manifest | None = None
