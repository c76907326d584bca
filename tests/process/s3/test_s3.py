"""Whole runs on S3, under everything that S3 and a network do to them.

The server is `tests.support.s3_server`: it has real sums and goes wrong on demand. An instance is a host of its own:
when it is lost, so is its disk. Whatever happened, training went on, every commit is whole, the user was told what is
wrong and what helps, and the end is the unbroken run's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.cli import app
from harness.core.snapshot import SnapshotId
from tests.support.process import Process
from tests.support.s3_server import S3Server
from tests.support.world import ROOT, World, nobody_left, steps_said

STEPS = 20
PART_BYTES = 64 * 1024  # four of them and a bit are one snapshot
HOLD = ("--hold-at", "12", "--patient-until", "10")
FAST = ("--back-off-s", "0.05", "--every-s", "1000", "--await-s", "0.1", "--part-bytes", str(PART_BYTES))
IMPATIENT = ("--attempts", "2")  # a store that is down is told at once
SILENCE = ("--handover-s", "0.5")


@pytest.fixture
def server() -> Iterator[S3Server]:
    """An empty bucket that takes parts of any size."""
    with S3Server(min_part_bytes=1) as made:
        yield made


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path, server: S3Server) -> Iterator[World]:
    """The first instance."""
    with nobody_left(request, World(tmp_path, s3=server)) as made:
        yield made


def train(host: World, *options: str | Path, trainer: tuple[str, ...] = (), step_s: float = 0.002) -> Process:
    return host.run_rigged(*FAST, *options, command=host.tiny(*trainer, step_s=step_s))


def held(host: World, *options: str | Path) -> Process:
    """A run that waits at step 12 for `host.released`, with everything that it has sealed in the bucket."""
    process = train(host, *options, trainer=HOLD)
    process.wait_for(r" Published tier=remote [^\n]* step=10 ")  # and before it the one of step 5
    return process


def finish(host: World, *before: World, torn: SnapshotId | None = None) -> Process:
    """Start the same command again, on this host: it goes on from what there is, to the right end."""
    host.released.touch()
    process = train(host, *SILENCE, trainer=HOLD)
    assert process.wait() == 0, process.stderr
    host.check_tiny(STEPS, *before)
    assert host.check_commits(but=torn)[-1].step == STEPS
    return process


def check_finished(world: World, process: Process, *before: World) -> None:
    """It has come to the right end, and nothing is torn."""
    assert process.wait() == 0, process.stderr
    world.check_tiny(STEPS, *before)
    assert world.check_commits()[-1].step == STEPS
    assert world.survey().finished_at == STEPS


# ---- a run, and an instance that is gone ----------------------------------------------------------------------------


@pytest.mark.sample
def test_a_run_goes_from_nothing_to_finished_and_leaves_what_the_format_says(world: World, server: S3Server) -> None:
    check_finished(world, train(world))

    assert {key.split("/")[2] for key in server.objects()} == {"generations", "commits", "snapshots", "events"}
    assert all(key.startswith("p/a/") for key in server.objects())
    assert len(server.calls("UploadPart")) >= 5
    assert server.uploads() == []
    refused = [call.key for call in server.calls("PutObject") if call.status == 412]
    assert len(refused) == 1, "what the store is tried with at the start"
    assert "/probe-" in refused[0]


@pytest.mark.sample
def test_an_instance_that_is_gone_is_resumed_elsewhere_with_nothing_but_the_same_line(
    world: World, server: S3Server
) -> None:
    first = held(world)
    world.lose_host()
    assert first.wait() == -signal.SIGKILL
    host = world.elsewhere()

    second = finish(host, world)

    assert steps_said(second.stderr, "Restored") == [10]
    assert server.uploads() == []


@pytest.mark.parametrize(
    ("at", "lost", "floor"),
    [
        ("ShardStored@local:2", False, 5),
        ("Published@local:2", False, 10),
        ("ShardStored@remote:2", True, 5),
        ("PartStored@remote:2", True, 10),  # finished by the next start: its shards are there
    ],
)
def test_a_kill_between_the_local_and_the_remote_commit_loses_nothing_that_was_promised(
    world: World, at: str, lost: bool, floor: int
) -> None:
    first = train(world, "--at", f"{at}:kill-both", trainer=HOLD)
    assert first.wait() == -signal.SIGKILL, first.stderr
    world.check_commits()
    if lost:
        world.lose_host()
    host = world.elsewhere() if lost else world

    again = finish(host, *([world] if lost else []))

    (restored,) = steps_said(again.stderr, "Restored")
    assert restored >= floor, again.stderr


def test_parts_that_an_agent_had_sent_before_it_died_are_not_sent_again(world: World, server: S3Server) -> None:
    refused = server.fault("error", "UploadPart", key="000000000005-", nth=5, times=None)
    first = train(world, trainer=("--patient-until", "5"))
    server.wait_struck(refused)
    server.wait_calls("UploadPart", 4, status=200)  # a refusal may be repeated before the last of them is there
    world.signal_host(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    server.clear()
    server.forget_calls()

    again = finish(world)

    assert steps_said(again.stderr, "Restored") == [5]
    (behind,) = re.findall(r" Published tier=remote snapshot=(00000001-\S+)", again.stderr)
    sent = [call.part for call in server.calls("UploadPart") if f"/snapshots/{behind}-" in call.key]
    assert len(sent) == 1, "the others were there, with our sums"


def test_uploads_that_a_lost_instance_has_left_are_aborted(world: World, server: S3Server) -> None:
    held_up = server.fault("stall", "UploadPart", key="000000000010-", nth=3, times=None)
    first = train(world, trainer=HOLD)
    server.wait_struck(held_up)
    world.lose_host()
    assert first.wait() == -signal.SIGKILL
    server.clear()
    assert len(server.uploads()) == 1
    host = world.elsewhere()

    finish(host, world)

    assert server.uploads() == []
    assert [call.status for call in server.calls("AbortMultipartUpload") if "probe" not in call.key] == [204]


# ---- everything that can go wrong once ------------------------------------------------------------------------------


def test_a_run_outlives_every_fault_of_every_call_that_it_makes(world: World, server: S3Server) -> None:
    payload, records = "/snapshots/0", "/(commits|generations|events)/"
    server.fault("lose_reply", "PutObject", key="/generations/")
    server.fault("lose_reply", "PutObject", key="/commits/")
    server.fault("lose_reply", "CreateMultipartUpload", key=payload)
    server.fault("lose_reply", "UploadPart", key=payload)
    server.fault("lose_reply", "CompleteMultipartUpload", key=payload)
    server.fault("lose_reply", "HeadObject", key=payload)
    server.fault("lose_reply", "GetObject", key="/commits/")
    server.fault("lose_reply", "DeleteObject", key="/commits/")
    server.fault("lose_reply", "ListObjectsV2")
    server.fault("lose_reply", "ListMultipartUploads")
    server.fault("reset", "UploadPart", key=payload, nth=3, after_bytes=30_000)
    server.fault("stall", "UploadPart", key=payload, nth=7, after_bytes=30_000)
    server.fault("corrupt_stored", "UploadPart", key=payload, nth=8)
    server.fault("forget_part", "UploadPart", key=payload, nth=9)
    server.fault("embedded_error", "CompleteMultipartUpload", key=payload, nth=2)
    server.fault("error", "CompleteMultipartUpload", key=payload, nth=3, status=409, code="OperationAborted")
    server.fault("error", "PutObject", key="/commits/", nth=3, status=409, code="ConditionalRequestConflict")
    server.fault("corrupt_stored", "PutObject", key=records, nth=4)
    server.fault("error", "PutObject", key=records, nth=6, status=500)
    server.fault("error", "UploadPart", key=payload, nth=12, times=3, status=503, code="SlowDown")
    faults = server.fault("slow", "ListObjectsV2", nth=3, delay_s=0.5)

    process = train(world, "--read-s", "1", "--keep-last", "1", trainer=HOLD)
    process.wait_for(" Retired tier=remote ")
    world.released.touch()

    check_finished(world, process)
    for fault in range(1, faults + 1):
        server.wait_struck(fault, timeout_s=0)
    assert server.uploads() == []


def test_a_resume_outlives_every_fault_of_reading(world: World, server: S3Server) -> None:
    first = held(world)
    world.lose_host()
    assert first.wait() == -signal.SIGKILL
    payload = "/snapshots/0"
    server.fault("lose_reply", "GetObject", key=payload)
    server.fault("truncate", "GetObject", key=payload, nth=2)
    server.fault("reset", "GetObject", key=payload, nth=3, at="reply", after_bytes=1000)
    server.fault("stall", "GetObject", key=payload, nth=4, at="reply", after_bytes=1000)
    server.fault("error", "GetObject", key=payload, nth=5, status=503, code="SlowDown")
    faults = server.fault("corrupt_response", "GetObject", key=payload, nth=6)
    host = world.elsewhere()
    host.released.touch()

    second = train(host, *SILENCE, "--read-s", "1", trainer=HOLD)

    assert second.wait() == 0, second.stderr
    assert steps_said(second.stderr, "Restored") == [10]
    assert "Quarantined" not in second.stderr, "the second of two reads was good"
    host.check_tiny(STEPS, world)
    for fault in range(1, faults + 1):
        server.wait_struck(fault, timeout_s=0)


ODD = {
    "a page of HTML": {"kind": "page", "status": 200},
    "a redirect": {"kind": "page", "status": 307},
    "half an answer": {"kind": "short_reply"},
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("when", ["at the start", "in the middle", "at the resume"])
def test_an_answer_that_is_none_of_s3_s_is_waited_out(world: World, server: S3Server, odd: str, when: str) -> None:
    """A gateway's page, a captive portal, a proxy that cuts answers: tracebacks, and 70, which ends a fleet."""
    host, options = world, ("--every-s", "1000", "--attempts", "2", "--first-answer-s", "0.2", *SILENCE)
    if when == "at the resume":
        first = held(world)
        world.lose_host()
        assert first.wait() == -signal.SIGKILL
        host = world.elsewhere()
    if when == "in the middle":
        process = held(world, "--attempts", "2")
    struck = server.fault(times=None, **ODD[odd])
    if when != "in the middle":
        process = train(host, *options, trainer=HOLD)
        process.wait_for(" StoreBlind ")
    server.wait_struck(struck)
    host.released.touch()
    if when == "in the middle":
        process.wait_for(" SaveFailed tier=remote ")
    server.clear()

    assert process.wait() == 0, process.stderr
    assert "Traceback" not in process.stderr
    if when == "at the resume":
        assert steps_said(process.stderr, "Restored") == [10]
    host.check_tiny(STEPS, *([world] if host is not world else []))


