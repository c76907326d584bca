"""Real processes for tests: started in a world of their own, heard line by line, and gone at the end.

Owns starting, listening, waiting and cleaning up; knows only so much of the harness as finds its store and socket.
Every wait has a time-out and waits *for* something: a line, an exit, the last process of the world.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from cloud.directory import DirectoryStore
from cloud.memory import MemoryStore
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.agent import commit
from harness.config import resolve
from harness.core.snapshot import RunKeys, SnapshotId
from harness.ipc.channel import RunPlace
from tests.support.s3_server import S3Server
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

    def __init__(self, root: Path, *, run: str = "a", local: bool = False, s3: S3Server | None = None) -> None:
        """Nothing is started.

        Args:
            root: its directory.
            run: the run's name.
            local: whether `run_harness` and `run_rigged` use a local tier; with S3 they do.
            s3: the store, instead of a directory.
        """
        self.root, self.run, self.has_local, self.s3 = root, run, local, s3
        self.store, self.local = root / "store", root / "local"
        self.curve, self.final, self.released = root / "curve", root / "final", root / "released"
        self.hosts: list[World] = []
        self._runtime_dir: Path | None = None
        self._mark = secrets.token_hex(8)

    def elsewhere(self) -> World:
        """Another host with the same store: its agents see nothing of this one's disk, memory and sockets."""
        root = self.root / f"host-{len(self.hosts) + 2}"
        root.mkdir()
        host = World(root, run=self.run, local=self.has_local, s3=self.s3)
        host.store = self.store
        host._mark = f"{self._mark}.{len(self.hosts) + 2}"
        host._runtime_dir = Path(tempfile.mkdtemp(prefix="harness-"))  # short: a socket's path ends at 107 bytes
        self.hosts.append(host)
        return host

    @property
    def location(self) -> str:
        """The store, as a user names it."""
        return str(self.store) if self.s3 is None else f"s3://{self.s3.bucket}/p"

    @property
    def env(self) -> dict[str, str]:
        """The environment of everything that is started here."""
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", _MARK: self._mark}
        if self._runtime_dir is not None:
            env["HARNESS_RUNTIME_DIR"] = str(self._runtime_dir)
        if self.s3 is not None:
            env |= {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        return env

    @property
    def place(self) -> RunPlace:
        """Where the run's agent listens."""
        flags = {"store": self.location, "run": self.run, "s3_endpoint": None if self.s3 is None else self.s3.url}
        settings = resolve(flags, self.env, self.root, script=None)
        return RunPlace.of(Path(settings.runtime_dir), settings.store_identity, settings.run)

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
        with_local = self.has_local or self.s3 is not None
        tiers = ["--local", str(self.local), "--durable-every-s", "0.01"] if with_local else []
        return [*self.named(), "--metadata", "off", *tiers]

    def named(self) -> list[str]:
        """Options that name the run to every command."""
        endpoint = [] if self.s3 is None else ["--s3-endpoint", self.s3.url]
        return ["--store", self.location, "--run", self.run, *endpoint]

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

    def opened(self) -> ObjectStore:
        """The store, to look at: what S3 holds now as a copy, which no fault strikes and no call is counted for."""
        if self.s3 is None:
            return DirectoryStore(self.store)
        copy = MemoryStore()
        for key, data in self.s3.contents().items():
            if key.startswith("p/"):
                copy.put(key.removeprefix("p/"), memoryview(data), deadline=Deadline.never())
        return copy

    def survey(self) -> commit.Survey:
        """What the store knows of the run."""
        return commit.survey(self.opened(), RunKeys(self.run), Deadline.after(10.0))

    def check_commits(self) -> list[SnapshotId]:
        """No commit is torn: every shard of every manifest is there, byte for byte. The usable ones, oldest first."""
        store, keys = self.opened(), RunKeys(self.run)
        usable = self.survey().commits
        for snapshot in usable:
            manifest = commit.read_manifest(store, keys, snapshot, Deadline.after(10.0))
            commit.verify(store, keys, manifest, Deadline.after(10.0))
        return list(usable)

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
            lambda: self._is_there() and any(found.step >= step for found in self.survey().commits), f"step {step}"
        )

    def _is_there(self) -> bool:
        return self.s3 is not None or self.store.is_dir()

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

    def check_tiny(self, steps: int = 20, *before: World) -> None:
        """Every step of every life was the unbroken run's, none is missing, and so is the end.

        Args:
            steps: where it ends.
            before: other hosts on which it was trained.
        """
        unbroken, final = unbroken_curve(steps)
        trained = [line for host in (*before, self) for line in host.curve.read_text().splitlines()]
        assert set(trained) == set(unbroken)
        assert self.final.read_text() == final

    # ---- the end ----------------------------------------------------------------------------------------------------

    def signal_host(self, signum: int) -> None:
        """Signal every process of this host, and of no other."""
        for pid in self.running(alone=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def lose_host(self) -> None:
        """The instance is gone without a word, and its disk with it."""
        self.signal_host(signal.SIGKILL)
        self.signal_host(signal.SIGKILL)  # whoever was being started at the first
        self.wait_gone(but=lambda pid, _: pid not in self.running(alone=True))
        shutil.rmtree(self.local, ignore_errors=True)

    def running(self, *, alone: bool = False) -> dict[int, str]:
        """Every live process that was started here, or by one that was: its command line by its pid.

        Those of its other hosts count as well, unless `alone`.
        """
        found = {}
        mark = f"{_MARK}={self._mark}".encode() + (b"\0" if alone else b"")
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes():
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
        for host in self.hosts:
            shutil.rmtree(str(host._runtime_dir), ignore_errors=True)


@functools.cache
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
