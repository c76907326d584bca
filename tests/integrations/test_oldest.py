"""The oldest version of each framework that an extra of pyproject.toml allows does what the newest does."""

from __future__ import annotations

import re
import sys
import tomllib

import pytest

from tests.support.framework_lives import check_same, command, live
from tests.support.installed import installed
from tests.support.world import ROOT, World

pytestmark = pytest.mark.long("an older framework is installed, and trains several times")


def oldest(framework: str) -> str:
    """What pyproject.toml says at least."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = [line for line in extras[framework] if re.match(rf"{framework}\b", line)]
    return wanted.replace(">=", "==")


@pytest.mark.parametrize(
    ("framework", "trainer", "mode"),
    [
        ("transformers", "hf_trainer", "evaluate"),
        pytest.param("transformers", "hf_trainer", "epochs", marks=pytest.mark.nightly),
        pytest.param("transformers", "hf_trainer", "stops", marks=pytest.mark.nightly),
        ("lightning", "lightning_trainer", "validate"),
        pytest.param("lightning", "lightning_trainer", "stops", marks=pytest.mark.nightly),
    ],
)
def test_the_oldest_one_is_resumed_bit_for_bit(
    framework: str,
    trainer: str,
    mode: str,
    world: World,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    wanted = oldest(framework)
    # Not Lightning's torch: it would be a second one.
    options = ["--no-deps"] if framework == "lightning" else []
    environ = installed(wanted, [*options, wanted], factory=tmp_path_factory)
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
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted = oldest("accelerate")
    environ = installed(wanted, ["--no-deps", wanted], factory=tmp_path_factory)
    units = ["tests/unit/trainer/loaders/test_accelerate.py", "tests/unit/trainer/state/test_prepared.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *units]
    process = world.start(*command, env=environ, cwd=ROOT)
    assert process.wait() == 0, process.stdout.decode()
    assert "skipped" not in process.stdout.decode()
