"""What a store says of a run: its records, read and validated, and all of them at once as a survey.

Owns reading them; what is a valid record is `core.manifest`. Nothing is written here.
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
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import SnapshotCorrupt


@dataclass(frozen=True)
class Survey:
    """What a store knows of a run, from listing it and reading its newest claim.

    Attributes:
        last_claim: the newest readable claim; `None` if nobody ever started the run here.
        next_generation: the first number that nobody has.
        done: the end of the newest generation, if it has one.
        commits: snapshots with a manifest that are not quarantined, ascending.
        quarantined: those that are.
        run_id: identity of the run: its newest claim's, or its newest snapshot's where the claims are gone (a lifecycle
            rule of the bucket deletes by age, and claims are what is oldest); empty where there is neither.
    """

    last_claim: Claim | None
    next_generation: int
    done: Done | None
    commits: tuple[SnapshotId, ...]
    quarantined: frozenset[SnapshotId] = field(default_factory=frozenset)
    run_id: str = ""

    @property
    def finished_at(self) -> int | None:
        """The step at which the run finished, or `None` while it has not."""
        return self.done.step if self.done is not None and self.done.outcome == "finished" else None

    @property
    def stopped_early(self) -> Done | None:
        """The end of a run whose program ended it before its time; `None` for every other."""
        return self.done if self.done is not None and self.done.outcome == STOPPED_EARLY else None


def survey(store: ObjectStore, keys: RunKeys, deadline: Deadline) -> Survey:
    """List a run. Raises CloudError; SnapshotCorrupt if the newest claim or end cannot be read."""
    # IMPORTANT: commits before claims. A claim is there before its commits, so none is seen without it.
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


def read_claim(store: ObjectStore, keys: RunKeys, generation: int, deadline: Deadline) -> Claim:
    """Who started a generation. Raises NotFound, SnapshotCorrupt, CloudError."""
    key = keys.claim(generation)
    return parse_claim(store.read(key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline), key)


def read_done(store: ObjectStore, keys: RunKeys, generation: int, deadline: Deadline) -> Done:
    """How a generation ended. Raises NotFound, SnapshotCorrupt, CloudError."""
    key = keys.done(generation)
    return parse_done(store.read(key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline), key)


def read_manifest(store: ObjectStore, keys: RunKeys, snapshot: SnapshotId, deadline: Deadline) -> Manifest:
    """The manifest of a committed snapshot, its small state verified. Raises NotFound, SnapshotCorrupt, CloudError."""
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
    """ISO 8601 UTC, for people: nothing is ever decided by it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _identity(store: ObjectStore, keys: RunKeys, snapshots: Sequence[SnapshotId], deadline: Deadline) -> str:
    """Whose snapshots these are, by the newest that can be read; empty if none can."""
    for snapshot in sorted(snapshots, reverse=True):
        with contextlib.suppress(NotFound, SnapshotCorrupt, Unreadable):
            return read_manifest(store, keys, snapshot, deadline).run_id
    return ""


def snapshots_in(
    store: ObjectStore, prefix: str, parse: Callable[[str], SnapshotId | None], deadline: Deadline
) -> list[SnapshotId]:
    """Snapshots that the keys below `prefix` name, ascending. Raises CloudError."""
    found = (parse(info.key) for info in store.list(prefix, deadline=deadline))
    return sorted(snapshot for snapshot in found if snapshot is not None)
