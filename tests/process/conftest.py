"""A world for each test, which ends with nobody in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Store, local tier and processes of one test; nobody may be left when it ends."""
    made = World(tmp_path)
    try:
        yield made
        made.wait_gone(5.0)
    finally:
        made.close()
