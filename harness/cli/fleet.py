"""`harness fleet …`: a run on a spot fleet of AWS's, from any machine. A thin command over Terraform and AWS's calls.

Owns options, prompts and words; `harness.fleet` does the work.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import Json
from harness.cli.output import print_fields, print_json, print_lines, say
from harness.errors import ConfigError, ExitCode
from harness.fleet.vendor import Image, PackError

if TYPE_CHECKING:
    from cloud.aws.console import Console
    from harness.fleet.fleet import Fleet, Planned

fleet = typer.Typer(
    name="fleet",
    help="Train on a spot fleet of AWS's: make it, watch it, stop it.",
    epilog="Example: harness fleet up gpt-small --source . --email me@example.com -- python train.py",
    no_args_is_help=True,
)

Run = Annotated[str, typer.Argument(help="Name of the run")]
Region = Annotated[str | None, typer.Option("--region", help="AWS region; else AWS_REGION, or the profile's")]
Bucket = Annotated[str | None, typer.Option("--bucket", help="The run's bucket, if it is not found by itself")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask")]

_POLL_S = 3.0
_DRILL_S = 600.0


@contextlib.contextmanager
def _opened(run: str, region: str | None, bucket: str | None) -> Generator[tuple[Fleet, Console]]:
    from cloud.aws.console import Console
    from harness.fleet.fleet import Fleet, choose_region
    from harness.fleet.home import find

    console = Console(choose_region(region))
    try:
        yield Fleet(find(run, console.region, bucket, console), console, say), console
    finally:
        console.close()


@fleet.command(
    epilog="Example: harness fleet up gpt-small --source . --email me@example.com -- python train.py",
    context_settings={"allow_extra_args": True, "allow_interspersed_args": True},
    options_metavar="[OPTIONS]",
)
def up(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN [-- PROGRAM ...]", help="Name of the run, and the program")],
    source: Annotated[
        str | None,
        typer.Option("--source", help="The code: a folder, an archive, s3://bucket/key, or git+https://host/repo@ref"),
    ] = None,
    vendor: Annotated[
        bool, typer.Option("--vendor", help="Pack the wheels of all packages with a folder; see scripts/pack --help")
    ] = False,
    image_python: Annotated[
        str, typer.Option("--image-python", metavar="X.Y", help="With --vendor: the image's Python")
    ] = Image.python,
    image_torch: Annotated[
        str, typer.Option("--image-torch", metavar="X.Y.Z", help="With --vendor: the image's torch")
    ] = Image.torch,
    email: Annotated[str | None, typer.Option("--email", help="Address that gets a mail when the fleet stops")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any variable of the module; may be repeated"),
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", metavar="NAME", help="Leave a variable to its default again")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Variables from a JSON file")] = None,
    region: Region = None,
    bucket: Bucket = None,
    yes: Yes = False,
) -> None:
    """Make the fleet of a run, or change it; start it again after a stop.

    What is given once is remembered, in the run's bucket: `harness fleet up RUN` alone goes on. The price and the plan
    are shown before anything is bought.
    """
    from harness.fleet.definition import Definition, Variables
    from harness.fleet.terraform import find_module

    variables = Variables(find_module()[0] / "aws")
    given: dict[str, Any] = dict(Definition.from_json(_read(file), str(file)).values) if file is not None else {}
    variables.check(given)
    given |= variables.parse(assignments or [])
    variables.check(unset or [])
    if context.args and "--" not in sys.argv:
        raise ConfigError(f"what is {shlex.join(context.args)}? The program comes after --")
    given |= {"command": shlex.join(context.args)} if context.args else {}
    given |= {"notify_email": email} if email else {}
    given |= {"bucket": bucket} if bucket else {}
    code = _code(source)
    given |= {"source_archive": source} if source and code is None else {}

    def agrees(planned: Planned) -> bool:
        print_fields(dict(_plan_in_words(planned)))
        if yes:
            return True
        if not sys.stdin.isatty():
            raise ConfigError("nothing was made: without a terminal that can be asked, --yes is needed")
        return typer.confirm("Go on?", err=True)

    try:
        image = Image.checked(image_python, image_torch) if vendor else None
    except PackError as err:
        raise ConfigError(str(err)) from err
    with _opened(run, region, bucket) as (found, _):
        if not found.up(given, unset or [], code, agrees, image):
            say("nothing was made")
            raise typer.Exit(ExitCode.CTRL_C)
        where = f"--region {found.home.region}"
        say(f"watch it: harness fleet status {run} {where}; harness fleet logs {run} {where}")


@fleet.command(epilog="Example: harness fleet status gpt-small")
def status(
    run: Annotated[str | None, typer.Argument(help="Name of the run; without it: all fleets of the region")] = None,
    region: Region = None,
    bucket: Bucket = None,
    as_json: Json = False,
) -> None:
    """Show what a fleet does now, how its run is, and what it has cost."""
    from harness.fleet.screen import fleets, screen, to_json

    if run is None:
        from cloud.aws.console import Console
        from cloud.notice import Deadline
        from harness.cli.output import print_table
        from harness.fleet.fleet import choose_region
        from harness.fleet.home import CALL_S

        rows = fleets(Console(choose_region(region)).groups(Deadline.after(CALL_S)))
        print_json(rows) if as_json else print_table(rows)
        return
    with _opened(run, region, bucket) as (found, _):
        looked = found.look()
        progress = _progress(found)
        print_json(to_json(looked, progress)) if as_json else print_fields(dict(screen(looked, progress)))


@fleet.command(epilog="Example: harness fleet logs gpt-small --since 600")
def logs(
    run: Run,
    since_s: Annotated[float, typer.Option("--since", help="Begin so many seconds ago")] = 900.0,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Go on with what comes")] = True,
    region: Region = None,
) -> None:
    """Show the output of the program, of whichever instance has the run."""
    from cloud.notice import Deadline
    from harness.fleet.home import CALL_S
    from harness.fleet.logs import Tail

    with _opened(run, region, None) as (found, console):
        tail = Tail(int((time.time() - since_s) * 1000))
        while True:
            print_some = tail.new(console.log_lines(found.log_group, tail.since_ms, Deadline.after(CALL_S)))
            if print_some:
                print_lines(print_some)
            if not follow:
                return
            time.sleep(_POLL_S)


@fleet.command(epilog="Example: harness fleet ssh gpt-small")
def ssh(run: Run, region: Region = None) -> None:
    """Open a shell on the instance that has the run, by Session Manager: no key, no open port."""
    from harness.fleet.fleet import shell_command

    with _opened(run, region, None) as (found, _):
        command = shell_command(found.serving(), found.home.region)
    say(f"$ {shlex.join(command)}")
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        raise ConfigError(
            "there is no AWS CLI here. It, and its Session Manager plugin, open the shell:"
            " https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"
        ) from None


@fleet.command(epilog="Example: harness fleet drill gpt-small")
def drill(
    run: Run,
    real: Annotated[
        bool, typer.Option("--real", help="Have AWS interrupt the instance (needs enable_drill=true)")
    ] = False,
    region: Region = None,
) -> None:
    """Simulate an interruption on the instance that has the run, and measure it: training goes on.

    With --real, AWS takes the instance away within two minutes, and the run goes on on another one.
    """
    from cloud.notice import Deadline
    from harness.fleet.home import CALL_S

    with _opened(run, region, None) as (found, console):
        if real:
            template = found.drill_template()
            say(
                f"experiment {console.experiment(template, Deadline.after(CALL_S))} has begun: harness fleet logs {run}"
            )
            return
        instance = found.serving()
        say(f"on {instance}: harness drill")
        ran = console.run_on(instance, "/usr/local/bin/harness drill 2>&1", Deadline.after(_DRILL_S))
    print_lines((ran.output + ran.errors).splitlines())
    if ran.code:
        raise typer.Exit(ran.code if ran.code > 0 else ExitCode.BUG)


@fleet.command(epilog="Example: harness fleet stop gpt-small")
def stop(run: Run, region: Region = None) -> None:
    """Stop training and stop paying for instances; keep everything else. `harness fleet up RUN` goes on.

    Its call: aws autoscaling set-desired-capacity --auto-scaling-group-name harness-RUN --desired-capacity 0
    """
    with _opened(run, region, None) as (found, _):
        found.stop()
        say(
            f"{found.home.name} wants no instances any more. They have two minutes, as at a spot notice, to make the"
            " newest step durable that fits; then they end"
        )


@fleet.command(epilog="Example: harness fleet down gpt-small")
def down(
    run: Run,
    delete_checkpoints: Annotated[
        bool, typer.Option("--delete-checkpoints", help="Delete the bucket, too, with everything in it")
    ] = False,
    region: Region = None,
    bucket: Bucket = None,
    yes: Yes = False,
) -> None:
    """Delete the fleet and everything of it that costs money, but for the bucket with the checkpoints."""
    with _opened(run, region, bucket) as (found, _):
        lost = f"ALL CHECKPOINTS of s3://{found.home.bucket} are deleted." if delete_checkpoints else ""
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError("nothing was ended: without a terminal that can be asked, --yes is needed")
            typer.confirm(f"{lost} End the fleet of {run} in {found.home.region}?".strip(), abort=True, err=True)
        if delete_checkpoints:
            found.down_with_checkpoints()
            say("nothing is left")
            return
        kept = found.down()
        say(f"the checkpoints stay in s3://{kept}. harness fleet up {run} goes on with them")


def _plan_in_words(planned: Planned) -> list[tuple[str, object]]:
    from harness.fleet.screen import plan_in_words

    return plan_in_words(planned)


def _progress(found: Fleet) -> dict[str, Any] | None:
    """Return how the run is, by its store; `None` if it has nothing yet."""
    from harness.cli.options import settings_of
    from harness.inspect.status import status as status_of

    if found.home.bucket is None:
        return None
    try:
        return status_of(settings_of({"store": found.store, "run": found.home.run, "s3_endpoint": None}))
    except ConfigError:
        return None


def _code(source: str | None) -> Path | None:
    """Return the folder or the archive on this machine; `None` if the code is elsewhere."""
    if source is None or source.startswith(("s3://", "git+")):
        return None
    path = Path(source).expanduser()
    if not path.exists():
        raise ConfigError(f"--source {source}: there is no such folder or archive")
    return path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise ConfigError(f"--file {path}: {err.strerror}") from err
