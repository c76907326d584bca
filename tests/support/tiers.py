"""Which tests run when: a tier for each folder of tests/, so that a test is in one and no file is in none.

A pytest plugin. `scripts/test` runs what somebody wants to know before each commit, `--all` what has to hold before a
change lands, `--nightly` also the further cases of a test that `--all` runs; what takes hours is no test
(scripts/torture). Naming files or folders runs all that there is in them. A folder that waits for `--all` has one test
or a few that stand for it every day: `@pytest.mark.sample`. A case that waits for the night: `@pytest.mark.nightly`.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

TESTS = Path(__file__).resolve().parents[1]


class Tier(enum.IntEnum):
    """When a folder runs; each includes those before it."""

    QUICK = 0
    EVERYDAY = 1
    ALL = 2
    NIGHTLY = 3


FOLDERS: Mapping[str, Tier] = MappingProxyType({
    "unit": Tier.QUICK,
    "contract": Tier.EVERYDAY,  # every store, against what a store owes
    "model": Tier.EVERYDAY,  # the protocol, at any interleaving
    "node": Tier.EVERYDAY,  # the scripts of an instance
    "unit/trainer/loaders": Tier.EVERYDAY,  # with worker processes
    "process": Tier.EVERYDAY,  # real processes; nearly all trainers are without torch
    "gpu": Tier.ALL,
    "integrations": Tier.ALL,  # real frameworks, noticed and killed
    "node/boot": Tier.ALL,  # a system that boots
    "node/install": Tier.ALL,  # pip and environments
    "power": Tier.ALL,  # a power cut between any two system calls
    "process/faults": Tier.ALL,  # damaged snapshots, and stores that are silent
    "process/handover": Tier.ALL,  # two starts of a run at once
    "process/kills": Tier.ALL,  # a kill at every event
    "ranks": Tier.ALL,  # several ranks under torchrun
    "process/rehearse": Tier.ALL,  # trainings that are interrupted at several places
    "process/s3": Tier.ALL,  # everything that a store over the network does
    "process/shown": Tier.ALL,  # what is shown to others: demo and benchmarks
    "process/torch": Tier.ALL,  # real trainings
    "process/watch": Tier.ALL,  # programs that save by themselves
    "soak": Tier.ALL,  # a minute of it
    "terraform": Tier.ALL,
    "unit/support/runs": Tier.ALL,  # pytest in pytest
    "unit/trainer/styles": Tier.ALL,  # every style of loop, interrupted at each of its events
})  # fmt: skip
"""The tier of each folder, by its path in tests/; a folder in it has that tier too, or one of its own."""


def tier_of(path: Path) -> Tier | None:
    """Return the tier of a file, or None where no folder of it has one."""
    if not path.is_relative_to(TESTS):
        return None
    folders = (str(folder) for folder in path.relative_to(TESTS).parents)
    return next((FOLDERS[folder] for folder in folders if folder in FOLDERS), None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for each tier but that of `scripts/test` itself."""
    group = parser.getgroup("tiers")
    group.addoption("--quick", dest="tier", action="store_const", const="QUICK", help="units only")
    group.addoption("--everyday", dest="tier", action="store_const", const="EVERYDAY", help="as without any option")
    group.addoption("--all", dest="tier", action="store_const", const="ALL", help="all that has to hold before landing")
    group.addoption("--nightly", dest="tier", action="store_const", const="NIGHTLY", help="every test")


def pytest_configure(config: pytest.Config) -> None:
    """Decide on the tier, once: the workers are told."""
    if config.option.tier is None:
        named = config.args_source is pytest.Config.ArgsSource.ARGS
        config.option.tier = "NIGHTLY" if named else "EVERYDAY"
    elif config.option.tier == "NIGHTLY" and not hasattr(config, "workerinput"):
        os.environ["HARNESS_TEST_EXEC"] = "1"  # see tests/support/fork_server.py


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what --quick leaves out: there are no samples in it."""
    if config.option.tier == "QUICK" and collection_path.parent == TESTS:
        tier = FOLDERS.get(collection_path.name)
        return True if tier is not None and tier > Tier.QUICK else None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what belongs to a later tier."""
    wanted, kept, left_out = Tier[config.option.tier], list[pytest.Item](), list[pytest.Item]()
    for item in items:
        tier = tier_of(item.path)
        if tier is None:
            raise pytest.UsageError(f"{item.path} is in no tier: give its folder one in {Path(__file__).name}")
        if item.get_closest_marker("sample") is not None:
            tier = min(tier, Tier.EVERYDAY)
        if item.get_closest_marker("nightly") is not None:
            tier = Tier.NIGHTLY
        (kept if tier <= wanted else left_out).append(item)
    items[:] = kept
    if left_out:
        config.hook.pytest_deselected(items=left_out)
