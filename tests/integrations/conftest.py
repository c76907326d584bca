"""A world for each test, which ends with nobody in it; and unbroken runs, made once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.framework_lives import command
from tests.support.once import once
from tests.support.world import World, nobody_left


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """Store, local tier and processes of one test; nobody may be left when it ends."""
    with nobody_left(request, World(tmp_path)) as made:
        yield made


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str, str], World]:
    """The world of an unbroken run of a trainer of tests/support, in a mode."""

    def of(trainer: str, mode: str) -> World:
        def train(folder: Path) -> None:
            with contextlib.closing(World(folder)) as world:
                process = world.run_harness("--every-s", "1000", command=command(trainer, world, mode))
                assert process.wait() == 0, process.stderr

        return World(once(tmp_path_factory, worker_id, f"unbroken-{trainer}-{mode}", train))

    return of
