"""Real processes for tests: started in a world of their own, heard line by line, and gone at the end.

Owns starting, listening, waiting and cleaning up; knows only so much of the harness as finds its store and socket.
Every wait has a time-out and waits *for* something: a line, an exit, the last process of the world.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from cloud.directory import DirectoryStore
from cloud.notice import Deadline
from harness.agent import commit
from harness.config import resolve
from harness.core.snapshot import RunKeys, SnapshotId
from harness.ipc.channel import RunPlace
from tests.support.tiny_trainer import STATE_BYTES, advance, digest

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 20.0  # a machine that is busy; nothing here takes more than a few seconds on an idle one
_MARK = "TEST_WORLD"


class Process:
    """One command, with what it prints so far. Its output ends when everybody who inherited it has ended."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdin: int | IO[bytes] | None = None,
    ) -> None:
        """Start it, in a session of its own."""
        self._changed = threading.Condition()
        self._text: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._process = subprocess.Popen(
            list(arguments),
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._readers = [
            threading.Thread(target=self._read, args=(name, pipe), daemon=True)
            for name, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def stdout(self) -> bytes:
        """What it wrote so far."""
        with self._changed:
            return bytes(self._text["stdout"])

    @property
    def stderr(self) -> str:
        """What it, and the harness, wrote so far."""
        with self._changed:
            return self._text["stderr"].decode(errors="replace")

    @property
    def input(self) -> IO[bytes]:
        """Its stdin, where that is a pipe."""
        assert self._process.stdin is not None
        return self._process.stdin

    def wait_for(self, pattern: str, timeout_s: float = WAIT_S) -> re.Match[str]:
        """The first match of `pattern` in stderr, now or later."""
        with self._changed:
            give_up_at = time.monotonic() + timeout_s
            while True:
                text = self._text["stderr"].decode(errors="replace")
                if (found := re.search(pattern, text)) is not None:
                    return found
                left_s = give_up_at - time.monotonic()
                ended = not any(reader.is_alive() for reader in self._readers)
                if left_s <= 0 or ended:
                    raise AssertionError(f"never said: {pattern}\n{text}")
                self._changed.wait(min(left_s, 0.5))

    def signal(self, signum: int) -> None:
        """Signal this process alone."""
        os.kill(self.pid, signum)

    def signal_group(self, signum: int) -> None:
        """Signal everybody in its process group, as a terminal, a shell or a container does."""
        os.killpg(self.pid, signum)

    def wait_exit(self, timeout_s: float = WAIT_S) -> int:
        """Its own exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s:g} s:\n{self.stderr}") from None

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Its exit code, once everybody who inherited its output has ended as well."""
        give_up_at = time.monotonic() + timeout_s
        code = self.wait_exit(timeout_s)
        for reader in self._readers:
            reader.join(max(0.0, give_up_at - time.monotonic()))
            assert not reader.is_alive(), f"somebody lives on:\n{self.stderr}"
        return code

    def _read(self, name: str, pipe: IO[bytes]) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), 65536):
                with self._changed:
                    self._text[name] += data
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


