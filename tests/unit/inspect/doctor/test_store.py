"""Reach and permissions: a store that refuses, or breaks its word, is found out, and nothing is left in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cloud.directory.store import DirectoryStore
from cloud.errors import AlreadyExists, CloudError, Denied, Full, OutcomeUnknown, Unavailable
from cloud.notice import Deadline
from cloud.retry import RetryingStore
from cloud.s3.store import S3Options, S3Store
from cloud.store import Progress, Receipt, Source
from cloud.testing.memory import MemoryStore
from harness.config.program import digest_of, words_of
from harness.core.rehearsal import Record
from harness.core.snapshot import RunKeys, SnapshotId
from harness.inspect.doctor.capacity import incompressible
from harness.inspect.doctor.finding import Finding, Level, examined
from harness.inspect.doctor.s3 import check_bucket, check_sums, judge_clock, judge_lifecycle
from harness.inspect.doctor.store import (
    Ground,
    check_cleared,
    check_permissions,
    check_reach,
    check_rehearsed,
    ground,
    state_bytes,
    try_cut_off,
    try_multipart,
)
from harness.snapshots import commit, records
from tests.support.clock import FakeClock
from tests.support.protocol import FOREVER, KEYS, Content
from tests.support.s3_server import S3Server
from tests.support.stores import FaultyStore, RecordingStore

OK, WARNING, FAILURE = Level.OK, Level.WARNING, Level.FAILURE


def place(store: Any, keys: RunKeys = KEYS) -> Ground:
    return Ground(store, keys, f"{keys.snapshots}doctor-0123456789abcdef/", FakeClock())


# ---- rehearsed ------------------------------------------------------------------------------------------------------


def rehearsed(tmp_path: Path, *words: str, record: bytes | None) -> Finding:
    """What is found for `python train.py WORDS` where this record is kept."""
    script, store = tmp_path / "train.py", MemoryStore()
    script.write_text("train()")
    command = ("python", str(script), *words)
    if record is not None:
        store.put_if_absent(KEYS.rehearsal(digest_of(command), "20261126T000000Z"), record, deadline=FOREVER)
    return check_rehearsed(store, KEYS, command, FakeClock())


def encoded(tmp_path: Path, *, identical: bool) -> bytes:
    """The record of a rehearsal of `python train.py --lr 1`."""
    (tmp_path / "train.py").write_text("train()")
    words = words_of(("python3", str(tmp_path / "train.py"), "--lr", "1"))
    return msgspec.json.encode(Record(identical, ("14", "20"), 40, words))


def test_a_program_that_was_rehearsed_is_well(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, "--lr", "1", record=encoded(tmp_path, identical=True))

    assert (found.level, found.what) == (OK, "identical at step 40 after interruptions at steps 14, 20")


def test_a_program_that_was_not_rehearsed_is_a_warning_with_the_command(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, "--name", "a b", record=None)

    assert found.level is WARNING
    assert found.remedy == (
        f"harness rehearse --store memory: --run {KEYS.run} -- python {tmp_path}/train.py --name 'a b'"
    )


def test_the_command_names_the_endpoint_of_the_store() -> None:
    found = check_rehearsed(MemoryStore(), KEYS, ("python", "train.py"), FakeClock(), "http://127.0.0.1:9000")

    assert f"--run {KEYS.run} --s3-endpoint http://127.0.0.1:9000 -- python train.py" in (found.remedy or "")


def test_other_arguments_a_difference_and_a_damaged_record_are_warnings(tmp_path: Path) -> None:
    others = rehearsed(tmp_path, "--lr", "2", record=encoded(tmp_path, identical=True))
    differs = rehearsed(tmp_path, "--lr", "1", record=encoded(tmp_path, identical=False))
    damaged = rehearsed(tmp_path, record=b"{")

    assert [found.level for found in (others, differs, damaged)] == [WARNING] * 3
    assert others.what.endswith("but with other arguments")
    assert "NOT identical" in differs.what
    assert damaged.what.startswith("not known: ")


# ---- reach and permissions ------------------------------------------------------------------------------------------


def test_the_ground_is_foreign_to_every_other_reader() -> None:
    with ground(MemoryStore(), KEYS, FakeClock()) as found:
        key = found.key("object")

    assert key.startswith(KEYS.snapshots + "doctor-")
    assert KEYS.parse_directory(key) is None


def test_a_store_that_does_everything(tmp_path: Path) -> None:
    for store in (MemoryStore(), DirectoryStore(tmp_path / "store")):
        findings = list(check_permissions(place(store)))

        assert [finding.name for finding in findings] == ["put", "put if absent", "get", "stat", "list", "delete"]
        assert {finding.level for finding in findings} == {OK}, findings


@pytest.mark.parametrize(
    ("verb", "failing"),
    [
        ("put", {"put"}),
        ("put_if_absent", {"put if absent"}),
        ("get", {"get"}),
        ("stat", {"stat"}),
        ("list", {"list", "delete"}),  # which looks whether it is gone
        ("delete", {"delete"}),
    ],
)
@pytest.mark.parametrize("error", [Denied, Full, Unavailable, OutcomeUnknown])
def test_what_is_refused_is_the_finding_that_fails(verb: str, failing: set[str], error: type[CloudError]) -> None:
    store = FaultyStore(MemoryStore(), verb, fail_on=None, error=error)

    findings = list(check_permissions(place(store)))

    assert {finding.name for finding in findings if finding.level is FAILURE} == failing
    assert all(finding.remedy for finding in findings if finding.level is FAILURE)
    assert len(findings) == (2 if verb == "put" else 6)


def test_without_an_object_the_rest_is_not_tried() -> None:
    store = RecordingStore(FaultyStore(MemoryStore(), "put", fail_on=None, error=Denied))

    findings = list(check_permissions(place(store)))

    assert [(finding.name, finding.level) for finding in findings] == [("put", FAILURE), ("other calls", WARNING)]
    assert {verb for verb, _ in store.calls} == {"put"}


class Careless(MemoryStore):
    """A store that does what no store may."""

    def __init__(self, *sins: str) -> None:
        super().__init__()
        self._sins = sins

    def put_if_absent(self, key: str, data: bytes, *, deadline: Deadline) -> None:
        if "taken" in self._sins:
            raise AlreadyExists(key)
        if "condition" in self._sins:
            self.put(key, memoryview(data), deadline=deadline)
        else:
            super().put_if_absent(key, data, deadline=deadline)

    def put(self, key: str, source: Source, *, deadline: Deadline, progress: Progress | None = None) -> Receipt:
        receipt = super().put(key, source, deadline=deadline, progress=progress)
        if "damage" in self._sins:
            super().put(key, memoryview(b"x" * receipt.size), deadline=deadline)
        return receipt

    def list(self, prefix: str, *, after: str = "", deadline: Deadline) -> Iterator[Any]:
        return iter(()) if "list" in self._sins else super().list(prefix, after=after, deadline=deadline)

    def delete(self, key: str, *, deadline: Deadline) -> None:
        if "delete" not in self._sins:
            super().delete(key, deadline=deadline)


@pytest.mark.parametrize(
    ("sin", "failing"),
    [
        ("condition", {"put if absent"}),
        ("taken", {"put if absent"}),
        ("damage", {"get", "stat"}),
        ("list", {"list"}),
        ("delete", {"delete"}),
    ],
)
def test_a_store_that_breaks_its_word_is_found_out(sin: str, failing: set[str]) -> None:
    findings = list(check_permissions(place(Careless(sin))))

    assert {finding.name for finding in findings if finding.level is FAILURE} == failing


def test_parts_that_become_other_bytes_are_found_out() -> None:
    class Shorter(Careless):
        def stat(self, key: str, *, deadline: Deadline) -> Any:
            info = super().stat(key, deadline=deadline)
            return type(info)(info.key, info.size - 1)

    data = memoryview(incompressible(100))

    assert try_multipart(place(MemoryStore()), data).level is OK
    assert try_multipart(place(Shorter()), data).level is FAILURE


@pytest.mark.parametrize("verb", ["put", "put_if_absent", "get", "stat", "list", "delete"])
@pytest.mark.parametrize("after", [False, True])
def test_nothing_is_left_behind_whatever_failed(verb: str, after: bool) -> None:
    inner = MemoryStore()
    with ground(FaultyStore(inner, verb, after=after), KEYS, FakeClock()) as tried:
        list(check_permissions(tried))

    assert list(inner.list("", deadline=FOREVER)) == []


def test_what_cannot_be_deleted_is_named() -> None:
    tried = place(FaultyStore(MemoryStore(), "delete", fail_on=None, error=Denied))
    list(check_permissions(tried))

    found = check_cleared(tried)

    assert (found.level, found.what) == (WARNING, "2 objects or uploads may be left from these checks")
    assert found.remedy.endswith(f"{KEYS.snapshots}doctor-0123456789abcdef/")
    assert check_cleared(place(MemoryStore())).level is OK


class NamedS3:
    """A store that an s3:// URL names, which refuses as S3 does."""

    url = "s3://bucket/some/prefix"

    def __init__(self, words: str) -> None:
        self._words = words

    def __getattr__(self, name: str) -> Any:
        def refuse(*args: object, **kwargs: object) -> None:
            raise Denied(self._words)

        return refuse


