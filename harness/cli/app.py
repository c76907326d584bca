"""The command line: run · resume · doctor · status · drill · ls · verify · export · rm · metadata-sim.

Owns words on the screen and exit codes; every command parses, calls, prints. Human text goes to stderr, data to stdout,
`--json` is for machines. Errors say what, where and what to do, without a traceback.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import TyperException

from cloud.errors import CloudError, Denied
from harness.agent.log import open_missing_descriptors
from harness.config.settings import Settings, check_alone, here, resolve
from harness.core.words import printable
from harness.errors import ConfigError, ExitCode, HarnessError

if TYPE_CHECKING:
    from rich.text import Text

app = typer.Typer(
    name="harness",
    help="Training on spot instances that loses nothing but the seconds it takes to move to the next machine.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
simulator = typer.Typer(
    help="An EC2 metadata service on this machine, to try what a spot notice does.\n\n"
    "Example: harness metadata-sim start --port 1338 &  harness metadata-sim notice --in 20",
)
app.add_typer(simulator, name="metadata-sim")

Store = Annotated[
    str | None, typer.Option(help="Durable store: a directory, or s3://bucket/prefix. Default: ./.harness")
]
Run = Annotated[
    str | None,
    typer.Option(help="The run's name. Default: the script's name; to look at one, the only run of the store"),
]
Local = Annotated[str | None, typer.Option(help="Directory of the local tier. Default: none for a directory store")]
S3Endpoint = Annotated[str | None, typer.Option(help="URL of an S3-compatible store. Default: AWS")]
S3Sse = Annotated[str | None, typer.Option(help="Encryption of every object: AES256 or aws:kms")]
S3KmsKeyId = Annotated[str | None, typer.Option(help="The key for --s3-sse aws:kms")]
EveryS = Annotated[float | None, typer.Option(help="Seconds between snapshots")]
DurableEveryS = Annotated[float | None, typer.Option(help="Seconds between snapshots in the store, with a local tier")]
EverySteps = Annotated[int | None, typer.Option(help="A snapshot at each multiple of this step too")]
KeepLast = Annotated[int | None, typer.Option(help="Snapshots to keep in the store")]
KeepEvery = Annotated[int | None, typer.Option(help="Keep snapshots of each multiple of this step for good")]
KeepLocal = Annotated[int | None, typer.Option(help="Snapshots to keep in the local tier")]
Slots = Annotated[int | None, typer.Option(help="Images of the state in memory. Default: 2, 1 below 32 GB")]
GraceS = Annotated[float | None, typer.Option(help="Seconds that a SIGTERM leaves us")]
DrainFile = Annotated[str | None, typer.Option(help="A file whose appearance is a notice")]
MaxCrashes = Annotated[int | None, typer.Option(help="Crashes without progress before giving up")]
HandoverS = Annotated[
    float | None, typer.Option(help="Seconds of silence after which an older start of this run counts as dead")
]
UploadBytesS = Annotated[
    float | None, typer.Option(help="Bytes a second to the store while training; no limit after a notice")
]
Metadata = Annotated[str | None, typer.Option(help='Base URL of the instance metadata service, or "off"')]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start at step 0 although the run has snapshots")]
Continue = Annotated[bool, typer.Option("--continue", help="Go on with a run that its program stopped early")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout")]
Port = Annotated[int, typer.Option(help="Port on 127.0.0.1")]

_SILENCE_S = 2.0
_IN_A_PIPE = 10_000


@app.command(
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
    epilog="Example: harness run --store /mnt/checkpoints --run gpt-small -- python train.py --lr 3e-4",
)
def run(
    context: typer.Context,
    store: Store = None,
    run: Run = None,
    local: Local = None,
    every_s: EveryS = None,
    durable_every_s: DurableEveryS = None,
    every_steps: EverySteps = None,
    keep_last: KeepLast = None,
    keep_every: KeepEvery = None,
    keep_local: KeepLocal = None,
    slots: Slots = None,
    grace_s: GraceS = None,
    drain_file: DrainFile = None,
    max_crashes: MaxCrashes = None,
    handover_s: HandoverS = None,
    upload_bytes_s: UploadBytesS = None,
    s3_endpoint: S3Endpoint = None,
    s3_sse: S3Sse = None,
    s3_kms_key_id: S3KmsKeyId = None,
    metadata: Metadata = None,
    fresh: Fresh = False,
    continue_: Continue = False,
) -> None:
    """Run a training script; start it or resume it, whichever it is.

    Exit codes: 0 finished, 75 interrupted and durable (run me again), 74 interrupted and only local, 73 superseded,
    70 bug, 64 usage, 130 Ctrl-C; otherwise the script's own.
    """
    from harness.agent.trainers.child import Program, check_command, script_of

    command = tuple(context.args)
    check_command(command)
    check_alone(os.environ)
    flags = context.params | {"fresh": fresh or None, "continue_": continue_ or None}
    settings = resolve(flags, os.environ, here(), script=script_of(command))
    _say_settings(settings)
    from harness.agent.main import Agent

    raise typer.Exit(Agent(settings, Program(command, os.environ)).run())


@app.command(
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
    epilog="Example: harness resume --store s3://bucket/prefix --run gpt-small -- python train.py --lr 3e-4",
)
def resume(
    context: typer.Context,
    store: Store = None,
    run: Run = None,
    local: Local = None,
    every_s: EveryS = None,
    durable_every_s: DurableEveryS = None,
    every_steps: EverySteps = None,
    keep_last: KeepLast = None,
    keep_every: KeepEvery = None,
    keep_local: KeepLocal = None,
    slots: Slots = None,
    grace_s: GraceS = None,
    drain_file: DrainFile = None,
    max_crashes: MaxCrashes = None,
    handover_s: HandoverS = None,
    upload_bytes_s: UploadBytesS = None,
    s3_endpoint: S3Endpoint = None,
    s3_sse: S3Sse = None,
    s3_kms_key_id: S3KmsKeyId = None,
    metadata: Metadata = None,
    fresh: Fresh = False,
    continue_: Continue = False,
    line: Annotated[
        str | None, typer.Option("--command", help="The program as one line, instead of what is behind --")
    ] = None,
    self_test: Annotated[
        str | None,
        typer.Option(
            help='To succeed before the first start; "" for none. Default: nvidia-smi -L where there is a GPU'
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be resumed and run, and change nothing")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: one JSON document on stdout")] = False,
) -> None:
    """`harness run` as often as it takes: on a spot instance of a fleet, in a Slurm or Kubernetes job, on a laptop.

    Settings and program come from options, then the environment (HARNESS_RUN, HARNESS_STORE, HARNESS_COMMAND, …), then
    the instance's tags (harness-run, harness-store, harness-command).

    Exits with the last `harness run`'s code; in a fleet, after doing what follows from it.
    """
    from harness.node import main as node

    own = ("line", "self_test", "dry_run", "as_json")
    flags = {name: value for name, value in context.params.items() if name not in own}
    flags |= {"fresh": fresh or None, "continue_": continue_ or None}
    if dry_run:
        with _patience(store):
            found = node.dry_run(flags, context.args, line, os.environ, here())
        _print_json(found.to_json()) if as_json else _print_lines(found.lines())
        raise typer.Exit(found.code)
    if as_json:
        raise ConfigError("--json goes with --dry-run")
    raise typer.Exit(node.resume(flags, context.args, line, self_test, os.environ, here()))


@app.command(
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
    epilog="Example: harness doctor --store s3://bucket/prefix --run gpt-small --state-gb 13.4 -- python train.py",
)
def doctor(
    context: typer.Context,
    store: Store = None,
    run: Run = None,
    local: Local = None,
    every_s: EveryS = None,
    durable_every_s: DurableEveryS = None,
    every_steps: EverySteps = None,
    keep_last: KeepLast = None,
    keep_every: KeepEvery = None,
    keep_local: KeepLocal = None,
    slots: Slots = None,
    grace_s: GraceS = None,
    drain_file: DrainFile = None,
    max_crashes: MaxCrashes = None,
    handover_s: HandoverS = None,
    upload_bytes_s: UploadBytesS = None,
    s3_endpoint: S3Endpoint = None,
    s3_sse: S3Sse = None,
    s3_kms_key_id: S3KmsKeyId = None,
    metadata: Metadata = None,
    state_gb: Annotated[
        float | None, typer.Option(help="Size of weights and optimizer. Default: that of the run's newest snapshot")
    ] = None,
    as_json: Json = False,
) -> None:
    """Try everything that a run needs here, before it costs a night. Starts nothing, leaves nothing behind.

    Takes the options of `harness run`: put "doctor" where "run" stood.

    One line each: ok, warning, or FAIL with the remedy. Exits 64 if anything failed; warnings are allowed.
    """
    from harness.agent.trainers.child import script_of
    from harness.inspect.doctor.checks import Examination
    from harness.inspect.doctor.finding import all_well
    from harness.inspect.doctor.host import Host

    if state_gb is not None and not state_gb > 0:
        raise ConfigError(f"--state-gb must be more than 0, not {state_gb:g}")
    command = tuple(context.args)
    script = (script_of(command) if command else None) or "doctor"
    flags = {name: value for name, value in context.params.items() if name not in ("state_gb", "as_json")}
    settings = resolve(flags, os.environ, here(), script=script)
    _say_settings(settings)
    size = None if state_gb is None else int(state_gb * 1e9)
    findings = []
    for finding in Examination(settings, Host(os.environ), command=command, state_bytes=size).findings():
        findings.append(finding)
        if not as_json:
            _print_lines(finding.lines())
    if as_json:
        _print_json([finding.to_json() for finding in findings])
    if not all_well(findings):
        raise typer.Exit(ExitCode.USAGE)


@app.command(epilog="Example: harness status --run gpt-small --json")
def status(store: Store = None, run: Run = None, s3_endpoint: S3Endpoint = None, as_json: Json = False) -> None:
    """What a run is doing now, or how it ended: step, local step, durable step, bytes pending."""
    from harness.core import events
    from harness.inspect import report
    from harness.node.platform import describe_fleet, fleet_words

    with _patience(store):
        settings = _settings(store, run, None, s3_endpoint)
        found = report.status(settings)
        fleet = describe_fleet(settings.metadata, os.environ)
    if as_json:
        _print_json(found | {"fleet": fleet})
    else:
        restart = events.Restarted(**found["restart"]).words() if found.get("restart") else None
        _print_fields(found | {"restart": restart, "fleet": fleet_words(fleet)})


@app.command(epilog="Example: harness drill --run gpt-small --in 120")
def drill(
    store: Store = None,
    run: Run = None,
    in_s: Annotated[float, typer.Option("--in", help="Seconds that the notice leaves")] = 120.0,
    end: Annotated[bool, typer.Option("--end", help="Leave in earnest: the run ends with 75 and can go on")] = False,
    s3_endpoint: S3Endpoint = None,
    as_json: Json = False,
) -> None:
    """Send the run that trains here a notice that is none: how long until its last step is durable? Training goes on.

    Exits 74 if the last step was not durable in time.
    """
    from harness.ipc import client

    if not 0 < in_s < 86_400:
        raise ConfigError(f"--in must be more than 0 and less than a day, not {in_s:g}")
    drilled, words = client.drill(_settings(store, run, None, s3_endpoint), in_s, end=end, on_plan=_say)
    _print_json(drilled.fields()) if as_json else _say(words)
    if drilled.durable_in_s is None:
        raise typer.Exit(ExitCode.INTERRUPTED_LOCAL)


@app.command(name="ls", epilog="Example: harness ls --run gpt-small")
def list_(
    store: Store = None,
    run: Run = None,
    local: Local = None,
    s3_endpoint: S3Endpoint = None,
    as_json: Json = False,
) -> None:
    """Snapshots in each tier, and why one is not usable. Without --run, the runs of the store."""
    from harness.inspect import report

    if run is None and "HARNESS_RUN" not in os.environ:
        with _patience(store):
            runs = report.runs(_settings(store, "_", local, s3_endpoint))
        _print_json(runs) if as_json else _print_table([{"run": name} for name in runs])
        return
    with _patience(store):
        rows = report.snapshots(_settings(store, run, local, s3_endpoint))
    if as_json:
        _print_json(rows)
    else:
        _print_table([row | {"sealed_at": _to_the_second(row["sealed_at"])} for row in rows])


@app.command(epilog="Example: harness verify --run gpt-small")
def verify(
    store: Store = None,
    run: Run = None,
    local: Local = None,
    lift: Annotated[
        bool, typer.Option("--lift", help="Read what is quarantined too, and use again what is what was committed")
    ] = False,
    s3_endpoint: S3Endpoint = None,
    as_json: Json = False,
) -> None:
    """Read every snapshot of a run again and compare each byte with what was committed. Exits 70 if one differs."""
    from harness.inspect import report

    with _patience(store):
        rows = report.verify(_settings(store, run, local, s3_endpoint), lift=lift)
    _print_json(rows) if as_json else _print_table(rows)
    if any(row["verdict"] != "ok" for row in rows):
        raise typer.Exit(ExitCode.BUG)


@app.command(epilog="Example: harness export model.safetensors --run gpt-small --only model")
def export(
    file: Annotated[Path, typer.Argument(help="To be made: a name with .safetensors")],
    store: Store = None,
    run: Run = None,
    local: Local = None,
    snapshot: Annotated[str | None, typer.Option(help="Which, as `harness ls` shows it. Default: the newest")] = None,
    step: Annotated[int | None, typer.Option(help="Which, by its step")] = None,
    only: Annotated[str | None, typer.Option(help="One state, e.g. model: its tensors under their plain names")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there")] = False,
    s3_endpoint: S3Endpoint = None,
    as_json: Json = False,
) -> None:
    """Write a snapshot, or one state of it, to a safetensors file, for any script. Exits 70 if a byte differs."""
    from harness.inspect.export import export as export_

    with _patience(store) as waiting:

        def say(text: str) -> None:
            waiting.cancel()  # that is a word already
            _say(text)

        settings = _settings(store, run, local, s3_endpoint)
        made = export_(settings, file, say, snapshot=snapshot, step=step, only=only, force=force)
    _say(
        f"wrote {made['file']}: {made['tensors']} tensors, {made['bytes']} bytes, step {made['step']} of {settings.run}"
    )
    if as_json:
        _print_json(made)


@app.command(epilog="Example: harness rm 00000002-000000001200 --run gpt-small")
def rm(
    snapshot: Annotated[str, typer.Argument(help="A snapshot, as `harness ls` shows it; or ALL for the whole run")],
    store: Store = None,
    run: Run = None,
    local: Local = None,
    s3_endpoint: S3Endpoint = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
) -> None:
    """Delete a snapshot from every tier, or a whole run with everything that is known of it."""
    from harness.inspect import report

    settings = _settings(store, run, local, s3_endpoint)
    if not yes and not typer.confirm(f"delete {snapshot} of run {settings.run!r} from {settings.store}?", err=True):
        raise typer.Exit(1)
    for line in report.remove(settings, snapshot):
        _say(line)


@simulator.command(epilog="Example: harness metadata-sim start --port 1338")
def start(port: Port = 1338) -> None:
    """Serve until Ctrl-C. Point the harness at it: harness run --metadata http://127.0.0.1:1338 -- ..."""
    from cloud.testing.metadata_sim import MetadataSimulator

    with contextlib.ExitStack() as stack:
        try:
            serving = stack.enter_context(MetadataSimulator(port=port))
        except (OSError, OverflowError) as err:
            raise ConfigError(f"port {port} cannot be listened on: {err}") from err
        typer.echo(serving.url)
        try:
            serving.wait()
        except KeyboardInterrupt:
            _say("stopped")


