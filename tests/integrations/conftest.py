"""A world for each test, which ends with nobody in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.world import World, nobody_left


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """Store, local tier and processes of one test; nobody may be left when it ends."""
    with nobody_left(request, World(tmp_path)) as made:
        yield made
