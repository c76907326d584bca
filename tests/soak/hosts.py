"""A host of the soak: its processes, its disk, its metadata service, and what its processes have written.

A host is a runtime directory and a local disk; everything that runs on it carries its mark in the environment, so that
it can be found, counted and killed at once, detached agents and data workers too. Owns these processes and nothing
else: it decides nothing. The curves and logs lie outside of the disk, which an instance takes with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cloud.testing.metadata_sim import MetadataSimulator

ROOT = Path(__file__).resolve().parents[2]
TRAIN = Path(__file__).with_name("train.py")
RUN = "soak"
MARK = "SOAK_HOST"
_EVENT = re.compile(r"^harness: soak g(\d+) (\w+) ?(.*)$")
_FIELD = re.compile(r'(\w+)=("[^"]*"|\S+)')
REAPED_S = 15.0


@dataclass(frozen=True)
class Told:
    """One line of an agent's log."""

    generation: int
    event: str
    fields: dict[str, str]


@dataclass(frozen=True)
class Sample:
    """What an agent has at one moment. Shared memory is the slots': only its own memory can leak."""

    at: float
    own_bytes: int
    resident_bytes: int
    descriptors: int
    threads: int


@dataclass
class Log:
    """What one start of `harness run` writes, or the detached agents of a host."""

    path: Path
    durable: set[str]  # the snapshots that had been told to be durable before it began, and what it told itself
    read_to: int = 0

    def news(self) -> list[Told]:
        """The events that were told since the last call."""
        found = []
        with self.path.open("rb") as log:
            log.seek(self.read_to)
            *lines, _rest = log.read().split(b"\n")
        for line in lines:
            self.read_to += len(line) + 1
            if match := _EVENT.match(line.decode(errors="replace")):
                fields = {name: value.strip('"') for name, value in _FIELD.findall(match[3])}
                found.append(Told(int(match[1]), match[2], fields))
        return found


@dataclass
class Setting:
    """What is the same for every host."""

    directory: Path
    store: str
    endpoint: str
    options: tuple[str, ...]
    pace_s: float
    epochs: int = 1_000_000  # more than there is time for
    samples: dict[int, list[Sample]] = field(default_factory=dict)


