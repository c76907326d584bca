from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.policy.copying import ASSUMED_STORE_BYTES_S, Copied, Rates
from harness.core.policy.drain import (
    MARGIN_S,
    Choice,
    Plan,
    gives_way,
    never_fits,
    plan_drain,
    reserve_s,
    still_fits,
    wait_for_boundary_s,
)

GB = 10**9
FAST = Rates(copy_bytes_s=10 * GB, store_bytes_s=GB, step_s=1.0)
SLOW_STEP = Rates(copy_bytes_s=10 * GB, store_bytes_s=GB, step_s=300.0)

# has_s, bytes, rates, trainer alive, in flight, sealed -> choice
DRAINS = {
    "plenty of time": (120.0, 10 * GB, FAST, True, None, True, Choice.NEW),
    "nobody knows how long": (None, 10 * GB, FAST, True, 10 * GB, True, Choice.NEW),
    "new fits just": (14.0, 10 * GB, FAST, True, None, True, Choice.NEW),
    "new does not fit, the newest does": (13.9, 10 * GB, FAST, True, None, True, Choice.NEWEST),
    "no boundary in time": (120.0, 10 * GB, SLOW_STEP, True, None, True, Choice.NEWEST),
    "the newest displaces an upload only if it fits": (12.0, 10 * GB, FAST, True, 5 * GB, True, Choice.NEWEST),
    "the newest does not fit behind an upload": (11.9, 10 * GB, FAST, True, 5 * GB, True, Choice.FINISH),
    "nothing fits, nothing in flight: try the newest": (1.0, 10 * GB, FAST, True, None, True, Choice.NEWEST),
    "new waits for an upload that ends before the boundary": (15.0, 10 * GB, FAST, True, 2 * GB, True, Choice.NEW),
    "new fits only without the upload": (15.0, 10 * GB, FAST, True, 9 * GB, True, Choice.NEW),
    "nothing sealed, an upload in flight": (5.0, 10 * GB, FAST, True, GB, False, Choice.FINISH),
    "nothing at all to lose by trying": (0.1, 10 * GB, FAST, True, None, False, Choice.NEW),
    "before the first layout": (30.0, None, Rates(), True, None, False, Choice.NEW),
    "the trainer is dead, something is sealed": (120.0, 10 * GB, FAST, False, None, True, Choice.NEWEST),
    "the trainer is dead, nothing is sealed": (120.0, 10 * GB, FAST, False, None, False, Choice.FINISH),
    "the trainer is dead, an upload in flight": (120.0, 10 * GB, FAST, False, GB, False, Choice.FINISH),
}


@pytest.mark.parametrize("row", DRAINS.values(), ids=DRAINS.keys())
def test_the_newest_step_that_can_still_become_durable_is_chosen(
    row: tuple[float | None, int | None, Rates, bool, int | None, bool, Choice],
) -> None:
    has_s, size, rates, alive, in_flight, sealed, choice = row

    plan = plan_drain(has_s, size, rates, trainer_alive=alive, in_flight_bytes=in_flight, sealed=sealed)

    assert (plan.choice, plan.has_s) == (choice, has_s)


@pytest.mark.parametrize(
    ("has_s", "in_flight", "replaces", "needs_s"),
    [
        (120.0, 9 * GB, False, 21.0),  # both fit: one after the other
        (21.0, 9 * GB, False, 21.0),
        (20.9, 9 * GB, True, 14.0),  # only one of them does, and it is the newer
        (14.0, 9 * GB, True, 14.0),
        (14.0, GB, False, 14.0),  # the upload is over before the trainer comes by
        (None, 9 * GB, False, 21.0),
    ],
)
def test_an_upload_in_flight_is_given_up_only_where_both_do_not_fit(
    has_s: float | None, in_flight: int, replaces: bool, needs_s: float
) -> None:
    plan = plan_drain(has_s, 10 * GB, FAST, trainer_alive=True, in_flight_bytes=in_flight, sealed=False)

    assert (plan.choice, plan.replaces, plan.needs_s) == (Choice.NEW, replaces, needs_s)


