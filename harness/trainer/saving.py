"""Saving: takes the snapshots of one training loop, and waits for them.

Owns every wait of the loop for a slot, for the store, and for the agent's answer to a signal. `boundary.py` decides
whether a snapshot is due, and `staging/` takes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from harness.ipc.control_page import Command
from harness.trainer.boundary import Boundary, Decision
from harness.trainer.link import Link
from harness.trainer.staging.stager import Stager

_POLL_S = 0.02
_PROGRESS_S = 1.0
_ANSWER_S = 2.0  # from a signal to the agent's command


class Saving:
    """Takes the snapshots of one loop. Used from the thread that trains; `settle` may be called from any thread."""

    def __init__(self, link: Link, stager: Stager, boundary: Boundary, say: Callable[[str], None]) -> None:
        """Take nothing yet.

        Args:
            link: the connection to the agent.
            stager: takes snapshots.
            boundary: counts steps, and gets the request back if a snapshot fails.
            say: shows a line to the user.
        """
        self._link, self._stager, self._boundary, self._say = link, stager, boundary, say

    def settle(self, *, updating: bool = False) -> None:
        """Finish the snapshot that a thread still copies, if there is one. If it is void, request another one."""
        settled = False
        try:
            settled = self._stager.settle(self._boundary.step, updating=updating)
        finally:
            if not settled:  # after an error too: the agent asks again only after a seal
                self._boundary.want()

    def take(self, *, overlap: bool = False, compares: bool = False) -> bool:
        """Seal a snapshot of this step, if a slot is free; return whether it is sealed. See `Stager.stage`."""
        return self._stager.stage(self._boundary.step, overlap=overlap, compares=compares)

    def take_waiting(self, news: int | None = None, *, compares: bool = False) -> None:
        """Take a snapshot, and wait for a slot: the loop is over, or the program waits for this snapshot anyway.

        Gives up if the agent wants the loop left without it, if there is no agent, or if the deadline has passed.

        Args:
            news: of several ranks, the control page's word for which this is done. With another word it gives up too:
                the others may be asked for another step by now, and need this rank for it.
            compares: see `Stager.stage`.
        """
        while not (self._plan_if_needed() and self.take(compares=compares)):
            page = self._link.page
            if page.command is Command.LEAVE or self._link.gone or page.time_is_up:
                return
            if news is not None and page.news != news:
                return
            time.sleep(_POLL_S)

    def _plan_if_needed(self) -> bool:
        if not self._stager.planned:
            self._stager.plan(self._boundary.step)
        return self._stager.planned

    def carry_out(self, decision: Decision, news: int, *, overlap: bool) -> None:
        """Carry out the decision at a boundary that does not end the loop.

        Args:
            decision: what to do.
            news: the control page's word on which the decision is based.
            overlap: let a thread copy the tensors of an optimizer, unless the loop waits anyway.
        """
        if not self._stager.planned:
            self._stager.plan(self._boundary.step)
        if decision.waits:
            self.take_waiting()
        taken = decision.saves and self.take(overlap=overlap and not decision.waits)
        self._boundary.done(news, decision, taken=taken, pending=self._stager.pending)
        if taken and decision.waits:
            self.wait_durable()

    def wait_durable(self) -> bool:
        """Block until the newest sealed snapshot is durable, the deadline has passed, or there is no agent.

        Of several ranks, it may never be: others may not have sealed it. Return false then.
        """
        self.settle()
        step = self._stager.sealed_step
        if step is None:
            return True
        say_at = time.monotonic() + _PROGRESS_S
        while not self._link.gone and not self._link.page.time_is_up:
            durable = self._link.page.durable_step
            if durable is not None and durable >= step:
                return True
            if self._stager.is_void:
                return False
            if self._link.detached and time.monotonic() >= say_at:
                self._say(f"step {step} is sealed, durable step is {durable}; waiting")
                say_at = time.monotonic() + 5 * _PROGRESS_S
            time.sleep(_POLL_S)
        return True

    def wait_answer(self) -> None:
        """Block until the agent has commanded to leave after a signal, for 2 seconds at most."""
        give_up_at = time.monotonic() + _ANSWER_S
        while not self._link.page.command.leaves:
            if self._link.gone or time.monotonic() >= give_up_at:
                return
            time.sleep(_POLL_S)
