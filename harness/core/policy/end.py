"""How a run ends: whether now, with which outcome, and what each part of the end may take.

Owns these decisions, as functions of facts; records nothing and ends nothing. 75 is said only of what the store has
confirmed (I13).

    Standing ── decide_end ──▶ WAIT | DISMISS | STOP | END ── Facts, outcome_of ──▶ Outcome: a name, and an exit code
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from harness.core.manifest import STOPPED_EARLY
from harness.errors import ExitCode


class Next(enum.Enum):
    """What an agent does about the end of its run, at one turn of its loop."""

    WAIT = "wait"
    """It is not the time: somebody trains, or something sealed is on its way."""
    DISMISS = "dismiss"
    """A trainer that is no child waits for a resume point that will not come: tell it, and let it end by itself.

    Otherwise it would take the agent for dead, start another one, and ask for the run again.
    """
    STOP = "stop"
    """Time is up: the trainer is ended, if it is a child, and is waited for no longer in any case."""
    END = "end"
    """Nobody trains, and everything sealed is where it has to be, or time is up."""


@dataclass(frozen=True)
class Standing:
    """How far a run is from its end.

    Attributes:
        over: whether the trainer's process has ended, and so did what was to start another.
        begins: whether a trainer is about to begin: one is to be started again, or its generation is being claimed.
        leaving: whether the run is to be left.
        expired: whether the time for leaving is over.
        in_vain: whether a start waits for an older generation, or for a store, that may not come before the end.
        listens: whether a trainer that is no child is there to be told that, or about to be.
        settled: whether nothing sealed is on its way, and nothing that happened is still to be looked at.
    """

    over: bool
    begins: bool = False
    leaving: bool = False
    expired: bool = False
    in_vain: bool = False
    listens: bool = False
    settled: bool = True


def decide_end(standing: Standing) -> Next:
    """What is to be done about the end now."""
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
        why: a word to the user where neither of them explains itself.
    """

    name: str
    exit_code: int
    why: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the run has come to its own end."""
        return self.name == "finished"

    def confirmed(self, *, everything_durable: bool) -> Outcome:
        """The same, once nothing is written any more: the last commit may have come while it was being waited for."""
        if self.exit_code == ExitCode.INTERRUPTED_LOCAL and everything_durable:
            return Outcome(self.name, ExitCode.INTERRUPTED, self.why)
        return self


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the outcome of a run is decided from, once its trainer's process has ended or is waited for no longer.

    Attributes:
        leaving: what leaving was to end with, if it went well; `None` where the run was not to be left.
        exit_code: of the program; `None` for a crash of one that is no child.
        connected: whether it made a Checkpointer.
        finished: whether its last loop came to its end.
        stopped_early: whether it left its outermost loop before.
        raised: whether its Checkpointer ended by an exception.
        restored: whether it made the snapshot's state its own.
        resumes: the snapshot that it was to resume, if there was one.
        nothing_to_resume: whether it is known that there was none; not as long as the search goes on.
        refused: the exit code of the error that kept it from beginning.
        durable_step: newest step committed in the store.
        everything_durable: whether the newest snapshot there is survives this machine.
        sealed: whether there is a snapshot at all, of this life or resumed.
        awaiting: whether an older generation was being waited for, so that nothing of this one existed yet.
        only_here: while one was: whether this machine holds a snapshot that is newer than any in the store.
    """

    leaving: ExitCode | None = None
    exit_code: int | None = None
    connected: bool = True
    finished: bool = False
    stopped_early: bool = False
    raised: bool = False
    restored: bool = False
    resumes: str | None = None
    nothing_to_resume: bool = False
    refused: int | None = None
    durable_step: int | None = None
    everything_durable: bool = False
    sealed: bool = False
    awaiting: bool = False
    only_here: bool = False


def outcome_of(facts: Facts) -> Outcome:
    """What the trainer's last life comes to."""
    ended_well = facts.exit_code == 0
    if facts.finished and ended_well and facts.everything_durable:
        return Outcome("finished", ExitCode.FINISHED)
    if facts.stopped_early and ended_well and (facts.leaving is None or facts.everything_durable):
        return Outcome(STOPPED_EARLY, ExitCode.FINISHED, _why_early(facts.durable_step))
    if facts.leaving is not None:
        if ended_well and not facts.connected and facts.nothing_to_resume:
            return Outcome("stopped", ExitCode.FINISHED)  # a program that we know nothing of: its word counts
        return interrupted(facts.leaving, facts)
    if facts.refused is not None:
        return Outcome("failed", facts.refused)
    if ended_well and facts.connected and facts.resumes is not None and not facts.restored:
        return Outcome(
            "failed",
            ExitCode.BUG,
            f"the program ended without restoring snapshot {facts.resumes}: its loops are not those that "
            "made it, or none ran. What it printed or saved was not trained; --fresh starts at step 0",
        )
    if ended_well and facts.raised:
        return Outcome("failed", 1, "an exception ended the thread that trained, and the program went on without it")
    if ended_well:
        return Outcome("stopped", ExitCode.FINISHED)
    return Outcome("failed", 1 if facts.exit_code is None else facts.exit_code)


def interrupted(code: ExitCode, facts: Facts) -> Outcome:
    """What leaving comes to, `code` if it went well: 74 where this machine holds something that the store does not."""
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
    newest = "from its beginning" if durable_step is None else f"from step {durable_step}"
    return (
        "the program left its outermost loop before its end: the run counts as stopped early. "
        f"--continue goes on {newest}, --fresh starts at step 0"
    )


@dataclass(frozen=True)
class EndTimes:
    """What each part of an end may take at most, one after the other: all of them end within what is left.

    Each is a share of the seconds that are left when it begins, so that a part that is done early leaves its time to
    the next. A part has `least_s` even where nothing is left.

    Attributes:
        calls_s: for calls in flight, and for recording, while nobody urges.
        journal_s: for the journal, likewise.
        least_s: for any part.
    """

    calls_s: float = 5.0
    journal_s: float = 10.0
    least_s: float = 0.2

    def quiet_s(self, left_s: float) -> float:
        """Until no tier can commit any more."""
        return self._share(left_s, 0.3, self.calls_s)

    def record_s(self, left_s: float) -> float:
        """For the record of the outcome, which must not be missing: whoever comes next would wait for nothing."""
        return self._share(left_s, 0.6, self.calls_s)

    def rest_s(self, left_s: float) -> float:
        """For the journal's last segment; and then for closing the stores."""
        return self._share(left_s, 0.6, self.journal_s)

    def _share(self, left_s: float, share: float, most_s: float) -> float:
        return min(most_s, max(self.least_s, share * left_s))
