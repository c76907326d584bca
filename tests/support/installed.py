"""Packages that no environment of ours has, for one test: another version of a framework, or a library that is large.

They are installed into a folder of the session, once for all workers, and come before the others by PYTHONPATH.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest

from tests.support.environment import show_package_index
from tests.support.needs import lacking
from tests.support.world import ROOT

LARGE: Mapping[str, Sequence[Sequence[str]]] = MappingProxyType({
    "keras": [["keras==3.15.1"]],
    "deepspeed": [
        ["hjson", "py-cpuinfo", "ninja", "pydantic", "psutil", "einops", "msgpack", "tqdm", "packaging"],
        ["--no-deps", "--no-build-isolation", "deepspeed==0.19.8"],  # not its torch: it would be a second one
    ],
    "trl": [[
        "--no-deps", "trl==1.16.0", "datasets==5.2.0",  # not what is here already, in another version
        "pyarrow==22.0.0", "pandas", "dill", "xxhash", "multiprocess", "psutil", "python-dateutil", "six",
    ]],
    "orbax": [["orbax-checkpoint==0.12.8", "jax==0.10.2"]],
})  # fmt: skip
"""Libraries that only nightly tests use: what pip is told, one time after the other."""

OPTIONS = ("--quiet", "--no-compile", "--upgrade")
"""What pip is told each time: of thousands of files a test imports some hundred."""
TIED = ("composer", "fastai")
"""Libraries that only nightly tests use, and only where they are: they come with the torchvision of their own torch."""


def environment_of(library: str, factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what a program that uses a library needs in its environment. Skips the test where it cannot be had.

    Args:
        library: its name.
        factory: pytest's, of this session.
    """
    if library in TIED and importlib.util.find_spec(library) is None:
        lacking(library)
    return installed(library, *LARGE[library], factory=factory) if library in LARGE else {}


def installed(name: str, *commands: Sequence[str], factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment in which packages are found. Skips the test where no package index answers.

    Args:
        name: of the folder: the same for the same packages.
        commands: what pip is told, one time after the other.
        factory: pytest's, of this session.
    """
    # By its name it is no place of the program's own: dill stores the modules of such a place whole.
    folder = factory.getbasetemp().parent / name / "site-packages"
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, folder.with_suffix(".lock").open("w") as lock:
        show_package_index(patch)
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "all-is-installed"
        for command in () if done.exists() else commands:
            pip = [sys.executable, "-m", "pip", "install", *OPTIONS, "--target", str(folder), *command]
            found = subprocess.run(pip, capture_output=True, text=True)
            if found.returncode:
                lacking("package-index", found.stderr.strip().splitlines()[-1])
        done.touch()
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
