from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.config.settings import Settings
from harness.ipc import client
from harness.ipc.channel import listen
from harness.ipc.runtime_dir import RuntimeDir
from tests.support.two_snapshots import publish_two


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        store=str(tmp_path / "store"), run="run", local=str(tmp_path / "local"), runtime_dir=str(tmp_path / "runtime")
    )


@pytest.fixture
def store(settings: Settings) -> Path:
    """A run with two snapshots in the store, one of them in the local tier too."""
    return publish_two(settings)


@pytest.fixture
def frozen(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This host's agent of the run listens, and has been stopped."""
    monkeypatch.setattr(client, "ANSWER_S", 0.05)
    place = RuntimeDir.of(Path(settings.runtime_dir), settings.store_identity, settings.run)
    place.prepare()
    lock, listener = place.try_lock(), listen(place.socket)
    assert lock is not None
    yield
    listener.close()
    os.close(lock)
