"""Check whether a start may continue the run that a store knows: not a finished run, nor another script's.

Owns these refusals, and the warnings about a start that differs from the last one. Asks no store.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from harness.config.program import script_of
from harness.config.settings import Settings
from harness.core.manifest import STOPPED_EARLY, Done
from harness.errors import ConfigError, RunFinished
from harness.snapshots.records import Survey


def check_identity(known: Survey, settings: Settings, command: Sequence[str]) -> list[str]:
    """Refuse a run that is over, or that belongs to another script.

    Args:
        known: the run, as the store knows it.
        settings: of this start.
        command: the trainer's command line, without secrets.

    Returns:
        Messages for the user about everything else that differs from the last start.

    Raises:
        ConfigError: the run must not be started like this.
    """
    claim = known.last_claim
    if claim is None or settings.fresh:
        return []
    check_not_over(known.done, settings)
    if not settings.run_named and not claim.named and _scripts_differ(claim.command, command):
        raise ConfigError(
            f"run {settings.run!r} belongs to another script: {' '.join(claim.command)}. Name this one: --run NAME"
        )
    differs = []
    if command and claim.command and tuple(command) != claim.command:
        differs.append(f"the command differs from the last start's, which was: {' '.join(claim.command)}")
    for name, value in settings.remembered().items():
        before = claim.settings.get(name)
        if before is not None and before != value:
            differs.append(f"{name} differs from the last start's: it was {before}, now it is {value}")
    return differs


def check_not_over(done: Done | None, settings: Settings) -> None:
    """Refuse a run that has finished, unless `--from` was given, or one stopped early, unless `--continue` was too.

    Raises:
        RunFinished: it is over.
    """
    if settings.from_ is not None:
        return
    run = settings.run
    others = "--fresh (in Python: fresh=True) starts it again at step 0, another --run (run=) starts another"
    if done is not None and done.outcome == "finished":
        raise RunFinished(f"run {run!r} finished at step {done.step}: {others}")
    if done is not None and done.outcome == STOPPED_EARLY and not settings.continue_:
        where = "from its beginning" if done.step is None else f"from step {done.step}"
        raise RunFinished(
            f"run {run!r} was stopped early by its own program: "
            f"--continue (continue_=True) resumes it {where}, {others}"
        )


def _scripts_differ(before: Sequence[str], now: Sequence[str]) -> bool:
    first, second = (script_of(command) if command else None for command in (before, now))
    return first is not None and second is not None and os.path.normpath(first) != os.path.normpath(second)
