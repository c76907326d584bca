"""`harness run`: start a training script, or resume it, under an agent."""

from __future__ import annotations

import os
from typing import Any

import typer

from harness.cli.options import TO_RUN, with_settings
from harness.cli.output import say
from harness.config.settings import Settings, check_alone, here, resolve


@with_settings(*TO_RUN)
def run(context: typer.Context, flags: dict[str, Any]) -> None:
    """Run a training script: start it, or resume it if it has run before.

    Exit codes: 0 finished, 75 interrupted and durable (run me again), 74 interrupted and only local, 73 superseded,
    70 bug, 64 usage, 130 Ctrl-C; otherwise the script's own.
    """
    from harness.config.program import Program, check_command, script_of

    command = tuple(context.args)
    check_command(command)
    check_alone(os.environ)
    settings = resolve(flags, os.environ, here(), script=script_of(command))
    say_settings(settings)
    from harness.agent.main import Agent

    raise typer.Exit(Agent(settings, Program(command, os.environ)).run())


def say_settings(settings: Settings) -> None:
    """Print where a run saves, and how often."""
    local = f", local tier {settings.local}" if settings.local else ""
    when = f"a snapshot every {settings.every_s:g} s"
    if settings.watch is not None:
        when = f"each checkpoint that the program writes to {settings.watch}"
    say(f"run {settings.run!r}, store {settings.store}{local}, {when}")
