"""`harness run` that stops itself and its trainer at calls that change a disk, so that the disk can be looked at.

    python -m tests.power.stopping_run --stop calls --forget nothing --store DIR --run NAME -- python train.py

`--stop calls` stops after each changing call of its store, within each fdatasync of a file, and after each `Published`;
`--stop published` only there; `--stop never` not at all. It leads a process group; whoever waits for it (waitid,
WSTOPPED) sends SIGCONT there. Its shards are small, and go past the page cache all the same.
`--forget` is the bug that a test must be able to find: `files`, `directories` or `everything` are never synced.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloud.directory import direct
from cloud.directory.filesystem import FileSystem
from cloud.directory.store import DirectoryStore
from harness.agent.main import Agent
from harness.config.program import Program
from harness.config.settings import resolve
from harness.core import events

CHANGING = (
    "open",
    "write",
    "pwrite",
    "fsync",
    "fdatasync",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
    "ftruncate",
    "fallocate",
)
_WRITE_AND_WAIT = 7  # sync_file_range(2): SYNC_FILE_RANGE_WAIT_BEFORE | _WRITE | _WAIT_AFTER


class StoppingFileSystem(FileSystem):
    """The real system calls; the process stops after each one that changes something, and amid each fdatasync."""

    def __init__(self, *, forget: str, stops: bool) -> None:
        self._forget, self._stops = forget, stops
        self.wrote_directly = False
        if stops:
            for name in CHANGING:
                setattr(self, name, _stopping(getattr(self, name)))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:  # type: ignore[override]
        self.wrote_directly |= bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        return os.pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:  # type: ignore[override]
        if self._forget not in ("directories", "everything"):
            os.fsync(fd)

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        if self._forget in ("files", "everything"):
            return
        if self._stops:
            submit(fd)
            stop()
        os.fdatasync(fd)


def _stopping(call: Callable[..., Any]) -> Callable[..., Any]:
    def stopping(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if call is not os.open or args[1] & os.O_CREAT:
            stop()
        return result

    return stopping


def submit(fd: int) -> None:
    """The first half of a file's fdatasync: its data go to the disk, and nothing there says yet whose they are."""
    if ctypes.CDLL(None).sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE_AND_WAIT) != 0:
        raise OSError("sync_file_range failed")


def stop() -> None:
    """Stop this process and its trainer, exactly here."""
    os.killpg(0, signal.SIGSTOP)
    # That one may be taken by any thread, while this one runs on for a moment. Not past this line:
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def stop_when_published(line: events.Line) -> None:
    """A journal listener: the line is on stderr already."""
    if isinstance(line.body, events.Published):
        stop()


def main(arguments: list[str]) -> int:
    """Run; the exit code."""
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1 :]
    flags = {options[i][2:].replace("-", "_"): options[i + 1] for i in range(0, len(options), 2)}
    when, forget = flags.pop("stop"), flags.pop("forget")
    numbers = {"every_s": float, "keep_last": int}
    settings = resolve(
        {name: numbers.get(name, str)(value) for name, value in flags.items()}, os.environ, Path.cwd(), script=None
    )
    direct.LEAST_BYTES = direct.BLOCK
    fs = StoppingFileSystem(forget=forget, stops=when == "calls")
    agent = Agent(
        settings,
        Program(command, os.environ),
        sources=(),
        listeners=() if when == "never" else (stop_when_published,),
        stores=lambda location: DirectoryStore(Path(location), fs=fs),
    )
    code = agent.run()
    assert fs.wrote_directly, "no shard went past the page cache: that is not tested here"
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
