"""The table "what ends how" of docs/operations.md, row by row."""

from __future__ import annotations

import pytest

from harness.node.exit_policy import (
    Act,
    Consequence,
    Ending,
    Then,
    Where,
    code_of,
    consequence,
    counts_as_failed,
    ending_of,
)

FLEET, SLURM, ELSEWHERE = Where.FLEET, Where.SLURM, Where.ELSEWHERE
EXIT = Consequence()


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        (0, Ending.FINISHED),
        (75, Ending.INTERRUPTED),
        (74, Ending.INTERRUPTED),
        (73, Ending.SUPERSEDED),
        (64, Ending.FAILED),
        (70, Ending.FAILED),
        (1, Ending.FAILED),
        (130, Ending.FAILED),
        (137, Ending.FAILED),  # the program's own: harness run has given up
        (None, Ending.AGENT_DIED),
    ],
)
def test_an_exit_code_is_an_ending(code: int | None, ending: Ending) -> None:
    assert ending_of(code) is ending


@pytest.mark.parametrize(
    ("outcome", "ending"),
    [
        ("finished", Ending.FINISHED),
        ("stopped early", Ending.FINISHED),
        ("interrupted", Ending.INTERRUPTED),
        ("superseded", Ending.SUPERSEDED),
        ("failed", Ending.FAILED),
    ],
)
@pytest.mark.parametrize("code", [0, 73, 75, 3])
def test_the_recorded_outcome_tells_and_not_the_code(code: int, outcome: str, ending: Ending) -> None:
    assert ending_of(code, None, outcome) is ending
    assert counts_as_failed(75, outcome) is (outcome == "failed")


@pytest.mark.parametrize(("code", "ending"), [(0, Ending.FINISHED), (130, Ending.FAILED)])
def test_a_run_that_just_stopped_goes_by_its_code(code: int, ending: Ending) -> None:
    assert ending_of(code, None, "stopped") is ending


def test_a_harness_run_that_a_signal_ended_says_nothing_of_the_run() -> None:
    assert ending_of(137, 9) is Ending.AGENT_DIED


@pytest.mark.parametrize(
    ("ending", "where", "expected"),
    [
        (Ending.FINISHED, FLEET, Consequence((Act.FINISH, Act.COMPLETE))),
        (Ending.FINISHED, SLURM, EXIT),
        (Ending.FINISHED, ELSEWHERE, EXIT),
        (Ending.INTERRUPTED, FLEET, Consequence(then=Then.WAIT)),
        (Ending.INTERRUPTED, SLURM, Consequence((Act.REQUEUE,))),
        (Ending.INTERRUPTED, ELSEWHERE, EXIT),
        (Ending.SUPERSEDED, FLEET, Consequence((Act.LEAVE, Act.COMPLETE))),
        (Ending.SUPERSEDED, SLURM, EXIT),
        (Ending.SUPERSEDED, ELSEWHERE, EXIT),
        (Ending.FAILED, FLEET, Consequence((Act.STOP, Act.COMPLETE))),
        (Ending.FAILED, SLURM, EXIT),
        (Ending.FAILED, ELSEWHERE, EXIT),
        (Ending.AGENT_DIED, FLEET, Consequence(then=Then.AGAIN)),
        (Ending.AGENT_DIED, SLURM, Consequence(then=Then.AGAIN)),
        (Ending.AGENT_DIED, ELSEWHERE, Consequence(then=Then.AGAIN)),
    ],
)
def test_what_follows_depends_on_the_place(ending: Ending, where: Where, expected: Consequence) -> None:
    assert consequence(ending, where) == expected


@pytest.mark.parametrize(
    ("ending", "where", "expected"),
    [
        (Ending.FINISHED, FLEET, Consequence((Act.FINISH, Act.COMPLETE))),
        (Ending.INTERRUPTED, FLEET, EXIT),
        (Ending.INTERRUPTED, SLURM, Consequence((Act.REQUEUE,))),
        (Ending.SUPERSEDED, FLEET, EXIT),
        (Ending.FAILED, FLEET, EXIT),  # a program that ended by our own signal is no reason to stop the fleet
        (Ending.AGENT_DIED, FLEET, EXIT),
        (Ending.AGENT_DIED, ELSEWHERE, EXIT),
    ],
)
def test_who_was_told_to_leave_leaves(ending: Ending, where: Where, expected: Consequence) -> None:
    assert consequence(ending, where, asked=True) == expected


@pytest.mark.parametrize(
    ("ending", "actions"),
    [
        (Ending.FINISHED, (Act.FINISH, Act.COMPLETE)),
        (Ending.INTERRUPTED, (Act.COMPLETE,)),
        (Ending.SUPERSEDED, (Act.COMPLETE,)),  # it is being terminated as it is
        (Ending.FAILED, (Act.STOP, Act.COMPLETE)),
        (Ending.AGENT_DIED, (Act.COMPLETE,)),
    ],
)
def test_where_the_group_ends_the_instance_the_hook_is_completed_and_nothing_starts(
    ending: Ending, actions: tuple[Act, ...]
) -> None:
    assert consequence(ending, FLEET, group_ends=True) == Consequence(actions)


def test_a_signal_while_the_group_ends_the_instance_still_completes_the_hook() -> None:
    assert consequence(Ending.INTERRUPTED, FLEET, asked=True, group_ends=True) == Consequence((Act.COMPLETE,))


@pytest.mark.parametrize(
    ("outcome", "code"),
    [("finished", 0), ("interrupted", 75), ("superseded", 73), ("failed", None), ("stopped", None), (None, None)],
)
def test_the_outcome_of_a_run_that_was_found_counts_as_its_code(outcome: str | None, code: int | None) -> None:
    assert code_of(outcome) == code


def test_what_counts_as_a_failed_start() -> None:
    assert [code for code in (0, 73, 74, 75, 64, 70, 1, 137, None) if counts_as_failed(code)] == [64, 70, 1, 137, None]
