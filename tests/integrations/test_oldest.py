"""The oldest version of each framework that an extra of pyproject.toml allows does what the newest does."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.environment import show_package_index
from tests.support.framework_lives import check_same, command, live
from tests.support.needs import lacking
from tests.support.world import ROOT, World

pytestmark = pytest.mark.long("an older framework is installed, and trains several times")


def oldest(framework: str) -> str:
    """What pyproject.toml says at least."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = [line for line in extras[framework] if re.match(rf"{framework}\b", line)]
    return wanted.replace(">=", "==")


def installed(wanted: str, factory: pytest.TempPathFactory, *options: str) -> Path:
    """A folder with a version of a package, and what that needs; made once for all workers."""
    folder = factory.getbasetemp().parent / wanted.replace("==", "-")
    with (folder.with_suffix(".lock")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *options, wanted]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                lacking("package-index", done.stderr.strip().splitlines()[-1])
    return folder


@pytest.mark.parametrize(
    ("framework", "trainer", "mode"),
    [
        ("transformers", "hf_trainer", "evaluate"),
        pytest.param("transformers", "hf_trainer", "epochs", marks=pytest.mark.nightly),
        ("lightning", "lightning_trainer", "validate"),
    ],
)
def test_the_oldest_one_is_resumed_bit_for_bit(
    framework: str,
    trainer: str,
    mode: str,
    world: World,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = oldest(framework)
    show_package_index(monkeypatch)
    # Not Lightning's torch: it would be a second one.
    folder = installed(wanted, tmp_path_factory, *(["--no-deps"] if framework == "lightning" else []))
    # Before the newest one, which this interpreter has.
    environ = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    say = f"import {framework}; print({framework}.__version__)"
    found = world.start(sys.executable, "-c", say, env=environ)
    assert found.wait() == 0, found.stderr
    assert found.stdout.decode().strip().startswith(wanted.partition("==")[2])

    plain = world.elsewhere()
    process = plain.start(*command(trainer, plain, mode, "--plain"), env=environ)
    assert process.wait() == 0, process.stderr
    lives = [("Published:2:terminate", 75), ("Published:1:kill-trainer", 0)]
    live(world, command(trainer, world, mode), lives, environ)
    check_same(world, plain)


def test_loaders_and_states_of_the_oldest_accelerate_are_followed(
    world: World, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_package_index(monkeypatch)
    folder = installed(oldest("accelerate"), tmp_path_factory, "--no-deps")
    units = ["tests/unit/trainer/loaders/test_accelerate.py", "tests/unit/trainer/state/test_prepared.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *units]
    process = world.start(*command, env={"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}, cwd=ROOT)
    assert process.wait() == 0, process.stdout.decode()
    assert "skipped" not in process.stdout.decode()
