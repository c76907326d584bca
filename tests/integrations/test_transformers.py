"""A Trainer with the callback, noticed and killed: every loss, log and tensor is that of an unbroken run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import safetensors.torch

from tests.support.once import once
from tests.support.world import World, steps_said

pytest.importorskip("transformers")
pytestmark = pytest.mark.long("several lives of a training by transformers")

FAST = ("--back-off-s", "0.05", "--every-s", "1000", "--every-steps", "4")


def command(world: World, mode: str, *options: str) -> list[str | Path]:
    output = ["--curve", world.curve, "--final", world.final]
    return [sys.executable, "-m", "tests.support.hf_trainer", *output, "--mode", mode, *options]


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str], World]:
    """The world of an unbroken run in a mode."""

    def of(mode: str) -> World:
        def train(folder: Path) -> None:
            with contextlib.closing(World(folder)) as world:
                process = world.run_harness("--every-s", "1000", command=command(world, mode))
                assert process.wait() == 0, process.stderr

        return World(once(tmp_path_factory, worker_id, f"unbroken-{mode}", train))

    return of


LIVES: list[tuple[str, Sequence[tuple[str, int]]]] = [
    # the mode; what happens in each start, and its exit code
    ("plain", [("FirstStep:1:terminate", 75), ("Published:2:kill-trainer,Published:4:terminate", 75), ("", 0)]),
    ("evaluate", [("Sealed:3:terminate", 75), ("Published:1:kill-trainer", 0)]),
    ("epochs", [("Sealed:3:terminate", 75), ("Published:2:terminate", 75), ("", 0)]),
    ("accumulate", [("Published:1:terminate", 75), ("Published:1:kill-trainer", 0)]),
    ("workers", [("Published:2:terminate", 75), ("Published:1:kill-trainer", 0)]),
    ("steps", [("Published:3:terminate", 75), ("", 0)]),
    ("lora", [("Published:2:terminate", 75), ("Published:1:kill-trainer", 0)]),
    ("early", [("Published:2:terminate", 75), ("Published:1:kill-trainer", 0)]),
    ("start", [("Published:2:terminate", 75), ("", 0)]),
    ("twice", [("Published:4:terminate", 75), ("Published:3:kill-trainer,Published:5:terminate", 75), ("", 0)]),
    ("attached", [("Published:2:terminate", 75), ("", 0)]),
]


@pytest.mark.parametrize(
    ("mode", "lives"),
    [pytest.param(*case, id=case[0], marks=[pytest.mark.sample] if case is LIVES[0] else []) for case in LIVES],
)
def test_what_ended_early_goes_on_bit_identical(
    mode: str, lives: Sequence[tuple[str, int]], world: World, unbroken: Callable[[str], World]
) -> None:
    expected, newest = unbroken(mode), 0
    for at, code in lives:
        process = world.run_rigged(*FAST, *(["--at", at] if at else []), command=command(world, mode))
        assert process.wait() == code, process.stderr
        assert not newest or steps_said(process.stderr, "Restored")[0] == newest, process.stderr
        snapshot = world.newest()
        newest = 0 if snapshot is None else snapshot.step
        world.wait_gone()
    assert set(world.curve.read_text().splitlines()) == set(expected.curve.read_text().splitlines())
    assert world.final.read_text() == expected.final.read_text()
    world.check_commits()


def test_with_the_callback_a_training_computes_what_it_computes_without(
    world: World, unbroken: Callable[[str], World]
) -> None:
    """Not with workers, whose random numbers the harness seeds."""
    process = world.start(*command(world, "evaluate", "--plain"))
    assert process.wait() == 0, process.stderr
    assert world.curve.read_text() == unbroken("evaluate").curve.read_text()
    assert world.final.read_text() == unbroken("evaluate").final.read_text()


def test_an_evaluation_is_begun_again_where_it_was_interrupted(world: World, unbroken: Callable[[str], World]) -> None:
    """The first one begins with a snapshot: it may take long."""
    rigged = ["--back-off-s", "0.05", "--every-s", "1000", "--at", "Sealed:1:kill-trainer"]
    process = world.run_rigged(*rigged, command=command(world, "evaluate"))
    assert process.wait() == 0, process.stderr
    assert steps_said(process.stderr, "Sealed")[0] == 3
    assert set(world.curve.read_text().splitlines()) == set(unbroken("evaluate").curve.read_text().splitlines())
    assert world.final.read_text() == unbroken("evaluate").final.read_text()


def test_of_a_model_with_adapters_only_these_are_stored(world: World) -> None:
    process = world.run_rigged(*FAST, "--at", "Published:1:terminate", command=command(world, "lora"))
    assert process.wait() == 75, process.stderr
    exported = world.root / "exported.safetensors"
    process = world.start(*world.harness("export", *world.named(), exported))
    assert process.wait() == 0, process.stderr
    names = list(safetensors.torch.load_file(exported))
    assert any("lora_A" in name for name in names)
    assert not any("base_layer" in name or "wte" in name for name in names), names


def test_rehearse_agrees(world: World) -> None:
    process = world.start(*world.harness("rehearse", "--run", "a"), "--", *command(world, "accumulate"))
    assert process.wait() == 0, process.stdout.decode() + process.stderr
