"""harness doctor as a whole: what is checked, what one check needs of another, and what is printed."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cloud.errors import CloudError, Denied, Unavailable
from cloud.notice import Deadline
from cloud.s3.facts import BucketFacts
from cloud.s3.probe import Quirks
from cloud.store import ObjectStore, Progress, Receipt, Source
from cloud.testing.memory import MemoryStore
from harness.cli import app
from harness.config.settings import Settings
from harness.core.snapshot import SnapshotId
from harness.errors import ConfigError, NoSpace
from harness.inspect.doctor.checks import Examination
from harness.inspect.doctor.finding import Finding, Level, all_well, examined, failure, ok, warning
from harness.inspect.doctor.host import (
    Host,
)
from harness.snapshots import commit
from harness.snapshots.open import open_store
from tests.support.machine import Instance, Silent, Slow, Ticking, settings
from tests.support.protocol import FOREVER, KEYS, Content
from tests.support.stores import FaultyStore

OK, WARNING, FAILURE = Level.OK, Level.WARNING, Level.FAILURE


def level_of(findings: Sequence[Finding], name: str) -> Level:
    return next(finding.level for finding in findings if finding.name == name)


# ---- words ----------------------------------------------------------------------------------------------------------


def test_a_finding_is_one_aligned_line_and_its_remedy_is_the_next() -> None:
    assert ok("put", "works").lines() == ["ok       put             works"]
    assert failure("put", "denied", "allow it").lines() == [
        "FAIL     put             denied",
        "                         allow it",
    ]


def test_a_finding_for_machines() -> None:
    assert warning("nofile", "few", "more").to_json() == {
        "check": "nofile",
        "level": "warning",
        "what": "few",
        "remedy": "more",
    }
    assert failure("a", "b", "c").to_json()["level"] == "failure"


def test_warnings_are_well_and_one_failure_is_not() -> None:
    assert all_well([ok("a", ""), warning("b", "")])
    assert not all_well([ok("a", ""), failure("b", "", "")])


@pytest.mark.parametrize("error", [Unavailable("down\nfor now"), OSError(errno.EIO, "down"), NoSpace("down")])
def test_a_check_that_cannot_be_made_is_a_warning_that_says_why(error: Exception) -> None:
    def check() -> Finding:
        raise error

    found = examined("room", check)

    assert (found.level, found.name) == (WARNING, "room")
    assert found.what.startswith("could not be checked: ")
    assert "down" in found.what
    assert "\n" not in found.what


def test_a_bug_in_a_check_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        examined("room", lambda: ok("room", str(1 // 0)))


# ---- the whole -------------------------------------------------------------------------------------------------------


def examine(chosen: Settings, store: Any = None, **parts: Any) -> list[Finding]:
    """All findings on a machine where time goes by as `store` says, and where nobody hears a notice."""
    store = store or Slow()
    clock = store.clock if isinstance(store, Slow) and "stores" not in parts else Ticking()
    parts = {"open_metadata": lambda url: Silent("no route"), "stores": lambda url: store, **parts}
    return list(Examination(chosen, Host({}, clock=clock), **parts).findings())


def test_a_directory_store_and_a_local_tier_are_well_and_left_as_they_were(tmp_path: Path) -> None:
    findings = examine(
        settings(store=str(tmp_path / "deep" / "store"), local=str(tmp_path / "local")),
        stores=open_store,
        state_bytes=1_000_000,
    )

    assert all_well(findings), findings
    assert len({finding.name for finding in findings}) == len(findings)
    assert {"store", "delete", "upload", "memory", "local pace", "torchrun"} <= {finding.name for finding in findings}
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be_opened_fails_and_the_rest_is_still_told() -> None:
    def refuse(location: str) -> ObjectStore:
        raise ConfigError(f"the store {location} cannot be used: Permission denied")

    findings = examine(settings(local="/nowhere/either"), stores=refuse)

    assert {finding.name for finding in findings if finding.level is FAILURE} == {"store", "local tier"}
    assert {"memory", "torchrun"} <= {finding.name for finding in findings}


def test_a_store_that_is_down_is_one_failure_and_not_ten() -> None:
    findings = examine(settings(), FaultyStore(MemoryStore(), "list", fail_on=None))

    assert [finding.name for finding in findings if finding.level is FAILURE] == ["store"]
    assert "put" not in {finding.name for finding in findings}


def test_a_store_that_takes_small_objects_only_fails_at_the_rate() -> None:
    findings = examine(settings(), FaultyStore(MemoryStore(), "put", fail_on=2))

    assert [finding.name for finding in findings if finding.level is FAILURE] == ["upload"]


def test_the_window_is_a_notice_s_where_notices_are_heard_and_grace_s_elsewhere() -> None:
    heard = examine(settings(), open_metadata=lambda url: Instance())
    deaf = examine(settings(grace_s=17.0))

    assert any("120 s that a spot notice leaves" in finding.what for finding in heard)
    assert any("17 s that a SIGTERM (grace_s) leaves" in finding.what for finding in deaf)


def test_without_a_size_there_is_a_warning_that_says_how_to_tell_it() -> None:
    findings = examine(settings())

    assert level_of(findings, "state") is WARNING
    assert level_of(examine(settings(), state_bytes=5), "state") is OK


def test_the_size_of_the_newest_snapshot_is_what_is_judged_with() -> None:
    store = Slow()
    commit.publish(store, KEYS, Content(SnapshotId(1, 7)).staged(), "remote", FOREVER, lambda event: None)

    findings = examine(settings(), store)

    assert next(finding for finding in findings if finding.name == "state").what.endswith("the newest snapshot's")


def test_torchrun_must_leave_no_more_than_the_upload_needs() -> None:
    command = ("torchrun", "--shutdown-timeout", "30", "train.py")
    small = examine(settings(grace_s=100.0), command=command, state_bytes=1000)
    unknown = examine(settings(grace_s=100.0), command=command)

    assert (level_of(small, "torchrun"), level_of(unknown, "torchrun")) == (OK, WARNING)


def test_nothing_is_left_behind_when_nobody_listens_to_the_end() -> None:
    store = MemoryStore()
    findings = Examination(settings(), Host({}), stores=lambda url: store).findings()
    while next(findings).name != "put":
        pass
    assert list(store.list("", deadline=FOREVER)) != []

    findings.close()  # type: ignore[attr-defined]

    assert list(store.list("", deadline=FOREVER)) == []


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Any]:
    """`harness doctor ARGUMENTS` in an empty directory, of an examination that finds what it is given."""
    monkeypatch.chdir(tmp_path)

    def run(found: list[Finding], *arguments: str) -> tuple[int, str, Examination]:
        made: list[Examination] = []

        def findings(examination: Examination) -> Iterator[Finding]:
            made.append(examination)
            return iter(found)

        monkeypatch.setattr(Examination, "findings", findings)
        monkeypatch.setattr(sys, "argv", ["harness", "doctor", *arguments])
        with pytest.raises(SystemExit) as left:
            app.main()
        return int(left.value.code or 0), capsys.readouterr().out, made[0]

    return run


def test_warnings_exit_0_and_a_failure_exits_64(doctor: Callable[..., Any]) -> None:
    code, out, _ = doctor([ok("put", "works"), warning("nofile", "few", "more")])
    assert (code, out.splitlines()[0]) == (0, "ok       put             works")
    code, out, _ = doctor([ok("put", "works"), failure("get", "denied", "allow it")])
    assert (code, out.splitlines()[-1].strip()) == (64, "allow it")


def test_json_is_one_list_of_findings(doctor: Callable[..., Any]) -> None:
    _, out, _ = doctor([ok("put", "works")], "--json")

    assert json.loads(out) == [{"check": "put", "level": "ok", "what": "works", "remedy": ""}]


@pytest.mark.parametrize(
    ("arguments", "run"),
    [
        ((), "doctor"),
        (("--run", "mine"), "mine"),
        (("--", "python", "train.py"), "train"),
        (("--run", "mine", "--", "torchrun", "train.py"), "mine"),
    ],
)
def test_the_trials_lie_below_the_run_that_would_be_started(
    doctor: Callable[..., Any], arguments: tuple[str, ...], run: str
) -> None:
    _, _, examination = doctor([], *arguments)

    assert examination._settings.run == run
    assert examination._command == (arguments[arguments.index("--") + 1 :] if "--" in arguments else ())


def test_the_size_is_told_in_gb(doctor: Callable[..., Any]) -> None:
    _, _, examination = doctor([], "--state-gb", "13.4")

    assert examination._state_bytes == 13_400_000_000


# ---- buckets --------------------------------------------------------------------------------------------------------


class FakeBucket(Slow):
    """A bucket that tells what it is told to."""

    url = "s3://bucket/some/prefix"

    def __init__(self, facts: BucketFacts | CloudError) -> None:
        super().__init__(8e6)
        self._facts = facts
        self._cut_off: set[str] = set()

    def facts(self, prefix: str, *, deadline: Deadline) -> BucketFacts:
        if isinstance(self._facts, CloudError):
            raise self._facts
        return self._facts

    def probe(self, prefix: str, *, deadline: Deadline) -> Quirks:
        return Quirks()

    def put(self, key: str, source: Source, *, deadline: Deadline, progress: Progress | None = None) -> Receipt:
        self._cut_off.add(key)
        receipt = super().put(key, source, deadline=deadline, progress=progress)
        self._cut_off.discard(key)
        return receipt

    def unfinished(self, prefix: str, *, deadline: Deadline) -> list[str]:
        return sorted(key for key in self._cut_off if key.startswith(prefix))

    def abandon(self, key: str, *, deadline: Deadline) -> None:
        self._cut_off.discard(key)


FACTS = BucketFacts("us-east-1", 0.4, 7, "aws:kms", "WXYZ", "iam-role")


def examine_bucket(bucket: FakeBucket, **parts: Any) -> list[Finding]:
    return examine(settings(store=bucket.url), bucket, open_bucket=lambda settings: bucket, **parts)


def test_an_s3_store_is_examined_as_a_bucket_and_not_as_a_directory() -> None:
    findings = examine_bucket(FakeBucket(FACTS))

    names = [finding.name for finding in findings]
    assert {"credentials", "bucket", "clock", "lifecycle", "sums", "upload"} <= set(names)
    assert not {"durable", "room"} & set(names)
    assert all_well(findings)
    assert next(finding for finding in findings if finding.name == "credentials").what.startswith("iam-role")


def test_a_bucket_that_may_not_be_asked_for_its_facts_is_tried_all_the_same() -> None:
    findings = examine_bucket(FakeBucket(Denied("HeadBucket: 403; allow s3:ListBucket")))

    assert level_of(findings, "bucket") is WARNING
    assert level_of(findings, "delete") is OK


def test_requests_without_credentials_are_told() -> None:
    anonymous = BucketFacts(None, None, None, None, None, None)

    assert level_of(examine_bucket(FakeBucket(anonymous)), "credentials") is WARNING


def test_an_s3_url_that_names_no_bucket_fails_the_store() -> None:
    findings = list(
        Examination(settings(store="s3://No_Bucket"), Host({}), open_metadata=lambda url: Silent("")).findings()
    )

    assert level_of(findings, "store") is FAILURE


def test_nothing_large_is_put_where_nothing_can_be_deleted() -> None:
    inner = MemoryStore()

    findings = examine(settings(), FaultyStore(inner, "delete", fail_on=None, error=Denied))

    assert level_of(findings, "delete") is FAILURE
    assert "upload" not in {finding.name for finding in findings}
    assert max(info.size for info in inner.list("", deadline=FOREVER)) < 100


def test_without_boto3_an_s3_store_is_a_failure_and_no_traceback() -> None:
    def missing(settings: Settings) -> Any:
        raise ModuleNotFoundError("No module named 'boto3'")

    findings = examine(settings(store="s3://bucket"), open_bucket=missing)

    assert (level_of(findings, "store"), level_of(findings, "torchrun")) == (FAILURE, OK)


def test_a_size_that_cannot_be_read_says_why() -> None:
    store = Slow()
    commit.publish(store, KEYS, Content(SnapshotId(1, 7)).staged(), "remote", FOREVER, lambda event: None)

    findings = examine(settings(), FaultyStore(store, "read", fail_on=None, error=Denied("no such permission")))

    assert next(finding for finding in findings if finding.name == "state").what.endswith("no such permission")
