"""A training survives its spot instance: shown on this machine, without a cloud, and compared bit by bit.

    ./scripts/demo             # makes its own environment first
    python examples/demo.py    # where harness[examples] is installed

`gpt.py` is trained three times under `harness run`, with the default store (./.harness) of one directory:

    unbroken   nothing happens to it; the others are compared with it
    noticed    an EC2 metadata simulator announces a spot interruption; the run saves and exits with code 75
    killed     SIGKILL to trainer, agent and data workers at once, without any notice

After an interruption the demo deletes the local tier, as if the instance had been terminated, and runs the same command
again. At the end final weights, optimizer state and every step's loss have to be equal, bit by bit. All figures of the
table are measured: they come from the runs' journals in the store.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text
from safetensors.numpy import load_file

from cloud.notice import Deadline
from cloud.testing.metadata_sim import MetadataSimulator
from harness.core import events
from harness.core.snapshot import RunKeys
from harness.snapshots.journal import read_journal
from harness.snapshots.open import open_store

LEAD_S = 120.0  # EC2 announces a spot interruption two minutes ahead
LIFE_S = 300.0  # a start of the run that takes longer than this hangs
LOOK_S = 0.05
ROOM_S = 5.0  # the steps after the announcement take at least this long: the agent asks once a second


@dataclass(frozen=True)
class Size:
    """Size of the training, interval of its snapshots, and time of the interruption.

    Attributes:
        every_s: seconds between snapshots, both in the local tier and in the store.
        interrupt_at: share of the steps after which the instance is interrupted.
    """

    epochs: int
    steps_per_epoch: int
    width: int
    layers: int
    every_s: float
    interrupt_at: float

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch


FULL = Size(epochs=4, steps_per_epoch=50, width=128, layers=2, every_s=3.0, interrupt_at=0.4)
QUICK = Size(epochs=2, steps_per_epoch=100, width=64, layers=1, every_s=0.5, interrupt_at=0.2)


class DemoFailed(Exception):
    """The demo did not go as expected. The message says why."""


@dataclass(frozen=True)
class Run:
    """A run, and the one command that both starts and resumes it."""

    name: str
    directory: Path
    command: list[str]

    @property
    def curve(self) -> Path:
        """File with a line 'step loss learning-rate' for every step; a repeated step has a line each time."""
        return self.directory / f"{self.name}.curve"

    @property
    def final(self) -> Path:
        """File with the final weights and optimizer state."""
        return self.directory / f"{self.name}.safetensors"

    def losses(self) -> dict[int, str]:
        """Return the line of each step; the last one if a resumed run had to repeat a step."""
        lines = self.curve.read_text().splitlines() if self.curve.exists() else []
        return {int(line.partition(" ")[0]): line for line in lines}

    def last_step(self) -> int:
        """Return the newest step that the trainer has completed; 0 if there is none."""
        return max(self.losses(), default=0)


@dataclass(frozen=True)
class Life:
    """One start of a run's command, until the last of its processes has exited."""

    exit_code: int
    last_step: int


@dataclass(frozen=True)
class Survival:
    """The cost of an interruption. Durations are seconds; None if there was nothing to measure.

    Attributes:
        exit_codes: exit codes of the interrupted start and of the resumed one, as a shell shows them.
        first_difference: the first difference from the unbroken run, None if there is none.
        steps_lost: steps that were trained before the interruption, and again after it.
        resumed_from: the tier that the resumed start took the snapshot from.
        stall_median_s: median time for which a snapshot stops the training loop.
        notice_seen_s: from the announcement until the agent sees it; the agent asks once a second.
        notice_to_durable_s: from when the agent sees the notice to the commit of the last step in the store.
        first_step_s: from the agent's start to the end of the first resumed step.
        until_connected_s: the part of `first_step_s` until the Checkpointer connects: Python, torch, data, the model.
        restore_s: the part of `first_step_s` from then until the state is restored.
        sealed: snapshots taken, according to the journal, whose last lines a killed agent could not write.
        durable: snapshots that were committed in the store.
    """

    exit_codes: tuple[int, ...]
    first_difference: str | None
    steps_lost: int
    resumed_step: int
    resumed_from: str
    stall_median_s: float
    stall_max_s: float
    notice_seen_s: float | None
    notice_to_durable_s: float | None
    first_step_s: float
    until_connected_s: float
    restore_s: float
    snapshot_bytes: int
    sealed: int
    durable: int


