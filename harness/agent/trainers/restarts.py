"""Restarts in place: whether a trainer that died by itself is started again, when, and where its slots go meanwhile.

Owns the number of crashes, the furthest step, and the time of the next start. Knows neither processes nor notices: the
agent reports a crash, and calls a restart off. Main thread.
"""

from __future__ import annotations

import signal
import time

from harness.agent.context import Context
from harness.agent.save.pipeline import SavePipeline
from harness.agent.save.slot_pool import oom_kills
from harness.agent.trainers.attempt import TrainerAttempt
from harness.core import events
from harness.core.policy.restart import GiveUp, after_crash
from harness.errors import NoSpace


class Restarts:
    """The restarts in place of one agent."""

    def __init__(self, context: Context, pipeline: SavePipeline) -> None:
        """Start with no restart pending.

        Args:
            context: of the agent.
            pipeline: its slots move to the disk after the trainer was killed for lack of memory.
        """
        self._max_crashes, self._pipeline = context.settings.max_crashes, pipeline
        self._emit, self._say = context.emit, context.say
        self._due_at: float | None = None
        self._crashes = self._furthest = self._furthest_crashed = 0
        self._connected = False
        self._oom_kills = oom_kills()

    @property
    def pending(self) -> bool:
        """Whether the trainer is going to be started again."""
        return self._due_at is not None

    @property
    def due(self) -> bool:
        """Whether the pending restart is due."""
        return self._due_at is not None and time.monotonic() >= self._due_at

    def call_off(self) -> None:
        """Clear the pending restart: it is cancelled, or carried out now."""
        self._due_at = None

    def reached(self, step: int) -> None:
        """Note that the trainer has completed `step`."""
        self._furthest = max(self._furthest, step)

    def after_crash(self, attempt: TrainerAttempt, *, would_be_the_same: bool) -> None:
        """Schedule a restart after an attempt that crashed, or give up.

        Args:
            attempt: the one that crashed.
            would_be_the_same: whether the next attempt could only end in the same way.
        """
        self._connected |= attempt.connected  # if it is killed before its next hello, it is still this program
        decision = after_crash(
            crashes=self._crashes,
            progressed=self._furthest > max(attempt.resumed_step, self._furthest_crashed),
            connected=self._connected,
            max_crashes=0 if would_be_the_same else self._max_crashes,
        )
        self._furthest_crashed = max(self._furthest, self._furthest_crashed)
        if isinstance(decision, GiveUp):
            if self._connected:
                self._emit(events.GaveUp(crashes=decision.crashes))
            self._pipeline.save_newest_now()
            return
        self._crashes = decision.crashes
        if attempt.exit_code == 128 + signal.SIGKILL and oom_kills() > self._oom_kills:
            self._leave_memory()
        self._due_at = time.monotonic() + decision.in_s
        self._emit(events.Restarting(in_s=decision.in_s, crashes=decision.crashes))

    def _leave_memory(self) -> None:
        """Free the slots' memory for the next trainer: the kernel killed one, or another process, for lack of it."""
        self._oom_kills = oom_kills()
        try:
            self._pipeline.leave_memory()
        except NoSpace as err:
            self._say(f"the kernel has killed the program for lack of memory, but the slots stay in memory: {err}")
        else:
            self._say("the kernel has killed the program for lack of memory: from now on the disk takes the snapshots")
