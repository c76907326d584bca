"""Every style of loop goes on after a SIGKILL of trainer and agent as if nothing had happened."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.support.loops import STYLES
from tests.support.process import Process
from tests.support.world import World

pytestmark = pytest.mark.slow


def train(world: World, style: str, name: str, *options: str) -> Process:
    """Start one life; `name` tells the unbroken run's files from the other's."""
    script = [sys.executable, "-m", "tests.support.loops", style, "--pause-s", "0.02"]
    files: list[str | Path] = ["--curve", world.root / f"{name}.curve", "--final", world.root / f"{name}.final"]
    return world.run_rigged("--run", name, "--every-steps", "1", *options, command=[*script, *files])


@pytest.mark.parametrize("style", STYLES)
def test_a_killed_run_ends_as_the_unbroken_one(world: World, style: str) -> None:
    assert train(world, style, "unbroken").wait() == 0
    published = 2 if style == "accumulated" else 5
    killed = train(world, style, "cut", "--at", f"Published:{published}:kill-both")
    assert killed.wait() == -signal.SIGKILL
    assert not (world.root / "cut.final").exists(), "the kill came too late to show anything"

    resumed = train(world, style, "cut")
    assert resumed.wait() == 0, resumed.stderr

    assert "Restored" in resumed.stderr
    unbroken, cut = ((world.root / f"{name}.curve").read_text().splitlines() for name in ("unbroken", "cut"))
    assert set(cut) == set(unbroken)
    assert (world.root / "cut.final").read_text() == (world.root / "unbroken.final").read_text()


@pytest.mark.parametrize("style", ["epochs", "steps"])  # a loop by hand has no end that we could know
def test_a_program_that_fails_after_its_last_loop_is_restored_to_the_end_and_trains_no_step_again(
    world: World, style: str
) -> None:
    curve = world.root / "curve"
    script = [sys.executable, "-m", "tests.support.loops", style, "--curve", curve]
    missing = world.root / "not-there" / "final"  # writing the result fails, each time
    options = ["--run", "late", "--every-steps", "1", "--max-crashes", "1", "--back-off-s", "0.01"]
    failing = world.run_rigged(*options, command=[*script, "--final", missing])
    assert failing.wait() == 1, failing.stderr
    trained = len(curve.read_text().splitlines())

    again = world.run_rigged(*options, command=[*script, "--final", world.root / "final"])
    assert again.wait() == 0, again.stderr

    lines = curve.read_text().splitlines()
    assert [line for line in lines[trained:] if not line.startswith("validation")] == []
    unbroken = train(world, style, "unbroken")
    assert unbroken.wait() == 0
    assert (world.root / "final").read_text() == (world.root / "unbroken.final").read_text()
