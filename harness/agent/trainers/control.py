"""Asking and granting: the agent's words of the control page, and the slots that they are about.

Owns the control page, what is asked of the trainer and why, and which slot it may fill. Knows neither notices nor
stores nor sockets: whoever wants a snapshot says so. Main thread of the agent, but for `trainer_step`.

    layout ──▶ slots ──▶ GRANT, as soon as one is free
    reason ────────────▶ ASK, once a slot is granted
    seal ──────────────▶ TAKEN: from now on grants count again
"""

from __future__ import annotations

from cloud.notice import Deadline
from harness.agent.save.pipeline import Steps
from harness.agent.save.slot_pool import TRAINER, SlotPool
from harness.ipc.slots import NO_SLOT, Command, ControlPage, Request, Word


class TrainerControl:
    """What is being asked of the trainer, and what it may use for the answer."""

    def __init__(self, pool: SlotPool) -> None:
        """A page of its own, all zero. `pool` is where the slots are."""
        self._pool, self._page = pool, ControlPage.create()
        self._asked = Command.NOTHING
        self._granted: int | None = None
        self._laid_out = False
        self.reasons: set[str] = set()
        """Why a snapshot is wanted at the next boundary; empty where it is not."""
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
        return self._page.step_or_none(Word.TRAINER_STEP)

    def sign(self, pid: int) -> None:
        """Process `pid` is the agent."""
        self._page.words[Word.AGENT_PID] = pid

    def tell_steps(self, steps: Steps) -> None:
        """The newest committed steps."""
        self._page.put_step(Word.LOCAL_STEP, steps.local)
        self._page.put_step(Word.DURABLE_STEP, steps.durable)

    def tell_deadline(self, deadline: Deadline) -> None:
        """Until when the trainer may wait. Not one that never comes."""
        self._page.words[Word.DEADLINE_NS] = int(deadline.at * 1e9)

    # ---- one trainer after the other --------------------------------------------------------------------------------

    def begin_again(self) -> None:
        """A new life of the trainer: it has made no step, and nothing is asked of it."""
        self._page.words[Word.TRAINER_STEP] = 0
        self._write(Word.ASK, Command.NOTHING)

    def adopt(self, page_fd: int, pid: int) -> None:
        """Go on with the page of a live trainer whose agent died: process `pid` is its agent now. Takes the descriptor.

        Slots of that trainer, where there are any, are told by `begin_layout` and `end_layout`.
        """
        self._page.close()
        self._page = ControlPage(page_fd)
        self.sign(pid)
        self._write(Word.ASK, Command.NOTHING)
        self._write(Word.GRANT, NO_SLOT)
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
        if self._granted is None and self._laid_out and (index := self._pool.grant()) is not None:
            self._granted = index
            self._pool.hold(index, TRAINER)
            self._write(Word.GRANT, index)

    def answered(self) -> None:
        """A snapshot is sealed: what there was to ask for is there."""
        self.reasons.clear()
        if self._asked is Command.SNAPSHOT:
            self.ask(Command.NOTHING)

    def acknowledge(self, sequence: int) -> None:
        """The newest seal is noticed and its slot is held: from now on grants count again."""
        self._revoke()
        self.take_note(sequence)

    def take_note(self, sequence: int) -> None:
        """Every seal up to number `sequence` is known."""
        self._page.words[Word.TAKEN] = sequence

    # ---- asking -----------------------------------------------------------------------------------------------------

    @property
    def may_ask(self) -> bool:
        """Whether a snapshot can be asked for: a slot is granted, and nothing is being asked."""
        return self._granted is not None and self._asked is Command.NOTHING

    def ask(self, ask: Command) -> None:
        """Of the trainer, at its next boundary. No news where it is asked already."""
        if self._asked is not ask:
            self._asked = ask
            self._write(Word.ASK, ask)

    def _revoke(self) -> None:
        """No slot is granted: the trainer has used the grant, waits for another layout, or is dead."""
        if self._granted is not None:
            self._pool.release(self._granted, TRAINER)
        self._granted = None
        self._write(Word.GRANT, NO_SLOT)

    def _clear(self) -> None:
        self._asked, self._granted = Command.NOTHING, None
        self.layout_bytes, self._laid_out = None, False
        self.reasons.clear()

    def _write(self, word: Word, value: int) -> None:
        """Under a new sequence number, so that the trainer sees that it is news."""
        self._page.words[word] = Request(value, Request.decode(self._page.words[word]).sequence + 1).encode()
