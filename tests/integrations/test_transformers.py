"""A Trainer with the callback, noticed and killed: every loss, log and tensor is that of an unbroken run."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import safetensors.torch

from tests.support.framework_lives import FAST, Lives, check_same, command, live
from tests.support.tensorboard import curve
from tests.support.world import ROOT, World, steps_said

pytest.importorskip("transformers")
pytestmark = pytest.mark.long("several lives of a training by transformers")

TRAINER = "hf_trainer"
Unbroken = Callable[[str, str], World]

LIVES: list[tuple[str, Lives]] = [
    # the mode; what happens in each start, and its exit code
    ("plain", [("FirstStep:1:terminate", 75), ("Published:2:kill-trainer,Published:4:terminate", 75), ("", 0)]),
    ("evaluate", [("Sealed:3:terminate", 75), ("Published:1:kill-trainer", 0)]),
    ("epochs", [("Published:1:terminate", 75), ("Published:1:kill-trainer", 0)]),
    ("workers", [("Published:2:terminate", 75), ("Published:1:kill-trainer", 0)]),
    ("lora", [("Published:2:terminate", 75), ("Published:1:kill-trainer", 0)]),
    ("fsdp2", [("Published:2:terminate", 75), ("Published:1:kill-rank", 0)]),
    ("early", [("Published:2:terminate", 75), ("Published:1:kill-trainer", 0)]),
    ("twice", [("Published:4:terminate", 75), ("Published:3:kill-trainer,Published:5:terminate", 75), ("", 0)]),
    ("own", [("Published:1:terminate", 75), ("Published:2:kill-trainer", 0)]),
    ("stops", [("Published:1:terminate", 75), ("TrainerFinished:1:kill-trainer", 0)]),
]
TIERS = {"plain": [pytest.mark.sample], "evaluate": [], "fsdp2": [], "stops": [], "own": []}


@pytest.mark.parametrize(
    ("mode", "lives"),
    [pytest.param(*case, id=case[0], marks=TIERS.get(case[0], [pytest.mark.nightly])) for case in LIVES],
)
def test_what_ended_early_goes_on_bit_identical(mode: str, lives: Lives, world: World, unbroken: Unbroken) -> None:
    live(world, command(TRAINER, world, mode), lives)
    check_same(world, unbroken(TRAINER, mode))


def test_with_the_callback_a_training_computes_what_it_computes_without(world: World, unbroken: Unbroken) -> None:
    """Not with workers, whose random numbers the harness seeds."""
    process = world.start(*command(TRAINER, world, "evaluate", "--plain"))
    assert process.wait() == 0, process.stderr
    assert world.curve.read_text() == unbroken(TRAINER, "evaluate").curve.read_text()
    check_same(world, unbroken(TRAINER, "evaluate"))


def test_a_training_of_which_only_the_end_of_a_call_was_still_to_come_is_the_same(
    world: World, unbroken: Unbroken
) -> None:
    """It ends between two calls of train(), and again behind the second."""
    live(
        world, command(TRAINER, world, "twice"), [("TrainerFinished:1:kill-trainer,TrainerFinished:3:kill-trainer", 0)]
    )
    check_same(world, unbroken(TRAINER, "twice"))


def test_a_training_that_is_made_longer_goes_on_to_its_new_end(world: World) -> None:
    live(world, command(TRAINER, world, "plain"), [("Published:1:terminate", 75)])
    live(world, command(TRAINER, world, "plain", "--epochs", "4"), [("", 0)])
    assert any(line.startswith("result 44 ") for line in world.curve.read_text().splitlines())


def test_the_trainer_s_own_checkpoint_on_sigterm_is_switched_off_and_that_is_said(world: World) -> None:
    process = world.run_rigged(*FAST, "--at", "Published:1:terminate", command=command(TRAINER, world, "jit"))
    assert process.wait() == 75, process.stderr
    assert "enable_jit_checkpoint is off" in process.stderr
    assert not list(world.root.glob("output/checkpoint-*"))


def test_an_evaluation_is_begun_again_where_it_was_interrupted(world: World, unbroken: Unbroken) -> None:
    """The first one begins with a snapshot: it may take long."""
    rigged = ["--back-off-s", "0.05", "--every-s", "1000", "--at", "Sealed:1:kill-trainer"]
    process = world.run_rigged(*rigged, command=command(TRAINER, world, "evaluate"))
    assert process.wait() == 0, process.stderr
    assert steps_said(process.stderr, "Sealed")[0] == 3
    check_same(world, unbroken(TRAINER, "evaluate"))


def test_of_a_model_with_adapters_only_these_are_stored(world: World) -> None:
    process = world.run_rigged(*FAST, "--at", "Published:1:terminate", command=command(TRAINER, world, "lora"))
    assert process.wait() == 75, process.stderr
    exported = world.root / "exported.safetensors"
    process = world.start(*world.harness("export", *world.named(), exported))
    assert process.wait() == 0, process.stderr
    names = list(safetensors.torch.load_file(exported))
    assert any("lora_A" in name for name in names)
    assert not any("base_layer" in name or "wte" in name for name in names), names


@pytest.mark.nightly
def test_rehearse_agrees(world: World) -> None:
    example = ROOT / "examples" / "huggingface.py"
    process = world.start(*world.harness("rehearse", "--run", "a"), "--", sys.executable, example)
    assert process.wait() == 0, process.stdout.decode() + process.stderr


def test_tensorboard_s_curve_goes_on_in_its_directory_with_no_step_twice(world: World) -> None:
    from tests.support.hf_trainer import STEPS

    kill = "Published:2:kill-trainer,Published:4:terminate"
    process = world.run_rigged(*FAST, "--at", kill, command=command(TRAINER, world, "tensorboard"))
    assert process.wait() == 75, process.stderr
    process = world.run_rigged(*FAST, command=command(TRAINER, world, "tensorboard"))
    assert process.wait() == 0, process.stderr
    (folder,) = (world.root / "output" / "runs").iterdir()
    assert [step for step, _ in curve(folder, "train/loss")] == list(range(1, STEPS + 1))
    assert len(list(folder.iterdir())) == 3, "one file for each life"
