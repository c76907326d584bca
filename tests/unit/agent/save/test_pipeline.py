"""SavePipeline: which tier takes which slot, and which slot nobody may take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from cloud.errors import SourceUnreadable, Unavailable
from cloud.testing.memory import MemoryStore
from harness.agent.generation import Generation
from harness.agent.resume_point import ResumePoint
from harness.agent.save.jobs import LocalSnapshot, MemorySnapshot
from harness.agent.save.pipeline import SavePipeline, Steps
from harness.agent.save.slot_pool import TRAINER
from harness.agent.save.snapshot_set import Dropped
from harness.config.settings import Settings
from harness.core.snapshot import SnapshotId
from harness.ipc.slots import Slot
from harness.snapshots.open import open_store
from tests.support.clock import standing
from tests.support.context import Posts, a_context
from tests.support.patience import HANG_S
from tests.support.protocol import RUN_ID, SHARD_BYTES, SLOT_BYTES, Content
from tests.support.slots import a_slot, fetched

UNREADABLE = SourceUnreadable("cannot read the source: Input/output error")


class Scene:
    """One slot, a local tier and a remote one, whose threads run only when they are started."""

    def __init__(self, directory: Path) -> None:
        settings = Settings(store=str(directory / "store"), run="run", local=str(directory / "local"))
        self.posts, self.steps = Posts(), Steps()
        self.pipeline = SavePipeline(a_context(settings, self.posts), open_store, self.note)
        self.generation = Generation(1, RUN_ID, "a" * 16)
        self.generation.claimed.set()
        self.index = self.pipeline.pool.add(Slot.create(SLOT_BYTES))

    def note(self, steps: Steps) -> None:
        self.steps = steps

    def seal(self, step: int, sequence: int) -> None:
        """What a trainer does, and the agent on hearing of it."""
        Content(SnapshotId(1, step)).seal(self.pipeline.pool[self.index], sequence)
        self.pipeline.take(self.index, self.generation)

    def commit_locally(self, step: int) -> LocalSnapshot:
        """Seal `step` where it is not the remote tier's turn; its file in the local tier."""
        assert self.pipeline.local is not None
        self.pipeline.steps = Steps(durable=1)  # so that the local commit alone uploads nothing
        self.pipeline._upload_started_at = float("inf")
        self.seal(step, 1)
        self.pipeline.local.start()
        self.until(lambda: self.steps.local == step)
        file = self.pipeline._newest_local
        assert file is not None
        return file

    def until(self, condition: Callable[[], bool]) -> None:
        """Run what the tiers post."""
        while not condition():
            self.posts.run_one(HANG_S)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.pipeline.close(5.0)
    made.pipeline.close_stores()


def test_a_granted_slot_is_never_read_and_its_file_is_uploaded_instead(scene: Scene) -> None:
    """The trainer may overwrite it at any moment: a torn snapshot would be committed under digests that agree (I8)."""
    scene.commit_locally(10)
    scene.until(lambda: scene.pipeline.pool.grant() == scene.index)

    scene.pipeline.pool.hold(scene.index, TRAINER)
    scene.pipeline.save_newest_now()

    assert [type(job) for job in scene.pipeline.remote.jobs] == [LocalSnapshot]


def test_a_slot_that_is_not_granted_goes_to_the_store_straight(scene: Scene) -> None:
    scene.seal(10, 1)

    scene.pipeline.save_newest_now()

    assert [type(job) for job in scene.pipeline.remote.jobs] == [MemorySnapshot]


def test_while_a_newer_snapshot_is_awaited_the_newest_is_sent_if_that_leaves_it_a_slot(scene: Scene) -> None:
    scene.seal(10, 1)
    assert len(scene.pipeline.pool) == 1

    scene.pipeline.save_newest_meanwhile()
    assert scene.pipeline.remote.jobs == [], "the newer one would wait for the slot until it was sent"

    scene.pipeline.pool.allocate(scene.pipeline.pool[scene.index].size, 1)
    scene.pipeline.pool.add(a_slot(Content(SnapshotId(1, 1))))
    scene.pipeline.save_newest_meanwhile()
    scene.pipeline.save_newest_meanwhile()
    assert [job.step for job in scene.pipeline.remote.jobs] == [10]


