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
from dataclasses import dataclass
from typing import Any, NoReturn

from harness.errors import ConfigError, StateError

Handler = Callable[[int, types.FrameType | None], Any] | int | None


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
        self.exiting = False
        """Whether the program has called sys.exit."""
        self._exit_failed = False
        self._handlers: dict[int, list[Handler]] = {}
        self._calling: dict[int, int] = {}
        self._install = signal.signal
        self._forked = False

    @property
    def failed(self) -> bool:
        """Whether the process ends by an exception, or by an exit code that says so."""
        return self._exit_failed or self._error is not None

    @property
    def hopeless(self) -> bool:
        """Whether it ends by one of our own errors that the same program would meet again."""
        error = self._error
        while error is not None and not isinstance(error, ConfigError | StateError):
            error = error.__cause__ or error.__context__  # a framework may have wrapped it
        return error is not None

    @property
    def _error(self) -> BaseException | None:
        return getattr(sys, "last_value", None)

    def hook(self) -> None:
        """From now on it tells."""
        python_exit = sys.exit

        def exit_(code: Any = None, /) -> NoReturn:
            self.exiting, self._exit_failed = True, code not in (None, 0)
            python_exit(code)

        sys.exit = exit_  # the interpreter tells nobody at exit whether a SystemExit was a failure
        os.register_at_fork(after_in_child=self._in_child)
        atexit.register(self._on_exit)
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._handlers[signum] = [signal.signal(signum, self._on_signal)]
            self._hook_signal()

    def has_handler(self, signum: int) -> bool:
        """Whether the program has one of its own: what it does next need not be another boundary."""
        handler = self._handlers.get(signum, [None])[-1]
        return callable(handler) and handler is not signal.default_int_handler

    # ---- signals ----------------------------------------------------------------------------------------------------

    def _hook_signal(self) -> None:
        """A handler that the program installs from now on comes after ours, instead of taking its place."""
        real = self._install = signal.signal

        def install(signalnum: Any, handler: Any, /) -> Any:
            before = real(signalnum, handler)  # raises what it always did
            handlers = self._handlers.get(int(signalnum))
            if handlers is None or self._forked:
                return before
            real(signalnum, self._on_signal)
            before = handlers[-1]
            if handler == self._on_signal:  # it puts back what it had found
                del handlers[1:]
            elif handler in handlers:
                del handlers[handlers.index(handler) + 1 :]
            else:
                handlers.append(handler)
            return before

        signal.signal = install  # type: ignore[assignment]

    def _in_child(self) -> None:
        self._forked = True
        self._on_fork()

    def _on_signal(self, signum: int, frame: types.FrameType | None) -> None:
        """Ours first, then the program's. A second Ctrl-C is Python's own."""
        nested = self._calling.get(signum, 0)  # the program's handler may call the one that was there before: us
        taken = nested > 0
        if not nested:
            again = self.ctrl_c
            self.ctrl_c |= signum == signal.SIGINT
            taken = not (again and signum == signal.SIGINT) and self._takes_signal(signum)
        handlers = self._handlers[signum]
        if nested >= len(handlers):
            return
        handler = handlers[-1 - nested]
        self._calling[signum] = nested + 1
        try:
            if callable(handler) and not (taken and handler is signal.default_int_handler):
                handler(signum, frame)
            elif not taken and handler == signal.SIG_DFL:
                self._install(signum, signal.SIG_DFL)
                signal.raise_signal(signum)
        finally:
            self._calling[signum] = nested


@dataclass(frozen=True)
class Asking:
    """Where in the program somebody asks our iterator for more: a `for`, or whatever stands between it and us.

    When an iterator of ours is given up before its end, that tells a `break`, a `return` or an exception, which happen
    elsewhere, from `zip` or `islice` that are through: they give it up where they are asked for more themselves.
    """

    code: types.CodeType | None
    line: int | None

    @classmethod
    def now(cls) -> Asking:
        """Of the generator that calls this: who has called it."""
        frame = sys._getframe(1).f_back
        return cls(None, None) if frame is None else cls(frame.f_code, frame.f_lineno)


def script() -> str | None:
    """The training script's file, or `None` in a notebook, and for `-c` and `-m`."""
    main = sys.modules.get("__main__")
    if main is None or main.__spec__ is not None or not getattr(main, "__file__", None):
        return None
    return sys.argv[0] or None
