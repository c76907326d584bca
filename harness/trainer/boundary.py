"""Boundary: decides between two steps whether there is anything to do, and what; counts the steps.

Owns the counters and flags behind that decision. Pure: the caller passes the control page's word and the sealed step,
gets a decision, carries it out and reports back. So a test needs neither agent nor tensor.

    batch ─▶ ends_step? ─▶ step += 1 ─▶ the word is unchanged, and nothing is due ─▶ continue   (the hot path)
                                └─▶ decide ─▶ leave · take a snapshot · continue ─▶ done
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.ipc.control_page import Command
from harness.trainer.position import Position

_NEVER = -1


@dataclass(frozen=True)
class Decision:
    """The decision at one boundary.

    Attributes:
        leaves: leave the loop.
        saves: take a snapshot here; before leaving, if both are set.
        asked: the agent asks for that snapshot, and asks again only after a new seal.
        waits: the loop waits until the snapshot is durable.
        sealed: the snapshot of this very step is sealed already.
    """

    leaves: bool = False
    saves: bool = False
    asked: bool = False
    waits: bool = False
    sealed: bool = False


class Boundary:
    """The counters and requests of one training loop.

    Used from one thread, except `look_soon` and `hurry`, which only set a value.
    """

    def __init__(self, *, accumulate: int | None, sees_optimizers: bool) -> None:
        """Begin with no complete step and nothing due.

        Args:
            accumulate: batches per step; `None` if the optimizer's own steps are counted.
            sees_optimizers: whether an optimizer is among the states; if not, each batch is a step.
        """
        self._accumulate, self._sees_optimizers = accumulate, sees_optimizers
        self.step = 0
        """Completed optimizer steps."""
        self.every_steps: int | None = None
        """A snapshot is due at each step that is a multiple of this; `None` for never."""
        self.optimizer_stepped = False
        """Whether an optimizer has stepped since the last boundary."""
        self.counted = False
        """Whether the step of the batch that has not ended yet is counted already: a validation began in the batch."""
        self.overdue = False
        """Whether a snapshot has to be taken as soon as there is a slot for it."""
        self.requested = False
        """Whether the program itself has asked for that snapshot."""
        self._waits = False
        self._entered = (_NEVER, 0)  # a step, and how many validations were entered there
        self.always = False
        """Whether every boundary decides, though the word is unchanged and nothing is due."""
        self.seen = 0
        """The word of the control page that was acted upon last."""
        self.next_due = 0
        """The next step at which there is something to do even if the word is unchanged."""

    # ---- steps ------------------------------------------------------------------------------------------------------

    def ends_step(self, place: Position) -> bool:
        """Whether the batch that has just ended completes a step."""
        if self._accumulate is not None:
            place.calls += 1
            if place.calls % self._accumulate:
                return False
        elif self._sees_optimizers and not self.optimizer_stepped:
            return False
        self.optimizer_stepped = False
        return True

    def is_complete(self, place: Position) -> bool:
        """Whether the step of the batch that has not ended yet is made, as far as that is known."""
        if self._accumulate is not None:
            return (place.calls + 1) % self._accumulate == 0
        return self._sees_optimizers and self.optimizer_stepped

    def count_early(self) -> None:
        """Count the step of the batch that has not ended yet: its end is a boundary, and counts nothing more."""
        self.step += 1
        self.resume_counted()

    def resume_counted(self) -> None:
        """Continue in a batch whose step is counted."""
        self.counted, self.optimizer_stepped = True, False

    def ends_counted(self, place: Position) -> bool:
        """End a batch whose step was counted before its end. Return whether it has completed no further step."""
        self.counted = False
        if self._accumulate is None:
            return not self.optimizer_stepped
        place.calls += 1
        return True

    def broken_off(self, place: Position) -> None:
        """Count the batch in which the loop was left, if its step was made. There is no boundary."""
        if self.counted:
            self.counted = self.optimizer_stepped = False
        elif self.optimizer_stepped or (self._accumulate is not None and self.is_complete(place)):
            self.optimizer_stepped = False
            place.calls += self._accumulate is not None
            self.step += 1

    def ends_in_iteration(self, *, early: bool) -> bool:
        """End an iteration of `steps` in which the loop is left. Return whether its step was made; then it counts.

        Args:
            early: whether the program itself leaves it. A `zip` has not begun an iteration that it closes.
        """
        made = self.counted or self.optimizer_stepped or (early and not self._sees_optimizers)
        self.step += made and not self.counted
        self.counted = self.optimizer_stepped = False
        return made

    @property
    def passed(self) -> int:
        """The validations that were entered at this step in this process."""
        step, count = self._entered
        return count if step == self.step else 0

    def enter(self) -> None:
        """Count a validation that begins: the places of this step before it are passed."""
        self._entered = (self.step, self.passed + 1)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def look_soon(self) -> None:
        """Have the boundary after the next step decide, even if the word is unchanged."""
        self.next_due = self.step + 1

    def hurry(self) -> None:
        """Have the next boundary decide, whatever the word and the step are. Safe to call from a signal handler."""
        self.seen = _NEVER

    def rest(self) -> None:
        """Have no boundary decide any more unless the word changes."""
        self.next_due = _NEVER

    def want(self, *, wait: bool = False, by_program: bool = False) -> None:
        """Request a snapshot at the next boundary; with `wait`, the loop waits there until it is durable."""
        self.overdue = True
        self.requested |= by_program
        self._waits |= wait
        self.look_soon()

    @property
    def waits(self) -> bool:
        """Whether the program waits until the snapshot that it has requested is durable."""
        return self._waits

    def take_up(self) -> bool:
        """Note that the requested snapshot was taken outside of a boundary. Return whether the program waits for it."""
        waits, self.overdue, self.requested, self._waits = self._waits, False, False, False
        return waits

    # ---- the decision -----------------------------------------------------------------------------------------------

    def decide(self, news: int, sealed_step: int | None) -> Decision:
        """Return what to do at this boundary.

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
        asked = command is Command.SNAPSHOT and news != self.seen  # an unchanged request was taken up before
        return Decision(saves=asked or self.overdue, asked=asked, waits=self._waits, sealed=sealed)

    def attended(self, news: int, until: int | None) -> None:
        """Note that a command to several ranks was acted upon, as far as it can be at this step.

        Args:
            news: the word that was acted upon.
            until: the step at which there is more to do about it; `None` if there is nothing.
        """
        self.seen, self.overdue = news, False
        self.next_due = self.step + 1 if self.always else _NEVER if until is None else until

    def done(self, news: int, decision: Decision, *, taken: bool, pending: bool) -> None:
        """Note that a decision was carried out.

        Args:
            news: the word on which the decision is based.
            decision: what was decided.
            taken: whether the snapshot was taken; false if there was no slot.
            pending: whether a thread still copies it.
        """
        if taken:
            # The agent asks again only after a new seal: if this step is sealed already, the next one is taken.
            self.overdue = decision.asked and decision.sealed
            self.requested = self._waits = False
        elif decision.asked:
            self.overdue = True
        self.seen = news
        self.next_due = self._following(pending=pending)

    def _following(self, *, pending: bool) -> int:
        if self.overdue or pending or self.always:
            return self.step + 1
        if self.every_steps is not None:
            return (self.step // self.every_steps + 1) * self.every_steps
        return _NEVER
