"""Directories below a root, each opened from its parent; and the file system's errors, turned into CloudErrors.

Owns the root, every open directory on the way to a file, and how names are made durable; knows neither drafts nor the
content of files. Never follows a symbolic link below the root: every directory is opened with O_NOFOLLOW.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator, Sequence
from pathlib import Path

from cloud.directory.filesystem import FileSystem
from cloud.errors import Denied, Full, OutcomeUnknown, Unavailable, Unreadable
from cloud.notice import Deadline

MOST_ATTEMPTS = 100
"""How often a put makes its directory again after a delete pruned it. A bound for bugs, not for races."""

NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Descriptors = list[int]
"""Open directories, from the root down."""


class Tree:
    """The directories of one store. Safe for threads.

    Attributes:
        root: absolute. If it vanishes it is not made again: an unmounted disk is not an empty store.
        fs: the system calls.
        file_mode: the mode that a new file is created with; the umask is subtracted from it, as usual.
        directory_mode: the same for a new directory. Existing files and directories keep their own modes.
    """

    def __init__(self, root: Path, fs: FileSystem, *, shared: bool = False) -> None:
        """Make `root` if it does not exist. Raises CloudError if it can be neither found nor made."""
        self.root, self.fs = root, fs
        self.file_mode, self.directory_mode = (0o666, 0o777) if shared else (0o600, 0o700)
        with self.errors("open the store"):
            self._identity = self._make_root()

    @contextlib.contextmanager
    def descent(self, parents: Sequence[str], *, make: bool = False) -> Generator[Descriptors]:
        """Open, for a `with` block, the directories from the root to the last of `parents`, or as far as they exist.

        With `make`, missing directories are made.
        """
        with contextlib.ExitStack() as opened:
            directories = [self.open_root()]
            opened.callback(self.fs.close, directories[0])
            for name in parents:
                try:
                    fd = self._open_below(name, directories[-1], make=make)
                except (FileNotFoundError, NotADirectoryError):
                    if make:
                        raise
                    break
                directories.append(fd)
                opened.callback(self.fs.close, fd)
            yield directories

    def open_root(self) -> int:
        """Return a descriptor of the root, which the caller closes. Raises OSError, Unavailable."""
        try:  # the root itself may be a symbolic link: that is its owner's choice
            fd = self.fs.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as err:
            raise Unavailable(f"{self.root} is gone: removed or unmounted since the store was opened") from err
        try:
            if not self._is_root(self.fs.stat(fd)):
                raise Unavailable(f"another directory is at {self.root} now: was a disk unmounted, or mounted over it?")
        except BaseException:
            self.fs.close(fd)
            raise
        return fd

    def _is_root(self, found: os.stat_result) -> bool:
        """Whether `found` is the root that was opened first. After a remount it may have another device number."""
        device, inode, file_system = self._identity
        if found.st_ino != inode:
            return False
        if found.st_dev != device and self.fs.statvfs(self.root).f_fsid != file_system:
            return False
        self._identity = found.st_dev, inode, file_system
        return True

    def prune(self, parents: Sequence[str], directories: Sequence[int]) -> int:
        """Remove open directories that are empty, deepest first. Return the index of the deepest one left."""
        depth = len(directories) - 1
        while depth > 0:
            try:
                self.fs.rmdir(parents[depth - 1], dir_fd=directories[depth - 1])
            except OSError:
                break  # not empty, or not ours to remove; a put that loses its directory to this makes it again
            depth -= 1
        return depth

    def settle(self, directories: Sequence[int], key: str) -> None:
        """Make the names in open directories durable. Raises OutcomeUnknown: they exist, but may not be durable."""
        try:
            for fd in reversed(directories):
                self.fs.fsync(fd)
        except OSError as err:
            raise OutcomeUnknown(f"{key} is in {self.root}, but its name may not be durable: {err.strerror}") from err

    def _make_root(self) -> tuple[int, int, int]:
        """Make the root if it does not exist. Return its device, inode, and its file system's own identifier."""
        missing = []
        path = self.root
        while not path.exists():
            missing.append(path)
            path = path.parent
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self.fs.mkdir(path, self.directory_mode)
            fd = self.fs.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self.fs.fsync(fd)
            finally:
                self.fs.close(fd)
        fd = self.fs.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = self.fs.stat(fd)
        finally:
            self.fs.close(fd)
        return found.st_dev, found.st_ino, self.fs.statvfs(self.root).f_fsid

    def _open_below(self, name: str, directory: int, *, make: bool) -> int:
        try:
            return self.fs.open(name, _DIRECTORY, dir_fd=directory)
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):
            self.fs.mkdir(name, self.directory_mode, dir_fd=directory)
        return self.fs.open(name, _DIRECTORY, dir_fd=directory)

    # ---------------------------------------------------------------------------------------------------------- words

    @contextlib.contextmanager
    def errors(self, what: str, needed_bytes: int = 0) -> Generator[None]:
        """Turn OSErrors into CloudErrors that name the key, the directory and the kernel's own message."""
        try:
            yield
        except OSError as err:
            words = f"{what} in {self.root}: {err.strerror or err}"
            if err.errno in NO_ROOM:
                raise Full(f"{words}; {needed_bytes:,} bytes needed, {self._room_or_nothing():,} free") from err
            if err.errno in _NOT_ALLOWED:
                raise Denied(words) from err
            raise Unavailable(words) from err

    @contextlib.contextmanager
    def reading(self, key: str) -> Generator[None]:
        """Act as `errors` for reads of `key`; EIO becomes Unreadable, which says nothing about other objects."""
        with self.errors(key):
            try:
                yield
            except OSError as err:
                if err.errno != errno.EIO:
                    raise
                raise Unreadable(f"{key} in {self.root}: {err.strerror or err}") from err

    def check_time(self, deadline: Deadline, what: str) -> None:
        """Raise Unavailable if the deadline has passed before `what` was done."""
        if deadline.expired:
            raise Unavailable(f"no time left to {what} in {self.root}")

    def room(self) -> int:
        """Return the bytes that an unprivileged process may still write. Raises OSError."""
        room = self.fs.statvfs(self.root)
        return room.f_bavail * room.f_frsize

    def _room_or_nothing(self) -> int:
        try:
            return self.room()
        except OSError:
            return 0
