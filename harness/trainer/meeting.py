"""Meeting: one rank's side of the agreement on a place at which all ranks take a snapshot.

Owns what a rank of several does at a boundary while something is commanded: it goes on to the agreed place, seals it,
and waits where it must. `core/policy/meeting.py` decides, `staging/` takes the snapshot. A rank that trains and has no
command never comes here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from harness.core import messages
from harness.core.policy.meeting import Hold, Move, move
from harness.ipc.control_page import Command
from harness.trainer.boundary import Boundary
from harness.trainer.link import Link

if TYPE_CHECKING:  # without torch, for trainers of another kind
    from harness.trainer.saving import Saving
    from harness.trainer.staging.stager import Stager

_POLL_S = 0.001
_ENTER_S = 0.02  # how long a rank waits for the others to enter the same validation
_TOLD_S = 60.0


class Meeting:
    """One of several ranks. Used from the thread that trains."""

    def __init__(
        self, link: Link, saving: Saving, stager: Stager, boundary: Boundary, say: Callable[[str], None]
    ) -> None:
        """Attend nothing yet.

        Args:
            link: the connection to the agent.
            saving: takes the snapshots.
            stager: knows what is sealed.
            boundary: counts the steps.
            say: shows a line to the user.
        """
        self._link, self._saving, self._stager, self._boundary = link, saving, stager, boundary
        self._say = say
        self._sealed_for = 0  # the word for which the newest step was sealed

    def attend(self, *, overlap: bool, entering: bool = False, may_take_long: bool = False) -> bool:
        """Act at the boundary of a step. Return whether to leave the loop.

        Blocks until the place is agreed, milliseconds as a rule; and before it leaves, until all ranks have sealed it.

        Args:
            overlap: let a thread copy the tensors of an optimizer.
            entering: this is the entry of a validation.
            may_take_long: a validation that begins here may take long: if all ranks enter it, they take a snapshot
                before.

        Raises:
            StateError: the ranks will never come to one step; or something in the states cannot be stored.
            NoSpace: there is no room for a snapshot.
        """
        if may_take_long and self._stager.sealed_step != self._boundary.step:
            self._link.send(messages.Evaluates(self._boundary.step, self._boundary.passed))
            give_up_at = time.monotonic() + _ENTER_S
            while self._link.page.command is Command.NOTHING and time.monotonic() < give_up_at:
                time.sleep(_POLL_S)
        return self._act(last=False, overlap=overlap, entering=entering)

    def attend_last(self) -> bool:
        """Seal the last step together with the other ranks. Return whether to leave without that.

        Blocks until all ranks have sealed it, or the agent wants the loop left. Raises what `attend` raises.
        """
        if self._is_complete:
            return False
        self._link.send(messages.AtEnd(self._boundary.step), repeat=True)
        try:
            return self._act(last=True, overlap=False, entering=False)
        finally:
            self._link.forget(messages.AtEnd)

    def want(self, *, wait: bool) -> None:
        """Request a snapshot of all ranks; with `wait`, wait at its step until it is durable. Does not block."""
        self._boundary.want(wait=wait, by_program=True)
        self._link.send(messages.SaveWanted(), repeat=True)

    def stand(self) -> None:
        """Say, within a validation, that this rank has sealed its step, and makes no other one for a while."""
        page = self._link.page
        news = page.news
        if Command.of(news) is Command.SNAPSHOT_AND_LEAVE and self._stager.sealed_step == self._boundary.step:
            page.say(news, Hold.HOLDS)

    def _act(self, *, last: bool, overlap: bool, entering: bool) -> bool:
        link, boundary, stager = self._link, self._boundary, self._stager
        tell_at = time.monotonic() + _TOLD_S
        while not link.gone:
            link.check_meeting()
            if not stager.planned:
                stager.plan(boundary.step)
            page = link.page
            news = page.news
            command = Command.of(news)
            say = partial(page.say, news, entering=entering, passed=boundary.passed)
            stays = last or command.leaves
            if stays:  # no step is to follow: this one is sealed again
                stager.forget_void()
            if last and self._is_complete:
                return False
            if command is Command.LEAVE:
                return True
            if command is Command.NOTHING:
                if not last:
                    boundary.attended(news, None)
                    if not stager.planned:  # what it stores may be told it a moment after the word has changed
                        boundary.look_soon()
                    return False
                say(Hold.LAST)
                tell_at = self._rest(tell_at)
                continue
            agreed = page.agreed(news)
            if not stays and agreed is not None and agreed.step == stager.sealed_step and self._sealed_for != news:
                say(Hold.PASSED)  # that snapshot was void, and a step is sealed once
                boundary.attended(news, boundary.step + 1)
                return False
            match move(
                boundary.step,
                agreed,
                stager.sealed_step,
                last=last,
                leaves=command.leaves,
                entering=entering,
                passed=boundary.passed,
            ):
                case Move.HOLD:
                    say(Hold.LAST if last else Hold.HOLDS)
                    if command.leaves and page.time_is_up:
                        return True
                    tell_at = self._rest(tell_at)
                case Move.SEAL if self._seal(news, last=last, overlap=overlap):
                    self._sealed_for = news
                    if stager.pending:
                        boundary.attended(news, boundary.step + 1)
                        return False
                    link.forget(messages.SaveWanted)
                    if boundary.take_up() and not (command.leaves or last) and not self._saving.wait_durable():
                        self.want(wait=True)
                case Move.SEAL if link.page.news != news:
                    continue  # another step is asked for by now
                case Move.PASS if last:
                    say(Hold.PASSED)
                    tell_at = self._rest(tell_at)  # it is asked again
                case Move.SEAL | Move.PASS:
                    say(Hold.PASSED)
                    boundary.attended(news, boundary.step + 1)
                    return False
                case Move.GO_ON:
                    say(Hold.NONE)  # before it looks again: the agent may take it for one that waits
                    if page.news != news:
                        continue
                    assert agreed is not None, "else it holds"
                    boundary.attended(news, agreed.step if agreed.step > boundary.step else None)
                    if agreed.step == boundary.step != stager.sealed_step:
                        boundary.hurry()  # the very next place may be the one, or the first that is beyond it
                    return False
        return False

    @property
    def _is_complete(self) -> bool:
        """Whether all ranks have sealed this step."""
        step, set_step = self._boundary.step, self._link.page.set_step
        return self._stager.sealed_step == step and set_step is not None and set_step >= step

    def _seal(self, news: int, *, last: bool, overlap: bool) -> bool:
        """Take the snapshot, if a slot is granted; wait for one if there is no later step. Return whether it is."""
        command = Command.of(news)
        ends = command.leaves or last
        compares = ends or command is Command.SNAPSHOT_AND_COMPARE  # no later one would show what differs in this one
        if ends or self._boundary.waits:
            self._saving.take_waiting(news, compares=compares)
        else:
            self._saving.take(overlap=overlap, compares=compares)
        return self._stager.pending or self._stager.sealed_step == self._boundary.step

    def _rest(self, tell_at: float) -> float:
        """Pause; say, seldom, that the other ranks are waited for. Return when to say it next."""
        time.sleep(_POLL_S)
        if time.monotonic() < tell_at:
            return tell_at
        self._say(f"at step {self._boundary.step}, waiting for the other ranks")
        return time.monotonic() + 10 * _TOLD_S
