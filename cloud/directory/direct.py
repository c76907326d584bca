"""Large buffers to and from files, past the page cache where the file system takes that (O_DIRECT).

Owns how many bytes are in flight and what becomes of a file system that refuses; knows neither keys nor durability,
which are `store.py`'s. A copy into the page cache costs the training loop memory bandwidth and a core, and evicts
what it has cached; the disk fetches an aligned buffer by itself.

    room for all of it ──▶ THREADS chunks at a time: sum, write ──▶ the last bytes, less than a block, buffered

- A refusal (tmpfs before Linux 6.6, some overlays, FUSE and network mounts) comes at `open` or at the first write. From
  then on that file system is written and read through its page cache: the same bytes, the same promise.
- Only what is large and lies at a multiple of `BLOCK` in memory and file goes this way; shards in a slot do.
- Sizes were measured (16 MiB × 3 with sums reached the disk's own speed, 8 to 64 MiB × 2 to 4 differ by a few per
  cent), and a chunk is a chunk of the receipt.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol

from cloud.digest import combine, crc64nvme
from cloud.directory.filesystem import FileSystem
from cloud.pool import Pool
from cloud.store import CHUNK_BYTES, Progress, Receipt

BLOCK = 4096  # what every disk that we know can do, and the page in which slots keep their shards
LEAST_BYTES = 2 * 1024 * 1024  # below that, an allocation and a second descriptor cost more than a copy
THREADS = 3

_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class _Stopped(Exception):
    """Nobody wants the bytes any more."""


def aligned_buffer(size: int) -> memoryview:
    """Memory for direct reads, in huge pages where the host gives them: they take a disk's bytes twice as fast."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared, it would be tmpfs
    memory.madvise(mmap.MADV_DONTFORK)  # a page that a fork shares is no place for a disk to write to
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:size]


def is_aligned(view: memoryview) -> bool:
    """Whether a large buffer lies as direct I/O needs it. A read-only one does not tell, and counts as not."""
    if view.readonly or len(view) < LEAST_BYTES:
        return False
    import ctypes  # 10 ms that only a large object costs

    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % BLOCK == 0


class DirectIO:
    """Whether one file system lets bytes past its page cache: so it is held until it refuses. For any thread.

    Attributes:
        usable: whether to try.
    """

    def __init__(self) -> None:
        self.usable = True

    def refuses(self, err: OSError) -> bool:
        """Whether this is how a file system refuses, after which nobody tries again; any other failure is one."""
        if err.errno not in _REFUSALS:
            return False
        self.usable = False
        return True


def read(
    fs: FileSystem, fd: int, into: memoryview, offset: int, check: Callable[[int], None] = lambda done: None
) -> int:
    """Fill an aligned buffer from a descriptor past the page cache, as far as that goes; how far it went.

    Less than everything: the file ends there, or the rest does not begin with a block. Who asked reads on otherwise,
    and is told which.

    Args:
        fs: the system calls.
        fd: opened with O_DIRECT.
        into: an aligned buffer.
        offset: where in the file; a multiple of `BLOCK`.
        check: called with the bytes that are read, before more are; raises to end it.
    """
    done = 0
    whole = len(into) - len(into) % BLOCK
    while done < whole and done % BLOCK == 0:
        check(done)
        count = _preadv(fs, fd, into[done : min(done + CHUNK_BYTES, whole)], offset + done)
        if count == 0:
            return done
        done += count
    if done != whole or done == len(into):
        return done
    block = aligned_buffer(BLOCK)  # a file ends where it likes; a direct read ends with a block, or with the file
    count = min(_preadv(fs, fd, block, offset + done), len(into) - done)
    into[done : done + count] = block[:count]
    return done + count


def _preadv(fs: FileSystem, fd: int, into: memoryview, offset: int) -> int:
    while True:
        try:
            return fs.preadv(fd, [into], offset)
        except InterruptedError:
            continue


class Chunks(Protocol):
    """What is written. Several chunks may be taken at once.

    Attributes:
        size: bytes.
    """

    size: int

    def take(self, at: int) -> contextlib.AbstractContextManager[memoryview]:
        """The bytes from `at` on, `CHUNK_BYTES` or what is left; `at` is a multiple of that. For one thread."""
        ...


class Writer:
    """Writes one source as one file. For one thread, which hears of each chunk; others write.

    When `run` has returned or raised, nobody reads the source and nobody writes the file any more.

    Args:
        fs: the system calls.
        io: whether its file system lets bytes past the page cache.
        fd: the file, empty, open for writing.
        direct: the same file past the page cache; `None` where that is refused.
        source: what to write, in aligned chunks.
        make_room: asked when the disk is full, with the bytes that are needed; whether it is worth another try.
    """

    def __init__(
        self,
        fs: FileSystem,
        io: DirectIO,
        fd: int,
        direct: int | None,
        source: Chunks,
        make_room: Callable[[int], bool],
    ) -> None:
        self._fs, self._io, self._fd, self._direct = fs, io, fd, direct
        self._source, self._make_room = source, make_room
        self._stopped = False

    def run(self, check: Callable[[int], None], progress: Progress | None) -> Receipt:
        """Write everything; nothing is durable yet.

        Args:
            check: called with the bytes that are written, before more are; raises to end it.
            progress: see `ObjectStore.put`.
        """
        check(0)
        self._allocate()
        size, written, whole = self._source.size, 0, 0
        sums: list[int] = []
        pool = Pool(THREADS, "harness-write")
        pending: deque[Future[int]] = deque()
        waiting = iter(range(0, size, CHUNK_BYTES))
        try:
            while written < size:
                check(written)
                while len(pending) < THREADS and (at := next(waiting, None)) is not None:
                    pending.append(pool.submit(self._write_chunk, at))
                sums.append(pending[0].result())
                pending.popleft()
                count = min(CHUNK_BYTES, size - written)
                whole = combine(whole, sums[-1], count)
                written += count
                if progress is not None:
                    progress(count)
        finally:
            self._stopped = True
            pool.shutdown()
            wait(pending)
        return Receipt(size, whole, tuple(sums))

    def _allocate(self) -> None:
        """All the room at once: a full disk is told before anything is written, and writes need not wait in line."""
        while True:
            try:
                self._fs.fallocate(self._fd, self._source.size)
                return
            except InterruptedError:
                continue
            except OSError as err:
                if err.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    return  # this file system cannot; then each write finds its own
                if err.errno not in _NO_ROOM or not self._make_room(self._source.size):
                    raise

    def _write_chunk(self, at: int) -> int:
        with self._source.take(at) as chunk:
            crc = crc64nvme(chunk)
            done = 0
            while done < len(chunk):
                if self._stopped:
                    raise _Stopped
                try:
                    done += self._write(chunk[done:], at + done)
                except InterruptedError:
                    continue
                except OSError as err:
                    if err.errno not in _NO_ROOM or not self._make_room(len(chunk) - done):
                        raise
            return crc

    def _write(self, data: memoryview, offset: int) -> int:
        """Write some of it: whole blocks past the page cache, the last bytes and a short write's rest through it."""
        count = None
        whole = len(data) - len(data) % BLOCK
        if self._direct is not None and self._io.usable and whole and offset % BLOCK == 0:
            try:
                count = self._fs.pwrite(self._direct, data[:whole], offset)
            except OSError as err:
                if not self._io.refuses(err):
                    raise
        if count is None:
            count = self._fs.pwrite(self._fd, data, offset)
        if count == 0:
            raise OSError(errno.EIO, "a write wrote nothing")
        return count
