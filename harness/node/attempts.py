"""One start of `harness run`: our child, or a run that is here already because its parent died.

Owns processes and their ends. `harness run` is an agent with the trainer as its child. If the agent is killed, the
trainer lives on and starts another, detached agent. So look for a run that is here before starting one:

    our child ──SIGKILL──▶ its trainer, now our child, with a detached agent    } wait for it; its outcome is in the
    we ourselves ──SIGKILL──▶ our child, which listens on the run's socket      } store

Nothing here kills a process: the supervisor exists to keep the trainer training. Only a watched program starts no
agent: the supervisor ends one whose agent has died.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.core.messages import Status
from harness.errors import ConfigError
from harness.ipc.process import open_pidfd, pidfd_dead

_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING, _PF_SIGNALED = 0x4, 0x400  # include/linux/sched.h

AskStatus = Callable[[], Status | None]
"""Returns the status of the run's agent on this host; `None` if none answers."""


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        code: exit code, as a shell shows it; `None` if unknown.
        signum: the signal, if one ended `harness run` itself.
        outcome: as the agent recorded it; `None` if it could not, or had not begun.
    """

    code: int | None
    signum: int | None = None
    outcome: str | None = None


class RunAttempt(Protocol):
    """A run that is under way."""

    pidfd: int | None
    """Readable when the run's process has ended; `None` if there is more to wait for than one process."""
    ours: bool
    """Whether we started it."""

    def ended(self) -> Ended | None:
        """Return how the run ended, or `None` while it has not. Does not block for long."""
        ...

    def signal(self, signum: int) -> None:
        """Pass a signal on to the run."""
        ...

    def close(self) -> None:
        """Close descriptors. The run is not touched."""
        ...


class StartedAttempt:
    """`harness run` as our child, with our terminal and our process group."""

    ours = True

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], said: Callable[[int], str | None]) -> None:
        """Start it.

        Args:
            arguments: its command line.
            environ: its environment.
            said: returns the outcome that the agent with a given pid has recorded on this host.

        Raises:
            ConfigError: it cannot be started.
        """
        self._said = said
        try:
            self._process = subprocess.Popen(list(arguments), env=dict(environ))
        except OSError as err:
            raise ConfigError(f"{arguments[0]}: {err.strerror}") from err
        self.pidfd: int | None = os.pidfd_open(self._process.pid)

    def ended(self) -> Ended | None:
        """See `RunAttempt`."""
        code = self._process.poll()
        reap_strangers(but=self._process.pid)
        if code is None:
            return None
        return Ended(128 - code, -code) if code < 0 else Ended(code, outcome=self._said(self._process.pid))

    def signal(self, signum: int) -> None:
        """See `RunAttempt`. Signals the agent alone: it knows what to tell its trainer."""
        if self._process.poll() is None and self.pidfd is not None:
            signal.pidfd_send_signal(self.pidfd, signum)

    def close(self) -> None:
        """See `RunAttempt`."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class FoundAttempt:
    """A run that is here already: an agent that answers, or processes that may start one.

    Args:
        ask: see `AskStatus`.
        outcome: returns the exit code for how the found generation ended; `None` if unknown.
        pids: processes to wait for, whether an agent answers or not.
        found: the agent's first answer, if there was one.
    """

    ours = False
    pidfd: int | None = None

    def __init__(
        self,
        ask: AskStatus,
        outcome: Callable[[int | None], int | None],
        pids: Sequence[int] = (),
        found: Status | None = None,
    ) -> None:
        self._ask, self._outcome = ask, outcome
        self._agent: int | None = None
        self._generation: int | None = None
        self._alive: dict[int, int] = {}
        for pid in pids:
            self._await(pid)
        if found is not None:
            self._note(found)

    def ended(self) -> Ended | None:
        """See `RunAttempt`. The run has ended once no process is left and no agent answers."""
        reap_strangers()
        for pid, pidfd in list(self._alive.items()):
            if pidfd_dead(pidfd):
                os.close(self._alive.pop(pid))
        answer = self._ask()
        if answer is not None:
            self._note(answer)
        if answer is not None or self._alive:
            return None
        return Ended(self._outcome(self._generation))

    def signal(self, signum: int) -> None:
        """See `RunAttempt`. Passes on only SIGTERM, which ends a service: Ctrl-C is not for a run started elsewhere."""
        if signum != signal.SIGTERM:
            return
        target = self._agent if self._agent in self._alive else next(iter(self._alive), None)
        if target is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._alive[target], signum)

    def close(self) -> None:
        """See `RunAttempt`."""
        while self._alive:
            os.close(self._alive.popitem()[1])

    def _note(self, answer: Status) -> None:
        self._generation, self._agent = answer.generation, answer.agent_pid
        for pid in (answer.agent_pid, answer.trainer_pid):
            if pid is not None:
                self._await(pid)

    def _await(self, pid: int) -> None:
        if pid not in self._alive and (pidfd := open_pidfd(pid)) is not None:
            self._alive[pid] = pidfd


def adopt_orphans() -> None:
    """From now on, adopt processes whose parents below us die, so that they can be found, and are reaped."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def left_behind(proc: Path = Path("/proc")) -> list[int]:
    """Return our living children in our process group: after the death of an agent, its trainer.

    Processes that a program has started to outlive it are in a group or session of their own; no one waits for those.
    """
    found, ours, group = [], os.getpid(), os.getpgrp()
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                # Bytes: the kernel cuts a program's name off after 15 bytes, even in the middle of a character.
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == ours and int(fields[2]) == group and not _is_dying(fields):
                    found.append(int(entry.name))
    return found


def _is_dying(fields: Sequence[bytes]) -> bool:
    """Return whether a process is dead, or about to be: a SIGKILL takes a moment. By its fields in proc_pid_stat(5)."""
    state, flags, pending = fields[0], int(fields[6]), int(fields[28])
    return state in b"ZX" or bool(flags & (_PF_EXITING | _PF_SIGNALED)) or bool(pending & 1 << signal.SIGKILL - 1)


def reap_strangers(but: int | None = None) -> None:
    """Reap children that we did not start: orphans, and in a container those of all processes. Does not block.

    Args:
        but: the child that is left to its own starter.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == but:
                return  # the others follow once it is reaped
            os.waitpid(ended.si_pid, 0)
