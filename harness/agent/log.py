"""Log: lines for people on stderr, written by a thread of its own.

Owns the descriptor's use. A reader that has stopped (a pager, Ctrl-S, a log shipper that hangs) blocks every write to a
pipe or terminal; the agent must keep hearing notices meanwhile. So `line` waits a moment for its line to be written,
so that lines and what follows them keep their order; once a write hangs, it waits no more until that write is done.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque

from harness.core.words import printable

PATIENCE_S = 0.2
MOST_LINES = 2000  # that wait; further lines are dropped, and counted


def open_missing_descriptors() -> None:
    """Give a process that was started without stdin, stdout or stderr the null device instead. First thing in it.

    Otherwise the first file or socket that it opens is its stderr, and messages are written into that.
    """
    with contextlib.suppress(OSError):
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(fd, True)
        os.close(fd)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115, PTH123


class Log:
    """Safe for threads. The thread that writes is a daemon: a write that hangs holds up no end.

    Args:
        fd: where to write.
    """

    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self.is_terminal = os.isatty(fd)
        """Whether a person sees what is written."""
        self._condition = threading.Condition()
        self._waiting: deque[str] = deque()
        self._writing = self._hangs = False
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        """Write a message to the user that is no event."""
        self.line(f"harness: {printable(text)}")

    def line(self, text: str) -> None:
        """Write one line. Blocks for `PATIENCE_S` at most, and not at all while an earlier write hangs."""
        with self._condition:
            if len(self._waiting) >= MOST_LINES:
                self._dropped += 1
                return
            self._waiting.append(text)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="harness-log", daemon=True)
                self._thread.start()
            self._condition.notify_all()
            if not self._hangs:
                self._hangs = not self._condition.wait_for(self._is_idle, PATIENCE_S)

    def close(self, wait_s: float) -> None:
        """Wait until everything is written, for `wait_s` at most."""
        with self._condition:
            self._condition.wait_for(self._is_idle, wait_s)

    def _is_idle(self) -> bool:
        return not self._waiting and not self._writing

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting)
                lines, dropped = list(self._waiting), self._dropped
                self._waiting.clear()
                self._writing, self._dropped = True, 0
            if dropped:
                lines.append(f"harness: {dropped} lines were dropped because stderr was blocked")
            self._write("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
            with self._condition:
                self._writing = self._hangs = False
                self._condition.notify_all()

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone, the disk is full: that is when saving matters most
            while data:
                data = data[os.write(self._fd, data) :]
