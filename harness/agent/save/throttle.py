"""Speed of a tier's uploads: measured, and kept to a limit while nothing is urgent.

Owns the measurements of one tier. Pauses for the limit count as time only while something is still on its way; what
the store copies by itself does not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from harness.core.policy.copying import Copied, Rates
from harness.core.rate import Rate
from harness.snapshots.commit import Attempt

SAMPLE_S = 2.0  # the time over which a speed is measured: parts are acknowledged in bursts


class Throttle:
    """Rate limit and measurements of one tier. `count` in the thread that sends, everything else from any."""

    def __init__(self, limit_bytes_s: float | None) -> None:
        """Start without measurements. `limit_bytes_s` is how fast to send at most; `None` for no limit."""
        self.limit_bytes_s = limit_bytes_s
        self._changed = threading.Condition()
        self._free = False
        self._rate, self._copied = Rate(), Copied()
        self._attempt = Attempt()
        self._began_at = time.monotonic()
        self._copied_before_s = 0.0
        self._sent = 0
        self._paused_s = 0.0
        self._sampled = False
        self._since = (0, 0.0)

    @property
    def rates(self) -> Rates:
        """Measured speeds: pessimistic, without pauses for the limit; `None` until something was sent."""
        with self._changed:
            return Rates(store_bytes_s=self._rate.per_s, copied=self._copied)

    @property
    def copied(self) -> Copied:
        """Part of the newest snapshot that the store copied by itself: as much of the next one need not be sent."""
        with self._changed:
            return self._copied

    def begin(self, attempt: Attempt) -> None:
        """Count for `attempt` from now on, and start its time."""
        with self._changed:
            self._attempt, self._copied_before_s = attempt, attempt.copying_s
            self._began_at = time.monotonic()
            self._sent, self._paused_s, self._sampled, self._since = 0, 0.0, False, (0, 0.0)

    def left(self, size: int) -> int:
        """Return the bytes still to send of the attempt in flight, out of `size`."""
        with self._changed:
            return max(0, size - self._sent - self._attempt.skipped_bytes)

    def count(self, sent: int, *, idle_s: Callable[[], float] | None = None) -> None:
        """Note that `sent` more bytes are stored. Blocks for as long as the limit demands. See `Progress`."""
        with self._changed:
            self._sent += sent
            sent_before, elapsed_before = self._since
            elapsed_s = self._elapsed_s
            if sent and elapsed_s - elapsed_before >= SAMPLE_S:
                self._rate.add(self._sent - sent_before, elapsed_s - elapsed_before)
                self._since, self._sampled = (self._sent, elapsed_s), True
            self._wait_for_pace(idle_s)

    def end(self) -> None:
        """Note that everything of the attempt is stored."""
        with self._changed:
            if not self._sampled:  # a small one: its round trips are most of what it costs
                self._rate.add(self._sent, self._elapsed_s)
            self._copied = Copied(self._attempt.copied_bytes, self._attempt.copying_s)

    def forget_copied(self) -> None:
        """Forget what was copied: the next snapshot has no base, and is sent whole."""
        with self._changed:
            self._copied = Copied()

    def set_free(self, free: bool) -> None:
        """Set whether to send at full speed, regardless of the limit."""
        with self._changed:
            self._free = free
            self._changed.notify_all()

    @property
    def _elapsed_s(self) -> float:
        copying_s = self._attempt.copying_s - self._copied_before_s
        return time.monotonic() - self._began_at - self._paused_s - copying_s

    def _wait_for_pace(self, idle_s: Callable[[], float] | None) -> None:
        if self.limit_bytes_s is None:
            return
        began = time.monotonic()
        pace_at = self._began_at + self._sent / self.limit_bytes_s
        while not self._free and (left_s := pace_at - time.monotonic()) > 0:
            self._changed.wait(min(left_s, 3600.0))
        paused_s = time.monotonic() - began
        self._paused_s += paused_s if idle_s is None else min(paused_s, idle_s())
