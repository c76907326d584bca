"""The place at which several ranks carry out a command: the agent's side of the agreement.

Owns the present ask, from the command to the last rank that has carried it out. `core/policy/meeting.py` decides, on
what the control pages show. Main thread of the agent.

    ask ──▶ COMMAND ──(1 ms: every rank has seen it, or will before its next step)──▶ AT_STEP ──▶ a seal of each rank
      ▲                                                                                  └─ a rank is beyond it ─┐
      └──────────────────────────────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from harness.agent.trainers.control import TrainerControl
from harness.core.policy.meeting import Place, agree, check_even, is_void
from harness.ipc.control_page import Command

SEEN_S = 0.001
"""After so long, a store into shared memory is seen by every core; a rank that it is late for says so."""
_SOON_S = 0.02
"""An ask that is undecided for longer waits for a rank that is before its loop."""
_POLLS_S = ((_SOON_S, SEEN_S), (1.0, 0.01))
"""How often the pages are looked at, by the age of the ask: nothing but a word on a page tells that a rank is late."""
_SELDOM_S = 0.1


class Meeting:
    """The present ask. Without several ranks, or for a command that needs no step, there is none."""

    def __init__(self, controls: Callable[[], Sequence[TrainerControl]]) -> None:
        """Ask nothing yet. `controls` returns those of all ranks."""
        self._controls = controls
        self._command = Command.NOTHING
        self._asked_at = 0.0
        self._is_for_later = False
        self._place: Place | None = None  # the agreed one
        self._again: Place | None = None  # where all ranks stand, to seal once more what they leave with
        self.agreed: int | None = None
        """The step of the present ask; `None` while it is not agreed."""
        self.given_up: int | None = None
        """The newest step of an ask that was taken back: those that have sealed it wait for the others in vain."""

    @property
    def is_open(self) -> bool:
        """Whether a command waits for its step, or for ranks that have yet to come to it."""
        return self._command.takes or self._command is Command.SNAPSHOT_AND_LEAVE

    def is_for_later(self, farthest: int | None) -> bool:
        """Whether it is asked for a step that no rank has come to, by `farthest`: something urgent may come before."""
        return self._is_for_later and self.agreed is not None and farthest is not None and farthest < self.agreed

    @property
    def age_s(self) -> float:
        """Seconds since the present ask."""
        return time.monotonic() - self._asked_at

    @property
    def patience_s(self) -> float | None:
        """Seconds until `turn` is to be called again; `None` if nothing is awaited."""
        if not self.is_open:
            return None
        return next((poll_s for until_s, poll_s in _POLLS_S if self.age_s < until_s), _SELDOM_S)

    def ask(self, command: Command, at: Place | None = None) -> None:
        """Ask all ranks. An earlier ask is void, for a rank that has not carried it out."""
        self._command, self._asked_at = command, time.monotonic()
        self._is_for_later = at is not None
        if command is Command.SNAPSHOT_AND_LEAVE:
            at, self._again = self._again, None
        self._agree(at)
        for control in self._controls():
            control.ask(command, at)

    def ask_again(self) -> None:
        """Take the present ask back: what is sealed for it is no snapshot.

        To leave, it is asked again at once; else once all ranks have a slot again.
        """
        self.give_up()
        self.ask(Command.NOTHING if self._command.takes else self._command)

    def sealed(self, step: int) -> bool:
        """Note that all ranks have sealed a step. Return whether they leave with it.

        That carries out the ask, with one exception: an ask to leave stands if they sealed that step for an earlier
        ask. They may be beyond it by now, and what they have computed since would be lost.
        """
        leaves = self._command is Command.SNAPSHOT_AND_LEAVE
        if leaves and self.agreed != step:
            return False
        self.close()
        return leaves

    def sealed_in_vain(self, step: int) -> bool:
        """Note that all ranks have sealed a step, and that it is no snapshot. Return whether they stand there.

        They do if they were to leave with it: the next ask is for the same place. Else they go on.
        """
        if self._command is Command.SNAPSHOT_AND_LEAVE and self.agreed == step:
            self._again = self._place
            return True
        self.sealed(step)
        return False

    def give_up(self) -> None:
        """Note that the present ask will be replaced: a rank that has sealed its step is not kept waiting."""
        if self.agreed is not None:
            self.given_up = self.agreed

    def all_stand(self, sealed: int | None) -> bool:
        """Whether every rank waits at the newest sealed step, and will not go on before the next command.

        Ranks may wait there for as long as a validation takes. Once a step is agreed, a waiting rank may go on. This
        takes the agreement back then, and returns false until every rank has had the time to see that.

        Args:
            sealed: the newest step that all have sealed; `None` for none.
        """
        views = [control.view for control in self._controls()]
        if sealed is None or any(not view.waits or view.step != sealed for view in views):
            return False
        if self.agreed is not None:
            self.agreed, self._asked_at = None, time.monotonic()
            for control in self._controls():
                control.ask(self._command, keeps_word=True)
        return self.age_s >= SEEN_S

    def take_missed(self) -> int | None:
        """Return the agreed step, once, if a rank is beyond it without a seal; then all are asked again."""
        missed, views = self.agreed, [control.view for control in self._controls()]
        if not self.is_open or missed is None or not is_void(views, missed):
            return None
        self.ask_again()
        return missed

    def turn(self, sealed: int | None) -> int | None:
        """Agree on the place. Return its step, if it was agreed now.

        Args:
            sealed: the newest step that all ranks have sealed.

        Raises:
            Uneven: the ranks will never come to one step.
        """
        controls = self._controls()
        views = [control.view for control in controls]
        check_even(views)
        if not self.is_open or self.age_s < SEEN_S or self.agreed is not None:
            return None
        place = agree(views, sealed, leaves=self._command.leaves)
        if place is None:
            return None
        self._agree(place)
        for control in controls:
            control.agree(place)
        return place.step

    def close(self) -> None:
        """Note that nothing is asked any more: all have carried it out, it was taken back, or the ranks are gone."""
        self._command, self.agreed, self.given_up, self._again = Command.NOTHING, None, None, None

    def _agree(self, place: Place | None) -> None:
        self._place, self.agreed = place, None if place is None else place.step
        if self.agreed == self.given_up:
            self.given_up = None
