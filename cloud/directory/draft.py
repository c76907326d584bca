"""Drafts: files that no reader sees yet, from the first byte to the moment at which they get their object's name.

Owns how a file is written and made durable before any reader can see it: all bytes, their sums, the size, fdatasync.
`store.py` owns whether a draft gets its name by rename or by link, and what follows.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from cloud.digest import Digester
from cloud.directory import direct
from cloud.directory.hidden import DRAFT, Reservation, create
from cloud.directory.tree import MOST_ATTEMPTS, NO_ROOM, Tree
from cloud.errors import Unavailable
from cloud.notice import Deadline
from cloud.source import Chunks
from cloud.store import CHUNK_BYTES, Progress, Receipt

_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Draft:
    """A file that no reader sees yet.

    Attributes:
        directories: open directories, from the root down to the one that holds the draft and its target.
        name: the draft's name in the last of them.
        fd: open for writing, and locked.
    """

    directories: Sequence[int]
    name: str
    fd: int

    @property
    def directory(self) -> int:
        """The open directory that holds the draft."""
        return self.directories[-1]


class Drafts:
    """Begins, fills, names and discards the drafts of one store. Safe for threads."""

    def __init__(self, tree: Tree, io: direct.DirectIO, reservation: Reservation) -> None:
        """Write nothing yet.

        Args:
            tree: the directories of the store.
            io: whether the file system allows direct I/O.
            reservation: gives room back to a write that finds none.
        """
        self._tree, self._fs, self._direct, self._reservation = tree, tree.fs, io, reservation

    @contextlib.contextmanager
    def begin(self, parents: Sequence[str]) -> Generator[Draft]:
        """Make a locked file beside the target, and missing directories. Its name is removed at the end in any case."""
        with contextlib.ExitStack() as opened:
            for attempt in range(MOST_ATTEMPTS):
                try:
                    directories = opened.enter_context(self._tree.descent(parents, make=True))
                    name, fd = create(self._tree, DRAFT, directories[-1])
                    break
                except FileNotFoundError:
                    opened.close()  # a delete pruned the directory before our file was in it: make it again
                    if attempt == MOST_ATTEMPTS - 1:
                        raise
            opened.callback(self._fs.close, fd)
            draft = Draft(directories, name, fd)
            opened.callback(self.discard, draft)
            yield draft

    def fill(self, draft: Draft, key: str, chunks: Chunks, deadline: Deadline, progress: Progress | None) -> Receipt:
        """Write all chunks and make them durable, by direct I/O if they are aligned. Return size and sums.

        Raises:
            OSError: the file system has failed.
            Unavailable: there is no time left, or the file does not have the size of the source.
        """
        write = self._write_directly if chunks.aligned else self._write_buffered
        receipt = write(draft, key, chunks, deadline, progress)
        self._sync(draft, key, chunks.size, deadline)
        return receipt

    def link(self, draft: Draft, name: str) -> bool:
        """Link the draft to its object's name. Return False if another file has that name."""
        try:
            self._fs.link(
                draft.name, name, src_dir_fd=draft.directory, dst_dir_fd=draft.directory, follow_symlinks=False
            )
        except FileExistsError:
            # NFS repeats a link whose reply was lost, and then gets EEXIST for its own success (open(2), O_EXCL).
            return self._fs.fstat(draft.fd).st_nlink > 1
        return True

    def discard(self, draft: Draft) -> None:
        """Remove the draft's own name, if the draft still has it. A failure only leaves work for `sweep`."""
        with contextlib.suppress(OSError):
            self._fs.unlink(draft.name, dir_fd=draft.directory)

    def _write_buffered(
        self, draft: Draft, key: str, chunks: Chunks, deadline: Deadline, progress: Progress | None
    ) -> Receipt:
        digester = Digester()
        for at in range(0, chunks.size, CHUNK_BYTES):
            self._tree.check_time(deadline, f"write {key}: {at} of {chunks.size} bytes are written")
            with chunks.take(at) as chunk:
                digester.update(chunk)
                self._write(draft.fd, chunk)
                count = len(chunk)
            if progress is not None:
                progress(count)
        return digester.receipt()

    def _write_directly(
        self, draft: Draft, key: str, chunks: Chunks, deadline: Deadline, progress: Progress | None
    ) -> Receipt:
        """Write by direct I/O, or through the page cache if the file system refuses that, in several threads."""
        size = chunks.size
        with contextlib.ExitStack() as stack:
            fd = None
            if self._direct.usable:
                try:
                    fd = self._fs.open(draft.name, _WRITE | os.O_DIRECT, dir_fd=draft.directory)
                    stack.callback(self._fs.close, fd)
                except OSError as err:
                    if not self._direct.refuses(err):
                        raise
            writer = direct.Writer(self._fs, self._direct, draft.fd, fd, chunks, self._reservation.give_back)
            return writer.run(
                lambda written: self._tree.check_time(deadline, f"write {key}: {written} of {size} bytes are written"),
                progress,
            )

    def _write(self, fd: int, piece: memoryview) -> None:
        while piece:
            try:
                count = self._fs.write(fd, piece)
            except InterruptedError:
                continue
            except OSError as err:
                if err.errno in NO_ROOM and self._reservation.give_back(len(piece)):
                    continue
                raise
            if count == 0:
                raise OSError(errno.EIO, "a write wrote nothing")
            piece = piece[count:]

    def _sync(self, draft: Draft, key: str, size: int, deadline: Deadline) -> None:
        found = self._fs.fstat(draft.fd).st_size
        if found != size:
            raise Unavailable(f"{key} in {self._tree.root}: {size} bytes were to be written, and the file has {found}")
        self._tree.check_time(deadline, f"sync {key}")
        self._fs.fdatasync(draft.fd)
