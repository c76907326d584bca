"""Ours: where the harness keeps what it needs for a watched directory. Not in that directory itself.

Owns the folder's place. Programs ask whether their directory is empty, or delete it as they start, so ours lies beside
it: `out/` has `.harness-out/`. For renames and links it has to be on the same file system: where the directory is a
mount, or nothing can be made beside it, ours is `.harness/` in it.
"""

from __future__ import annotations

import os
from pathlib import Path

LOCK = "lock"
"""Held by the agent, and by its program."""
ASIDE = "aside"
"""Checkpoints, until they are uploaded."""
FETCHED = "fetched"
"""A snapshot, until it is whole, and gets its place."""
MOVED = "moved"
"""What was in the way of one, or torn."""
POINTER = "pointer"
"""A pointer, until it is durable."""
LINEAGE = "lineage"
"""Which snapshots the directory has given, where only times tell the order of checkpoints."""
_PREFIX = ".harness"


def folder_of(root: Path) -> Path:
    """Return the folder that belongs to a watched directory. It may not be there yet, and neither may the directory."""
    real = Path(os.path.realpath(root))
    if real == real.parent or _is_mount(real) or not _may_write(real.parent):
        return real / _PREFIX
    return real.parent / f"{_PREFIX}-{real.name}"


def is_ours(name: str) -> bool:
    """Whether a name in a watched directory is the harness's own."""
    return name == _PREFIX or name.startswith(f"{_PREFIX}-")


def _is_mount(path: Path) -> bool:
    try:
        return path.stat().st_dev != path.parent.stat().st_dev or path.is_mount()
    except OSError:
        return False  # it is made beside what is there


def _may_write(folder: Path) -> bool:
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)
