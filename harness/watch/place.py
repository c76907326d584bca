"""Place: lays a checkpoint back into the watched directory, so that the program finds it, and nothing torn beside it.

Owns every change to the program's own directory. Nothing is overwritten, and nothing is deleted: what is in the way, or
torn, moves into a folder of ours, and stays there.

    fetch into a folder of ours, verified, durable ─▶ move what is in the way ─▶ rename ─▶ pointers, last

A death in between leaves the old checkpoint, or the new one, or neither under its name and both in our folder.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.core.manifest import FileEntry, Manifest
from harness.core.snapshot import RunKeys
from harness.errors import SnapshotCorrupt
from harness.ipc.write import write_at
from harness.snapshots.fetch import Retry, StoredShard, once
from harness.watch.adapter import Pointer
from harness.watch.ours import FETCHED, MOVED, POINTER, folder_of
from harness.watch.patterns import NUMBERS, pattern
from harness.watch.record import Record, decode


def fetch_files(
    folder: Path,
    store: ObjectStore,
    keys: RunKeys,
    manifest: Manifest,
    deadline: Callable[[], Deadline],
    given_up: Callable[[], bool] = lambda: False,
    retry: Retry = once,
) -> None:
    """Fetch a snapshot's files into a folder of ours, each byte compared, and durable.

    Args:
        folder: is deleted first, then made.
        store: the store that holds the snapshot.
        keys: keys of the run.
        manifest: of the snapshot.
        deadline: makes the deadline of each read.
        given_up: asked between reads.
        retry: makes each request.

    Raises:
        SnapshotCorrupt: a file is not what was committed.
        CloudError: a file could not be read.
        OSError: there is no room, or the disk failed.
        InterruptedError: `given_up` has said so.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record = decode(manifest.parts[0].state)
    when = max(record.modified_ns, record.order)  # the order is later where this machine's clock was behind another's
    for entry in files_of(manifest):
        target = folder / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shard = StoredShard(store, keys.payload(manifest.directory, entry.name), entry)
        with target.open("xb") as file, shard.unless_right(retry(partial(shard.stat, deadline()))):
            for offset, piece in shard.chunks(deadline, retry=retry):
                if given_up():
                    raise InterruptedError
                write_at(file.fileno(), piece, offset)
            os.utime(file.fileno(), ns=(when, when))  # which checkpoint is newer may depend on it
            os.fsync(file.fileno())
    for path in record.folders:
        (folder / path).mkdir(parents=True, exist_ok=True)
    for path, to in record.links.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).symlink_to(to)
    _sync_folders(folder)


def put_in_place(root: Path, record: Record, pointers: Sequence[Pointer], files: Collection[str]) -> None:
    """Give the files that were fetched into our folder their own names, and then the pointers what they say.

    Args:
        root: the watched directory.
        record: of the snapshot.
        pointers: of its adapter.
        files: paths of the snapshot's files.
    """
    fetched, inside = folder_of(root) / FETCHED, f"{record.name}/"
    if record.is_directory and (fetched / record.name).is_dir():
        _rename(root, fetched, record.name)
    for path in sorted(files):
        if not (record.is_directory and path.startswith(inside)):
            _rename(root, fetched, path)
    for pointer in pointers:
        point_to(root, pointer, record.texts, record.name)
    shutil.rmtree(fetched, ignore_errors=True)


def move_aside(root: Path, paths: Collection[str], why: str) -> Path | None:
    """Move files and directories, in this order, into a folder of ours; return it. `None` if none of them is there.

    Args:
        root: the watched directory.
        paths: of what is in the way, or torn.
        why: a word for the folder's name.
    """
    there = [path for path in paths if os.path.lexists(root / path)]
    if not there:
        return None
    folder = _new_folder(root, why)
    for path in there:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        (root / path).rename(target)
        _sync(target.parent)
        _sync((root / path).parent)
    return folder


def point_to(root: Path, pointer: Pointer, texts: Mapping[str, str], name: str) -> None:
    """Have a pointer name a checkpoint. What it said before is kept in a folder of ours.

    Args:
        root: the watched directory.
        pointer: what to change.
        texts: what the checkpoint's name says, by field.
        name: of the checkpoint.
    """
    plain = {field: str(int(text)) if field in NUMBERS else text for field, text in texts.items()}
    says = pattern(pointer.says).fill({**plain, "name": name, "root": str(root)})
    path = root / pointer.path
    if _leads_to(path, says) if pointer.is_link else _says(path, says):
        return
    draft = folder_of(root) / POINTER
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.unlink(missing_ok=True)
    if pointer.is_link:
        draft.symlink_to(says)
    else:
        with draft.open("x") as file:
            file.write(says)
            file.flush()
            os.fsync(file.fileno())
    move_aside(root, [pointer.path], "replaced")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.rename(path)
    _sync(path.parent)


def _leads_to(path: Path, says: str) -> bool:
    return path.is_symlink() and str(path.readlink()) == says


def _says(path: Path, says: str) -> bool:
    try:
        return path.is_file() and path.read_text().strip() == says
    except (OSError, UnicodeDecodeError):
        return False


def files_of(manifest: Manifest) -> list[FileEntry]:
    """Return the files of a snapshot. Raises SnapshotCorrupt if it has none: it is a Checkpointer's."""
    found = [entry for part in manifest.parts for entry in part.stored if isinstance(entry, FileEntry)]
    if not found:
        raise SnapshotCorrupt(f"{manifest.id}: it has no files")
    return found


def _rename(root: Path, fetched: Path, path: str) -> None:
    if not os.path.lexists(fetched / path):
        return  # an earlier start has done that
    move_aside(root, [path], "replaced")
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (fetched / path).rename(root / path)
    _sync((root / path).parent)


def _new_folder(root: Path, why: str) -> Path:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    number = 0
    while True:
        folder = folder_of(root) / MOVED / (f"{now}-{why}" if not number else f"{now}-{why}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
        number += 1


def _sync_folders(folder: Path) -> None:
    for below, _, _ in os.walk(folder):
        _sync(Path(below))


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
