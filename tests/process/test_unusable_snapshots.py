"""I10 against real processes: a run whose snapshots are all damaged is refused each time, and never begins anew."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = "tiny"


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A short directory for sockets: their paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="h") as directory:
        yield Path(directory)


def start(place: Path, runtime: Path, steps: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.cli", "run", "--run", RUN, "--store", str(place / "store")]
    trainer = [
        sys.executable,
        "-m",
        "tests.support.tiny_trainer",
        "--steps",
        str(steps),
        "--curve",
        str(place / "curve"),
    ]
    return subprocess.run(
        [*command, "--metadata", "off", "--", *trainer, "--final", str(place / "final")],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HARNESS_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def interrupted_run(place: Path, runtime: Path) -> None:
    """A run with snapshots that was not finished: the record of its end says so."""
    assert start(place, runtime, steps=12).returncode == 0
    for done in (place / "store" / RUN / "generations").glob("*.done.json"):
        done.unlink()


def damage(place: Path) -> None:
    """Flip a bit of every shard."""
    shards = list((place / "store" / RUN / "snapshots").glob("*/*.safetensors"))
    assert shards
    for shard in shards:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.unlink()
        shard.write_bytes(data)


@pytest.mark.slow
def test_a_run_whose_snapshots_are_all_damaged_exits_70_and_is_not_restarted(tmp_path: Path, runtime: Path) -> None:
    interrupted_run(tmp_path, runtime)
    damage(tmp_path)

    refused = start(tmp_path, runtime, steps=20)

    assert refused.returncode == 70, refused.stderr
    assert "Restarting" not in refused.stderr


@pytest.mark.slow
def test_a_run_whose_snapshots_are_all_quarantined_never_starts_at_step_0(tmp_path: Path, runtime: Path) -> None:
    interrupted_run(tmp_path, runtime)
    damage(tmp_path)
    start(tmp_path, runtime, steps=20)
    curve = (tmp_path / "curve").read_text()

    again = start(tmp_path, runtime, steps=20)

    assert again.returncode == 70, again.stderr
    assert "NothingToResume" not in again.stderr
    assert (tmp_path / "curve").read_text() == curve, "not one step was made"
