"""What this process has open: to see that nothing stays, whatever earlier tests of it have left."""

from __future__ import annotations

import gc
import os
from pathlib import Path


def open_files() -> set[tuple[str, str]]:
    """Return every open descriptor with what it refers to. What is only garbage is closed before.

    Compare with `<=`: something of an earlier test may be closed at any moment, nothing of ours may be added.
    """
    gc.collect()
    return {(entry.name, target) for entry in Path("/proc/self/fd").iterdir() if (target := _target(entry))}


def _target(entry: Path) -> str:
    try:
        return os.readlink(entry)  # noqa: PTH115  "socket:[123]" is no path
    except OSError:  # the one with which the directory was read
        return ""
