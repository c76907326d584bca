"""Several ranks under torchrun, noticed and killed: each rank's curve and state are the unbroken run's, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.once import once
from tests.support.rank_trainer import EPOCHS, steps
from tests.support.world import World, steps_said

pytestmark = pytest.mark.long("several lives of a training on several ranks")

RANKS = {"ddp": 3, "fsdp": 4, "hsdp": 4, "tp": 4}
FAST = ("--back-off-s", "0.05", "--every-s", "1000", "--every-steps", "4")


def command(world: World, divide: str) -> list[str | Path]:
    output = ["--curve", world.curve, "--final", world.final, "--hold-until", world.released]
    workers = ["--workers", "1"] if divide == "ddp" else []
    return [*world.torchrun(RANKS[divide]), "tests.support.rank_trainer", *output, "--divide", divide, *workers]


def of_ranks(path: Path, divide: str) -> list[Path]:
    return [path.with_name(f"{path.name}.{rank}") for rank in range(RANKS[divide])]


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str], World]:
    """The world of an unbroken run, for each way to divide the model. It took no snapshot before its end."""

    def of(divide: str) -> World:
        def train(folder: Path) -> None:
            with contextlib.closing(World(folder)) as world:
                process = world.run_harness("--every-s", "1000", command=command(world, divide))
                assert process.wait() == 0, process.stderr
                assert set(steps_said(process.stderr, "Sealed")) == {steps(divide, RANKS[divide])}

        return World(once(tmp_path_factory, worker_id, f"unbroken-{divide}", train))

    return of


def check_identical(world: World, unbroken: World, divide: str) -> None:
    """Each rank's lines in every life are the unbroken run's, none is missing, and each holds the same at the end."""
    pairs = [*zip(of_ranks(world.curve, divide), of_ranks(unbroken.curve, divide), strict=True)]
    for found, expected in pairs:
        lines = expected.read_text().splitlines()
        assert [int(line.split()[0]) for line in lines] == list(range(1, steps(divide, RANKS[divide]) + 1))
        assert set(found.read_text().splitlines()) == set(lines)
    for found, expected in zip(of_ranks(world.final, divide), of_ranks(unbroken.final, divide), strict=True):
        assert found.read_text() == expected.read_text()


LIVES: list[tuple[str, Sequence[tuple[str, int]]]] = [
    # how the model is divided; what happens in each start, and its exit code
    ("ddp", [("FirstStep:1:terminate", 75), ("Published:1:terminate", 75), ("", 0)]),
    ("ddp", [("Published:1:kill-rank,FirstStep:2:kill-rank", 0)]),
    ("fsdp", [("Published:1:kill-rank,Published:2:terminate", 75), ("Published:1:kill-rank", 0)]),
    ("hsdp", [("Published:1:terminate", 75), ("Published:1:kill-rank", 0)]),
    ("tp", [("Published:1:terminate", 75), ("Published:1:kill-rank", 0)]),
]
SAMPLE = LIVES[1]
TIERS = [[pytest.mark.nightly], [pytest.mark.sample], [], [pytest.mark.nightly], []]


@pytest.mark.parametrize(
    ("divide", "lives"),
    [pytest.param(*case, id=f"{case[0]}-{case[1][0][0]}", marks=TIERS[LIVES.index(case)]) for case in LIVES],
)
def test_what_ended_early_goes_on_bit_identical(
    divide: str, lives: Sequence[tuple[str, int]], world: World, unbroken: Callable[[str], World]
) -> None:
    expected = unbroken(divide)
    newest = 0
    for at, code in lives:
        trained = command(world, divide)
        process = world.run_rigged(*FAST, *(["--at", at] if at else []), command=trained)
        assert process.wait() == code, process.stderr
        restored = steps_said(process.stderr, "Restored")
        assert not newest or restored[0] == newest, process.stderr
        snapshot = world.newest()
        newest = 0 if snapshot is None else snapshot.step
        world.wait_gone()
    check_identical(world, expected, divide)
    world.check_commits()


@pytest.mark.parametrize("who", ["one", "all"])
def test_a_break_behind_a_save_ends_the_loop_of_all_ranks(who: str, world: World) -> None:
    """Saved by one alone, it waited for the others, which waited for it in the next collective call."""
    process = world.run_harness("--every-s", "1000", command=[*command(world, "ddp"), "--saves", who])
    assert process.wait() == 0, process.stderr

    taken = steps(divide="ddp", ranks=RANKS["ddp"]) // EPOCHS if who == "all" else None
    newest = world.newest()
    assert (None if newest is None else newest.step) == taken, process.stderr
    assert ("call ckpt.save() on all ranks" in process.stderr) is (who == "one"), process.stderr