def test_its_file_is_sent_meanwhile_and_the_slot_stays_free(scene: Scene) -> None:
    scene.commit_locally(10)
    scene.until(lambda: scene.pipeline.pool.grant() == scene.index)

    scene.pipeline.save_newest_meanwhile()

    assert [type(job) for job in scene.pipeline.remote.jobs] == [LocalSnapshot]
    assert scene.pipeline.pool.grant() == scene.index


def test_what_is_committed_is_not_sent_again_before_that_is_heard_of(scene: Scene) -> None:
    """The tier's thread is through, its news is on the way, and the program ends: it was uploaded twice."""
    scene.pipeline.set_urgent(True)
    scene.seal(10, 1)
    scene.pipeline.remote.start()
    while not scene.pipeline.remote.idle:
        threading.Event().wait(0.001)

    scene.pipeline.save_newest_now()

    assert scene.pipeline.remote.jobs == []
    scene.until(lambda: scene.steps.durable == 10)
    scene.pipeline.save_newest_now()
    assert scene.pipeline.remote.jobs == []


class Down(MemoryStore):
    def put(self, *arguments: object, **options: object) -> NoReturn:
        raise Unavailable("the store is down")


def test_a_store_that_is_down_does_not_keep_the_slot_from_the_next_local_snapshot(scene: Scene) -> None:
    assert scene.pipeline.local is not None
    scene.pipeline.remote.store = Down()
    scene.pipeline.set_urgent(True)  # as after a rebalance recommendation: to both tiers at once
    scene.seal(10, 1)
    scene.pipeline.local.start()
    scene.until(lambda: scene.steps.local == 10)

    scene.pipeline.remote.start()

    scene.until(lambda: scene.pipeline.pool.grant() == scene.index)
    assert [type(job) for job in scene.pipeline.remote.jobs] == [LocalSnapshot]
    scene.seal(20, 2)
    scene.until(lambda: scene.steps.local == 20)
    assert MemorySnapshot not in [type(job) for job in scene.pipeline.remote.jobs]


def test_with_a_deadline_the_slot_is_sent_again_and_not_its_file(scene: Scene) -> None:
    """What was sent of it before the failure counts, and no other snapshot comes."""
    assert scene.pipeline.local is not None
    scene.pipeline.remote.store = Down()
    scene.pipeline.set_urgent(True)
    scene.seal(10, 1)
    scene.pipeline.local.start()
    scene.until(lambda: scene.steps.local == 10)

    scene.pipeline.drain(standing(60.0))
    scene.pipeline._on_failed(scene.pipeline.remote, scene.pipeline.remote.jobs[0], Unavailable("down"))

    assert [type(job) for job in scene.pipeline.remote.jobs] == [MemorySnapshot]


def test_a_file_that_cannot_be_read_back_is_sent_from_memory_instead(scene: Scene) -> None:
    """A bad block below the local tier, in the notice: the store was tried with it until the time was over."""
    file = scene.commit_locally(10)
    scene.pipeline._submit(scene.pipeline.remote, file)

    scene.pipeline._on_failed(scene.pipeline.remote, file, UNREADABLE)

    assert [type(job) for job in scene.pipeline.remote.jobs] == [MemorySnapshot]


def test_pressing_gives_what_memory_has_where_its_file_is_tried_in_vain(scene: Scene) -> None:
    file = scene.commit_locally(10)
    scene.pipeline.pool.hold(scene.index, TRAINER)  # it may overwrite the slot: the file is all that there is
    scene.pipeline._submit(scene.pipeline.remote, file)
    scene.pipeline._on_failed(scene.pipeline.remote, file, UNREADABLE)
    assert [type(job) for job in scene.pipeline.remote.jobs] == [LocalSnapshot]
    scene.pipeline.pool.release(scene.index, TRAINER)

    scene.pipeline.save_newest_now()

    assert [type(job) for job in scene.pipeline.remote.jobs] == [MemorySnapshot]


