"""DirectoryStore: objects as files below a directory; the one place where files reach a disk.

Owns the order of system calls that makes a file durable, and the room that is kept for the next one. A key is a path
below the root, so that `ls` tells the truth; names that start with a dot are this module's own and never listed.

The durability contract:

    put             draft beside the target → write all → check the size → fdatasync → rename → fsync the directories
    put_if_absent   the same up to fdatasync → link (EEXIST: AlreadyExists) → unlink the draft → fsync the directories
    copy            open the source, compare its size → link what is open (EEXIST: CannotCopy, but for a copy that was
                    made before: a draft is made and unlinked) → fsync the directories
    delete          unlink → remove the directories that it left empty → fsync the deepest one that remains

- rename replaces and link does not: that is the whole difference between a payload and a commit.
- "Write all" goes past the page cache where the object is large and the file system takes that (`direct.py`); the same
  bytes are written otherwise. fdatasync waits for either, and covers the size and the blocks that were allocated before
  they were written: it leaves out only times, which nobody reads.
- "The directories" are all from the target's up to the root. One that was there already may have been made a moment ago
  by a writer that has not synced it yet; syncing a clean directory costs microseconds.
- What is lost before rename or link is a draft, which no reader sees. Between rename or link and the directories' fsync
  a reader on the same host may see the complete object although power loss could still take its name away; whoever is
  told `AlreadyExists` has waited for that fsync. A failed fsync is never repeated on the same file: the kernel has
  dropped the pages by then (https://wiki.postgresql.org/wiki/Fsync_Errors). The draft goes, and the put fails.
- A draft is flocked by its writer, and goes by `sweep` once that has died (`hidden.py`).
- A copy is a second name of the same file: no room, no writing, and each name is deleted by itself. Nothing here writes
  into a file that has an object's name, so neither changes with the other; but a medium that rots takes both. The
  source is not read for that: as after a put, whoever wants to know what a disk holds reads it back when it is idle.
- Nothing below the root is reached through a symbolic link (`tree.py`).
- `a` and `a/b` cannot both be objects here, as they can in S3.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from cloud.directory import direct
from cloud.directory.draft import Drafts
from cloud.directory.filesystem import FileSystem
from cloud.directory.hidden import DRAFT, RESERVE, Reservation, create, sweep
from cloud.directory.read import Objects
from cloud.directory.tree import MOST_ATTEMPTS, Descriptors, Tree
from cloud.errors import AlreadyExists, CannotCopy, CloudError, CopyDiffers, NotFound, TooLarge
from cloud.notice import Deadline
from cloud.source import opened
from cloud.store import ObjectInfo, Progress, Receipt, Source, check_key, check_prefix

_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class DirectoryStore:
    """Objects as files below `root`. Safe for threads, and for any number of processes and hosts on one file system.

    Args:
        root: made if it is not there. If it vanishes later it is *not* made again: an unmounted disk is no empty store.
        fs: the system calls.
        shared: give new files and directories what the umask leaves; else they are this user's alone.

    Raises:
        CloudError: `root` can be neither found nor made.
    """

    def __init__(self, root: Path, *, fs: FileSystem | None = None, shared: bool = False) -> None:
        self.root = root.absolute()
        self.url = str(self.root)
        self._fs = fs or FileSystem()
        self._tree = Tree(self.root, self._fs, shared=shared)
        io = direct.DirectIO()
        self._objects = Objects(self._tree, io)
        self._reservation = Reservation(self._tree)
        self._drafts = Drafts(self._tree, io, self._reservation)
        with contextlib.suppress(CloudError):  # a read-only store holds no reservation of ours
            sweep(self._tree, RESERVE)

    # ------------------------------------------------------------------------------------------------------- writing

    def put(self, key: str, source: Source, *, deadline: Deadline, progress: Progress | None = None) -> Receipt:
        """See `ObjectStore.put`. `OutcomeUnknown` means that the object is there and its name may not be durable."""
        *parents, name = check_key(key).split("/")
        with (
            opened(self._fs, source) as chunks,
            self._tree.errors(key, chunks.size),
            self._drafts.begin(parents) as draft,
        ):
            receipt = self._drafts.fill(draft, key, chunks, deadline, progress)
            self._fs.rename(draft.name, name, src_dir_fd=draft.directory, dst_dir_fd=draft.directory)
            self._tree.settle(draft.directories, key)
        return receipt

    def put_if_absent(self, key: str, data: bytes, *, deadline: Deadline) -> None:
        """See `ObjectStore.put_if_absent`. `OutcomeUnknown` as with `put`."""
        *parents, name = check_key(key).split("/")
        with self._tree.errors(key, len(data)), self._drafts.begin(parents) as draft:
            with opened(self._fs, memoryview(data)) as chunks:
                self._drafts.fill(draft, key, chunks, deadline, None)
            taken = not self._drafts.link(draft, name)
            self._drafts.discard(draft)
            self._tree.settle(draft.directories, key)
            if taken:
                raise AlreadyExists(f"{key} is already in {self.root}")

    def copy(self, source: str, key: str, expected: Receipt, *, deadline: Deadline) -> None:
        """See `ObjectStore.copy`. `OutcomeUnknown` as with `put`."""
        *parents, name = check_key(key).split("/")
        with self._tree.errors(key), self._objects.opened(source) as fd:
            if (size := self._fs.fstat(fd).st_size) != expected.size:
                raise CopyDiffers(f"{source} in {self.root} has {size} bytes; {expected.size} were expected")
            self._tree.check_time(deadline, f"copy {key}")
            with self._named(fd, parents, name) as directories:
                self._tree.settle(directories, key)

    def delete(self, key: str, *, deadline: Deadline) -> None:
        """See `ObjectStore.delete`. Directories that become empty go too."""
        *parents, name = check_key(key).split("/")
        with self._tree.errors(key), self._tree.descent(parents) as directories:
            if len(directories) > len(parents):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    self._fs.unlink(name, dir_fd=directories[-1])
            self._fs.fsync(directories[self._tree.prune(parents, directories)])

    # ------------------------------------------------------------------------------------------------------- reading

    def get(self, key: str, into: memoryview, *, offset: int = 0, deadline: Deadline) -> None:
        """See `ObjectStore.get`. Past the page cache where `into` is large, and it and `offset` are aligned.

        `into` is memory: where it is the mapping of a file, the kernel may lose what a disk writes there.
        """
        with self._tree.reading(key):
            self._objects.read_into(key, into.cast("B"), offset, deadline)

    def read(self, key: str, *, limit_bytes: int, deadline: Deadline) -> bytes:
        """See `ObjectStore.read`."""
        with self._tree.reading(key), self._objects.opened(key) as fd:
            size = self._fs.fstat(fd).st_size
            if size > limit_bytes:
                raise TooLarge(f"{key} in {self.root} has {size} bytes; at most {limit_bytes} were expected")
            data = bytearray(size)
            self._objects.read_exactly(fd, memoryview(data), 0, key, deadline)
            return bytes(data)

    def stat(self, key: str, *, deadline: Deadline) -> ObjectInfo:
        """See `ObjectStore.stat`. A directory keeps no sums."""
        with self._tree.reading(key), self._objects.opened(key) as fd:
            return ObjectInfo(key, self._fs.fstat(fd).st_size)

    def list(self, prefix: str, *, after: str = "", deadline: Deadline) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. Reads the directories that can hold a match, each when its turn comes."""
        check_prefix(prefix)
        return self._objects.list(prefix, after, deadline)

    def unfinished(self, prefix: str, *, deadline: Deadline) -> Sequence[str]:
        """See `ObjectStore.unfinished`. A dead writer's draft goes by `sweep`."""
        check_prefix(prefix)
        return []

    def abandon(self, key: str, *, deadline: Deadline) -> None:
        """See `ObjectStore.abandon`."""
        check_key(key)

    def local_path(self, key: str) -> Path | None:
        """The object's own file. Others may read it, and nothing else."""
        return self.root / check_key(key)

    # ---------------------------------------------------------------------------------------------------------- room

    def free_bytes(self) -> int | None:
        """See `ObjectStore.free_bytes`: what an unprivileged process may still write, and what is reserved."""
        with self._tree.errors("ask for free space"):
            return self._tree.room() + self._reservation.size

    def reserve(self, size: int) -> None:
        """See `ObjectStore.reserve`. A hidden file holds the room; a put takes of it what it cannot get otherwise."""
        if size < 0:
            raise ValueError(f"cannot reserve {size} bytes")
        with self._tree.errors("a reservation", size):
            self._reservation.resize(size)

    def sweep(self) -> int:
        """Remove the drafts of writers that died; how many there were. Walks the whole tree, so call it when idle."""
        return sweep(self._tree, DRAFT) + sweep(self._tree, RESERVE)

    def close(self) -> None:
        """Give the reservation back."""
        with contextlib.suppress(OSError, CloudError):  # the lock goes with the descriptor; a later sweep has the rest
            self._reservation.resize(0)

    # -------------------------------------------------------------------------------------------------------- names

    @contextlib.contextmanager
    def _named(self, fd: int, parents: Sequence[str], name: str) -> Generator[Descriptors]:
        """Give an open object another name; its directories, made and open."""
        with contextlib.ExitStack() as opened:
            for attempt in range(MOST_ATTEMPTS):
                directories = opened.enter_context(self._tree.descent(parents, make=True))
                try:
                    # What is open, whatever has its name by now: link(2) follows this one when it is told to.
                    self._fs.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=directories[-1], follow_symlinks=True)
                    break
                except FileNotFoundError:
                    opened.close()  # as in `Drafts.begin`
                    if self._fs.fstat(fd).st_nlink == 0:
                        raise NotFound(f"the source of {name} has been deleted from {self.root}") from None
                    if attempt == MOST_ATTEMPTS - 1:
                        raise
                except FileExistsError:
                    if self._is_same(fd, name, directories[-1]):
                        self._stir(directories[-1])  # an earlier attempt's, whose outcome nobody knew
                        break
                    raise CannotCopy(f"{name} is already in {self.root}: a copy replaces nothing") from None
                except OSError as err:
                    if err.errno in _NO_LINKS:
                        raise CannotCopy(f"{name} in {self.root}: no second name: {err.strerror}") from err
                    raise
            yield directories

    def _stir(self, directory: int) -> None:
        """Change a directory, so that its next fsync writes something, or fails.

        IMPORTANT: repeated for a change that the kernel has dropped, an fsync says yes; on ext4 even after the journal
        was aborted. A put's next attempt brings another draft.
        """
        name, fd = create(self._tree, DRAFT, directory)
        self._fs.close(fd)
        self._fs.unlink(name, dir_fd=directory)

    def _is_same(self, fd: int, name: str, directory: int) -> bool:
        found, meant = self._fs.stat(name, dir_fd=directory, follow_symlinks=False), self._fs.fstat(fd)
        return (found.st_dev, found.st_ino) == (meant.st_dev, meant.st_ino)
