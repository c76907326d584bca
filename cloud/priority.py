"""Background: work that leaves the CPU and the disk to others, until it is urgent.

Owns what "leaves to others" means, and how threads come to know. Whoever does the work says so once, in its own thread
(`Background.begin`); every `Pool` that is made there from then on starts its threads accordingly. Knows neither tiers
nor notices.

Linux keeps both values for each thread, and a new thread begins with its maker's. An unprivileged process can lower its
nice value and never raise it again (setpriority(2), RLIMIT_NICE); the I/O value it can. So a thread that was lowered
stays so, and what has become urgent is done by threads that are made anew. Hence whoever makes them is never lowered
itself: it decides and waits, and leaves bytes to its pools.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from contextvars import ContextVar

NICE = 10  # below this process, and so below its trainer: who wants the same core gets nine tenths of it
LAST_NICE = 19
_IOPRIO = {"x86_64": (252, 251), "aarch64": (31, 30)}  # ioprio_get(2), ioprio_set(2): no wrapper, in Python or in C
_WHO_THREAD = 1
_CLASS_SHIFT, _IDLE = 13, 3
_BEST_EFFORT_LAST = 2 << _CLASS_SHIFT | 7  # not "idle": a data loader that never pauses would starve that for ever


class Background:
    """Whether one kind of work is done in the background now. Set by any thread, asked by pools.

    Attributes:
        urgent: no longer: what is begun from now on is done as fast as it goes.
    """

    def __init__(self) -> None:
        self.urgent = False

    def begin(self) -> None:
        """From now on what this thread does, and has done by pools, is of this kind."""
        _current.set(self)


_current: ContextVar[Background | None] = ContextVar("background", default=None)


def current() -> Background | None:
    """What kind of work this thread does; `None` for the ordinary."""
    return _current.get()


def lower() -> None:
    """Give this thread, and those that it makes, the last turn at CPU and disk. For good.

    Relative to the process, whose main thread nobody lowers: a run that was started under `nice` has a trainer that is
    nice as well, and root may set a value that is *less* nice than that. A thread that is the idle disk's stays so.
    """
    with contextlib.suppress(OSError):  # forbidden by a sandbox: then it is done as everything else is
        ordinary = os.getpriority(os.PRIO_PROCESS, os.getpid())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(LAST_NICE, ordinary + NICE))
    if (numbers := _IOPRIO.get(platform.machine())) is not None:
        import ctypes  # 10 ms that only an agent pays

        get, set_ = numbers
        libc = ctypes.CDLL(None)
        if libc.syscall(get, _WHO_THREAD, 0) >> _CLASS_SHIFT != _IDLE:
            libc.syscall(set_, _WHO_THREAD, 0, _BEST_EFFORT_LAST)  # refused by a sandbox: see above
