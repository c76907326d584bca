"""Where a run is on this host: one state, assigned in one place that knows the legal moves.

STARTING ⇄ RUNNING ──▶ DRAINING ──▶ DONE        (every state may go to DONE, STARTING to DRAINING too)
"""

from __future__ import annotations

from harness.core.messages import RunState

MOVES = {
    RunState.STARTING: {RunState.RUNNING, RunState.DRAINING, RunState.DONE},
    RunState.RUNNING: {RunState.STARTING, RunState.DRAINING, RunState.DONE},
    RunState.DRAINING: {RunState.DONE},
    RunState.DONE: set[RunState](),
}
"""From each state, where it may go. A trainer that comes or goes while the run is left, or over, changes nothing."""


class State:
    """Of one run in one agent. Main thread."""

    def __init__(self) -> None:
        """It starts."""
        self._now = RunState.STARTING

    @property
    def now(self) -> RunState:
        """What it is."""
        return self._now

    def move(self, to: RunState) -> None:
        """Go to `to` if that is a legal move, else stay."""
        if to in MOVES[self._now]:
            self._now = to
