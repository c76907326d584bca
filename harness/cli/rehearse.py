"""`harness rehearse`: show that a program resumes exactly, before it is trusted with a night."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any

import typer

from harness.cli import output
from harness.cli.options import Json, with_settings
from harness.config.settings import check_alone, here, resolve
from harness.errors import ConfigError, ExitCode

TO_KEEP = ("store", "run", "s3_endpoint", "watch", "watch_as")


@with_settings(*TO_KEEP)
def rehearse(
    context: typer.Context,
    flags: dict[str, Any],
    steps: Annotated[int, typer.Option(help="Compare up to this step", min=2)] = 40,
    at: Annotated[
        str | None, typer.Option(help="Interrupt at these steps: 7,13,20. Default: chosen from what the program does")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a training script unbroken, then interrupted, and compare every batch, random state and tensor.

    Works in a scratch store. The result is kept with the run, and `harness run` shows it. In the command, `{out}`
    stands for a folder of its own for each pass. With --watch {out}, for a program that saves by itself, its
    checkpoints are compared. Exits 0 if both are bit-identical, 70 if they differ.
    """
    from harness.config.program import check_command, script_of
    from harness.rehearse.rehearse import keep_if_possible
    from harness.rehearse.rehearse import rehearse as rehearse_program
    from harness.rehearse.verdict import Verdict
    from harness.rehearse.watched import WatchedVerdict, rehearse_watched

    command = tuple(context.args)
    check_command(command)
    check_alone(os.environ)
    settings = resolve(flags, os.environ, here(), script=script_of(command))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the program too, and cleans up
    verdict: Verdict | WatchedVerdict
    if settings.watch is not None:
        watch = flags["watch"] or settings.watch  # with {out}, and not below this directory
        verdict = rehearse_watched(command, os.environ, output.say, watch, settings.watch_as)
    else:
        verdict = rehearse_program(command, os.environ, output.say, steps=steps, at=_steps(at))
    if verdict.places:
        keep_if_possible(verdict, settings, command, output.say)
    for line in verdict.lines:
        output.say(line)
    if as_json:
        output.print_json(verdict.to_json())
    raise typer.Exit(ExitCode.FINISHED if verdict.identical else ExitCode.BUG)


def _steps(text: str | None) -> list[int]:
    try:
        return [int(word) for word in (text or "").split(",") if word.strip()]
    except ValueError as err:
        raise ConfigError(f"--at {text}: give steps, as in --at 7,13,20") from err
