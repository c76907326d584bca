"""What can be said of a run from its stores and its live agent: status, snapshots, verification, removal.

Owns the rows that the command line prints; starts nothing, and changes nothing but on `remove`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cloud.errors import CloudError, Denied, NotFound, TooLarge, Unreadable
from cloud.notice import Deadline
from cloud.pool import Pool
from cloud.store import ObjectStore
from harness.agent.journal import MAX_SEGMENT_BYTES, decode_segment, segments
from harness.config.settings import Settings
from harness.core import events
from harness.core.manifest import MAX_RECORD_BYTES, parse_quarantine
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import ConfigError, SnapshotCorrupt
from harness.ipc.client import AgentSilent, ask_status
from harness.snapshots import fetch, records, retire
from harness.snapshots.open import open_existing_store

_CALL_S = 60.0
_JOURNAL_S = 20.0
_FIRST_SEGMENTS, _LAST_SEGMENTS = 48, 16  # what a start took is told once, figures every 15 s
_READS = 16  # at once
_VERIFY_S = 24 * 3600.0
_NAMED = 10  # of what is left


def status(settings: Settings) -> dict[str, Any]:
    """A live agent's own answer; without one, what the journal in the store says of the last generation.

    Raises:
        ConfigError: there is no such run.
    """
    silent = False
    try:
        if (live := ask_status(settings)) is not None:
            return live.fields()
    except AgentSilent:
        silent = True
    store, keys = open_existing_store(settings.store, settings), RunKeys(settings.run)
    known = _survey(store, keys, settings)
    told = fold(_read_ends(store, keys, known.last_claim.generation if known.last_claim else 0))
    newest = known.commits[-1] if known.commits else None
    return {
        "run": settings.run,
        "store": settings.store,
        "state": "does not answer here" if silent else known.done.outcome if known.done else "not running here",
        "generation": known.last_claim.generation if known.last_claim else None,
        "step": told["step"],
        "local_step": told["local_step"],
        "durable_step": newest.step if newest else None,
        "latest": str(newest) if newest else None,
        "snapshots": len(known.commits),
        "quarantined": len(known.quarantined),
        "restart": told["restart"],
        "ended_at": known.done.ended_at if known.done else None,
    }


def fold(lines: Iterator[events.Line]) -> dict[str, Any]:
    """The last word of a journal on each figure."""
    told: dict[str, Any] = {"step": None, "local_step": None, "durable_step": None, "restart": None}
    for line in lines:
        body = line.body
        if isinstance(body, events.Published):
            told["durable_step" if body.tier == "remote" else "local_step"] = body.step
        if isinstance(body, events.Ended):
            told["local_step"], told["durable_step"] = body.local_step, body.durable_step
        if isinstance(body, events.Restarted):
            told["restart"] = body.fields()
        if isinstance(body, events.Sealed | events.TrainerFinished) or (
            isinstance(body, events.Heartbeat | events.TrainerLeft) and body.step is not None
        ):
            told["step"] = body.step
    return told


def read_journal(store: ObjectStore, keys: RunKeys, generation: int | None = None) -> Iterator[events.Line]:
    """Lines of a run's journal, of one generation or of all, in the order of their keys. Foreign lines are skipped."""
    deadline = Deadline.after(_CALL_S)
    prefix = keys.events if generation is None else f"{keys.events}{generation:08d}-"
    for info in store.list(prefix, deadline=deadline):
        yield from decode_segment(store.read(info.key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline))


def _read_ends(store: ObjectStore, keys: RunKeys, generation: int) -> Iterator[events.Line]:
    """What a generation's journal tells at its beginning and at its end. What cannot be read is passed over."""
    deadline, wanted = Deadline.after(_JOURNAL_S), list[str]()
    with contextlib.suppress(CloudError):
        for first, last in segments(store, keys, generation, _FIRST_SEGMENTS, _LAST_SEGMENTS, deadline):
            wanted += [*first, *last]

    def read(key: str) -> bytes:
        with contextlib.suppress(CloudError):
            return store.read(key, limit_bytes=MAX_SEGMENT_BYTES, deadline=deadline)
        return b""

    pool = Pool(_READS, "harness-journal")
    try:
        for future in [pool.submit(partial(read, key)) for key in wanted]:
            yield from decode_segment(future.result())
    finally:
        pool.shutdown()