def test_an_upload_in_flight_is_never_given_up_on_a_guess() -> None:
    guess = Rates(copy_bytes_s=GB)

    plan = plan_drain(30.0, GB, guess, trainer_alive=True, in_flight_bytes=GB, sealed=True)

    assert (plan.choice, plan.replaces) == (Choice.FINISH, False)
    assert not gives_way(30.0, GB, GB, guess)


@pytest.mark.parametrize(
    ("has_s", "gives"), [(float("inf"), False), (22.0, False), (21.9, True), (12.0, True), (11.9, False)]
)
def test_an_upload_makes_way_when_only_the_newer_one_fits(has_s: float, gives: bool) -> None:
    assert gives_way(has_s, 10 * GB, 10 * GB, Rates(store_bytes_s=GB)) is gives


@pytest.mark.parametrize(("has_s", "gives"), [(22.0, False), (21.9, True), (12.0, True), (11.9, False), (8.0, False)])
def test_an_upload_makes_no_way_for_one_whose_copies_take_longer(has_s: float, gives: bool) -> None:
    """Of the newer one 2 GB are sent, and 8 are copied, in 8 s: given up for it at 8 s, neither would arrive."""
    rates = Rates(store_bytes_s=GB, copied=Copied(8 * GB, 8.0))

    assert gives_way(has_s, 10 * GB, 10 * GB, rates) is gives


@pytest.mark.parametrize(("has_s", "kept_s"), [(2.0, 0.3), (30.0, 4.5), (120.0, 5.0), (math.inf, 5.0)])
def test_a_part_of_the_time_is_kept_for_the_end_itself(has_s: float, kept_s: float) -> None:
    assert reserve_s(has_s) == pytest.approx(kept_s)


def test_what_never_fits_is_said_from_measurements_only() -> None:
    assert never_fits(10 * GB, Rates(), 120.0) is None
    assert never_fits(100 * GB, FAST, 120.0) is None
    assert never_fits(120 * GB, FAST, 120.0) == pytest.approx(134.0)


PLANS = {
    "fits: 13 s of 113 s; step 12 034 (a new snapshot)": (113.0, True, None, True),
    "needs 13 s, and there is no deadline; step 12 034 (a new snapshot)": (None, True, None, True),
    "fits: 14 s of 15 s; step 12 034 (a new snapshot, instead of the upload in flight)": (15.0, True, 9 * GB, True),
    "fits: 12 s of 113 s; step 12 034 (the newest sealed snapshot)": (113.0, False, None, True),
    "needs 12 s, has 1 s, 5 s to the local disk; step 12 034 (the newest sealed snapshot)": (1.0, False, None, True),
    "fits: 3 s of 9 s; step 12 034 (the upload in flight)": (9.0, False, GB, True),
    "fits: 2 s of 9 s; step 12 034 (nothing is left to save)": (9.0, False, None, False),
}


@pytest.mark.parametrize("words", PLANS)
def test_a_plan_is_told_with_its_numbers_before_it_starts(words: str) -> None:
    has_s, alive, in_flight, sealed = PLANS[words]
    speeds = Rates(10 * GB, GB, 1.0 if in_flight is not None else None, 2 * GB)

    plan = plan_drain(has_s, 10 * GB, speeds, trainer_alive=alive, in_flight_bytes=in_flight, sealed=sealed)

    assert plan.words(12034) == words


def test_an_unmeasured_store_is_assumed_to_be_slow() -> None:
    plan = plan_drain(60.0, GB, Rates(), trainer_alive=True, in_flight_bytes=None, sealed=False)

    assert plan.needs_s == pytest.approx(2 * GB / ASSUMED_STORE_BYTES_S + MARGIN_S)


seconds = st.none() | st.floats(0, 1e6)

sizes = st.none() | st.integers(0, 10**13)

rates = st.none() | st.floats(1e-3, 1e12)