@simulator.command(epilog="Example: harness metadata-sim notice --in 20 --lead 120")
def notice(
    in_s: Annotated[float, typer.Option("--in", help="Seconds from now until the notice appears")] = 0.0,
    lead_s: Annotated[float, typer.Option("--lead", help="Seconds from the notice to the end of the instance")] = 120.0,
    action: Annotated[str, typer.Option(help="terminate, stop or hibernate")] = "terminate",
    port: Port = 1338,
) -> None:
    """A spot interruption notice."""
    _steer(port, "notice", in_s=in_s, lead_s=lead_s, action=action)


@simulator.command(epilog="Example: harness metadata-sim rebalance")
def rebalance(port: Port = 1338) -> None:
    """A rebalance recommendation: make a snapshot durable and go on."""
    _steer(port, "rebalance")


@simulator.command(epilog="Example: harness metadata-sim lifecycle Terminated")
def lifecycle(state: Annotated[str, typer.Argument(help="e.g. InService, Terminated")], port: Port = 1338) -> None:
    """The Auto Scaling group's target state."""
    _steer(port, "lifecycle", state=state)


@simulator.command(epilog="Example: harness metadata-sim withdraw")
def withdraw(port: Port = 1338) -> None:
    """Take every notice back."""
    _steer(port, "withdraw")


