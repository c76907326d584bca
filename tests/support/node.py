"""A node for tests of `harness resume`: a clock, signals, a fleet and a run that do as they are told, and remember."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloud.aws.instance import Instance
from cloud.errors import CloudError
from cloud.notice import Deadline, Notice, NoticeKind
from harness.core.messages import RunState, Status
from harness.node.attempts import Ended
from tests.support.clock import FakeClock

INSTANCE = Instance("i-0123456789abcdef0", "us-east-1", "g6e.xlarge", "us-east-1a", spot=True)
RUNNING = Status(
    run="run", store="/store", local=None, state=RunState.RUNNING, generation=3, run_id="a" * 32, claimed=True, step=12,
    local_step=None, durable_step=None, durable_age_s=None, bytes_copied=0, bytes_pending=0, estimate_s=None,
    deadline_s=None, finished_step=None, everything_durable=False, restarts=0, restart=None, unreachable=(),
    agent_pid=1, trainer_pid=2,
)  # fmt: skip


class FakeSignals:
    """Signals that come when the clock says so; pausing is what makes time pass."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.asked: int | None = None
        self.asked_at: dict[float, int] = {}
        self.passed_on: list[int] = []
        self.pauses: list[float] = []

    def forget(self) -> None:
        pass

    def pass_on(self, life: Any) -> None:
        if self.asked is not None and self.asked not in self.passed_on:
            self.passed_on.append(self.asked)

    def pause(self, seconds: float, pidfd: int | None = None) -> None:
        self.pauses.append(seconds)
        self._clock.advance(seconds)
        for at, signum in self.asked_at.items():
            if self.asked is None and self._clock() >= at:
                self.asked = signum


class FakeFleet:
    """Remembers what it was told. `failing` maps a call's name to the error that it raises."""

    def __init__(self) -> None:
        self.instance, self.group = INSTANCE, "trainers"
        self.calls: list[tuple[Any, ...]] = []
        self.failing: dict[str, CloudError] = {}
        self.completes_at_try = 1
        self.launching = False
        """Whether the group waits until this instance is in service."""

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def measured(self) -> list[dict[str, float]]:
        return [call[1] for call in self.calls if call[0] == "measure"]

    def complete(self, deadline: Deadline) -> bool:
        self._called("complete")
        return self.names().count("complete") >= self.completes_at_try

    def ready(self, deadline: Deadline) -> bool:
        return self._launched("ready")

    def abandon(self, deadline: Deadline) -> bool:
        return self._launched("abandon")

    def _launched(self, call: str) -> bool:
        was = self.launching
        if was:
            self._called(call)
        self.launching = False
        return was

    def protect(self, on: bool, deadline: Deadline) -> None:
        self._called("protect", on)

    def notify(self, subject: str, text: str, deadline: Deadline) -> None:
        self._called("notify", subject, text)

    def measure(self, values: Mapping[str, float], deadline: Deadline) -> None:
        self._called("measure", dict(values))

    def __getattr__(self, name: str) -> Callable[[Deadline], None]:
        if name not in ("finish", "stop", "leave", "heartbeat", "mark_unhealthy"):
            raise AttributeError(name)
        return lambda deadline: self._called(name)

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if (error := self.failing.get(call[0])) is not None:
            raise error


class FakeSource:
    """Announces what it is told."""

    name = "ec2"
    lead_s: float | None = None
    expected = True

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.announces: Callable[[float], Sequence[Notice] | CloudError] = lambda now: ()

    def spot(self, ends_at: float, *, until: float = float("inf"), since: float = 0.0) -> None:
        notice = Notice("spot", NoticeKind.INTERRUPT, "ec2 spot", Deadline(ends_at, self._clock))
        self.announces = lambda now: (notice,) if since <= now < until else ()

    def group(self) -> None:
        notice = Notice(
            "asg", NoticeKind.INTERRUPT, "ec2 autoscaling", Deadline(self._clock() + 120, self._clock), by_group=True
        )
        self.announces = lambda now: (notice,)

    def poll(self) -> Sequence[Notice]:
        said = self.announces(self._clock())
        if isinstance(said, CloudError):
            raise said
        return said

    def close(self) -> None:
        pass


class FakeLife:
    """A run that ends after so many looks."""

    def __init__(self, ended: Ended, looks: int = 2, *, ours: bool = True) -> None:
        self._ended, self._looks, self.ours, self.pidfd = ended, looks, ours, None
        self.closed = False

    def ended(self) -> Ended | None:
        self._looks -= 1
        return self._ended if self._looks < 0 else None

    def signal(self, signum: int) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class FakeRuns:
    """One ending after the other; what is found here already comes first."""

    def __init__(self, *endings: Ended | int) -> None:
        self.endings = [Ended(ending) if isinstance(ending, int) else ending for ending in endings]
        self.found: list[FakeLife | None] = []
        self.durable: list[int | None] = []
        self.is_over = False
        self.superseded_times = 1
        self.orphaned: list[int] = []
        self.sent = list[tuple[tuple[int, ...], int]]()
        self.ends_by = {signal.SIGTERM, signal.SIGKILL}
        self.starts: list[bool] = []
        self.looks = 2

    def orphans(self) -> list[int]:
        return list(self.orphaned)

    def send(self, pids: Sequence[int], signum: int) -> None:
        self.sent.append((tuple(pids), signum))
        if signum in self.ends_by:
            self.orphaned = []

    def find(self) -> FakeLife | None:
        return self.found.pop(0) if self.found else None

    def start(self, *, anew: bool) -> FakeLife:
        self.starts.append(anew)
        return FakeLife(self.endings.pop(0), self.looks)

    def durable_step(self) -> int | None:
        return self.durable.pop(0) if self.durable else None

    def over(self) -> bool:
        return self.is_over

    def superseded(self) -> int:
        return self.superseded_times
