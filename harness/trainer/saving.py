"""Snapshots of one training loop: taken where it stands, and waited for.

Owns every wait of the loop for a slot, for the store, and for the agent's answer to a signal. Whether a snapshot is due
is `boundary.py`'s to say, how it is taken `staging/`'s.
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
_ANSWER_S = 2.0  # from a signal to what the agent makes of it


class Saving:
    """Of one loop; used from the thread that trains, and `settle` from any."""

    def __init__(self, link: Link, stager: Stager, boundary: Boundary, say: Callable[[str], None]) -> None:
        """Nothing is taken yet.

        Args:
            link: to the agent.
            stager: takes snapshots.
            boundary: counts steps, and hears of what came to nothing.
            say: a word to the user.
        """
        self._link, self._stager, self._boundary, self._say = link, stager, boundary, say

    def settle(self, *, updating: bool = False) -> None:
        """See to the snapshot that a thread still copies, if there is one; have another taken if it is void."""
        settled = False
        try:
            settled = self._stager.settle(self._boundary.step, updating=updating)
        finally:
            if not settled:  # by an error, too: the agent has asked, and asks again only after a seal
                self._boundary.want()

    def take(self, *, overlap: bool = False) -> bool:
        """Seal a snapshot of this step, if a slot is free. See `Stager.stage`."""
        return self._stager.stage(self._boundary.step, overlap=overlap)

    def take_waiting(self) -> None:
        """Take a snapshot and wait for its slot: the loop is over, or the program waits for this snapshot anyway."""
        if not self._stager.planned:
            self._stager.plan(self._boundary.step)
        while not self.take():
            page = self._link.page
            if page.command is Command.LEAVE or self._link.gone or page.time_is_up:
                return
            time.sleep(_POLL_S)

    def carry_out(self, decision: Decision, news: int, *, overlap: bool) -> None:
        """Do what is to be done at a boundary that does not end the loop.

        Args:
            decision: what that is.
            news: the word that it was made by.
            overlap: leave what an optimizer owns to a thread, unless the loop waits anyway.
        """
        if not self._stager.planned:
            self._stager.plan(self._boundary.step)
        if decision.waits:
            self.take_waiting()
        taken = decision.saves and self.take(overlap=overlap and not decision.waits)
        self._boundary.done(news, decision, taken=taken, pending=self._stager.pending)
        if taken and decision.waits:
            self.wait_durable()

    def wait_durable(self) -> None:
        """Block until the newest sealed snapshot is durable, the deadline has passed, or nobody can do it."""
        self.settle()
        step = self._stager.sealed_step
        if step is None:
            return
        say_at = time.monotonic() + _PROGRESS_S
        while not self._link.gone and not self._link.page.time_is_up:
            durable = self._link.page.durable_step
            if durable is not None and durable >= step:
                return
            if self._link.detached and time.monotonic() >= say_at:
                self._say(f"step {step} is sealed, durable step is {durable}; waiting")
                say_at = time.monotonic() + 5 * _PROGRESS_S
            time.sleep(_POLL_S)

    def wait_answer(self) -> None:
        """Block until the agent has said what a signal means, for a moment at most."""
        give_up_at = time.monotonic() + _ANSWER_S
        while not self._link.page.command.leaves:
            if self._link.gone or time.monotonic() >= give_up_at:
                return
            time.sleep(_POLL_S)
