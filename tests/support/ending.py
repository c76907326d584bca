"""Tells a framework's trainer that its agent is about to ask for its end, so that it does not train on to it first.

`tests.support.harness_run` creates a file before it sends the signal; a trainer that finds it stays at its next step
(patient.py). Without it, what the signal interrupts depends on how fast the agent hears it.
"""

from __future__ import annotations

import os
from pathlib import Path

_VARIABLE = "HARNESS_TEST_ENDING"


def prepare(path: Path) -> None:
    """Name the file, which is not there yet, to this process and its children."""
    path.unlink(missing_ok=True)
    os.environ[_VARIABLE] = str(path)


def tell() -> None:
    """Create the file, if `prepare` has named one."""
    if _VARIABLE in os.environ:
        Path(os.environ[_VARIABLE]).touch()


def is_told() -> bool:
    """Return whether the file is there."""
    return _VARIABLE in os.environ and Path(os.environ[_VARIABLE]).exists()
