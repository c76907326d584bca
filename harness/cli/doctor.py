"""`harness doctor`: check everything that a run needs on this machine."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from harness.cli.options import TO_TRY, Json, with_settings
from harness.cli.output import print_json, print_lines
from harness.cli.run import say_settings
from harness.config.settings import here, resolve
from harness.errors import ConfigError, ExitCode


@with_settings(*TO_TRY)
def doctor(
    context: typer.Context,
    flags: dict[str, Any],
    state_gb: Annotated[
        float | None, typer.Option(help="GB of weights and optimizer. Default: the size of the run's newest snapshot")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check everything that a run needs here, before a problem costs a night. Starts nothing, leaves nothing behind.

    Takes the options of `harness run`: replace "run" with "doctor" in its command line.

    One line each: ok, warning, or FAIL with the remedy. Exits 64 if anything failed; warnings are allowed.
    """
    from harness.config.program import script_of
    from harness.inspect.doctor.checks import Examination
    from harness.inspect.doctor.finding import all_well
    from harness.inspect.doctor.host import Host

    if state_gb is not None and not state_gb > 0:
        raise ConfigError(f"--state-gb must be more than 0, not {state_gb:g}")
    command = tuple(context.args)
    script = (script_of(command) if command else None) or "doctor"
    settings = resolve(flags, os.environ, here(), script=script)
    say_settings(settings)
    size = None if state_gb is None else int(state_gb * 1e9)
    findings = []
    for finding in Examination(settings, Host(os.environ), command=command, state_bytes=size).findings():
        findings.append(finding)
        if not as_json:
            print_lines(finding.lines())
    if as_json:
        print_json([finding.to_json() for finding in findings])
    if not all_well(findings):
        raise typer.Exit(ExitCode.USAGE)
