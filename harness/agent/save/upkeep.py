"""Upkeep of a tier while no snapshot waits: read back what was written, retire, sweep, keep room for the next one.

Owns which snapshots of a store are known to be good, and which may be deleted there (I6). One thread at a time, the
tier's, except for `trust`, and for the last call of an upkeep that was overtaken: it may note what it has found.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from cloud.errors import CloudError, Full, NotFound, Unreadable
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.agent.context import Context
from harness.core import events
from harness.core.manifest import ForeignFormat, Manifest
from harness.core.policy.copying import patience_s
from harness.core.policy.retention import retain
from harness.core.snapshot import SnapshotId
from harness.errors import SnapshotCorrupt
from harness.snapshots import commit, fetch, records, retire

CALL_S = 600.0  # for all of it, plus the time for the bytes that are read back
AGAIN_S = (0.5, 2.0)  # before data that differs is read again
SPARE_BYTES = 64 * 1024 * 1024  # records, journal segments, the file system's own needs
MOST_SKIPPED = 1  # upkeeps in a row because a snapshot waits; the next snapshot waits for the upkeep
GRACE_S = 3 * 24 * 3600.0  # how old another run's snapshot must be to be retired without the user's consent


@dataclass(frozen=True)
class Retention:
    """The snapshots that a tier keeps. See `core.policy.retention`.

    Attributes:
        keep_last: how many of the newest to keep.
        keep_every: keep those whose step is a multiple of it, too; `None` for none.
        pinned: returns those that something else still reads; called each time. They are kept, too.
    """

    keep_last: int
    keep_every: int | None = None
    pinned: Callable[[], Collection[SnapshotId]] = tuple


@dataclass(frozen=True)
class MakesWay:
    """Callbacks that tell upkeep when to stop for more important work.

    Attributes:
        busy: whether a job waits, or there is no time for upkeep.
        closes: whether the tier will do no upkeep any more.
        pause: wait until one of these conditions holds, or for so many seconds.
    """

    busy: Callable[[], bool]
    closes: Callable[[], bool]
    pause: Callable[[Callable[[], bool], float], None]


class Upkeep:
    """Upkeep of one tier's store."""

    def __init__(
        self,
        context: Context,
        name: str,
        store: ObjectStore,
        retention: Retention,
        way: MakesWay,
        forget_base: Callable[[], None],
    ) -> None:
        """Does nothing yet.

        Args:
            context: of the agent.
            name: of the tier.
            store: its store.
            retention: what to keep.
            way: tells when to stop.
            forget_base: called when no snapshot of the store may be copied from any more.
        """
        self._name, self._store, self._keys, self._retention = name, store, context.keys, retention
        self._emit, self._host, self._way, self._forget_base = context.emit, context.host, way, forget_base
        self._fresh = context.settings.fresh  # the user wants older snapshots to be ignored; they may be deleted
        self.run_id = ""
        """Identity of the run that is saved here; empty before the first snapshot."""
        self._unverified: Manifest | None = None
        self._verified: set[SnapshotId] = set()
        self._doubtful: set[SnapshotId] = set()  # were verified before damage was found that they may share
        self._ours: set[SnapshotId] = set()
        self._swept = self._behind = self._reads_well = False
        self._skipped = 0

    def trust(self, snapshot: SnapshotId) -> None:
        """Note that a snapshot was read and found good outside this tier (a successful restore). From any thread."""
        self._verified.add(snapshot)

    def note_published(self, manifest: Manifest) -> None:
        """Note that a snapshot was published, and has to be read back."""
        self._ours.add(manifest.id)
        self._unverified = manifest

    # ---- room -------------------------------------------------------------------------------------------------------

    def make_room(self, size: int, deadline: Deadline) -> None:
        """Delete snapshots that need not be kept, if `size` bytes do not fit.

        Raises:
            Full: they do not fit even then.
            CloudError: the store could not be asked.
        """
        needed = size + SPARE_BYTES
        free = self._store.free_bytes()
        if free is not None and free < needed:
            self.clear(deadline)
            free = self._store.free_bytes()
        if free is not None and free < needed:
            option = "--keep-local" if self._name == "local" else "--keep-last"
            raise Full(
                f"{needed / 1e9:.3f} GB needed, {free / 1e9:.3f} GB free in {self._store.url}; "
                f"make room, or keep fewer snapshots ({option})"
            )

    def clear(self, deadline: Deadline) -> None:
        """Retire all but one. If none may go because none was read back, read one back first. Raises CloudError."""
        if self._retire(keep_last=1, deadline=deadline):
            return
        for snapshot in reversed(records.survey(self._store, self._keys, deadline).commits):
            if snapshot in self._verified:
                return  # everything older was retired before
            with contextlib.suppress(SnapshotCorrupt, NotFound, Unreadable):
                manifest = records.read_manifest(self._store, self._keys, snapshot, deadline)
                if self._verify(manifest, deadline, interrupted=self._way.closes):
                    self._retire(keep_last=1, deadline=deadline)
                    return

    # ---- while nothing waits ----------------------------------------------------------------------------------------

    def run(self, overtaken: threading.Event) -> None:
        """Verify what was written, retire, and keep room for the next snapshot; skip all of it while a snapshot waits.

        Once `overtaken` is set, the tier goes on beside the call in flight, which is then the last one.

        It is skipped at most once in a row: otherwise the snapshots of a training that saves faster than the store
        accepts them would never be verified, and so never retired.
        """
        busy = self._way.busy()
        owed = busy and self._skipped >= MOST_SKIPPED and not self._way.closes()
        if busy and not owed:
            self._skipped += 1
            return
        self._skipped = 0
        self._note_behind(owed)
        deadline = Deadline.after(CALL_S).unless(overtaken)
        try:
            unverified = self._unverified or self._doubted(deadline)
            if unverified is not None:
                deadline = Deadline.after(patience_s(unverified.payload_bytes, CALL_S)).unless(overtaken)
                if not self._verify(unverified, deadline, interrupted=self._way.closes if owed else self._way.busy):
                    return  # interrupted by a newer snapshot, which will be verified instead
            self._retire(self._retention.keep_last, deadline)
            if not self._swept and self._verified:
                retire.sweep(self._store, self._keys, self._sweepable(), deadline)
                self._swept = True
            if (newest := max(tuple(self._verified), default=None)) is not None:  # `trust` adds from another thread
                self._store.reserve(records.read_manifest(self._store, self._keys, newest, deadline).payload_bytes)
        except (CloudError, SnapshotCorrupt) as err:
            if not overtaken.is_set():
                self._emit(events.UpkeepFailed(tier=self._name, reason=str(err)))

    def _note_behind(self, behind: bool) -> None:
        """Report, once, that snapshots come faster than they can be saved and verified: saving gets slower then."""
        if behind and not self._behind:
            self._emit(events.Behind(tier=self._name))
        self._behind = behind

    def _verify(self, manifest: Manifest, deadline: Deadline, *, interrupted: Callable[[], bool]) -> bool:
        self._unverified = None
        try:
            good = self._read_back(manifest, deadline, interrupted)
        except SnapshotCorrupt as err:
            self.doubt(manifest.id)
            # A host that finds damage everywhere is most likely damaged itself, for example by bad memory.
            if self._reads_well or isinstance(err, fetch.DamagedInStore):
                self._reads_well = False
                commit.quarantine(self._store, self._keys, manifest.id, str(err), self._host, deadline)
                self._emit(events.Quarantined(snapshot=str(manifest.id), reason=str(err)))
            raise
        except CloudError:
            if deadline.cancelled is not None and deadline.cancelled.is_set():
                return False
            # A bad block proves nothing, but a copy that shares it is no better. A store without files compares sums.
            if self._store.local_path(self._keys.commit(manifest.id)) is not None:
                self._forget_base()
            raise
        if good:
            self._reads_well = True
            self._verified.add(manifest.id)
            self._doubtful.clear()
            self._emit(events.Verified(tier=self._name, snapshot=str(manifest.id)))
        return good

    def _read_back(self, manifest: Manifest, deadline: Deadline, interrupted: Callable[[], bool]) -> bool:
        """Read a snapshot back, repeatedly and with pauses before it counts as damaged. Return False if interrupted."""
        for pause_s in AGAIN_S:
            with contextlib.suppress(SnapshotCorrupt):
                return fetch.verify(self._store, self._keys, manifest, deadline, interrupted=interrupted)
            self._way.pause(interrupted, pause_s)
        return fetch.verify(self._store, self._keys, manifest, deadline, interrupted=interrupted)

    def doubt(self, damaged: SnapshotId) -> None:
        """Trust no snapshot that was verified before: if snapshots share a file, damage in one is damage in all.

        No shard is copied from them. Until one is read back again, none counts as verified, and so none is deleted.
        """
        self._forget_base()
        self._doubtful.update(tuple(self._verified))  # `trust` adds from another thread
        self._doubtful.discard(damaged)
        self._verified.clear()

    def _doubted(self, deadline: Deadline) -> Manifest | None:
        """Return the newest doubtful snapshot, to be read again if no newer one has to be verified; else `None`."""
        if not self._doubtful:
            return None
        newest = max(self._doubtful)
        try:
            return records.read_manifest(self._store, self._keys, newest, deadline)
        except (NotFound, SnapshotCorrupt, Unreadable):
            self._doubtful.discard(newest)
            raise

    def _retire(self, keep_last: int, deadline: Deadline) -> int:
        """Delete snapshots that need not be kept. Return how many were deleted."""
        doomed = retain(
            records.survey(self._store, self._keys, deadline).commits,
            keep_last=keep_last,
            keep_every=self._retention.keep_every,
            verified=frozenset(self._verified),  # an upkeep that was overtaken may still add to it
            pinned=self._retention.pinned(),
        )
        retired = [snapshot for snapshot in doomed if self._may_go(snapshot, deadline)]
        for snapshot in retired:
            retire.remove(self._store, self._keys, snapshot, deadline)
            self._verified.discard(snapshot)
            self._ours.discard(snapshot)
            self._emit(events.Retired(tier=self._name, snapshot=str(snapshot)))
        return len(retired)

    def _may_go(self, snapshot: SnapshotId, deadline: Deadline) -> bool:
        """Return whether this run may delete a snapshot: not a newer version's; another run's only if old, or --fresh.

        That another run of this name exists may be an error: a mistaken --fresh, or a fault of the store.
        """
        if snapshot in self._ours:
            return True
        try:
            manifest = records.read_manifest(self._store, self._keys, snapshot, deadline)
        except ForeignFormat:
            return False
        except NotFound:
            return True
        except (SnapshotCorrupt, Unreadable):
            return self._is_claimed_by_this_run(snapshot, deadline)
        if manifest.run_id == self.run_id or self._fresh:
            return True
        return _age_s(manifest.parts[0].sealed_at) > GRACE_S

    def _is_claimed_by_this_run(self, snapshot: SnapshotId, deadline: Deadline) -> bool:
        """Return whether the claim of the snapshot's generation is this run's; a local tier has no claims."""
        if self._name == "local":
            return True  # a copy, which dies with this machine
        with contextlib.suppress(NotFound, SnapshotCorrupt, Unreadable):
            return records.read_claim(self._store, self._keys, snapshot.generation, deadline).run_id == self.run_id
        return False

    def _sweepable(self) -> int:
        """Return the newest generation whose garbage this run may delete: that of its newest verified snapshot."""
        return max((snapshot.generation for snapshot in tuple(self._verified)), default=0)


def _age_s(instant: str) -> float:
    """Return the seconds since an instant of a record, by this host's wall clock; 0 if it cannot be parsed."""
    try:
        return (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(instant)).total_seconds()
    except (ValueError, TypeError):
        return 0.0
