"""Voice: what this process says to the user, on stderr or as a warning.

Owns who speaks: of several ranks, the first one says what all of them would say.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

from harness.core.words import printable
from harness.errors import ConfigError
from harness.trainer.ranks import find_rank

_PACKAGE = "harness."


def say(text: str, *, each: bool = False) -> None:
    """Show a line to the user. `each`: of several ranks, every one that comes here does, and not the first one only."""
    if not (each or _speaks()):
        return
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone: that is when saving matters most
        sys.stderr.write(f"harness: {printable(text)}\n")
        sys.stderr.flush()


def warn(text: str) -> None:
    """Show a warning to the user, at the line of the script that has called the harness."""
    if not _speaks():
        return
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _speaks() -> bool:
    try:
        return find_rank(os.environ).speaks
    except ConfigError:  # which is raised where it matters
        return True
