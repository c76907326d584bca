"""Every test here needs a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.needs import lacking
from tests.support.world import World, nobody_left


@pytest.fixture(autouse=True)
def _device() -> None:
    if not torch.cuda.is_available():
        lacking("cuda")


@pytest.fixture
def worlds(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[World, World]]:
    """One for the run that is never interrupted, and one for the other."""
    for name in ("unbroken", "other"):
        (tmp_path / name).mkdir()
    with (
        nobody_left(request, World(tmp_path / "unbroken")) as unbroken,
        nobody_left(request, World(tmp_path / "other")) as other,
    ):
        yield unbroken, other
