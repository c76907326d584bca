"""The self-test: a command that runs before the first start and shows whether this machine is fit to train.

Owns the choice of the command, and its result. `actions.py` acts on the result.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import ConfigError
from harness.ipc.process import open_pidfd
from harness.node.signals import Signals

VARIABLE = "HARNESS_SELF_TEST"
TIMEOUT_S = 60.0  # nvidia-smi hangs where a GPU has fallen off the bus
KILLED_S = 1.0
_GPU = Path("/dev/nvidia0")


def choose_test(given: str | None, environ: Mapping[str, str], gpu: Path = _GPU) -> list[str]:
    """Return the command: an option, else the environment's, else `nvidia-smi -L` where there is a GPU. Empty for none.

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


def run_test(command: Sequence[str], signals: Signals, timeout_s: float = TIMEOUT_S) -> str | None:
    """Run the self-test; return what is wrong, or `None`. A signal that asks us to exit kills it, and it has failed."""
    shown = " ".join(command)
    with os.fdopen(os.memfd_create("self-test", os.MFD_CLOEXEC), "w+b") as output:
        try:
            test = subprocess.Popen(list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        except OSError as err:
            return f"{shown}: {err.strerror}"
        if not _has_ended(test, signals, timeout_s):
            test.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # what hangs in a driver cannot be killed
                test.wait(KILLED_S)
            return f"{shown} has not ended in {timeout_s:g} s"
        output.seek(0)
        said = output.read().decode(errors="replace").strip()[-1000:]
    return f"{shown} ended with {test.returncode}{f': {said}' if said else ''}" if test.returncode else None


def _has_ended(test: subprocess.Popen[bytes], signals: Signals, timeout_s: float) -> bool:
    """Wait at most `timeout_s`, or until a signal asks us to exit; return whether the test has ended."""
    give_up_at = time.monotonic() + timeout_s
    with contextlib.ExitStack() as held:
        if (pidfd := open_pidfd(test.pid)) is not None:
            held.callback(os.close, pidfd)
        while test.poll() is None and signals.asked is None and (left_s := give_up_at - time.monotonic()) > 0:
            signals.pause(left_s, pidfd)
        return test.poll() is not None
