"""A tier: sealed slot or local snapshot → one ObjectStore → publish → verify → retire. Two instances: local and remote.

Owns one thread and its order of work; the protocol itself is `snapshots/commit.py`. The newest job wins: a job that
waits is replaced by a newer one, a job in flight is finished, unless time runs out and only the newer one alone still
fits. A failing store is retried without end and never stops training. While nothing presses, sending keeps to a rate
limit.

    submit ─▶ [pending] ─▶ save (retry until it fits, a newer one comes, or the deadline passes)
                            └▶ idle: verify what was written, retire, keep room for the next one
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from cloud.errors import CloudError, Full, NotFound, Unreadable
from cloud.notice import Deadline
from cloud.pool import Pool
from cloud.priority import Background
from cloud.store import ObjectStore
from harness.agent.context import Context
from harness.agent.generation import Generation
from harness.core import events
from harness.core.manifest import ForeignFormat, Manifest
from harness.core.policy.copying import Copied, Rates, patience_s
from harness.core.policy.drain import gives_way
from harness.core.policy.retention import retain
from harness.core.rate import Rate
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import SnapshotCorrupt
from harness.ipc.slots import Slot, SlotRecord
from harness.snapshots import commit
from harness.snapshots.dedup import Deduplicator

CALL_S = 600.0  # one attempt at a snapshot while nothing presses, beside what its bytes take
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
AGAIN_S = (0.5, 2.0)  # before what differs is read again
SPARE_BYTES = 64 * 1024 * 1024  # records, journal segments, the file system's own needs
MOST_SKIPPED = 1  # upkeeps in a row, since a snapshot was waiting: after that it waits for one
GRACE_S = 3 * 24 * 3600.0  # how old another run's snapshot must be before it is retired without the user's word
SILENT_S = 10.0  # without a sign of a store that something is sent to, until that is told
SAMPLE_S = 2.0  # a speed is measured over so long: parts are acknowledged in bursts


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


@dataclass(frozen=True)
class Retention:
    """What a tier keeps. See `core.policy.retention`."""

    keep_last: int
    keep_every: int | None = None


@dataclass(frozen=True)
class TierEvents:
    """What a tier tells the agent, from the tier's thread.

    Attributes:
        published: a job is committed.
        failed: an attempt failed; the last argument says whether it was the last one.
        released: the tier does not read the job's bytes any more, whatever became of it.
    """

    published: Callable[[Tier, Job, Manifest], None]
    failed: Callable[[Tier, Job, CloudError | SnapshotCorrupt, bool], None]
    released: Callable[[Tier, Job], None]


class _GivenUp(Exception):
    """The job in flight makes way for a newer one; raised out of the store's `put` by `Tier._count`."""


