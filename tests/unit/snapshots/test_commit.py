from __future__ import annotations

import contextlib
import dataclasses
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
from cloud.store import ObjectStore
from cloud.testing.memory import MemoryStore
from harness.core import events
from harness.core.manifest import encode
from harness.core.snapshot import SnapshotId
from harness.errors import SnapshotCorrupt
from harness.snapshots import commit, fetch, records, retire
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
    altered,
    retrying,
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
    wanted,
)
from tests.support.stores import FaultyStore, RecordingStore


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
        *["read", "put", "put", "put_if_absent", "put_if_absent"],
        *["read", "stat", "stat"],  # IMPORTANT: looked at after the manifest stands
    ]
    assert [type(event).__name__ for event in told] == ["ShardStored", "ShardStored", "PartStored"]


@pytest.mark.parametrize("call", range(1, 7))
@pytest.mark.parametrize("kind", ["die before", "die after"])
def test_a_death_anywhere_leaves_a_whole_commit_or_none(store: ProtocolStore, kind: str, call: int) -> None:
    with store.armed(Fault(kind, call)), pytest.raises(Crash):
        publish(store, FIRST)

    committed = call == 6 or (call == 5 and kind == "die after")
    assert commits(store) == ([KEYS.commit(FIRST)] if committed else [])
    if committed:
        assert fetch.verify(store, KEYS, records.read_manifest(store, KEYS, FIRST, FOREVER), FOREVER)


@pytest.mark.parametrize("call", range(1, 7))
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

    assert records.survey(store, KEYS, FOREVER).commits == ()


def test_committing_what_is_committed_already_succeeds(store: ProtocolStore) -> None:
    publish(store, FIRST)
    manifest = records.read_manifest(store, KEYS, FIRST, FOREVER)

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

    staged = altered(Content(FIRST).staged(), state=b'{"step":10,"seed":2}')

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

    known = records.survey(store, KEYS, FOREVER)
    assert known.done is not None
    assert (known.done.outcome, known.done.step, known.finished_at) == ("interrupted", 10, None)


# ---- finish what somebody died over ---------------------------------------------------------------------------------


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
    assert records.survey(store, KEYS, FOREVER).commits == (FIRST,)


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


# ---- two at once, and attempts that go on ---------------------------------------------------------------------------


def test_a_next_attempt_sends_only_what_is_missing() -> None:
    store = FaultyStore(RecordingStore(Bucket()), "put", fail_on=2)
    attempt, staged, sent = commit.Attempt(), Content(FIRST).staged(), list[int]()
    with pytest.raises(Unavailable):
        commit.publish(store, KEYS, staged, "remote", FOREVER, quiet, attempt=attempt)
    assert list(attempt.stored) == [staged.parts[0].shards[0][0]]

    manifest = commit.publish(
        store, KEYS, staged, "remote", FOREVER, quiet, attempt=attempt, progress=lambda n, **_: sent.append(n)
    )

    assert [key.rpartition("/")[2] for key in store.keys("put")] == [name for name, _ in staged.parts[0].shards]
    assert sent == [SHARD_BYTES[1]]
    assert attempt.skipped_bytes == SHARD_BYTES[0]
    assert fetch.verify(store, KEYS, manifest, FOREVER)


def copied(store: ObjectStore, name: SnapshotId, nonce: str) -> tuple[commit.Staged, commit.Attempt]:
    """What a local snapshot is staged as; its first shard is in `store` already, from somebody who died."""
    local = commit.publish(MemoryStore(), KEYS, Content(name).staged(), "local", FOREVER, quiet)
    staged = altered(Content(name).staged(), known=local.parts[0].shards)
    shard, data = staged.parts[0].shards[0]
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
    key = KEYS.payload(KEYS.directory(FIRST, "a" * 16), staged.parts[0].shards[0][0])
    store.put(key, memoryview(bytes(SHARD_BYTES[0])), deadline=FOREVER)

    manifest = commit.publish(store, KEYS, staged, "remote", FOREVER, quiet, attempt=attempt)

    assert fetch.verify(store, KEYS, manifest, FOREVER)


