"""claim, end, publish, finish, quarantine: the only writer of generations/ and commits/.

Owns the commit protocol of docs/commit-protocol.md over any ObjectStore; knows neither slots' memory nor threads.

    put_part:  shards of one rank ──▶ its part (put-if-absent)
    commit:    all parts ──▶ manifest (put-if-absent) ──▶ read back, and check that every shard is there
    publish:   put_part for each rank of this node, then commit
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from cloud.digest import crc64nvme, format_crc
from cloud.errors import AlreadyExists, CloudError, NotFound, TooLarge, Unavailable, Unreadable
from cloud.notice import Deadline
from cloud.store import CHUNK_BYTES, ObjectStore, Progress, Receipt, Source
from harness.core import events
from harness.core.manifest import (
    FORMAT,
    FORMAT_OF_RANKS,
    MAX_RECORD_BYTES,
    Claim,
    Done,
    FileEntry,
    Manifest,
    Part,
    Quarantine,
    ShardEntry,
    StoredPiece,
    combine_parts,
    encode,
    parse_claim,
    parse_manifest,
    parse_part,
)
from harness.core.snapshot import RunKeys, SnapshotId, file_name
from harness.errors import SnapshotCorrupt
from harness.snapshots import records
from harness.snapshots.dedup import Deduplicator, Wanted, is_there, sum_of

Emit = Callable[[events.Event], None]


@dataclass(frozen=True)
class StagedFile:
    """A file of the program's own that is ready to be published.

    Attributes:
        path: see `FileEntry`.
        source: its bytes.
    """

    path: str
    source: Source


@dataclass(frozen=True)
class StagedPart:
    """One rank's share of a snapshot: the content of its part, and the sources of its shards and files.

    Attributes:
        rank: index of the rank.
        world_size: number of ranks.
        state: small state, tagged JSON text.
        environment: as in `Part`.
        sealed_at: ISO 8601 UTC.
        pieces: of several ranks, as in `Part`.
        lacks: of several ranks, as in `Part`.
        shards: name and bytes of each shard, in file order.
        known: size and sums that each shard, and then each file, must have, if known already (for a copy of a committed
            snapshot, or for files that were summed as they were set aside).
        files: files of the program's own.
        intact: returns whether the bytes are still those that the state belongs to. Asked after they were read: a
            trainer may overwrite memory that an agent takes over, because the agent that died had told it to.
    """

    rank: int
    world_size: int
    state: bytes
    environment: dict[str, str]
    sealed_at: str
    shards: Sequence[tuple[str, Source]]
    known: Sequence[ShardEntry] | None = None
    pieces: dict[str, StoredPiece] | msgspec.UnsetType = msgspec.UNSET
    lacks: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    files: Sequence[StagedFile] = ()
    intact: Callable[[], bool] = lambda: True

    @property
    def items(self) -> list[tuple[str, Source]]:
        """Name and bytes of each shard, and then of each file."""
        files = [(file_name(self.rank, self.world_size, index), file.source) for index, file in enumerate(self.files)]
        return [*self.shards, *files]


@dataclass(frozen=True)
class Staged:
    """A snapshot that is ready to be published: the parts of all ranks of this node.

    Attributes:
        id: generation and step.
        run_id: identity of the run.
        parent: the snapshot that this generation resumed from.
        parts: the parts, in rank order.
    """

    id: SnapshotId
    run_id: str
    parent: str | None
    parts: Sequence[StagedPart]


@dataclass
class Attempt:
    """Progress of publishing one snapshot, so that the next attempt does not send stored shards again.

    Attributes:
        nonce: part of the directory's name. All nodes that publish a snapshot use the same one without a message, since
            it is the nonce of the generation's claim (ADR 22). The default, a random one, is for a snapshot that no
            other node publishes.
        stored: shards that are durable in the directory, of all ranks.
        skipped_bytes: bytes that the present attempt did not have to send.
        copied_bytes: bytes that the store copied by itself, in all attempts.
        copying_s: seconds spent on the search for shards to copy, and on copying them, in all attempts.
    """

    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    stored: dict[str, ShardEntry] = field(default_factory=dict)
    skipped_bytes: int = 0
    copied_bytes: int = 0
    copying_s: float = 0.0


def claim(store: ObjectStore, keys: RunKeys, wanted: Claim, deadline: Deadline, *, join: bool = False) -> Claim:
    """Claim `wanted.generation`, or the next free number. A claim is never deleted and never modified.

    Args:
        store: the remote store.
        keys: keys of the run.
        wanted: the claim.
        deadline: for the whole.
        join: adopt the `run_id` of a claim that already has the number. So two starts that begin a run at the same
            moment agree on its identity; otherwise each would take the other's snapshots for another run's.

    Returns:
        The claim that is in the store; its number may be higher than wanted.

    Raises:
        CloudError: the store could not be asked; nothing is claimed, or the next call finds that the claim is ours.
    """
    while True:
        key = keys.claim(wanted.generation)
        try:
            store.put_if_absent(key, encode(wanted), deadline=deadline)
            return wanted
        except AlreadyExists:
            with contextlib.suppress(SnapshotCorrupt):  # a claim that cannot be read is not ours
                standing = parse_claim(store.read(key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline), key)
                if standing.nonce == wanted.nonce:
                    return standing
                if join:
                    wanted = msgspec.structs.replace(wanted, run_id=standing.run_id)
            wanted = msgspec.structs.replace(wanted, generation=wanted.generation + 1)


def end(
    store: ObjectStore, keys: RunKeys, generation: int, nonce: str, outcome: str, step: int | None, deadline: Deadline
) -> None:
    """Record how a generation ended. If a record exists already, it stays unchanged. Raises CloudError."""
    done = Done(
        format=FORMAT, generation=generation, nonce=nonce, outcome=outcome, step=step, ended_at=records.utc_now()
    )
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
    progress: Progress | None = None,
    unchanged: Deduplicator | None = None,
    committing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Manifest:
    """Make every part of `staged` durable, and commit it. Blocks until the bytes are stored.

    A process that dies in the middle leaves either a commit or invisible bytes in a directory of their own. Committing
    a snapshot that is committed already succeeds, also if another process committed it.

    Args:
        store: the store to publish to.
        keys: keys of the run.
        staged: the snapshot, with the parts of all ranks of the run.
        tier: name of the tier, for events.
        deadline: for the whole.
        emit: receives the events for the journal.
        attempt: progress of an earlier attempt at the same `staged`; shards that it stored are not sent again.
        progress: see `ObjectStore.put`; not called for shards that are copied or already stored.
        unchanged: finds and copies shards that the store holds already; `None` to send everything.
        committing: context that is entered around the calls that may make the snapshot visible. Raises CloudError to
            prevent them.

    Raises:
        CloudError: not committed; `attempt` has the stored shards, which are otherwise garbage for `sweep`.
        SnapshotCorrupt: a different snapshot is committed under this id; or its shards were deleted meanwhile.
    """
    attempt = attempt or Attempt()
    attempt.skipped_bytes = 0
    parts = [
        put_part(
            store, keys, staged, part, tier, deadline, emit, attempt=attempt, progress=progress, unchanged=unchanged
        )
        for part in staged.parts
    ]
    with committing():
        return commit(store, keys, combine_parts(parts), deadline)


def put_part(
    store: ObjectStore,
    keys: RunKeys,
    staged: Staged,
    wanted: StagedPart,
    tier: str,
    deadline: Deadline,
    emit: Emit,
    *,
    attempt: Attempt,
    progress: Progress | None = None,
    unchanged: Deduplicator | None = None,
) -> Part:
    """Make one rank's shards durable, and after them the part that names them. Commits nothing.

    Args:
        store: the store to publish to.
        keys: keys of the run.
        staged: the snapshot that the part belongs to.
        wanted: the part.
        tier: name of the tier, for events.
        deadline: for the whole.
        emit: receives the events for the journal.
        attempt: names the directory; shards are added to it as they become durable.
        progress: see `publish`.
        unchanged: see `publish`.

    Returns:
        The part that is in the store: ours, or an equal one that was there first.

    Raises:
        CloudError: the part was not stored; `attempt` has the stored shards.
        SnapshotCorrupt: a different part is stored there, and nothing was put over what it names; or the bytes are not
            those that `wanted.known` requires, or not `wanted.intact`.
    """
    directory = keys.directory(staged.id, attempt.nonce)
    part_key = keys.part(directory, wanted.rank, wanted.world_size)
    how, missing, items = dict[str, str](), list[Wanted](), wanted.items
    if any(name not in attempt.stored for name, _ in items):
        before = _stored_before(store, keys, part_key, directory, wanted, deadline)
        attempt.stored |= before
        how |= dict.fromkeys(before, "kept")
    for index, (name, source) in enumerate(items):
        known = wanted.known[index] if wanted.known is not None else None
        if name in attempt.stored:
            how[name] = "kept"
            continue
        if known is not None and is_there(store, keys.payload(directory, name), known, deadline):
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
    attempt.skipped_bytes += sum(attempt.stored[name].size for name, _ in items if name in attempt.stored)
    for index, (name, source) in enumerate(items):
        entry = attempt.stored.get(name)
        if entry is None:
            key = keys.payload(directory, name)
            entry = entry_of(name, store.put(key, source, deadline=deadline, progress=progress))
        if wanted.known is not None and entry.crc64nvme != wanted.known[index].crc64nvme:
            raise SnapshotCorrupt(f"{staged.id}: its bytes are not what was committed before; this copy is damaged")
        attempt.stored[name] = entry
        emit(events.ShardStored(tier=tier, step=staged.id.step, name=name, bytes=entry.size, how=how.get(name, "sent")))
    if not wanted.intact():
        raise SnapshotCorrupt(f"{staged.id}: the trainer overwrote its memory while it was read")
    files = tuple(
        _file(attempt.stored[file_name(wanted.rank, wanted.world_size, index)], file.path)
        for index, file in enumerate(wanted.files)
    )
    part = Part(
        format=FORMAT if wanted.world_size == 1 and not files else FORMAT_OF_RANKS,
        run_id=staged.run_id,
        generation=staged.id.generation,
        step=staged.id.step,
        rank=wanted.rank,
        world_size=wanted.world_size,
        directory=directory,
        parent=staged.parent,
        sealed_at=wanted.sealed_at,
        shards=tuple(attempt.stored[name] for name, _ in wanted.shards),
        state=msgspec.Raw(wanted.state),
        state_crc64nvme=format_crc(crc64nvme(wanted.state)),
        environment=wanted.environment,
        pieces=wanted.pieces,
        lacks=wanted.lacks,
        files=files or msgspec.UNSET,
    )
    try:
        store.put_if_absent(part_key, encode(part), deadline=deadline)
    except AlreadyExists:  # by an earlier attempt, perhaps of a process that has died
        standing = parse_part(store.read(part_key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline), part_key)
        if _part_content(standing) != _part_content(part):
            raise SnapshotCorrupt(f"{part_key}: another part is stored there") from None
        part = standing
    emit(events.PartStored(tier=tier, step=staged.id.step, rank=part.rank))
    return part


def _stored_before(
    store: ObjectStore, keys: RunKeys, part_key: str, directory: str, wanted: StagedPart, deadline: Deadline
) -> dict[str, ShardEntry]:
    """Return the shards that an earlier attempt has stored, by the part that it has put after them.

    IMPORTANT: nothing is put over what a part names. It may be committed, and then it is the good copy, whatever has
    happened to ours meanwhile. So ours is compared here, and not on its way to the store.

    Returns:
        Nothing if there is no such part, or if some of its shards are gone: then they are to be sent again.

    Raises:
        CloudError: the store could not be asked.
        SnapshotCorrupt: the part is of another content than ours.
    """
    try:
        standing = parse_part(store.read(part_key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline), part_key)
    except NotFound:
        return {}
    paths = [] if standing.files is msgspec.UNSET else [file.path for file in standing.files]
    entries, items = standing.stored, wanted.items
    if (
        (bytes(standing.state), standing.pieces, standing.lacks) != (wanted.state, wanted.pieces, wanted.lacks)
        or paths != [file.path for file in wanted.files]
        or [entry.name for entry in entries] != [name for name, _ in items]
    ):
        raise SnapshotCorrupt(f"{part_key}: another part is stored there")
    for index, (name, source) in enumerate(items):
        ours = sum_of(source) if wanted.known is None else wanted.known[index].crc64nvme
        if entries[index].crc64nvme != ours:
            raise SnapshotCorrupt(f"{part_key}: another part is stored there, or this copy is damaged: {name} differs")
    there = all(_has_size(store, keys.payload(directory, entry.name), entry, deadline) for entry in entries)
    return {entry.name: entry for entry in entries} if there else {}


def commit(store: ObjectStore, keys: RunKeys, manifest: Manifest, deadline: Deadline) -> Manifest:
    """Put the manifest and read it back (I13): when this returns, the snapshot exists, with every shard.

    IMPORTANT: the shards are checked *after* the manifest is stored. A process that was stopped for long may commit a
    snapshot that a newer generation has swept or retired meanwhile; `sweep` and `remove` look for a manifest after they
    have deleted. Each looks after it wrote, so one of them sees the other, and a torn commit does not stay (I3).

    Returns:
        The manifest that is in the store: ours, or an equal snapshot's that was there first.

    Raises:
        SnapshotCorrupt: a *different* snapshot, or an object that is no manifest, is stored under this id; or our
            shards are gone, and our manifest is deleted again; or an equal snapshot is stored whose shards are damaged,
            and its manifest stays, since this function does not judge it.
    """
    key, data = keys.commit(manifest.id), encode(manifest)
    with contextlib.suppress(AlreadyExists):
        store.put_if_absent(key, data, deadline=deadline)
    try:
        found = store.read(key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline)
    except (NotFound, TooLarge) as err:
        raise SnapshotCorrupt(f"{key}: it cannot be committed, another object is stored there ({err})") from err
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
    raise SnapshotCorrupt(f"{key}: it exists, but its shards are not what was committed; see harness verify")


def finish_complete(store: ObjectStore, keys: RunKeys, run_id: str, deadline: Deadline) -> list[SnapshotId]:
    """Commit complete snapshots whose writer died before it committed them. Returns the ids of those committed.

    Complete are snapshots above Latest whose parts are all there.
    """
    done = []
    for manifest in complete(store, keys, run_id, deadline):
        with contextlib.suppress(SnapshotCorrupt):  # it stays invisible
            commit(store, keys, manifest, deadline)
            done.append(manifest.id)
    return done


def complete(store: ObjectStore, keys: RunKeys, run_id: str, deadline: Deadline) -> Iterator[Manifest]:
    """Yield manifests of snapshots that are not committed but complete: above Latest, with all their parts there.

    A part is written only after its shards are durable, so complete parts are a complete snapshot.
    """
    committed = records.snapshots_in(store, keys.commits, keys.parse_commit, deadline)
    quarantined = set(records.snapshots_in(store, keys.quarantine, keys.parse_quarantined, deadline))
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
    """Return the newest readable manifest, as a base for copies; `None` if it is quarantined. Raises CloudError.

    An older snapshot is not used instead: shards that it shares with the damaged one may be the same bytes on a disk.
    """
    quarantined = set(records.snapshots_in(store, keys.quarantine, keys.parse_quarantined, deadline))
    for snapshot in reversed(records.snapshots_in(store, keys.commits, keys.parse_commit, deadline)):
        if snapshot in quarantined:
            return None
        with contextlib.suppress(NotFound, SnapshotCorrupt, Unreadable):
            return records.read_manifest(store, keys, snapshot, deadline)
    return None


def quarantine(
    store: ObjectStore, keys: RunKeys, snapshot: SnapshotId, reason: str, host: str, deadline: Deadline
) -> None:
    """Mark a committed snapshot unusable, for all readers. Raises CloudError."""
    record = Quarantine(
        format=FORMAT,
        generation=snapshot.generation,
        step=snapshot.step,
        reason=reason,
        found_at=records.utc_now(),
        host=host,
    )
    try:
        store.put_if_absent(keys.quarantined(snapshot), encode(record), deadline=deadline)
    except AlreadyExists:
        return


def _all_there(store: ObjectStore, keys: RunKeys, manifest: Manifest, deadline: Deadline) -> bool:
    try:
        return _has_sizes(store, keys, manifest, deadline)
    except NotFound:
        return False


def _has_sizes(store: ObjectStore, keys: RunKeys, manifest: Manifest, deadline: Deadline) -> bool:
    """Whether every shard has the size in the manifest. Raises NotFound if one is gone."""
    return all(
        store.stat(keys.payload(manifest.directory, shard.name), deadline=deadline).size == shard.size
        for part in manifest.parts
        for shard in part.stored
    )


def _has_size(store: ObjectStore, key: str, entry: ShardEntry, deadline: Deadline) -> bool:
    with contextlib.suppress(NotFound):
        return store.stat(key, deadline=deadline).size == entry.size
    return False


def _file(entry: ShardEntry, path: str) -> FileEntry:
    """Return the entry of a file. One that was copied had a path of its own in the snapshot before."""
    return FileEntry(**{**msgspec.structs.asdict(entry), "path": path})


def entry_of(name: str, receipt: Receipt) -> ShardEntry:
    """Return the entry of an object, by what was counted as its bytes were read."""
    return ShardEntry(
        name=name,
        size=receipt.size,
        crc64nvme=format_crc(receipt.crc64nvme),
        chunk_bytes=CHUNK_BYTES,
        chunks=tuple(format_crc(crc) for crc in receipt.chunk_crcs),
    )


def _content(manifest: Manifest) -> list[object]:
    """Return a snapshot's content without its location, which is equal for two attempts at one snapshot."""
    return [_part_content(part) for part in manifest.parts]


def _part_content(part: Part) -> tuple[object, ...]:
    paths = None if part.files is msgspec.UNSET else [file.path for file in part.files]
    return bytes(part.state), part.pieces, part.lacks, paths, [(one.name, one.crc64nvme) for one in part.stored]
