"""Choose the snapshot to use among all tiers' copies. A start, its dry run and an export share this walk.

Owns the order, and whether the failure of one copy says something about the others. The greatest (generation, step)
wins; the tier decides only between copies of one snapshot: memory, then local, then remote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cloud.errors import CloudError, NotFound
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.core.manifest import ForeignFormat, Manifest
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import SnapshotCorrupt
from harness.snapshots import records

LOOK_S = 60.0
_ORDER = {"memory": 2, "local": 1, "remote": 0}


class Copy(Protocol):
    """One snapshot in one tier."""

    @property
    def id(self) -> SnapshotId:
        """Generation and step of the snapshot."""
        ...

    @property
    def tier(self) -> str:
        """Tier of the copy: "memory", "local" or "remote"."""
        ...


@dataclass(frozen=True)
class StoredCopy:
    """A committed snapshot in a store."""

    id: SnapshotId
    tier: str
    store: ObjectStore


class ForeignRun(Exception):
    """The snapshot belongs to another run of this name."""


_C = TypeVar("_C", bound=Copy)
_T = TypeVar("_T")


def stored_copies(store: ObjectStore, tier: str, known: Sequence[SnapshotId]) -> list[StoredCopy]:
    """Return a copy for each snapshot that a survey of one store found."""
    return [StoredCopy(snapshot, tier, store) for snapshot in known]


def order(copies: Sequence[_C]) -> list[_C]:
    """Sort copies: the newest snapshot first; of one snapshot's copies the nearest first."""
    return sorted(copies, key=lambda copy: (copy.id, _ORDER[copy.tier]), reverse=True)


def named(text: str, known: Iterable[SnapshotId]) -> SnapshotId | None:
    """Return the snapshot that a user means by its name or by its step; of several the newest, of none `None`."""
    return max((snapshot for snapshot in known if text in (str(snapshot), str(snapshot.step))), default=None)


def check_run(manifest: Manifest, run_id: str) -> None:
    """Raise ForeignRun if the snapshot belongs to another run."""
    if manifest.run_id != run_id:
        raise ForeignRun("belongs to another run of this name")


def choose(
    copies: Sequence[_C],
    keys: RunKeys,
    take: Callable[[_C], _T],
    reject: Callable[[_C, CloudError | SnapshotCorrupt | ForeignRun], None],
) -> _T | None:
    """Use the first copy that can be used, in the order of `order`.

    Args:
        copies: candidates, in any order.
        keys: keys of the run.
        take: uses a copy, or raises the reason why it cannot be used.
        reject: called with each copy that is skipped, and the reason.

    Returns:
        The result of `take`; `None` if no copy can be used, or there are none.

    Raises:
        ForeignFormat: a newer version wrote a copy that comes first.
        CloudError: a store failed as a whole; nothing was concluded.
    """
    foreign: set[str] = set()
    for copy in order(copies):
        if copy.tier in foreign:
            continue
        try:
            return take(copy)
        except ForeignFormat:
            raise
        except ForeignRun as err:
            # From before --fresh, or of a local disk that served another store; older copies there are no better.
            foreign.add(copy.tier)
            reject(copy, err)
        except CloudError as err:
            if not isinstance(err, NotFound) and not _is_one_place(copy, keys):
                raise  # nothing may be concluded from a store that is down
            reject(copy, err)
        except SnapshotCorrupt as err:
            reject(copy, err)
    return None


def _is_one_place(copy: Copy, keys: RunKeys) -> bool:
    """Whether a failed read concerns only `copy` (a bad block, for example), and not its store. Asks the store."""
    if not isinstance(copy, StoredCopy):
        return False
    if copy.tier == "local":
        return True  # a local tier ends with this machine anyway
    if copy.store.local_path(keys.commit(copy.id)) is None:
        return False
    try:
        records.survey(copy.store, keys, Deadline.after(LOOK_S))
    except (CloudError, SnapshotCorrupt):
        return False
    return True
