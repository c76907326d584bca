"""Which of the program's own variables count as changed by an interruption."""

from __future__ import annotations

import pytest

from harness.core.rehearsal import AnyLine, Interrupted, Resumed, Stepped
from harness.rehearse.compare import (
    Difference,
    Variable,
    first_difference,
    other_objects,
    other_variables,
    without_seed,
)


def stepped(step: int, **variables: str) -> AnyLine:
    return Stepped(step, None, {}, {}, variables)


UNBROKEN = [stepped(1, best="3", clock="10:00"), stepped(2, best="2", clock="10:01"), stepped(3, best="2", late="x")]


def test_the_first_step_after_which_a_variable_differs() -> None:
    interrupted = [stepped(1, best="3"), Interrupted(1, "step"), stepped(2, best="inf"), stepped(3, best="inf")]

    assert other_variables(UNBROKEN, interrupted) == [Variable(2, "best", "2", "inf")]


def test_what_differs_without_an_interruption_is_a_clock() -> None:
    interrupted = [stepped(1, clock="11:00"), Interrupted(1, "step"), stepped(2, clock="11:01")]

    assert other_variables(UNBROKEN, interrupted) == []


def test_what_differs_in_two_unbroken_passes_is_a_clock_too() -> None:
    interrupted = [stepped(1), Interrupted(1, "step"), stepped(2, clock="11:01", best="inf")]
    again = [stepped(1, clock="12:00")]

    assert other_variables(UNBROKEN, interrupted, again) == [Variable(2, "best", "2", "inf")]


def test_what_the_program_does_not_have_yet_is_not_compared() -> None:
    assert other_variables(UNBROKEN, [Interrupted(1, "step"), stepped(2, late="y"), stepped(3)]) == []


def test_objects_are_compared_likewise() -> None:
    def line(digest: str) -> AnyLine:
        return Stepped(2, None, {}, {}, {}, {"ema, an EMA,": digest})

    assert other_objects([line("aa")], [Interrupted(1, "step"), line("bb")]) == [
        Variable(2, "ema, an EMA,", "aa", "bb")
    ]


def test_a_gradient_that_only_one_pass_has_is_no_difference_and_one_of_other_bytes_is() -> None:
    """The harness may know in one pass only that no step reads it any more. If one does, the weights differ."""

    def line(**gradients: str) -> AnyLine:
        return Stepped(2, None, {}, {"a/weight": "same"}, gradients=gradients)

    assert first_difference([line(stale="aa", pending="bb")], [line(pending="bb")]) is None
    assert first_difference([line(pending="bb")], [line(stale="aa", pending="bb")]) is None
    assert first_difference([line(pending="bb")], [line(pending="cc")]) == Difference(
        2, "state", "pending", names=("pending",)
    )


def test_libraries_without_a_seed_are_those_that_the_steps_draw_from_and_torch() -> None:
    def steps(python: str, numpy: str, torch: str) -> list[AnyLine]:
        return [
            Stepped(1, None, {"python": python, "numpy": numpy, "torch": torch}, {}),
            Stepped(2, None, {"python": "later" + python, "numpy": numpy, "torch": torch}, {}),
        ]

    assert without_seed(steps("a", "a", "a"), steps("b", "b", "b")) == {"python", "torch"}
    assert without_seed(steps("a", "a", "a"), steps("a", "b", "a")) == set()
    assert without_seed(steps("a", "a", "a"), []) == set()


@pytest.mark.parametrize(("there", "named"), [(1, {"python"}), (2, {"torch"})])
def test_torch_has_a_seed_if_that_is_the_same(there: int, named: set[str]) -> None:
    """Its state may follow what another library has drawn before the loop, and steps need not draw from that."""

    def lines(seed: int, python: str, torch: str) -> list[AnyLine]:
        steps = [Stepped(step, None, {"python": python, "torch": f"{torch}{step}"}, {}) for step in (1, 2)]
        return [Resumed(0, seed), *steps]

    assert without_seed(lines(1, "a", "a"), lines(there, "b", "b")) == named
