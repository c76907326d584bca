"""Delete a snapshot, or a run with its snapshots, records and unfinished uploads.

Owns the distinction between the run's objects and foreign ones below its name: those are left alone, and named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from cloud.errors import Denied
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.config.settings import Settings
from harness.core.snapshot import RunKeys
from harness.errors import ConfigError
from harness.inspect.tiers import CALL_S, all_snapshots, tiers
from harness.ipc.client import ask_status
from harness.snapshots import retire

_REMOVE_S = 24 * 3600.0
_NAMED = 10  # at most, of the foreign objects that are left alone


def remove(settings: Settings, snapshot: str) -> Iterator[str]:
    """Delete one snapshot, or the whole run for "ALL". Yields a line for each action.

    Raises:
        ConfigError: there is no such snapshot, or the run is being trained here.
        AgentSilent: an agent of the run is frozen on this host.
    """
    if ask_status(settings) is not None:
        raise ConfigError(f"run {settings.run!r} is being trained on this host: stop it first")
    keys, found = RunKeys(settings.run), False
    for tier, store in tiers(settings):
        for known, _reason in all_snapshots(store, keys):
            if snapshot in ("ALL", str(known)):
                retire.remove(store, keys, known, Deadline.after(_REMOVE_S))
                found = True
                yield f"deleted {known} from {tier}"
        if snapshot == "ALL":
            if not _is_run(store, keys):
                continue
            begun: Sequence[str] = ()
            with contextlib.suppress(Denied):  # without this permission, a lifecycle rule deletes them
                begun = store.unfinished(f"{settings.run}/", deadline=Deadline.after(CALL_S))
            for key in begun:
                store.abandon(key, deadline=Deadline.after(CALL_S))
            below = [info.key for info in store.list(f"{settings.run}/", deadline=Deadline.after(CALL_S))]
            leftover = [key for key in below if keys.is_ours(key)]
            for key in leftover:
                store.delete(key, deadline=Deadline.after(CALL_S))
            if begun:
                yield f"gave up {len(begun)} unfinished upload{'s' * (len(begun) > 1)} of {settings.run} to {tier}"
            if leftover:
                yield f"deleted {len(leftover)} records of {settings.run} from {tier}"
            found |= bool(begun or leftover)
            yield from _left_alone(store, settings.run, tier, [key for key in below if key not in leftover])
    if not found:
        raise ConfigError(f"{snapshot}: no such snapshot of run {settings.run!r}; see harness ls --run {settings.run}")


def _is_run(store: ObjectStore, keys: RunKeys) -> bool:
    """Return whether the store holds anything of the run: a directory of that name may hold only foreign files."""
    prefixes = (keys.generations, keys.commits, keys.quarantine, keys.snapshots, keys.events, keys.rehearsals)
    listed = (info.key for prefix in prefixes for info in store.list(prefix, deadline=Deadline.after(CALL_S)))
    if any(keys.is_ours(key) for key in listed):
        return True
    with contextlib.suppress(Denied):
        return bool(store.unfinished(keys.snapshots, deadline=Deadline.after(CALL_S)))
    return False


def _left_alone(store: ObjectStore, run: str, tier: str, keys: Sequence[str]) -> Iterator[str]:
    """Yield a line that names what is left below the run's name: foreign objects; in a directory pipes and links."""
    where, left = f"{store.url}/{run}", sorted(key.removeprefix(f"{run}/") for key in keys)
    if (root := store.local_path(run)) is not None:
        where = str(root)
        left = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or not path.is_dir())
    if left:
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        yield f"left in {where} ({tier}), since they are not the harness's: {', '.join(left[:_NAMED])}{more}"
