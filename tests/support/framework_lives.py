"""The lives of a training by a framework: it is ended early, started again, and compared with an unbroken one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.world import World, steps_said

EVERY = ("--every-s", "1000", "--every-steps", "4")
FAST = ("--back-off-s", "0.05", *EVERY)
Lives = Sequence[tuple[str, int]]
"""What happens in each start, and its exit code."""


def command(trainer: str, world: World, mode: str, *options: str) -> list[str | Path]:
    """The command of a trainer of tests/support; a mode that divides the model has two ranks."""
    output = ["--curve", world.curve, "--final", world.final]
    launcher = world.torchrun(2) if mode == "fsdp2" else [sys.executable, "-m"]
    return [*launcher, f"tests.support.{trainer}", *output, "--mode", mode, *options]


def live(world: World, command: Sequence[str | Path], lives: Lives, env: Mapping[str, str] | None = None) -> None:
    """Start it again and again, each time with what happens to it; each goes on at the newest snapshot."""
    newest = 0
    for at, code in lives:
        rigged = [sys.executable, "-m", "tests.support.harness_run", *world.options(), "--release", world.released]
        process = world.start(*rigged, *FAST, *(["--at", at] if at else []), "--", *command, env=env)
        assert process.wait() == code, process.stderr
        assert not newest or steps_said(process.stderr, "Restored")[0] == newest, process.stderr
        snapshot = world.newest()
        newest = 0 if snapshot is None else snapshot.step
        world.wait_gone()
    world.check_commits()


def check_same(world: World, expected: World) -> None:
    """Lines of every life are the unbroken run's, but for where its files are; none is missing."""
    found, wanted = (
        {line.replace(str(each.root), "") for line in each.curve.read_text().splitlines()} for each in (world, expected)
    )
    assert found == wanted
    assert world.final.read_bytes() == expected.final.read_bytes()
