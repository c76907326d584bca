"""The reading side of a DirectoryStore: objects opened, read past the page cache or through it, and listed.

Owns which files count as objects (regular files whose path is a key) and the order of a listing; writes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Generator, Sequence

from cloud.directory import direct
from cloud.directory.tree import Tree
from cloud.errors import NotFound, Truncated
from cloud.notice import Deadline
from cloud.store import CHUNK_BYTES, ObjectInfo, check_key

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a named pipe does not block
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO})  # a link; a socket
_Entries = list[tuple[str, int | None]]


class Objects:
    """Reads and lists the objects of one store. Safe for threads."""

    def __init__(self, tree: Tree, io: direct.DirectIO) -> None:
        """Keep `io`, which tells whether the file system allows direct I/O."""
        self._tree, self._fs, self._direct = tree, tree.fs, io

    @contextlib.contextmanager
    def opened(self, key: str, flags: int = 0) -> Generator[int]:
        """Open the object for the duration of the `with` block; yields a descriptor. Raises OSError, NotFound."""
        *parents, name = check_key(key).split("/")
        with self._tree.descent(parents) as directories:
            try:
                if len(directories) <= len(parents):
                    raise FileNotFoundError
                fd = self._fs.open(name, _READ | flags, dir_fd=directories[-1])
            except FileNotFoundError:
                raise NotFound(f"{key} is not in {self._tree.root}") from None
            except OSError as err:
                if err.errno in _NO_FILE:
                    raise NotFound(f"{key} in {self._tree.root} is not a file") from err
                raise
        try:
            if not stat.S_ISREG(self._fs.fstat(fd).st_mode):
                raise NotFound(f"{key} in {self._tree.root} is not a file")
            yield fd
        finally:
            self._fs.close(fd)

    def read_into(self, key: str, into: memoryview, offset: int, deadline: Deadline) -> None:
        """Fill `into` from `offset` on, by direct I/O if `into` is large, and both `into` and `offset` are aligned.

        Raises:
            OSError: the file system has failed.
            NotFound: there is no such object.
            Truncated: the object ends before `into` is full.
            Unavailable: there is no time left.
        """
        done = self._read_directly(key, into, offset, deadline)
        if done < len(into) or not into:
            with self.opened(key) as fd:
                self.read_exactly(fd, into[done:], offset + done, key, deadline)

    def read_exactly(self, fd: int, into: memoryview, offset: int, key: str, deadline: Deadline) -> None:
        """Fill `into` from `offset` of an open object, through the page cache."""
        done = 0
        while done < len(into):
            self._tree.check_time(deadline, f"read {key}: {done} of {len(into)} bytes are read")
            try:
                count = self._fs.preadv(fd, [into[done : done + CHUNK_BYTES]], offset + done)
            except InterruptedError:
                continue
            if count == 0:
                raise Truncated(
                    f"{key} in {self._tree.root} has {offset + done} bytes; {offset + len(into)} were expected"
                )
            done += count

    def list(self, prefix: str, after: str, deadline: Deadline) -> Generator[ObjectInfo]:
        """Yield objects in key order; each directory is read when its turn comes. Raises CloudError."""
        return self._walk(tuple(prefix.split("/")[:-1]), prefix, after, deadline)

    def _walk(self, parents: tuple[str, ...], prefix: str, after: str, deadline: Deadline) -> Generator[ObjectInfo]:
        self._tree.check_time(deadline, f"list {prefix!r}")
        for key, size in self._matches(parents, prefix, after):
            if size is None:
                yield from self._walk(tuple(key.split("/")[:-1]), prefix, after, deadline)
            else:
                yield ObjectInfo(key, size)

    def _matches(self, parents: tuple[str, ...], prefix: str, after: str) -> Sequence[tuple[str, int | None]]:
        """Return the entries that can match, in key order: files with sizes, directories as "key/" and `None`.

        A directory is sorted by its name and the slash, since "a.json" < "a/b" < "a0".
        """
        base = "".join(f"{name}/" for name in parents)
        found: _Entries = []
        with self._tree.errors(prefix), self._tree.descent(parents) as directories:
            if len(directories) <= len(parents):
                return found
            with self._fs.scandir(directories[-1]) as entries:
                for entry in entries:
                    if not _is_segment(entry.name):
                        continue  # a draft, a reservation, a file of another program
                    if entry.is_dir(follow_symlinks=False):
                        key = f"{base}{entry.name}/"
                        if _may_hold(key, prefix, after):
                            found.append((key, None))
                    elif entry.is_file(follow_symlinks=False):
                        key = base + entry.name
                        if key.startswith(prefix) and key > after:
                            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                                found.append((key, entry.stat(follow_symlinks=False).st_size))
        return sorted(found, key=lambda item: item[0])

    def _read_directly(self, key: str, into: memoryview, offset: int, deadline: Deadline) -> int:
        """Fill `into` by direct I/O as far as possible. Return the number of bytes read."""
        if not self._direct.usable or offset % direct.BLOCK or not direct.is_aligned(into):
            return 0
        words = f"of {len(into)} bytes are read"
        try:
            with self.opened(key, os.O_DIRECT) as fd:
                return direct.read(
                    self._fs,
                    fd,
                    into,
                    offset,
                    lambda done: self._tree.check_time(deadline, f"read {key}: {done} {words}"),
                )
        except OSError as err:
            if not self._direct.refuses(err):
                raise
            return 0


def _is_segment(name: str) -> bool:
    try:
        check_key(name)
    except ValueError:
        return False
    return True


def _may_hold(directory: str, prefix: str, after: str) -> bool:
    """Whether a key below `directory` (with its slash) can start with `prefix` and be greater than `after`."""
    return (directory.startswith(prefix) or prefix.startswith(directory)) and (
        directory > after or after.startswith(directory)
    )
