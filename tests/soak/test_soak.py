"""A minute of the soak: everything that can go wrong, at random, and nothing is lost that was durable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEED = 2026  # the same strikes in the same order; what they meet is this machine's


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
def test_a_training_that_everything_happens_to_is_bit_identical_and_leaves_nothing_behind() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.driver", "--minutes", "1", "--seed", str(SEED), "--json"],
        cwd=ROOT,
        env=os.environ | {"HARNESS": "off", "HARNESS_RUN": "of the caller"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["violations"] == []
    assert sum(found["strikes"].values()) >= 3
    assert found["steps_trained"] >= found["steps"] > 0
    assert found["bucket_when_tidy"] != "never exact"
