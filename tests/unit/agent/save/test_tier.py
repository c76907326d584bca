from __future__ import annotations

import dataclasses
import datetime
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloud.digest import crc64nvme
from cloud.directory.store import DirectoryStore
from cloud.errors import Full, Unavailable
from cloud.notice import Deadline
from cloud.pool import Pool
from cloud.store import ObjectInfo, ObjectStore
from cloud.testing.memory import MemoryStore
from harness.agent.generation import Generation
from harness.agent.resume_point import SealedSlot
from harness.agent.save import throttle, tier, upkeep
from harness.agent.save.jobs import LocalSnapshot, MemorySnapshot
from harness.agent.save.tier import Tier, TierEvents
from harness.agent.save.upkeep import Retention
from harness.config.settings import Settings
from harness.core import events
from harness.core.manifest import FORMAT, Claim, Manifest
from harness.core.rate import Rate
from harness.core.snapshot import SnapshotId
from harness.ipc.slots import Slot
from harness.snapshots import commit, dedup, records
from tests.support.clock import ShiftedClock, standing
from tests.support.context import a_context
from tests.support.patience import HANG_S, telling
from tests.support.priority import LAST, ORDINARY, priority
from tests.support.protocol import (
    FOREVER,
    KEYS,
    RUN_ID,
    SHARD_BYTES,
    SLOT_BYTES,
    Content,
    FastFileSystem,
    ProtocolStore,
    altered,
)
from tests.support.stores import BadBlocks, FaultyStore, RecordingStore


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "FIRST_RETRY_S", 0.001)
    monkeypatch.setattr(tier, "LONGEST_RETRY_S", 0.002)
    monkeypatch.setattr(upkeep, "AGAIN_S", [0.0] * len(upkeep.AGAIN_S))


AGES_S = 1000.0
"""What a store takes for something, by a clock that a test moves: beside it, no stall of the machine counts."""


@pytest.fixture
def shifted(monkeypatch: pytest.MonkeyPatch) -> ShiftedClock:
    """The clock of tier and commit, to be moved."""
    clock = ShiftedClock()
    for module in (tier, throttle):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(commit, "time", clock)
    return clock


class Scene:
    """A tier over a store, and everything that it tells."""

    def __init__(
        self,
        store: ObjectStore,
        name: str = "remote",
        *,
        keep_last: int = 9,
        claimed: bool = True,
        limit_bytes_s: float | None = None,
        fresh: bool = False,
    ) -> None:
        self.generation = Generation(1, RUN_ID, "a" * 16)
        if claimed:
            self.generation.claimed.set()
        self.told, self.changed = list[Any](), threading.Condition()
        self.slots: list[Slot] = []
        settings = Settings(store="memory", run="run", fresh=fresh)
        self.tier = Tier(
            a_context(settings, emit=self._tell, on_bug=lambda bug: self._tell(("fatal", repr(bug)))),
            name,
            store,
            Retention(keep_last),
            TierEvents(
                published=lambda tier, job, manifest: self._tell(("published", job.step)),
                failed=lambda tier, job, err, final: self._tell(("failed", job.step, final)),
                released=lambda tier, job: self._tell(("released", job.step)),
            ),
            limit_bytes_s=limit_bytes_s,
        )
        self.tier.start()

    def _tell(self, what: Any) -> None:
        with self.changed:
            self.told.append(what)
            self.changed.notify_all()

    def until(self, seen: Callable[[list[Any]], bool]) -> None:
        with self.changed, telling(lambda: self.told):
            while not seen(self.told):
                self.changed.wait(0.01)  # what is waited for may be the store's, which tells nobody

    def until_event(self, kind: type[events.Event], count: int = 1) -> Any:
        self.until(lambda told: sum(isinstance(each, kind) for each in told) >= count)
        return [each for each in self.told if isinstance(each, kind)][count - 1]

    def sealed(self, step: int, *, frozen: bool = False) -> MemorySnapshot:
        content, slot = Content(SnapshotId(1, step), frozen=frozen), Slot.create(SLOT_BYTES)
        content.fill(slot)
        slot.seal(content.record(), step)
        self.slots.append(slot)
        return MemorySnapshot((SealedSlot(0, slot, content.record()),), self.generation, 0.0)

    def close(self) -> None:
        self.tier.close(HANG_S)
        for slot in self.slots:
            slot.close()


@pytest.fixture
def scenes() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(store: ObjectStore, name: str = "remote", **options: Any) -> Scene:
        made.append(Scene(store, name, **options))
        return made[-1]

    yield make
    for scene in made:
        scene.close()


def commits(store: ObjectStore) -> list[int]:
    found = (KEYS.parse_commit(info.key) for info in store.list(KEYS.commits, deadline=FOREVER))
    return [name.step for name in found if name is not None]


class Gate:
    """A store whose puts of `verb`, below `prefix`, wait until a test opens it."""

    def __init__(self, store: ObjectStore, verb: str = "put", prefix: str = "") -> None:
        self.store, self.reached, self.opened = store, threading.Event(), threading.Event()
        self.verb, self.prefix = verb, prefix

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.store, name)
        return partial(self._wait, call) if name == self.verb else call

    def _wait(self, call: Callable[..., Any], key: str, *args: Any, **options: Any) -> Any:
        if key.startswith(self.prefix):
            self.reached.set()
            assert self.opened.wait(HANG_S)
        return call(key, *args, **options)


class Sumless(MemoryStore):
    """A store that keeps no sums of its own: what it holds is known by reading it."""

    def stat(self, key: str, *, deadline: Deadline) -> ObjectInfo:
        return dataclasses.replace(super().stat(key, deadline=deadline), crc64nvme=None)


