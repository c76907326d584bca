"""The process that trains: its signals, its forks, and how it ends.

Owns the handlers that were there before ours, and what the interpreter tells nobody at exit: whether it is a failure.
Decides nothing; knows neither snapshots nor the agent. Everything here is called in the main thread.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn


class Process:
    """One for each Checkpointer; lives as long as the process."""

    def __init__(
        self, takes_signal: Callable[[int], bool], on_fork: Callable[[], None], on_exit: Callable[[], None]
    ) -> None:
        """Changes nothing before `hook`.

        Args:
            takes_signal: whether a signal is answered at the next boundary; where not, what was there before us does.
            on_fork: called in each forked child.
            on_exit: called when the interpreter ends, while everything is there still.
        """
        self._takes_signal, self._on_fork, self._on_exit = takes_signal, on_fork, on_exit
        self.ctrl_c = False
        """Whether it was pressed."""
        self._exit_failed = False
        self._previous_handlers: dict[int, Any] = {}

    @property
    def failed(self) -> bool:
        """Whether the process ends by an exception, or by an exit code that says so."""
        return self._exit_failed or getattr(sys, "last_value", None) is not None

    def hook(self) -> None:
        """From now on it tells."""
        python_exit = sys.exit

        def exit_(code: Any = None, /) -> NoReturn:
            self._exit_failed = code not in (None, 0)
            python_exit(code)

        sys.exit = exit_  # the interpreter tells nobody at exit whether a SystemExit was a failure
        os.register_at_fork(after_in_child=self._on_fork)
        atexit.register(self._on_exit)
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._previous_handlers[signum] = signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: types.FrameType | None) -> None:
        """A second Ctrl-C is Python's own."""
        again = self.ctrl_c
        self.ctrl_c |= signum == signal.SIGINT
        previous = self._previous_handlers.get(signum)
        if (again and signum == signal.SIGINT) or not self._takes_signal(signum):
            _call(previous, signum, frame)
        elif callable(previous) and previous is not signal.default_int_handler:
            previous(signum, frame)


def _call(handler: Callable[..., Any] | int | None, signum: int, frame: types.FrameType | None) -> None:
    """Do what would have happened without us."""
    if callable(handler):
        handler(signum, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)


def script() -> str | None:
    """The training script's file, or `None` in a notebook, and for `-c` and `-m`."""
    main = sys.modules.get("__main__")
    if main is None or main.__spec__ is not None or not getattr(main, "__file__", None):
        return None
    return sys.argv[0] or None
