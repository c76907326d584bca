from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloud.store import ObjectStore
from harness.config.settings import Settings
from harness.core.manifest import SET_ASIDE
from harness.errors import ConfigError
from harness.inspect.ls import snapshots
from harness.inspect.verify import is_bad, verify
from harness.snapshots import commit, fetch, retire
from harness.snapshots.open import open_store
from tests.support.protocol import FOREVER, KEYS
from tests.support.two_snapshots import FIRST, SECOND, flip


def test_verify_calls_good_what_is_good(settings: Settings, store: Path) -> None:
    assert [row["verdict"] for row in verify(settings)] == ["ok"] * 3


def test_verify_finds_a_flipped_bit_and_changes_nothing(settings: Settings, store: Path) -> None:
    path = flip(store, FIRST)
    before = sorted(store.rglob("*"))

    rows = {(row["snapshot"], row["tier"]): row["verdict"] for row in verify(settings)}

    assert path.name in rows[str(FIRST), "remote"]
    assert rows[str(SECOND), "remote"] == rows[str(SECOND), "local"] == "ok"
    assert sorted(store.rglob("*")) == before


def test_lifting_ends_the_quarantine_of_what_is_right_and_of_nothing_else(settings: Settings, store: Path) -> None:
    """One host with bad memory had condemned every snapshot for everybody, and no command took that back."""
    remote = open_store(settings.store)
    for name in (FIRST, SECOND):
        commit.quarantine(remote, KEYS, name, "differs", "bad-host", FOREVER)
    flip(store, FIRST)

    before = [row["verdict"] for row in verify(settings) if row["tier"] == "remote"]
    lifted = [row["verdict"] for row in verify(settings, lift=True) if row["tier"] == "remote"]

    assert before == ["quarantined: differs", "quarantined: differs"]
    assert lifted[0].startswith("quarantined: differs; and now: ")
    assert lifted[1] == "ok"
    assert [row["unusable"] for row in snapshots(settings) if row["tier"] == "remote"] == ["differs", None]


def test_what_was_set_aside_on_purpose_is_no_damage_unless_it_differs(settings: Settings, store: Path) -> None:
    reason = f"{SET_ASIDE}the run went back to {FIRST}"
    commit.quarantine(open_store(settings.store), KEYS, SECOND, reason, "host", FOREVER)

    found = [row["verdict"] for row in verify(settings) if row["tier"] == "remote"]
    flip(store, SECOND)
    lifted = [row["verdict"] for row in verify(settings, lift=True) if row["tier"] == "remote"]

    assert found == ["ok", reason]
    assert not any(map(is_bad, found))
    assert lifted[1].startswith(f"quarantined: {reason}; and now: ")
    assert is_bad(lifted[1])


def test_verify_of_nothing_is_an_error(settings: Settings) -> None:
    open_store(settings.store)
    with pytest.raises(ConfigError, match="no snapshot"):
        verify(settings)


def test_what_is_retired_while_it_is_verified_is_no_difference(
    settings: Settings, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fetch.verify

    def retired_meanwhile(opened: ObjectStore, keys: Any, manifest: Any, *rest: Any) -> bool:
        if manifest.id == FIRST:
            retire.remove(opened, keys, FIRST, FOREVER)
        return real(opened, keys, manifest, *rest)

    monkeypatch.setattr(fetch, "verify", retired_meanwhile)

    rows = [row for row in verify(settings) if row["tier"] == "remote"]
    assert [(row["snapshot"], row["verdict"]) for row in rows] == [(str(SECOND), "ok")]
