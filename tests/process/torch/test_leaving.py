"""A program that leaves by itself, without a notice and with one: what that is called, and what is lost by it."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.support.leaving_trainer import STEPS
from tests.support.process import Process
from tests.support.world import World, steps_said

pytestmark = pytest.mark.long("several lives of a training with torch")

OPTIONS = ("--every-s", "1000", "--every-steps", "4")


def start(world: World, way: str, *how: str, options: tuple[str, ...] = ()) -> Process:
    command = [sys.executable, "-m", "tests.support.leaving_trainer", way, "--curve", world.curve, *how]
    return world.run_harness(*OPTIONS, *options, command=command)


@pytest.mark.sample
def test_an_exit_in_the_middle_is_no_end_and_continue_goes_on(world: World) -> None:
    stopped = start(world, "exit", "--at", "6")
    assert stopped.wait() == 0, stopped.stderr
    assert "stopped early. --continue resumes from step 4, --fresh" in stopped.stderr
    known = world.survey()
    assert known.done is not None
    assert (known.done.outcome, known.done.step, known.finished_at) == ("stopped early", 4, None)

    refused = start(world, "exit")
    assert refused.wait() == 64
    why = "was stopped early by its own program: --continue (continue_=True) resumes it from step 4, --fresh"
    assert why in refused.stderr

    again = start(world, "exit", options=("--continue",))
    assert again.wait() == 0, again.stderr
    assert world.survey().finished_at == STEPS
    lines = world.curve.read_text().splitlines()
    assert world.steps_of_curve() == [1, 2, 3, 4, 5, 6, *range(5, STEPS + 1)]
    assert lines[4:6] == lines[6:8], "the two steps after the snapshot are made again, bit for bit"


def test_a_flag_of_the_programs_own_handler_loses_no_step(world: World) -> None:
    """The handler is installed after the Checkpointer; the signal reaches the trainer alone."""
    process = start(world, "flag", "--at", "6")
    world.wait_until(lambda: world.curve.exists() and len(world.steps_of_curve()) == 6, "step 6")
    os.kill(int(process.wait_for(r"TrainerStarted pid=(\d+)")[1]), signal.SIGTERM)

    assert process.wait() == 75, process.stderr
    assert "own handler" in process.stderr
    assert world.survey().commits[-1].step == 6
    again = start(world, "flag")
    assert again.wait() == 0, again.stderr
    assert steps_said(again.stderr, "Restored") == [6]
    assert world.survey().finished_at == STEPS


@pytest.mark.parametrize("way", ["handler", "imported"])
def test_a_handler_that_leaves_with_0_is_an_interruption(world: World, way: str) -> None:
    process = start(world, way, "--at", "6")
    world.wait_until(lambda: world.curve.exists() and len(world.steps_of_curve()) == 6, "step 6")
    os.kill(int(process.wait_for(r"TrainerStarted pid=(\d+)")[1]), signal.SIGTERM)

    assert process.wait() == 75, process.stderr
    assert "own handler" in process.stderr
    again = start(world, way)
    assert again.wait() == 0, again.stderr
    assert steps_said(again.stderr, "Restored") == [4]
    assert world.survey().finished_at == STEPS


def test_an_end_that_fails_is_none_and_the_run_goes_on_from_before_it(world: World) -> None:
    """Its final snapshot fitted no loop: every later life skipped them all, and ended with weights as they began."""
    failed = start(world, "failing", options=("--max-crashes", "0", "--every-steps", "5"))
    assert failed.wait() == 1, failed.stderr
    known = world.survey()
    assert known.done is not None
    assert (known.done.outcome, known.commits[-1].step) == ("failed", 10), "and not the end's own"

    again = start(world, "failing", "--at", "0", options=("--every-steps", "5"))

    assert again.wait() == 0, again.stderr
    assert steps_said(again.stderr, "Restored") == [10]
    assert world.survey().finished_at == STEPS
    lines = world.curve.read_text().splitlines()
    assert world.steps_of_curve() == [*range(1, STEPS + 1), *range(11, STEPS + 1)]
    assert lines[10:STEPS] == lines[STEPS:], "bit for bit"


IN_A_THREAD = """
import sys, threading, torch
from harness import Checkpointer

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = Checkpointer(model=model, optimizer=optimizer)

def train():
    for step in ckpt.steps(1_000_000):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if step == 20:
            print("trains", file=sys.stderr, flush=True)

thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


def test_a_training_in_a_thread_loses_no_step_to_a_signal_of_the_whole_group(world: World) -> None:
    """Its handlers were put in place when the loop began, which only the main thread can do: it was killed."""
    path = world.root / "in_a_thread.py"
    path.write_text(IN_A_THREAD)
    process = world.run_harness("--every-s", "1000", command=[sys.executable, path])
    process.wait_for("trains")
    process.signal_group(signal.SIGTERM)

    assert process.wait() == 75, process.stderr
    assert " Drained durable_step=" in process.stderr
    assert "lost_steps=0" in process.stderr
