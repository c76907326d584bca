from __future__ import annotations

import dataclasses

import pytest

from cloud.errors import AlreadyExists, OutcomeUnknown, Unavailable
from cloud.memory import MemoryStore
from harness.agent import commit
from harness.core import events
from harness.core.manifest import FORMAT, Claim, encode
from harness.core.snapshot import SnapshotId
from harness.errors import SnapshotCorrupt
from tests.support.protocol import FOREVER, KEYS, RUN_ID, Content, Crash, Fault, ProtocolStore, retrying
from tests.support.stores import FaultyStore, RecordingStore

FIRST, SECOND, THIRD = SnapshotId(1, 10), SnapshotId(1, 20), SnapshotId(2, 15)


@pytest.fixture
def store() -> ProtocolStore:
    return ProtocolStore(MemoryStore())


def publish(store: ProtocolStore, *names: SnapshotId, run_id: str = RUN_ID) -> None:
    for name in names:
        commit.publish(store, KEYS, Content(name, run_id).staged(), "remote", FOREVER, lambda event: None)


def wanted(generation: int = 1, nonce: str = "a" * 16, run_id: str = RUN_ID) -> Claim:
    return Claim(
        format=FORMAT,
        run_id=run_id,
        generation=generation,
        nonce=nonce,
        claimed_at="2026-01-02T03:04:05.678+00:00",
        host="here",
        pid=1,
        fresh=False,
        parent=None,
        command=("python", "train.py"),
        named=True,
    )


def commits(store: ProtocolStore) -> list[str]:
    return store.keys(KEYS.commits)


# ---- publish --------------------------------------------------------------------------------------------------------


def test_shards_come_before_the_part_and_the_part_before_the_manifest() -> None:
    store, told = RecordingStore(MemoryStore()), list[events.Event]()

    manifest = commit.publish(store, KEYS, Content(FIRST).staged(), "remote", FOREVER, told.append)

    below = f"run/snapshots/{manifest.directory}/rank-00000-of-00001"
    assert store.keys("put") == [f"{below}.00.safetensors", f"{below}.01.safetensors"]
    assert store.keys("put_if_absent") == [f"{below}.json", "run/commits/00000001-000000000010.json"]
    assert [verb for verb, _ in store.calls] == ["put", "put", "put_if_absent", "put_if_absent", "read"]
    assert [type(event).__name__ for event in told] == ["ShardStored", "ShardStored", "PartStored"]


@pytest.mark.parametrize("call", range(1, 6))
@pytest.mark.parametrize("kind", ["die before", "die after"])
def test_a_death_anywhere_leaves_a_whole_commit_or_none(store: ProtocolStore, kind: str, call: int) -> None:
    with store.armed(Fault(kind, call)), pytest.raises(Crash):
        publish(store, FIRST)

    committed = call == 5 or (call == 4 and kind == "die after")
    assert commits(store) == ([KEYS.commit(FIRST)] if committed else [])
    if committed:
        assert commit.verify(store, KEYS, commit.read_manifest(store, KEYS, FIRST, FOREVER), FOREVER)


@pytest.mark.parametrize("call", range(1, 6))
def test_a_lost_reply_anywhere_is_found_out_and_the_commit_succeeds(store: ProtocolStore, call: int) -> None:
    with store.armed(Fault("lose reply", call)):
        commit.publish(retrying(store), KEYS, Content(FIRST).staged(), "remote", FOREVER, lambda event: None)

    assert commits(store) == [KEYS.commit(FIRST)]


def test_an_outcome_that_nobody_read_back_is_no_success() -> None:
    store = FaultyStore(MemoryStore(), "put_if_absent", fail_on=2, error=OutcomeUnknown, after=True)

    with pytest.raises(OutcomeUnknown):
        commit.publish(store, KEYS, Content(FIRST).staged(), "remote", FOREVER, lambda event: None)


