"""Whether a run ends now, which outcome and exit code it ends with, and how long that may take: tables."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.policy.end import EndTimes, Facts, Next, Outcome, Standing, decide_end, interrupted, outcome_of
from harness.errors import ConfigError, ExitCode

# ---- whether now ----------------------------------------------------------------------------------------------------

TRAINS, OVER = Standing(over=False), Standing(over=True)

STANDINGS = {
    "it trains": (TRAINS, Next.WAIT),
    "it trains, and what was sealed is saved": (replace(TRAINS, settled=True), Next.WAIT),
    "it has ended, and everything is where it has to be": (OVER, Next.END),
    "it has ended, and something is on its way": (replace(OVER, settled=False), Next.WAIT),
    "it has ended, and is started again": (replace(OVER, begins=True), Next.WAIT),
    "told to leave, and there is time": (replace(TRAINS, leaving=True), Next.WAIT),
    "told to leave, ended, something is on its way": (replace(OVER, leaving=True, settled=False), Next.WAIT),
    "told to leave, ended, all is saved": (replace(OVER, leaving=True), Next.END),
    "time is up, it trains": (replace(TRAINS, leaving=True, expired=True), Next.STOP),
    "time is up, it trains, and would listen": (replace(TRAINS, leaving=True, expired=True, listens=True), Next.STOP),
    "time is up, it has ended, something is on its way": (
        replace(OVER, leaving=True, expired=True, settled=False),
        Next.END,
    ),
    "it waits for a start before it": (replace(TRAINS, in_vain=True), Next.WAIT),
    "it waits for a start before it, told to leave": (replace(TRAINS, in_vain=True, leaving=True), Next.STOP),
    "the same, and it is no child": (replace(TRAINS, in_vain=True, leaving=True, listens=True), Next.DISMISS),
    "the same, and time is up": (replace(TRAINS, in_vain=True, leaving=True, listens=True, expired=True), Next.STOP),
    "it waited in vain and has ended": (replace(OVER, in_vain=True, leaving=True, settled=False), Next.END),
    "it waited in vain and has ended, but nobody leaves": (replace(OVER, in_vain=True, settled=False), Next.WAIT),
    "time is up, it is started again": (replace(OVER, leaving=True, expired=True, begins=True), Next.WAIT),
}


@pytest.mark.parametrize("words", STANDINGS)
def test_what_is_done_about_the_end(words: str) -> None:
    standing, what = STANDINGS[words]
    assert decide_end(standing) is what


@given(st.builds(Standing, *[st.booleans()] * 7))
def test_a_run_never_ends_while_somebody_trains_or_begins(standing: Standing) -> None:
    if decide_end(standing) is Next.END:
        assert standing.over
        assert not standing.begins


@given(st.builds(Standing, *[st.booleans()] * 7))
def test_when_time_is_up_nobody_is_waited_for(standing: Standing) -> None:
    in_time = replace(standing, leaving=True, expired=True, begins=False)
    assert decide_end(in_time) is (Next.END if standing.over else Next.STOP)


# ---- which outcome --------------------------------------------------------------------------------------------------

LEAVES = ExitCode.INTERRUPTED
WELL = Facts(exit_code=0, sealed=True, everything_durable=True, durable_step=100, nothing_to_resume=True)
"""A program that has ended by itself; its newest snapshot, of step 100, is durable."""
LOCAL = replace(WELL, everything_durable=False)
NOTHING = replace(LOCAL, sealed=False, durable_step=None)


def short(facts: Facts) -> tuple[str, int]:
    outcome = outcome_of(facts)
    return outcome.name, outcome.exit_code


def test_a_run_is_finished_only_when_its_last_snapshot_is_durable() -> None:
    assert outcome_of(replace(WELL, finished=True)) == Outcome("finished", ExitCode.FINISHED)
    assert outcome_of(replace(LOCAL, finished=True)) == Outcome("stopped", ExitCode.FINISHED)


def test_a_run_that_finishes_while_it_leaves_is_finished() -> None:
    assert outcome_of(replace(WELL, finished=True, leaving=LEAVES)).finished


def test_a_program_that_fails_after_its_last_loop_has_not_finished() -> None:
    assert outcome_of(replace(WELL, finished=True, exit_code=3)) == Outcome("failed", 3)


def test_a_program_without_a_last_loop_has_stopped() -> None:
    assert outcome_of(WELL) == Outcome("stopped", ExitCode.FINISHED)


def test_a_program_that_left_its_loop_early_has_stopped_early_and_how_to_go_on_is_said() -> None:
    early = outcome_of(replace(WELL, stopped_early=True))
    assert (early.name, early.exit_code) == ("stopped early", ExitCode.FINISHED)
    assert "--continue resumes from step 100, --fresh" in str(early.why)
    assert "--continue resumes from the beginning" in str(outcome_of(replace(NOTHING, stopped_early=True)).why)
    assert outcome_of(replace(WELL, stopped_early=True, exit_code=3)) == Outcome("failed", 3)


def test_an_early_stop_stays_one_if_a_notice_comes_after_it_and_it_is_durable() -> None:
    assert outcome_of(replace(WELL, stopped_early=True, leaving=LEAVES)).name == "stopped early"
    assert outcome_of(replace(LOCAL, stopped_early=True, leaving=LEAVES)).name == "interrupted"


def test_a_run_of_which_nothing_exists_yet_may_be_started_anywhere() -> None:
    told = replace(NOTHING, exit_code=143, leaving=LEAVES)
    assert short(replace(told, connected=False)) == ("interrupted", ExitCode.INTERRUPTED)
    assert short(told) == ("interrupted", ExitCode.INTERRUPTED_LOCAL)
    searched = replace(told, connected=False, nothing_to_resume=False)
    assert short(searched) == ("interrupted", ExitCode.INTERRUPTED_LOCAL)


@pytest.mark.parametrize(
    ("nothing_to_resume", "connected", "code"),
    [(True, False, 0), (True, True, 75), (False, False, 75)],
)
def test_a_notice_lets_only_a_program_that_is_not_ours_keep_its_0(
    nothing_to_resume: bool, connected: bool, code: int
) -> None:
    told = replace(WELL, leaving=LEAVES, nothing_to_resume=nothing_to_resume, connected=connected)
    assert outcome_of(told).exit_code == code
    assert outcome_of(replace(told, exit_code=143)).exit_code == ExitCode.INTERRUPTED


def test_a_program_that_never_restored_its_snapshot_is_told_so() -> None:
    resumes = replace(WELL, resumes="g1-s100", nothing_to_resume=False)
    untouched = outcome_of(resumes)
    assert (untouched.name, untouched.exit_code) == ("failed", ExitCode.BUG)
    assert "without restoring snapshot g1-s100" in str(untouched.why)
    assert outcome_of(replace(resumes, restored=True)) == Outcome("stopped", ExitCode.FINISHED)
    assert outcome_of(replace(resumes, connected=False)) == Outcome("stopped", ExitCode.FINISHED)  # none of ours


@pytest.mark.parametrize(
    ("older", "words"),
    [
        ((), "the run has no older one"),
        (("00000001-000000000020",), "--from 00000001-000000000020"),
        (("5", "4", "3", "2", "1"), "5, 4, 3 and 2 more"),
    ],
)
def test_a_program_that_refuses_its_snapshot_is_told_the_older_ones(older: tuple[str, ...], words: str) -> None:
    refused = replace(WELL, exit_code=1, resumes="00000002-000000000030", older=older, hopeless=True)

    outcome = outcome_of(refused)

    assert (outcome.name, outcome.exit_code) == ("failed", 1)
    assert "refused snapshot 00000002-000000000030" in (outcome.why or "")
    assert words in (outcome.why or "")


def test_a_program_that_fails_after_it_has_restored_has_not_refused() -> None:
    failed = replace(WELL, exit_code=1, resumes="00000002-000000000030", hopeless=True, restored=True)
    assert outcome_of(failed).why is None


def test_an_exception_that_ended_only_the_thread_that_trained_is_a_failure() -> None:
    assert short(replace(WELL, raised=True)) == ("failed", 1)
    assert short(replace(WELL, raised=True, exit_code=9)) == ("failed", 9)


def test_a_crash_of_one_that_is_no_child_counts_as_one() -> None:
    assert outcome_of(replace(WELL, exit_code=None)) == Outcome("failed", 1)


def test_a_start_that_could_not_begin_fails_with_the_reason_and_not_with_the_programs_code() -> None:
    refused = replace(WELL, exit_code=1, refused=ConfigError.exit_code)
    assert outcome_of(refused) == Outcome("failed", ExitCode.USAGE)


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (WELL, ExitCode.INTERRUPTED),
        (LOCAL, ExitCode.INTERRUPTED_LOCAL),
        (NOTHING, ExitCode.INTERRUPTED_LOCAL),  # whether the store has anything is not known
        (replace(NOTHING, awaiting=True), ExitCode.INTERRUPTED),  # nothing of ours existed yet
        (replace(NOTHING, awaiting=True, only_here=True), ExitCode.INTERRUPTED_LOCAL),
        (replace(LOCAL, awaiting=True), ExitCode.INTERRUPTED_LOCAL),
    ],
)
def test_75_is_said_only_where_this_machine_holds_nothing_newer(facts: Facts, code: ExitCode) -> None:
    assert interrupted(LEAVES, facts) == Outcome("interrupted", code)
    assert outcome_of(replace(facts, exit_code=143, leaving=LEAVES)) == Outcome("interrupted", code)


@given(
    st.builds(
        Facts,
        leaving=st.just(LEAVES),
        exit_code=st.sampled_from([None, 0, 1, 143]),
        everything_durable=st.just(False),
        sealed=st.just(True),
        **dict.fromkeys(
            ["connected", "finished", "stopped_early", "raised", "nothing_to_resume", "awaiting", "only_here"],
            st.booleans(),
        ),
    )
)
def test_with_a_snapshot_that_is_not_durable_leaving_never_comes_to_75(facts: Facts) -> None:
    """I13."""
    assert outcome_of(facts).exit_code != ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("code", "name"), [(ExitCode.CTRL_C, "stopped"), (ExitCode.SUPERSEDED, "superseded")], ids=["ctrl-c", "superseded"]
)
def test_who_asked_to_leave_is_told_apart_whatever_became_durable(code: ExitCode, name: str) -> None:
    assert outcome_of(replace(LOCAL, exit_code=1, leaving=code)) == Outcome(name, code)


def test_a_commit_that_came_while_the_tiers_were_closing_makes_74_a_75() -> None:
    local = Outcome("interrupted", ExitCode.INTERRUPTED_LOCAL)
    assert local.confirmed(everything_durable=True) == Outcome("interrupted", ExitCode.INTERRUPTED)
    assert local.confirmed(everything_durable=False) is local
    failed = Outcome("failed", 1)
    assert failed.confirmed(everything_durable=True) is failed


# ---- in what time ---------------------------------------------------------------------------------------------------


def ends(times: EndTimes, left_s: float) -> float:
    """Seconds that an end takes where every part of it uses all the time that it is given."""
    took_s = 0.0
    for part in (times.quiet_s, times.record_s, times.rest_s, times.rest_s):
        took_s += part(left_s - took_s)
    return took_s


@given(st.floats(min_value=2.5, max_value=1000.0), st.sampled_from([EndTimes(), EndTimes(calls_s=60.0)]))
def test_an_end_in_which_everything_hangs_is_over_in_what_is_left(left_s: float, times: EndTimes) -> None:
    """It took 14 s of 8: the host died over it, and the next one waited until the journal counted as silent."""
    assert ends(times, left_s) < left_s


@given(st.floats(max_value=2.5))
def test_where_hardly_anything_is_left_each_part_has_the_least_there_is(left_s: float) -> None:
    times = EndTimes()
    assert ends(times, left_s) <= max(0.0, left_s) + 4 * times.least_s + 1e-9


def test_an_end_that_nobody_urges_waits_for_calls_in_flight() -> None:
    assert [part(math.inf) for part in (EndTimes().quiet_s, EndTimes().record_s, EndTimes().rest_s)] == [5.0, 5.0, 10.0]