class Watched:
    """A store that notes at which priority its pool writes, and at which it is read."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.put_at, self.got_at = list[tuple[int, int]](), list[tuple[int, int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def put(self, *args: Any, **options: Any) -> Any:
        pool = Pool(1, "test-put")
        self.put_at.append(pool.submit(priority).result(HANG_S))
        pool.shutdown()
        return self.store.put(*args, **options)

    def get(self, *args: Any, **options: Any) -> None:
        self.got_at.append(priority())
        self.store.get(*args, **options)


# ---- saving ---------------------------------------------------------------------------------------------------------


def test_a_sealed_slot_is_published_told_verified_and_released(scenes: Callable[..., Scene]) -> None:
    store = MemoryStore()
    scene = scenes(store)
    scene.tier.submit(scene.sealed(10))
    scene.until_event(events.Verified)

    kinds = [each if isinstance(each, tuple) else type(each).__name__ for each in scene.told]
    assert kinds == [
        "ShardStored", "ShardStored", "PartStored", "Published", ("published", 10), ("released", 10), "Verified",
    ]  # fmt: skip
    assert commits(store) == [10]
    assert scene.tier.idle


def test_an_agent_that_replaces_a_dead_one_sends_nothing_again(scenes: Callable[..., Scene]) -> None:
    """Both go where the claim of their generation says."""
    store = RecordingStore(MemoryStore())
    for scene in (scenes(store), scenes(store)):
        scene.tier.submit(scene.sealed(10))
        scene.until_event(events.Published)

    directory = KEYS.directory(SnapshotId(1, 10), scene.generation.nonce)
    assert store.keys("put") == [
        KEYS.payload(directory, f"rank-00000-of-00001.0{shard}.safetensors") for shard in (0, 1)
    ]


def test_a_failing_store_is_tried_until_it_works(scenes: Callable[..., Scene]) -> None:
    store = FaultyStore(MemoryStore(), "put", fail_on=(1, 2, 3))
    scene = scenes(store)
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: ("released", 10) in told)

    assert [each for each in scene.told if isinstance(each, tuple)] == [
        *[("failed", 10, False)] * 3,
        ("published", 10),
        ("released", 10),
    ]
    failed = [each for each in scene.told if isinstance(each, events.SaveFailed)]
    assert [each.retry_in_s for each in failed] == [0.001, 0.002, 0.002]
    assert commits(store) == [10]


def test_a_newer_job_replaces_one_that_waits(scenes: Callable[..., Scene]) -> None:
    gate = Gate(MemoryStore())
    scene = scenes(gate)
    scene.tier.submit(scene.sealed(10))
    assert gate.reached.wait(HANG_S)
    scene.tier.submit(scene.sealed(20))
    scene.tier.submit(scene.sealed(30))
    assert ("released", 20) in scene.told
    assert [job.step for job in scene.tier.jobs] == [10, 30]
    gate.opened.set()
    scene.until(lambda told: ("released", 30) in told)

    assert commits(gate.store) == [10, 30]


def test_a_newer_job_takes_over_from_one_that_fails(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "FIRST_RETRY_S", 3600.0)
    store = FaultyStore(MemoryStore(), "put", fail_on=1)
    scene = scenes(store)
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: ("failed", 10, False) in told)
    scene.tier.submit(scene.sealed(20))
    scene.until(lambda told: ("released", 20) in told)

    assert commits(store) == [20]
    assert ("released", 10) in scene.told


def test_nothing_is_published_remotely_before_the_generation_is_claimed(scenes: Callable[..., Scene]) -> None:
    store = MemoryStore()
    scene = scenes(store, claimed=False)
    scene.tier.submit(scene.sealed(10))
    scene.until_event(events.SaveFailed)
    assert commits(store) == []

    scene.generation.claimed.set()
    scene.until(lambda told: ("published", 10) in told)
    assert commits(store) == [10]


def test_a_claim_that_got_another_number_is_the_number_of_the_snapshot(scenes: Callable[..., Scene]) -> None:
    store = MemoryStore()
    scene = scenes(store)
    job = scene.sealed(10)
    scene.generation.number = 4
    scene.tier.submit(job)
    published = scene.until_event(events.Published)

    assert published.snapshot == str(SnapshotId(4, 10))


# ---- room -----------------------------------------------------------------------------------------------------------


class Tight(MemoryStore):
    """A store that has room for a number of shards, and says so only by `Full`."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        self.shards = shards

    def put(self, key: str, source: Any, **options: Any) -> Any:
        held = [info for info in self.list("", deadline=FOREVER) if info.key.endswith(".safetensors")]
        if len(held) >= self.shards:
            raise Full("no room left")
        return super().put(key, source, **options)


def test_a_full_store_is_relieved_of_old_snapshots_and_tried_again(scenes: Callable[..., Scene]) -> None:
    store = Tight(4)
    scene = scenes(store)
    for count, step in enumerate((10, 20), 1):
        scene.tier.submit(scene.sealed(step))
        scene.until_event(events.Verified, count)
    scene.tier.submit(scene.sealed(30))
    scene.until(lambda told: ("published", 30) in told)

    assert 10 not in commits(store)
    assert {20, 30} <= set(commits(store))


def test_a_store_that_stays_full_keeps_its_only_good_snapshot(scenes: Callable[..., Scene]) -> None:
    store = Tight(2)
    scene = scenes(store)
    scene.tier.submit(scene.sealed(10))
    scene.until_event(events.Verified)
    scene.tier.submit(scene.sealed(20))
    failed = scene.until_event(events.SaveFailed, 3)

    assert "no room left" in failed.reason
    assert commits(store) == [10]


class Small(MemoryStore):
    """A store that says how much room it has."""

    def free_bytes(self) -> int | None:
        return 1000


def test_too_little_room_is_said_with_numbers_before_a_byte_is_written(scenes: Callable[..., Scene]) -> None:
    store = Small()
    scene = scenes(store)
    scene.tier.submit(scene.sealed(10))
    failed = scene.until_event(events.SaveFailed)

    assert "GB needed" in failed.reason
    assert "--keep-last" in failed.reason
    assert list(store.list("", deadline=FOREVER)) == []


# ---- deadlines ------------------------------------------------------------------------------------------------------


def test_nothing_is_begun_after_the_deadline(scenes: Callable[..., Scene]) -> None:
    store = MemoryStore()
    scene = scenes(store)
    scene.tier.drain(standing(-1.0))
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: ("released", 10) in told)

    assert commits(store) == []


def test_a_failure_that_leaves_no_time_for_another_attempt_is_the_last_one(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "FIRST_RETRY_S", 3600.0)
    scene = scenes(FaultyStore(MemoryStore(), "put", fail_on=None, error=Unavailable))
    scene.tier.drain(standing(60.0))
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: ("released", 10) in told)

    assert ("failed", 10, True) in scene.told
    assert scene.until_event(events.SaveFailed).retry_in_s is None


def test_a_draining_tier_does_nothing_idle(scenes: Callable[..., Scene]) -> None:
    store = MemoryStore()
    scene = scenes(store)
    scene.tier.drain(standing(60.0))
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: ("released", 10) in told)
    scene.close()

    assert not [each for each in scene.told if isinstance(each, events.Verified | events.Retired)]
    assert commits(store) == [10]


