"""How fast something has been lately, pessimistically.

Owns the sliding window behind every promise about time: the 10th percentile of the newest samples, so that nine times
out of ten the work is faster than promised. Pure; the caller measures.
"""

from __future__ import annotations

from collections import deque

WINDOW = 32  # samples: a minute of a busy upload, or the last half hour of small ones


class Rate:
    """An amount per second: bytes of a copy, a write or an upload; optimizer steps. Not thread-safe."""

    def __init__(self, window: int = WINDOW) -> None:
        """`window` is how many of the newest samples count."""
        self._samples: deque[float] = deque(maxlen=window)

    def add(self, amount: int, seconds: float) -> None:
        """Add a measurement: `amount` took `seconds`. An amount of 0 is ignored."""
        if amount > 0:
            self._samples.append(amount / max(seconds, 1e-6))

    @property
    def per_s(self) -> float | None:
        """The 10th percentile (nearest rank, so the slowest of up to ten); `None` before anything was measured."""
        if not self._samples:
            return None
        ordered = sorted(self._samples)
        return ordered[max(0, -(-len(ordered) // 10) - 1)]