def test_the_part_of_a_dead_attempt_is_the_part() -> None:
    store, attempt = Bucket(), commit.Attempt("a" * 16)
    broken = FaultyStore(store, "put_if_absent", fail_on=2)
    with pytest.raises(Unavailable):
        commit.publish(broken, KEYS, Content(FIRST).staged(), "remote", FOREVER, quiet, attempt=attempt)
    heir = dataclasses.replace(Content(FIRST).staged(), parent="00000001-000000000005")

    manifest = commit.publish(store, KEYS, heir, "remote", FOREVER, quiet, attempt=commit.Attempt("a" * 16))

    assert manifest.parts[0].parent is None
    assert records.read_manifest(store, KEYS, FIRST, FOREVER) == manifest


def test_another_part_in_the_way_is_no_success() -> None:
    store, attempt = Bucket(), commit.Attempt("a" * 16)
    broken = FaultyStore(store, "put_if_absent", fail_on=2)
    with pytest.raises(Unavailable):
        commit.publish(broken, KEYS, Content(FIRST).staged(), "remote", FOREVER, quiet, attempt=attempt)
    other = Content(FIRST, "f" * 32).staged()

    with pytest.raises(SnapshotCorrupt, match="another part"):
        commit.publish(store, KEYS, other, "remote", FOREVER, quiet, attempt=commit.Attempt("a" * 16))

    assert keys_of(store, KEYS.commits) == []


# ---- several ranks --------------------------------------------------------------------------------------------------

RANKS = Content(FIRST, world_size=3)


def put_part(store: ObjectStore, content: Content, rank: int, nonce: str) -> None:
    staged = content.staged()
    commit.put_part(
        store, KEYS, staged, staged.parts[rank], "remote", FOREVER, quiet, attempt=commit.Attempt(nonce)
    )  # fmt: skip


def test_the_parts_of_all_ranks_make_one_commit() -> None:
    store, told = RecordingStore(MemoryStore()), list[events.Event]()

    manifest = commit.publish(store, KEYS, RANKS.staged(), "remote", FOREVER, told.append)

    assert [part.rank for part in manifest.parts] == [0, 1, 2]
    assert [event.rank for event in told if isinstance(event, events.PartStored)] == [0, 1, 2]
    assert store.keys("put_if_absent")[-1] == KEYS.commit(FIRST)
    assert fetch.verify(store, KEYS, manifest, FOREVER)


def test_nodes_that_agree_on_the_claim_put_their_parts_into_one_directory_and_any_of_them_commits() -> None:
    store, nonce = MemoryStore(), "a" * 16
    for rank in (2, 0):
        put_part(store, RANKS, rank, nonce)
    assert list(commit.complete(store, KEYS, RUN_ID, FOREVER)) == [], "a rank is missing"

    put_part(store, RANKS, 1, nonce)

    assert commit.finish_complete(store, KEYS, RUN_ID, FOREVER) == [FIRST]
    assert commit.publish(store, KEYS, RANKS.staged(), "remote", FOREVER, quiet).parts == (
        records.read_manifest(store, KEYS, FIRST, FOREVER).parts
    )


def test_parts_under_another_claim_are_none_of_this_snapshot() -> None:
    store = MemoryStore()
    for rank, nonce in enumerate(["a" * 16, "a" * 16, "b" * 16]):
        put_part(store, RANKS, rank, nonce)

    assert commit.finish_complete(store, KEYS, RUN_ID, FOREVER) == []


