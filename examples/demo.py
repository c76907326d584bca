"""A training survives its spot instance: shown on this machine, without a cloud, and compared bit by bit.

    ./scripts/demo             # makes its own environment first
    python examples/demo.py    # where harness[examples] is installed

`gpt.py` is trained three times under `harness run`, with the default store (./.harness) of one directory:

    unbroken   nothing happens to it; the others are compared with it
    noticed    an EC2 metadata simulator announces a spot interruption; the run saves and leaves with exit code 75
    killed     SIGKILL, trainer and agent and data workers at once, without a word before

After an interruption the local tier is thrown away, as a terminated instance's would be, and the very same command is
given again. At the end final weights, optimizer state and every step's loss have to be equal, bit by bit. All figures
of the table are measured: they come from the runs' journals in the store.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from safetensors.numpy import load_file

from cloud.metadata_sim import MetadataSimulator
from cloud.notice import Deadline
from harness.agent.report import read_journal
from harness.agent.stores import open_store
from harness.core import events
from harness.core.snapshot import RunKeys

LEAD_S = 120.0  # EC2 announces a spot interruption two minutes ahead
LIFE_S = 300.0  # a life that takes longer than this hangs
LOOK_S = 0.05


@dataclass(frozen=True)
class Size:
    """How much is trained, how often it is saved, and when the instance goes away.

    Attributes:
        every_s: seconds between snapshots, in the local tier and in the store alike.
        interrupt_at: share of the steps after which the instance goes away. What is left has to take well over a
            second at any speed: that is how often the agent asks for notices.
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


FULL = Size(epochs=4, steps_per_epoch=60, width=128, layers=2, every_s=3.0, interrupt_at=0.4)
QUICK = Size(epochs=2, steps_per_epoch=100, width=64, layers=1, every_s=0.5, interrupt_at=0.2)


class DemoFailed(Exception):
    """Something did not happen as announced. The message says what."""


@dataclass(frozen=True)
class Run:
    """A run, and the one command that starts it or resumes it, whichever it is."""

    name: str
    directory: Path
    command: list[str]

    @property
    def curve(self) -> Path:
        """A line 'step loss learning-rate' for every step; repeated steps stand there again."""
        return self.directory / f"{self.name}.curve"

    @property
    def final(self) -> Path:
        """Weights and optimizer state at the end."""
        return self.directory / f"{self.name}.safetensors"

    def losses(self) -> dict[int, str]:
        """The line of each step; where a resumed run had to repeat one, the later line."""
        lines = self.curve.read_text().splitlines() if self.curve.exists() else []
        return {int(line.partition(" ")[0]): line for line in lines}

    def last_step(self) -> int:
        """The newest step that the trainer has completed."""
        return max(self.losses(), default=0)


@dataclass(frozen=True)
class Life:
    """One start of a run's command, until the last of its processes has gone."""

    exit_code: int
    last_step: int


