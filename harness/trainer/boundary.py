"""Between two steps: what counts as a step, whether there is anything to do now, and what.

Owns the counters and flags behind that decision. Pure: it is told the control page's word and which step is sealed, and
says what to do; whoever asks does it, and reports back. So a test makes one, and needs neither agent nor tensor.

    batch ─▶ ends_step? ─▶ step += 1 ─▶ the word is as before, and nothing is due ─▶ go on      (the hot path)
                                └─▶ decide ─▶ leave · take a snapshot · go on ─▶ done
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.ipc.control_page import Command
from harness.trainer.position import Position

_NEVER = -1


@dataclass(frozen=True)
class Decision:
    """What is to be done at a boundary.

    Attributes:
        leaves: the loop is to be left.
        saves: a snapshot is to be taken here; before leaving, if that is asked too.
        asked: the agent asks for it, and asks again only after a new seal.
        waits: the loop waits until it is durable.
        sealed: the snapshot of this very step is sealed already.
    """

    leaves: bool = False
    saves: bool = False
    asked: bool = False
    waits: bool = False
    sealed: bool = False


class Boundary:
    """Of one training loop. One thread, but for `look_soon` and `hurry`, which only set a value."""

    def __init__(self, *, accumulate: int | None, sees_optimizers: bool) -> None:
        """Nothing is complete yet, and nothing is due.

        Args:
            accumulate: batches per step; `None` where an optimizer's step tells.
            sees_optimizers: whether an optimizer is among the states; if not, each batch is a step.
        """
        self._accumulate, self._sees_optimizers = accumulate, sees_optimizers
        self.step = 0
        """Completed optimizer steps."""
        self.every_steps: int | None = None
        """A snapshot is due at each multiple of this."""
        self.optimizer_stepped = False
        """Whether an optimizer has stepped since the last boundary."""
        self.overdue = False
        """Whether a snapshot is to be taken as soon as there is a slot for it."""
        self._waits = False
        self.seen = 0
        """The word of the control page that was answered last."""
        self.next_due = 0
        """The next step at which there is something to do whatever the word is."""

    # ---- steps ------------------------------------------------------------------------------------------------------

    def ends_step(self, place: Position) -> bool:
        """Whether the batch that is just over completes a step."""
        if self._accumulate is not None:
            place.calls += 1
            if place.calls % self._accumulate:
                return False
        elif self._sees_optimizers and not self.optimizer_stepped:
            return False
        self.optimizer_stepped = False
        return True

    def broken_off(self, place: Position) -> None:
        """The loop was left in the middle of a batch: it counts if its step was made, but there is no boundary."""
        completes = self._accumulate is not None and (place.calls + 1) % self._accumulate == 0
        if self.optimizer_stepped or completes:
            self.optimizer_stepped = False
            place.calls += self._accumulate is not None
            self.step += 1

    # ---- wishes -----------------------------------------------------------------------------------------------------

    def look_soon(self) -> None:
        """Have the next step looked at whatever the word is."""
        self.next_due = self.step + 1

    def hurry(self) -> None:
        """Have the next boundary looked at, whatever the word and the step are. Signal handlers may call it."""
        self.seen = _NEVER

    def rest(self) -> None:
        """Look at nothing any more but another word."""
        self.next_due = _NEVER

    def want(self, *, wait: bool = False) -> None:
        """A snapshot is wanted at the next boundary; with `wait`, the loop waits there until it is durable."""
        self.overdue = True
        self._waits |= wait
        self.look_soon()

    # ---- the decision -----------------------------------------------------------------------------------------------

    def decide(self, news: int, sealed_step: int | None) -> Decision:
        """What is to be done now.

        Args:
            news: the control page's word.
            sealed_step: the step of the newest sealed snapshot.
        """
        command = Command.of(news)
        if command.leaves:
            return Decision(leaves=True, saves=command is Command.SNAPSHOT_AND_LEAVE)
        sealed = sealed_step == self.step
        if self.every_steps is not None and self.step % self.every_steps == 0:
            self.overdue |= not sealed
        asked = command is Command.SNAPSHOT and news != self.seen  # what is asked still was taken up before
        return Decision(saves=asked or self.overdue, asked=asked, waits=self._waits, sealed=sealed)

    def done(self, news: int, decision: Decision, *, taken: bool, pending: bool) -> None:
        """The decision was carried out.

        Args:
            news: the word that it was made by.
            decision: what it was.
            taken: whether the snapshot was taken; false where there was no slot.
            pending: whether a thread still copies it.
        """
        if taken:
            # The agent asks again only after a new seal: what this step has already is taken at the next one.
            self.overdue = decision.asked and decision.sealed
            self._waits = False
        elif decision.asked:
            self.overdue = True
        self.seen = news
        self.next_due = self._following(pending=pending)

    def _following(self, *, pending: bool) -> int:
        if self.overdue or pending:
            return self.step + 1
        if self.every_steps is not None:
            return (self.step // self.every_steps + 1) * self.every_steps
        return _NEVER
