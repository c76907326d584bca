"""Processes: which files the program's processes have open for writing, and how many ranks there are.

Owns what is read of /proc. A process of another user, or one that is gone, is left out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_PROC = Path("/proc")
_GONE_S = 3.0  # until a killed process is gone
_WRITES = os.O_WRONLY | os.O_RDWR


def family(root_pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        if (parent := _parent(pid)) is not None:
            children.setdefault(parent, []).append(pid)
    found = [root_pid]
    for pid in found:
        found += children.get(pid, ())
    return found


def alive(pids: Iterable[int]) -> list[int]:
    """Return those of these processes that have not ended."""
    return [pid for pid in pids if _state(pid) not in ("", "Z", "X")]


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal, so that the signal does not simply end it."""
    try:
        status = (_PROC / str(pid) / "status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def marked(variable: str, value: str) -> list[int]:
    """Return the processes that have a variable with this value in their environment, as they were started."""
    return [pid for pid in _pids() if _environ(pid).get(variable) == value]


def send(pids: Iterable[int], signum: int) -> None:
    """Send a signal to processes. Those of another user do not get it."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def kill(pids: Iterable[int]) -> None:
    """Kill processes, and wait until they have ended. Those of another user live on."""
    send(told := list(pids), signal.SIGKILL)
    give_up_at = time.monotonic() + _GONE_S
    while alive(told) and time.monotonic() < give_up_at:
        threading.Event().wait(0.005)


def open_for_writing(pids: Iterable[int], root: Path) -> set[str]:
    """Return the paths below a directory that these processes have open for writing, or mapped so."""
    top = os.path.realpath(root)
    return {path[len(top) + 1 :] for pid in pids for path in _written_by(pid) if path.startswith(f"{top}/")}


def ranks_of(pids: Iterable[int]) -> dict[int, int]:
    """Return the processes that have a rank of their own, by that rank: their children have the same."""
    found: dict[int, int] = {}
    for pid in pids:
        rank = _environ(pid).get("RANK", "")
        if rank.isdecimal():
            found.setdefault(int(rank), pid)
    return found


def world_size(pids: Iterable[int]) -> int | None:
    """Return how many ranks there are, as their environment says; `None` if it says nothing."""
    sizes = (_environ(pid).get("WORLD_SIZE", "") for pid in pids)
    return next((int(size) for size in sizes if size.isdecimal()), None)


def _pids() -> list[int]:
    return [int(path.name) for path in _PROC.iterdir() if path.name.isdecimal()]


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """Return what the kernel says of a process, from its state on; nothing if there is none."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _written_by(pid: int) -> Iterator[str]:
    folder = _PROC / str(pid)
    try:
        links = list((folder / "fd").iterdir())
    except OSError:
        return
    for link in links:
        try:
            info = (folder / "fdinfo" / link.name).read_text().splitlines()
            flags = next(line for line in info if line.startswith("flags:"))
            if int(flags.split()[1], 8) & _WRITES:
                yield str(link.readlink())
        except (OSError, StopIteration, ValueError):
            continue
    try:
        lines = (folder / "maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[1].startswith("rw-s") and parts[5].startswith("/"):
            yield parts[5]


def _environ(pid: int) -> dict[str, str]:
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in data.split(b"\0") if b"=" in item)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}
