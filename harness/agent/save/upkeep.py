"""What a tier does while no snapshot waits: read back what was written, retire, sweep, keep room for the next one.

Owns what of a store is known to be good, and what may be deleted there (I6). One thread at a time, the tier's, but for
`trust`.
"""

from __future__ import annotations

import contextlib
import datetime
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

CALL_S = 600.0  # for all of it, beside what the bytes take that are read back
AGAIN_S = (0.5, 2.0)  # before what differs is read again
SPARE_BYTES = 64 * 1024 * 1024  # records, journal segments, the file system's own needs
MOST_SKIPPED = 1  # upkeeps in a row, since a snapshot was waiting: after that it waits for one
GRACE_S = 3 * 24 * 3600.0  # how old another run's snapshot must be before it is retired without the user's word


@dataclass(frozen=True)
class Retention:
    """What a tier keeps. See `core.policy.retention`.

    Attributes:
        keep_last: so many of the newest.
        keep_every: and those whose step is a multiple of it; `None` for none.
        pinned: and those, asked anew each time: something else still reads them.
    """

    keep_last: int
    keep_every: int | None = None
    pinned: Callable[[], Collection[SnapshotId]] = tuple


@dataclass(frozen=True)
class MakesWay:
    """What upkeep makes way for.

    Attributes:
        busy: whether something better waits, or there is no time.
        closes: whether there is no time for upkeep, ever again.
        pause: wait for so many seconds, or until a condition of these holds.
    """

    busy: Callable[[], bool]
    closes: Callable[[], bool]
    pause: Callable[[Callable[[], bool], float], None]


