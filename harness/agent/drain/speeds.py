"""Figures of a drain: the measured speeds of this run's saves, the plan for the time that is left, and the outcome.

Owns the figures before and during a drain; decides nothing (`core.policy` does) and moves no bytes (`save/pipeline.py`
does). Main thread only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cloud.notice import Deadline
from harness.agent.save.pipeline import SavePipeline
from harness.core import events
from harness.core.policy.copying import Rates
from harness.core.policy.drain import Choice, Plan, is_overdue, never_fits, plan_drain, reserve_s
from harness.core.rate import Rate
from harness.core.words import count
from harness.errors import ExitCode


class Speeds:
    """Measured speeds of a copy, a step, a write and an upload of this run; every plan is made from them."""

    def __init__(self, pipeline: SavePipeline) -> None:
        """`pipeline` measures its own tiers."""
        self._pipeline = pipeline
        self._copying, self._stepping = Rate(), Rate()
        self._last_step: tuple[int, float] | None = None
        self._told_never_fits = False

    def sealed(self, size: int, copy_s: float) -> None:
        """Note that a snapshot of `size` bytes was copied, which would stop the loop for at most `copy_s`."""
        self._copying.add(size, copy_s)

    def reached(self, step: int, now: float) -> None:
        """Note that the trainer has completed `step` by monotonic `now`."""
        if self._last_step is None or step < self._last_step[0]:
            self._last_step = (step, now)
        elif step > self._last_step[0]:
            self._stepping.add(step - self._last_step[0], now - self._last_step[1])
            self._last_step = (step, now)

    def step_age_s(self, now: float) -> float | None:
        """Return how long ago, at monotonic `now`, the trainer was first seen at its step; `None` before its first."""
        return None if self._last_step is None else round(now - self._last_step[1], 1)

    @property
    def rates(self) -> Rates:
        """Measured speeds, pessimistic."""
        local, steps_s = self._pipeline.local, self._stepping.per_s
        return Rates(
            copy_bytes_s=self._copying.per_s,
            store_bytes_s=self._pipeline.remote.bytes_s,
            step_s=None if steps_s is None else 1.0 / steps_s,
            disk_bytes_s=None if local is None else local.bytes_s,
            copied=self._pipeline.remote.copied,
        )

    def plan(self, deadline: Deadline, *, trainer_alive: bool, layout_bytes: int | None) -> Plan:
        """Return what can still become durable. `layout_bytes` is the size of a snapshot if none was sealed yet."""
        pipeline = self._pipeline
        return plan_drain(
            None if math.isinf(deadline.at) else deadline.remaining_s,
            pipeline.state_bytes or layout_bytes,
            self.rates,
            trainer_alive=trainer_alive,
            in_flight_bytes=pipeline.remote.bytes_left,
            sealed=pipeline.sealed_step is not None and not pipeline.everything_durable,
            step_age_s=self.step_age_s(time.monotonic()),
        )

    def is_overdue(self) -> bool:
        """Return whether the current step takes clearly longer than usual."""
        return is_overdue(self.rates.step_s, self.step_age_s(time.monotonic()))

    def step_of(self, plan: Plan, step: int | None) -> int | None:
        """Return the step that a plan saves, given that the trainer is at `step`."""
        if plan.choice is Choice.NEWEST:
            return self._pipeline.sealed_step
        if plan.choice is Choice.FINISH:
            return min((job.step for job in self._pipeline.remote.jobs), default=self._pipeline.steps.durable)
        return step

    def never_fits(self, window_s: float) -> events.NeverFits | None:
        """Return a warning, once, that no snapshot can become durable in `window_s`: long before a notice shows it."""
        size, rates = self._pipeline.state_bytes, self.rates
        if self._told_never_fits or size is None or rates.store_bytes_s is None:
            return None
        needs_s = never_fits(size, rates, window_s)
        if needs_s is None:
            return None
        self._told_never_fits = True
        return events.NeverFits(bytes=size, store_bytes_s=rates.store_bytes_s, needs_s=needs_s, window_s=window_s)


@dataclass
class Drain:
    """A drain. It begins when a notice, a signal or a newer generation asks this generation to end.

    Attributes:
        deadline: until when snapshots are saved; the soonest of all requests.
        ends_at: when the instance ends, or the sender of the signal waits no longer; the agent ends before that.
        exit_code: of the agent, if the drain succeeds.
        plan: what the time is used for.
        clock: monotonic seconds.
        began_at: monotonic.
        durable_at: monotonic; the newest commit in the store since then.
    """

    deadline: Deadline
    exit_code: ExitCode
    plan: Plan
    ends_at: Deadline
    clock: Callable[[], float] = time.monotonic
    began_at: float = field(init=False)
    durable_at: float | None = None

    def __post_init__(self) -> None:
        self.began_at = self.clock()

    def join(self, deadline: Deadline, ends_at: Deadline, code: ExitCode) -> bool:
        """Add another request to drain. Return whether there is less time now.

        SUPERSEDED is kept: an instance that exits 75 would be started again, and would take the run back.
        """
        if code is ExitCode.SUPERSEDED or (code is ExitCode.INTERRUPTED and self.exit_code is not ExitCode.SUPERSEDED):
            self.exit_code = code
        sooner = ends_at.at < self.ends_at.at
        if sooner:
            self.deadline, self.ends_at = deadline, ends_at
        return sooner

    def outcome(self, durable_step: int | None, step: int | None) -> events.Drained:
        """Return the outcome, given the newest durable step and the trainer's last one."""
        in_s = None if durable_step is None else 0.0 if self.durable_at is None else self.durable_at - self.began_at
        lost = None if step is None else max(0, step - (durable_step or 0))
        return events.Drained(durable_step=durable_step, durable_in_s=in_s, lost_steps=lost)

    def drilled(self, drained: events.Drained) -> events.Drilled:
        """Return the outcome for the caller of `harness drill --end`."""
        late = drained.durable_in_s is None or bool(drained.lost_steps)
        return events.Drilled(
            durable_step=drained.durable_step,
            durable_in_s=None if late else drained.durable_in_s,
            has_s=self.plan.has_s or 0.0,
            lost_steps=drained.lost_steps or 0,
        )


def before_the_end(ends_at: Deadline) -> Deadline:
    """Return until when snapshots are saved, if the agent has to end before `ends_at`."""
    if math.isinf(ends_at.at):
        return ends_at
    return Deadline(ends_at.at - reserve_s(ends_at.remaining_s), ends_at.clock)


def words(drained: events.Drained) -> str:
    """Return the outcome for people: "durable in 38 s: step 12 034; nothing is lost"."""
    lost = {None: "", 0: "; nothing is lost"}.get(drained.lost_steps, f"; {count(drained.lost_steps)} steps are lost")
    if drained.durable_step is None or drained.durable_in_s is None:
        return f"nothing became durable{lost}"
    if drained.durable_in_s == 0.0:
        return f"already durable: step {count(drained.durable_step)}{lost}"
    return f"durable in {drained.durable_in_s:.1f} s: step {count(drained.durable_step)}{lost}"
