"""The tiers of a run that can be read, and the snapshots in each.

Owns the iteration over tiers that `ls`, `verify` and `rm` share.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cloud.errors import CloudError, NotFound, TooLarge, Unreadable
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.config.settings import Settings
from harness.core.manifest import MAX_RECORD_BYTES, parse_quarantine
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import SnapshotCorrupt
from harness.snapshots.open import open_existing_store

CALL_S = 60.0


def tiers(settings: Settings) -> Iterator[tuple[str, ObjectStore]]:
    """Yield each tier's name and store; the local tier only if its directory exists. Raises ConfigError."""
    if settings.local_tier is not None and Path(settings.local_tier).is_dir():
        yield "local", open_existing_store(settings.local_tier, settings)
    yield "remote", open_existing_store(settings.store, settings)


def all_snapshots(store: ObjectStore, keys: RunKeys) -> list[tuple[SnapshotId, str | None]]:
    """Return every snapshot with a manifest, and the reason of its quarantine, or `None` if it is in none."""
    deadline, reasons = Deadline.after(CALL_S), {}
    for info in store.list(keys.quarantine, deadline=deadline):
        if (snapshot := keys.parse_quarantined(info.key)) is not None:
            try:
                data = store.read(info.key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline)
                reasons[snapshot] = parse_quarantine(data, info.key).reason
            except (SnapshotCorrupt, TooLarge, NotFound, Unreadable) as err:
                reasons[snapshot] = str(err)
    found = (keys.parse_commit(info.key) for info in store.list(keys.commits, deadline=deadline))
    return [(snapshot, reasons.get(snapshot)) for snapshot in found if snapshot is not None]


def is_committed(store: ObjectStore, keys: RunKeys, snapshot: SnapshotId) -> bool:
    """Return whether a snapshot is still committed; true if the store cannot say."""
    try:
        store.stat(keys.commit(snapshot), deadline=Deadline.after(CALL_S))
    except NotFound:
        return False
    except CloudError:
        return True  # the caller reports the error
    return True
