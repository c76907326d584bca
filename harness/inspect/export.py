"""Export one snapshot to one safetensors file that needs no harness: choose → plan → copy and verify → rename.

What a program has saved by itself becomes a directory with its files.

Owns the file's bytes until it has its name; `harness.core.document` owns the content. The file gets the target's name
only after every byte in it was compared with what was committed. Memory is bounded by one chunk, the shards' headers
and the document, whatever the snapshot's size.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import shutil
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cloud.errors import NotFound, Truncated
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.config.settings import Settings
from harness.core import document
from harness.core.document import FileLayout
from harness.core.manifest import Manifest, ShardEntry, StoredPiece
from harness.core.pieces import Piece, check_cover, runs
from harness.core.shard import Placed, ShardLayout, header_bytes, parse_header
from harness.core.small_state import whole_states
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import ConfigError, HarnessError, NoSpace, SnapshotCorrupt, StateError
from harness.ipc.write import write_at
from harness.snapshots import records
from harness.snapshots.candidates import ForeignRun, StoredCopy, check_run, choose
from harness.snapshots.fetch import StoredShard
from harness.snapshots.open import open_existing_store
from harness.watch.place import fetch_files, files_of

_CALL_S = 120.0
_LOOKS = 5
"""How often the stores are listed, in case a snapshot is retired while it is read."""

Say = Callable[[str], None]


def export(
    settings: Settings,
    target: Path,
    say: Say,
    *,
    snapshot: str | None = None,
    step: int | None = None,
    only: str | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Write one snapshot to `target`: a .safetensors file, or a directory of what a program has saved by itself.

    Blocks until it is durable.

    Args:
        settings: the run, its store and its local tier.
        target: the file, or the directory, to make.
        say: called with each line for the user.
        snapshot: id of the snapshot; without it and `step`, the newest that is committed and not quarantined.
        step: instead of `snapshot`, the newest one of this step.
        only: name of a state, e.g. "model": its tensors under their plain names, and nothing else.
        force: replace a file that is there.

    Returns:
        A description of the export, with the fields of `harness export --json`.

    Raises:
        ConfigError: there is no such snapshot or state, or `target` cannot be written.
        SnapshotCorrupt: its bytes are not what was committed.
        NoSpace: the target's disk is too small.
        CloudError: a store failed.
    """
    _check_target(target, force)

    def write(copy: StoredCopy, manifest: Manifest) -> dict[str, Any]:
        say(f"exporting {manifest.id} from {copy.store.url}")
        described = {"run": settings.run, "snapshot": str(manifest.id), "step": manifest.step, "tier": copy.tier}
        if manifest.parts[0].files is not msgspec.UNSET:
            if only is not None:
                raise ConfigError(
                    f"snapshot {manifest.id} is files that a program has saved by itself: leave --only out"
                )
            files = _write_files(copy, RunKeys(settings.run), manifest, target)
            size = manifest.payload_bytes
            return {"file": str(target), **described, "only": None, "tensors": None, "files": files, "bytes": size}
        _check_name(target)
        source = _Source(copy.store, RunKeys(settings.run), manifest)
        plan = _plan(source, only, say)
        _write(source, plan, target, force, 0o666 if settings.shared else 0o600)
        return {
            "file": str(target),
            **described,
            "only": only,
            "tensors": plan.layout.tensors,
            "bytes": target.stat().st_size,
        }

    for _ in range(_LOOKS):
        if (written := _Asked(settings, snapshot, step).use(write, say)) is not None:
            return written
    raise ConfigError(f"run {settings.run!r} retires its snapshots faster than they can be read: raise --keep-last")


# Which snapshot ------------------------------------------------------------------------------------------------------


