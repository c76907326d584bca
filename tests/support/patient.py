"""A Checkpointer whose steps belong to the test, and not to the clock.

A real one goes on to the next step while a snapshot waits for its slot, or is on its way to the store: what is sealed
then depends on how fast agent and trainer are today. This one waits at each step for what is due, and where it is told
to stay. In every other way it is the real one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Checkpointer
from harness.trainer.driven import Driven
from harness.trainer.training import Training
from tests.support.tiny_rank import is_awaited

LOOK_S = 0.002


def patient(ckpt: Checkpointer, *, hold_at: int | None = None, hold_until: Path | None = None) -> Checkpointer:
    """Make `ckpt` wait after each step, until a snapshot that is due is sealed and one that was sealed is durable.

    It listens meanwhile as at any boundary, and waits for nobody when the agent is gone.

    Args:
        ckpt: not inert; an inert one is left as it is.
        hold_at: a step after which it stays, until `hold_until` exists.
    """
    training, loops = ckpt._training, ckpt._loops
    if training.inert:
        return ckpt
    count_step = loops._count_step

    def is_held() -> bool:
        goes_on = not training.link.rank.is_alone and training.page.command.leaves  # to the step that all take
        return ckpt.step_count == hold_at and hold_until is not None and not hold_until.exists() and not goes_on

    def count_and_wait(kind: str) -> None:
        count_step(kind)
        _wait(training, kind, is_held)

    loops._count_step = count_and_wait  # type: ignore[method-assign]
    return ckpt


def all_patient() -> None:
    """Make every training of this process wait so: by a Checkpointer, or by a framework."""
    boundary, made = Driven.boundary, Checkpointer.__init__

    def wait_at_boundary(driven: Driven, step: int, **options: Any) -> None:
        boundary(driven, step, **options)
        _wait(driven.training, "step")

    def make(ckpt: Checkpointer, *args: Any, **options: Any) -> None:
        made(ckpt, *args, **options)
        patient(ckpt)

    Driven.boundary = wait_at_boundary  # type: ignore[method-assign]
    Checkpointer.__init__ = make  # type: ignore[method-assign]


def _wait(training: Training, kind: str, is_held: Callable[[], bool] = bool) -> None:
    boundary, stager, link = training.boundary, training.stager, training.link

    def is_due() -> bool:
        return boundary.overdue and stager.sealed_step != boundary.step

    def is_on_its_way() -> bool:
        sealed = stager.sealed_step
        there = sealed is not None and not stager.pending and not stager.is_void
        return there and (training.page.durable_step or 0) < (sealed or 0)

    def is_unasked() -> bool:  # of several ranks
        return is_awaited(link, boundary.step)

    def waits() -> bool:
        given_up = training.interrupted or link.gone or link.slot_error is not None
        return is_held() or (not given_up and (is_due() or is_on_its_way() or is_unasked()))

    while waits():
        threading.Event().wait(LOOK_S)
        if is_due() or is_unasked() or training.page.news != boundary.seen:
            training.at_boundary(kind)
