"""How a run ends: whether now, with which outcome, and how long each part of the end may take.

Owns these decisions, as functions of facts; records nothing and ends nothing. Exit code 75 stands only for what the
store has confirmed (I13).

    Standing ── decide_end ──▶ WAIT | DISMISS | STOP | END ── Facts, outcome_of ──▶ Outcome: a name, and an exit code
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from harness.core.manifest import STOPPED_EARLY
from harness.errors import ExitCode

_SHOWN = 3


class Next(enum.Enum):
    """The agent's next action on the way to the end of its run, at one turn of its loop."""

    WAIT = "wait"
    """The end has to wait: a trainer trains, or something sealed is on its way."""
    DISMISS = "dismiss"
    """A trainer that is not a child waits for a resume point that will not come: tell it, and let it end by itself.

    Otherwise it would take the agent for dead, start another agent, and ask for the run again.
    """
    STOP = "stop"
    """Time is up: end the trainer if it is a child, and stop waiting for it in any case."""
    END = "end"
    """End now: no trainer trains, and everything sealed is where it has to be, or time is up."""


@dataclass(frozen=True)
class Standing:
    """How far a run is from its end.

    Attributes:
        over: whether the trainer's process has ended, and so has a process that would start another one.
        begins: whether a trainer is about to begin: one is to be started again, or its generation is being claimed.
        leaving: whether the agent is leaving the run.
        expired: whether the time for leaving is over.
        in_vain: whether a start waits for an older generation to end or a store to answer, maybe past the end.
        listens: whether a trainer that is not a child is connected, or about to be, and can be told so.
        settled: whether nothing sealed is on its way, and nothing that happened is still to be handled.
    """

    over: bool
    begins: bool = False
    leaving: bool = False
    expired: bool = False
    in_vain: bool = False
    listens: bool = False
    settled: bool = True


def decide_end(standing: Standing) -> Next:
    """Return the next action on the way to the end."""
    out_of_time = standing.leaving and (standing.expired or standing.in_vain)
    if out_of_time and not standing.over:
        return Next.DISMISS if standing.in_vain and standing.listens and not standing.expired else Next.STOP
    if not standing.over or standing.begins:
        return Next.WAIT
    return Next.END if out_of_time or standing.settled else Next.WAIT


@dataclass(frozen=True)
class Outcome:
    """How a run ended here.

    Attributes:
        name: as it is recorded in the store.
        exit_code: of the agent.
        why: an explanation for the user, where name and code are not enough.
    """

    name: str
    exit_code: int
    why: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the training has reached its own end."""
        return self.name == "finished"

    def confirmed(self, *, everything_durable: bool) -> Outcome:
        """Return the final outcome, once nothing is written any more: a commit during the wait turns 74 into 75."""
        if self.exit_code == ExitCode.INTERRUPTED_LOCAL and everything_durable:
            return Outcome(self.name, ExitCode.INTERRUPTED, self.why)
        return self


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that decide a run's outcome, once its trainer's process has ended or the agent stops waiting for it.

    Attributes:
        leaving: the exit code for leaving, if it goes well; `None` if the agent was not leaving the run.
        exit_code: of the program; `None` for a crash of a program that is not a child.
        connected: whether the program made a Checkpointer.
        finished: whether its last loop reached its end.
        stopped_early: whether it left its outermost loop before the loop's end.
        raised: whether its Checkpointer ended by an exception.
        restored: whether it restored the snapshot.
        resumes: the snapshot that it was to resume, if there was one.
        older: snapshots that are older than that one, newest first.
        hopeless: whether it ended by an error that it would meet again.
        nothing_to_resume: whether the agent knows that there was none; false while the search continues.
        refused: the exit code of the error that kept it from beginning.
        durable_step: newest step committed in the store.
        everything_durable: whether the newest snapshot survives this machine.
        sealed: whether there is any snapshot, of this attempt or resumed.
        awaiting: whether the agent was waiting for an older generation, so that nothing of this one existed yet.
        only_here: during that wait: whether this machine holds a snapshot that is newer than any in the store.
    """

    leaving: ExitCode | None = None
    exit_code: int | None = None
    connected: bool = True
    finished: bool = False
    stopped_early: bool = False
    raised: bool = False
    restored: bool = False
    resumes: str | None = None
    older: tuple[str, ...] = ()
    hopeless: bool = False
    nothing_to_resume: bool = False
    refused: int | None = None
    durable_step: int | None = None
    everything_durable: bool = False
    sealed: bool = False
    awaiting: bool = False
    only_here: bool = False


