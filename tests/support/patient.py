"""A Checkpointer whose steps belong to the test, and not to the clock.

A real one goes on to the next step while a snapshot waits for its slot, or is on its way to the store: what is sealed
then depends on how fast agent and trainer are today. This one waits at each step for what is due, and where it is told
to stay. In every other way it is the real one. Of several ranks, none waits any more once another has gone on: a
framework lets the others wait for that one.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Checkpointer
from harness.trainer.driven import Driven
from harness.trainer.ranks import Rank
from harness.trainer.training import Training
from tests.support import ending
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
        held = ckpt.step_count == hold_at and hold_until is not None and not hold_until.exists()
        return held and not _goes_on(training)

    def count_and_wait(kind: str) -> None:
        count_step(kind)
        _wait(training, functools.partial(training.at_boundary, kind), is_held)

    loops._count_step = count_and_wait  # type: ignore[method-assign]
    return ckpt


def all_patient() -> None:
    """Make every training of this process wait so: by a Checkpointer, or by a framework.

    A framework's also stays, once its end is about to be asked for (ending.py), at the first step without a snapshot.
    Of one rank, a training waits also where a validation begins with a snapshot: a real one goes on without if there is
    no slot yet.
    """
    boundary, made, at_boundary = Driven.boundary, Checkpointer.__init__, Training.at_boundary

    def wait_at_boundary(driven: Driven, step: int, **options: Any) -> None:
        boundary(driven, step, **options)
        training = driven.training
        _wait(training, functools.partial(training.at_boundary, "step"), functools.partial(_is_ending, training))

    def wait_before_validation(training: Training, kind: str, **options: Any) -> None:
        at_boundary(training, kind, **options)
        if kind == "evaluating" and training.link.rank.is_alone and not training.inert:
            _wait(training, functools.partial(at_boundary, training, kind, **options))

    def make(ckpt: Checkpointer, *args: Any, **options: Any) -> None:
        made(ckpt, *args, **options)
        patient(ckpt)

    Driven.boundary = wait_at_boundary  # type: ignore[method-assign]
    Training.at_boundary = wait_before_validation  # type: ignore[method-assign]
    Checkpointer.__init__ = make  # type: ignore[method-assign]


def _goes_on(training: Training) -> bool:
    """Whether it is one of several ranks, on its way to the step that all take."""
    return not training.link.rank.is_alone and training.page.command.leaves


def _is_ending(training: Training) -> bool:
    """Whether it stays for the end that is about to be asked for, and not where there is a snapshot already."""
    if not ending.is_told() or training.interrupted or training.link.gone:
        return False
    return training.boundary.step != training.stager.sealed_step and not _goes_on(training)


class _GoneOn:
    """Steps from which the ranks of one launcher have gone on, in shared memory; a file in the working directory."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        attempt = f"{os.getppid()}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        fd = os.open(f".gone-on.{attempt}", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, 8 * rank.world_size)
        self._page = mmap.mmap(fd, 8 * rank.world_size)
        os.close(fd)

    def tell(self, step: int) -> None:
        struct.pack_into("<Q", self._page, 8 * self._rank.number, step)

    def is_beyond(self, step: int) -> bool:
        """Whether a rank has gone on from this step, or from a later one."""
        return max(struct.unpack_from(f"<{self._rank.world_size}Q", self._page)) >= step


_gone_on: list[_GoneOn] = []
"""That of this process, once it is one of several ranks."""


def _wait(training: Training, act: Callable[[], None], is_held: Callable[[], bool] = bool) -> None:
    boundary, stager, link = training.boundary, training.stager, training.link
    if not link.rank.is_alone and not _gone_on:
        _gone_on.append(_GoneOn(link.rank))

    def is_due() -> bool:
        return boundary.overdue and stager.sealed_step != boundary.step

    def is_on_its_way() -> bool:
        sealed = stager.sealed_step
        there = sealed is not None and not stager.pending and not stager.is_void
        return there and (training.page.durable_step or 0) < (sealed or 0)

    def is_unasked() -> bool:  # of several ranks
        return is_awaited(link, boundary.step)

    def waits() -> bool:
        waits_alone = any(ranks.is_beyond(boundary.step) for ranks in _gone_on)
        given_up = training.interrupted or link.gone or link.slot_error is not None or waits_alone
        return is_held() or (not given_up and (is_due() or is_on_its_way() or is_unasked()))

    while waits():
        threading.Event().wait(LOOK_S)
        if is_due() or is_unasked() or training.page.news != boundary.seen:
            act()
    for ranks in _gone_on:
        ranks.tell(boundary.step)
