"""Run a server that ends with the process that started it, however that ends.

    python -m tests.support.with_parent PID COMMAND ...

PID is the parent's: one that has ended before this could ask the kernel for its signal is noticed all the same.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def command(*words: str) -> list[str]:
    """Return the command that runs `words` for as long as this process lives."""
    return [sys.executable, "-m", "tests.support.with_parent", str(os.getpid()), *words]


def main(arguments: Sequence[str]) -> None:
    """Ask for SIGKILL at the parent's end, and become the command."""
    parent, *words = arguments
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(parent):
        os.execvp(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1:])
