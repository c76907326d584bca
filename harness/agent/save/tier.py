"""A tier: sealed slot or local snapshot → one ObjectStore → publish → verify → retire. Two instances: local and remote.

Owns one thread and its order of work; the protocol itself is `snapshots/commit.py`. The newest job wins: a newer job
replaces one that waits. A job in flight is finished, unless time runs out and only the newer one alone still fits. A
failing store is retried forever and never stops training. While nothing is urgent, sending keeps to a rate limit.

    submit ─▶ [pending] ─▶ save (retry until it fits, a newer one comes, or the deadline passes)
                            └▶ idle: verify what was written, retire, keep room for the next one
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from cloud.errors import CloudError, Full, NotFound
from cloud.notice import Deadline
from cloud.pool import Pool
from cloud.priority import Background
from cloud.store import ObjectStore
from harness.agent.context import Context
from harness.agent.save.jobs import Job
from harness.agent.save.throttle import Throttle
from harness.agent.save.upkeep import MakesWay, Retention, Upkeep
from harness.core import events
from harness.core.manifest import Manifest
from harness.core.policy.copying import Copied, patience_s
from harness.core.policy.drain import gives_way
from harness.core.snapshot import SnapshotId
from harness.errors import SnapshotCorrupt
from harness.snapshots import commit
from harness.snapshots.dedup import Deduplicator

CALL_S = 600.0  # for one attempt at a snapshot while nothing is urgent, plus the time for its bytes
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
GIVES_WAY_S = 0.5  # how long a call of the upkeep may keep a thread that has a deadline
SILENT_S = 10.0  # without progress of a store that something is sent to, until the tier reports it


@dataclass(frozen=True)
class TierEvents:
    """Callbacks of a tier. Each is called in the tier's thread.

    Attributes:
        published: a job is committed.
        failed: an attempt failed; the last argument says whether it was the last one.
        released: the tier does not read the job's bytes any more, whether it was committed or not.
    """

    published: Callable[[Tier, Job, Manifest], None]
    failed: Callable[[Tier, Job, CloudError | SnapshotCorrupt, bool], None]
    released: Callable[[Tier, Job], None]


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
        limit_bytes_s: float | None = None,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            context: of the agent.
            name: "local" or "remote".
            store: the one to fill.
            retention: what to keep.
            tell: callbacks of the pipeline, which submits the jobs.
            limit_bytes_s: how fast to send while nothing is urgent; `None` for no limit.
        """
        self.name, self.store, self.keys = name, store, context.keys
        self._emit, self._on_bug, self._tell = context.emit, context.on_bug, tell
        self._condition = threading.Condition()
        self._pending: Job | None = None
        self._current: Job | None = None
        self._attempt = commit.Attempt()
        self._cancelled = threading.Event()  # set once the job in flight is given up for a newer one
        self._deadline = Deadline.never()
        self._closing = self._urgent = self._commits = False
        self._heard_at: float | None = None  # while something is sent: when the store last accepted some of it
        self._throttle = Throttle(limit_bytes_s)
        self._unchanged = Deduplicator()
        self._looked_for_base = False
        way = MakesWay(self._busy, self._closes, self._pause)
        self._upkeep = Upkeep(context, name, store, retention, way, self._forget_base)
        self._background = Background()
        self._stalled: Future[None] | None = None  # upkeep in a call that was not waited for
        self._thread = threading.Thread(target=self._run, name=f"harness-tier-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue `job` to be made durable here; it replaces a job that is still waiting.

        The job in flight is finished first, unless there is a deadline that only `job` alone can still meet.
        """
        with self._condition:
            dropped, self._pending = self._pending, job
            self._give_way()
            self._set_pace()
        if dropped is not None:
            self._tell.released(self, dropped)

    def drain(self, deadline: Deadline) -> None:
        """Give up at `deadline`, and do no upkeep from now on."""
        with self._condition:
            self._deadline = deadline
            self._give_way()
            self._set_pace()

    def set_urgent(self, urgent: bool) -> None:
        """Set whether to send at full speed, regardless of the limit and of other users of the machine."""
        with self._condition:
            self._urgent = urgent
            self._set_pace()

    def trust(self, snapshot: SnapshotId) -> None:
        """Note that a snapshot was read and found good outside this tier (a successful restore)."""
        self._upkeep.trust(snapshot)

    @property
    def idle(self) -> bool:
        """Whether there is no snapshot waiting or in flight."""
        with self._condition:
            return self._pending is None and self._current is None

    @property
    def bytes_left(self) -> int | None:
        """Bytes still to send of the job in flight, else of the one that waits; `None` when idle."""
        with self._condition:
            if self._current is not None:
                return self._throttle.left(self._current.bytes)
            return None if self._pending is None else self._pending.bytes

    @property
    def bytes_s(self) -> float | None:
        """Speed of sending: measured, pessimistic, without pauses for the limit; `None` until something was sent."""
        return self._throttle.rates.store_bytes_s

    @property
    def copied(self) -> Copied:
        """Part of the newest snapshot that the store copied by itself: as much of the next one need not be sent."""
        return self._throttle.copied

    @property
    def jobs(self) -> list[Job]:
        """The job in flight and the one that waits."""
        with self._condition:
            return [job for job in (self._current, self._pending) if job is not None]

    def tell_silence(self) -> None:
        """Report that the store has accepted nothing for a while, once until it accepts something. Main thread."""
        with self._condition:
            job, heard_at = self._current, self._heard_at
            if job is None or heard_at is None or (silent_s := time.monotonic() - heard_at) < SILENT_S:
                return
            self._heard_at = None
        self._emit(events.StoreSilent(tier=self.name, step=job.step, seconds=silent_s))

    def close(self, wait_s: float) -> bool:
        """Stop after the call in flight; wait at most `wait_s`. Return whether nothing can be committed any more."""
        with self._condition:
            self._closing = True
            self._set_pace()
        if self._thread.is_alive():
            self._thread.join(wait_s)
        with self._condition:
            return not self._commits or not self._thread.is_alive()

    def _run(self) -> None:
        # Saving must not take the training loop's cores, nor its disk. This thread decides and waits, at the ordinary
        # priority; the store's pools move the bytes, and a pool of this thread does the upkeep when nothing waits.
        self._background.begin()
        idle = Pool(1, f"harness-upkeep-{self.name}")
        try:
            while (job := self._next()) is not None:
                self._save(job)
                with self._condition:
                    self._current = None
                self._tell.released(self, job)
                self._look_after(idle)
        except Exception as err:  # noqa: BLE001  the thread's root: a bug here must end the agent, not hang it
            self._on_bug(err)
        finally:
            idle.shutdown()

    def _look_after(self, idle: Pool) -> None:
        """Do the upkeep. Once there is a deadline, go on without it if its call does not return.

        A store may say nothing for as long as a read of it may take, and the last snapshot must not wait behind that.
        """
        if self._stalled is not None:
            if not self._stalled.done():
                return
            self._stalled.result()  # a bug in it is a bug
            self._stalled = None
        overtaken = threading.Event()
        upkeep = idle.submit(self._upkeep.run, overtaken)
        upkeep.add_done_callback(lambda _: self._wake())
        with self._condition:
            self._condition.wait_for(lambda: upkeep.done() or self._closes())
            if not self._condition.wait_for(upkeep.done, GIVES_WAY_S):
                overtaken.set()
                self._stalled = upkeep
                return
        upkeep.result()

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def _next(self) -> Job | None:
        with self._condition:
            while self._pending is None and not self._closing:
                self._condition.wait()
            if self._closing:
                return None
            job, self._pending = self._pending, None
            self._current = job
            if job is not None:
                self._attempt, self._cancelled = job.attempt(), threading.Event()
                self._throttle.begin(self._attempt)
                self._set_pace()
            return job

    def _save(self, job: Job) -> None:
        retry_s = FIRST_RETRY_S
        while not self._closing:
            with self._condition:
                deadline = self._deadline
            if deadline.expired:
                return
            try:
                limit_s = patience_s(job.bytes, CALL_S, self._throttle.limit_bytes_s)
                self._save_once(job, deadline.sooner(limit_s).unless(self._cancelled))
                return
            except (CloudError, SnapshotCorrupt) as err:
                if self._cancelled.is_set():
                    self._emit(events.GivenUp(tier=self.name, step=job.step))
                    return
                # A disk that fails is not retried for this job: the store gets it straight from the slot, and a retry
                # would keep the slot from the trainer. The next snapshot is the next attempt.
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
                    retry_s = FIRST_RETRY_S  # there was a notice: every second counts now

    def _save_once(self, job: Job, deadline: Deadline) -> None:
        if self.name == "remote" and not job.generation.claimed.wait(min(deadline.remaining_s, LONGEST_RETRY_S)):
            raise CloudError("the generation is not claimed yet: the store has not answered")
        self._upkeep.run_id = job.generation.run_id
        self._upkeep.make_room(self._needed(job), deadline)
        try:
            manifest = self._publish(job, deadline)
        except Full:
            self.store.reserve(0)
            self._upkeep.clear(deadline)
            manifest = self._publish(job, deadline)
        now = time.monotonic()
        self._upkeep.note_published(manifest)
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
        self._throttle.begin(self._attempt)  # the wait for the claim, or for room, is no network time
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
        self._throttle.end()
        return manifest

    @contextlib.contextmanager
    def _committing(self) -> Iterator[None]:
        """Guard the call that makes a snapshot visible; refuse it once the tier closes: an end may be recorded then."""
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
        """Find a snapshot that the store can copy unchanged shards from, even one of an earlier agent or host.

        A base that was quarantined since (by a resume in place, or another agent) is not used any more.
        """
        with contextlib.suppress(CloudError):  # nothing is found then, and the next snapshot looks again
            if not self._looked_for_base:
                base = commit.base(self.store, self.keys, deadline)
                if base is not None and base.run_id == self._upkeep.run_id:  # of another run, nothing was read here
                    self._unchanged.committed(base)
                self._looked_for_base = True
            elif self._unchanged.base is not None:
                self._look_whether_damaged(self._unchanged.base.id, deadline)

    def _look_whether_damaged(self, base: SnapshotId, deadline: Deadline) -> None:
        with contextlib.suppress(NotFound):
            self.store.stat(self.keys.quarantined(base), deadline=deadline)
            self._upkeep.doubt(base)

    def _overtaken(self, wait_s: float, deadline: Deadline) -> bool:
        """Wait before the next attempt, or until the deadline changes; return whether a newer job replaces it."""
        give_up_at = time.monotonic() + min(wait_s, deadline.remaining_s / 2)
        with self._condition:
            while self._pending is None and self._deadline is deadline and not self._closing:
                left_s = give_up_at - time.monotonic()
                if left_s <= 0:
                    break
                self._condition.wait(left_s)
            return self._pending is not None or self._closing

    def _needed(self, job: Job) -> int:
        """Estimate the bytes that a job will really write: shards that the store copies take no room."""
        copied = max(self._attempt.copied_bytes, self._throttle.copied.bytes)
        if copied:
            return max(0, job.bytes - copied)
        # Nothing was saved here yet. If there may be something to copy, the attempt itself finds out.
        return 0 if self._unchanged.base is not None else job.bytes

    def _busy(self) -> bool:
        """Return whether a job waits, or there is no time for upkeep."""
        with self._condition:
            return self._pending is not None or self._closes()

    def _closes(self) -> bool:
        """Return whether the tier will do no upkeep any more: it closes, or there is a deadline."""
        return self._closing or self._deadline.remaining_s != float("inf")

    def _pause(self, until: Callable[[], bool], seconds: float) -> None:
        with self._condition:
            self._condition.wait_for(until, seconds)

    def _forget_base(self) -> None:
        """Copy nothing until another snapshot is committed: the next one is sent whole."""
        self._unchanged.forget()
        self._throttle.forget_copied()

    def _count(self, sent: int, *, idle_s: Callable[[], float] | None = None) -> None:
        """Count the progress of a `put`. Tier's thread; blocks for as long as the limit demands. See `Progress`."""
        with self._condition:
            self._heard_at = None
        self._throttle.count(sent, idle_s=idle_s)
        with self._condition:
            self._heard_at = time.monotonic()

    def _set_pace(self) -> None:
        """Update the limit and the priority after a change, and wake waiting threads. Call it with the lock."""
        hurries = self._urgent or self._deadline.remaining_s != float("inf")
        self._background.urgent = hurries
        self._throttle.set_free(hurries or self._closing or self._cancelled.is_set())
        self._condition.notify_all()

    def _give_way(self) -> None:
        """Give up the job in flight if only a newer waiting one still meets the deadline. Call it with the lock."""
        current, waiting = self._current, self._pending
        if current is not None and waiting is not None and current.step < waiting.step:
            left = self._throttle.left(current.bytes)
            if gives_way(self._deadline.remaining_s, left, waiting.bytes, self._throttle.rates):
                self._cancelled.set()

    def _copies_pay(self) -> bool:
        """Return whether the store should copy: without a deadline always, else if that is no slower than sending."""
        with self._condition:
            return self._deadline.remaining_s == float("inf") or self._throttle.rates.copies_pay