def outcome_of(facts: Facts) -> Outcome:
    """Return the outcome of the trainer's last attempt."""
    ended_well = facts.exit_code == 0
    if facts.finished and ended_well and facts.everything_durable:
        return Outcome("finished", ExitCode.FINISHED)
    if facts.stopped_early and ended_well and (facts.leaving is None or facts.everything_durable):
        return Outcome(STOPPED_EARLY, ExitCode.FINISHED, _why_early(facts.durable_step))
    if facts.leaving is not None:
        if ended_well and not facts.connected and facts.nothing_to_resume:
            return Outcome("stopped", ExitCode.FINISHED)  # a program without a Checkpointer: its own exit code counts
        return interrupted(facts.leaving, facts)
    if facts.refused is not None:
        return Outcome("failed", facts.refused)
    if ended_well and facts.connected and facts.resumes is not None and not facts.restored:
        return Outcome(
            "failed",
            ExitCode.BUG,
            f"the program ended without restoring snapshot {facts.resumes}: its loops are not those that "
            "made it, or none ran. What it printed or saved is of an untrained model; --fresh starts at step 0",
        )
    if ended_well and facts.raised:
        return Outcome("failed", 1, "an exception ended the thread that trained, and the program continued without it")
    if ended_well:
        return Outcome("stopped", ExitCode.FINISHED)
    refused = facts.hopeless and facts.resumes is not None and not facts.restored
    return Outcome("failed", facts.exit_code or 1, _why_refused(facts) if refused else None)


def _why_refused(facts: Facts) -> str:
    older = ", ".join(facts.older[:_SHOWN])
    more = f" and {len(facts.older) - _SHOWN} more" if len(facts.older) > _SHOWN else ""
    if not older:
        return f"the program refused snapshot {facts.resumes}, and the run has no older one"
    return (
        f"the program refused snapshot {facts.resumes}. The run has older ones: {older}{more}. "
        f"--from {facts.older[0]} starts from that one"
    )


def interrupted(code: ExitCode, facts: Facts) -> Outcome:
    """Return the outcome of leaving: `code` if it went well, 74 if this machine holds what the store does not."""
    if code is ExitCode.CTRL_C:
        return Outcome("stopped", code)
    if code is ExitCode.SUPERSEDED:
        return Outcome("superseded", code)
    nothing_here = not facts.sealed and (
        (not facts.connected and facts.nothing_to_resume) or (facts.awaiting and not facts.only_here)
    )
    durable = facts.everything_durable or nothing_here
    return Outcome("interrupted", ExitCode.INTERRUPTED if durable else ExitCode.INTERRUPTED_LOCAL)


def _why_early(durable_step: int | None) -> str:
    newest = "from the beginning" if durable_step is None else f"from step {durable_step}"
    return (
        "the program left its outermost loop before its end: the run counts as stopped early. "
        f"--continue resumes {newest}, --fresh starts at step 0"
    )


@dataclass(frozen=True)
class EndTimes:
    """Time limits of the parts of an end, one after the other: all of them end within the time that is left.

    Each is a share of the seconds that are left when it begins, so that a part that is done early leaves its time to
    the next. A part has `least_s` even if no time is left.

    Attributes:
        calls_s: for calls in flight, and for recording, while there is time enough.
        journal_s: for the journal, likewise.
        least_s: for any part.
    """

    calls_s: float = 5.0
    journal_s: float = 10.0
    least_s: float = 0.2

    def quiet_s(self, left_s: float) -> float:
        """Return the limit for the wait until no tier can commit any more."""
        return self._share(left_s, 0.3, self.calls_s)

    def record_s(self, left_s: float) -> float:
        """Return the limit for recording the outcome. Without that record, the next start would wait in vain."""
        return self._share(left_s, 0.6, self.calls_s)

    def rest_s(self, left_s: float) -> float:
        """Return the limit for the journal's last segment; and then for closing the stores."""
        return self._share(left_s, 0.6, self.journal_s)

    def _share(self, left_s: float, share: float, most_s: float) -> float:
        return min(most_s, max(self.least_s, share * left_s))
