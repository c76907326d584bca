"""What to do after `harness run` has ended: the table of docs/operations.md, as values.

Owns the decision; does nothing. `ending_of` decides by the outcome that the agent recorded, because a program may exit
with any code of its own, 73 and 75 too. The exit code decides only if no outcome is known. The outcome of a found agent
that was not our child counts as the code that it would have ended with.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.core.manifest import STOPPED_EARLY
from harness.errors import ExitCode


class Where(enum.Enum):
    """The kinds of platform, which differ in the actions that they support."""

    FLEET = "fleet"
    """An instance of an Auto Scaling group."""
    SLURM = "slurm"
    """A Slurm job."""
    ELSEWHERE = "elsewhere"
    """A laptop, a container, a Kubernetes job: the caller reads the exit code."""


class Ending(enum.Enum):
    """How one start of `harness run` ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """Ended by a notice; durable or not."""
    SUPERSEDED = "superseded"
    FAILED = "failed"
    """Another start would fail again: usage, a bug, or a program that has crashed too often without progress."""
    AGENT_DIED = "agent died"
    """Killed by a signal, or gone without a recorded outcome: that says nothing about the run."""


class Act(enum.Enum):
    """An action on the platform; done in the order in which a consequence names them."""

    FINISH = "end the job"
    """Terminate this instance, and reduce the group's desired capacity by one."""
    LEAVE = "terminate this instance"
    """Terminate this instance only: the group keeps its size."""
    STOP = "stop the fleet"
    """Set the group's desired capacity to 0, and notify people."""
    REQUEUE = "requeue the Slurm job"
    COMPLETE = "complete the lifecycle hook"
    """Tell the group not to wait for us any longer before it ends the instance."""


class Then(enum.Enum):
    """What `harness resume` does afterwards."""

    EXIT = "exit"
    WAIT = "start again if the instance lives on"
    AGAIN = "start again after a while"


@dataclass(frozen=True)
class Consequence:
    """The actions to take, and what to do afterwards."""

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
    """Return how one start of `harness run` ended.

    Args:
        code: its exit code; `None` if unknown.
        signum: the signal that ended it, if one did.
        outcome: as it was recorded; `None` if unknown.
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
    """Return the exit code that stands for a recorded outcome; `None` for those after which a run is started again."""
    return _CODES.get(outcome or "")


def counts_as_failed(code: int | None, outcome: str | None = None) -> bool:
    """Return whether an end counts for the metric that shows a crash loop."""
    return outcome == "failed" or code not in _HARMLESS


def consequence(ending: Ending, where: Where, *, asked: bool = False, group_ends: bool = False) -> Consequence:
    """Return what to do after an ending.

    Args:
        ending: of the last `harness run`.
        where: the kind of platform.
        asked: whether a signal asked us to exit. A failure then says nothing about the run.
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
