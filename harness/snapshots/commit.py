"""claim, survey, publish, finish, retire: the only writer of generations/ and commits/.

Owns the commit protocol of docs/commit-protocol.md over any ObjectStore; knows neither slots' memory nor threads.

    publish:  shards ──▶ part (put-if-absent) ──▶ manifest (put-if-absent) ──▶ read back, and look that all is there
    retire:   manifest ──▶ part ──▶ shards, newest verified never
    sweep:    part ──▶ shards ──▶ look whether somebody has committed them meanwhile
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from cloud.digest import crc64nvme, format_crc
from cloud.directory.direct import aligned_buffer
from cloud.errors import AlreadyExists, CloudError, NotFound, TooLarge, Truncated, Unavailable, Unreadable
from cloud.notice import Deadline
from cloud.store import CHUNK_BYTES, ObjectStore, Receipt, Source
from harness.core import events
from harness.core.manifest import (
    FORMAT,
    MAX_RECORD_BYTES,
    STOPPED_EARLY,
    Claim,
    Done,
    ForeignFormat,
    Manifest,
    Part,
    Quarantine,
    ShardEntry,
    combine_parts,
    encode,
    parse_claim,
    parse_done,
    parse_manifest,
    parse_part,
)
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import SnapshotCorrupt
from harness.snapshots.dedup import Deduplicator, Wanted

Emit = Callable[[events.Event], None]


class DamagedInStore(SnapshotCorrupt):
    """A snapshot whose bytes the store itself says are not what was committed, whoever reads them."""


@dataclass(frozen=True)
class Staged:
    """One rank's snapshot, ready to be published: what the part will say, and where the bytes are.

    Attributes:
        id: generation and step.
        run_id: identity of the run.
        parent: what this generation resumed from.
        rank: whose.
        world_size: of how many.
        state: small state, tagged JSON text.
        environment: as in `Part`.
        sealed_at: ISO 8601 UTC.
        shards: name and bytes of each shard, in file order.
        known: what each shard has to be, where that is known already (a copy of a committed snapshot).
    """

    id: SnapshotId
    run_id: str
    parent: str | None
    rank: int
    world_size: int
    state: bytes
    environment: dict[str, str]
    sealed_at: str
    shards: Sequence[tuple[str, Source]]
    known: Sequence[ShardEntry] | None = None


@dataclass
class Attempt:
    """How far publishing one snapshot has come: what the next attempt need not send again.

    Attributes:
        nonce: names the directory, for every attempt of this job; the same job in another process has another nonce
            (but for a copy of a committed snapshot, whose bytes are the same whoever sends them).
        stored: shards that are durable there.
        skipped_bytes: what the present attempt did not have to send.
        copied_bytes: what the store copied by itself, in all attempts.
        copying_s: seconds that went into looking for what to copy, and into copying it, in all attempts.
    """

    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    stored: dict[str, ShardEntry] = field(default_factory=dict)
    skipped_bytes: int = 0
    copied_bytes: int = 0
    copying_s: float = 0.0


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
    quarantined = frozenset(_snapshots(store, keys.quarantine, keys.parse_quarantined, deadline))
    committed = _snapshots(store, keys.commits, keys.parse_commit, deadline)
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


def claim(store: ObjectStore, keys: RunKeys, wanted: Claim, deadline: Deadline, *, join: bool = False) -> Claim:
    """Claim `wanted.generation`, or the next number that is free. Never deleted, never modified.

    Args:
        store: the remote one.
        keys: of the run.
        wanted: the claim.
        deadline: for the whole.
        join: take over the `run_id` of whoever had the number first. Two that begin a run at the same moment agree
            which run it is; without it each would hold the other's snapshots for another run's.

    Returns:
        The claim as it stands in the store, its number possibly higher than wanted.

    Raises:
        CloudError: the store could not be asked; nothing is claimed, or the claim is found to be ours next time.
    """
    while True:
        key = keys.claim(wanted.generation)
        try:
            store.put_if_absent(key, encode(wanted), deadline=deadline)
            return wanted
        except AlreadyExists:
            with contextlib.suppress(SnapshotCorrupt):  # one that cannot be read is not ours
                standing = parse_claim(store.read(key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline), key)
                if standing.nonce == wanted.nonce:
                    return standing
                if join:
                    wanted = msgspec.structs.replace(wanted, run_id=standing.run_id)
            wanted = msgspec.structs.replace(wanted, generation=wanted.generation + 1)


def end(
    store: ObjectStore, keys: RunKeys, generation: int, nonce: str, outcome: str, step: int | None, deadline: Deadline
) -> None:
    """Say once and for all how a generation ended. A second word is ignored. Raises CloudError."""
    done = Done(format=FORMAT, generation=generation, nonce=nonce, outcome=outcome, step=step, ended_at=utc_now())
    try:
        store.put_if_absent(keys.done(generation), encode(done), deadline=deadline)
    except AlreadyExists:
        return


def publish(
    store: ObjectStore,
    keys: RunKeys,
    staged: Staged,
    tier: str,
    deadline: Deadline,
    emit: Emit,
    *,
    attempt: Attempt | None = None,
    progress: Callable[[int], None] | None = None,
    unchanged: Deduplicator | None = None,
    committing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Manifest:
    """Make `staged` durable and commit it. Blocks for as long as the bytes take.

    Whatever dies in the middle leaves either a commit or invisible bytes in a directory of their own. Committing a
    snapshot that is committed already succeeds, whoever did it.

    Args:
        store: where to.
        keys: of the run.
        staged: what to publish.
        tier: for events.
        deadline: for the whole.
        emit: the journal.
        attempt: what an earlier attempt at the same `staged` has left; shards that it stored are not sent again.
        progress: see `ObjectStore.put`; not called for what is copied, nor for what is there already.
        unchanged: what the store holds already; `None` to send everything.
        committing: entered around what may make the snapshot visible. Raises CloudError to keep it from being so.

    Raises:
        CloudError: not committed; what was stored is in `attempt`, and otherwise garbage for `sweep`.
        SnapshotCorrupt: another, different snapshot stands under this id; or its shards were deleted meanwhile.
    """
    attempt = attempt or Attempt()
    attempt.skipped_bytes = 0
    directory = keys.directory(staged.id, attempt.nonce)
    how = dict.fromkeys(attempt.stored, "kept")
    missing = []
    for index, (name, source) in enumerate(staged.shards):
        known = staged.known[index] if staged.known is not None else None
        if name in attempt.stored:
            continue
        if known is not None and _is_there(store, keys.payload(directory, name), known, deadline):
            attempt.stored[name], how[name] = known, "kept"
        else:
            missing.append(Wanted(name, source, known))

    def copied(entry: ShardEntry) -> None:
        attempt.stored[entry.name], how[entry.name] = entry, "copied"
        attempt.copied_bytes += entry.size
        if deadline.expired:
            raise Unavailable(f"{staged.id}: no time left; {attempt.copied_bytes} bytes are copied")

    def refused(name: str, err: CloudError) -> None:
        emit(events.NotCopied(tier=tier, step=staged.id.step, name=name, reason=str(err)))

    if unchanged is not None:
        began = time.monotonic()
        try:
            unchanged.copy(store, keys, directory, missing, deadline, copied, refused)
        finally:
            attempt.copying_s += time.monotonic() - began
    attempt.skipped_bytes = sum(entry.size for entry in attempt.stored.values())
    for index, (name, source) in enumerate(staged.shards):
        entry = attempt.stored.get(name)
        if entry is None:
            key = keys.payload(directory, name)
            entry = _entry(name, store.put(key, source, deadline=deadline, progress=progress))
        if staged.known is not None and entry.crc64nvme != staged.known[index].crc64nvme:
            raise SnapshotCorrupt(f"{staged.id}: its bytes are not what was committed before; this copy has rotted")
        attempt.stored[name] = entry
        emit(events.ShardStored(tier=tier, step=staged.id.step, name=name, bytes=entry.size, how=how.get(name, "sent")))
    part = Part(
        format=FORMAT,
        run_id=staged.run_id,
        generation=staged.id.generation,
        step=staged.id.step,
        rank=staged.rank,
        world_size=staged.world_size,
        directory=directory,
        parent=staged.parent,
        sealed_at=staged.sealed_at,
        shards=tuple(attempt.stored[name] for name, _ in staged.shards),
        state=msgspec.Raw(staged.state),
        state_crc64nvme=format_crc(crc64nvme(staged.state)),
        environment=staged.environment,
    )
    part_key = keys.part(directory, part.rank, part.world_size)
    try:
        store.put_if_absent(part_key, encode(part), deadline=deadline)
    except AlreadyExists:  # an earlier attempt's, perhaps of a process that died since
        standing = parse_part(store.read(part_key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline), part_key)
        if _part_content(standing) != _part_content(part):
            raise SnapshotCorrupt(f"{part_key}: another part stands there") from None
        part = standing
    emit(events.PartStored(tier=tier, step=staged.id.step))
    with committing():
        return commit(store, keys, combine_parts([part]), deadline)


def commit(store: ObjectStore, keys: RunKeys, manifest: Manifest, deadline: Deadline) -> Manifest:
    """Put the manifest and read it back (I13): when this returns, the snapshot exists, with every shard.

    IMPORTANT: the shards are looked at *after* the manifest is there. A process that was stopped for long may commit
    what a newer generation has swept or retired meanwhile; `sweep` and `remove` look for a manifest after they have
    deleted. Each looks after it wrote, so one of them sees the other, and a torn commit does not stay (I3).

    Returns:
        The manifest that stands: ours, or an equal snapshot's that was there first.

    Raises:
        SnapshotCorrupt: a *different* snapshot of this id is committed, or something that is none; or our shards are
            gone, and now it is too; or an equal one stands that is damaged, which is not ours to judge here.
    """
    key, data = keys.commit(manifest.id), encode(manifest)
    with contextlib.suppress(AlreadyExists):
        store.put_if_absent(key, data, deadline=deadline)
    try:
        found = store.read(key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline)
    except (NotFound, TooLarge) as err:
        raise SnapshotCorrupt(f"{key}: it cannot be committed, something else stands in its place ({err})") from err
    standing = parse_manifest(found, keys, manifest.id)
    if _content(standing) != _content(manifest):
        raise SnapshotCorrupt(
            f"{key}: another snapshot is committed under this id; was generation {manifest.generation} used twice?"
        )
    try:
        if _has_sizes(store, keys, standing, deadline):
            return standing
    except NotFound as err:
        if standing.directory == manifest.directory:
            store.delete(key, deadline=deadline)
            raise SnapshotCorrupt(f"{key}: deleted while it was being committed ({err}); it is taken back") from err
    raise SnapshotCorrupt(f"{key}: it stands, and its shards are not what was committed; see harness verify")


def finish_complete(store: ObjectStore, keys: RunKeys, run_id: str, deadline: Deadline) -> list[SnapshotId]:
    """Commit what somebody died over: snapshots above Latest whose parts are all there. Returns what it committed."""
    done = []
    for manifest in complete(store, keys, run_id, deadline):
        with contextlib.suppress(SnapshotCorrupt):  # it stays invisible
            commit(store, keys, manifest, deadline)
            done.append(manifest.id)
    return done


def complete(store: ObjectStore, keys: RunKeys, run_id: str, deadline: Deadline) -> Iterator[Manifest]:
    """What is not committed and could be: manifests of snapshots above Latest whose parts are all there.

    A part is written only after its shards are durable, so complete parts are a complete snapshot.
    """
    committed = _snapshots(store, keys.commits, keys.parse_commit, deadline)
    quarantined = set(_snapshots(store, keys.quarantine, keys.parse_quarantined, deadline))
    latest = max(committed, default=None)
    parts: dict[str, list[str]] = {}
    for info in store.list(keys.snapshots, deadline=deadline):
        named = keys.parse_directory(info.key)
        if (
            named is not None
            and info.key.endswith(".json")
            and (latest is None or named[0] > latest)
            and named[0] not in quarantined
        ):
            parts.setdefault(named[1], []).append(info.key)
    for part_keys in parts.values():
        try:
            found = [
                parse_part(store.read(key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline), key) for key in part_keys
            ]
            manifest = combine_parts(found)
        except (SnapshotCorrupt, TooLarge):
            continue  # incomplete: it stays invisible
        if manifest.run_id == run_id and _all_there(store, keys, manifest, deadline):
            yield manifest


def base(store: ObjectStore, keys: RunKeys, deadline: Deadline) -> Manifest | None:
    """The newest snapshot whose manifest can be read, to copy from; `None` if that is quarantined. Raises CloudError.

    Not an older one instead: what it has in common with the damaged one may be the very same bytes of a disk.
    """
    quarantined = set(_snapshots(store, keys.quarantine, keys.parse_quarantined, deadline))
    for snapshot in reversed(_snapshots(store, keys.commits, keys.parse_commit, deadline)):
        if snapshot in quarantined:
            return None
        with contextlib.suppress(NotFound, SnapshotCorrupt, Unreadable):
            return read_manifest(store, keys, snapshot, deadline)
    return None


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


def quarantine(
    store: ObjectStore, keys: RunKeys, snapshot: SnapshotId, reason: str, host: str, deadline: Deadline
) -> None:
    """Mark a committed snapshot unusable, for everybody. Raises CloudError."""
    record = Quarantine(
        format=FORMAT, generation=snapshot.generation, step=snapshot.step, reason=reason, found_at=utc_now(), host=host
    )
    try:
        store.put_if_absent(keys.quarantined(snapshot), encode(record), deadline=deadline)
    except AlreadyExists:
        return


def verify(
    store: ObjectStore,
    keys: RunKeys,
    manifest: Manifest,
    deadline: Deadline,
    *,
    interrupted: Callable[[], bool] = lambda: False,
) -> bool:
    """Whether the store still holds exactly what was committed, without keeping the bytes.

    Where the store keeps sums itself (S3), size and sum of each shard are compared; elsewhere every byte is read again.

    Args:
        store: where the snapshot is committed.
        keys: of the run.
        manifest: what was committed.
        deadline: for the whole.
        interrupted: asked between chunks; when true, verification stops.

    Returns:
        False if it was interrupted; a verified snapshot returns True.

    Raises:
        SnapshotCorrupt: which shard differs, and how.
        DamagedInStore: the same, and this reader is not to blame.
    """
    # Aligned, so that what was just written is read from the disk, and what the training loop has cached stays cached.
    scratch = aligned_buffer(min(CHUNK_BYTES, max((s.size for p in manifest.parts for s in p.shards), default=1)))
    for part in manifest.parts:
        for shard in part.shards:
            key = keys.payload(manifest.directory, shard.name)
            try:
                info = store.stat(key, deadline=deadline)
                if info.size != shard.size:
                    raise DamagedInStore(f"{key}: {info.size} bytes, {shard.size} were committed")
                if info.crc64nvme is not None:
                    if format_crc(info.crc64nvme) != shard.crc64nvme:
                        raise DamagedInStore(f"{key}: the store's sum is not the committed one")
                    continue
                crc = 0
                for offset in range(0, shard.size, len(scratch)):
                    if interrupted():
                        return False
                    piece = scratch[: min(len(scratch), shard.size - offset)]
                    store.get(key, piece, offset=offset, deadline=deadline)
                    crc = crc64nvme(piece, crc)
            except (NotFound, Truncated) as err:
                raise SnapshotCorrupt(f"{key}: {err}") from err
            if format_crc(crc) != shard.crc64nvme:
                raise SnapshotCorrupt(f"{key}: bytes differ from what was committed")
    return True


def remove(store: ObjectStore, keys: RunKeys, snapshot: SnapshotId, deadline: Deadline) -> None:
    """Delete one snapshot: manifest first, then parts, then shards (I6). Raises CloudError, ForeignFormat."""
    directories = set()
    try:
        directories.add(read_manifest(store, keys, snapshot, deadline).directory)
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
    committed = set(_snapshots(store, keys.commits, keys.parse_commit, deadline))
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


def utc_now() -> str:
    """ISO 8601 UTC, for people: nothing is ever decided by it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _identity(store: ObjectStore, keys: RunKeys, snapshots: Sequence[SnapshotId], deadline: Deadline) -> str:
    """Whose snapshots these are, by the newest that can be read; empty if none can."""
    for snapshot in sorted(snapshots, reverse=True):
        with contextlib.suppress(NotFound, SnapshotCorrupt, Unreadable):
            return read_manifest(store, keys, snapshot, deadline).run_id
    return ""


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
        return read_manifest(store, keys, snapshot, deadline).directory == directory
    except NotFound:
        return absent
    except (SnapshotCorrupt, Unreadable):
        return damaged


