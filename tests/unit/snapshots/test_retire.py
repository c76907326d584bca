from __future__ import annotations

import pytest

from cloud.testing.memory import MemoryStore
from harness.core.manifest import encode
from harness.core.snapshot import SnapshotId
from harness.errors import SnapshotCorrupt
from harness.snapshots import commit, fetch, records, retire
from tests.support.protocol import (
    FOREVER,
    KEYS,
    RUN_ID,
    Content,
    Crash,
    Fault,
    ProtocolStore,
)
from tests.support.published import (
    FIRST,
    SECOND,
    THIRD,
    Bucket,
    die_before_the_manifest,
    frozen,
    is_whole,
    keys_of,
    publish,
    publish_onto,
    quiet,
)
from tests.support.stores import RecordingStore


def commits(store: ProtocolStore) -> list[str]:
    return store.keys(KEYS.commits)


@pytest.mark.parametrize("call", range(1, 10))
def test_a_death_while_removing_leaves_a_whole_snapshot_or_an_invisible_one(store: ProtocolStore, call: int) -> None:
    store.may_uncommit = lambda snapshot: None
    publish(store, FIRST, SECOND)
    try:
        with store.armed(Fault("die after", call)):
            retire.remove(store, KEYS, FIRST, FOREVER)
    except Crash:
        pass

    if KEYS.commit(FIRST) in commits(store):
        assert fetch.verify(store, KEYS, records.read_manifest(store, KEYS, FIRST, FOREVER), FOREVER)
    assert commit.finish_complete(store, KEYS, RUN_ID, FOREVER) == []
    retire.remove(store, KEYS, FIRST, FOREVER)
    left = {found[0] for key in store.keys(KEYS.snapshots) if (found := KEYS.parse_directory(key)) is not None}
    assert left == {SECOND}


def test_removing_takes_manifest_part_and_shards_in_that_order() -> None:
    store = RecordingStore(MemoryStore())
    manifest = commit.publish(store, KEYS, Content(FIRST).staged(), "remote", FOREVER, lambda event: None)
    retire.remove(store, KEYS, FIRST, FOREVER)

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

    assert retire.sweep(store, KEYS, 9, FOREVER) == 1

    left = {found[0] for key in store.keys(KEYS.snapshots) if (found := KEYS.parse_directory(key)) is not None}
    assert left == {SECOND, THIRD, SnapshotId(3, 30)}


def test_sweep_leaves_the_garbage_of_newer_generations(store: ProtocolStore) -> None:
    die_before_the_manifest(store, THIRD)
    publish(store, SnapshotId(3, 1))

    assert retire.sweep(store, KEYS, 1, FOREVER) == 0
    assert retire.sweep(store, KEYS, 2, FOREVER) == 1


def test_nothing_is_swept_where_nothing_is_committed(store: ProtocolStore) -> None:
    die_before_the_manifest(store, FIRST)

    assert retire.sweep(store, KEYS, 9, FOREVER) == 0
    assert len(store.keys(KEYS.snapshots)) == 3


def test_sweep_does_not_judge_a_snapshot_with_a_damaged_manifest(store: ProtocolStore) -> None:
    publish(store, FIRST, SECOND)
    store.damage(KEYS.commit(FIRST), "flip", 0.0)

    assert retire.sweep(store, KEYS, 9, FOREVER) == 0


def test_a_commit_that_comes_after_the_sweep_is_taken_back_by_whoever_made_it() -> None:
    """The process was stopped between part and manifest for so long that a newer generation has swept its shards."""
    store = Bucket()
    commit.publish(store, KEYS, Content(THIRD).staged(), "remote", FOREVER, quiet)

    def woken() -> None:  # after the part: everything but the manifest is there
        assert retire.sweep(store, KEYS, 2, FOREVER) == 1

    store.after["put_if_absent"] = woken
    with pytest.raises(SnapshotCorrupt, match="taken back"):
        commit.publish(store, KEYS, Content(FIRST).staged(), "remote", FOREVER, quiet)

    assert keys_of(store, KEYS.commits) == [KEYS.commit(THIRD)]


def test_a_commit_that_comes_during_the_sweep_and_dies_is_taken_back_by_the_sweep() -> None:
    store = Bucket()
    commit.publish(store, KEYS, Content(THIRD).staged(), "remote", FOREVER, quiet)
    late = commit.publish(store, KEYS, Content(FIRST).staged(), "remote", FOREVER, quiet)
    store.delete(KEYS.commit(FIRST), deadline=FOREVER)
    store.after["delete"] = lambda: store.put_if_absent(KEYS.commit(FIRST), encode(late), deadline=FOREVER)

    assert retire.sweep(store, KEYS, 2, FOREVER) == 1

    assert keys_of(store, KEYS.commits) == [KEYS.commit(THIRD)]
    assert keys_of(store, KEYS.snapshots + str(FIRST)) == []


def test_uploads_of_older_generations_are_given_up_and_no_others() -> None:
    store = Bucket()
    old, spared, ours = (
        KEYS.payload(KEYS.directory(name, nonce * 16), "x")
        for name, nonce in ((FIRST, "a"), (SECOND, "b"), (SnapshotId(3, 40), "c"))
    )
    store.uploads |= {old, spared, ours, "run/snapshots/somebody-else/x"}

    assert retire.abandon_stale(store, KEYS, 3, KEYS.directory(SECOND, "b" * 16), FOREVER) == 1

    assert store.uploads == {spared, ours, "run/snapshots/somebody-else/x"}


@pytest.mark.parametrize("removed", [FIRST, SECOND])
def test_removing_either_of_two_snapshots_with_one_shard_in_common_leaves_the_other(
    copying: ProtocolStore, removed: SnapshotId
) -> None:
    commit.publish(copying, KEYS, frozen(FIRST).staged(), "remote", FOREVER, lambda event: None)
    publish_onto(copying, FIRST, SECOND)

    retire.remove(copying, KEYS, removed, FOREVER)
    retire.sweep(copying, KEYS, 9, FOREVER)

    assert is_whole(copying, SECOND if removed == FIRST else FIRST)
    assert commits(copying) == [KEYS.commit(SECOND if removed == FIRST else FIRST)]