class _Asked:
    """The snapshots that match the user's request, as the stores list them now."""

    def __init__(self, settings: Settings, snapshot: str | None, step: int | None) -> None:
        self._keys = RunKeys(settings.run)
        self._settings, self._snapshot, self._step = settings, snapshot, step
        self._named = _parse_id(snapshot, step)
        self._surveys = [
            (tier, store, records.survey(store, self._keys, Deadline.after(_CALL_S)))
            for tier, store in _open_tiers(settings)
        ]
        claim = self._surveys[-1][2].last_claim
        self._run_id = "" if claim is None else claim.run_id

    def use(self, write: Callable[[StoredCopy, Manifest], dict[str, Any]], say: Say) -> dict[str, Any] | None:
        """Write the newest matching snapshot, from the nearest copy that can be used.

        Returns:
            The result of `write`; `None` if matching snapshots were retired while they were read: look again.

        Raises:
            SnapshotCorrupt: no copy of that snapshot can be used.
            ConfigError: no snapshot matches.
            CloudError: a store failed.
        """
        damage: Exception | None = None
        retired = False

        def take(copy: StoredCopy) -> dict[str, Any]:
            try:
                return write(copy, self._read(copy))
            except Truncated as err:
                raise SnapshotCorrupt(str(err)) from err

        def reject(copy: StoredCopy, err: Exception) -> None:
            nonlocal damage, retired
            if isinstance(err, ForeignRun):
                return
            if not self._stands(copy):
                retired = True
            else:
                damage = err
                say(f"not from {copy.store.url}: {err}")

        for copies in self._copies():
            if (written := choose(copies, self._keys, take, reject)) is not None:
                return written
            if damage is not None:
                raise SnapshotCorrupt(f"{damage}. Nothing was written; --snapshot names another one, see harness ls")
        if retired:
            return None
        raise self._not_found()

    def _copies(self) -> Iterator[list[StoredCopy]]:
        """Yield the copies of each matching snapshot, newest snapshot first."""
        ids = {known for _, _, found in self._surveys for known in found.commits if self._is_meant(known)}
        for known in sorted(ids, reverse=True):
            yield [StoredCopy(known, tier, store) for tier, store, found in self._surveys if known in found.commits]

    def _read(self, copy: StoredCopy) -> Manifest:
        """Read the manifest of a copy. Raises SnapshotCorrupt, ForeignRun, CloudError."""
        manifest = records.read_manifest(copy.store, self._keys, copy.id, Deadline.after(_CALL_S))
        self._run_id = self._run_id or manifest.run_id
        # A snapshot from before --fresh is not one of this run, unless the user names it. A local disk may have served
        # another store.
        if self._named is None or copy.tier != "remote":
            check_run(manifest, self._run_id)
        return manifest

    def _not_found(self) -> HarnessError:
        """Return the error for a request that no snapshot matches."""
        where = f"run {self._settings.run!r} in {self._settings.store}"
        if any(self._is_meant(known) for _, _, found in self._surveys for known in found.quarantined):
            what = self._snapshot or "the requested snapshot"
            return SnapshotCorrupt(f"{what} of {where} is quarantined; see harness ls")
        what = "snapshot"
        if self._snapshot is not None or self._step is not None:
            what += f" {self._snapshot}" if self._snapshot else f" of step {self._step}"
        return ConfigError(f"no {what} of {where}; see harness ls")

    def _stands(self, copy: StoredCopy) -> bool:
        try:
            copy.store.stat(self._keys.commit(copy.id), deadline=Deadline.after(_CALL_S))
        except NotFound:
            return False
        return True

    def _is_meant(self, known: SnapshotId) -> bool:
        if self._named is not None:
            return known == self._named
        return self._step is None or known.step == self._step


def _open_tiers(settings: Settings) -> Iterator[tuple[str, ObjectStore]]:
    if settings.local_tier is not None and Path(settings.local_tier).is_dir():
        yield "local", open_existing_store(settings.local_tier, settings)
    yield "remote", open_existing_store(settings.store, settings)


def _parse_id(snapshot: str | None, step: int | None) -> SnapshotId | None:
    if snapshot is None:
        return None
    if step is not None:
        raise ConfigError("--snapshot and --step both name a snapshot: use one of them")
    try:
        return SnapshotId.parse(snapshot)
    except ValueError as err:
        raise ConfigError(f"{err}; harness ls shows the snapshots") from err


@dataclass(frozen=True)
class _Source:
    """The snapshot that is read."""

    store: ObjectStore
    keys: RunKeys
    manifest: Manifest

    def shard(self, entry: ShardEntry) -> StoredShard:
        """Return one shard of the snapshot."""
        return StoredShard(self.store, self.keys.payload(self.manifest.directory, entry.name), entry)


