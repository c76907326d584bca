from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from cloud.directory.store import DirectoryStore
from cloud.notice import Deadline
from cloud.store import ObjectInfo, ObjectStore
from harness.config.settings import Settings
from harness.core import events
from harness.core.manifest import FORMAT, Claim
from harness.core.snapshot import SnapshotId
from harness.errors import ConfigError, SnapshotCorrupt
from harness.inspect import report
from harness.ipc import client
from harness.ipc.channel import listen
from harness.ipc.runtime_dir import RuntimeDir
from harness.snapshots import commit, fetch, open, retire
from harness.snapshots.open import open_store
from tests.support.protocol import FOREVER, KEYS, RUN_ID, Content
from tests.support.s3_account import use_account
from tests.support.s3_server import S3Server
from tests.support.stores import BadBlocks

FIRST, SECOND = SnapshotId(1, 10), SnapshotId(1, 20)


class ListedStore:
    """A store that counts what its listings have shown."""

    def __init__(self, store: ObjectStore) -> None:
        self._store, self.seen = store, 0

    def list(self, prefix: str, *, after: str = "", deadline: Deadline) -> Iterator[ObjectInfo]:
        for info in self._store.list(prefix, after=after, deadline=deadline):
            self.seen += 1
            yield info


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        store=str(tmp_path / "store"), run="run", local=str(tmp_path / "local"), runtime_dir=str(tmp_path / "runtime")
    )


@pytest.fixture
def store(settings: Settings) -> Path:
    """A run with two snapshots in the store, one of them in the local tier too."""
    remote, local = open_store(settings.store), open_store(settings.local_tier or "")
    claim = Claim(format=FORMAT, run_id=RUN_ID, generation=1, nonce="a" * 16, claimed_at="", host="here", pid=1,
                  fresh=False, parent=None, command=(), named=True)  # fmt: skip
    commit.claim(remote, KEYS, claim, FOREVER)
    for name in (FIRST, SECOND):
        commit.publish(remote, KEYS, Content(name).staged(), "remote", FOREVER, lambda event: None)
    commit.publish(local, KEYS, Content(SECOND).staged(), "local", FOREVER, lambda event: None)
    return Path(settings.store)


def flip(store: Path, snapshot: SnapshotId) -> Path:
    path = next((store / "run" / "snapshots").glob(f"{snapshot}-*/*.01.safetensors"))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    return path


def journal(settings: Settings, *bodies: events.Event) -> None:
    lines = [events.Line(at="t", mono=1.0, generation=1, body=body) for body in bodies]  # type: ignore[arg-type]
    data = b"a foreign line\n" + b"".join(events.encode_line(line) for line in lines)
    open_store(settings.store).put_if_absent(KEYS.journal(1, "host", 0), data, deadline=FOREVER)


def test_the_status_of_a_run_without_an_agent_comes_from_its_store(settings: Settings, store: Path) -> None:
    journal(
        settings,
        events.Sealed(step=30, bytes=1, stall_s=0.1),
        events.Published(tier="local", snapshot=str(SECOND), step=20, bytes=1, seconds=0.1),
        events.Heartbeat(),
    )
    open_store(settings.store)
    found = report.status(settings)

    assert found == {
        "run": "run",
        "store": settings.store,
        "state": "not running here",
        "generation": 1,
        "step": 30,
        "local_step": 20,
        "durable_step": 20,
        "latest": str(SECOND),
        "snapshots": 2,
        "quarantined": 0,
        "restart": None,
        "ended_at": None,
    }


def test_the_status_of_an_ended_run_is_its_outcome(settings: Settings, store: Path) -> None:
    commit.end(open_store(settings.store), KEYS, 1, "a" * 16, "finished", 20, FOREVER)

    assert report.status(settings)["state"] == "finished"


def test_the_status_of_a_run_that_never_was_is_an_error(settings: Settings) -> None:
    open_store(settings.store)
    with pytest.raises(ConfigError, match="no run 'run' in"):
        report.status(settings)


