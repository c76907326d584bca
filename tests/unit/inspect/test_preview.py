"""What a dry run says of good, damaged, quarantined and foreign snapshots; and that it changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cloud.directory.store import DirectoryStore
from cloud.errors import Denied, Unavailable
from cloud.notice import Deadline
from cloud.store import ObjectInfo, ObjectStore
from harness.config.settings import Settings
from harness.core.manifest import FORMAT, Claim
from harness.core.snapshot import SnapshotId
from harness.errors import ExitCode
from harness.inspect import preview
from harness.inspect.preview import Row
from harness.snapshots import commit
from harness.snapshots.open import open_store
from tests.support.protocol import FOREVER, KEYS, RUN_ID, Content
from tests.support.s3_account import use_account
from tests.support.s3_server import S3Server
from tests.support.stores import FaultyStore

FIRST, SECOND, THIRD = SnapshotId(1, 10), SnapshotId(1, 20), SnapshotId(2, 30)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        store=str(tmp_path / "store"), run="run", local=str(tmp_path / "local"), runtime_dir=str(tmp_path / "runtime")
    )


def publish(location: str, *snapshots: SnapshotId) -> ObjectStore:
    store = open_store(location)
    for snapshot in snapshots:
        commit.publish(store, KEYS, Content(snapshot).staged(), "remote", FOREVER, lambda event: None)
    return store


def claim(store: ObjectStore, generation: int = 1, run_id: str = RUN_ID, *, ended: str | None = "interrupted") -> None:
    made = Claim(format=FORMAT, run_id=run_id, generation=generation, nonce="a" * 16, claimed_at="", host="elsewhere",
                 pid=1, fresh=False, parent=None, command=(), named=True)  # fmt: skip
    commit.claim(store, KEYS, made, FOREVER)
    if ended:
        commit.end(store, KEYS, generation, "a" * 16, ended, 20, FOREVER)


@pytest.fixture
def store(settings: Settings) -> ObjectStore:
    """A run with two snapshots in the store; nothing that a test looks at changes by being looked at."""
    store = publish(settings.store, FIRST, SECOND)
    claim(store)
    return store


def tree(settings: Settings) -> dict[str, bytes]:
    roots = [Path(location) for location in (settings.store, settings.local) if location]
    return {str(path): path.read_bytes() for root in roots for path in root.rglob("*") if path.is_file()}


def look(settings: Settings) -> preview.Preview:
    before = tree(settings)
    found = preview.preview(settings)
    assert tree(settings) == before, "a dry run changes nothing"
    return found


def used(found: preview.Preview) -> tuple[str, str] | None:
    return None if found.used is None else (found.used.snapshot, found.used.tier)


def payload(root: str, snapshot: SnapshotId) -> Path:
    return next((Path(root) / "run" / "snapshots").glob(f"{snapshot}-*/*.00.safetensors"))


def test_a_newer_version_s_snapshot_refuses_a_start(settings: Settings, store: ObjectStore) -> None:
    path = Path(settings.store) / KEYS.commit(SECOND)
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":3'))
    found = look(settings)

    assert found.used is None
    assert found.refused == ExitCode.USAGE
    assert "format 3" in found.why
    assert "resume with a version that knows it" in found.why


def test_a_place_that_cannot_be_read_is_passed_over(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DirectoryStore.stat

    def stat(self: DirectoryStore, key: str, *, deadline: Deadline) -> ObjectInfo:
        if str(SECOND) in key:
            raise Denied("EIO")
        return real(self, key, deadline=deadline)

    monkeypatch.setattr(DirectoryStore, "stat", stat)
    assert used(look(settings)) == (str(FIRST), "remote")


def test_the_newest_is_used(settings: Settings, store: ObjectStore) -> None:
    found = look(settings)

    assert (used(found), found.rejected, found.refused) == ((str(SECOND), "remote"), (), None)


def test_of_two_copies_the_nearer_is_used(settings: Settings, store: ObjectStore) -> None:
    publish(settings.local_tier or "", SECOND)

    assert used(look(settings)) == (str(SECOND), "local")


def test_one_without_its_bytes_is_rejected_with_the_reason(settings: Settings, store: ObjectStore) -> None:
    path = payload(settings.store, SECOND)
    path.write_bytes(path.read_bytes()[:-1])

    found = look(settings)

    assert used(found) == (str(FIRST), "remote")
    ((row),) = found.rejected
    assert (row.snapshot, row.tier) == (str(SECOND), "remote")
    assert "were committed" in row.reason


def test_one_whose_shard_is_gone_is_rejected(settings: Settings, store: ObjectStore) -> None:
    payload(settings.store, SECOND).unlink()

    assert used(look(settings)) == (str(FIRST), "remote")


def test_one_whose_record_is_damaged_is_rejected_and_not_quarantined(settings: Settings, store: ObjectStore) -> None:
    (Path(settings.store) / KEYS.commit(SECOND)).write_bytes(b"{")

    found = look(settings)

    assert used(found) == (str(FIRST), "remote")
    assert [row.snapshot for row in found.rejected] == [str(SECOND)]


def test_one_in_quarantine_is_told_with_its_reason(settings: Settings, store: ObjectStore) -> None:
    commit.quarantine(store, KEYS, SECOND, "rotten", "here", FOREVER)

    found = look(settings)

    assert used(found) == (str(FIRST), "remote")
    assert found.rejected == (Row(str(SECOND), "remote", 20, "quarantined: rotten"),)


def test_another_run_s_in_the_local_tier_is_passed_over(settings: Settings, store: ObjectStore) -> None:
    publish(settings.local_tier or "", THIRD)
    for path in Path(settings.local_tier or "").rglob("*.json"):
        path.write_text(path.read_text().replace(RUN_ID, "f" * 32))

    found = look(settings)

    assert used(found) == (str(SECOND), "remote")
    assert "another run of this name" in found.rejected[0].reason


def test_what_lies_there_from_before_fresh_is_passed_over(settings: Settings, store: ObjectStore) -> None:
    claim(store, 2, "e" * 32)

    found = look(settings)

    assert (found.used, found.refused) == (None, None)
    assert "begins at step 0" in found.why
    assert "another run of this name" in found.rejected[0].reason


def test_what_somebody_died_over_would_be_committed_and_used(settings: Settings, store: ObjectStore) -> None:
    publish(settings.store, THIRD)
    (Path(settings.store) / KEYS.commit(THIRD)).unlink()

    found = look(settings)

    assert used(found) == (str(THIRD), "remote")
    assert "complete, and committed at the start" in found.why


def test_a_finished_run_is_said_and_refused(settings: Settings, store: ObjectStore) -> None:
    claim(store, 2, ended="finished")

    found = look(settings)

    assert (found.used, found.refused) == (None, ExitCode.USAGE)
    assert "finished at step 20" in found.why


def test_fresh_says_what_it_passes_over(settings: Settings, store: ObjectStore) -> None:
    found = look(Settings(store=settings.store, run="run", fresh=True, runtime_dir=settings.runtime_dir))

    assert (found.used, found.refused) == (None, None)
    assert "ignores 2 snapshots" in found.why


def test_a_run_that_never_was_begins_at_step_0_and_no_store_is_made(settings: Settings) -> None:
    found = look(settings)

    assert (found.used, found.refused) == (None, None)
    assert not Path(settings.store).exists()


def test_a_run_none_of_whose_snapshots_can_be_used_is_refused(settings: Settings, store: ObjectStore) -> None:
    shutil.rmtree(Path(settings.store) / "run" / "snapshots")

    found = look(settings)

    assert (found.used, found.refused) == (None, ExitCode.BUG)
    assert len(found.rejected) == 2


def test_a_run_whose_snapshots_are_all_in_quarantine_is_refused(settings: Settings, store: ObjectStore) -> None:
    for snapshot in (FIRST, SECOND):
        commit.quarantine(store, KEYS, snapshot, "rotten", "here", FOREVER)

    assert look(settings).refused == ExitCode.BUG


def test_a_start_that_has_not_ended_is_noted(settings: Settings, store: ObjectStore) -> None:
    claim(store, 2, ended=None)

    (note,) = look(settings).notes
    assert note.startswith("generation 2 on elsewhere has not recorded its end")


def test_a_store_that_is_down_is_an_error_and_no_verdict(
    settings: Settings, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(settings.local_tier or "", SECOND)
    down = FaultyStore(store, "list", fail_on=None)
    monkeypatch.setattr(preview, "open_existing_store", lambda location, settings: down)

    with pytest.raises(Unavailable):
        preview.preview(settings)


def test_a_local_tier_that_cannot_be_read_is_noted(settings: Settings, store: ObjectStore) -> None:
    publish(settings.local_tier or "", SECOND)
    local = FaultyStore(open_store(settings.local_tier or ""), "list", fail_on=None)
    opened = preview.open_existing_store

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            preview, "open_existing_store", lambda at, its: local if at == settings.local_tier else opened(at, its)
        )
        found = look(settings)

    assert used(found) == (str(SECOND), "remote")
    assert "cannot be used" in found.notes[0]


def test_drafts_of_others_are_left_where_they_are(settings: Settings, store: ObjectStore) -> None:
    draft = Path(settings.store) / "run" / "commits" / ".x.tmp"
    draft.write_bytes(b"half")

    look(settings)


def test_a_bucket_is_looked_at_without_a_byte_of_payload_and_without_a_trial(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_account(monkeypatch)
    with S3Server() as server:
        settings = Settings(
            store="s3://bucket/prefix", run="run", s3_endpoint=server.url, runtime_dir=str(tmp_path / "runtime"),
            local=str(tmp_path / "local"),
        )  # fmt: skip
        store = open_store(settings.store, settings)
        claim(store)
        for snapshot in (FIRST, SECOND):
            commit.publish(store, KEYS, Content(snapshot).staged(), "remote", Deadline.never(), lambda event: None)
        before = server.contents()
        server.forget_calls()

        found = preview.preview(settings)

        assert used(found) == (str(SECOND), "remote")
        assert server.contents() == before
        asked = [call.operation for call in server.calls()]
        assert {"PutObject", "DeleteObject", "CreateMultipartUpload"}.isdisjoint(asked)
        assert not [call for call in server.calls("GetObject") if ".safetensors" in call.key]