def test_what_a_rank_has_stored_is_not_sent_again_when_another_s_part_failed() -> None:
    store = FaultyStore(RecordingStore(Bucket()), "put", fail_on=4)
    attempt, staged, sent = commit.Attempt(), RANKS.staged(), list[int]()
    with pytest.raises(Unavailable):
        commit.publish(store, KEYS, staged, "remote", FOREVER, quiet, attempt=attempt)

    commit.publish(
        store, KEYS, staged, "remote", FOREVER, quiet, attempt=attempt, progress=lambda n, **_: sent.append(n)
    )

    assert sum(sent) == 2 * sum(SHARD_BYTES) - SHARD_BYTES[0]
    assert attempt.skipped_bytes == sum(SHARD_BYTES) + SHARD_BYTES[0]


# ---- an agent that replaces a dead one ------------------------------------------------------------------------------


def republished(store: ObjectStore) -> list[events.Event]:
    """`FIRST` is committed, and published again into the same directory by an agent that knows nothing of it."""
    unchanged, told = Deduplicator(), list[events.Event]()
    commit.publish(store, KEYS, frozen(FIRST).staged(), "remote", FOREVER, quiet, attempt=commit.Attempt("a" * 16))
    unchanged.committed(records.read_manifest(store, KEYS, FIRST, FOREVER))
    again = commit.Attempt("a" * 16)
    commit.publish(
        store, KEYS, frozen(FIRST).staged(), "remote", FOREVER, told.append, attempt=again, unchanged=unchanged
    )
    return told


def test_what_the_dead_agent_had_committed_is_not_sent_again() -> None:
    store = RecordingStore(Bucket())

    told = republished(store)

    assert len(store.keys("put")) == 2
    assert [event.how for event in told if isinstance(event, events.ShardStored)] == ["kept", "kept"]
    assert store.keys("copy") == []


def test_nor_is_it_where_the_store_keeps_no_sums(store: ProtocolStore) -> None:
    recording = RecordingStore(store)

    republished(recording)

    assert len(recording.keys("put")) == 2
    assert is_whole(store, FIRST)


def test_what_is_missing_of_it_is_sent_again() -> None:
    store = MemoryStore()
    manifest = commit.publish(
        store, KEYS, Content(FIRST).staged(), "remote", FOREVER, quiet, attempt=commit.Attempt("a" * 16)
    )
    store.delete(KEYS.payload(manifest.directory, manifest.parts[0].shards[1].name), deadline=FOREVER)

    commit.publish(store, KEYS, Content(FIRST).staged(), "remote", FOREVER, quiet, attempt=commit.Attempt("a" * 16))

    assert fetch.verify(store, KEYS, manifest, FOREVER)


@pytest.mark.parametrize("until", ["its part", "its commit"])
@pytest.mark.parametrize("known", [False, True], ids=["in memory", "in a file"])
def test_a_copy_that_is_damaged_is_not_put_over_a_good_one(until: str, known: bool) -> None:
    """It was found to differ only once it had replaced the bytes of a committed snapshot."""
    store, good = MemoryStore(), Content(FIRST).staged()
    with contextlib.ExitStack() as stack:
        target: ObjectStore = store
        if until == "its part":
            target = FaultyStore(store, "put_if_absent", fail_on=2)
            stack.enter_context(pytest.raises(Unavailable))
        commit.publish(target, KEYS, good, "remote", FOREVER, quiet, attempt=commit.Attempt("a" * 16))
    part = good.parts[0]
    flipped = [(name, memoryview(bytes(source[:-1]) + bytes([source[-1] ^ 1]))) for name, source in part.shards]
    sums = [commit.entry_of(name, MemoryStore().put(name, source, deadline=FOREVER)) for name, source in flipped]
    bad = dataclasses.replace(part, shards=flipped, known=sums if known else None)
    before = {
        info.key: store.read(info.key, limit_bytes=1 << 20, deadline=FOREVER)
        for info in store.list("", deadline=FOREVER)
    }

    with pytest.raises(SnapshotCorrupt, match="another part is stored there, or this copy is damaged"):
        commit.publish(
            store,
            KEYS,
            dataclasses.replace(good, parts=[bad]),
            "remote",
            FOREVER,
            quiet,
            attempt=commit.Attempt("a" * 16),
        )

    assert before == {key: store.read(key, limit_bytes=1 << 20, deadline=FOREVER) for key in before}
    assert len(keys_of(store, "")) == len(before)


