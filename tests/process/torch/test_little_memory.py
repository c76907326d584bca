"""Less memory than a snapshot needs, by a real limit of the kernel's: the disk takes it, and nothing is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.support.cgroup import memory_limit
from tests.support.needs import lacking
from tests.support.process import Process
from tests.support.world import ROOT, World, steps_said

pytestmark = pytest.mark.long("a state of 200 MB, by way of a disk")

MB, STEPS = 200, 20


@dataclass(frozen=True)
class Bare:
    """What a trainer takes before it has a state: a torch for GPUs takes 500 MB more than one for CPUs.

    Attributes:
        all: bytes, with the files of libraries, which count as used.
        own: bytes without these, which the kernel lets go of before it kills a process.
    """

    all: int
    own: int


@pytest.fixture(scope="module")
def bare() -> Bare:
    code = "import tests.support.large_trainer, pathlib; print(pathlib.Path('/proc/self/status').read_text())"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True).stdout
    found = {name: int(kib) * 1024 for name, kib in re.findall(r"(VmRSS|RssAnon):\s+(\d+) kB", said)}
    return Bare(found["VmRSS"], found["RssAnon"])


@pytest.fixture
def train(world: World) -> Callable[..., Process]:
    def start(limited: list[str], *more: str) -> Process:
        script = ["-m", "tests.support.large_trainer", "--mb", str(MB), "--steps", str(STEPS)]
        command = [sys.executable, *script, "--final", str(world.final), *more]
        options = ["--every-s", "1000", "--every-steps", "8"]
        return world.start(*limited, *world.harness("run", *world.options(), *options, "--", *command))

    return start


def test_a_state_of_more_than_half_the_memory_is_saved_and_resumed_by_way_of_the_disk(
    world: World, train: Callable[..., Process], bare: Bare
) -> None:
    """With the state there is not room for another one."""
    world.has_local = True
    with memory_limit(bare.all + 330_000_000) as limited:
        process = train(limited, "--hold-at", "10", "--hold-until", str(world.released))
        process.wait_for(r" Published [^\n]* step=8 ")
        process.signal(signal.SIGTERM)
        assert process.wait() == 75, process.stderr
        assert "training waits for that disk meanwhile" in process.stderr
        again = train(limited)
        assert again.wait() == 0, again.stderr

    assert steps_said(again.stderr, "Restored")[0] >= 8
    assert world.survey().finished_at == STEPS
    world.check_commits()
    assert world.final.read_text() == unbroken()


@pytest.mark.sample
def test_a_program_that_the_kernel_kills_for_memory_gets_that_of_the_slots(
    world: World, train: Callable[..., Process], bare: Bare
) -> None:
    """At its step 12 it needs more than there is beside a slot in memory, and less than there is without."""
    with memory_limit(bare.all + 690_000_000) as limited:
        more_mb = (bare.all - bare.own) // 10**6 + 370
        process = train(limited, "--more-mb", str(more_mb), "--more-at", "12")
        assert process.wait() == 0, process.stderr

    said = process.stderr
    assert "TrainerLeft code=137 step=11" in said
    assert "from now on the disk takes the snapshots" in said
    assert steps_said(said, "Restored") == [8]
    assert said.count("TrainerStarted") == 2
    assert world.final.read_text() == unbroken()


@pytest.mark.root
def test_a_dev_shm_of_64_mb_as_docker_gives_it_holds_no_slot_and_need_not(
    world: World, train: Callable[..., Process]
) -> None:
    small = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    if subprocess.run(["unshare", "--mount", "sh", "-c", small, "sh", "true"], capture_output=True).returncode != 0:
        lacking("mounts", "this process may make no mount namespace of its own")
    process = train(["unshare", "--mount", "sh", "-c", small, "sh"])

    assert process.wait() == 0, process.stderr
    assert "waits for that disk" not in process.stderr
    assert world.survey().finished_at == STEPS
    assert world.final.read_text() == unbroken()


def unbroken() -> str:
    """What an unbroken run ends with."""
    from tests.support.large_trainer import Large, digest

    model = Large(MB)
    for _ in range(STEPS):
        model.train_once()
    return digest(model.state_dict())