class Demo:
    """The three runs, in a directory of their own."""

    def __init__(self, directory: Path, size: Size, console: Console):
        self.directory, self.size, self.console = directory, size, console
        self.store = open_store(str(directory / ".harness"))
        self.interrupt_step = int(size.steps * size.interrupt_at)
        self.pause_s = 0.0
        (directory / "tmp").mkdir()

    def run(self) -> dict[str, Survival]:
        """Run all three. Return the results of the two interrupted ones, by name."""
        unbroken = self.unbroken()
        return {"noticed": self.noticed(unbroken), "killed": self.killed(unbroken)}

    def unbroken(self) -> Run:
        self.title("1/3 unbroken: nothing happens to it; the others are compared with it")
        run = self.command("unbroken", metadata="off")
        self.expect(0, self.live(run))
        if sorted(run.losses()) != list(range(1, self.size.steps + 1)):
            raise DemoFailed(f"{run.curve} does not hold each of the {self.size.steps} steps")
        self.pause_s = self.pause_for(run)
        return run

    def pause_for(self, unbroken: Run) -> float:
        """Return the pause between steps of the other runs, in seconds: above 0 only on a very fast machine.

        On such a machine, a run would otherwise end before the agent sees the notice.
        """
        lines = list(read_journal(self.store, RunKeys(unbroken.name)))
        (began_at, _), (ended_at, _) = told(lines, events.FirstStep)[0], told(lines, events.TrainerFinished)[0]
        step_s = (ended_at - began_at) / self.size.steps
        return max(0.0, round(ROOM_S / (self.size.steps - self.interrupt_step) - step_s, 3))

    def noticed(self, unbroken: Run) -> Survival:
        self.title("2/3 noticed: EC2 announces a spot interruption in the middle")
        with MetadataSimulator() as simulator:
            run, announced_at = self.command("noticed", metadata=simulator.url), []

            def announce(_pid: int) -> None:
                announced_at.append(time.monotonic())  # the journal uses the same clock
                self.say(
                    f"step {run.last_step()}: the metadata service announces the end of the instance in {LEAD_S:g} s"
                )
                simulator.notice(lead_s=LEAD_S)

            first = self.expect(75, self.live(run, lambda: run.last_step() >= self.interrupt_step, announce))
            self.lose_instance()
            simulator.withdraw()  # the next instance's metadata service announces nothing
            second = self.expect(0, self.live(run))
        return self.survival(run, first, second, unbroken, *announced_at)

    def killed(self, unbroken: Run) -> Survival:
        self.title("3/3 killed: SIGKILL in the middle, to trainer, agent and data workers, without any notice")
        run = self.command("killed", metadata="off")

        def is_time() -> bool:
            return run.last_step() >= self.interrupt_step and self.has_durable(run)

        def kill(pid: int) -> None:
            self.say(f"step {run.last_step()}: SIGKILL to all of it")
            os.killpg(pid, signal.SIGKILL)

        first = self.expect(128 + signal.SIGKILL, self.live(run, is_time, kill))
        self.lose_instance()
        second = self.expect(0, self.live(run))
        return self.survival(run, first, second, unbroken)

    # ---- a run and its starts ---------------------------------------------------------------------------------------

    def command(self, name: str, *, metadata: str) -> Run:
        size = self.size
        harness = ["run", "--run", name, "--local", "instance-disk", "--metadata", metadata]
        harness += ["--every-s", f"{size.every_s:g}", "--durable-every-s", f"{size.every_s:g}"]
        train = [str(Path(__file__).resolve().with_name("gpt.py"))]
        train += ["--epochs", str(size.epochs), "--steps-per-epoch", str(size.steps_per_epoch)]
        train += ["--width", str(size.width), "--layers", str(size.layers)]
        train += ["--curve", f"{name}.curve", "--final", f"{name}.safetensors"]
        train += ["--pause-s", f"{self.pause_s:g}"] if self.pause_s else []
        self.console.print(Text(f"$ {shlex.join(['harness', *harness, '--', 'python', *train])}"), soft_wrap=True)
        return Run(name, self.directory, [sys.executable, "-m", "harness", *harness, "--", sys.executable, *train])

    def live(
        self, run: Run, is_time: Callable[[], bool] = lambda: False, strike: Callable[[int], None] | None = None
    ) -> Life:
        """Start the run and show its output. Call `strike` once when `is_time`. Return after its last process exits."""
        give_up_at = time.monotonic() + LIFE_S
        process = subprocess.Popen(
            run.command,
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.directory,
            env=self.environment(),
            start_new_session=True,  # one process group for all: it can die at once, as an instance does
        )
        assert process.stdout is not None
        try:
            for line in follow(process.stdout.fileno()):
                if line is not None:
                    self.show(run, line)
                elif strike is not None and is_time():
                    strike(process.pid)
                    strike = None
                if time.monotonic() > give_up_at:
                    raise DemoFailed(f"the run has not ended after {LIFE_S:g} s")
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for _line in follow(process.stdout.fileno()):
                pass  # wait for all writers, before the directory is removed
            raise
        finally:
            code = process.wait()
            process.stdout.close()
        life = Life(128 - code if code < 0 else code, run.last_step())
        if strike is not None:
            raise DemoFailed(f"the run ended by itself, with exit code {life.exit_code} at step {life.last_step}")
        return life

    def environment(self) -> dict[str, str]:
        """Return the caller's environment without settings that would change the runs; files go to our directory."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HARNESS", "AWS_"))}
        return {**kept, "TMPDIR": str(self.directory / "tmp"), "HARNESS_RUNTIME_DIR": str(self.directory / "run")}

    def has_durable(self, run: Run) -> bool:
        return any(self.store.list(RunKeys(run.name).commits, deadline=Deadline.after(10.0)))

    def lose_instance(self) -> None:
        """Delete the local tier, as the end of an instance does."""
        shutil.rmtree(self.directory / "instance-disk")
        self.say("the instance is gone, and its disk too: the local tier is deleted. The same command again:")

    def expect(self, code: int, life: Life) -> Life:
        if life.exit_code != code:
            raise DemoFailed(f"the run ended with exit code {life.exit_code} at step {life.last_step}, not with {code}")
        self.say(f"exit code {code} at step {life.last_step}")
        return life

    def survival(
        self, run: Run, first: Life, second: Life, unbroken: Run, announced_at: float | None = None
    ) -> Survival:
        """Compute the figures from the journals of the two starts."""
        lines = list(read_journal(self.store, RunKeys(run.name)))
        resumed = max(index for index, line in enumerate(lines) if isinstance(line.body, events.AgentStarted))
        before, after = lines[:resumed], lines[resumed:]
        if not told(after, events.Restored):
            raise DemoFailed("the second start resumed nothing: it began at step 0")
        connected_at, _connected = told(after, events.TrainerConnected)[0]
        restored_at, restored = told(after, events.Restored)[0]
        stepped_at, stepped = told(after, events.FirstStep)[0]
        snapshots = [event for _at, event in told(lines, events.Sealed)]
        stalls = [event.stall_s for event in snapshots]
        commits = [(at, event) for at, event in told(lines, events.Published) if event.tier == "remote"]
        seen_at = min((at for at, _event in told(before, events.NoticeSeen)), default=None)
        saved_at = min((at for at, event in commits if event.step == first.last_step), default=None)
        return Survival(
            exit_codes=(first.exit_code, second.exit_code),
            first_difference=difference(run, unbroken),
            steps_lost=first.last_step - restored.step,
            resumed_step=restored.step,
            resumed_from=told(after, events.Located)[0][1].tier,
            stall_median_s=statistics.median(stalls),
            stall_max_s=max(stalls),
            notice_seen_s=seen_at - announced_at if seen_at and announced_at else None,
            notice_to_durable_s=saved_at - seen_at if saved_at and seen_at else None,
            first_step_s=stepped.seconds,
            until_connected_s=connected_at - (stepped_at - stepped.seconds),
            restore_s=restored_at - connected_at,
            snapshot_bytes=snapshots[-1].bytes,
            sealed=len(snapshots),
            durable=len({event.snapshot for _at, event in commits}),
        )

    # ---- output -----------------------------------------------------------------------------------------------------

    def title(self, text: str) -> None:
        self.console.print(Text(f"\n{text}", style="bold"), soft_wrap=True)

    def say(self, text: str) -> None:
        self.console.print(Text(f"» {text}", style="cyan"), soft_wrap=True)

    def show(self, run: Run, line: str) -> None:
        """Print a line of a run, cut to the terminal's width; a log beside the curve gets the whole line."""
        with (self.directory / f"{run.name}.log").open("a") as log:
            log.write(f"{line}\n")
        self.console.print(Text(f"{run.name:>8} │ {line}", style="dim"), no_wrap=True, overflow="ellipsis")


