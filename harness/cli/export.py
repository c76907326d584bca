"""`harness export`: write a snapshot to one safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli import output
from harness.cli.options import TO_LOOK, Json, settings_of, with_settings


@with_settings(*TO_LOOK)
def export(
    file: Annotated[
        Path, typer.Argument(help="File to write: a name that ends in .safetensors. Of a watched program: a directory")
    ],
    flags: dict[str, Any],
    snapshot: Annotated[
        str | None, typer.Option(help="Snapshot, as `harness ls` shows it. Default: the newest")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Instead of --snapshot: the newest one of this step")] = None,
    only: Annotated[str | None, typer.Option(help="Only this state, e.g. model, with plain tensor names")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists")] = False,
    as_json: Json = False,
) -> None:
    """Write a snapshot, or one state of it, to a safetensors file, for any script. Exits 70 if a byte differs."""
    from harness.inspect.export import export as export_run

    with output.patience(flags["store"]) as waiting:

        def say(text: str) -> None:
            waiting.cancel()  # this line shows already that the command is at work
            output.say(text)

        settings = settings_of(flags)
        made = export_run(settings, file, say, snapshot=snapshot, step=step, only=only, force=force)
    what = f"{made['files']} files" if made["tensors"] is None else f"{made['tensors']} tensors"
    size = f"{what}, {made['bytes']} bytes"
    output.say(f"wrote {made['file']}: {size}, step {made['step']} of {settings.run}")
    if as_json:
        output.print_json(made)
