"""Notice, NoticeSource, Deadline: the announcement of an instance's end, and the time that is left.

Owns the values; knows no HTTP and no signals. Instants that are compared or waited for are monotonic seconds
(`time.monotonic`, one clock per host, shared by its processes). No decision uses wall-clock time.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

SPOT_NOTICE_S = 120.0
"""Seconds that an EC2 spot interruption notice leaves at best; also assumed if a notice does not say."""

Clock = Callable[[], float]
"""Returns monotonic seconds. Injected, so that tests own the time."""


@dataclass(frozen=True)
class Deadline:
    """A monotonic instant after which work has no value. Every function that waits takes one.

    Attributes:
        at: monotonic seconds; `math.inf` for no limit.
        clock: the clock that `at` is read on.
        cancelled: once it is set, the work has no value either, at whatever time.
    """

    at: float
    clock: Clock = time.monotonic
    cancelled: threading.Event | None = None

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Deadline:
        """Return the deadline `seconds` from now."""
        return cls(clock() + seconds, clock)

    @classmethod
    def never(cls, clock: Clock = time.monotonic) -> Deadline:
        """Return a deadline without a limit: `remaining_s` is infinite."""
        return cls(math.inf, clock)

    @property
    def remaining_s(self) -> float:
        """Seconds left; 0.0 once it has passed, or the work was cancelled."""
        return 0.0 if self._is_cancelled else max(0.0, self.at - self.clock())

    @property
    def expired(self) -> bool:
        """Whether the instant has passed, or the work was cancelled."""
        return self._is_cancelled or self.clock() >= self.at

    def sooner(self, seconds: float) -> Deadline:
        """Return the earlier of this deadline and `seconds` from now, to bound one attempt inside the whole."""
        return Deadline(min(self.at, self.clock() + seconds), self.clock, self.cancelled)

    def unless(self, cancelled: threading.Event) -> Deadline:
        """Return the same deadline for work that ends at its next step (not in the middle) once `cancelled` is set."""
        return Deadline(self.at, self.clock, cancelled)

    @property
    def _is_cancelled(self) -> bool:
        return self.cancelled is not None and self.cancelled.is_set()


class NoticeKind(enum.Enum):
    """Kinds of announcement, the mildest first."""

    REBALANCE = "rebalance"
    """The instance is at risk. Cheap action: make a snapshot durable now and continue training."""
    INTERRUPT = "interrupt"
    """The instance will end: make a snapshot durable and exit before the deadline."""


@dataclass(frozen=True)
class Notice:
    """One announcement, edge-triggered: the same announcement seen twice has the same `id`.

    Attributes:
        id: stable for one announcement (source, action and time), so that polling it again is not news.
        kind: the kind of announcement.
        source: the source's name, for people: "ec2 spot", "signal SIGTERM", "drain file".
        deadline: when the instance ends, on the monotonic clock; `None` for a rebalance recommendation.
        detail: the source's own words, for the journal.
        by_group: whether the Auto Scaling group ends the instance: if the group has a hook, it waits for us.
        while_it_stands: whether it is in force for as long as it is announced, whatever its deadline (a drain file is).
    """

    id: str
    kind: NoticeKind
    source: str
    deadline: Deadline | None
    detail: str = ""
    by_group: bool = False
    while_it_stands: bool = False


class NoticeSource(Protocol):
    """A source that may announce the end of this instance. One thread polls it, about once a second.

    Attributes:
        name: for people.
        lead_s: seconds that its notices leave at best; `None` if the source does not decide that.
        expected: whether it should answer on this machine. The poller does not report the silence of a source that
            is not expected and has never answered.
    """

    name: str
    lead_s: float | None
    expected: bool

    def poll(self) -> Sequence[Notice]:
        """Return every announcement in force now; an empty sequence if there is none.

        May block for about a second, never longer. A withdrawn announcement is simply no longer returned.

        Raises:
            CloudError: the source did not answer just now (the poller reports that it is blind, and continues to ask).
        """
        ...

    def close(self) -> None:
        """Close sockets and remove handlers. Idempotent."""
        ...