class Parts(MemoryStore):
    """A store that takes objects in pieces, and reports each; a test may act between two of them."""

    def __init__(self, piece: int = 1000) -> None:
        super().__init__()
        self.piece, self.act = piece, dict[int, Callable[[], None]]()
        self.reported = 0

    def put(self, key: str, source: Any, *, deadline: Deadline, progress: Any = None) -> Any:
        data = source.read_bytes() if isinstance(source, Path) else bytes(source)
        for at in range(0, len(data), self.piece):
            self.act.pop(self.reported, lambda: None)()
            self.reported += 1
            if deadline.expired:
                raise Unavailable("no time left")
            if progress is not None:
                progress(len(data[at : at + self.piece]))
        return super().put(key, source, deadline=deadline)


class Punctual(MemoryStore):
    """Sends nothing after a deadline, and remembers the last one."""

    deadline: Deadline | None = None

    def put(self, key: str, source: Any, *, deadline: Deadline, progress: Any = None) -> Any:
        self.deadline = deadline
        if deadline.expired:
            raise Unavailable("no time left")
        receipt = super().put(key, source, deadline=deadline)
        if progress is not None:
            progress(receipt.size)
        return receipt


def test_an_upload_makes_way_when_only_the_newer_snapshot_still_fits(scenes: Callable[..., Scene]) -> None:
    store = Parts()
    scene = scenes(store)
    scene.tier._throttle._rate.add(sum(SHARD_BYTES), 10.0)  # ten seconds for a snapshot
    older, newer = scene.sealed(10), scene.sealed(20)

    def notice() -> None:
        scene.tier.drain(standing(15.0))
        scene.tier.submit(newer)

    store.act[2] = notice
    scene.tier.submit(older)
    scene.until(lambda told: ("released", 20) in told)

    assert commits(store) == [20]
    assert scene.until_event(events.GivenUp).step == 10
    assert ("released", 10) in scene.told


def test_an_upload_is_finished_where_both_fit(scenes: Callable[..., Scene]) -> None:
    store = Parts()
    scene = scenes(store)
    scene.tier._throttle._rate.add(sum(SHARD_BYTES), 10.0)
    older, newer = scene.sealed(10), scene.sealed(20)

    def notice() -> None:
        scene.tier.drain(standing(60.0))
        scene.tier.submit(newer)

    store.act[2] = notice
    scene.tier.submit(older)
    scene.until(lambda told: ("released", 20) in told)

    assert commits(store) == [10, 20]


def test_sending_keeps_to_the_limit_until_something_presses(scenes: Callable[..., Scene]) -> None:
    store = Parts()
    scene = scenes(store, limit_bytes_s=1.0)  # an hour and a half for a snapshot
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: store.reported == 1)
    assert scene.tier.bytes_left == sum(SHARD_BYTES) - SHARD_BYTES[0]

    scene.tier.set_urgent(True)
    scene.until(lambda told: ("published", 10) in told)
    measured = scene.tier.bytes_s

    assert measured is not None
    assert measured > 100.0, "the pause is not the store's fault"


def test_a_notice_lifts_the_limit(scenes: Callable[..., Scene]) -> None:
    store = Parts()
    scene = scenes(store, limit_bytes_s=1.0)
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: store.reported == 1)

    scene.tier.drain(standing(60.0))
    scene.until(lambda told: ("published", 10) in told)


def test_saving_and_verifying_leave_the_machine_to_the_training_loop_until_something_presses(
    scenes: Callable[..., Scene], tmp_path: Path
) -> None:
    store = Watched(DirectoryStore(tmp_path, fs=FastFileSystem()))
    scene = scenes(store)
    scene.tier.submit(scene.sealed(10))
    scene.until_event(events.Verified)
    low, store.put_at = store.put_at, []

    scene.tier.set_urgent(True)
    scene.tier.submit(scene.sealed(20))
    scene.until_event(events.Verified, 2)
    urgent, store.put_at = store.put_at, []
    scene.tier.set_urgent(False)
    scene.tier.submit(scene.sealed(30))
    scene.until_event(events.Verified, 3)

    assert set(low) == set(store.put_at) == {LAST}
    assert set(urgent) == {ORDINARY}
    assert store.got_at[0] == store.got_at[-1] == LAST


def test_after_a_notice_saving_is_urgent_for_good(scenes: Callable[..., Scene]) -> None:
    store = Watched(MemoryStore())
    scene = scenes(store)
    scene.tier.drain(standing(HANG_S))
    scene.tier.set_urgent(False)
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: ("released", 10) in told)

    assert set(store.put_at) == {ORDINARY}


def test_closing_while_nothing_is_in_flight_is_quiet_at_once(scenes: Callable[..., Scene]) -> None:
    scene = scenes(MemoryStore())

    assert scene.tier.close(0.0)


def test_closing_tells_whether_something_may_still_be_committed(scenes: Callable[..., Scene]) -> None:
    """The end of a generation must not be recorded before that is over (I5)."""
    gate = Gate(MemoryStore(), "put_if_absent", KEYS.commits)
    scene = scenes(gate)
    scene.tier.submit(scene.sealed(10))
    assert gate.reached.wait(HANG_S)

    assert not scene.tier.close(0.0)

    gate.opened.set()
    assert scene.tier.close(HANG_S)


def test_an_end_may_be_recorded_while_a_payload_hangs_since_nothing_is_committed_after_it(
    scenes: Callable[..., Scene],
) -> None:
    """With a store that takes no bytes no end was ever recorded, and whoever came next waited for a silent journal."""
    gate = Gate(MemoryStore())
    scene = scenes(gate)
    scene.tier.submit(scene.sealed(10))
    assert gate.reached.wait(HANG_S)

    assert scene.tier.close(0.0)

    gate.opened.set()
    scene.tier._thread.join(HANG_S)
    assert not list(gate.store.list(KEYS.commits, deadline=FOREVER))
    assert ("published", 10) not in scene.told


