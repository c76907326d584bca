"""Notice, NoticeSource, Deadline: how the end of an instance is announced, and how long is left.

Owns the values; knows no HTTP and no signals. Instants that are compared or waited for are monotonic seconds
(`time.monotonic`, one clock per host, shared by its processes); wall-clock time is never used to decide.
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
"""What an EC2 spot interruption notice leaves, at best; what is taken where a notice does not say."""

Clock = Callable[[], float]
"""Returns monotonic seconds. Injected, so that tests own the time."""


@dataclass(frozen=True)
class Deadline:
    """A monotonic instant after which work is worth nothing. Passed down to everything that waits.

    Attributes:
        at: monotonic seconds; `math.inf` for "whenever it is done".
        clock: the clock that `at` is read on.
        cancelled: once it is set, the work is worth nothing either, whatever the time.
    """

    at: float
    clock: Clock = time.monotonic
    cancelled: threading.Event | None = None

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Deadline:
        """The instant `seconds` from now."""
        return cls(clock() + seconds, clock)

    @classmethod
    def never(cls, clock: Clock = time.monotonic) -> Deadline:
        """No limit: `remaining_s` is infinite."""
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
        """The earlier of this deadline and `seconds` from now: a bound for one attempt inside the whole."""
        return Deadline(min(self.at, self.clock() + seconds), self.clock, self.cancelled)

    def unless(self, cancelled: threading.Event) -> Deadline:
        """The same, for work that is over as soon as `cancelled` is set: at its next step, not in the middle of one."""
        return Deadline(self.at, self.clock, cancelled)

    @property
    def _is_cancelled(self) -> bool:
        return self.cancelled is not None and self.cancelled.is_set()


class NoticeKind(enum.Enum):
    """What is announced, mildest first."""

    REBALANCE = "rebalance"
    """The instance is at risk. Cheap action: make a snapshot durable now and go on training."""
    INTERRUPT = "interrupt"
    """The instance is going away: leave with a durable snapshot before the deadline."""


@dataclass(frozen=True)
class Notice:
    """One announcement, edge-triggered: the same announcement seen twice has the same `id`.

    Attributes:
        id: stable for one announcement (source, action and time), so that polling it again is not news.
        kind: what is announced.
        source: who said so, for people: "ec2 spot", "signal SIGTERM", "drain file".
        deadline: when the instance ends, on the monotonic clock; `None` for a rebalance recommendation.
        detail: the source's own words, for the journal.
        by_group: whether it is the Auto Scaling group that ends the instance: it waits for us if it has a hook.
        while_it_stands: whether it is in force for as long as it is announced, whatever its deadline: a drain file.
    """

    id: str
    kind: NoticeKind
    source: str
    deadline: Deadline | None
    detail: str = ""
    by_group: bool = False
    while_it_stands: bool = False


class NoticeSource(Protocol):
    """Something that may announce the end of this instance. Polled by one thread, about once a second.

    Attributes:
        name: for people.
        lead_s: what its notices leave at best, in seconds; `None` where it has no say in that.
        expected: whether it should answer on this machine. One that should not, and never has, is not missed.
    """

    name: str
    lead_s: float | None
    expected: bool

    def poll(self) -> Sequence[Notice]:
        """Every announcement in force now; an empty sequence when there is none.

        May block for about a second, never longer. A withdrawn announcement is simply no longer returned.

        Raises:
            CloudError: the source could not be asked just now (the poller says that it is blind, and goes on asking).
        """
        ...

    def close(self) -> None:
        """Give up sockets and handlers. Idempotent."""
        ...
