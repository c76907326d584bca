"""Signals that the agent's process gets: those that end a run, and those that are the program's.

Owns which they are, and their handlers. What follows is decided in the main loop.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from harness.ipc.process import is_ignored

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def install(
    post: Callable[[Callable[[], None]], None], ends: Callable[[int], None], other: Callable[[int], None]
) -> None:
    """Handle signals from now on. Main thread only.

    Args:
        post: runs an action in the main loop soon.
        ends: called there with a signal that ends the run, unless this process was started with it ignored.
        other: called there with a signal that is for the program.
    """
    for signum in _ENDING:
        if not is_ignored(signum):
            signal.signal(signum, lambda number, _frame: post(lambda: ends(number)))
    for signum in _PASSED_ON:
        signal.signal(signum, lambda number, _frame: post(lambda: other(number)))


def ignore() -> None:
    """Ignore signals once the end is recorded, so that none changes the exit code.

    Otherwise Python would restore their deadly default.
    """
    for signum in (*_ENDING, *_PASSED_ON):
        signal.signal(signum, signal.SIG_IGN)
