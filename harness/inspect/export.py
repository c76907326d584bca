"""One snapshot as one file that needs no harness: locate → plan → copy, verified → give it its name.

Owns which copy is read, and the file's bytes until it has its name; what is in it is `harness.core.document`. A torch
file is made of a safetensors file by another process, since this one never has torch.

    shards ──chunks, verified──▶ draft.safetensors ──▶ FILE.safetensors
                                        └──▶ python -m harness.trainer.export ──▶ draft ──▶ FILE.pt

Nothing stands under the target's name before every byte in it was compared with what was committed. Memory is bounded
by one piece of `CHUNK_BYTES`, the shards' headers and the document, whatever the snapshot's size.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import subprocess
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud.digest import crc64nvme, format_crc
from cloud.errors import NotFound, Truncated
from cloud.notice import Deadline
from cloud.store import CHUNK_BYTES, ObjectStore
from harness.config.settings import Settings
from harness.core import document
from harness.core.document import FileLayout
from harness.core.manifest import Manifest, ShardEntry
from harness.core.shard import Placed, ShardLayout, header_bytes, parse_header
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import ConfigError, HarnessError, NoSpace, SnapshotCorrupt
from harness.ipc.process import safe_python
from harness.snapshots import records
from harness.snapshots.open import open_existing_store

_CALL_S = 120.0
_LOOKS = 5
"""How often a snapshot that was retired under our eyes is followed by another look."""

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
    """Write one snapshot to `target`: .safetensors, or .pt and .pth for `torch.load`. Blocks until it is durable.

    Args:
        settings: which run, in which store, and its local tier.
        target: the file to make.
        say: told what a person should know meanwhile.
        snapshot: which one; without it and `step`, the newest that is committed and not quarantined.
        step: or the newest one of this step.
        only: name of a state, e.g. "model": its tensors under their plain names, and nothing else.
        force: replace a file that is there.

    Returns:
        What was written.

    Raises:
        ConfigError: there is no such snapshot or state, or `target` cannot be written.
        SnapshotCorrupt: its bytes are not what was committed.
        NoSpace: the target's disk is too small.
        CloudError: a store failed.
    """
    is_torch = _check_target(target, force)
    for _ in range(_LOOKS):
        damage: Exception | None = None
        for copy in _locate(settings, snapshot, step, say):
            if damage is not None:
                say(f"not from there: {damage}")
            say(f"exporting {copy.manifest.id} from {copy.store.url}")
            try:
                plan = _plan(copy, only, is_torch)
                _write(copy, plan, target, force, 0o666 if settings.shared else 0o600)
            except (SnapshotCorrupt, NotFound, Truncated) as err:
                if isinstance(err, SnapshotCorrupt) or _stands(copy):
                    damage = err
                continue  # else it was retired while it was read
            return {
                "file": str(target),
                "run": settings.run,
                "snapshot": str(copy.manifest.id),
                "step": copy.manifest.step,
                "tier": copy.tier,
                "only": only,
                "tensors": plan.layout.tensors,
                "bytes": target.stat().st_size,
            }
        if damage is not None:
            raise SnapshotCorrupt(f"{damage}. Nothing was written; --snapshot names another one, see harness ls")
    raise ConfigError(f"run {settings.run!r} retires its snapshots faster than they can be read: raise --keep-last")


# Which snapshot ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Copy:
    """A committed snapshot in one tier."""

    tier: str
    store: ObjectStore
    keys: RunKeys
    manifest: Manifest


def _locate(settings: Settings, snapshot: str | None, step: int | None, say: Say) -> list[_Copy]:
    """The copies of the snapshot that is asked for, the nearest first."""
    keys = RunKeys(settings.run)
    asked = _parse_id(snapshot, step)
    surveys = [
        (tier, store, records.survey(store, keys, Deadline.after(_CALL_S))) for tier, store in _open_tiers(settings)
    ]
    claim = surveys[-1][2].last_claim
    run_id = claim.run_id if claim is not None else None

    def is_meant(known: SnapshotId) -> bool:
        return known == asked if asked is not None else step is None or known.step == step

    for known in sorted({known for _, _, found in surveys for known in found.commits if is_meant(known)}, reverse=True):
        copies, damage = [], None
        for tier, store, found in surveys:
            if known not in found.commits:
                continue
            try:
                manifest = records.read_manifest(store, keys, known, Deadline.after(_CALL_S))
            except NotFound:
                continue  # retired since it was listed
            except SnapshotCorrupt as err:
                say(f"{known} in {store.url} cannot be used: {err}")
                damage = err
                continue
            run_id = run_id or manifest.run_id
            # What lay here before --fresh is no snapshot of this run, unless somebody names it; and a local disk may
            # have served another store.
            if manifest.run_id == run_id or (asked is not None and tier == "remote"):
                copies.append(_Copy(tier, store, keys, manifest))
        if copies:
            return copies
        if damage is not None:
            raise damage
    where = f"run {settings.run!r} in {settings.store}"
    if any(is_meant(known) for _, _, found in surveys for known in found.quarantined):
        raise SnapshotCorrupt(f"{snapshot or 'what is asked for'} of {where} is quarantined; see harness ls")
    what = f"snapshot {snapshot}" if snapshot else "snapshot" if step is None else f"snapshot of step {step}"
    raise ConfigError(f"no {what} of {where}; see harness ls")


def _open_tiers(settings: Settings) -> Iterator[tuple[str, ObjectStore]]:
    if settings.local_tier is not None and Path(settings.local_tier).is_dir():
        yield "local", open_existing_store(settings.local_tier, settings)
    yield "remote", open_existing_store(settings.store, settings)


def _parse_id(snapshot: str | None, step: int | None) -> SnapshotId | None:
    if snapshot is None:
        return None
    if step is not None:
        raise ConfigError("a snapshot is named by --snapshot or by --step, not by both")
    try:
        return SnapshotId.parse(snapshot)
    except ValueError as err:
        raise ConfigError(f"{err}; harness ls shows what there is") from err


def _stands(copy: _Copy) -> bool:
    try:
        copy.store.stat(copy.keys.commit(copy.manifest.id), deadline=Deadline.after(_CALL_S))
    except NotFound:
        return False
    return True


# What is in the file -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """A file before its bytes are there, and where they come from.

    Attributes:
        layout: the safetensors file.
        torch_document: what the torch file says that is made of it; `None` where it is the target itself.
        shards: the snapshot's shards, their headers parsed but not yet verified.
    """

    layout: FileLayout
    torch_document: bytes | None
    shards: Sequence[tuple[ShardEntry, ShardLayout]]


def _plan(copy: _Copy, only: str | None, is_torch: bool) -> _Plan:
    manifest = copy.manifest
    if len(manifest.parts) != 1:
        raise ConfigError(f"{manifest.id} is of {len(manifest.parts)} ranks; only one rank's can be exported")
    part = manifest.parts[0]
    picked = document.pick(bytes(part.state), only)
    shards = [(shard, _read_header(copy, shard, number)) for number, shard in enumerate(part.shards)]
    stored = _stored_tensors(shards)
    if is_torch:
        return _Plan(document.lay_out_image(picked, stored), document.encode(picked), shards)
    # "format" is what transformers asks for.
    metadata = {"format": "pt", "run": copy.keys.run, "snapshot": str(manifest.id), "step": str(manifest.step)}
    return _Plan(document.lay_out_plain(picked, stored, metadata), None, shards)


# Reading shards ------------------------------------------------------------------------------------------------------


def _read_header(copy: _Copy, shard: ShardEntry, number: int) -> ShardLayout:
    """A shard's layout, from bytes that are compared later, when its chunks are read (`_read_shard`)."""
    key = copy.keys.payload(copy.manifest.directory, shard.name)
    size = copy.store.stat(key, deadline=Deadline.after(_CALL_S)).size
    if size != shard.size:
        raise SnapshotCorrupt(f"{key}: {size} bytes, {shard.size} were committed")
    first = bytearray(8)
    copy.store.get(key, memoryview(first), deadline=Deadline.after(_CALL_S))
    header = bytearray(header_bytes(bytes(first), shard.size))
    copy.store.get(key, memoryview(header), deadline=Deadline.after(_CALL_S))
    return parse_header(bytes(header), shard.size, number)


