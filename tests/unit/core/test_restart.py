from __future__ import annotations

import dataclasses

from hypothesis import example, given
from hypothesis import strategies as st

from harness.core import events
from harness.core.restart import Moments, Parts, divide

USUAL = Moments(
    ended_at=100.0,
    began_at=103.0,
    spawned_at=103.4,
    waits=[(107.6, 107.6), (109.0, 110.0)],
    wanted_at=110.0,
    stepped_at=112.0,
)


def test_a_restart_is_divided_by_what_its_program_was_doing() -> None:
    parts = divide(USUAL)

    assert parts == Parts(detect=3000, start=6000, wait=1000, first_step=2000)
    assert parts.total == 12_000


def test_a_fetch_that_was_over_before_anybody_wanted_it_costs_nothing() -> None:
    parts = divide(dataclasses.replace(USUAL, waits=[(107.6, 107.6)]))

    assert (parts.start, parts.wait) == (7000, 0)
    assert parts.total == 12_000


def test_where_nobody_knows_of_a_life_before_the_total_begins_with_this_one() -> None:
    parts = divide(dataclasses.replace(USUAL, ended_at=None))

    assert parts.detect == 0
    assert parts.total == 9_000


def test_a_clock_of_another_host_that_is_ahead_makes_no_time_negative() -> None:
    parts = divide(dataclasses.replace(USUAL, ended_at=900.0))

    assert parts == dataclasses.replace(divide(USUAL), detect=0)


def test_a_program_that_starts_its_own_agent_begins_before_it() -> None:
    parts = divide(dataclasses.replace(USUAL, began_at=107.0, spawned_at=103.0))

    assert (parts.detect, parts.start) == (3000, 6000)
    assert parts.total == 12_000


def test_a_shell_that_becomes_the_next_program_counts_from_the_end_of_the_one_before() -> None:
    """`sh -c 'python train.py; exec python train.py'`: the process is as old as the whole first life."""
    parts = divide(dataclasses.replace(USUAL, spawned_at=20.0))

    assert parts.detect == 0
    assert parts.total == 12_000


MOMENT = st.one_of(st.floats(-1e5, 1e5), st.integers(-20, 20).map(float))
SPAN = st.tuples(MOMENT, MOMENT)


@given(
    st.builds(
        Moments,
        ended_at=st.none() | MOMENT,
        began_at=MOMENT,
        spawned_at=MOMENT,
        waits=st.lists(SPAN, max_size=4),
        wanted_at=MOMENT,
        stepped_at=MOMENT,
    )
)
@example(USUAL)
@example(dataclasses.replace(USUAL, wanted_at=0.0, waits=[]))
def test_in_whatever_order_things_happened_the_parts_sum_to_the_total(moments: Moments) -> None:
    parts = divide(moments)

    begin = min(moments.began_at, moments.spawned_at)
    if moments.ended_at is not None:
        was_there = moments.spawned_at < moments.ended_at <= moments.began_at
        begin = moments.ended_at if was_there else min(begin, moments.ended_at)
    assert all(milliseconds >= 0 for milliseconds in vars(parts).values())
    assert sum(vars(parts).values()) == max(0, round(moments.stepped_at * 1000) - round(begin * 1000))


def test_a_restart_is_told_in_one_line() -> None:
    told = events.Restarted(
        step=13, snapshot="00000002-000000000012", tier="remote", total_s=9.87, detect_s=3.2, start_s=5.5,
        wait_s=0.1, first_step_s=1.07, fetching_s=4.3,
    )  # fmt: skip

    assert told.words() == (
        "9.9 s from the end of the previous attempt to step 13: detect 3.2, start 5.5, wait 0.1, first step 1.1; "
        "4.2 s of fetching overlapped with the start"
    )
    assert events.Restarted(**told.fields()) == told
