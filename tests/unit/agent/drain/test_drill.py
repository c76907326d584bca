from __future__ import annotations

import socket

import pytest

from harness.agent.drain.drill import Drill, words
from harness.core.events import Drilled
from harness.core.policy.drain import Choice, Plan
from harness.ipc.channel import Channel
from tests.support.clock import FakeClock

IN_S = 120.0


def begin(clock: FakeClock, choice: Choice, *, step: int, sealed: int | None) -> Drill:
    ours, theirs = socket.socketpair()
    ours.close()  # whoever asked did not wait
    theirs.close()
    return Drill(Channel(ours), IN_S, Plan(choice, 10.0, IN_S), step, sealed, clock)


def test_what_counts_is_the_first_snapshot_from_the_notice_on() -> None:
    clock = FakeClock()
    drill = begin(clock, Choice.NEW, step=100, sealed=90)
    drill.sealed(99)  # it was on its way when the notice came: a trainer that leaves does not stop for it
    assert drill.outcome(99, clock()) is None
    clock.advance(3.0)
    drill.sealed(101)
    drill.sealed(130)  # training goes on; a trainer that had left would not have come so far
    assert drill.outcome(99, clock()) is None

    clock.advance(4.0)

    assert drill.outcome(101, clock()) == Drilled(durable_step=101, durable_in_s=7.0, has_s=IN_S, lost_steps=0)


def test_the_time_is_that_of_the_commit_not_of_the_moment_when_it_is_noticed() -> None:
    clock = FakeClock()
    drill = begin(clock, Choice.NEW, step=100, sealed=None)
    drill.sealed(101)
    clock.advance(5.0)
    committed_at = clock()
    clock.advance(1.0)

    drilled = drill.outcome(101, committed_at)

    assert drilled is not None
    assert drilled.durable_in_s == 5.0


@pytest.mark.parametrize(("durable", "sealed", "lost"), [(None, 101, 101), (80, 101, 21), (80, None, 20)])
def test_what_is_not_durable_at_the_end_of_the_window_would_be_lost(
    durable: int | None, sealed: int | None, lost: int
) -> None:
    clock = FakeClock()
    drill = begin(clock, Choice.NEW, step=100, sealed=80)
    if sealed is not None:
        drill.sealed(sealed)
    clock.advance(IN_S - 0.1)
    assert drill.outcome(durable, None) is None

    clock.advance(0.1)

    assert drill.outcome(durable, None) == Drilled(durable_step=durable, durable_in_s=None, has_s=IN_S, lost_steps=lost)


def test_a_step_that_was_durable_already_is_not_lost_however_long_the_next_one_takes() -> None:
    """A validation, say: a trainer that leaves does so at its next safe point, at the step that it has."""
    clock = FakeClock()
    drill = begin(clock, Choice.NEW, step=100, sealed=100)
    durable_at = clock() - 5.0
    clock.advance(IN_S)

    assert drill.outcome(100, durable_at) == Drilled(durable_step=100, durable_in_s=0.0, has_s=IN_S, lost_steps=0)


def test_where_only_the_newest_sealed_one_fits_the_steps_beyond_it_would_be_lost() -> None:
    clock = FakeClock()
    drill = begin(clock, Choice.NEWEST, step=100, sealed=90)
    drill.sealed(101)  # not by the drill: the interval was over
    clock.advance(2.0)

    assert drill.outcome(90, clock()) == Drilled(durable_step=90, durable_in_s=2.0, has_s=IN_S, lost_steps=10)


def test_whoever_asked_may_be_gone() -> None:
    clock = FakeClock()
    drill = begin(clock, Choice.NEW, step=1, sealed=None)

    drill.answer(Drilled(durable_step=1, durable_in_s=1.0, has_s=IN_S, lost_steps=0))
    drill.call_off("the program has ended")


@pytest.mark.parametrize(
    ("drilled", "told"),
    [
        (
            Drilled(durable_step=12034, durable_in_s=3.24, has_s=120.0, lost_steps=0),
            "durable 3.2 s after the notice, of 120 s: step 12 034; nothing would be lost",
        ),
        (
            Drilled(durable_step=90, durable_in_s=2.0, has_s=120.0, lost_steps=10),
            "durable 2.0 s after the notice, of 120 s: step 90; 10 steps would be lost",
        ),
        (
            Drilled(durable_step=None, durable_in_s=None, has_s=30.0, lost_steps=1200),
            "NOT durable in 30 s: 1 200 steps would be lost; nothing is durable",
        ),
    ],
)
def test_the_outcome_is_told_with_its_numbers(drilled: Drilled, told: str) -> None:
    assert words(drilled) == told