def runs(settings: Settings) -> list[str]:
    """Names of the runs in the store. What else lies there, however much, is passed by."""
    store, deadline = open_existing_store(settings.store, settings), Deadline.after(_CALL_S)
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
        after = f"{name}/~"  # behind every key below it


def snapshots(settings: Settings) -> list[dict[str, Any]]:
    """One row for each committed snapshot of each tier, oldest first, with why it cannot be used if so."""
    rows = []
    for tier, store in _tiers(settings):
        keys = RunKeys(settings.run)
        for snapshot, reason in _all_snapshots(store, keys):
            row: dict[str, Any] = {"snapshot": str(snapshot), "tier": tier, "step": snapshot.step}
            try:
                manifest = records.read_manifest(store, keys, snapshot, Deadline.after(_CALL_S))
                row |= {"bytes": manifest.payload_bytes, "sealed_at": manifest.parts[0].sealed_at}
            except (SnapshotCorrupt, CloudError) as err:
                if not _stands(store, keys, snapshot):
                    continue
                row |= {"bytes": None, "sealed_at": None}
                reason = reason or str(err)
            rows.append({**row, "unusable": reason})
    return rows


def verify(settings: Settings, *, lift: bool = False) -> list[dict[str, Any]]:
    """One row for each snapshot of each tier: "ok", or what differs. Reads every byte.

    Args:
        settings: which run, where.
        lift: read what is quarantined as well, and end the quarantine of what is what was committed.
    """
    rows = []
    for tier, store in _tiers(settings):
        keys = RunKeys(settings.run)
        for snapshot, reason in _all_snapshots(store, keys):
            quarantined = reason is not None
            verdict = f"quarantined: {reason}" if quarantined else "ok"
            if lift or not quarantined:
                try:
                    manifest = records.read_manifest(store, keys, snapshot, Deadline.after(_CALL_S))
                    fetch.verify(store, keys, manifest, Deadline.after(_VERIFY_S))
                except (SnapshotCorrupt, CloudError) as err:
                    if not _stands(store, keys, snapshot):
                        continue  # retired while it was read, by an agent that trains
                    verdict = f"{verdict}; and now: {err}" if quarantined else str(err)
                else:
                    if quarantined:
                        store.delete(keys.quarantined(snapshot), deadline=Deadline.after(_CALL_S))
                        verdict = "ok"
            rows.append({"snapshot": str(snapshot), "tier": tier, "verdict": verdict})
    if not rows:
        raise ConfigError(f"run {settings.run!r} has no snapshot in {settings.store}")
    return rows


def _stands(store: ObjectStore, keys: RunKeys, snapshot: SnapshotId) -> bool:
    """Whether a snapshot is committed still."""
    try:
        store.stat(keys.commit(snapshot), deadline=Deadline.after(_CALL_S))
    except NotFound:
        return False
    except CloudError:
        return True  # whoever asked reports it
    return True


