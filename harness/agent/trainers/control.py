"""What one rank's trainer is told to do, and which slot it may fill for it.

Owns the agent's side of a control page, and what is commanded. Knows neither why, nor stores, nor sockets. Main thread
of the agent, but for `trainer_step`.

    layout ──▶ slots ──▶ GRANT, as soon as one is free
    command ───────────▶ COMMAND
    seal ──────────────▶ ACKED: from now on grants count again
"""

from __future__ import annotations

from cloud.notice import Deadline
from harness.agent.save.pipeline import Steps
from harness.agent.save.slot_pool import TRAINER, SlotPool
from harness.ipc.control_page import AgentSide, Command


class TrainerControl:
    """What a trainer is told to do, and what it may use for it."""

    def __init__(self, pool: SlotPool, rank: int = 0) -> None:
        """A page of its own, all zero. `pool` is where the slots are, of `rank` and others."""
        self._pool, self._rank, self._page = pool, rank, AgentSide.create()
        self._commanded = Command.NOTHING
        self._granted: int | None = None
        self._laid_out = False
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

    def tell_steps(self, steps: Steps) -> None:
        """The newest committed steps."""
        self._page.tell_steps(steps.local, steps.durable)

    def tell_deadline(self, deadline: Deadline) -> None:
        """Until when the trainer may wait. Not one that never comes."""
        self._page.tell_deadline(deadline.at)

    # ---- one trainer after the other --------------------------------------------------------------------------------

    def begin_again(self) -> None:
        """Another trainer: it has made no step, and nothing is commanded."""
        self._page.forget_step()
        self._page.command(Command.NOTHING)

    def adopt(self, page_fd: int) -> None:
        """Go on with the page of a live trainer whose agent died. Takes the descriptor.

        Slots of that trainer, where there are any, are told by `begin_layout` and `end_layout`.
        """
        self._page.close()
        self._page = AgentSide(page_fd)
        self._page.command(Command.NOTHING)
        self._page.grant(None)
        self._clear()

    def forget(self) -> None:
        """The trainer is gone: what it was asked and granted is void."""
        self._revoke()
        self._clear()

    # ---- slots ------------------------------------------------------------------------------------------------------

    def begin_layout(self, slot_bytes: int) -> None:
        """The trainer has another layout: nothing is granted until its slots are there."""
        self.layout_bytes, self._laid_out = slot_bytes, False
        self._revoke()

    def end_layout(self) -> None:
        """The trainer has been told its slots."""
        self._laid_out = True

    def grant(self) -> None:
        """Keep a free slot granted."""
        if self._granted is None and self._laid_out and (index := self._pool.grant(self._rank)) is not None:
            self._granted = index
            self._pool.hold(index, TRAINER)
            self._page.grant(index)

    def answered(self) -> None:
        """A snapshot is sealed: what there was to ask for is there."""
        if self._commanded is Command.SNAPSHOT:
            self.command(Command.NOTHING)

    def acknowledge(self, sequence: int) -> None:
        """The newest seal is noticed and its slot is held: from now on grants count again."""
        self._revoke()
        self.take_note(sequence)

    def take_note(self, sequence: int) -> None:
        """Every seal up to number `sequence` is known."""
        self._page.acknowledge(sequence)

    # ---- commands ---------------------------------------------------------------------------------------------------

    @property
    def may_ask(self) -> bool:
        """Whether a snapshot can be asked for: a slot is granted, and nothing else is commanded."""
        return self._granted is not None and self._commanded is Command.NOTHING

    def command(self, command: Command) -> None:
        """For the trainer's next boundary. No news where that is commanded already."""
        if self._commanded is not command:
            self._commanded = command
            self._page.command(command)

    def _revoke(self) -> None:
        """No slot is granted: the trainer has used the grant, waits for another layout, or is dead."""
        if self._granted is not None:
            self._pool.release(self._granted, TRAINER)
        self._granted = None
        self._page.grant(None)

    def _clear(self) -> None:
        self._commanded, self._granted = Command.NOTHING, None
        self.layout_bytes, self._laid_out = None, False