def test_behind_a_file_that_could_not_be_read_snapshots_go_from_memory_in_their_turn(scene: Scene) -> None:
    """With one slot the trainer had it back before its file was tried: nothing became durable until the run ended."""
    file = scene.commit_locally(10)
    scene.pipeline.pool.hold(scene.index, TRAINER)
    scene.pipeline._submit(scene.pipeline.remote, file)
    scene.pipeline._on_failed(scene.pipeline.remote, file, UNREADABLE)
    scene.pipeline.pool.release(scene.index, TRAINER)

    scene.seal(20, 2)
    assert [type(job) for job in scene.pipeline.remote.jobs] == [LocalSnapshot], "not its turn"
    scene.pipeline._upload_started_at = float("-inf")
    scene.seal(30, 3)

    assert [(type(job), job.step) for job in scene.pipeline.remote.jobs] == [(MemorySnapshot, 30)]
    assert scene.pipeline._upload_started_at > 0, "and the next one has to wait"


def test_a_file_that_was_uploaded_after_all_is_trusted_again(scene: Scene) -> None:
    file = scene.commit_locally(10)
    scene.pipeline._submit(scene.pipeline.remote, file)
    scene.pipeline._on_failed(scene.pipeline.remote, file, UNREADABLE)
    scene.pipeline._on_published(scene.pipeline.remote, file, file.manifest)
    scene.pipeline._on_released(scene.pipeline.remote, file)
    scene.pipeline._upload_started_at = float("-inf")

    scene.seal(20, 2)

    assert 20 not in [job.step for job in scene.pipeline.remote.jobs], "its file's turn"


@pytest.mark.parametrize("claimed", [False, True])
def test_a_slot_of_an_agent_that_never_claimed_is_the_heirs_own(scene: Scene, claimed: bool) -> None:
    """Nobody would ever have claimed it: the upload of what was resumed waited for that, for ever."""
    dead, heir = Generation(1, RUN_ID, "b" * 16), Generation(2, RUN_ID, "c" * 16)
    if claimed:
        dead.claimed.set()
    scene.pipeline.adopt(7, a_slot(Content(SnapshotId(1, 10))), Generation.of(dead.info), ends=True)
    (copy,) = scene.pipeline.memory_copies(RUN_ID)

    point = ResumePoint(copy.id, "memory", (copy.slots[0].slot,), copy.records, (7,), verified=True)
    scene.pipeline.note_resumed(point, heir)

    assert scene.pipeline._made_by[7].number == (1 if claimed else 2)


def test_a_seal_is_taken_once(scene: Scene) -> None:
    scene.seal(10, 1)
    scene.pipeline.save_newest_now()
    scene.pipeline.take(scene.index, scene.generation)

    assert not scene.pipeline.take_left_over(scene.generation)
    assert scene.pipeline.sequence(0) == 1


@pytest.mark.parametrize(("step", "durable"), [(100, 100), (200, 200)])
def test_what_is_durable_is_counted_from_the_resume_point_on(scene: Scene, step: int, durable: int) -> None:
    """Behind a damaged snapshot, steps that were never sent counted as durable, and the exit said 75."""
    scene.pipeline.steps = Steps(local=200, durable=200)

    scene.pipeline.note_resumed(fetched(Content(SnapshotId(1, step))), Generation(2, RUN_ID, "b" * 16))
    assert scene.pipeline.steps.durable == durable

    scene.seal(step + 50, 1)
    assert not scene.pipeline.everything_durable


@pytest.mark.parametrize("counts", [True, False])
def test_a_snapshot_that_is_held_back_counts_once_it_is_known_to(scene: Scene, counts: bool) -> None:
    scene.seal(10, 1)
    held = scene.pipeline.pool.add(a_slot(Content(SnapshotId(1, 20)), 2))
    scene.pipeline.hold_back(held, scene.generation)

    assert scene.pipeline.sealed_step == 10
    assert not scene.pipeline.take_left_over(scene.generation), "it is not one that nobody has told us of"
    assert scene.pipeline.pool.grant() != held
    scene.pipeline.settle_held(counts=counts)

    assert scene.pipeline.sealed_step == (20 if counts else 10)
    assert sorted(copy.id.step for copy in scene.pipeline.memory_copies(RUN_ID)) == ([10, 20] if counts else [10])
    scene.pipeline.settle_held(counts=counts)