def test_a_store_that_takes_nothing_is_told_once(scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fails for minutes yet: whoever watches saw a run that trains, and a durable step that stands."""
    gate = Gate(MemoryStore())
    scene = scenes(gate)
    scene.tier.submit(scene.sealed(10))
    assert gate.reached.wait(HANG_S)

    monkeypatch.setattr(tier, "SILENT_S", math.inf)
    scene.tier.tell_silence()
    assert not silences(scene), "it has had no time yet"
    monkeypatch.setattr(tier, "SILENT_S", 0.0)
    scene.tier.tell_silence()
    scene.tier.tell_silence()

    assert [(each.tier, each.step) for each in silences(scene)] == [("remote", 10)]
    gate.opened.set()
    scene.until(lambda told: ("published", 10) in told)
    scene.tier.tell_silence()
    assert len(silences(scene)) == 1


def silences(scene: Scene) -> list[events.StoreSilent]:
    return [each for each in scene.told if isinstance(each, events.StoreSilent)]


def test_a_snapshot_that_takes_longer_than_one_call_may_is_published_all_the_same(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 GB to a disk of 125 MB/s, or 10 GB under a limit of 10 MB/s: each attempt was cut off, for ever."""
    monkeypatch.setattr(tier, "CALL_S", 0.0)
    scene = scenes(Punctual())
    scene.tier.submit(scene.sealed(10))

    scene.until(lambda told: ("published", 10) in told)
    assert not [each for each in scene.told if isinstance(each, events.SaveFailed)]


def test_a_limit_leaves_each_attempt_the_time_that_it_takes(scenes: Callable[..., Scene]) -> None:
    store = Punctual()
    scene = scenes(store, limit_bytes_s=1.0)
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: store.deadline is not None)
    assert store.deadline is not None

    assert store.deadline.remaining_s > sum(SHARD_BYTES)


def test_a_notice_makes_an_upload_give_way_to_one_that_waits_already(scenes: Callable[..., Scene]) -> None:
    """The plan had said so, and nobody did it: the winner had been submitted before there was a deadline."""
    store = Parts()
    scene = scenes(store)
    scene.tier._throttle._rate.add(sum(SHARD_BYTES), 10.0)
    older, newer = scene.sealed(10), scene.sealed(20)

    def notice() -> None:
        scene.tier.submit(newer)
        scene.tier.drain(standing(15.0))

    store.act[2] = notice
    scene.tier.submit(older)
    scene.until(lambda told: ("released", 20) in told)

    assert commits(store) == [20]


def test_waiting_for_the_claim_is_not_the_network_s_fault(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, shifted: ShiftedClock
) -> None:
    monkeypatch.setattr(tier, "LONGEST_RETRY_S", HANG_S)
    scene = scenes(MemoryStore(), claimed=False)
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: scene.tier.bytes_left is not None and scene.tier._current is not None)
    shifted.jump(AGES_S)
    scene.generation.claimed.set()
    scene.until(lambda told: ("published", 10) in told)

    assert scene.tier.bytes_s is not None
    assert scene.tier.bytes_s > sum(SHARD_BYTES) / AGES_S


# ---- upkeep ---------------------------------------------------------------------------------------------------------


def test_old_snapshots_are_retired_after_a_newer_one_was_verified(scenes: Callable[..., Scene]) -> None:
    store = MemoryStore()
    scene = scenes(store, keep_last=2)
    for count, step in enumerate((10, 20, 30), 1):
        scene.tier.submit(scene.sealed(step))
        scene.until_event(events.Verified, count)
    scene.until_event(events.Retired)

    assert commits(store) == [20, 30]
    kinds = [type(each) for each in scene.told]
    assert kinds.index(events.Retired) > len(kinds) - 1 - kinds[::-1].index(events.Verified)


def test_a_snapshot_that_is_damaged_when_read_back_is_quarantined_and_retires_nothing(
    scenes: Callable[..., Scene],
) -> None:
    store = ProtocolStore(MemoryStore())
    scene = scenes(store, keep_last=1)
    scene.tier.submit(scene.sealed(10))
    scene.until_event(events.Verified)
    real = store.inner.put_if_absent

    def rot(key: str, data: bytes, **options: Any) -> None:
        real(key, data, **options)
        if key == KEYS.commit(SnapshotId(1, 20)):
            store.damage(
                next(each for each in store.keys(KEYS.snapshots + "00000001-000000000020") if "00.safe" in each), "flip"
            )

    store.inner.put_if_absent = rot  # type: ignore[method-assign]
    scene.tier.submit(scene.sealed(20))
    scene.until_event(events.UpkeepFailed)

    assert scene.until_event(events.Quarantined).snapshot == str(SnapshotId(1, 20))
    assert commits(store) == [10, 20]


def test_what_is_damaged_at_every_read_is_not_condemned_by_who_never_read_anything_right(
    scenes: Callable[..., Scene],
) -> None:
    """Its memory may be bad, and there is a snapshot that others can use."""

    class Bad(Sumless):
        def get(self, key: str, into: memoryview, **options: Any) -> None:
            super().get(key, into, **options)
            into[0] ^= 1

    store = Bad()
    scene = scenes(store, keep_last=1)
    for count, step in enumerate((10, 20), 1):
        scene.tier.submit(scene.sealed(step))
        scene.until_event(events.UpkeepFailed, count)

    assert [event for event in scene.told if isinstance(event, events.Quarantined)] == []
    assert list(store.list(KEYS.quarantine, deadline=FOREVER)) == []
    assert commits(store) == [10, 20]


def test_what_can_be_read_at_last_is_verified(scenes: Callable[..., Scene]) -> None:
    class Flaky(Sumless):
        bad = len(upkeep.AGAIN_S)

        def get(self, key: str, into: memoryview, **options: Any) -> None:
            super().get(key, into, **options)
            if self.bad:
                self.bad -= 1
                into[0] ^= 1

    scene = scenes(Flaky())
    scene.tier.submit(scene.sealed(10))
    scene.until_event(events.Verified)
    assert [event for event in scene.told if isinstance(event, events.UpkeepFailed)] == []


class Stalled(Gate):
    """A store that answers nothing to the upkeep until a test opens it."""

    def _wait(self, call: Callable[..., Any], key: str, *args: Any, **options: Any) -> Any:
        is_upkeep = threading.current_thread().name.startswith("harness-upkeep")
        return super()._wait(call, key, *args, **options) if is_upkeep else call(key, *args, **options)


def test_under_a_deadline_a_snapshot_does_not_wait_for_upkeep_that_gets_no_answer(scenes: Callable[..., Scene]) -> None:
    """The store had gone silent in the middle of reading the snapshot before back: 15 s of a notice's 120."""
    store = Stalled(MemoryStore(), "stat", KEYS.snapshots)
    scene = scenes(store, keep_last=1)
    scene.tier.submit(scene.sealed(10))
    assert store.reached.wait(HANG_S)

    scene.tier.drain(standing(60.0))
    scene.tier.submit(scene.sealed(20))
    scene.until(lambda told: ("published", 20) in told)

    assert not store.opened.is_set()
    assert scene.tier.idle
    store.opened.set()
    scene.tier.submit(scene.sealed(30))
    scene.until(lambda told: ("released", 30) in told)
    assert [event for event in scene.told if isinstance(event, events.UpkeepFailed)] == []
    assert commits(store) == [10, 20, 30], "its answer came too late: nothing is deleted under a deadline"


# ---- upkeep that is never starved, and what it may delete -----------------------------------------------------------


