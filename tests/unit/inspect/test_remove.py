from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import requests

from cloud.directory.store import DirectoryStore
from harness.config.settings import Settings
from harness.errors import ConfigError, SnapshotCorrupt
from harness.inspect.ls import runs, snapshots
from harness.inspect.remove import remove
from harness.inspect.verify import verify
from harness.ipc import client
from harness.snapshots import commit, open
from harness.snapshots.open import open_store
from tests.support.protocol import FOREVER, KEYS
from tests.support.s3_account import use_account
from tests.support.s3_server import S3Server
from tests.support.stores import BadBlocks
from tests.support.two_snapshots import FIRST, SECOND


@pytest.mark.usefixtures("frozen")
def test_nothing_is_removed_and_no_drill_begun_while_the_agent_is_frozen(settings: Settings, store: Path) -> None:
    with pytest.raises(client.AgentSilent, match=rf"for 0\.05 s: process {os.getpid()}: is it stopped"):
        list(remove(settings, str(FIRST)))
    with pytest.raises(client.AgentSilent, match="kill -CONT"):
        client.drill(settings, 60.0, end=False, on_plan=lambda words: None)

    assert len(snapshots(settings)) == 3


@pytest.mark.parametrize("which", [str(SECOND), "ALL"])
def test_rm_does_not_touch_what_a_newer_version_wrote(settings: Settings, store: Path, which: str) -> None:
    path = store / KEYS.commit(SECOND)
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":3'))

    with pytest.raises(SnapshotCorrupt, match="format 3"):
        list(remove(settings, which))

    assert path.exists()
    assert list((store / "run" / "snapshots").glob(f"{SECOND}-*/*"))


def test_rm_takes_one_snapshot_from_every_tier(settings: Settings, store: Path) -> None:
    done = list(remove(settings, str(SECOND)))

    assert done == [f"deleted {SECOND} from local", f"deleted {SECOND} from remote"]
    assert [row["snapshot"] for row in snapshots(settings)] == [str(FIRST)]
    assert not list((store / "run" / "snapshots").glob(f"{SECOND}-*"))


def test_rm_all_leaves_nothing_of_the_run(settings: Settings, store: Path) -> None:
    list(remove(settings, "ALL"))

    assert runs(settings) == []


def test_rm_all_of_a_directory_that_is_no_run_deletes_nothing(settings: Settings) -> None:
    """`--run src --store .` took a program's sources for a run."""
    file = Path(settings.store) / "run" / "sub" / "precious.py"
    file.parent.mkdir(parents=True)
    file.touch()

    with pytest.raises(ConfigError, match="no such snapshot"):
        list(remove(settings, "ALL"))
    assert file.exists()


def test_rm_all_deletes_nothing_of_somebody_else_s(settings: Settings, store: Path) -> None:
    file = store / "run" / "snapshots" / "notes.md"
    file.touch()

    *_, last = list(remove(settings, "ALL"))

    assert last.endswith("since they are not the harness's: snapshots/notes.md")
    assert [path for path in (store / "run").rglob("*") if path.is_file()] == [file]


def test_rm_all_names_what_it_leaves(settings: Settings, store: Path) -> None:
    os.mkfifo(store / "run" / "snapshots" / "pipe")
    *_, last = list(remove(settings, "ALL"))

    assert last == f"left in {store / 'run'} (remote), since they are not the harness's: snapshots/pipe"


@pytest.mark.parametrize("which", [str(SECOND), "ALL"])
def test_rm_deletes_a_snapshot_whose_manifest_is_on_a_bad_block(
    settings: Settings, store: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    disk = BadBlocks()
    disk.spoil(store / KEYS.commit(SECOND))
    commit.quarantine(open_store(settings.store), KEYS, FIRST, "differs", "here", FOREVER)
    disk.spoil(store / KEYS.quarantined(FIRST))
    monkeypatch.setattr(open, "DirectoryStore", partial(DirectoryStore, fs=disk))

    unusable = {row["snapshot"]: row["unusable"] for row in snapshots(settings) if row["tier"] == "remote"}
    verdicts = {row["snapshot"]: row["verdict"] for row in verify(settings) if row["tier"] == "remote"}
    list(remove(settings, which))

    for words in (unusable, verdicts):
        assert all("Input/output error" in word for word in words.values()), words
    assert not list((store / "run").glob(f"**/*{SECOND}*"))


@pytest.mark.parametrize("which", [str(SECOND), "ALL"])
def test_a_manifest_that_is_too_large_is_named_and_deleted(settings: Settings, store: Path, which: str) -> None:
    path = store / KEYS.commit(SECOND)
    os.truncate(path, 1 << 30)

    rows = {row["snapshot"]: row["verdict"] for row in verify(settings) if row["tier"] == "remote"}
    list(remove(settings, which))

    assert "at most" in rows[str(SECOND)]
    assert rows[str(FIRST)] == "ok"
    assert not list((store / "run").glob(f"**/*{SECOND}*"))


def test_rm_all_gives_up_unfinished_uploads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_account(monkeypatch)
    with S3Server() as server:
        begun = "prefix/run/snapshots/00000001-000000000010-0123456789abcdef/rank-00000-of-00001.00.safetensors"
        for key in (begun, "prefix/another/x"):
            assert requests.post(f"{server.url}/bucket/{key}?uploads").ok
        settings = Settings(
            store="s3://bucket/prefix", run="run", s3_endpoint=server.url, runtime_dir=str(tmp_path / "runtime")
        )

        assert list(remove(settings, "ALL")) == ["gave up 1 unfinished upload of run to remote"]
        assert [upload.key for upload in server.uploads()] == ["prefix/another/x"]


def test_rm_of_what_is_not_there_is_an_error(settings: Settings, store: Path) -> None:
    with pytest.raises(ConfigError, match="no such snapshot"):
        list(remove(settings, "00000009-000000000001"))