Kind = TypeVar("Kind", bound=events.Event)


def told(journal: Sequence[events.Line], kind: type[Kind]) -> list[tuple[float, Kind]]:
    """Return the events of one kind, each with its monotonic instant, in order."""
    return [(line.mono, line.body) for line in journal if isinstance(line.body, kind)]


def difference(run: Run, unbroken: Run) -> str | None:
    """Return the first difference of `run` from the unbroken one; None if every bit is the same."""
    losses, expected = run.losses(), unbroken.losses()
    for step in sorted(losses.keys() | expected.keys()):
        if losses.get(step) != expected.get(step):
            return f"step {step} of the loss curve: {losses.get(step)!r}, unbroken {expected.get(step)!r}"
    if run.final.read_bytes() == unbroken.final.read_bytes():
        return None
    tensors, wanted = load_file(run.final), load_file(unbroken.final)
    for name in sorted(tensors.keys() | wanted.keys()):
        if name not in tensors or name not in wanted or tensors[name].tobytes() != wanted[name].tobytes():
            return f"tensor {name} after the last step"
    return "the files of final tensors, though not in their values"


def follow(pipe: int) -> Iterator[str | None]:
    """Yield lines as they arrive, and None in between. Ends when no process can write to the pipe any more."""
    rest = b""
    while True:
        if select.select([pipe], [], [], LOOK_S)[0]:
            data = os.read(pipe, 65536)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
        yield None
    if rest:
        yield rest.decode(errors="replace")