def _stored_tensors(shards: Sequence[tuple[ShardEntry, ShardLayout]]) -> dict[str, Placed]:
    stored: dict[str, Placed] = {}
    for shard, layout in shards:
        for placed in layout.tensors:
            if placed.name in stored:
                raise SnapshotCorrupt(f"{shard.name}: tensor {placed.name[:120]!r} is in another shard too")
            stored[placed.name] = placed
    return stored


def _read_shard(
    copy: _Copy, shard: ShardEntry, layout: ShardLayout, wanted: Sequence[Placed], scratch: memoryview
) -> Iterator[tuple[int, memoryview]]:
    """The chunks of a shard that hold its header or a wanted tensor, each compared with its digest.

    Yields:
        Where in the shard a piece begins, and its bytes, which are valid until the next. What a piece holds counts only
        once the iteration has come to its end.
    """
    key = copy.keys.payload(copy.manifest.directory, shard.name)
    needed = [Placed("", "U8", (), 0, len(layout.header)), *wanted]
    for number, expected in enumerate(shard.chunks):
        begin = number * shard.chunk_bytes
        end = min(begin + shard.chunk_bytes, shard.size)
        nearest = bisect_right(needed, begin, key=_end)
        if nearest == len(needed):
            return
        if needed[nearest].offset >= end:
            continue
        crc = 0
        for offset in range(begin, end, len(scratch)):
            piece = scratch[: min(len(scratch), end - offset)]
            copy.store.get(key, piece, offset=offset, deadline=Deadline.after(_CALL_S))
            crc = crc64nvme(piece, crc)
            parsed = layout.header[offset : offset + len(piece)]
            if piece[: len(parsed)] != parsed:  # else what was parsed would not be what is verified
                raise SnapshotCorrupt(f"{key}: two reads of its header differ")
            yield offset, piece
        if format_crc(crc) != expected:
            raise SnapshotCorrupt(f"{key}: chunk {number} of {len(shard.chunks)} is not what was committed")


