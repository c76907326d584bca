"""Delete snapshots: a committed one (`remove`), or the garbage of writers that died (`sweep`).

Owns the order of deletion (I6), and the search for a manifest that was committed meanwhile (docs/commit-protocol.md).

    remove:  manifest ──▶ part ──▶ shards, newest verified never
    sweep:   part ──▶ shards ──▶ look whether a manifest has been committed for them meanwhile
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
        raise  # written by a newer version, which alone may delete it
    except (NotFound, SnapshotCorrupt, Unreadable):
        pass  # the directories are found by their names, below
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
    """Delete payload without a manifest, below Latest and of `generation` or older. Returns how many directories."""
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
        # A list may be stale: if it hid a commit, this would tear it. A read of the manifest by its name is not stale.
        if _names(store, keys, snapshot, directory, deadline, absent=snapshot in committed, damaged=True):
            continue
        _remove_directory(store, keys, directory, deadline)
        _take_back(store, keys, snapshot, directory, deadline)
        count += 1
    return count


def abandon_stale(store: ObjectStore, keys: RunKeys, generation: int, spared: str | None, deadline: Deadline) -> int:
    """Abandon unfinished uploads of older generations. Returns how many.

    Call it only when every older generation has ended or is silent: otherwise an upload may belong to a running agent.
    Abandoning such an upload nevertheless costs its owner an attempt, never a commit.

    Args:
        store: the store of the uploads.
        keys: keys of the run.
        generation: our generation; its uploads and newer ones stay.
        spared: a directory whose uploads stay, because they will be resumed.
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
    """Delete a manifest that was committed for a directory while the directory was being deleted. See `commit`."""
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
    """Whether `snapshot`'s manifest names `directory`. Returns `absent` if there is none, `damaged` if unreadable."""
    try:
        return records.read_manifest(store, keys, snapshot, deadline).directory == directory
    except NotFound:
        return absent
    except (SnapshotCorrupt, Unreadable):
        return damaged
