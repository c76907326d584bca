"""The place at which all ranks take a snapshot: agreed by words in shared memory, without a collective.

Owns both sides of the agreement, as pure functions. Nothing is assumed about how far ranks are apart: the CPU of a rank
runs ahead of its GPU, and pipelines and accumulation skew.

    agent:  ASK to all ranks ─▶ it is seen ─▶ every rank's step ─▶ N = the greatest + 1 ─▶ AT_STEP = N
    rank, at a boundary:   no AT_STEP of this ask yet ─▶ hold
                           before N ─▶ go on;  at N ─▶ seal;  beyond N ─▶ say so: the agent asks again

No rank waits without end: one that holds has done all its communication up to its step, so one that is behind needs
nothing more of it to come to N. No snapshot is mixed: a set is complete once every rank has sealed N.

A step has several places where a rank may stop: its boundary, the entries of validations before and after that, the
end of the loop. A resume from an entry repeats that validation. So ranks that have all their parts of one step may
still part after a resume: one repeats a validation, with its collectives, and the others do not. Therefore a place is
agreed, not only a step: one with the same validations behind it on every rank. It need not be the same line of the
program, and cannot be, as only rank 0 may validate.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Hold(enum.IntEnum):
    """What a rank says at a boundary about the newest ask."""

    NONE = 0
    """It trains, or has not seen the ask yet."""
    HOLDS = 1
    """It waits to learn the place."""
    LAST = 2
    """It waits too, and makes no further step."""
    PASSED = 3
    """It is beyond the place that was agreed."""


class Where(enum.Enum):
    """Which place of a step."""

    BOUNDARY = "the boundary that completes it; there is one"
    FIRST = "the first one that a rank comes to, an entry of a validation included"
    AFTER = "the first one behind so many of its validations"


@dataclass(frozen=True)
class Place:
    """A place at which all ranks take a snapshot.

    Attributes:
        step: completed steps.
        where: which place of that step. The end of the loop is as good as any: nothing comes behind it.
        passed: of `AFTER`, how many.
    """

    step: int
    where: Where = Where.BOUNDARY
    passed: int = 0


@dataclass(frozen=True)
class View:
    """What the agent sees of a rank.

    Attributes:
        step: completed steps; `None` before the rank's loop.
        hold: what it says about the present ask; `NONE` if what it says is about an earlier one.
        at_end: whether it has said before that it makes no further step.
        entering: whether it has said so at the entry of a validation.
        passed: the validations of its step that it had entered before.
    """

    step: int | None
    hold: Hold = Hold.NONE
    at_end: bool = False
    entering: bool = False
    passed: int = 0

    @property
    def is_last(self) -> bool:
        """Whether it makes no further step."""
        return self.at_end or self.hold is Hold.LAST

    @property
    def waits(self) -> bool:
        """Whether it waits for the other ranks."""
        return self.hold in (Hold.HOLDS, Hold.LAST)


class Uneven(Exception):
    """One rank's loop has ended at a step that another has passed. `steps` are those of all ranks."""

    def __init__(self, steps: Sequence[int | None]) -> None:
        super().__init__(f"the loops of the ranks end at different steps: {', '.join(map(str, steps))}")
        self.steps = tuple(steps)


def check_even(views: Sequence[View]) -> None:
    """Raise Uneven if a rank makes no further step, and another is beyond it."""
    steps = [view.step for view in views if view.step is not None]
    last = [view.step for view in views if view.is_last and view.step is not None]
    if last and max(steps) > min(last):
        raise Uneven([view.step for view in views])


def agree(views: Sequence[View], sealed: int | None, *, leaves: bool) -> Place | None:
    """Return the place at which all ranks seal; `None` while a rank is before its loop.

    Call it once the ask can be seen by every rank: a rank that makes a step after that holds.

    Args:
        views: of every rank.
        sealed: the step that all have sealed already; `None` for none.
        leaves: whether all leave with this snapshot: then it is not left for after a validation.

    Raises:
        Uneven: a rank makes no further step, and another is beyond it.
    """
    steps = [view.step for view in views if view.step is not None]
    if len(steps) < len(views):
        return None
    top = max(steps)
    check_even(views)
    here = Place(top, Where.AFTER, max(view.passed for view in views if view.step == top))
    if any(view.is_last for view in views):
        return here
    if all(view.hold is Hold.HOLDS for view in views) and min(steps) == top != sealed:
        # For example all have entered a validation: there is no later boundary for a while.
        return here if any(view.entering for view in views) else Place(top)
    return Place(top + 1, Where.FIRST if leaves else Where.BOUNDARY)


def is_void(views: Sequence[View], agreed: int) -> bool:
    """Return whether not all ranks can seal the agreed step any more: one is beyond it, or ends before it."""
    return any(
        view.hold is Hold.PASSED or (view.is_last and view.step is not None and view.step < agreed) for view in views
    )


class Move(enum.Enum):
    """What a rank does at a boundary while a snapshot is asked for."""

    GO_ON = "go on to the next place, and look again"
    HOLD = "wait here until the step is agreed, or the ask is taken back"
    SEAL = "take the snapshot here"
    PASS = "say that the agreed place is behind"


def move(
    step: int,
    agreed: Place | None,
    sealed: int | None,
    *,
    last: bool,
    leaves: bool,
    entering: bool = False,
    passed: int = 0,
) -> Move:
    """Return what a rank does at a place of `step`.

    Args:
        step: completed steps.
        agreed: the place of the present ask; `None` while it is not agreed.
        sealed: the newest step that this rank has sealed; `None` for none.
        last: whether this rank makes no further step: it does not end before every rank has sealed this one.
        leaves: whether all leave after this snapshot: none goes on before every rank has sealed it.
        entering: whether a validation begins here.
        passed: the validations of this step that this rank has entered before.
    """
    if agreed is None:
        return Move.HOLD
    if sealed == agreed.step:
        return Move.HOLD if leaves or last else Move.GO_ON
    if step < agreed.step:
        return Move.HOLD if last else Move.GO_ON
    if step > agreed.step or (agreed.where is Where.AFTER and passed > agreed.passed):
        return Move.PASS
    is_before = passed < agreed.passed if agreed.where is Where.AFTER else entering and agreed.where is Where.BOUNDARY
    return Move.GO_ON if is_before and not last else Move.SEAL
