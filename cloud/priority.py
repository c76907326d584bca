"""Background: work that yields the CPU and the disk to other work, until it becomes urgent.

Owns the priority of background work, and how a thread learns of it. The thread that does such work calls
`Background.begin` once; every `Pool` that it makes from then on starts its threads at that priority. Knows neither
tiers nor notices.

Linux keeps a nice value and an I/O priority for each thread, and a new thread inherits both from the thread that made
it. An unprivileged process can give itself less CPU (nice) and never take it back (setpriority(2), RLIMIT_NICE); the
I/O priority it can change in both directions. So a thread that was lowered stays low, and new threads do the work that
has become urgent. Hence the thread that makes those threads is never lowered itself: it decides and waits,
and its pools move the bytes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from contextvars import ContextVar

NICE = 10  # below this process, and so below its trainer: a rival for the same core gets nine tenths of it
LAST_NICE = 19
_IOPRIO = {"x86_64": (252, 251), "aarch64": (31, 30)}  # ioprio_get(2), ioprio_set(2): no wrapper, in Python or in C
_WHO_THREAD = 1
_CLASS_SHIFT, _IDLE = 13, 3
_BEST_EFFORT_LAST = 2 << _CLASS_SHIFT | 7  # not "idle": a data loader that never pauses would starve it forever


class Background:
    """Whether one kind of work runs in the background now. Any thread sets it, pools read it.

    Attributes:
        urgent: whether work that begins from now on runs at full speed instead of in the background.
    """

    def __init__(self) -> None:
        self.urgent = False

    def begin(self) -> None:
        """Declare that this thread, and the pools that it makes from now on, do this kind of work."""
        _current.set(self)


_current: ContextVar[Background | None] = ContextVar("background", default=None)


def current() -> Background | None:
    """Return the kind of background work that this thread does; `None` for ordinary work."""
    return _current.get()


def lower() -> None:
    """Lower this thread, and the threads that it makes, to background priority for CPU and disk. Cannot be undone.

    The new nice value is relative to the process, whose main thread is never lowered: a run that was started under
    `nice` has a trainer that is nice as well, and root may set a value that is *less* nice than that. A thread whose
    I/O class is "idle" keeps that class.
    """
    with contextlib.suppress(OSError):  # forbidden by a sandbox: the thread keeps the ordinary priority
        ordinary = os.getpriority(os.PRIO_PROCESS, os.getpid())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(LAST_NICE, ordinary + NICE))
    if (numbers := _IOPRIO.get(platform.machine())) is not None:
        import ctypes  # 10 ms that only an agent pays

        get, set_ = numbers
        libc = ctypes.CDLL(None)
        if libc.syscall(get, _WHO_THREAD, 0) >> _CLASS_SHIFT != _IDLE:
            libc.syscall(set_, _WHO_THREAD, 0, _BEST_EFFORT_LAST)  # refused by a sandbox: see above