def test_a_store_that_fails_shows_no_snapshot(store: ProtocolStore) -> None:
    with store.armed(Fault("down", 3)), pytest.raises(Unavailable):
        publish(store, FIRST)

    assert commit.survey(store, KEYS, FOREVER).commits == ()


def test_committing_what_is_committed_already_succeeds(store: ProtocolStore) -> None:
    publish(store, FIRST)
    manifest = commit.read_manifest(store, KEYS, FIRST, FOREVER)

    assert commit.commit(store, KEYS, manifest, FOREVER) == manifest


def test_publishing_an_equal_snapshot_again_keeps_the_first_manifest(store: ProtocolStore) -> None:
    publish(store, FIRST)
    before = store.peek(KEYS.commit(FIRST))

    publish(store, FIRST)

    assert store.peek(KEYS.commit(FIRST)) == before


def test_another_snapshot_under_the_same_name_is_refused(store: ProtocolStore) -> None:
    publish(store, FIRST)

    with pytest.raises(SnapshotCorrupt, match="was generation 1 used twice"):
        publish(store, FIRST, run_id="f" * 32)


def test_an_equal_image_with_another_small_state_is_another_snapshot(store: ProtocolStore) -> None:
    publish(store, FIRST)

    staged = dataclasses.replace(Content(FIRST).staged(), state=b'{"step":10,"seed":2}')

    with pytest.raises(SnapshotCorrupt, match="was generation 1 used twice"):
        commit.publish(store, KEYS, staged, "remote", FOREVER, lambda event: None)


# ---- claim and end --------------------------------------------------------------------------------------------------


def test_the_first_claim_of_a_number_stands(store: ProtocolStore) -> None:
    first = commit.claim(store, KEYS, wanted(1, "a" * 16), FOREVER)
    second = commit.claim(store, KEYS, wanted(1, "b" * 16), FOREVER)

    assert (first.generation, second.generation) == (1, 2)
    assert store.peek(KEYS.claim(1)) == encode(first)


def test_claiming_again_under_the_same_nonce_finds_the_own_claim(store: ProtocolStore) -> None:
    commit.claim(store, KEYS, wanted(), FOREVER)

    assert commit.claim(store, KEYS, wanted(), FOREVER) == wanted()
    assert store.keys(KEYS.generations) == [KEYS.claim(1)]


def test_a_claim_whose_reply_was_lost_is_not_made_twice(store: ProtocolStore) -> None:
    with store.armed(Fault("lose reply", 1)):
        standing = commit.claim(retrying(store), KEYS, wanted(), FOREVER)

    assert standing.generation == 1
    assert store.keys(KEYS.generations) == [KEYS.claim(1)]


def test_the_first_word_about_an_end_stands(store: ProtocolStore) -> None:
    commit.end(store, KEYS, 1, "a" * 16, "interrupted", 10, FOREVER)
    commit.end(store, KEYS, 1, "a" * 16, "finished", 20, FOREVER)
    commit.claim(store, KEYS, wanted(), FOREVER)

    known = commit.survey(store, KEYS, FOREVER)
    assert known.done is not None
    assert (known.done.outcome, known.done.step, known.finished_at) == ("interrupted", 10, None)


# ---- survey ---------------------------------------------------------------------------------------------------------


def test_nothing_is_known_of_a_run_that_never_was(store: ProtocolStore) -> None:
    assert commit.survey(store, KEYS, FOREVER) == commit.Survey(None, 1, None, ())


def test_a_survey_lists_generation_first_and_leaves_out_what_is_quarantined(store: ProtocolStore) -> None:
    publish(store, THIRD, SECOND, FIRST)
    commit.quarantine(store, KEYS, SECOND, "rotten", "here", FOREVER)
    commit.claim(store, KEYS, wanted(3), FOREVER)

    known = commit.survey(store, KEYS, FOREVER)
    assert (known.commits, known.quarantined) == ((FIRST, THIRD), frozenset({SECOND}))
    assert (known.next_generation, known.last_claim) == (4, wanted(3))


