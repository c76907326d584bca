from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import json
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloud.digest import crc64nvme, format_crc
from cloud.directory.store import DirectoryStore
from cloud.errors import CloudError, Denied, TooLarge, Unavailable
from cloud.testing.memory import MemoryStore
from harness.agent.resume import finder, startup
from harness.agent.resume.finder import (
    READS,
    Copy,
    Finder,
    SnapshotsMissing,
    _fetch_shard,
    to_records,
)
from harness.agent.resume.preallocate import Preallocation
from harness.agent.resume_point import MemoryCopy, ResumePoint
from harness.agent.save import slot_pool
from harness.agent.save.slot_pool import SlotPool
from harness.config.settings import Settings
from harness.core import events
from harness.core.manifest import FORMAT, Claim, ShardEntry
from harness.core.snapshot import SnapshotId
from harness.errors import ConfigError, NoSpace, SnapshotCorrupt
from harness.ipc import pages
from harness.ipc.slots import Slot, place_shards
from harness.snapshots import commit, records
from harness.snapshots.candidates import StoredCopy, order
from harness.snapshots.fetch import StoredShard
from tests.support.context import a_context
from tests.support.needs import lacking
from tests.support.open_files import open_files
from tests.support.patience import HANG_S
from tests.support.protocol import (
    FOREVER,
    KEYS,
    RUN_ID,
    SHARD_BYTES,
    SLOT_BYTES,
    Content,
    Fault,
    ProtocolStore,
    altered,
)
from tests.support.slots import pooled

FIRST, SECOND, THIRD = SnapshotId(1, 10), SnapshotId(1, 20), SnapshotId(2, 15)
Find = Callable[..., ResumePoint | None]


