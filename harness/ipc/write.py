"""Write: all of some bytes at a place of a file. `os.pwrite` may write less, and a full disk makes it."""

from __future__ import annotations

import os


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all bytes at `offset`. Blocks on the disk. Raises OSError (ENOSPC, EIO): a part of them may be written."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
