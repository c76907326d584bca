"""Large buffers to and from files, by direct I/O (O_DIRECT) if the file system allows it: past the page cache.

Owns how many bytes are in flight and the fallback for a file system that refuses direct I/O; knows neither keys nor
durability, which `store.py` owns. A copy into the page cache costs the training loop memory bandwidth and a core, and
evicts what it has cached; the disk fetches an aligned buffer by itself.

    room for all of it ──▶ THREADS chunks at a time: sum, write ──▶ the last bytes, less than a block, buffered

- A refusal (tmpfs before Linux 6.6, some overlays, FUSE and network mounts) comes at `open` or at the first write. From
  then on that file system is written and read through its page cache: the same bytes, the same promise.
- Only large buffers that are aligned to `BLOCK` in memory and in the file use direct I/O; shards in a slot do.
- Sizes were measured (16 MiB × 3 with sums reached the disk's own speed, 8 to 64 MiB × 2 to 4 differ by a few per
  cent), and a chunk is a chunk of the receipt.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Protocol

from cloud.digest import combine, crc64nvme
from cloud.directory.filesystem import FileSystem
from cloud.pool import Pool
from cloud.store import CHUNK_BYTES, Progress, Receipt

BLOCK = 4096  # every disk that we know supports it; also the page size at which slots align their shards
LEAST_BYTES = 2 * 1024 * 1024  # below that, an allocation and a second descriptor cost more than a copy
THREADS = 3

_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class _Stopped(Exception):
    """The writer has stopped: its bytes are not needed any more."""


def aligned_buffer(size: int) -> memoryview:
    """Allocate memory for direct reads, in huge pages if the host has them: a disk fills those twice as fast."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared, it would be tmpfs
    memory.madvise(mmap.MADV_DONTFORK)  # a disk must not write to a page that a fork shares
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:size]


def is_aligned(view: memoryview) -> bool:
    """Whether a buffer is large and aligned for direct I/O. A read-only buffer hides its address: returns False."""
    if view.readonly or len(view) < LEAST_BYTES:
        return False
    import ctypes  # 10 ms that only a large object costs

    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % BLOCK == 0


class DirectIO:
    """Whether one file system allows direct I/O; assumed until it refuses. For any thread.

    Attributes:
        usable: whether to try direct I/O.
    """

    def __init__(self) -> None:
        self.usable = True

    def refuses(self, err: OSError) -> bool:
        """Whether `err` is a refusal of direct I/O; then `usable` becomes False. Any other error is a real failure."""
        if err.errno not in _REFUSALS:
            return False
        self.usable = False
        return True


def read(
    fs: FileSystem, fd: int, into: memoryview, offset: int, check: Callable[[int], None] = lambda done: None
) -> int:
    """Fill an aligned buffer by direct I/O, as far as possible. Return the number of bytes read.

    The number is less than the buffer's size if the file ends there, or if the rest does not begin at a block. The
    caller reads the rest through the page cache, which shows which of the two it was.

    Args:
        fs: the system calls.
        fd: opened with O_DIRECT.
        into: an aligned buffer.
        offset: position in the file; a multiple of `BLOCK`.
        check: called with the number of bytes read so far, before each read; raises to stop.
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
    block = aligned_buffer(BLOCK)  # a file may end anywhere; a direct read ends at a block, or with the file
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
    """The source of a `Writer`, in chunks. Several threads may take chunks at once.

    Attributes:
        size: bytes.
    """

    size: int

    def take(self, at: int) -> contextlib.AbstractContextManager[memoryview]:
        """Take the chunk at `at`, a multiple of `CHUNK_BYTES`: that many bytes or the rest. For one thread."""
        ...


class Writer:
    """Writes one source as one file. For one calling thread, which gets the progress; a pool's threads write.

    When `run` has returned or raised, no thread reads the source or writes the file any more.

    Args:
        fs: the system calls.
        io: whether the file system allows direct I/O.
        fd: the file, empty, open for writing.
        direct: the same file, open for direct I/O; `None` if the file system refuses that.
        source: the bytes to write, in aligned chunks.
        make_room: called when the disk is full, with the number of bytes needed; returns whether to try again.
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
        self._ended_at = time.monotonic()  # when a thread was last done with a chunk

    def run(self, check: Callable[[int], None], progress: Progress | None) -> Receipt:
        """Write everything and return its size and sums; nothing is durable yet.

        Args:
            check: called with the number of bytes written so far, before more are; raises to stop.
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
                    progress(count, idle_s=lambda: self._idle_s(pending))
        finally:
            self._stopped = True
            pool.shutdown()
            wait(pending)
        return Receipt(size, whole, tuple(sums))

    def _idle_s(self, pending: Iterable[Future[int]]) -> float:
        """Return for how many seconds nothing has been written."""
        return 0.0 if any(not future.done() for future in pending) else time.monotonic() - self._ended_at

    def _allocate(self) -> None:
        """Allocate all the room at once: a full disk fails before the first write, and writes do not queue for room."""
        while True:
            try:
                self._fs.fallocate(self._fd, self._source.size)
                return
            except InterruptedError:
                continue
            except OSError as err:
                if err.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    return  # this file system cannot preallocate; then each write allocates its own room
                if err.errno not in _NO_ROOM or not self._make_room(self._source.size):
                    raise

    def _write_chunk(self, at: int) -> int:
        try:
            return self._write_all(at)
        finally:
            self._ended_at = time.monotonic()

    def _write_all(self, at: int) -> int:
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
        """Write some bytes: whole blocks by direct I/O, the last bytes and a short write's rest via the page cache."""
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