@pytest.mark.parametrize(
    ("words", "what", "remedy"),
    [
        (
            "PutObject s3://bucket/x: AccessDenied no; allow s3:PutObject",
            "PutObject s3://bucket/x: AccessDenied no",
            f"allow s3:PutObject on arn:aws:s3:::bucket/some/prefix/{KEYS.run}/*",
        ),
        (
            "ListObjectsV2: AccessDenied; allow s3:ListBucket",
            "ListObjectsV2: AccessDenied",
            f'allow s3:ListBucket on arn:aws:s3:::bucket for the prefix "some/prefix/{KEYS.run}/*"',
        ),
        ("HeadObject: the bucket does not exist; create it", "HeadObject: the bucket does not exist", "create it"),
    ],
)
def test_a_denial_of_s3_names_the_action_and_where_to_allow_it(words: str, what: str, remedy: str) -> None:
    store: Any = NamedS3(words)

    found = check_reach(store, KEYS, FakeClock())

    assert (found.level, found.what, found.remedy) == (FAILURE, what, remedy)


@pytest.mark.parametrize(("count", "told"), [(0, "no snapshots"), (1, "1 snapshot"), (2, "2 snapshots")])
def test_a_store_in_reach_tells_its_snapshots(count: int, told: str) -> None:
    store = MemoryStore()
    for step in range(1, count + 1):
        commit.publish(store, KEYS, Content(SnapshotId(1, step)).staged(), "remote", FOREVER, lambda event: None)

    found = check_reach(store, KEYS, FakeClock())

    assert (found.level, found.what.endswith(f"has {told}")) == (OK, True), found


