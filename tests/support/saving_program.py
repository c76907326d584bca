"""A program that saves by itself, as programs do that never heard of the harness: no Checkpointer, and no torch.

Its "training" is the hash chain of `tests/support/tiny_trainer.py`. It looks for the greatest checkpoint in its own
directory when it starts, and fails if that is not whole, as frameworks do. It also fails if its directory is not empty,
and has no checkpoint, as transformers' examples do.

    python -m tests.support.saving_program --out DIR --curve curve --final final [--steps 20] [--save-every 5]

    --layout numbered|one      a directory `checkpoint-N` for each, as of transformers; or one file, in place
    --resume PATH              the checkpoint to go on from, instead of the greatest; nothing begins at step 0
    --on-signal SIGTERM        save and leave when this comes, after the step; more than once for more signals
    --stays                    after such a signal save, but go on
    --hold-at STEP --hold-until FILE   stay after STEP, until FILE exists
    --die-in STEP:N            SIGKILL itself before the N-th write of the checkpoint of STEP, in the first life only
    --keep N                   delete all checkpoints but the newest N
    --await-commits            after each checkpoint, stay until its snapshot is committed, or the agent has died
    --never-resumes            begins at step 0 in each life
    --forgets                  goes on with another state than it has saved
    --raise-at STEP            raise an exception after STEP, in the first life only
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import shutil
import signal
import threading
import time
import zipfile
from pathlib import Path

from tests.support.tiny_trainer import STATE_BYTES, advance, digest

PIECES = 4


class Program:
    """One life."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, Path(options.out)
        self.step, self.state = 0, bytes(STATE_BYTES)
        self.told = False
        self.writes = 0
        self.is_first = os.environ.get("HARNESS_RESTARTS", "0") == "0"

    # ---- its checkpoints --------------------------------------------------------------------------------------------

    def newest(self) -> Path | None:
        """The checkpoint to go on from: what was named, else the greatest."""
        if self.options.resume is not None:
            return Path(self.options.resume) if self.options.resume else None
        if self.options.layout == "one":
            return self.out / "last.pt" if (self.out / "last.pt").exists() else None
        found = sorted(self.out.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
        return found[-1] if found else None

    def load(self, path: Path) -> None:
        """Go on from a checkpoint. Raises whatever a torn one raises."""
        if self.options.layout == "one":
            with zipfile.ZipFile(path) as file:
                self.step, self.state = int(file.read("step")), file.read("state")
        else:
            self.step = json.loads((path / "trainer_state.json").read_bytes())["global_step"]
            self.state = (path / "state.bin").read_bytes()
            pickle.loads((path / "rng_state.pth").read_bytes())
        if len(self.state) != STATE_BYTES:
            raise EOFError(f"{path} is torn")
        if self.options.forgets:
            self.state = bytes(STATE_BYTES)

    def save(self) -> None:
        """Write a checkpoint, in place, as it is the custom."""
        self.writes = 0
        if self.options.layout == "one":
            packed = io.BytesIO()
            with zipfile.ZipFile(packed, "w") as file:
                file.writestr("step", str(self.step))
                file.writestr("state", self.state)
            return self._write(self.out / "last.pt", packed.getvalue())
        folder = self.out / f"checkpoint-{self.step}"
        folder.mkdir(exist_ok=True)
        self._write(folder / "state.bin", self.state)
        self._write(folder / "rng_state.pth", pickle.dumps({"step": self.step}))
        self._write(folder / "trainer_state.json", json.dumps({"global_step": self.step}).encode())
        if self.options.keep:
            for old in sorted(self.out.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)[
                : -self.options.keep
            ]:
                shutil.rmtree(old)
        return None

    def _write(self, path: Path, data: bytes) -> None:
        length = -(-len(data) // PIECES)
        with path.open("wb", buffering=0) as file:
            for begin in range(0, len(data), length):
                self._die(self.options.die_in)
                file.write(data[begin : begin + length])
                self.writes += 1

    def _die(self, when: str | None) -> None:
        step, _, writes = (when or "-1:-1").partition(":")
        if self.is_first and (self.step, self.writes) == (int(step), int(writes)):
            os.kill(os.getpid(), signal.SIGKILL)

    # ---- its training -----------------------------------------------------------------------------------------------

    def train(self) -> int:
        """Train to the end; the exit code."""
        options = self.options
        with Path(options.curve).open("a") as curve:
            while self.step < options.steps:
                self.state, self.step = advance(self.state, self.step), self.step + 1
                print(self.step, digest(self.state), file=curve, flush=True)
                time.sleep(options.step_s)
                while self.step == options.hold_at and not options.hold_until.exists() and not self.told:
                    threading.Event().wait(0.002)
                if self.is_first and self.step == options.raise_at:
                    raise ArithmeticError("injected")
                told = self.told
                if self.step % options.save_every == 0 or told:
                    self._save_and_await()
                if told and not options.stays:
                    return 0  # as many do: their script goes on behind the loop, and ends well
                if told:
                    self.told = False
        Path(options.final).write_text(digest(self.state))
        return 0

    def _save_and_await(self) -> None:
        folder = _commits_of_agent() if self.options.await_commits else None
        ours = f"*-{self.step:012d}.json" if self.options.layout == "numbered" else "*.json"  # one file tells no step
        before = set() if folder is None or self.options.layout == "numbered" else set(folder.glob(ours))
        self.save()
        while (
            folder is not None and folder == _commits_of_agent() and not self.told and set(folder.glob(ours)) <= before
        ):
            threading.Event().wait(0.002)

    def on_signal(self, _signum: int, _frame: object) -> None:
        """Note that it was asked to save."""
        self.told = True


def _commits_of_agent() -> Path | None:
    """Where the agent that is our parent commits; None if it has died, or has none."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:
        return None  # it has died at this moment
    if "--store" not in words:
        return None
    return Path(words[words.index("--store") + 1], words[words.index("--run") + 1], "commits")


def main() -> int:
    """Run one life."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--curve", required=True)
    parser.add_argument("--final", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.002)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--layout", choices=("numbered", "one"), default="numbered")
    parser.add_argument("--resume")
    parser.add_argument("--on-signal", action="append", default=[])
    parser.add_argument("--stays", action="store_true")
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--hold-until", type=Path)
    parser.add_argument("--die-in")
    parser.add_argument("--keep", type=int, default=0)
    parser.add_argument("--await-commits", action="store_true")
    parser.add_argument("--forgets", action="store_true")
    parser.add_argument("--never-resumes", action="store_true")
    parser.add_argument("--raise-at", type=int)
    options = parser.parse_args()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()) and not any(path.name.startswith(("checkpoint-", "last.pt")) for path in out.iterdir()):
        raise ValueError(f"{out} already exists and is not empty")
    program = Program(options)
    for name in options.on_signal:
        signal.signal(signal.Signals[name], program.on_signal)
    if (newest := program.newest()) is not None and not options.never_resumes:
        program.load(newest)
    return program.train()


if __name__ == "__main__":
    raise SystemExit(main())