@given(seconds, sizes, st.builds(Rates, rates, rates, seconds), st.booleans(), sizes, st.booleans())
def test_a_plan_is_always_one_that_can_be_carried_out(
    has_s: float | None,
    size: int | None,
    speeds: Rates,
    alive: bool,
    in_flight: int | None,
    sealed: bool,
) -> None:
    plan = plan_drain(has_s, size, speeds, trainer_alive=alive, in_flight_bytes=in_flight, sealed=sealed)

    assert plan.choice is not Choice.NEW or alive
    assert plan.choice is not Choice.NEWEST or sealed
    if in_flight is not None and has_s is not None and plan.choice is not Choice.FINISH:
        assert plan.needs_s is not None
        assert plan.needs_s <= has_s, "an upload in flight is given up only for what provably fits"


@given(st.floats(0, 1e6), st.integers(0, 10**13), st.builds(Rates, rates, rates, seconds), sizes, st.booleans())
def test_a_new_snapshot_that_a_plan_says_fits_still_fits_then(
    has_s: float, size: int, speeds: Rates, in_flight: int | None, sealed: bool
) -> None:
    plan = plan_drain(has_s, size, speeds, trainer_alive=True, in_flight_bytes=in_flight, sealed=sealed)

    if plan.choice is Choice.NEW and plan.fits:
        assert still_fits(has_s * (1 + 1e-9), size, speeds), "given up as soon as it is made, and steps with it"


def test_a_plan_counts_only_what_has_to_be_sent() -> None:
    copies = dataclasses.replace(FAST, copied=Copied(bytes=95 * GB, seconds=3.0))

    plan = plan_drain(60.0, 100 * GB, copies, trainer_alive=True, in_flight_bytes=None, sealed=False)

    assert plan.needs_s == pytest.approx(100 / 10 + 1.0 + 5.0 + 3.0 + MARGIN_S)
    assert plan.fits
    assert still_fits(plan.needs_s, 100 * GB, copies)
    assert never_fits(100 * GB, copies, 60.0) is None
    assert never_fits(100 * GB, FAST, 60.0) is not None


# ---- the time to the next boundary ----------------------------------------------------------------------------------

LONG_STEP = Rates(copy_bytes_s=10 * GB, store_bytes_s=GB, step_s=40.0)


@pytest.mark.parametrize(
    ("step_s", "age_s", "wait_s"),
    [
        (None, None, 0.0),
        (40.0, None, 40.0),
        (40.0, 31.0, 9.0),
        (1.0, 31.0, 31.0),  # a validation is in it: as long again
        (None, 31.0, 31.0),
    ],
)
def test_how_long_the_next_boundary_is_awaited(step_s: float | None, age_s: float | None, wait_s: float) -> None:
    assert wait_for_boundary_s(step_s, age_s) == wait_s


def planned(has_s: float, rates: Rates, age_s: float, *, in_flight: int | None = None) -> Plan:
    return plan_drain(
        has_s, 10 * GB, rates, trainer_alive=True, in_flight_bytes=in_flight, sealed=True, step_age_s=age_s
    )


def test_a_step_that_is_nearly_over_is_waited_for() -> None:
    """By the step's usual length alone, a new snapshot would not have fitted."""
    assert planned(30.0, LONG_STEP, 31.0).choice is Choice.NEW
    assert planned(30.0, LONG_STEP, 1.0).choice is Choice.NEWEST


def test_what_is_sealed_is_sent_while_a_far_boundary_is_awaited() -> None:
    assert planned(120.0, LONG_STEP, 20.0).meanwhile
    assert not planned(120.0, LONG_STEP, 38.0).meanwhile, "it would be in the new one's way"
    assert not planned(120.0, LONG_STEP, 20.0, in_flight=GB).meanwhile, "something is sent already"


def test_what_is_sealed_is_sent_while_nobody_knows_when_the_step_ends() -> None:
    assert planned(120.0, FAST, 3.0).meanwhile
    assert not planned(120.0, FAST, 0.5).meanwhile


def test_the_sentence_says_what_it_depends_on() -> None:
    words = planned(120.0, FAST, 31.0).words(12034)
    assert words == (
        "fits: 44 s of 120 s; step 12 034 (a new snapshot, if the step, 31 s so far, ends in time; "
        "meanwhile the newest sealed one)"
    )
    assert "if the step" not in planned(120.0, FAST, 0.5).words(12034)
    assert "if the step, 3 s so far, ends in time" in planned(120.0, FAST, 3.0).words(12034), "usually it takes 0.1 s"
