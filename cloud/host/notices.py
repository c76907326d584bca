"""SignalSource and DrainFileSource: announcements that come from the host itself.

Owns how a signal or a file becomes a Notice. Installs no handler: the process's one signal handler calls `received`.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from cloud.errors import Unavailable
from cloud.notice import Clock, Deadline, Notice, NoticeKind


class SignalSource:
    """Announces the signals that `received` reports; a signal is never withdrawn.

    Args:
        grace_s: seconds between the signal and the sender's SIGKILL (Kubernetes: 30, systemd: 90).
        clock: monotonic seconds.
    """

    name = "signal"
    lead_s: float | None = None
    expected = True

    def __init__(self, grace_s: float, clock: Clock = time.monotonic) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._received: dict[int, Notice] = {}

    def received(self, signum: int) -> None:
        """Note a signal. Only sets a value, so a handler may call it. The first signal of a kind fixes the deadline."""
        name = signal.Signals(signum).name
        deadline = Deadline.after(self._grace_s, self._clock)
        notice = Notice(f"signal {name}", NoticeKind.INTERRUPT, f"signal {name}", deadline)
        self._received.setdefault(signum, notice)

    def poll(self) -> Sequence[Notice]:
        """See `NoticeSource.poll`. Does not block."""
        return tuple(self._received.copy().values())

    def close(self) -> None:
        """Do nothing: no resource is held."""


class DrainFileSource:
    """Announces the end while a file exists: `touch` it to drain a node by hand or from a script.

    A number in the file is the seconds until the end, counted from when the file is first seen; with any other content,
    `grace_s` applies. Writing the file again is a new announcement; removing it withdraws the announcement.

    Args:
        path: the file.
        grace_s: seconds until the end if the file does not say.
        clock: monotonic seconds.
    """

    name = "drain file"
    lead_s: float | None = None
    expected = True

    def __init__(self, path: Path, grace_s: float, clock: Clock = time.monotonic) -> None:
        self._path = path
        self._grace_s = grace_s
        self._clock = clock
        self._in_force: Notice | None = None

    def poll(self) -> Sequence[Notice]:
        """See `NoticeSource.poll`. Raises `Unavailable` if it cannot find out whether the file exists."""
        try:
            status = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            self._in_force = None
            return ()
        except OSError as err:
            raise Unavailable(f"cannot look for the drain file {self._path}: {err.strerror}") from err
        identity = f"drain file {self._path} {status.st_ino}-{status.st_mtime_ns}"
        if self._in_force is None or self._in_force.id != identity:
            text = self._text()
            deadline = Deadline.after(self._seconds(text), self._clock)
            self._in_force = Notice(identity, NoticeKind.INTERRUPT, "drain file", deadline, text, while_it_stands=True)
        return (self._in_force,)

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _text(self) -> str:
        """Return the beginning of the file; empty if it cannot be read, since its existence is enough."""
        try:
            if not self._path.is_file():
                return ""  # opening a pipe would block
            with self._path.open("rb") as file:
                return file.read(200).decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def _seconds(self, text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            return self._grace_s
        return seconds if math.isfinite(seconds) and seconds >= 0 else self._grace_s
