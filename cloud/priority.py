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

NICE = 10  # against a training thread that wants the same core, a ninth of it
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # ioprio_set(2) has no wrapper, in Python or in C
_WHO_THREAD = 1
_BEST_EFFORT_LAST = 2 << 13 | 7  # not "idle": a data loader that never pauses would starve that for ever


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
    """Give this thread, and those that it makes, the last turn at CPU and disk. For good."""
    with contextlib.suppress(OSError):  # forbidden by a sandbox: then it is done as everything else is
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    if (number := _IOPRIO_SET.get(platform.machine())) is not None:
        import ctypes  # 10 ms that only an agent pays

        ctypes.CDLL(None).syscall(number, _WHO_THREAD, 0, _BEST_EFFORT_LAST)  # refused by a sandbox: see above