def test_the_state_s_size_is_the_newest_snapshot_s() -> None:
    store, content = MemoryStore(), Content(SnapshotId(1, 7))
    assert state_bytes(store, KEYS, FakeClock()) is None
    commit.publish(store, KEYS, content.staged(), "remote", FOREVER, lambda event: None)
    manifest = records.read_manifest(store, KEYS, SnapshotId(1, 7), FOREVER)

    assert state_bytes(store, KEYS, FakeClock()) == manifest.payload_bytes > 0


# ---- buckets --------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE1234")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with S3Server() as serving:
        yield serving


@pytest.fixture
def bucket(server: S3Server) -> Iterator[S3Store]:
    store = S3Store("s3://bucket/some/prefix", S3Options(server.url), part_bytes=PART_BYTES)
    yield store
    store.close()


PART_BYTES = 5 * 1024**2
TWO_PARTS = memoryview(bytes(PART_BYTES + 1))


def findings_in(bucket: S3Store) -> dict[str, Finding]:
    """What is found of a bucket, by name; afterwards the ground is cleared."""
    clock = FakeClock()  # an answer may take as long as it wants
    tried = Ground(RetryingStore(bucket), KEYS, KEYS.snapshots + "doctor-0123456789abcdef/", clock)
    findings = [check_reach(tried.store, KEYS, clock)]
    if findings[0].level is OK:
        findings += check_bucket(bucket, KEYS, clock)
        findings += [examined("sums", lambda: check_sums(bucket, tried.prefix, clock))]
        findings += check_permissions(tried)
        findings += [try_multipart(tried, TWO_PARTS), try_cut_off(tried, TWO_PARTS), check_cleared(tried)]
    return {finding.name: finding for finding in findings}


