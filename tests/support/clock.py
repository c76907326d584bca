"""FakeClock: monotonic seconds that pass only when a test says so, or when the code under test sleeps."""

from __future__ import annotations

import time

from cloud.notice import Deadline


class FakeClock:
    """A `Clock` and its `sleep`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.advance(seconds)


def standing(seconds: float) -> Deadline:
    """A deadline that is always so far away: what is asked of it does not depend on how fast the machine is today."""
    return Deadline(seconds, lambda: 0.0)


class ShiftedClock:
    """The real monotonic clock, ahead by what a test has added: what takes a second here may take any time there.

    Put it in the place of a module's `time`. A stall of the machine is nothing beside a jump of a thousand seconds.
    """

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def jump(self, seconds: float) -> None:
        self._ahead_s += seconds
