from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from cloud.directory.store import DirectoryStore
from cloud.errors import (
    AlreadyExists,
    CannotCopy,
    CloudError,
    CopyDiffers,
    Denied,
    Full,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)
from cloud.notice import Deadline
from cloud.store import ObjectStore
from cloud.testing.memory import MemoryStore
from harness.core import events
from harness.core.manifest import FORMAT, Claim, encode
from harness.core.snapshot import SnapshotId
from harness.errors import SnapshotCorrupt
from harness.snapshots import commit
from harness.snapshots.dedup import Deduplicator
from tests.support.protocol import (
    FOREVER,
    KEYS,
    RUN_ID,
    SHARD_BYTES,
    Content,
    Crash,
    FastFileSystem,
    Fault,
    ProtocolStore,
    retrying,
)
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
    assert [verb for verb, _ in store.calls] == [
        *["put", "put", "put_if_absent", "put_if_absent"],
        *["read", "stat", "stat"],  # IMPORTANT: looked at after the manifest stands
    ]
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


def test_a_manifest_s_place_that_something_else_has_keeps_a_snapshot_invisible(tmp_path: Path) -> None:
    """A directory there ended every start of the run, with 70."""
    store = DirectoryStore(tmp_path)
    for name in (FIRST, SECOND):
        commit.publish(store, KEYS, Content(name).staged(), "remote", FOREVER, lambda event: None)
    (tmp_path / KEYS.commit(SECOND)).unlink()
    (tmp_path / KEYS.commit(SECOND)).mkdir()

    assert commit.finish_complete(store, KEYS, RUN_ID, FOREVER) == []
    assert commit.survey(store, KEYS, FOREVER).commits == (FIRST,)


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


# ---- two at once, and attempts that go on ---------------------------------------------------------------------------