def _end(placed: Placed) -> int:
    return placed.offset + placed.size


# Writing the file ----------------------------------------------------------------------------------------------------


def _check_target(target: Path, force: bool) -> bool:
    """Whether `target` is to be a torch file."""
    if target.suffix not in (".safetensors", ".pt", ".pth"):
        raise ConfigError(f"{target}: a file to export to ends in .safetensors, .pt or .pth")
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: there is no directory {target.parent}")
    _check_free(target, force)
    return target.suffix != ".safetensors"


def _check_free(target: Path, force: bool) -> None:
    if target.is_dir() or (target.exists() and not force):
        raise ConfigError(f"{target} is there already: {'it is a directory' if target.is_dir() else 'see --force'}")


def _write(copy: _Copy, plan: _Plan, target: Path, force: bool, mode: int) -> None:
    with _errors(target), _draft(target, mode) as image:
        room = shutil.disk_usage(target.parent).free
        # A torch file, and beside it what it is made of.
        needed = plan.layout.size * (1 if plan.torch_document is None else 2)
        if needed > room:
            raise NoSpace(f"{target}: {needed} bytes are needed there, and {room} are free; name another disk")
        _fill(copy, plan, image)
        if plan.torch_document is None:
            _name(image, target, force)
            return
        with _draft(target, mode) as draft:
            _convert(image, draft, plan.torch_document)
            _name(draft, target, force)


def _fill(copy: _Copy, plan: _Plan, image: Path) -> None:
    """Write every byte that was planned: the shards are read in their order, the file is written here and there."""
    scratch = memoryview(bytearray(CHUNK_BYTES))
    with image.open("r+b") as file:
        fd = file.fileno()
        os.ftruncate(fd, plan.layout.size)
        _put(fd, memoryview(plan.layout.header), 0)
        for shard, layout in plan.shards:
            wanted = [placed for placed in layout.tensors if placed.name in plan.layout.targets]
            if not wanted:
                continue
            for offset, piece in _read_shard(copy, shard, layout, wanted, scratch):
                _scatter(fd, piece, offset, wanted, plan.layout.targets)


def _scatter(
    fd: int, piece: memoryview, offset: int, wanted: Sequence[Placed], targets: Mapping[str, Sequence[int]]
) -> None:
    """Put what a piece of a shard holds of the wanted tensors where it belongs."""
    for placed in wanted[bisect_right(wanted, offset, key=_end) :]:
        if placed.offset >= offset + len(piece):
            return
        begin, end = max(placed.offset, offset), min(_end(placed), offset + len(piece))
        for target in targets[placed.name]:
            _put(fd, piece[begin - offset : end - offset], target + begin - placed.offset)


def _put(fd: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(fd, data, at)
        data, at = data[count:], at + count


def _convert(image: Path, draft: Path, torch_document: bytes) -> None:
    """Make a torch file of a safetensors file, in a process that may have torch."""
    command = [*safe_python("harness.trainer.export"), str(image), str(draft)]
    done = subprocess.run(command, input=torch_document, capture_output=True, check=False)
    if done.returncode != 0:
        told = done.stderr.decode(errors="replace").strip().splitlines()
        raise HarnessError(f"the torch file was not written ({done.returncode}): {told[-1] if told else 'no word'}")


@contextlib.contextmanager
def _draft(target: Path, mode: int) -> Generator[Path]:
    """A new hidden file beside `target`. It goes at the end, unless it was given a name."""
    draft = target.with_name(f".harness-export-{secrets.token_hex(8)}")
    draft.touch(mode, exist_ok=False)
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _name(draft: Path, target: Path, force: bool) -> None:
    """Let `draft` become `target`, whole and durable."""
    _sync(draft)
    _check_free(target, force)  # it may have come meanwhile
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
