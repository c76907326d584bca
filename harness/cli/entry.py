"""The `harness` command begins here: a package that is missing or too old is one line, before one is imported."""

from __future__ import annotations

import os
import sys

from harness.errors import ExitCode
from harness.requirements import unmet


def main() -> None:
    """Run the `harness` command, and exit with its code."""
    if (problem := unmet(without=("torch",))) is not None:  # the training's environment has torch, if this has none
        os.write(2, f"harness: error: {problem}\n".encode())
        sys.exit(ExitCode.USAGE)
    from harness.cli.app import main as run

    run()
