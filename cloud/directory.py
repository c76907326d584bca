"""DirectoryStore: objects as files below a directory; the one place where files reach a disk.

Owns the order of system calls that makes a file durable, and the room that is kept for the next one. A key is a path
below the root, so that `ls` tells the truth; names that start with a dot are this module's own and never listed.

The durability contract:

    put             draft beside the target → write all → check the size → fdatasync → rename → fsync the directories
    put_if_absent   the same up to fdatasync → link (EEXIST: AlreadyExists) → unlink the draft → fsync the directories
    copy            open the source, compare its size → link what is open (EEXIST: CannotCopy) → fsync the directories
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
- A draft is flocked by its writer. A draft whose lock can be had is a dead writer's, whatever host, container or boot
  it was written in; `sweep` removes those. (A pid in its name would not tell: pids come again after a reboot, and every
  container has a pid 1.)
- A copy is a second name of the same file: no room, no writing, and each name is deleted by itself. Nothing here writes
  into a file that has an object's name, so neither changes with the other; but a medium that rots takes both. The
  source is not read for that: as after a put, whoever wants to know what a disk holds reads it back when it is idle.
- Nothing below the root is reached through a symbolic link: every directory is opened from its parent, O_NOFOLLOW.
- `a` and `a/b` cannot both be objects here, as they can in S3.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import stat
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloud import direct
from cloud.digest import Digester
from cloud.errors import (
    AlreadyExists,
    CannotCopy,
    CloudError,
    CopyDiffers,
    Denied,
    Full,
    NotFound,
    OutcomeUnknown,
    TooLarge,
    Truncated,
    Unavailable,
)
from cloud.filesystem import FileSystem
from cloud.notice import Deadline
from cloud.source import Chunks, opened
from cloud.store import CHUNK_BYTES, ObjectInfo, Progress, Receipt, Source, check_key, check_prefix

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_DRAFT = ".tmp"
_RESERVE = ".reserve"

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}

_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

MOST_ATTEMPTS = 100
"""How often a put makes its directory again after a delete pruned it. A bound for bugs, not for races."""


class DirectoryStore:
    """Objects as files below `root`. Safe for threads, and for any number of processes and hosts on one file system.

    Args:
        root: made if it is not there. If it vanishes later it is *not* made again: an unmounted disk is no empty store.
        fs: the system calls.

    Raises:
        CloudError: `root` can be neither found nor made.
    """

    def __init__(self, root: Path, *, fs: FileSystem | None = None) -> None:
        self.root = root.absolute()
        self.url = str(self.root)
        self._fs = fs or FileSystem()
        self._direct = direct.DirectIO()
        with self._errors("open the store"):
            self._make_root()
        self._reservation = _Reservation(self)
        with contextlib.suppress(CloudError):  # a read-only store holds no reservation of ours
            self._sweep((), _RESERVE)

    # ------------------------------------------------------------------------------------------------------- writing

    def put(self, key: str, source: Source, *, deadline: Deadline, progress: Progress | None = None) -> Receipt:
        """See `ObjectStore.put`. `OutcomeUnknown` means that the object is there and its name may not be durable."""
        *parents, name = check_key(key).split("/")
        with opened(self._fs, source) as chunks, self._errors(key, chunks.size), self._draft(parents) as draft:
            fill = self._fill_directly if chunks.aligned else self._fill
            receipt = fill(draft, key, chunks, deadline, progress)
            self._fs.rename(draft.name, name, src_dir_fd=draft.directory, dst_dir_fd=draft.directory)
            self._settle(draft.directories, key)
        return receipt

    def put_if_absent(self, key: str, data: bytes, *, deadline: Deadline) -> None:
        """See `ObjectStore.put_if_absent`. `OutcomeUnknown` as with `put`."""
        *parents, name = check_key(key).split("/")
        with self._errors(key, len(data)), self._draft(parents) as draft:
            with opened(self._fs, memoryview(data)) as chunks:
                self._fill(draft, key, chunks, deadline, None)
            taken = not self._link(draft, name)
            self._discard(draft)
            self._settle(draft.directories, key)
            if taken:
                raise AlreadyExists(f"{key} is already in {self.root}")

    def copy(self, source: str, key: str, expected: Receipt, *, deadline: Deadline) -> None:
        """See `ObjectStore.copy`. `OutcomeUnknown` as with `put`."""
        *parents, name = check_key(key).split("/")
        with self._errors(key), self._object(source) as fd:
            if (size := self._fs.fstat(fd).st_size) != expected.size:
                raise CopyDiffers(f"{source} in {self.root} has {size} bytes; {expected.size} were expected")
            self._check_time(deadline, f"copy {key}")
            with self._named(fd, parents, name) as directories:
                self._settle(directories, key)

    def delete(self, key: str, *, deadline: Deadline) -> None:
        """See `ObjectStore.delete`. Directories that become empty go too."""
        *parents, name = check_key(key).split("/")
        with self._errors(key), self._descent(parents) as directories:
            if len(directories) > len(parents):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    self._fs.unlink(name, dir_fd=directories[-1])
            self._fs.fsync(directories[self._prune(parents, directories)])

    # ------------------------------------------------------------------------------------------------------- reading

    def get(self, key: str, into: memoryview, *, offset: int = 0, deadline: Deadline) -> None:
        """See `ObjectStore.get`. Past the page cache where `into` is large, and it and `offset` are aligned.

        `into` is memory: where it is the mapping of a file, the kernel may lose what a disk writes there.
        """
        into = into.cast("B")
        with self._errors(key):
            done = self._read_directly(key, into, offset, deadline)
            if done < len(into) or not into:
                with self._object(key) as fd:
                    self._read_exactly(fd, into[done:], offset + done, key, deadline)

    def read(self, key: str, *, limit_bytes: int, deadline: Deadline) -> bytes:
        """See `ObjectStore.read`."""
        with self._errors(key), self._object(key) as fd:
            size = self._fs.fstat(fd).st_size
            if size > limit_bytes:
                raise TooLarge(f"{key} in {self.root} has {size} bytes; at most {limit_bytes} were expected")
            data = bytearray(size)
            self._read_exactly(fd, memoryview(data), 0, key, deadline)
            return bytes(data)

    def stat(self, key: str, *, deadline: Deadline) -> ObjectInfo:
        """See `ObjectStore.stat`. A directory keeps no sums."""
        with self._errors(key), self._object(key) as fd:
            return ObjectInfo(key, self._fs.fstat(fd).st_size)

    def list(self, prefix: str, *, after: str = "", deadline: Deadline) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. Reads the directories that can hold a match, each when its turn comes."""
        check_prefix(prefix)
        return self._walk(tuple(prefix.split("/")[:-1]), prefix, after, deadline)

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
        with self._errors("ask for free space"):
            return self._room() + self._reservation.size

    def reserve(self, size: int) -> None:
        """See `ObjectStore.reserve`. A hidden file holds the room; a put takes of it what it cannot get otherwise."""
        if size < 0:
            raise ValueError(f"cannot reserve {size} bytes")
        with self._errors("a reservation", size):
            self._reservation.resize(size)

    def sweep(self) -> int:
        """Remove the drafts of writers that died; how many there were. Walks the whole tree, so call it when idle."""
        return self._sweep((), _DRAFT) + self._sweep((), _RESERVE)

    def close(self) -> None:
        """Give the reservation back."""
        with contextlib.suppress(OSError, CloudError):  # the lock goes with the descriptor; a later sweep has the rest
            self._reservation.resize(0)

    # ------------------------------------------------------------------------------------------- drafts: unseen files

    @contextlib.contextmanager
    def _draft(self, parents: Sequence[str]) -> Generator[_Draft]:
        """A new locked file beside the target, its directories made and open. It goes at the end, whatever happens."""
        with contextlib.ExitStack() as opened:
            for attempt in range(MOST_ATTEMPTS):
                try:
                    directories = opened.enter_context(self._descent(parents, make=True))
                    name, fd = self._create(_DRAFT, directories[-1])
                    break
                except FileNotFoundError:
                    opened.close()  # a delete pruned the directory before our file was in it: make it again
                    if attempt == MOST_ATTEMPTS - 1:
                        raise
            opened.callback(self._fs.close, fd)
            draft = _Draft(directories, name, fd)
            opened.callback(self._discard, draft)
            yield draft

    @contextlib.contextmanager
    def _named(self, fd: int, parents: Sequence[str], name: str) -> Generator[_Descriptors]:
        """Give an open object another name; its directories, made and open."""
        with contextlib.ExitStack() as opened:
            for attempt in range(MOST_ATTEMPTS):
                directories = opened.enter_context(self._descent(parents, make=True))
                try:
                    # What is open, whatever has its name by now: link(2) follows this one when it is told to.
                    self._fs.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=directories[-1], follow_symlinks=True)
                    break
                except FileNotFoundError:
                    opened.close()  # as in `_draft`
                    if self._fs.fstat(fd).st_nlink == 0:
                        raise NotFound(f"the source of {name} has been deleted from {self.root}") from None
                    if attempt == MOST_ATTEMPTS - 1:
                        raise
                except FileExistsError:
                    if self._is_same(fd, name, directories[-1]):
                        break  # an earlier attempt's, whose outcome nobody knew
                    raise CannotCopy(f"{name} is already in {self.root}: a copy replaces nothing") from None
                except OSError as err:
                    if err.errno in _NO_LINKS:
                        raise CannotCopy(f"{name} in {self.root}: no second name: {err.strerror}") from err
                    raise
            yield directories

    def _is_same(self, fd: int, name: str, directory: int) -> bool:
        found, meant = self._fs.stat(name, dir_fd=directory, follow_symlinks=False), self._fs.fstat(fd)
        return (found.st_dev, found.st_ino) == (meant.st_dev, meant.st_ino)

    def _create(self, kind: str, directory: int) -> tuple[str, int]:
        """A new empty hidden file, locked for as long as its descriptor is open. Host and pid are for people."""
        host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:64]
        while True:
            name = f"{kind}-{host}-{os.getpid()}-{secrets.token_hex(8)}"
            fd = self._fs.open(name, _CREATE, 0o666, dir_fd=directory)
            try:
                self._fs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                kept = self._fs.fstat(fd).st_nlink > 0
            except BlockingIOError:
                kept = False
            except OSError:
                kept = True  # no locks on this file system: then a sweep cannot lock it either, and leaves it alone
            if kept:
                return name, fd
            self._fs.close(fd)  # a sweep came between open and flock

    def _fill(self, draft: _Draft, key: str, chunks: Chunks, deadline: Deadline, progress: Progress | None) -> Receipt:
        digester = Digester()
        for at in range(0, chunks.size, CHUNK_BYTES):
            self._check_time(deadline, f"write {key}: {at} of {chunks.size} bytes are written")
            with chunks.take(at) as chunk:
                digester.update(chunk)
                self._write(draft.fd, chunk)
                count = len(chunk)
            if progress is not None:
                progress(count)
        self._sync(draft, key, chunks.size, deadline)
        return digester.receipt()

    def _fill_directly(
        self, draft: _Draft, key: str, chunks: Chunks, deadline: Deadline, progress: Progress | None
    ) -> Receipt:
        """`_fill` past the page cache, or through it where the file system refuses that; by several threads."""
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
            receipt = writer.run(
                lambda written: self._check_time(deadline, f"write {key}: {written} of {size} bytes are written"),
                progress,
            )
        self._sync(draft, key, size, deadline)
        return receipt

    def _sync(self, draft: _Draft, key: str, size: int, deadline: Deadline) -> None:
        found = self._fs.fstat(draft.fd).st_size
        if found != size:
            raise Unavailable(f"{key} in {self.root}: {size} bytes were to be written, and the file has {found}")
        self._check_time(deadline, f"sync {key}")
        self._fs.fdatasync(draft.fd)

    def _write(self, fd: int, piece: memoryview) -> None:
        while piece:
            try:
                count = self._fs.write(fd, piece)
            except InterruptedError:
                continue
            except OSError as err:
                if err.errno in _NO_ROOM and self._reservation.give_back(len(piece)):
                    continue
                raise
            if count == 0:
                raise OSError(errno.EIO, "a write wrote nothing")
            piece = piece[count:]

    def _link(self, draft: _Draft, name: str) -> bool:
        """Give the draft its name unless that is taken; whether it is the draft's now."""
        try:
            self._fs.link(
                draft.name, name, src_dir_fd=draft.directory, dst_dir_fd=draft.directory, follow_symlinks=False
            )
        except FileExistsError:
            # NFS repeats a link whose reply was lost, and is told EEXIST of its own success (open(2), O_EXCL).
            return self._fs.fstat(draft.fd).st_nlink > 1
        return True

    def _discard(self, draft: _Draft) -> None:
        """Remove the draft's own name, if it still has it. A failure only leaves work for `sweep`."""
        with contextlib.suppress(OSError):
            self._fs.unlink(draft.name, dir_fd=draft.directory)

    def _settle(self, directories: Sequence[int], key: str) -> None:
        try:
            for fd in reversed(directories):
                self._fs.fsync(fd)
        except OSError as err:
            raise OutcomeUnknown(f"{key} is in {self.root}, but its name may not be durable: {err.strerror}") from err

    # ---------------------------------------------------------------------------------------------------- directories

    def _make_root(self) -> None:
        missing = []
        path = self.root
        while not path.exists():
            missing.append(path)
            path = path.parent
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self._fs.mkdir(path)
            fd = self._fs.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._fs.fsync(fd)
            finally:
                self._fs.close(fd)
        self._fs.close(self._open_root())

    def _open_root(self) -> int:
        try:  # the root itself may be a symbolic link: that is its owner's choice
            return self._fs.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as err:
            raise Unavailable(f"{self.root} is gone: removed or unmounted since the store was opened") from err

    @contextlib.contextmanager
    def _descent(self, parents: Sequence[str], *, make: bool = False) -> Generator[_Descriptors]:
        """Open directories from the root down to the last of `parents`: all of them, or as far as they exist."""
        with contextlib.ExitStack() as opened:
            directories = [self._open_root()]
            opened.callback(self._fs.close, directories[0])
            for name in parents:
                try:
                    fd = self._open_below(name, directories[-1], make=make)
                except (FileNotFoundError, NotADirectoryError):
                    if make:
                        raise
                    break
                directories.append(fd)
                opened.callback(self._fs.close, fd)
            yield directories

    def _open_below(self, name: str, directory: int, *, make: bool) -> int:
        try:
            return self._fs.open(name, _DIRECTORY, dir_fd=directory)
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):
            self._fs.mkdir(name, dir_fd=directory)
        return self._fs.open(name, _DIRECTORY, dir_fd=directory)

    def _prune(self, parents: Sequence[str], directories: Sequence[int]) -> int:
        """Remove the open directories that are empty, deepest first; the index of the one that stopped it."""
        depth = len(directories) - 1
        while depth > 0:
            try:
                self._fs.rmdir(parents[depth - 1], dir_fd=directories[depth - 1])
            except OSError:
                break  # not empty, or somebody else's to remove; a put whose directory this took makes it again
            depth -= 1
        return depth

    def _sweep(self, parents: tuple[str, ...], kind: str) -> int:
        with self._errors("sweep"), self._descent(parents) as directories:
            if len(directories) <= len(parents):
                return 0
            with self._fs.scandir(directories[-1]) as entries:
                found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            abandoned = [name for name, is_directory in found if not is_directory and name.startswith(f"{kind}-")]
            removed = sum(self._remove_if_abandoned(name, directories[-1]) for name in abandoned)
            if removed:
                self._prune(parents, directories)
        if kind == _DRAFT:  # reservations lie in the root only
            for name, is_directory in found:
                if is_directory and not name.startswith("."):
                    removed += self._sweep((*parents, name), kind)
        return removed

    def _remove_if_abandoned(self, name: str, directory: int) -> bool:
        try:
            fd = self._fs.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        except OSError:
            return False  # gone already, or not ours to touch
        try:
            self._fs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._fs.unlink(name, dir_fd=directory)
        except OSError:
            return False  # its writer lives
        finally:
            self._fs.close(fd)
        return True

    def _walk(self, parents: tuple[str, ...], prefix: str, after: str, deadline: Deadline) -> Generator[ObjectInfo]:
        self._check_time(deadline, f"list {prefix!r}")
        for key, size in self._matches(parents, prefix, after):
            if size is None:
                yield from self._walk(tuple(key.split("/")[:-1]), prefix, after, deadline)
            else:
                yield ObjectInfo(key, size)

    def _matches(self, parents: tuple[str, ...], prefix: str, after: str) -> Sequence[tuple[str, int | None]]:
        """What of one directory can match, in key order: files with their sizes, directories as "key/" with `None`.

        A directory sorts as its name and the slash, since "a.json" < "a/b" < "a0".
        """
        base = "".join(f"{name}/" for name in parents)
        found: _Entries = []
        with self._errors(prefix), self._descent(parents) as directories:
            if len(directories) <= len(parents):
                return found
            with self._fs.scandir(directories[-1]) as entries:
                for entry in entries:
                    if not _is_segment(entry.name):
                        continue  # a draft, a reservation, a stranger's file
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

    # ------------------------------------------------------------------------------------------------- reading a file

    @contextlib.contextmanager
    def _object(self, key: str, flags: int = 0) -> Generator[int]:
        *parents, name = check_key(key).split("/")
        with self._descent(parents) as directories:
            try:
                if len(directories) <= len(parents):
                    raise FileNotFoundError
                fd = self._fs.open(name, _READ | flags, dir_fd=directories[-1])
            except FileNotFoundError:
                raise NotFound(f"{key} is not in {self.root}") from None
        try:
            if not stat.S_ISREG(self._fs.fstat(fd).st_mode):
                raise NotFound(f"{key} in {self.root} is not a file")
            yield fd
        finally:
            self._fs.close(fd)

    def _read_directly(self, key: str, into: memoryview, offset: int, deadline: Deadline) -> int:
        """Fill `into` past the page cache, as far as that goes; how far it went."""
        if not self._direct.usable or offset % direct.BLOCK or not direct.is_aligned(into):
            return 0
        words = f"of {len(into)} bytes are read"
        try:
            with self._object(key, os.O_DIRECT) as fd:
                return direct.read(
                    self._fs, fd, into, offset, lambda done: self._check_time(deadline, f"read {key}: {done} {words}")
                )
        except OSError as err:
            if not self._direct.refuses(err):
                raise
            return 0

    def _read_exactly(self, fd: int, into: memoryview, offset: int, key: str, deadline: Deadline) -> None:
        done = 0
        while done < len(into):
            self._check_time(deadline, f"read {key}: {done} of {len(into)} bytes are read")
            try:
                count = self._fs.preadv(fd, [into[done : done + CHUNK_BYTES]], offset + done)
            except InterruptedError:
                continue
            if count == 0:
                raise Truncated(f"{key} in {self.root} has {offset + done} bytes; {offset + len(into)} were expected")
            done += count

    # ---------------------------------------------------------------------------------------------------------- errors

    @contextlib.contextmanager
    def _errors(self, what: str, needed_bytes: int = 0) -> Generator[None]:
        """Turn the file system's errors into ours, with the key, the directory and the kernel's own words."""
        try:
            yield
        except OSError as err:
            words = f"{what} in {self.root}: {err.strerror or err}"
            if err.errno in _NO_ROOM:
                raise Full(f"{words}; {needed_bytes:,} bytes needed, {self._room_or_nothing():,} free") from err
            if err.errno in _NOT_ALLOWED:
                raise Denied(words) from err
            raise Unavailable(words) from err

    def _check_time(self, deadline: Deadline, what: str) -> None:
        if deadline.expired:
            raise Unavailable(f"no time left to {what} in {self.root}")

    def _room(self) -> int:
        """Bytes that an unprivileged process may still write. Raises OSError."""
        room = self._fs.statvfs(self.root)
        return room.f_bavail * room.f_frsize

    def _room_or_nothing(self) -> int:
        try:
            return self._room()
        except OSError:
            return 0