# ---- a store that is away, or does not let us -----------------------------------------------------------------------


def snapshots_go_on(world: World, process: Process, words: str, mend: Callable[[], None]) -> None:
    """The store fails from here on: the user is told, the training trains, and when it is mended nothing is lost."""
    world.released.touch()
    process.wait_for(words)
    process.wait_for(r" Published tier=local [^\n]* step=20 ")
    mend()
    check_finished(world, process)


def test_a_store_that_is_down_for_a_while_stops_neither_training_nor_a_restart_in_place(
    world: World, server: S3Server
) -> None:
    process = held(world, *IMPATIENT)
    server.down()
    world.released.touch()
    process.wait_for(" SaveFailed tier=remote ")
    process.wait_for(r" Published tier=local [^\n]* step=20 ")
    os.kill(int(process.wait_for(r" TrainerStarted pid=(\d+)")[1]), signal.SIGKILL)

    snapshots_go_on(world, process, r" ClaimDeferred [^\0]* Restored [^\n]* step=20 ", server.up)


@pytest.mark.long("a grace that has to run out")
def test_a_notice_while_the_store_is_down_leaves_what_the_next_start_here_brings_there(
    world: World, server: S3Server
) -> None:
    first = held(world, *IMPATIENT, "--grace-s", "12")
    world.wait_until(lambda: world.steps_of_curve()[-1] == 12, "step 12")
    server.down()
    first.signal(signal.SIGTERM)

    assert first.wait() == 74, first.stderr
    assert re.search(r" Ended outcome=interrupted exit_code=74 local_step=12 durable_step=10", first.stderr)
    server.up()
    second = finish(world)
    assert steps_said(second.stderr, "Restored") == [12]
    assert "Published tier=remote snapshot=00000001-000000000012 step=12" in second.stderr


