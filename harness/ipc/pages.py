"""The memory behind a slot: huge pages where the host has them, and every page allocated before the slot is filled.

Owns how a slot's memory is allocated and how it is mapped; knows nothing of what a slot holds. A disk moves huge pages
in fewer and larger requests, and they are cheaper to allocate. Measured at 1 GB on one virtual disk: O_DIRECT writes up
to 1.8 times as fast, reads one at a time up to 2.6, and allocation in a quarter of the time where the host has the
memory at hand.

By itself, a memfd gets huge pages only where an administrator has switched that on (`shmem_enabled`, "never" nearly
everywhere). MADV_COLLAPSE (Linux 6.1) asks for them once, whatever that setting is, in a range that has at least one
page. It needs a mapping that is aligned to huge pages. So does every reader and writer: in another mapping they are
mapped like small pages, with a fault for each. The first copy of 2 GB out of a slot took 0.42 s in such a mapping, and
0.13 s in an aligned one. If there are no huge pages, not enough, or no such call, the rest is allocated as small pages.

The same holds if huge pages are slow to come: the kernel has to compact memory first, or the host of a virtual machine
has taken it back (it takes whole huge pages) and has to find some. That was 30 times as slow here, and a start waits
for its first slot.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Generator

PAGE = 4096
HUGE = 2 * 1024 * 1024  # on x86-64, and on 64-bit Arm with pages of 4 KiB; the kernel refuses a wrong size
_MOST_FAILURES = 3  # one may be chance; where memory is fragmented, each costs milliseconds
_PAGE_S, _SLACK_S = 0.0005, 0.02  # time that as much takes in small pages; how far behind that counts as slow
_MADV_COLLAPSE = 25
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value


def allocate(fd: int, size: int) -> None:
    """Allocate all of an empty memfd. Raises OSError (ENOMEM); then the memfd is unusable."""
    for _ in allocating(fd, size):
        pass


def allocating(fd: int, size: int) -> Generator[int]:
    """Allocate an empty memfd from front to back, without the GIL, and yield the progress.

    Yields:
        Bytes that are allocated, from the beginning; `size` at last.

    Raises:
        OSError: there is not enough memory (ENOMEM); then the memfd is unusable.
    """
    os.ftruncate(fd, size)
    ask = _Asking(fd, size)
    try:
        for start in range(0, size, HUGE):
            end = min(start + HUGE, size)
            if end - start == HUGE:
                ask.for_huge_page(start)
            reserve(fd, start, end - start)  # pages that exist already do not change
            yield end
    finally:
        ask.close()


def reserve(fd: int, start: int, length: int) -> None:
    """Allocate a range of a file or memfd that holds zeros or nothing yet. Raises OSError (ENOMEM, ENOSPC).

    Writes zeros where a sandbox's kernel has no such call.
    """
    try:
        os.posix_fallocate(fd, start, length)
    except OSError as err:
        if err.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        end = start + length
        while start < end:
            start += os.pwrite(fd, bytes(min(HUGE, end - start)), start)


def mapped(fd: int, size: int) -> tuple[mmap.mmap, int]:
    """Map all of a memfd, at a multiple of `HUGE` if possible.

    Returns:
        The mapping, whose `close` unmaps the memfd, and the offset in it at which the memfd begins.

    Raises:
        OSError: there is no room in the address space.
    """
    with contextlib.suppress(OSError):
        if size >= HUGE:
            return _mapped_like_huge_pages(fd, size)
    return mmap.mmap(fd, size), 0


def address_of(mapping: mmap.mmap) -> int:
    """Return the address at which a writable mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class _Asking:
    """Requests for huge pages for a memfd; they stop when they no longer pay."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._failures, self._left_s = fd, 0, _SLACK_S
        self._mapping: mmap.mmap | None = None
        if size >= HUGE:
            self._mapping, start = mapped(fd, size)
            self._address = address_of(self._mapping) + start
            self._madvise = ctypes.CDLL(None, use_errno=True).madvise
            if self._address % HUGE != 0:
                self.close()

    def for_huge_page(self, start: int) -> None:
        """Request the huge page that begins at `start`. Raises OSError (ENOMEM)."""
        if self._mapping is None:
            return
        began = time.monotonic()
        reserve(self._fd, start, mmap.PAGESIZE)
        address, length = ctypes.c_void_p(self._address + start), ctypes.c_size_t(HUGE)
        self._failures += self._madvise(address, length, _MADV_COLLAPSE) != 0
        self._left_s += _PAGE_S - (time.monotonic() - began)
        if self._failures == _MOST_FAILURES or self._left_s < 0:
            self.close()

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None


def _mapped_like_huge_pages(fd: int, size: int) -> tuple[mmap.mmap, int]:
    """Reserve a larger range of addresses, and map the memfd at an aligned place in it; `close` unmaps both."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE  # never touched, so it takes no memory
    room = mmap.mmap(-1, size + HUGE, flags=private)
    start = -address_of(room) % HUGE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    wanted = ctypes.c_void_p(address_of(room) + start)
    readable, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED  # inside the reserved range
    if libc.mmap(wanted, ctypes.c_size_t(size), readable, shared, fd, ctypes.c_long(0)) == _FAILED:
        room.close()
        raise OSError(ctypes.get_errno(), "mmap")
    return room, start


def keep_from_children(mapping: mmap.mmap) -> None:
    """Keep a mapping out of forked children. A sandbox may not support that; then a fork costs more."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_DONTFORK)
