"""A machine for each test, which leaves no device behind."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.node.machine import CannotHaveDisks, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """An instance without disks."""
    made = Machine(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def disks(machine: Machine) -> Callable[[int], list[str]]:
    """Gives the machine so many disks, or skips the test."""
    for program in ("losetup", "wipefs", "blkid", "lsblk", "mkfs.ext4"):
        if shutil.which(program) is None:
            pytest.skip(f"no loop devices here: {program} is not installed")
    if os.geteuid() != 0:
        pytest.skip("no loop devices here: you are not root")
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mounts here: this root has no mount namespaces")

    def add(count: int) -> list[str]:
        try:
            return [machine.add_disk() for _ in range(count)]
        except CannotHaveDisks as err:
            pytest.skip(f"no loop devices here: {err}")

    return add