def test_a_file_that_has_become_damaged_does_no_harm_to_what_was_made_of_it() -> None:
    """A machine sends what it resumed from its own disk again, as it does not know what the store has."""
    store, good = MemoryStore(), Content(FIRST).staged()
    manifest = commit.publish(store, KEYS, good, "remote", FOREVER, quiet, attempt=commit.Attempt("a" * 16))
    part = good.parts[0]
    zeros = [(name, memoryview(bytes(len(source)))) for name, source in part.shards]
    again = dataclasses.replace(part, shards=zeros, known=manifest.parts[0].shards)

    commit.publish(
        store,
        KEYS,
        dataclasses.replace(good, parts=[again]),
        "remote",
        FOREVER,
        quiet,
        attempt=commit.Attempt("a" * 16),
    )

    assert fetch.verify(store, KEYS, manifest, FOREVER)


def test_memory_that_is_filled_anew_while_it_is_read_is_no_snapshot() -> None:
    """An agent that takes over does not know what its predecessor has granted; the bytes were of two steps."""
    store, staged = MemoryStore(), Content(FIRST).staged()
    part = dataclasses.replace(staged.parts[0], intact=lambda: not keys_of(store, KEYS.snapshots))

    with pytest.raises(SnapshotCorrupt, match="overwrote its memory"):
        commit.publish(store, KEYS, dataclasses.replace(staged, parts=[part]), "remote", FOREVER, quiet)

    assert not [key for key in keys_of(store, "") if key.endswith(".json")]


def test_quarantine_is_said_once(store: ProtocolStore) -> None:
    commit.quarantine(store, KEYS, FIRST, "first", "here", FOREVER)
    before = store.peek(KEYS.quarantined(FIRST))
    commit.quarantine(store, KEYS, FIRST, "second", "there", FOREVER)

    assert store.peek(KEYS.quarantined(FIRST)) == before
    with pytest.raises(AlreadyExists):
        store.put_if_absent(KEYS.quarantined(FIRST), b"", deadline=FOREVER)


# ---- what has not changed -------------------------------------------------------------------------------------------


def how(told: list[events.Event]) -> list[str]:
    return [event.how for event in told if isinstance(event, events.ShardStored)]


def test_a_shard_that_has_not_changed_is_copied_and_the_others_are_sent(copying: ProtocolStore) -> None:
    store = RecordingStore(copying)
    commit.publish(store, KEYS, frozen(FIRST).staged(), "remote", FOREVER, lambda event: None)
    store.calls.clear()

    told = publish_onto(store, FIRST, SECOND)

    assert how(told) == ["copied", "sent"]
    assert [key.rpartition(".")[0][-2:] for key in store.keys("put")] == ["01"]
    manifest = records.read_manifest(store, KEYS, SECOND, FOREVER)
    assert manifest.parts[0].shards == tuple(Content(SECOND, frozen=True).entries())
    assert is_whole(store, SECOND)


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
            retire.remove(copying, KEYS, FIRST, FOREVER)
            copying.copy(*args, **options)

    told = publish_onto(cast("ObjectStore", Retires()), FIRST, SECOND)

    assert how(told) == ["sent", "sent"]
    assert is_whole(copying, SECOND)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_shard_is_not_copied_by_a_store_that_can_tell(store: ProtocolStore, damage: str) -> None:
    commit.publish(store, KEYS, frozen(FIRST).staged(), "remote", FOREVER, lambda event: None)
    directory = records.read_manifest(store, KEYS, FIRST, FOREVER).directory
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

    with pytest.raises(SnapshotCorrupt, match="not what was committed"):
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
    unchanged.committed(records.read_manifest(store, KEYS, FIRST, FOREVER))
    content = frozen(SECOND)
    staged = altered(content.staged(), known=content.entries())

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
