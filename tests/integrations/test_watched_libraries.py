"""`--watch`, with programs that save by a real library's own means: noticed, killed and moved, they end as unbroken."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.installed import LARGE, TIED, environment_of
from tests.support.once import once
from tests.support.process import Process
from tests.support.world import World, steps_said

pytest.importorskip("transformers")
pytestmark = pytest.mark.long("several lives of a real training")

FAST = ("--back-off-s", "0.05", "--watch-look-s", "0.1")
LARGE_PATH = "TESTS_LARGE_PATH"
BY_EPOCH = ("lightning", "keras", "fastai")
BY_PATH = ("transformers", "accelerate", "lightning")
"""Libraries that are told from which path to go on; the other programs look for the newest by themselves."""


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCHERS: dict[str, Sequence[str]] = {"transformers-ddp": TORCHRUN}


def command(world: World, library: str, *options: str) -> list[str | Path]:
    prefix = ["env", f"PYTHONPATH={os.environ[LARGE_PATH]}"] if library in LARGE else []
    launcher, library = LAUNCHERS.get(library, ()), library.partition("-ddp")[0]
    checkpoint = ["--checkpoint", "{checkpoint}"] if library in BY_PATH else []
    files = ["--out", world.root / "out", "--curve", world.curve, "--final", world.final]
    program = ["-m", "tests.support.library_program", library]
    return [*prefix, sys.executable, *launcher, *program, *files, *checkpoint, *options]


def start(world: World, library: str, *options: str, at: str = "") -> Process:
    rig = ("--at", at) if at else ()
    return world.run_rigged(*FAST, *rig, "--watch", str(world.root / "out"), command=command(world, library, *options))


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str], World]:
    """The world of a run of a library that nothing has interrupted, and that knows nothing of the harness."""

    def of(library: str) -> World:
        def train(folder: Path) -> None:
            with contextlib.closing(World(folder)) as world:
                plain = [word for word in command(world, library) if word not in ("--checkpoint", "{checkpoint}")]
                process = world.start(*plain)
                assert process.wait() == 0, process.stderr

        return World(once(tmp_path_factory, worker_id, f"watched-{library}", train))

    return of


def check_same(unbroken: World, *hosts: World) -> None:
    """Every step of every life was the unbroken run's, and so is the end."""
    trained = [line for host in hosts for line in host.curve.read_text().splitlines()]
    assert set(trained) == set(unbroken.curve.read_text().splitlines())
    assert hosts[-1].final.read_text() == unbroken.final.read_text()


@pytest.mark.parametrize(
    "library",
    [
        *("transformers", "torch"),
        *(
            pytest.param(library, marks=pytest.mark.nightly)
            for library in (
                *("transformers-ddp", "accelerate", "lightning", "dcp", "torch-one"),
                *("deepspeed", "keras", "orbax", *TIED),
            )
        ),
    ],
)
def test_a_library_s_own_checkpoints_survive_the_machine_bit_for_bit(
    library: str,
    world: World,
    unbroken: Callable[[str], World],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if needed := environment_of(library, tmp_path_factory):
        monkeypatch.setenv(LARGE_PATH, needed["PYTHONPATH"])
    first, second = ("12", "22") if library in BY_EPOCH else ("10", "18")  # some save every 10 steps, the others 4
    process = start(world, library, "--hold-at", first, at="Published:1:terminate")
    assert process.wait() == 75, process.stderr

    host = world.elsewhere()
    process = start(host, library, "--hold-at", second, at="Published:1:kill-trainer")
    assert process.wait() == 0, process.stderr
    assert steps_said(process.stderr, "Restored"), process.stderr
    assert process.stderr.count(" TrainerStarted ") == 2
    check_same(unbroken(library), world, host)
    host.check_commits()


@pytest.mark.sample
def test_transformers_own_just_in_time_checkpoint_is_asked_for_and_kept(
    world: World, unbroken: Callable[[str], World]
) -> None:
    process = start(world, "transformers", "--asked", "--hold-at", "10", at="Published:1:terminate")
    assert process.wait() == 75, process.stderr
    assert "asked to save: SIGTERM" in process.stderr
    assert world.check_commits()[-1].step == 10

    host = world.elsewhere()
    process = start(host, "transformers", "--asked")
    assert process.wait() == 0, process.stderr
    assert steps_said(process.stderr, "Restored") == [10]
    check_same(unbroken("transformers"), world, host)