_Descriptors = list[int]
_Entries = list[tuple[str, int | None]]


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


@dataclass(frozen=True)
class _Draft:
    """A file that no reader sees yet.

    Attributes:
        directories: open, from the root down to the one that the draft and its target lie in.
        name: its name there.
        fd: open for writing, and locked.
    """

    directories: Sequence[int]
    name: str
    fd: int

    @property
    def directory(self) -> int:
        return self.directories[-1]


class _Reservation:
    """Room that is held by a hidden, preallocated file in the root. Locked like a draft: it goes with its process."""

    def __init__(self, store: DirectoryStore) -> None:
        self._store = store
        self._fs = store._fs
        self._lock = threading.Lock()
        self._file: tuple[str, int] | None = None
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes held now."""
        return self._size

    def resize(self, size: int) -> None:
        """Hold exactly `size` bytes, or raise OSError and hold what was held."""
        with self._lock:
            if size > self._size:
                self._grow(size)
            elif size < self._size:
                self._shrink(size)

    def give_back(self, size: int) -> bool:
        """Free `size` bytes, or what there is; whether that was anything."""
        with self._lock:
            if not self._size:
                return False
            self._shrink(max(0, self._size - size))
            return True

    def _grow(self, size: int) -> None:
        if self._file is None:
            root = self._store._open_root()
            try:
                self._file = self._store._create(_RESERVE, root)
            finally:
                self._fs.close(root)
        _, fd = self._file
        try:
            self._fs.fallocate(fd, size)
        except OSError as err:
            self._shrink(self._size)
            if err.errno != errno.EOPNOTSUPP:
                raise
            # The file system cannot hold room (NFS before 4.2): then the best that can be done is to look.
            if self._store._room() < size:
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
            root = self._store._open_root()
            try:
                self._fs.unlink(name, dir_fd=root)
            finally:
                self._fs.close(root)
