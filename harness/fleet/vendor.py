"""The wheels of everything that a node installs, chosen on the user's machine for the image's Python.

Owns which wheels fit an image, and the list that a node installs them by: wheels/requirements.lock, with their sums.
torch is the image's own: it fits the image's driver, and nothing here replaces it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOCK = "requirements.lock"
_GLIBC = (17, 24, 26, 27, 28, 31, 34, 35, 38, 39)  # of the manylinux tags that packages are built for; 2.39 and older
_OLD_TAGS = ("manylinux2014", "manylinux2010", "manylinux1", "linux")
_END_OF_A_LOG = 12


class PackError(Exception):
    """A project cannot be packed; the text says why, and what to do."""


@dataclass(frozen=True)
class Image:
    """What a node's image has.

    Attributes:
        python: version of its Python, "3.14": Ubuntu 26.04 has that one.
        torch: version of its torch, "2.13.0".
        machine: its architecture, as `uname -m` says it.
    """

    python: str = "3.14"
    torch: str = "2.13.0"
    machine: str = "x86_64"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add an option for each attribute."""
        parser.add_argument("--python", metavar="X.Y", default=cls.python, help="the image's Python (%(default)s)")
        parser.add_argument("--torch", metavar="X.Y.Z", default=cls.torch, help="the image's torch (%(default)s)")
        parser.add_argument("--machine", default=cls.machine, help="its architecture (%(default)s)")

    @classmethod
    def of_options(cls, given: argparse.Namespace) -> Image:
        """Read the options. Raises PackError."""
        return cls.checked(given.python, given.torch, given.machine)

    @classmethod
    def checked(cls, python: str, torch: str, machine: str = machine) -> Image:
        """Return an image with these. Raises PackError if they are no versions."""
        if not re.fullmatch(r"3\.\d+", python):
            raise PackError(f"{python} is no version of a Python: such as 3.14")
        if not re.fullmatch(r"\d+\.\d+\.\d+", torch):
            raise PackError(f"{torch} is no version of torch: such as 2.13.0, without what follows a +")
        return cls(python, torch, machine)


def vendor(wheel: Path, requirements: Path | None, image: Image, into: Path) -> Sequence[Path]:
    """Fetch the wheels that `wheel` and `requirements` need on `image`, and write the list that a node installs.

    Args:
        wheel: of the harness.
        requirements: the project's requirements.txt, if there is one.
        image: what they have to fit.
        into: a folder to make.

    Returns:
        The wheels and the list.

    Raises:
        PackError: the index cannot be reached, a package has no wheel for the image, or two requirements contradict.
    """
    into.mkdir()
    of_image = into.parent / "image"
    of_image.mkdir()
    # The index has a torch of this version, too: only the one with a local version of our own is allowed.
    torch = f"{image.torch}+image"
    _write_stub(of_image, torch)
    constraints = into.parent / "constraints.txt"
    constraints.write_text(f"torch=={torch}\n")
    major, minor = image.python.split(".")
    platforms = [f"manylinux_2_{glibc}_{image.machine}" for glibc in _GLIBC]
    platforms += [f"{tag}_{image.machine}" for tag in _OLD_TAGS]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
        "--dest", str(into), "--only-binary=:all:", "--find-links", str(of_image), "--constraint", str(constraints),
        "--python-version", image.python, "--implementation", "cp", "--abi", f"cp{major}{minor}", "--abi", "abi3",
        "--abi", "none", *(part for platform in platforms for part in ("--platform", platform)), str(wheel),
    ]  # fmt: skip
    if requirements is not None:
        command += ["--requirement", str(requirements)]
    why = f"the wheels for Python {image.python} with torch {image.torch} cannot be had"
    run(command, f"{why}. Another image: --python, --torch. What has no wheel: setup_command, or a container")
    for stub in into.glob("torch-*+image-*.whl"):
        stub.unlink()
    wheels = sorted(into.glob("*.whl"))
    lock = into / LOCK
    lines = [f"{_requirement(path)} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in wheels]
    lock.write_text("\n".join([f"# python {image.python}", f"# torch {image.torch}", *lines]) + "\n")
    return [*wheels, lock]


def run(command: Sequence[str], why: str) -> str:
    """Run a program to its end and return its output.

    Raises:
        PackError: it failed; the text begins with `why` and has the end of what it said.
    """
    try:
        done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL, env=_environment())
    except OSError as err:
        raise PackError(f"{why}: {command[0]}: {err.strerror}") from err
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-_END_OF_A_LOG:]
        raise PackError("\n".join([f"{why}:", *said]))
    return done.stdout.decode(errors="surrogateescape")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}


def _requirement(wheel: Path) -> str:
    name, version = wheel.name.split("-")[:2]
    return f"{name.replace('_', '-').lower()}=={version}"


def _write_stub(folder: Path, version: str) -> None:
    """Write a wheel that stands for the image's torch, and has nothing in it."""
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
