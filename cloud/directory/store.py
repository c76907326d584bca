"""DirectoryStore: objects as files below a directory; the one place where files reach a disk.

Owns the order of system calls that makes a file durable, and the room that is reserved for the next one. A key is a
path below the root, so that `ls` shows the objects; names that start with a dot are this module's own and never listed.

The durability contract:

    put             draft beside the target → write all → check the size → fdatasync → rename → fsync the directories
    put_if_absent   the same up to fdatasync → link (EEXIST: AlreadyExists) → unlink the draft → fsync the directories
    copy            open the source, compare its size → link what is open (EEXIST: CannotCopy, except for a copy that
                    was made before: a draft is made and unlinked) → fsync the directories
    delete          unlink → remove the directories that it left empty → fsync the deepest one that remains

- rename replaces and link does not: that is the whole difference between a payload and a commit.
- "Write all" uses direct I/O if the object is large and the file system allows it (`direct.py`); otherwise the same
  bytes go through the page cache. fdatasync waits for either, and covers the size and the blocks that were allocated
  before they were written: it omits only timestamps, which are never used.
- "The directories" are all directories from the target's up to the root. Another writer may have made one of them a
  moment ago and not synced it yet; syncing a clean directory costs microseconds.
- A power loss before rename or link loses a draft, which no reader sees. Between rename or link and the fsync of the
  directories, a reader on the same host may see the complete object although a power loss could still remove its name;
  a caller that gets `AlreadyExists` has waited for that fsync. A failed fsync is never repeated on the same file: the
  kernel has dropped the pages by then (https://wiki.postgresql.org/wiki/Fsync_Errors). The draft is removed, and the
  put fails.
- The writer of a draft flocks it; `sweep` removes the draft once the writer has died (`hidden.py`).
- A copy is a second name of the same file: it needs no room and no writing, and each name is deleted by itself. This
  module never writes into a file that has an object's name, so neither changes with the other; but damage to the medium
  affects both. The source is not read for a copy: as after a put, a caller that wants to verify a disk's content reads
  it back when the disk is idle.
- No path below the root is followed through a symbolic link (`tree.py`).
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
        root: made if it is missing. If it vanishes later it is *not* made again: an unmounted disk is no empty store.
        fs: the system calls.
        shared: give new files and directories the permissions that the umask leaves; else only this user has access.

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
        """See `ObjectStore.put`. `OutcomeUnknown` means: the object exists, but its name may not be durable."""
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
        """See `ObjectStore.delete`. Directories that become empty are removed too."""
        *parents, name = check_key(key).split("/")
        with self._tree.errors(key), self._tree.descent(parents) as directories:
            if len(directories) > len(parents):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    self._fs.unlink(name, dir_fd=directories[-1])
            self._fs.fsync(directories[self._tree.prune(parents, directories)])

    # ------------------------------------------------------------------------------------------------------- reading

    def get(self, key: str, into: memoryview, *, offset: int = 0, deadline: Deadline) -> None:
        """See `ObjectStore.get`. Uses direct I/O if `into` is large, and both `into` and `offset` are aligned.

        `into` must be memory: if it is a mapping of a file, the kernel may lose the bytes that a disk writes there.
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
        """See `ObjectStore.unfinished`. Always empty: `sweep` removes the drafts of dead writers."""
        check_prefix(prefix)
        return []

    def abandon(self, key: str, *, deadline: Deadline) -> None:
        """See `ObjectStore.abandon`."""
        check_key(key)

    def local_path(self, key: str) -> Path | None:
        """Return the object's own file, which callers may only read."""
        return self.root / check_key(key)

    # ---------------------------------------------------------------------------------------------------------- room

    def free_bytes(self) -> int | None:
        """See `ObjectStore.free_bytes`. Counts bytes that an unprivileged process may write, and the reservation."""
        with self._tree.errors("ask for free space"):
            return self._tree.room() + self._reservation.size

    def reserve(self, size: int) -> None:
        """See `ObjectStore.reserve`. A hidden file holds the room; a put on a full disk takes bytes from it."""
        if size < 0:
            raise ValueError(f"cannot reserve {size} bytes")
        with self._tree.errors("a reservation", size):
            self._reservation.resize(size)

    def sweep(self) -> int:
        """Remove the drafts of writers that died. Return how many. Walks the whole tree, so call it when idle."""
        return sweep(self._tree, DRAFT) + sweep(self._tree, RESERVE)

    def close(self) -> None:
        """Give the reservation back."""
        with contextlib.suppress(OSError, CloudError):  # closing the descriptor unlocks it; a later sweep removes it
            self._reservation.resize(0)

    # -------------------------------------------------------------------------------------------------------- names

    @contextlib.contextmanager
    def _named(self, fd: int, parents: Sequence[str], name: str) -> Generator[Descriptors]:
        """Link an open object to another name, making directories. Yields the open directories."""
        with contextlib.ExitStack() as opened:
            for attempt in range(MOST_ATTEMPTS):
                directories = opened.enter_context(self._tree.descent(parents, make=True))
                try:
                    # Link the open file, even if another file has its name by now: link(2) follows this symlink.
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
                        self._stir(directories[-1])  # made by an earlier attempt of unknown outcome
                        break
                    raise CannotCopy(f"{name} is already in {self.root}: a copy never replaces it") from None
                except OSError as err:
                    if err.errno in _NO_LINKS:
                        raise CannotCopy(f"{name} in {self.root}: cannot link it: {err.strerror}") from err
                    raise
            yield directories

    def _stir(self, directory: int) -> None:
        """Change a directory, so that its next fsync writes something, or fails.

        IMPORTANT: when an fsync is repeated for a change that the kernel has dropped, it reports success; on ext4 even
        after the journal was aborted. A put's next attempt changes the directory anyway, by a new draft.
        """
        name, fd = create(self._tree, DRAFT, directory)
        self._fs.close(fd)
        self._fs.unlink(name, dir_fd=directory)

    def _is_same(self, fd: int, name: str, directory: int) -> bool:
        found, meant = self._fs.stat(name, dir_fd=directory, follow_symlinks=False), self._fs.fstat(fd)
        return (found.st_dev, found.st_ino) == (meant.st_dev, meant.st_ino)