@pytest.fixture
def frozen(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This host's agent of the run listens, and has been stopped."""
    monkeypatch.setattr(client, "ANSWER_S", 0.05)
    place = RuntimeDir.of(Path(settings.runtime_dir), settings.store_identity, settings.run)
    place.prepare()
    lock, listener = place.try_lock(), listen(place.socket)
    assert lock is not None
    yield
    listener.close()
    os.close(lock)


@pytest.mark.usefixtures("frozen")
def test_the_status_of_a_run_whose_agent_is_frozen_comes_from_its_store_and_says_so(
    settings: Settings, store: Path
) -> None:
    """It waited for an answer, for as long as the agent was stopped."""
    found = report.status(settings)

    assert found["state"] == "does not answer here"
    assert found["durable_step"] == 20


@pytest.mark.usefixtures("frozen")
def test_nothing_is_removed_and_no_drill_begun_while_the_agent_is_frozen(settings: Settings, store: Path) -> None:
    with pytest.raises(client.AgentSilent, match=rf"for 0\.05 s: process {os.getpid()}: is it stopped"):
        list(report.remove(settings, str(FIRST)))
    with pytest.raises(client.AgentSilent, match="kill -CONT"):
        client.drill(settings, 60.0, end=False, on_plan=lambda words: None)

    assert len(report.snapshots(settings)) == 3


def test_the_status_of_a_long_run_reads_both_ends_of_its_journal(settings: Settings, store: Path) -> None:
    """What a start took is told once, at the beginning; how far it is, at the end."""
    remote = open_store(settings.store)
    for number in range(200):
        at = events.Line(at="t", mono=1.0, generation=1, body=events.Heartbeat(step=number, durable_step=20))
        remote.put_if_absent(KEYS.journal(1, "host", number), events.encode_line(at), deadline=FOREVER)
    read = list[str]()

    class Watched(DirectoryStore):
        def read(self, key: str, **options: Any) -> bytes:
            read.append(key)
            return super().read(key, **options)

    report_of = report.fold(report._read_ends(Watched(Path(settings.store)), KEYS, 1))

    assert report_of["step"] == 199
    assert len(read) == 64
    assert {KEYS.journal(1, "host", number) for number in (0, 47, 184, 199)} <= set(read)


def test_asking_about_a_store_that_is_not_there_makes_none(settings: Settings) -> None:
    with pytest.raises(ConfigError):
        report.status(settings)

    assert not Path(settings.store).exists()


def test_ls_shows_each_tier_and_why_a_snapshot_is_not_usable(settings: Settings, store: Path) -> None:
    commit.quarantine(open_store(settings.store), KEYS, FIRST, "rotten", "here", FOREVER)
    (store / "run" / "commits" / f"{SECOND}.json").write_bytes(b"{")

    rows = [(row["snapshot"], row["tier"], row["bytes"], row["unusable"]) for row in report.snapshots(settings)]

    assert rows[0] == (str(SECOND), "local", 5064, None)
    assert rows[1] == (str(FIRST), "remote", 5064, "rotten")
    assert rows[2][:3] == (str(SECOND), "remote", None)
    assert str(SECOND) in rows[2][3]


def test_a_quarantine_that_nobody_can_read_is_one_all_the_same(
    settings: Settings, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit.quarantine(open_store(settings.store), KEYS, FIRST, "rotten", "here", FOREVER)
    monkeypatch.setattr(report, "MAX_RECORD_BYTES", 10)

    (row,) = [row for row in report.snapshots(settings) if row["snapshot"] == str(FIRST)]

    assert "at most 10 were expected" in row["unusable"]


def test_runs_are_listed_by_name(settings: Settings, store: Path) -> None:
    open_store(settings.store).put_if_absent("another/generations/00000001.json", b"{}", deadline=FOREVER)

    assert report.runs(settings) == ["another", "run"]


def test_what_else_lies_in_a_store_is_no_run_and_is_passed_by(
    settings: Settings, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_store(settings.store)
    for key in ("flat", *(f"images/{number}.png" for number in range(30)), "run.old/x", "zebra/events/x"):
        opened.put_if_absent(key, b"", deadline=FOREVER)
    listed = ListedStore(opened)
    monkeypatch.setattr(report, "open_existing_store", lambda location, settings: listed)

    assert report.runs(settings) == ["run"]
    assert listed.seen < 15


def test_verify_calls_good_what_is_good(settings: Settings, store: Path) -> None:
    assert [row["verdict"] for row in report.verify(settings)] == ["ok"] * 3


def test_verify_finds_a_flipped_bit_and_changes_nothing(settings: Settings, store: Path) -> None:
    path = flip(store, FIRST)
    before = sorted(store.rglob("*"))

    rows = {(row["snapshot"], row["tier"]): row["verdict"] for row in report.verify(settings)}

    assert path.name in rows[str(FIRST), "remote"]
    assert rows[str(SECOND), "remote"] == rows[str(SECOND), "local"] == "ok"
    assert sorted(store.rglob("*")) == before


def test_lifting_ends_the_quarantine_of_what_is_right_and_of_nothing_else(settings: Settings, store: Path) -> None:
    """One host with bad memory had condemned every snapshot for everybody, and no command took that back."""
    remote = open_store(settings.store)
    for name in (FIRST, SECOND):
        commit.quarantine(remote, KEYS, name, "differs", "bad-host", FOREVER)
    flip(store, FIRST)

    before = [row["verdict"] for row in report.verify(settings) if row["tier"] == "remote"]
    lifted = [row["verdict"] for row in report.verify(settings, lift=True) if row["tier"] == "remote"]

    assert before == ["quarantined: differs", "quarantined: differs"]
    assert lifted[0].startswith("quarantined: differs; and now: ")
    assert lifted[1] == "ok"
    assert [row["unusable"] for row in report.snapshots(settings) if row["tier"] == "remote"] == ["differs", None]


@pytest.mark.parametrize("which", [str(SECOND), "ALL"])
def test_rm_does_not_touch_what_a_newer_version_wrote(settings: Settings, store: Path, which: str) -> None:
    path = store / KEYS.commit(SECOND)
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))

    with pytest.raises(SnapshotCorrupt, match="format 2"):
        list(report.remove(settings, which))

    assert path.exists()
    assert list((store / "run" / "snapshots").glob(f"{SECOND}-*/*"))


def test_verify_of_nothing_is_an_error(settings: Settings) -> None:
    open_store(settings.store)
    with pytest.raises(ConfigError, match="no snapshot"):
        report.verify(settings)


def test_rm_takes_one_snapshot_from_every_tier(settings: Settings, store: Path) -> None:
    done = list(report.remove(settings, str(SECOND)))

    assert done == [f"deleted {SECOND} from local", f"deleted {SECOND} from remote"]
    assert [row["snapshot"] for row in report.snapshots(settings)] == [str(FIRST)]
    assert not list((store / "run" / "snapshots").glob(f"{SECOND}-*"))


def test_rm_all_leaves_nothing_of_the_run(settings: Settings, store: Path) -> None:
    list(report.remove(settings, "ALL"))

    assert report.runs(settings) == []


def test_rm_all_of_a_directory_that_is_no_run_deletes_nothing(settings: Settings) -> None:
    """`--run src --store .` took a program's sources for a run."""
    file = Path(settings.store) / "run" / "sub" / "precious.py"
    file.parent.mkdir(parents=True)
    file.touch()

    with pytest.raises(ConfigError, match="no such snapshot"):
        list(report.remove(settings, "ALL"))
    assert file.exists()


def test_rm_all_deletes_nothing_of_somebody_else_s(settings: Settings, store: Path) -> None:
    file = store / "run" / "snapshots" / "notes.md"
    file.touch()

    *_, last = list(report.remove(settings, "ALL"))

    assert last.endswith("since they are not the harness's: snapshots/notes.md")
    assert [path for path in (store / "run").rglob("*") if path.is_file()] == [file]


def test_what_is_retired_while_it_is_verified_is_no_difference(
    settings: Settings, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fetch.verify

    def verify(opened: ObjectStore, keys: Any, manifest: Any, *rest: Any) -> bool:
        if manifest.id == FIRST:
            retire.remove(opened, keys, FIRST, FOREVER)
        return real(opened, keys, manifest, *rest)

    monkeypatch.setattr(fetch, "verify", verify)

    rows = [row for row in report.verify(settings) if row["tier"] == "remote"]
    assert [(row["snapshot"], row["verdict"]) for row in rows] == [(str(SECOND), "ok")]


def test_rm_all_names_what_it_leaves(settings: Settings, store: Path) -> None:
    os.mkfifo(store / "run" / "snapshots" / "pipe")
    *_, last = list(report.remove(settings, "ALL"))

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

    unusable = {row["snapshot"]: row["unusable"] for row in report.snapshots(settings) if row["tier"] == "remote"}
    verdicts = {row["snapshot"]: row["verdict"] for row in report.verify(settings) if row["tier"] == "remote"}
    list(report.remove(settings, which))

    for words in (unusable, verdicts):
        assert all("Input/output error" in word for word in words.values()), words
    assert not list((store / "run").glob(f"**/*{SECOND}*"))


@pytest.mark.parametrize("which", [str(SECOND), "ALL"])
def test_a_manifest_that_is_too_large_is_named_and_deleted(settings: Settings, store: Path, which: str) -> None:
    path = store / KEYS.commit(SECOND)
    os.truncate(path, 1 << 30)

    rows = {row["snapshot"]: row["verdict"] for row in report.verify(settings) if row["tier"] == "remote"}
    list(report.remove(settings, which))

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

        assert list(report.remove(settings, "ALL")) == ["gave up 1 unfinished upload of run to remote"]
        assert [upload.key for upload in server.uploads()] == ["prefix/another/x"]


def test_rm_of_what_is_not_there_is_an_error(settings: Settings, store: Path) -> None:
    with pytest.raises(ConfigError, match="no such snapshot"):
        list(report.remove(settings, "00000009-000000000001"))


def test_the_last_restart_of_a_run_without_an_agent_is_told_by_its_journal(settings: Settings, store: Path) -> None:
    told = events.Restarted(
        step=13, snapshot=None, tier=None, total_s=6.7, detect_s=None, start_s=5.5, wait_s=0.1, first_step_s=1.1,
        fetching_s=4.3,
    )  # fmt: skip
    journal(settings, told, events.Heartbeat())

    assert report.status(settings)["restart"] == told.fields()
