"""What follows from how `harness run` ended: the table of docs/operations.md, as values.

Owns the decision; does nothing. What it is decided from is the outcome that the agent recorded, by `ending_of`: a
program may end with any code of its own, 73 and 75 too. Only where no outcome is known the code tells; and a found one
of an agent that was not our child counts as the code that it would have ended with.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.core.manifest import STOPPED_EARLY
from harness.errors import ExitCode


class Where(enum.Enum):
    """The places that differ in what they understand."""

    FLEET = "fleet"
    """An instance of an Auto Scaling group."""
    SLURM = "slurm"
    """A Slurm job."""
    ELSEWHERE = "elsewhere"
    """A laptop, a container, a Kubernetes job: whoever started us reads the exit code."""


class Ending(enum.Enum):
    """What one start of `harness run` came to."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """By a notice; durable or not."""
    SUPERSEDED = "superseded"
    FAILED = "failed"
    """Again would be the same: usage, a bug, or a program that has crashed too often without progress."""
    AGENT_DIED = "agent died"
    """Killed by a signal, or gone without a recorded outcome: that says nothing about the run."""


class Act(enum.Enum):
    """Something to be done about the place, in the order in which a consequence names them."""

    FINISH = "end the job"
    """This instance is terminated, and the group wants one fewer."""
    LEAVE = "terminate this instance"
    """And the group keeps its size."""
    STOP = "stop the fleet"
    """The group wants none any more; people are told."""
    REQUEUE = "requeue the Slurm job"
    COMPLETE = "complete the lifecycle hook"
    """The group need not wait for us to end the instance."""


class Then(enum.Enum):
    """What becomes of us afterwards."""

    EXIT = "exit"
    WAIT = "start again if the instance lives on"
    AGAIN = "start again after a while"


@dataclass(frozen=True)
class Consequence:
    """What to do, and how to go on."""

    actions: tuple[Act, ...] = ()
    then: Then = Then.EXIT


_INTERRUPTED = frozenset({ExitCode.INTERRUPTED, ExitCode.INTERRUPTED_LOCAL})
_HARMLESS = frozenset({ExitCode.FINISHED, ExitCode.SUPERSEDED, *_INTERRUPTED})
_CODES: Mapping[str, ExitCode] = {
    "finished": ExitCode.FINISHED,
    STOPPED_EARLY: ExitCode.FINISHED,
    "interrupted": ExitCode.INTERRUPTED,
    "superseded": ExitCode.SUPERSEDED,
}
_ENDINGS: Mapping[str, Ending] = {
    "finished": Ending.FINISHED,
    STOPPED_EARLY: Ending.FINISHED,
    "interrupted": Ending.INTERRUPTED,
    "superseded": Ending.SUPERSEDED,
    "failed": Ending.FAILED,
}

_TABLE: Mapping[tuple[Ending, Where], Consequence] = {
    (Ending.FINISHED, Where.FLEET): Consequence((Act.FINISH, Act.COMPLETE)),
    (Ending.INTERRUPTED, Where.FLEET): Consequence(then=Then.WAIT),
    (Ending.INTERRUPTED, Where.SLURM): Consequence((Act.REQUEUE,)),
    (Ending.SUPERSEDED, Where.FLEET): Consequence((Act.LEAVE, Act.COMPLETE)),
    (Ending.FAILED, Where.FLEET): Consequence((Act.STOP, Act.COMPLETE)),
    **{(Ending.AGENT_DIED, where): Consequence(then=Then.AGAIN) for where in Where},
}


def ending_of(code: int | None, signum: int | None = None, outcome: str | None = None) -> Ending:
    """What one start of `harness run` came to.

    Args:
        code: its exit code; `None` where nobody knows it.
        signum: the signal that ended it, if one did.
        outcome: as it was recorded; `None` where nobody knows it.
    """
    if signum is not None or code is None:
        return Ending.AGENT_DIED
    if (told := _ENDINGS.get(outcome or "")) is not None:
        return told
    if code == ExitCode.FINISHED:
        return Ending.FINISHED
    if code == ExitCode.SUPERSEDED:
        return Ending.SUPERSEDED
    return Ending.INTERRUPTED if code in _INTERRUPTED else Ending.FAILED


def code_of(outcome: str | None) -> int | None:
    """The exit code that stands for a recorded outcome; `None` for those after which a run is started again."""
    return _CODES.get(outcome or "")


def counts_as_failed(code: int | None, outcome: str | None = None) -> bool:
    """Whether an end belongs to the metric that tells a crash loop."""
    return outcome == "failed" or code not in _HARMLESS


def consequence(ending: Ending, where: Where, *, asked: bool = False, group_ends: bool = False) -> Consequence:
    """What follows from an ending.

    Args:
        ending: of the last `harness run`.
        where: the place.
        asked: whether we were told to leave ourselves, by a signal. A failure then says nothing about the run.
        group_ends: whether the Auto Scaling group is ending this instance.
    """
    found = _TABLE.get((ending, where), Consequence())
    if asked:
        kept = (Act.FINISH, Act.COMPLETE) if ending is Ending.FINISHED else (Act.REQUEUE,)
        found = Consequence(tuple(act for act in found.actions if act in kept))
    if group_ends and where is Where.FLEET:
        actions = tuple(act for act in found.actions if act not in (Act.LEAVE, Act.COMPLETE))
        found = replace(found, actions=(*actions, Act.COMPLETE), then=Then.EXIT)
    return found