# ---- several ranks --------------------------------------------------------------------------------------------------


class TwoRanks:
    """A pipeline with two slots for each of two ranks, and what their trainers seal."""

    def __init__(self, pipeline: SavePipeline) -> None:
        self.pipeline = pipeline
        self.generation = Generation(1, RUN_ID, "a" * 16)
        self.generation.claimed.set()
        self.slots = [[pipeline.pool.add(Slot.create(SLOT_BYTES), rank) for _ in range(2)] for rank in range(2)]

    def seal(self, rank: int, which: int, step: int, sequence: int, assignment: str = "") -> int:
        index = self.slots[rank][which]
        content = Content(SnapshotId(1, step), world_size=2)
        content.seal(self.pipeline.pool[index], sequence, rank, assignment=assignment)
        self.pipeline.take(index, self.generation)
        return index


@pytest.fixture
def two(scene: Scene) -> TwoRanks:
    scene.pipeline.pool.close([scene.index])
    return TwoRanks(scene.pipeline)


def test_a_snapshot_is_the_tiers_turn_once_all_ranks_have_sealed(scene: Scene, two: TwoRanks) -> None:
    two.seal(1, 0, 10, 1)
    assert (scene.pipeline.sealed_step, scene.pipeline.memory_copies(RUN_ID)) == (None, [])
    two.seal(0, 0, 10, 7)

    assert scene.pipeline.sealed_step == 10
    assert [scene.pipeline.sequence(rank) for rank in range(2)] == [7, 1]
    assert scene.pipeline.state_bytes == 2 * sum(SHARD_BYTES)
    for tier in scene.pipeline.tiers:
        tier.start()
    scene.pipeline.save_newest_now()
    scene.until(lambda: scene.steps == Steps(10, 10))
    (copy,) = scene.pipeline.memory_copies(RUN_ID)
    assert copy.manifest is not None
    assert [part.rank for part in copy.manifest.parts] == [0, 1]


def test_a_slot_that_waits_for_the_other_rank_s_is_not_granted(scene: Scene, two: TwoRanks) -> None:
    two.seal(0, 0, 10, 1)
    waits = two.seal(0, 1, 20, 2)

    assert scene.pipeline.pool.grant(0) is None
    two.seal(1, 0, 20, 1)
    scene.pipeline.pool.release(waits, "local")

    assert scene.pipeline.pool.grant(0) == two.slots[0][0], "step 10 never comes to be"


def test_what_was_half_sealed_is_given_up_with_its_trainers(scene: Scene, two: TwoRanks) -> None:
    two.seal(0, 0, 10, 1)

    scene.pipeline.give_up_incomplete()

    assert scene.pipeline.pool.grant(0) == two.slots[0][1]
    scene.pipeline.pool.hold(two.slots[0][1], TRAINER)
    assert scene.pipeline.pool.grant(0) == two.slots[0][0]
    assert scene.pipeline.memory_copies(RUN_ID) == []


def test_a_step_that_a_rank_has_passed_without_a_seal_is_dropped(scene: Scene, two: TwoRanks) -> None:
    two.seal(0, 0, 10, 1)

    assert scene.pipeline.forget_passed([11, 10]) == [], "the other one may still seal it"
    assert scene.pipeline.forget_passed([11, None]) == []
    assert scene.pipeline.forget_passed([11, 11]) == [Dropped(0, 1)]

    scene.pipeline.pool.hold(two.slots[0][1], TRAINER)
    assert scene.pipeline.pool.grant(0) == two.slots[0][0]


