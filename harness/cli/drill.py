"""`harness drill`: simulate an interruption notice for the run that trains on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cloud.notice import SPOT_NOTICE_S
from harness.cli.options import TO_FIND, Json, settings_of, with_settings
from harness.cli.output import print_json, say
from harness.errors import ConfigError, ExitCode


@with_settings(*TO_FIND)
def drill(
    flags: dict[str, Any],
    in_s: Annotated[float, typer.Option("--in", help="Seconds from the notice to its deadline")] = SPOT_NOTICE_S,
    end: Annotated[bool, typer.Option("--end", help="Really end the run: it exits with 75 and can be resumed")] = False,
    as_json: Json = False,
) -> None:
    """Simulate a notice for the run that trains here, and measure how long until its last step is durable.

    Training continues. Exits 74 if the last step was not durable in time.
    """
    from harness.ipc import client

    if not 0 < in_s < 86_400:
        raise ConfigError(f"--in must be more than 0 and less than a day, not {in_s:g}")
    drilled, words = client.drill(settings_of(flags), in_s, end=end, on_plan=say)
    print_json(drilled.fields()) if as_json else say(words)
    if drilled.durable_in_s is None:
        raise typer.Exit(ExitCode.INTERRUPTED_LOCAL)