def test_a_resume_that_is_denied_ends_with_the_action_that_it_lacks_and_begins_nothing(
    world: World, server: S3Server
) -> None:
    first = held(world)
    world.lose_host()
    assert first.wait() == -signal.SIGKILL
    server.deny("s3:GetObject", "p/a/snapshots/")
    host = world.elsewhere()

    second = train(host, *SILENCE)

    assert second.wait() == 70, second.stderr
    assert "allow s3:GetObject" in second.stderr
    assert not host.curve.exists()
    assert "Quarantined" not in second.stderr, "nothing is known to be damaged"


def test_slow_down_for_a_while_is_waited_for(world: World, server: S3Server) -> None:
    process = held(world)
    server.fault("error", status=503, code="SlowDown", times=None, for_s=1.0)
    world.released.touch()

    check_finished(world, process)


def test_credentials_that_expire_are_looked_for_again(world: World, server: S3Server, tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = AKIAOLD\naws_secret_access_key = secret\n")
    process = start_with(world, {"AWS_SHARED_CREDENTIALS_FILE": str(credentials)}, *IMPATIENT)
    process.wait_for(r" Published tier=remote [^\n]* step=10 ")
    server.expire("AKIAOLD")

    def mend() -> None:
        credentials.write_text("[default]\naws_access_key_id = AKIANEW\naws_secret_access_key = secret\n")

    snapshots_go_on(world, process, " SaveFailed tier=remote [^\n]*the credentials have expired", mend)
    assert {call.access_key for call in server.calls()} == {"AKIAOLD", "AKIANEW"}


def start_with(world: World, env: dict[str, str], *options: str) -> Process:
    """As `train`, without credentials in the environment."""
    hidden = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    rigged = [sys.executable, "-m", "tests.support.harness_run", *world.options(), "--release", world.released]
    return world.start(*rigged, *FAST, *options, "--", *world.tiny(*HOLD), env={**hidden, **env})


@pytest.mark.parametrize(
    ("action", "prefix", "words"),
    [
        ("s3:PutObject", "p/a/snapshots/", r" SaveFailed tier=remote [^\n]*allow s3:PutObject"),
        ("s3:GetObject", "p/a/commits/", r" SaveFailed tier=remote [^\n]*allow s3:GetObject"),
    ],
)
def test_an_action_that_is_denied_is_named_and_when_it_is_allowed_nothing_is_lost(
    world: World, server: S3Server, action: str, prefix: str, words: str
) -> None:
    process = held(world)
    server.deny(action, prefix)

    snapshots_go_on(world, process, words, server.allow)


def test_without_the_right_to_delete_a_run_finishes_and_says_what_it_lacks(world: World, server: S3Server) -> None:
    server.deny("s3:DeleteObject")
    process = train(world, "--keep-last", "1")

    check_finished(world, process)
    assert re.search(r" UpkeepFailed tier=remote [^\n]*allow s3:DeleteObject", process.stderr)


def test_a_bucket_that_vanishes_is_named_training_goes_on_and_what_is_saved_afterwards_is_the_runs(
    world: World, server: S3Server
) -> None:
    process = held(world)
    server.bucket_vanishes()
    world.released.touch()
    process.wait_for(" SaveFailed tier=remote [^\n]*the bucket bucket does not exist; create it")
    process.wait_for(r" Published tier=local [^\n]* step=20 ")
    server.bucket_returns()
    assert process.wait() == 0, process.stderr
    world.check_tiny(STEPS)

    assert [found.step for found in world.check_commits()] == [20]
    again = train(world.elsewhere())
    assert again.wait() == 0, again.stderr
    assert steps_said(again.stderr, "Restored") == [20], "it is told by its snapshots: the claims went with the bucket"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda server: server.deny("s3:ListBucket"), "allow s3:ListBucket"),
        (lambda server: server.deny("s3:PutObject"), "allow s3:PutObject"),
        (lambda server: server.bucket_vanishes(), "the bucket bucket does not exist; create it"),
        (lambda server: server.configure(ignore_conditions=True), "nothing would guard it against a second writer"),
        (
            lambda server: server.configure(clock_offset_s=3600.0),
            r"this clock is -3[56]\d\d s from the server's; set the clock",
        ),
    ],
    ids=["list-denied", "put-denied", "no-bucket", "no-conditions", "clock"],
)
def test_a_start_that_cannot_succeed_is_refused_with_the_remedy(
    world: World, server: S3Server, wrong: Callable[[S3Server], None], words: str
) -> None:
    wrong(server)

    process = train(world)

    assert process.wait() == 64, process.stderr
    assert re.search(words, process.stderr), process.stderr
    assert "Traceback" not in process.stderr
    assert not world.curve.exists(), "it has trained"
    assert [key for key in server.objects() if "/commits/" in key] == []


