"""Lightning's fit with the callback, noticed and killed: every loss, logged value and tensor is an unbroken run's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.framework_lives import check_same, command, live
from tests.support.lightning_trainer import MODES
from tests.support.tensorboard import curve
from tests.support.world import ROOT, World, steps_said

pytestmark = pytest.mark.long("several lives of a training by Lightning")

TRAINER = "lightning_trainer"
Unbroken = Callable[[str, str], World]

LIVES = {
    "workers": [("Published:2:terminate", 75), ("Published:1:kill-trainer,TrainerFinished:1:kill-trainer", 0)],
    "fsdp2": [("Published:2:terminate", 75), ("Published:1:kill-rank", 0)],
    "scheduled": [("Published:2:terminate", 75), ("Published:2:kill-trainer,TrainerFinished:1:kill-trainer", 0)],
    "plain": [("FirstStep:1:terminate", 75), ("Published:2:kill-trainer,Published:4:terminate", 75), ("", 0)],
}
TIERS = {"plain": [pytest.mark.sample], "validate": [], "stops": [], "scheduled": [], "fsdp2": []}
USUAL = [("Published:2:terminate", 75), ("Published:1:kill-trainer,TrainerFinished:1:kill-trainer", 0)]


def check_drawn(world: World, expected: World) -> None:
    """TensorBoard shows the unbroken run's curves, each point once."""
    for tag in ("loss_step", "val_loss"):
        found, wanted = (curve(each.root / "logs" / "drawn" / "version_0", tag) for each in (world, expected))
        assert found == wanted


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=TIERS.get(mode, [pytest.mark.nightly])) for mode in MODES])
def test_what_ended_early_goes_on_bit_identical(mode: str, world: World, unbroken: Unbroken) -> None:
    live(world, command(TRAINER, world, mode), LIVES.get(mode, USUAL))
    check_same(world, unbroken(TRAINER, mode))
    if mode == "validate":
        check_drawn(world, unbroken(TRAINER, mode))


def test_a_validation_is_begun_again_where_it_was_interrupted(world: World, unbroken: Unbroken) -> None:
    """The first one begins with a snapshot: it may take long."""
    rigged = ["--back-off-s", "0.05", "--every-s", "1000", "--at", "Sealed:1:kill-trainer"]
    process = world.run_rigged(*rigged, command=command(TRAINER, world, "validate"))
    assert process.wait() == 0, process.stderr
    assert steps_said(process.stderr, "Sealed")[0] == 4
    check_same(world, unbroken(TRAINER, "validate"))
    check_drawn(world, unbroken(TRAINER, "validate"))


@pytest.mark.parametrize(
    "mode", ["validate", *(pytest.param(mode, marks=pytest.mark.nightly) for mode in ("steps", "manual"))]
)
def test_with_the_callback_a_training_computes_what_it_computes_without(
    mode: str, world: World, unbroken: Unbroken
) -> None:
    process = world.start(*command(TRAINER, world, mode, "--plain"))
    assert process.wait() == 0, process.stderr
    check_same(world, unbroken(TRAINER, mode))


@pytest.mark.nightly
def test_the_older_name_of_the_package_is_the_same(world: World, unbroken: Unbroken) -> None:
    live(world, command(TRAINER, world, "validate", "--package", "pytorch_lightning"), USUAL)
    check_same(world, unbroken(TRAINER, "validate"))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param([ROOT / "examples" / "with_lightning.py"], marks=pytest.mark.nightly, id="example"),
        pytest.param(
            [
                "-m",
                f"tests.support.{TRAINER}",
                "--mode",
                "validate",
                "--curve",
                "{out}/curve",
                "--final",
                "{out}/final",
            ],
            id="validate",
        ),
    ],
)
def test_rehearse_agrees(program: list[str | Path], world: World) -> None:
    process = world.start(*world.harness("rehearse", "--run", "a"), "--", sys.executable, *program)
    assert process.wait() == 0, process.stdout.decode() + process.stderr
