"""Jobs of a tier: a set of sealed slots, a snapshot in the local tier, or a checkpoint that was set aside.

Owns the input of `publish` for each of them; moves no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cloud.store import ObjectStore
from harness.agent.generation import Generation
from harness.agent.resume_point import SealedSlot, SnapshotSet
from harness.core import small_state
from harness.core.manifest import Manifest, Part
from harness.core.snapshot import RunKeys, SnapshotId
from harness.snapshots import commit
from harness.watch.record import encode
from harness.watch.survey import saved_at
from harness.watch.watcher import Checkpoint


@dataclass(frozen=True)
class MemorySnapshot:
    """A snapshot in shared memory. Its slots are held for as long as a tier reads them."""

    slots: SnapshotSet
    generation: Generation
    sealed_at: float  # monotonic

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.slots[0].record.step

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(sealed.payload_bytes for sealed in self.slots)

    @property
    def indexes(self) -> list[int]:
        """Indexes of its slots."""
        return [sealed.index for sealed in self.slots]

    def stage(self) -> commit.Staged:
        """Return the input of `publish`, under the generation's present number."""
        return commit.Staged(
            id=SnapshotId(self.generation.number, self.step),
            run_id=self.generation.run_id,
            parent=self.generation.parent,
            parts=[_stage_slot(sealed, self.slots[0]) for sealed in self.slots],
        )

    def attempt(self) -> commit.Attempt:
        """Return an attempt in the directory that the generation's claim fixes: a dead agent may have sent parts there.

        An agent of an earlier version may have handed a slot over without the nonce.
        """
        return commit.Attempt(self.generation.nonce) if self.generation.nonce else commit.Attempt()


@dataclass(frozen=True)
class LocalSnapshot:
    """A snapshot committed in the local tier; it is not retired there while this is queued.

    Attributes:
        store: the local tier's.
        keys: of the run.
        manifest: the local commit.
        generation: the one under whose claim it is published.
        sealed_at: monotonic.
        behind: whether it is an earlier generation's that was resumed; then it keeps its own name.
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
        """Return the input of `publish`: the local files."""
        return commit.Staged(
            id=self.manifest.id if self.behind else SnapshotId(self.generation.number, self.manifest.step),
            run_id=self.manifest.run_id,
            parent=self.manifest.parent,
            parts=[self._stage_part(part) for part in self.manifest.parts],
        )

    def _stage_part(self, part: Part) -> commit.StagedPart:
        shards = []
        for shard in part.shards:
            path = self.store.local_path(self.keys.payload(self.manifest.directory, shard.name))
            if path is None:
                raise ValueError("a local tier is a directory")
            shards.append((shard.name, path))
        return commit.StagedPart(
            rank=part.rank,
            world_size=part.world_size,
            state=bytes(part.state),
            environment=part.environment,
            sealed_at=part.sealed_at,
            shards=shards,
            known=part.shards,
            pieces=part.pieces,
            lacks=part.lacks,
        )

    def attempt(self) -> commit.Attempt:
        """Return an attempt in a directory of the local one's name: parts that a dead agent sent are not sent again."""
        return commit.Attempt(self.manifest.nonce)


@dataclass(frozen=True)
class FilesSnapshot:
    """A checkpoint that the program has written by itself, set aside. Its files are deleted once no tier reads them.

    Attributes:
        checkpoint: what was set aside.
        generation: the one under whose claim it is published.
        sealed_at: monotonic.
    """

    checkpoint: Checkpoint
    generation: Generation
    sealed_at: float

    @property
    def step(self) -> int:
        """The checkpoint's step, or its number if its name tells none."""
        return self.checkpoint.record.step

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return self.checkpoint.kept.bytes

    def stage(self) -> commit.Staged:
        """Return the input of `publish`: the files as they were set aside, and what they were then."""
        record, kept = self.checkpoint.record, self.checkpoint.kept
        part = commit.StagedPart(
            rank=0,
            world_size=1,
            state=encode(record),
            environment={},
            sealed_at=saved_at(record),
            shards=[],
            known=[file.entry for file in kept.files],
            files=[commit.StagedFile(file.path, file.source) for file in kept.files],
        )
        return commit.Staged(
            id=SnapshotId(self.generation.number, self.step),
            run_id=self.generation.run_id,
            parent=self.generation.parent,
            parts=[part],
        )

    def attempt(self) -> commit.Attempt:
        """Return an attempt in a directory of its own: another agent would set aside other files."""
        return commit.Attempt()


Job = MemorySnapshot | LocalSnapshot | FilesSnapshot


def _stage_slot(sealed: SealedSlot, first: SealedSlot) -> commit.StagedPart:
    record, lacks = sealed.record, tuple[str, ...]()
    state = record.state.encode()
    if sealed is not first:
        state, lacks = small_state.split(first.record.state.encode(), state)
    return commit.StagedPart(
        rank=record.rank,
        world_size=record.world_size,
        state=state,
        environment=record.environment,
        sealed_at=record.sealed_at,
        shards=[(span.name, sealed.slot.shard(span)) for span in record.shards],
        pieces=msgspec.UNSET if record.pieces is None else record.pieces,
        lacks=lacks or msgspec.UNSET,
        intact=lambda: sealed.slot.record() == record,
    )