def test_the_next_generation_is_above_every_commit_though_claims_are_missing(store: ProtocolStore) -> None:
    publish(store, SnapshotId(7, 1))

    assert commit.survey(store, KEYS, FOREVER).next_generation == 8


def test_only_the_last_generation_says_whether_the_run_is_finished(store: ProtocolStore) -> None:
    commit.claim(store, KEYS, wanted(1), FOREVER)
    commit.end(store, KEYS, 1, "a" * 16, "finished", 10, FOREVER)
    assert commit.survey(store, KEYS, FOREVER).finished_at == 10

    commit.claim(store, KEYS, wanted(2), FOREVER)
    assert commit.survey(store, KEYS, FOREVER).finished_at is None


def test_foreign_objects_in_a_run_are_nothing(store: ProtocolStore) -> None:
    for key in ("run/commits/latest.json", "run/generations/notes.txt", "run/quarantine/x", "run/snapshots/x/y"):
        store.inner.put_if_absent(key, b"?", deadline=FOREVER)

    assert commit.survey(store, KEYS, FOREVER) == commit.Survey(None, 1, None, ())
    assert commit.finish_complete(store, KEYS, RUN_ID, FOREVER) == []


# ---- finish what somebody died over ---------------------------------------------------------------------------------


def die_before_the_manifest(store: ProtocolStore, name: SnapshotId, run_id: str = RUN_ID) -> None:
    with store.armed(Fault("die before", 4)), pytest.raises(Crash):
        publish(store, name, run_id=run_id)


def test_complete_parts_above_latest_are_committed(store: ProtocolStore) -> None:
    publish(store, FIRST)
    die_before_the_manifest(store, SECOND)

    assert commit.finish_complete(store, KEYS, RUN_ID, FOREVER) == [SECOND]
    assert commits(store) == [KEYS.commit(FIRST), KEYS.commit(SECOND)]


def test_what_lies_below_latest_stays_invisible(store: ProtocolStore) -> None:
    die_before_the_manifest(store, FIRST)
    publish(store, SECOND)

    assert commit.finish_complete(store, KEYS, RUN_ID, FOREVER) == []
    assert commits(store) == [KEYS.commit(SECOND)]


def test_another_runs_parts_are_not_finished(store: ProtocolStore) -> None:
    die_before_the_manifest(store, FIRST, run_id="f" * 32)

    assert commit.finish_complete(store, KEYS, RUN_ID, FOREVER) == []
    assert commits(store) == []


@pytest.mark.parametrize("how", ["delete", "truncate"])
def test_parts_whose_shards_are_not_there_are_not_finished(store: ProtocolStore, how: str) -> None:
    die_before_the_manifest(store, FIRST)
    store.damage(next(key for key in store.keys(KEYS.snapshots) if key.endswith(".00.safetensors")), how)

    assert commit.finish_complete(store, KEYS, RUN_ID, FOREVER) == []
    assert commits(store) == []


def test_a_damaged_part_is_passed_over(store: ProtocolStore) -> None:
    die_before_the_manifest(store, FIRST)
    die_before_the_manifest(store, SECOND)
    store.damage(next(key for key in store.keys(KEYS.snapshots + str(FIRST)) if key.endswith(".json")), "truncate")
    store.damage(next(key for key in store.keys(KEYS.snapshots + str(SECOND)) if key.endswith(".json")), "flip", 0.0)

    assert commit.finish_complete(store, KEYS, RUN_ID, FOREVER) == []


# ---- verify ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
@pytest.mark.parametrize("shard", [0, 1])
def test_a_damaged_shard_is_found(store: ProtocolStore, how: str, shard: int) -> None:
    publish(store, FIRST)
    manifest = commit.read_manifest(store, KEYS, FIRST, FOREVER)
    assert commit.verify(store, KEYS, manifest, FOREVER)
    key = KEYS.payload(manifest.directory, manifest.parts[0].shards[shard].name)
    store.damage(key, how)

    with pytest.raises(SnapshotCorrupt, match=key):
        commit.verify(store, KEYS, manifest, FOREVER)


