"""The path of sealed slots into the tiers: which tier gets which set, which step is local, which is durable.

Owns the slot pool, both tiers, and the local and the durable step, which are always kept apart. Knows neither trainers
nor notices. Main thread only; the tiers' threads report through `post`.

    a set ──▶ local ──(durable_every_s, or at once when urgent)──▶ remote, from the local file
      ├──────────────────── no local tier, or urgent ───────────▶ remote, from the slots
      └── (durable_every_s) ── the local tier's files are unreadable ▶ remote, from the slots
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from cloud.errors import SourceUnreadable
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.agent.context import Context
from harness.agent.generation import Generation
from harness.agent.resume_point import MemoryCopy, ResumePoint, SealedSlot, SnapshotSet
from harness.agent.save.jobs import FilesSnapshot, Job, LocalSnapshot, MemorySnapshot
from harness.agent.save.slot_pool import SlotPool
from harness.agent.save.snapshot_set import Dropped, Gathering, differing, whole_sets
from harness.agent.save.tier import Tier, TierEvents
from harness.agent.save.upkeep import Retention
from harness.core.manifest import Manifest
from harness.core.policy.cadence import Cadence
from harness.core.snapshot import SnapshotId
from harness.errors import SnapshotCorrupt
from harness.ipc.slots import Slot
from harness.watch.watcher import Checkpoint

_MANIFESTS = 16  # how many are kept, to verify a resume from memory
_Seals = tuple[tuple[int, int], ...]  # index and sequence of each slot of a set


@dataclass(frozen=True)
class Steps:
    """The newest committed steps. Only `durable` survives this machine."""

    local: int | None = None
    durable: int | None = None


class SavePipeline:
    """Takes sealed slots, has the tiers commit them, and keeps the committed steps."""

    def __init__(
        self,
        context: Context,
        stores: Callable[[str], ObjectStore],
        on_commit: Callable[[Steps], None],
    ) -> None:
        """Open the stores; nothing is written before `start`.

        Args:
            context: of the agent.
            stores: opens a store by its location.
            on_commit: called in the main thread whenever a committed step has changed.

        Raises:
            ConfigError: a store cannot be used.
        """
        self._settings, self._keys, self._on_commit = context.settings, context.keys, on_commit
        settings, post = context.settings, context.post
        self._post = post
        self._began_at = time.monotonic()
        self.pool = SlotPool(settings.slot_disk)
        self.steps = Steps()
        self.sealed_step: int | None = None
        self.sealed_at: float | None = None
        self.durable_at: float | None = None
        self._urgent = self._draining = self._store_fails = False
        self._upload_started_at: float | None = None
        self._last_sequence: dict[int, int] = {}  # by rank
        self._gathering = Gathering()
        self._mixed: list[Dropped] = []
        self._newest_set: tuple[int, ...] = ()  # the slots that are kept for I8
        self._newest_local: LocalSnapshot | None = None
        self._newest_files: FilesSnapshot | None = None
        self._given: list[tuple[Tier, Job]] = []
        self._made_by: dict[int, Generation] = {}
        self._unreadable: set[int] = set()  # steps whose file in the local tier cannot be read
        self._distrusts_files = False  # whether the newest file that was to be uploaded was such a one
        self._held: dict[int, Generation] = {}
        self._unclaimed: set[int] = set()  # slots of a generation that will never be claimed
        self._manifests: dict[_Seals, Manifest] = {}
        tell = TierEvents(
            published=lambda tier, job, manifest: post(lambda: self._on_published(tier, job, manifest)),
            failed=lambda tier, job, err, _final: post(lambda: self._on_failed(tier, job, err)),
            released=self._released,
        )
        retention = Retention(settings.keep_last, settings.keep_every)
        self.remote = Tier(
            context, "remote", stores(settings.store), retention, tell, limit_bytes_s=settings.upload_bytes_s
        )
        self.local: Tier | None = None
        if settings.local_tier is not None:
            self.local = Tier(
                context,
                "local",
                stores(settings.local_tier),
                Retention(settings.keep_local, pinned=self._uploading),
                tell,
            )

    def _uploading(self) -> list[SnapshotId]:
        """Return the snapshots of the local tier that are being uploaded."""
        return [job.manifest.id for job in self.remote.jobs if isinstance(job, LocalSnapshot)]

    @property
    def tiers(self) -> list[Tier]:
        """The local tier, if there is one, and the remote."""
        return [self.remote] if self.local is None else [self.local, self.remote]

    def set_urgent(self, urgent: bool) -> None:
        """Set whether every snapshot becomes durable at once, at full speed, not only when the remote tier is due."""
        self._urgent = urgent
        for tier in self.tiers:
            tier.set_urgent(urgent)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is in flight."""
        return all(tier.idle for tier in self.tiers)

    @property
    def state_bytes(self) -> int | None:
        """Bytes of the newest snapshot."""
        if self._newest_files is not None:
            return self._newest_files.bytes
        newest = self.pool.newest()
        return sum(self.pool[index].payload_bytes for index in newest) if newest else None

    @property
    def everything_durable(self) -> bool:
        """Whether the newest snapshot survives the loss of this machine; the one that was resumed counts, too."""
        durable = self.steps.durable
        return durable is not None and (self.sealed_step is None or durable >= self.sealed_step)

    def start(self) -> None:
        """Start the tiers' threads."""
        for tier in self.tiers:
            tier.start()

    def drain(self, deadline: Deadline) -> None:
        """Have both tiers give up at `deadline`."""
        self._draining = True
        for tier in self.tiers:
            tier.drain(deadline)

    def close(self, wait_s: float) -> bool:
        """Stop after the calls in flight; wait at most `wait_s`. Return whether nothing can be committed any more."""
        give_up_at = time.monotonic() + wait_s
        for tier in self.tiers:
            tier.close(0.0)  # neither begins another call while the other is waited for
        quiet = [tier.close(max(0.0, give_up_at - time.monotonic())) for tier in self.tiers]
        return all(quiet)

    def close_stores(self, wait_s: float = 2.0) -> None:
        """Close the stores, then the slots. Waits at most `wait_s`: a hung disk releases nothing.

        Call it after the journal is closed, which writes to the store as well.
        """
        give_up_at = time.monotonic() + wait_s
        closing = [
            threading.Thread(target=tier.store.close, name=f"harness-close-{tier.name}", daemon=True)
            for tier in self.tiers
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        self.pool.close()

    def tell_silence(self) -> None:
        """Report, once each time, that a store or disk accepts nothing any more: calls fail only after minutes."""
        for tier in self.tiers:
            tier.tell_silence()

    # ---- sealed slots -----------------------------------------------------------------------------------------------

    def take(self, index: int, generation: Generation) -> None:
        """Take a sealed slot. Once the slots of all ranks are sealed, give the set to the tiers."""
        slot = self.pool[index]
        record = slot.record()
        if record is None or not self._is_news(index):
            return  # void, or taken already
        self._made_by[index], self._last_sequence[record.rank] = generation, slot.sequence
        self._unclaimed.discard(index)
        waited = self._gathering.indexes
        slots = self._gathering.add(SealedSlot(index, slot, record))
        for other in self._gathering.indexes - waited:
            self.pool.hold(other, "set")
        for other in waited - self._gathering.indexes:
            self.pool.release(other, "set")
        if slots is not None and differing(sealed.record for sealed in slots):
            self._mixed += self._drop(sealed.index for sealed in slots)
        elif slots is not None:
            self._on_set(MemorySnapshot(slots, generation, time.monotonic()))

    def take_files(self, checkpoint: Checkpoint, generation: Generation) -> None:
        """Take a checkpoint that was set aside, and give it to the remote tier. It is let go once that has it."""
        job = FilesSnapshot(checkpoint, generation, time.monotonic())
        self.sealed_step, self.sealed_at, self._newest_files = job.step, job.sealed_at, job
        self._upload_started_at = job.sealed_at
        self._submit(self.remote, job)

    def void(self, index: int) -> list[Dropped]:
        """Drop a set of which this slot is the last: its ranks differ where they should be equal."""
        others = [*self._gathering.indexes, *self._held]
        self._gathering.forget()
        self._held.clear()
        return [*self._drop(others), *self.refuse(index)]

    def take_mixed(self) -> list[Dropped]:
        """Return, once, what was dropped because ranks differ in a set that no rank has told of."""
        mixed, self._mixed = self._mixed, []
        return mixed

    def refuse(self, index: int) -> list[Dropped]:
        """Drop a sealed slot that was not taken: it belongs to no set that can be complete."""
        self._last_sequence[self.pool.rank_of(index)] = self.pool[index].sequence
        return self._drop([index])

    def forget_passed(self, steps: Sequence[int | None], given_up: int | None = None) -> list[Dropped]:
        """Drop the incomplete sets of steps that a rank has passed without a seal: they are no snapshots.

        Args:
            steps: completed steps of each rank; `None` for one that is before its loop.
            given_up: a step that ranks are not asked to seal any more.
        """
        if not self._gathering.steps:
            return []
        # A rank seals before it counts its next step: if the step is seen here, so is the seal, told or not.
        sealed = {(self.pool.rank_of(index), self.pool[index].step) for index in self.pool.sealed()}
        passed = [
            step
            for step, there in self._gathering.steps.items()
            for rank, completed in enumerate(steps)
            if (step == given_up or (completed is not None and completed > step))
            and rank not in there
            and (rank, step) not in sealed
        ]
        return self.forget(passed)

    def forget_others(self, asked: int | None) -> list[Dropped]:
        """Drop the incomplete sets of all steps but the one that ranks are asked to seal, if they are."""
        return self.forget([step for step in self._gathering.steps if step != asked])

    def forget(self, steps: Collection[int] | None = None) -> list[Dropped]:
        """Drop the incomplete sets, of these steps or of all."""
        waited = self._gathering.indexes
        self._gathering.forget(steps)
        return self._drop(waited - self._gathering.indexes)

    def _drop(self, indexes: Iterable[int]) -> list[Dropped]:
        """Make sealed slots void, so that neither a set of theirs nor another agent of this host counts them."""
        dropped = []
        for index in indexes:
            dropped.append(Dropped(self.pool.rank_of(index), self.pool[index].sequence))
            self.pool[index].begin()
            for holder in ("set", "held"):
                self.pool.release(index, holder)
        return dropped

    def give_up_incomplete(self) -> None:
        """Drop all incomplete sets: their ranks have ended."""
        for index in self._gathering.indexes:
            self.pool.release(index, "set")
        self._gathering.forget()

    def _on_set(self, job: MemorySnapshot) -> None:
        """Give a complete set to the tiers."""
        self.sealed_step, self.sealed_at = job.step, job.sealed_at
        self._keep_newest(job.indexes)
        self.pool.collect()
        if self.local is not None:
            self._give(self.local, job)
        if self.local is None or (self._goes_straight() and (self._draining or not self._store_fails)):
            self._upload_started_at = self.sealed_at
            self._give(self.remote, job)

    def _keep_newest(self, indexes: Sequence[int]) -> None:
        """Have the slots of several ranks' newest set kept until a newer one is complete (I8).

        A rank may seal a step that the others never do. A rank with one slot has nowhere else to seal it.
        """
        kept, self._newest_set = self._newest_set, ()
        if all(self.pool.count(self.pool.rank_of(index)) > 1 for index in indexes) and len(indexes) > 1:
            self._newest_set = tuple(indexes)
        for index in self._newest_set:
            self.pool.hold(index, "newest")
        for index in set(kept) - set(self._newest_set):
            self.pool.release(index, "newest")

    def _goes_straight(self) -> bool:
        """Return whether the store gets the sealed slots themselves, and not their file in the local tier."""
        return self._urgent or (self._distrusts_files and self._is_due(time.monotonic()))

    def _is_due(self, now: float) -> bool:
        """Return whether the remote tier is due; until something is durable, it always is."""
        due = Cadence(self._settings.durable_every_s).due(now, self._upload_started_at, self._began_at)
        return due or self.steps.durable is None

    def _is_news(self, index: int) -> bool:
        """Return whether the slot's seal is newer than the last seal that we know of its rank."""
        return self.pool[index].sequence > self._last_sequence.get(self.pool.rank_of(index), 0)

    def hold_back(self, index: int, generation: Generation) -> None:
        """Hold a sealed slot until its process has ended, when it is known whether it counts. See `settle_held`."""
        if self._is_news(index):
            self._last_sequence[self.pool.rank_of(index)] = self.pool[index].sequence
            self.pool.hold(index, "held")
            self._held[index] = generation

    def settle_held(self, *, counts: bool) -> None:
        """Take the slots that were held back, or make them void."""
        held, self._held = self._held, {}
        for index, generation in held.items():
            if counts:
                self._last_sequence[self.pool.rank_of(index)] -= 1
                self.take(index, generation)
            else:
                self.pool[index].begin()
            self.pool.release(index, "held")

    def take_left_over(self, generation: Generation, rank: int | None = None) -> list[SealedSlot]:
        """Take slots that `generation`'s trainers sealed and did not report, and return them.

        Args:
            generation: of the trainers.
            rank: the one whose slots are taken; `None` for all.
        """
        newest = [index for index in self.pool.newest() if rank is None or self.pool.rank_of(index) == rank]
        taken = []
        for index in newest:
            record = self.pool[index].record()
            if record is not None and self._is_news(index):
                self.take(index, generation)
                taken.append(SealedSlot(index, self.pool[index], record))
        return taken

    def sequence(self, rank: int) -> int:
        """Return the number of a rank's newest seal on this host; the rank's next trainer counts on from it."""
        return max(self._last_sequence.get(rank, 0), self.pool.sequence(rank))

    def save_newest_now(self) -> None:
        """Make the newest snapshot, and every later one, durable at once, before the remote tier is due."""
        self.set_urgent(True)
        step = self.sealed_step
        if step is None or self.steps.durable == step:
            return
        if any(job.step >= step and not self._is_stuck(job) for job in self._jobs(self.remote)):
            return
        if not self._give_from_memory(step) and self._newest_local is not None and self._newest_local.step == step:
            self._submit(self.remote, self._newest_local)  # the slot is not available any more, but the file is

    def save_newest_meanwhile(self) -> None:
        """Begin to make the newest snapshot durable while a newer one is awaited, if that leaves it a slot."""
        step = self.sealed_step
        if step is None or self.steps.durable == step or any(job.step >= step for job in self._jobs(self.remote)):
            return
        if self._newest_local is not None and self._newest_local.step == step:
            self._submit(self.remote, self._newest_local)
        elif len(self.pool) > len(self.pool.newest()):
            self._give_from_memory(step)

    def _is_stuck(self, job: Job) -> bool:
        """Return whether a job is retried although its bytes cannot be read."""
        return isinstance(job, LocalSnapshot) and job.step in self._unreadable

    def _give_from_memory(self, step: int) -> bool:
        """Give the remote tier the slots that hold `step`. Return whether there were such slots."""
        # IMPORTANT: a granted slot may be overwritten at any moment (I8)
        kept = [index for index, _ in self.handed_over() if not self.pool.is_granted(index)]
        for slots in self._sets_of(index for index in kept if self.pool[index].step == step):
            sealed_at = self.sealed_at or time.monotonic()
            self._give(self.remote, MemorySnapshot(slots, self._made_by[slots[0].index], sealed_at))
            return True
        return False

    def _sets_of(self, indexes: Iterable[int]) -> list[SnapshotSet]:
        """Return the snapshots that these slots hold."""
        found = [(index, self.pool[index], self.pool[index].record()) for index in indexes]
        return whole_sets(SealedSlot(index, slot, record) for index, slot, record in found if record is not None)

    def _give(self, tier: Tier, job: MemorySnapshot) -> None:
        for index in job.indexes:
            self.pool.hold(index, tier.name)
        self._submit(tier, job)

    def _submit(self, tier: Tier, job: Job) -> None:
        self._given.append((tier, job))
        tier.submit(job)

    def _jobs(self, tier: Tier) -> list[Job]:
        """Return the jobs that a tier has not released yet, as far as the main thread knows.

        A job's result is known before its release.
        """
        return [job for holder, job in self._given if holder is tier]

    # ---- slots of earlier attempts and agents -----------------------------------------------------------------------

    def adopt(self, index: int, slot: Slot, generation: Generation, *, rank: int = 0, ends: bool = False) -> None:
        """Take over a slot from another agent of this host.

        Args:
            index: of the slot.
            slot: the slot. Its record names the rank that it belongs to.
            generation: the one that sealed its content.
            rank: the one that an empty slot belongs to.
            ends: whether the generation ends with that agent.
        """
        record = slot.record()
        self.pool.put(index, slot, rank if record is None else record.rank)
        self._made_by[index] = generation
        if ends and not generation.claimed.is_set():
            self._unclaimed.add(index)

    def note_all_taken(self) -> None:
        """Note that all sealed slots are of earlier attempts: no trainer of ours will report them."""
        for index in self.pool.newest():
            rank = self.pool.rank_of(index)
            self._last_sequence[rank] = self.sequence(rank)

    def handed_over(self) -> list[tuple[int, Generation]]:
        """Return the sealed slots that another agent of this host can take over, each with its generation."""
        return [(index, self._made_by[index]) for index in self.pool.sealed() if index in self._made_by]

    @property
    def run_id(self) -> str:
        """Identity of the run in the newest slot of `handed_over`; empty if there is no such slot."""
        newest = max(self.handed_over(), key=lambda made: self.pool[made[0]].sequence, default=None)
        return "" if newest is None else newest[1].run_id

    def memory_copies(self, run_id: str) -> list[MemoryCopy]:
        """Return sealed slots as candidates to resume. `run_id` is the run's identity, empty while it is not known."""
        copies = []
        for slots in self._sets_of(index for index, made_by in self.handed_over() if run_id in ("", made_by.run_id)):
            number, step = self._made_by[slots[0].index].number, slots[0].record.step
            copies.append(MemoryCopy(SnapshotId(number, step), slots, self._manifests.get(_seals(slots))))
        return copies

    def leave_memory(self) -> None:
        """Move the slots to the disk, because the trainer needs their memory. See `SlotPool.leave_memory`."""
        moved = self.pool.leave_memory()
        for old, new in moved.items():
            if (generation := self._made_by.get(old)) is not None:
                self._made_by[new] = generation
        for seals, manifest in list(self._manifests.items()):
            self._manifests[tuple((moved.get(index, index), sequence) for index, sequence in seals)] = manifest

    def note_resumed(self, point: ResumePoint, generation: Generation) -> ResumePoint:
        """Note what a resume tells of the tiers. Return the point with its slots in the pool, held until restored."""
        indexes = point.indexes or tuple(
            self.pool.add(slot, record.rank) for slot, record in zip(point.slots, point.records, strict=True)
        )
        for index in indexes:
            self.pool.hold(index, "resume")
            if not point.indexes:
                self._made_by[index] = _published(point, generation.run_id)
            elif index in self._unclaimed:
                self._made_by[index] = generation  # the store never got the claim of the other one
            self._unclaimed.discard(index)
        self.sealed_step = point.id.step
        self._forget_beyond(point.id.step)
        if point.tier == "remote":
            self.remote.trust(point.id)
            self._set(durable=point.id.step)
        elif point.tier == "local" and self.local is not None:
            self.local.trust(point.id)
            self._set(local=point.id.step)
            if point.manifest is not None:
                self._upload_behind(self.local, point.manifest, generation)
        return replace(point, indexes=indexes)

    def _upload_behind(self, local: Tier, manifest: Manifest, generation: Generation) -> None:
        """Upload a resumed snapshot that only the local tier has, behind the training and under its own id."""
        if self.steps.durable is not None and self.steps.durable >= manifest.step:
            return
        behind = LocalSnapshot(local.store, self._keys, manifest, generation, time.monotonic(), behind=True)
        self._submit(self.remote, behind)

    # ---- tiers ------------------------------------------------------------------------------------------------------

    def _on_published(self, tier: Tier, job: Job, manifest: Manifest) -> None:
        if isinstance(job, MemorySnapshot):
            self._manifests[_seals(job.slots)] = manifest
            while len(self._manifests) > _MANIFESTS:
                self._manifests.pop(next(iter(self._manifests)))
        if tier is self.remote:
            self._store_fails = False
            self._distrusts_files = self._distrusts_files and not isinstance(job, LocalSnapshot)
            self.durable_at = time.monotonic()
            self._set(durable=manifest.step, local=manifest.step if self.local is None else None)
        else:
            assert self.local is not None, "there are two tiers"
            self._set(local=manifest.step)
            self._newest_local = LocalSnapshot(self.local.store, self._keys, manifest, job.generation, job.sealed_at)
            self._upload_if_due(manifest, job)

    def _upload_if_due(self, manifest: Manifest, job: Job) -> None:
        assert self.local is not None, "only a local tier's snapshot is uploaded from its file"
        if self.steps.durable == manifest.step or any(job.step >= manifest.step for job in self._jobs(self.remote)):
            return  # it goes, or went, there straight from the slot
        now = time.monotonic()
        if self._urgent or self._is_due(now):
            self._upload_started_at = now
            due_one = LocalSnapshot(self.local.store, self._keys, manifest, job.generation, job.sealed_at)
            self._submit(self.remote, due_one)

    def _on_failed(self, tier: Tier, job: Job, err: Exception) -> None:
        """Let the other tier take over from one that fails: a slot that waits for a disk or a store is not free."""
        unreadable = isinstance(err, SourceUnreadable | SnapshotCorrupt)
        self._store_fails = self._store_fails or (tier is self.remote and not unreadable)
        if not isinstance(job, MemorySnapshot):
            if tier is self.remote and unreadable:
                self._unreadable.add(job.step)  # the local disk's file: memory may still have the snapshot
                self._distrusts_files = True  # and upload the next ones from memory, before the trainer gets the slot
                self._give_from_memory(job.step)
            return
        if tier is self.local:
            known = self.steps.durable == job.step or any(
                waiting.step >= job.step for waiting in self._jobs(self.remote)
            )
            if all(index in self.pool for index in job.indexes) and not known:
                self._give(self.remote, job)
            return
        # A store may be down for hours: the file waits for it, since the next snapshot needs the slot.
        file = self._newest_local
        if file is None or file.step in self._unreadable or self._draining or self._jobs(self.remote) != [job]:
            return
        if file.step == job.step and file.generation is job.generation:
            self._submit(self.remote, file)

    def _released(self, tier: Tier, job: Job) -> None:
        """Note, in a tier's thread, that it does not read a job's bytes any more."""
        if isinstance(job, FilesSnapshot):
            job.checkpoint.kept.let_go()
        self._post(lambda: self._on_released(tier, job))

    def _on_released(self, tier: Tier, job: Job) -> None:
        self._given = [(holder, given) for holder, given in self._given if given is not job or holder is not tier]
        if isinstance(job, MemorySnapshot):
            again = {i for other in self._jobs(tier) if isinstance(other, MemorySnapshot) for i in other.indexes}
            for index in set(job.indexes) - again:
                self.pool.release(index, tier.name)

    def _forget_beyond(self, step: int) -> None:
        """Forget committed steps beyond `step`: their snapshots could not be used, and future steps are not durable."""
        known = (self.steps.local, self.steps.durable)
        self.steps = Steps(*(None if figure is None or figure > step else figure for figure in known))

    def _set(self, *, local: int | None = None, durable: int | None = None) -> None:
        def later(before: int | None, now: int | None) -> int | None:
            return before if now is None else max(now, before or 0)

        self.steps = Steps(later(self.steps.local, local), later(self.steps.durable, durable))
        self._on_commit(self.steps)


def _seals(slots: SnapshotSet) -> _Seals:
    """Return a key for the present content of these slots."""
    return tuple((sealed.index, sealed.slot.sequence) for sealed in slots)


def _published(point: ResumePoint, run_id: str) -> Generation:
    """Return the generation that `point` was fetched from: an upload of its slots goes to the same place again."""
    assert point.manifest is not None, "it was read from a store"
    made = Generation(point.id.generation, run_id, point.manifest.nonce)
    made.claimed.set()
    return made
