"""Reports to the fleet while a run is under way: metrics, protection, heartbeats of the hook.

Owns when each is due. It only observes and reports: nothing here starts or ends anything. A call that fails is logged
once, and retried. Each tick makes one call to AWS at most, so that its caller is never held up for long.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from cloud.aws.fleet import Fleet
from cloud.errors import CloudError
from cloud.notice import Deadline
from harness.core.messages import RunState, Status
from harness.node.attempts import AskStatus
from harness.node.context import Context
from harness.node.notices import Notices

MEASURE_S = 60.0
HEARTBEAT_S = 60.0
LOOK_S = 5.0  # what EC2's manual recommends; the agent asks every second
ASK_S = 2.0
CALL_S = 5.0


class FleetReporter:
    """Observes the run, the announcements and the clock, and reports to the fleet. One thread.

    Args:
        context: of this `harness resume`.
        fleet: receives the reports; `None` for no reports.
        announcements: notices about this instance.
        ask: asks the run's agent on this host.
    """

    def __init__(self, context: Context, fleet: Fleet | None, announcements: Notices, ask: AskStatus) -> None:
        self._say, self._clock = context.say, context.clock
        self._fleet, self._announcements, self._ask = fleet, announcements, ask
        self._due: dict[str, float] = {}
        self._failing: set[str] = set()
        self._counts: collections.Counter[str] = collections.Counter()
        self._durable_at = self._clock()  # from the start, while there is none
        self._saving = self._protected = self._launched = self._was_ready = False
        self._durable_step: int | None = None
        self.generation: int | None = None
        """Generation of the agent that answered last, since `started`."""
        self.claimed = False
        """Whether an agent has said, since `started`, that the store knows of its start."""

    def started(self) -> None:
        """Note that `harness run` was started."""
        self.generation, self.claimed = None, False
        self._counts["Starts"] += 1
        self._due.pop("measure", None)

    def ended(self, *, failed: bool) -> None:
        """Note that `harness run` has ended and saves nothing any more. Reports at once; blocks for some seconds."""
        if failed:
            self._counts["FailedStarts"] += 1
        self._saving = False
        self._protect(CALL_S)
        self._measure()

    def tick(self) -> None:
        """Do what is due. Blocks for some seconds at most, however little the services answer."""
        if self._is_due("ask", ASK_S) and (status := self._ask()) is not None:
            self._look_at_agent(status)
        if self._fleet is None:
            return
        if self._is_due("look", LOOK_S):
            self._announcements.look()
        if self._announcements.last.by_group and self._is_due("heartbeat", HEARTBEAT_S):
            self._try("heartbeat of the lifecycle hook", self._fleet.heartbeat, CALL_S)
        elif self._wants_protection() != self._protected and self._is_due("protect", LOOK_S):
            self._protect(CALL_S)
        elif self._is_due("measure", MEASURE_S):
            self._measure()
        elif self.claimed and not self._launched and self._is_due("launched", LOOK_S):
            self._launched = self._try("lifecycle hook of the launch", self._fleet.ready, CALL_S)

    def _look_at_agent(self, status: Status) -> None:
        self.generation = status.generation
        if status.claimed and not self._was_ready:
            self._was_ready = True
            self._counts["Ready"] += 1
        self.claimed |= status.claimed
        if status.step is not None:  # before the loop it is not known yet which snapshot is resumed
            self._count_durable_steps(status.durable_step or 0)
        if (age_s := status.durable_age_s) is not None:
            self._durable_at = max(self._durable_at, self._clock() - age_s)
        finishing = status.finished_step is not None and not status.everything_durable
        self._saving = status.state is RunState.DRAINING or finishing

    def _count_durable_steps(self, newest: int) -> None:
        """Count the steps that have become durable since the loop of this supervisor's first start began."""
        if self._durable_step is not None and newest > self._durable_step:
            self._counts["DurableSteps"] += newest - self._durable_step
        self._durable_step = newest if self._durable_step is None else max(newest, self._durable_step)

    def _wants_protection(self) -> bool:
        return self._saving and not self._announcements.last.by_group

    def _protect(self, seconds: float) -> None:
        wanted = self._wants_protection()
        if self._fleet is None or wanted == self._protected:
            return
        fleet = self._fleet
        if self._try("protection of this instance", lambda deadline: fleet.protect(wanted, deadline), seconds):
            self._protected = wanted

    def _measure(self) -> None:
        if self._fleet is None:
            return
        fleet, age_s = self._fleet, self._clock() - self._durable_at
        values = {"DurableAgeSeconds": age_s, "DurableSteps": 0, **self._counts}
        if self._try("metrics", lambda deadline: fleet.measure(values, deadline), CALL_S):
            self._counts.clear()

    def _is_due(self, what: str, every_s: float) -> bool:
        now = self._clock()
        if now < self._due.get(what, now):
            return False
        self._due[what] = now + every_s
        return True

    def _try(self, what: str, call: Callable[[Deadline], object], seconds: float) -> bool:
        try:
            call(Deadline.after(seconds, self._clock))
        except CloudError as err:
            if what not in self._failing:
                self._say(f"{what}: {err} (training continues; the call is retried)")
            self._failing.add(what)
            return False
        self._failing.discard(what)
        return True
