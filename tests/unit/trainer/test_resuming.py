"""What a start goes on from, and why it may fail there."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.trainer.resuming import BEHIND_A_LOOP, refill
from tests.support.played_agent import BATCHES, PlayedLink, Program, as_before, no_checkpointer

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)


def test_containers_that_the_program_holds_get_the_other_content() -> None:
    live: dict[str, Any] = {"losses": [3, 2, 1], "best": {"step": 3, "of": [3]}, "new": 1}
    losses, best, of = live["losses"], live["best"], live["best"]["of"]

    refill(live, {"losses": [3, 2], "best": {"step": 2, "of": [2, 2]}, "old": (1,)})

    assert live == {"losses": [3, 2], "best": {"step": 2, "of": [2, 2]}, "old": (1,)}
    assert live["losses"] is losses
    assert live["best"] is best
    assert live["best"]["of"] is of


def test_what_is_of_another_type_is_another_object() -> None:
    live: dict[str, Any] = {"a": [1], "b": {"x": 1}, "c": [[1], 2]}

    refill(live, {"a": {"y": 1}, "b": OrderedDict(x=1), "c": [2, [1], 3]})

    assert live == {"a": {"y": 1}, "b": OrderedDict(x=1), "c": [2, [1], 3]}
    assert type(live["b"]) is OrderedDict


# ---- behind a loop --------------------------------------------------------------------------------------------------


def epochs(program: Program) -> Iterator[None]:
    """Steps 1 to 4, the end of the epoch, its validation, and so on."""
    for _ in program.ckpt.epochs(3):
        for _ in program.ckpt.batches(BATCHES):
            program.train()
            yield
        yield
        with program.ckpt.evaluating():
            pass


def resumed(stop: int, go_on: int = 1) -> tuple[Program, Iterator[None]]:
    """A program that was broken off after so many yields, and went on for others; its loop is still open."""
    with as_before():
        before = Program(PlayedLink(every_steps=1))
        broken_off = epochs(before)
        for _ in range(stop):
            next(broken_off)
    program = Program(PlayedLink(before.link.sealed, generation=2))
    loop = epochs(program)
    for _ in range(go_on):
        next(loop)
    return program, loop


def explained(program: Program, error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> bool:
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    program.ckpt._training.at_exit()
    return BEHIND_A_LOOP in capfd.readouterr().err


UNSET, OTHER = NameError("name 'loss' is not defined"), OSError("disk full")


@pytest.mark.parametrize(
    "error", [UNSET, ZeroDivisionError(), IndexError(), ValueError("max() arg is an empty sequence")]
)
def test_a_start_that_fails_behind_a_loop_that_has_yielded_nothing_is_told_why(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program, _loop = resumed(5)
    assert explained(program, error, monkeypatch, capfd)


@pytest.mark.parametrize(
    ("begun", "error"),
    [
        pytest.param(lambda: resumed(5), OTHER, id="another error"),
        pytest.param(lambda: resumed(3), UNSET, id="in the loop's body"),
        pytest.param(lambda: resumed(5, 3), UNSET, id="later"),
        pytest.param(lambda: (Program(), None), UNSET, id="without a snapshot"),
    ],
)
def test_other_failures_are_not_explained_so(
    begun: Callable[[], tuple[Program, Any]],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    program, _loop = begun()
    assert not explained(program, error, monkeypatch, capfd)
