"""Where a restart's time goes: moments of the agent and the trainer in, parts that sum to the total out.

Owns the four parts, and which of two things that happen at once counts; reads no clock. The first step waits for the
trainer, so each instant belongs to what the trainer was doing then: the agent's work counts only while the trainer
waited for it.

    previous ends    this one begins            wants its tensors            first step complete
         │   detect       │   start  ┊ wait ┊ start  ┊ wait ┊│       first step       │
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[float, float]
"""Begin and end, in monotonic seconds of one host."""

NO_TIME: Span = (0.0, 0.0)


@dataclass(frozen=True)
class Moments:
    """The moments of one start. All are monotonic seconds of this host; they may be in any order.

    Attributes:
        ended_at: when the trainer of the previous attempt was last known to live; `None` if unknown.
        began_at: when this attempt began: the agent's process, or its decision to start the trainer again.
        spawned_at: when the trainer's process was started.
        waits: when the trainer waited to learn what it resumes, and for the tensors.
        wanted_at: when the trainer was ready to restore the snapshot.
        stepped_at: when the first optimizer step was complete.
    """

    ended_at: float | None
    began_at: float
    spawned_at: float
    waits: Sequence[Span]
    wanted_at: float
    stepped_at: float


@dataclass(frozen=True)
class Parts:
    """Milliseconds until the first step, each instant in one part: the parts sum to `total` exactly."""

    detect: int
    start: int
    wait: int
    first_step: int

    @property
    def total(self) -> int:
        """Sum of the parts, in milliseconds."""
        return sum(vars(self).values())


def divide(moments: Moments) -> Parts:
    """Divide the time from the end of the previous attempt to the first step of this one into its parts."""
    spawned_at = moments.spawned_at
    if moments.ended_at is not None and spawned_at < moments.ended_at <= moments.began_at:
        spawned_at = moments.ended_at  # the shell that had run the previous attempt became this one's trainer: `exec`
    began_at = min(moments.began_at, spawned_at)  # a detached agent is started by its trainer
    start = began_at if moments.ended_at is None else min(moments.ended_at, began_at)
    end = max(moments.stepped_at, start)

    def part_at(instant: int) -> str:
        if instant < _ms(began_at):
            return "detect"
        if instant >= _ms(moments.wanted_at):
            return "first_step"
        return "wait" if any(_ms(begin) <= instant < _ms(until) for begin, until in moments.waits) else "start"

    edges = {_ms(edge) for edge in (began_at, moments.wanted_at, *(edge for span in moments.waits for edge in span))}
    cuts = sorted({edge for edge in edges if _ms(start) < edge < _ms(end)} | {_ms(start), _ms(end)})
    found = dict.fromkeys(Parts.__dataclass_fields__, 0)
    for begin, until in pairwise(cuts):
        found[part_at(begin)] += until - begin
    return Parts(**found)


def _ms(instant: float) -> int:
    """Round a moment to whole milliseconds: differences of whole numbers sum without a remainder."""
    return round(instant * 1000)