def test_a_store_that_takes_no_sums_is_used_and_that_is_said(world: World, server: S3Server) -> None:
    server.configure(checksums="reject")
    process = train(world)

    check_finished(world, process)
    assert "takes no CRC64NVME: damage on the way is found when a snapshot is read back" in process.stderr


def test_a_manifest_whose_shards_were_deleted_by_hand_is_passed_over_and_the_one_before_is_used(
    world: World, server: S3Server
) -> None:
    first = held(world)
    world.lose_host()
    assert first.wait() == -signal.SIGKILL
    (shard,) = (key for key in server.objects() if "000000000010-" in key and key.endswith(".safetensors"))
    server.delete_behind(shard)
    host = world.elsewhere()

    second = finish(host, world, torn=SnapshotId(1, 10))

    assert steps_said(second.stderr, "Restored") == [5]
    assert re.search(r" Rejected snapshot=00000001-000000000010 tier=remote ", second.stderr)
    assert world.survey().quarantined == frozenset(), "a 404 may pass"


# ---- looking, and the rights that it takes --------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture
def ask(world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """`harness ARGUMENTS` about the world's run, in this process: boto3 is imported once."""
    for name, value in world.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(world.root)

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["harness", *arguments, *world.named()])
        with pytest.raises(SystemExit) as left:
            app.main()
        said = capsys.readouterr()
        return Said(int(left.value.code or 0), said.out, said.err)

    return run


