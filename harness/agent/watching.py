"""Directory mode: the agent of a program that has no Checkpointer, and saves by itself in a directory.

Owns the watched directory: its lock, what is laid back into it before the program starts, the watcher while it runs,
and how it is asked to save. `resume/laying_back.py` decides what it goes on from. Main thread, except where it says so.

    search ─▶ laid back ─▶ program ─▶ a whole checkpoint ─▶ set aside ─▶ remote tier
    notice ─▶ asked to save ─▶ its last checkpoint ─▶ it ends ─▶ a last look ─▶ the end
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.agent.context import CalledOff, Context
from harness.agent.resume.laying_back import CheckpointFinder, Laid
from harness.agent.resume_point import ResumePoint
from harness.core import events
from harness.errors import ConfigError
from harness.ipc.process import is_in_foreground
from harness.watch import processes
from harness.watch.adapter import Save, named
from harness.watch.asking import ask, listens
from harness.watch.lineage import Lineage
from harness.watch.ours import LOCK, folder_of
from harness.watch.place import move_aside
from harness.watch.survey import Survey
from harness.watch.watcher import Checkpoint, Watcher

PLACEHOLDER = "{checkpoint}"
"""Stands, in a program's command, for the path of the checkpoint that it goes on from."""
VARIABLE = "HARNESS_CHECKPOINT"
EARLIER_S = 10.0  # data workers of torch look each 5 s whether their program lives
_TELL_S = 1.0
_NOT_HEARD_S = 1.0  # until a program that Ctrl-C has not reached gets it
_HEARD_S = 10.0  # the same where a terminal has sent it to the program as well, which may take a while to save
_LOOK_S = 0.1
_COARSE_NS = 20_000_000  # so much may a file's time be behind the clock
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class WatchingEvents:
    """Callbacks. Each is called in the main thread.

    Attributes:
        found: a checkpoint was set aside.
        signal: send the program a signal.
    """

    found: Callable[[Checkpoint], None]
    signal: Callable[[int], None]