# Content of the file -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """An entry of a shard, and what of the exported tensor it is.

    Attributes:
        placed: where it lies in the shard.
        tensor: name of the tensor.
        whole: the tensor's shape.
        offset: where in the tensor it begins, in each dimension.
    """

    placed: Placed
    tensor: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def of(cls, placed: Placed, piece: StoredPiece | None) -> _Entry:
        """Return the entry that a part's `pieces` describe."""
        if piece is None or piece.whole is None or piece.offset is None:
            return cls(placed, placed.name, placed.shape, (0,) * len(placed.shape))
        fits = len(placed.shape) == len(piece.whole) and all(
            at + count <= size for at, count, size in zip(piece.offset, placed.shape, piece.whole, strict=True)
        )
        if not fits:
            raise SnapshotCorrupt(f"{placed.name[:120]!r} is no part of a tensor of shape {list(piece.whole)}")
        return cls(placed, piece.tensor, piece.whole, piece.offset)

    @property
    def piece(self) -> Piece:
        """It as a piece of the tensor."""
        return Piece(self.tensor, self.offset, self.placed.shape, self.whole, self.placed.dtype)


@dataclass(frozen=True)
class _Shard:
    """A shard, its header parsed but not yet verified, and what is exported of it."""

    entry: ShardEntry
    layout: ShardLayout
    entries: Sequence[_Entry]


@dataclass(frozen=True)
class _Plan:
    """The layout of a file to write, and the shards that its bytes come from."""

    layout: FileLayout
    shards: Sequence[_Shard]


def _plan(source: _Source, only: str | None, say: Say) -> _Plan:
    manifest = source.manifest
    picked = document.pick(whole_states(manifest), only)
    shards, left_out = [], set[str]()
    owners: dict[str, int] = {}  # the first rank that has a tensor of its own under this name
    for part in manifest.parts:
        pieces = {} if part.pieces is msgspec.UNSET else part.pieces
        own = {name for name, piece in pieces.items() if piece.own}
        left_out |= {name for name in own if owners.setdefault(name, part.rank) != part.rank}
        for number, shard in enumerate(part.shards):
            layout = _read_header(source, shard, number)
            kept = [placed for placed in layout.tensors if owners.get(placed.name, part.rank) == part.rank]
            entries = [_Entry.of(placed, None if placed.name in own else pieces.get(placed.name)) for placed in kept]
            shards.append(_Shard(shard, layout, entries))
    if left_out:
        say(f"{len(left_out)} tensors are each rank's own, like {min(left_out)}: the first rank's are exported")
    # transformers requires "format".
    metadata = {"format": "pt", "run": source.keys.run, "snapshot": str(manifest.id), "step": str(manifest.step)}
    return _Plan(document.lay_out(picked, _stored_tensors(shards), metadata), shards)


# Reading shards ------------------------------------------------------------------------------------------------------


def _read_header(source: _Source, entry: ShardEntry, number: int) -> ShardLayout:
    """Read a shard's layout. Its bytes are compared later, when `_read_shard` reads the chunks."""
    shard = source.shard(entry)
    shard.stat(Deadline.after(_CALL_S))
    first = bytearray(8)
    shard.store.get(shard.key, memoryview(first), deadline=Deadline.after(_CALL_S))
    header = bytearray(header_bytes(bytes(first), entry.size))
    shard.store.get(shard.key, memoryview(header), deadline=Deadline.after(_CALL_S))
    return parse_header(bytes(header), entry.size, number)


def _stored_tensors(shards: Sequence[_Shard]) -> dict[str, Placed]:
    """Return the tensors that the entries of all shards make up, by name. Offsets in them mean nothing."""
    by_name: dict[str, list[_Entry]] = {}
    for shard in shards:
        for entry in shard.entries:
            by_name.setdefault(entry.tensor, []).append(entry)
    return {name: _whole(name, entries) for name, entries in by_name.items()}


def _whole(name: str, entries: Sequence[_Entry]) -> Placed:
    pieces = [entry.piece for entry in entries]
    try:
        check_cover(pieces)
    except StateError as err:
        raise SnapshotCorrupt(f"tensor {name[:120]!r} is not stored once, and whole: {err}") from err
    return Placed(name, pieces[0].dtype, pieces[0].whole, 0, math.prod(pieces[0].whole) * pieces[0].itemsize)


