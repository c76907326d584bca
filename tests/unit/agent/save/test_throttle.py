from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from harness.agent.save import throttle as module
from harness.agent.save.throttle import Throttle
from harness.snapshots.commit import Attempt
from tests.support.clock import FakeClock

MB = 10**6
LINK, LIMIT = 40 * MB, 10 * MB
PART = 16 * MB


class Pause(threading.Condition):
    """Its waits take the clock's time, and none of the test's."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._clock.advance(timeout)
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    found = FakeClock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=found))
    return found


def paced(clock: FakeClock) -> Throttle:
    throttle = Throttle(LIMIT)
    throttle._changed = Pause(clock)
    throttle.begin(Attempt())
    return throttle


def test_a_pause_in_which_nothing_is_on_its_way_is_no_time(clock: FakeClock) -> None:
    throttle = paced(clock)
    for _ in range(8):
        clock.advance(PART / LINK)
        throttle.count(PART)
    throttle.end()

    assert throttle.rates.store_bytes_s == pytest.approx(LINK)


@pytest.mark.parametrize("in_flight", [2, 3, 16])
def test_what_is_still_on_its_way_in_a_pause_takes_time(clock: FakeClock, in_flight: int) -> None:
    """Parts in flight share the link; the pauses behind the first acknowledged ones are their time too."""
    throttle, began = paced(clock), clock()
    all_there_at = began + in_flight * PART / LINK
    told = 0

    def idle() -> float:
        return max(0.0, clock() - all_there_at)

    clock.advance(PART / LINK)
    while told < in_flight:
        there = min(in_flight, round((clock() - began) * LINK) // PART)
        throttle.count((there - told) * PART, idle_s=idle)
        told = there
    throttle.end()

    assert throttle.rates.store_bytes_s == pytest.approx(LINK)
