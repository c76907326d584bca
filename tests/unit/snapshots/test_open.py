from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from cloud.directory.store import DirectoryStore
from cloud.errors import Denied
from harness.config.settings import Settings
from harness.errors import ConfigError
from harness.snapshots import open
from harness.snapshots.open import open_soon
from tests.support.protocol import FOREVER

SETTINGS = Settings(store="/store", run="run")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Directories open once it is set, as on a network mount."""
    answers, real = threading.Event(), DirectoryStore

    def opened(*args: Any, **options: Any) -> DirectoryStore:
        answers.wait()
        return real(*args, **options)

    monkeypatch.setattr(open, "DirectoryStore", opened)
    monkeypatch.setattr(open, "OPEN_S", 0.01)
    return answers


def test_a_directory_that_hangs_holds_up_only_who_uses_it(server: threading.Event, tmp_path: Path) -> None:
    store, found = open_soon(str(tmp_path), SETTINGS, print), list[bytes]()

    def use() -> None:
        store.put_if_absent("a", b"b", deadline=FOREVER)
        found.append(store.read("a", limit_bytes=1, deadline=FOREVER))

    user = threading.Thread(target=use)
    user.start()
    assert store.local_path("a") == tmp_path / "a"
    store.close()
    assert found == []
    server.set()
    user.join()

    assert found == [b"b"]


def test_a_directory_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be used: .*Not a directory"):
        open_soon(str(tmp_path / "file" / "store"), SETTINGS, print)


def test_a_directory_that_could_not_be_opened_is_opened_again(server: threading.Event, tmp_path: Path) -> None:
    (tmp_path / "mount").touch()
    store = open_soon(str(tmp_path / "mount" / "store"), SETTINGS, print)
    server.set()
    with pytest.raises(Denied, match="Not a directory"):
        store.free_bytes()
    (tmp_path / "mount").unlink()
    free = None
    while free is None:  # the next attempt may have begun before
        with contextlib.suppress(Denied):
            free = store.free_bytes()

    assert free
