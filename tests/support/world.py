"""A world for a test: a store, a local tier, a trainer's output, and every process that is started in it.

Owns where things are, looking at them, and that nobody is left at the end; knows only so much of the harness as finds
its store and socket.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from cloud.directory.store import DirectoryStore
from cloud.notice import Deadline
from cloud.store import ObjectStore
from cloud.testing.memory import MemoryStore
from harness.config.settings import Settings, resolve
from harness.core.snapshot import RunKeys, SnapshotId
from harness.ipc.runtime_dir import RuntimeDir
from harness.snapshots import fetch, records
from tests.support.failed_tests import has_failed
from tests.support.process import Process, kill, wait_ended
from tests.support.s3_server import S3Server
from tests.support.tiny_trainer import STATE_BYTES, advance, digest

ROOT = Path(__file__).resolve().parents[2]
_MARK = "TEST_WORLD"


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
        self._started: list[Process] = []
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
    def place(self) -> RuntimeDir:
        """Where the run's agent listens."""
        settings = self._settings()
        return RuntimeDir.of(Path(settings.runtime_dir), settings.store_identity, settings.run)

    @property
    def local_tier(self) -> Path:
        """Where this store's local tier lies, below `local`."""
        return Path(self._settings().local_tier or "")

    def _settings(self) -> Settings:
        endpoint = None if self.s3 is None else self.s3.url
        flags = {"store": self.location, "run": self.run, "s3_endpoint": endpoint, "local": str(self.local)}
        return resolve(flags, self.env, self.root, script=None)

    # ---- starting ---------------------------------------------------------------------------------------------------

    def start(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[bytes] | None = None,
        cwd: Path | None = None,
    ) -> Process:
        """Start any command here."""
        made = Process(arguments, cwd=cwd or self.root, env={**self.env, **(env or {})}, stdin=stdin)
        self._started.append(made)
        return made

    def harness(self, *arguments: str | Path) -> list[str | Path]:
        """The `harness` command."""
        return [sys.executable, "-m", "harness", *arguments]

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

    @staticmethod
    def torchrun(ranks: int) -> list[str | Path]:
        """The launcher, before the module that several ranks run."""
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]

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

    def survey(self) -> records.Survey:
        """What the store knows of the run."""
        return records.survey(self.opened(), RunKeys(self.run), Deadline.never())

    def check_commits(self, but: SnapshotId | None = None) -> list[SnapshotId]:
        """No commit is torn: every shard of every manifest is there, byte for byte. The usable ones, oldest first.

        Args:
            but: one that a test has torn itself.
        """
        store, keys = self.opened(), RunKeys(self.run)  # one copy: a run that still goes on commits meanwhile
        usable = [one for one in records.survey(store, keys, Deadline.never()).commits if one != but]
        for snapshot in usable:
            manifest = records.read_manifest(store, keys, snapshot, Deadline.never())
            fetch.verify(store, keys, manifest, Deadline.never())
        return usable

    def newest(self) -> SnapshotId | None:
        """The newest committed snapshot of all tiers that is not quarantined."""
        found = list(self.survey().commits)
        if self.local_tier.is_dir():
            found += records.survey(DirectoryStore(self.local_tier), RunKeys(self.run), Deadline.never()).commits
        return max(found, default=None)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something in the file system is as it should be; fails when nobody is left to make it so."""
        looks = 0
        while not condition():
            looks += 1
            if looks % 100 == 0 and not self.running():
                assert condition(), f"never came: {what}"
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

    def wait_gone(self, *, but: Callable[[int, str], bool] = lambda pid, command: False) -> None:
        """Wait until no process of this world is left, `but` those that do not count."""
        while left := [pid for pid, command in self.running().items() if not but(pid, command)]:
            for pid in left:
                wait_ended(pid)

    def close(self) -> None:
        """Kill whatever a failed test has left, until nobody is; nothing of it is met by a later test."""
        while left := self.running():
            for pid in left:
                kill(pid)
        for host in (self, *self.hosts):
            for process in host._started:
                process.reap()
            if host._runtime_dir is not None:
                shutil.rmtree(host._runtime_dir, ignore_errors=True)


@contextlib.contextmanager
def nobody_left(request: pytest.FixtureRequest, world: World) -> Iterator[World]:
    """A world for a fixture: after a test that passed everybody has to end, after one that failed they are killed."""
    try:
        yield world
        if not has_failed(request.node):
            world.wait_gone()
    finally:
        world.close()


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
