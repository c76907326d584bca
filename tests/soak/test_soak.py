"""A minute of the soak: everything that can go wrong, at random, and nothing is lost that was durable."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.world import World, nobody_left

pytestmark = pytest.mark.long("a minute of the soak", minutes=2)

SEED = 2026  # the same strikes in the same order; what they meet is this machine's


@pytest.mark.process
def test_a_training_that_everything_happens_to_is_bit_identical_and_leaves_nothing_behind(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with nobody_left(request, World(tmp_path)) as world:
        done = world.start(
            *(sys.executable, "-m", "tests.soak.driver", "--minutes", "1", "--seed", str(SEED), "--json"),
            env={"HARNESS": "off", "HARNESS_RUN": "of the caller"},
        )

        assert done.wait() == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["violations"] == []
    assert sum(found["strikes"].values()) >= 3
    assert found["steps_trained"] >= found["steps"] > 0
    assert found["bucket_when_tidy"] != "never exact"