def remove(settings: Settings, snapshot: str) -> Iterator[str]:
    """Delete one snapshot, or the whole run for "ALL". Yields a line for each thing done.

    Raises:
        ConfigError: there is no such snapshot, or the run is being trained here.
        AgentSilent: an agent of it is frozen here.
    """
    if ask_status(settings) is not None:
        raise ConfigError(f"run {settings.run!r} is being trained on this host: stop it first")
    keys, found = RunKeys(settings.run), False
    for tier, store in _tiers(settings):
        for known, _reason in _all_snapshots(store, keys):
            if snapshot in ("ALL", str(known)):
                retire.remove(store, keys, known, Deadline.after(_VERIFY_S))
                found = True
                yield f"deleted {known} from {tier}"
        if snapshot == "ALL":
            if not _is_run(store, keys):
                continue
            begun: Sequence[str] = ()
            with contextlib.suppress(Denied):  # who may not ask has a lifecycle rule for them
                begun = store.unfinished(f"{settings.run}/", deadline=Deadline.after(_CALL_S))
            for key in begun:
                store.abandon(key, deadline=Deadline.after(_CALL_S))
            below = [info.key for info in store.list(f"{settings.run}/", deadline=Deadline.after(_CALL_S))]
            leftover = [key for key in below if keys.is_ours(key)]
            for key in leftover:
                store.delete(key, deadline=Deadline.after(_CALL_S))
            if begun:
                yield f"gave up {len(begun)} unfinished upload{'s' * (len(begun) > 1)} of {settings.run} to {tier}"
            if leftover:
                yield f"deleted {len(leftover)} records of {settings.run} from {tier}"
            found |= bool(begun or leftover)
            yield from _left_alone(store, settings.run, tier, [key for key in below if key not in leftover])
    if not found:
        raise ConfigError(f"{snapshot}: no such snapshot of run {settings.run!r}; see harness ls --run {settings.run}")


def _is_run(store: ObjectStore, keys: RunKeys) -> bool:
    """Whether there is anything of a run: a directory of that name may hold somebody's work."""
    prefixes = (keys.generations, keys.commits, keys.quarantine, keys.snapshots, keys.events)
    listed = (info.key for prefix in prefixes for info in store.list(prefix, deadline=Deadline.after(_CALL_S)))
    if any(keys.is_ours(key) for key in listed):
        return True
    with contextlib.suppress(Denied):
        return bool(store.unfinished(keys.snapshots, deadline=Deadline.after(_CALL_S)))
    return False


def _left_alone(store: ObjectStore, run: str, tier: str, keys: Sequence[str]) -> Iterator[str]:
    """A line on what is still below the run's name: objects of somebody else's, and in a directory pipes and links."""
    where, left = f"{store.url}/{run}", sorted(key.removeprefix(f"{run}/") for key in keys)
    if (root := store.local_path(run)) is not None:
        where = str(root)
        left = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or not path.is_dir())
    if left:
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        yield f"left in {where} ({tier}), since they are not the harness's: {', '.join(left[:_NAMED])}{more}"


def _tiers(settings: Settings) -> Iterator[tuple[str, ObjectStore]]:
    if settings.local_tier is not None and Path(settings.local_tier).is_dir():
        yield "local", open_existing_store(settings.local_tier, settings)
    yield "remote", open_existing_store(settings.store, settings)


def _all_snapshots(store: ObjectStore, keys: RunKeys) -> list[tuple[SnapshotId, str | None]]:
    """Every snapshot with a manifest, and the reason of its quarantine if it is in one."""
    deadline, reasons = Deadline.after(_CALL_S), {}
    for info in store.list(keys.quarantine, deadline=deadline):
        if (snapshot := keys.parse_quarantined(info.key)) is not None:
            try:
                data = store.read(info.key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline)
                reasons[snapshot] = parse_quarantine(data, info.key).reason
            except (SnapshotCorrupt, TooLarge, NotFound, Unreadable) as err:
                reasons[snapshot] = str(err)
    found = (keys.parse_commit(info.key) for info in store.list(keys.commits, deadline=deadline))
    return [(snapshot, reasons.get(snapshot)) for snapshot in found if snapshot is not None]


def _survey(store: ObjectStore, keys: RunKeys, settings: Settings) -> records.Survey:
    known = records.survey(store, keys, Deadline.after(_CALL_S))
    if known.last_claim is None and not known.commits:
        raise ConfigError(f"no run {settings.run!r} in {settings.store}; see harness ls --store {settings.store}")
    return known
