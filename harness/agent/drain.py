"""One drain: until when, with which plan, how it ends, and what came of it.

Owns the figures between "the instance is going away" and the end; decides nothing (`core.policy` does) and moves no
bytes (`saves.py` does).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cloud.notice import Deadline
from harness.core import events
from harness.core.policy import Plan, count
from harness.errors import ExitCode


@dataclass
class Drain:
    """Begins when a notice, a signal or a newer generation asks this one to leave.

    Attributes:
        deadline: until when; the soonest of all that asked.
        exit_code: what the end will be if it goes well.
        plan: what the time is used for.
        clock: monotonic seconds.
        began_at: monotonic.
        durable_at: monotonic; the newest commit in the store since then.
    """

    deadline: Deadline
    exit_code: ExitCode
    plan: Plan
    clock: Callable[[], float] = time.monotonic
    began_at: float = field(init=False)
    durable_at: float | None = None

    def __post_init__(self) -> None:
        self.began_at = self.clock()

    def join(self, deadline: Deadline, code: ExitCode) -> bool:
        """Somebody else asks as well. Whether there is less time now.

        Being superseded stays: an instance that exits 75 would be started again, and would take the run back.
        """
        if code is ExitCode.SUPERSEDED or (code is ExitCode.INTERRUPTED and self.exit_code is not ExitCode.SUPERSEDED):
            self.exit_code = code
        sooner = deadline.at < self.deadline.at
        if sooner:
            self.deadline = deadline
        return sooner

    def outcome(self, durable_step: int | None, step: int | None) -> events.Drained:
        """What came of it, given the newest durable step and the trainer's last one."""
        in_s = None if durable_step is None else 0.0 if self.durable_at is None else self.durable_at - self.began_at
        lost = None if step is None else max(0, step - (durable_step or 0))
        return events.Drained(durable_step=durable_step, durable_in_s=in_s, lost_steps=lost)


def words(drained: events.Drained) -> str:
    """For people: "durable in 38 s: step 12 034; nothing is lost"."""
    lost = {None: "", 0: "; nothing is lost"}.get(drained.lost_steps, f"; {count(drained.lost_steps)} steps are lost")
    if drained.durable_step is None or drained.durable_in_s is None:
        return f"nothing became durable{lost}"
    if drained.durable_in_s == 0.0:
        return f"durable before: step {count(drained.durable_step)}{lost}"
    return f"durable in {drained.durable_in_s:.1f} s: step {count(drained.durable_step)}{lost}"
