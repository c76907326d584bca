"""FakeClock: monotonic seconds that pass only when a test says so, or when the code under test sleeps."""

from __future__ import annotations


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
