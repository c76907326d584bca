"""Snapshots that were copied during the next step: whoever dies, the final tensors are the unbroken run's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.torch.test_kills import check_identical, settle
from tests.support.once import once
from tests.support.process import Process
from tests.support.torch_trainer import STEPS
from tests.support.world import World, steps_said

pytestmark = pytest.mark.long("several lives of a training with torch")

OFTEN = ("--back-off-s", "0.05", "--every-s", "1000", "--every-steps", "2")
VALIDATIONS = 2  # of a start's first snapshots, which are copied at their boundary


def command(world: World, optimizer: str, *options: str) -> list[str | Path]:
    output = ["--curve", world.curve, "--final", world.final, "--hold-until", world.released]
    pace = ["--hidden", "1024", "--optimizer", optimizer]
    return [sys.executable, "-m", "tests.support.torch_trainer", *output, *pace, *options]


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str], World]:
    """The world of an unbroken run without overlap, for each optimizer."""

    def of(optimizer: str) -> World:
        def run(folder: Path) -> None:
            with contextlib.closing(World(folder)) as world:
                process = world.start(*command(world, optimizer), env={"HARNESS": "off"})
                assert process.wait() == 0, process.stderr

        return World(once(tmp_path_factory, worker_id, f"unbroken-{optimizer}", run))

    return of


def train(world: World, optimizer: str, *options: str) -> Process:
    """One start, up to its end, whatever that is."""
    process = world.run_rigged(*OFTEN, *options, command=command(world, optimizer, "--overlap"))
    settle(world, process)
    assert "overlap is OFF" not in process.stderr, process.stderr
    return process


@pytest.mark.parametrize("at", [pytest.param("Published:3:kill-both", marks=pytest.mark.sample), "Sealed:3:terminate"])
def test_what_was_copied_late_is_resumed_bit_identical(at: str, world: World, unbroken: Callable[[str], World]) -> None:
    expected = unbroken("adamw")
    first = train(world, "adamw", "--at", at)
    assert f"test: {at.split(':')[-1]} at" in first.stderr
    assert "overlap is on" in first.stderr, first.stderr

    second = train(world, "adamw")

    assert steps_said(second.stderr, "Restored")[0] in steps_said(first.stderr, "Sealed")[VALIDATIONS:]
    assert world.survey().finished_at == STEPS
    check_identical(world, expected)


@pytest.mark.parametrize("victim", ["trainer", "agent"])
def test_a_process_that_dies_when_a_late_copy_is_sealed_costs_nothing(
    victim: str, world: World, unbroken: Callable[[str], World]
) -> None:
    process = train(world, "sgd", "--at", f"Sealed:3:kill-{victim}")

    assert f"test: kill-{victim} at Sealed 3" in process.stderr
    assert "overlap is on" in process.stderr
    if victim == "trainer":
        assert steps_said(process.stderr, "Restored")[0] in steps_said(process.stderr, "Sealed")[VALIDATIONS:]
    check_identical(world, unbroken("sgd"))