@simulator.command(epilog="Example: harness metadata-sim fault token-expiry --for 10")
def fault(
    kind: Annotated[str, typer.Argument(help="token-expiry, hang, 5xx, xhtml, slow, unauthorized, ...")],
    for_s: Annotated[float, typer.Option("--for", help="Seconds")] = 10.0,
    port: Port = 1338,
) -> None:
    """Misbehave for a while."""
    _steer(port, "fault", kind=kind, for_s=for_s)


def main() -> None:
    """The `harness` command."""
    open_missing_descriptors()
    try:
        sys.exit(app(standalone_mode=False))
    except typer.Abort:
        sys.exit(ExitCode.CTRL_C)
    except TyperException as err:  # a word that there is not, a number that is none
        _say(f"error: {err.format_message().rstrip('.')}. See harness --help")
        sys.exit(ExitCode.USAGE)
    except HarnessError as err:
        _say(f"error: {err}")
        sys.exit(err.exit_code)
    except CloudError as err:
        _say(f"error: {err}")
        sys.exit(ExitCode.USAGE if isinstance(err, Denied) else ExitCode.BUG)
    except Exception:  # noqa: BLE001  the process's root: a bug has an exit code of its own
        with contextlib.suppress(OSError):
            traceback.print_exc()
        sys.exit(ExitCode.BUG)


