"""List the runs of a store, and the snapshots of a run."""

from __future__ import annotations

from typing import Any

from cloud.errors import CloudError
from cloud.notice import Deadline
from harness.config.settings import Settings
from harness.core.snapshot import RunKeys
from harness.errors import SnapshotCorrupt
from harness.inspect.tiers import CALL_S, all_snapshots, is_committed, tiers
from harness.snapshots import records
from harness.snapshots.open import open_existing_store


def runs(settings: Settings) -> list[str]:
    """Return the names of the runs in the store. Other objects there, however many, are skipped."""
    store, deadline = open_existing_store(settings.store, settings), Deadline.after(CALL_S)
    names: list[str] = []
    after = ""
    while True:
        found = (info.key.split("/", 1) for info in store.list("", after=after, deadline=deadline))
        name = next((first for first, *below in found if below), None)
        if name is None:
            return sorted(names)
        keys = RunKeys(name)
        if any(next(iter(store.list(prefix, deadline=deadline)), None) for prefix in (keys.generations, keys.commits)):
            names.append(name)
        after = f"{name}/~"  # sorts after every key below it


def snapshots(settings: Settings) -> list[dict[str, Any]]:
    """Return a row for each committed snapshot of each tier, oldest first; `unusable` says why it cannot be used."""
    rows = []
    for tier, store in tiers(settings):
        keys = RunKeys(settings.run)
        for snapshot, reason in all_snapshots(store, keys):
            row: dict[str, Any] = {"snapshot": str(snapshot), "tier": tier, "step": snapshot.step}
            try:
                manifest = records.read_manifest(store, keys, snapshot, Deadline.after(CALL_S))
                row |= {"ranks": len(manifest.parts), "bytes": manifest.payload_bytes}
                row["sealed_at"] = manifest.parts[0].sealed_at
            except (SnapshotCorrupt, CloudError) as err:
                if not is_committed(store, keys, snapshot):
                    continue
                row |= {"ranks": None, "bytes": None, "sealed_at": None}
                reason = reason or str(err)
            rows.append({**row, "unusable": reason})
    return rows