@pytest.mark.sample
def test_every_command_knows_s3(world: World, server: S3Server, ask: Callable[..., Said]) -> None:
    check_finished(world, train(world))
    newest = world.survey().commits[-1]

    rows = json.loads(ask("ls", "--json").out)
    assert [row["snapshot"] for row in rows if row["tier"] == "remote"][-1] == str(newest)
    assert json.loads(ask("status", "--json").out)["state"] == "finished"
    assert {row["verdict"] for row in json.loads(ask("verify", "--json").out)} == {"ok"}
    (shard,) = (key for key in server.objects() if str(newest) in key and key.endswith(".safetensors"))
    server.flip(shard, 4000)
    bad = ask("verify", "--json")
    assert bad.code == 70
    assert [row["snapshot"] for row in json.loads(bad.out) if row["verdict"] != "ok"] == [str(newest)]
    assert ask("rm", str(newest), "--yes").code == 0
    assert newest not in world.survey().commits
    assert ask("rm", "ALL", "--yes").code == 0
    assert server.objects() == {}


def documented() -> dict[str, str]:
    """The table of docs/operations.md: what each IAM action is needed on, by its name."""
    text = (ROOT / "docs" / "operations.md").read_text()
    section = text.split("\n### IAM actions\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(s3:\w+)` \| ([^|]*) \|", section, re.MULTILINE)
    return dict(rows)


def test_the_rights_that_a_whole_life_needs_are_those_of_the_table(
    world: World, server: S3Server, ask: Callable[..., Said]
) -> None:
    server.configure(role_prefix="p/a/")  # and it needs no more than they give
    held_up = server.fault("stall", "UploadPart", key="000000000010-", nth=3, times=None)
    first = train(world, trainer=HOLD)
    server.wait_struck(held_up)
    world.lose_host()
    assert first.wait() == -signal.SIGKILL
    server.clear()
    server.fault("forget_part", "UploadPart")  # then the upload is gone on with
    host = world.elsewhere()
    second = train(host, *SILENCE, "--keep-last", "1", trainer=HOLD)
    second.wait_for(" Retired tier=remote ")
    host.released.touch()
    check_finished(host, second, world)
    assert ask("ls").code == ask("status").code == ask("verify").code == 0
    assert ask("export", "all.safetensors").code == 0
    examined = ask("doctor", "--metadata", "off")
    assert "lifecycle" in examined.out

    table = documented()
    assert server.actions() == set(table)
    for action, on in table.items():
        allowed = tuple(f"p/a/{below}" for below in re.findall(r"`<run>/([a-z]*)", on))
        keys = {call.key for call in server.calls() if call.action == action and call.key}
        assert not allowed or all(key.startswith(allowed) for key in keys), (action, keys)
    deleted = {call.key.split("/")[2] for call in server.calls("DeleteObject")}
    assert {"snapshots", "commits"} <= deleted <= {"snapshots", "commits", "quarantine"}
