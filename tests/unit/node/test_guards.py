"""Loops between machines: what is counted in the store, and what is not."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from cloud.store import ObjectStore
from harness.config.settings import Settings
from harness.core.manifest import FORMAT, Claim
from harness.node import decision, guards
from harness.node.guards import MOST_SUPERSEDED, MOST_UNFIT, Guards
from harness.snapshots import commit
from harness.snapshots.open import open_store
from tests.support.protocol import FOREVER, KEYS, RUN_ID


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(store=str(tmp_path / "store"), run=KEYS.run)


@pytest.fixture
def store(settings: Settings) -> ObjectStore:
    return open_store(settings.store)


def claim(store: ObjectStore, generation: int, outcome: str | None = None) -> None:
    made = Claim(format=FORMAT, run_id=RUN_ID, generation=generation, nonce="a" * 16, claimed_at="", host="h",
                 pid=1, fresh=False, parent=None, command=(), named=True)  # fmt: skip
    commit.claim(store, KEYS, made, FOREVER)
    if outcome is not None:
        commit.end(store, KEYS, generation, "a" * 16, outcome, 20, FOREVER)


def test_instances_that_are_not_fit_are_counted_until_one_is(settings: Settings, store: ObjectStore) -> None:
    counted = Guards(settings)

    assert [counted.unfit(f"i-{number}", "no GPU") for number in range(MOST_UNFIT)] == [1, 2, 3]
    claim(store, 1)  # one that was fit has taken over the run
    assert counted.unfit("i-9", "no GPU") == 1


def test_an_instance_that_boots_again_is_counted_once(settings: Settings) -> None:
    assert [Guards(settings).unfit("i-1", "no GPU") for _ in range(3)] == [1, 1, 1]


def test_the_record_says_why(settings: Settings, store: ObjectStore) -> None:
    Guards(settings).unfit("i-0abc", "nvidia-smi ended with 9")

    (info,) = store.list(KEYS.events, deadline=FOREVER)
    record = json.loads(bytes(store.read(info.key, limit_bytes=10_000, deadline=FOREVER)))
    assert KEYS.parse_unfit(info.key) == record["instance"] == "i-0abc"
    assert record["reason"] == "nvidia-smi ended with 9"
    assert KEYS.is_ours(info.key)


def test_a_journal_is_no_such_record(settings: Settings, store: ObjectStore) -> None:
    store.put_if_absent(KEYS.journal(0, "i-7", 1), b"{}\n", deadline=FOREVER)

    assert Guards(settings).unfit("i-1", "no GPU") == 1


@pytest.mark.parametrize("count", ["unfit", "superseded"])
def test_a_store_that_cannot_be_used_counts_nothing(tmp_path: Path, count: str) -> None:
    (tmp_path / "file").touch()
    counted = Guards(Settings(store=str(tmp_path / "file"), run="run"))

    assert (counted.unfit("i-1", "") if count == "unfit" else counted.superseded()) == 0


def test_starts_that_were_superseded_within_an_hour_are_counted(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for generation in range(1, MOST_SUPERSEDED + 1):
        claim(store, generation, "superseded")
    claim(store, MOST_SUPERSEDED + 1, "interrupted")
    claim(store, MOST_SUPERSEDED + 2)

    assert Guards(settings).superseded() == MOST_SUPERSEDED

    later = datetime.datetime.now(datetime.UTC) + guards.LATELY
    monkeypatch.setattr(guards, "_now", lambda: later)
    assert Guards(settings).superseded() == 0


def test_a_time_that_cannot_be_read_is_long_ago() -> None:
    assert guards._instant("yesterday") < guards._now() - guards.LATELY
    assert guards._instant("2999-01-01T00:00:00") > guards._now()


def test_a_decision_is_written_where_it_is_looked_for(tmp_path: Path) -> None:
    said: list[str] = []
    decision.note_decision({decision.VARIABLE: str(tmp_path / "decision")}, "nothing is left", said.append)
    decision.note_decision({}, "nothing is left", said.append)
    assert (tmp_path / "decision").read_text() == "nothing is left\n"
    assert said == []

    decision.note_decision({decision.VARIABLE: str(tmp_path / "no" / "decision")}, "nothing is left", said.append)
    assert "No such file or directory" in said[0]
