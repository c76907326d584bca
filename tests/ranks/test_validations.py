"""Ranks that are apart by a validation take their snapshot behind it: else one of them would repeat it alone."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.generating_ranks import STEPS
from tests.support.validating_ranks import BATCHES, EPOCHS
from tests.support.world import World, steps_said

pytestmark = pytest.mark.long("a training on two ranks")

LAST = EPOCHS * BATCHES


def test_a_rank_before_the_last_validation_is_saved_behind_it_as_the_other_is(world: World) -> None:
    trainer = [*world.torchrun(2), "tests.support.validating_ranks", "--curve", world.curve]
    process = world.run_harness("--every-s", "1000", command=[*trainer, "--hold-until", world.released])
    process.wait_for(f"rank 0 has validated epoch {EPOCHS - 1}")
    process.wait_for("rank 1 stands before the last validation")
    os.kill(process.pid, signal.SIGTERM)
    process.wait_for(rf" Sealed step={LAST} [^\n]*rank=0")
    world.released.touch()
    assert process.wait() == 0, process.stderr

    assert steps_said(process.stderr, "Sealed")[-2:] == [LAST, LAST]
    for rank in range(2):
        validated = world.curve.with_name(f"{world.curve.name}.{rank}").read_text().splitlines()
        assert validated == [f"{epoch} {epoch}" for epoch in range(EPOCHS)], rank


def test_ranks_that_lay_out_their_slots_at_steps_of_their_own_gather_alike_after_a_generation(world: World) -> None:
    process = world.run_harness("--every-s", "0.2", command=[*world.torchrun(2), "tests.support.generating_ranks"])

    assert process.wait() == 0, process.stderr
    assert steps_said(process.stderr, "Sealed")[-2:] == [STEPS, STEPS]
    assert " AttemptFailed " not in process.stderr
