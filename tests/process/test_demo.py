"""The demo's own path, small: what a newcomer sees first has to be true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short directory for temporary files: sockets live in there, and their paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="h") as directory:
        yield Path(directory)


@pytest.mark.slow
def test_the_demo_loses_nothing_with_notice_and_ends_bit_identical_with_and_without(
    tmp_path: Path, temporary: Path
) -> None:
    elsewhere = tmp_path / "another directory"
    elsewhere.mkdir()

    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py", "--quick", "--json"],
        cwd=elsewhere,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "HARNESS": "off", "HARNESS_RUN": "of the caller"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    noticed, killed = found["runs"]["noticed"], found["runs"]["killed"]
    assert found["bit_identical"] is True
    assert (noticed["exit_codes"], noticed["steps_lost"]) == ([75, 0], 0)
    assert killed["exit_codes"] == [137, 0]
    assert 0 <= killed["steps_lost"] < found["steps"]
    assert noticed["resumed_from"] == killed["resumed_from"] == "remote"  # the local tier was thrown away
    assert not list(elsewhere.iterdir())
    assert not list(temporary.iterdir())  # nothing is left behind
