"""Read and validate a run's records in a store, one by one or all at once as a survey.

Owns reading; `core.manifest` defines which records are valid. Writes nothing.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cloud.digest import crc64nvme, format_crc
from cloud.errors import NotFound, TooLarge, Unreadable
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.core.manifest import (
    MAX_RECORD_BYTES,
    STOPPED_EARLY,
    Claim,
    Done,
    Manifest,
    parse_claim,
    parse_done,
    parse_manifest,
)
from harness.core.rehearsal import Record, parse_record
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import SnapshotCorrupt


@dataclass(frozen=True)
class Survey:
    """State of a run in a store, from a listing and its newest claim.

    Attributes:
        last_claim: the newest claim; `None` if the run was never started with this store.
        next_generation: the lowest generation above all that are in use.
        done: the end of the newest generation; `None` if it has none.
        commits: snapshots with a manifest that are not quarantined, ascending.
        quarantined: snapshots that are quarantined.
        run_id: identity of the run, from its newest claim, or from its newest snapshot if the claims are gone (a
            lifecycle rule of the bucket deletes by age, and claims are the oldest objects); empty if there is neither.
    """

    last_claim: Claim | None
    next_generation: int
    done: Done | None
    commits: tuple[SnapshotId, ...]
    quarantined: frozenset[SnapshotId] = field(default_factory=frozenset)
    run_id: str = ""

    @property
    def finished_at(self) -> int | None:
        """The step at which the run finished, or `None` if it has not finished."""
        return self.done.step if self.done is not None and self.done.outcome == "finished" else None

    @property
    def stopped_early(self) -> Done | None:
        """The end of a run that its program stopped early; `None` for any other run."""
        return self.done if self.done is not None and self.done.outcome == STOPPED_EARLY else None


def survey(store: ObjectStore, keys: RunKeys, deadline: Deadline) -> Survey:
    """List a run. Raises CloudError; SnapshotCorrupt if the newest claim or end cannot be read."""
    # IMPORTANT: list commits before claims. A claim exists before its commits, so no commit is seen without its claim.
    quarantined = frozenset(snapshots_in(store, keys.quarantine, keys.parse_quarantined, deadline))
    committed = snapshots_in(store, keys.commits, keys.parse_commit, deadline)
    claims, dones = [], []
    for info in store.list(keys.generations, deadline=deadline):
        if (number := keys.parse_claim(info.key)) is not None:
            claims.append(number)
        elif (number := keys.parse_done(info.key)) is not None:
            dones.append(number)
    last = max(claims, default=0)
    claim = read_claim(store, keys, last, deadline) if last else None
    done = read_done(store, keys, last, deadline) if last in dones else None
    return Survey(
        last_claim=claim,
        next_generation=max([0, *claims, *(snapshot.generation for snapshot in committed)]) + 1,
        done=done,
        commits=tuple(snapshot for snapshot in committed if snapshot not in quarantined),
        quarantined=quarantined,
        run_id=_identity(store, keys, [*committed, *quarantined], deadline) if claim is None else claim.run_id,
    )


def read_rehearsal(store: ObjectStore, keys: RunKeys, digest: str, deadline: Deadline) -> Record | None:
    """Read the newest result of rehearsing a script; `None` if there is none. Raises SnapshotCorrupt, CloudError."""
    listed = store.list(f"{keys.rehearsals}{digest}.", deadline=deadline)
    key = max((info.key for info in listed if keys.parse_rehearsal(info.key) is not None), default=None)
    if key is None:
        return None
    try:
        return parse_record(bytes(store.read(key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline)))
    except ValueError as err:
        raise SnapshotCorrupt(f"{key}: {err}") from err


def read_claim(store: ObjectStore, keys: RunKeys, generation: int, deadline: Deadline) -> Claim:
    """Return a generation's claim. Raises NotFound, SnapshotCorrupt, CloudError."""
    key = keys.claim(generation)
    return parse_claim(store.read(key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline), key)


def read_done(store: ObjectStore, keys: RunKeys, generation: int, deadline: Deadline) -> Done:
    """Return the record of a generation's end. Raises NotFound, SnapshotCorrupt, CloudError."""
    key = keys.done(generation)
    return parse_done(store.read(key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline), key)


def read_manifest(store: ObjectStore, keys: RunKeys, snapshot: SnapshotId, deadline: Deadline) -> Manifest:
    """Return the manifest of a committed snapshot, and verify its small state.

    Raises NotFound, SnapshotCorrupt, CloudError.
    """
    key = keys.commit(snapshot)
    try:
        manifest = parse_manifest(store.read(key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline), keys, snapshot)
    except TooLarge as err:
        raise SnapshotCorrupt(f"{key}: {err}") from err
    for part in manifest.parts:
        if format_crc(crc64nvme(bytes(part.state))) != part.state_crc64nvme:
            raise SnapshotCorrupt(f"{key}: the small state of rank {part.rank} is not what was committed")
    return manifest


def utc_now() -> str:
    """Return the time as ISO 8601 UTC, for people only: no decision uses it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _identity(store: ObjectStore, keys: RunKeys, snapshots: Sequence[SnapshotId], deadline: Deadline) -> str:
    """Return the run_id of the newest of the snapshots that can be read; empty if none can."""
    for snapshot in sorted(snapshots, reverse=True):
        with contextlib.suppress(NotFound, SnapshotCorrupt, Unreadable):
            return read_manifest(store, keys, snapshot, deadline).run_id
    return ""


def snapshots_in(
    store: ObjectStore, prefix: str, parse: Callable[[str], SnapshotId | None], deadline: Deadline
) -> list[SnapshotId]:
    """Return the snapshots that the keys below `prefix` name, ascending. Raises CloudError."""
    found = (parse(info.key) for info in store.list(prefix, deadline=deadline))
    return sorted(snapshot for snapshot in found if snapshot is not None)
