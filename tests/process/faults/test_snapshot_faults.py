"""Damaged stores against real processes: the next older snapshot is taken and it is said, or the run is refused.

A run that has snapshots never begins at step 0 (I10); what is damaged after two reads is quarantined (I12).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.core.snapshot import RunKeys, SnapshotId
from tests.support.world import World, steps_said

STEPS = 20

Damage = Callable[[World, SnapshotId], None]


@pytest.fixture
def begun(world: World) -> World:
    """A run that died, without warning, with two durable snapshots."""
    process = world.run_rigged("--at", "Published:2:kill-both", command=world.tiny("--hold-at", "12"))
    process.wait()
    assert len(world.survey().commits) == 2
    return world


def again(world: World) -> tuple[int, str]:
    """Start the same command again: exit code and stderr."""
    process = world.run_harness("--max-crashes", "1", "--keep-last", "9", command=world.tiny("--hold-at", "12"))
    return process.wait(), process.stderr


def rewrite(path: Path, change: Callable[[bytearray], bytes | bytearray]) -> None:
    """Replace a file; links to the old one keep it."""
    data = bytes(change(bytearray(path.read_bytes())))
    path.unlink()
    path.write_bytes(data)


def flip(data: bytearray) -> bytearray:
    data[len(data) // 2] ^= 0x10
    return data


def edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change a JSON record."""

    def changed(data: bytearray) -> bytes:
        record = json.loads(data)
        change(record)
        return json.dumps(record).encode()

    rewrite(path, changed)


PAYLOAD: dict[str, Callable[[bytearray], bytes | bytearray]] = {
    "a flipped bit": flip,
    "a truncated shard": lambda data: data[:-4096],
    "an empty shard": lambda data: b"",
    "a shard with more": lambda data: data + b"\0",
}

MANIFEST: dict[str, Callable[[Path], None]] = {
    "a missing key": lambda path: edit(path, lambda record: record.pop("parts")),
    "a path outside the run": lambda path: edit(path, lambda record: record.update(directory="../../etc")),
    "an empty manifest": lambda path: rewrite(path, lambda data: b""),
    "no JSON": lambda path: rewrite(path, lambda data: data[: len(data) // 2]),
}


@pytest.mark.parametrize("damage", PAYLOAD.values(), ids=PAYLOAD.keys())
def test_damaged_payload_is_quarantined_and_the_next_older_snapshot_is_taken(
    begun: World, damage: Callable[[bytearray], bytes | bytearray]
) -> None:
    older, newest = begun.survey().commits
    for shard in begun.shards(newest):
        rewrite(shard, damage)

    code, said = again(begun)

    assert code == 0, said
    assert f" Rejected snapshot={newest} tier=remote" in said
    assert f" Quarantined snapshot={newest}" in said
    assert f" Restored snapshot={older} step={older.step} " in said
    assert "NothingToResume" not in said
    assert (begun.store / RunKeys(begun.run).quarantined(newest)).exists()
    begun.check_tiny(STEPS)


@pytest.mark.parametrize("damage", MANIFEST.values(), ids=MANIFEST.keys())
def test_a_manifest_that_cannot_be_trusted_is_refused_and_the_next_older_snapshot_is_taken(
    begun: World, damage: Callable[[Path], None]
) -> None:
    older, newest = begun.survey().commits
    damage(begun.manifest(newest))

    code, said = again(begun)

    assert code == 0, said
    assert f" Rejected snapshot={newest} tier=remote" in said
    assert f" Restored snapshot={older} step={older.step} " in said
    assert "NothingToResume" not in said
    begun.check_tiny(STEPS)


def test_a_snapshot_of_a_newer_version_ends_the_start_and_stays(begun: World) -> None:
    """To go on from an older one would throw away what the newer version has trained."""
    newest = begun.survey().commits[-1]
    path = begun.store / RunKeys(begun.run).commit(newest)
    edit(path, lambda record: record.update(format=999))

    code, said = again(begun)

    assert code == 64, said
    assert "format 999; this version reads format 1" in said
    assert "Nothing was started: resume with a version that knows it" in said
    assert path.exists()


@pytest.mark.sample
def test_a_snapshot_with_a_missing_shard_is_passed_over(begun: World) -> None:
    older, newest = begun.survey().commits
    for shard in begun.shards(newest):
        shard.unlink()

    code, said = again(begun)

    assert code == 0, said
    assert f" Rejected snapshot={newest} tier=remote" in said
    assert "Quarantined" not in said, "what is not there now may be there for the next one who looks"
    assert f" Restored snapshot={older} step={older.step} " in said


@pytest.mark.parametrize("what", ["commits", "quarantine"])
def test_a_directory_in_the_place_of_a_record_ends_no_start(begun: World, what: str) -> None:
    older, newest = begun.survey().commits
    path = begun.manifest(newest) if what == "commits" else begun.store / RunKeys(begun.run).quarantined(newest)
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)

    code, said = again(begun)

    assert code == 0, said
    assert steps_said(said, "Restored") == [older.step if what == "commits" else newest.step]
    begun.check_tiny(STEPS)


@pytest.mark.sample
def test_a_local_copy_that_is_damaged_is_replaced_by_the_remote_one_of_the_same_snapshot(world: World) -> None:
    world.has_local = True
    only_one = world.tiny("--every-steps", "6", "--hold-at", "6")
    world.run_rigged("--at", "Published:2:kill-both", command=only_one).wait()
    newest = world.newest()
    assert newest is not None
    assert newest in world.survey().commits, "it is in both tiers"
    for shard in world.shards(newest, world.local_tier):
        rewrite(shard, flip)

    code, said = again(world)

    assert code == 0, said
    assert f" Rejected snapshot={newest} tier=local" in said
    assert f" Fetched snapshot={newest} tier=remote" in said
    assert steps_said(said, "Restored") == [newest.step]
    assert newest in world.survey().commits, "the store's own copy is not quarantined for the local one's damage"
    world.check_tiny(STEPS)


def test_when_every_snapshot_is_damaged_the_run_is_refused_and_nothing_is_trained(begun: World) -> None:
    trained = begun.curve.read_text()
    for shard in begun.shards():
        rewrite(shard, flip)

    code, said = again(begun)

    assert code == 70, said
    assert "none of them can be used" in said
    assert "--fresh" in said
    assert "NothingToResume" not in said
    assert begun.curve.read_text() == trained
    assert not begun.final.exists()


def test_when_every_manifest_is_empty_the_run_is_refused_and_nothing_is_trained(begun: World) -> None:
    trained = begun.curve.read_text()
    for snapshot in begun.survey().commits:
        rewrite(begun.manifest(snapshot), lambda data: b"")

    code, said = again(begun)

    assert code == 70, said
    assert "NothingToResume" not in said
    assert begun.curve.read_text() == trained


def test_an_empty_claim_is_a_clear_error_that_names_it(begun: World) -> None:
    rewrite(begun.store / RunKeys(begun.run).claim(1), lambda data: b"")

    code, said = again(begun)

    assert code == 64, said
    assert "generations/00000001.json" in said
    assert "Traceback" not in said