def test_a_step_that_is_given_up_is_dropped_though_no_rank_has_passed_it(scene: Scene, two: TwoRanks) -> None:
    """The one that has sealed it may wait for it, and the others for that one."""
    assert scene.pipeline.forget_passed([10, 10], given_up=10) == []
    two.seal(0, 0, 10, 1)

    assert scene.pipeline.forget_passed([10, 10], given_up=9) == []
    assert scene.pipeline.forget_passed([10, 10], given_up=10) == [Dropped(0, 1)]


def test_a_step_that_ranks_are_not_asked_for_is_dropped_though_they_are_asked_for_another(
    scene: Scene, two: TwoRanks
) -> None:
    """One may seal, late, what an agent had asked for that is dead by then."""
    two.seal(0, 0, 10, 1)

    assert scene.pipeline.forget_others(10) == []
    assert scene.pipeline.forget_others(11) == [Dropped(0, 1)]
    two.seal(0, 1, 11, 2)
    assert scene.pipeline.forget_others(None) == [Dropped(0, 2)]


def test_what_is_dropped_is_no_part_of_a_set_even_if_its_step_is_sealed_again(scene: Scene, two: TwoRanks) -> None:
    two.seal(0, 0, 10, 1)
    scene.pipeline.forget([10])

    two.seal(1, 0, 10, 1)
    assert scene.pipeline.sealed_step is None
    assert scene.pipeline.sequence(0) == 1, "the rank counts on"
    two.seal(0, 1, 10, 2)
    assert scene.pipeline.sealed_step == 10


def test_shares_of_two_assignments_are_no_snapshot(scene: Scene, two: TwoRanks) -> None:
    two.seal(0, 0, 10, 1, "before")
    two.seal(1, 0, 10, 1, "after")
    assert (scene.pipeline.sealed_step, scene.pipeline.memory_copies(RUN_ID)) == (None, [])

    two.seal(0, 1, 10, 2, "after")
    assert scene.pipeline.sealed_step == 10
    ((first, second),) = [copy.slots for copy in scene.pipeline.memory_copies(RUN_ID)]
    assert (first.index, second.index) == (two.slots[0][1], two.slots[1][0])


def test_a_seal_that_is_refused_is_void_and_counts(scene: Scene, two: TwoRanks) -> None:
    index = two.slots[0][0]
    Content(SnapshotId(1, 10), world_size=2).seal(scene.pipeline.pool[index], 1, 0)

    assert scene.pipeline.refuse(index) == [Dropped(0, 1)]
    assert scene.pipeline.pool[index].record() is None
    assert scene.pipeline.sequence(0) == 1


def test_a_step_whose_last_seal_is_not_told_yet_is_not_dropped(scene: Scene, two: TwoRanks) -> None:
    two.seal(0, 0, 10, 1)
    Content(SnapshotId(1, 10), world_size=2).seal(scene.pipeline.pool[two.slots[1][0]], 1, 1)

    assert scene.pipeline.forget_passed([11, 11], given_up=10) == []
    scene.pipeline.take(two.slots[1][0], two.generation)

    assert scene.pipeline.sealed_step == 10


def test_what_one_rank_did_not_tell_is_taken_without_the_others(scene: Scene, two: TwoRanks) -> None:
    for rank in range(2):
        Content(SnapshotId(1, 30), world_size=2).seal(scene.pipeline.pool[two.slots[rank][0]], 3, rank)

    assert scene.pipeline.take_left_over(two.generation, rank=1)
    assert [scene.pipeline.sequence(rank) for rank in range(2)] == [3, 3]
    assert scene.pipeline.sealed_step is None
    assert not scene.pipeline.take_left_over(two.generation, rank=1)
    assert scene.pipeline.take_left_over(two.generation, rank=0)
    assert scene.pipeline.sealed_step == 30


def test_what_both_ranks_sealed_and_did_not_tell_is_taken(scene: Scene, two: TwoRanks) -> None:
    for rank in range(2):
        Content(SnapshotId(1, 30), world_size=2).seal(scene.pipeline.pool[two.slots[rank][0]], 3, rank)

    assert scene.pipeline.take_left_over(two.generation)
    assert scene.pipeline.sealed_step == 30
