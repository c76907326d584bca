"""What a test, and every process that it starts, may see of the caller's environment.

The list says what may be seen: nobody can list what may not. A job's SLURM_JOB_ID would let a test requeue the
developer's own job, GIT_INDEX_FILE of a hook would let it write the developer's index, and COLUMNS changes words.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

CALLERS: Mapping[str, str] = MappingProxyType(dict(os.environ))
"""The environment as the caller left it, read before anything is hidden."""

SEEN = frozenset({"PATH", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "HARNESS_VENV", "TF_PLUGIN_DIR"})
SEEN_PREFIXES = ("CUDA_", "PYTEST_XDIST_", "HARNESS_TEST_")
INDEX_PREFIXES = ("PIP_", "SSL_CERT_", "REQUESTS_CA_BUNDLE")
GIVEN = MappingProxyType({"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "GOGC": "400"})
"""What every test and process gets. Programs speak one language. Several of them share the cores: threads that wait for
each other only spin, and what Terraform's provider collects is gone with it in seconds."""
HOMES = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")


def hide_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every variable away that is not in the list, and set those that everybody gets."""
    for name in list(os.environ):
        if name not in SEEN and not name.startswith(SEEN_PREFIXES) and name != "PYTEST_CURRENT_TEST":
            monkeypatch.delenv(name)
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    for name in ("COLUMNS", "LINES"):
        os.unsetenv(name)  # readline sets them behind Python's back, for every program that is started without `env`


def move_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Make `home` the home, with each of XDG's directories below it."""
    monkeypatch.setenv("HOME", str(home))
    for name in HOMES:
        directory = home / name.removeprefix("XDG_").lower()
        directory.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(directory))


def move_temporary_files(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Make `directory` the place of temporary files, of this process and of those that it starts; anyone may use it."""
    directory.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))


def show_package_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the caller's settings of pip back, and its proxies: for a test that fetches packages as the caller would."""
    for name, value in CALLERS.items():
        if name.startswith(INDEX_PREFIXES) or name.lower().endswith("_proxy"):
            monkeypatch.setenv(name, value)


def heed_signals() -> None:
    """Ignore no signal that the caller ignores, or that an agent in this process has ignored at its end.

    Processes inherit it. A job in the background ignores SIGINT, and nohup SIGHUP.
    """
    for signum, as_ever in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, as_ever)