class Host:
    """One instance, from its start to its end. For one thread."""

    def __init__(self, number: int, setting: Setting) -> None:
        self.number, self._setting = number, setting
        self.directory = setting.directory / f"h{number}"
        (self.directory / "tmp").mkdir(parents=True)
        self._mark = secrets.token_hex(8)
        self.simulator = MetadataSimulator().start()
        self.logs: list[Log] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.gone_at: float | None = None  # when the instance is taken away
        self.thaw_at: float | None = None
        self._later: tuple[float, Callable[[], object]] | None = None  # what else is done to it, and when
        self.is_lost = False
        self.misled_until = 0.0  # its metadata service has shown something that has to be taken for a notice
        self.struck: set[str] = set()  # what was done to it since its last start
        self.generation = 0  # that it has claimed last
        self.has_told = False  # anything, since its last start
        self.told_code: int | None = None  # the exit code in an agent's last word
        self.left_at: float | None = None  # when `harness run` was seen to have ended

    @property
    def access_key(self) -> str:
        return f"HOST{self.number}"

    def environment(self) -> dict[str, str]:
        """The caller's, without what would change the run."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HARNESS", "AWS_")) and not name.lower().endswith("_proxy")
        }
        return kept | {
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.directory / "tmp"),
            "HARNESS_RUNTIME_DIR": str(self.directory / "run"),
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "SOAK_CURVE": str(self.curve),
            "SOAK_FINAL": str(self._setting.directory / "final.safetensors"),
            "SOAK_EPOCHS": str(self._setting.epochs),
            "SOAK_PACE_S": str(self._setting.pace_s),
            MARK: self._mark,
        }

    @property
    def command(self) -> list[str]:
        """What a user would have in a unit file: the same every time."""
        setting = self._setting
        harness = [sys.executable, "-m", "harness", "run", "--run", RUN, "--store", setting.store]
        harness += ["--s3-endpoint", setting.endpoint, "--local", str(self.directory / "disk")]
        harness += ["--metadata", self.simulator.url, *setting.options]
        return [*harness, "--", sys.executable, str(TRAIN)]

    def start(self, durable: set[str]) -> None:
        """`harness run`, on whatever is on this host. `durable`: the snapshots that are known to be."""
        self.starts += 1
        self.struck, self.told_code, self.left_at, self.has_told = set(), None, None, False
        self._later = None
        self.logs.append(Log(self._setting.directory / f"h{self.number}.{self.starts}.log", set(durable)))
        with self.logs[-1].path.open("ab") as sink:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd=self._setting.directory,
                env=self.environment(),
                start_new_session=True,
            )

    # ---- looking ----------------------------------------------------------------------------------------------------

    @property
    def curve(self) -> Path:
        """The steps that were trained here."""
        return self._setting.directory / f"h{self.number}.curve"

    def running(self) -> dict[int, tuple[int, str]]:
        """Every live process of this host: its parent and its command line by its pid."""
        found = {}
        needle = f"{MARK}={self._mark}\0".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError, ValueError):
                    if needle in (entry / "environ").read_bytes():
                        status = (entry / "stat").read_text().rpartition(")")[2].split()
                        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        if status[0] not in "ZX" and command:
                            found[int(entry.name)] = (int(status[1]), command)
        return found

    def agents(self) -> list[int]:
        """The agents: `harness run`, and any that a trainer has started in its place."""
        return [pid for pid, (_, command) in self.running().items() if _is_agent(command)]

    def trainers(self) -> list[int]:
        """The trainer, without its data workers, which have its command line."""
        running = self.running()
        ours = {pid for pid, (_, command) in running.items() if str(TRAIN) in command and not _is_agent(command)}
        return [pid for pid in ours if running[pid][0] not in ours]

    def workers(self) -> list[int]:
        """The trainer's data workers."""
        running, trainers = self.running(), self.trainers()
        return [pid for pid, (parent, command) in running.items() if parent in trainers and not _is_agent(command)]

    @property
    def exit_code(self) -> int | None:
        """Of the last `harness run`, as a shell shows it; `None` while it runs."""
        code = self.process.poll() if self.process else 0
        return 128 - code if code is not None and code < 0 else code

    def has_ended(self) -> bool:
        """Whether nothing runs here any more."""
        return self.exit_code is not None and not self.running()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until nothing runs here; whether that came."""
        give_up_at = time.monotonic() + timeout_s
        while not self.has_ended():
            if time.monotonic() > give_up_at:
                return False
            threading.Event().wait(0.1)
        return True

    def news(self) -> list[tuple[Log, Told]]:
        """The events that its agents have told since the last call, those of detached ones too."""
        for path in (self.directory / "run").glob("**/*.log"):
            if all(path != log.path for log in self.logs):
                self.logs.append(Log(path, set(self.logs[-1].durable)))
        return [(log, told) for log in self.logs for told in log.news()]

    def sample(self) -> None:
        """Note what each agent has now."""
        for pid in self.agents():
            with contextlib.suppress(OSError):
                status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                if "RssAnon" in status:
                    sample = Sample(
                        at=time.monotonic(),
                        own_bytes=_kilobytes(status["RssAnon"]),
                        resident_bytes=_kilobytes(status["VmRSS"]),
                        descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
                        threads=int(status["Threads"]),
                    )
                    self._setting.samples.setdefault(pid, []).append(sample)

    # ---- ending -----------------------------------------------------------------------------------------------------

    def send(self, pids: list[int], signum: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def kill(self) -> None:
        """SIGKILL everything, as the end of the instance does, or of its container."""
        while running := self.running():
            self.send(list(running), signal.SIGKILL)
        if self.process is not None:
            self.process.wait(REAPED_S)

    def then(self, at: float, do: Callable[[], object]) -> None:
        """Do this too, at monotonic `at`; of several, the last. See `do_what_is_due`."""
        self._later = (at, do)

    def do_what_is_due(self, now: float) -> None:
        """What `then` was told, once its time has come."""
        if self._later is not None and now >= self._later[0]:
            (_, do), self._later = self._later, None
            do()

    def terminate(self, signum: int = signal.SIGTERM) -> bool:
        """A signal as a service manager sends it: to `harness run`, or to what a dead one has left. Was there any?"""
        pids = self.agents() if self.exit_code is None else [*self.trainers(), *self.agents()]
        self.send(pids, signum)
        return bool(pids)

    def freeze(self) -> None:
        """SIGSTOP everything."""
        for _ in range(3):  # what was forked between looking and stopping
            self.send(list(self.running()), signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT everything."""
        self.thaw_at = None
        self.send(list(self.running()), signal.SIGCONT)

    def lose(self) -> None:
        """The instance is gone, and its disk with it. Its lock stays, so that no other host has the same inode."""
        self.kill()
        self.is_lost = True
        self.simulator.stop()
        shutil.rmtree(self.directory / "disk", ignore_errors=True)
        shutil.rmtree(self.directory / "tmp", ignore_errors=True)


def _is_agent(command: str) -> bool:
    return " -m harness " in command or " -m harness.agent " in command


def _kilobytes(text: str) -> int:
    return int(text.split()[0]) * 1024
