"""The demo's own path, small: what a newcomer sees first has to be true."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.world import ROOT, World

pytestmark = [
    pytest.mark.long("three trainings, one after the other"),
    pytest.mark.nightly,  # .ci/run has run the demo itself, which fails unless its runs end bit-identical
]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short directory for temporary files: sockets live in there, and their paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="h") as directory:
        yield Path(directory)


def test_the_demo_loses_nothing_with_notice_and_ends_bit_identical_with_and_without(
    world: World, temporary: Path
) -> None:
    elsewhere = world.root / "another directory"
    elsewhere.mkdir()

    done = world.start(
        *(sys.executable, ROOT / "examples" / "demo.py", "--quick", "--json"),
        env={"TMPDIR": str(temporary), "HARNESS": "off", "HARNESS_RUN": "of the caller"},
        cwd=elsewhere,
    )

    assert done.wait() == 0, done.stderr
    found = json.loads(done.stdout)
    noticed, killed = found["runs"]["noticed"], found["runs"]["killed"]
    assert found["bit_identical"] is True
    assert (noticed["exit_codes"], noticed["steps_lost"]) == ([75, 0], 0)
    assert killed["exit_codes"] == [137, 0]
    assert 0 <= killed["steps_lost"] < found["steps"]
    assert noticed["resumed_from"] == killed["resumed_from"] == "remote"  # the local tier was thrown away
    assert not list(elsewhere.iterdir())
    assert not list(temporary.iterdir())  # nothing is left behind
