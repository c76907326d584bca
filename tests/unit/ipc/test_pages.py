"""Memory for slots: all of it allocated, whatever the host thinks of huge pages."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.ipc import pages
from harness.ipc.pages import HUGE, allocate
from harness.ipc.slots import Slot
from tests.support.needs import lacking

SIZES = [mmap.PAGESIZE, HUGE - mmap.PAGESIZE, HUGE, 3 * HUGE + 5 * mmap.PAGESIZE]


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:test" in line]


@pytest.mark.parametrize("size", SIZES)
def test_every_page_is_allocated_and_zero(memfd: int, size: int) -> None:
    allocate(memfd, size)

    found = os.fstat(memfd)
    assert (found.st_size, found.st_blocks * 512) == (size, size)
    assert os.pread(memfd, size, 0) == bytes(size)
    assert mappings() == []


@pytest.mark.parametrize("collapsed", [0, 1])
def test_a_host_without_huge_pages_gives_small_ones(
    memfd: int, monkeypatch: pytest.MonkeyPatch, collapsed: int
) -> None:
    class NoHugePages(ctypes.CDLL):
        asked = 0

        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            self.madvise = self.refuse

        def refuse(self, *_: object) -> int:
            NoHugePages.asked += 1
            return 0 if NoHugePages.asked <= collapsed else -1

    monkeypatch.setattr(pages.ctypes, "CDLL", NoHugePages)
    allocate(memfd, 9 * HUGE)

    assert NoHugePages.asked == collapsed + 3  # it does not insist
    assert os.fstat(memfd).st_blocks * 512 == 9 * HUGE


def test_huge_pages_that_are_slow_to_come_are_not_waited_for(memfd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.01)
    monkeypatch.setattr(pages, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    asked: list[int] = []

    class Slow(ctypes.CDLL):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            self.madvise = lambda *given: asked.append(1) or 0

    monkeypatch.setattr(pages.ctypes, "CDLL", Slow)
    allocate(memfd, 9 * HUGE)

    assert len(asked) == 3, "20 ms are over, and half a ms for each"
    assert os.fstat(memfd).st_blocks * 512 == 9 * HUGE


def test_too_little_memory_is_told_and_leaves_no_mapping(memfd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "posix_fallocate", no_memory)

    with pytest.raises(OSError, match="no memory"):
        allocate(memfd, 3 * HUGE)
    assert mappings() == []


def test_what_is_told_to_be_there_is_there(memfd: int) -> None:
    size = 2 * HUGE + 5 * mmap.PAGESIZE
    told = []
    for end in pages.allocating(memfd, size):
        told.append(end)
        assert os.fstat(memfd).st_blocks * 512 >= end

    assert told == [HUGE, 2 * HUGE, size]


def test_who_stops_in_the_middle_leaves_no_mapping(memfd: int) -> None:
    making = pages.allocating(memfd, 3 * HUGE)
    next(making)
    making.close()

    assert mappings() == []


@pytest.mark.parametrize("size", SIZES)
def test_a_mapping_is_of_the_whole_memfd_and_goes_with_what_it_lies_in(memfd: int, size: int) -> None:
    allocate(memfd, size)
    mapping, start = pages.mapped(memfd, size)
    view = memoryview(mapping)[start : start + size]
    view[0], view[size - 1] = 1, 2

    assert (os.pread(memfd, 1, 0), os.pread(memfd, 1, size - 1)) == (b"\1", b"\2")
    assert size < HUGE or (pages.address_of(mapping) + start) % HUGE == 0
    view.release()
    mapping.close()
    assert mappings() == []


def test_an_address_space_in_which_nothing_can_be_placed_gives_an_ordinary_mapping(
    memfd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(ctypes.CDLL):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            self.mmap = refuse

    def refuse(*_: object) -> int | None:
        return pages._FAILED

    monkeypatch.setattr(pages.ctypes, "CDLL", Full)
    allocate(memfd, 2 * HUGE)
    mapping, start = pages.mapped(memfd, 2 * HUGE)

    assert (len(mapping), start) == (2 * HUGE, 0)
    assert os.fstat(memfd).st_blocks * 512 == 2 * HUGE
    mapping.close()


def test_a_slot_is_in_huge_pages_and_mapped_as_such_where_the_kernel_gives_them() -> None:
    slot = Slot.create(4 * HUGE)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(slot.buffer))
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE), pages._MADV_COLLAPSE) != 0:
        lacking("huge-pages")
    other = Slot(os.dup(slot.fd))  # as the trainer maps it
    other.populate()
    smaps = Path("/proc/self/smaps").read_text()
    start = ctypes.addressof(ctypes.c_char.from_buffer(other.buffer))
    entry = smaps[smaps.index(f"{start:x}-") :]

    assert int(entry[entry.index("ShmemPmdMapped:") :].split()[1]) * 1024 >= HUGE
    slot.close()
    other.close()