def _settings(store: str | None, run: str | None, local: str | None, s3_endpoint: str | None) -> Settings:
    """The settings of a run to look at; where the store holds a single one, it needs no name."""
    flags = {"store": store, "local": local, "s3_endpoint": s3_endpoint}
    if run is None and "HARNESS_RUN" not in os.environ:
        from harness.inspect import report

        try:
            names = report.runs(resolve({**flags, "run": "_"}, os.environ, here(), script=None))
        except Denied as err:  # a role may list below its own run only
            raise ConfigError(f"name a run with --run; which ones the store holds cannot be seen: {err}") from err
        if len(names) != 1:
            raise ConfigError(f"name a run with --run; the store holds {', '.join(names) or 'none'}")
        run = names[0]
    return resolve({**flags, "run": run}, os.environ, here(), script=None)


def _steer(port: int, verb: str, **fields: object) -> None:
    from cloud.testing.metadata_sim import steer

    try:
        typer.echo(json.dumps(steer(f"http://127.0.0.1:{port}", verb, **fields)))
    except ValueError as err:
        raise ConfigError(str(err)) from err
    except OSError as err:
        raise ConfigError(
            f"no simulator answers on port {port}: {err}. Start one: harness metadata-sim start --port {port}"
        ) from err


def _say_settings(settings: Settings) -> None:
    local = f", local tier {settings.local}" if settings.local else ""
    _say(f"run {settings.run!r}, store {settings.store}{local}, a snapshot every {settings.every_s:g} s")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it, or the disk that it goes to is full
        os.write(2, f"harness: {printable(text)}\n".encode(errors="backslashreplace"))


