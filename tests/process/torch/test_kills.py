"""Real torch, really killed: whatever happened in between, the curve and the final tensors are the unbroken run's."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.once import once
from tests.support.process import Process
from tests.support.torch_trainer import STEPS, WORKERS
from tests.support.world import World, steps_said

pytestmark = pytest.mark.long("several lives of a training with torch")

FAST = ("--back-off-s", "0.05", "--every-s", "1000", "--every-steps", "4")


def command(world: World, workers: str, *options: str) -> list[str | Path]:
    output = ["--curve", world.curve, "--final", world.final, "--hold-until", world.released]
    return [sys.executable, "-m", "tests.support.torch_trainer", *output, "--workers", workers, *options]


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str], World]:
    """The world of an unbroken run, for each kind of workers. It took no snapshot before its end."""

    def of(workers: str) -> World:
        workers = {"spawn": "2", "forkserver": "2"}.get(workers, workers)  # how they start makes no difference

        def train(folder: Path) -> None:
            with contextlib.closing(World(folder)) as world:
                process = world.run_harness("--every-s", "1000", command=command(world, workers, "--only-the-end"))
                assert process.wait() == 0, process.stderr
                assert steps_said(process.stderr, "Sealed") == [STEPS]

        return World(once(tmp_path_factory, worker_id, f"unbroken-{workers}", train))

    return of


def settle(world: World, process: Process) -> None:
    """Wait until the agent and every trainer have ended, then end what a killed trainer's loader has left.

    torch's workers look for their parent's death every 5 s; one whose parent dies while it starts never sees it.
    """

    def is_worker(pid: int, command: str) -> bool:
        return "torch_trainer" in command and " TrainerStarted pid=" in process.stderr and pid not in trainers()

    def trainers() -> list[int]:
        return [process.pid, *map(int, re.findall(r" TrainerStarted pid=(\d+)", process.stderr))]

    process.wait_exit()
    world.wait_gone(but=is_worker)
    world.close()
    process.wait()


def check_identical(world: World, unbroken: World) -> None:
    """Every line of every life is the unbroken run's, none is missing, and every final tensor is the same."""
    lines, found = unbroken.curve.read_text().splitlines(), world.curve.read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(1, STEPS + 1))
    assert set(found) == set(lines)
    assert world.final.read_text() == unbroken.final.read_text()


def finish(world: World, workers: str) -> Process:
    """Start the same command again until the run is finished."""
    for _ in range(2):
        floor = world.newest()
        process = world.run_rigged(*FAST, command=command(world, workers))
        assert process.wait() in (0, 75), process.stderr
        if floor is not None:
            assert steps_said(process.stderr, "Restored")[0] >= floor.step, process.stderr
        if world.final.exists():
            break
    assert world.survey().finished_at == STEPS
    return process


KILLS: list[tuple[str, str, Sequence[str]]] = [
    # workers, --at: one or several kills in one start, then each further start's
    ("0", "Sealed:2:kill-agent", ()),
    ("2", "Sealed:2:kill-both", ()),
    ("persistent", "ShardStored:2:kill-trainer", ()),
    ("0", "Published:2:kill-both", ("Restored:1:kill-both",)),
    ("2", "Published:1:kill-trainer,Restored:1:kill-agent", ()),
    ("persistent", "Published:1:kill-both", ("FirstStep:1:kill-both",)),
    ("2", "Published:3:kill-trainer,FirstStep:2:kill-trainer", ()),
    ("0", "Published:1:terminate,Draining:1:kill-agent", ()),
    ("persistent", "Published:1:terminate,Draining:1:kill-trainer", ()),
    ("2", "Published:1:terminate,Draining:1:kill-both", ()),
    ("forkserver", "Published:2:kill-trainer,Published:4:kill-both", ()),
]
_NIGHT, _ALL, _SAMPLE = [pytest.mark.nightly], list[pytest.MarkDecorator](), [pytest.mark.sample]
TIERS = [_NIGHT, _ALL, _ALL, _SAMPLE, _ALL, _NIGHT, _NIGHT, _NIGHT, _ALL, _NIGHT, _ALL]


