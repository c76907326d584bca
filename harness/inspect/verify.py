"""Read every byte of a run's snapshots again, and compare it with what was committed."""

from __future__ import annotations

from typing import Any

from cloud.errors import CloudError
from cloud.notice import Deadline
from harness.config.settings import Settings
from harness.core.manifest import SET_ASIDE
from harness.core.snapshot import RunKeys
from harness.errors import ConfigError, SnapshotCorrupt
from harness.inspect.tiers import CALL_S, all_snapshots, is_committed, tiers
from harness.snapshots import fetch, records

_VERIFY_S = 24 * 3600.0


def is_bad(verdict: str) -> bool:
    """Whether the verdict on a snapshot is one of damage."""
    return verdict != "ok" and not verdict.startswith(SET_ASIDE)


def verify(settings: Settings, *, lift: bool = False) -> list[dict[str, Any]]:
    """Return one row for each snapshot of each tier: "ok", what differs, or why it was set aside. Reads every byte.

    Args:
        settings: the run, its store and its local tier.
        lift: read quarantined snapshots as well, and end the quarantine of those that are what was committed.
    """
    rows = []
    for tier, store in tiers(settings):
        keys = RunKeys(settings.run)
        for snapshot, reason in all_snapshots(store, keys):
            quarantined = reason is not None
            verdict = "ok"
            if reason is not None:
                verdict = reason if reason.startswith(SET_ASIDE) else f"quarantined: {reason}"
            if lift or not quarantined:
                try:
                    manifest = records.read_manifest(store, keys, snapshot, Deadline.after(CALL_S))
                    fetch.verify(store, keys, manifest, Deadline.after(_VERIFY_S))
                except (SnapshotCorrupt, CloudError) as err:
                    if not is_committed(store, keys, snapshot):
                        continue  # retired while it was read, by an agent that trains
                    verdict = f"quarantined: {reason}; and now: {err}" if quarantined else str(err)
                else:
                    if quarantined:
                        store.delete(keys.quarantined(snapshot), deadline=Deadline.after(CALL_S))
                        verdict = "ok"
            rows.append({"snapshot": str(snapshot), "tier": tier, "verdict": verdict})
    if not rows:
        raise ConfigError(f"run {settings.run!r} has no snapshot in {settings.store}")
    return rows
