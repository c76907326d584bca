"""A window onto a slot on a disk: what passes arrives, and does not stay in memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.ipc.slots import PAGE, Slot
from harness.ipc.window import Window

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