def _is_there(store: ObjectStore, key: str, known: ShardEntry, deadline: Deadline) -> bool:
    """Whether the store itself says that `key` holds exactly the known bytes. One that keeps no sums never does."""
    try:
        info = store.stat(key, deadline=deadline)
    except NotFound:
        return False
    return info.size == known.size and info.crc64nvme is not None and format_crc(info.crc64nvme) == known.crc64nvme


def _all_there(store: ObjectStore, keys: RunKeys, manifest: Manifest, deadline: Deadline) -> bool:
    try:
        return _has_sizes(store, keys, manifest, deadline)
    except NotFound:
        return False


def _has_sizes(store: ObjectStore, keys: RunKeys, manifest: Manifest, deadline: Deadline) -> bool:
    """Whether every shard is as long as it should be. Raises NotFound where one is gone."""
    return all(
        store.stat(keys.payload(manifest.directory, shard.name), deadline=deadline).size == shard.size
        for part in manifest.parts
        for shard in part.shards
    )


def _entry(name: str, receipt: Receipt) -> ShardEntry:
    return ShardEntry(
        name=name,
        size=receipt.size,
        crc64nvme=format_crc(receipt.crc64nvme),
        chunk_bytes=CHUNK_BYTES,
        chunks=tuple(format_crc(crc) for crc in receipt.chunk_crcs),
    )


def _content(manifest: Manifest) -> list[object]:
    """What a snapshot holds, wherever its bytes lie: two attempts at one snapshot are equal in this."""
    return [_part_content(part) for part in manifest.parts]


def _part_content(part: Part) -> tuple[bytes, list[tuple[str, str]]]:
    return bytes(part.state), [(shard.name, shard.crc64nvme) for shard in part.shards]


def _snapshots(
    store: ObjectStore, prefix: str, parse: Callable[[str], SnapshotId | None], deadline: Deadline
) -> list[SnapshotId]:
    found = (parse(info.key) for info in store.list(prefix, deadline=deadline))
    return sorted(snapshot for snapshot in found if snapshot is not None)
