"""Aside: keeps a checkpoint's files as they are now, whatever the program does with them afterwards.

Owns the folder for them, on the same file system, and how a file gets there. What changes meanwhile is no checkpoint.

    the same blocks (reflink), at no cost ─▶ else a hard link, if its files are not written again ─▶ else a copy
    inode, size and time of each file: the same before and after
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cloud.digest import Digester
from cloud.store import Receipt
from harness.core.manifest import ShardEntry
from harness.core.snapshot import file_name
from harness.snapshots.commit import entry_of
from harness.watch.look import Seen
from harness.watch.ours import ASIDE, folder_of

_FICLONE = 0x40049409
_PIECE = 4 << 20
_NO_CLONE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY)
_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class Changed(Exception):
    """A file of the checkpoint has changed, or is gone. `path` is the first one."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} has changed while it was set aside")
        self.path = path


@dataclass(frozen=True)
class KeptFile:
    """A file that was set aside.

    Attributes:
        path: where it lies in the watched directory.
        source: where it is kept.
        entry: its size and sums, under its name in a snapshot.
    """

    path: str
    source: Path
    entry: ShardEntry


@dataclass(frozen=True)
class Kept:
    """A checkpoint that was set aside.

    Attributes:
        folder: where it is kept.
        files: its files, in the order of their paths.
        how: "reflink", "link" or "copy": the costliest way that a file took.
    """

    folder: Path
    files: tuple[KeptFile, ...]
    how: str

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.entry.size for file in self.files)

    def let_go(self) -> None:
        """Delete what is kept. The program's own files stay."""
        shutil.rmtree(self.folder, ignore_errors=True)


def set_aside(
    root: Path,
    files: Mapping[str, Seen],
    name: str,
    *,
    may_link: bool,
    given_up: Callable[[], bool] = lambda: False,
) -> Kept:
    """Keep files as they are now. Blocks while they are read once: their sums are known afterwards.

    Args:
        root: the watched directory.
        files: what to keep, as it was judged.
        name: of the folder.
        may_link: whether the program never writes to these files again.
        given_up: asked between pieces.

    Raises:
        Changed: a file is not what was judged; nothing is kept.
        OSError: there is no room, or the disk failed; nothing is kept.
        InterruptedError: `given_up` has said so.
    """
    folder = folder_of(root) / ASIDE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kept, ways = [], set()
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        for index, (path, seen) in enumerate(sorted(files.items())):
            target = folder / f"{index:05d}"
            how, receipt = _keep(root, path, seen, target, may_link=may_link, given_up=given_up)
            ways.add(how)
            kept.append(KeptFile(path, target, entry_of(file_name(0, 1, index), receipt)))
        for path, seen in files.items():  # all of them were there at one moment
            _check_same(root, path, seen)
        undo.pop_all()
    return Kept(folder, tuple(kept), next((how for how in ("copy", "link") if how in ways), "reflink"))


def sweep(root: Path) -> None:
    """Delete what an earlier agent has kept, and has not uploaded to its end."""
    shutil.rmtree(folder_of(root) / ASIDE, ignore_errors=True)


def _keep(
    root: Path, path: str, seen: Seen, target: Path, *, may_link: bool, given_up: Callable[[], bool]
) -> tuple[str, Receipt]:
    """Keep one file; return how, and its sums."""
    try:
        source = os.open(root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be a link, or a pipe by now
    except OSError as err:
        if err.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            raise
        raise Changed(path) from err
    try:
        if Seen.of(os.fstat(source)) != seen:
            raise Changed(path)
        made = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if _clone(source, made):
                return "reflink", _summed(made, given_up)
            linked = may_link and not (root / path).is_symlink() and _link(root / path, target)
            receipt = _summed(source, given_up) if linked else _copied(source, made, given_up)
            if Seen.of(os.fstat(source)) != seen or (linked and Seen.of(target.stat()) != seen):
                raise Changed(path)
            return "link" if linked else "copy", receipt
        finally:
            os.close(made)
    finally:
        os.close(source)


def _link(path: Path, target: Path) -> bool:
    """Give a file a second name, in place of an empty one. Return whether its file system can do that."""
    linked = target.with_suffix(".link")
    try:
        os.link(path, linked, follow_symlinks=False)
    except FileNotFoundError as err:
        raise Changed(str(path)) from err
    except OSError as err:
        if err.errno not in _NO_LINK:
            raise
        return False
    linked.replace(target)
    return True


def _check_same(root: Path, path: str, seen: Seen) -> None:
    """Raise Changed unless a file is what it was. One that is gone by now was kept before."""
    with contextlib.suppress(FileNotFoundError):
        if Seen.of((root / path).stat()) != seen:
            raise Changed(path)


def _clone(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as err:
        if err.errno not in _NO_CLONE:
            raise
        return False
    return True


def _copied(source: int, target: int, given_up: Callable[[], bool]) -> Receipt:
    return _read(source, given_up, lambda piece: _write(target, piece))


def _summed(source: int, given_up: Callable[[], bool]) -> Receipt:
    return _read(source, given_up, lambda piece: None)


def _read(source: int, given_up: Callable[[], bool], use: Callable[[memoryview], None]) -> Receipt:
    """Read a file once, in pieces, and leave none of it in the page cache."""
    digest, at, scratch = Digester(), 0, memoryview(bytearray(_PIECE))
    while True:
        if given_up():
            raise InterruptedError
        count = os.preadv(source, [scratch], at)
        if not count:
            break
        use(scratch[:count])
        digest.update(scratch[:count])
        at += count
    with contextlib.suppress(OSError):
        os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.receipt()


def _write(target: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(target, piece) :]
