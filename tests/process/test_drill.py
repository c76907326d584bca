"""`harness drill`: what a notice comes to, tried on a run that goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import Process
from tests.support.world import World, steps_said

STEPS = 20
PATIENT = ("--patient-until", "10")  # a snapshot of step 10 is durable, and none is on its way
HOLD = ("--hold-at", "12", *PATIENT)
STUCK = ("--stuck-at", "12", *PATIENT)


@pytest.fixture(params=[False, True], ids=["one-tier", "two-tiers"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, local=request.param)
    yield made
    made.close()


def drill(world: World, *options: str) -> Process:
    return world.start(*world.harness("drill", *world.named(), *options))


def training(world: World, *trainer: str) -> Process:
    """A run that has made 12 steps and waits there."""
    process = world.run_harness("--every-s", "1000", command=world.tiny(*(trainer or HOLD)))
    world.wait_until(lambda: world.curve.exists() and world.steps_of_curve()[-1:] == [12], "step 12")
    return process


def test_a_drill_makes_the_last_step_durable_and_training_goes_on(world: World) -> None:
    process = training(world)

    asked = drill(world, "--in", "60", "--json")

    assert asked.wait() == 0, asked.stderr
    found = json.loads(asked.stdout)
    assert (found["durable_step"], found["lost_steps"], found["has_s"]) == (12, 0, 60.0)
    assert 0.0 < found["durable_in_s"] < 60.0
    assert "fits: " in asked.stderr, "the plan is told before it is carried out"
    assert world.check_commits()[-1].step == 12
    world.released.touch()
    assert process.wait() == 0, process.stderr
    assert steps_said(process.stderr, "Drilling") == [12]
    world.check_tiny(STEPS)
    assert world.steps_of_curve() == list(range(1, STEPS + 1)), "nobody left"


def test_a_drill_to_the_end_is_the_real_thing(world: World) -> None:
    process = training(world)

    asked = drill(world, "--end", "--json")

    assert asked.wait() == 0, asked.stderr
    assert process.wait() == 75, process.stderr
    found = json.loads(asked.stdout)
    assert (found["durable_step"], found["lost_steps"]) == (12, 0)
    world.released.touch()
    assert world.run_harness(command=world.tiny(*HOLD)).wait() == 0
    world.check_tiny(STEPS)
    assert world.steps_of_curve() == list(range(1, STEPS + 1)), "no step was made twice"


def test_a_drill_that_does_not_fit_says_what_would_be_lost(world: World) -> None:
    process = training(world, *STUCK)  # a step that is longer than the window

    asked = drill(world, "--in", "0.3")

    assert asked.wait() == 74, asked.stderr
    assert "NOT durable in 0.3 s: 2 steps would be lost; step 10 is durable" in asked.stderr
    world.released.touch()
    assert process.wait() == 0, process.stderr


def test_a_notice_that_comes_in_a_drill_counts(world: World) -> None:
    process = training(world, *STUCK)
    asked = drill(world, "--in", "600")
    process.wait_for(" Drilling ")

    process.signal(signal.SIGTERM)

    assert asked.wait() == 64
    assert "no drill: a real interruption has begun" in asked.stderr
    world.released.touch()
    assert process.wait() == 75, process.stderr
    assert world.survey().commits[-1].step == world.steps_of_curve()[-1]


def test_a_drill_whose_program_dies_is_called_off_and_the_program_started_again(world: World) -> None:
    process = training(world, *STUCK)
    asked = drill(world, "--in", "600")
    process.wait_for(" Drilling ")

    os.kill(int(process.wait_for(r" TrainerStarted pid=(\d+)")[1]), signal.SIGKILL)

    assert asked.wait() == 64
    assert "no drill: the program has ended" in asked.stderr
    world.released.touch()
    assert process.wait() == 0, process.stderr
    world.check_tiny(STEPS)


@pytest.mark.parametrize("event", ["Drilling", "Drilled"])
def test_an_agent_that_dies_in_a_drill_is_replaced_as_ever(world: World, event: str) -> None:
    process = world.run_rigged("--every-s", "1000", "--at", f"{event}:1:kill-agent", command=world.tiny(*HOLD))
    world.wait_until(lambda: world.curve.exists() and world.steps_of_curve()[-1:] == [12], "step 12")

    asked = drill(world)

    assert asked.wait() == 64
    assert "the agent ended before the drill did" in asked.stderr
    world.released.touch()
    process.wait_exit()
    world.wait_gone()
    world.check_tiny(STEPS)
    assert world.steps_of_curve() == list(range(1, STEPS + 1)), "the trainer did not notice"


def test_there_is_one_drill_at_a_time(world: World) -> None:
    process = training(world, *STUCK)
    first = drill(world, "--in", "600")
    process.wait_for(" Drilling ")

    second = drill(world)

    assert second.wait() == 64
    assert "no drill: a drill is under way" in second.stderr
    world.released.touch()
    assert first.wait() == 0, first.stderr
    assert process.wait() == 0, process.stderr


def test_a_drill_of_nothing_is_refused(world: World) -> None:
    nobody = drill(world)
    assert nobody.wait() == 64
    assert "no agent of run 'a'" in nobody.stderr

    never = drill(world, "--in", "-1")
    assert never.wait() == 64
    assert "--in must be more than 0" in never.stderr
