"""What does the agent cost beside a training? Good enough is:

- the first answer of the metadata service at most 0.5 s after `harness run` was started: a notice may be in force;
- at most 90 MB of memory of its own (RssAnon: slots are shared memory, and the page cache is the kernel's), idle and
  while it saves 400 MB; with S3 at most 120 MB, since boto3 alone is 35; at most 200 MB whatever the size is;
- at most 1 % of a core while nothing happens but a poll each second.

Starts real `harness run`s against the metadata simulator, with this script as the trainer, and looks on from outside.

    python benchmarks/bench_agent.py [--starts 11] [--saves 3] [--idle-s 10] [--mb 400,6000] [--check] [--json]

The S3 server holds a snapshot in memory, beside the slot: twice `--mb` is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from circumstances import ROOT, Row, Verdict, at_most, circumstances, environment, show
from processes import Quiet, cpu_s, own_mb

sys.path.insert(0, str(ROOT))

from cloud.testing.metadata_sim import MetadataSimulator
from tests.support.s3_server import serving

BAR_ANSWER_S, BAR_OWN_MB, BAR_OWN_MB_S3, BAR_OWN_MB_LARGE, BAR_CPU_PERCENT = 0.5, 90.0, 120.0, 200.0, 1.0
LARGE_MB = 1000
SAVE_AT_STEP = 3
SAVE_S, SLOWEST_MB_S = 60.0, 20.0
STEP_S = 0.02


def main() -> int:
    """Measure, print, judge."""
    options = parse()
    if options.trainer is not None:
        train(options.trainer)
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        answers = [first_answer_s(directory / f"start-{number}") for number in range(options.starts)]
        idle = idle_figures(directory / "idle", options.idle_s)
        saving = [
            result for mb in options.mb for result in own_memory(directory, mb, 1 if mb >= LARGE_MB else options.saves)
        ]
    results = [
        Result("first metadata answer", "s", answers, BAR_ANSWER_S),
        Result("own memory, idle", "MB", [idle.own_mb], BAR_OWN_MB),
        *saving,
        Result(f"CPU over {options.idle_s:g} idle s", "% of a core", [idle.cpu_percent], BAR_CPU_PERCENT),
    ]
    verdicts = [result.verdict() for result in results]
    rows = [result.row() for result in results]
    show(circumstances(["torch", "requests", "msgspec"]), rows, verdicts, as_json=options.json)
    return 1 if options.check and not all(verdict.met for verdict in verdicts) else 0


@dataclass(frozen=True)
class Result:
    """Figures of one kind, and what their median may be at most."""

    name: str
    unit: str
    figures: list[float]
    bar: float

    def verdict(self) -> Verdict:
        return at_most(f"the agent's {self.name}", self.bar, statistics.median(self.figures), f" {self.unit}")

    def row(self) -> Row:
        return {
            "the agent's": f"{self.name}, {self.unit}",
            "median": f"{statistics.median(self.figures):.3g}",
            "min": f"{min(self.figures):.3g}",
            "max": f"{max(self.figures):.3g}",
        }


class TimedSimulator(MetadataSimulator):
    """Tells when it first gave out data; the token was asked for before."""

    def __init__(self) -> None:
        super().__init__()
        self.first_at: Future[float] = Future()

    def lookup(self, path: str) -> str | None:
        with contextlib.suppress(InvalidStateError):
            self.first_at.set_result(time.monotonic())
        return super().lookup(path)


@dataclass(frozen=True)
class Idle:
    own_mb: float
    cpu_percent: float


def first_answer_s(directory: Path) -> float:
    """Seconds from the start of `harness run` to the first data of the metadata service."""
    simulator = TimedSimulator()
    with simulator:
        began = time.monotonic()
        with agent(directory, simulator.url, mb=0):
            return simulator.first_at.result(timeout=60.0) - began


def idle_figures(directory: Path, idle_s: float) -> Idle:
    """An agent whose trainer trains, when no snapshot is due."""
    with MetadataSimulator() as simulator, agent(directory, simulator.url, mb=0) as (pid, log):
        wait_for("FirstStep", log)
        before, began = cpu_s(pid), time.monotonic()
        time.sleep(idle_s)
        busy = (cpu_s(pid) - before) / (time.monotonic() - began)
        return Idle(own_mb(pid), 100 * busy)


def own_memory(directory: Path, mb: int, saves: int) -> list[Result]:
    """While saving to a directory, and while uploading as well."""
    large = mb >= LARGE_MB
    saving, to_s3 = [], []
    for number in range(saves):
        saving.append(own_mb_while_saving(directory / f"save-{mb}-{number}", mb))
        with serving() as url:  # a server for each: it forgets nothing
            to_s3.append(own_mb_while_saving(directory / f"s3-{mb}-{number}", mb, url))
    what = f"own memory, most while saving {mb} MB"
    return [
        Result(what, "MB", saving, BAR_OWN_MB_LARGE if large else BAR_OWN_MB),
        Result(f"{what} and uploading them to S3", "MB", to_s3, BAR_OWN_MB_LARGE if large else BAR_OWN_MB_S3),
    ]


def own_mb_while_saving(directory: Path, mb: int, s3: str = "") -> float:
    """The most memory of its own that an agent has between the seal of a snapshot and its verification in the store."""
    with MetadataSimulator() as simulator, agent(directory, simulator.url, mb=mb, s3=s3) as (pid, log):
        wait_for("Sealed", log)
        most, text = 0.0, ""
        give_up_at = time.monotonic() + SAVE_S + mb / SLOWEST_MB_S
        quiet = Quiet(pid)  # once the snapshot is there, and was read back
        while not quiet() or "Published tier=remote" not in text:
            if time.monotonic() > give_up_at:
                raise SystemExit(f"{mb} MB were not saved in time:\n{text}")
            most = max(most, own_mb(pid))
            text += log.read()
            time.sleep(0.002)
        return most


@contextlib.contextmanager
def agent(directory: Path, metadata: str, *, mb: int, s3: str = "") -> Iterator[tuple[int, IO[str]]]:
    """A running `harness run`: its pid, and its log to read on. It is killed at the end.

    `s3` is the URL of a server that takes the place of a directory as the store.
    """
    directory.mkdir()
    tiers = ["--store", str(directory / "store")]
    if s3:
        tiers = ["--store", f"s3://bucket/{directory.name}", "--s3-endpoint", s3, "--local", str(directory / "local")]
        tiers += ["--durable-every-s", "0.1"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "harness", "run", *tiers, "--run", "bench"),
                *("--metadata", metadata, "--every-s", "1000", "--keep-last", "1"),
                *("--", sys.executable, __file__, "--trainer", str(mb)),
            ],
            env=environment(XDG_RUNTIME_DIR=str(directory), AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench"),
            stderr=log,
            start_new_session=True,
        )
    try:
        with (directory / "log").open() as reader:
            yield process.pid, reader
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(words: str, log: IO[str], timeout_s: float = 60.0) -> None:
    """Read on until the agent has said `words`."""
    give_up_at, text = time.monotonic() + timeout_s, ""
    while words not in text:
        text += log.read()
        if time.monotonic() > give_up_at:
            raise SystemExit(f"the agent did not say {words!r} within {timeout_s:g} s:\n{text}")
        time.sleep(0.002)


def train(mb: int) -> None:
    """The trainer: parameters of `mb` MB that were never written, so that they take no memory, and one save."""
    import torch

    from harness import Checkpointer

    torch.set_num_threads(1)
    with torch.device("meta"):
        model = torch.nn.Linear(1000, max(1, mb * 250), bias=False)
    model.weight = torch.nn.Parameter(torch.zeros(model.weight.shape))
    ckpt = Checkpointer(model=model)
    for step in ckpt.steps(10**9):
        if mb and step == SAVE_AT_STEP:
            ckpt.save()
        time.sleep(STEP_S)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=11)
    parser.add_argument("--saves", type=int, default=3, help=f"below {LARGE_MB} MB; above it is one")
    parser.add_argument("--idle-s", type=float, default=10.0)
    parser.add_argument("--mb", type=lambda text: [int(mb) for mb in text.split(",")], default="400")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trainer", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