def test_a_store_that_is_down_proves_nothing_about_a_snapshot(store: ProtocolStore) -> None:
    publish(store, FIRST)
    manifest = commit.read_manifest(store, KEYS, FIRST, FOREVER)

    with store.armed(Fault("down", 1)), pytest.raises(Unavailable):
        commit.verify(store, KEYS, manifest, FOREVER)


# ---- remove and sweep -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", range(1, 10))
def test_a_death_while_removing_leaves_a_whole_snapshot_or_an_invisible_one(store: ProtocolStore, call: int) -> None:
    store.may_uncommit = lambda snapshot: None
    publish(store, FIRST, SECOND)
    try:
        with store.armed(Fault("die after", call)):
            commit.remove(store, KEYS, FIRST, FOREVER)
    except Crash:
        pass

    if KEYS.commit(FIRST) in commits(store):
        assert commit.verify(store, KEYS, commit.read_manifest(store, KEYS, FIRST, FOREVER), FOREVER)
    assert commit.finish_complete(store, KEYS, RUN_ID, FOREVER) == []
    commit.remove(store, KEYS, FIRST, FOREVER)
    left = {found[0] for key in store.keys(KEYS.snapshots) if (found := KEYS.parse_directory(key)) is not None}
    assert left == {SECOND}


def test_removing_takes_manifest_part_and_shards_in_that_order() -> None:
    store = RecordingStore(MemoryStore())
    manifest = commit.publish(store, KEYS, Content(FIRST).staged(), "remote", FOREVER, lambda event: None)
    commit.remove(store, KEYS, FIRST, FOREVER)

    below = f"run/snapshots/{manifest.directory}/rank-00000-of-00001"
    assert store.keys("delete") == [
        KEYS.commit(FIRST),
        f"{below}.json",
        f"{below}.00.safetensors",
        f"{below}.01.safetensors",
        KEYS.quarantined(FIRST),
    ]


def test_sweep_takes_garbage_below_latest_and_nothing_else(store: ProtocolStore) -> None:
    die_before_the_manifest(store, FIRST)
    publish(store, SECOND, THIRD)
    die_before_the_manifest(store, SnapshotId(3, 30))

    assert commit.sweep(store, KEYS, 9, FOREVER) == 1

    left = {found[0] for key in store.keys(KEYS.snapshots) if (found := KEYS.parse_directory(key)) is not None}
    assert left == {SECOND, THIRD, SnapshotId(3, 30)}


def test_sweep_leaves_the_garbage_of_newer_generations(store: ProtocolStore) -> None:
    die_before_the_manifest(store, THIRD)
    publish(store, SnapshotId(3, 1))

    assert commit.sweep(store, KEYS, 1, FOREVER) == 0
    assert commit.sweep(store, KEYS, 2, FOREVER) == 1


def test_nothing_is_swept_where_nothing_is_committed(store: ProtocolStore) -> None:
    die_before_the_manifest(store, FIRST)

    assert commit.sweep(store, KEYS, 9, FOREVER) == 0
    assert len(store.keys(KEYS.snapshots)) == 3


def test_sweep_does_not_judge_a_snapshot_with_a_damaged_manifest(store: ProtocolStore) -> None:
    publish(store, FIRST, SECOND)
    store.damage(KEYS.commit(FIRST), "flip", 0.0)

    assert commit.sweep(store, KEYS, 9, FOREVER) == 0


def test_quarantine_is_said_once(store: ProtocolStore) -> None:
    commit.quarantine(store, KEYS, FIRST, "first", "here", FOREVER)
    before = store.peek(KEYS.quarantined(FIRST))
    commit.quarantine(store, KEYS, FIRST, "second", "there", FOREVER)

    assert store.peek(KEYS.quarantined(FIRST)) == before
    with pytest.raises(AlreadyExists):
        store.put_if_absent(KEYS.quarantined(FIRST), b"", deadline=FOREVER)