class Behind:
    """A store so slow that the next snapshot always waits already when one has been saved."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.next: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def put_if_absent(self, key: str, data: bytes, **options: Any) -> None:
        self.store.put_if_absent(key, data, **options)
        if key.startswith(KEYS.commits):
            self.next()


def test_upkeep_gets_its_turn_while_the_next_snapshot_always_waits(scenes: Callable[..., Scene]) -> None:
    """Nothing was verified, retired or swept as long as saving took longer than the interval: bytes without bound."""
    store, most = Behind(MemoryStore()), list[int]()
    scene = scenes(store, keep_last=2)
    steps = iter(range(20, 210, 10))

    def submit() -> None:
        most.append(len(commits(store)))
        if (step := next(steps, None)) is not None:
            scene.tier.submit(scene.sealed(step))

    store.next = submit
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: ("released", 200) in told)

    assert max(most) <= 2 + 2, "what is kept, and what was saved since it was looked after"
    assert sum(isinstance(each, events.Behind) for each in scene.told) == 1, "it is said once"
    assert sum(isinstance(each, events.Verified) for each in scene.told) >= 9


def test_that_snapshots_come_too_fast_is_said_again_once_it_had_been_over(scenes: Callable[..., Scene]) -> None:
    store = Behind(MemoryStore())
    scene = scenes(store)

    def behind(first: int) -> None:
        steps = iter((first + 1, first + 2))

        def submit() -> None:
            if (step := next(steps, None)) is not None:
                scene.tier.submit(scene.sealed(step))

        store.next = submit
        scene.tier.submit(scene.sealed(first))
        scene.until(lambda told: ("released", first + 2) in told and scene.tier.idle)

    behind(10)
    scene.until(lambda told: any(event.snapshot.endswith("12") for event in told if isinstance(event, events.Verified)))
    behind(20)

    assert sum(isinstance(each, events.Behind) for each in scene.told) == 2


CONTENT_BYTES = sum(SHARD_BYTES)


class Room(MemoryStore):
    """A disk of so many bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def used(self) -> int:
        listed = self.list(KEYS.snapshots, deadline=FOREVER)
        return sum(info.size for info in listed if not info.key.endswith(".json"))

    def free_bytes(self) -> int | None:
        return self.size - self.used()

    def put(self, key: str, source: Any, **options: Any) -> Any:
        if len(source) > self.size - self.used():
            raise Full("no space left")
        return super().put(key, source, **options)


def publish(store: ObjectStore, *steps: int, run_id: str = RUN_ID, sealed_at: str | None = None) -> None:
    for step in steps:
        staged = Content(SnapshotId(1, step), run_id).staged()
        if sealed_at is not None:
            staged = altered(staged, sealed_at=sealed_at)
        commit.publish(store, KEYS, staged, "remote", FOREVER, lambda event: None)


def test_a_full_disk_of_snapshots_that_nobody_has_looked_at_is_looked_at(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five good ones, none of which might be deleted, since none had been read back; no save succeeded any more."""
    monkeypatch.setattr(upkeep, "SPARE_BYTES", 0)
    store = Room(5 * CONTENT_BYTES + 3000)
    publish(store, 1, 2, 3, 4, 5)
    scene = scenes(store, keep_last=2)
    scene.tier.submit(scene.sealed(10))
    scene.until_event(events.Verified, 2)

    assert commits(store)[-2:] == [5, 10]
    assert [event for event in scene.told if isinstance(event, events.SaveFailed)] == []


def test_a_full_disk_whose_newest_snapshot_is_damaged_makes_room_below_the_next(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SPARE_BYTES", 0)
    inner = Room(5 * CONTENT_BYTES + 3000)
    store = ProtocolStore(inner)
    store.free_bytes = inner.free_bytes  # type: ignore[method-assign]
    publish(store, 1, 2, 3, 4, 5)
    store.damage(next(key for key in store.keys(KEYS.snapshots + "00000001-000000000005") if "00.safe" in key), "flip")
    scene = scenes(store, keep_last=2)
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: ("released", 10) in told)

    assert commits(store)[:3] == [4, 5, 10], "4 was read back"
    assert store.keys(KEYS.quarantine) == [KEYS.quarantined(SnapshotId(1, 5))], "the store's own sum differs"


def test_room_is_asked_for_the_bytes_that_will_be_written(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is mostly frozen, a few bytes are written and the others are a second name of a file."""
    monkeypatch.setattr(upkeep, "SPARE_BYTES", 0)

    class Links(Room):
        def used(self) -> int:
            return super().used() - self.linked

        linked = 0

        def copy(self, source: str, key: str, *args: Any, **options: Any) -> None:
            super().copy(source, key, *args, **options)
            self.linked += self.stat(key, deadline=FOREVER).size

    store = Links(CONTENT_BYTES + 2 * SHARD_BYTES[1])
    scene = scenes(store)
    for step in (10, 20, 30):
        scene.tier.submit(scene.sealed(step, frozen=True))
        scene.until(lambda told, step=step: ("released", step) in told)

    assert commits(store) == [10, 20, 30], "the second half of the disk took two of them"
    assert [event for event in scene.told if isinstance(event, events.SaveFailed)] == []


OTHER = "f" * 32


@pytest.mark.parametrize("fresh", [False, True])
def test_another_run_of_this_name_is_retired_on_the_user_s_word(scenes: Callable[..., Scene], fresh: bool) -> None:
    """A list that was empty for a moment made a new run of it, which deleted the weeks of the old one."""
    store = MemoryStore()
    publish(store, 1, 2, run_id=OTHER, sealed_at=records.utc_now())
    scene = scenes(store, keep_last=1, fresh=fresh)
    for count, step in enumerate((10, 20), 1):
        scene.tier.submit(scene.sealed(step))
        scene.until_event(events.Verified, count)
    scene.until(lambda told: len(commits(store)) == (1 if fresh else 3))

    assert commits(store) == ([20] if fresh else [1, 2, 20])


@pytest.mark.parametrize(("age_s", "goes"), [(upkeep.GRACE_S - 3600, False), (upkeep.GRACE_S + 3600, True)])
def test_another_run_of_this_name_is_retired_after_days(scenes: Callable[..., Scene], age_s: float, goes: bool) -> None:
    store = MemoryStore()
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age_s)
    publish(store, 1, run_id=OTHER, sealed_at=then.isoformat())
    publish(store, 2)
    scene = scenes(store, keep_last=1)
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: 2 not in commits(store))
    scene.until(lambda told: sum(isinstance(each, events.Retired) for each in told) == 1 + goes)

    assert commits(store) == ([10] if goes else [1, 10])


