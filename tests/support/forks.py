"""What a forked child sees of its parent's memory."""

from __future__ import annotations

import os
from pathlib import Path


def seen_in_a_fork(name: str) -> bool:
    """Whether a forked child has a mapping of that name."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, b"1" if name in Path("/proc/self/maps").read_text() else b"0")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    answer = os.read(read, 1)
    os.close(read)
    os.close(write)
    return answer == b"1"
