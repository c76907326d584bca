"""How often a dead agent is replaced, and how soon.

Owns the count. An agent that dies again and again is a bug, or the machine cannot run one; one that dies every few
days, as where memory is short now and then, is replaced each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Pauses before the attempts to start another agent, in a row."""
LASTED_S = 60.0
"""An agent that has lived this long counts as no failure."""


class Replacements:
    """The attempts to replace an agent. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin, at the moment when there is an agent. `clock` is monotonic, in seconds."""
        self._clock = clock
        self._tried = 0
        self._began_at = clock()

    def note_lost(self) -> None:
        """Note that the agent has died: if it had lived for a while, count the attempts from 0 again."""
        if self._clock() - self._began_at >= LASTED_S:
            self._tried = 0

    def note_begun(self) -> None:
        """Note that another agent is there."""
        self._began_at = self._clock()

    def next_pause_s(self) -> float | None:
        """Return the pause before the next attempt; `None` if there have been enough."""
        if self._tried == len(PAUSES_S):
            return None
        self._tried += 1
        return PAUSES_S[self._tried - 1]
