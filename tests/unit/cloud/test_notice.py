from __future__ import annotations

import threading

from cloud.notice import Deadline
from tests.support.clock import FakeClock


def test_what_is_cancelled_has_no_time_left_whatever_the_clock_says() -> None:
    clock, cancelled = FakeClock(), threading.Event()
    deadlines = [
        Deadline.never(clock).unless(cancelled),
        Deadline.after(60.0, clock).unless(cancelled),
        Deadline.after(60.0, clock).unless(cancelled).sooner(5.0),
    ]
    assert not any(deadline.expired for deadline in deadlines)

    cancelled.set()

    assert all(deadline.expired for deadline in deadlines)
    assert [deadline.remaining_s for deadline in deadlines] == [0.0] * 3


def test_a_bound_inside_the_whole_is_never_later_than_the_whole() -> None:
    clock = FakeClock()
    whole = Deadline.after(10.0, clock)

    assert (whole.sooner(5.0).remaining_s, whole.sooner(60.0).remaining_s) == (5.0, 10.0)
    clock.advance(10.0)
    assert whole.expired
    assert whole.remaining_s == 0.0
