"""Snapshots on their way out: one that is deleted, and the garbage that somebody died over.

Owns the order of deletion (I6), and the look for whoever committed meanwhile (docs/commit-protocol.md).

    remove:  manifest ──▶ part ──▶ shards, newest verified never
    sweep:   part ──▶ shards ──▶ look whether somebody has committed them meanwhile
"""

from __future__ import annotations

from cloud.errors import NotFound, Unreadable
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.core.manifest import ForeignFormat
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import SnapshotCorrupt
from harness.snapshots import records


def remove(store: ObjectStore, keys: RunKeys, snapshot: SnapshotId, deadline: Deadline) -> None:
    """Delete one snapshot: manifest first, then parts, then shards (I6). Raises CloudError, ForeignFormat."""
    directories = set()
    try:
        directories.add(records.read_manifest(store, keys, snapshot, deadline).directory)
    except ForeignFormat:
        raise  # of a newer version, whose it is
    except (NotFound, SnapshotCorrupt, Unreadable):
        pass  # the directories are found by name, below
    store.delete(keys.commit(snapshot), deadline=deadline)
    prefix = f"{keys.snapshots}{snapshot}-"
    for info in store.list(prefix, deadline=deadline):
        if (named := keys.parse_directory(info.key)) is not None:
            directories.add(named[1])
    for directory in directories:
        _remove_directory(store, keys, directory, deadline)
        _take_back(store, keys, snapshot, directory, deadline)
    store.delete(keys.quarantined(snapshot), deadline=deadline)


def sweep(store: ObjectStore, keys: RunKeys, generation: int, deadline: Deadline) -> int:
    """Delete payload that nothing names, below Latest and from `generation` or older. Returns how many directories."""
    committed = set(records.snapshots_in(store, keys.commits, keys.parse_commit, deadline))
    if not committed:
        return 0
    latest = max(committed)
    named = {}
    for info in store.list(keys.snapshots, deadline=deadline):
        found = keys.parse_directory(info.key)
        if found is not None and found[0] < latest and found[0].generation <= generation:
            named[found[1]] = found[0]
    count = 0
    for directory, snapshot in named.items():
        # A list may be stale, and one that hides a commit would have it torn: whoever is asked for it by name knows.
        if _names(store, keys, snapshot, directory, deadline, absent=snapshot in committed, damaged=True):
            continue
        _remove_directory(store, keys, directory, deadline)
        _take_back(store, keys, snapshot, directory, deadline)
        count += 1
    return count


def abandon_stale(store: ObjectStore, keys: RunKeys, generation: int, spared: str | None, deadline: Deadline) -> int:
    """Give up uploads that older generations began and nobody will finish. Returns how many.

    Only when every older generation has ended or is silent: an upload may be a living one's otherwise. Abandoning one
    all the same costs its owner an attempt, never a commit.

    Args:
        store: where they were begun.
        keys: of the run.
        generation: ours; its own uploads and newer ones are left alone.
        spared: a directory whose upload will be resumed.
        deadline: for the whole.
    """
    count = 0
    for key in store.unfinished(keys.snapshots, deadline=deadline):
        found = keys.parse_directory(key)
        if found is not None and found[0].generation < generation and found[1] != spared:
            store.abandon(key, deadline=deadline)
            count += 1
    return count


def _remove_directory(store: ObjectStore, keys: RunKeys, directory: str, deadline: Deadline) -> None:
    found = [info.key for info in store.list(f"{keys.snapshots}{directory}/", deadline=deadline)]
    for key in sorted(found, key=lambda key: not key.endswith(".json")):
        store.delete(key, deadline=deadline)


def _take_back(store: ObjectStore, keys: RunKeys, snapshot: SnapshotId, directory: str, deadline: Deadline) -> None:
    """Delete a manifest that has come to name a directory while it was being deleted. See `commit`."""
    if _names(store, keys, snapshot, directory, deadline, absent=False, damaged=False):
        store.delete(keys.commit(snapshot), deadline=deadline)


def _names(
    store: ObjectStore,
    keys: RunKeys,
    snapshot: SnapshotId,
    directory: str,
    deadline: Deadline,
    *,
    absent: bool,
    damaged: bool,
) -> bool:
    """Whether `snapshot`'s manifest names `directory`; `absent` if there is none, `damaged` if it cannot be read."""
    try:
        return records.read_manifest(store, keys, snapshot, deadline).directory == directory
    except NotFound:
        return absent
    except (SnapshotCorrupt, Unreadable):
        return damaged
