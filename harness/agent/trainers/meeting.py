"""The step at which several ranks carry out a command: the agent's side of the agreement.

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
from harness.core.policy.meeting import agree, is_void
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
        self.agreed: int | None = None
        """The step of the present ask; `None` while it is not agreed."""
        self.decided_s: float | None = None
        """How long the newest agreement took."""

    @property
    def is_open(self) -> bool:
        """Whether a command waits for its step, or for ranks that have yet to come to it."""
        return self._command.takes or self._command is Command.SNAPSHOT_AND_LEAVE

    @property
    def patience_s(self) -> float | None:
        """Seconds until `turn` is to be called again; `None` if nothing is awaited."""
        if not self.is_open:
            return None
        age_s = time.monotonic() - self._asked_at
        return next((poll_s for until_s, poll_s in _POLLS_S if age_s < until_s), _SELDOM_S)

    def ask(self, command: Command, at: int | None = None) -> None:
        """Ask all ranks. An earlier ask is void, for a rank that has not carried it out."""
        self._command, self.agreed, self._asked_at = command, at, time.monotonic()
        for control in self._controls():
            control.ask(command, at)

    def turn(self, sealed: int | None) -> None:
        """Agree on the step, or ask again. `sealed` is the newest step that all ranks have sealed.

        Raises:
            Uneven: the ranks will never come to one step.
        """
        if not self.is_open or time.monotonic() - self._asked_at < SEEN_S:
            return
        controls = self._controls()
        views = [control.view for control in controls]
        if self.agreed is not None:
            if is_void(views, self.agreed):  # it is asked again once all have a slot; before leaving, at once
                self.ask(Command.NOTHING if self._command.takes else self._command)
            return
        step = agree(views, sealed)
        if step is not None:
            self.agreed, self.decided_s = step, time.monotonic() - self._asked_at
            for control in controls:
                control.agree(step)

    def close(self) -> None:
        """Note that nothing is asked any more: all have carried it out, it was taken back, or the ranks are gone."""
        self._command, self.agreed = Command.NOTHING, None