def publish_unreadable(tmp_path: Path, *, claimed_by: str | None) -> DirectoryStore:
    """Snapshots 1 and 2 of an earlier agent; a bad block under the manifest of the first."""
    disk = BadBlocks()
    store = DirectoryStore(tmp_path, fs=disk)
    if claimed_by is not None:
        claim = Claim(format=FORMAT, run_id=claimed_by, generation=1, nonce="a" * 16, claimed_at="", host="here", pid=1,
                      fresh=False, parent=None, command=(), named=True)  # fmt: skip
        commit.claim(store, KEYS, claim, FOREVER)
    publish(store, 1, 2)
    path = store.local_path(KEYS.commit(SnapshotId(1, 1)))
    assert path is not None
    disk.spoil(path)
    return store


@pytest.mark.parametrize(("claimed_by", "goes"), [(RUN_ID, True), (OTHER, False), (None, False)])
def test_a_manifest_on_a_bad_block_keeps_nothing_else_from_being_retired(
    scenes: Callable[..., Scene], tmp_path: Path, claimed_by: str | None, goes: bool
) -> None:
    """Every upkeep ended at it, and the store grew without bound. Whose it is the claim of its generation says."""
    store = publish_unreadable(tmp_path, claimed_by=claimed_by)
    scene = scenes(store, keep_last=1)
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: sum(isinstance(each, events.Retired) for each in told) == 1 + goes)

    assert commits(store) == ([10] if goes else [1, 10])
    assert [event for event in scene.told if isinstance(event, events.UpkeepFailed)] == []


def test_an_unreadable_copy_in_the_local_tier_goes(scenes: Callable[..., Scene], tmp_path: Path) -> None:
    store = publish_unreadable(tmp_path, claimed_by=None)
    scene = scenes(store, "local", keep_last=1)
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: commits(store) == [10])


@pytest.mark.parametrize(("name", "option"), [("local", "--keep-local"), ("remote", "--keep-last")])
def test_a_tier_without_room_names_its_own_option(scenes: Callable[..., Scene], name: str, option: str) -> None:
    scene = scenes(Room(10), name)
    scene.tier.submit(scene.sealed(10))

    assert scene.until_event(events.SaveFailed).reason.endswith(f"({option})")


@pytest.mark.parametrize("fresh", [False, True])
def test_a_newer_version_s_snapshot_is_never_retired(scenes: Callable[..., Scene], fresh: bool) -> None:
    store = MemoryStore()
    publish(store, 1, 2)
    key = KEYS.commit(SnapshotId(1, 1))
    text = store.read(key, limit_bytes=1 << 20, deadline=FOREVER).replace(b'"format":1', b'"format":2')
    store.put(key, memoryview(text), deadline=FOREVER)
    scene = scenes(store, keep_last=1, fresh=fresh)
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: 2 not in commits(store))

    assert commits(store) == [1, 10]


def test_what_an_earlier_life_left_is_swept_though_the_first_save_of_this_one_fails(
    scenes: Callable[..., Scene],
) -> None:
    """A sweep before anything is verified may delete nothing; it is not the one of this life."""
    inner = MemoryStore()
    left = KEYS.payload(KEYS.directory(SnapshotId(1, 1), "b" * 16), "rank-00000-of-00001.00.safetensors")
    inner.put(left, memoryview(b"left"), deadline=FOREVER)
    store = RecordingStore(FaultyStore(inner, "put"))
    scene = scenes(store, "local")
    scene.tier.submit(scene.sealed(10))
    scene.until_event(events.SaveFailed)
    scene.until(lambda told: KEYS.generations in store.keys("list"))  # upkeep has begun, and goes to its end
    for count, step in enumerate((20, 30), 1):
        scene.tier.submit(scene.sealed(step))
        scene.until_event(events.Verified, count)
    scene.until(lambda told: left not in [info.key for info in inner.list(KEYS.snapshots, deadline=FOREVER)])


# ---- from the local tier --------------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "local", fs=FastFileSystem())


def local_job(local: DirectoryStore, scene: Scene) -> tuple[LocalSnapshot, Manifest]:
    staged = Content(SnapshotId(1, 10)).staged()
    manifest = commit.publish(local, KEYS, staged, "local", FOREVER, lambda event: None)
    return LocalSnapshot(local, KEYS, manifest, scene.generation, 0.0), manifest


def test_a_local_snapshot_arrives_as_it_was(scenes: Callable[..., Scene], local: DirectoryStore) -> None:
    store = ProtocolStore(MemoryStore())
    scene = scenes(store)
    job, _ = local_job(local, scene)
    scene.tier.submit(job)
    scene.until(lambda told: ("published", 10) in told)

    manifest = records.read_manifest(store, KEYS, SnapshotId(1, 10), FOREVER)
    content = Content(SnapshotId(1, 10))
    assert [store.peek(KEYS.payload(manifest.directory, s.name)) for s in manifest.parts[0].shards] == content.shards
    assert manifest.directory == job.manifest.directory  # so that a successor finds what was sent


def test_a_local_snapshot_gets_the_number_that_its_generation_got(
    scenes: Callable[..., Scene], local: DirectoryStore
) -> None:
    """It was made under a number that somebody else claimed first, while the store did not answer."""
    store = MemoryStore()
    scene = scenes(store)
    job, _ = local_job(local, scene)
    scene.generation.number = 4
    scene.tier.submit(job)

    assert scene.until_event(events.Published).snapshot == str(SnapshotId(4, 10))


def test_a_local_snapshot_of_an_earlier_generation_keeps_its_name(
    scenes: Callable[..., Scene], local: DirectoryStore
) -> None:
    store = MemoryStore()
    scene = scenes(store)
    job, _ = local_job(local, scene)
    scene.generation.number = 4
    scene.tier.submit(dataclasses.replace(job, behind=True))

    assert scene.until_event(events.Published).snapshot == str(SnapshotId(1, 10))


@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
def test_a_local_snapshot_that_has_rotted_is_never_made_durable(
    scenes: Callable[..., Scene], local: DirectoryStore, how: str
) -> None:
    """Its digest would be computed from the rotten bytes, and everybody would call it verified (I3)."""
    store = MemoryStore()
    scene = scenes(store)
    job, manifest = local_job(local, scene)
    ProtocolStore(local).damage(KEYS.payload(manifest.directory, manifest.parts[0].shards[1].name), how)
    scene.tier.submit(job)
    scene.until(lambda told: ("released", 10) in told or any(isinstance(each, events.SaveFailed) for each in told))

    assert commits(store) == []


