"""`harness resume`: run a training on an unattended machine."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from harness.cli.options import TO_RUN, with_settings
from harness.cli.output import patience, print_json, print_lines
from harness.config.settings import here
from harness.errors import ConfigError


@with_settings(*TO_RUN)
def resume(
    context: typer.Context,
    flags: dict[str, Any],
    line: Annotated[
        str | None, typer.Option("--command", help="The program as one line, instead of the words after --")
    ] = None,
    self_test: Annotated[
        str | None,
        typer.Option(
            help='Command to succeed before the first start; "" for none. Default: nvidia-smi -L if there is a GPU'
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be resumed and run, and change nothing")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: one JSON document on stdout")] = False,
) -> None:
    """Run a program as often as needed: on a spot instance of a fleet, in a Slurm or Kubernetes job, on a laptop.

    Settings and program come from options, then the environment (HARNESS_RUN, HARNESS_STORE, HARNESS_COMMAND, …), then
    the instance's tags (harness-run, harness-store, harness-command).

    Exits with the code of the last `harness run`; in a fleet, it first acts on that code.
    """
    from harness.node import main as node
    from harness.node.job import Request

    request = Request(flags, tuple(context.args), line, os.environ, here())
    if dry_run:
        with patience(flags["store"]):
            found = node.dry_run(request)
        print_json(found.to_json()) if as_json else print_lines(found.lines())
        raise typer.Exit(found.code)
    if as_json:
        raise ConfigError("--json needs --dry-run")
    raise typer.Exit(node.resume(request, self_test))
