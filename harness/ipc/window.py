"""Window: fills a slot on a disk from front to back, through a buffer of bounded size.

Owns how bytes get into the file behind a slot where memory has no room for one; knows nothing of what they mean.

Bytes do not go through the slot's mapping. There, each page would cost a fault and stay dirty for as long as the kernel
likes, in memory that is short already; that is five times slower in all. Bytes written here start their way to the disk
at once, and are out of memory two windows later, whatever the kernel's own thresholds are. They are not durable: only
commits make them so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

from harness.ipc.pages import PAGE
from harness.ipc.slots import Slot
from harness.ipc.write import write_at

WINDOW_BYTES = 32 * 1024 * 1024
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # sync_file_range(2)
_libc = ctypes.CDLL(None, use_errno=True)
_UNKNOWN = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}  # errors of a kernel or a sandbox without it


class Window:
    """One filling of one slot. `buffer` holds the bytes to write next; its first byte is at a multiple of a page."""

    def __init__(self, slot: Slot, size: int = WINDOW_BYTES) -> None:
        """Allocate the buffer.

        Args:
            slot: on a disk, and marked as void.
            size: of the buffer, a multiple of 4096.
        """
        self.size = size
        self.buffer = mmap.mmap(-1, size)
        self._fd = slot.fd
        self._passed: list[tuple[int, int]] = []

    def write(self, start: int, end: int) -> None:
        """Write the buffer's bytes for `start` to `end` of the slot. Blocks for as long as the disk takes.

        Raises:
            OSError: the disk failed (EIO, ENOSPC), now or in an earlier write; the slot stays void.
        """
        if start == end:
            return
        with memoryview(self.buffer)[start % PAGE : start % PAGE + end - start] as data:
            write_at(self._fd, data, start)
        _write_back(self._fd, start, end, _WRITE)
        self._passed.append((start, end))
        if len(self._passed) > 2:
            _drop(self._fd, *self._passed.pop(0))

    def move(self, source: Slot) -> None:
        """Copy the slot `source` into this one, its header page last: whatever dies, this slot is void or complete."""
        for start in range(PAGE, source.size, self.size):
            end = min(start + self.size, source.size)
            self.buffer[: end - start] = source.buffer[start:end]
            self.write(start, end)
        self.buffer[:PAGE] = source.buffer[:PAGE]
        self.write(0, PAGE)
        self.close()

    def close(self) -> None:
        """Wait until the disk has all bytes written here or through the mapping, and drop the former from memory.

        IMPORTANT: call this before the slot is sealed. The kernel forgets bytes that a disk does not take. The next
        reader of the slot gets the bytes that were there before, and digests of those agree with them.

        Raises:
            OSError: the disk failed; the slot stays void.
        """
        os.fdatasync(self._fd)  # the shards' headers went through the mapping: nothing else waits for those
        while self._passed:
            _drop(self._fd, *self._passed.pop(0))


def put(slot: Slot, start: int, data: memoryview) -> None:
    """Write `data` at `start` of a slot on a disk, wait for the disk, and drop it from memory. From any thread.

    Raises:
        OSError: the disk failed (EIO, ENOSPC); the slot is void.
    """
    write_at(slot.fd, data, start)
    _drop(slot.fd, start, start + len(data))


def _drop(fd: int, start: int, end: int) -> None:
    _write_back(fd, start, end, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
    with contextlib.suppress(OSError):  # advice
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)


def _write_back(fd: int, start: int, end: int, flags: int) -> None:
    """Start the write-back of a range, or wait for it.

    A kernel without this call writes back when it sees fit. A wait then calls `fdatasync`, which reports errors.
    """
    if _libc.sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(end - start), ctypes.c_uint(flags)) == 0:
        return
    code = ctypes.get_errno()
    if code not in _UNKNOWN:
        raise OSError(code, os.strerror(code))
    if flags & _WAIT_AFTER:
        os.fdatasync(fd)
