"""An image's interpreter for the machines: pip looks through all that there is, and an image has no tools of ours."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.node.machine import Machine

OF_AN_IMAGE = ("pip", "torch", "boto3")


@pytest.fixture(scope="session")
def image_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with what an image has: links to what is here."""
    made = tmp_path_factory.mktemp("image") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    there = made / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    for distribution in needed(*OF_AN_IMAGE):
        here = Path(str(distribution.locate_file("")))
        for name in {file.parts[0] for file in distribution.files or ()} - {".."}:
            if (here / name).exists() and name != "__pycache__":
                (there / name).symlink_to(here / name)
    return str(made / "bin/python")


def needed(*names: str) -> Iterator[metadata.Distribution]:
    """Each of these distributions, and what they need here, once."""
    seen, todo = set[str](), [*names]
    while todo:
        distribution = metadata.distribution(todo.pop())
        if distribution.name in seen:
            continue
        seen.add(distribution.name)
        yield distribution
        wanted = map(Requirement, distribution.requires or ())
        todo += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]


@pytest.fixture
def machine(machine: Machine, image_python: str) -> Machine:
    """A machine of such an image."""
    machine.settings["HARNESS_PYTHON"] = image_python
    return machine