def test_a_bug_is_told_and_not_swallowed(scenes: Callable[..., Scene]) -> None:
    class Broken(MemoryStore):
        def put(self, *args: Any, **options: Any) -> Any:
            raise KeyError("bug")

    scene = scenes(Broken())
    scene.tier.submit(scene.sealed(10))
    scene.until(lambda told: ("fatal", "KeyError('bug')") in told)


# ---- what has not changed -------------------------------------------------------------------------------------------


def stored_how(scene: Scene) -> list[str]:
    return [event.how for event in scene.told if isinstance(event, events.ShardStored)]


def test_what_has_not_changed_is_copied_from_the_second_snapshot_on(scenes: Callable[..., Scene]) -> None:
    scene = scenes(MemoryStore())
    for count, step in enumerate((10, 20, 30), 1):
        scene.tier.submit(scene.sealed(step, frozen=True))
        published = scene.until_event(events.Published, count)
        assert published.copied == (0 if count == 1 else SHARD_BYTES[0])
        scene.until(lambda told, step=step: ("released", step) in told)

    assert stored_how(scene) == ["sent", "sent", "copied", "sent", "copied", "sent"]
    assert scene.tier.copied.bytes == SHARD_BYTES[0]


def test_looking_for_what_has_not_changed_leaves_the_cpu_to_the_training_until_it_is_urgent(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a frozen model that is a pass over nearly all of it, with every snapshot."""
    looked_at: list[tuple[int, int]] = []

    def watched(data: Any, previous: int = 0) -> int:
        looked_at.append(priority())
        return crc64nvme(data, previous)

    monkeypatch.setattr(dedup, "crc64nvme", watched)
    scene = scenes(MemoryStore())
    for step in (10, 20):
        scene.tier.submit(scene.sealed(step, frozen=True))
        scene.until(lambda told, step=step: ("released", step) in told)
    assert set(looked_at) == {LAST}

    looked_at.clear()
    scene.tier.set_urgent(True)
    scene.tier.submit(scene.sealed(30, frozen=True))
    scene.until(lambda told: ("released", 30) in told)
    assert set(looked_at) == {ORDINARY}


def test_another_life_copies_from_what_an_earlier_one_has_sent(scenes: Callable[..., Scene]) -> None:
    store = MemoryStore()
    first = scenes(store)
    first.tier.submit(first.sealed(10, frozen=True))
    first.until_event(events.Published)
    first.close()

    second = scenes(store)
    second.tier.submit(second.sealed(20, frozen=True))
    second.until_event(events.Published)

    assert stored_how(second) == ["copied", "sent"]


def test_what_was_found_damaged_is_not_copied_from(scenes: Callable[..., Scene]) -> None:
    class Rots(MemoryStore):
        def stat(self, key: str, **options: Any) -> Any:
            found = super().stat(key, **options)
            rotten = key.endswith(".00.safetensors") and "-000000000010-" in key
            return dataclasses.replace(found, crc64nvme=0) if rotten else found

    scene = scenes(Rots())
    scene.tier.submit(scene.sealed(10, frozen=True))
    scene.until_event(events.Quarantined)
    scene.tier.submit(scene.sealed(20, frozen=True))
    scene.until_event(events.Published, 2)

    assert stored_how(scene) == ["sent"] * 4


class Rotting:
    """A directory store whose files share blocks; a bit of them may flip, and its room may shrink."""

    def __init__(self, root: Path) -> None:
        self.store, self.free = DirectoryStore(root, fs=FastFileSystem()), 1 << 40
        self.doomed = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def free_bytes(self) -> int | None:
        return self.free

    def put_if_absent(self, key: str, data: bytes, **options: Any) -> None:
        self.store.put_if_absent(key, data, **options)
        if key == self.doomed:
            (shard,) = [info.key for info in self.store.list(KEYS.snapshots, deadline=FOREVER) if self._rots(info.key)]
            path = self.store.local_path(shard)
            assert path is not None
            with path.open("r+b") as file:
                file.write(bytes([file.read(1)[0] ^ 1]))

    def _rots(self, key: str) -> bool:
        return f"/{KEYS.parse_commit(self.doomed)}-" in key and ".00." in key


def publish_and_rot(scene: Scene, store: Rotting) -> None:
    """Snapshot 5 has bytes of its own; 10 and 20 share a shard, which rots between their commits' verifications."""
    for count, (step, frozen) in enumerate(((5, False), (10, True)), 1):
        scene.tier.submit(scene.sealed(step, frozen=frozen))
        scene.until_event(events.Verified, count)
    store.doomed = KEYS.commit(SnapshotId(1, 20))
    scene.tier.submit(scene.sealed(20, frozen=True))
    assert scene.until_event(events.Quarantined).snapshot == str(SnapshotId(1, 20))
    scene.until_event(events.UpkeepFailed)


def test_what_shares_bytes_with_something_damaged_is_no_base_of_another_life(
    scenes: Callable[..., Scene], tmp_path: Path
) -> None:
    """It was promised to be durable, and was a second name of a file that was known to be rotten."""
    store = Rotting(tmp_path)
    first = scenes(store)
    publish_and_rot(first, store)
    first.close()

    second = scenes(store)
    second.tier.submit(second.sealed(30, frozen=True))

    assert second.until_event(events.Verified).snapshot == str(SnapshotId(1, 30))
    assert stored_how(second) == ["sent", "sent"]


def test_what_somebody_else_found_damaged_is_no_base(scenes: Callable[..., Scene]) -> None:
    """A resume in place reads the tier in a thread of its own, and so may another agent."""
    store = MemoryStore()
    scene = scenes(store)
    scene.tier.submit(scene.sealed(10, frozen=True))
    scene.until_event(events.Verified)
    commit.quarantine(store, KEYS, SnapshotId(1, 10), "rotten", "there", FOREVER)

    scene.tier.submit(scene.sealed(20, frozen=True))
    scene.until_event(events.Verified, 2)

    assert stored_how(scene) == ["sent"] * 4
    assert scene.tier.copied.bytes == 0


def test_what_cannot_be_read_back_is_no_base(scenes: Callable[..., Scene], tmp_path: Path) -> None:
    """A bad block says EIO, which proves nothing: but every later snapshot had a second name of it, for ever."""
    inner, bad = DirectoryStore(tmp_path, fs=FastFileSystem()), set[int]()

    class Unreadable:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def get(self, key: str, into: memoryview, **options: Any) -> None:
            path = inner.local_path(key)
            assert path is not None
            if path.stat().st_ino in bad:
                raise Unavailable("Input/output error")
            inner.get(key, into, **options)

    scene = scenes(Unreadable())
    scene.tier.submit(scene.sealed(10, frozen=True))
    scene.until_event(events.Verified)
    bad.update(path.stat().st_ino for path in tmp_path.rglob("*.00.safetensors"))
    scene.tier.submit(scene.sealed(20, frozen=True))
    scene.until_event(events.UpkeepFailed)
    scene.tier.submit(scene.sealed(30, frozen=True))

    assert scene.until_event(events.Verified, 2).snapshot == str(SnapshotId(1, 30))
    assert stored_how(scene) == ["sent", "sent", "copied", "sent", "sent", "sent"]


def test_an_outage_while_snapshots_are_read_back_ends_no_copies(scenes: Callable[..., Scene]) -> None:
    """A store that keeps sums compares them with every copy: no reason to send a whole model again."""

    class Away(MemoryStore):
        def stat(self, key: str, **options: Any) -> Any:
            if threading.current_thread().name.startswith("harness-upkeep"):
                raise Unavailable("no answer")
            return super().stat(key, **options)

    scene = scenes(Away())
    for count, step in enumerate((10, 20), 1):
        scene.tier.submit(scene.sealed(step, frozen=True))
        scene.until_event(events.UpkeepFailed, count)

    assert stored_how(scene) == ["sent", "sent", "copied", "sent"]


def test_for_what_shares_bytes_with_something_damaged_nothing_is_deleted(
    scenes: Callable[..., Scene], tmp_path: Path
) -> None:
    """10 had been verified, before it rotted: 5 made way for it, and nothing was left that could be used."""
    store = Rotting(tmp_path)
    scene = scenes(store, "local", keep_last=9)
    publish_and_rot(scene, store)

    store.free = 0
    for count, step in enumerate((30, 40), 1):
        scene.tier.submit(scene.sealed(step, frozen=True))
        scene.until_event(events.SaveFailed, count)
        assert commits(store) == [5, 10, 20]
    store.free = 1 << 40
    scene.tier.submit(scene.sealed(50, frozen=True))
    scene.until(lambda told: verified(told)[-1] == 50)


def verified(told: list[Any]) -> list[int]:
    return [SnapshotId.parse(each.snapshot).step for each in told if isinstance(each, events.Verified)]


def test_a_store_that_cannot_list_is_sent_everything(scenes: Callable[..., Scene]) -> None:
    scene = scenes(FaultyStore(MemoryStore(), "list", fail_on=None))
    scene.tier.submit(scene.sealed(10, frozen=True))
    scene.until(lambda told: ("published", 10) in told)
    scene.tier.submit(scene.sealed(20, frozen=True))
    scene.until(lambda told: ("published", 20) in told)

    assert stored_how(scene) == ["sent", "sent", "copied", "sent"]


def test_the_time_that_copies_take_is_no_slowness_of_the_network(
    scenes: Callable[..., Scene], shifted: ShiftedClock
) -> None:
    class Slow(MemoryStore):
        def copy(self, *args: Any, **options: Any) -> None:
            shifted.jump(AGES_S)
            super().copy(*args, **options)

    scene = scenes(Slow())
    for step in (10, 20):
        scene.tier.submit(scene.sealed(step, frozen=True))
        scene.until(lambda told, step=step: ("published", step) in told)

    assert scene.tier.copied.seconds >= AGES_S
    assert scene.tier.bytes_s is not None
    assert scene.tier.bytes_s > SHARD_BYTES[1] / AGES_S


@pytest.mark.parametrize(("bytes_s", "how"), [(1, "copied"), (10**9, "sent")])
def test_with_a_deadline_the_store_copies_only_where_that_is_no_slower_than_sending(
    scenes: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, shifted: ShiftedClock, bytes_s: int, how: str
) -> None:
    class Slow(MemoryStore):
        def copy(self, *args: Any, **options: Any) -> None:
            shifted.jump(0.05)
            super().copy(*args, **options)

    scene = scenes(Slow())
    for step in (10, 20):
        scene.tier.submit(scene.sealed(step, frozen=True))
        scene.until(lambda told, step=step: ("released", step) in told)
    monkeypatch.setattr(scene.tier._throttle, "_rate", Rate())
    scene.tier._throttle._rate.add(bytes_s, 1.0)
    scene.tier.drain(standing(60.0))
    scene.tier.submit(scene.sealed(30, frozen=True))
    scene.until(lambda told: ("released", 30) in told)

    assert stored_how(scene) == ["sent", "sent", "copied", "sent", how, "sent"]


def test_with_a_deadline_the_second_snapshot_of_a_run_copies_from_the_first(scenes: Callable[..., Scene]) -> None:
    scene = scenes(MemoryStore())
    scene.tier.submit(scene.sealed(10, frozen=True))
    scene.until(lambda told: ("released", 10) in told)
    scene.tier.drain(standing(60.0))
    scene.tier.submit(scene.sealed(20, frozen=True))
    scene.until(lambda told: ("released", 20) in told)

    assert stored_how(scene) == ["sent", "sent", "copied", "sent"]


def test_what_an_earlier_attempt_copied_took_its_time_all_the_same(
    scenes: Callable[..., Scene], shifted: ShiftedClock
) -> None:
    """A plan that counts the bytes and forgets the seconds promises what nobody can keep."""

    class Slow(MemoryStore):
        def copy(self, *args: Any, **options: Any) -> None:
            shifted.jump(AGES_S)
            super().copy(*args, **options)

    scene = scenes(FaultyStore(Slow(), "put", fail_on=3))  # the first of the second snapshot
    for step in (10, 20):
        scene.tier.submit(scene.sealed(step, frozen=True))
        scene.until(lambda told, step=step: ("published", step) in told)

    assert stored_how(scene) == ["sent", "sent", "copied", "kept", "sent"]
    assert scene.tier.copied.bytes == SHARD_BYTES[0]
    assert scene.tier.copied.seconds >= AGES_S
    assert scene.tier.bytes_s is not None
    assert scene.tier.bytes_s > 0


def test_what_is_copied_does_not_count_as_left_to_send(scenes: Callable[..., Scene]) -> None:
    gate = Gate(MemoryStore())
    gate.opened.set()
    scene = scenes(gate)
    scene.tier.submit(scene.sealed(10, frozen=True))
    scene.until(lambda told: ("released", 10) in told)
    gate.opened.clear()
    gate.reached.clear()

    scene.tier.submit(scene.sealed(20, frozen=True))
    assert gate.reached.wait(HANG_S)

    assert scene.tier.bytes_left == SHARD_BYTES[1]
    gate.opened.set()
