"""Who is waited for: a program without a Checkpointer, and of several ranks those that do not come.

Owns how long each rank has been at its step, and which were named. It ends no rank and sends no command: it names late
ranks, and returns whether the present command waits for one. Main thread of the agent.
"""

from __future__ import annotations

import time

from harness.agent.context import Context
from harness.agent.trainers.attempt import TrainerAttempt
from harness.agent.trainers.ranks import Rank, Ranks
from harness.core import events
from harness.core.messages import RankStatus

HELLO_S = 60.0
"""After this time without a Checkpointer, it is logged that nothing is being saved; of several ranks, which lack it."""
LATE_S = 60.0
"""After this time at one step, a rank that others wait for is late, unless its steps usually take as long."""
_USUAL = 4
"""So many usual steps are not late."""


class Lateness:
    """What is known of ranks that do not come."""

    def __init__(self, context: Context, ranks: Ranks) -> None:
        """Name no rank yet."""
        self._ranks, self._emit, self._say = ranks, context.emit, context.say
        self._since: dict[int, tuple[int | None, float]] = {}
        self._told: dict[int, int | None] = {}  # the step at which a rank was named, or will not be asked
        self._missing: set[int] = set()
        self._told_silent = False

    def begin_again(self) -> None:
        """Note that another attempt begins."""
        self._since.clear()
        self._told.clear()
        self._missing.clear()

    def _age_s(self, rank: int) -> float | None:
        """Return for how long a rank has been at its step; `None` before that was looked at."""
        known = self._since.get(rank)
        return None if known is None else time.monotonic() - known[1]

    @property
    def in_the_way(self) -> bool:
        """Whether a rank that was late is still where it was: no snapshot is asked for before it moves."""
        return any(self._is_late(rank) for rank in self._ranks)

    def status(self) -> tuple[RankStatus, ...]:
        """Return what `harness status` shows of several ranks; nothing for one."""
        return tuple(
            RankStatus(
                rank=rank.number,
                pid=None if rank.connection is None else rank.connection.pid,
                step=rank.control.trainer_step,
                step_age_s=None if (age_s := self._age_s(rank.number)) is None else round(age_s, 1),
                waits=rank.control.view.waits,
                late=self._is_late(rank),
            )
            for rank in (self._ranks if self._ranks.several else ())
        )

    def _is_late(self, rank: Rank) -> bool:
        """Whether a rank was named, and has neither moved since nor come to its end."""
        named = rank.number in self._told and self._told[rank.number] == rank.control.trainer_step
        return named and not (rank.control.at_end or rank.control.view.waits)

    def turn(self, attempt: TrainerAttempt, usual_s: float | None, *, spawned: bool) -> bool:
        """Look at all ranks, and name those that are late. Return whether the present ask waits for one of them.

        Args:
            attempt: the present one.
            usual_s: how long a step usually takes; `None` while that is not known.
            spawned: whether a child runs that may create a Checkpointer.
        """
        now = time.monotonic()
        for rank in self._ranks:
            if self._since.get(rank.number, (-1, 0.0))[0] != (step := rank.control.trainer_step):
                self._since[rank.number] = (step, now)
        self._name_missing(attempt, now, spawned=spawned)
        if not self._ranks.several:
            return False
        patience_s = max(LATE_S, _USUAL * (usual_s or 0.0))
        late = [rank for rank in self._awaited() if now - self._since[rank.number][1] > patience_s]
        for rank in late:
            self._name(rank, now)
        return bool(late)

    def _awaited(self) -> list[Rank]:
        """Return the ranks that the others wait for, by what is asked, or at the end."""
        ranks = [rank for rank in self._ranks if rank.connection is not None]
        if self._ranks.meeting.is_open and self._ranks.meeting.age_s > LATE_S:
            there = [rank for rank in ranks if rank.control.view.waits or self._ranks.has_sealed(rank)]
        else:
            there = [rank for rank in ranks if rank.control.at_end]
        return [rank for rank in ranks if rank not in there] if there else []

    def _name(self, rank: Rank, now: float) -> None:
        step, since = self._since[rank.number]
        if self._told.get(rank.number, -1) != step:
            self._told[rank.number] = step
            agreed = self._ranks.meeting.agreed
            self._emit(events.RankLate(rank=rank.number, step=step, age_s=now - since, agreed=agreed))

    def _name_missing(self, attempt: TrainerAttempt, now: float, *, spawned: bool) -> None:
        if attempt.greeted_at is None:
            if spawned and not self._told_silent and now - (attempt.spawned_at or attempt.began_at) > HELLO_S:
                self._told_silent = True
                self._say(f"the program has not created a Checkpointer in {HELLO_S:g} s: nothing is being saved")
            return
        age_s = now - attempt.greeted_at
        missing = {rank.number for rank in self._ranks} - attempt.greeted - self._missing
        if age_s > HELLO_S:
            for number in sorted(missing):
                self._emit(events.RankLate(rank=number, age_s=age_s))
            self._missing |= missing
