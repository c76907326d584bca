"""Every style of loop goes on after a SIGKILL of trainer and agent as if nothing had happened."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import pytest

from harness.core.snapshot import RunKeys
from harness.snapshots import records
from tests.support.loops import STYLES, VALIDATED
from tests.support.once import once
from tests.support.process import Process
from tests.support.protocol import FOREVER
from tests.support.world import World

pytestmark = pytest.mark.long("several lives of a training with torch")

TIERS = {"epochs": [pytest.mark.sample]} | {
    style: list[pytest.MarkDecorator]() for style in ("by_hand", "plain_loader", "two_phases", "extra", "reshaping")
}
LOOPS = (sys.executable, "-m", "tests.support.loops")


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder with the curve and the end of every style, had there been no harness at all."""

    def train(folder: Path) -> None:
        with contextlib.closing(World(folder)) as world:
            process = world.start(*LOOPS, "--all", folder, env={"HARNESS": "off"})
            assert process.wait() == 0, process.stderr

    return once(tmp_path_factory, worker_id, "unbroken-loops", train)


def train(world: World, style: str, *options: str) -> Process:
    """Start one life, with a snapshot at every step."""
    return run(world, style, "--every-steps", "1", *options)


def run(world: World, style: str, *options: str) -> Process:
    """Start one life, with snapshots where the program wants them."""
    command = [*LOOPS, style, "--curve", world.curve, "--final", world.final]
    return world.run_rigged(*options, command=command)


@pytest.mark.parametrize(
    "style", [pytest.param(style, marks=TIERS.get(style, [pytest.mark.nightly])) for style in STYLES]
)
def test_a_killed_run_ends_as_the_unbroken_one(world: World, style: str, unbroken: Path) -> None:
    published = 2 if style == "accumulated" else 5
    killed = train(world, style, "--at", f"Published:{published}:kill-both")
    assert killed.wait() == -signal.SIGKILL
    assert not world.final.exists(), "the kill came too late to show anything"

    resumed = train(world, style)
    assert resumed.wait() == 0, resumed.stderr

    assert "Restored" in resumed.stderr
    assert set(world.curve.read_text().splitlines()) == set((unbroken / f"{style}.curve").read_text().splitlines())
    assert world.final.read_text() == (unbroken / f"{style}.final").read_text()


@pytest.mark.parametrize("style", VALIDATED)
@pytest.mark.parametrize("published", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_snapshot_that_is_due_at_a_validation_inside_a_loop_can_be_gone_on_from(
    world: World, style: str, published: int, unbroken: Path
) -> None:
    killed = run(world, style, "--at", f"Published:{published}:kill-both")
    assert killed.wait() == -signal.SIGKILL

    resumed = run(world, style)
    assert resumed.wait() == 0, resumed.stderr

    assert "Restored" in resumed.stderr
    assert set(world.curve.read_text().splitlines()) == set((unbroken / f"{style}.curve").read_text().splitlines())
    assert world.final.read_text() == (unbroken / f"{style}.final").read_text()


@pytest.mark.parametrize("style", ["epochs", "steps"])  # a loop by hand has no end that we could know
def test_a_program_that_fails_after_its_last_loop_is_restored_to_the_end_and_trains_no_step_again(
    world: World, style: str, unbroken: Path
) -> None:
    script = [*LOOPS, style, "--curve", world.curve]
    missing = world.root / "not-there" / "final"  # writing the result fails, each time
    options = ["--every-steps", "1", "--max-crashes", "1", "--back-off-s", "0.01"]
    failing = world.run_rigged(*options, command=[*script, "--final", missing])
    assert failing.wait() == 1, failing.stderr
    trained = len(world.curve.read_text().splitlines())

    again = world.run_rigged(*options, command=[*script, "--final", world.final])
    assert again.wait() == 0, again.stderr

    lines = world.curve.read_text().splitlines()
    assert [line for line in lines[trained:] if not line.startswith("validation")] == []
    assert world.final.read_text() == (unbroken / f"{style}.final").read_text()


SWEEP = """
import torch
from harness import Checkpointer

for name in ("first", "second"):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(model=model, optimizer=optimizer, run=name)
    for step in ckpt.steps(5):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    print(name, ckpt.step_count, ckpt.durable_step)
ckpt.close()
print("closed")
"""


def test_one_process_trains_several_runs_one_after_the_other(world: World) -> None:
    path = world.root / "sweep.py"
    path.write_text(SWEEP)
    process = world.start(sys.executable, path, env={"HARNESS_STORE": str(world.store), "HARNESS_METADATA": "off"})

    assert process.wait() == 0, process.stderr
    assert process.stdout.decode().splitlines() == ["first 5 5", "second 5 5", "closed"]
    world.wait_gone()
    for name in ("first", "second"):
        assert records.survey(world.opened(), RunKeys(name), FOREVER).finished_at == 5