class World:
    """A directory with a store, a local tier and a trainer's output; and every process that was started in it."""

    def __init__(self, root: Path, *, run: str = "a", local: bool = False) -> None:
        """Nothing is started. `local` says whether `harness` and `killing` use a local tier."""
        self.root, self.run, self.has_local = root, run, local
        self.store, self.local = root / "store", root / "local"
        self.curve, self.final, self.released = root / "curve", root / "final", root / "released"
        self._mark = secrets.token_hex(8)

    @property
    def env(self) -> dict[str, str]:
        """The environment of everything that is started here."""
        return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", _MARK: self._mark}

    @property
    def place(self) -> RunPlace:
        """Where the run's agent listens."""
        settings = resolve({"store": str(self.store), "run": self.run}, os.environ, self.root, script=None)
        return RunPlace.of(Path(settings.runtime_dir), settings.store, settings.run)

    # ---- starting ---------------------------------------------------------------------------------------------------

    def start(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[bytes] | None = None,
        cwd: Path | None = None,
    ) -> Process:
        """Start any command here."""
        return Process(arguments, cwd=cwd or self.root, env={**self.env, **(env or {})}, stdin=stdin)

    def harness(self, *arguments: str | Path) -> list[str | Path]:
        """The `harness` command."""
        return [sys.executable, "-m", "harness.cli", *arguments]

    def options(self) -> list[str]:
        """Options of `harness run` that make it this world's."""
        tiers = ["--local", str(self.local), "--durable-every-s", "0.01"] if self.has_local else []
        return ["--store", str(self.store), "--run", self.run, "--metadata", "off", *tiers]

    def run_harness(self, *options: str | Path, command: Sequence[str | Path]) -> Process:
        """Start `harness run` here."""
        return self.start(*self.harness("run", *self.options(), *options, "--", *command))

    def run_rigged(self, *options: str | Path, command: Sequence[str | Path]) -> Process:
        """Start `tests.support.harness_run` here, which is `harness run` with something up its sleeve."""
        rigged = [sys.executable, "-m", "tests.support.harness_run", *self.options()]
        return self.start(*rigged, "--release", self.released, *options, "--", *command)

    def tiny(self, *options: str, steps: int = 20, step_s: float = 0.002) -> list[str | Path]:
        """The command of the trainer without torch."""
        fixed = ["--steps", str(steps), "--step-s", str(step_s), "--curve", self.curve, "--final", self.final]
        return [sys.executable, "-m", "tests.support.tiny_trainer", *fixed, "--hold-until", self.released, *options]

    # ---- looking ----------------------------------------------------------------------------------------------------

    def survey(self) -> commit.Survey:
        """What the store knows of the run."""
        return commit.survey(DirectoryStore(self.store), RunKeys(self.run), Deadline.after(10.0))

    def newest(self) -> SnapshotId | None:
        """The newest committed snapshot of all tiers that is not quarantined."""
        found = list(self.survey().commits)
        if self.local.is_dir():
            found += commit.survey(DirectoryStore(self.local), RunKeys(self.run), Deadline.after(10.0)).commits
        return max(found, default=None)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something in the file system is as it should be."""
        give_up_at = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < give_up_at, f"never came: {what}"
            threading.Event().wait(0.01)

    def wait_until_durable(self, step: int) -> None:
        """Wait until a snapshot of `step` or later is committed: for a run whose agent's words go elsewhere."""
        self.wait_until(
            lambda: self.store.is_dir() and any(found.step >= step for found in self.survey().commits), f"step {step}"
        )

    def shards(self, snapshot: SnapshotId | None = None, tier: Path | None = None) -> list[Path]:
        """Files of the payload, of one snapshot or of all."""
        where = (tier or self.store) / self.run / "snapshots"
        return sorted(where.glob(f"{snapshot or ''}*/*.safetensors"))

    def manifest(self, snapshot: SnapshotId) -> Path:
        """The file whose presence is the commit."""
        return self.store / RunKeys(self.run).commit(snapshot)

    def steps_of_curve(self) -> list[int]:
        """The steps that were trained, in the order in which they were, over all lives."""
        return [int(line.split()[0]) for line in self.curve.read_text().splitlines()]

    def check_tiny(self, steps: int = 20) -> None:
        """Every step of every life was the unbroken run's, none is missing, and so is the end."""
        unbroken, final = unbroken_curve(steps)
        trained = self.curve.read_text().splitlines()
        assert set(trained) == set(unbroken)
        assert self.final.read_text() == final

    # ---- the end ----------------------------------------------------------------------------------------------------

    def running(self) -> dict[int, str]:
        """Every live process that was started here, or by one that was: its command line by its pid."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if f"{_MARK}={self._mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def wait_gone(
        self, timeout_s: float = WAIT_S, *, but: Callable[[int, str], bool] = lambda pid, command: False
    ) -> None:
        """Wait until no process of this world is left, `but` those that do not count."""
        give_up_at = time.monotonic() + timeout_s
        while left := [pid for pid, command in self.running().items() if not but(pid, command)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    fd = os.pidfd_open(pid)
                    try:
                        ended, _, _ = select.select([fd], [], [], max(0.0, give_up_at - time.monotonic()))
                    finally:
                        os.close(fd)
                    assert ended, f"left behind: {self.running()}"

    def close(self) -> None:
        """Kill whatever a failed test has left."""
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def unbroken_curve(steps: int) -> tuple[list[str], str]:
    """The tiny trainer's curve and end, had nothing ever happened."""
    state, lines = bytes(STATE_BYTES), []
    for step in range(steps):
        state = advance(state, step)
        lines.append(f"{step + 1} {digest(state)}")
    return lines, digest(state)


def steps_said(text: str, event: str) -> list[int]:
    """The `step=` of every line of an event, in order; `event` is the beginning of its line's body."""
    return [int(step) for step in re.findall(rf" {event}\b[^\n]*?\bstep=(\d+)", text)]