@contextlib.contextmanager
def _patience(store: str | None) -> Generator[threading.Timer]:
    """A word to whoever waits, once: a store that does not answer is asked for a while, and large ones are slow."""
    waiting = threading.Timer(_SILENCE_S, _say, [f"still at work on {store or 'the store'} …"])
    waiting.daemon = True
    waiting.start()
    try:
        yield waiting
    finally:
        waiting.cancel()


@contextlib.contextmanager
def _output() -> Generator[None]:
    """Around what is written to stdout. Raises ConfigError: it takes nothing (a full disk)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read it has enough
    except OSError as err:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python tries once more when it ends
        raise ConfigError(f"the output could not be written: {err.strerror}") from err


def _print_lines(lines: Iterable[str]) -> None:
    with _output():
        typer.echo("\n".join(map(printable, lines)))


def _print_json(value: object) -> None:
    with _output():
        typer.echo(json.dumps(value, indent=2))


def _print_fields(fields: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, value in fields.items():
        table.add_row(name.replace("_", " "), _cell(value))
    with _output():
        Console().print(table)


def _cell(value: object) -> Text:
    """As it is, whoever wrote it: no escape of a terminal's, no markup of rich's."""
    from rich.text import Text

    return Text("-" if value is None else printable(str(value)))


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not rows:
        _say("nothing there")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    *_, prose = rows[0]
    for name in rows[0]:
        table.add_column(name.replace("_", " "), overflow="fold", no_wrap=name != prose)
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    console = Console()
    # Only the last column, which is prose, is folded, and that not in a pipe: what is there is searched by lines.
    unfolded = console.options.update(max_width=_IN_A_PIPE)
    narrowest = console.measure(table, options=unfolded).minimum
    console.width = max(console.width, narrowest) if console.is_terminal else _IN_A_PIPE
    with _output():
        console.print(table)


def _to_the_second(at: str | None) -> str | None:
    """A snapshot's time, short enough for a table in a terminal."""
    return at if at is None or not at.endswith("+00:00") else f"{at[:10]} {at[11:19]}Z"


if __name__ == "__main__":
    main()
