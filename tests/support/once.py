"""What is made once for all workers of a test run, by whoever needs it first."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

_MADE = "made"


def once(factory: pytest.TempPathFactory, worker_id: str, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder `name` that `make` has filled, in this process or in another worker's; waits for that one.

    Nothing that `make` starts may outlive it: the worker may end before the others do. If it fails, the next one tries.
    """
    own = factory.getbasetemp()
    shared = own if worker_id == "master" else own.parent
    folder = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _MADE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / _MADE).touch()
    return folder
