"""The lines of a run on stderr: sentences for a person at a terminal, key=value lines for everything else.

Owns which events are worth a line, and its text. Both formats are listeners of the journal.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from harness.agent.log import Log
from harness.config.settings import Settings
from harness.core import events
from harness.core.snapshot import SnapshotId
from harness.core.words import count, duration, printable, size

_QUIET = (
    events.Heartbeat,
    events.ShardStored,
    events.PartStored,
    events.Due,
    events.Agreed,
    events.Verified,
    events.SlotsReady,
)
_SEALED = 16  # snapshots whose stall is remembered until they are stored

Write = Callable[[str], None]


def lines_of(settings: Settings, log: Log, environ: Mapping[str, str]) -> Callable[[events.Line], None]:
    """Return the listener that writes to `log`, in the format that is set, or else in the one that suits `log`."""
    if settings.log_format == "logfmt" or (settings.log_format is None and not log.is_terminal):
        return Logfmt(settings.run, log.line)
    coloured = log.is_terminal and "NO_COLOR" not in environ and environ.get("TERM") != "dumb"
    return Sentences(settings.store, log.line, coloured=coloured)


class Logfmt:
    """`harness: RUN gGENERATION Event key=value …`, for machines and for a search."""

    def __init__(self, run: str, write: Write) -> None:
        """`write` takes one line at a time."""
        self._run, self._write = run, write

    def __call__(self, line: events.Line) -> None:
        """Write a line for the event, unless it is a quiet one."""
        if not isinstance(line.body, _QUIET):
            self._write(f"harness: {self._run} g{line.generation} {events.describe(line.body)}")


class Tone(enum.Enum):
    """How much a sentence matters, as a terminal's attributes."""

    PLAIN = ""
    GOOD = "32"
    WARNING = "33"
    BAD = "1;31"