@dataclass(frozen=True)
class Survival:
    """What an interruption cost. Durations are seconds; None where there was nothing to measure.

    Attributes:
        exit_codes: of the interrupted life and of the resumed one, as a shell shows them.
        first_difference: what differs from the unbroken run, None if nothing does.
        steps_lost: trained before the interruption, and again after it.
        resumed_from: the tier that the resumed life took the snapshot from.
        stall_median_s: how long a snapshot stops the training loop.
        notice_to_durable_s: from the agent's seeing the notice to the commit of the last step in the store.
        first_step_s: from the agent's start to the end of the first resumed step.
        until_connected_s: the part of it until the Checkpointer says hello: Python, torch, data, the model.
        restore_s: the part of it until the state is back, from there.
        sealed: snapshots taken, as far as the journal goes: what a killed agent had not yet written of it is lost.
        durable: those that were committed in the store.
    """

    exit_codes: tuple[int, ...]
    first_difference: str | None
    steps_lost: int
    resumed_step: int
    resumed_from: str
    stall_median_s: float | None
    stall_max_s: float | None
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
        (directory / "tmp").mkdir()

    def run(self) -> dict[str, Survival]:
        """All three. What the two interrupted ones went through, by name."""
        unbroken = self.unbroken()
        return {"noticed": self.noticed(unbroken), "killed": self.killed(unbroken)}

    def unbroken(self) -> Run:
        self.title("unbroken: nothing happens to it; the others are compared with it")
        run = self.command("unbroken", metadata="off")
        self.expect(0, self.live(run))
        if sorted(run.losses()) != list(range(1, self.size.steps + 1)):
            raise DemoFailed(f"{run.curve} does not hold each of the {self.size.steps} steps")
        return run

    def noticed(self, unbroken: Run) -> Survival:
        self.title("noticed: EC2 announces a spot interruption in the middle")
        with MetadataSimulator() as simulator:
            run = self.command("noticed", metadata=simulator.url)

            def announce(_pid: int) -> None:
                self.say(f"step {run.last_step()}: the metadata service announces the end of the instance in {LEAD_S:g} s")
                simulator.notice(lead_s=LEAD_S)

            first = self.expect(75, self.live(run, lambda: run.last_step() >= self.interrupt_step, announce))
            self.lose_instance()
            simulator.withdraw()  # the next instance's metadata service announces nothing
            second = self.expect(0, self.live(run))
        return self.survival(run, first, second, unbroken)

    def killed(self, unbroken: Run) -> Survival:
        self.title("killed: SIGKILL in the middle, trainer and agent and data workers, without a word before")
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

    # ---- a run and its lives ----------------------------------------------------------------------------------------

    def command(self, name: str, *, metadata: str) -> Run:
        size = self.size
        harness = ["run", "--run", name, "--local", "instance-disk", "--metadata", metadata]
        harness += ["--every-s", f"{size.every_s:g}", "--durable-every-s", f"{size.every_s:g}"]
        train = [str(Path(__file__).resolve().with_name("gpt.py"))]
        train += ["--epochs", str(size.epochs), "--steps-per-epoch", str(size.steps_per_epoch)]
        train += ["--width", str(size.width), "--layers", str(size.layers)]
        train += ["--curve", f"{name}.curve", "--final", f"{name}.safetensors"]
        self.console.print(Text(f"$ {shlex.join(['harness', *harness, '--', 'python', *train])}"), soft_wrap=True)
        return Run(
            name, self.directory, [sys.executable, "-m", "harness.cli", *harness, "--", sys.executable, *train]
        )

    def live(
        self, run: Run, is_time: Callable[[], bool] = lambda: False, strike: Callable[[int], None] = lambda pid: None
    ) -> Life:
        """One life: show what it prints, and `strike` once when `is_time`. Returns when its last process has gone."""
        give_up_at, struck = time.monotonic() + LIFE_S, False
        process = subprocess.Popen(
            run.command,
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.directory,
            env=self.environment(),
            start_new_session=True,  # all of a life is one process group: it can die as an instance does, at once
        )
        assert process.stdout is not None
        try:
            for line in follow(process.stdout.fileno()):
                if line is not None:
                    self.show(run, line)
                elif not struck and is_time():
                    struck = True
                    strike(process.pid)
                if time.monotonic() > give_up_at:
                    raise DemoFailed(f"the run has not ended after {LIFE_S:g} s")
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for _line in follow(process.stdout.fileno()):
                pass  # nothing may write into the directory any more when it is removed
            raise
        finally:
            code = process.wait()
            process.stdout.close()
        return Life(128 - code if code < 0 else code, run.last_step())

    def environment(self) -> dict[str, str]:
        """The caller's, without what would change these runs; whatever they leave behind is left in our directory."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HARNESS", "AWS_"))}
        return {**kept, "TMPDIR": str(self.directory / "tmp"), "HARNESS_RUNTIME_DIR": str(self.directory / "run")}

    def has_durable(self, run: Run) -> bool:
        return any(self.store.list(RunKeys(run.name).commits, deadline=Deadline.after(10.0)))

    def lose_instance(self) -> None:
        """What a terminated instance takes with it."""
        shutil.rmtree(self.directory / "instance-disk")
        self.say("the instance is gone, and its disk with it: the local tier is deleted. The very same command again:")

    def expect(self, code: int, life: Life) -> Life:
        if life.exit_code != code:
            raise DemoFailed(f"the run ended with exit code {life.exit_code} at step {life.last_step}, not with {code}")
        self.say(f"exit code {code} at step {life.last_step}")
        return life

    # ---- figures ----------------------------------------------------------------------------------------------------

    def survival(self, run: Run, first: Life, second: Life, unbroken: Run) -> Survival:
        """Fold the journals of a run's two lives, each a generation of its own."""
        before, after = (Journal(list(read_journal(self.store, RunKeys(run.name), number))) for number in (1, 2))
        restored = after.first(events.Restored)
        if restored is None:
            raise DemoFailed("the second life resumed nothing: it started at step 0")
        resumed_step = restored.body.step
        began_at = after.need(events.FirstStep).mono - after.need(events.FirstStep).body.seconds
        connected_at = after.need(events.TrainerConnected).mono
        seen = before.first(events.NoticeSeen)
        saved = before.last(events.Published, lambda body: body.tier == "remote" and body.step == first.last_step)
        both = Journal([*before.lines, *after.lines])
        stalls = [line.body.stall_s for line in both.all(events.Sealed)]
        return Survival(
            exit_codes=(first.exit_code, second.exit_code),
            first_difference=difference(run, unbroken),
            steps_lost=first.last_step - resumed_step,
            resumed_step=resumed_step,
            resumed_from=after.need(events.Located).body.tier,
            stall_median_s=statistics.median(stalls),
            stall_max_s=max(stalls),
            notice_to_durable_s=saved.mono - seen.mono if seen and saved else None,
            first_step_s=after.need(events.FirstStep).body.seconds,
            until_connected_s=connected_at - began_at,
            restore_s=restored.mono - connected_at,
            snapshot_bytes=after.need(events.Sealed).body.bytes,
            sealed=len(stalls),
            durable=len(both.all(events.Published, lambda body: body.tier == "remote")),
        )

    # ---- words ------------------------------------------------------------------------------------------------------

    def title(self, text: str) -> None:
        self.console.print(Text(f"\n{text}", style="bold"))

    def say(self, text: str) -> None:
        self.console.print(Text(f"» {text}", style="cyan"))

    def show(self, run: Run, line: str) -> None:
        """A line of a run's own, as far as the terminal is wide; all of it goes to a file beside the curve."""
        with (self.directory / f"{run.name}.log").open("a") as log:
            log.write(f"{line}\n")
        self.console.print(Text(f"{run.name:>8} │ {line}", style="dim"), no_wrap=True, overflow="ellipsis")
