"""Hidden files below a store's root: each has one writer, which locks it while it lives. A sweep removes the unlocked.

Owns their names, their locks, and the file that holds room (the reservation); knows no objects.

- The writer of a hidden file flocks it. If another process can lock the file, its writer is dead, whatever host,
  container or boot it was written in; `sweep` removes such files. (A pid in the name would not prove that: pids are
  used again after a reboot, and every container has a pid 1.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import threading

from cloud.directory.tree import Tree
from cloud.errors import CloudError

DRAFT = ".tmp"
RESERVE = ".reserve"
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def create(tree: Tree, kind: str, directory: int) -> tuple[str, int]:
    """Create an empty hidden file, locked while its descriptor is open. Host and pid in its name are for people."""
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:64]
    while True:
        name = f"{kind}-{host}-{os.getpid()}-{secrets.token_hex(8)}"
        fd = tree.fs.open(name, _CREATE, tree.file_mode, dir_fd=directory)
        try:
            tree.fs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept = tree.fs.fstat(fd).st_nlink > 0
        except BlockingIOError:
            kept = False
        except OSError:
            kept = True  # no locks on this file system: then a sweep cannot lock it either, and leaves it alone
        if kept:
            return name, fd
        tree.fs.close(fd)  # a sweep came between open and flock


def sweep(tree: Tree, kind: str, parents: tuple[str, ...] = ()) -> int:
    """Remove the files of one kind below `parents` whose writers have died. Return how many were removed.

    A deeper directory that cannot be read is skipped: it is another user's run in a common store, or has a bad block.

    Raises:
        CloudError: `parents` themselves cannot be read.
    """
    with tree.errors("sweep"), tree.descent(parents) as directories:
        if len(directories) <= len(parents):
            return 0
        with tree.fs.scandir(directories[-1]) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        abandoned = [name for name, is_directory in found if not is_directory and name.startswith(f"{kind}-")]
        removed = sum(_remove_if_abandoned(tree, name, directories[-1]) for name in abandoned)
        if removed:
            tree.prune(parents, directories)
    if kind == DRAFT:  # reservations lie in the root only
        for name, is_directory in found:
            if is_directory and not name.startswith("."):
                with contextlib.suppress(CloudError):
                    removed += sweep(tree, kind, (*parents, name))
    return removed


class Reservation:
    """Room that a hidden, preallocated file in the root holds. It is locked like a draft: it ends with its process."""

    def __init__(self, tree: Tree) -> None:
        """Holds nothing yet."""
        self._tree, self._fs = tree, tree.fs
        self._lock = threading.Lock()
        self._file: tuple[str, int] | None = None
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes held now."""
        return self._size

    def resize(self, size: int) -> None:
        """Hold exactly `size` bytes, or raise OSError and hold as much as before."""
        with self._lock:
            if size > self._size:
                self._grow(size)
            elif size < self._size:
                self._shrink(size)

    def give_back(self, size: int) -> bool:
        """Free `size` bytes, or all that are held if those are fewer. Return whether any were held."""
        with self._lock:
            if not self._size:
                return False
            self._shrink(max(0, self._size - size))
            return True

    def _grow(self, size: int) -> None:
        if self._file is None:
            root = self._tree.open_root()
            try:
                self._file = create(self._tree, RESERVE, root)
            finally:
                self._fs.close(root)
        _, fd = self._file
        try:
            self._fs.fallocate(fd, size)
        except OSError as err:
            self._shrink(self._size)
            if err.errno != errno.EOPNOTSUPP:
                raise
            # The file system cannot hold room (NFS before 4.2): all that can be done is to compare with the free bytes.
            if self._tree.room() < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from err
            return
        self._size = size

    def _shrink(self, size: int) -> None:
        assert self._file is not None
        name, fd = self._file
        self._fs.ftruncate(fd, size)
        self._size = size
        if not size:
            self._file = None
            self._fs.close(fd)
            root = self._tree.open_root()
            try:
                self._fs.unlink(name, dir_fd=root)
            finally:
                self._fs.close(root)


def _remove_if_abandoned(tree: Tree, name: str, directory: int) -> bool:
    try:
        fd = tree.fs.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return False  # gone already, or not ours to touch
    try:
        tree.fs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        tree.fs.unlink(name, dir_fd=directory)
    except OSError:
        return False  # its writer lives
    finally:
        tree.fs.close(fd)
    return True
