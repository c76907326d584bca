"""A rehearsal finds what makes a resume inexact, and nothing in a training that resumes exactly. In this process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from harness.rehearse.compare import Difference, first_difference, observed
from harness.rehearse.points import choose
from tests.support.inexact import INEXACT, of_itself
from tests.support.lives import Lives
from tests.support.loops import BESIDE, INSIDE, STYLES, VALIDATED, Style

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:.*random numbers were drawn between Checkpointer"),
    pytest.mark.filterwarnings("ignore:a resume in the middle of"),
]

STOP = 14
EXACT = {**STYLES, **VALIDATED, **INSIDE, **BESIDE}
del EXACT["counted_in_extra"]  # it counts its starts


def rehearsed(style: Style, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Difference | None, int]:
    """The first difference, and at how many places the training was interrupted."""
    with contextlib.ExitStack() as ending:

        def lives(name: str) -> Lives:
            (folder / name).mkdir()
            return ending.enter_context(contextlib.closing(Lives(style, folder / name, monkeypatch)))

        unbroken = lives("unbroken").rehearse(STOP)
        plan = choose(unbroken, observed(unbroken).step)
        interrupted = lives("interrupted").rehearse(STOP, plan.interruptions)
    return first_difference(unbroken, interrupted), len(plan.interruptions)


@pytest.mark.parametrize("style", EXACT)
def test_nothing_is_found_in_a_training_that_resumes_exactly(
    style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    difference, places = rehearsed(EXACT[style], tmp_path, monkeypatch)

    assert difference is None
    assert places >= 2


@pytest.mark.parametrize("style", INEXACT)
def test_what_no_boundary_can_see_is_found(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    difference, _ = rehearsed(INEXACT[style], tmp_path, monkeypatch)

    assert difference is not None
    assert difference.what == "state"


def test_a_program_that_differs_from_itself_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with contextlib.closing(Lives(of_itself, tmp_path / name, monkeypatch)) as lives:
            passes.append(lives.rehearse(STOP))

    difference = first_difference(*passes)
    assert difference is not None
    assert (difference.step, difference.name.split()[0]) == (1, "model.0.weight")
