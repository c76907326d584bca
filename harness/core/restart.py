"""What a restart's time went into: moments of the agent and the trainer in, parts that sum to the total out.

Owns the eight parts and who of two that happen at once is charged; asks no clock. The trainer's own way is what the
first step waits for, so each instant belongs to what the trainer was doing then, and the agent's work counts only
where the trainer waited for it:

    last life ends   agent starts   trainer starts       wants its tensors     restored   first step complete
         │   detect       │   boot        │ import ┊wait┊ import ┊wait┊│ restore │  first step  │
                                                     └──────┴─▶ locate, fetch and verify, by what the agent did then
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[float, float]
"""From, until: monotonic seconds of one host."""

NO_TIME: Span = (0.0, 0.0)


@dataclass(frozen=True)
class Moments:
    """When things happened. All monotonic seconds of this host; in whatever order they came.

    Attributes:
        ended_at: when the trainer of the last life was last known to live; `None` if nobody knows.
        began_at: when this life was begun: the agent's process, or its decision to start the trainer again.
        spawned_at: when the trainer's process was started.
        joining: the trainer finds its agent, or starts one and waits until it listens.
        waits: the trainer waits to be told what is resumed, and for the tensors.
        filling: the snapshot came into a slot and was verified; may be over before the trainer was started.
        verify_share: of the time of `filling`, what its threads spent on checksums rather than reading: 0 to 1.
        restoring: the live state became the snapshot's.
        stepped_at: when the first optimizer step was complete.
    """

    ended_at: float | None
    began_at: float
    spawned_at: float
    joining: Span
    waits: Sequence[Span]
    filling: Span
    verify_share: float
    restoring: Span
    stepped_at: float


@dataclass(frozen=True)
class Parts:
    """Milliseconds of the first step's waiting, each instant in one part: they sum to `total` exactly."""

    detect: int
    boot: int
    import_: int
    locate: int
    fetch: int
    verify: int
    restore: int
    first_step: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(vars(self).values())


def divide(moments: Moments) -> Parts:
    """Divide the time from the end of the last life to the first step of this one among what it was spent on."""
    spawned_at = moments.spawned_at
    if moments.ended_at is not None and spawned_at < moments.ended_at <= moments.began_at:
        spawned_at = moments.ended_at  # the shell that had run the last life became this one's trainer: `exec`
    began_at = min(moments.began_at, spawned_at)  # a detached agent is started by its trainer
    start = began_at if moments.ended_at is None else min(moments.ended_at, began_at)
    end = max(moments.stepped_at, start)
    wanted_at, restored_at = moments.restoring

    def part_at(instant: int) -> str:
        if instant < _ms(began_at):
            return "detect"
        if instant < _ms(spawned_at) or _holds(moments.joining, instant):
            return "boot"
        if instant >= _ms(wanted_at):
            return "restore" if instant < _ms(restored_at) else "first_step"
        if any(_holds(wait, instant) for wait in moments.waits):
            return "fetch" if _holds(moments.filling, instant) else "locate"
        return "import_"

    spans = [moments.joining, *moments.waits, moments.filling, moments.restoring]
    edges = {_ms(edge) for edge in (began_at, spawned_at, *(edge for span in spans for edge in span))}
    cuts = sorted({edge for edge in edges if _ms(start) < edge < _ms(end)} | {_ms(start), _ms(end)})
    found = dict.fromkeys(Parts.__dataclass_fields__, 0)
    for begin, until in pairwise(cuts):
        found[part_at(begin)] += until - begin
    found["verify"] = round(found["fetch"] * moments.verify_share)  # chunk by chunk, so it has no place of its own
    found["fetch"] -= found["verify"]
    return Parts(**found)


def _ms(instant: float) -> int:
    """Whole milliseconds, once for every moment: differences of whole numbers sum without a rest."""
    return round(instant * 1000)


def _holds(span: Span, instant: int) -> bool:
    return _ms(span[0]) <= instant < _ms(span[1])
