"""A window onto a slot on a disk: what passes arrives, and does not stay in memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.ipc import window as windows
from harness.ipc.pages import PAGE
from harness.ipc.slots import Slot
from harness.ipc.window import Window, put
from tests.support.failing_disk import failing_disk

SIZE = 8 * PAGE


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    slot = Slot.create(16 * SIZE, tmp_path)
    yield slot
    slot.close()


def resident(slot: Slot) -> int:
    """Pages of the slot's file that are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = (ctypes.c_ubyte * (slot.size // PAGE))()
    with mmap.mmap(slot.fd, slot.size) as mapping:
        address = ctypes.c_char.from_buffer(mapping)
        assert libc.mincore(ctypes.byref(address), ctypes.c_size_t(slot.size), pages) == 0
        del address
    return sum(page & 1 for page in pages)


def test_what_passes_arrives_where_it_belongs_and_changes_nothing_else(slot: Slot) -> None:
    window = Window(slot, SIZE)
    window.buffer[10:20] = b"0123456789"
    window.write(3 * PAGE + 10, 3 * PAGE + 20)

    assert bytes(slot.buffer[3 * PAGE + 10 : 3 * PAGE + 20]) == b"0123456789"
    assert slot.buffer[PAGE:].tobytes().count(0) == slot.size - PAGE - 10


def test_a_write_that_falls_short_is_gone_on_with(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    real, counts = os.pwrite, iter([1, 3, 100])
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: next(counts)], at))
    window = Window(slot, SIZE)
    window.buffer[:9] = b"abcdefghi"
    window.write(PAGE, PAGE + 9)

    assert bytes(slot.buffer[PAGE : PAGE + 9]) == b"abcdefghi"


def test_a_disk_that_fails_is_said(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="Input/output error"):
        Window(slot, SIZE).write(PAGE, 2 * PAGE)


class Kernel:
    """Whoever is asked to write back: fails so, from the call on that has this number."""

    def __init__(self, code: int, good: int = 0) -> None:
        self.code, self.good = code, good

    def sync_file_range(self, *_: Any) -> int:
        self.good -= 1
        if self.good >= 0:
            return 0
        ctypes.set_errno(self.code)
        return -1


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("good", [0, 1, 2, 3])
def test_what_the_disk_takes_and_then_loses_is_said(
    slot: Slot, code: int, good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write is over when the page cache has it. Unheard of, the failure was read back, sealed, and given a digest."""
    monkeypatch.setattr(windows, "_libc", Kernel(code, good))
    window = Window(slot, SIZE)

    def fill() -> None:
        for number in range(1, 5):
            window.write(number * SIZE, (number + 1) * SIZE)
        window.close()

    with pytest.raises(OSError, match=re.escape(os.strerror(code))):
        fill()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_that_cannot_write_back_a_part_is_asked_for_all(
    slot: Slot, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = os.fdatasync, list[int]()
    monkeypatch.setattr(os, "fdatasync", lambda fd: (asked.append(fd), real(fd)))
    monkeypatch.setattr(windows, "_libc", Kernel(code))
    window = Window(slot, SIZE)
    window.buffer[:3] = b"abc"
    window.write(PAGE, PAGE + 3)
    window.close()

    assert bytes(slot.buffer[PAGE : PAGE + 3]) == b"abc"
    assert set(asked) == {slot.fd}


def test_what_is_put_is_in_the_slot_and_not_in_memory(slot: Slot) -> None:
    data = memoryview(bytes(range(256)) * (SIZE // 256))
    before = resident(slot)
    put(slot, PAGE, data)

    assert resident(slot) <= before
    assert os.pread(slot.fd, SIZE, PAGE) == data
    assert slot.buffer[PAGE : PAGE + SIZE] == data


def test_what_is_put_and_does_not_arrive_is_said(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_libc", Kernel(errno.EIO))

    with pytest.raises(OSError, match="Input/output error"):
        put(slot, PAGE, memoryview(b"abc"))


def test_what_moved_and_did_not_arrive_is_said(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_libc", Kernel(errno.EIO, good=20))
    memory = Slot.create(slot.size)
    window = Window(slot, SIZE)

    with pytest.raises(OSError, match="Input/output error"):
        window.move(memory)
    memory.close()


@pytest.mark.root
@pytest.mark.parametrize("what", ["passes", "lies beside"])
def test_what_a_real_disk_did_not_keep_is_said_before_the_slot_is_sealed(tmp_path: Path, what: str) -> None:
    """The shards' headers are written through the slot's mapping, and may have many pages."""
    size, passes = 1024 * 1024, what == "passes"
    with (
        failing_disk(tmp_path, 16 * size) as disk,
        contextlib.closing(Slot.create(4 * size, disk.root)) as slot,
    ):
        if not passes:  # where the windows go there are blocks already
            with_windows(slot, size, 2 * size)
        disk.fail()
        if not passes:
            slot.buffer[PAGE:size] = b"h" * (size - PAGE)

        # The last one: the kernel had written back before us, and ext4 has given up its journal for it.
        with pytest.raises(OSError, match=r"No space left|Input/output error|Read-only file system"):
            with_windows(slot, size, 2 * size)


def with_windows(slot: Slot, at: int, end: int) -> None:
    window = Window(slot, SIZE)
    window.buffer[:] = b"x" * SIZE
    for start in range(at, end, SIZE):
        window.write(start, start + SIZE)
    window.close()


def test_no_more_than_a_few_windows_stay_in_memory(tmp_path: Path) -> None:
    size = 4 * 1024 * 1024
    slot = Slot.create(20 * size, tmp_path)
    os.posix_fadvise(slot.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    window = Window(slot, size)
    for number in range(1, 19):
        window.write(number * size, (number + 1) * size)

    assert resident(slot) <= 3 * size // PAGE
    window.close()
    assert resident(slot) <= size // PAGE
    slot.close()


def test_nothing_is_written_where_there_is_nothing(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", None)
    Window(slot, SIZE).write(PAGE, PAGE)


def test_a_slot_tells_by_its_descriptor_what_it_is_made_of(slot: Slot, tmp_path: Path) -> None:
    memory = Slot.create(PAGE * 2)
    again = Slot(os.dup(slot.fd))

    assert (memory.on_disk, slot.on_disk, again.on_disk) == (False, True, True)
    assert list(tmp_path.iterdir()) == []
    slot.populate()  # asks for no page
    memory.close()
    again.close()
