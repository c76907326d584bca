"""Where a rehearsal interrupts a program."""

from __future__ import annotations

from harness.core.rehearsal import AnyLine, Entered, EpochEnded, Interruption, Stepped
from harness.rehearse.points import choose, in_words


def steps(*numbers: int) -> list[AnyLine]:
    return [Stepped(number, None, {}, {}) for number in numbers]


def test_in_the_middle_right_after_at_an_end_and_around_a_validation() -> None:
    lines = [*steps(1, 2, 3, 4), EpochEnded(0, 4), Entered(4, True), *steps(5, 6, 7, 8), EpochEnded(1, 8)]
    lines += [Entered(8, True), *steps(9, 10)]

    plan = choose(lines, 10)

    assert plan.interruptions == (
        Interruption(3),
        Interruption(4, "resumed"),
        Interruption(4),
        Interruption(4, "evaluating"),
        Interruption(8, "validation"),
    )
    assert plan.missing == ()


def test_what_the_program_did_not_come_to_is_named() -> None:
    plan = choose(steps(1, 2, 3), 3)

    assert plan.interruptions == (Interruption(1), Interruption(2, "resumed"))
    assert plan.missing == ("the end of an epoch", "a validation")


def learning(*steps: int, **first: int) -> list[AnyLine]:
    """Steps of a program whose optimizers step for the first time in these; at 0 never."""
    return [
        Stepped(step, None, {}, {}, optimizers={name: 0 < at <= step for name, at in first.items()}) for step in steps
    ]


def test_one_interruption_is_behind_the_first_step_of_each_optimizer_that_steps() -> None:
    plan = choose(learning(*range(1, 61), critic=41, actor=43), 60)

    assert plan.interruptions == (Interruption(20), Interruption(21, "resumed"), Interruption(48))
    assert plan.missing == ("the end of an epoch", "a validation")


def test_an_optimizer_without_a_step_before_an_interruption_is_named() -> None:
    never = "a step of {} before an interruption: use more --steps"

    assert choose(learning(1, 2, 3, actor=3, a=0, critic=1), 3).missing[-1] == never.format("actor and a")
    assert choose(learning(1, 2, 3, 4, actor=3), 4, (2,)).missing == (never.format("actor"),)
    assert choose(learning(1, 2, 3, 4, actor=3), 4, (2, 3)).missing == ()


def test_the_last_step_is_no_place_to_interrupt() -> None:
    assert choose(steps(1), 1).interruptions == ()


def test_the_users_own_steps_are_taken_as_they_are() -> None:
    assert choose(steps(*range(1, 30)), 29, (20, 7, 7, 40)).interruptions == (Interruption(7), Interruption(20))


def test_places_in_words() -> None:
    assert [
        in_words(Interruption(7), ()),
        in_words(Interruption(8), (8,)),
        in_words(Interruption(8, "validation")),
    ] == [
        "7",
        "8 (the end of an epoch)",
        "8 (in a validation)",
    ]
