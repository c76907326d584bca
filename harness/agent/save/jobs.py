"""What a tier is asked to make durable: a sealed slot, or a snapshot that is committed in the local tier.

Owns what `publish` needs of each of them; moves no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from cloud.store import ObjectStore
from harness.agent.generation import Generation
from harness.core.manifest import Manifest
from harness.core.snapshot import RunKeys, SnapshotId
from harness.ipc.slots import Slot, SlotRecord
from harness.snapshots import commit


@dataclass(frozen=True)
class SealedSlot:
    """A snapshot in shared memory. The slot is held for as long as a tier reads it."""

    index: int
    slot: Slot
    record: SlotRecord
    generation: Generation
    sealed_at: float  # monotonic

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.record.step

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(span.size for span in self.record.shards)

    def stage(self) -> commit.Staged:
        """What `publish` needs, under the generation's number as it is now."""
        return commit.Staged(
            id=SnapshotId(self.generation.number, self.record.step),
            run_id=self.generation.run_id,
            parent=self.generation.parent,
            rank=self.record.rank,
            world_size=self.record.world_size,
            state=self.record.state.encode(),
            environment=self.record.environment,
            sealed_at=self.record.sealed_at,
            shards=[(span.name, self.slot.shard(span)) for span in self.record.shards],
        )

    def attempt(self) -> commit.Attempt:
        """Nothing is stored yet: what is in memory has never been sent by anybody before us."""
        return commit.Attempt()


@dataclass(frozen=True)
class LocalSnapshot:
    """A snapshot committed in the local tier; it is not retired there while this is queued.

    Attributes:
        store: the local tier's.
        keys: of the run.
        manifest: the local commit.
        generation: under whose claim it is published.
        sealed_at: monotonic.
        behind: it is an earlier generation's, resumed from: it keeps its own name.
    """

    store: ObjectStore
    keys: RunKeys
    manifest: Manifest
    generation: Generation
    sealed_at: float
    behind: bool = False

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.manifest.step

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return self.manifest.payload_bytes

    def stage(self) -> commit.Staged:
        """What `publish` needs: the local files."""
        part = self.manifest.parts[0]
        shards = []
        for shard in part.shards:
            path = self.store.local_path(self.keys.payload(self.manifest.directory, shard.name))
            if path is None:
                raise ValueError("a local tier is a directory")
            shards.append((shard.name, path))
        return commit.Staged(
            id=self.manifest.id if self.behind else SnapshotId(self.generation.number, self.manifest.step),
            run_id=part.run_id,
            parent=part.parent,
            rank=part.rank,
            world_size=part.world_size,
            state=bytes(part.state),
            environment=part.environment,
            sealed_at=part.sealed_at,
            shards=shards,
            known=part.shards,
        )

    def attempt(self) -> commit.Attempt:
        """In a directory of the local one's name: what an agent that died had sent of it is not sent again."""
        return commit.Attempt(nonce=self.manifest.directory.rpartition("-")[2])


Job = SealedSlot | LocalSnapshot