class Bucket(MemoryStore):
    """A store that keeps unfinished uploads, as S3 does, and lets a test in between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: set[str] = set()
        self.after: dict[str, Callable[[], object]] = {}

    def put_if_absent(self, key: str, data: bytes, *, deadline: Deadline) -> None:
        super().put_if_absent(key, data, deadline=deadline)
        self._interrupt("put_if_absent")

    def delete(self, key: str, *, deadline: Deadline) -> None:
        super().delete(key, deadline=deadline)
        self._interrupt("delete")

    def unfinished(self, prefix: str, *, deadline: Deadline) -> list[str]:
        return sorted(key for key in self.uploads if key.startswith(prefix))

    def abandon(self, key: str, *, deadline: Deadline) -> None:
        self.uploads.discard(key)

    def _interrupt(self, verb: str) -> None:
        if (act := self.after.pop(verb, None)) is not None:
            act()


def keys_of(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix, deadline=FOREVER)]


def quiet(event: events.Event) -> None:
    """No journal."""


def test_a_next_attempt_sends_only_what_is_missing() -> None:
    store = FaultyStore(RecordingStore(Bucket()), "put", fail_on=2)
    attempt, staged, sent = commit.Attempt(), Content(FIRST).staged(), list[int]()
    with pytest.raises(Unavailable):
        commit.publish(store, KEYS, staged, "remote", FOREVER, quiet, attempt=attempt)
    assert list(attempt.stored) == [staged.shards[0][0]]

    manifest = commit.publish(store, KEYS, staged, "remote", FOREVER, quiet, attempt=attempt, progress=sent.append)

    assert [key.rpartition("/")[2] for key in store.keys("put")] == [name for name, _ in staged.shards]
    assert sent == [SHARD_BYTES[1]]
    assert attempt.skipped_bytes == SHARD_BYTES[0]
    assert commit.verify(store, KEYS, manifest, FOREVER)


def copied(store: ObjectStore, name: SnapshotId, nonce: str) -> tuple[commit.Staged, commit.Attempt]:
    """What a local snapshot is staged as; its first shard is in `store` already, from somebody who died."""
    local = commit.publish(MemoryStore(), KEYS, Content(name).staged(), "local", FOREVER, quiet)
    staged = dataclasses.replace(Content(name).staged(), known=local.parts[0].shards)
    shard, data = staged.shards[0]
    store.put(KEYS.payload(KEYS.directory(name, nonce), shard), data, deadline=FOREVER)
    return staged, commit.Attempt(nonce)


def test_what_a_dead_process_has_sent_of_a_copy_is_not_sent_again() -> None:
    store = RecordingStore(Bucket())
    staged, attempt = copied(store, FIRST, "a" * 16)

    commit.publish(store, KEYS, staged, "remote", FOREVER, quiet, attempt=attempt)

    assert len(store.keys("put")) == 2
    assert attempt.skipped_bytes == SHARD_BYTES[0]


def test_a_store_that_keeps_no_sums_gets_everything_again(tmp_path: Path) -> None:
    store = RecordingStore(DirectoryStore(tmp_path, fs=FastFileSystem()))
    staged, attempt = copied(store, FIRST, "a" * 16)

    commit.publish(store, KEYS, staged, "remote", FOREVER, quiet, attempt=attempt)

    assert len(store.keys("put")) == 3


def test_what_is_there_and_is_something_else_is_replaced() -> None:
    store = Bucket()
    staged, attempt = copied(store, FIRST, "a" * 16)
    key = KEYS.payload(KEYS.directory(FIRST, "a" * 16), staged.shards[0][0])
    store.put(key, memoryview(bytes(SHARD_BYTES[0])), deadline=FOREVER)

    manifest = commit.publish(store, KEYS, staged, "remote", FOREVER, quiet, attempt=attempt)

    assert commit.verify(store, KEYS, manifest, FOREVER)


def test_the_part_of_a_dead_attempt_is_the_part() -> None:
    store, attempt = Bucket(), commit.Attempt("a" * 16)
    broken = FaultyStore(store, "put_if_absent", fail_on=2)
    with pytest.raises(Unavailable):
        commit.publish(broken, KEYS, Content(FIRST).staged(), "remote", FOREVER, quiet, attempt=attempt)
    heir = dataclasses.replace(Content(FIRST).staged(), parent="00000001-000000000005")

    manifest = commit.publish(store, KEYS, heir, "remote", FOREVER, quiet, attempt=commit.Attempt("a" * 16))

    assert manifest.parts[0].parent is None
    assert commit.read_manifest(store, KEYS, FIRST, FOREVER) == manifest


def test_another_part_in_the_way_is_no_success() -> None:
    store, attempt = Bucket(), commit.Attempt("a" * 16)
    broken = FaultyStore(store, "put_if_absent", fail_on=2)
    with pytest.raises(Unavailable):
        commit.publish(broken, KEYS, Content(FIRST).staged(), "remote", FOREVER, quiet, attempt=attempt)
    other = Content(FIRST, "f" * 32).staged()

    with pytest.raises(SnapshotCorrupt, match="another part"):
        commit.publish(store, KEYS, other, "remote", FOREVER, quiet, attempt=commit.Attempt("a" * 16))

    assert keys_of(store, KEYS.commits) == []


def test_a_commit_that_comes_after_the_sweep_is_taken_back_by_whoever_made_it() -> None:
    """The process was stopped between part and manifest for so long that a newer generation has swept its shards."""
    store = Bucket()
    commit.publish(store, KEYS, Content(THIRD).staged(), "remote", FOREVER, quiet)

    def woken() -> None:  # after the part: everything but the manifest is there
        assert commit.sweep(store, KEYS, 2, FOREVER) == 1

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

    assert commit.sweep(store, KEYS, 2, FOREVER) == 1

    assert keys_of(store, KEYS.commits) == [KEYS.commit(THIRD)]
    assert keys_of(store, KEYS.snapshots + str(FIRST)) == []


def test_uploads_of_older_generations_are_given_up_and_no_others() -> None:
    store = Bucket()
    old, spared, ours = (
        KEYS.payload(KEYS.directory(name, nonce * 16), "x")
        for name, nonce in ((FIRST, "a"), (SECOND, "b"), (SnapshotId(3, 40), "c"))
    )
    store.uploads |= {old, spared, ours, "run/snapshots/somebody-else/x"}

    assert commit.abandon_stale(store, KEYS, 3, KEYS.directory(SECOND, "b" * 16), FOREVER) == 1

    assert store.uploads == {spared, ours, "run/snapshots/somebody-else/x"}


def test_quarantine_is_said_once(store: ProtocolStore) -> None:
    commit.quarantine(store, KEYS, FIRST, "first", "here", FOREVER)
    before = store.peek(KEYS.quarantined(FIRST))
    commit.quarantine(store, KEYS, FIRST, "second", "there", FOREVER)

    assert store.peek(KEYS.quarantined(FIRST)) == before
    with pytest.raises(AlreadyExists):
        store.put_if_absent(KEYS.quarantined(FIRST), b"", deadline=FOREVER)


# ---- what has not changed -------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "directory"])
def copying(request: pytest.FixtureRequest, tmp_path: Path) -> ProtocolStore:
    """A store that keeps sums, and one that keeps none."""
    return ProtocolStore(MemoryStore() if request.param == "memory" else DirectoryStore(tmp_path, fs=FastFileSystem()))


def frozen(name: SnapshotId) -> Content:
    return Content(name, frozen=True)


def publish_onto(
    store: ObjectStore, base: SnapshotId, name: SnapshotId, attempt: commit.Attempt | None = None
) -> list[events.Event]:
    """Publish `name` where its first shard is that of `base`; what was told."""
    unchanged, told = Deduplicator(), list[events.Event]()
    unchanged.committed(commit.read_manifest(store, KEYS, base, FOREVER))
    commit.publish(
        store, KEYS, frozen(name).staged(), "remote", FOREVER, told.append, attempt=attempt, unchanged=unchanged
    )
    return told


def how(told: list[events.Event]) -> list[str]:
    return [event.how for event in told if isinstance(event, events.ShardStored)]


def is_whole(store: ObjectStore, name: SnapshotId) -> bool:
    return commit.verify(store, KEYS, commit.read_manifest(store, KEYS, name, FOREVER), FOREVER)


def test_a_shard_that_has_not_changed_is_copied_and_the_others_are_sent(copying: ProtocolStore) -> None:
    store = RecordingStore(copying)
    commit.publish(store, KEYS, frozen(FIRST).staged(), "remote", FOREVER, lambda event: None)
    store.calls.clear()

    told = publish_onto(store, FIRST, SECOND)

    assert how(told) == ["copied", "sent"]
    assert [key.rpartition(".")[0][-2:] for key in store.keys("put")] == ["01"]
    manifest = commit.read_manifest(store, KEYS, SECOND, FOREVER)
    assert manifest.parts[0].shards == tuple(Content(SECOND, frozen=True).entries())
    assert is_whole(store, SECOND)


@pytest.mark.parametrize("removed", [FIRST, SECOND])
def test_removing_either_of_two_snapshots_with_one_shard_in_common_leaves_the_other(
    copying: ProtocolStore, removed: SnapshotId
) -> None:
    commit.publish(copying, KEYS, frozen(FIRST).staged(), "remote", FOREVER, lambda event: None)
    publish_onto(copying, FIRST, SECOND)

    commit.remove(copying, KEYS, removed, FOREVER)
    commit.sweep(copying, KEYS, 9, FOREVER)

    assert is_whole(copying, SECOND if removed == FIRST else FIRST)
    assert commits(copying) == [KEYS.commit(SECOND if removed == FIRST else FIRST)]


@pytest.mark.parametrize("error", [CannotCopy, Denied, Unavailable, OutcomeUnknown, CopyDiffers, NotFound, Full])
@pytest.mark.parametrize("after", [False, True])
def test_a_copy_that_is_not_made_is_told_and_the_shard_is_sent(
    copying: ProtocolStore, error: type[CloudError], after: bool
) -> None:
    commit.publish(copying, KEYS, frozen(FIRST).staged(), "remote", FOREVER, lambda event: None)

    told = publish_onto(FaultyStore(copying, "copy", error=error, after=after), FIRST, SECOND)

    assert how(told) == ["sent", "sent"]
    (refused,) = [event for event in told if isinstance(event, events.NotCopied)]
    assert (refused.tier, refused.step, refused.reason) == ("remote", SECOND.step, "injected into copy")
    assert is_whole(copying, SECOND)


def test_a_base_that_was_retired_just_now_is_sent_again(copying: ProtocolStore) -> None:
    commit.publish(copying, KEYS, frozen(FIRST).staged(), "remote", FOREVER, lambda event: None)

    class Retires:
        def __getattr__(self, name: str) -> object:
            return getattr(copying, name)

        def copy(self, *args: Any, **options: Any) -> None:
            commit.remove(copying, KEYS, FIRST, FOREVER)
            copying.copy(*args, **options)

    told = publish_onto(cast("ObjectStore", Retires()), FIRST, SECOND)

    assert how(told) == ["sent", "sent"]
    assert is_whole(copying, SECOND)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_shard_is_not_copied_by_a_store_that_can_tell(store: ProtocolStore, damage: str) -> None:
    commit.publish(store, KEYS, frozen(FIRST).staged(), "remote", FOREVER, lambda event: None)
    directory = commit.read_manifest(store, KEYS, FIRST, FOREVER).directory
    store.damage(KEYS.payload(directory, "rank-00000-of-00001.00.safetensors"), damage)

    told = publish_onto(store, FIRST, SECOND)

    assert how(told) == ["sent", "sent"]
    assert is_whole(store, SECOND)


def test_what_a_directory_copied_of_a_damaged_file_is_found_when_it_is_read_back(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, fs=FastFileSystem())
    first = commit.publish(store, KEYS, frozen(FIRST).staged(), "local", FOREVER, lambda event: None)
    path = store.local_path(KEYS.payload(first.directory, "rank-00000-of-00001.00.safetensors"))
    assert path is not None
    path.write_bytes(b"x" * path.stat().st_size)

    publish_onto(store, FIRST, SECOND)

    with pytest.raises(SnapshotCorrupt, match="differ"):
        is_whole(store, SECOND)


def test_another_attempt_keeps_what_was_copied(copying: ProtocolStore) -> None:
    commit.publish(copying, KEYS, frozen(FIRST).staged(), "remote", FOREVER, lambda event: None)
    attempt = commit.Attempt()
    with pytest.raises(Unavailable):
        publish_onto(FaultyStore(copying, "put"), FIRST, SECOND, attempt)

    told = publish_onto(copying, FIRST, SECOND, attempt)

    assert how(told) == ["kept", "sent"]
    assert (attempt.copied_bytes, attempt.skipped_bytes) == (SHARD_BYTES[0], SHARD_BYTES[0])


def test_a_copy_of_a_local_snapshot_is_compared_by_its_sums(store: ProtocolStore) -> None:
    commit.publish(store, KEYS, frozen(FIRST).staged(), "remote", FOREVER, lambda event: None)
    unchanged, told = Deduplicator(), list[events.Event]()
    unchanged.committed(commit.read_manifest(store, KEYS, FIRST, FOREVER))
    content = frozen(SECOND)
    staged = dataclasses.replace(content.staged(), known=content.entries())

    commit.publish(store, KEYS, staged, "remote", FOREVER, told.append, unchanged=unchanged)

    assert how(told) == ["copied", "sent"]


@pytest.mark.parametrize("call", range(1, 9))
@pytest.mark.parametrize("kind", ["die before", "die after", "lose reply"])
def test_a_death_in_a_snapshot_that_copies_leaves_the_base_and_a_whole_commit_or_none(
    copying: ProtocolStore, kind: str, call: int
) -> None:
    commit.publish(copying, KEYS, frozen(FIRST).staged(), "remote", FOREVER, lambda event: None)

    with copying.armed(Fault(kind, call)), contextlib.suppress(Crash):
        publish_onto(retrying(copying), FIRST, SECOND)

    assert is_whole(copying, FIRST)
    if KEYS.commit(SECOND) in commits(copying):
        assert is_whole(copying, SECOND)


def test_the_newest_readable_snapshot_is_the_base_of_a_new_life(store: ProtocolStore) -> None:
    assert commit.base(store, KEYS, FOREVER) is None
    publish(store, FIRST, SECOND)
    store.damage(KEYS.commit(SECOND), "truncate")

    found = commit.base(store, KEYS, FOREVER)

    assert found is not None
    assert found.id == FIRST


def test_what_lies_below_a_damaged_snapshot_is_no_base_and_what_comes_after_it_is(store: ProtocolStore) -> None:
    """They may share the bytes that are damaged."""
    publish(store, FIRST, SECOND)
    commit.quarantine(store, KEYS, SECOND, "rotten", "here", FOREVER)
    assert commit.base(store, KEYS, FOREVER) is None

    publish(store, THIRD)
    found = commit.base(store, KEYS, FOREVER)

    assert found is not None
    assert found.id == THIRD
