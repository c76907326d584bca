"""Run a program once through a rehearsal: unbroken, or in several starts, each interrupted at its place.

Owns the scratch folder, the command line and the environment of each start, and the files that the program changed.
Every start is a process of its own, with a local tier of its own.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from harness.core.rehearsal import (
    OUT,
    VARIABLE,
    AnyLine,
    Instructions,
    Interrupted,
    Interruption,
    Resumed,
    Stepped,
    decode_lines,
    file_of,
)
from harness.errors import ConfigError, ExitCode, HarnessError
from harness.ipc.process import safe_python

_OFFLINE = {
    "HARNESS_REHEARSAL": "1",
    "WANDB_MODE": "offline",
    "NEPTUNE_MODE": "offline",
    "COMET_OFFLINE": "1",
    "CLEARML_OFFLINE_MODE": "1",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # since 3.17 it is refused otherwise
}
_ELSEWHERE = ("HARNESS_SOCKET", "HARNESS_DRAIN_FILE", "HARNESS_RUN", "HARNESS_STORE", "HARNESS_LOCAL", VARIABLE)
_LOOK_S = 0.5
_MOST_FILES = 20_000
_PASSED_OVER = (".git", "__pycache__", ".venv", "node_modules")
_LAST_LINES = 20


class ProgramFailed(HarnessError):
    """The program ended otherwise than it was told to."""

    exit_code = ExitCode.BUG


@dataclass
class Pass:
    """What one pass has shown.

    Attributes:
        lines: of all starts, in order; of several ranks, the first one's.
        others: those of the other ranks, by rank.
        starts: the number of starts.
        seconds: of all starts together.
        first_step_s: seconds until the first start had begun to train.
        reached: the interruptions that happened.
        files: files below the current directory that were created or changed.
    """

    lines: list[AnyLine] = field(default_factory=list)
    others: dict[int, list[AnyLine]] = field(default_factory=dict)
    starts: int = 0
    seconds: float = 0.0
    first_step_s: float = 0.0
    reached: list[Interruption] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> dict[int, list[AnyLine]]:
        """The lines of each rank."""
        return {0: self.lines, **self.others}


class Rehearsal:
    """Runs passes of one program."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], scratch: Path, progress: Callable[[int, float], None]
    ) -> None:
        """Nothing runs yet.

        Args:
            command: the program; `{out}` in it is replaced by a folder of the pass.
            environ: its environment, as `harness run` would get it.
            scratch: an empty folder for everything that the passes write.
            progress: called with the newest step, and the seconds since the start, about twice a second.
        """
        self._command, self._scratch, self._progress = command, scratch, progress
        self._environ = offline(environ, scratch)

    def run(self, name: str, stop: int, interruptions: Sequence[Interruption] = ()) -> Pass:
        """Run the program up to a step, interrupted at these places. Blocks.

        Raises:
            ProgramFailed: it ended otherwise than it was told to; says how, with its last lines.
        """
        done = Pass()
        before = _files_here()
        for interruption in [*interruptions, None]:
            lines = self._start(name, done, Instructions("", stop, interruption))
            done.lines += lines
            last = next((line for line in lines if isinstance(line, Interrupted)), None)
            if interruption is not None and last is not None and last.where:
                done.reached.append(interruption)
            if last is None or not last.where:
                break
        done.files = sorted(path for path, seen in _files_here().items() if before.get(path) != seen)
        return done

    def _start(self, name: str, done: Pass, instructions: Instructions) -> list[AnyLine]:
        """Start the program once, and wait for its end. Return its lines."""
        done.starts += 1
        folder = self._scratch / name
        out, local = folder / "out", folder / f"local-{done.starts}"
        out.mkdir(parents=True, exist_ok=True)
        written, output = folder / f"{done.starts}.lines", folder / f"{done.starts}.output"
        written.touch()
        told = msgspec.structs.replace(instructions, file=str(written))
        options = ["--store", str(folder / "store"), "--run", "rehearsal", "--local", str(local), "--metadata", "off"]
        command = [
            *safe_python("harness"),
            *("run", *options, "--every-s", "1e9", "--max-crashes", "0", "--log-format", "text", "--"),
            *(word.replace(OUT, str(out)) for word in self._command),
        ]
        environ = self._environ | {VARIABLE: msgspec.json.encode(told).decode()}
        began_at = time.monotonic()
        with output.open("wb") as sink:
            process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
            try:
                code = self._wait(process, written, began_at, done)
            finally:  # after Ctrl-C: its agent has got that too, and saves nothing more that matters
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        done.seconds += time.monotonic() - began_at
        lines = decode_lines(written.read_bytes())
        _check(code, lines, output)
        rank = 1
        while (of_rank := Path(file_of(str(written), rank))).exists():
            done.others.setdefault(rank, []).extend(decode_lines(of_rank.read_bytes()))
            rank += 1
        return lines

    def _wait(self, process: subprocess.Popen[bytes], written: Path, began_at: float, done: Pass) -> int:
        while True:
            try:
                return process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                lines = decode_lines(written.read_bytes())
                if lines and not done.first_step_s:
                    done.first_step_s = time.monotonic() - began_at
                steps = [line.step for line in lines if isinstance(line, Stepped | Resumed)]
                self._progress(max(steps, default=0), time.monotonic() - began_at)


def offline(environ: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Return the environment of a pass: the program's, but with trackers offline and nothing of another run."""
    found = {name: value for name, value in environ.items() if name not in _ELSEWHERE}
    elsewhere = {"HARNESS_RUNTIME_DIR": str(scratch / "rt"), "MLFLOW_TRACKING_URI": (scratch / "mlruns").as_uri()}
    return found | _OFFLINE | elsewhere


def _check(code: int, lines: Sequence[AnyLine], output: Path) -> None:
    """Raise unless the program was interrupted where it was told to be, or has reached its own end."""
    if code == ExitCode.INTERRUPTED and any(isinstance(line, Interrupted) for line in lines):
        return
    if code == ExitCode.FINISHED and lines:  # at its own end, or it has left its loop by itself
        return
    text = output.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    shown = "".join(f"\n    {line}" for line in text)
    if code == ExitCode.FINISHED:
        raise ConfigError(f"the program made no Checkpointer, or no step. Its last lines:{shown}")
    raise ProgramFailed(f"the program failed with exit code {code}. Its last lines:{shown}")


def _files_here() -> dict[str, tuple[int, int]]:
    """Return time and size of the files below the current directory, by path; of so many at most."""
    found: dict[str, tuple[int, int]] = {}
    for folder, folders, files in os.walk("."):
        folders[:] = [name for name in folders if name not in _PASSED_OVER]
        for name in files:
            path = os.path.join(folder, name)  # noqa: PTH118  a Path for each file takes ten times as long
            try:
                status = os.lstat(path)
            except OSError:
                continue
            found[os.path.relpath(path)] = (status.st_mtime_ns, status.st_size)
        if len(found) > _MOST_FILES:
            break
    return found
