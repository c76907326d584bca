"""Find out what a start would resume, without a start: nothing is claimed, quarantined, probed or downloaded.

Owns the words of `harness resume --dry-run`. It follows the steps of `agent.resume`, but only reads records and asks
the stores about shards. Only a start reads the bytes and finds out whether they are what was committed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud.errors import CloudError, NotFound
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.config.settings import Settings
from harness.core.manifest import MAX_RECORD_BYTES, ForeignFormat, Manifest, parse_quarantine
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import ExitCode, SnapshotCorrupt
from harness.ipc.client import AgentSilent, ask_status
from harness.snapshots import commit, records
from harness.snapshots.candidates import ForeignRun, StoredCopy, check_run, choose, stored_copies
from harness.snapshots.fetch import StoredShard
from harness.snapshots.open import open_existing_store

CALL_S = 30.0
ANSWER_S = 5.0


@dataclass(frozen=True)
class Row:
    """One snapshot in one tier; `reason` says why it is not used."""

    snapshot: str
    tier: str
    step: int
    reason: str = ""


@dataclass(frozen=True)
class Preview:
    """What a start would do.

    Attributes:
        used: the snapshot that it would resume; `None` if it would begin at step 0 or fail.
        why: the reason for `used`, or for `None`, in words.
        rejected: snapshots that it would skip before `used`, and every one in quarantine.
        notes: other facts for the user.
        refused: the exit code of a start that would be refused or fail; else `None`.
    """

    used: Row | None
    why: str
    rejected: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    refused: ExitCode | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields for `--json`."""
        return dataclasses.asdict(self) | {"refused": None if self.refused is None else int(self.refused)}


def preview(settings: Settings) -> Preview:
    """Find out what a start of the run would do, from its store and the local tier.

    Raises:
        CloudError: the store cannot be asked; a start would wait for it.
        SnapshotCorrupt: the newest claim cannot be read: a start would be refused.
    """
    store, keys = open_existing_store(settings.store, settings), RunKeys(settings.run)
    known = records.survey(store, keys, Deadline.after(CALL_S))
    notes = tuple(_notes(settings, known))
    if settings.fresh:
        passed = f", and ignores {len(known.commits)} snapshots" if known.commits else ""
        return Preview(None, f"--fresh begins at step 0 under a new identity{passed}", notes=notes)
    if known.finished_at is not None:
        why = f"the run finished at step {known.finished_at}: a start is refused; --fresh begins at step 0"
        return Preview(None, why, notes=notes, refused=ExitCode.USAGE)
    if known.stopped_early is not None and not settings.continue_:
        why = "the program stopped the run early: a start is refused; --continue resumes it, --fresh begins at step 0"
        return Preview(None, why, notes=notes, refused=ExitCode.USAGE)
    if not known.run_id:
        return Preview(None, "there is no run of this name in the store: it begins at step 0", notes=notes)
    search = _Search(keys, known.run_id)
    search.add("remote", store, known)
    if settings.local_tier is not None and Path(settings.local_tier).is_dir():
        local = open_existing_store(settings.local_tier, settings)
        try:
            search.add("local", local, records.survey(local, keys, Deadline.after(CALL_S)))
        except (CloudError, SnapshotCorrupt) as err:
            notes += (f"the local tier {settings.local} cannot be used: {err}",)
    return search.outcome(notes)


def _notes(settings: Settings, known: records.Survey) -> Iterator[str]:
    claim = known.last_claim
    try:
        live = ask_status(settings)
    except AgentSilent as err:
        yield str(err)
        return
    if live is not None:
        yield f"the run is being trained on this host already, by process {live.trainer_pid or live.agent_pid}"
    elif claim is not None and known.done is None and not settings.fresh:
        yield (
            f"generation {claim.generation} on {claim.host} has not recorded its end: if it is alive, a start asks it "
            "to hand over, and continues from its last snapshot"
        )


