"""What the hardware can do at best, and how a file is made cold: what every speed here is held against."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 2
WHOLE_BYTES = 2_100_000_000  # up to here, a buffer is as large as the state: what was idle is slow to come back
BUFFER_BYTES = 512 << 20  # of a larger state, as much as is copied at a time: far beyond every cache
WRITE_BYTES, READ_BYTES = 64 << 20, 32 << 20
READS_IN_FLIGHT = 4
PAGE = 4096
_LEFT_BYTES = 2 << 30
_MADV_HUGEPAGE = 14


class Limits:
    """Two warm buffers, plain and shared, from one to the other as memory goes; and files as the disk goes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._length = -(-(size if size <= WHOLE_BYTES else BUFFER_BYTES) // PAGE) * PAGE
        self._plain = mmap.mmap(-1, self._length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self._plain.madvise(_MADV_HUGEPAGE)
        self._shared = mmap.mmap(-1, self._length)
        self._pool = ThreadPoolExecutor(max(THREADS, READS_IN_FLIGHT))
        block = os.urandom(1 << 20)
        for buffer in (self._plain, self._shared):
            for at in range(0, self._length, len(block)):
                buffer[at : at + len(block)] = block[: self._length - at]

    def close(self) -> None:
        self._pool.shutdown()

    def copy_s(self) -> float:
        """Seconds for a flat memcpy of `size` bytes into shared memory that is there already, by two threads."""
        source, target = _address(self._plain), _address(self._shared)

        def copy(at: int, count: int) -> None:
            ctypes.memmove(target + at, source + at, count)

        began = time.perf_counter()
        for done in range(0, self.size, self._length):
            count = min(self._length, self.size - done)
            middle = count // 2
            first = self._pool.submit(copy, 0, middle)
            copy(middle, count - middle)
            first.result()
        return time.perf_counter() - began

    def write_s(self, path: Path) -> float:
        """Seconds to write a file of `size` bytes with O_DIRECT, with its space allocated first, and to sync it."""

        def write(fd: int, at: int, count: int) -> None:
            start = at % self._length
            with memoryview(self._shared) as view, view[start : start + count] as piece:
                _must_be(os.pwrite(fd, piece, at), count)

        began = time.perf_counter()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            whole = -(-self.size // PAGE) * PAGE
            os.posix_fallocate(fd, 0, whole)
            self._in_flight(THREADS, WRITE_BYTES, whole, lambda at, count: write(fd, at, count))
            os.fdatasync(fd)
        finally:
            os.close(fd)
        return time.perf_counter() - began

    def read_s(self, path: Path) -> float:
        """Seconds to read a file with O_DIRECT into huge pages that are there already. Nothing is done with it."""
        size = path.stat().st_size // PAGE * PAGE

        def read(fd: int, at: int, count: int) -> None:
            start = at % self._length
            with memoryview(self._plain) as view, view[start : start + count] as piece:
                _must_be(os.preadv(fd, [piece], at), count)

        began = time.perf_counter()
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            self._in_flight(READS_IN_FLIGHT, READ_BYTES, size, lambda at, count: read(fd, at, count))
        finally:
            os.close(fd)
        return time.perf_counter() - began

    def _in_flight(self, requests: int, most: int, size: int, call: Callable[[int, int], None]) -> None:
        """Do pieces of at most `most` bytes, none across the end of a buffer, by so many threads."""
        pieces, at = [], 0
        while at < size:
            count = min(most, size - at, self._length - at % self._length)
            pieces.append((at, count))
            at += count
        waiting = iter(pieces)

        def work() -> None:
            while (piece := next(waiting, None)) is not None:  # a list's iterator is safe for threads
                call(*piece)

        for done in [self._pool.submit(work) for _ in range(requests)]:
            done.result()


def have_memory(size: int) -> None:
    """Let the host of a virtual machine have `size` bytes at hand, free, for a second or two.

    Some hosts take freed memory back, and give it again at 1 to 2 seconds per GB: whoever allocates pays for what was
    freed before, by whomever. Elsewhere this changes nothing. Less, where there is not so much.
    """
    size = min(size, _available_bytes() - _LEFT_BYTES)
    if size < PAGE:
        return
    code = (
        "import ctypes, mmap\n"
        f"memory = mmap.mmap(-1, {size}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        f"memory.madvise({_MADV_HUGEPAGE})\n"
        "ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, len(memory))\n"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=False)  # a kernel without huge pages has none to give


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def direct_writes(directory: Path) -> bool:
    """Whether files in `directory` can be written around the page cache: not on tmpfs, overlayfs, or NFS."""
    path = directory / "direct"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def sync_tree(root: Path) -> None:
    """Make every file below `root`, and its directory entries, durable."""
    for directory, _, names in os.walk(root, topdown=False):
        for path in (*(Path(directory, name) for name in names), Path(directory)):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def make_cold(root: Path) -> bool:
    """Take every file below `root` out of the page cache; whether they are out of it, as far as can be told."""
    sync_tree(root)
    return all(_leaves_page_cache(path) for path in root.rglob("*") if path.is_file())


def _leaves_page_cache(path: Path) -> bool:
    """Take a file out of the page cache. A kernel may hold on to large folios for a moment after they were written."""
    fd = os.open(path, os.O_RDONLY)
    try:
        for _ in range(100):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if not _in_page_cache(fd):
                return True
            time.sleep(0.05)
        return False
    finally:
        os.close(fd)


def _in_page_cache(fd: int) -> bool:
    """Whether the middle of a file can be read without waiting for the disk."""
    size = os.fstat(fd).st_size
    if not size:
        return False
    try:
        os.preadv(fd, [bytearray(1)], size // 2, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError as err:
        if err.errno != errno.EOPNOTSUPP:
            raise
    return True


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _must_be(count: int, asked: int) -> None:
    if count != asked:
        raise OSError(errno.EIO, f"{count} bytes where {asked} were asked for")