class Sentences:
    """`harness: saved step 1 200 (1.5 GB) in 0.3 s; durable in S3 4.0 s later`. Called in the emitting thread."""

    def __init__(self, store: str, write: Write, *, coloured: bool = False) -> None:
        """Nothing is written yet.

        Args:
            store: location of the store, as in `Settings.store`.
            write: takes one line at a time.
            coloured: whether important lines have a colour.
        """
        self._write, self._coloured = write, coloured
        self._in = {"remote": "in S3" if store.startswith("s3://") else "in the store", "local": "on the local disk"}
        self._stalls: dict[int, float] = {}
        """Stalls, in seconds, of snapshots that no tier has stored yet, by their steps."""

    def __call__(self, line: events.Line) -> None:
        """Write a sentence for an event that matters to a person; ignore other events."""
        told = self._sentence(line.body)
        if told is None:
            return
        tone, words = told
        words = printable(" ".join(words.split("\n")))
        coloured = f"\x1b[{tone.value}m{words}\x1b[0m" if self._coloured and tone.value else words
        self._write(f"harness: {coloured}")

    def _sentence(self, event: events.Event) -> tuple[Tone, str] | None:
        if isinstance(event, events.Sealed):
            self._stalls[event.step] = max(event.stall_s, self._stalls.get(event.step, 0.0))  # of all ranks
            while len(self._stalls) > _SEALED:
                self._stalls.pop(next(iter(self._stalls)), None)
            return None
        if isinstance(event, events.Published):
            return Tone.PLAIN, self._saved(event)
        return self._of_start(event) or self._of_saving(event) or self._of_notice(event) or self._of_end(event)

    def _saved(self, event: events.Published) -> str:
        step, where = count(event.step), self._in[event.tier]
        kept = "durable " if event.tier == "remote" else ""
        stall_s = self._stalls.pop(event.step, None)
        if stall_s is None:  # the other tier has it already, or it is of an earlier agent
            return f"step {step} is {kept}{where}, {duration(event.seconds)} after it was saved"
        later = f"{kept}{where} {duration(event.seconds)} later"
        return f"saved step {step} ({size(event.bytes)}) in {duration(stall_s)}; {later}"

    def _of_start(self, event: events.Event) -> tuple[Tone, str] | None:
        match event:
            case events.Located():
                step = count(SnapshotId.parse(event.snapshot).step)
                return Tone.PLAIN, f"resuming from step {step}, found {self._in.get(event.tier, 'in memory')}"
            case events.NothingToResume():
                return Tone.PLAIN, f"starting at step 0: {event.reason}"
            case events.Restarted():
                return Tone.PLAIN, f"training again: {event.words()}"
            case events.ClaimDeferred():
                return Tone.WARNING, f"the store does not answer, training continues without it: {event.reason}"
            case events.StoreBlind():
                return Tone.WARNING, f"the store does not answer, retrying: {event.reason}"
            case events.Rejected():
                what = "the local tier" if event.snapshot == "all" else f"snapshot {event.snapshot} ({event.tier})"
                return Tone.WARNING, f"{what} is not used: {event.reason}"
            case events.Quarantined():
                return Tone.WARNING, f"snapshot {event.snapshot} is quarantined: {event.reason}"
            case events.HandoverAwaited():
                older = f"start {event.generation} on {event.host}"
                silence = duration(event.silence_s)
                return Tone.PLAIN, f"waiting for {older}, which may still be saving: {silence} at most"
            case events.HandoverOver():
                return Tone.PLAIN, f"earlier starts have handed over, after {duration(event.seconds)}"
            case events.AgentReplaced():
                return Tone.PLAIN, f"took over from an agent that has ended, with {event.slots} snapshots in memory"
        return None

    def _of_saving(self, event: events.Event) -> tuple[Tone, str] | None:
        match event:
            case events.SaveFailed():
                again = "" if event.retry_in_s is None else f", trying again in {duration(event.retry_in_s)}"
                where = self._in[event.tier]
                return Tone.WARNING, f"step {count(event.step)} is not saved {where} yet{again}: {event.reason}"
            case events.StoreSilent():
                silent = f"{self._in[event.tier]} for {duration(event.seconds)}"
                return Tone.WARNING, f"no data of step {count(event.step)} was stored {silent}"
            case events.Behind():
                where = self._in[event.tier]
                return Tone.WARNING, f"snapshots come faster than they can be kept {where}: taking fewer from now on"
            case events.GivenUp():
                return Tone.PLAIN, f"the upload of step {count(event.step)} was given up for a newer snapshot"
            case events.UpkeepFailed():
                where = self._in[event.tier]
                return Tone.WARNING, f"old snapshots {where} could not be verified or deleted: {event.reason}"
            case events.RankLate():
                since = duration(event.age_s)
                if event.step is None:
                    return Tone.WARNING, f"rank {event.rank} has created no Checkpointer in {since}; others have"
                for_ = "" if event.agreed is None else f", to save step {count(event.agreed)}"
                stands = f"rank {event.rank} has been at step {count(event.step)} for {since}"
                return Tone.WARNING, f"{stands}, and the others wait for it{for_}"
            case events.RanksDiffer():
                ranks = "rank " + ", ".join(map(str, event.ranks))
                return Tone.WARNING, (
                    f"{event.tensor} is not the same on all ranks any more ({ranks}): each saves its own from now on, "
                    f"and what was taken of step {count(event.step)} is not used"
                )
            case events.NeverFits():
                needs = f"a snapshot of {size(event.bytes)} needs {duration(event.needs_s)} to become durable"
                window = duration(event.window_s)
                return Tone.WARNING, f"{needs}, but a notice leaves {window}: only periodic snapshots count"
        return None

    def _of_notice(self, event: events.Event) -> tuple[Tone, str] | None:
        match event:
            case events.NoticeSeen(kind="rebalance"):
                return Tone.WARNING, f"{event.source}: this instance is at risk; making a snapshot durable"
            case events.NoticeSeen():
                left = "" if event.in_s is None else f" within {duration(event.in_s)}"
                return Tone.WARNING, f"notice ({event.source}): this run has to stop here{left}"
            case events.NoticeWithdrawn():
                return Tone.GOOD, f"the notice ({event.source}) was withdrawn"
            case events.SourceBlind(source="ec2", expected=False):
                return Tone.PLAIN, "this seems to be no EC2 instance: notices come by SIGTERM or by a drain file here"
            case events.SourceBlind():
                return Tone.WARNING, f"{event.source} does not answer, a notice could be missed: {event.reason}"
            case events.SourceBack():
                return Tone.GOOD, f"{event.source} answers again"
            case events.SupersededBy():
                newer = f"start {event.generation} on {event.host}"
                return Tone.WARNING, f"{newer} takes this run over: saving, then exiting"
            case events.Drilling():
                return Tone.PLAIN, "a drill has begun: training continues"
        return None

    def _of_end(self, event: events.Event) -> tuple[Tone, str] | None:
        match event:
            case events.TrainerLeft(code=code) if code:
                return Tone.PLAIN, f"the program has ended with exit code {code}"
            case events.Restarting():
                crashes = f"crash {event.crashes} without progress" if event.crashes else "it had made progress"
                return Tone.WARNING, f"starting the program again in {duration(event.in_s)} ({crashes})"
            case events.GaveUp():
                return Tone.BAD, f"giving up: {event.crashes} crashes without progress"
            case events.Ended():
                return self._ended(event)
        return None

    def _ended(self, event: events.Ended) -> tuple[Tone, str]:
        durable = "nothing is durable"
        if event.durable_step is not None:
            durable = f"step {count(event.durable_step)} is durable {self._in['remote']}"
        match event.outcome, event.exit_code:
            case "finished", _:
                return Tone.GOOD, f"finished: {durable}"
            case "interrupted", 75:
                return Tone.GOOD, f"interrupted: {durable}; the same command continues the run, here or elsewhere"
            case "interrupted", _ if event.local_step is None:
                if event.durable_step is None:
                    return Tone.BAD, "interrupted: nothing was saved; the same command starts the run again"
                return Tone.BAD, f"interrupted: {durable}, later ones are lost; the same command continues the run"
            case "interrupted", _:
                local = f"step {count(event.local_step)} is on this machine alone, {durable}"
                return Tone.BAD, f"interrupted: {local}; the same command continues the run, without loss only here"
            case "failed", code:
                return Tone.BAD, f"failed with exit code {code}; {durable}"
            case "stopped early", _:
                return Tone.PLAIN, f"the program stopped early: {durable}; --continue resumes, --fresh begins at step 0"
            case "superseded", _:
                return Tone.PLAIN, f"another start has taken this run over; {durable}"
        return Tone.PLAIN, f"{event.outcome}: {durable}; the same command continues the run"