def test_a_bucket_that_does_everything_and_has_no_lifecycle_rule(server: S3Server, bucket: S3Store) -> None:
    findings = findings_in(bucket)

    assert [name for name, finding in findings.items() if finding.level is not OK] == ["lifecycle"]
    assert findings["credentials"].what == "env, access key ending in 1234"
    assert "us-east-1" in findings["bucket"].what
    assert (server.objects(), server.uploads()) == ({}, [])


@pytest.mark.parametrize(
    ("action", "failing", "warned"),
    [
        ("s3:PutObject", {"put", "multipart"}, {"other calls", "cut-off uploads"}),
        ("s3:GetObject", {"get", "stat", "multipart"}, set()),
        ("s3:DeleteObject", {"delete"}, {"clean-up"}),
        ("s3:ListBucket", {"store"}, set()),
        ("s3:ListBucketMultipartUploads", set(), {"cut-off uploads"}),
        ("s3:AbortMultipartUpload", set(), {"cut-off uploads", "clean-up"}),
        ("s3:GetLifecycleConfiguration", set(), {"lifecycle"}),
    ],
)
def test_the_action_that_is_not_allowed_is_named(
    server: S3Server, bucket: S3Store, action: str, failing: set[str], warned: set[str]
) -> None:
    server.configure(abort_after_days=7)
    server.deny(action)

    findings = findings_in(bucket)
    findings.pop("sums", None)  # what a probe makes of a denial is the probe's

    assert {name for name, finding in findings.items() if finding.level is FAILURE} == failing
    assert {name for name, finding in findings.items() if finding.level is WARNING} == warned
    for name in failing | (warned & {"cut-off uploads", "lifecycle"}):
        assert f"allow {action}" in findings[name].remedy, findings[name]
    if "clean-up" not in warned:
        assert (server.objects(), server.uploads()) == ({}, [])


def test_a_bucket_without_conditions_cannot_guard_a_run(server: S3Server, bucket: S3Store) -> None:
    server.configure(ignore_conditions=True, checksums="ignore")

    findings = findings_in(bucket)

    assert findings["put if absent"].level is FAILURE
    assert "If-None-Match" in findings["put if absent"].what
    assert findings["sums"].level is WARNING
    assert server.objects() == {}


@pytest.mark.parametrize(("offset_s", "level"), [(30, OK), (300, WARNING), (3600, FAILURE)])
def test_a_clock_that_is_wrong_is_told(server: S3Server, bucket: S3Store, offset_s: float, level: Level) -> None:
    server.configure(clock_offset_s=offset_s)

    findings = findings_in(bucket)

    found = findings.get("clock") or findings["store"]
    assert (found.level, level is OK or "set the clock" in found.remedy) == (level, True)


def test_a_bucket_that_is_not_there_is_to_be_created(server: S3Server, bucket: S3Store) -> None:
    server.bucket_vanishes()

    found = findings_in(bucket)["store"]

    assert (found.level, found.remedy) == (FAILURE, "create it")


@pytest.mark.parametrize(("days", "level"), [(None, WARNING), (0, WARNING), (1, OK), (7, OK), (90, WARNING)])
def test_a_rule_for_uploads_that_nobody_ends(days: int | None, level: Level) -> None:
    assert judge_lifecycle(days).level is level


@pytest.mark.parametrize(
    ("skew_s", "level", "told"),
    [
        (None, WARNING, "no date"),
        (-60.0, OK, "60 s behind"),
        (61.0, WARNING, "61 s ahead of"),
        (901.0, FAILURE, "refuses"),
        (-901.0, FAILURE, "refuses"),
    ],
)
def test_how_far_clocks_may_be_apart(skew_s: float | None, level: Level, told: str) -> None:
    assert (judge_clock(skew_s).level, told in judge_clock(skew_s).what) == (level, True)
