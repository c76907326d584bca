"""A signal reaches the run once: ours is passed on, unless the run has heard the same one itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from harness.node.attempts import Ended
from harness.node.signals import HEARD_AFTER_S, PASSED_ON, Signals
from tests.support.clock import FakeClock
from tests.support.node import FakeLife


class HearingLife(FakeLife):
    def __init__(self) -> None:
        super().__init__(Ended(0))
        self.heard: list[int] = []

    def signal(self, signum: int) -> None:
        self.heard.append(signum)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def signals(clock: FakeClock) -> Iterator[Signals]:
    before = {signum: signal.getsignal(signum) for signum in PASSED_ON}
    made = Signals(clock)
    made.install()
    yield made
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_us_alone_is_passed_on_once(signals: Signals, clock: FakeClock, signum: int) -> None:
    attempt = HearingLife()
    os.kill(os.getpid(), signum)
    for _ in range(5):
        signals.pass_on(attempt)
        clock.advance(HEARD_AFTER_S)

    assert (attempt.heard, signals.asked) == ([signum], signum)


def test_a_signal_to_the_whole_group_is_not_the_second_one_that_means_at_once(
    signals: Signals, clock: FakeClock
) -> None:
    attempt = HearingLife()
    signals.heard = lambda: True
    os.kill(os.getpid(), signal.SIGTERM)
    clock.advance(HEARD_AFTER_S)
    signals.pass_on(attempt)

    assert (attempt.heard, signals.asked) == ([], signal.SIGTERM)


def test_a_second_signal_is_passed_on_at_once(signals: Signals, clock: FakeClock) -> None:
    attempt = HearingLife()
    signals.heard = lambda: True
    os.kill(os.getpid(), signal.SIGTERM)
    clock.advance(HEARD_AFTER_S)
    signals.pass_on(attempt)
    os.kill(os.getpid(), signal.SIGTERM)
    signals.pass_on(attempt)

    assert attempt.heard == [signal.SIGTERM]


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_what_is_meant_for_the_program_is_passed_on_and_asks_nobody_to_leave(signals: Signals, signum: int) -> None:
    attempt = HearingLife()
    os.kill(os.getpid(), signum)
    signals.pass_on(attempt)

    assert (attempt.heard, signals.asked) == ([signum], None)


def test_what_was_meant_for_one_program_is_not_for_the_next(signals: Signals, clock: FakeClock) -> None:
    attempt = HearingLife()
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    signals.forget()
    clock.advance(HEARD_AFTER_S)
    signals.pass_on(attempt)

    assert attempt.heard == [signal.SIGTERM]


def test_a_program_that_outlives_the_agent_that_was_told_to_leave_is_told_too(
    signals: Signals, clock: FakeClock
) -> None:
    told, lives_on = HearingLife(), HearingLife()
    os.kill(os.getpid(), signal.SIGTERM)
    for attempt in (told, lives_on):
        signals.forget()
        clock.advance(HEARD_AFTER_S)
        signals.pass_on(attempt)
        clock.advance(HEARD_AFTER_S)
        signals.pass_on(attempt)

    assert (told.heard, lives_on.heard) == ([signal.SIGTERM], [signal.SIGTERM])


def test_a_signal_ends_a_pause(signals: Signals) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)

    signals.pause(60.0)  # the test's time-out is the proof
