from __future__ import annotations

from harness.core.snapshot import SnapshotId
from harness.snapshots import commit, records
from tests.support.protocol import (
    FOREVER,
    KEYS,
    RUN_ID,
    ProtocolStore,
)
from tests.support.published import (
    FIRST,
    SECOND,
    THIRD,
    publish,
    wanted,
)


def test_nothing_is_known_of_a_run_that_never_was(store: ProtocolStore) -> None:
    assert records.survey(store, KEYS, FOREVER) == records.Survey(None, 1, None, ())


def test_a_survey_lists_generation_first_and_leaves_out_what_is_quarantined(store: ProtocolStore) -> None:
    publish(store, THIRD, SECOND, FIRST)
    commit.quarantine(store, KEYS, SECOND, "rotten", "here", FOREVER)
    commit.claim(store, KEYS, wanted(3), FOREVER)

    known = records.survey(store, KEYS, FOREVER)
    assert (known.commits, known.quarantined) == ((FIRST, THIRD), frozenset({SECOND}))
    assert (known.next_generation, known.last_claim) == (4, wanted(3))


def test_the_next_generation_is_above_every_commit_though_claims_are_missing(store: ProtocolStore) -> None:
    publish(store, SnapshotId(7, 1))

    assert records.survey(store, KEYS, FOREVER).next_generation == 8


def test_only_the_last_generation_says_whether_the_run_is_finished(store: ProtocolStore) -> None:
    commit.claim(store, KEYS, wanted(1), FOREVER)
    commit.end(store, KEYS, 1, "a" * 16, "finished", 10, FOREVER)
    assert records.survey(store, KEYS, FOREVER).finished_at == 10

    commit.claim(store, KEYS, wanted(2), FOREVER)
    assert records.survey(store, KEYS, FOREVER).finished_at is None


def test_foreign_objects_in_a_run_are_nothing(store: ProtocolStore) -> None:
    for key in ("run/commits/latest.json", "run/generations/notes.txt", "run/quarantine/x", "run/snapshots/x/y"):
        store.inner.put_if_absent(key, b"?", deadline=FOREVER)

    assert records.survey(store, KEYS, FOREVER) == records.Survey(None, 1, None, ())
    assert commit.finish_complete(store, KEYS, RUN_ID, FOREVER) == []
