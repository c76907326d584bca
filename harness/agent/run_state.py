"""The state of a run on this host, assigned in one place that knows the legal moves.

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
"""The legal moves from each state. A trainer that connects or ends in DRAINING or DONE changes nothing."""


class State:
    """The state of one run in one agent. Main thread."""

    def __init__(self) -> None:
        """Begin with STARTING."""
        self._now = RunState.STARTING

    @property
    def now(self) -> RunState:
        """The present state."""
        return self._now

    def move(self, to: RunState) -> None:
        """Go to `to` if that is a legal move, else stay."""
        if to in MOVES[self._now]:
            self._now = to
