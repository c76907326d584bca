"""Asking: has a program save a checkpoint now, in the way that its adapter says.

Owns how it is asked. A signal goes only to processes that have a handler for it: it would end the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from harness.watch import processes
from harness.watch.adapter import Save

_HTTP_S = 5.0


def ask(save: Save, root: Path, pid: int) -> str | None:
    """Ask a program to save. Return how, in words; `None` if there is no way that it would hear.

    Does not wait for an answer.

    Args:
        save: of the adapter. If it says nothing, a program that has a handler for SIGTERM is taken to save by it.
        root: the watched directory.
        pid: of the program's first process.
    """
    if save.touch:
        with contextlib.suppress(OSError):
            path = root / save.touch
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            return f"{save.touch} was made"
    if save.http:
        threading.Thread(target=_post, args=(save.http,), name="harness-watch-ask", daemon=True).start()
        return f"a POST to {save.http}"
    if save.command:
        with contextlib.suppress(OSError):
            process = subprocess.Popen([*save.command], stdin=subprocess.DEVNULL)
            threading.Thread(target=process.wait, name="harness-watch-ask", daemon=True).start()
            return save.command[0]
    name = save.signal or ("" if save.is_possible else "SIGTERM")
    if not name:
        return None
    signum = signal.Signals[name]
    told = [each for each in listeners(save, pid) if processes.catches(each, signum)]
    for each in told:
        with contextlib.suppress(OSError):
            os.kill(each, signum)
    return f"{name} to {len(told)} process{'es' if len(told) > 1 else ''}" if told else None


def listens(save: Save, pid: int) -> bool:
    """Whether there is a way to ask the program that it would hear."""
    if save.touch or save.http or save.command:
        return True
    signum = signal.Signals[save.signal or "SIGTERM"]
    return any(processes.catches(each, signum) for each in listeners(save, pid))


def listeners(save: Save, pid: int) -> Sequence[int]:
    """Return the processes that a signal is for: the ranks; or the first process that has a handler for it."""
    family = processes.family(pid)
    ranks = processes.ranks_of(family)
    if ranks and (save.to == "ranks" or not save.is_possible):
        return [ranks[rank] for rank in sorted(ranks)]
    signum = signal.Signals[save.signal or "SIGTERM"]
    return [each for each in family if processes.catches(each, signum)][:1]


def _post(url: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the program may not answer, and the table may be wrong
        urllib.request.urlopen(urllib.request.Request(url, data=b"", method="POST"), timeout=_HTTP_S).close()
