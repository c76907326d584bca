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
