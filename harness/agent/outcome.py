"""How a run ends here: its outcome, and the exit code that says so.

Owns the decision; records nothing and ends nothing. 75 is said only of what the store has confirmed (I13).
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.agent.drain import Drain
from harness.agent.life import Life
from harness.agent.origin import Origin
from harness.agent.saves import Saves
from harness.errors import ExitCode


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

    def confirmed(self, saves: Saves) -> Outcome:
        """The same, once nothing is written any more: the last commit may have come while it was being waited for."""
        if self.exit_code == ExitCode.INTERRUPTED_LOCAL and saves.everything_durable:
            return Outcome(self.name, ExitCode.INTERRUPTED, self.why)
        return self


def of_life(life: Life, drain: Drain | None, saves: Saves, origin: Origin) -> Outcome:
    """What the trainer's last life has come to. It is over, or nobody waits for it any more."""
    if life.finished_step is not None and life.exit_code == 0 and saves.everything_durable:
        return Outcome("finished", ExitCode.FINISHED)
    if drain is not None:
        return of_interruption(drain.exit_code, saves, origin)
    if origin.error is not None:
        return Outcome("failed", origin.error.exit_code)
    if life.exit_code == 0 and life.connected and origin.point is not None and not life.restored:
        return Outcome(
            "failed",
            ExitCode.BUG,
            f"the program ended without restoring snapshot {origin.point.id}: its loops are not those that "
            "made it, or none ran. What it printed or saved was not trained; --fresh starts at step 0",
        )
    if life.exit_code == 0:
        return Outcome("stopped", ExitCode.FINISHED)
    return Outcome("failed", life.exit_code if life.exit_code is not None else 1)


def of_interruption(code: ExitCode, saves: Saves, origin: Origin) -> Outcome:
    """What leaving has come to, `code` if it went well: 74 if the newest snapshot is not durable."""
    if code is ExitCode.CTRL_C:
        return Outcome("stopped", code)
    if code is ExitCode.SUPERSEDED:
        return Outcome("superseded", code)
    durable = _nothing_here_is_newer(saves, origin)
    return Outcome("interrupted", ExitCode.INTERRUPTED if durable else ExitCode.INTERRUPTED_LOCAL)


def _nothing_here_is_newer(saves: Saves, origin: Origin) -> bool:
    """Whether this machine holds nothing that the store does not."""
    return saves.everything_durable or (origin.awaiting and saves.sealed_step is None and not origin.only_here)
