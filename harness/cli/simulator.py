"""`harness metadata-sim`: an EC2 metadata service on this machine."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated

import typer

from cloud.notice import SPOT_NOTICE_S
from harness.cli.output import say
from harness.errors import ConfigError

Port = Annotated[int, typer.Option(help="Port on 127.0.0.1")]

simulator = typer.Typer(
    help="Run an EC2 metadata service on this machine, to try what a spot notice does.\n\n"
    "Example: harness metadata-sim start --port 1338 &  harness metadata-sim notice --in 20",
)


@simulator.command(epilog="Example: harness metadata-sim start --port 1338")
def start(port: Port = 1338) -> None:
    """Serve until Ctrl-C. Point the harness at it: harness run --metadata http://127.0.0.1:1338 -- ..."""
    from cloud.testing.metadata_sim import MetadataSimulator

    with contextlib.ExitStack() as stack:
        try:
            serving = stack.enter_context(MetadataSimulator(port=port))
        except (OSError, OverflowError) as err:
            raise ConfigError(f"cannot listen on port {port}: {err}") from err
        typer.echo(serving.url)
        try:
            serving.wait()
        except KeyboardInterrupt:
            say("stopped")


@simulator.command(epilog="Example: harness metadata-sim notice --in 20 --lead 120")
def notice(
    in_s: Annotated[float, typer.Option("--in", help="Seconds from now until the notice appears")] = 0.0,
    lead_s: Annotated[
        float, typer.Option("--lead", help="Seconds from the notice to the end of the instance")
    ] = SPOT_NOTICE_S,
    action: Annotated[str, typer.Option(help="terminate, stop or hibernate")] = "terminate",
    port: Port = 1338,
) -> None:
    """Send a spot interruption notice."""
    _steer(port, "notice", in_s=in_s, lead_s=lead_s, action=action)


@simulator.command(epilog="Example: harness metadata-sim rebalance")
def rebalance(port: Port = 1338) -> None:
    """Send a rebalance recommendation: a snapshot is made durable, and training continues."""
    _steer(port, "rebalance")


@simulator.command(epilog="Example: harness metadata-sim lifecycle Terminated")
def lifecycle(state: Annotated[str, typer.Argument(help="e.g. InService, Terminated")], port: Port = 1338) -> None:
    """Set the Auto Scaling group's target state."""
    _steer(port, "lifecycle", state=state)


@simulator.command(epilog="Example: harness metadata-sim withdraw")
def withdraw(port: Port = 1338) -> None:
    """Withdraw every notice."""
    _steer(port, "withdraw")


@simulator.command(epilog="Example: harness metadata-sim fault token-expiry --for 10")
def fault(
    kind: Annotated[str, typer.Argument(help="token-expiry, hang, 5xx, xhtml, slow, unauthorized, ...")],
    for_s: Annotated[float, typer.Option("--for", help="Seconds that the fault lasts")] = 10.0,
    port: Port = 1338,
) -> None:
    """Make the simulator misbehave for a while."""
    _steer(port, "fault", kind=kind, for_s=for_s)


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
