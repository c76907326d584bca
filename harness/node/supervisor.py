"""The loop of `harness resume`: start the run, watch it, and continue according to how it ended.

Owns the loop and every wait in it. `exit_policy.py` decides what follows from an ending, `actions.py` acts on the
platform, and `fleet_reporter.py` reports to the fleet meanwhile.

    ┌─▶ is one here already? ──no──▶ start `harness run` ──▶ watch until it ends ──▶ consequence ──▶ exit
    │        └──yes: wait for it ──────────────────────────────────▲                    │
    └────────── wait: until a minute past the deadline, or for the back-off ────────────┘
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from harness.core.policy.restart import GiveUp, Restart, after_crash
from harness.errors import ExitCode
from harness.node.actions import Actions
from harness.node.attempts import Ended, RunAttempt
from harness.node.context import Context
from harness.node.exit_policy import Act, Ending, Then, Where, consequence, counts_as_failed, ending_of
from harness.node.fleet_reporter import FleetReporter
from harness.node.guards import MOST_SUPERSEDED
from harness.node.notices import Notices

_LOOK_S = 0.2


class Runs(Protocol):
    """The run, as far as it is on this host and in its store."""

    def find(self) -> RunAttempt | None:
        """Return a run that is under way here already, no matter which process started it; `None` if there is none."""
        ...

    def orphans(self) -> list[int]:
        """Return the processes of a watched program whose agent has died: no other agent can take it over."""
        ...

    def send(self, pids: Sequence[int], signum: int) -> None:
        """Send a signal to processes."""
        ...

    def start(self, *, anew: bool) -> RunAttempt:
        """Start `harness run`. Raises ConfigError."""
        ...

    def durable_step(self) -> int | None:
        """Return the newest step in the store; `None` if there is none, or the store does not answer."""
        ...

    def over(self) -> bool:
        """Return whether the store says that the run has finished, or was stopped early by its program."""
        ...

    def superseded(self) -> int:
        """See `Guards`."""
        ...


@dataclass(frozen=True)
class Limits:
    """Time limits and intervals, in seconds.

    Attributes:
        margin_s: from a deadline (from the start of the wait, if none is known) until an instance that lives on counts
            as spared.
        let_go_s: see `Actions`.
        tick_s: between two checks.
        back_off_s: before the first new start after an agent has died; doubled for each one without progress.
        orphans_s: until a watched program whose agent has died is killed, after SIGTERM.
    """

    margin_s: float = 60.0
    let_go_s: float = 90.0
    tick_s: float = 1.0
    back_off_s: float = 1.0
    orphans_s: float = 10.0


@dataclass(frozen=True)
class Terms:
    """When a run is started again.

    Attributes:
        where: the kind of platform.
        max_crashes: deaths of the agent in a row, without progress, that are answered by a new start.
        anew: whether to pass --fresh or --continue, until a start has taken effect.
        limits: time limits and intervals.
    """

    where: Where
    max_crashes: int
    anew: bool = False
    limits: Limits = Limits()


class Supervisor:
    """One run on one node, over as many starts as needed. Main thread.

    Args:
        context: of this `harness resume`.
        terms: when the run is started again.
        actions: on the platform.
        runs: the run.
        announcements: notices about this instance.
        reporter: reports to the fleet while the run is under way.
    """

    def __init__(
        self,
        context: Context,
        terms: Terms,
        actions: Actions,
        runs: Runs,
        announcements: Notices,
        reporter: FleetReporter,
    ) -> None:
        self._run, self._signals, self._say, self._clock = context.run, context.signals, context.say, context.clock
        self._actions, self._runs, self._reporter, self._announcements = actions, runs, reporter, announcements
        self._where, self._max_crashes, self._limits, self._anew = (
            terms.where, terms.max_crashes, terms.limits, terms.anew
        )  # fmt: skip
        self._crashes = 0
        self._furthest: int | None = None
        self._code: int | None = None
        self.decided = False
        """Whether it has ended with nothing left to do: all that follows from the end of the run has taken effect."""

    def run(self) -> int:
        """Run until there is nothing more to do here; return the exit code of the last `harness run`."""
        while (attempt := self._next()) is not None:
            if not self._goes_on(self._live(attempt)):
                return self._exit_code
        # A signal asked us to exit while nothing was being trained: nothing is lost.
        self.decided = self._actions.do(
            consequence(ending_of(self._told_to_leave), self._where, asked=True).actions, "stopped by a signal"
        )
        return self._exit_code

    @property
    def _exit_code(self) -> int:
        if self._code is not None:
            return self._code
        if self._signals.asked is None:
            return int(ExitCode.BUG)  # given up on a run that was found, and nothing says how it ended
        return self._told_to_leave

    @property
    def _told_to_leave(self) -> int:
        """The exit code after a signal that asked us to exit, if no agent reports one. Ctrl-C is final."""
        return int(ExitCode.CTRL_C if self._signals.asked == signal.SIGINT else ExitCode.INTERRUPTED)

    # ---- one attempt ------------------------------------------------------------------------------------------------

    def _next(self) -> RunAttempt | None:
        """Return the run that is here already, else a new start; `None` if a signal asked us to exit."""
        self._announcements.forget()
        self._signals.forget()
        self._end_orphans()
        attempt = self._runs.find()
        if attempt is not None:
            self._say(f"run {self._run!r} is being trained on this host already: waiting for its end")
        elif self._signals.asked is None:
            self._reporter.started()
            attempt = self._runs.start(anew=self._anew)
        return attempt

    def _live(self, attempt: RunAttempt) -> Ended:
        """Watch one attempt until its end."""
        try:
            while (ended := attempt.ended()) is None:
                self._signals.pass_on(attempt)
                if not attempt.ours and self._signals.asked == signal.SIGINT:
                    return Ended(int(ExitCode.CTRL_C))  # the user has started that run elsewhere, and ends only us
                self._tick()
                self._signals.pause(self._limits.tick_s, attempt.pidfd)
        finally:
            attempt.close()
        if ended.signum is not None and ended.signum == self._signals.asked:
            ended = Ended(self._told_to_leave)  # killed before it could listen, or when it had nothing left to do
        if ended.code is not None:
            self._code = ended.code
        failed = counts_as_failed(ended.code, ended.outcome)
        self._anew = self._anew and not self._reporter.claimed and failed
        self._reporter.ended(failed=failed)
        return ended

    def _tick(self) -> None:
        try:
            self._reporter.tick()
        except Exception:  # noqa: BLE001  a report must never end the training; it is logged, and tried again
            self._say(traceback.format_exc())

    # ---- what follows -----------------------------------------------------------------------------------------------

    def _goes_on(self, ended: Ended) -> bool:
        """Do what follows from an end. Return whether to start the run again."""
        ending, in_s = self._understand(ended)
        if ending is None:
            return True
        by_group = self._where is Where.FLEET and self._announcements.look().by_group
        asked = self._signals.asked is not None
        why = f"harness run ended with {cause(ended)}"
        if ending is Ending.SUPERSEDED and self._where is Where.FLEET and not (by_group or asked):
            count = self._runs.superseded()
            if count >= MOST_SUPERSEDED:
                ending = Ending.FAILED
                why += f", start number {count} within an hour: two machines take the run from each other"
        following = consequence(ending, self._where, asked=asked, group_ends=by_group)
        done = self._actions.do(following.actions, why)
        self.decided = done and following.then is Then.EXIT
        if following.then is Then.WAIT:
            return self._wait_for_the_end()
        if following.then is Then.AGAIN:
            self._say(f"the agent died ({cause(ended)}): starting again in {in_s:g} s")
            self._wait(in_s)
            return True
        return False

    def _understand(self, ended: Ended) -> tuple[Ending | None, float]:
        """Return what an end means, and the delay of a new start; no ending if another process still trains here."""
        ending = ending_of(ended.code, ended.signum, ended.outcome)
        if ending is not Ending.AGENT_DIED:
            self._crashes = 0
        if ended.code == ExitCode.USAGE and self._is_here():
            return None, 0.0  # started twice at one moment; wait for the other one
        if ended.code == ExitCode.USAGE and self._where is Where.FLEET and self._runs.over():
            self._say(f"run {self._run!r} is over")  # by an earlier start, which could not end the job any more
            return Ending.FINISHED, 0.0
        if ending is Ending.AGENT_DIED:
            self._end_orphans()
            if self._is_here():
                self._say("the agent died; its program lives on with another agent")
                return None, 0.0
            if self._signals.asked is not None:
                return ending_of(self._told_to_leave), 0.0  # by now it would have exited, whatever it died of
            decision = self._after_death()
            if isinstance(decision, GiveUp):
                self._say(f"the agent died {decision.crashes} times without progress")
                return Ending.FAILED, 0.0
            return ending, decision.in_s
        return ending, 0.0

    def _end_orphans(self) -> None:
        """End a watched program whose agent has died. Nothing that it writes would be saved, and no notice be heard."""
        if not (orphans := self._runs.orphans()):
            return
        shown = ", ".join(map(str, orphans))
        self._say(f"the agent died; the program that it watched is ended, since nothing would save it: {shown}")
        for signum in (signal.SIGTERM, signal.SIGKILL):
            self._runs.send(orphans, signum)
            until = self._clock() + self._limits.orphans_s
            while (orphans := self._runs.orphans()) and self._clock() < until:
                self._tick()
                self._signals.pause(min(_LOOK_S, self._limits.tick_s))
            if not orphans:
                return

    def _after_death(self) -> GiveUp | Restart:
        durable = self._runs.durable_step()
        progressed = self._furthest is not None and durable is not None and durable > self._furthest
        self._furthest = max((step for step in (durable, self._furthest) if step is not None), default=None)
        decision = after_crash(
            crashes=self._crashes,
            progressed=progressed,
            connected=True,
            max_crashes=self._max_crashes,
            first_delay_s=self._limits.back_off_s,
        )
        self._crashes = decision.crashes
        return decision

    def _is_here(self) -> bool:
        attempt = self._runs.find()
        if attempt is not None:
            attempt.close()
        return attempt is not None

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def _wait_for_the_end(self) -> bool:
        """Wait for the announced end of the instance. Return whether to train again: spared, or notice withdrawn."""
        margin_s = self._limits.margin_s
        until = self._clock() + margin_s
        self._say(
            "waiting for the end of this instance; if it is still alive "
            f"{margin_s:g} s after its deadline, training starts again"
        )
        while self._signals.asked is None:
            outlook = self._announcements.look()
            if outlook.by_group:
                self._actions.do((Act.COMPLETE,), "the group ends this instance")
                self.decided = True
                return False
            if outlook.ends_at is not None:
                until = outlook.ends_at + margin_s
            elif self._announcements.seen:
                self._say("the notice was withdrawn: starting again")
                return True
            if self._clock() >= until:
                self._say("this instance is still alive: starting again")
                return True
            self._tick()
            self._signals.pause(self._limits.tick_s)
        self.decided = True
        return False

    def _wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until a signal asks us to exit."""
        until = self._clock() + seconds
        while self._signals.asked is None and (left_s := until - self._clock()) > 0:
            self._tick()
            self._signals.pause(min(left_s, self._limits.tick_s))


def cause(ended: Ended) -> str:
    """Return the cause of an end, for people."""
    if ended.signum is not None:
        return f"signal {ended.signum}"
    if ended.code is None:
        return "no recorded outcome"
    own = ended.outcome == "failed" and ended.code in (ExitCode.SUPERSEDED, *_INTERRUPTED)
    return f"exit code {ended.code}{' (of the program itself)' if own else _MEANING.get(ended.code, '')}"


_INTERRUPTED = (ExitCode.INTERRUPTED, ExitCode.INTERRUPTED_LOCAL)
_MEANING: Mapping[int, str] = {
    ExitCode.FINISHED: " (finished)",
    ExitCode.USAGE: " (usage or configuration)",
    ExitCode.BUG: " (a bug, or snapshots that cannot be used)",
    ExitCode.SUPERSEDED: " (superseded)",
    ExitCode.INTERRUPTED_LOCAL: " (interrupted, only local)",
    ExitCode.INTERRUPTED: " (interrupted)",
}
