"""The drain, and its rehearsal (a drill): from a deadline to a plan for the time that is left, and to its outcome.

Owns the drain and the drill, of which there is at most one each. Decides nothing by itself (`core.policy` does, on the
figures of `speeds.py`), and ends nothing: the agent ends once every snapshot is stored where it has to be. Main thread.

    deadline ──▶ plan ──▶ reported: journal, user, control page ──▶ tiers at full speed
                  └─ as time runs out: NEW becomes NEWEST, while that still fits
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from cloud.notice import Deadline, Notice, NoticeKind
from harness.agent.context import Context
from harness.agent.drain import drill as drills
from harness.agent.drain import speeds as drains
from harness.agent.drain.drill import Drill
from harness.agent.drain.speeds import Drain, Speeds
from harness.agent.save.pipeline import SavePipeline
from harness.agent.trainers.ranks import Ranks
from harness.core import events
from harness.core.messages import Drilling, Forecast
from harness.core.policy.drain import Choice, Plan, still_fits
from harness.errors import ExitCode
from harness.ipc.channel import Channel, ChannelClosed


class DrainController:
    """Drain and drill of one agent. `trains` always says whether a trainer is connected that can take a snapshot."""

    def __init__(self, context: Context, pipeline: SavePipeline, speeds: Speeds, ranks: Ranks) -> None:
        """Start without a drain and without a drill.

        Args:
            context: of the agent.
            pipeline: of the run.
            speeds: measured speeds of its saves.
            ranks: pass the deadline, and a drill's request for a snapshot, to the trainers.
        """
        self._pipeline, self._speeds, self._ranks = pipeline, speeds, ranks
        self._emit, self._say = context.emit, context.say
        self.current: Drain | None = None
        """The drain; `None` before it begins."""
        self._drill: Drill | None = None
        self._drilled_for: Channel | None = None

    def plan(self, deadline: Deadline, *, trains: bool) -> Plan:
        """Return the plan: what can still become durable until `deadline`."""
        return self._speeds.plan(deadline, trainer_alive=trains, layout_bytes=self._ranks.layout_bytes)

    def forecast(self, in_s: float, *, trains: bool) -> Forecast | None:
        """Return the cost of a notice now that leaves `in_s` seconds; `None` before the first step, and in a drain."""
        step = self._ranks.trainer_step
        if step is None or self.current is not None:
            return None
        plan = self.plan(drains.before_the_end(Deadline.after(in_s)), trains=trains)
        saved = self._speeds.step_of(plan, step) if plan.fits else self._pipeline.steps.durable
        return Forecast(in_s, round(plan.needs_s, 1), max(0, step - (saved or 0)))

    # ---- leaving ----------------------------------------------------------------------------------------------------

    def begin(self, ends_at: Deadline, code: ExitCode, *, trains: bool) -> None:
        """Begin a drain: choose how to use the time until `ends_at`, and log that first.

        `code` is the exit code if the drain succeeds.
        """
        deadline = drains.before_the_end(ends_at)
        if (drain := self.current) is not None:
            if drain.join(deadline, ends_at, code):
                self._push_deadline(deadline)
            return
        self.call_off_drill("a real interruption has begun")
        step, plan = self._ranks.trainer_step, self.plan(deadline, trains=trains)
        self.current = Drain(deadline, code, plan, ends_at)
        self._emit(
            events.Draining(
                choice=plan.choice.value, step=step, needs_s=plan.needs_s, has_s=plan.has_s, replaces=plan.replaces
            )
        )
        self._say(plan.words(self._speeds.step_of(plan, step)))
        self._push_deadline(deadline)
        self._hurry(plan)

    def save_what_there_is_in_time(self) -> None:
        """Save the newest sealed snapshot if no boundary for a new one has come in time, while that still fits.

        If the step takes longer than usual, that snapshot is sent before: a new one may come in time, or may not.
        """
        drain, pipeline = self.current, self._pipeline
        if drain is None or drain.plan.choice is not Choice.NEW or math.isinf(drain.deadline.at):
            return
        if pipeline.sealed_step is None or pipeline.everything_durable:
            return  # nothing else is left to save
        if not still_fits(drain.deadline.remaining_s, pipeline.state_bytes or 0, self._speeds.rates):
            drain.plan = replace(drain.plan, choice=Choice.NEWEST)  # a trainer that still comes exits without one
            pipeline.save_newest_now()
        elif not drain.plan.meanwhile and self._speeds.is_overdue():
            drain.plan = replace(drain.plan, meanwhile=True)
            pipeline.save_newest_meanwhile()

    def tell_outcome(self) -> None:
        """Report the outcome of the drain, if one was begun. Nothing is written any more at this point."""
        if self.current is None:
            return
        drained = self.current.outcome(self._pipeline.steps.durable, self._ranks.trainer_step)
        self._emit(drained)
        self._say(drains.words(drained))
        if self._drilled_for is not None:
            drills.tell(self._drilled_for, self.current.drilled(drained))

    def _push_deadline(self, deadline: Deadline) -> None:
        if not math.isinf(deadline.at):
            self._ranks.tell_deadline(deadline)
            self._pipeline.drain(deadline)

    def _hurry(self, plan: Plan) -> None:
        if plan.choice is Choice.NEW:
            self._pipeline.set_urgent(True)  # the new snapshot goes to both tiers at once
            if plan.meanwhile:
                self._pipeline.save_newest_meanwhile()
        else:
            self._pipeline.save_newest_now()

    # ---- drills -----------------------------------------------------------------------------------------------------

    def rehearse(
        self, channel: Channel, in_s: float, *, trains: bool, saves_itself: bool, over: bool, end: bool
    ) -> Notice | None:
        """Begin a drill for a caller. With `end` the run ends as after a notice, else training continues.

        Args:
            channel: to the caller.
            in_s: seconds that the notice would leave.
            trains: whether a trainer is there to take one more snapshot.
            saves_itself: whether a program without a Checkpointer runs, of which no step is known.
            over: whether the agent's outcome is decided.
            end: whether the run has to end.

        Returns:
            With `end`, the notice to treat as a real one.
        """
        if self.current is not None or self._drill is not None or over:
            drills.refuse(channel, "a drill is under way" if self._drill else "this run is already shutting down")
            return None
        step, deadline = self._ranks.trainer_step, Deadline.after(in_s)
        if saves_itself and not end:
            drills.refuse(
                channel, "this program saves by itself, and may exit once it is asked to: there is only --end"
            )
            return None
        if not saves_itself and (not trains or step is None):
            drills.refuse(channel, "nothing is being trained at the moment: no snapshot can be taken")
            return None
        plan = self.plan(drains.before_the_end(deadline), trains=trains)
        with contextlib.suppress(ChannelClosed):
            channel.send(Drilling(plan.words(self._speeds.step_of(plan, step))))
        if end:
            self._drilled_for = channel
            return Notice("drill", NoticeKind.INTERRUPT, "drill", deadline, "harness drill --end")
        assert step is not None, "a program without one is drilled to its end"
        self._emit(events.Drilling(choice=plan.choice.value, step=step, needs_s=plan.needs_s, has_s=plan.has_s))
        self._drill = Drill(channel, in_s, plan, step, self._pipeline.sealed_step)
        if plan.choice is Choice.NEW:
            self._ranks.reasons.add("drill")
        self._hurry(plan)
        return None

    def sealed(self, step: int) -> None:
        """Note that a snapshot of `step` was taken: a drill may wait for it."""
        if self._drill is not None:
            self._drill.sealed(step)

    def conclude_drill(self) -> None:
        """Send the result of a drill to its caller, once it is known."""
        if self._drill is None:
            return
        drilled = self._drill.outcome(self._pipeline.steps.durable, self._pipeline.durable_at)
        if drilled is not None:
            self._emit(drilled)
            self._drill.answer(drilled)
            self._drill = None

    def call_off_drill(self, why: str) -> None:
        """Cancel the drill, if there is one, and tell its caller why."""
        if self._drill is not None:
            self._drill.call_off(why)
            self._drill = None