class Tier:
    """One store and the thread that fills it."""

    def __init__(
        self,
        context: Context,
        name: str,
        store: ObjectStore,
        retention: Retention,
        tell: TierEvents,
        *,
        pinned: Callable[[], Collection[SnapshotId]] = tuple,
        limit_bytes_s: float | None = None,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            context: of the agent.
            name: "local" or "remote".
            store: where to.
            retention: what to keep.
            tell: whoever gives it jobs.
            pinned: snapshots that something else still reads.
            limit_bytes_s: how fast to send while nothing is urgent; `None` for as fast as it goes.
        """
        self.name, self.store, self.keys, self._retention = name, store, context.keys, retention
        self._emit, self._host, self._on_bug = context.emit, context.host, context.on_bug
        self._tell, self._pinned = tell, pinned
        self._condition = threading.Condition()
        self._pending: Job | None = None
        self._current: Job | None = None
        self._deadline = Deadline.never()
        self._closing = False
        self._limit_bytes_s = limit_bytes_s
        self._attempt = commit.Attempt()
        self._unchanged = Deduplicator()
        self._copied = Copied()
        self._looked_for_base = False
        self._rate = Rate()
        self._meter = _Meter(self._attempt)
        self._gives_up = False
        self._urgent = False
        self._unverified: Manifest | None = None
        self._verified: set[SnapshotId] = set()
        self._doubtful: set[SnapshotId] = set()  # were verified, before something was damaged that may be theirs, too
        self._swept = False
        self._heard_at: float | None = None  # while something is sent: when the store last took some of it
        self._commits = False
        self._fresh = context.settings.fresh  # the user has said that what was before is to be ignored, and may go
        self._run_id = ""
        self._ours: set[SnapshotId] = set()
        self._skipped = 0
        self._behind = self._reads_well = False
        self._background = Background()
        self._thread = threading.Thread(target=self._run, name=f"harness-tier-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Ask for `job` to be made durable here; a job that is still waiting is dropped for it.

        The one in flight is finished first, unless there is a deadline, and only `job` alone still makes it.
        """
        with self._condition:
            dropped, self._pending = self._pending, job
            self._give_way()
            self._condition.notify_all()
        if dropped is not None:
            self._tell.released(self, dropped)

    def drain(self, deadline: Deadline) -> None:
        """From now on nothing is worth doing after `deadline`, and nothing idle is done."""
        with self._condition:
            self._deadline = deadline
            self._background.urgent = True
            self._give_way()
            self._condition.notify_all()

    def set_urgent(self, urgent: bool) -> None:
        """Whether to send as fast as it goes: whatever the limit, and whoever else wants the machine."""
        with self._condition:
            self._urgent = urgent
            self._background.urgent = urgent or self._deadline.remaining_s != float("inf")
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
            if self._current is not None:
                return self._left(self._current)
            return None if self._pending is None else self._pending.bytes

    @property
    def bytes_s(self) -> float | None:
        """Measured, pessimistic, and without what the limit slows down; `None` until something was sent."""
        with self._condition:
            return self._rate.per_s

    @property
    def copied(self) -> Copied:
        """What the store copied by itself of the newest snapshot here: of the next one that need not be sent either."""
        with self._condition:
            return self._copied

    @property
    def jobs(self) -> list[Job]:
        """What is in flight and waiting."""
        with self._condition:
            return [job for job in (self._current, self._pending) if job is not None]

    def tell_silence(self) -> None:
        """Say that the store has taken nothing for a while, once until it does. Main thread."""
        with self._condition:
            job, heard_at = self._current, self._heard_at
            if job is None or heard_at is None or (silent_s := time.monotonic() - heard_at) < SILENT_S:
                return
            self._heard_at = None
        self._emit(events.StoreSilent(tier=self.name, step=job.step, seconds=silent_s))

    def close(self, wait_s: float) -> bool:
        """Stop after the call in flight; waits at most `wait_s`. Whether nothing can be committed any more."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread.is_alive():
            self._thread.join(wait_s)
        with self._condition:
            return not self._commits or not self._thread.is_alive()

    def _run(self) -> None:
        # Saving must not take the training loop's cores, nor its disk. This thread decides and waits, like any other;
        # the store's pools have the bytes, and one of its own has what is done when nothing waits.
        self._background.begin()
        idle = Pool(1, f"harness-upkeep-{self.name}")
        try:
            while (job := self._next()) is not None:
                self._save(job)
                with self._condition:
                    self._current = None
                self._tell.released(self, job)
                idle.submit(self._upkeep).result()
        except Exception as err:  # noqa: BLE001  the thread's root: a bug here must end the agent, not hang it
            self._on_bug(err)
        finally:
            idle.shutdown()

    def _next(self) -> Job | None:
        with self._condition:
            while self._pending is None and not self._closing:
                self._condition.wait()
            if self._closing:
                return None
            job, self._pending = self._pending, None
            self._current = job
            if job is not None:
                self._attempt, self._gives_up = job.attempt(), False
                self._meter = _Meter(self._attempt)
            return job

    def _save(self, job: Job) -> None:
        retry_s = FIRST_RETRY_S
        while not self._closing:
            with self._condition:
                deadline = self._deadline
            if deadline.expired:
                return
            try:
                self._save_once(job, deadline.sooner(patience_s(job.bytes, CALL_S, self._limit_bytes_s)))
                return
            except _GivenUp:
                self._emit(events.GivenUp(tier=self.name, step=job.step))
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
        self._run_id = job.generation.run_id
        self._make_room(job, deadline)
        try:
            manifest = self._publish(job, deadline)
        except Full:
            self.store.reserve(0)
            self._clear(deadline)
            manifest = self._publish(job, deadline)
        now = time.monotonic()
        self._ours.add(manifest.id)
        self._emit(
            events.Published(
                tier=self.name,
                snapshot=str(manifest.id),
                step=job.step,
                bytes=job.bytes,
                seconds=now - job.sealed_at,
                copied=self._attempt.copied_bytes,
            )
        )
        self._unverified = manifest
        self._tell.published(self, job, manifest)

    def _publish(self, job: Job, deadline: Deadline) -> Manifest:
        with self._condition:
            self._heard_at = time.monotonic()
        try:
            return self._publish_heard(job, deadline)
        finally:
            with self._condition:
                self._heard_at = None

    def _publish_heard(self, job: Job, deadline: Deadline) -> Manifest:
        self._look_for_base(deadline)
        with self._condition:
            self._meter = _Meter(self._attempt)  # waiting for the claim, or for room, was not the network's fault
        manifest = commit.publish(
            self.store,
            self.keys,
            job.stage(),
            self.name,
            deadline,
            self._emit,
            attempt=self._attempt,
            progress=self._count,
            unchanged=self._unchanged if self._copies_pay() else None,
            committing=self._committing,
        )
        self._unchanged.committed(manifest)
        with self._condition:
            if not self._meter.sampled:  # a small one: its round trips are most of what it costs
                self._rate.add(self._meter.sent, self._meter.elapsed_s)
            self._copied = Copied(self._attempt.copied_bytes, self._attempt.copying_s)
        return manifest

    @contextlib.contextmanager
    def _committing(self) -> Iterator[None]:
        """Around what makes a snapshot visible: not begun once the tier closes, since an end may be recorded then."""
        with self._condition:
            if self._closing:
                raise CloudError("the agent is ending: nothing is committed any more")
            self._commits = True
        try:
            yield
        finally:
            with self._condition:
                self._commits = False

    def _look_for_base(self, deadline: Deadline) -> None:
        """A run that goes on elsewhere, or as another agent's, copies from the start what an earlier life has sent.

        What somebody else has found damaged since (a resume in place, another agent) is no base any more.
        """
        with contextlib.suppress(CloudError):  # nothing is found then, and the next snapshot looks again
            if not self._looked_for_base:
                base = commit.base(self.store, self.keys, deadline)
                if base is not None and base.run_id == self._run_id:  # of another run, nothing was read
                    self._unchanged.committed(base)
                self._looked_for_base = True
            elif self._unchanged.base is not None:
                self._look_whether_damaged(self._unchanged.base.id, deadline)

    def _look_whether_damaged(self, base: SnapshotId, deadline: Deadline) -> None:
        with contextlib.suppress(NotFound):
            self.store.stat(self.keys.quarantined(base), deadline=deadline)
            self._doubt(base)

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
        needed = self._needed(job) + SPARE_BYTES
        free = self.store.free_bytes()
        if free is not None and free < needed:
            self._clear(deadline)
            free = self.store.free_bytes()
        if free is not None and free < needed:
            option = "--keep-local" if self.name == "local" else "--keep-last"
            raise Full(
                f"{needed / 1e9:.3f} GB needed, {free / 1e9:.3f} GB free in {self.store.url}; "
                f"make room, or keep fewer snapshots ({option})"
            )

    def _needed(self, job: Job) -> int:
        """The bytes that a job will really write, as far as one can tell: what the store copies takes no room."""
        if self._attempt.copied_bytes or self._copied.bytes:
            return max(0, job.bytes - max(self._attempt.copied_bytes, self._copied.bytes))
        # Nothing was saved here yet. Where there may be something to copy, the attempt itself finds out.
        return 0 if self._unchanged.base is not None else job.bytes

    def _clear(self, deadline: Deadline) -> None:
        """Make room: retire down to one. Where nothing may go, since nothing was read back, do that first."""
        if self._retire(keep_last=1, deadline=deadline):
            return
        for snapshot in reversed(commit.survey(self.store, self.keys, deadline).commits):
            if snapshot in self._verified:
                return  # all that is older was retired before
            with contextlib.suppress(SnapshotCorrupt, NotFound, Unreadable):
                manifest = commit.read_manifest(self.store, self.keys, snapshot, deadline)
                if self._verify(manifest, deadline, interrupted=self._closes):
                    self._retire(keep_last=1, deadline=deadline)
                    return

    def _upkeep(self) -> None:
        busy = self._busy()
        owed = busy and self._skipped >= MOST_SKIPPED and not self._closes()
        if busy and not owed:
            self._skipped += 1
            return
        self._skipped = 0
        self._note_behind(owed)
        deadline = Deadline.after(CALL_S)
        try:
            unverified = self._unverified or self._doubted(deadline)
            if unverified is not None:
                deadline = Deadline.after(patience_s(unverified.payload_bytes, CALL_S))
                if not self._verify(unverified, deadline, interrupted=self._closes if owed else self._busy):
                    return  # interrupted by a newer snapshot, which will be verified instead
            self._retire(self._retention.keep_last, deadline)
            if not self._swept and self._verified:
                commit.sweep(self.store, self.keys, self._sweepable(), deadline)
                self._swept = True
            if (newest := max(tuple(self._verified), default=None)) is not None:  # `trust` adds from another thread
                self.store.reserve(commit.read_manifest(self.store, self.keys, newest, deadline).payload_bytes)
        except (CloudError, SnapshotCorrupt) as err:
            self._emit(events.UpkeepFailed(tier=self.name, reason=str(err)))

    def _note_behind(self, behind: bool) -> None:
        """Say it, once, when snapshots come faster than they can be saved and looked after; and go on more slowly."""
        if behind and not self._behind:
            self._emit(events.Behind(tier=self.name))
        self._behind = behind

    def _verify(self, manifest: Manifest, deadline: Deadline, *, interrupted: Callable[[], bool]) -> bool:
        self._unverified = None
        try:
            good = self._read_back(manifest, deadline, interrupted)
        except SnapshotCorrupt as err:
            self._doubt(manifest.id)
            # Whoever finds damage everywhere is most likely damaged itself: bad memory, say.
            if self._reads_well or isinstance(err, commit.DamagedInStore):
                self._reads_well = False
                commit.quarantine(self.store, self.keys, manifest.id, str(err), self._host, deadline)
                self._emit(events.Quarantined(snapshot=str(manifest.id), reason=str(err)))
            raise
        except CloudError:
            # A bad block proves nothing, and another name makes it no better. A store without files compares sums.
            if self.store.local_path(self.keys.commit(manifest.id)) is not None:
                self._unchanged.forget()
            raise
        if good:
            self._reads_well = True
            self._verified.add(manifest.id)
            self._doubtful.clear()
            self._emit(events.Verified(tier=self.name, snapshot=str(manifest.id)))
        return good

    def _read_back(self, manifest: Manifest, deadline: Deadline, interrupted: Callable[[], bool]) -> bool:
        """Read it; and again, after a pause, before anybody calls it damaged."""
        for pause_s in AGAIN_S:
            with contextlib.suppress(SnapshotCorrupt):
                return commit.verify(self.store, self.keys, manifest, deadline, interrupted=interrupted)
            with self._condition:
                self._condition.wait_for(interrupted, pause_s)
        return commit.verify(self.store, self.keys, manifest, deadline, interrupted=interrupted)

    def _doubt(self, damaged: SnapshotId) -> None:
        """Trust nothing that was verified before: where snapshots share a file, damage in one is damage in all.

        Nothing is copied from it, and until something is read back again, nothing is verified, and so nothing deleted.
        """
        self._unchanged.forget()
        self._doubtful.update(tuple(self._verified))  # `trust` adds from another thread
        self._doubtful.discard(damaged)
        self._verified.clear()
        with self._condition:
            self._copied = Copied()  # the next snapshot has no base, and is sent whole

    def _doubted(self, deadline: Deadline) -> Manifest | None:
        """What to read again, if there is anything: only where no newer snapshot has come to be verified."""
        if not self._doubtful:
            return None
        newest = max(self._doubtful)
        try:
            return commit.read_manifest(self.store, self.keys, newest, deadline)
        except (NotFound, SnapshotCorrupt, Unreadable):
            self._doubtful.discard(newest)
            raise

    def _retire(self, keep_last: int, deadline: Deadline) -> int:
        """Delete what need not be kept. How many snapshots that were."""
        doomed = retain(
            commit.survey(self.store, self.keys, deadline).commits,
            keep_last=keep_last,
            keep_every=self._retention.keep_every,
            verified=self._verified,
            pinned=self._pinned(),
        )
        retired = [snapshot for snapshot in doomed if self._may_go(snapshot, deadline)]
        for snapshot in retired:
            commit.remove(self.store, self.keys, snapshot, deadline)
            self._verified.discard(snapshot)
            self._ours.discard(snapshot)
            self._emit(events.Retired(tier=self.name, snapshot=str(snapshot)))
        return len(retired)

    def _may_go(self, snapshot: SnapshotId, deadline: Deadline) -> bool:
        """Whether it is ours to delete: not a newer version's, nor another run's unless the user said so, or for days.

        That there was another run of this name may be an error: of whoever typed --fresh, or of a store.
        """
        if snapshot in self._ours:
            return True
        try:
            manifest = commit.read_manifest(self.store, self.keys, snapshot, deadline)
        except ForeignFormat:
            return False
        except NotFound:
            return True
        except (SnapshotCorrupt, Unreadable):
            return self._is_claimed_by_this_run(snapshot, deadline)
        if manifest.run_id == self._run_id or self._fresh:
            return True
        return _age_s(manifest.parts[0].sealed_at) > GRACE_S

    def _is_claimed_by_this_run(self, snapshot: SnapshotId, deadline: Deadline) -> bool:
        """Whether the claim of its generation is this run's; a local tier has no claims."""
        if self.name == "local":
            return True  # a copy, which dies with this machine
        with contextlib.suppress(NotFound, SnapshotCorrupt, Unreadable):
            return commit.read_claim(self.store, self.keys, snapshot.generation, deadline).run_id == self._run_id
        return False

    def _sweepable(self) -> int:
        """The newest generation whose garbage is ours to delete: our own."""
        return max((snapshot.generation for snapshot in tuple(self._verified)), default=0)

    def _busy(self) -> bool:
        """Whether something better than upkeep waits."""
        with self._condition:
            return self._pending is not None or self._closes()

    def _closes(self) -> bool:
        """Whether there is no time for upkeep, ever again."""
        return self._closing or self._deadline.remaining_s != float("inf")

    def _count(self, sent: int) -> None:
        """Progress of a `put`: measures, keeps to the limit, and gives up what has to make way. Tier's thread."""
        with self._condition:
            self._meter.count(sent, self._rate)
            self._heard_at = None
            self._wait_for_pace()
            self._heard_at = time.monotonic()
            if self._gives_up:
                raise _GivenUp

    def _give_way(self) -> None:
        """Whether the job in flight is given up for the one that waits, now that either or the deadline is new."""
        current, waiting = self._current, self._pending
        if current is not None and waiting is not None and current.step < waiting.step:
            has_s, left = self._deadline.remaining_s, self._left(current)
            self._gives_up = self._gives_up or gives_way(has_s, left, waiting.bytes, self._rates)

    def _copies_pay(self) -> bool:
        """Whether to have the store copy: while nothing presses, and after that where it is no slower than sending."""
        with self._condition:
            return self._deadline.remaining_s == float("inf") or self._rates.copies_pay

    @property
    def _rates(self) -> Rates:
        return Rates(store_bytes_s=self._rate.per_s, copied=self._copied)

    def _wait_for_pace(self) -> None:
        if self._limit_bytes_s is None:
            return
        began = time.monotonic()
        pace_at = self._meter.began_at + self._meter.sent / self._limit_bytes_s
        while not (self._closing or self._gives_up or self._urgent or self._deadline.remaining_s != float("inf")):
            left_s = pace_at - time.monotonic()
            if left_s <= 0:
                break
            self._condition.wait(min(left_s, 3600.0))
        self._meter.paused_s += time.monotonic() - began

    def _left(self, job: Job) -> int:
        return max(0, job.bytes - self._meter.sent - self._attempt.skipped_bytes)


def _age_s(instant: str) -> float:
    """Seconds since an instant of a record, by this host's wall clock; 0 where it cannot be read."""
    try:
        return (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(instant)).total_seconds()
    except (ValueError, TypeError):
        return 0.0


class _Meter:
    """What one attempt has sent, and how fast. Pauses for the limit do not count as time, nor does what is copied."""

    def __init__(self, attempt: commit.Attempt) -> None:
        self._attempt = attempt
        self._copied_before_s = attempt.copying_s
        self.began_at = time.monotonic()
        self.sent = 0
        self.paused_s = 0.0
        self.sampled = False
        self._since = (0, 0.0)

    @property
    def elapsed_s(self) -> float:
        copying_s = self._attempt.copying_s - self._copied_before_s
        return time.monotonic() - self.began_at - self.paused_s - copying_s

    def count(self, sent: int, rate: Rate) -> None:
        self.sent += sent
        sent_before, elapsed_before = self._since
        elapsed_s = self.elapsed_s
        if sent and elapsed_s - elapsed_before >= SAMPLE_S:
            rate.add(self.sent - sent_before, elapsed_s - elapsed_before)
            self._since, self.sampled = (self.sent, elapsed_s), True
