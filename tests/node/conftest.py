"""A machine for each test, which leaves no device behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.node.machine import CannotHaveDisks, Machine
from tests.support.environment import show_package_index
from tests.support.needs import lacking


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
            lacking("loop-devices", f"{program} is not installed")
    if os.geteuid() != 0:
        lacking("loop-devices", "you are not root")
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        lacking("mounts", "this root has no mount namespaces")

    def add(count: int) -> list[str]:
        try:
            return [machine.add_disk() for _ in range(count)]
        except CannotHaveDisks as err:
            lacking("loop-devices", str(err))

    return add


@pytest.fixture
def xfs() -> None:
    """XFS, or the test is skipped."""
    if shutil.which("mkfs.xfs") is None or "\txfs\n" not in Path("/proc/filesystems").read_text():
        lacking("xfs")


@pytest.fixture
def raid0() -> None:
    """Arrays, or the test is skipped."""
    if shutil.which("mdadm") is None:
        lacking("mdadm", "mdadm is not installed")
    arrays = Path("/proc/mdstat")
    if not arrays.exists() or "[raid0]" not in arrays.read_text():
        lacking("mdadm", "this kernel has no RAID 0")


@pytest.fixture(scope="session")
def _why_no_package_index(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Why packages cannot be fetched here; empty if they can."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "0", "hatchling"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        show_package_index(monkeypatch)
        done = subprocess.run(
            download, cwd=tmp_path_factory.mktemp("index"), stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    return done.stderr.strip() if done.returncode else ""


@pytest.fixture
def package_index(_why_no_package_index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip fetch packages as the caller would, or skip the test."""
    if _why_no_package_index:
        lacking("package-index", _why_no_package_index)
    show_package_index(monkeypatch)
