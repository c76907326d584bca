"""`harness watch`: what a directory holds that programs save by themselves, and what of it is a whole checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.options import Json
from harness.cli.output import print_json, print_table, say
from harness.core.words import size


def watch(
    directory: Annotated[Path, typer.Argument(help="Where the program saves", exists=True, file_okay=False)],
    watch_as: Annotated[
        str | None, typer.Option(help="The name of an adapter, or a .toml file. Default: it is recognized")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also show the adapter, and which others fit")] = False,
    as_json: Json = False,
) -> None:
    """List what is a checkpoint in a directory, as harness run --watch would see it, and why one is not whole.

    Changes nothing. While a program writes there, what it has begun shows as not whole.
    """
    from harness.watch.survey import Survey

    there = Survey.of(directory, watch_as)
    rows = [
        {
            "checkpoint": one.candidate.name,
            "step": one.candidate.step,
            "files": len(one.candidate.files) + len(one.candidate.shared),
            "size": size(one.candidate.bytes),
            "whole": one.lack is None,
            "why": f"it {why}" if (why := one.candidate.why_odd if one.lack is None else one.lack.why) else "",
        }
        for one in there.judged
    ]
    adapter = there.adapter
    if as_json:
        found: dict[str, Any] = {"adapter": None, "others": [], "checkpoints": rows}
        if adapter is not None:
            found |= {"adapter": adapter.name, "others": [other.name for other in there.others]}
        return print_json(found)
    if adapter is None:
        return say(f"nothing in {directory} is known as a checkpoint; docs/watch.md shows how to describe one")
    say(f"{adapter.title} (adapter {adapter.name}); to resume: {adapter.resume.how}")
    if explain:
        for line in adapter.explained():
            say(line)
        if there.others:
            say(f"these fit as well: {', '.join(other.name for other in there.others)}; choose with --watch-as")
    return print_table(rows)
