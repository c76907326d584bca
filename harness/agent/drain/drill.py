"""A drill: the effect of a notice, measured on a live run without ending it.

Owns what one drill waits for and how its result is counted. Everything else is as after a notice: the same plan, a
snapshot at the next boundary, both tiers at once, no rate limit. But training continues, and takes its share of the
machine, so the times are too long rather than too short. Main thread of the agent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from cloud.notice import Deadline
from harness.core import events
from harness.core.messages import DrillDone, NoDrill
from harness.core.policy.drain import Choice, Plan
from harness.core.words import count
from harness.ipc.channel import Channel, ChannelClosed


class Drill:
    """One drill, from the moment of its notice until the snapshot that it asked for is durable, or time is up."""

    def __init__(
        self,
        channel: Channel,
        in_s: float,
        plan: Plan,
        step: int,
        sealed_step: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin the drill. Its notice is in force from now on.

        Args:
            channel: to the caller, who may be gone by the end.
            in_s: seconds until the end of the instance, had it been a notice.
            plan: what that time would be used for.
            step: the trainer's.
            sealed_step: of the newest snapshot that is sealed.
            clock: monotonic seconds.
        """
        self._channel, self._plan, self._step = channel, plan, step
        self._awaited = None if plan.choice is Choice.NEW else sealed_step
        self._in_s, self._deadline, self._began_at = in_s, Deadline.after(in_s, clock), clock()

    def sealed(self, step: int) -> None:
        """Note that a snapshot was taken. A notice would have led to the first one at or after it."""
        if self._plan.choice is Choice.NEW and self._awaited is None and step >= self._step:
            self._awaited = step

    def outcome(self, durable_step: int | None, durable_at: float | None) -> events.Drilled | None:
        """Return the result, given the newest durable step and when it became durable; `None` while it is open."""
        over = self._deadline.expired
        reached = self._awaited
        if self._plan.choice is not Choice.NEW or (reached is None and over):
            reached = self._step  # a trainer that leaves goes no further, however long its step takes
        awaited = reached if self._awaited is None else self._awaited
        durable = awaited is not None and durable_step is not None and durable_step >= awaited
        if reached is None or not (durable or over):
            return None
        return events.Drilled(
            durable_step=durable_step,
            durable_in_s=max(0.0, (durable_at or 0.0) - self._began_at) if durable else None,
            has_s=self._in_s,
            lost_steps=max(0, reached - (durable_step or 0)),
        )

    def answer(self, drilled: events.Drilled) -> None:
        """Send the result to the caller."""
        tell(self._channel, drilled)

    def call_off(self, why: str) -> None:
        """Tell the caller that the drill was cancelled, and why."""
        refuse(self._channel, why)


def tell(channel: Channel, drilled: events.Drilled) -> None:
    """Send the result of a drill to its caller, who may be gone."""
    with contextlib.suppress(ChannelClosed):
        channel.send(DrillDone(drilled, words(drilled)))


def refuse(channel: Channel, why: str) -> None:
    """Tell the caller that there is no drill, or that it was cancelled."""
    with contextlib.suppress(ChannelClosed):
        channel.send(NoDrill(why))


def words(drilled: events.Drilled) -> str:
    """Return the result for people: "durable 3.2 s after the notice, of 120 s: step 12 034; nothing would be lost"."""
    lost = "nothing" if not drilled.lost_steps else f"{count(drilled.lost_steps)} steps"
    if drilled.durable_in_s is None:
        durable = "nothing" if drilled.durable_step is None else f"step {count(drilled.durable_step)}"
        return f"NOT durable in {drilled.has_s:.3g} s: {lost} would be lost; {durable} is durable"
    when = f"durable {drilled.durable_in_s:.1f} s after the notice, of {drilled.has_s:.3g} s"
    return f"{when}: step {count(drilled.durable_step)}; {lost} would be lost"
