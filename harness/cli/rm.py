"""`harness rm`: delete a snapshot, or a whole run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from harness.cli.options import TO_LOOK, settings_of, with_settings
from harness.cli.output import say


@with_settings(*TO_LOOK)
def rm(
    snapshot: Annotated[str, typer.Argument(help="A snapshot, as `harness ls` shows it; or ALL for the whole run")],
    flags: dict[str, Any],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
) -> None:
    """Delete a snapshot from every tier, or a whole run with its snapshots, records and unfinished uploads."""
    from harness.inspect.remove import remove

    settings = settings_of(flags)
    if not yes and not typer.confirm(f"delete {snapshot} of run {settings.run!r} from {settings.store}?", err=True):
        raise typer.Exit(1)
    for line in remove(settings, snapshot):
        say(line)
