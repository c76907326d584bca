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
from harness.agent.trainers.ranks import Ranks, Taken
from harness.core import events
from harness.core.policy.cadence import Cadence
from harness.core.policy.drain import Choice
from harness.ipc.control_page import Command

_EVERY_STEPS = "every_steps"


class Requests:
    """The present request for a snapshot, if there is one."""

    def __init__(self, context: Context, ranks: Ranks, pipeline: SavePipeline, drain: DrainController) -> None:
        """Request nothing yet.

        Args:
            context: of the agent.
            ranks: get the commands.
            pipeline: knows when the last snapshot was sealed.
            drain: has the plan once the run is left.
        """
        self._settings, self._emit = context.settings, context.emit
        self._ranks, self._pipeline, self._drain = ranks, pipeline, drain
        self._left_with: int | None = None  # the step that all ranks have sealed in a drain

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
        ranks.grant()
        if (drain := self._drain.current) is not None:
            takes = drain.plan.choice is Choice.NEW and self._left_with is None and not self._stands_sealed()
            ranks.command(Command.SNAPSHOT_AND_LEAVE if takes else Command.LEAVE)
        elif ranks.may_ask and (reason := self._reason(attempt, attached=attached)) is not None:
            ranks.command(self._snapshot)
            self._emit(events.Due(reason=reason))
        elif ranks.several and ranks.may_ask and (step := self._next_multiple()) is not None:
            ranks.command(self._snapshot, step)
            self._emit(events.Due(reason=_EVERY_STEPS))
        ranks.meeting.turn(self._pipeline.sealed_step)

    @property
    def _snapshot(self) -> Command:
        at_end = any(rank.control.at_end for rank in self._ranks)  # there is no later step to take instead
        compares = self._ranks.several and self._ranks.holdings.compares and not at_end
        return Command.SNAPSHOT_AND_COMPARE if compares else Command.SNAPSHOT

    def taken(self, taken: Taken) -> None:
        """Note that all ranks have sealed a step. Several leave with it, and none leaves before."""
        if self._drain.current is not None and self._ranks.several:
            self._left_with = taken.step

    def forget(self) -> None:
        """Note that the trainer has gone."""
        self._left_with = None
        self._ranks.meeting.close()

    def _stands_sealed(self) -> bool:
        """Whether several ranks stand at a step that all have sealed, with no boundary before them for a while."""
        if not self._ranks.several or self._pipeline.sealed_step is None:
            return False
        views = [rank.control.view for rank in self._ranks]
        return all(view.waits and view.step == self._pipeline.sealed_step for view in views)

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
