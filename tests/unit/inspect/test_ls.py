from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud.notice import Deadline
from cloud.store import ObjectInfo, ObjectStore
from harness.config.settings import Settings
from harness.inspect import ls as module
from harness.inspect import tiers
from harness.inspect.ls import runs, snapshots
from harness.snapshots import commit
from harness.snapshots.open import open_store
from tests.support.protocol import FOREVER, KEYS
from tests.support.two_snapshots import FIRST, SECOND


class ListedStore:
    """A store that counts what its listings have shown."""

    def __init__(self, store: ObjectStore) -> None:
        self._store, self.seen = store, 0

    def list(self, prefix: str, *, after: str = "", deadline: Deadline) -> Iterator[ObjectInfo]:
        for info in self._store.list(prefix, after=after, deadline=deadline):
            self.seen += 1
            yield info


def test_ls_shows_each_tier_and_why_a_snapshot_is_not_usable(settings: Settings, store: Path) -> None:
    commit.quarantine(open_store(settings.store), KEYS, FIRST, "rotten", "here", FOREVER)
    (store / "run" / "commits" / f"{SECOND}.json").write_bytes(b"{")

    rows = [(row["snapshot"], row["tier"], row["bytes"], row["unusable"]) for row in snapshots(settings)]

    assert rows[0] == (str(SECOND), "local", 5064, None)
    assert rows[1] == (str(FIRST), "remote", 5064, "rotten")
    assert rows[2][:3] == (str(SECOND), "remote", None)
    assert str(SECOND) in rows[2][3]


def test_a_quarantine_that_nobody_can_read_is_one_all_the_same(
    settings: Settings, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit.quarantine(open_store(settings.store), KEYS, FIRST, "rotten", "here", FOREVER)
    monkeypatch.setattr(tiers, "MAX_RECORD_BYTES", 10)

    (row,) = [row for row in snapshots(settings) if row["snapshot"] == str(FIRST)]

    assert "at most 10 were expected" in row["unusable"]


def test_runs_are_listed_by_name(settings: Settings, store: Path) -> None:
    open_store(settings.store).put_if_absent("another/generations/00000001.json", b"{}", deadline=FOREVER)

    assert runs(settings) == ["another", "run"]


def test_what_else_lies_in_a_store_is_no_run_and_is_passed_by(
    settings: Settings, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_store(settings.store)
    for key in ("flat", *(f"images/{number}.png" for number in range(30)), "run.old/x", "zebra/events/x"):
        opened.put_if_absent(key, b"", deadline=FOREVER)
    listed = ListedStore(opened)
    monkeypatch.setattr(module, "open_existing_store", lambda location, settings: listed)

    assert runs(settings) == ["run"]
    assert listed.seen < 15
