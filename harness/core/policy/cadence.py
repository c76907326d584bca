"""When a tier wants a new snapshot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cadence:
    """How often a tier wants a new snapshot.

    Attributes:
        every_s: seconds between the starts of two snapshots.
    """

    every_s: float

    def due(self, now: float, last_started_at: float | None, since: float) -> bool:
        """Whether a snapshot is due at monotonic `now`; before the first one the clock runs from `since`."""
        return now - (since if last_started_at is None else last_started_at) >= self.every_s