class _Search:
    """The search for a copy to resume, in all tiers, and the reasons why newer copies are unusable."""

    def __init__(self, keys: RunKeys, run_id: str) -> None:
        self._keys, self._run_id = keys, run_id
        self._copies: list[StoredCopy] = []
        self._uncommitted: dict[tuple[str, SnapshotId], Manifest] = {}
        self._quarantined: list[Row] = []
        self._lost = False

    def add(self, tier: str, store: ObjectStore, known: records.Survey) -> None:
        """Add the snapshots that a survey found in one tier, and those that a start would commit there first."""
        deadline = Deadline.after(CALL_S)
        for manifest in commit.complete(store, self._keys, self._run_id, deadline):
            self._uncommitted[tier, manifest.id] = manifest
        found = {*known.commits, *(id_ for named, id_ in self._uncommitted if named == tier)}
        self._copies += stored_copies(store, tier, sorted(found))
        for snapshot in sorted(known.quarantined, reverse=True):
            reason = f"quarantined: {self._reason(store, snapshot, deadline)}"
            self._quarantined.append(Row(str(snapshot), tier, snapshot.step, reason))
            self._lost |= tier == "remote" and self._is_ours(store, snapshot, deadline)

    def outcome(self, notes: tuple[str, ...]) -> Preview:
        """Choose the newest copy that looks usable without reading its bytes, and return the preview."""
        rejected: list[Row] = []
        unusable = False

        def take(copy: StoredCopy) -> StoredCopy:
            manifest = self._manifest(copy)
            check_run(manifest, self._run_id)
            self._check(copy, manifest)
            return copy

        def reject(copy: StoredCopy, err: Exception) -> None:
            nonlocal unusable
            foreign = isinstance(err, ForeignRun)
            unusable = unusable or not foreign
            reason = f"{err}, and so do older ones there" if foreign else str(err)
            rejected.append(Row(str(copy.id), copy.tier, copy.id.step, reason))

        try:
            copy = choose(self._copies, self._keys, take, reject)
        except ForeignFormat as err:
            why = f"{err}: a start is refused; resume with a version that knows it"
            return Preview(None, why, (*rejected, *self._quarantined), notes, ExitCode.USAGE)
        if copy is not None:
            complete = "complete, and committed at the start" if self._is_uncommitted(copy) else "committed"
            why = f"{complete}; its shards are there, their bytes are verified at the start"
            used = Row(str(copy.id), copy.tier, copy.id.step)
            return Preview(used, why, (*rejected, *self._quarantined), notes)
        lost = unusable or self._lost
        why = "no snapshot of this run anywhere: it begins at step 0"
        if lost:
            why = "this run has snapshots, and none of them can be used: a start fails; --fresh begins at step 0"
        return Preview(None, why, (*rejected, *self._quarantined), notes, ExitCode.BUG if lost else None)

    def _is_uncommitted(self, copy: StoredCopy) -> bool:
        return (copy.tier, copy.id) in self._uncommitted

    def _manifest(self, copy: StoredCopy) -> Manifest:
        if (manifest := self._uncommitted.get((copy.tier, copy.id))) is not None:
            return manifest
        return records.read_manifest(copy.store, self._keys, copy.id, Deadline.after(CALL_S))

    def _check(self, copy: StoredCopy, manifest: Manifest) -> None:
        """Check that the store reports every shard and file as it was committed. Raises SnapshotCorrupt, NotFound."""
        for part in manifest.parts:
            for shard in part.stored:
                stored = StoredShard(copy.store, self._keys.payload(manifest.directory, shard.name), shard)
                info = stored.stat(Deadline.after(CALL_S))
                if info.crc64nvme is not None:
                    stored.check_whole(info.crc64nvme)

    def _reason(self, store: ObjectStore, snapshot: SnapshotId, deadline: Deadline) -> str:
        key = self._keys.quarantined(snapshot)
        try:
            return parse_quarantine(store.read(key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline), key).reason
        except (SnapshotCorrupt, NotFound) as err:
            return str(err)

    def _is_ours(self, store: ObjectStore, snapshot: SnapshotId, deadline: Deadline) -> bool:
        try:
            return records.read_manifest(store, self._keys, snapshot, deadline).run_id == self._run_id
        except NotFound:
            return False  # retired meanwhile
        except SnapshotCorrupt:
            return True
