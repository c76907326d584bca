from __future__ import annotations

import dataclasses

from hypothesis import example, given
from hypothesis import strategies as st

from harness.core import events
from harness.core.restart import NO_TIME, Moments, Parts, divide

USUAL = Moments(
    ended_at=100.0,
    began_at=103.0,
    spawned_at=103.4,
    joining=(107.5, 107.501),
    waits=[(107.6, 107.6), (109.0, 110.0)],
    filling=(103.3, 109.6),
    verify_share=0.25,
    restoring=(110.0, 110.7),
    stepped_at=112.0,
)


def test_a_restart_is_divided_by_what_its_program_was_doing() -> None:
    parts = divide(USUAL)

    assert parts == Parts(
        detect=3000,
        boot=401,  # until the program is started, and until it has found its agent
        import_=5599,
        locate=400,  # what it waited for once the fetch was over: the message
        fetch=450,
        verify=150,
        restore=700,
        first_step=1300,
    )
    assert parts.total == 12_000


def test_a_fetch_that_was_over_before_anybody_wanted_it_costs_nothing() -> None:
    parts = divide(dataclasses.replace(USUAL, filling=(103.3, 106.0), waits=[(107.6, 107.6)]))

    assert (parts.fetch, parts.verify, parts.locate) == (0, 0, 0)
    assert parts.total == 12_000


def test_a_wait_for_an_older_generation_is_no_fetch() -> None:
    parts = divide(dataclasses.replace(USUAL, waits=[(107.6, 109.6)], filling=(109.0, 109.6)))

    assert (parts.locate, parts.fetch + parts.verify) == (1400, 600)


def test_where_nobody_knows_of_a_life_before_the_total_begins_with_this_one() -> None:
    parts = divide(dataclasses.replace(USUAL, ended_at=None))

    assert parts.detect == 0
    assert parts.total == 9_000


def test_a_clock_of_another_host_that_is_ahead_makes_no_time_negative() -> None:
    parts = divide(dataclasses.replace(USUAL, ended_at=900.0))

    assert parts == dataclasses.replace(divide(USUAL), detect=0)


def test_a_program_that_starts_its_agent_waits_for_it_to_boot() -> None:
    parts = divide(dataclasses.replace(USUAL, began_at=107.0, spawned_at=103.0, joining=(106.9, 107.3)))

    assert (parts.detect, parts.boot) == (3000, 400)
    assert parts.total == 12_000


def test_a_shell_that_becomes_the_next_program_counts_from_the_end_of_the_one_before() -> None:
    """`sh -c 'python train.py; exec python train.py'`: the process is as old as the whole first life."""
    parts = divide(dataclasses.replace(USUAL, spawned_at=20.0))

    assert (parts.detect, parts.boot) == (0, 1)
    assert parts.total == 12_000


MOMENT = st.one_of(st.floats(-1e5, 1e5), st.integers(-20, 20).map(float))
SPAN = st.tuples(MOMENT, MOMENT)


@given(
    st.builds(
        Moments,
        ended_at=st.none() | MOMENT,
        began_at=MOMENT,
        spawned_at=MOMENT,
        joining=SPAN,
        waits=st.lists(SPAN, max_size=4),
        filling=SPAN,
        verify_share=st.floats(0, 1),
        restoring=SPAN,
        stepped_at=MOMENT,
    )
)
@example(USUAL)
@example(dataclasses.replace(USUAL, joining=NO_TIME, filling=NO_TIME, restoring=NO_TIME, waits=[]))
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
        step=13, snapshot="00000002-000000000012", tier="remote", total_s=9.87, detect_s=3.2, boot_s=0.4, import_s=5.1,
        locate_s=0.0, fetch_s=0.1, verify_s=0.0, restore_s=0.4, first_step_s=0.7, fetching_s=3.8, verifying_s=0.5,
    )  # fmt: skip

    assert told.words() == (
        "9.9 s from the end of the last life to step 13: detect 3.2, boot 0.4, import 5.1, locate 0.0, fetch 0.1, "
        "verify 0.0, restore 0.4, first step 0.7; 4.2 s of fetching went on beside the import"
    )
    assert events.Restarted(**told.fields()) == told
