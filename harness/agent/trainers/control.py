"""Commands to one rank's trainer, and the slot that is granted to it.

Owns the agent's side of a control page, and the current command. Knows neither the reason for it, nor stores, nor
sockets. Main thread of the agent, except for `trainer_step`.

    layout ──▶ slots ──▶ GRANT, as soon as one is free
    command ───────────▶ COMMAND
    seal ──────────────▶ ACKED: from now on grants count again
"""

from __future__ import annotations

from cloud.notice import Deadline
from harness.agent.save.pipeline import Steps
from harness.agent.save.slot_pool import TRAINER, SlotPool
from harness.core.policy.meeting import Place, View
from harness.ipc.control_page import AgentSide, Command


class TrainerControl:
    """Commands and grants to the trainer of one rank."""

    def __init__(self, pool: SlotPool, rank: int = 0) -> None:
        """Create a control page, all zero. `pool` has the slots of `rank` and of others."""
        self._pool, self._rank, self._page = pool, rank, AgentSide.create()
        self._commanded = Command.NOTHING
        self._granted: int | None = None
        self._laid_out = False
        self.at_end = False
        """Whether the rank has said that it makes no further step."""
        self.evaluates: Place | None = None
        """The place at which the rank has entered a validation that may take long."""
        self.layout_bytes: int | None = None
        """Size of a slot of the trainer's present layout; `None` until it has told one."""

    # ---- the page ---------------------------------------------------------------------------------------------------

    @property
    def page_fd(self) -> int:
        """The page's descriptor, for the trainer."""
        return self._page.fd

    @property
    def trainer_step(self) -> int | None:
        """Steps that the trainer has completed; `None` before its loop. From any thread."""
        return self._page.trainer_step

    @property
    def view(self) -> View:
        """What is seen of the rank, for the agreement on a step."""
        step, said = self._page.trainer_step, self._page.said  # in this order: what it says is of no earlier step
        return View(step, said.hold, at_end=self.at_end, entering=said.entering, passed=said.passed)

    def tell_steps(self, steps: Steps) -> None:
        """Publish the newest committed steps on the control page."""
        self._page.tell_steps(steps.local, steps.durable)

    def tell_deadline(self, deadline: Deadline) -> None:
        """Publish the drain deadline on the control page. `Deadline.never()` is not allowed."""
        self._page.tell_deadline(deadline.at)

    def tell_void(self, sequence: int) -> None:
        """Publish on the control page that the rank's seal of this number is dropped."""
        self._page.tell_void(sequence)

    def tell_set(self, step: int) -> None:
        """Publish on the control page that all ranks have sealed a step."""
        self._page.tell_set(step)

    # ---- one trainer after the other --------------------------------------------------------------------------------

    def begin_again(self) -> None:
        """Reset the page for another trainer: no step is made, and nothing is commanded."""
        self._page.forget_step()
        self._page.tell_set(None)
        self._page.command(Command.NOTHING)

    def adopt(self, page_fd: int) -> None:
        """Continue with the page of a live trainer whose agent died. Takes over the descriptor.

        If that trainer has slots, the caller reports them by `begin_layout` and `end_layout`.
        """
        self._page.close()
        self._page = AgentSide(page_fd)
        self._page.tell_deadline(None)  # it was the dead agent's; a notice that is still in force comes again
        self._page.command(Command.NOTHING)
        self._page.grant(None)
        self._clear()

    def forget(self) -> None:
        """Drop the command and the grant: the trainer is gone."""
        self._revoke()
        self._clear()

    # ---- slots ------------------------------------------------------------------------------------------------------

    def begin_layout(self, slot_bytes: int) -> None:
        """Note the trainer's new layout: nothing is granted until its slots are there."""
        self.layout_bytes, self._laid_out = slot_bytes, False
        self._revoke()

    def await_layout(self) -> None:
        """Note that the rank has to plan its slots again: nothing is granted before."""
        self._laid_out = False
        self._revoke()

    def end_layout(self) -> None:
        """Note that the trainer has got its slots."""
        self._laid_out = True

    def grant(self) -> None:
        """Keep a free slot granted."""
        if self._granted is None and self._laid_out and (index := self._pool.grant(self._rank)) is not None:
            self._granted = index
            self._pool.hold(index, TRAINER)
            self._page.grant(index)

    def answered(self) -> None:
        """Withdraw the command to take a snapshot: one is sealed."""
        if self._commanded.takes:
            self.command(Command.NOTHING)

    def acknowledge(self, sequence: int) -> None:
        """Acknowledge the newest seal of this rank, whose slot is held now: from now on grants count again."""
        self._revoke()
        self.take_note(sequence)

    def take_note(self, sequence: int) -> None:
        """Publish that every seal up to number `sequence` is known."""
        self._page.acknowledge(sequence)

    # ---- commands ---------------------------------------------------------------------------------------------------

    @property
    def commanded(self) -> Command:
        """The present command."""
        return self._commanded

    @property
    def is_granted(self) -> bool:
        """Whether a slot is granted."""
        return self._granted is not None

    @property
    def may_ask(self) -> bool:
        """Whether a snapshot can be asked for: a slot is granted, and nothing else is commanded."""
        return self._granted is not None and self._commanded is Command.NOTHING

    def command(self, command: Command) -> None:
        """Set the command for the trainer's next boundary. Does nothing if it is set already."""
        if self._commanded is not command:
            self._commanded = command
            self._page.command(command)

    def ask(self, command: Command, at: Place | None = None, *, keeps_word: bool = False) -> None:
        """Set the command for the next boundary. What was agreed or said about an earlier one is void.

        Args:
            command: what to do.
            at: the place at which all ranks do it; `None` if that is still to be agreed.
            keeps_word: what the rank has said is not void, until it takes it back.
        """
        self._commanded = command
        self._page.command(command, at, keeps_word=keeps_word)

    def agree(self, place: Place) -> None:
        """Tell the rank the place at which all ranks carry out the command."""
        self._page.agree(place)

    def _revoke(self) -> None:
        """Withdraw the grant: the trainer has used it, waits for another layout, or is dead."""
        if self._granted is not None:
            self._pool.release(self._granted, TRAINER)
        self._granted = None
        self._page.grant(None)

    def _clear(self) -> None:
        self._commanded, self._granted, self.at_end = Command.NOTHING, None, False
        self.layout_bytes, self._laid_out = None, False