@pytest.mark.parametrize(
    ("workers", "first", "later"),
    [pytest.param(*kill, id="-".join(kill[:2]), marks=TIERS[KILLS.index(kill)]) for kill in KILLS],
)
def test_a_killed_training_ends_bit_identical(
    workers: str, first: str, later: Sequence[str], world: World, unbroken: Callable[[str], World]
) -> None:
    expected = unbroken(workers)
    for at in (first, *later):
        process = world.run_rigged(*FAST, "--at", at, command=command(world, workers))
        settle(world, process)
        for kill in at.split(","):
            event, nth, action = kill.split(":")
            assert f"test: {action} at {event} {nth}" in process.stderr, process.stderr
    if not world.final.exists():
        finish(world, workers)

    check_identical(world, expected)


@pytest.mark.parametrize(
    "workers",
    [
        *(pytest.param(workers, marks=pytest.mark.nightly) for workers in ("0", "2")),
        pytest.param("persistent", marks=pytest.mark.sample),
    ],
)
def test_a_training_that_is_interrupted_twice_in_a_row_loses_no_step_and_ends_bit_identical(
    workers: str, world: World, unbroken: Callable[[str], World]
) -> None:
    expected = unbroken(workers)
    for _ in range(2):
        process = world.run_rigged(*FAST, "--at", "FirstStep:1:terminate", command=command(world, workers))
        assert process.wait() == 75, process.stderr
        assert world.survey().commits[-1].step == world.steps_of_curve()[-1], process.stderr
    finish(world, workers)

    check_identical(world, expected)
    assert world.steps_of_curve() == list(range(1, STEPS + 1)), "no step was made twice"


def test_saving_draws_no_random_number(world: World, unbroken: Callable[[str], World]) -> None:
    process = world.run_harness("--every-s", "1000", "--every-steps", "1", command=command(world, "2"))

    assert process.wait() == 0, process.stderr
    assert len(steps_said(process.stderr, "Sealed")) > 3
    check_identical(world, unbroken("2"))


@pytest.mark.parametrize(
    "workers",
    [pytest.param(name, marks=[] if name in ("2", "spawn") else [pytest.mark.nightly]) for name in WORKERS],
)
def test_sigterm_to_the_whole_group_while_workers_run_loses_no_step(
    workers: str, world: World, unbroken: Callable[[str], World]
) -> None:
    process = world.run_rigged(*FAST, "--at", "Sealed:1:terminate-group", command=command(world, workers))

    assert process.wait() == 75, process.stderr
    known = world.survey()
    assert known.done is not None
    assert (known.done.outcome, known.done.step) == ("interrupted", world.steps_of_curve()[-1]), process.stderr
    finish(world, workers)
    check_identical(world, unbroken(workers))


def test_a_notice_in_a_long_phase_leaves_at_a_safe_point_with_the_newest_sealed(
    world: World, unbroken: Callable[[str], World]
) -> None:
    process = world.run_harness("--every-steps", "4", command=command(world, "0", "--phase-at", "0"))
    process.wait_for(" Published ")
    world.wait_until(lambda: world.steps_of_curve()[-1] == STEPS // 3, "the phase after the first epoch")
    process.signal(signal.SIGTERM)

    assert process.wait() == 75, process.stderr
    assert world.survey().commits[-1].step == steps_said(process.stderr, "Sealed")[-1]
    world.released.touch()
    finish(world, "0")
    check_identical(world, unbroken("0"))


def test_harness_off_is_inert(world: World, unbroken: Callable[[str], World]) -> None:
    process = world.start(*command(world, "2"), env={"HARNESS": "off"})

    assert process.wait() == 0, process.stderr
    assert process.stderr == ""
    assert not (world.root / ".harness").exists()
    assert sorted(path.name for path in world.root.iterdir()) == ["curve", "final"]
    assert world.steps_of_curve() == list(range(1, STEPS + 1))
