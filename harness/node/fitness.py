"""Whether this machine is fit to train: a command that is run before the first start.

Owns which command that is, and what it came to. What follows is `acts.py`.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import ConfigError

VARIABLE = "HARNESS_SELF_TEST"
TIMEOUT_S = 60.0  # nvidia-smi hangs where a GPU has fallen off the bus
KILLED_S = 1.0
_GPU = Path("/dev/nvidia0")


def choose_test(given: str | None, environ: Mapping[str, str], gpu: Path = _GPU) -> list[str]:
    """The command: an option, else the environment's, else `nvidia-smi -L` where there is a GPU. Empty for none.

    Raises:
        ConfigError: it cannot be read.
    """
    line = given if given is not None else environ.get(VARIABLE)
    if line is None:
        return ["nvidia-smi", "-L"] if gpu.exists() and shutil.which("nvidia-smi") else []
    try:
        return shlex.split(line)
    except ValueError as err:
        raise ConfigError(f"the self-test cannot be read ({err}): {line}") from err


def run_test(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> str | None:
    """Run it; what is wrong, or `None`."""
    shown = " ".join(command)
    try:
        test = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as err:
        return f"{shown}: {err.strerror}"
    try:
        said = test.communicate(timeout=timeout_s)[0].decode(errors="replace").strip()[-1000:]
    except subprocess.TimeoutExpired:
        test.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # what hangs in a driver cannot be killed
            test.wait(KILLED_S)
        if test.stdout is not None:
            test.stdout.close()
        return f"{shown} has not ended in {timeout_s:g} s"
    return f"{shown} ended with {test.returncode}{f': {said}' if said else ''}" if test.returncode else None
