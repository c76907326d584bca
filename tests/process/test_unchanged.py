"""Whole runs of which most never changes: it is sent once, to S3 and to a disk, and every snapshot is whole anyway.

What was sent is what the server received: bodies of requests for the snapshot's directory and its commit.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud.directory.store import DirectoryStore
from cloud.notice import Deadline
from harness.core.snapshot import RunKeys, SnapshotId
from harness.snapshots import fetch, records
from tests.support.lora_trainer import EVERY
from tests.support.lora_trainer import STEPS as LORA_STEPS
from tests.support.process import Process
from tests.support.s3_server import S3Server
from tests.support.tiny_trainer import STATE_BYTES
from tests.support.world import World, nobody_left, steps_said

STEPS = 20
FROZEN_BYTES = 19 * STATE_BYTES  # 95 %
WHOLE_BYTES = FROZEN_BYTES + STATE_BYTES
HOLD = ("--hold-at", "12", "--patient-until", "10", "--frozen-bytes", str(FROZEN_BYTES))
FAST = ("--back-off-s", "0.05", "--every-s", "1000", "--await-s", "0.1", "--handover-s", "0.5")
FIRST, SECOND = SnapshotId(1, 5), SnapshotId(1, 10)
NEVER = Deadline.never()


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server(min_part_bytes=1) as made:
        yield made


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path, server: S3Server) -> Iterator[World]:
    """The first instance."""
    with nobody_left(request, World(tmp_path, s3=server)) as made:
        yield made


def received(server: S3Server, snapshot: SnapshotId) -> int:
    """Bytes that were sent for one snapshot, records included."""
    return sum(call.body_bytes for call in server.calls() if f"/{snapshot}" in call.key)


def held(host: World, *options: str) -> Process:
    """A run that waits at step 12, with the snapshots of steps 5 and 10 in the bucket."""
    process = host.run_rigged(*FAST, *options, command=host.tiny(*HOLD))
    process.wait_for(r" Published tier=remote [^\n]* step=10 ")
    return process


def finish(host: World, process: Process, *before: World) -> None:
    host.released.touch()
    assert process.wait() == 0, process.stderr
    host.check_tiny(STEPS, *before)
    assert host.check_commits()[-1].step == STEPS


def test_the_second_snapshot_uploads_what_changed_and_no_more(world: World, server: S3Server) -> None:
    process = held(world)

    assert received(server, FIRST) >= WHOLE_BYTES
    assert received(server, SECOND) <= 0.06 * WHOLE_BYTES
    assert re.search(rf" Published tier=remote [^\n]* step=10 [^\n]* copied={FROZEN_BYTES + 4096}\b", process.stderr)
    finish(world, process)
    assert server.uploads() == []


def test_on_another_instance_the_first_snapshot_uploads_what_changed_and_no_more(
    world: World, server: S3Server
) -> None:
    first = held(world)
    world.lose_host()
    assert first.wait() == -signal.SIGKILL
    host = world.elsewhere()

    host.released.touch()
    second = host.run_rigged(*FAST, "--keep-last", "9", command=host.tiny(*HOLD))

    finish(host, second, world)
    assert steps_said(second.stderr, "Restored") == [10]
    later = host.survey().commits[2:]
    assert later
    for snapshot in later:
        assert received(server, snapshot) <= 0.06 * WHOLE_BYTES


def test_a_snapshot_outlives_the_one_that_it_was_copied_from(world: World, server: S3Server) -> None:
    process = held(world, "--keep-last", "1", "--keep-local", "1")
    process.wait_for(rf" Retired tier=remote snapshot={FIRST}")
    process.wait_for(rf" Retired tier=local snapshot={FIRST}")

    assert world.check_commits() == [SECOND]
    local = DirectoryStore(world.local_tier)
    manifest = records.read_manifest(local, RunKeys(world.run), SECOND, NEVER)
    assert fetch.verify(local, RunKeys(world.run), manifest, NEVER)
    world.lose_host()
    process.wait()
    host = world.elsewhere()
    host.released.touch()
    finish(host, host.run_rigged(*FAST, command=host.tiny(*HOLD)), world)


def test_a_role_that_may_not_copy_costs_the_upload_and_nothing_else(world: World, server: S3Server) -> None:
    server.fault("error", ("CopyObject", "UploadPartCopy"), status=403, code="AccessDenied", times=None)

    process = held(world)

    assert " NotCopied tier=remote step=10 " in process.stderr
    assert received(server, SECOND) >= WHOLE_BYTES
    finish(world, process)


def test_a_source_that_is_retired_in_that_moment_is_sent(world: World, server: S3Server) -> None:
    server.fault("error", ("CopyObject", "UploadPartCopy"), status=404, code="NoSuchKey")

    process = held(world)

    assert " NotCopied tier=remote step=10 " in process.stderr
    assert received(server, SECOND) >= WHOLE_BYTES
    finish(world, process)


@pytest.mark.parametrize("fault", ["lose_reply", "error", "embedded_error"])
def test_a_copy_whose_answer_is_lost_is_made_again(world: World, server: S3Server, fault: str) -> None:
    server.fault(fault, "CopyObject")

    process = held(world)

    assert received(server, SECOND) <= 0.06 * WHOLE_BYTES
    finish(world, process)


@pytest.mark.parametrize("at", ["ShardStored@remote:3", "ShardStored@local:3", "Published@local:2"])
def test_a_kill_between_a_copy_and_its_commit_loses_nothing_that_was_promised(world: World, at: str) -> None:
    first = world.run_rigged(*FAST, "--at", f"{at}:kill-both", command=world.tiny(*HOLD))
    assert first.wait() == -signal.SIGKILL, first.stderr
    world.check_commits()

    world.released.touch()
    again = world.run_rigged(*FAST, command=world.tiny(*HOLD))

    finish(world, again)
    assert steps_said(again.stderr, "Restored")[0] >= 5


def test_the_disk_holds_what_did_not_change_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    try:
        process = held(world)
        frozen = [path for path in world.shards() if path.name.endswith(".00.safetensors")]

        assert len(frozen) == 2
        assert frozen[0].samefile(frozen[1])
        finish(world, process)
        world.wait_gone()
    finally:
        world.close()


# ---- torch ----------------------------------------------------------------------------------------------------------


def lora(host: World) -> list[str | Path]:
    options = ["--curve", host.curve, "--final", host.final]
    return [sys.executable, "-m", "tests.support.lora_trainer", *options]


@pytest.mark.long("several lives of a training with torch")
def test_an_adapter_training_that_is_killed_ends_bit_identical_and_has_sent_its_adapters(
    tmp_path: Path, world: World, server: S3Server
) -> None:
    unbroken = World(tmp_path / "unbroken")
    unbroken.root.mkdir()
    try:
        alone = unbroken.run_harness("--every-s", "1000", command=lora(unbroken))
        assert alone.wait() == 0, alone.stderr
    finally:
        unbroken.close()
    every = ("--every-steps", str(EVERY), "--durable-every-s", "0.01", "--keep-last", "9")

    first = world.run_rigged(*FAST, *every, "--at", "Published@remote:2:kill-both", command=lora(world))
    first.wait_exit()
    world.lose_host()
    host = world.elsewhere()
    second = host.run_rigged(*FAST, *every, command=lora(host))
    assert second.wait() == 0, second.stderr

    assert steps_said(second.stderr, "Restored")[0] >= EVERY
    assert host.final.read_text() == unbroken.final.read_text()
    lines = unbroken.curve.read_text().splitlines()
    assert set(world.curve.read_text().splitlines() + host.curve.read_text().splitlines()) == set(lines)
    first_made, *later = host.check_commits()
    state = records.read_manifest(host.opened(), RunKeys(host.run), first_made, NEVER).payload_bytes
    assert received(server, first_made) >= state
    assert [snapshot.step for snapshot in later][-1] == LORA_STEPS
    for snapshot in later:
        assert received(server, snapshot) <= 0.06 * state, snapshot
