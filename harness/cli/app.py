"""The command line: its commands, their groups in the help, and their exit codes.

Owns exit codes: an error is one line on stderr that says what failed, where, and what to do; there is no traceback.
Each command has its own file in this folder: it parses options, calls the harness and prints.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from cloud.errors import CloudError, Denied
from harness.agent.log import open_missing_descriptors
from harness.cli.doctor import doctor
from harness.cli.drill import drill
from harness.cli.export import export
from harness.cli.fleet import fleet
from harness.cli.ls import ls
from harness.cli.options import Command
from harness.cli.output import print_lines, say
from harness.cli.rehearse import rehearse
from harness.cli.resume import resume
from harness.cli.rm import rm
from harness.cli.run import run
from harness.cli.simulator import simulator
from harness.cli.status import status
from harness.cli.verify import verify
from harness.cli.watch import watch
from harness.errors import ConfigError, ExitCode, HarnessError
from harness.ipc.process import heed_children

TRAIN, LOOK, KEEP, TRY = "Train", "Look at a run", "Snapshots", "Try it out"

app = typer.Typer(
    name="harness",
    help="Training on spot instances that loses nothing but the seconds it takes to move to the next machine.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        try:
            print_lines([f"harness {importlib.metadata.version('harness-spot')}"])
        except importlib.metadata.PackageNotFoundError as err:
            raise ConfigError("this is a source tree that was not installed: it has no version") from err
        raise typer.Exit


@app.callback()
def harness(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version")
    ] = False,
) -> None:
    """Take the options of `harness` itself. The help shows the text of `app`, not this docstring."""


def _add(command: Command, group: str, example: str, *, runs_a_program: bool = False) -> None:
    settings: dict[str, Any] = {"allow_extra_args": True, "allow_interspersed_args": False}
    register = app.command(
        rich_help_panel=group,
        epilog=f"Example: {example}",
        context_settings=settings if runs_a_program else None,
        options_metavar="[OPTIONS] -- PROGRAM ..." if runs_a_program else None,
    )
    register(command)


_add(
    run,
    TRAIN,
    "harness run --store /mnt/checkpoints --run gpt-small -- python train.py --lr 3e-4",
    runs_a_program=True,
)
_add(
    resume,
    TRAIN,
    "harness resume --store s3://bucket/prefix --run gpt-small -- python train.py --lr 3e-4",
    runs_a_program=True,
)
_add(
    doctor,
    TRY,
    "harness doctor --store s3://bucket/prefix --run gpt-small --state-gb 13.4 -- python train.py",
    runs_a_program=True,
)
_add(
    rehearse,
    TRY,
    "harness rehearse --steps 40 -- python train.py --out {out}",
    runs_a_program=True,
)
_add(drill, TRY, "harness drill --run gpt-small --in 120")
_add(watch, TRY, "harness watch --explain out/")
_add(status, LOOK, "harness status --run gpt-small --json")
_add(ls, KEEP, "harness ls --run gpt-small")
_add(verify, KEEP, "harness verify --run gpt-small")
_add(export, KEEP, "harness export model.safetensors --run gpt-small --only model")
_add(rm, KEEP, "harness rm 00000002-000000001200 --run gpt-small")
app.add_typer(fleet, name="fleet", rich_help_panel=TRAIN)
app.add_typer(simulator, name="metadata-sim", rich_help_panel=TRY)


def main() -> None:
    """Run the `harness` command, and exit with its code."""
    open_missing_descriptors()
    heed_children()
    try:
        sys.exit(app(prog_name="harness", standalone_mode=False))
    except typer.Abort:
        sys.exit(ExitCode.CTRL_C)
    except TyperException as err:  # an unknown command or option, or a value of the wrong type
        if message := err.format_message().rstrip("."):  # empty if the help was shown because no command was given
            say(f"error: {message}. See harness --help")
        sys.exit(ExitCode.USAGE)
    except HarnessError as err:
        say(f"error: {err}")
        sys.exit(err.exit_code)
    except CloudError as err:
        say(f"error: {err}")
        sys.exit(ExitCode.USAGE if isinstance(err, Denied) else ExitCode.BUG)
    except Exception:  # noqa: BLE001  root of the process: a bug has its own exit code
        with contextlib.suppress(OSError):
            traceback.print_exc()
        sys.exit(ExitCode.BUG)


if __name__ == "__main__":
    main()
