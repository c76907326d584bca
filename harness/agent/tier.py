"""A tier: sealed slot or local snapshot → one ObjectStore → publish → verify → retire. Two instances: local and remote.

Owns one thread and its order of work; the protocol itself is `commit.py`. The newest job wins: a job that waits is
replaced by a newer one, a job in flight is finished. A failing store is retried for ever and never stops training.

    submit ─▶ [pending] ─▶ save (retry until it fits, a newer one comes, or the deadline passes)
                            └▶ idle: verify what was written, retire, keep room for the next one
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from cloud.errors import CloudError, Full
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.agent import commit
from harness.core import events
from harness.core.manifest import Manifest
from harness.core.policy import retain
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import SnapshotCorrupt
from harness.ipc.slots import Slot, SlotRecord

CALL_S = 600.0  # one attempt at a snapshot while nothing presses
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
SPARE_BYTES = 64 * 1024 * 1024  # records, journal segments, the file system's own needs


@dataclass
class Generation:
    """One start of the trainers. `number` may still rise until `claimed` is set; published remotely only after.

    Attributes:
        number: the generation's number.
        run_id: identity of the run.
        nonce: this claimant's.
        parent: the snapshot it resumed from; `None` for step 0, or while it is not known yet.
        claimed: set once the claim stands in the store.
    """

    number: int
    run_id: str
    nonce: str
    parent: str | None = None
    claimed: threading.Event = field(default_factory=threading.Event)


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


@dataclass(frozen=True)
class LocalSnapshot:
    """A snapshot committed in the local tier; it is not retired there while this is queued."""

    store: ObjectStore
    keys: RunKeys
    manifest: Manifest
    generation: Generation
    sealed_at: float  # monotonic

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
            id=self.manifest.id,
            run_id=part.run_id,
            parent=part.parent,
            rank=part.rank,
            world_size=part.world_size,
            state=bytes(part.state),
            environment=part.environment,
            sealed_at=part.sealed_at,
            shards=shards,
            digests=[shard.crc64nvme for shard in part.shards],
        )


Job = SealedSlot | LocalSnapshot


@dataclass(frozen=True)
class Retention:
    """What a tier keeps. See `policy.retain`."""

    keep_last: int
    keep_every: int | None = None


@dataclass(frozen=True)
class TierEvents:
    """What a tier tells the agent, from the tier's thread.

    Attributes:
        published: a job is committed.
        failed: an attempt failed; the last argument says whether it was the last one.
        released: the tier does not read the job's bytes any more, whatever became of it.
        fatal: a bug.
    """

    published: Callable[[Tier, Job, Manifest], None]
    failed: Callable[[Tier, Job, CloudError | SnapshotCorrupt, bool], None]
    released: Callable[[Tier, Job], None]
    fatal: Callable[[BaseException], None]


class Tier:
    """One store and the thread that fills it."""

    def __init__(
        self,
        name: str,
        store: ObjectStore,
        keys: RunKeys,
        retention: Retention,
        emit: commit.Emit,
        tell: TierEvents,
        *,
        host: str,
        pinned: Callable[[], Collection[SnapshotId]] = tuple,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            name: "local" or "remote".
            store: where to.
            keys: of the run.
            retention: what to keep.
            emit: the journal.
            tell: the agent.
            host: for quarantine records.
            pinned: snapshots that something else still reads.
        """
        self.name, self.store, self.keys, self._retention = name, store, keys, retention
        self._emit, self._tell, self._host, self._pinned = emit, tell, host, pinned
        self._condition = threading.Condition()
        self._pending: Job | None = None
        self._current: Job | None = None
        self._deadline = Deadline.never()
        self._closing = False
        self._sent = 0
        self._unverified: Manifest | None = None
        self._verified: set[SnapshotId] = set()
        self._swept = False
        self.bytes_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"harness-tier-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Ask for `job` to be made durable here; a job that is still waiting is dropped for it."""
        with self._condition:
            dropped, self._pending = self._pending, job
            self._condition.notify_all()
        if dropped is not None:
            self._tell.released(self, dropped)

    def drain(self, deadline: Deadline) -> None:
        """From now on nothing is worth doing after `deadline`, and nothing idle is done."""
        with self._condition:
            self._deadline = deadline
            self._condition.notify_all()

    def trust(self, snapshot: SnapshotId) -> None:
        """Note that a snapshot was read and found good by somebody else (a successful restore)."""
        self._verified.add(snapshot)

    @property
    def idle(self) -> bool:
        """Whether there is no snapshot waiting or in flight."""
        with self._condition:
            return self._pending is None and self._current is None

    @property
    def bytes_left(self) -> int | None:
        """Bytes still to send of the job in flight; `None` when idle."""
        with self._condition:
            job = self._current or self._pending
            return None if job is None else max(0, job.bytes - self._sent)

    @property
    def jobs(self) -> list[Job]:
        """What is in flight and waiting."""
        with self._condition:
            return [job for job in (self._current, self._pending) if job is not None]

    def close(self, wait_s: float) -> None:
        """Stop after the call in flight; waits at most `wait_s`."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        # Linux keeps a nice value for each thread: saving must not take the training loop's cores.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            while (job := self._next()) is not None:
                self._save(job)
                with self._condition:
                    self._current = None
                self._tell.released(self, job)
                self._upkeep()
        except Exception as err:  # noqa: BLE001  the thread's root: a bug here must end the agent, not hang it
            self._tell.fatal(err)

    def _next(self) -> Job | None:
        with self._condition:
            while self._pending is None and not self._closing:
                self._condition.wait()
            if self._closing:
                return None
            self._current, self._pending = self._pending, None
            self._sent = 0
            return self._current

    def _save(self, job: Job) -> None:
        retry_s = FIRST_RETRY_S
        while not self._closing:
            with self._condition:
                deadline = self._deadline
                self._sent = 0
            if deadline.expired:
                return
            try:
                self._save_once(job, deadline.sooner(CALL_S))
                return
            except (CloudError, SnapshotCorrupt) as err:
                # A disk that fails is not asked again for this one: the store gets it straight from the slot, which a
                # retry would keep from the trainer; the next snapshot is the next attempt.
                final = isinstance(err, SnapshotCorrupt) or self.name == "local" or deadline.remaining_s < FIRST_RETRY_S
                self._emit(
                    events.SaveFailed(
                        tier=self.name, step=job.step, reason=str(err), retry_in_s=None if final else retry_s
                    )
                )
                self._tell.failed(self, job, err, final)
                if final or self._overtaken(retry_s, deadline):
                    return
                retry_s = min(LONGEST_RETRY_S, 2 * retry_s)
                if self._deadline is not deadline:
                    retry_s = FIRST_RETRY_S  # a notice came: every second counts now

    def _save_once(self, job: Job, deadline: Deadline) -> None:
        if self.name == "remote" and not job.generation.claimed.wait(min(deadline.remaining_s, LONGEST_RETRY_S)):
            raise CloudError("the generation is not claimed yet: the store has not answered")
        started = time.monotonic()
        self._make_room(job, deadline)
        staged = job.stage()
        try:
            manifest = commit.publish(
                self.store, self.keys, staged, self.name, deadline, self._emit, progress=self._count
            )
        except Full:
            self.store.reserve(0)
            self._retire(keep_last=1, deadline=deadline)
            manifest = commit.publish(
                self.store, self.keys, staged, self.name, deadline, self._emit, progress=self._count
            )
        now = time.monotonic()
        self.bytes_s = job.bytes / max(now - started, 1e-6)
        self._emit(
            events.Published(
                tier=self.name, snapshot=str(manifest.id), step=job.step, bytes=job.bytes, seconds=now - job.sealed_at
            )
        )
        self._unverified = manifest
        self._tell.published(self, job, manifest)

    def _overtaken(self, wait_s: float, deadline: Deadline) -> bool:
        """Wait before the next attempt, or until another deadline counts; whether a newer job makes it pointless."""
        give_up_at = time.monotonic() + min(wait_s, deadline.remaining_s / 2)
        with self._condition:
            while self._pending is None and self._deadline is deadline and not self._closing:
                left_s = give_up_at - time.monotonic()
                if left_s <= 0:
                    break
                self._condition.wait(left_s)
            return self._pending is not None or self._closing

    def _make_room(self, job: Job, deadline: Deadline) -> None:
        needed = job.bytes + SPARE_BYTES
        free = self.store.free_bytes()
        if free is not None and free < needed:
            self._retire(keep_last=1, deadline=deadline)
            free = self.store.free_bytes()
        if free is not None and free < needed:
            raise Full(
                f"{needed / 1e9:.3f} GB needed, {free / 1e9:.3f} GB free in {self.store.url}; "
                "make room, or keep fewer snapshots (--keep-last)"
            )

    def _upkeep(self) -> None:
        if self._busy():
            return
        deadline = Deadline.after(CALL_S)
        try:
            if self._unverified is not None and not self._verify(self._unverified, deadline):
                return  # interrupted by a newer snapshot, which will be verified instead
            self._retire(self._retention.keep_last, deadline)
            if not self._swept:
                commit.sweep(self.store, self.keys, self._sweepable(), deadline)
                self._swept = True
            if (newest := max(self._verified, default=None)) is not None:
                self.store.reserve(commit.read_manifest(self.store, self.keys, newest, deadline).payload_bytes)
        except (CloudError, SnapshotCorrupt) as err:
            self._emit(events.UpkeepFailed(tier=self.name, reason=str(err)))

    def _verify(self, manifest: Manifest, deadline: Deadline) -> bool:
        self._unverified = None
        try:
            good = commit.verify(self.store, self.keys, manifest, deadline, interrupted=self._busy)
        except SnapshotCorrupt:
            try:
                good = commit.verify(self.store, self.keys, manifest, deadline, interrupted=self._busy)
            except SnapshotCorrupt as err:
                commit.quarantine(self.store, self.keys, manifest.id, str(err), self._host, deadline)
                self._emit(events.Quarantined(snapshot=str(manifest.id), reason=str(err)))
                raise
        if good:
            self._verified.add(manifest.id)
            self._emit(events.Verified(tier=self.name, snapshot=str(manifest.id)))
        return good

    def _retire(self, keep_last: int, deadline: Deadline) -> None:
        doomed = retain(
            commit.survey(self.store, self.keys, deadline).commits,
            keep_last=keep_last,
            keep_every=self._retention.keep_every,
            verified=self._verified,
            pinned=self._pinned(),
        )
        for snapshot in doomed:
            commit.remove(self.store, self.keys, snapshot, deadline)
            self._verified.discard(snapshot)
            self._emit(events.Retired(tier=self.name, snapshot=str(snapshot)))

    def _sweepable(self) -> int:
        """The newest generation whose garbage is ours to delete: our own."""
        return max((snapshot.generation for snapshot in self._verified), default=0)

    def _busy(self) -> bool:
        """Whether something better than upkeep waits."""
        with self._condition:
            return self._pending is not None or self._closing or self._deadline.remaining_s != float("inf")

    def _count(self, sent: int) -> None:
        self._sent += sent
