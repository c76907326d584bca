from __future__ import annotations

from pathlib import Path

import pytest

from cloud.directory.store import DirectoryStore
from cloud.testing.memory import MemoryStore
from tests.support.protocol import (
    FastFileSystem,
    ProtocolStore,
)


@pytest.fixture
def store() -> ProtocolStore:
    return ProtocolStore(MemoryStore())


@pytest.fixture(params=["memory", "directory"])
def copying(request: pytest.FixtureRequest, tmp_path: Path) -> ProtocolStore:
    """A store that keeps sums, and one that keeps none."""
    return ProtocolStore(MemoryStore() if request.param == "memory" else DirectoryStore(tmp_path, fs=FastFileSystem()))
