"""`harness verify`: read every snapshot of a run again."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from harness.cli.options import TO_LOOK, Json, settings_of, with_settings
from harness.cli.output import patience, print_json, print_table
from harness.errors import ExitCode


@with_settings(*TO_LOOK)
def verify(
    flags: dict[str, Any],
    lift: Annotated[
        bool, typer.Option("--lift", help="Read quarantined snapshots too, and end the quarantine of intact ones")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read every snapshot of a run again and compare each byte with what was committed. Exits 70 if one differs."""
    from harness.inspect.verify import is_bad
    from harness.inspect.verify import verify as verify_run

    with patience(flags["store"]):
        rows = verify_run(settings_of(flags), lift=lift)
    print_json(rows) if as_json else print_table(rows)
    if any(is_bad(row["verdict"]) for row in rows):
        raise typer.Exit(ExitCode.BUG)