class Scene:
    """Two stores, some slots, and a Finder whose finds are closed at the end."""

    def __init__(self) -> None:
        self.remote, self.local = ProtocolStore(MemoryStore()), ProtocolStore(MemoryStore())
        self.pool, self.events, self.heads = SlotPool(), list[events.Event](), list[tuple[str, SnapshotId, str]]()
        self.found: list[ResumePoint] = []

    def publish(self, store: ProtocolStore, *names: SnapshotId, run_id: str = RUN_ID, state: str | None = None) -> None:
        for name in names:
            staged = Content(name, run_id).staged()
            if state is not None:
                staged = altered(staged, state=state.encode())
            commit.publish(store, KEYS, staged, "remote", FOREVER, lambda event: None)

    def stored(self, tier: str, *names: SnapshotId) -> list[Copy]:
        store = self.remote if tier == "remote" else self.local
        return [StoredCopy(name, tier, store) for name in names]

    def memory(self, name: SnapshotId, *, published: bool = True) -> Copy:
        manifest = None
        if published:
            self.publish(self.local, name)
            manifest = records.read_manifest(self.local, KEYS, name, FOREVER)
        return MemoryCopy(name, pooled(self.pool, Content(name)), manifest)

    def find(self, *copies: Copy, run_id: str = RUN_ID) -> ResumePoint | None:
        finder = Finder(KEYS, run_id, "here", self.events.append)
        point = finder.find(copies, lambda copy, parts: self.heads.append((copy.tier, copy.id, parts[0].state)))
        if point is not None:
            self.found.append(point)
        return point

    def shard_key(self, store: ProtocolStore, name: SnapshotId, index: int = 0) -> str:
        manifest = records.read_manifest(store, KEYS, name, FOREVER)
        return KEYS.payload(manifest.directory, manifest.parts[0].shards[index].name)

    def condemned(self) -> list[str]:
        return self.remote.keys(KEYS.quarantine)

    def told(self, kind: type[events.Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(finder, "PAUSES_S", [0.0] * len(finder.PAUSES_S))
    scene = Scene()
    yield scene
    for point in scene.found:
        point.close()
    scene.pool.close()


# ---- order ----------------------------------------------------------------------------------------------------------


def test_the_newest_comes_first_and_of_one_snapshot_the_nearest(scene: Scene) -> None:
    remote, local = scene.stored("remote", FIRST, SECOND, THIRD), scene.stored("local", SECOND, THIRD)
    memory = scene.memory(SECOND)

    found = [(copy.id, copy.tier) for copy in order([*remote, *local, memory])]

    assert found == [
        (THIRD, "local"),
        (THIRD, "remote"),
        (SECOND, "memory"),
        (SECOND, "local"),
        (SECOND, "remote"),
        (FIRST, "remote"),
    ]


def test_a_newer_snapshot_far_away_beats_an_older_one_at_hand(scene: Scene) -> None:
    scene.publish(scene.remote, THIRD)
    point = scene.find(scene.memory(SECOND), *scene.stored("remote", THIRD))

    assert point is not None
    assert (point.id, point.tier, point.indexes, point.verified) == (THIRD, "remote", (), True)
    assert Content(THIRD).is_in(point.slots[0])


def test_small_state_is_told_before_the_tensors_are_there(scene: Scene) -> None:
    scene.publish(scene.remote, FIRST)
    seen_at_head: list[int] = []
    finder = Finder(KEYS, RUN_ID, "here", scene.events.append)
    point = finder.find(
        scene.stored("remote", FIRST), lambda copy, record: seen_at_head.append(len(scene.told(events.Fetched)))
    )

    assert point is not None
    scene.found.append(point)
    assert seen_at_head == [0]
    assert [type(event).__name__ for event in scene.events] == ["Located", "Fetched"]


def test_nothing_anywhere_is_nothing(scene: Scene) -> None:
    assert scene.find() is None


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flip", "truncate"])
@pytest.mark.parametrize("shard", [0, 1])
def test_a_damaged_snapshot_is_quarantined_and_the_next_older_one_taken(scene: Scene, how: str, shard: int) -> None:
    scene.publish(scene.remote, FIRST, SECOND)
    key = scene.shard_key(scene.remote, SECOND, shard)
    scene.remote.damage(key, how)

    point = scene.find(*scene.stored("remote", FIRST, SECOND))

    assert point is not None
    assert point.id == FIRST
    assert Content(FIRST).is_in(point.slots[0])
    assert scene.remote.keys(KEYS.quarantine) == [KEYS.quarantined(SECOND)]
    assert [(event.snapshot, event.tier) for event in scene.told(events.Rejected)] == [(str(SECOND), "remote")]
    (quarantined,) = scene.told(events.Quarantined)
    assert key in quarantined.reason


def test_the_same_snapshot_of_the_next_tier_is_taken_before_an_older_one(scene: Scene) -> None:
    scene.publish(scene.remote, FIRST, SECOND)
    scene.publish(scene.local, FIRST, SECOND)
    scene.local.damage(scene.shard_key(scene.local, SECOND), "flip")

    point = scene.find(*scene.stored("remote", FIRST, SECOND), *scene.stored("local", FIRST, SECOND))

    assert point is not None
    assert (point.id, point.tier) == (SECOND, "remote")
    assert scene.remote.keys(KEYS.quarantine) == []


@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
def test_a_manifest_that_cannot_be_read_is_passed_over_loudly(scene: Scene, how: str) -> None:
    scene.publish(scene.remote, FIRST, SECOND)
    if how == "truncate":
        scene.remote.inner.put(KEYS.commit(SECOND), memoryview(b'{"format":1,'), deadline=FOREVER)
    else:
        scene.remote.damage(KEYS.commit(SECOND), how, 0.0)

    point = scene.find(*scene.stored("remote", FIRST, SECOND))

    assert point is not None
    assert point.id == FIRST
    assert [event.snapshot for event in scene.told(events.Rejected)] == [str(SECOND)]


def test_a_damaged_manifest_is_quarantined_too(scene: Scene) -> None:
    scene.publish(scene.remote, FIRST, SECOND)
    scene.remote.damage(KEYS.commit(SECOND), "flip", 0.0)

    scene.find(*scene.stored("remote", FIRST, SECOND))

    assert scene.remote.keys(KEYS.quarantine) == [KEYS.quarantined(SECOND)]


def test_a_manifest_of_a_newer_version_is_neither_passed_over_nor_called_damaged(scene: Scene) -> None:
    """An older snapshot would be resumed, and the progress that a newer version made would be deleted in time."""
    scene.publish(scene.remote, FIRST, SECOND)
    text = scene.remote.peek(KEYS.commit(SECOND)).replace(b'"format":1', b'"format":3')
    scene.remote.inner.put(KEYS.commit(SECOND), memoryview(text), deadline=FOREVER)

    with pytest.raises(ConfigError, match=r"format 3.*Nothing was started: resume with a version that knows it"):
        scene.find(*scene.stored("remote", FIRST, SECOND))

    assert scene.remote.keys(KEYS.quarantine) == []


@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_that_is_not_there_is_passed_over_and_condemns_nothing(scene: Scene, shard: int) -> None:
    """A store that is being repaired answers 404 for a while; whoever comes later may find it all."""
    scene.publish(scene.remote, FIRST, SECOND)
    key = scene.shard_key(scene.remote, SECOND, shard)
    scene.remote.damage(key, "delete")

    point = scene.find(*scene.stored("remote", FIRST, SECOND))

    assert point is not None
    assert point.id == FIRST
    assert scene.remote.keys(KEYS.quarantine) == []
    (rejected,) = scene.told(events.Rejected)
    assert key in rejected.reason


def test_that_every_snapshot_is_missing_is_told_apart_from_damage(scene: Scene) -> None:
    scene.publish(scene.remote, FIRST, SECOND)
    for name in (FIRST, SECOND):
        scene.remote.damage(scene.shard_key(scene.remote, name, 0), "delete")
    with pytest.raises(SnapshotsMissing, match="none of them can be used"):
        scene.find(*scene.stored("remote", FIRST, SECOND))

    scene.publish(scene.remote, THIRD)
    scene.remote.damage(scene.shard_key(scene.remote, THIRD, 0), "flip")
    with pytest.raises(SnapshotCorrupt) as raised:
        scene.find(*scene.stored("remote", FIRST, SECOND, THIRD))
    assert not isinstance(raised.value, SnapshotsMissing), "one of them is there, and is damaged"


def test_a_manifest_is_read_as_often_as_a_chunk(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.publish(scene.remote, FIRST, SECOND)
    real, reads = scene.remote.read, list[str]()

    def flaky(key: str, **options: Any) -> bytes:
        data = real(key, **options)
        reads.append(key)
        wrong = key == KEYS.commit(SECOND) and reads.count(key) <= len(finder.PAUSES_S)
        return data[:-1] if wrong else data

    monkeypatch.setattr(scene.remote, "read", flaky)
    point = scene.find(*scene.stored("remote", FIRST, SECOND))

    assert point is not None
    assert point.id == SECOND


@pytest.mark.parametrize("bad", ["shards", "manifests"])
def test_a_reader_that_finds_damage_everywhere_condemns_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    """Bad memory, or a network card: another host goes on from these very snapshots."""
    scene.publish(scene.remote, FIRST, SECOND, THIRD)
    get, read = scene.remote.get, scene.remote.read

    def bad_get(key: str, into: memoryview, **options: Any) -> None:
        get(key, into, **options)
        into[0] ^= 1

    def bad_read(key: str, **options: Any) -> bytes:
        data = bytearray(read(key, **options))
        data[0] ^= 1
        return bytes(data)

    with monkeypatch.context() as broken:
        broken.setattr(scene.remote, *(("get", bad_get) if bad == "shards" else ("read", bad_read)))
        with pytest.raises(SnapshotCorrupt, match=r"this host \(here\) is at fault, run harness verify on another"):
            scene.find(*scene.stored("remote", FIRST, SECOND, THIRD))

    assert scene.condemned() == []
    point = scene.find(*scene.stored("remote", FIRST, SECOND, THIRD))
    assert point is not None
    assert point.id == THIRD


def test_one_start_condemns_one_snapshot(scene: Scene) -> None:
    scene.publish(scene.remote, FIRST, SECOND, THIRD)
    for name in (SECOND, THIRD):
        scene.remote.damage(scene.shard_key(scene.remote, name), "flip")

    point = scene.find(*scene.stored("remote", FIRST, SECOND, THIRD))

    assert point is not None
    assert point.id == FIRST
    assert scene.condemned() == [KEYS.quarantined(THIRD)]


def test_what_the_store_itself_finds_right_is_not_condemned(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.publish(scene.remote, FIRST, SECOND)
    real, rotten = scene.remote.get, scene.shard_key(scene.remote, SECOND)
    sums = {key: crc64nvme(scene.remote.peek(key)) for key in scene.remote.keys(KEYS.snapshots)}
    stat = scene.remote.stat

    def bad_get(key: str, into: memoryview, **options: Any) -> None:
        real(key, into, **options)
        into[0] ^= key == rotten

    monkeypatch.setattr(scene.remote, "get", bad_get)
    monkeypatch.setattr(
        scene.remote, "stat", lambda key, **options: dataclasses.replace(stat(key, **options), crc64nvme=sums[key])
    )
    point = scene.find(*scene.stored("remote", FIRST, SECOND))

    assert point is not None
    assert point.id == FIRST
    assert scene.condemned() == []
    (rejected,) = scene.told(events.Rejected)
    assert "the store's own checksum is right: this host may be at fault" in rejected.reason


def test_each_chunk_is_read_again_by_itself(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where three reads of ten are damaged, a snapshot of many chunks never comes right in one piece."""
    scene.publish(scene.remote, FIRST)
    real, reads = scene.remote.get, Counter[tuple[str, int]]()

    def flaky(key: str, into: memoryview, *, offset: int = 0, **options: Any) -> None:
        real(key, into, offset=offset, **options)
        reads[key, offset] += 1
        if reads[key, offset] <= len(finder.PAUSES_S):
            into[0] ^= 1

    monkeypatch.setattr(scene.remote, "get", flaky)
    point = scene.find(*scene.stored("remote", FIRST))

    assert point is not None
    assert Content(FIRST).is_in(point.slots[0])
    assert set(reads.values()) == {1 + len(finder.PAUSES_S)}


@pytest.mark.parametrize("answer", [Unavailable, Denied])
def test_one_place_of_a_disk_that_cannot_be_read_is_passed_over(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: type[CloudError]
) -> None:
    """A bad block is no store that is down: the next older snapshot lies elsewhere."""
    scene.publish(scene.remote, FIRST, SECOND)
    real, rotten = scene.remote.get, scene.shard_key(scene.remote, SECOND)

    def bad_block(key: str, into: memoryview, **options: Any) -> None:
        if key == rotten:
            raise answer("EIO")
        real(key, into, **options)

    monkeypatch.setattr(scene.remote, "get", bad_block)
    with pytest.raises(answer):
        scene.find(*scene.stored("remote", FIRST, SECOND))
    monkeypatch.setattr(scene.remote, "local_path", lambda key: tmp_path / key)

    point = scene.find(*scene.stored("remote", FIRST, SECOND))

    assert point is not None
    assert point.id == FIRST
    assert scene.condemned() == []
    assert [event.snapshot for event in scene.told(events.Rejected)] == [str(SECOND)]


def test_a_disk_that_answers_nothing_is_down(scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scene.publish(scene.remote, FIRST, SECOND)

    def down(*_: Any, **__: Any) -> None:
        raise Unavailable("EIO")

    monkeypatch.setattr(scene.remote, "local_path", lambda key: tmp_path / key)
    for verb in ("get", "list"):
        monkeypatch.setattr(scene.remote, verb, down)
    with pytest.raises(Unavailable):
        scene.find(*scene.stored("remote", FIRST, SECOND))


def test_a_manifest_that_is_too_large_to_be_one_is_passed_over(scene: Scene) -> None:
    scene.publish(scene.remote, FIRST, SECOND)
    real = scene.remote.read

    def read(key: str, *, limit_bytes: int, **options: Any) -> bytes:
        if key == KEYS.commit(SECOND):
            raise TooLarge(f"{key}: more than {limit_bytes} bytes")
        return real(key, limit_bytes=limit_bytes, **options)

    scene.remote.read = read  # type: ignore[method-assign]
    point = scene.find(*scene.stored("remote", FIRST, SECOND))

    assert point is not None
    assert point.id == FIRST


def test_a_flipped_bit_in_the_small_state_is_found(scene: Scene) -> None:
    """A digit of a counter or of a generator's state: still JSON, and wrong."""
    scene.publish(scene.remote, FIRST, SECOND)
    text = scene.remote.peek(KEYS.commit(SECOND))
    rotten = text.replace(b'"state":{"step":20', b'"state":{"step":21')
    assert rotten != text
    scene.remote.inner.put(KEYS.commit(SECOND), memoryview(rotten), deadline=FOREVER)

    point = scene.find(*scene.stored("remote", FIRST, SECOND))

    assert point is not None
    assert point.id == FIRST


def test_snapshots_that_are_all_damaged_start_nothing(scene: Scene) -> None:
    scene.publish(scene.remote, FIRST, SECOND)
    for name in (FIRST, SECOND):
        scene.remote.damage(scene.shard_key(scene.remote, name), "flip")

    with pytest.raises(SnapshotCorrupt, match=r"none of them can be used.*--fresh"):
        scene.find(*scene.stored("remote", FIRST, SECOND))


def test_a_read_that_failed_once_is_repeated_before_anybody_calls_it_damaged(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.publish(scene.remote, FIRST)
    real, reads = scene.remote.get, list[str]()

    def flaky(key: str, into: memoryview, **options: Any) -> None:
        real(key, into, **options)
        reads.append(key)
        if len(reads) == 1:
            into[0] ^= 1

    monkeypatch.setattr(scene.remote, "get", flaky)
    point = scene.find(*scene.stored("remote", FIRST))

    assert point is not None
    assert Content(FIRST).is_in(point.slots[0])
    assert scene.remote.keys(KEYS.quarantine) == []


def test_a_store_that_is_down_proves_nothing(scene: Scene) -> None:
    scene.publish(scene.remote, FIRST, SECOND)

    for call in range(1, 6):
        with scene.remote.armed(Fault("down", call)), pytest.raises(Unavailable):
            scene.find(*scene.stored("remote", FIRST, SECOND))

    assert scene.remote.keys(KEYS.quarantine) == []
    assert scene.told(events.Rejected) == []


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_a_slot_that_was_published_is_verified_by_its_manifest(scene: Scene) -> None:
    copy = scene.memory(SECOND)
    point = scene.find(copy)

    assert point is not None
    assert (point.tier, point.indexes, point.verified) == ("memory", (0,), True)
    assert isinstance(copy, MemoryCopy)
    assert point.slots[0] is copy.slots[0].slot, "nothing is copied"


def test_a_slot_that_nobody_has_digests_of_is_trusted_and_that_is_said(scene: Scene) -> None:
    point = scene.find(scene.memory(SECOND, published=False))

    assert point is not None
    assert point.verified is False
    assert [event.verified for event in scene.told(events.Fetched)] == [False]


def test_a_slot_that_differs_from_its_manifest_is_passed_over(scene: Scene) -> None:
    copy = scene.memory(SECOND)
    assert isinstance(copy, MemoryCopy)
    copy.slots[0].slot.shard(copy.records[0].shards[1])[17] ^= 1

    point = scene.find(copy, *scene.stored("local", SECOND))

    assert point is not None
    assert (point.id, point.tier) == (SECOND, "local")


# ---- several ranks --------------------------------------------------------------------------------------------------


def test_every_rank_s_part_is_fetched_into_a_slot_of_its_own(scene: Scene) -> None:
    content = Content(FIRST, world_size=3)
    commit.publish(scene.remote, KEYS, content.staged(), "remote", FOREVER, lambda event: None)

    point = scene.find(*scene.stored("remote", FIRST))

    assert point is not None
    assert point.records == tuple(content.record(rank) for rank in range(3))
    assert [content.is_in(slot, rank) for rank, slot in enumerate(point.slots)] == [True] * 3
    assert [event.bytes for event in scene.told(events.Fetched)] == [3 * sum(SHARD_BYTES)]


def test_a_snapshot_with_one_damaged_part_is_none_and_its_good_parts_are_let_go(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Slot] = []
    real = Slot.close
    monkeypatch.setattr(Slot, "close", lambda slot: (closed.append(slot), real(slot)))
    scene.publish(scene.remote, FIRST)
    whole = Content(SECOND, world_size=2).staged()
    manifest = commit.publish(scene.remote, KEYS, whole, "remote", FOREVER, lambda event: None)
    scene.remote.damage(KEYS.payload(manifest.directory, manifest.parts[1].shards[1].name), "flip")

    point = scene.find(*scene.stored("remote", FIRST, SECOND))

    assert point is not None
    assert point.id == FIRST
    assert len(closed) == 2
    assert point.slots[0] not in closed


def test_a_memory_copy_with_one_damaged_slot_is_passed_over(scene: Scene) -> None:
    content = Content(SECOND, world_size=2)
    manifest = commit.publish(scene.local, KEYS, content.staged(), "local", FOREVER, lambda event: None)
    copy = MemoryCopy(SECOND, pooled(scene.pool, content), manifest)
    copy.slots[1].slot.shard(copy.records[1].shards[0])[3] ^= 1

    point = scene.find(copy, *scene.stored("local", SECOND))

    assert point is not None
    assert point.tier == "local"


# ---- identity and room ----------------------------------------------------------------------------------------------


def test_a_local_disk_of_another_run_does_not_count(scene: Scene) -> None:
    scene.publish(scene.local, THIRD, run_id="f" * 32)
    scene.publish(scene.remote, FIRST)

    point = scene.find(*scene.stored("local", THIRD), *scene.stored("remote", FIRST))

    assert point is not None
    assert (point.id, point.tier) == (FIRST, "remote")


def test_what_lay_here_before_fresh_is_no_snapshot_of_this_run(scene: Scene) -> None:
    scene.publish(scene.remote, FIRST, SECOND, run_id="f" * 32)

    assert scene.find(*scene.stored("remote", FIRST, SECOND)) is None
    assert [event.snapshot for event in scene.told(events.Rejected)] == [str(SECOND)]


def test_too_little_memory_is_said_with_numbers_and_quarantines_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.publish(scene.remote, FIRST)
    monkeypatch.setattr(slot_pool, "available_bytes", lambda: 1000)

    with pytest.raises(NoSpace, match=r"0\.00 GB are free"):
        scene.find(*scene.stored("remote", FIRST))

    assert scene.remote.keys(KEYS.quarantine) == []


@pytest.mark.parametrize("letter", ["x", '"', "é", "\\", "\U0001f600"])
def test_a_large_small_state_fits_into_the_slot_whatever_it_is_made_of(scene: Scene, letter: str) -> None:
    state = json.dumps({"words": letter * 150_000}, ensure_ascii=False)
    scene.publish(scene.remote, FIRST, state=state)

    point = scene.find(*scene.stored("remote", FIRST))

    assert point is not None
    assert point.records[0].state == state


def test_the_slot_of_a_refused_copy_is_closed(scene: Scene) -> None:
    scene.publish(scene.remote, FIRST)
    scene.remote.damage(scene.shard_key(scene.remote, FIRST), "flip")
    before = open_files()

    with pytest.raises(SnapshotCorrupt):
        scene.find(*scene.stored("remote", FIRST))

    assert open_files() <= before


def test_a_fetched_record_is_the_one_that_was_sealed(scene: Scene) -> None:
    scene.publish(scene.remote, FIRST)

    assert to_records(records.read_manifest(scene.remote, KEYS, FIRST, FOREVER)) == (Content(FIRST).record(),)


# ---- I10, where the search begins -----------------------------------------------------------------------------------


def test_a_run_whose_every_snapshot_is_quarantined_does_not_silently_start_at_step_0(scene: Scene) -> None:
    claim = Claim(format=FORMAT, run_id=RUN_ID, generation=1, nonce="a" * 16, claimed_at="", host="here", pid=1,
                  fresh=False, parent=None, command=(), named=True)  # fmt: skip
    commit.claim(scene.remote, KEYS, claim, FOREVER)
    scene.publish(scene.remote, FIRST)
    commit.end(scene.remote, KEYS, 1, "a" * 16, "failed", 10, FOREVER)
    commit.quarantine(scene.remote, KEYS, FIRST, "rotten", "here", FOREVER)
    pipeline = SimpleNamespace(
        remote=SimpleNamespace(store=scene.remote),
        local=None,
        run_id="",
        steps=SimpleNamespace(durable=None),
        memory_copies=lambda run_id: [],
        handed_over=list,
    )
    journal = SimpleNamespace(generation=0, claimed=0)
    answered, said = threading.Event(), list[str]()
    context = a_context(Settings(store="/store", run="run"), emit=scene.events.append, say=said.append)
    tell = startup.StartupEvents(answered.set, lambda refusal: answered.set(), lambda newer: None)

    start = startup.Startup(context, (), pipeline, journal, tell)
    start.begin(lambda: None)

    assert answered.wait(HANG_S)
    assert start.finding is startup.Finding.FAILED
    assert "--fresh" in " ".join(said)


# ---- fetching from a disk -------------------------------------------------------------------------------------------


CHUNK = 4096
CONTENT = b"".join(bytes([number]) * CHUNK for number in range(2 * READS)) + b"the rest"
ENTRY = ShardEntry(
    name="shard",
    size=len(CONTENT),
    crc64nvme=format_crc(crc64nvme(CONTENT)),
    chunk_bytes=CHUNK,
    chunks=tuple(format_crc(crc64nvme(CONTENT[at : at + CHUNK])) for at in range(0, len(CONTENT), CHUNK)),
)
(SPAN,) = place_shards([("shard", len(CONTENT))])


class Together(DirectoryStore):
    """Answers when `READS` are asked for at once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.together = threading.Barrier(READS, timeout=HANG_S)
        self.into: list[memoryview] = []

    def get(self, key: str, into: memoryview, **options: Any) -> None:
        self.into.append(into)
        if len(into) == CHUNK:
            self.together.wait()
        super().get(key, into, **options)


@pytest.fixture
def disk(tmp_path: Path) -> Together:
    store = Together(tmp_path / "store")
    store.put("run/shard", memoryview(CONTENT), deadline=FOREVER)
    return store


def test_several_chunks_of_a_local_shard_are_read_at_once(disk: Together) -> None:
    with contextlib.closing(Slot.create(SLOT_BYTES + len(CONTENT))) as slot:
        total = _fetch_shard(StoredShard(disk, "run/shard", ENTRY), slot, SPAN, there(), FOREVER)

        assert format_crc(total) == ENTRY.crc64nvme
        assert slot.shard(SPAN) == CONTENT
        disk.into.clear()


def test_no_disk_writes_into_a_slot_that_is_a_file(disk: Together, tmp_path: Path) -> None:
    with contextlib.closing(Slot.create(SLOT_BYTES + len(CONTENT), tmp_path)) as slot:
        if not slot.on_disk:
            lacking("disk")
        _fetch_shard(StoredShard(disk, "run/shard", ENTRY), slot, SPAN, there(), FOREVER)

        assert slot.shard(SPAN) == CONTENT
        mapped = range(address(slot.buffer), address(slot.buffer) + slot.size)
        assert not any(address(into) in mapped for into in disk.into)


# ---- memory that comes beside the fetch -----------------------------------------------------------------------------


def there() -> Preallocation:
    """All of the memory is there already."""
    return Preallocation(_ for _ in ())


def test_a_read_waits_for_the_memory_that_it_goes_to(disk: Together) -> None:
    """No read begins before its part is there; one whose part is there does not wait for the rest."""
    reached = SPAN.offset + len(CONTENT)
    steps = queue.Queue[int]()

    def making() -> Generator[int]:
        while (end := steps.get(timeout=HANG_S)) < reached:
            yield end
        yield end

    begun = threading.Event()
    slot, _ = Slot.creating(SLOT_BYTES + len(CONTENT))
    ahead = Preallocation(making())
    real = disk.get

    def get(key: str, into: memoryview, **options: Any) -> None:
        begun.set()
        real(key, into, **options)

    disk.get = get  # type: ignore[method-assign]
    with contextlib.closing(slot), ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(_fetch_shard, StoredShard(disk, "run/shard", ENTRY), slot, SPAN, ahead, FOREVER)
        assert not begun.wait(0.05)
        steps.put(SPAN.offset + READS * CHUNK)
        assert begun.wait(HANG_S)
        steps.put(reached)
        assert format_crc(fetching.result(HANG_S)) == ENTRY.crc64nvme
        ahead.wait()
        disk.into.clear()


def test_an_allocation_that_dies_of_a_bug_is_no_memory_to_read_into() -> None:
    def making() -> Generator[int]:
        yield 4096
        raise ValueError("a bug")

    ahead = Preallocation(making())
    ahead.wait_for(4096)
    with pytest.raises(ValueError, match="a bug"):
        ahead.wait_for(8192)
    with pytest.raises(ValueError, match="a bug"):
        ahead.wait()
    ahead.stop()


def test_memory_that_runs_out_in_the_middle_sends_the_resume_to_the_disk(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scene.publish(scene.remote, FIRST)
    closed: list[int] = []

    def too_much(fd: int, size: int) -> Generator[int]:
        try:
            yield 4096
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        finally:
            closed.append(size)

    monkeypatch.setattr(pages, "allocating", too_much)
    before = open_files()

    finder = Finder(KEYS, RUN_ID, "here", scene.events.append, tmp_path)
    point = finder.find(scene.stored("remote", FIRST), lambda copy, record: None)
    assert point is not None
    with contextlib.closing(point.slots[0]):
        assert point.slots[0].on_disk
        assert point.slots[0].record() == Content(FIRST).record()
    with pytest.raises(NoSpace, match="free here"):
        scene.find(*scene.stored("remote", FIRST))

    assert len(closed) == 2
    assert scene.remote.keys(KEYS.quarantine) == []
    assert open_files() <= before


def test_what_a_disk_loses_after_it_was_verified_is_not_resumed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel forgets what it cannot write back: 46,848 of 76,800 pages were others when they were read again."""
    scene.publish(scene.remote, FIRST)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("harness.agent.save.slot_pool.how_many_fit", lambda *_: 0)
    monkeypatch.setattr(os, "fdatasync", fail)
    finder = Finder(KEYS, RUN_ID, "here", scene.events.append, tmp_path)
    with pytest.raises(NoSpace, match="Input/output error"):
        finder.find(scene.stored("remote", FIRST), lambda copy, record: None)

    assert scene.told(events.Fetched) == []
    assert scene.remote.keys(KEYS.quarantine) == []


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