class Upkeep:
    """Of one tier's store."""

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
            way: what it makes way for.
            forget_base: called where nothing that the store holds may be copied from any more.
        """
        self._name, self._store, self._keys, self._retention = name, store, context.keys, retention
        self._emit, self._host, self._way, self._forget_base = context.emit, context.host, way, forget_base
        self._fresh = context.settings.fresh  # the user has said that what was before is to be ignored, and may go
        self.run_id = ""
        """Identity of the run that is saved here; empty before the first snapshot."""
        self._unverified: Manifest | None = None
        self._verified: set[SnapshotId] = set()
        self._doubtful: set[SnapshotId] = set()  # were verified, before something was damaged that may be theirs, too
        self._ours: set[SnapshotId] = set()
        self._swept = self._behind = self._reads_well = False
        self._skipped = 0

    def trust(self, snapshot: SnapshotId) -> None:
        """Note that a snapshot was read and found good by somebody else (a successful restore). From any thread."""
        self._verified.add(snapshot)

    def note_published(self, manifest: Manifest) -> None:
        """It is there, and has to be read back."""
        self._ours.add(manifest.id)
        self._unverified = manifest

    # ---- room -------------------------------------------------------------------------------------------------------

    def make_room(self, size: int, deadline: Deadline) -> None:
        """Delete what need not be kept where `size` bytes do not fit.

        Raises:
            Full: they do not even so.
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
        """Retire down to one. Where nothing may go, since nothing was read back, do that first. Raises CloudError."""
        if self._retire(keep_last=1, deadline=deadline):
            return
        for snapshot in reversed(records.survey(self._store, self._keys, deadline).commits):
            if snapshot in self._verified:
                return  # all that is older was retired before
            with contextlib.suppress(SnapshotCorrupt, NotFound, Unreadable):
                manifest = records.read_manifest(self._store, self._keys, snapshot, deadline)
                if self._verify(manifest, deadline, interrupted=self._way.closes):
                    self._retire(keep_last=1, deadline=deadline)
                    return

    # ---- while nothing waits ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Verify what was written, retire, keep room for the next one; nothing of it while a snapshot waits.

        But at most once in a row: a training that saves faster than a store takes it would never be verified, and so
        never retired.
        """
        busy = self._way.busy()
        owed = busy and self._skipped >= MOST_SKIPPED and not self._way.closes()
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
                if not self._verify(unverified, deadline, interrupted=self._way.closes if owed else self._way.busy):
                    return  # interrupted by a newer snapshot, which will be verified instead
            self._retire(self._retention.keep_last, deadline)
            if not self._swept and self._verified:
                retire.sweep(self._store, self._keys, self._sweepable(), deadline)
                self._swept = True
            if (newest := max(tuple(self._verified), default=None)) is not None:  # `trust` adds from another thread
                self._store.reserve(records.read_manifest(self._store, self._keys, newest, deadline).payload_bytes)
        except (CloudError, SnapshotCorrupt) as err:
            self._emit(events.UpkeepFailed(tier=self._name, reason=str(err)))

    def _note_behind(self, behind: bool) -> None:
        """Say it, once, when snapshots come faster than they can be saved and looked after; and go on more slowly."""
        if behind and not self._behind:
            self._emit(events.Behind(tier=self._name))
        self._behind = behind

    def _verify(self, manifest: Manifest, deadline: Deadline, *, interrupted: Callable[[], bool]) -> bool:
        self._unverified = None
        try:
            good = self._read_back(manifest, deadline, interrupted)
        except SnapshotCorrupt as err:
            self.doubt(manifest.id)
            # Whoever finds damage everywhere is most likely damaged itself: bad memory, say.
            if self._reads_well or isinstance(err, fetch.DamagedInStore):
                self._reads_well = False
                commit.quarantine(self._store, self._keys, manifest.id, str(err), self._host, deadline)
                self._emit(events.Quarantined(snapshot=str(manifest.id), reason=str(err)))
            raise
        except CloudError:
            # A bad block proves nothing, and another name makes it no better. A store without files compares sums.
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
        """Read it; and again, after a pause, before anybody calls it damaged."""
        for pause_s in AGAIN_S:
            with contextlib.suppress(SnapshotCorrupt):
                return fetch.verify(self._store, self._keys, manifest, deadline, interrupted=interrupted)
            self._way.pause(interrupted, pause_s)
        return fetch.verify(self._store, self._keys, manifest, deadline, interrupted=interrupted)

    def doubt(self, damaged: SnapshotId) -> None:
        """Trust nothing that was verified before: where snapshots share a file, damage in one is damage in all.

        Nothing is copied from it, and until something is read back again, nothing is verified, and so nothing deleted.
        """
        self._forget_base()
        self._doubtful.update(tuple(self._verified))  # `trust` adds from another thread
        self._doubtful.discard(damaged)
        self._verified.clear()

    def _doubted(self, deadline: Deadline) -> Manifest | None:
        """What to read again, if there is anything: only where no newer snapshot has come to be verified."""
        if not self._doubtful:
            return None
        newest = max(self._doubtful)
        try:
            return records.read_manifest(self._store, self._keys, newest, deadline)
        except (NotFound, SnapshotCorrupt, Unreadable):
            self._doubtful.discard(newest)
            raise

    def _retire(self, keep_last: int, deadline: Deadline) -> int:
        """Delete what need not be kept. How many snapshots that were."""
        doomed = retain(
            records.survey(self._store, self._keys, deadline).commits,
            keep_last=keep_last,
            keep_every=self._retention.keep_every,
            verified=self._verified,
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
        """Whether it is ours to delete: not a newer version's, nor another run's unless the user said so, or for days.

        That there was another run of this name may be an error: of whoever typed --fresh, or of a store.
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
        """Whether the claim of its generation is this run's; a local tier has no claims."""
        if self._name == "local":
            return True  # a copy, which dies with this machine
        with contextlib.suppress(NotFound, SnapshotCorrupt, Unreadable):
            return records.read_claim(self._store, self._keys, snapshot.generation, deadline).run_id == self.run_id
        return False

    def _sweepable(self) -> int:
        """The newest generation whose garbage is ours to delete: our own."""
        return max((snapshot.generation for snapshot in tuple(self._verified)), default=0)


def _age_s(instant: str) -> float:
    """Seconds since an instant of a record, by this host's wall clock; 0 where it cannot be read."""
    try:
        return (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(instant)).total_seconds()
    except (ValueError, TypeError):
        return 0.0