def _read_shard(shard: StoredShard, layout: ShardLayout, wanted: Sequence[Placed]) -> Iterator[tuple[int, memoryview]]:
    """Yield the chunks of a shard that hold its header or a wanted tensor: offset in the shard, and bytes."""
    needed = [Placed("", "U8", (), 0, len(layout.header)), *wanted]

    def is_needed(begin: int, size: int) -> bool:
        nearest = bisect_right(needed, begin, key=_end)
        return nearest < len(needed) and needed[nearest].offset < begin + size

    for begin, piece in shard.chunks(lambda: Deadline.after(_CALL_S), is_needed):
        parsed = layout.header[begin : begin + len(piece)]
        if piece[: len(parsed)] != parsed:  # otherwise the parsed header is not the verified one
            raise SnapshotCorrupt(f"{shard.key}: two reads of its header differ")
        yield begin, piece


def _end(placed: Placed) -> int:
    return placed.offset + placed.size


# Writing the file ----------------------------------------------------------------------------------------------------


def _check_target(target: Path, force: bool) -> None:
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: there is no directory {target.parent}")
    _check_free(target, force)


def _check_name(target: Path) -> None:
    if target.suffix != ".safetensors":
        raise ConfigError(
            f"{target}: the name must end in .safetensors; for a torch file, export first, then "
            "torch.save(safetensors.torch.load_file(FILE), ...)"
        )


def _write_files(copy: StoredCopy, keys: RunKeys, manifest: Manifest, target: Path) -> int:
    """Make a directory with the files of a snapshot, under their own names. Return how many they are."""
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with _errors(target):
        try:
            fetch_files(draft, copy.store, keys, manifest, lambda: Deadline.after(_CALL_S))
            draft.rename(target)
            _sync(target.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return len(files_of(manifest))


def _check_free(target: Path, force: bool) -> None:
    if target.is_dir() or (target.exists() and not force):
        raise ConfigError(f"{target} exists already: {'it is a directory' if target.is_dir() else 'see --force'}")


def _write(source: _Source, plan: _Plan, target: Path, force: bool, mode: int) -> None:
    with _errors(target), _draft(target, mode) as draft:
        room = shutil.disk_usage(target.parent).free
        if plan.layout.size > room:
            raise NoSpace(
                f"{target}: {plan.layout.size} bytes are needed there, and {room} are free; name another disk"
            )
        _fill(source, plan, draft)
        _name(draft, target, force)


def _fill(source: _Source, plan: _Plan, draft: Path) -> None:
    """Write every planned byte: read the shards in order, write to the file at scattered offsets."""
    with draft.open("r+b") as file:
        fd = file.fileno()
        os.ftruncate(fd, plan.layout.size)
        write_at(fd, memoryview(plan.layout.header), 0)
        for shard in plan.shards:
            wanted = [entry for entry in shard.entries if entry.tensor in plan.layout.targets]
            if not wanted:
                continue
            placed = [entry.placed for entry in wanted]
            for offset, chunk in _read_shard(source.shard(shard.entry), shard.layout, placed):
                _scatter(fd, chunk, offset, wanted, plan.layout.targets)


def _scatter(
    fd: int, chunk: memoryview, offset: int, wanted: Sequence[_Entry], targets: Mapping[str, Sequence[int]]
) -> None:
    """Write the bytes of wanted tensors in a chunk of a shard to their offsets in the file."""
    for entry in wanted[bisect_right(wanted, offset, key=lambda entry: _end(entry.placed)) :]:
        placed, piece = entry.placed, entry.piece
        if placed.offset >= offset + len(chunk):
            return
        for run in runs(piece.whole, piece.offset, piece.shape, piece.itemsize):
            begin = max(placed.offset + run.begin, offset)
            end = min(placed.offset + run.begin + run.size, offset + len(chunk))
            for target in targets[entry.tensor] if begin < end else ():
                at = target + run.at + begin - placed.offset - run.begin
                write_at(fd, chunk[begin - offset : end - offset], at)


@contextlib.contextmanager
def _draft(target: Path, mode: int) -> Generator[Path]:
    """Make a hidden file beside `target`. Delete it at the end, unless it was renamed."""
    draft = target.with_name(f".harness-export-{secrets.token_hex(8)}")
    draft.touch(mode, exist_ok=False)
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _name(draft: Path, target: Path, force: bool) -> None:
    """Rename `draft` to `target`, and make both the bytes and the name durable."""
    _sync(draft)
    _check_free(target, force)  # another process may have made it meanwhile
    draft.replace(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _errors(target: Path) -> Generator[None]:
    try:
        yield
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NoSpace(f"{target}: {err.strerror}; nothing was written") from err
        kind = ConfigError if err.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else HarnessError
        raise kind(f"{target}: cannot be written: {err.strerror}") from err
