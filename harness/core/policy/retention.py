"""Which committed snapshots may be deleted (I6)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from harness.core.snapshot import SnapshotId


def retain(
    committed: Sequence[SnapshotId],
    *,
    keep_last: int,
    keep_every: int | None,
    verified: Collection[SnapshotId],
    pinned: Collection[SnapshotId] = (),
) -> list[SnapshotId]:
    """Return the committed snapshots that may be deleted, oldest first (I6).

    Kept are: the newest `keep_last`; every one whose step is a multiple of `keep_every`; those that are `pinned`; and
    the newest *verified* one with everything newer, so that a snapshot known to be good always exists. While none is
    verified, none is deleted.

    Args:
        committed: the snapshots that the tier holds, in any order.
        keep_last: at least 1.
        keep_every: in steps; `None` for no milestones.
        verified: those that were read back and found good.
        pinned: those that something else still needs (an upload from the local tier, a resume).
    """
    if keep_last < 1:
        raise ValueError("keep_last must be at least 1")
    ordered = sorted(committed)
    good = [snapshot for snapshot in ordered if snapshot in verified]
    if not good:
        return []
    newest_good = good[-1]
    kept = {*ordered[-keep_last:], *pinned}
    return [
        snapshot
        for snapshot in ordered
        if snapshot < newest_good
        and snapshot not in kept
        and not (keep_every and snapshot.step > 0 and snapshot.step % keep_every == 0)
    ]
