"""What a test needs of the machine that not every machine has, and what becomes of it where that is missing.

It is skipped, and the end of the run says so in one line for each thing that was missing. On a machine that is told to
have it, HARNESS_TESTS_MUST_RUN="root terraform" or "all but cuda xfs", the skip is a failure: nobody finds out months
later that a part of the suite has not run. CI is told so (`.ci/run`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

import pytest

from tests.support.environment import CALLERS

NEEDS: Mapping[str, str] = MappingProxyType({
    "aws-cli": "the AWS CLI",
    "cgroup": "a cgroup of its own, to limit memory",
    "composer": "Composer (mosaicml 0.32, with torch 2.7.0 and torchvision 0.22.0)",
    "cuda": "a CUDA device",
    "disk": "a temporary directory on a disk",
    "fastai": "fastai (with the torchvision of its torch)",
    "init": "systemd as the first process of a namespace",
    "huge-pages": "huge pages",
    "loop-devices": "root and loop devices",
    "mdadm": "mdadm and RAID 0 in the kernel",
    "mounts": "a mount namespace, or mounts at all",
    "package-index": "a package index that answers",
    "root": "root",
    "safe-tarfile": "a Python whose tarfile unpacks safely (3.11.4)",
    "shellcheck": "shellcheck",
    "strace": "strace",
    "systemd": "systemd-analyze",
    "terraform": "terraform and its AWS provider (TF_PLUGIN_DIR)",
    "xfs": "mkfs.xfs and xfs in the kernel",
})  # fmt: skip
MUST_RUN = "HARNESS_TESTS_MUST_RUN"
PREFIX = "this machine lacks "


def lacking(need: str, why: str = "") -> NoReturn:
    """Skip this test for want of `need`, or fail it where the machine was told to have that.

    Args:
        need: one of NEEDS.
        why: what was tried; only its first line counts.
    """
    detail = f": {first}" if (first := why.strip().partition("\n")[0]) else ""
    words = f"{PREFIX}{NEEDS[need]}{detail}"
    if need in must_run():
        pytest.fail(f"{words}, and {MUST_RUN} says that it has {need!r}", pytrace=False)
    pytest.skip(words)


def must_run() -> frozenset[str]:
    """Return what this machine was told to have; ValueError where there is no such thing."""
    words = CALLERS.get(MUST_RUN, "").split()
    every_other = words[:2] == ["all", "but"]
    named = frozenset(words[2 * every_other :])
    if unknown := named - NEEDS.keys():
        raise ValueError(f"{MUST_RUN}: there is no {', '.join(sorted(unknown))}; there are {', '.join(NEEDS)}")
    return NEEDS.keys() - named if every_other else named
