"""One attempt of the trainer, as its agent sees it: how far it got, how it ended, and how long its start took.

Owns what is known of one process between its start and its exit; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.agent.resume_point import ResumePoint
from harness.core import events
from harness.core.messages import FirstStep
from harness.core.restart import Moments, divide


@dataclass
class TrainerAttempt:
    """One attempt of the trainer, from its start to its exit.

    Attributes:
        began_at: monotonic; when it began. For an agent's first attempt, when the agent started.
        starting_at: monotonic; when its start began; for the first attempt, that of the agent's process, including
            Python's own.
        last_ended_at: monotonic; when the previous attempt in this agent ended.
        spawned_at: monotonic; when its process was started. `None` for one that another agent saw start.
        greeted: the ranks whose Checkpointer has said hello.
        greeted_at: monotonic; when the first of them did.
        first_step_at: monotonic; when the first optimizer step was complete.
        finished_step: the step at which the last loop ended, on all ranks.
        exit_code: how the process ended; `None` while it lives, and for a trainer that is not our child and crashed.
        raised: whether its Checkpointer said goodbye because of an exception, or an exit code that says so.
        stopped_early: whether it said that the program left its outermost loop before its end, by its own choice.
        hopeless: whether the exception was one of our own errors, which the same program would meet again.
        stopped: whether the agent has sent its process SIGTERM, as the last resort.
        over: whether the process has ended, or is not waited for any more.
        ended_at: monotonic; when the process, or its last connection, ended.
        resumed_step: the step where it began.
        restored: whether it has restored the snapshot's state.
        saves_by_itself: whether it is a watched program, which has no Checkpointer.
        stepped: the trainer's message about its first step, until `Restarted` is emitted.
        left_loop: the ranks that have left their outermost loop early, and are in no other.
        told: the ranks that have sent a message, by its kind, of those that count once all have sent it.
    """

    began_at: float
    starting_at: float
    last_ended_at: float | None = None
    spawned_at: float | None = None
    greeted: set[int] = field(default_factory=set)
    greeted_at: float | None = None
    first_step_at: float | None = None
    finished_step: int | None = None
    exit_code: int | None = None
    raised: bool = False
    stopped_early: bool = False
    hopeless: bool = False
    stopped: bool = False
    over: bool = False
    ended_at: float | None = None
    resumed_step: int = 0
    restored: bool = False
    saves_by_itself: bool = False
    stepped: FirstStep | None = None
    left_loop: set[int] = field(default_factory=set)
    told: dict[type, set[int]] = field(default_factory=dict)

    def is_last(self, kind: type, rank: int, of: int) -> bool:
        """Note that a rank has sent a message of this kind; return whether all of `of` ranks have now."""
        ranks = self.told.setdefault(kind, set())
        ranks.add(rank)
        return len(ranks) == of

    @property
    def connected(self) -> bool:
        """Whether a Checkpointer said hello; or the program is one that is watched instead."""
        return bool(self.greeted) or self.saves_by_itself

    def restarted(self, last_ended_at: float | None, point: ResumePoint | None) -> events.Restarted | None:
        """Return how long its start took, in parts; `None` if this agent has not seen all of it.

        Args:
            last_ended_at: monotonic; the end of the previous attempt, if that had another agent.
            point: what it resumed.
        """
        told, resumed = self.stepped, point if self.restored else None
        if told is None or self.spawned_at is None:
            return None
        ended_at = self.last_ended_at if self.last_ended_at is not None else last_ended_at
        parts = divide(
            Moments(
                ended_at=ended_at,
                began_at=self.starting_at,
                spawned_at=self.spawned_at,
                waits=told.waits,
                wanted_at=told.wanted_at,
                stepped_at=told.at,
            )
        )
        return events.Restarted(
            step=told.step,
            snapshot=None if resumed is None else str(resumed.id),
            tier=None if resumed is None else resumed.tier,
            total_s=parts.total / 1000,
            detect_s=None if ended_at is None else parts.detect / 1000,
            start_s=parts.start / 1000,
            wait_s=parts.wait / 1000,
            first_step_s=parts.first_step / 1000,
            fetching_s=0.0 if resumed is None else resumed.filling_s,
        )
