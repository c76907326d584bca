"""A training with torch that leaves by itself, in one of several ways, after its first steps.

python -m tests.support.leaving_trainer WAY --curve FILE [--at STEP]

exit     sys.exit(0) in the middle of ckpt.steps, at STEP
flag     a SIGTERM handler of its own, installed after the Checkpointer: sets a flag, at which a loop by hand breaks
handler  the same, but it leaves by itself, with exit code 0, and was installed before
imported the same, by a `signal.signal` that was imported before the Checkpointer was made
failing  exit code 1, by SystemExit, after the end of a loop that has no end of its own; --at 0 does not fail
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path
from signal import signal as install
from typing import Any

import torch
from torch import nn

from harness import Checkpointer
from harness.trainer import saving
from tests.support import delays
from tests.support.patience import HANG_S
from tests.support.patient import patient

STEPS = 12


class Job:
    """A model, and what is written of its steps."""

    def __init__(self, curve: Path) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(1)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.curve = curve.open("a", buffering=1)
        self.stop = threading.Event()

    def train(self, step: int) -> None:
        """A step."""
        x = torch.randn(4, 4)
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.curve.write(f"{step + 1} {loss.item().hex()}\n")

    def handle(self, *_: Any) -> None:
        """A handler of SIGTERM that only sets a flag."""
        sys.stderr.write("own handler\n")
        self.stop.set()


def leave(*_: Any) -> None:
    """A handler of SIGTERM that ends the program."""
    sys.stderr.write("own handler\n")
    sys.exit(0)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["exit", "flag", "handler", "imported", "failing"])
    parser.add_argument("--curve", type=Path, required=True)
    parser.add_argument("--at", type=int)
    options = parser.parse_args()
    delays.install(delays.TRAINER)
    saving._ANSWER_S = HANG_S
    job = Job(options.curve)
    if options.way == "handler":
        signal.signal(signal.SIGTERM, leave)
    ckpt = patient(Checkpointer(model=job.model, optimizer=job.optimizer))
    if options.way == "flag":
        signal.signal(signal.SIGTERM, job.handle)
        for step in range(ckpt.resume(), STEPS):
            job.train(step)
            if step + 1 == options.at:
                job.stop.wait()  # the signal comes in the middle of this step
            ckpt.step()
            if job.stop.is_set():
                break
        return
    if options.way == "imported":
        install(signal.SIGTERM, leave)
    if options.way == "failing":
        for _epoch in range(3):
            for _batch in ckpt.batches(list(range(STEPS // 3))):
                job.train(ckpt.step_count)
        if options.at != 0:
            raise SystemExit(1)  # what sys.exit does; nobody hears of it
        return
    for step in ckpt.steps(STEPS):
        job.train(step)
        if step + 1 == options.at and options.way == "exit":
            sys.exit(0)
        while step + 1 == options.at:
            threading.Event().wait(0.01)


if __name__ == "__main__":
    main()
