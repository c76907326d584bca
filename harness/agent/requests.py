"""Requests for snapshots: when one is due, and the command that all ranks get for it.

Owns the reasons by time and by step; `trainers/ranks.py` has those that others give. In a drain the plan decides. Main
thread of the agent.
"""

from __future__ import annotations

import time

from harness.agent.context import Context
from harness.agent.drain.controller import DrainController
from harness.agent.save.pipeline import SavePipeline
from harness.agent.trainers.attempt import TrainerAttempt
from harness.agent.trainers.lateness import Lateness
from harness.agent.trainers.ranks import Ranks, Taken
from harness.core import events
from harness.core.policy.cadence import Cadence
from harness.core.policy.drain import Choice
from harness.core.policy.meeting import Place
from harness.ipc.control_page import Command

_EVERY_STEPS = "every_steps"


class Requests:
    """The present request for a snapshot, if there is one."""

    def __init__(
        self, context: Context, ranks: Ranks, pipeline: SavePipeline, drain: DrainController, lateness: Lateness
    ) -> None:
        """Request nothing yet.

        Args:
            context: of the agent.
            ranks: get the commands.
            pipeline: knows when the last snapshot was sealed.
            drain: has the plan once the run is left.
            lateness: knows whether a rank that is late keeps all from a snapshot.
        """
        self._settings, self._emit = context.settings, context.emit
        self._ranks, self._pipeline, self._drain = ranks, pipeline, drain
        self._lateness = lateness
        self._left_with: int | None = None  # the step that all ranks have sealed in a drain
        self._missed: int | None = None  # the newest step that one has not sealed when all were asked to

    def turn(self, attempt: TrainerAttempt, *, attached: bool) -> None:
        """Keep a free slot granted, and command a snapshot (or an exit) when there is a reason.

        Raises:
            Uneven: several ranks will never come to one step.

        Args:
            attempt: the present one.
            attached: whether its first step was made under another agent.
        """
        ranks = self._ranks
        if not ranks.connections:
            return
        if ranks.several:
            self._drop_incomplete()
        ranks.grant()
        if (drain := self._drain.current) is not None:
            takes = drain.plan.choice is Choice.NEW and self._left_with is None and not self._stands_sealed()
            ranks.command(Command.SNAPSHOT_AND_LEAVE if takes and not ranks.one_has_left else Command.LEAVE)
        elif ranks.one_has_left:
            self.take_back()
        elif self._lateness.in_the_way:
            pass
        elif ranks.may_ask and (place := ranks.evaluate_at) is not None and self._is_new(place.step):
            ranks.command(self._snapshot, place)
            self._emit(events.Due(reason="evaluating"))
        elif ranks.may_ask and (reason := self._reason(attempt, attached=attached)) is not None:
            ranks.command(self._snapshot)
            self._emit(events.Due(reason=reason))
        elif (
            ranks.several
            and not ranks.meeting.is_open
            and ranks.may_ask
            and (step := self._next_multiple()) is not None
        ):
            ranks.command(self._snapshot, Place(step))
            self._emit(events.Due(reason=_EVERY_STEPS))
        sealed = self._pipeline.sealed_step if ranks.sealed_step is None else ranks.sealed_step
        if (agreed := ranks.meeting.turn(sealed)) is not None:
            self._emit(events.Agreed(step=agreed, seconds=ranks.meeting.age_s))

    def _drop_incomplete(self) -> None:
        """Drop what some ranks have sealed and others will not, and tell those that wait for it to become durable.

        An agent that takes over knows nothing of the ask that the dead one left half carried out: it is taken back. A
        rank may carry that out even later, when all have been asked for another step.
        """
        if self._ranks.complete and self._drain.current is None:
            self._ranks.drop(self._pipeline.forget_others(self._ranks.meeting.agreed))
        missed = self._ranks.meeting.take_missed()
        if missed is not None:
            self._missed = missed
            self._ranks.drop(self._pipeline.forget([missed]))
        steps = [rank.control.trainer_step for rank in self._ranks]
        self._ranks.drop(self._pipeline.forget_passed(steps, self._ranks.meeting.given_up))

    def _is_new(self, step: int) -> bool:
        """Whether a step is neither sealed, nor asked for before in vain."""
        return step not in (self._pipeline.sealed_step, self._missed)

    @property
    def _snapshot(self) -> Command:
        at_end = any(rank.control.at_end for rank in self._ranks)  # no later one would show what differs in this one
        compares = self._ranks.several and (self._ranks.holdings.compares or at_end)
        return Command.SNAPSHOT_AND_COMPARE if compares else Command.SNAPSHOT

    def take_back(self) -> None:
        """Take the present ask back, because of a rank that is late. In a drain it stands: there is no later one."""
        if self._drain.current is None and self._ranks.meeting.is_open:
            self._ranks.meeting.ask_again()

    def taken(self, taken: Taken) -> None:
        """Note that all ranks have sealed a step. Several leave with the one they are asked for, none before."""
        if taken.leaves:
            self._left_with = taken.step

    def forget(self) -> None:
        """Note that the trainer has gone."""
        self._left_with = self._missed = None
        self._ranks.meeting.close()

    def _stands_sealed(self) -> bool:
        """Whether several ranks stand at a step that all have sealed, with no boundary before them for a while."""
        meeting = self._ranks.meeting
        return self._ranks.several and meeting.is_open and meeting.all_stand(self._pipeline.sealed_step)

    def _reason(self, attempt: TrainerAttempt, *, attached: bool) -> str | None:
        if self._ranks.reasons:
            return min(self._ranks.reasons)
        if attempt.first_step_at is None and not attached:
            return None
        settings = self._settings
        every_s = settings.every_s if settings.local else min(settings.every_s, settings.durable_every_s)
        since = attempt.first_step_at or attempt.began_at
        if Cadence(every_s).due(time.monotonic(), self._pipeline.sealed_at, since):
            return "interval"
        return _EVERY_STEPS if self._ranks.several and self._is_overdue() else None

    def _is_overdue(self) -> bool:
        """Whether several ranks have passed a multiple of `every_steps` without a snapshot: no slot was free."""
        every, step = self._settings.every_steps, self._ranks.trainer_step
        if every is None or step is None:
            return False
        return step // every * every > (self._pipeline.sealed_step or 0)

    def _next_multiple(self) -> int | None:
        """Return the next step at which several ranks take a snapshot by `every_steps`; one rank counts by itself."""
        every, step = self._settings.every_steps, self._ranks.farthest_step
        return None if every is None or step is None else (step // every + 1) * every
