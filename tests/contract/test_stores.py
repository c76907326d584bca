"""The contract of ObjectStore, over every store that there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud.directory.store import DirectoryStore
from cloud.retry import RetryingStore
from cloud.store import ObjectStore
from cloud.testing.memory import MemoryStore
from tests.contract.store_contract import StoreContract
from tests.support.clock import FakeClock


class TestDirectoryStore(StoreContract):
    keeps_sums = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[ObjectStore]:
        store = DirectoryStore(tmp_path / "store")
        yield store
        store.close()
        left = [path for path in store.root.rglob("*") if path.name.startswith(".")]
        assert left == []  # no draft and no reservation outlives its use


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MemoryStore()


class TestRetryingStore(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return RetryingStore(MemoryStore(), sleep=FakeClock().sleep)
