"""What a thread's priority is: CPU and disk, as Linux keeps them."""

from __future__ import annotations

import ctypes
import os
import platform
import threading

from cloud.priority import LAST_NICE, NICE

_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}[platform.machine()]


def priority() -> tuple[int, int]:
    """Of the calling thread: its nice value, and what ioprio_get(2) says."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), ctypes.CDLL(None).syscall(_IOPRIO_GET, 1, 0)


ORDINARY = priority()  # of whoever runs the tests
LAST = (min(LAST_NICE, ORDINARY[0] + NICE), ORDINARY[1] if ORDINARY[1] >> 13 == 3 else 2 << 13 | 7)
