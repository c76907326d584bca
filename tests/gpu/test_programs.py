"""Whole programs on a CUDA device, under `harness run` and without it. Needs a GPU; says so when there is none."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import graph_trainer
from tests.support.world import World, nobody_left

pytestmark = [pytest.mark.gpu, pytest.mark.long("a program that imports torch and starts CUDA takes 5 s")]
PROGRAM = [sys.executable, graph_trainer.__file__]


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with nobody_left(request, World(tmp_path)) as made:
        yield made


def final(stdout: bytes) -> str:
    found = re.search(rb"^final (\S+)$", stdout, re.MULTILINE)
    assert found is not None, stdout
    return found[1].decode()


def test_a_step_that_is_one_graph_computes_what_it_computes_without_the_harness(world: World) -> None:
    alone = world.start(*PROGRAM, env={"HARNESS": "off"})
    assert alone.wait() == 0, alone.stderr

    process = world.run_harness(command=PROGRAM)

    assert process.wait() == 0, process.stderr
    assert final(process.stdout) == final(alone.stdout)
    assert world.check_commits()[-1].step == graph_trainer.STEPS