class Watching:
    """The watched directory of one agent, and the programs that write there, one after the other."""

    def __init__(self, context: Context, root: Path, name: str | None, tell: WatchingEvents) -> None:
        """Prepare; nothing is read yet.

        Args:
            context: of the agent.
            root: the directory.
            name: the adapter that the user has named, if any.
            tell: callbacks.

        Raises:
            ConfigError: there is no such adapter.
        """
        if name is not None:
            named(name)
        self._context, self.root, self._name, self._tell = context, root, name, tell
        self._watcher = Watcher(root, self._on_found, context.say, context.on_bug)
        self._finder: CheckpointFinder | None = None
        self._laid = Laid()
        self._lock_fd: int | None = None
        self._mark: tuple[str, str] | None = None
        self._pid: int | None = None
        self._asked: Save | None = None
        self._asked_ns = 0
        self._pass_on_at = math.inf
        self._leaves = False
        self.awaits_start = False
        """Whether a program is to be started once it is known what it goes on from."""

    def open(self, mark: tuple[str, str], is_called_off: Callable[[], bool]) -> None:
        """Lock the directory for this agent and its programs. It may not be there yet: some programs want that.

        Blocks while processes of an earlier start end, which data workers do seconds after they have lost their
        program; not longer than EARLIER_S.

        Args:
            mark: a variable, and its value, in the environment of every process of the run's programs on this host.
            is_called_off: whether this start is to end instead. Posts are run meanwhile.

        Raises:
            ConfigError: it cannot be used, or a program of an earlier start still runs.
            CalledOff: `is_called_off` was true while this waited.
        """
        path = folder_of(self.root) / LOCK
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as err:
            raise ConfigError(f"{self.root} cannot be watched: {err.strerror}") from err
        give_up_at, told = time.monotonic() + EARLIER_S, False
        while (in_use := self._in_use(fd, path, mark)) is not None and time.monotonic() < give_up_at:
            if not told and time.monotonic() > give_up_at - EARLIER_S + _TELL_S:
                self._context.say(f"waiting up to {EARLIER_S:.0f} s for {self.root}: {in_use}")
                told = True
            threading.Event().wait(_LOOK_S)
            self._context.loop.run_posts()
            if is_called_off():
                os.close(fd)
                raise CalledOff
        if in_use is not None:
            os.close(fd)
            raise ConfigError(f"{self.root} is in use: {in_use}. End it first")
        self._lock_fd, self._mark = fd, mark

    def _in_use(self, fd: int, path: Path, mark: tuple[str, str]) -> str | None:
        """Lock the file. Return who else uses the directory; `None` if it is free."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"a program of an earlier start still writes there (see fuser {path})"
        except OSError as err:
            if err.errno not in _NO_LOCKS:
                os.close(fd)
                raise ConfigError(f"{self.root} cannot be watched: {err.strerror}") from err
        outlived = processes.alive(processes.marked(*mark))  # a launcher does not hand the lock on to its ranks
        if not outlived:
            return None
        shown = ", ".join(map(str, outlived))
        return f"processes of a program of an earlier start still run: {shown}"

    @property
    def inherited(self) -> tuple[int, ...]:
        """Descriptors that a program inherits, so that the directory stays locked while it lives."""
        return () if self._lock_fd is None else (self._lock_fd,)

    # ---- before the program -----------------------------------------------------------------------------------------

    def finder(self, run_id: str, goes_back: bool) -> CheckpointFinder:
        """Return what lays a snapshot back. From the search's thread."""
        self._finder = CheckpointFinder(self._context, run_id, self.root, self._name, goes_back=goes_back)
        return self._finder

    def begin_at_zero(self) -> None:
        """Move every checkpoint away, for a run that begins at step 0 although there are some. Blocks on the disk."""
        there = Survey.of(self.root, self._name)
        gone = [path for one in there.judged for path in one.paths]
        pointers = there.pointers_without(there.judged)  # first: alone they would lead nowhere
        folder = move_aside(self.root, [*pointers, *gone], "fresh")
        if folder is not None:
            self._context.say(f"--fresh: {len(there.judged)} checkpoints are moved to {folder}")
        Lineage(self.root).forget()
        self._finder = None

    def started(self, pid: int) -> None:
        """Watch a program from now on."""
        self._pid, self._asked = pid, None
        laid = self._found
        self._watcher.begin(laid.adapter, laid.taken, pid, is_named=self._name is not None, mark=self._mark)
        if "HARNESS_REHEARSAL" in os.environ:  # two passes are compared: none of their checkpoints should be missed
            self._watcher.hurry()

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a program's command, with the path of its checkpoint in it.

        Without a checkpoint, a word with `{checkpoint}` in it is left out; so is the option before a word that is
        nothing else. A word of several words, such as a script for `bash -c`, stays, with nothing in its place.
        """
        path, words = self._found.checkpoint, list[str]()
        for word in command:
            if PLACEHOLDER not in word:
                words.append(word)
            elif path is not None or len(word.split()) > 1:
                words.append(word.replace(PLACEHOLDER, "" if path is None else str(path)))
            elif word == PLACEHOLDER and words and words[-1].startswith("-"):
                words.pop()
        return words

    def environment(self) -> Mapping[str, str]:
        """Return what is added to a program's environment: the path of its checkpoint, or nothing in its place."""
        path = self._found.checkpoint
        return {VARIABLE: "" if path is None else str(path)}

    def restored(self, point: ResumePoint) -> events.Restored:
        """Return the event of the snapshot that a program goes on from."""
        return events.Restored(snapshot=str(point.id), step=point.id.step, seconds=point.filling_s)

    @property
    def _found(self) -> Laid:
        return Laid() if self._finder is None else self._finder.laid

    # ---- while it runs ----------------------------------------------------------------------------------------------

    @property
    def step(self) -> int | None:
        """Of the newest checkpoint; `None` if there is none."""
        return self._watcher.step

    @property
    def settled(self) -> bool:
        """Whether no program runs, and the directory was looked at since the last one ended."""
        return self._watcher.settled

    @property
    def answers(self) -> bool:
        """Whether a program runs that can be asked to save."""
        return self._pid is not None and listens(self._save, self._pid)

    @property
    def _save(self) -> Save:
        adapter = self._watcher.adapter
        return Save() if adapter is None else adapter.save

    def leave(self, *, by_signal: bool) -> None:
        """Ask the program to save, and to end.

        Args:
            by_signal: whether a signal has come that would have ended it. Then it gets that if it cannot be asked; else
                it goes on, and may save once more, until the time is up.
        """
        if self._pid is None or self._asked is not None:
            return
        if self._ask(self._pid):
            return
        if by_signal:
            self._tell.signal(signal.SIGTERM)
        else:
            self._context.say("the program has no way to be asked to save: it goes on until the time is up")

    def _ask(self, pid: int) -> bool:
        """Ask a program to save. Return whether there is a way that it would hear."""
        self._watcher.hurry()
        save = self._save
        how = ask(save, self.root, pid)
        if how is not None:
            self._asked, self._asked_ns = save, time.time_ns() - _COARSE_NS
            self._context.say(f"the program is asked to save: {how}")
        return how is not None

    def interrupted(self) -> None:
        """Have the program leave after Ctrl-C. A terminal sends that to it as well; a command may not."""
        self._pass_on_at = time.monotonic() + (_HEARD_S if is_in_foreground() else _NOT_HEARD_S)

    def pass_on_in_time(self) -> None:
        """Ask the program to save and to leave after Ctrl-C, or send it that, if it shows no sign of having got it."""
        if self._pid is None or self._asked is not None or time.monotonic() < self._pass_on_at:
            return
        family = processes.family(self._pid)
        if processes.open_for_writing(family, self.root):  # it saves
            self._pass_on_at = time.monotonic() + _NOT_HEARD_S
            return
        self._pass_on_at = math.inf
        if not self._ask(self._pid):
            self._context.say("the program gets Ctrl-C")
            processes.send(family, signal.SIGINT)  # to all, as a terminal does: a shell waits for what it has started

    def ended(self, *, well: bool, is_last: bool, leaves_s: float | None = None) -> None:
        """Look once more at what a program has left. See `Watcher.program_ended`."""
        self._pid, self._pass_on_at = None, math.inf
        self._leaves = leaves_s is not None
        self._watcher.program_ended(well=well, is_last=is_last, leaves_s=leaves_s)

    def why_not(self) -> str:
        """Return why the newest thing in the directory is no snapshot; empty if it is one."""
        if self._watcher.adapter is None:
            return f"nothing in {self.root} is known as a checkpoint: see harness watch {self.root}"
        return f"{self._watcher.why}: it is not saved" if self._watcher.why else ""

    def close(self) -> None:
        """Stop looking, and unlock the directory once the programs have ended as well: they have if they are to."""
        self._watcher.close()
        if self._leaves and self._mark is not None:  # the time was up
            processes.kill(processes.alive(processes.marked(*self._mark)))
        if self._lock_fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._lock_fd)
            self._lock_fd = None

    def _on_found(self, checkpoint: Checkpoint) -> None:
        """Pass a checkpoint on to the main thread. In the watcher's thread."""
        self._context.post(lambda: self._take(checkpoint))

    def _take(self, checkpoint: Checkpoint) -> None:
        self._tell.found(checkpoint)
        is_answer = checkpoint.record.modified_ns >= self._asked_ns  # and none that was being set aside already
        if self._asked is not None and not self._asked.leaves and is_answer:
            self._tell.signal(signal.SIGTERM)
