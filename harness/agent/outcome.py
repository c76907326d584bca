"""How a run ends here: its outcome, and the exit code that says so.

Owns the decision; records nothing and ends nothing. 75 is said only of what the store has confirmed (I13).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from harness.agent.drain.speeds import Drain
from harness.agent.resume.startup import Finding, Startup
from harness.agent.save.pipeline import SavePipeline
from harness.agent.trainers.attempt import TrainerAttempt
from harness.core.manifest import STOPPED_EARLY
from harness.errors import ExitCode
from harness.ipc.runtime_dir import RuntimeDir


@dataclass(frozen=True)
class Outcome:
    """One of them.

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

    def confirmed(self, pipeline: SavePipeline) -> Outcome:
        """The same, once nothing is written any more: the last commit may have come while it was being waited for."""
        if self.exit_code == ExitCode.INTERRUPTED_LOCAL and pipeline.everything_durable:
            return Outcome(self.name, ExitCode.INTERRUPTED, self.why)
        return self


def of_attempt(attempt: TrainerAttempt, drain: Drain | None, pipeline: SavePipeline, startup: Startup) -> Outcome:
    """The outcome that the trainer's last life leads to, once it is over or the time to wait for it has run out."""
    if attempt.finished_step is not None and attempt.exit_code == 0 and pipeline.everything_durable:
        return Outcome("finished", ExitCode.FINISHED)
    if attempt.stopped_early and attempt.exit_code == 0 and (drain is None or pipeline.everything_durable):
        return Outcome(STOPPED_EARLY, ExitCode.FINISHED, _why_early(pipeline))
    if drain is not None:
        if attempt.exit_code == 0 and not attempt.connected and startup.finding is Finding.NOTHING:
            return Outcome("stopped", ExitCode.FINISHED)  # a program that we know nothing of: its word counts
        return of_interruption(drain.exit_code, pipeline, startup, began=attempt.connected)
    if startup.error is not None:
        return Outcome("failed", startup.error.exit_code)
    if attempt.exit_code == 0 and attempt.connected and startup.point is not None and not attempt.restored:
        return Outcome(
            "failed",
            ExitCode.BUG,
            f"the program ended without restoring snapshot {startup.point.id}: its loops are not those that "
            "made it, or none ran. What it printed or saved was not trained; --fresh starts at step 0",
        )
    if attempt.exit_code == 0 and attempt.raised:
        return Outcome("failed", 1, "an exception ended the thread that trained, and the program went on without it")
    if attempt.exit_code == 0:
        return Outcome("stopped", ExitCode.FINISHED)
    return Outcome("failed", attempt.exit_code if attempt.exit_code is not None else 1)


def _why_early(pipeline: SavePipeline) -> str:
    newest = "from its beginning" if pipeline.steps.durable is None else f"from step {pipeline.steps.durable}"
    return (
        "the program left its outermost loop before its end: the run counts as stopped early. "
        f"--continue goes on {newest}, --fresh starts at step 0"
    )


def of_interruption(code: ExitCode, pipeline: SavePipeline, startup: Startup, *, began: bool = True) -> Outcome:
    """What leaving has come to, `code` if it went well: 74 if the newest snapshot is not durable.

    Args:
        code: what was asked for.
        pipeline: of the run.
        startup: of its generation.
        began: whether a trainer said hello.
    """
    if code is ExitCode.CTRL_C:
        return Outcome("stopped", code)
    if code is ExitCode.SUPERSEDED:
        return Outcome("superseded", code)
    new = not began and startup.finding is Finding.NOTHING and pipeline.sealed_step is None
    durable = new or _nothing_here_is_newer(pipeline, startup)
    return Outcome("interrupted", ExitCode.INTERRUPTED if durable else ExitCode.INTERRUPTED_LOCAL)


def write_outcome(place: RuntimeDir, pid: int, outcome: Outcome) -> None:
    """Record how the agent with process `pid` ended, on this host. Raises OSError."""
    word = {"pid": pid, "outcome": outcome.name, "exit_code": int(outcome.exit_code)}
    draft = place.outcome.with_suffix(f".{pid}")
    draft.touch(0o600)
    draft.write_text(json.dumps(word))
    draft.replace(place.outcome)


def read_outcome(place: RuntimeDir, pid: int) -> str | None:
    """The name of the outcome that the agent with process `pid` recorded here; `None` if it recorded none."""
    try:
        word = json.loads(place.outcome.read_text())
        return str(word["outcome"]) if word["pid"] == pid else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _nothing_here_is_newer(pipeline: SavePipeline, startup: Startup) -> bool:
    """Whether this machine holds nothing that the store does not."""
    return pipeline.everything_durable or (startup.awaiting and pipeline.sealed_step is None and not startup.only_here)
