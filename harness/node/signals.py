"""Signals to `harness resume`: kept until the loop looks, and passed on to the run once.

Owns the handlers, which set a value and nothing more, and the check whether the run has received the same signal
itself: a terminal, a shell or Slurm signals every process of a job, and a second signal means "at once" to an agent.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType

from cloud.notice import Clock
from harness.ipc.process import is_ignored
from harness.node.attempts import RunAttempt

LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASSED_ON = (*LEAVE, signal.SIGUSR1, signal.SIGUSR2)
HEARD_AFTER_S = 0.5  # by then an agent that had the signal from elsewhere reports that it is leaving


class Signals:
    """The process's signals. Main thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._waiting: list[tuple[float, int]] = []
        self._first = True
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.heard: Callable[[], bool] = lambda: False
        """Returns whether the run's agent reports that it is leaving."""
        self.asked: int | None = None
        """The first signal that asks us to exit; `None` while there was none."""

    def install(self) -> None:
        """Install the handlers; a child process has the default ones again."""
        for signum in PASSED_ON:
            if not is_ignored(signum):
                signal.signal(signum, self._note)

    def forget(self) -> None:
        """Another attempt begins: drop signals for the previous program, except those that ask us to exit."""
        self._waiting = [(came_at, signum) for came_at, signum in self._waiting if signum in LEAVE]
        if self.asked is not None and not self._waiting:  # the agent that was signalled has died, its program has not
            self._waiting.append((self._clock(), self.asked))
            self._first = True

    def pass_on(self, attempt: RunAttempt) -> None:
        """Pass pending signals on to `attempt`; the first that asks to exit only if the run did not get it itself."""
        while self._waiting:
            came_at, signum = self._waiting[0]
            if signum in LEAVE and self._first:
                if self._clock() - came_at < HEARD_AFTER_S:
                    return
                self._first = False
                if self.heard():
                    self._waiting.pop(0)
                    continue
            self._waiting.pop(0)
            attempt.signal(signum)

    def pause(self, seconds: float, pidfd: int | None = None) -> None:
        """Wait until a signal comes or the process behind `pidfd` ends, for `seconds` at most."""
        if self._waiting:
            seconds = min(seconds, HEARD_AFTER_S / 5)
        poll = select.poll()
        for fd in (self._read, pidfd):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        poll.poll(seconds * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._waiting.append((self._clock(), signum))
        if signum in LEAVE and self.asked is None:
            self.asked = signum
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"\0")
