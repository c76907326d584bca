"""A rehearsal finds what makes a resume inexact, and nothing in a training that resumes exactly. In this process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.core.rehearsal import AnyLine, Stepped
from harness.rehearse.compare import first_difference, observed, other_objects, other_variables
from harness.rehearse.points import choose
from tests.support.inexact import INEXACT, of_itself
from tests.support.lives import Lives
from tests.support.loops import BESIDE, INSIDE, STYLES, VALIDATED, Job, Style

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:.*random numbers were drawn between Checkpointer"),
    pytest.mark.filterwarnings("ignore:a resume in the middle of"),
    # Some make a module grow, and make it as large before their loop when they start again.
    pytest.mark.filterwarnings("ignore:.* since Checkpointer.* was made"),
]

STOP = 14
EXACT = {**STYLES, **VALIDATED, **INSIDE, **BESIDE}
del EXACT["counted_in_extra"]  # it counts its starts


CAUSES = {
    "local_average": "average",
    "counted_by_python": "number",
    "unknown_loader": "x",
    "forgotten_optimizer": "job.optimizer, an AdamW,",
    "forgotten_average": "teacher, a Linear,",
}
"""The variable or object by which most of them differ: what is drawn ahead is the same again at each boundary."""
COUNTED = {"extra": "best", "accumulated": "micro"}
"""Variables that a resume changes, and that decide nothing."""


def rehearsed(
    style: Style, folder: Path, monkeypatch: pytest.MonkeyPatch, stop: int = STOP
) -> tuple[list[AnyLine], list[AnyLine], int]:
    """What an unbroken and an interrupted training have written down, and at how many places that was interrupted."""
    with contextlib.ExitStack() as ending:

        def lives(name: str) -> Lives:
            (folder / name).mkdir()
            return ending.enter_context(contextlib.closing(Lives(style, folder / name, monkeypatch)))

        unbroken = lives("unbroken").rehearse(stop)
        plan = choose(unbroken, observed(unbroken).step)
        interrupted = lives("interrupted").rehearse(stop, plan.interruptions)
    return unbroken, interrupted, len(plan.interruptions)


@pytest.mark.parametrize("style", EXACT)
def test_nothing_is_found_in_a_training_that_resumes_exactly(
    style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken, interrupted, places = rehearsed(EXACT[style], tmp_path, monkeypatch)

    assert first_difference(unbroken, interrupted) is None
    assert places >= 2
    assert not [each for each in other_objects(unbroken, interrupted) if "(loops.py)" in each.name]
    changed = {each.name.split()[0] for each in other_variables(unbroken, interrupted) if "(loops.py)" in each.name}
    assert changed == ({COUNTED[style]} if style in COUNTED else set())


@pytest.mark.filterwarnings("ignore:an optimizer steps that was not given")  # which a boundary does see
@pytest.mark.parametrize("style", INEXACT)
def test_what_no_boundary_can_see_is_found(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken, interrupted, _ = rehearsed(INEXACT[style], tmp_path, monkeypatch)

    difference = first_difference(unbroken, interrupted)
    assert difference is not None
    assert difference.what == "state"
    here = f"{style}() (inexact.py)"
    found = {each.name.removesuffix(f" in {here}") for each in other_variables(unbroken, interrupted)}
    found |= {each.name.replace(f" in {here}", "") for each in other_objects(unbroken, interrupted)}
    assert style not in CAUSES or CAUSES[style] in found


def test_a_program_that_differs_from_itself_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with contextlib.closing(Lives(of_itself, tmp_path / name, monkeypatch)) as lives:
            passes.append(lives.rehearse(STOP))

    difference = first_difference(*passes)
    assert difference is not None
    assert (difference.step, difference.name.split()[0]) == (1, "model.0.weight")


def in_turns(job: Job) -> None:
    """Two models train for an epoch each, in turns, with a validation between."""
    models = [nn.Linear(16, 1), nn.Linear(16, 1)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    ckpt = job.checkpointer(models=models, optimizers=optimizers)
    for epoch in ckpt.epochs(6):
        job.model, job.optimizer = models[epoch % 2], optimizers[epoch % 2]
        for (x,) in ckpt.batches(job.loader):
            job.optimizer.zero_grad()
            job.model(x).square().mean().backward()
            job.optimizer.step()
        job.validate(ckpt, str(epoch))


def test_stale_gradients_of_a_model_that_waits_for_its_turn_are_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken, interrupted, places = rehearsed(in_turns, tmp_path, monkeypatch, stop=20)

    assert first_difference(unbroken, interrupted) is None
    assert places >= 4
    written = [line.gradients for line in (*unbroken, *interrupted) if isinstance(line, Stepped)]
    assert any(written)