def table(survivals: dict[str, Survival]) -> Table:
    """Return the table of figures, with a column for each interrupted run."""
    rows: dict[str, Callable[[Survival], str]] = {
        "compared with unbroken": lambda s: "differs" if s.first_difference else "bit-identical",
        "exit codes": lambda s: ", then ".join(map(str, s.exit_codes)),
        "steps lost": lambda s: str(s.steps_lost),
        "resumed from": lambda s: f"step {s.resumed_step}, {s.resumed_from} tier",
        "stall per snapshot": lambda s: f"{milliseconds(s.stall_median_s)}, max {milliseconds(s.stall_max_s)}",
        "notice → seen": lambda s: seconds(s.notice_seen_s),
        "notice seen → durable": lambda s: seconds(s.notice_to_durable_s),
        "start → first resumed step": lambda s: seconds(s.first_step_s),
        "  of it Python, torch, model": lambda s: seconds(s.until_connected_s),
        "  of it restoring": lambda s: seconds(s.restore_s),
        "bytes per snapshot": lambda s: decimal(s.snapshot_bytes),
        "snapshots taken, durable *": lambda s: f"{s.sealed}, {s.durable}",
    }
    found = Table(
        Column(no_wrap=True),
        *survivals,
        box=None,
        header_style="bold",
        padding=(0, 3, 0, 0),
        caption="* as the journals tell; the last lines of the killed agent's journal were lost with it",
        caption_justify="left",
    )
    for label, cell in rows.items():
        found.add_row(label, *(cell(survival) for survival in survivals.values()))
    return found


def seconds(duration_s: float | None) -> str:
    return "-" if duration_s is None else f"{duration_s:.2f} s"


def milliseconds(duration_s: float) -> str:
    return f"{1e3 * duration_s:.1f} ms"


@contextlib.contextmanager
def workspace(console: Console, *, keep: bool) -> Iterator[Path]:
    """Make a directory for a `with` block, and remove it at the end, also after an error, unless `keep` is set."""
    # Agents listen on sockets below it, and a socket's path has at most 107 bytes.
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < 40 else "/tmp"
    directory = Path(tempfile.mkdtemp(prefix="harness-demo-", dir=parent))
    try:
        yield directory
    finally:
        if keep:
            console.print(f"\nkept: {directory}   (try: cd {directory} && harness ls --run noticed)", soft_wrap=True)
        else:
            shutil.rmtree(directory)


def main() -> int:
    """Run the demo. Return exit code 0 if the runs are bit-identical, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="keep the directory with stores, curves and logs")
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer steps")
    parser.add_argument("--json", action="store_true", help="the figures on stdout as one JSON document")
    args = parser.parse_args()

    def stop(signum: int, _frame: object) -> NoReturn:
        sys.exit(128 + signum)  # runs every `finally`

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, stop)
    console = Console(stderr=args.json, highlight=False)
    size, began_at = QUICK if args.quick else FULL, time.monotonic()
    try:
        with workspace(console, keep=args.keep) as directory:
            survivals = Demo(directory, size, console).run()
    except DemoFailed as err:
        console.print(f"demo: {err}. Its output is above; use --keep to keep the files", style="red")
        return 1
    differences = {name: found.first_difference for name, found in survivals.items() if found.first_difference}
    if args.json:
        runs = {name: asdict(found) for name, found in survivals.items()}
        print(json.dumps({"bit_identical": not differences, "steps": size.steps, "runs": runs}, indent=2))
    else:
        console.print("", table(survivals))
    for name, found in differences.items():
        console.print(f"{name} DIFFERS from the unbroken run: {found}", style="bold red", soft_wrap=True)
    if not differences:
        console.print(
            f"\nbit-identical: weights, optimizer state and all {size.steps} losses",
            style="bold green",
            soft_wrap=True,
        )
    console.print(f"({time.monotonic() - began_at:.0f} s in all)", style="dim")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
